"""The command line of OptPipe: parses, calls, prints.

A command imports what it needs when it runs, so that help is instant and no torch is loaded to check a plan.
Exit status: 0 done; 1 a check found violations or the run failed; 2 bad input; 3 infeasible; 130 interrupted.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from optpipe import __version__
from optpipe.errors import Infeasible, InputError, RunFailed
from optpipe.front import (
    CONTEXT,
    Front,
    Number,
    check_output,
    debug_option,
    json_option,
    plain_console,
    print_json,
    working,
)

if TYPE_CHECKING:
    from rich.console import Console

    from optpipe.metrics import Metrics
    from optpipe.plan import Plan
    from optpipe.profile import Profile
    from optpipe.task import Task
    from runtime.metrics_log import Step
    from solver.incumbent import Progress

#: What a plan is exported to.
FORMS = ("html", "svg", "trace", "torch-csv", "megatron", "mps", "lp")

Command = TypeVar("Command", bound=Callable[..., Any])


def command(example: str) -> Callable[[Command], click.Command]:
    """A command of the group, named in its example, which its help shows, with the options that all commands have."""

    def wrap(function: Command) -> click.Command:
        name, epilog = example.split()[1], f"\b\nExample:\n  {example}"
        return main.command(name, context_settings=CONTEXT, epilog=epilog)(debug_option(function))

    return wrap


@click.group(cls=Front, context_settings=CONTEXT)
@click.version_option(__version__, message="optpipe %(version)s")
@debug_option
def main() -> None:
    """Plan and run pipeline-parallel training.

    \b
    optpipe profile config.yaml        measure the model
    optpipe solve config.yaml          find the best schedule within the memory
    optpipe train --schedule plan.json train under it
    """  # noqa: D301 (click reads the backspace as: keep these lines apart)


@command("optpipe profile configs/demo.yaml -o profile.json")
@click.argument("config", type=click.Path())
@click.option("-o", "--output", type=click.Path(), default="profile.json", help="Where the profile goes.")
@json_option
def profile(config: str, output: str, as_json: bool) -> None:
    """Run the model of CONFIG on its ranks and measure it.

    Per stage: times of F, B, W and of a fused backward, bytes held after F and after B, transfers to the host and
    back, and the links between stages.
    """
    from optpipe.config import Config

    settings = Config.read(config)
    check_output(output)
    from runtime import launch, profiler

    with working("measuring") as progress:
        measured = profiler.profile(settings, progress)
    if launch.is_chief():
        _write_profile(measured, output, as_json)
    launch.leave()


def _write_profile(found: Profile, output: str, as_json: bool) -> None:
    """Write a profile, and show it."""
    found.write(output)
    if as_json:
        print_json({"output": output, **found.to_json()})
        return
    from optpipe.report import profile_table

    console = plain_console()
    console.print(profile_table(found))
    _print_warnings(console, found.warnings)
    console.print(f"written to {output}")


def _print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}")


@command("optpipe estimate configs/estimate_example.yaml -o profile.json")
@click.argument("config", type=click.Path())
@click.option("--hardware", type=click.Path(), help="A hardware file, in place of the config's.")
@click.option("-o", "--output", type=click.Path(), default="profile.json", help="Where the profile goes.")
@json_option
def estimate(config: str, hardware: str | None, output: str, as_json: bool) -> None:
    """Make the profile of CONFIG by arithmetic, for a cluster that is not at hand.

    From FLOPs and bytes of the model and a description of the hardware. Bytes are those that a run counts, times are
    rough. Nothing runs.
    """
    from optpipe.config import Config
    from optpipe.estimate import estimate as run
    from optpipe.hardware import Hardware

    settings = Config.read(config)
    described = None if hardware is None else Hardware.read(hardware)
    check_output(output)
    _write_profile(run(settings, described), output, as_json)


@command("optpipe solve profile.json --time-limit 60 -o plan.json")
@click.argument("task_file", metavar="CONFIG_OR_PROBLEM", type=click.Path())
@click.option("-o", "--output", type=click.Path(), default="plan.json", help="Where the plan goes.")
@click.option("--profile", "profile_file", type=click.Path(), help="The profile to plan a config with.")
@click.option("--method", help="auto, milp, search or the name of a schedule.  [default: auto]")
@click.option("--solver", metavar="NAME", help="A solver that PuLP finds, for the MILP.  [default: HiGHS]")
@click.option(
    "--objective",
    type=click.Choice(["makespan", "span"]),
    help="Time to shorten.  [default: makespan]",
)
@click.option("--time-limit", type=Number(min=0, min_open=True), help="Seconds.  [default: 300]")
@click.option("--gap", type=Number(min=0), help="How far from the bound is good enough.  [default: 0.05]")
@click.option("--threads", type=click.IntRange(min=1), help="Of the solver.  [default: all cores]")
@click.option("--seed", type=click.IntRange(min=0), help="Same seed, same plan.  [default: 0]")
@click.option("--cache/--no-cache", default=True, help="Start from plans of similar problems; keep this one.")
@json_option
def solve(task_file: str, output: str, profile_file: str | None, as_json: bool, **options: Any) -> None:
    """Find the best schedule that fits the memory.

    CONFIG_OR_PROBLEM: a YAML config with a profile, a problem, or hardware to estimate for, a profile, a problem as
    JSON, or a plan, whose problem is solved again from its schedule on. Ctrl-C ends the search and keeps the best plan
    known.
    """
    from optpipe.task import read_task

    task = read_task(task_file, profile_file)
    check_output(output)
    try:
        plan = _solved(task, {name: value for name, value in options.items() if value is not None})
    except InputError as error:
        if error.file or error.key != "method":
            raise
        given = options["method"] is not None
        where = ("--method", "") if given else (task_file, f"{task.solver_key}.method")
        raise InputError(*where, error.message) from None
    except Infeasible as error:
        if as_json:
            print_json({"feasible": False, "message": str(error), "smallest_budget_bytes": error.smallest_budget})
        raise
    plan.training, plan.extra = task.training, {**task.extra, **plan.extra}
    plan.write(output)

    from optpipe import report

    if as_json:
        print_json({"feasible": True, "output": output, **report.summary(plan)})
        return
    console = plain_console()
    for line in report.facts(plan):
        console.print(line)
    console.print(report.device_table(plan))
    _print_warnings(console, task.warnings)
    console.print(f"written to {output}")


def _solved(task: Task, given: dict[str, Any]) -> Plan:
    """The solver's plan; options given on the command line go before those of the file."""
    from solver.options import SolveOptions
    from solver.solve import solve as run

    wanted = task.solver
    backend = given.get("solver", SolveOptions.backend)
    if backend != SolveOptions.backend:
        from solver.milp.pulp_backend import check_there

        check_there(backend, "--solver")
    options = SolveOptions(
        # Who names a solver wants to see it at work.
        method=given.get("method", wanted.method if backend == SolveOptions.backend else "milp"),
        backend=backend,
        objective=given.get("objective", wanted.objective),
        time_limit=given.get("time_limit", wanted.time_limit_s),
        gap=given.get("gap", wanted.gap),
        threads=given.get("threads", wanted.threads),
        seed=given.get("seed", wanted.seed),
        cache=given["cache"],
    )
    with working("solving") as tell:
        return run(task.problem, options, lambda now: tell(_progress_text(now)), start=task.start)


