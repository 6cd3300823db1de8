"""An independent model for tests: time in whole steps, one binary for each op and start, nothing assumed of the orders.

Slow and simple on purpose: it shares no row with the formulation that it checks.
"""

from __future__ import annotations

import highspy
import numpy as np

from optpipe.problem import Problem


class _Program:
    def __init__(self) -> None:
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def binary(self, cost: float = 0.0) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        self.rows.append((terms, low, high))

    def solve(self) -> float | None:
        n = len(self.costs)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n, len(self.rows)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(self.costs), np.zeros(n), np.ones(n)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * n
        lp.row_lower_ = np.array([row[1] for row in self.rows])
        lp.row_upper_ = np.array([row[2] for row in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0] + [len(row[0]) for row in self.rows]).astype(np.int32)
        lp.a_matrix_.index_ = np.array([c for row in self.rows for c in row[0]], np.int32)
        lp.a_matrix_.value_ = np.array([float(v) for row in self.rows for v in row[0].values()])
        self.solver.passModel(lp)
        self.solver.run()
        if self.solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return float(self.solver.getInfo().objective_function_value)


def optimum(problem: Problem, horizon: int, *, ascending: bool, parts: int = 1, fuse: bool = False) -> float | None:
    """The least makespan in whole ms, or None if there is none within ``horizon``. Times must be whole numbers of ms,
    durations at least 1 (W, O and R may take none).

    Parameters
    ----------
    ascending
        Microbatches of every stage and kind in order.
    parts
        A transfer may move 1/parts, 2/parts, ... of what can be offloaded, in times that must be whole too.
    fuse
        BW may take the place of B and W.
    """
    program = _Program()
    steps = range(horizon + 1)
    inf = highspy.kHighsInf
    m = problem.num_microbatches
    last = [program.binary(1.0) for _ in range(horizon)]  # last[t]: something runs after step t
    for t in range(horizon - 1):
        program.row({last[t]: 1, last[t + 1]: -1}, 0, inf)
    x: dict[tuple[str, int, int], list[int]] = {}
    took: dict[tuple[str, int, int], int] = {}

    def add(kind: str, s: int, j: int, duration: float) -> None:
        key = (kind, s, j)
        took[key] = round(duration)
        x[key] = [program.binary() for _ in steps]
        program.row(dict.fromkeys(x[key], 1.0), 0, 1)
        for t in steps:
            if t + took[key] > horizon:
                program.row({x[key][t]: 1}, 0, 0)
            elif t + took[key] > 0:
                program.row({x[key][t]: 1, last[t + took[key] - 1]: -1}, -inf, 0)

    def same(key: tuple[str, int, int], other: dict[int, float], right: float) -> None:
        """The op runs just if ``other`` sums to ``right`` less 0 or 1."""
        terms = dict.fromkeys(x[key], 1.0)
        for c, v in other.items():
            terms[c] = terms.get(c, 0.0) + v
        program.row(terms, right, right)

    def after(first: tuple[str, int, int], second: tuple[str, int, int], lag: float = 0.0) -> None:
        """If both run, the second starts at least ``lag`` after the end of the first."""
        wait = took[first] + round(lag)
        for t in steps:
            # The second has started by t and the first runs: then the first has started by t - wait.
            terms = {x[second][u]: 1.0 for u in range(t + 1)}
            for u in steps:
                if u > t - wait:
                    terms[x[first][u]] = terms.get(x[first][u], 0.0) + 1.0
            program.row(terms, -inf, 1)

    for s, stage in enumerate(problem.stages):
        for j in range(m):
            add("F", s, j, stage.forward_ms)
            add("B", s, j, stage.backward_ms)
            add("W", s, j, stage.weight_ms)
            same(("F", s, j), {}, 1)
            fused: dict[int, float] = {}
            if fuse and stage.bw_ms < stage.backward_ms + stage.weight_ms:
                add("BW", s, j, stage.bw_ms)
                fused = dict.fromkeys(x["BW", s, j], 1.0)
            same(("B", s, j), fused, 1)
            same(("W", s, j), fused, 1)
            if problem.can_offload(s):
                for q in range(1, parts + 1):
                    add(f"O{q}", s, j, stage.offload_ms * q / parts)
                    add(f"R{q}", s, j, stage.reload_ms * q / parts)
                    same((f"O{q}", s, j), dict.fromkeys(x[f"R{q}", s, j], -1.0), 0)
                program.row({c: 1.0 for q in range(1, parts + 1) for c in x[f"O{q}", s, j]}, 0, 1)
    transfers = [f"{k}{q}" for k in "OR" for q in range(1, parts + 1)]
    for s in range(problem.num_stages):
        for j in range(m):
            for backward in ("B", "BW"):
                if (backward, s, j) not in x:
                    continue
                after(("F", s, j), (backward, s, j))
                for above in ("B", "BW"):
                    if (above, s + 1, j) in x:
                        after((above, s + 1, j), (backward, s, j), problem.comm_ms[s])
                for q in range(1, parts + 1):
                    if (f"R{q}", s, j) in x:
                        after((f"R{q}", s, j), (backward, s, j))
            after(("B", s, j), ("W", s, j))
            if s + 1 < problem.num_stages:
                after(("F", s, j), ("F", s + 1, j), problem.comm_ms[s])
            for q in range(1, parts + 1):
                if (f"O{q}", s, j) in x:
                    after(("F", s, j), (f"O{q}", s, j))
                    after((f"O{q}", s, j), (f"R{q}", s, j))
            if ascending and j:
                after(("F", s, j - 1), ("F", s, j))
                after(("W", s, j - 1), ("W", s, j))
                for one in ("B", "BW"):
                    for other in ("B", "BW"):
                        if (one, s, j - 1) in x and (other, s, j) in x:
                            after((one, s, j - 1), (other, s, j))
    _lanes(program, problem, x, took, transfers, steps)
    _memory(program, problem, x, took, parts, steps)
    return program.solve()


