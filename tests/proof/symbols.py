"""What the steps of a program must give, as symbols.

Weights are `(unit, version)`, gradients multisets of contributions. A contribution is (visit, microbatch, unit, the
weights that its backward read); it counts once per replica.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.schedules import Program, Trace

STEPS = 3
Memory = dict[Buffer, Any]
Result = dict[Buffer, Any]
"""`("forward" or "backward", step, visit, microbatch)`: the weights that it read; `("update", step, unit)`: shard,
gradient and norm; `("measured", step)`: norm, of each
unit's gradient; `("shard", unit)`: at the end."""
RESULTS = ("forward", "backward", "update", "measured", "shard")


def expected(program: Program, leaves: bool = False) -> Result:
    """What the steps must give: every compute reads its units' weights of that step, every gradient counts once.

    leaves: whether the loss reads leaves beside its visits, of all trainable units, visited or not
    """
    trace, result = program.trace, Result()

    def weights(visit: int, step: int) -> tuple[Any, ...]:
        return tuple((unit, step * trace.units[unit].trainable) for unit in trace.visits[visit].units)

    for step in range(STEPS):
        grads = {unit.id: Counter[Any]() for unit in trace.units if unit.trainable}
        for kind, visit, microbatch, _ in trace.order:
            result[kind, step, visit, microbatch] = weights(visit, step)
            if kind == "backward":
                for unit in trace.visits[visit].trained:
                    grads[unit][visit, microbatch, unit, weights(visit, step)] += trace.replicas
        for unit, grad in grads.items():
            if leaves and trace.trains:
                grad["leaf", unit] += trace.replicas
        norm = norm_of(grads)
        result["measured", step] = norm
        for unit, grad in grads.items():
            result["update", step, unit] = ((unit, step), grad, norm)
    return result | {("shard", unit.id): (unit.id, STEPS * unit.trainable) for unit in trace.units}


def norm_of(grads: dict[int, Any]) -> Any:
    """The norm of these gradients, unit -> gradient: a symbol that tells them apart."""
    return {
        unit: frozenset(g.items()) if isinstance(g, Counter) else ("not a gradient", g) for unit, g in grads.items()
    }


def beginning(trace: Trace) -> Memory:
    """Memory before the first step; all else holds nothing that is known."""
    return {("shard", unit.id): (unit.id, 0) for unit in trace.units}


def outcome(memory: Memory) -> Result:
    """What the steps gave, of all that is in memory."""
    return {buffer: value for buffer, value in memory.items() if buffer[0] in RESULTS}
