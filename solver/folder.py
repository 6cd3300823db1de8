"""Where the solver keeps what may be thrown away."""

from __future__ import annotations

import os
from pathlib import Path


def default_folder() -> Path:
    """``$OPTPIPE_CACHE``, else ``optpipe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("OPTPIPE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "optpipe"