def _lanes(program, problem, x, took, transfers, steps) -> None:  # type: ignore[no-untyped-def]
    """One op at a time on a device and on a channel."""

    def exclusive(keys) -> None:  # type: ignore[no-untyped-def]
        for t in steps:
            terms = {x[k][u]: 1.0 for k in keys for u in range(max(0, t - took[k] + 1), t + 1) if took[k]}
            if len(terms) > 1:
                program.row(terms, 0, 1)
        # An op without a duration may stand at the ends of others, not inside them.
        for k in keys:
            if took[k] == 0:
                for t in steps:
                    terms = {x[k][t]: 1.0}
                    terms |= {x[o][u]: 1.0 for o in keys if took[o] > 1 for u in range(max(0, t - took[o] + 1), t)}
                    if len(terms) > 1:
                        program.row(terms, 0, 1)

    for d in range(problem.num_devices):
        exclusive([k for k in x if problem.stages[k[1]].device == d and k[0] in ("F", "B", "W", "BW")])
    for channel in problem.channels:
        carried = {(t.device, "O" if t.direction == "d2h" else "R") for t in channel.transfers}
        exclusive([k for k in x if k[0] in transfers and (problem.stages[k[1]].device, k[0][0]) in carried])


def _memory(program, problem, x, took, parts, steps) -> None:  # type: ignore[no-untyped-def]
    """At every step, takes at or before it less frees at or before it fit."""
    for d, device in enumerate(problem.devices):
        if device.memory_bytes is None:
            continue
        keys = [k for k in x if problem.stages[k[1]].device == d]
        for t in steps:
            terms: dict[int, float] = {}
            for key in keys:
                kind, s, _ = key
                stage = problem.stages[s]
                a, c, g = stage.activation_bytes, stage.weight_context_bytes, stage.offloadable_bytes
                share = int(kind[1:]) / parts if kind[0] in "OR" else 0.0
                size, at_end = {
                    "F": (a, False),
                    "B": (c - a, True),
                    "W": (-c, True),
                    "BW": (-a, True),
                }.get(kind, (-g * share, True) if kind[0] == "O" else (g * share, False))
                upto = t - took[key] if at_end else t
                for u in range(upto + 1):
                    terms[x[key][u]] = terms.get(x[key][u], 0.0) + size
            if terms:
                program.row(terms, -highspy.kHighsInf, device.memory_bytes)
