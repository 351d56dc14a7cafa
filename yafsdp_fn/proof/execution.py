"""Executes a program on symbols, with the contents of every buffer, and asks the rules of `verify` before each change.

    for op in program:
        for moment in op:                  a backward: backward, crosses, take, read, load, resume, write, ...
            for rule in rules:             those that have a check for this moment
                rule.moment(run, ...)     refuses, or not
            contents change

Rules have no state of their own: a check looks at the execution. verify.py has the list of rules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, NoReturn, TypeVar

from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    Buffer,
    ComputeOp,
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
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Message
from yafsdp_fn.program.trace import writes_of
from yafsdp_fn.proof.errors import refusal


class Weights(NamedTuple):
    """Contents of a weight slot: a unit's weights of this step (version 0) or of the next (1), and the op that wrote
    them, -1 where the step before did."""

    unit: int
    version: int
    op: int


Contribution = tuple[int, int, int]
"""(visit, microbatch, unit)"""


class Gradient(NamedTuple):
    """Contents of a gradient slot: the last op that wrote it, and the contributions that are in it."""

    unit: int
    op: int
    contributions: tuple[Contribution, ...]


class Activation(NamedTuple):
    """Contents of a carry slot: what a visit has saved, by its number, or a message of a pipeline, and the op that put
    it there."""

    what: int | Message
    op: int


# ---- A rule: checks, by the moment at which they are asked.


What = TypeVar("What")
OfProgram = Callable[[Program], None] | None
Of = Callable[["Execution", What], None] | None
OfUnit = Callable[["Execution", int, What], None] | None
OfCarrySlot = Callable[["Execution", int, int | Message], None] | None
"""Checks: of a program, of an op, of one unit of an op (and the op, or the slot), of a carry slot and its content."""


@dataclass(frozen=True)
class Rule:
    """A rule of `verify`: its name, its sentence, and a check for each moment that it is asked at.

    of a program    form: before anything is executed
    of an op        the moment of its name, before it changes anything: for each unit, with the op, or with its slot
    of a reduction  add: for each unit and its slot, when all of the op's gradients are known to be there
    in a compute    crosses: it takes, or gives, so many messages in carry slots; read: the weights of a unit; save,
                    load: the carry; resume: a backward runs on what its forward kept; begin: a forward may begin
                    gradients; write: a gradient, of one unit
    of any op       take, put: it empties or fills a carry slot
    at the end      end; last: of each slot that the program reads before it gathers into it
    of all stages   pipeline: before anything else; in_form: when all ops are in form; proved: when each is right
    """

    name: str
    sentence: str
    # of a program
    form: OfProgram = None
    # of an op
    gather: OfUnit[Gather] = None
    stash: OfUnit[int] = None
    forward: Of[Forward] = None
    backward: Of[Backward] = None
    reduce: OfUnit[int] = None
    add: OfUnit[int] = None
    allreduce: OfUnit[AllReduce] = None
    norm: Of[Norm] = None
    update: OfUnit[Update] = None
    exchange: OfUnit[Exchange] = None
    fetch: Of[Fetch] = None
    send: Of[Send] = None
    receive: Of[Receive] = None
    # in a compute
    crosses: Callable[["Execution", ComputeOp, str, Sequence[Message]], None] | None = None
    read: OfUnit[int] = None
    save: Of[Forward] = None
    load: Of[Backward] = None
    resume: Of[Backward] = None
    begin: Of[Forward] = None
    write: OfUnit[int] = None
    # of any op
    take: OfCarrySlot = None
    put: OfCarrySlot = None
    # at the end
    end: Callable[["Execution"], None] | None = None
    last: OfUnit[int] = None
    # of all stages
    pipeline: OfProgram = None
    in_form: OfProgram = None
    proved: OfProgram = None


Checks = Mapping[str, Sequence[tuple[str, Callable[..., None]]]]
"""Moment -> the rules that are asked at it, in their order: name and check."""


def by_moment(rules: Sequence[Rule]) -> Checks:
    """Returns the checks of `rules`, by the moment at which they are asked."""
    moments = [field.name for field in fields(Rule)][2:]
    found: dict[str, list[tuple[str, Callable[..., None]]]] = {moment: [] for moment in moments}
    for rule in rules:
        for moment in moments:
            check = getattr(rule, moment)
            if check is not None:
                found[moment].append((rule.name, check))
    return found


# ---- The execution.


class Execution:
    """One execution of a program that is in form.

    at              index of the op being executed, -1 at the end
    done            number of computes executed
    needed          unit -> the contributions to its gradient
    shared          the units that this stage trains together with others
    carried         weight slot -> the unit that the step before must have left there

    Contents of buffers:
    slots, grads    of weight slots, of gradient slots
    activations     of carry slots
    host            visits whose carry is on the host
    secondary       unit -> op that stashed it

    What has been done:
    saved, graphs   (visit, microbatch) -> the forward that saved a carry; the forward, and the slots of a kept graph
    trained         units of which a compute has written a gradient, or begun one
    reduced         contribution -> op that added it to its shard
    summed, joined  unit -> op that summed its gradient over replicas, over stages
    norm            the op that took it
    begun, updated  unit -> op that began, ended its update
    turns           unit -> parts of its update, and exchanges between them, executed so far
    """

    def __init__(self, program: Program, checks: Checks) -> None:
        self.program = program
        self._checks = checks
        self.at = -1
        self.done = 0
        self._rule = ""
        # what the program is
        self.trace = program.trace
        self.split = self.trace.cut
        self.ops = program.ops
        computes = [at for at, op in enumerate(self.ops) if isinstance(op, ComputeOp)]
        self.last_compute = max(computes, default=-1)
        self.has_updates = program.has_updates
        self.shared = self.trace.shared
        self.needed: dict[int, list[Contribution]] = {}
        for now in sorted(self.trace.order, key=lambda now: (now.visit, now.microbatch)):
            for unit in writes_of(now, self.trace):
                self.needed.setdefault(unit, []).append((now.visit, now.microbatch, unit))
        self.carried = program.carried()
        # contents of buffers
        self.slots = {slot: Weights(unit, 0, -1) for slot, unit in self.carried.items()}
        self.secondary: dict[int, int] = {}
        self.grads: dict[int, Gradient] = {}
        self.activations: dict[int, Activation] = {}
        self.host: set[int] = set()
        # what has been done
        self.saved: dict[tuple[int, int], int] = {}
        self.graphs: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.reduced: dict[Contribution, int] = {}
        self.summed: dict[int, int] = {}
        self.joined: dict[int, int] = {}
        self.trained: set[int] = set()
        self.norm: int | None = None
        self.begun: dict[int, int] = {}
        self.updated: dict[int, int] = {}
        self.turns: dict[int, int] = {}

    def run(self) -> None:
        """Executes the program. Raises Refused where a rule refuses."""
        for at, op in enumerate(self.ops):
            self.at = at
            execute = getattr(self, f"_{type(op).__name__.lower()}")
            execute(op)
        self.at = -1
        self._ask("end")
        for slot, unit in self.carried.items():
            self._ask("last", unit, slot)

    def _ask(self, moment: str, *what: object) -> None:
        """Asks the rules that have a check for a moment, in their order. what: the check is given"""
        for rule, check in self._checks[moment]:
            self._rule = rule
            check(self, *what)

    # ---- what rules ask of it

    def refuse(
        self, why: str, buffer: Buffer | None = None, other: int | None = None, at: int | None = None
    ) -> NoReturn:
        """Refuses op `at`, by default the one that is executed, by the rule that is asked. other: the op that it
        collides with, -1 for the step before"""
        raise refusal(self.program, self._rule, self.at if at is None else at, why, buffer, other)

    def sums(self, unit: int) -> bool:
        """Says whether a sum over replicas counts now: there are some, and no later gradient overwrites it."""
        return self.trace.replicas > 1 and unit in self.trained

    def last_reduced(self, unit: int) -> int | None:
        """Returns the last op that reduced a part of the gradient of `unit`."""
        return max((at for (_, _, other), at in self.reduced.items() if other == unit), default=None)

    def unit(self, unit: int) -> str:
        """Returns the name of a unit."""
        return self.trace.units[unit].name

    def visit(self, visit: int) -> str:
        """Returns the name of a visit."""
        return self.trace.visits[visit].name

    # ---- computes

    def _forward(self, op: Forward) -> None:
        """Takes messages, reads weights, and leaves a graph, or a carry, for the backward; gives messages."""
        self._ask("forward", op)
        self.done += 1
        self._cross(op, "takes")
        self._read(op)
        self.graphs[op.visit, op.microbatch] = self.at, op.slots if op.keep else ()
        if op.carry_slot is not None:
            self._ask("save", op)
            self._put(op.carry_slot, op.visit)
            self.saved[op.visit, op.microbatch] = self.at
        self._cross(op, "gives")
        if op.early:
            self._ask("begin", op)
            self.trained.update(self.trace.visits[op.visit].trained)

    def _backward(self, op: Backward) -> None:
        """Goes on from what its forward left, and writes gradients: both, or the half that it is."""
        self._ask("backward", op)
        self.done += 1
        self._cross(op, "takes")
        if op.half != "weights":
            self._read(op)
            self._ask("load", op)
            self.saved.pop((op.visit, op.microbatch), None)
            if op.carry_slot is not None:
                self._take(op.carry_slot, op.visit)
            self._ask("resume", op)
        if op.half != "inputs":
            self._write(op)
        self._cross(op, "gives")

    def _read(self, op: ComputeOp) -> None:
        """Reads the weights of a compute."""
        for unit, slot in zip(self.trace.visits[op.visit].units, op.slots, strict=True):
            self._ask("read", unit, slot)

    def _write(self, op: Backward) -> None:
        """Adds the contributions of a backward to its gradient slots."""
        for unit, slot in zip(self.trace.visits[op.visit].trained, op.grad_slots, strict=True):
            self._ask("write", unit, slot)
            before = self.grads[slot].contributions if slot in self.grads else ()
            self.grads[slot] = Gradient(unit, self.at, (*before, (op.visit, op.microbatch, unit)))
            self.trained.add(unit)

    def _cross(self, op: ComputeOp, way: Literal["takes", "gives"]) -> None:
        """Takes the messages of a compute from its carry slots, or gives them."""
        messages = getattr(self.split, way)(kind_of(op), op.visit, op.microbatch)
        self._ask("crosses", op, way, messages)
        change = self._take if way == "takes" else self._put
        for slot, message in zip(getattr(op, way), messages, strict=True):
            change(slot, message)

    # ---- weights

    def _gather(self, op: Gather) -> None:
        """Fills weight slots: after the update of a unit, with the weights of the next step."""
        for unit, slot in zip(op.units, op.slots, strict=True):
            self._ask("gather", unit, op)
            self.slots[slot] = Weights(unit, int(unit in self.updated), self.at)

    def _stash(self, op: Stash) -> None:
        """Fills secondary shards from weight slots."""
        for unit, slot in zip(op.units, op.slots, strict=True):
            self._ask("stash", unit, slot)
            self.secondary[unit] = self.at

    # ---- gradients

    def _reduce(self, op: Reduce) -> None:
        """Empties gradient slots: their contributions are in gradient shards from now on."""
        for moment in ("reduce", "add"):
            for unit, slot in zip(op.units, op.grad_slots, strict=True):
                self._ask(moment, unit, slot)
        for slot in op.grad_slots:
            for contribution in self.grads.pop(slot).contributions:
                self.reduced[contribution] = self.at

    def _allreduce(self, op: AllReduce) -> None:
        """Sums gradient shards over stages, or over replicas, if that counts."""
        for unit in op.units:
            self._ask("allreduce", unit, op)
            if op.over == "stages":
                self.joined[unit] = self.at
            elif self.sums(unit):
                self.summed[unit] = self.at

    # ---- the optimizer

    def _norm(self, op: Norm) -> None:
        self._ask("norm", op)
        self.norm = self.at

    def _update(self, op: Update) -> None:
        """Takes one part of the optimizer's step; the last one makes a unit's weights those of the next step."""
        for unit in op.units:
            self._ask("update", unit, op)
            self.turns[unit] = 2 * op.part + 1
            self.begun.setdefault(unit, self.at)
            if op.part + 1 == self.trace.parts(unit):
                self.updated[unit] = self.at

    def _exchange(self, op: Exchange) -> None:
        """Moves leaves between two parts of an update."""
        for unit in op.units:
            self._ask("exchange", unit, op)
            self.turns[unit] = 2 * op.part + 2

    # ---- carry slots

    def _offload(self, op: Offload) -> None:
        """Moves a carry to the host."""
        self._take(op.carry_slot, op.visit)
        self.host.add(op.visit)

    def _fetch(self, op: Fetch) -> None:
        """Moves a carry back from the host."""
        self._ask("fetch", op)
        self.host.remove(op.visit)
        self._put(op.carry_slot, op.visit)

    def _send(self, op: Send) -> None:
        self._ask("send", op)
        self._take(op.carry_slot, op.message)

    def _receive(self, op: Receive) -> None:
        self._ask("receive", op)
        self._put(op.carry_slot, op.message)

    def _take(self, slot: int, what: int | Message) -> None:
        """Empties a carry slot."""
        self._ask("take", slot, what)
        del self.activations[slot]

    def _put(self, slot: int, what: int | Message) -> None:
        """Fills a carry slot."""
        self._ask("put", slot, what)
        self.activations[slot] = Activation(what, self.at)
