"""numba compiles once, in a process of its own, and never where it is switched off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from solver import compiled


def _python(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    ).stdout.strip()


def test_functions_stay_plain_until_they_have_been_compiled(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="without numba there is only plain Python")
    ask = "from solver import compiled; print(compiled.COMPILED)"
    auto = {name: value for name, value in os.environ.items() if name != compiled.COMPILING}
    auto["OPTPIPE_CACHE"] = str(tmp_path)

    def compiled_now() -> str:
        command = [sys.executable, "-c", ask]
        return subprocess.run(command, env=auto, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert compiled_now() == "False"
    subprocess.run([sys.executable, "-m", "solver.warm_up"], env=auto, check=True, timeout=900)
    assert compiled_now() == "True"
    assert _python(ask, OPTPIPE_COMPILE="0", OPTPIPE_CACHE=str(tmp_path)) == "False"


def test_one_process_at_a_time_compiles(tmp_path: Path) -> None:
    folder = tmp_path / "numba"
    assert compiled._claim(folder)
    assert not compiled._claim(folder)
    os.utime(folder / "busy", (0, 0))  # left behind by a process that died
    assert compiled._claim(folder)
