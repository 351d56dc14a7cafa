"""The ops of a program, as data.

    Gather(units, slots, source)         all-gather each unit into its weight slot, from all ranks or inside the node
    Stash(units, slots)                  keep this rank's part of each slot, for gathers inside the node
    Forward(visit, slots, keep)          run a visit on the weights in `slots`; keep its graph, or recompute it later
    Backward(visit, slots, grad_slots)   its backward; the gradient of each trained unit goes to its gradient slot
    Reduce(units, grad_slots)            reduce-scatter each gradient slot and add the result to the gradient shard
    AllReduce(units)                     sum gradient shards over replicas
    Norm(units)                          the norm of the whole gradient, over all ranks
    Update(units)                        the optimizer's step on the units' shards
    Offload(visit, carry_slot)           move what the visit has saved from its carry slot to the host
    Fetch(visit, carry_slot)             move it back, into a carry slot that its backward reads

A slot is a preallocated flat buffer; weight slots, gradient slots and carry slots are numbered apart. A `Backward` adds
when its gradient slot already holds that unit's unreduced gradient, else it overwrites. A slot that is read before the
program gathers into it is carried over from the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from yafsdp_fn.schedules.trace import Compute, Trace

AnyOp = TypeVar("AnyOp")


class Gather(NamedTuple):
    """All-gathers: unit `units[i]` into weight slot `slots[i]`.

    source: "shard": from the shards of all ranks; "node": from the secondary shards of the ranks of one node
    """

    units: tuple[int, ...]
    slots: tuple[int, ...]
    source: Literal["shard", "node"] = "shard"


class Stash(NamedTuple):
    """Copies this rank's part of weight slot `slots[i]` into the secondary shard of `units[i]`.

    A node's ranks together hold the whole unit: the part is 1 / local ranks of it.
    """

    units: tuple[int, ...]
    slots: tuple[int, ...]


class Forward(NamedTuple):
    """A visit's forward on the weights in `slots`, one for each unit of the visit. keep: its graph, or recompute it.

    carry_slot: where it saves the scan's carry for its recomputation; None where the carry stays where it is
    """

    visit: int
    slots: tuple[int, ...]
    keep: bool
    carry_slot: int | None = None


class Backward(NamedTuple):
    """A visit's backward on the weights in `slots`; one gradient slot for each unit that the visit trains.

    carry_slot: where it finds the carry that its forward saved in one
    """

    visit: int
    slots: tuple[int, ...]
    grad_slots: tuple[int, ...]
    carry_slot: int | None = None


class Reduce(NamedTuple):
    """Reduce-scatters: the gradient of `units[i]` from gradient slot `grad_slots[i]`, which is free afterwards."""

    units: tuple[int, ...]
    grad_slots: tuple[int, ...]


class AllReduce(NamedTuple):
    """Sums the gradient shards of `units` over replicas, in place: once, when they are complete."""

    units: tuple[int, ...]


class Norm(NamedTuple):
    """The norm of the gradient of `units`, all that are trained: what clipping and the skip of a step wait for."""

    units: tuple[int, ...]


class Update(NamedTuple):
    """The optimizer's step on the shards of `units`, and the refresh of their working copies.

    A program without updates is followed by one of all units.
    """

    units: tuple[int, ...]


class Offload(NamedTuple):
    """Copies the carry of `visit` from `carry_slot`, which is free afterwards, to the visit's buffer on the host."""

    visit: int
    carry_slot: int


class Fetch(NamedTuple):
    """Copies the carry of `visit` from its buffer on the host to `carry_slot`."""

    visit: int
    carry_slot: int


Op = Gather | Stash | Forward | Backward | Reduce | AllReduce | Norm | Update | Offload | Fetch
OPS: dict[str, type[Any]] = {
    op.__name__.lower(): op
    for op in (Gather, Stash, Forward, Backward, Reduce, AllReduce, Norm, Update, Offload, Fetch)
}

STREAM = dict.fromkeys((Forward, Backward, Norm, Update), "compute") | {
    Gather: "gather",
    Stash: "gather",
    Reduce: "reduce",
    AllReduce: "replicate",
    Offload: "offload",
    Fetch: "offload",
}


def stream_of(op: Op) -> str:
    """Where it runs. A copy of a peer, which is no op of a program that runs, says so itself (`planner.costs.Copy`)."""
    stream: str | None = getattr(op, "stream", None)
    return stream or STREAM[type(op)]


def units_of(op: Op, trace: Trace) -> tuple[int, ...]:
    """The units that an op names, or its visit uses."""
    return trace.visits[op.visit].units if isinstance(op, Forward | Backward | Offload | Fetch) else op.units


def with_computes(ops: Iterable[AnyOp], trace: Trace) -> Iterator[tuple[AnyOp, Compute | None]]:
    """Each op, with the compute of `trace` that it is: None for what is none, and beyond those that the trace has."""
    computes = iter(trace.order)
    for op in ops:
        yield op, next(computes, None) if isinstance(op, Forward | Backward) else None


def describe(op: Op, trace: Trace, microbatch: int | None = None) -> str:
    """One op in words: `gather layers[3] -> slot 1`; as Python shows it where it names what does not exist."""
    try:
        return _in_words(op, trace, microbatch)
    except (IndexError, TypeError):
        return repr(op)


def _in_words(op: Op, trace: Trace, microbatch: int | None) -> str:
    def units(ids: tuple[int, ...]) -> str:
        return ", ".join(trace.units[unit].name for unit in ids)

    def slots(ids: tuple[int, ...]) -> str:
        return f"slot{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"

    match op:
        case Gather(ids, into, source):
            return f"gather {units(ids)}{' in node' if source == 'node' else ''} -> {slots(into)}"
        case Stash(ids, at):
            return f"stash {units(ids)} <- {slots(at)}"
        case Reduce(ids, at):
            return f"reduce {units(ids)} <- grad {slots(at)}"
        case AllReduce(ids):
            return f"all-reduce {units(ids)}"
        case Norm(ids):
            return f"norm of {len(ids)} units"
        case Update(ids):
            return f"update {units(ids)}"
        case Offload(visit, carry):
            return f"offload {trace.visits[visit].name} <- carry slot {carry}"
        case Fetch(visit, carry):
            return f"fetch {trace.visits[visit].name} -> carry slot {carry}"
        case Forward(visit, at, keep, carry):
            detail = f"{slots(at)}, {'keep graph' if keep else 'recompute'}"
            detail += "" if carry is None else f", save in carry slot {carry}"
            name = f"forward {trace.visits[visit].name}"
        case Backward(visit, at, into, carry):
            detail = slots(at) + ("" if carry is None else f", carry slot {carry}")
            detail += f" -> grad {slots(into)}" if into else ""
            name = f"backward {trace.visits[visit].name}"
        case _ if hasattr(op, "stream"):
            return f"copy {units(op.units)}".strip()
        case _:
            return repr(op)
    where = "" if microbatch is None or trace.microbatches == 1 else f" (microbatch {microbatch})"
    return f"{name}{where} in {detail}"
