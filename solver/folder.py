"""Where the solver keeps what may be thrown away."""

from __future__ import annotations

import os
from pathlib import Path

#: Where nothing can be kept and nothing found: no folder can be made in it.
NOWHERE = Path(os.devnull) / "optpipe"


def default_folder() -> Path:
    """``$OPTPIPE_CACHE``, else ``optpipe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; ``NOWHERE`` for a user without a
    home, as in a container under any user id."""
    try:
        if own := os.environ.get("OPTPIPE_CACHE"):
            return Path(own).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path("~/.cache").expanduser()) / "optpipe"
    except RuntimeError:  # expanduser finds no home
        return NOWHERE
