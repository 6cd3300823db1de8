"""The pages say what is so: their commands exist and run, and their tables name every option and key."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from cli import main
from optpipe.config import Config
from optpipe.hardware import Hardware
from optpipe.plan import Plan
from optpipe.problem import Channel, Device, Problem, Stage, Transfer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [ROOT / "docs" / name for name in ("formats.md", "command-line.md", "export.md")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page: Path) -> list[list[str]]:
    """The words of each ``$ optpipe ...`` line of a page."""
    found = []
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if line.startswith("$ ") else []
            if "optpipe" in words:
                found.append(words[words.index("optpipe") + 1 :])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_exists_with_its_options(page):
    for name, *arguments in commands(page):
        if "--help" in (name, *arguments):
            continue
        assert name in main.commands, f"optpipe {name}"
        main.commands[name].make_context(name, list(arguments)).close()


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```", RUN[0].read_text(), re.M | re.S):
        (tmp_path / path).write_text(text)
    shown = commands(page)
    assert shown
    for words in shown:
        if "run.json" in words:
            continue  # what a training run leaves behind; tests of traces make one
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, f"optpipe {shlex.join(words)}: {result.output}"
        if "--json" in words:
            json.loads(result.stdout)
    for path, text in re.findall(r"<!-- written: (\S+) -->\n```\w+\n(.*?)^```", page.read_text(), re.M | re.S):
        assert (tmp_path / path).read_text() == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_output_shown_is_what_the_command_prints(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command, shown in re.findall(
        r"<!-- output: optpipe (.*?) -->\n```text\n(.*?)^```", page.read_text(), re.M | re.S
    ):
        result = CliRunner().invoke(main, shlex.split(command))
        assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_every_command_and_option_is_documented():
    page = (ROOT / "docs" / "command-line.md").read_text()
    sections = dict(re.findall(r"^## optpipe (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert sections.keys() == main.commands.keys()
    for name, command in main.commands.items():
        rows = re.findall(r"^\| (`-.*?) \|", sections[name], re.M)
        documented = {option for row in rows for option in re.findall(r"`(-[-\w]+)`", row)}
        options = {o for p in command.params if isinstance(p, click.Option) for o in [*p.opts, *p.secondary_opts]}
        assert documented == options - {"--debug"}, name


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of a config, sections spelled out."""
    found = set()
    for name, field in model.model_fields.items():
        inner = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(t, type)]
        section = next((t for t in inner if issubclass(t, BaseModel) and t not in (Problem, Hardware)), None)
        found |= leaves(section, f"{prefix}{name}.") if section else {prefix + name}
    return found


def table_keys(page: Path, heading: str) -> set[str]:
    """What stands in backticks in the first column under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert section
    rows = re.findall(r"^\| (`.*?) \|", section.group(1), re.M)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def test_every_key_of_the_config_is_documented():
    assert table_keys(ROOT / "docs" / "formats.md", "The config") == leaves(Config)


def test_every_key_of_the_hardware_is_documented():
    assert table_keys(ROOT / "docs" / "formats.md", "The hardware") == leaves(Hardware)


def test_every_key_of_the_problem_is_documented():
    documented = {key.split(".")[-1] for key in table_keys(ROOT / "docs" / "formats.md", "The problem")}
    keys: set[str] = set()
    for model in (Problem, Device, Stage, Channel, Transfer):
        keys |= set(model.model_fields)
    known_by_their_parts = {"devices", "stages", "channels", "transfers"}
    assert documented == keys - known_by_their_parts


def test_every_key_of_the_plan_is_documented(tiny_plan: Plan):
    written: dict[str, Any] = tiny_plan.to_json()
    documented = table_keys(ROOT / "docs" / "formats.md", "The plan")
    assert set(written) - {"ops"} <= documented
    assert {"ops[].kind", "microbatch", "start", "end"} <= documented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", page.read_text()):
        assert not target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_to_a_heading(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        other = page.parent / target if target else page
        titles = re.findall(r"^#+ (.+)$", other.read_text(), re.M)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_shown_is_a_valid_config(page):
    for block in blocks(page, "yaml"):
        Config.from_json(yaml.safe_load(block), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_shown_runs(page, tmp_path, monkeypatch, tiny_problem_file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.json").write_text(tiny_problem_file.read_text())
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})


def test_the_comparison_with_torch_is_the_measured_one() -> None:
    ratios: dict[str, list[float]] = {}
    for line in (ROOT / "benchmarks" / "results" / "runtime.md").read_text().splitlines():
        if row := re.match(
            r"\| \d+ x \d+, [^|]*\| ([^|,(]+?)(?: \(CSV\))? \| [^|]*\| [^|]*\| [^|]*\| ([\d.]+) \|", line
        ):
            ratios.setdefault(row[1], []).append(float(row[2]))
    told = re.findall(r"^\| (\S+) \| ([\d.]+) to ([\d.]+) \|$", (ROOT / "docs" / "training.md").read_text(), re.M)
    assert told == [(name, f"{min(found):.2f}", f"{max(found):.2f}") for name, found in ratios.items()]
