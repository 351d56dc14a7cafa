"""A program: a trace and the ops that execute it. It is verified, executed, printed, compared and saved as data."""

from collections import Counter
from typing import Any, NamedTuple

from yafsdp_fn.schedules import further_ops, ops, serialised, text
from yafsdp_fn.schedules.lending import lent_bytes
from yafsdp_fn.schedules.ops import Op, filled
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.schedules.updating import after_program


class Program(NamedTuple):
    """What a schedule returns: the trace it was built from, and the ops in issue order."""

    trace: Trace
    ops: tuple[Op, ...]

    # ---- what the ops amount to

    @property
    def has_updates(self) -> bool:
        """Whether the optimizer's step is part of the program."""
        return any(isinstance(op, ops.Update) for op in self.ops)

    @property
    def updates_early(self) -> bool:
        """Whether an update comes before the end of the backward."""
        found = [index for index, op in enumerate(self.ops) if isinstance(op, ops.Update)]
        return bool(found) and any(isinstance(op, ops.Forward | ops.Backward) for op in self.ops[found[0] :])

    def carried(self) -> dict[int, int]:
        """Slot -> unit that it must hold when the program begins: what is read before anything is put into the slot."""
        found: dict[int, int] = {}
        full: set[int] = set()
        for op in self.ops:
            for unit, slot in self.trace.weights_of(op):
                if slot not in full:
                    found.setdefault(slot, unit)
            full.update(slot for _, slot in filled(op))
        return found

    def slot_bytes(self) -> dict[int, int]:
        """Size of each weight slot: the largest unit it ever holds."""
        pairs = [pair for op in self.ops for pair in filled(op)]
        pairs += [(unit, slot) for slot, unit in self.carried().items()]
        return _largest(pairs, {unit.id: unit.gather_bytes for unit in self.trace.units})

    def grad_slot_bytes(self) -> dict[int, int]:
        """Size of each gradient slot."""
        pairs = [pair for op in self.ops if isinstance(op, ops.Reduce) for pair in zip(*op, strict=True)]
        return _largest(pairs, {unit.id: unit.reduce_bytes for unit in self.trace.units})

    def carry_slot_bytes(self) -> dict[int, int]:
        """Size of each carry slot: the most that a visit saves in it, zero where nothing has measured that, or that
        crosses between segments in it."""
        found = [op for op in self.ops if isinstance(op, ops.Forward | further_ops.Fetch)]
        saved = [(op.visit, op.carry_slot) for op in found if op.carry_slot is not None]
        size: dict[Any, int] = {visit.id: visit.cost.carry_slot_bytes for visit in self.trace.visits}
        crossing: list[tuple[Any, int]] = []
        for op in self.ops:
            crossing += [((parcel.flow, parcel.back), slot) for parcel, slot in self.trace.parcels_of(op)]
        for number, flow in enumerate(self.trace.split.flows if self.trace.split else ()):
            size |= {(number, False): flow.nbytes, (number, True): flow.grad_bytes}
        return _largest([*saved, *crossing], size)

    def host_bytes(self) -> dict[int, int]:
        """Visit -> size of its buffer on the host, zero where nothing has measured what it saves."""
        ids = {op.visit for op in self.ops if isinstance(op, further_ops.Offload)}
        return {visit: self.trace.visits[visit].cost.carry_slot_bytes for visit in sorted(ids)}

    def secondary_bytes(self) -> dict[int, int]:
        """Unit -> size of its secondary shard."""
        units = [unit for op in self.ops if isinstance(op, further_ops.Stash) for unit in op.units]
        return {unit: self.trace.units[unit].gather_bytes // self.trace.local_ranks for unit in sorted(units)}

    def count(self, kind: type[Any], source: str | None = None) -> int:
        """Collectives of one kind of op, `Gather` say: one for each of its units. source: of gathers from there."""
        if "units" not in getattr(kind, "_fields", ()) or (source is not None and kind is not ops.Gather):
            raise TypeError(
                f"count({kind.__name__}, {source}): expected a kind of op that has units; a source for Gather"
            )
        found: list[Any] = [op for op in self.ops if type(op) is kind]
        return sum(len(op.units) for op in found if source is None or op.source == source)

    def wire_bytes(self) -> Counter[str]:
        """Bytes that each rank sends in a step, by kind of collective; a step's few scalars are not counted.

        A collective over k ranks of a vector of b bytes sends (k - 1) / k of b, an all-reduce twice that. What the
        optimizer exchanges after a program without updates is in it, where a trace has measured that.
        """
        ranks, replicas, local = self.trace.ranks, self.trace.replicas, self.trace.local_ranks
        sent: Counter[str] = Counter()
        after = () if self.has_updates else after_program(self.trace.trained, self.trace.lent)
        for op in (*self.ops, *after):
            units = [self.trace.units[unit] for unit in getattr(op, "units", ())]
            match op:
                case ops.Gather(source="shard"):
                    sent["gather"] += sum(u.gather_bytes // ranks * (ranks - 1) for u in units)
                case ops.Gather():
                    sent["gather in node"] += sum(u.gather_bytes // local * (local - 1) for u in units)
                case ops.Reduce():
                    sent["reduce"] += sum(u.reduce_bytes // ranks * (ranks - 1) for u in units)
                case further_ops.AllReduce(over="stages"):
                    of = [len(self.trace.split.holders(u.id)) if self.trace.split else 1 for u in units]
                    sums = [2 * u.reduce_bytes // ranks * (k - 1) // k for u, k in zip(units, of, strict=True)]
                    sent["all-reduce over stages"] += sum(sums)
                case further_ops.AllReduce():
                    twice = [u.reduce_bytes + (u.sum_bytes or u.reduce_bytes) for u in units]
                    sent["all-reduce"] += sum(b // ranks * (replicas - 1) // replicas for b in twice)
                case further_ops.Exchange(ids):
                    sent["exchange"] += lent_bytes(self.trace, ids)
        return sent

    # ---- as text

    def __str__(self) -> str:
        try:
            head = self._summary()
        except (IndexError, TypeError, ValueError):  # it is printed because it is wrong
            head = f"program of {len(self.ops)} ops, not all in form: verify says which"
        return "\n".join([head, *text.table(self.ops, self.trace)])

    def _summary(self) -> str:
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
        return head

    def diff(self, other: "Program") -> str:
        """The ops that differ, in words, as a unified diff; empty where all ops are equal."""
        return text.diff(self.words(), other.words())

    def words(self) -> list[str]:
        """Each op in words."""
        return [text.describe(op, self.trace) for op in self.ops]

    def fingerprint(self) -> str:
        """A hash of what ranks must agree on: ops, units and visits, without measured costs."""
        return serialised.fingerprint(self.trace, self.ops)

    def to_json(self) -> str:
        """The whole program as JSON, for checkpoints and for reading."""
        return serialised.to_json(self.trace, self.ops)

    @staticmethod
    def from_json(text: str) -> "Program":
        """The program that `to_json` wrote. Raises ValueError where `text` is not one."""
        return Program(*serialised.from_json(text))


def _largest(pairs: list[tuple[Any, int]], size: dict[Any, int]) -> dict[int, int]:
    """Slot -> bytes, from the pairs `(what is in it, slot)` of a kind of op."""
    out: dict[int, int] = {}
    for unit, slot in pairs:
        out[slot] = max(out.get(slot, 0), size.get(unit, 0))
    return dict(sorted(out.items()))


def _mib(sizes: dict[int, int]) -> str:
    return f"{len(sizes)} ({sum(sizes.values()) / 2**20:.1f} MiB)"