def _progress_text(now: Progress) -> str:
    """The best step so far, how near it is to the proven bound, and what found it."""
    return f"{now.best:.5g} ms, bound {now.bound:.5g} ms, gap {now.gap:.1%}, by {now.source}, {now.seconds:.0f} s"


@command("optpipe compare problem.json --time-limit 30")
@click.argument("task_file", metavar="CONFIG_OR_PROBLEM", type=click.Path())
@click.option("--profile", "profile_file", type=click.Path(), help="The profile to plan a config with.")
@click.option("--objective", type=click.Choice(["makespan", "span"]), default="makespan", help="Time to shorten.")
@click.option("--time-limit", type=Number(min=0, min_open=True), default=30.0, help="Seconds for OptPipe's own plan.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Same seed, same plan.")
@json_option
def compare(
    task_file: str, profile_file: str | None, objective: str, time_limit: float, seed: int, as_json: bool
) -> None:
    """Every known schedule and OptPipe's, side by side.

    Makespan, bubble, peak memory of the fullest device against its budget, offloaded bytes, and why a schedule cannot
    be used. Nothing is written.
    """
    from optpipe import report
    from optpipe.task import read_task
    from solver.compare import compare as run
    from solver.options import SolveOptions

    task = read_task(task_file, profile_file)
    problem = task.problem
    options = SolveOptions(objective="span" if objective == "span" else "makespan", time_limit=time_limit, seed=seed)
    with working("comparing") as tell:
        rows = run(problem, options, lambda now: tell(_progress_text(now)))
    if as_json:
        budgets = [device.memory_bytes for device in problem.devices]
        print_json({"name": problem.name, "budget_bytes": budgets, "schedules": [row.to_json() for row in rows]})
        return
    console = plain_console()
    console.print(report.comparison_table(problem, rows.cells))
    _print_warnings(console, task.warnings)


