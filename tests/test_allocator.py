import os
import subprocess
import sys

import pytest

#: Pages faulted in when the same 128 MiB are taken, used and freed once more; then what the call said.
SCRIPT = """
import resource, torch
from runtime.allocator import keep_freed_memory

said = keep_freed_memory()

def use():
    return [torch.ones(1 << 20) for _ in range(32)]

for _ in range(4):  # until the heap has found its size
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's malloc")
def test_memory_that_was_freed_is_taken_again_without_a_page_fault():
    pages = (128 << 20) // os.sysconf("SC_PAGE_SIZE")
    count, said = faults()
    if said == "False":
        pytest.skip("not glibc's malloc")
    assert count < pages / 50


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's malloc")
def test_whoever_has_set_up_malloc_has_the_last_word():
    assert faults(MALLOC_ARENA_MAX="2")[1] == "False"
