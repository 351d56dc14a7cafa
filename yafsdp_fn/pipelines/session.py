"""Adds stages to a session: visits of other stages, messages, and results that other stages make.

    forward     what arrives; the loss: its visits run, placeholders stand for the others;    what leaves
    backward    what arrives; backward of what the forward has made;                          what leaves
    weights     what a backward in two halves has left for later

A call of a segment takes the messages that arrive for it from carry slots when it begins, and puts those that leave
there when it ends (stage_io.py).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from yafsdp_fn.nn.linear import AutogradRun
from yafsdp_fn.params.tree import Tree, tensors_in
from yafsdp_fn.pipelines.stage_io import Crossing, MessageBuffers, PieceKey, neutral
from yafsdp_fn.program.ops import Backward, Forward
from yafsdp_fn.program.split import Call
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.proof.stages import calls_of
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import Results, StepLoss, detached
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.errors import SAME_ORDER, OrderChanged
from yafsdp_fn.runtime.execute import BackwardRoot, Session
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.programs import Verified
from yafsdp_fn.runtime.recording import check_origin
from yafsdp_fn.runtime.reductions import Mean, is_reduction, shapes_in
from yafsdp_fn.runtime.shards import GradSlot
from yafsdp_fn.runtime.visit import GradTargets, ToSlots
from yafsdp_fn.util.torch_private import asks_for_values

# ---- Splits a visit's backward into two halves, for schedules that put other ops between them.
#
#     inputs     grad_x = grad_y w       sent on at once        (the factors grad_y, x are kept)
#     weights    slot = grad_y^T x       when nobody waits
#
# Products of `ya.linear` and `ya.embedding` are left for the second half. Autograd's gradients of other weights are
# made in the first half, and kept. A factor in a weight slot (x may be a weight itself) is copied: the slot holds
# another unit by then.


class Later:
    """The work that the first half leaves to the second. slots: addresses of the memory that blocks see as weights"""

    def __init__(self, slots: Collection[int]) -> None:
        self._slots = slots
        self.grad_slots: Sequence[GradSlot] = ()  # none is known yet
        self._by_unit: GradTargets = ()
        # what writes a gradient, of which factors, and their versions
        self._writes: list[tuple[Callable[..., None], list[Tensor], list[int]]] = []
        self._fresh: Sequence[Tensor | None] = ()

    def open(self, targets: GradTargets, task: AutogradRun) -> None:
        """Starts keeping the products that are gradients of leaves, in `task`."""
        self._by_unit = targets
        for unit in targets:
            for found, direct in filter(None, unit):
                found.later = self._leave
                found.task = task if direct else None

    def close(self, fresh: Sequence[Tensor | None]) -> None:
        """Ends the first half. fresh: autograd's gradients of all leaves"""
        self._fresh = [None if grad is None else self._own(grad) for grad in fresh]
        for unit in self._by_unit:
            for found, _ in filter(None, unit):
                found.later = found.task = None

    def write(self, target: ToSlots) -> None:
        """Runs the second half: writes the gradients to `target`."""
        target.open(self._by_unit, AutogradRun())
        for write, factors, versions in self._writes:
            for factor, before in zip(factors, versions, strict=True):
                if factor._version != before:
                    raise RuntimeError(
                        f"a tensor of {factor.numel()} elements that ya.linear or ya.embedding took, or a gradient of "
                        "what it gave, was written in place before the later half of its backward, which needs it; "
                        "work on a copy, or take an order of calls without halves (one_f_one_b)"
                    )
            write(*factors)
        target.close(self._fresh)

    def _leave(self, write: Callable[..., None], *given: Tensor) -> None:
        factors = [self._own(factor) for factor in given]
        self._writes.append((write, factors, [factor._version for factor in factors]))

    def _own(self, kept: Tensor) -> Tensor:
        return kept.clone() if kept.untyped_storage().data_ptr() in self._slots else kept


# ---- A session of one stage.


class Passed(NamedTuple):
    """A forward, until its backward.

    arrived: the tensors that its segment took and that have a gradient; left: those that left, whose gradients come
    back; own: further roots: the last token, and the loss if it is made here
    """

    arrived: dict[PieceKey, Tensor]
    left: dict[PieceKey, GradientEdge]
    own: list[BackwardRoot]