@command("optpipe check plan.json --jitter 100")
@click.argument("plan_file", metavar="PLAN", type=click.Path())
@click.option(
    "--jitter", type=click.IntRange(min=0), default=0, metavar="N", help="Replay it N times under random durations too."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the random durations.")
@json_option
def check(plan_file: str, jitter: int, seed: int, as_json: bool) -> None:
    """Verify a plan against its problem; every violation is a line, and the exit status 1.

    With --jitter also replay it under random durations: memory must stay within the plan's whatever they are.
    """
    from optpipe import report
    from optpipe.jitter import check_replays
    from optpipe.plan import Plan
    from optpipe.verify import verify_plan

    plan = Plan.read(plan_file)
    violations = verify_plan(plan)
    replays = 0 if violations else jitter
    violations += check_replays(plan.problem, plan.ops, replays, seed) if replays else []
    if as_json:
        print_json({"valid": not violations, "violations": violations, "replays": replays, **report.summary(plan)})
    else:
        for line in violations or report.facts(plan):
            click.echo(line)
        if not violations:
            click.echo("valid" + (f", and within its memory in {replays} replays" if replays else ""))
    if violations:
        count = len(violations)
        raise RunFailed(f"{plan_file}: {count} violation{'' if count == 1 else 's'}")


@command("optpipe show plan.json --device 0 --from 0 --to 50")
@click.argument("plan_file", metavar="PLAN", type=click.Path())
@click.option("--width", type=click.IntRange(min=20, max=10_000), help="Columns.  [default: those of the terminal]")
@click.option("--device", "devices", type=click.IntRange(min=0), multiple=True, help="Only this one; may be repeated.")
@click.option("--stage", "stages", type=click.IntRange(min=0), multiple=True, help="Only this one; may be repeated.")
@click.option("--from", "start", type=Number(), metavar="MS", help="From this time on, in ms.")
@click.option("--to", "end", type=Number(), metavar="MS", help="Up to this time, in ms.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Only characters that any terminal has.")
@json_option
def show(
    plan_file: str,
    width: int | None,
    devices: Sequence[int],
    stages: Sequence[int],
    start: float | None,
    end: float | None,
    ascii_only: bool,
    as_json: bool,
) -> None:
    """Draw a plan: the Gantt chart and the memory of every device.

    Under it, in words: where devices idle and why, where memory is fullest, what decides the length.
    """
    from optpipe import notebook, report
    from optpipe.plan import Plan
    from optpipe.words import explain

    plan = Plan.read(plan_file)
    if as_json:
        print_json({**report.summary(plan), "explanation": explain(plan)})
        return
    for option, chosen, count in (
        ("--device", devices, plan.problem.num_devices),
        ("--stage", stages, plan.problem.num_stages),
    ):
        if chosen and max(chosen) >= count:
            raise InputError(option, "", f"{max(chosen)} does not exist in {plan_file}, expected 0 to {count - 1}")
    console = plain_console(width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else 100))
    plain = ascii_only or not console.encoding.lower().startswith("utf")
    try:
        notebook.show(
            plan,
            devices=devices or None,
            stages=stages or None,
            start=start,
            end=end,
            ascii_only=plain,
            console=console,
        )
    except ValueError as error:
        raise InputError("--from/--to", "", str(error)) from None


