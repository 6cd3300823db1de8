"""Memory of a CPU device: glibc's malloc, told to keep what a training step frees.

As it comes, malloc returns the top of its heap to the system whenever a few MiB of it are free, and takes blocks above
a threshold from the system one by one. A pipeline's step frees and takes the same activations over and over, and what
waits for W makes it more: each time every page of theirs is faulted in and zeroed again, which can cost a few percent
of a step. What is kept is bounded by the step's own peak.
"""

from __future__ import annotations

import ctypes
import functools
import os

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Free bytes at the top of the heap that malloc keeps: more than any step frees.
_KEPT_BYTES = (1 << 31) - 1  # the largest int
#: Blocks above such a size come from the system, and go back to it: none that a step takes, or, where malloc (before
#: glibc 2.35) refuses that, the most that it takes.
_OWN_BLOCK_BYTES = (1 << 30, 32 << 20)


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for its next tensors; whether its malloc can be told so.

    Whoever has set malloc's own variables (``MALLOC_TRIM_THRESHOLD_`` and the like, or ``GLIBC_TUNABLES``) has the last
    word: then nothing is changed.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    # Set together: either alone would end malloc's own tuning of both.
    own = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _OWN_BLOCK_BYTES)
    return own and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
