"""The report page and the picture: everything of a plan is in them, where the plan says, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli import main
from optpipe import colours, memory, metrics
from optpipe.ops import Kind, Ops
from optpipe.page import PageTable, render, svg, view
from optpipe.plan import Plan
from optpipe.problem import Problem
from solver.schedules import generate
from tests.browser import ask, needs_chromium
from tests.conftest import plan_in_order

NASTY = "</script><script>alert(1)</script><!-- & \" ' \u2028 <b>x</b>"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found.group(1))


def named(plan: Plan, name: str) -> Plan:
    return replace(plan, problem=plan.problem.changed(name=name))


class Elements(HTMLParser):
    """The elements of a page, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_data_of_the_page_are_those_of_the_plan(tiny_plan):
    (chart,) = data_of(render(tiny_plan))["charts"]
    ops = chart["ops"]
    for n, op in enumerate(tiny_plan.ops):
        found = (ops["kind"][n], ops["stage"][n], ops["microbatch"][n])
        assert found == (op.kind, op.stage, op.microbatch)
        assert (ops["start"][n], ops["end"][n]) == pytest.approx((op.start, op.end))
    listed = [op for device in chart["devices"] for lane in device["lanes"] for op in lane["ops"]]
    assert sorted(listed) == list(range(len(tiny_plan.ops)))
    assert [device["peak"] for device in chart["devices"]] == memory.peaks(tiny_plan.problem, tiny_plan.ops)
    assert [device["budget"] for device in chart["devices"]] == [2000, 2000]
    assert [lane["name"] for lane in chart["devices"][0]["lanes"]] == ["compute", "d2h", "h2d"]


def test_a_memory_curve_keeps_every_level_that_lasts(tiny_plan):
    (chart,) = data_of(render(tiny_plan))["charts"]
    for device in range(2):
        times, levels = memory.curve(tiny_plan.problem, tiny_plan.ops, device)
        curve = chart["devices"][device]["memory"]
        assert max(curve["bytes"]) == levels.max()
        for instant in set(times.tolist()):
            last = levels[times == instant][-1]
            assert [b for t, b in zip(curve["time"], curve["bytes"], strict=True) if t == round(instant, 6)][-1] == last


def test_a_shared_channel_is_a_lane_of_its_own():
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10, "offloadable_bytes": 10}
    both = [{"device": 0, "direction": "d2h"}, {"device": 0, "direction": "h2d"}]
    problem = Problem.model_validate(
        {
            "num_microbatches": 1,
            "devices": [{"memory_bytes": None}],
            "stages": [{"device": 0, "offload_ms": 1.0, "reload_ms": 1.0, **stage}],
            "comm_ms": [],
            "channels": [{"name": "the link", "transfers": both}],
        }
    )
    plan = plan_in_order(problem, "F(0,0) O(0,0) R(0,0) B(0,0) W(0,0)")
    chart = view.of_plan(plan, "plan")
    assert [(lane["name"], len(lane["ops"])) for lane in chart["shared"]] == [("the link", 2)]
    assert "the link" in svg.render(plan)


def test_the_page_needs_nothing_from_elsewhere(tiny_plan):
    page = render(tiny_plan)
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert "src" not in attributes and "href" not in attributes
    script = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
    for word in ("http:", "https:", "fetch(", "XMLHttpRequest", "import(", "@import", "url("):
        assert word not in script


def test_names_cannot_break_out_of_the_page(tiny_plan):
    nasty = named(tiny_plan, NASTY)
    nasty.solver = {"method": NASTY}
    table = PageTable(NASTY, ["a", "b"], [[NASTY, NASTY]], NASTY)
    page = render(nasty, against=nasty, more=[table])
    plain = render(tiny_plan, against=tiny_plan, more=[PageTable("t", ["a", "b"], [["c", "d"]], "n")])
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(plain).found]
    facts = dict(map(tuple, data_of(page)["charts"][0]["facts"]))
    assert facts["problem"] == NASTY
    picture = ElementTree.fromstring(svg.render(nasty).encode())
    assert NASTY.split("\u2028")[0] in next(e.text for e in picture.iter() if e.tag.endswith("title"))


