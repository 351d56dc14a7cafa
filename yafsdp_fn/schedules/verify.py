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
from typing import Any

from yafsdp_fn.schedules.further_ops import AllReduce, Exchange, Fetch, Offload, Receive, Send, Stash
from yafsdp_fn.schedules.ops import Backward, Forward, Gather, Norm, Reduce, Update, kind_of
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.rules.updates import UpdateRules
from yafsdp_fn.schedules.well_formed import check_form


def verify(program: Program) -> Program:
    """Returns `program` if it is right; raises `Refused`, which names op, buffer, rule and both uses, if not."""
    if not isinstance(program, Program):
        raise TypeError(f"verify: expected a Program, got {type(program).__name__}: Program(trace, ops)")
    check_form(program)
    _Checker(program).step()
    return program


class _Checker(UpdateRules):
    """The rules `order`, `graph` and `early`, which are of computes; and every op with its rules."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.computes = iter(self.trace.order)
        self.graphs: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # (op, slots of a kept graph)

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
            self.must_be_free("early", slot)

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
        self.leave_gradients(op)
        self.give_flows(op)

    def end(self) -> None:
        if (left := next(self.computes, None)) is not None:
            self.refuse("order", f"{left.kind} of {self.visit(left.visit)} is missing")
        self.end_of_carries()
        self.end_of_gradients()
        self.end_of_updates()
        self.end_of_weights()