Forwards = dict[tuple[int, int], Passed]
"""Forwards that wait for their backward, by segment and microbatch."""


class StageSession(Session):
    """A session of one stage."""

    def __init__(self, memory: StateMemory, verified: Verified, *step: Any, **how: Any) -> None:
        super().__init__(memory, verified, *step, **how | {"activations": MessageBuffers})
        assert isinstance(verified.crossing, Crossing)
        self.crossing = verified.crossing
        self.slots.activations.reserve(self.crossing, verified.program)
        # the call under way: what it does at visits, and its name, for errors
        self.segment: Any = None
        self._named = ""
        self._later: dict[tuple[int, int], Later] = {}  # (visit, microbatch) between the halves of its backward

    # ---- the calls of the loss

    def run_calls(self, loss: StepLoss) -> Results:
        """Runs the loss: forwards, backwards and later halves of segments, in the order of the program."""
        results = StageResults(self.crossing, loss.arguments.microbatches, self.memory.comms.device)
        forwards: Forwards = {}
        for call in calls_of(self.verified.program):
            if call.kind == "forward":
                self._forward(loss, call, results, forwards)
            elif call.kind == "weights":
                self._weights(call)
            else:
                self._backward(loss, call, forwards)
        self.end_backward([None] * len(self.leaves))
        return Results(results.losses, results.aux, [])

    def _forward(self, loss: StepLoss, call: Call, results: "StageResults", forwards: Forwards) -> None:
        """Calls the loss for a segment, and keeps in `forwards` what its backward needs."""
        arrived = self._arrive(call)
        where = f"microbatch {call.microbatch}, step {self.number}"
        # values are leaves of this segment's graph, whose gradients go back
        taken = {key: x for key, x in arrived.items() if self.crossing.has_gradient(key)}
        for tensor in taken.values():
            tensor.requires_grad_(self.differentiates)
        self.segment = Segment(self.crossing, call, arrived, where)
        try:
            # of other microbatches and segments at once: what it writes to its batch stays its own
            mean, aux = self.call_loss(loss, call.microbatch, copied=True)
        except Exception as error:
            if not asks_for_values(error):
                raise
            raise errors.value_on_other_stage(f"the loss, called for {self._named},", error) from error
        # all stages alike: each of them has the whole loss
        if self.watch and check_origin([mean.total, *self.segment.given], self):
            raise RuntimeError(errors.READ_BESIDE_VISITS)
        # what it has made, and what leaves for other segments
        left: dict[PieceKey, Tensor] = self.segment.leaving(len(self.visits), self.position)
        # what left it hangs on a graph whose visits hold this session: a cycle that no collector sees
        self.segment = None
        has_loss = results.store(call, mean, aux)
        self._leave(call, {key: x.detach() for key, x in left.items()})
        if not self.differentiates:
            return
        # edges, not tensors: what has left needs no memory here
        own = [self.loss_root(mean)] if has_loss else []
        own.append(self.token_root())
        roots = {key: get_gradient_edge(x) for key, x in left.items() if self.crossing.has_gradient(key)}
        forwards[call.segment, call.microbatch] = Passed(taken, roots, own)

    def _backward(self, loss: StepLoss, call: Call, forwards: Forwards) -> None:
        """Runs the backward of a segment, from the loss, the token, and what has left, whose gradients have come
        back."""
        before = forwards.pop((call.segment, call.microbatch))
        back = self._arrive(call)
        roots = [*before.own, *((edge, back[key]) for key, edge in before.left.items())]
        found = self.gradients(loss, call.microbatch, roots, list(before.arrived.values()))
        self._leave(call, dict(zip(before.arrived, found, strict=True)))

    def _weights(self, call: Call) -> None:
        """Runs the later halves of the backwards of a segment."""
        self.microbatch = call.microbatch
        for number in reversed(self.crossing.split.visits(call.segment)):
            visit = self.verified.program.trace.visits[number]
            op = self.begin_compute("weights", visit, call.microbatch)
            assert isinstance(op, Backward)
            later = self._later.pop((number, call.microbatch))
            with torch.no_grad():
                later.write(super().target(op, visit))
            self.end_compute()

    # ---- what arrives for a call, and what leaves after it

    def _arrive(self, call: Call) -> dict[PieceKey, Tensor]:
        """Begins a call. Returns what arrives for it, from its carry slots."""
        self.begin(call)
        self._named = f"{call.kind} of segment {call.segment} (microbatch {call.microbatch}, step {self.number})"
        # what arrives is for the first compute of the call
        op = self._ops[self._cursor]
        assert isinstance(op, Forward | Backward), "issued ahead up to a compute"
        messages = self.crossing.split.taken_by(call)
        self.position = f"what arrives for {self._named}"
        with self.memory.using([("carry slot", self.slots.number, slot) for slot in op.takes]):
            pairs = list(zip(messages, op.takes, strict=True))
            return self.slots.activations.get(pairs) if pairs else {}

    def _leave(self, call: Call, leaving: Mapping[PieceKey, Tensor | None]) -> None:
        """Ends a call. What leaves after it goes into its carry slots, and the program goes on."""
        self.end()
        # what leaves is of its last compute
        op = next(op for op in reversed(self._ops[: self._cursor]) if isinstance(op, Forward | Backward))
        messages = self.crossing.split.given_by(call)
        self.position = f"what leaves after {self._named}"
        with self.memory.using([], [("carry slot", self.slots.number, slot) for slot in op.gives]):
            if messages:
                self.slots.activations.put(zip(messages, op.gives, strict=True), leaving)
        self.follow()

    def abort(self, error: BaseException) -> None:
        self.segment = None
        super().abort(error)

    def rank_position(self) -> str:
        return f"{super().rank_position()}, stage {self.memory.comms.stage}"

    # ---- visits

    def visit(self, call: BlockCall) -> Tree:
        """Runs a visit that is here; returns what stands for the outputs of another one."""
        number = len(self.visits)
        if self.differentiates and not torch.is_grad_enabled():
            raise errors.untracked(call.name)
        if self.watch:
            self.segment.given += call.tensors
        if self.segment.enter(call, number):
            self.new_visit(call)
            return self.segment.placeholders(call, number)
        return self.segment.checked(call, super().visit(call), number)

    def target(self, op: Backward, visit: Visit) -> Any:
        """Returns what takes the gradients of a visit's weights to its slots; of a first half, to the second one."""
        if op.half != "inputs":
            return super().target(op, visit)
        later = self._later[visit.id, op.microbatch] = Later(self.slots.storages)
        return later


