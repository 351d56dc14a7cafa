"""Programs: a trace and the ops that execute it; and of a step that is cut into stages, a program for each."""

import dataclasses
import difflib
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from yafsdp_fn.program import json, ops, text
from yafsdp_fn.program.ops import ComputeOp, Exchange, Norm, Op, Update, filled, kind_of
from yafsdp_fn.program.split import LINE, Call
from yafsdp_fn.program.trace import Compute, Lent, Trace, UnitSpec, Visit, closing, elsewhere
from yafsdp_fn.util.mesh_axes import MeshAxes, padded_numel, round_up, subgroups
from yafsdp_fn.util.owners import Leaf, assign

# ---- What the optimizer's exchanges move, from leaves as they were measured.


def lent_bytes(trace: Trace, units: tuple[int, ...]) -> int:
    """Returns the bytes that a rank sends in an exchange of `units`, on average; zero where nothing has measured their
    leaves."""
    away = _away(trace.lent, trace.units, trace.ranks, trace.inside)
    return sum(away.get(unit, 0) for unit in units) // trace.ranks


@lru_cache(maxsize=64)
def _away(lent: tuple[Lent, ...], units: tuple[UnitSpec, ...], ranks: int, inside: MeshAxes) -> dict[int, int]:
    """Returns unit -> bytes that all ranks send in one exchange: those of its leaves that owners lack."""
    # where the leaves are, and who owns them
    found = []
    for unit, _, measured in lent:
        spec = units[unit]
        holders = subgroups(ranks, dict(inside), across=spec.over)  # of each part of the unit
        shards = len(holders[0])
        leaves = [Leaf("", offset, shape, 0, len(holders)) for offset, shape, _, _ in measured]
        found.append((unit, padded_numel(spec.numel, shards, spec.align) // shards, leaves, holders))
    owners = assign(found, ranks)
    # of each leaf, what its owner has not got
    out: dict[int, int] = {}
    for (unit, n, leaves, holders), of in zip(found, lent, strict=True):
        shard_of = {rank: shard for members in holders for shard, rank in enumerate(members)}
        away = 0.0
        for leaf, owner, (_, _, nbytes, _) in zip(leaves, owners[unit], of.leaves, strict=True):
            here = len(leaf.in_shard(shard_of[owner], n))
            away += (1 - here / max(math.prod(leaf.shape), 1)) * nbytes
        out[unit] = round(away)
    return out


# ---- The order of the optimizer's step: one unit after the other; of an update in several parts one part at a time.
#
#     update a, part 0; exchange a      update b, part 0; exchange b; update a, part 1; exchange a      ...
#
# While the leaves of one unit travel to their owners, those of the unit before are worked on.


def update_turns(parts: Mapping[int, int]) -> Iterator[tuple[list[Op], list[int]]]:
    """Yields the ops of updates, and the units that these complete, turn by turn: a turn begins with one more unit, and
    goes on by one part with those that are between two.

    parts: unit -> the number of parts of its update, in the order in which updates begin; 0 where there is no update
    """
    between: dict[int, int] = {}  # unit -> its next part
    waiting = deque(parts)
    while waiting or between:
        turn = [*between]
        if waiting:
            turn.insert(0, waiting.popleft())
        if not parts[turn[0]]:
            yield [], turn[:1]
            continue
        ops: list[Op] = []
        done: list[int] = []
        for unit in turn:
            part = between.pop(unit, 0)
            ops.append(Update((unit,), part))
            if part + 1 == parts[unit]:
                done.append(unit)
            else:
                ops.append(Exchange((unit,), part))
                between[unit] = part + 1
        yield ops, done


def after_program(trained: tuple[int, ...], lent: Iterable[Lent]) -> list[Op]:
    """Returns the norm and the updates that follow a program without updates."""
    parts = {of.unit: of.parts for of in lent}
    whole = tuple(unit for unit in trained if unit not in parts)
    ops: list[Op] = [Norm(trained)]
    if whole or not parts:
        ops.append(Update(whole))
    for turn, _ in update_turns(parts):
        ops += turn
    return ops


# ---- The trace of one stage, out of that of the whole step: its computes, in the order of its calls.
#
# calls of a stage    F0 F1 B0 F2 B1 B2
# order               forwards of the segment's visits, microbatch 0; ... ; backwards in reverse, microbatch 0; ...


def stage_trace(trace: Trace, stage: int, calls: Iterable[Call]) -> Trace:
    """Returns the trace of `stage`, in the order of `calls`. Any schedule builds a program from it."""
    return _stage_trace(trace, stage, _computes(trace, calls))


def stage_trace_of_ops(trace: Trace, stage: int, ops: Iterable[Any]) -> Trace:
    """Returns the trace of `stage`, in the order of the computes among its `ops`, but those that are not in form."""
    order: list[Compute] = []
    for op in ops:
        in_form = isinstance(op, ComputeOp) and type(op.visit) is type(op.microbatch) is int
        if in_form and op.visit in range(len(trace.visits)):
            order.append(Compute(kind_of(op), op.visit, op.microbatch))
    return _stage_trace(trace, stage, order)


def _stage_trace(trace: Trace, stage: int, order: Iterable[Compute]) -> Trace:
    """Returns the trace of `stage`, whose computes are in this order."""
    assert trace.stage is None, "a whole step"
    held = units_of(trace, stage)
    here = trace.cut.visits_on(stage)
    # visits and units of others keep their numbers
    visits = tuple(v if v.id in here else Visit(v.id, v.name, (), ()) for v in trace.visits)
    units = tuple(unit if unit.id in held else elsewhere(unit) for unit in trace.units)
    between = tuple(each for each in trace.between if max(each.after, 0) in here)
    lent = tuple(of for of in trace.lent if of.unit in held)
    optimizer = trace.optimizer._replace(shards=_of_units(trace, held))
    own = trace._replace(units=units, visits=visits, between=between, stage=stage, lent=lent, optimizer=optimizer)
    return own._replace(order=closing(list(order), visits))


def units_of(trace: Trace, stage: int) -> frozenset[int]:
    """Returns the units that `stage` holds: those that its visits use, and, of those that no visit uses, its own."""
    split = trace.cut
    home = dict(split.unused)
    held = {unit.id for unit in trace.units if home.get(unit.id, 0) == stage}
    for visit in trace.visits:
        held.difference_update(visit.units)
    for number in split.visits_on(stage):
        held.update(trace.visits[number].units)
    return frozenset(held)


def _of_units(trace: Trace, held: frozenset[int]) -> tuple[tuple[int, int, int], ...]:
    """Returns `OptimizerMemory.shards` of the units in `held`: of units of one size alike."""
    sizes = [
        (unit.numel, trace.ranks // trace.ranks_of(unit), unit.id in held) for unit in trace.units if unit.trainable
    ]
    found: list[tuple[int, int, int]] = []
    for numel, nbytes, parts in trace.optimizer.shards:
        alike = [here for *size, here in sizes if size == [numel, parts]]
        if any(alike):
            found.append((numel, nbytes * sum(alike) // len(alike), parts))
    return tuple(found)


def _computes(trace: Trace, calls: Iterable[Call]) -> Iterator[Compute]:
    """Yields the computes of calls, one after the other."""
    for kind, segment, microbatch in calls:
        visits = trace.cut.visits(segment)
        for visit in visits if kind == "forward" else reversed(visits):
            yield Compute(kind, visit, microbatch)


# ---- A program: a trace and the ops that execute it. It is verified, executed, printed, compared and saved as data.
#
# Program(trace, ops)                 plain training has one stage
# Program(trace, ops, ops, ...)       a pipeline has a list of ops for each stage


@dataclasses.dataclass(frozen=True, init=False)
class Program:
    """A trace and, of each stage, the ops in issue order: what a schedule returns.

    trace: of the whole step, cut if there are several stages; or of one stage

    >>> program.count(ya.schedules.Gather), program.wire_bytes()
    (8, Counter({'gather': 6656, 'reduce': 4608}))
    >>> ya.Program.from_json(program.to_json()) == program
    True
    """

    trace: Trace
    stages: tuple[tuple[Op, ...], ...]

    def __init__(self, trace: Trace, *stages: tuple[Op, ...]) -> None:
        object.__setattr__(self, "trace", trace)
        object.__setattr__(self, "stages", stages)

    # ---- stages

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of a program of one stage. Raises TypeError where there are several."""
        if len(self.stages) != 1:
            raise TypeError(
                f"a program of {len(self.stages)} stages has a list of ops for each: program.stages[0], or "
                "program.by_stage[0], a program of that stage alone"
            )
        return self.stages[0]

    @cached_property
    def by_stage(self) -> tuple["Program", ...]:
        """The program of each stage alone, on the stage's own trace, which follows from its ops; this one itself if the
        step is not cut."""
        if self.trace.split is not None and self.trace.stage is None:
            each = enumerate(self.stages)
            return tuple(Program(stage_trace_of_ops(self.trace, stage, own), own) for stage, own in each)
        if len(self.stages) == 1:
            return (self,)
        return tuple(Program(self.trace, ops) for ops in self.stages)

    def with_ops(self, ops: Iterable[Op], stage: int = 0) -> "Program":
        """This program with other ops on `stage`."""
        return Program(self.trace, *self.stages[:stage], tuple(ops), *self.stages[stage + 1 :])

    def with_trace(self, trace: Trace) -> "Program":
        """This program's ops for another trace."""
        return Program(trace, *self.stages)

    # ---- as a sequence of ops: those of all stages count, those of one are looked at

    def __len__(self) -> int:
        return sum(map(len, self.stages))

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __getitem__(self, number: int) -> Op:
        return self.ops[number]

    # ---- what the ops amount to

    @property
    def has_updates(self) -> bool:
        """Tells whether the optimizer's step is part of the program."""
        return any(isinstance(op, ops.Update) for own in self.stages for op in own)

    def carried(self) -> dict[int, int]:
        """Returns slot -> unit that it must hold when the program begins: what is read before anything is put into the
        slot."""
        found: dict[int, int] = {}
        full: set[int] = set()
        for op in self.ops:
            for unit, slot in self.trace.weights_of(op):
                if slot not in full:
                    found.setdefault(slot, unit)
            full.update(slot for _, slot in filled(op))
        return found

    def slot_bytes(self, without: Collection[int] = ()) -> dict[int, int]:
        """Size of each weight slot: the largest unit it ever holds. without: units that take no room"""
        units = self.trace.units
        pairs = [pair for op in self.ops for pair in filled(op)]
        pairs += [(unit, slot) for slot, unit in self.carried().items()]
        return _largest((slot, units[unit].gather_bytes) for unit, slot in pairs if unit not in without)

    def grad_slot_bytes(self, without: Collection[int] = ()) -> dict[int, int]:
        """Size of each gradient slot."""
        units = self.trace.units
        pairs = [pair for op in self.ops if isinstance(op, ops.Reduce) for pair in zip(*op, strict=True)]
        return _largest((slot, units[unit].reduce_bytes) for unit, slot in pairs if unit not in without)

    def carry_slot_bytes(self) -> dict[int, int]:
        """Size of each carry slot: the most that a visit saves, or that crosses between segments, in it. Zero where
        nothing has measured what visits save."""
        split = self.trace.cut
        sizes: list[tuple[int, int]] = []
        for op in self.ops:
            if isinstance(op, ops.Forward | ops.Fetch) and op.carry_slot is not None:
                sizes.append((op.carry_slot, self.trace.visits[op.visit].cost.carry_slot_bytes))
            for message, slot in self.trace.messages_of(op):
                sizes.append((slot, round_up(split.bytes_of(message), LINE)))
        return _largest(sizes)

    def host_bytes(self) -> dict[int, int]:
        """Returns visit -> size of its buffer on the host, zero where nothing has measured what it saves."""
        visits = sorted({op.visit for op in self.ops if isinstance(op, ops.Offload)})
        return {visit: self.trace.visits[visit].cost.carry_slot_bytes for visit in visits}

    def secondary_bytes(self) -> dict[int, int]:
        """Returns unit -> size of its secondary shard."""
        units = sorted(unit for op in self.ops if isinstance(op, ops.Stash) for unit in op.units)
        specs = [self.trace.units[unit] for unit in units]
        return {spec.id: spec.gather_bytes // self.trace.local_ranks_of(spec) for spec in specs}

    def count(self, kind: type[Any], source: str | None = None) -> int:
        """Collectives of one kind of op, `Gather` say: one for each of its units. source: of gathers from there."""
        if "units" not in getattr(kind, "_fields", ()) or (source is not None and kind is not ops.Gather):
            raise TypeError(
                f"count({kind.__name__}, {source}): expected a kind of op that has units; a source for Gather"
            )
        found: list[Any] = [op for op in self.ops if type(op) is kind]
        return sum(len(op.units) for op in found if source is None or op.source == source)

    def wire_bytes(self) -> Counter[str]:
        """Returns the bytes that each rank sends in a step, by kind of collective, and in messages to other stages; a
        step's few scalars, and collectives inside blocks, are not counted.

        A collective over k ranks of a vector of b bytes sends (k - 1) / k of b, an all-reduce twice that. What the
        optimizer exchanges after a program without updates is in it, where a trace has measured that.
        """
        trace = self.trace
        sent: Counter[str] = Counter()
        after = () if self.has_updates else after_program(trace.trained, trace.lent)
        for op in (*self.ops, *after):
            if isinstance(op, ops.Exchange):
                sent["exchange"] += lent_bytes(trace, op.units)
            elif isinstance(op, ops.Send):
                sent["message"] += trace.cut.bytes_of(op.message)
            for number in getattr(op, "units", ()):
                unit = trace.units[number]
                ranks = trace.ranks_of(unit)
                match op:
                    case ops.Gather(source="shard"):
                        sent["gather"] += _others(unit.gather_wire, ranks)
                    case ops.Gather():
                        sent["gather in node"] += _others(unit.gather_bytes, trace.local_ranks_of(unit))
                    case ops.Reduce():
                        sent["reduce"] += _others(unit.reduce_wire, ranks)
                    case ops.AllReduce(over="stages"):
                        holders = len(trace.cut.holders(number))
                        sent["all-reduce over stages"] += 2 * unit.reduce_bytes // ranks * (holders - 1) // holders
                    case ops.AllReduce():
                        shards = (unit.reduce_bytes + (unit.sum_bytes or unit.reduce_bytes)) // ranks
                        sent["all-reduce"] += shards * (trace.replicas - 1) // trace.replicas
        return sent

    # ---- as text

    _proved = ""
    """The proof in words, written by `verify`; no field, so that a program of other ops does not have it."""

    def __repr__(self) -> str:
        several = f"program of {len(self.stages)} stages, {len(self)} ops"
        head = several if len(self.stages) > 1 else str(self).splitlines()[0]
        return f"<{head}{self._proved}>"

    def __str__(self) -> str:
        proof = self._proved.replace("; ", "\n", 1)
        if len(self.stages) != 1:
            parts = [f"stage {number}: {part}" for number, part in enumerate(self.by_stage)]
            return "\n\n".join(parts) + proof
        try:
            head = self._summary()
        except (IndexError, TypeError, ValueError):  # it is printed because it is wrong
            head = f"program of {len(self.ops)} ops, not all in form: verify says which"
        return "\n".join([head, *text.table(self.ops, self.trace)]) + proof

    def _repr_html_(self) -> str:
        """Shown by a notebook."""
        return text.in_notebook(str(self))

    def _summary(self) -> str:
        """Summarises the ops, for the head of the printed program."""
        trace = self.trace
        head = (
            f"program of {len(self.ops)} ops: {len(trace.visits)} visits, microbatches: {trace.microbatches}, "
            f"{self.count(ops.Gather)} gathers, {self.count(ops.Reduce)} reductions; "
            f"weight slots {_mib(self.slot_bytes())}, gradient slots {_mib(self.grad_slot_bytes())}"
        )
        if host := self.host_bytes():
            head += f"\noffloaded visits: {_mib(host)}, carry slots {_mib(self.carry_slot_bytes())}"
        elif carries := self.carry_slot_bytes():
            head += f", carry slots {_mib(carries)}"
        if carried := self.carried():
            held = ", ".join(f"{trace.units[unit].name} in slot {slot}" for slot, unit in sorted(carried.items()))
            head += f"\ncarried over from the step before: {held}"
        return "\n".join([head, *text.collectives(trace)])

    def draw(self, path: str | Path, cluster: Any) -> None:
        """Draws a step of it to a .png, .svg or .pdf. cluster: as for `ya.planner.simulate`, which predicts it

        Raises ValueError for another suffix and an unknown cluster, ModuleNotFoundError without matplotlib."""
        planner = import_module("yafsdp_fn.planner.simulate")  # which stands on programs
        planner.simulate(self, cluster).save(path)

    def diff(self, other: "Program") -> str:
        """Returns the ops that differ, in words, as a unified diff; empty where all ops are equal."""
        return "\n".join(difflib.unified_diff(self.words(), other.words(), "this", "other", lineterm="", n=2))

    def words(self) -> list[str]:
        """Each op in words, after its stage where there are several."""
        if len(self.stages) == 1:
            return [text.describe(op, self.trace) for op in self.ops]
        each = enumerate(self.stages)
        return [f"stage {stage}: {text.describe(op, self.trace)}" for stage, own in each for op in own]

    def fingerprint(self) -> str:
        """Returns a hash of what ranks must agree on: ops, units and visits, without measured costs."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return json.fingerprint(self.trace, self.stages)

    def to_json(self) -> str:
        """Returns the whole program as JSON, for checkpoints and for reading."""
        return json.to_json(self.trace, self.stages)

    @staticmethod
    def from_json(text: str) -> "Program":
        """Returns the program that `to_json` wrote. Raises ValueError where `text` is not one."""
        trace, stages = json.from_json(text)
        return Program(trace, *stages)


# ---- Sums over ops.


def must_be_program(given: object, call: str) -> None:
    """Raises TypeError, with the name of the function that was called, for anything but a program."""
    if not isinstance(given, Program):
        raise TypeError(f"{call}: expected a Program, got {type(given).__name__}: schedule(trace) makes one")


def _largest(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Returns slot -> the most bytes that it holds, from the bytes of each content."""
    out: dict[int, int] = {}
    for slot, nbytes in sizes:
        out[slot] = max(out.get(slot, 0), nbytes)
    return dict(sorted(out.items()))


def _others(nbytes: int, ranks: int) -> int:
    """Returns the parts of a vector that are other ranks'."""
    return nbytes // ranks * (ranks - 1)


def _mib(sizes: dict[int, int]) -> str:
    return f"{len(sizes)} ({sum(sizes.values()) / 2**20:.1f} MiB)"
