"""Schedules to and from other tools: what torch writes comes in and goes out unchanged, what is wrong is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import main
from optpipe import memory
from optpipe.errors import Infeasible, InputError
from optpipe.interchange import megatron, orders, text_in, torch_csv
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan
from tests import pipelines, torch_runtime
from tests.random_schedules import random_problem, random_schedule

#: Dumps schedules of torch's own classes, as seen by rank 0 of 2, without any communication.
DUMP = """
import os, sys, torch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
for name, kind, own, count in (
    ("1f1b", schedules.ScheduleInterleaved1F1B, (0,), 2),
    ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B, (0, 2), 4),
    ("interleaved-zero-bubble", schedules.ScheduleInterleavedZeroBubble, (0, 2), 4),
    ("zbv", schedules.ScheduleZBVZeroBubble, (0, 3), 4),
    ("dualpipe-v", schedules.ScheduleDualPipeV, (0, 3), 4),
):
    stages = [PipelineStage(nn.Linear(2, 2), s, count, torch.device("cpu")) for s in own]
    schedule = kind(stages, 8, loss_fn=nn.functional.mse_loss)
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(os.path.join(sys.argv[1], f"{name}.{form}.csv"), form)
"""
#: The device of each stage.
PLACES = {
    "1f1b": (0, 1),
    "interleaved-1f1b": (0, 1, 0, 1),
    "interleaved-zero-bubble": (0, 1, 0, 1),
    "zbv": (0, 1, 1, 0),
    "dualpipe-v": (0, 1, 1, 0),
}
#: A file such as torchtitan takes: two ranks, four stages, eight microbatches, written by hand.
TITAN = (
    "0F0,0F1,2F0,,2F1,2I0,2W0,0F2,2I1,2W1,0F3,0I0,0W0,2F2,0I1,0W1,2F3,2I2,2W2,0F4,2I3,2W3,0F5,0I2,0W2,2F4,0I3,0W3,"
    "2F5,2I4,2W4,0F6,2I5,2W5,0F7,0I4,0W4,2F6,0I5,0W5,2F7,2I6,2W6,2I7,2W7,0I6,0W6,0I7,0W7\n"
    ",1F0,1F1,3F0,3I0,3F1,3I1,3W0,1F2,1I0,3W1,1F3,1I1,1W0,3F2,3I2,1W1,3F3,3I3,3W2,1F4,1I2,3W3,1F5,1I3,1W2,3F4,3I4,"
    "1W3,3F5,3I5,3W4,1F6,1I4,3W5,1F7,1I5,1W4,3F6,3I6,1W5,3F7,3I7,3W6,1I6,3W7,1I7,1W6,1W7\n"
)


def problem_on(places: tuple[int, ...], microbatches: int = 8, **changes: Any) -> Problem:
    stage = {"forward_ms": 1.0, "backward_ms": 1.2, "weight_ms": 0.8, "activation_bytes": 10, "weight_context_bytes": 4}
    return Problem.model_validate(
        {
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": None}] * (max(places) + 1),
            "stages": [{"device": place, **stage} for place in places],
            "comm_ms": [0.1] * (len(places) - 1),
            **changes,
        }
    )


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def imported(text: str, problem: Problem, folder: Path) -> Plan:
    path = folder / "schedule.csv"
    path.write_bytes(text.encode())
    return torch_csv.read(path, problem)


def cells(plan: Plan) -> list[list[tuple[Kind, int, int]]]:
    return [[op[:3] for op in row] for row in orders.orders_of(plan.problem, plan.ops)]


@pytest.fixture(scope="session")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files as torch writes them."""
    folder = tmp_path_factory.mktemp("torch")
    done = subprocess.run([sys.executable, "-c", DUMP, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


# --- torch's files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACES)
def test_what_torch_dumps_is_imported_and_written_again_byte_for_byte(dumped, name, tmp_path):
    source, problem = dumped / f"{name}.compute_only.csv", problem_on(PLACES[name])
    (tmp_path / "problem.json").write_text(json.dumps(problem.to_json()))
    done = invoke("import", source, "--problem", tmp_path / "problem.json", "-o", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    assert verify_plan(Plan.read(tmp_path / "plan.json")) == []
    again = tmp_path / "again.csv"
    done = invoke("export", tmp_path / "plan.json", "--to", "torch-csv", "-o", again)
    assert done.exit_code == 0, done.output
    assert again.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", PLACES)
def test_a_file_with_communication_is_the_same_schedule(dumped, name):
    problem = problem_on(PLACES[name])
    with_comms = torch_csv.read(dumped / f"{name}.compute_comms.csv", problem)
    alone = torch_csv.read(dumped / f"{name}.compute_only.csv", problem)
    assert cells(with_comms) == cells(alone)
    assert torch_csv.KEPT not in with_comms.extra
    compact = torch_csv.text_of(with_comms)
    assert ",," not in compact and "RECV" not in compact


def test_a_file_like_torchtitans_comes_back_byte_for_byte(tmp_path):
    problem = problem_on((0, 1, 0, 1))
    plan = imported(TITAN, problem, tmp_path)
    assert verify_plan(plan) == []
    assert torch_csv.text_of(plan) == TITAN
    assert {Kind.F, Kind.B, Kind.W} == set(map(Kind, plan.ops.kind.tolist()))


def test_the_times_are_the_problems_and_as_early_as_the_order_allows(tmp_path):
    plan = imported("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", problem_on((0, 1), 2), tmp_path)
    start = {op.label: round(op.start, 6) for op in plan.ops}
    assert start == {
        "F(0,0)": 0.0,
        "F(0,1)": 1.0,
        "F(1,0)": 1.1,
        "BW(1,0)": 2.1,
        "F(1,1)": 4.1,
        "BW(0,0)": 4.2,
        "BW(1,1)": 5.1,
        "BW(0,1)": 7.2,
    }


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1\n",
        " 0F0 , 0F1,,0I0,0W0, 0B1 ,,\r\n,,1F0,1I0,1F1 ,1W0,1B1",
        '"0F0",0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1\n\n',
        "0F0,0F1,0B0,0W0,0BW1\n1F0,1B0,1F1,1W0,1BW1\n",
        "0F0,0F1,0I0,0W0,0B1\n1F0,( 1F1 ; 1I0 )OVERLAP_F_B,1W0,1B1\n".replace("1F1 ; 1I0", "1I0 ; 1F1"),
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1W0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n",
    ],
    ids=["plain", "spaces and empty cells", "quotes and a blank line", "letters of old torch", "overlap", "comms"],
)
def test_every_way_to_write_it_is_the_same_schedule(text, tmp_path):
    plan = imported(text, problem_on((0, 1), 2), tmp_path)
    assert verify_plan(plan) == []
    first = [(Kind.F, 0, 0), (Kind.F, 0, 1), (Kind.B, 0, 0), (Kind.W, 0, 0), (Kind.BW, 0, 1)]
    second = [(Kind.F, 1, 0), (Kind.B, 1, 0), (Kind.F, 1, 1), (Kind.W, 1, 0), (Kind.BW, 1, 1)]
    assert cells(plan) == [first, second]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0X0\n1F0,1B0\n", "row 1, column 2: '0X0' is malformed, expected a cell such as 2F0"),
        ("0F0,0B0x\n1F0,1B0\n", "row 1, column 2: '0B0x' is malformed"),
        ("0F0,0B\n1F0,1B0\n", "row 1, column 2: '0B' is malformed"),
        ("0F0,0B0\n1F0,1B-1\n", "row 2, column 2: '1B-1' is malformed"),
        ("0F0,0B0\n1F0,(1B0\n", "row 2, column 2: '(1B0' is malformed, expected a cell such as (0F3;1B2)OVERLAP_F_B"),
        ("0F0,0B0\n1F0,()OVERLAP_F_B\n", "row 2, column 2: '()OVERLAP_F_B' overlaps nothing"),
        ("0F0,0B0\n1F0,,1F0,1B0\n", "row 2, column 3: '1F0' is there a second time, after row 2, column 1"),
        ("0F0,0B0,0I0\n1F0,1B0\n", "row 1, column 3: '0I0' and '0B0' (row 1, column 2) do the same backward"),
        ("0F0,0BW0,0W0\n1F0,1B0\n", "row 1, column 3: '0W0' and '0BW0' (row 1, column 2) do the same backward"),
        ("0F1,0B1\n1F1,1B1\n", "row 1, column 1: '0F1': microbatch 1 does not exist, expected 0 to 0 (the first"),
        ("0F9,0B9\n1F0,1B0\n", "row 1, column 1: '0F9': microbatch 9 does not exist, expected 0 to 0"),
        ("1F0,1B0\n2F0,2B0\n", "row 1, column 1: '1F0' is on rank 0, but the problem holds stage 1 on device 1"),
        (
            "0F0,0B0\n2F0,2B0\n",
            "row 2, column 1: '2F0': stage 2 does not exist, expected 0 to 1 (the first stage is 0)",
        ),
        ("0F0,0B0\n1F0,1RECV_B7,1B0\n", "row 2, column 2: '1RECV_B7': microbatch 7 does not exist"),
        ("0F0\n1F0,1B0\n", "row 1: 0B0 is missing"),
        ("0F0,0I0\n1F0,1B0\n", "row 1: 0W0 is missing"),
        ("0F0,0B0\n\n1F0,1B0\n", "has 3 rows, expected 2: one for each device of the problem"),
        ("0F0,0B0\n", "has 1 rows, expected 2"),
        ("", "has 0 rows, expected 2"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "row 1, column 2: W(0,0) waits for B(0,0), which never comes before it"),
        ("0F0,0B0\n1B0,1F0\n", "row 1, column 2: BW(0,0) waits for B(1,0), which never comes before it"),
        ('0F0,"0B0\n1F0,1B0\n', "has 1 rows"),
    ],
)
def test_what_is_wrong_is_refused_with_its_row_and_column(text, said, tmp_path):
    with pytest.raises(InputError) as error:
        imported(text, problem_on((0, 1), 1), tmp_path)
    assert said in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "schedule.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(InputError, match="cannot be read"):
        torch_csv.read(tmp_path / "schedule.csv", problem_on((0, 1)))
    with pytest.raises(InputError):
        imported("0F0\0,0B0\n1F0,1B0\n", problem_on((0, 1), 1), tmp_path)


