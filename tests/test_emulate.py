import torch

from optpipe.ops import Kind
from runtime.emulate import SleepStage
from runtime.executor import Executor
from tests.pipelines import model_problem, plan_of_orders


def test_a_sleeping_stage_takes_its_time_and_moves_its_bytes():
    saved = 1 << 16
    stage = SleepStage(2.0, 3.0, 4.0, (2, 3), saved)
    least = {Kind.F: 2.0, Kind.B: 3.0, Kind.W: 4.0, Kind.BW: 7.0}
    order = [(Kind.F, 0, 0), (Kind.F, 0, 1), (Kind.B, 0, 0), (Kind.W, 0, 0), (Kind.BW, 0, 1)]
    plan = plan_of_orders(model_problem(1, microbatches=2), [order], {(0, 0)})
    executor = Executor(plan, {0: stage}, [], lambda output, target: output.sum())
    result = executor.step([torch.zeros(2, 3)] * 2, [torch.zeros(1)] * 2)
    executor.close()
    for op in result.ops:
        if op.kind in least:
            assert op.end - op.start >= least[op.kind]
        else:
            assert op.bytes == saved
    assert len(result.ops) == len(plan.ops)
