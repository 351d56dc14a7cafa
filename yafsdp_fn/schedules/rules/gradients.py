"""The rules `gradient`, `reduce`, `once`, `ordered`, `replicas` and `shared`: a gradient from its slot to the shard."""

from typing import NamedTuple

from yafsdp_fn.schedules.buffers import Buffer
from yafsdp_fn.schedules.further_ops import AllReduce
from yafsdp_fn.schedules.ops import Backward, Reduce
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.rules.weights import WeightRules

Contribution = tuple[int, int, int]
"""(visit, microbatch, unit)"""


class Gradient(NamedTuple):
    """What a gradient slot holds: the last op that wrote it, and the contributions that are in it."""

    unit: int
    op: int
    parts: tuple[Contribution, ...]


class GradientRules(WeightRules):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.grads: dict[int, Gradient] = {}
        self.reduced: dict[Contribution, int] = {}
        self.trained: set[int] = set()  # units of which a compute has written a gradient, or begun one
        self.shared = self.trace.shared
        self.summed: dict[int, int] = {}  # unit -> op that summed it over replicas
        self.joined: dict[int, int] = {}  # unit that stages share -> op that summed it over them
        self.needed: dict[int, list[Contribution]] = {}  # unit -> its contributions
        for visit, microbatch in sorted(
            (c.visit, c.microbatch) for c in self.trace.order if c.kind in ("backward", "weights")
        ):
            for unit in self.trace.visits[visit].trained:
                self.needed.setdefault(unit, []).append((visit, microbatch, unit))

    def must_be_free(self, rule: str, slot: int, unit: int | None = None) -> None:
        """Raises where a gradient slot holds what is not reduced; that of `unit` itself may be added to."""
        held = self.grads.get(slot)
        if held is not None and held.unit != unit:
            why = f"grad slot {slot} still holds the unreduced gradient of {self.unit(held.unit)}"
            self.refuse(rule, why, ("grad slot", 0, slot), held.op)

    def leave_gradients(self, op: Backward) -> None:
        for unit, slot in zip(self.trace.visits[op.visit].trained, op.grad_slots, strict=op.half != "inputs"):
            self.must_be_free("gradient", slot, unit)
            before = self.grads[slot].parts if slot in self.grads else ()
            self.grads[slot] = Gradient(unit, self.at, (*before, (op.visit, op.microbatch, unit)))
            self.trained.add(unit)

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

    def one_microbatch(self, unit: int, held: Gradient, buffer: Buffer) -> None:
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
        if unit not in self.needed:  # the shard holds what the step before has left
            self.refuse("shared", f"nothing on this stage trains {self.unit(unit)}", buffer)
        if unit in self.joined:
            why = f"the gradient of {self.unit(unit)} was summed over stages already"
            self.refuse("shared", why, buffer, self.joined[unit])
        self.complete("shared", unit)
        self.joined[unit] = self.at

    def end_of_gradients(self) -> None:
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
