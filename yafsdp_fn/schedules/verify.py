"""Proof that a program is right: it is executed symbolically, with the contents of every buffer.

The rules, by the names that a refusal gives:

    form       ops name units, visits and slots that exist, as many slots as units, no slot twice
    order      the computes are the trace's, all of them, in its order
    weights    a compute reads slots that hold its units' weights of this step
    carry      what a slot must hold before the program gathers into it, it holds when the program ends
    secondary  a gather inside the node reads a secondary shard that this step has stashed, before the unit's update
    graph      a kept graph's backward runs in the slots of its forward (saved weights are views of them)
    gradient   a backward writes to a gradient slot that is free or holds the same unit
    reduce     a reduction takes the gradient of its unit from the slot that holds it
    once       every contribution (visit, microbatch, unit) is reduced exactly once by the end
    replicas   where there are replicas, each unit's gradient is summed over them exactly once, when it is complete
    norm       the norm is taken at most once, for updates, of all trained units, after the last compute and when their
               gradients are complete
    update     each trainable unit exactly once, or none at all; after its last compute and its complete gradient, and
               after the norm where the step clips or skips
    offload    a carry that a visit saves is in one place, a carry slot that was free or the host, until its backward,
               which finds it in its carry slot

One step is enough: by `carry` and `once` it leaves behind what it began with. docs/design.md has the argument.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from yafsdp_fn.schedules.carries import Carries
from yafsdp_fn.schedules.form import check_form
from yafsdp_fn.schedules.ops import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Reduce,
    Stash,
    Update,
)
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Refused, drawn
from yafsdp_fn.schedules.scoreboard import Buffer
from yafsdp_fn.schedules.trace import Compute, Trace

Contribution = tuple[int, int, int]
"""(visit, microbatch, unit)"""


def verify(program: Program) -> Program:
    """Returns `program` if it is right; raises `Refused`, which names op, buffer, rule and both uses, if not."""
    if not isinstance(program, Program):
        raise TypeError(f"verify: expected a Program, got {type(program).__name__}: Program(trace, ops)")
    check_form(program)
    _Checker(program).step()
    return program


class _Weights(NamedTuple):
    """What a slot holds: a unit's weights of this step (version 0) or of the next (1), and the op that wrote them,
    -1 where the step before did."""

    unit: int
    version: int
    op: int


class _Gradient(NamedTuple):
    """What a gradient slot holds: the last op that wrote it, and the contributions that are in it."""

    unit: int
    op: int
    parts: tuple[Contribution, ...]


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.trace, self.ops = program
        self.weights: dict[int, _Weights] = {}
        self.grads: dict[int, _Gradient] = {}
        self.graphs: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # (op, slots of a kept graph)
        self.reduced: dict[Contribution, int] = {}
        self.secondary: dict[int, int] = {}  # unit -> op that stashed it
        self.summed: dict[int, int] = {}  # unit -> op that summed it over replicas
        self.updated: dict[int, int] = {}
        self.norm: int | None = None
        self.carries = Carries(self.trace, self.refuse)
        self.needed: dict[int, list[Contribution]] = {}  # unit -> its contributions
        for part in sorted(needed(self.trace)):
            self.needed.setdefault(part[2], []).append(part)

    def step(self) -> None:
        self.computes = iter(self.trace.order)
        self.carried = self.program.carried()
        self.weights = {slot: _Weights(unit, 0, -1) for slot, unit in self.carried.items()}
        self.last_use = {
            unit: index
            for index, op in enumerate(self.ops)
            if isinstance(op, Forward | Backward)
            for unit in self.trace.visits[op.visit].units
        }
        for index, op in enumerate(self.ops):
            match op:
                case Gather():
                    self.gather(index, op)
                case Stash():
                    self.stash(index, op)
                case Forward() | Backward():
                    self.compute(index, op)
                case Reduce():
                    self.reduce(index, op)
                case AllReduce(units):
                    self.all_reduce(index, units)
                case Norm(units):
                    self.take_norm(index, units)
                case Update(units):
                    self.update(index, units)
                case Offload():
                    self.carries.offload(index, op)
                case Fetch():
                    self.carries.fetch(index, op)
        self.end()

    # ---- refusals

    def refuse(
        self, rule: str, index: int, why: str, buffer: Buffer | None = None, other: int | None = None
    ) -> NoReturn:
        raise Refused(rule, index, drawn(self.program, rule, index, why, buffer, other))

    def unit(self, unit: int) -> str:
        return self.trace.units[unit].name

    # ---- order

    def next_compute(self, index: int, op: Forward | Backward) -> Compute:
        now = next(self.computes, None)
        kind = type(op).__name__.lower()
        if now is None:
            self.refuse("order", index, "the trace has no more computes")
        if (kind, op.visit) != (now.kind, now.visit):
            self.refuse("order", index, f"the trace has {now.kind} of {self.trace.visits[now.visit].name} here")
        return now

    # ---- weights

    def gather(self, index: int, op: Gather) -> None:
        for unit, slot in zip(op.units, op.slots, strict=True):
            if op.source == "node" and unit not in self.secondary:
                self.refuse("secondary", index, f"nothing was stashed of {self.unit(unit)} in this step")
            if op.source == "node" and unit in self.updated:
                why = f"the secondary shard of {self.unit(unit)} is of the weights before its update"
                self.refuse("secondary", index, why, ("secondary", 0, unit), self.secondary[unit])
            self.weights[slot] = _Weights(unit, int(unit in self.updated), index)

    def stash(self, index: int, op: Stash) -> None:
        self.reads(index, op.units, op.slots, "secondary")
        self.secondary.update(dict.fromkeys(op.units, index))

    def reads(self, index: int, units: tuple[int, ...], slots: tuple[int, ...], rule: str = "weights") -> None:
        for unit, slot in zip(units, slots, strict=True):
            held, buffer = self.weights[slot], ("slot", 0, slot)
            if held[:2] != (unit, 0):
                age = " of the next step" * held.version
                why = f"slot {slot} holds {self.unit(held.unit)}{age}, it must hold {self.unit(unit)}"
                self.refuse(rule, index, why, buffer, held.op)

    def compute(self, index: int, op: Forward | Backward) -> None:
        now = self.next_compute(index, op)
        self.reads(index, self.trace.visits[op.visit].units, op.slots)
        if isinstance(op, Forward):
            self.graphs[now.visit, now.microbatch] = (index, op.slots if op.keep else ())
            self.carries.forward(index, op, now)
            return
        self.carries.backward(index, op, now)
        forward, slots = self.graphs[now.visit, now.microbatch]
        if slots and slots != op.slots:
            moved = next(slot for slot, now in zip(slots, op.slots, strict=True) if slot != now)
            why = f"the graph was kept in slots {slots}, not {op.slots}"
            self.refuse("graph", index, why, ("slot", 0, moved), forward)
        for unit, slot in zip(self.trace.visits[op.visit].trained, op.grad_slots, strict=True):
            held = self.grads.get(slot, _Gradient(unit, index, ()))
            if held.unit != unit:
                why = f"grad slot {slot} still holds the unreduced gradient of {self.unit(held.unit)}"
                self.refuse("gradient", index, why, ("grad slot", 0, slot), held.op)
            parts = (*held.parts, (now.visit, now.microbatch, unit))
            self.grads[slot] = _Gradient(unit, index, parts)

    # ---- gradients

    def reduce(self, index: int, op: Reduce) -> None:
        for unit, slot in zip(op.units, op.grad_slots, strict=True):
            held, buffer = self.grads.get(slot), ("grad slot", 0, slot)
            if held is None:
                before = max((at for (_, _, u), at in self.reduced.items() if u == unit), default=None)
                again = "; it was reduced already" if before is not None else ""
                why = f"grad slot {slot} holds no gradient of {self.unit(unit)}{again}"
                self.refuse("reduce", index, why, buffer, before)
            if held.unit != unit:
                why = f"grad slot {slot} holds the gradient of {self.unit(held.unit)}, not of {self.unit(unit)}"
                self.refuse("reduce", index, why, buffer, held.op)
            self.reduced.update(dict.fromkeys(held.parts, index))
            del self.grads[slot]

    def complete(self, rule: str, index: int, unit: int) -> None:
        """Raises unless the gradient shard of `unit` has all its contributions, from all replicas."""
        missing = next((part for part in self.needed.get(unit, ()) if part not in self.reduced), None)
        buffer = ("grad shard", unit)
        if missing is not None:
            visit, microbatch, _ = missing
            where = f"{self.trace.visits[visit].name} in microbatch {microbatch}"
            last = max((at for (_, _, u), at in self.reduced.items() if u == unit), default=None)
            self.refuse(rule, index, f"the gradient of {self.unit(unit)} from {where} is not reduced yet", buffer, last)
        if rule != "replicas" and self.trace.replicas > 1 and unit in self.needed and unit not in self.summed:
            self.refuse(rule, index, f"the gradient of {self.unit(unit)} is not summed over replicas yet", buffer)

    def all_reduce(self, index: int, units: tuple[int, ...]) -> None:
        for unit in units:
            buffer = ("grad shard", unit)
            if self.trace.replicas == 1:
                self.refuse("replicas", index, "the mesh has no replicas: ya.mesh(replicate=...)", buffer)
            if unit not in self.needed:
                self.refuse("replicas", index, f"nothing trains {self.unit(unit)}", buffer)
            if unit in self.summed:
                why = f"the gradient of {self.unit(unit)} was summed over replicas already"
                self.refuse("replicas", index, why, buffer, self.summed[unit])
            self.complete("replicas", index, unit)
            self.summed[unit] = index

    def take_norm(self, index: int, units: tuple[int, ...]) -> None:
        if self.trace.updates == "never":
            self.refuse("norm", index, "this step has no optimizer, so that nothing would read the norm")
        if self.norm is not None:
            self.refuse("norm", index, "the norm was taken already", ("norm",), self.norm)
        if index < (last := max(self.last_use.values(), default=-1)):
            # a loss may read sharded leaves beside its visits: that gradient arrives with the end of the backward
            self.refuse("norm", index, "the norm comes before the last compute", ("norm",), last)
        if set(units) != self.needed.keys():
            unit = min(self.needed.keys() ^ set(units))
            why = "is trained, and missing" if unit in self.needed else "is not trained by any visit"
            self.refuse("norm", index, f"it must be of all trained units: {self.unit(unit)} {why}")
        for unit in units:
            if unit in self.updated:  # the update has scaled the gradient in place
                why = f"the update of {self.unit(unit)} has overwritten its gradient"
                self.refuse("norm", index, why, ("grad shard", unit), self.updated[unit])
            self.complete("norm", index, unit)
        self.norm = index

    # ---- the optimizer

    def update(self, index: int, units: tuple[int, ...]) -> None:
        for unit in units:
            if self.trace.updates == "never":
                self.refuse("update", index, "this step has no optimizer: only a train_step has")
            if not self.trace.units[unit].trainable:
                self.refuse("update", index, f"{self.unit(unit)} is frozen")
            if unit in self.updated:
                why = f"{self.unit(unit)} was updated already"
                self.refuse("update", index, why, ("shard", unit), self.updated[unit])
            if index < (last := self.last_use.get(unit, -1)):
                # at world size 1 slots are the shards, and the later compute would read new weights
                why = f"a later compute uses {self.unit(unit)}, and where one rank holds all of it slots are the shards"
                self.refuse("update", index, why, ("shard", unit), last)
            self.complete("update", index, unit)
            if self.norm is None and self.trace.updates == "after norm":
                self.refuse(
                    "update",
                    index,
                    f"{self.unit(unit)} is updated before the norm of the whole gradient is known, but this step clips "
                    "by it, or skips steps that are not finite. Either take the norm first, or have neither: no "
                    "clip_by_global_norm, and train_step(skip_nonfinite=False)",
                    ("norm",),
                )
            self.updated[unit] = index

    def end(self) -> None:
        if (left := next(self.computes, None)) is not None:
            self.refuse("order", -1, f"{left.kind} of {self.trace.visits[left.visit].name} is missing")
        self.carries.end()
        for slot, grad in self.grads.items():
            why = f"grad slot {slot} still holds the gradient of {self.unit(grad.unit)}"
            self.refuse("once", -1, why, ("grad slot", 0, slot), grad.op)
        for unit in sorted(self.needed.keys() - self.summed.keys() if self.trace.replicas > 1 else ()):
            why = f"the gradient of {self.unit(unit)} is never summed over replicas"
            self.refuse("replicas", -1, why, ("grad shard", unit))
        if self.norm is not None and not self.program.updates:
            self.refuse("norm", self.norm, "nothing reads the norm: the program has no updates", ("norm",))
        for record in self.trace.units:
            if self.program.updates and record.trainable and record.id not in self.updated:
                self.refuse("update", -1, f"{record.name} is never updated, other units are", ("shard", record.id))
        for slot, carried in self.carried.items():
            held = self.weights[slot]
            if held.unit == carried and held.version == self.trace.units[carried].trainable:
                continue  # without updates in the program, one of all trainable units follows
            first = next(i for i, op in enumerate(self.ops) if slot in getattr(op, "slots", ()))
            buffer = ("slot", 0, slot)
            if held.op < 0 or (not self.program.updates and self.trace.units[carried].trainable):
                why = f"slot {slot} holds no weights of this step; it must hold {self.unit(carried)}"
                self.refuse("weights", first, why, buffer)
            now = "" if held.version else " of this step"
            why = (
                f"slot {slot} is read before anything is gathered into it, so at the end it must hold the next step's "
                f"{self.unit(carried)}; it will hold {self.unit(held.unit)}{now}. "
                f"Gather {self.unit(carried)} first, or once more after its update"
            )
            self.refuse("carry", first, why, buffer, held.op)


def needed(trace: Trace) -> set[Contribution]:
    """Every gradient contribution of the trace."""
    return {
        (compute.visit, compute.microbatch, unit)
        for compute in trace.order
        if compute.kind == "backward"
        for unit in trace.visits[compute.visit].trained
    }
