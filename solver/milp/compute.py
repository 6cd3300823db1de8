"""Rows of compute: data dependencies, one op at a time on a device, and the objective."""

from __future__ import annotations

import numpy as np

from optpipe.ops import Kind
from solver.milp.model import DeviceOrder, Meaning, Model
from solver.milp.precedence import DevicePrecedence
from solver.milp.sparse import INF


def add_dependencies(model: Model) -> None:
    """F(s, j) before F(s + 1, j), B(s + 1, j) before B(s, j). (F before B before W is an order on one device.)"""
    problem, table = model.problem, model.table
    for s in range(problem.num_stages - 1):
        lag = problem.comm_ms[s]
        model.after("data_{}_{}", table.ops(Kind.F, s), table.ops(Kind.F, s + 1), lag)
        model.after("data_{}_{}", table.ops(Kind.B, s + 1), table.ops(Kind.B, s), lag)


def add_exclusivity(model: Model, precedence: DevicePrecedence) -> None:
    """One op at a time on a device: rows for what is sure, and for each open pair a bit with two big-M rows.

    For x < y in the device's list the bit says that y runs before x: all bits 0 is every F, then every B, then every
    W. Both big M's come from the windows of the two ops.
    """
    device = add_sure_order(model, precedence)
    ops = precedence.ops
    x, y = np.nonzero(np.triu(precedence.open))
    columns = model.add_bits("{}_before_{}", Meaning.ORDER, ops[y], ops[x])
    model.after("order_{}_{}", ops[y], ops[x], bit=columns, when=1)
    model.after("order_{}_{}", ops[x], ops[y], bit=columns, when=0)
    device.column[x, y] = device.column[y, x] = columns
    device.const[x, y], device.sign[x, y] = 1.0, -1.0
    device.sign[y, x] = 1.0


def add_sure_order(model: Model, precedence: DevicePrecedence) -> DeviceOrder:
    """The next device: rows for what is sure of its order; other ops may overlap."""
    ops = precedence.ops
    n = len(ops)
    x, y = np.nonzero(precedence.reduced())
    model.after("sure_{}_{}", ops[x], ops[y])
    place = np.full(model.table.num_ops, -1, np.int64)
    place[ops] = np.arange(n)
    const = precedence.sure.astype(np.float64)
    device = DeviceOrder(const, np.zeros((n, n)), np.full((n, n), -1, np.int64), precedence, place)
    model.devices.append(device)
    return device


def add_objective(model: Model) -> None:
    """The objective is at least the end of every device's last ops; for the span less the start of its first op."""
    table = model.table
    last = table.microbatches - 1
    ops = np.array([table.ops(Kind.W, s)[last] for s in range(model.problem.num_stages)])
    terms = [
        (np.full(len(ops), model.end_of_all), model.per_unit),
        (model.start[ops], -1.0),
        (model.decision[ops], -model.scale[ops]),
    ]
    if model.objective == "span":
        device = np.array([stage.device for stage in model.problem.stages])
        terms.append((model.start[model.first_op[device]], 1.0))
    model.builder.rows("end_{}", (ops,), model.base[ops], INF, terms)