@given(st.one_of(st.text(max_size=60), st.text('0123FIBW,;() \n\r"OVERLAP_x', max_size=60)), st.integers(0, 400))
@settings(max_examples=200)
def test_whatever_the_file_holds_it_is_a_schedule_or_one_line(tmp_path_factory, noise, at):
    """Noise alone, and noise within a good file."""
    folder, problem = tmp_path_factory.mktemp("noise"), problem_on((0, 1, 0, 1))
    for text in (noise, TITAN[:at] + noise + TITAN[at:]):
        try:
            plan = imported(text, problem, folder)
        except InputError as error:
            assert "\n" not in str(error).removeprefix(str(folder)) or "\n" in noise
        else:
            assert verify_plan(plan) == []
            assert torch_csv.text_of(plan) == text or torch_csv.KEPT not in plan.extra


def test_a_schedule_that_does_not_fit_is_infeasible_and_says_what_it_needs(tmp_path):
    problem = problem_on((0, 1), 2, devices=[{"memory_bytes": 19}, {"memory_bytes": 19}])
    with pytest.raises(Infeasible, match="device 0 needs 20 bytes, its budget is 19"):
        imported("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", problem, tmp_path)


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_orders_survive_the_way_out_and_back(tmp_path_factory, seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    plan = Plan(problem, random_schedule(problem, rng, offload=0.0, fused=0.4))
    if (plan.ops.kind == Kind.C).any():
        plan.ops = orders.only_plain(problem, plan.ops)
    back = imported(torch_csv.text_of(plan), problem, tmp_path_factory.mktemp("csv"))
    assert verify(problem, back.ops) == []
    assert cells(back) == cells(plan)
    assert back.makespan_ms <= plan.makespan_ms * (1 + 1e-9)


def test_the_kept_text_is_not_written_for_another_order(tmp_path):
    problem = problem_on((0, 1), 2)
    plan = imported("0F0,,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", problem, tmp_path)
    other = imported("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", problem, tmp_path)
    plan.ops = other.ops
    assert torch_csv.text_of(plan) == "0F0,0F1,0B0,0B1\r\n1F0,1F1,1B0,1B1\r\n"
    plan.extra[torch_csv.KEPT] = 7
    assert torch_csv.text_of(plan).startswith("0F0,0F1")


def test_what_the_plan_carries_beside_its_schedule_is_kept(tmp_path):
    plan = imported("0F0,,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", problem_on((0, 1), 2), tmp_path)
    plan.training, plan.extra["partition"] = {"name": "mine"}, [3, 1]
    plan.write(tmp_path / "plan.json")
    text = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    for source, kept in ((text, {torch_csv.KEPT: text}), (text.replace("0F0", "0UNSHARD,0F0"), {})):
        (tmp_path / "other.csv").write_text(source)
        done = invoke(
            "import", tmp_path / "other.csv", "--problem", tmp_path / "plan.json", "-o", tmp_path / "new.json"
        )
        assert done.exit_code == 0, done.output
        back = Plan.read(tmp_path / "new.json")
        assert back.extra == {"partition": [3, 1], **kept}  # the file with communication has no text to keep
        assert back.training == plan.training


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch's runtime greets the stages of its own rank too, which gloo cannot"
)
def test_torchs_runtime_and_the_executor_get_the_same_from_an_exported_plan(tmp_path):
    """One step of two ranks under torch's runtime with the exported file, and under the executor with the plan."""
    from runtime import launch

    problem = pipelines.model_problem(2, 2, "v", 4)
    source = "0F0,0F1,3F0,3I0,3W0,0F2,3F1,3B1,0I0,0W0,0F3,3F2,3I2,0B1,3W2,3F3,3I3,0B2,3W3,0I3,0W3\n"
    source += "1F0,2F0,1F1,2F1,2I0,1I0,2W0,1F2,2F2,2B1,1B1,1W0,1F3,2F3,2B2,1B2,2I3,1I3,2W3,1W3\n"
    plan = imported(source, problem, tmp_path)
    plan.extra.clear()
    (tmp_path / "exported.csv").write_bytes(torch_csv.text_of(plan).encode())
    heard: list[dict[str, Any]] = []
    arguments = {"csv": str(tmp_path / "exported.csv"), "plan": plan.to_json()}
    launch.launch(torch_runtime.both, arguments, 2, "cpu", heard.append)
    assert sorted(answer["rank"] for answer in heard) == [0, 1]
    for answer in heard:
        assert answer["difference"] <= 1e-6
    (loss,) = [answer for answer in heard if answer["ours"] is not None]
    assert loss["ours"] == pytest.approx(loss["torch"], rel=1e-6)


