import threading
import time

import pytest
import torch

from optpipe.errors import RunFailed
from runtime.channel import CpuLane
from runtime.events import CpuClock, CpuEvent, Failure, PeerLost


class Copy:
    """A job that notes what is done with it."""

    def __init__(self, nbytes=64, log=None, name=""):
        self.source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self.target = torch.zeros(nbytes, dtype=torch.uint8)
        self.log, self.name = log if log is not None else [], name

    def start(self):
        self.log.append(("start", self.name))
        return [(self.target, self.source)]

    def finish(self):
        assert torch.equal(self.target, self.source)
        self.log.append(("finish", self.name))


@pytest.fixture
def failure():
    return Failure()


@pytest.fixture
def lane(failure):
    lane = CpuLane("lane", failure)
    yield lane
    lane.close()


def test_jobs_go_one_at_a_time_in_order(lane):
    log = []
    for name in range(20):
        lane.submit(Copy(log=log, name=name))
    lane.settle()
    assert log == [(what, name) for name in range(20) for what in ("start", "finish")]


def test_a_job_starts_after_its_events_and_its_own_event_comes_after_it(lane, failure):
    log, gate = [], CpuEvent(failure)
    done = lane.submit(Copy(log=log), after=[gate])
    time.sleep(0.02)
    assert log == [] and not done.done
    log.append("gate")
    gate.set()
    done.wait()
    assert done.done and [entry if entry == "gate" else entry[0] for entry in log] == ["gate", "start", "finish"]


def test_one_lane_waits_for_another(failure):
    log, gate = [], CpuEvent(failure)
    out, back = CpuLane("out", failure), CpuLane("back", failure)
    offload = out.submit(Copy(log=log, name="offload"), after=[gate])
    reload = back.submit(Copy(log=log, name="reload"), after=[offload])
    gate.set()
    reload.wait()
    assert [name for what, name in log if what == "start"] == ["offload", "reload"]
    out.close()
    back.close()


def test_a_paced_lane_is_never_faster_than_its_pace(failure):
    rate, nbytes = 200e6, 5_000_000
    lane = CpuLane("paced", failure, bytes_per_s=rate)
    begin = time.perf_counter()
    for n in range(3):
        lane.submit(Copy(nbytes), label=f"job {n}")
    lane.settle()
    assert time.perf_counter() - begin >= 3 * nbytes / rate
    log = lane.take_log(CpuClock())
    assert [transfer.label for transfer in log] == ["job 0", "job 1", "job 2"]
    for transfer in log:
        assert transfer.nbytes == nbytes
        assert transfer.submitted <= transfer.ready <= transfer.start <= transfer.end
        assert transfer.end - transfer.start >= nbytes / rate
        assert transfer.late_s == pytest.approx(transfer.end - transfer.start - nbytes / rate)
    assert lane.take_log(CpuClock()) == []
    lane.close()


def test_an_error_in_a_job_reaches_whoever_waits(lane, failure):
    class Broken(Copy):
        def start(self):
            raise ValueError("no memory left")

    first = lane.submit(Broken(), label="O(1,2)")
    second = lane.submit(Copy(), label="O(1,3)")
    for event in (first, second):
        with pytest.raises(RunFailed, match=r"O\(1,2\): ValueError: no memory left"):
            event.wait()
    assert isinstance(failure.first.__cause__, ValueError)


def test_the_first_failure_stays_the_first(failure):
    failure.report(ValueError("one"), "here")
    failure.report(KeyError("two"), "there")
    with pytest.raises(RunFailed, match="here: ValueError: one"):
        failure.check()


def test_a_wait_for_another_rank_ends(failure):
    with pytest.raises(PeerLost, match=r"waited 0\.05 s for the input"):
        CpuEvent(failure, "the input", 0.05).wait()


def test_callbacks_run_once_the_event_is_set(failure):
    event, seen = CpuEvent(failure), []
    event.then(lambda: seen.append("before"))
    assert seen == []
    thread = threading.Thread(target=event.set)
    thread.start()
    thread.join()
    event.then(lambda: seen.append("after"))
    assert seen == ["before", "after"]


@pytest.mark.parametrize("gated", [False, True])
def test_a_lane_of_a_failed_run_has_ended_once_it_is_closed(failure, gated):
    log = []
    slow = CpuLane("lane", failure, bytes_per_s=1 << 20)
    gate = [CpuEvent(failure)] if gated else []  # never comes
    slow.submit(Copy(100 << 20, log), after=gate)  # would take 100 s
    slow.submit(Copy(log=log))
    while not gated and not log:
        time.sleep(0.001)
    failure.report(RuntimeError("over"))
    slow.close()
    assert not slow._thread.is_alive()
    assert log == ([] if gated else [("start", "")])
