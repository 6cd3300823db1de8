"""OptPipe from Python: loading, the table of ops, how plans print themselves, and the notebook of the docs."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import optpipe
from optpipe import notebook, semantics
from optpipe.errors import InputError
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.waits import waits

DOCS = Path(__file__).parent.parent / "docs"
NASTY = "<script>alert(1)</script>"


def printed(what: Any, width: int = 90) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(what)
    return stream.getvalue()


def test_load_gives_what_the_file_is(tiny_plan_file, tiny_problem_file, tiny_problem):
    plan, problem = optpipe.load(tiny_plan_file), optpipe.load(tiny_problem_file)
    assert isinstance(plan, Plan) and plan.problem == tiny_problem
    assert isinstance(problem, Problem) and problem == tiny_problem


def test_load_of_anything_else_is_an_input_error(tmp_path, tiny_plan_file):
    for text in ("[]", "{", '{"format": "optpipe-plan", "version": 1}', '{"format": "other"}'):
        (tmp_path / "some.json").write_text(text)
        with pytest.raises(InputError):
            optpipe.load(tmp_path / "some.json")


def test_options_of_solve_and_compare_are_keywords(tiny_problem):
    plan = optpipe.solve(tiny_problem, time_limit=5)
    assert plan.solver["method"] == "auto"
    assert optpipe.solve(tiny_problem, method="sequential").solver["method"] == "sequential"
    with pytest.raises(TypeError, match="no_such_option"):
        optpipe.solve(tiny_problem, no_such_option=1)
    rows = optpipe.compare(tiny_problem, time_limit=1)
    assert [row.name for row in rows][-1] == "optpipe"
    table = printed(rows, 120)
    assert "1f1b" in table and "device 0 needs" in table
    assert rows._repr_html_().count("<tr>") == len(rows) + 1


def test_show_prints_chart_and_words(tiny_plan):
    stream = io.StringIO()
    optpipe.show(tiny_plan, console=Console(file=stream, width=100))
    text = stream.getvalue()
    assert "dev 0" in text and "F0" in text and "- Bubbles: devices idle" in text
    stream = io.StringIO()
    optpipe.show(tiny_plan, devices=[1], console=Console(file=stream, width=100))
    assert "dev 0" not in stream.getvalue() and "Bubbles" not in stream.getvalue()


def test_a_plan_prints_itself(tiny_plan):
    assert repr(tiny_plan) == f"<Plan tiny: 2 devices, 2 stages, 4 microbatches, {len(tiny_plan.ops)} ops, 14.2 ms>"
    text = printed(tiny_plan)
    assert "makespan 14.2 ms" in text and "dev 1" in text
    assert all(len(line) <= 90 for line in text.splitlines())
    assert printed(Plan(tiny_plan.problem, optpipe.Ops.of([])))


def test_a_name_is_printed_as_it_is(tiny_plan):
    tiny_plan.problem = tiny_plan.problem.changed(name="[/x] [bold] :smile:")
    stream = io.StringIO()
    optpipe.show(tiny_plan, console=Console(file=stream, width=100))
    for text in (stream.getvalue(), printed(tiny_plan)):
        assert text.startswith("[/x] [bold] :smile:: 2 devices")


def test_in_jupyter_a_plan_is_a_picture_with_words(tiny_plan):
    tiny_plan.problem = tiny_plan.problem.changed(name=NASTY)
    shown = tiny_plan._repr_html_()
    assert shown.count("<svg") == 1 and "Bubbles: devices idle" in shown
    assert NASTY not in shown and "&lt;script&gt;" in shown


def test_the_frame_has_every_op_in_the_plans_order(tiny_plan):
    pytest.importorskip("pandas")
    frame = tiny_plan.frame()
    ops, found = tiny_plan.ops, waits(tiny_plan.problem, tiny_plan.ops)
    order = semantics.rank(ops).tolist()
    assert len(frame) == len(ops)
    for row, index in zip(frame.itertuples(), order, strict=True):
        op = ops[index]
        assert (row.kind, row.stage, row.microbatch, row.start, row.end) == (op.kind.name, *op[1:5])
        assert row.device == tiny_plan.problem.stages[op.stage].device
        assert row.bytes == (1000 if op.kind in (Kind.O, Kind.R) else 0)
        before = int(found.before[index])
        assert row.waits_for == ("" if before < 0 else ops[before].label)
    assert frame["duration"].sum() == pytest.approx(float((ops.end - ops.start).sum()))
    assert set(frame["why"]) == {"nothing", "data", "lane", "memory"}


def test_without_pandas_it_says_so(tiny_plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas: pip install pandas"):
        notebook.frame(tiny_plan)


def cells(kind: str) -> list[str]:
    book = json.loads((DOCS / "notebook.ipynb").read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


def test_the_notebook_runs_as_a_script(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    shutil.copy(DOCS / "example-plan.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"cell {number}", "exec"), space)
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")
    assert space["steps"] and sorted(space["steps"].values(), reverse=True) == list(space["steps"].values())
    assert space["warnings"]


def test_the_notebook_is_short_and_names_no_machine():
    text = (DOCS / "notebook.ipynb").read_text()
    assert len(text) < 200_000
    for word in ("/home/", "/tmp/", str(DOCS.parent), str(Path.home()), "Traceback"):
        assert word not in text