# ---- One call of the loss: its visits, here and elsewhere.


class Segment:
    """The forward of one segment in one microbatch, at the visits of the loss.

    arrived: what the segment takes; where: names the call, for errors
    """

    def __init__(self, crossing: Crossing, call: Call, arrived: Mapping[PieceKey, Tensor], where: str) -> None:
        self._crossing, self._split, self._call, self._arrived = crossing, crossing.split, call, arrived
        self._where = where
        self.given: list[Tensor] = []  # what all visits take, in a step that looks
        self._left: dict[PieceKey, tuple[Tensor, int]] = {}  # with its version

    def enter(self, call: Any, number: int) -> bool:
        """Begins visit `number`, of the `BlockCall` `call`, and returns whether another segment has it. Where this one
        does, the arguments of the call are replaced by those that have arrived."""
        first, end = self._split.segments[self._call.segment]
        here = first <= number < end
        # is it the visit of the trace?
        visits = self._crossing.trace.visits
        expected = visits[number] if number < len(visits) else None
        if expected is None or (expected.name, expected.units) != (call.name, call.units):
            has = "no further visit" if expected is None else f"{expected.name} here"
            raise OrderChanged(f"{call.name} (visit {number}, {self._where}): the trace has {has}. {SAME_ORDER}")
        given = self._crossing.placeholders[number].given
        if call.given != given:
            raise errors.arguments_differ_from_trace(f"{call.name} (visit {number})", call.given, given)
        # what comes from another segment, and what goes to one
        for at, tensor in enumerate(call.tensors):
            key = self._crossing.key_of.get((number, at))
            if key is None:
                continue
            if here:
                call.tensors[at] = self._arrived[key]
            elif self._split.flows[key[0]].source == self._call.segment:
                self._left.setdefault(key, (tensor, tensor._version))
        return not here

    def placeholders(self, call: Any, number: int) -> Tree:
        """Returns what stands for the outputs of a visit that is elsewhere."""
        found = self._crossing.placeholders[number]
        call.structure = found.structure
        return call.outputs(found.tensors)

    def checked(self, call: Any, out: Tree, number: int) -> Tree:
        """Returns the outputs of a visit that is here. Raises if they differ from what stands for them elsewhere."""
        traced = self._crossing.placeholders[number]
        found = [(x.shape, x.dtype) for x in tensors_in(out)]
        expected = [(x.shape, x.dtype) for x in traced.tensors]
        if call.structure[0] != traced.structure[0] or found != expected:
            what = "it returns other shapes, or another tree"
            raise errors.visit_differs_from_trace(f"{call.name} (visit {number})", what)
        if _numbers(call.structure[1]) != _numbers(traced.structure[1]):
            raise errors.number_differs_from_trace(f"{call.name} (visit {number})")
        return out

    def leaving(self, visited: int, position: str) -> dict[PieceKey, Tensor]:
        """Returns the values that the loss has given to visits that are elsewhere, once it has returned after so many
        visits. position: for errors"""
        expected = self._crossing.trace.visits
        if visited < len(expected):
            raise OrderChanged(
                f"the loss has ended after {visited} visits; the trace has {expected[visited].name} next. {SAME_ORDER}"
            )
        # a tensor may be taken by several visits, and counts as it was at the first
        for (flow, _), (tensor, version) in self._left.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"{position}: a tensor of shape {tuple(tensor.shape)} that goes to segment "
                    f"{self._split.flows[flow].target} was written in place after a visit there took it; work on a copy"
                )
        return {key: tensor for key, (tensor, _) in self._left.items()}


