"""What is installed, and that the repository stands alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import optpipe

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def repository_files() -> list[Path]:
    """The files that git would take along: tracked, or new and not ignored."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        skip = {".venv", "build", "dist", "__pycache__"}
        return [p for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.relative_to(ROOT).parts)]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_the_console_script_is_the_command_line():
    script = PROJECT["project"]["scripts"]["optpipe"]
    module, name = script.split(":")
    assert callable(getattr(import_module(module), name))
    assert any(e.value == script for e in entry_points(group="console_scripts", name="optpipe"))


def test_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+", optpipe.__version__)
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "optpipe/__init__.py"


def test_everything_that_is_imported_is_in_the_wheel():
    taken = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    for name in taken:
        assert (ROOT / name).exists(), name
    for package in ("optpipe", "solver", "runtime"):
        assert (ROOT / package / "py.typed").exists()
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            assert (folder / "__init__.py").exists(), f"{folder} is not a package"


IMPORTS = {
    "optpipe": ("torch", "pulp", "highspy", "solver", "runtime", "cli"),
    "solver": ("torch", "runtime", "cli"),
    "runtime": ("pulp", "highspy", "solver", "cli"),
}


@pytest.mark.parametrize("package", IMPORTS)
def test_imports_point_one_way(package):
    for path in (ROOT / package).rglob("*.py"):
        for module in re.findall(r"^\s*(?:import|from)\s+(\w+)", path.read_text(), re.M):
            assert module not in IMPORTS[package], f"{path} imports {module}"


def test_the_repository_names_no_index_no_machine_and_nothing_beside_it():
    forbidden = ["pypi" + ".org", "download." + "pytorch", "--index" + "-url", "--find" + "-links", "../" + "shared"]
    forbidden += [str(ROOT) + "/"]
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", "replace")
        for word in forbidden:
            assert word not in text, f"{path} names {word}"


def test_scripts_can_be_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("target", ["setup", "demo", "test", "lint", "bench"])
def test_make_targets_set_themselves_up(target, tmp_path):
    """In a fresh folder each target begins with the virtual environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    plan = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "-m venv .venv" in plan
    assert plan.index("pip install") < len(plan) - 1
