import os
import platform
import subprocess
import sys

import pytest

#: Pages faulted in when the same 128 MiB are taken, used and freed once more; then what the call said. As malloc comes,
#: blocks of that size are the system's, and every use of them faults every page.
SCRIPT = """
import ctypes, resource
from runtime.allocator import keep_freed_memory

said = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 64 << 20

def use():
    blocks = [libc.malloc(size) for _ in range(2)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)

for _ in range(3):  # until the heap has found its size
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, said)
"""


def faults(**variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    count, said = done.stdout.split()
    return int(count), said


PAGES = (128 << 20) // os.sysconf("SC_PAGE_SIZE")


def glibc():
    """(major, minor), or (0, 0) where it is another library."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else (0, 0)


@pytest.mark.skipif(glibc() < (2, 35), reason="of glibc's malloc, which takes a threshold above 32 MiB since 2.35")
def test_memory_that_was_freed_is_taken_again_without_a_page_fault():
    count, said = faults()
    assert said == "True"
    assert count < PAGES / 50


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's malloc")
def test_whoever_has_set_up_malloc_has_the_last_word():
    count, said = faults(MALLOC_ARENA_MAX="2")
    assert said == "False"
    if glibc() > (0, 0):
        assert count >= PAGES
