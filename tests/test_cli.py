"""The command line: exit status, one-line errors, and what check, show and their JSON say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cli import main
from optpipe.errors import Infeasible, RunFailed
from optpipe.problem import Problem


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def only_line(result: Result) -> str:
    """The single line of stderr; nothing else was said."""
    assert result.stdout == ""
    assert result.stderr.endswith("\n")
    (line,) = result.stderr.splitlines()
    assert "Traceback" not in line
    return line


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


# --- help and usage ---------------------------------------------------------------------------------------------


def test_each_command_has_a_short_help_with_an_example():
    for name, command in main.commands.items():
        result = run(name, "--help")
        assert result.exit_code == 0
        assert f"Example:\n    optpipe {name} " in result.stdout
        assert len(command.get_short_help_str(80)) > 10
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{name} {option.opts} says nothing"


def test_version():
    from optpipe import __version__

    assert run("--version").stdout == f"optpipe {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["solve"], "Missing argument 'CONFIG_OR_PROBLEM'"),
        (["solve", "x", "--objective", "fun"], "'fun' is not one of 'makespan', 'span'"),
        (["solve", "x", "--time-limit", "0"], "0.0 is not in the range x>0"),
        (["solve", "x", "--time-limit", "soon"], "'soon' is not a valid"),
        (["solve", "x", "--gap", "nan"], "--gap"),
        (["solve", "x", "--time-limit", "inf"], "--time-limit"),
        (["show", "x", "--from", "nan"], "--from"),
        (["check", "x", "--nothing"], "No such option '--nothing'"),
        (["fly"], "No such command 'fly'"),
        (["train"], "Missing option '--schedule'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    line = only_line(result)
    assert line.startswith("Error: optpipe")
    assert said in line
    assert "--help" in line


def test_without_a_command_it_shows_the_help():
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: optpipe")


@pytest.mark.parametrize("command", [["--help"], ["check", "PLAN"], ["show", "PLAN"]])
def test_neither_torch_nor_a_solver_is_loaded_without_need(command, tiny_plan_file):
    arguments = [str(tiny_plan_file) if word == "PLAN" else word for word in command]
    code = (
        "import sys; sys.argv[0] = 'optpipe'\n"
        "from cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'pulp', 'highspy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)


# --- bad input --------------------------------------------------------------------------------------------------


def problem_with(problem: Problem, **changes: Any) -> dict[str, Any]:
    """The tiny problem as JSON, with values at paths like ``stages.0.forward_ms`` replaced (``...`` removes)."""
    value = problem.to_json()
    for path, new in changes.items():
        *way, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        here = value
        for part in way:
            here = here[part]
        if new is ...:
            del here[last]
        else:
            here[last] = new
    return value


BAD_PROBLEMS = {
    "unknown key": ({"microbatches": 4}, "microbatches: unknown key, expected one of"),
    "unknown key of a stage": ({"stages__1__forward": 1.0}, "stages[1].forward: unknown key, expected one of device"),
    "negative time": ({"stages__0__forward_ms": -1.0}, "stages[0].forward_ms: "),
    "wrong type": ({"stages__0__forward_ms": "1.0"}, "stages[0].forward_ms: expected a number, not '1.0'"),
    "list in place of a mapping": ({"stages__1": [1, 2]}, "stages[1]: expected a mapping, not a list"),
    "missing key": ({"num_microbatches": ...}, "num_microbatches: is missing"),
    "comm of another length": ({"comm_ms": [0.1, 0.1]}, "comm_ms: has 2 entries, expected 1"),
    "unused device": ({"stages__1__device": 0}, "devices[1]: no stage uses this device"),
    "device that is not there": (
        {"stages__1__device": 7},
        "stages[1].device: device 7 does not exist, expected 0 to 1",
    ),
    "no microbatches": ({"num_microbatches": 0}, "num_microbatches: "),
    "half a byte": ({"devices__0__memory_bytes": 0.5}, "devices[0].memory_bytes: expected an integer, not 0.5"),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name in BAD_PROBLEMS
        for form in ("problem.json", "problem.yaml", "config.yaml", "plan.json")
        if not ("unknown key" in name and form == "plan.json")  # a plan keeps unknown keys
    ],
)
def test_a_bad_problem_is_one_line_that_names_file_and_key(name, form, tiny_problem, tmp_path):
    changes, said = BAD_PROBLEMS[name]
    value: Any = problem_with(tiny_problem, **changes)
    if form == "config.yaml":
        value, said = {"problem": value}, f"problem.{said}"
    if form == "plan.json":
        value = {"format": "optpipe-plan", "version": 1, "problem": value, "ops": [], "makespan_ms": 0.0}
        said = f"problem.{said}"
    path = write(tmp_path / form, value)
    result = run("solve", path, "-o", tmp_path / "out.json")
    assert result.exit_code == 2
    assert only_line(result).startswith(f"Error: {path}: {said}")
    assert not (tmp_path / "out.json").exists()


BAD_CONFIGS = {
    "unknown key": ("modle: {}", "modle: unknown key"),
    "unknown key in a section": ("train: {step: 3}", "train.step: unknown key"),
    "negative number": ("optimizer: {learning_rate: -0.1}", "optimizer.learning_rate: "),
    "wrong type": ("batch: {microbatches: many}", "batch.microbatches: expected an integer, not 'many'"),
    "key given twice": ("train: {}\ntrain: {}", "line 2: is not YAML: key 'train' is given twice"),
    "broken YAML": ("train: [1,", "line 1: is not YAML"),
    "a tag that would run code": ("train: !!python/object/apply:os.system ['true']", "line 1: is not YAML"),
    "a number": ("3", "expected a config, a problem, a profile or a plan"),
    "empty": ("", "expected a config, a problem, a profile or a plan"),
    "nothing to solve": ("batch: {microbatches: 4}", "profile: is missing"),
    "profile that is not there": ("profile: no.json", "no such file"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_config_is_one_line(name, tmp_path):
    text, said = BAD_CONFIGS[name]
    result = run("solve", write(tmp_path / "config.yaml", text))
    assert result.exit_code == 2
    line = only_line(result)
    assert line.startswith(f"Error: {tmp_path}")
    assert said in line


@pytest.mark.parametrize("command", ["solve", "check", "show", "profile", "train"])
def test_a_missing_file_is_one_line(command, tmp_path):
    path = tmp_path / "nothing.yaml"
    result = run(command, *(["--schedule"] if command == "train" else []), path)
    assert result.exit_code == 2
    assert only_line(result) == f"Error: {path}: no such file"


@pytest.mark.parametrize("command", ["solve", "check", "show"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "optpipe-plan", "version": 1,', "line 1: is not JSON"),
        ('{"format": "optpipe-plan", "version": 1, "makespan_ms": NaN}', "NaN is not JSON"),
        ('{"format": "optpipe-plan", "version": 1, "note": [-1e999]}', "-1e999 is too large, expected a finite number"),
        ('{"format": "something", "version": 1}', "format: expected 'optpipe-plan'"),
        ('{"format": "optpipe-plan", "version": 2, "problem": {}, "ops": []}', "version: expected 1, not 2"),
        ('{"format": "optpipe-plan", "version": 1, "ops": [], "makespan_ms": 1}', "problem: is missing"),
        ("[" * 100_000, "is not"),
    ],
)
def test_a_broken_plan_is_one_line(command, text, said, tmp_path):
    path = write(tmp_path / "plan.json", text)
    result = run(command, path)
    assert result.exit_code == 2
    line = only_line(result)
    assert line.startswith(f"Error: {path}: ")
    assert said in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "G"}, "ops[3].kind: expected one of F, B"),
        ({"stage": 9}, "ops[3].stage: expected an integer from 0 to 1, not 9"),
        ({"microbatch": True}, "ops[3].microbatch: "),
        ({"start": "soon"}, "ops[3].start: expected a number"),
        ({"bytes": -1}, "ops[3].bytes: "),
    ],
)
def test_a_bad_op_is_named(changes, said, tiny_plan_file):
    plan = json.loads(tiny_plan_file.read_text())
    plan["ops"][3].update(changes)
    result = run("check", write(tiny_plan_file, plan))
    assert result.exit_code == 2
    assert said in only_line(result)


def test_a_folder_that_is_not_there(tiny_problem_file, tmp_path):
    result = run("solve", tiny_problem_file, "--method", "1f1b", "-o", tmp_path / "no" / "plan.json")
    assert result.exit_code == 2
    assert "cannot be written" in only_line(result)


@pytest.mark.parametrize("command", [["solve"], ["export", "--to", "svg"]])
def test_a_name_that_is_too_long(command, tiny_plan_file, tmp_path):
    result = run(*command, tiny_plan_file, "-o", tmp_path / ("p" * 256))
    assert result.exit_code == 2
    assert only_line(result).endswith("pp: cannot be written: File name too long")
    result = run("export", "--to", "svg", tiny_plan_file, "-o", tmp_path / ("\N{EURO SIGN}" * 85))
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_may_not_be_entered(tiny_plan_file, tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    result = run("export", "--to", "svg", tiny_plan_file, "-o", tmp_path / "closed" / "plan.svg")
    assert result.exit_code == 2
    assert only_line(result).endswith("plan.svg: cannot be written: Permission denied")


@pytest.mark.parametrize("form", ["html", "svg", "trace"])
def test_half_a_character_in_a_name_is_no_reason_to_fail(form, tiny_plan, tmp_path):
    tiny_plan.problem = tiny_plan.problem.changed(name="a\ud800b")
    tiny_plan.write(tmp_path / "plan.json")
    result = run("export", tmp_path / "plan.json", "--to", form, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "a?b" in (tmp_path / "out").read_text() or form == "trace"


def test_debug_shows_the_traceback(tmp_path):
    for arguments in (["--debug", "check", "no.json"], ["check", "no.json", "--debug"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1] == "Error: no.json: no such file"


# --- how errors of each kind end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RunFailed("rank 1 died\nof a cold"), 1, "Error: rank 1 died of a cold"),
        (Infeasible("nothing fits"), 3, "Error: nothing fits"),
        (
            Infeasible("nothing fits", [7, 7]),
            3,
            "Error: nothing fits; the smallest budget that works is 7 bytes a device",
        ),
        (Infeasible("nothing fits", [7, 8]), 3, "Error: nothing fits; the smallest budget that works is 7, 8 bytes"),
        (Infeasible("7 bytes are needed", [7]), 3, "Error: 7 bytes are needed"),
        (KeyboardInterrupt(), 130, "Error: interrupted"),
        (ZeroDivisionError("division by zero"), 1, "Error: ZeroDivisionError: division by zero (a fault of OptPipe"),
    ],
)
def test_exit_status_of_each_error(error, status, said, monkeypatch, tiny_plan_file):
    def fail(*_):
        raise error

    monkeypatch.setattr("optpipe.verify.verify_plan", fail)
    result = run("check", tiny_plan_file)
    assert result.exit_code == status
    assert result.stderr.strip().splitlines()[-1].startswith(said)
    assert "Traceback" not in result.stderr


def test_a_reader_that_leaves_is_no_error(tiny_plan_file):
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "check", tiny_plan_file, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() in (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["show"], ["check", "--json"]])
def test_an_output_that_is_full_is_one_line(arguments, tiny_plan_file):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments, str(tiny_plan_file)],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_a_terminal_without_a_character_shows_another(tiny_problem_file, tmp_path):
    command = [sys.executable, "-m", "cli", "solve", str(tiny_problem_file), "-o", str(tmp_path / "plan.json")]
    done = subprocess.run(
        [*command, "--time-limit", "1", "--no-cache"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert b"makespan" in done.stdout and done.stdout.isascii()


# --- check ------------------------------------------------------------------------------------------------------


def test_check_accepts_a_valid_plan(tiny_plan_file):
    result = run("check", tiny_plan_file, "--jitter", 20)
    assert result.exit_code == 0
    assert "makespan 14.2 ms" in result.stdout
    assert result.stdout.splitlines()[-1] == "valid, and within its memory in 20 replays"
    assert result.stderr == ""


def damaged(path: Path, damage) -> Path:
    plan = json.loads(path.read_text())
    ops = {f"{op['kind']}({op['stage']},{op['microbatch']})": op for op in plan["ops"]}
    damage(plan, ops)
    return write(path, plan)


def _shift(op: dict[str, Any], by: float) -> None:
    op["start"] += by
    op["end"] += by


DAMAGE = {
    "late op": (lambda plan, ops: _shift(ops["F(0,0)"], 0.5), "F(1,0) starts at 1.1 ms, before F(0,0) ends at 1.5 ms"),
    "overlap": (lambda plan, ops: _shift(ops["F(0,1)"], -0.5), "device 0 compute: F(0,1) [0.5, 1.5] overlaps F(0,0)"),
    "missing op": (lambda plan, ops: plan["ops"].remove(ops["W(1,3)"]), "W(1,3) is missing"),
    "op twice": (lambda plan, ops: plan["ops"].append(dict(ops["W(1,3)"])), "W(1,3) is there 2 times"),
    "early reload": (lambda plan, ops: _shift(ops["R(0,1)"], -4.0), "R(0,1) starts at 1.5 ms, before O(0,1) ends at"),
    "offload without reload": (lambda plan, ops: plan["ops"].remove(ops["R(0,1)"]), "O(0,1) has no reload"),
    "over budget": (
        lambda plan, ops: plan["problem"]["devices"][0].update(memory_bytes=1999),
        "device 0 holds 2000 bytes at 1 ms (start of F(0,1)), over its budget of 1999 bytes",
    ),
    "wrong duration": (
        lambda plan, ops: ops["W(0,3)"].update(end=20.0),
        "W(0,3) [13.2, 20] takes 6.8 ms, expected 1 ms",
    ),
    "wrong makespan": (
        lambda plan, ops: plan.update(makespan_ms=13.0),
        "makespan_ms says 13 ms, but first start to last end is 14.2 ms",
    ),
    "bound above the makespan": (lambda plan, ops: plan.update(lower_bound_ms=15.0), "lower_bound_ms says 15 ms"),
    "before the start": (lambda plan, ops: _shift(ops["F(0,0)"], -0.5), "F(0,0) starts at -0.5 ms, before 0"),
    "no ops": (lambda plan, ops: plan.update(ops=[]), "F(0,0) is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_rejects_each_kind_of_damage_in_words(name, tiny_plan_file):
    damage, said = DAMAGE[name]
    path = damaged(tiny_plan_file, damage)
    result = run("check", path, "--jitter", 5)
    assert result.exit_code == 1
    violations = result.stdout.splitlines()
    assert any(line.startswith(said) for line in violations), violations
    plural = "" if len(violations) == 1 else "s"
    assert result.stderr == f"Error: {path}: {len(violations)} violation{plural}\n"


def test_check_json(tiny_plan_file):
    said = json.loads(run("check", tiny_plan_file, "--jitter", 3, "--json").stdout)
    assert said["valid"] is True and said["violations"] == [] and said["replays"] == 3
    assert said["makespan_ms"] == pytest.approx(14.2)
    result = run("check", damaged(tiny_plan_file, DAMAGE["missing op"][0]), "--json")
    said = json.loads(result.stdout)
    assert result.exit_code == 1
    assert said["valid"] is False and said["violations"][0].startswith("W(1,3) is missing")


def test_check_says_when_a_replay_breaks_the_memory_promise(tiny_plan_file, monkeypatch):
    monkeypatch.setattr("optpipe.jitter.check_replays", lambda *_: ["replay 0: device 1 held 3 bytes"])
    result = run("check", tiny_plan_file, "--jitter", 1)
    assert result.exit_code == 1
    assert result.stdout == "replay 0: device 1 held 3 bytes\n"


# --- show -------------------------------------------------------------------------------------------------------


def test_show_draws_within_the_width(tiny_plan_file):
    result = run("show", tiny_plan_file, "--width", 100)
    assert result.exit_code == 0
    assert "makespan 14.2 ms · bubble 15.49% · offloaded 1 kB" in result.stdout
    assert "dev 0" in result.stdout and "dev 1" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "\x1b" not in result.stdout


def test_show_of_a_part(tiny_plan_file):
    result = run("show", tiny_plan_file, "--device", 1, "--from", 0, "--to", 5)
    assert "dev 1" in result.stdout and "dev 0" not in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", 2], "Error: --device: 2 does not exist in {}, expected 0 to 1"),
        (["--stage", 5], "Error: --stage: 5 does not exist in {}, expected 0 to 1"),
        (["--from", 5, "--to", 5], "Error: --from/--to: nothing between 5 and 5 ms"),
    ],
)
def test_show_of_a_part_that_is_not_there(options, said, tiny_plan_file):
    result = run("show", tiny_plan_file, *options)
    assert result.exit_code == 2
    assert only_line(result) == said.format(tiny_plan_file)


def test_show_of_a_damaged_plan(tiny_plan_file):
    path = damaged(tiny_plan_file, DAMAGE["over budget"][0])
    result = run("show", path)
    assert result.exit_code == 0
    assert "! over the budget" in result.stdout


def test_show_json(tiny_plan_file):
    said = json.loads(run("show", tiny_plan_file, "--json").stdout)
    assert said["peak_bytes"] == [2000, 1000]
    assert said["budget_bytes"] == [2000, 2000]
    assert said["offloaded_bytes"] == [1000, 0]
    assert said["solver"] == {"method": "by hand"}
