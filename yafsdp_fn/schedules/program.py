"""A program: a trace and the ops that execute it.

    Gather(units, slots)                 all-gather each unit's shard into its weight slot
    Forward(visit, slots, keep)          run a visit on the weights in `slots`; keep its graph, or recompute it later
    Backward(visit, slots, grad_slots)   its backward; the gradient of each trained unit goes to its gradient slot
    Reduce(units, grad_slots)            reduce-scatter each gradient slot and add the result to the gradient shard

A slot is a preallocated flat buffer; weight slots and gradient slots are numbered apart. A `Backward` adds when its
gradient slot already holds that unit's unreduced gradient, else it overwrites.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from yafsdp_fn.schedules.trace import Compute, Trace, Unit, Visit


class Gather(NamedTuple):
    """All-gathers: unit `units[i]` into weight slot `slots[i]`."""

    units: tuple[int, ...]
    slots: tuple[int, ...]


class Reduce(NamedTuple):
    """Reduce-scatters: the gradient of `units[i]` from gradient slot `grad_slots[i]`, which is free afterwards."""

    units: tuple[int, ...]
    grad_slots: tuple[int, ...]


class Forward(NamedTuple):
    """A visit's forward on the weights in `slots`, one for each unit of the visit. keep: its graph, or recompute it."""

    visit: int
    slots: tuple[int, ...]
    keep: bool


class Backward(NamedTuple):
    """A visit's backward on the weights in `slots`; one gradient slot for each unit that the visit trains."""

    visit: int
    slots: tuple[int, ...]
    grad_slots: tuple[int, ...]


class Update(NamedTuple):
    """The optimizer's step, as the scoreboard sees it. It follows the program; it is not one of its ops."""

    units: tuple[int, ...]


Op = Gather | Reduce | Forward | Backward
OPS: dict[str, type[Any]] = {op.__name__.lower(): op for op in (Gather, Reduce, Forward, Backward)}


class Program(NamedTuple):
    """What a schedule returns: the trace it was built from, and the ops in issue order."""

    trace: Trace
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return render(self)

    def slot_bytes(self) -> dict[int, int]:
        """Size of each weight slot: the largest unit it ever holds."""
        pairs = [pair for op in self.ops if isinstance(op, Gather) for pair in zip(*op, strict=True)]
        return _largest(pairs, {unit.id: unit.gather_bytes for unit in self.trace.units})

    def grad_slot_bytes(self) -> dict[int, int]:
        """Size of each gradient slot."""
        pairs = [pair for op in self.ops if isinstance(op, Reduce) for pair in zip(*op, strict=True)]
        return _largest(pairs, {unit.id: unit.reduce_bytes for unit in self.trace.units})

    def count(self, kind: type[Any]) -> int:
        """Collectives of one kind: the units of all its ops."""
        return sum(len(op.units) for op in self.ops if isinstance(op, Gather | Reduce) and type(op) is kind)

    def fingerprint(self) -> str:
        """A hash of what ranks must agree on: ops, units and visits, without measured costs."""
        visits = [(visit.units, visit.trained) for visit in self.trace.visits]
        text = json.dumps([self.trace.units, visits, self.trace.microbatches, self.trace.mesh, _ops_json(self)])
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The whole program as JSON, for checkpoints and for reading."""
        return json.dumps({"trace": self.trace._asdict(), "ops": _ops_json(self)})

    @staticmethod
    def from_json(text: str) -> Program:
        """The program that `to_json` wrote. Raises ValueError where `text` is not one."""
        try:
            data = json.loads(text)
            trace = data["trace"]
            built = Trace(
                units=tuple(Unit(*_tuples(unit)) for unit in trace["units"]),
                visits=tuple(Visit(*_tuples(visit)) for visit in trace["visits"]),
                order=tuple(Compute(*_tuples(compute)) for compute in trace["order"]),
                mesh=_tuples(trace["mesh"]),
                microbatches=trace["microbatches"],
            )
            return Program(built, tuple(OPS[name](*_tuples(fields)) for name, *fields in data["ops"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a program in JSON: {type(error).__name__}: {error}") from error


def _ops_json(program: Program) -> list[list[Any]]:
    return [[type(op).__name__.lower(), *op] for op in program.ops]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _largest(pairs: list[tuple[int, int]], size: dict[int, int]) -> dict[int, int]:
    """Slot -> bytes, from the `(unit, slot)` pairs of a kind of op."""
    out: dict[int, int] = {}
    for unit, slot in pairs:
        out[slot] = max(out.get(slot, 0), size[unit])
    return dict(sorted(out.items()))


def describe(op: Op, trace: Trace, microbatch: int | None = None) -> str:
    """One op in words: `gather layers[3] -> slot 1`."""

    def units(ids: tuple[int, ...]) -> str:
        return ", ".join(trace.units[unit].name for unit in ids)

    def slots(ids: tuple[int, ...]) -> str:
        return f"slot{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"

    match op:
        case Gather(ids, into):
            return f"gather {units(ids)} -> {slots(into)}"
        case Reduce(ids, source):
            return f"reduce {units(ids)} <- grad {slots(source)}"
        case Forward(visit, at, keep):
            detail = f"{slots(at)}, {'keep graph' if keep else 'recompute'}"
            name = f"forward {trace.visits[visit].name}"
        case Backward(visit, at, into):
            detail = slots(at) + (f" -> grad {slots(into)}" if into else "")
            name = f"backward {trace.visits[visit].name}"
    where = "" if microbatch is None or trace.microbatches == 1 else f" (microbatch {microbatch})"
    return f"{name}{where} in {detail}"


def render(program: Program) -> str:
    """The program as a table: one line per op, one column per stream."""
    trace = program.trace
    computes = iter(trace.order)
    rows = []
    for index, op in enumerate(program.ops):
        compute = next(computes, None) if isinstance(op, Forward | Backward) else None
        text = describe(op, trace, compute.microbatch if compute else None)
        column = 0 if isinstance(op, Gather) else 1 if compute else 2
        rows.append((index, column, text))
    width = [max([len(name), *(len(text) for _, column, text in rows if column == k)]) for k, name in enumerate(LANES)]
    lines = [f"{'op':>5}  " + "  ".join(name.ljust(width[k]) for k, name in enumerate(LANES))]
    for index, column, text in rows:
        cells = [(text if k == column else "").ljust(width[k]) for k in range(3)]
        lines.append(f"{index:>5}  {'  '.join(cells)}".rstrip())
    head = (
        f"program of {len(program.ops)} ops: {len(trace.visits)} visits, microbatches: {trace.microbatches}, "
        f"{program.count(Gather)} gathers, {program.count(Reduce)} reductions; "
        f"weight slots {_mib(program.slot_bytes())}, gradient slots {_mib(program.grad_slot_bytes())}"
    )
    return "\n".join([head, *(line.rstrip() for line in lines)])


LANES = ("gather stream", "compute", "reduce stream")


def _mib(sizes: dict[int, int]) -> str:
    return f"{len(sizes)} ({sum(sizes.values()) / 2**20:.1f} MiB)"
