"""numba where it is installed: the same functions, the same results, some twenty times as fast.

Functions marked :func:`compiled` read and write flat sequences of numbers only. Without numba they run as they are and
are best given lists; with it they are given arrays. :func:`column` makes whichever fits.

Compiled code is cached beside the source. numba looks for changes in a function's own file only: after a change of
something that compiled functions of other files call, remove their ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

try:
    import numba
except ImportError:
    _njit: Any = None
else:
    # numba's own switch, NUMBA_DISABLE_JIT=1, gives the plain lists too.
    _njit = None if getattr(numba.config, "DISABLE_JIT", 0) else numba.njit

Function = TypeVar("Function", bound=Callable[..., Any])

#: Whether functions are compiled.
COMPILED = _njit is not None


def compiled(function: Function) -> Function:
    """The function, compiled at its first call where numba is installed."""
    return function if _njit is None else _njit(cache=True)(function)


def column(values: Sequence[Any] | np.ndarray[Any, Any], kind: type[int] | type[float]) -> Any:
    """Numbers as the compiled functions like them: a list, or an array of int64 or float64."""
    array = np.array(values, np.int64 if kind is int else np.float64)
    return array if COMPILED else array.tolist()