@command("optpipe export plan.json --to html -o plan.html")
@click.argument("plan_file", metavar="PLAN", type=click.Path())
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="Format.")
@click.option("-o", "--output", type=click.Path(), required=True, help="Where it goes.")
@click.option("--against", type=click.Path(), metavar="PLAN", help="html: another plan, on the same clock.")
@click.option("--trace", type=click.Path(), metavar="RUN", help="html, trace: what 'optpipe train --trace' wrote.")
@click.option("--compare/--no-compare", "known", default=True, help="html: with the known schedules side by side.")
@click.option("--drop-offload", is_flag=True, help="Leave out offloads and recomputation where a format has none.")
@json_option
def export(plan_file: str, form: str, output: str, as_json: bool, **options: Any) -> None:
    """Write a plan as a page, as a picture, or for other tools.

    \b
    html       one page with everything there is to see, for any browser
    svg        the chart as a picture
    trace      for Perfetto and chrome://tracing
    torch-csv  for torch.distributed.pipelining and torchtitan
    megatron   the order of F, B and W on each rank, as text
    mps, lp    the problem as a mixed-integer program, for CPLEX, Gurobi, SCIP
    """  # noqa: D301
    from optpipe import files, formats
    from optpipe.plan import Plan

    plan = Plan.read(plan_file)
    check_output(output)
    formats.check_options(form, against=options["against"], trace=options["trace"])
    known = options.pop("known")
    if form in formats.FORMS:
        rows = _known_schedules(plan) if known and form == "html" else []
        text, warnings = formats.export(plan, form, plan_file, schedules=rows, **options)
    else:
        from optpipe.interchange import check_order
        from solver.milp.export import program_of

        check_order(plan, plan_file)
        program = program_of(plan.problem, plan.ops, form, lower_bound=plan.lower_bound_ms or 0.0)
        text = program.text
        warnings = [f"the program leaves out {program.leaves_out}"] if program.leaves_out else []
    with files.whole_file(output) as stream:
        stream.write(text)
    if as_json:
        print_json({"output": output, "warnings": warnings})
        return
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"written to {output}")


def _known_schedules(plan: Plan) -> list[tuple[str, Metrics | None, str]]:
    from solver.compare import known

    with working("comparing with known schedules"):
        return [(row.name, row.measured, row.why_not) for row in known(plan.problem)]


@command("optpipe import schedule.csv --problem problem.json -o plan.json")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option(
    "--problem", "task_file", type=click.Path(), required=True, help="Whose times and sizes: a problem, config or plan."
)
@click.option("-o", "--output", type=click.Path(), default="plan.json", help="Where the plan goes.")
@json_option
def import_(file: str, task_file: str, output: str, as_json: bool) -> None:
    """Make a plan of a schedule that another tool wrote.

    FILE: a CSV of torch.distributed.pipelining or torchtitan, with or without communication. The plan keeps its
    order; times and sizes are those of the problem.
    """
    from optpipe import report
    from optpipe.interchange import torch_csv
    from optpipe.task import read_task
    from solver.bounds import lower_bound

    task = read_task(task_file)
    check_output(output)
    plan = torch_csv.read(file, task.problem)
    # What a plan carries beside its schedule, such as how its layers are cut, holds for this schedule too.
    kept = {key: value for key, value in task.extra.items() if key != torch_csv.KEPT}
    plan.training, plan.extra, plan.lower_bound_ms = task.training, {**kept, **plan.extra}, lower_bound(task.problem)
    plan.write(output)
    if as_json:
        print_json({"output": output, **report.summary(plan)})
        return
    for line in [*report.facts(plan), f"written to {output}"]:
        click.echo(line)


