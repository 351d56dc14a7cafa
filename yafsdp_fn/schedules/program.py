"""A program: a trace and the ops that execute it. It is verified, executed, printed, compared and saved as data."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from typing import Any, NamedTuple

from yafsdp_fn.schedules.ops import (
    OPS,
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Offload,
    Op,
    Reduce,
    Stash,
    Update,
    describe,
    stream_of,
    with_computes,
)
from yafsdp_fn.schedules.trace import Compute, Optimizer, Trace, Unit, Value, Visit


class Program(NamedTuple):
    """What a schedule returns: the trace it was built from, and the ops in issue order."""

    trace: Trace
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return render(self)

    def diff(self, other: Program) -> str:
        """The ops that differ, in words, as a unified diff; empty where all ops are equal."""
        mine, theirs = ([words for _, _, words in _rows(program)] for program in (self, other))
        return "\n".join(difflib.unified_diff(mine, theirs, "this", "other", lineterm="", n=2))

    @property
    def updates(self) -> bool:
        """Whether the optimizer's step is part of the program."""
        return any(isinstance(op, Update) for op in self.ops)

    @property
    def updates_early(self) -> bool:
        """Whether an update comes before the end of the backward."""
        found = [index for index, op in enumerate(self.ops) if isinstance(op, Update)]
        return bool(found) and any(isinstance(op, Forward | Backward) for op in self.ops[found[0] :])

    def carried(self) -> dict[int, int]:
        """Slot -> unit that it must hold when the program begins: what is read before any gather into the slot."""
        found: dict[int, int] = {}
        gathered: set[int] = set()
        for op in self.ops:
            match op:
                case Gather(_, slots, _):
                    gathered.update(slots)
                case Forward() | Backward() | Stash():
                    units = op.units if isinstance(op, Stash) else self.trace.visits[op.visit].units
                    for unit, slot in zip(units, op.slots, strict=True):
                        if slot not in gathered:
                            found.setdefault(slot, unit)
        return found

    def slot_bytes(self) -> dict[int, int]:
        """Size of each weight slot: the largest unit it ever holds."""
        pairs = [pair for op in self.ops if isinstance(op, Gather) for pair in zip(op.units, op.slots, strict=True)]
        pairs += [(unit, slot) for slot, unit in self.carried().items()]
        return _largest(pairs, {unit.id: unit.gather_bytes for unit in self.trace.units})

    def grad_slot_bytes(self) -> dict[int, int]:
        """Size of each gradient slot."""
        pairs = [pair for op in self.ops if isinstance(op, Reduce) for pair in zip(*op, strict=True)]
        return _largest(pairs, {unit.id: unit.reduce_bytes for unit in self.trace.units})

    def carry_slot_bytes(self) -> dict[int, int]:
        """Size of each carry slot: the most that a visit saves in it, zero where nothing has measured that."""
        ops = [op for op in self.ops if isinstance(op, Forward | Fetch)]
        pairs = [(op.visit, op.carry_slot) for op in ops if op.carry_slot is not None]
        return _largest(pairs, {visit.id: visit.carry_slot_bytes for visit in self.trace.visits})

    def host_bytes(self) -> dict[int, int]:
        """Visit -> size of its buffer on the host, zero where nothing has measured what it saves."""
        ids = {op.visit for op in self.ops if isinstance(op, Offload)}
        return {visit: self.trace.visits[visit].carry_slot_bytes for visit in sorted(ids)}

    def secondary_bytes(self) -> dict[int, int]:
        """Unit -> size of its secondary shard."""
        units = [unit for op in self.ops if isinstance(op, Stash) for unit in op.units]
        return {unit: self.trace.units[unit].gather_bytes // self.trace.local_ranks for unit in sorted(units)}

    def count(self, kind: type[Any], source: str | None = None) -> int:
        """Collectives of one kind of op, `Gather` say: one for each of its units. source: of gathers from there."""
        if "units" not in getattr(kind, "_fields", ()) or (source is not None and kind is not Gather):
            raise TypeError(
                f"count({kind.__name__}, {source}): expected a kind of op that has units; a source for Gather"
            )
        found: list[Any] = [op for op in self.ops if type(op) is kind]
        return sum(len(op.units) for op in found if source is None or op.source == source)

    def wire_bytes(self) -> Counter[str]:
        """Bytes that each rank sends in a step, by kind of collective; a step's few scalars are not counted.

        A collective over k ranks of a vector of b bytes sends (k - 1) / k of b, an all-reduce twice that.
        """
        ranks, replicas, local = self.trace.ranks, self.trace.replicas, self.trace.local_ranks
        sent: Counter[str] = Counter()
        for op in self.ops:
            if isinstance(op, Gather | Reduce | AllReduce):
                units = [self.trace.units[unit] for unit in op.units]
                match op:
                    case Gather(source="shard"):
                        sent["gather"] += sum(u.gather_bytes // ranks * (ranks - 1) for u in units)
                    case Gather():
                        sent["gather in node"] += sum(u.gather_bytes // local * (local - 1) for u in units)
                    case Reduce():
                        sent["reduce"] += sum(u.reduce_bytes // ranks * (ranks - 1) for u in units)
                    case AllReduce():
                        twice = [u.reduce_bytes + (u.sum_bytes or u.reduce_bytes) for u in units]
                        sent["all-reduce"] += sum(b // ranks * (replicas - 1) // replicas for b in twice)
        return sent

    def fingerprint(self) -> str:
        """A hash of what ranks must agree on: ops, units and visits, without measured costs."""
        trace = self.trace
        visits = [(visit.units, visit.trained) for visit in trace.visits]
        text = json.dumps([trace.units, visits, trace.microbatches, trace.mesh, trace.updates, _ops_json(self)])
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
                visits=tuple(_visit(_tuples(visit)) for visit in trace["visits"]),
                order=tuple(Compute(*_tuples(compute)) for compute in trace["order"]),
                mesh=_tuples(trace["mesh"]),
                microbatches=trace["microbatches"],
                updates=trace["updates"],
                precision=_tuples(trace.get("precision", [])),
                optimizer=Optimizer(*_tuples(trace.get("optimizer", []))),
            )
            return Program(built, tuple(OPS[name](*_tuples(fields)) for name, *fields in data["ops"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a program in JSON: {type(error).__name__}: {error}") from error


def _ops_json(program: Program) -> list[list[Any]]:
    return [[type(op).__name__.lower(), *op] for op in program.ops]


def _visit(fields: Any) -> Visit:
    visit = Visit(*fields)
    takes, gives = (tuple(Value(*value) for value in values) for values in (visit.takes, visit.gives))
    return visit._replace(takes=takes, gives=gives)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _largest(pairs: list[tuple[int, int]], size: dict[int, int]) -> dict[int, int]:
    """Slot -> bytes, from the pairs `(what is in it, slot)` of a kind of op."""
    out: dict[int, int] = {}
    for unit, slot in pairs:
        out[slot] = max(out.get(slot, 0), size.get(unit, 0))
    return dict(sorted(out.items()))


LANES = {
    "gather": "gather stream",
    "compute": "compute",
    "reduce": "reduce stream",
    "replicate": "replicate stream",
    "offload": "offload stream",
}


def _rows(program: Program) -> list[tuple[int, str, str]]:
    """`(number, stream, words)` of every op."""
    rows = []
    for index, (op, compute) in enumerate(with_computes(program.ops, program.trace)):
        words = describe(op, program.trace, compute.microbatch if compute else None)
        rows.append((index, stream_of(op), words))
    return rows


def render(program: Program) -> str:
    """The program as a table: one line per op, one column per stream."""
    rows = _rows(program)
    lanes = [(stream, name) for stream, name in LANES.items() if any(row[1] == stream for row in rows)]
    width = {s: max(len(name), *(len(words) for _, at, words in rows if at == s)) for s, name in lanes}
    lines = [f"{'op':>5}  " + "  ".join(name.ljust(width[stream]) for stream, name in lanes)]
    for index, at, words in rows:
        lines.append(f"{index:>5}  " + "  ".join((words if at == s else "").ljust(width[s]) for s, _ in lanes))
    try:
        head = _summary(program)
    except (IndexError, TypeError, ValueError):  # it is printed because it is wrong
        head = f"program of {len(program.ops)} ops, not all in form: verify says which"
    return "\n".join([head, *(line.rstrip() for line in lines)])


def _summary(program: Program) -> str:
    """What the ops amount to."""
    trace = program.trace
    head = (
        f"program of {len(program.ops)} ops: {len(trace.visits)} visits, microbatches: {trace.microbatches}, "
        f"{program.count(Gather)} gathers, {program.count(Reduce)} reductions; "
        f"weight slots {_mib(program.slot_bytes())}, gradient slots {_mib(program.grad_slot_bytes())}"
    )
    if host := program.host_bytes():
        head += f"\noffloaded visits: {_mib(host)}, carry slots {_mib(program.carry_slot_bytes())}"
    if carried := program.carried():
        held = ", ".join(f"{trace.units[unit].name} in slot {slot}" for slot, unit in sorted(carried.items()))
        head += f"\ncarried over from the step before: {held}"
    return head


def _mib(sizes: dict[int, int]) -> str:
    return f"{len(sizes)} ({sum(sizes.values()) / 2**20:.1f} MiB)"