def _numbers(outputs: Sequence[Any]) -> list[str]:
    """Returns the numbers and strings among the outputs of a visit, as text: NaN is not equal to itself."""
    return [repr(leaf) for leaf in outputs if isinstance(leaf, bool | int | float | complex | str)]


# ---- Losses and aux, of the stage that makes them.


class StageResults:
    """The loss and aux of every microbatch that this stage makes, and zeros for those that others make: the sum over
    stages has all."""

    def __init__(self, crossing: Crossing, microbatches: int, device: torch.device) -> None:
        self._crossing = crossing
        # zeros, until this stage has made something
        zero = torch.zeros((), dtype=crossing.total.dtype, device=device)
        self.losses = [Mean(zero, zero)] * microbatches
        self._nodes: list[list[Any]] = []
        for _ in range(microbatches):
            self._nodes.append([neutral(node, device) if is_reduction(node) else None for _, node in crossing.aux])
        self._spec: Any = None

    def store(self, call: Call, mean: Mean, aux: Tree) -> bool:
        """Keeps the results of this call; those that every stage makes count on the stage that makes the loss. Returns
        whether this call made the loss."""
        has_loss = call.segment == self._crossing.loss
        if has_loss and isinstance(mean.total, FakeTensor):
            raise OrderChanged(f"the loss is made of what another segment has made, as it was not before. {SAME_ORDER}")
        # of aux, what this segment makes, and what every stage has
        nodes, self._spec = optree.tree_flatten(aux, is_leaf=is_reduction)
        came = shapes_in(nodes)
        traced = shapes_in([node for _, node in self._crossing.aux])
        if came != traced:
            raise OrderChanged(
                f"aux: microbatch {call.microbatch} returned the shapes {came}, and {traced} when the step was traced; "
                "each call must return the same leaves, of the same shapes"
            )
        kept = self._nodes[call.microbatch]
        for at, ((home, _), node) in enumerate(zip(self._crossing.aux, nodes, strict=True)):
            made_here = has_loss if home is None else call.segment == home
            on_every_stage = home is None and not is_reduction(node)
            if made_here or on_every_stage:
                kept[at] = detached(node)
        if has_loss:
            self.losses[call.microbatch] = Mean(mean.total.detach(), mean.weight)
        return has_loss

    @property
    def aux(self) -> list[Tree]:
        return [optree.tree_unflatten(self._spec, nodes) for nodes in self._nodes]
