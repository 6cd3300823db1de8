"""numba where it is installed: the same functions, the same results, some twenty times as fast.

Functions marked :func:`compiled` read and write flat sequences of numbers and records only. Without numba they run as
they are and are best given lists; with it they are given arrays. :func:`column` makes whichever fits.

numba takes the better part of a minute to compile them, more than many a problem takes to solve. So they run as they
are until they have been compiled once, in a process of its own (``solver.warm_up``) that the first search starts beside
itself; what it makes stays in a folder that belongs to these very sources. ``OPTPIPE_COMPILE=0`` keeps them plain.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from solver.folder import default_folder

numba: Any
try:
    import numba
except ImportError:
    numba = None

#: The environment variable by which to say when to compile: 1 now (set in the process that does), 0 never.
COMPILING = "OPTPIPE_COMPILE"
#: Seconds after which a process that said that it compiles is taken for dead.
_DEAD = 600.0
#: What is compiled, and what it calls.
_SOURCES = ("compiled.py", "list_scheduler", "annealing")

Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")


def possible() -> bool:
    """Whether numba is there and not switched off."""
    return numba is not None and not numba.config.DISABLE_JIT and os.environ.get(COMPILING) != "0"


def _folder() -> Path:
    """Where numba keeps what it makes of these sources."""
    text = hashlib.sha256(f"{numba.__version__} {sys.version} {platform.machine()} {Path(__file__)}".encode())
    here = Path(__file__).parent
    for name in _SOURCES:
        for path in sorted((here / name).glob("*.py")) if (here / name).is_dir() else [here / name]:
            text.update(path.read_bytes())
    return default_folder() / f"numba-{text.hexdigest()[:16]}"


def _use() -> bool:
    """Whether functions are compiled in this process; where they are, numba is told where it keeps them."""
    if not possible():
        return False
    folder = _folder()
    if os.environ.get(COMPILING) != "1" and not (folder / "ready").is_file():
        return False
    if not os.environ.get("NUMBA_CACHE_DIR"):
        numba.config.CACHE_DIR = str(folder)
    return True


#: Whether functions are compiled.
COMPILED = _use()


def compiled(function: Function) -> Function:
    """The function, compiled where that is possible and has been done before."""
    return cast(Function, numba.njit(cache=True)(function)) if COMPILED else function


def column(values: Sequence[Any] | np.ndarray[Any, Any], kind: type[int] | type[float]) -> Any:
    """Numbers as the compiled functions like them: a list, or an array of int64 or float64."""
    array = np.array(values, np.int64 if kind is int else np.float64)
    return array if COMPILED else array.tolist()


def records(kind: type[Record], count: int, columns: dict[str, Any]) -> Sequence[Record]:
    """Records of a dataclass of ints and floats, from columns (lists or arrays); fields without a column are 0.

    Compiled functions take them as an array of records, which costs nothing to pass around and has all about one thing
    in one place in memory; in plain Python they are small objects.
    """
    layout = [(f.name, np.int64 if f.type == "int" else np.float64) for f in fields(cast(Any, kind))]
    if COMPILED:
        array: Any = np.zeros(count, np.dtype(layout))
        for name, values in columns.items():
            array[name] = values
        rows: Sequence[Record] = array
        return rows
    zero = [0] * count
    lists = (columns.get(name, zero) for name, _ in layout)
    return [kind(*row) for row in zip(*(x.tolist() if hasattr(x, "tolist") else x for x in lists), strict=True)]


def compile_beside() -> None:
    """Have numba, where it is there and has not done so yet, compile beside this process, for those to come."""
    if COMPILED or not possible():
        return
    folder = _folder()
    with contextlib.suppress(OSError):
        if not (folder / "ready").exists() and _claim(folder):
            environment = {**os.environ, COMPILING: "1"}
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            subprocess.Popen(
                [sys.executable, "-m", "solver.warm_up"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


def _claim(folder: Path) -> bool:
    """Whether it is for this process to start the compiling."""
    folder.mkdir(parents=True, exist_ok=True)
    claim = folder / "busy"
    if claim.exists() and time.time() - claim.stat().st_mtime > _DEAD:
        claim.unlink(missing_ok=True)
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def mark_ready() -> None:
    """Everything has been compiled."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ready").touch()
    (folder / "busy").unlink(missing_ok=True)