def test_export_writes_the_page_with_the_known_schedules(tiny_plan_file, tmp_path):
    done = invoke("export", tiny_plan_file, "--to", "html", "-o", tmp_path / "plan.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "plan.html").read_text()
    for cell in ("1f1b", "gpipe", "zero-bubble", "this plan", "device 0 needs", "14.2"):
        assert cell in page
    done = invoke("export", tiny_plan_file, "--to", "html", "-o", tmp_path / "plan.html", "--no-compare")
    assert "Known schedules" not in (tmp_path / "plan.html").read_text()


def test_two_plans_are_on_one_page(tiny_plan, tiny_problem, tiny_plan_file, tmp_path):
    other = Plan(tiny_problem, generate("sequential", tiny_problem, "makespan"), None, {"method": "sequential"})
    other.write(tmp_path / "other.json")
    arguments = ("export", tiny_plan_file, "--to", "html", "-o", tmp_path / "two.html", "--no-compare")
    assert invoke(*arguments, "--against", tmp_path / "other.json").exit_code == 0
    page = (tmp_path / "two.html").read_text()
    first, second = data_of(page)["charts"]
    assert (first["label"], second["label"]) == ("plan", "other plan")
    assert second["end"] == pytest.approx(other.makespan_ms)
    assert f"{other.makespan_ms / tiny_plan.makespan_ms - 1:+.1%}" in page


@pytest.mark.parametrize("option", ["--against", "--trace"])
def test_options_of_other_formats_are_refused(option, tiny_plan_file, tmp_path):
    done = invoke("export", tiny_plan_file, "--to", "svg", "-o", tmp_path / "x", option, tiny_plan_file)
    assert done.exit_code == 2
    assert f"{option}: goes with --to html" in done.stderr


def test_facts_of_the_solver_are_told(tiny_plan):
    tiny_plan.solver = {
        "method": "auto",
        "source": "milp",
        "seconds": 12.345,
        "milp": {"columns": 1234, "binaries": 567, "rows": 89},
    }
    tiny_plan.lower_bound_ms = 14.0
    facts = dict(map(tuple, view.of_plan(tiny_plan, "plan")["facts"]))
    assert facts["found by"] == "auto (milp)"
    assert facts["proven bound"] == "14 ms"
    assert facts["gap"] == "1.43%"
    assert facts["solver time"] == "12.35 s"
    assert facts["variables"] == "1,234, 567 of them binary"


def test_facts_of_another_tool_need_not_be_numbers(tiny_plan):
    tiny_plan.solver = {"method": ["a"], "seconds": "long", "milp": {"columns": None, "rows": [1], "binaries": {}}}
    facts = dict(map(tuple, view.of_plan(tiny_plan, "plan")["facts"]))
    assert (facts["solver time"], facts["variables"], facts["rows"]) == ("long s", "None, {} of them binary", "[1]")


# --- the picture ----------------------------------------------------------------------------------------------------


def boxes(picture: str) -> dict[str, list[tuple[float, float, float]]]:
    """Per kind: (left, top, width) of every op."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for element in ElementTree.fromstring(picture.encode()).iter():
        if element.get("class") in Kind.__members__:
            for left, top, wide in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", element.get("d") or ""):
                found.setdefault(str(element.get("class")), []).append((float(left), float(top), float(wide)))
    return found


def test_every_op_is_drawn_to_scale_in_the_picture(tiny_plan):
    drawn = boxes(svg.render(tiny_plan, 960))
    scale = (960 - 64 - 6) / tiny_plan.makespan_ms
    for kind in Kind:
        own = sorted((op.start, op.end) for op in tiny_plan.ops if op.kind == kind)
        found = sorted((left, wide) for left, _, wide in drawn.get(kind.name, []))
        assert len(found) == len(own)
        for (left, wide), (start, end) in zip(found, own, strict=True):
            assert left == pytest.approx(64 + start * scale, abs=0.02)
            assert wide == pytest.approx((end - start) * scale - 0.5, abs=0.02)


def test_the_picture_has_memory_budgets_and_labels(tiny_plan):
    picture = svg.render(tiny_plan)
    tree = ElementTree.fromstring(picture.encode())
    classes = [element.get("class") for element in tree.iter()]
    assert classes.count("memory") == classes.count("budget") == 2
    texts = [element.text for element in tree.iter() if element.tag.endswith("text")]
    for op in tiny_plan.ops:
        if op.end - op.start >= 1:
            assert f"{op.kind.name}{op.microbatch}" in texts
    assert 'class="memory"' not in svg.render(tiny_plan, memory=False)


def two_stages_a_device(problem: Problem) -> Plan:
    """One microbatch through two devices and back, each with two stages."""
    first, second = problem.to_json()["stages"]
    vee = problem.changed(num_microbatches=1, stages=[first, second, second, first], comm_ms=[0.0] * 3)
    order = " ".join(["F(0,0) F(1,0) F(2,0) F(3,0)"] + [f"B({s},0) W({s},0)" for s in (3, 2, 1, 0)])
    return plan_in_order(vee, order)


def test_ops_of_a_later_stage_are_marked_in_the_picture(tiny_plan, tiny_problem):
    plan = two_stages_a_device(tiny_problem)
    picture = svg.render(plan)
    drawn, marked = boxes(picture), []
    for element in ElementTree.fromstring(picture.encode()).iter():
        if element.get("class") == "later":
            marked += [float(left) for left in re.findall(r"M([\d.]+) ", element.get("d") or "")]
    scale = (960 - 64 - 6) / plan.makespan_ms
    later = [64 + op.start * scale for op in plan.ops if op.stage in (2, 3)]
    assert sorted(marked) == pytest.approx(sorted(later), abs=0.02)
    assert len(marked) < sum(map(len, drawn.values()))
    assert "a later stage" in picture and "a later stage" not in svg.render(tiny_plan)


def test_the_picture_in_the_docs_is_that_of_the_example():
    docs = Path(__file__).parents[1] / "docs"
    assert (docs / "example-plan.svg").read_text() == svg.render(Plan.read(docs / "example-plan.json"))


def test_a_plan_without_ops_has_a_page_and_a_picture(tiny_problem):
    empty = Plan(tiny_problem, Ops.of([]))
    assert boxes(svg.render(empty)) == {}
    assert data_of(render(empty))["charts"][0]["critical"] == []


def test_colours_differ_in_lightness_or_hue_and_letters_can_be_read():
    def channel(value: int) -> float:
        part = value / 255
        return part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4

    def luminance(colour: str) -> float:
        red, green, blue = (channel(int(colour[n : n + 2], 16)) for n in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len(set(colours.FILL.values())) == len(Kind)
    for kind in Kind:
        light, dark = sorted((luminance(colours.FILL[kind]), luminance(colours.INK[kind])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.0, kind


# --- in a browser ---------------------------------------------------------------------------------------------------

#: What scripts of these tests use: the colour of a pixel, and the places of ops on the first chart.
TOOLS = """
const pane = report.panes[0], chart = pane.chart, scale = window.devicePixelRatio || 1;
report.paint();
const look = () => report.state.view;
const bits = (x, y) => pane.main.getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1).data;
const pixel = (x, y) => [...bits(x, y).slice(0, 3)];
const box = (op) => chart.box(op, look(), pane.width, pane.scroll.scrollTop);
const corner = (op) => { const b = box(op); return pixel(b.x + 2, b.y + b.height - 2); };
const rgb = (hex) => [1, 3, 5].map((n) => parseInt(hex.slice(n, n + 2), 16));
const fill = (op) => rgb(chart.kinds[chart.ops.kind[op]].fill);
const same = (a, b) => a.every((v, n) => Math.abs(v - b[n]) <= 2);
const every = [...Array(chart.count).keys()];
const point = (type, x, y) => {
  const place = pane.scroll.getBoundingClientRect();
  const at = {clientX: place.left + pane.scroll.clientLeft + x, clientY: place.top + pane.scroll.clientTop + y};
  pane.scroll.dispatchEvent(new PointerEvent(type, {bubbles: true, button: 0, pointerId: 1, ...at}));
};
const middle = (op) => { const b = box(op); return [b.x + b.width / 2, b.y + b.height / 2]; };
const tip = () => document.getElementById("tip").innerText;
"""


@needs_chromium
def test_ops_are_drawn_where_the_plan_says(tiny_plan, tmp_path):
    script = (
        TOOLS
        + """
    const wrong = every.filter((op) => !same(corner(op), fill(op))).map((op) => chart.label(op));
    const lefts = every.map((op) => box(op).x), rights = every.map((op) => box(op).x + box(op).width);
    const idle = chart.data.devices[1].lanes[0].ops[0], gap = box(idle);
    const bubble = pixel((GUTTER + gap.x) / 2, gap.y + 3);
    report.show(2, 4);
    report.paint();
    const seen = every.filter((op) => chart.ops.start[op] >= 2 && chart.ops.end[op] <= 4);
    const zoomed = seen.filter((op) => !same(corner(op), fill(op))).map((op) => chart.label(op));
    return {wrong, lefts, rights, bubble, zoomed, seen: seen.length, width: pane.width, title: document.title,
            words: document.getElementById("words").innerText, legend: document.getElementById("legend").innerText};
    """
    )
    answer = ask(render(named(tiny_plan, NASTY)), script, tmp_path)
    assert answer["faults"] == []
    assert answer["wrong"] == answer["zoomed"] == []
    assert answer["seen"] >= 3
    scale = (answer["width"] - 92) / tiny_plan.makespan_ms
    for op, left, right in zip(tiny_plan.ops, answer["lefts"], answer["rights"], strict=True):
        assert (left, right) == pytest.approx((92 + op.start * scale, 92 + op.end * scale), abs=0.01)
    fills = {tuple(int(c[n : n + 2], 16) for n in (1, 3, 5)) for c in colours.FILL.values()}
    assert tuple(answer["bubble"]) not in fills
    assert answer["title"].split() == NASTY.replace("\u2028", " ").split()
    assert "Bubbles: devices idle" in answer["words"]
    assert "forward" in answer["legend"] and "recompute" not in answer["legend"]


@needs_chromium
def test_the_pointer_tells_and_a_click_follows_a_microbatch(tiny_plan, tmp_path):
    script = (
        TOOLS
        + """
    const told = {};
    every.forEach((op) => { point("pointermove", ...middle(op)); told[chart.label(op)] = tip(); });
    const first = chart.data.devices[1].lanes[0].ops[0];
    point("pointermove", (GUTTER + box(first).x) / 2, box(first).y + 4);
    const idle = tip();
    const row = chart.rows.find((row) => row.type === "memory");
    point("pointermove", GUTTER + 5, row.y + 10);
    const held = tip();
    point("pointerdown", ...middle(0)); point("pointerup", ...middle(0));
    report.paint();
    const followed = report.state.microbatch;
    const faint = every.filter((op) => !same(corner(op), fill(op))).map((op) => chart.ops.microbatch[op]);
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
    document.getElementById("critical").click();
    report.paint();
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
    return {told, idle, held, followed, faint, after: report.state.microbatch, view: look(),
            hidden: document.getElementById("tip").hidden};
    """
    )
    answer = ask(render(tiny_plan), script, tmp_path)
    assert answer["faults"] == []
    for op in tiny_plan.ops:
        told = answer["told"][op.label]
        assert told.startswith(f"{op.label}: ")
        assert f"stage {op.stage}, microbatch {op.microbatch}" in told
        assert f"{round(op.start, 6):g} ms to {round(op.end, 6):g} ms" in told
        assert "waits for" in told
    assert "waits for memory, which O(0,1) frees" in answer["told"]["F(0,2)"]
    assert "waits for F(0,0) on device 0" in answer["told"]["F(1,0)"]
    assert "device 1 is idle: a bubble of 1.1 ms" in answer["idle"]
    assert "until F(1,0), which waits for F(0,0) on device 0" in answer["idle"]
    assert "device 0 holds 1 kB" in answer["held"] and "its budget is 2 kB" in answer["held"]
    assert answer["followed"] == 0 and answer["after"] is None
    assert set(answer["faint"]) == {1, 2, 3}
    assert answer["view"]["t1"] - answer["view"]["t0"] == pytest.approx(tiny_plan.makespan_ms / 1.5)


@needs_chromium
def test_a_second_plan_and_a_narrow_dark_window(tiny_plan, tiny_problem, tmp_path):
    other = Plan(tiny_problem, generate("sequential", tiny_problem, "makespan"), None, {"method": "sequential"})
    script = (
        TOOLS
        + """
    point("pointermove", ...middle(0));
    return {told: tip(), panes: report.panes.length, paper: getComputedStyle(document.body).backgroundColor,
            wide: document.documentElement.scrollWidth, window: innerWidth};
    """
    )
    answer = ask(render(tiny_plan, against=other), script, tmp_path, "--force-dark-mode", "--window-size=600,700")
    assert answer["faults"] == []
    assert answer["panes"] == 2
    assert "other plan: 0 ms to 1 ms, takes 1 ms" in answer["told"]
    assert answer["paper"] == "rgb(21, 24, 28)"
    assert answer["wide"] <= answer["window"]


@needs_chromium
def test_ops_of_a_later_stage_are_marked(tiny_problem, tmp_path):
    script = (
        TOOLS
        + """
    const top = (op) => { const b = box(op); return pixel(b.x + 3, b.y + 1); };
    const marked = every.filter((op) => !same(top(op), fill(op))).map((op) => chart.ops.stage[op]);
    const wrong = every.filter((op) => !same(corner(op), fill(op))).length;
    return {marked, wrong, legend: document.getElementById("legend").innerText};
    """
    )
    answer = ask(render(two_stages_a_device(tiny_problem)), script, tmp_path)
    assert answer["faults"] == [] and answer["wrong"] == 0
    assert sorted(answer["marked"]) == [2, 2, 2, 3, 3, 3]
    assert "a later stage of its device" in answer["legend"] and "budget" in answer["legend"]


@needs_chromium
def test_odd_plans_are_drawn_without_a_fault(tiny_plan, tiny_problem, tmp_path):
    """Nothing at all, and beside it a plan of another size whose ops break the rules."""
    big = tiny_problem.to_json()
    big["stages"] *= 2
    big["stages"] = [{**stage, "device": n} for n, stage in enumerate(big["stages"])]
    problem = tiny_problem.changed(
        devices=[{"memory_bytes": None}] * 4, stages=big["stages"], comm_ms=[0.0] * 3, channels=[]
    )
    other = plan_in_order(problem, "F(0,0) F(1,0) F(2,0) F(3,0) B(3,0) B(2,0)")
    broken = Plan(problem, other.ops.at(other.ops.start * 0.5 - 1, other.ops.end))
    script = """
    report.zoom(3); report.move(0.5); report.follow(2); report.state.critical = true; report.paint();
    return {counts: report.panes.map((pane) => pane.chart.count), view: report.state.view};
    """
    answer = ask(render(Plan(tiny_problem, Ops.of([])), against=broken), script, tmp_path)
    assert answer["faults"] == []
    assert answer["counts"] == [0, len(broken.ops)]
    assert answer["view"]["t0"] >= -1


@needs_chromium
def test_a_large_plan_is_drawn_whole(tmp_path):
    """16 devices x 256 microbatches: every column of pixels shows an op or a bubble that is there."""
    instance = Path(__file__).parents[1] / "benchmarks" / "instances" / "unit-s16-m64-meminf-nooff.json"
    problem = Problem.read(instance).changed(num_microbatches=256)
    plan = Plan(problem, generate("1f1b", problem, "makespan"))
    script = (
        TOOLS
        + """
    const fills = chart.kinds.map((kind) => rgb(kind.fill));
    const lane = chart.rows.find((row) => row.type === "lane"), y = lane.y + 4;
    let full = 0;
    for (let x = GUTTER; x < pane.width - 1; x++) full += fills.some((colour) => same(pixel(x, y), colour));
    point("pointermove", ...middle(300));
    return {count: chart.count, part: full / (pane.width - 1 - GUTTER), told: tip(), label: chart.label(300)};
    """
    )
    answer = ask(render(plan), script, tmp_path)
    assert answer["faults"] == []
    assert answer["count"] == len(plan.ops)
    assert answer["told"].startswith(answer["label"].split("(")[0])
    assert answer["part"] >= 1 - metrics.measure(problem, plan.ops).bubble_ratio - 0.05
