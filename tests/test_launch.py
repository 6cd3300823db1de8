"""Ranks: they start, talk, end; whoever fails first is named, and nobody outlives a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from optpipe.errors import Infeasible, InputError, RunFailed
from runtime import launch, worker
from tests import ranks


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(pid: int) -> bool:
    """Whether it is alive and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_work_together_and_rank_0_answers(count: int) -> None:
    heard: list[Any] = []
    answer = launch.launch(ranks.add_up, {"value": 10}, count, "cpu", heard.append)
    assert answer["total"] == 10 * count + sum(range(count))
    assert sorted(message["rank"] for message in heard) == list(range(count))
    assert answer["threads"] >= 1
    assert not alive(answer["pid"])


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("error", RunFailed, "rank 1: ValueError: boom"),
        ("input", InputError, "some.yaml: some.key: is wrong"),
        ("infeasible", Infeasible, "does not fit"),
        ("killed", RunFailed, "rank 1 was killed by SIGKILL (out of memory?)"),
        ("gone", RunFailed, "rank 1 ended without a word, exit status 0"),
        ("unjson", RunFailed, "rank 1: TypeError: Object of type module is not JSON serializable"),
    ],
)
def test_the_first_cause_is_named_not_the_ranks_that_lost_their_peer(
    how: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        launch.launch(ranks.fail, {"how": how}, 2, "cpu")
    assert str(caught.value) == message


def test_a_rank_that_fails_when_others_have_ended_is_the_only_one_heard(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(InputError) as caught:
        launch.launch(ranks.fail_alone, {}, 2, "cpu")
    assert str(caught.value) == "out.json: cannot be written: No space left on device"
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err


#: A rank that gloo could not connect, with the words of torch 2.13.
UNCONNECTED = """
import json, os, sys
task = json.loads(sys.stdin.readline())
report = {"kind": "", "message": "RuntimeError: Gloo connectFullMesh failed with ...", "lost_peer": False}
report |= {"traceback": "", "time": 0.0, "met": %r}
os.write(task["pipe"], json.dumps({"error": report}).encode() + b"\\n")
"""


@pytest.mark.parametrize(("failures", "met", "starts"), [(2, False, 3), (9, False, 3), (1, True, 1)])
def test_ranks_that_could_not_connect_are_started_again(
    failures: int, met: bool, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times at most, and never once the work may have begun."""
    started: list[list[str]] = []
    start = subprocess.Popen

    def popen(arguments: list[str], **how: Any) -> subprocess.Popen[bytes]:
        started.append(arguments)
        fails = len(started) <= 2 * failures and len(started) % 2 == 0  # of two ranks the second
        return start([sys.executable, "-c", UNCONNECTED % met] if fails else arguments, **how)

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    if failures < launch.STARTS and not met:
        assert launch.launch(ranks.add_up, {"value": 1}, 2, "cpu")["total"] == 3
    else:
        with pytest.raises(RunFailed, match="rank 1: RuntimeError: Gloo connectFullMesh failed"):
            launch.launch(ranks.add_up, {"value": 1}, 2, "cpu")
    assert len(started) == 2 * starts


def test_a_rank_that_does_not_notice_is_ended() -> None:
    heard: list[Any] = []
    with pytest.raises(RunFailed) as caught:
        launch.launch(ranks.fail, {"how": "asleep"}, 2, "cpu", heard.append)
    assert str(caught.value) == "rank 1: ValueError: boom"
    assert not alive(heard[0]["pid"])
    assert "in fail" in caught.value.__notes__[0], "the rank's traceback goes along"


def test_an_error_of_the_listener_ends_the_ranks() -> None:
    pids: list[int] = []

    def listen(message: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.launch(ranks.add_up, {"value": 1}, 2, "cpu", listen)
    assert not any(map(alive, pids))


SLEEP = """
from runtime import launch
from tests import ranks
launch.launch(ranks.sleep, {}, 2, "cpu", lambda message: print(message["pid"], flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_told_to_end_takes_its_ranks_along(number: int) -> None:
    root = str(Path(__file__).parent.parent)
    launcher = subprocess.Popen(
        [sys.executable, "-c", SLEEP], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(number)
    said = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == (143 if number == signal.SIGTERM else -number)
    assert "terminate called" not in said
    if number == signal.SIGKILL:
        deadline = time.monotonic() + 60  # they notice by themselves; where no one reaps orphans they stay as zombies
        while any(map(running, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    else:
        assert not any(map(alive, pids))


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be imported by name"):
        launch.launch(lambda rank: None, {}, 1, "cpu")


JOIN = """
from optpipe.errors import InputError
from runtime import launch
from tests import ranks
try:
    print(launch.launch(ranks.add_up, {"value": 10}, 2, "cpu", print))
except InputError as error:
    print(error)
"""


def under_torchrun(world: int, script: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = str(Path(__file__).parent.parent)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "PYTHONPATH": root}
    places |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(started, said, strict=True)]


@pytest.mark.parametrize("world", [1, 2])
def test_under_torchrun_it_joins_or_says_what_does_not_fit(world: int) -> None:
    said = [out for _, out, _ in under_torchrun(world, JOIN)]
    if world == 2:
        assert all("'total': 21" in text for text in said)
        assert "{'rank': 0}" in said[0] and "{'rank': 1}" not in said[1], "only rank 0 is heard"
    else:
        assert said[0].startswith("torchrun: started 1 ranks, but the run needs 2: one a device of each replica")


FAIL = """
import sys, time
import torch.distributed as dist
from runtime import launch
from tests import ranks
dist.destroy_process_group = lambda: time.sleep(1000)  # as NCCL's does where a peer is gone
try:
    launch.launch(ranks.fail, {"how": "error"}, 2, "cpu")
except Exception as error:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    sys.exit(3)
"""


def test_under_torchrun_a_failure_ends_its_rank_at_once_with_its_word_and_status() -> None:
    (lost, _, consequence), (failed, _, cause) = under_torchrun(2, FAIL)
    assert (failed, cause) == (3, "ValueError: boom\n")
    assert lost == 3 and consequence.startswith("RunFailed: rank 0 lost another rank") and consequence.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "variables", "expected"),
    [
        ("cuda", {"LOCAL_RANK": "1"}, 1),
        ("cuda", {}, 5),
        ("cuda:2", {"LOCAL_RANK": "1"}, 2),
    ],
)
def test_a_rank_takes_the_gpu_with_its_number_on_its_machine(
    asked: str, variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.device] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    assert worker.join(5, 8, torch.device(asked)) == torch.device("cuda", expected)
    assert taken == [torch.device("cuda", expected)]


def test_devices_are_found_or_missed_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.resolve_device("auto", 2) == "cuda"
    assert launch.resolve_device("auto", 3) == "cpu"
    assert launch.resolve_device("cpu", 2) == "cpu"
    with pytest.raises(
        InputError, match=r"^some.yaml: device: cuda needs 3 GPUs, one a device, but torch finds 2 here"
    ):
        launch.resolve_device("cuda", 3, "some.yaml")
