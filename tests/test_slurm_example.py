"""The job script for Slurm calls what there is, on all machines alike, and goes on where it stopped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli import main

SCRIPT = Path(__file__).parent.parent / "docs" / "examples" / "slurm.sh"

STUB = """#!/bin/bash
echo "$(basename $0) $*" >> calls
case $(basename $0) in
  scontrol) printf 'node7\\nnode8\\n' ;;
  srun) shift; "$@" ;;
esac
"""


def job(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Run the script with stubs in place of Slurm, torchrun and optpipe; status, calls, what it said."""
    for name in ("scontrol", "srun", "torchrun", "optpipe"):
        stub = folder / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "123456"}
    environment = {**os.environ, **slurm, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], done.stderr


def parsed(call: str) -> None:
    """The command line takes it."""
    name, *arguments = call.split(" optpipe ")[-1].removeprefix("optpipe ").split()
    main.commands[name].make_context(name, arguments).close()


def test_the_job_measures_solves_and_trains_on_all_machines(tmp_path: Path) -> None:
    status, calls, _ = job(tmp_path, "config.yaml")
    assert status == 0
    runs = [call for call in calls if call.startswith("torchrun ")]
    assert [run.split(" optpipe ")[1].split()[0] for run in runs] == ["profile", "train"]
    for run in runs:
        assert "--nnodes 2 --nproc-per-node 8" in run and "--rdzv-endpoint node7:23456" in run
        parsed(run)
    assert runs[0].split("--rdzv-id ")[1].split()[0] != runs[1].split("--rdzv-id ")[1].split()[0]
    (solve,) = [call for call in calls if call.startswith("optpipe ")]
    assert solve == "optpipe solve config.yaml --profile profile.json -o plan.json"
    parsed(solve)


def test_a_job_that_is_started_again_goes_on(tmp_path: Path) -> None:
    (tmp_path / "profile.json").touch()
    (tmp_path / "plan.json").touch()
    (tmp_path / "checkpoints" / "step-00000200").mkdir(parents=True)
    status, calls, _ = job(tmp_path, "config.yaml")
    assert status == 0
    (train,) = [call for call in calls if call.startswith("torchrun ")]
    assert train.endswith("optpipe train --schedule plan.json --config config.yaml --resume checkpoints")
    parsed(train)


def test_a_config_is_needed(tmp_path: Path) -> None:
    status, calls, said = job(tmp_path)
    assert status != 0 and calls == [] and "a config file is needed" in said


@pytest.mark.parametrize("word", ["--kill-on-bad-exit=1", "#SBATCH --ntasks-per-node=1"])
def test_one_torchrun_a_machine_and_all_end_together(word: str) -> None:
    assert word in SCRIPT.read_text()
