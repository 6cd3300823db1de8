"""The order of a schedule as plain text, in Megatron's terms: ranks, microbatches, and model chunks of a rank.

    rank 0: F0.0 F1.0 F0.1 B0.1 W0.1 ...

An op is its kind (F, B, W; BW both backwards in one), its microbatch and, behind the point, its model chunk: the
number of the stage among those of its rank.
"""

from __future__ import annotations

from optpipe.interchange import orders
from optpipe.ops import Kind
from optpipe.plan import Plan


def text_of(plan: Plan) -> str:
    """The orders of a plan without offload and recomputation, one line a rank.

    Raises
    ------
    ValueError
        The plan has ops that the text cannot say.
    """
    problem = plan.problem
    if (plan.ops.kind >= Kind.C).any():
        raise ValueError("offloads, reloads and recomputation have no words in an order of F, B and W")
    lines = [
        f"# {problem.num_devices} ranks, {problem.num_stages} stages, {problem.num_microbatches} microbatches; "
        "kind, microbatch . model chunk"
    ]
    for rank, order in enumerate(orders.orders_of(problem, plan.ops)):
        chunk = {stage: number for number, stage in enumerate(problem.stages_of[rank])}
        lines.append(f"rank {rank}: " + " ".join(f"{op.kind.name}{op.microbatch}.{chunk[op.stage]}" for op in order))
    return "\n".join(lines) + "\n"
