"""The verbs that ``import optpipe`` gives, and what the import does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import optpipe


@pytest.mark.parametrize("name", [name for name in optpipe.__all__ if name != "__version__"])
def test_each_verb_is_there_and_is_its_modules_own(name):
    found = getattr(optpipe, name)
    assert callable(found)
    assert found.__name__ == name
    assert name in dir(optpipe)


def test_no_verb_is_hidden_by_a_module_of_its_name():
    folder = Path(optpipe.__file__).parent
    assert not set(optpipe.__all__) & {path.stem for path in folder.iterdir()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optpipe.nothing


def test_the_import_alone_loads_neither_torch_nor_a_solver():
    code = "import sys, optpipe; print([m for m in ('torch', 'highspy', 'pulp', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_problem_is_solved_in_two_lines(tiny_problem_file, tmp_path):
    plan = optpipe.solve(optpipe.Problem.read(tiny_problem_file), optpipe.SolveOptions(time_limit=10))
    plan.write(tmp_path / "plan.json")
    assert optpipe.verify_plan(optpipe.Plan.read(tmp_path / "plan.json")) == []
