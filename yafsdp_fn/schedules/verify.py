"""Proof that a program is right: it is executed symbolically, with the contents of every buffer.

The rules, by the names that a refusal gives:

    form       ops name units, visits and slots that exist, as many slots as units, no slot twice
    order      the computes are the trace's, all of them, in its order
    weights    a compute reads slots that hold its units' weights of this step
    carry      what a slot must hold before the program gathers into it, it holds when the program ends
    secondary  a gather inside the node reads a secondary shard that this step has stashed from a slot that held the
               unit, before the unit's update
    graph      a kept graph's backward runs in the slots of its forward (saved weights are views of them)
    gradient   a backward writes to a gradient slot that is free or holds the same unit
    early      a forward begins gradients only where it keeps its graph, its backward is the next compute, into the same
               gradient slots, and they are free
    reduce     a reduction takes the gradient of its unit from the slot that holds it
    once       every contribution (visit, microbatch, unit) is reduced exactly once by the end
    replicas   where there are replicas, each unit's gradient is summed over them exactly once, when it is complete
               (what is summed before the step's first gradient of it does not count: that overwrites it)
    shared     where several stages of a pipeline hold a unit, its gradient is summed over them exactly once, when it is
               complete, and over replicas too
    norm       the norm is taken at most once, for updates, of all trainable units, after the last compute and when
               their gradients are complete
    update     each trainable unit exactly once, or none at all; after its last compute and its complete gradient (after
               the last compute of all, where no visit trains it), and after the norm where the step clips or skips;
               its parts in their order, with an exchange between two
    offload    a carry that a visit saves is in one place, a carry slot that was free or the host, until its backward,
               which finds it in its carry slot
    flow       what crosses between segments of a pipeline is in one carry slot at a time, from the compute that makes
               it, over a send and a receive where they are on two stages, to the one that takes it
    ordered    on a deterministic mesh, a unit is reduced once in each microbatch, with all of its gradient, in their
               order

One step is enough: by `carry` and `once` it leaves behind what it began with. docs/design.md has the argument.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from yafsdp_fn.schedules.flow_rule import FlowRules
from yafsdp_fn.schedules.ops import (
    AllReduce,
    Backward,
    Buffer,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Receive,
    Reduce,
    Send,
    Stash,
    Update,
    kind_of,
)
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.well_formed import check_form

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


class _Checker(FlowRules):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.carried = program.carried()
        self.slot_bytes = program.slot_bytes()
        self.weights = {slot: _Weights(unit, 0, -1) for slot, unit in self.carried.items()}
        self.grads: dict[int, _Gradient] = {}
        self.graphs: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # (op, slots of a kept graph)
        self.reduced: dict[Contribution, int] = {}
        self.secondary: dict[int, tuple[int, _Weights]] = {}  # unit -> op that stashed it, what it found in the slot
        self.trained: set[int] = set()  # units of which a compute has written a gradient, or begun one
        self.summed: dict[int, int] = {}  # unit -> op that summed it over replicas
        self.shared = self.trace.shared
        self.joined: dict[int, int] = {}  # unit that stages share -> op that summed it over them
        self.begun: dict[int, int] = {}  # unit -> op that began its update
        self.turns: dict[int, int] = {}  # unit -> parts and exchanges of its update that have been
        self.updated: dict[int, int] = {}  # unit -> op that ended it
        self.norm: int | None = None
        self.needed: dict[int, list[Contribution]] = {}  # unit -> its contributions
        for visit, microbatch in sorted(
            (c.visit, c.microbatch) for c in self.trace.order if c.kind in ("backward", "weights")
        ):
            for unit in self.trace.visits[visit].trained:
                self.needed.setdefault(unit, []).append((visit, microbatch, unit))
        self.computes = iter(self.trace.order)
        self.last_use = {
            unit: index
            for index, op in enumerate(self.ops)
            if isinstance(op, Forward | Backward)
            for unit in self.trace.visits[op.visit].units
        }
        self.last_compute = max(self.last_use.values(), default=-1)

    def step(self) -> None:
        rules: dict[type[Any], Callable[[Any], None]] = {
            Gather: self.gather,
            Stash: self.stash,
            Forward: self.forward,
            Backward: self.backward,
            Reduce: self.reduce,
            AllReduce: self.all_reduce,
            Norm: self.take_norm,
            Update: self.update,
            Exchange: self.exchange,
            Offload: self.offload,
            Fetch: self.fetch,
            Send: self.send,
            Receive: self.receive,
        }
        for index, op in enumerate(self.ops):
            self.at = index
            rules[type(op)](op)
        self.at = -1
        self.end()

    # ---- order

    def in_order(self, op: Forward | Backward) -> None:
        now = next(self.computes, None)
        if now is None:
            self.refuse("order", "the trace has no more computes")
        if (kind_of(op), op.visit, op.microbatch) != now[:3]:
            of = f" of microbatch {now.microbatch}" if self.trace.microbatches > 1 else ""
            self.refuse("order", f"the trace has {now.kind} of {self.visit(now.visit)}{of} here")

    # ---- weights

    def gather(self, op: Gather) -> None:
        for unit, slot in zip(op.units, op.slots, strict=True):
            if op.source == "node":
                self.finds_stashed(unit)
            self.weights[slot] = _Weights(unit, int(unit in self.updated), self.at)

    def finds_stashed(self, unit: int) -> None:
        if unit not in self.secondary:
            self.refuse("secondary", f"nothing was stashed of {self.unit(unit)} in this step")
        (stashed, held), buffer = self.secondary[unit], ("secondary", 0, unit)
        if unit in self.updated:
            why = f"the secondary shard of {self.unit(unit)} is of the weights before its update"
            self.refuse("secondary", why, buffer, stashed)
        if held[:2] != (unit, 0):
            why = f"what was stashed of {self.unit(unit)} is from a slot that held {self.held(held)}"
            self.refuse("secondary", why, buffer, stashed)

    def stash(self, op: Stash) -> None:
        """What it finds matters to those that gather it."""
        for unit, slot in zip(op.units, op.slots, strict=True):
            room, size = self.slot_bytes[slot], self.trace.units[unit].gather_bytes
            if room < size:
                why = f"slot {slot} has {room} bytes, {self.unit(unit)} is of {size}"
                self.refuse("secondary", why, ("slot", 0, slot), self.weights[slot].op)
            self.secondary[unit] = self.at, self.weights[slot]

    def held(self, held: _Weights) -> str:
        return self.unit(held.unit) + " of the next step" * held.version

    def reads(self, units: tuple[int, ...], slots: tuple[int, ...]) -> None:
        for unit, slot in zip(units, slots, strict=True):
            held = self.weights[slot]
            if held[:2] != (unit, 0):
                why = f"slot {slot} holds {self.held(held)}, it must hold {self.unit(unit)}"
                self.refuse("weights", why, ("slot", 0, slot), held.op)

    def forward(self, op: Forward) -> None:
        self.in_order(op)
        self.take_flows(op)
        self.reads(self.trace.visits[op.visit].units, op.slots)
        self.graphs[op.visit, op.microbatch] = (self.at, op.slots if op.keep else ())
        self.save(op)
        self.give_flows(op)
        if op.early:
            self.begins_early(op)
            self.trained.update(self.trace.visits[op.visit].trained)

    def begins_early(self, op: Forward) -> None:
        if not op.keep:
            self.refuse("early", "it recomputes, and its backward would not know what was begun")
        later = enumerate(self.ops[self.at + 1 :], self.at + 1)
        after, then = next(((at, it) for at, it in later if isinstance(it, Forward | Backward)), (None, None))
        buffer = ("grad slot", 0, op.early[0])
        if not isinstance(then, Backward) or (then.visit, then.microbatch) != (op.visit, op.microbatch):
            why = "its own backward is not the next compute, and another could write to the slots in between"
            self.refuse("early", why, buffer, after)
        if then.grad_slots != op.early:
            self.refuse("early", f"its backward writes to grad slots {then.grad_slots}, not {op.early}", buffer, after)
        for slot in op.early:
            if (held := self.grads.get(slot)) is not None:
                why = f"grad slot {slot} still holds the unreduced gradient of {self.unit(held.unit)}"
                self.refuse("early", why, ("grad slot", 0, slot), held.op)

    def backward(self, op: Backward) -> None:
        self.in_order(op)
        self.take_flows(op)
        if op.half != "weights":
            self.reads(self.trace.visits[op.visit].units, op.slots)
            self.load(op)
            forward, slots = self.graphs[op.visit, op.microbatch]
            if slots and slots != op.slots:
                moved = ("slot", 0, next(slot for slot, now in zip(slots, op.slots, strict=True) if slot != now))
                self.refuse("graph", f"the graph was kept in slots {slots}, not {op.slots}", moved, forward)
        for unit, slot in zip(self.trace.visits[op.visit].trained, op.grad_slots, strict=op.half != "inputs"):
            held = self.grads.get(slot, _Gradient(unit, self.at, ()))
            if held.unit != unit:
                why = f"grad slot {slot} still holds the unreduced gradient of {self.unit(held.unit)}"
                self.refuse("gradient", why, ("grad slot", 0, slot), held.op)
            self.trained.add(unit)
            self.grads[slot] = _Gradient(unit, self.at, (*held.parts, (op.visit, op.microbatch, unit)))
        self.give_flows(op)

    # ---- gradients

    def reduce(self, op: Reduce) -> None:
        for unit, slot in zip(op.units, op.grad_slots, strict=True):
            held, buffer = self.grads.get(slot), ("grad slot", 0, slot)
            if held is None:
                before = self.last_reduced(unit)
                again = "; it was reduced already" if before is not None else ""
                self.refuse("reduce", f"grad slot {slot} holds no gradient of {self.unit(unit)}{again}", buffer, before)
            if held.unit != unit:
                why = f"grad slot {slot} holds the gradient of {self.unit(held.unit)}, not of {self.unit(unit)}"
                self.refuse("reduce", why, buffer, held.op)
            if self.trace.ordered:
                self.one_microbatch(unit, held, buffer)
            self.reduced.update(dict.fromkeys(held.parts, self.at))
            del self.grads[slot]

    def one_microbatch(self, unit: int, held: _Gradient, buffer: Buffer) -> None:
        """Microbatches are added to the shard one by one: to the same bits at every number of ranks."""
        found = {microbatch for _, microbatch, _ in held.parts}
        if len(found) > 1:
            why = f"gradients of {self.unit(unit)} from microbatches {sorted(found)} are added before they are reduced"
            self.refuse("ordered", f"{why}; take a schedule that does not defer reductions", buffer, held.op)
        if missing := {part for part in self.needed[unit] if part[1] in found} - set(held.parts):
            why = (
                f"what {self.visit(min(missing)[0])} adds to the gradient of {self.unit(unit)} is reduced apart from it"
            )
            self.refuse("ordered", why, buffer, self.last_reduced(unit))
        if min(found) < max((m for _, m, other in self.reduced if other == unit), default=0):
            why = f"a later microbatch's gradient of {self.unit(unit)} was reduced before"
            self.refuse("ordered", why, ("grad shard", unit), self.last_reduced(unit))

    def last_reduced(self, unit: int) -> int | None:
        return max((at for (_, _, other), at in self.reduced.items() if other == unit), default=None)

    def complete(self, rule: str, unit: int) -> None:
        """Raises unless the gradient shard of `unit` has all its contributions, from all replicas."""
        buffer = ("grad shard", unit)
        for visit, microbatch, _ in (part for part in self.needed.get(unit, ()) if part not in self.reduced):
            part = f"the gradient of {self.unit(unit)} from {self.visit(visit)} in microbatch {microbatch}"
            self.refuse(rule, f"{part} is not reduced yet", buffer, self.last_reduced(unit))
        if rule != "replicas" and self.trace.replicas > 1 and unit in self.needed and unit not in self.summed:
            self.refuse(rule, f"the gradient of {self.unit(unit)} is not summed over replicas yet", buffer)
        if rule not in ("replicas", "shared") and unit in self.shared and unit not in self.joined:
            self.refuse(rule, f"the gradient of {self.unit(unit)} is not summed over the stages that share it", buffer)

    def all_reduce(self, op: AllReduce) -> None:
        for unit in op.units:
            buffer = ("grad shard", unit)
            if op.over == "stages":
                self.join(unit)
                continue
            if unit not in self.needed:
                self.refuse("replicas", f"nothing trains {self.unit(unit)}", buffer)
            if self.trace.replicas == 1 or unit not in self.trained:
                continue  # it does nothing, or the first gradient overwrites what it does
            if unit in self.summed:
                why = f"the gradient of {self.unit(unit)} was summed over replicas already"
                self.refuse("replicas", why, buffer, self.summed[unit])
            self.complete("replicas", unit)
            self.summed[unit] = self.at

    def join(self, unit: int) -> None:
        buffer = ("grad shard", unit)
        if unit not in self.shared:
            self.refuse("shared", f"no other stage has {self.unit(unit)}", buffer)
        if unit in self.joined:
            why = f"the gradient of {self.unit(unit)} was summed over stages already"
            self.refuse("shared", why, buffer, self.joined[unit])
        self.complete("shared", unit)
        self.joined[unit] = self.at

    def take_norm(self, op: Norm) -> None:
        if self.trace.update_when == "never":
            self.refuse("norm", "this step has no optimizer, so that nothing would read the norm")
        if self.norm is not None:
            self.refuse("norm", "the norm was taken already", ("norm",), self.norm)
        if self.at < self.last_compute:
            # a loss may read sharded leaves beside its visits: that gradient arrives with the end of the backward
            self.refuse("norm", "the norm comes before the last compute", ("norm",), self.last_compute)
        if wrong := set(self.trace.trained) ^ set(op.units):
            unit = min(wrong)
            why = "is trainable, and missing" if self.trace.units[unit].trainable else "is frozen"
            self.refuse("norm", f"it must be of all trainable units: {self.unit(unit)} {why}")
        for unit in op.units:
            if unit in self.begun:  # the update has scaled the gradient in place
                why = f"the update of {self.unit(unit)} has overwritten its gradient"
                self.refuse("norm", why, ("grad shard", unit), self.begun[unit])
            self.complete("norm", unit)
        self.norm = self.at

    # ---- the optimizer

    def update(self, op: Update) -> None:
        for unit in op.units:
            if self.trace.update_when == "never":
                self.refuse("update", "this step has no optimizer: only a train_step has")
            if not self.trace.units[unit].trainable:
                self.refuse("update", f"{self.unit(unit)} is frozen")
            if unit in self.updated:
                self.refuse("update", f"{self.unit(unit)} was updated already", ("shard", unit), self.updated[unit])
            self.turn(unit, 2 * op.part)
            if op.part + 1 == self.trace.parts(unit):
                self.updated[unit] = self.at
            if op.part:
                continue
            self.begun[unit] = self.at
            if self.at < (last := self.last_use.get(unit, -1)):
                # at world size 1 slots are the shards, and the later compute would read new weights
                why = f"a later compute uses {self.unit(unit)}, and where one rank holds all of it slots are the shards"
                self.refuse("update", why, ("shard", unit), last)
            if unit not in self.needed and self.at < self.last_compute:
                # what it gets comes from the loss itself, at the end of the backward; nothing else is known before
                why = f"no visit trains {self.unit(unit)}: its gradient is known only after the last compute"
                self.refuse("update", why, ("grad shard", unit), self.last_compute)
            self.complete("update", unit)
            if self.norm is None and self.trace.update_when == "after norm":
                why = (
                    f"{self.unit(unit)} is updated before the norm of the whole gradient is known, but this step clips "
                    "by it, or skips steps that are not finite. Either take the norm first, or have neither: no "
                    "clip_by_global_norm, and train_step(skip_nonfinite=False)"
                )
                self.refuse("update", why, ("norm",))

    def exchange(self, op: Exchange) -> None:
        for unit in op.units:
            if unit in self.updated or op.part + 1 >= self.trace.parts(unit):
                parts = f"{self.trace.parts(unit)} part{'s' * (self.trace.parts(unit) > 1)}"
                why = f"nothing of {self.unit(unit)} travels after part {op.part}: its update has {parts}"
                self.refuse("update", why, ("optimizer", unit), self.updated.get(unit))
            self.turn(unit, 2 * op.part + 1)

    def turn(self, unit: int, number: int) -> None:
        """The parts of an update and the exchanges between them, counted."""
        expected = self.turns.get(unit, 0)
        if number != expected:
            name = f"{'the exchange after ' * (expected % 2)}part {expected // 2}"
            why = f"next in the update of {self.unit(unit)} is {name}"
            self.refuse("update", why, ("optimizer", unit), self.begun.get(unit))
        self.turns[unit] = expected + 1

    def end(self) -> None:
        if (left := next(self.computes, None)) is not None:
            self.refuse("order", f"{left.kind} of {self.visit(left.visit)} is missing")
        self.end_of_carries()
        for slot, grad in self.grads.items():
            why = f"grad slot {slot} still holds the gradient of {self.unit(grad.unit)}"
            self.refuse("once", why, ("grad slot", 0, slot), grad.op)
        for unit in sorted(self.needed.keys() - self.summed.keys()) if self.trace.replicas > 1 else ():
            why = f"the gradient of {self.unit(unit)} is never summed over replicas"
            self.refuse("replicas", why, ("grad shard", unit))
        for unit in self.shared:
            if unit not in self.joined:
                why = f"the gradient of {self.unit(unit)} is never summed over the stages that share it"
                self.refuse("shared", why, ("grad shard", unit))
        if self.norm is not None and not self.program.has_updates:
            self.at = self.norm
            self.refuse("norm", "nothing reads the norm: the program has no updates", ("norm",))
        for record in self.trace.units:
            if record.id in self.begun and record.id not in self.updated:
                why = f"the update of {record.name} does not end: it has {self.trace.parts(record.id)} parts"
                self.refuse("update", why, ("shard", record.id), self.begun[record.id])
            if self.program.has_updates and record.trainable and record.id not in self.updated:
                self.refuse("update", f"{record.name} is never updated, other units are", ("shard", record.id))
        for slot, carried in self.carried.items():
            held = self.weights[slot]
            if held.unit == carried and held.version == self.trace.units[carried].trainable:
                continue  # without updates in the program, one of all trainable units follows
            uses = (any(slot == at for _, at in self.trace.weights_of(op)) for op in self.ops)
            self.at = list(uses).index(True)  # the first one
            buffer = ("slot", 0, slot)
            if held.op < 0 or (not self.program.has_updates and self.trace.units[carried].trainable):
                why = f"slot {slot} holds no weights of this step; it must hold {self.unit(carried)}"
                self.refuse("weights", why, buffer)
            why = (
                f"slot {slot} is read before anything is gathered into it, so at the end it must hold the next step's "
                f"{self.unit(carried)}; it will hold {self.unit(held.unit)}{' of this step' * (not held.version)}. "
                f"Gather {self.unit(carried)} first, or once more after its update"
            )
            self.refuse("carry", why, buffer, held.op)