# --- plans that other formats cannot say --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch-csv", "megatron"])
def test_offloads_are_refused_unless_they_are_to_be_dropped(form, tiny_plan, tiny_plan_file, tmp_path):
    done = invoke("export", tiny_plan_file, "--to", form, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert f"has 1 offload, which {form} cannot say; --drop-offload leaves them out" in done.stderr
    assert not (tmp_path / "out").exists()
    done = invoke("export", tiny_plan_file, "--to", form, "-o", tmp_path / "out", "--drop-offload")
    assert done.exit_code == 0
    plain = orders.only_plain(tiny_plan.problem, tiny_plan.ops)
    needed = memory.peaks(tiny_plan.problem, plain)[0]
    assert needed > memory.peaks(tiny_plan.problem, tiny_plan.ops)[0]
    assert f"warning: without 1 offload device 0 needs {needed} bytes" in done.stderr
    assert "over its budget of 2000" in done.stderr


@pytest.mark.parametrize("form", ["torch-csv", "megatron", "mps", "lp"])
def test_a_plan_that_breaks_a_rule_is_refused(form, tiny_plan, tmp_path):
    tiny_plan.ops = tiny_plan.ops.take(tiny_plan.ops.start > 0)
    tiny_plan.write(tmp_path / "plan.json")
    done = invoke("export", tmp_path / "plan.json", "--to", form, "-o", tmp_path / "out", "--drop-offload")
    assert done.exit_code == 2
    assert "ops: F(0,0) is missing, expected a valid plan" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["html", "svg", "trace"])