@command("optpipe train --schedule plan.json")
@click.option(
    "--schedule", "plan_file", type=click.Path(), required=True, metavar="PLAN", help="The plan to train under."
)
@click.option("--config", type=click.Path(), help="A config whose training part goes before the plan's.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps in all.  [default: the config's]")
@click.option("--resume", type=click.Path(), metavar="FOLDER", help="Go on from the checkpoint in this folder.")
@click.option("--trace", type=click.Path(), metavar="FILE", help="Write when the ops of the last steps ran.")
@click.option("--tensorboard", type=click.Path(), metavar="FOLDER", help="Write the figures of each step as events.")
@json_option
def train(
    plan_file: str,
    config: str | None,
    steps: int | None,
    resume: str | None,
    trace: str | None,
    tensorboard: str | None,
    as_json: bool,
) -> None:
    """Train the model of a plan under its schedule.

    Alone it starts one local process a device; under torchrun it joins the processes that are there. With train.replan
    in the config, plans that take over on the way are kept beside PLAN, as PLAN.replanned.json.
    """
    from optpipe.config import Config
    from optpipe.plan import Plan

    plan = Plan.read(plan_file)
    settings = None if config is None else Config.read(config)
    if trace is not None:
        check_output(trace)
    from optpipe import metrics, report
    from runtime import launch
    from runtime.tensorboard import Events
    from runtime.train import settings_of
    from runtime.train import train as run

    known = settings_of(plan, settings, plan_file)
    total = steps or known.train.steps
    planned = metrics.measure(plan.problem, plan.ops)
    if launch.is_chief() and not as_json:
        for line in report.facts(plan):
            click.echo(line)
    with Events(tensorboard if launch.is_chief() else None, planned, known.batch.accumulate) as events:

        def tell(step: Step) -> None:
            click.echo(
                json.dumps(step.to_json()) if as_json else step.line(total, events.peak_bytes, events.makespan_ms)
            )
            events.add(step)
            if step.replanned is not None and not as_json:
                click.echo(step.replanned.line())

        summary = run(
            plan,
            settings,
            steps=steps,
            resume=resume,
            on_step=tell,
            trace=trace,
            replanned=_replanned(plan_file),
            file=plan_file,
        )
    if launch.is_chief() and as_json:
        print_json(summary.to_json())
    elif launch.is_chief():
        console = plain_console()
        console.print(report.run_table(summary.to_json()))
        if summary.checkpoint:
            console.print(f"checkpoint in {summary.checkpoint}")
        if trace is not None:
            console.print(f"trace in {trace}" + (", of the plan that ran last" if summary.plans > 1 else ""))
    launch.leave()


def _replanned(plan_file: str) -> str:
    """Where a plan that takes over is kept: ``plan.replanned.json`` beside ``plan.json``, and itself from then on."""
    ending = ".replanned.json"
    return plan_file if plan_file.endswith(ending) else plan_file.removesuffix(".json") + ending


@command("optpipe cache list")
@click.argument("action", type=click.Choice(["list", "clear"]))
@json_option
def cache(action: str, as_json: bool) -> None:
    """List or clear the schedules kept from problems solved before.

    They are plain files in the user's cache folder ($OPTPIPE_CACHE names another one), and only ever a start: what
    comes of them is verified for the problem at hand.
    """
    from solver.cache import Cache

    store = Cache()
    if action == "clear":
        count = store.clear()
        if as_json:
            print_json({"folder": str(store.folder), "removed": count})
        else:
            click.echo(f"{count} schedule{'' if count == 1 else 's'} removed from {store.folder}")
        return
    entries = store.entries()
    keys = ("name", "stages", "devices", "microbatches", "objective", "makespan_ms", "method", "size")
    rows = [{"file": entry.path.name, **{key: getattr(entry, key) for key in keys}} for entry in entries]
    if as_json:
        print_json({"folder": str(store.folder), "entries": rows})
        return
    from optpipe import report

    if entries:
        plain_console().print(report.cache_table(rows))
    click.echo(f"{len(entries)} schedule{'' if len(entries) == 1 else 's'} in {store.folder}")


if __name__ == "__main__":
    main()