def test_a_plan_that_breaks_a_rule_can_be_looked_at(form, tiny_plan, tmp_path):
    tiny_plan.ops = tiny_plan.ops.take(tiny_plan.ops.start > 0)
    tiny_plan.write(tmp_path / "plan.json")
    done = invoke("export", tmp_path / "plan.json", "--to", form, "-o", tmp_path / "out", "--no-compare")
    assert done.exit_code == 0, done.output
    assert "F(0,1)" in (tmp_path / "out").read_text() or form != "trace"


def test_a_plan_above_its_budget_is_written_all_the_same(tmp_path):
    plan = imported("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", problem_on((0, 1), 2), tmp_path)
    plan.problem = plan.problem.with_budgets([1, 1])
    assert text_in("torch-csv", plan, "")[0].startswith("0F0,0F1")


def test_the_memory_in_the_warning_is_what_the_exported_schedule_takes(tiny_plan, tmp_path):
    text, warnings = text_in("torch-csv", tiny_plan, "plan.json", drop_offload=True)
    roomy = tiny_plan.problem.with_budgets([None] * 2)
    back = imported(text, roomy, tmp_path)
    assert f"device 0 needs {memory.peaks(roomy, back.ops)[0]} bytes" in warnings[0]


def test_megatrons_text_names_the_model_chunks(tmp_path):
    plan = imported("0F0,2F0,2I0,2W0,0B0\n1F0,3F0,3B0,1B0\n", problem_on((0, 1, 0, 1), 1), tmp_path)
    comment, *lines = megatron.text_of(plan).splitlines()
    assert comment.startswith("# 2 ranks, 4 stages, 1 microbatches")
    assert lines == ["rank 0: F0.0 F0.1 B0.1 W0.1 BW0.0", "rank 1: F0.0 F0.1 BW0.1 BW0.0"]
