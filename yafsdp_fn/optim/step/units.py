"""An optimizer's step in place, of all units at once or unit by unit, in any order, to the same bits."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import (
    Around,
    GradientTransformation,
    OnWrite,
    Scalar,
    Stage,
    State,
    as_transformation,
    name,
    stages,
)
from yafsdp_fn.optim.noise import Noise
from yafsdp_fn.optim.owner_compute import Leafwise, Messages
from yafsdp_fn.optim.partition import Masked, Partition, restricted
from yafsdp_fn.optim.scaling import ClipByGlobalNorm
from yafsdp_fn.optim.step.cutting import Cutter, named
from yafsdp_fn.optim.step.definition import Definition, MultiPhase, check_shapes, rounds
from yafsdp_fn.optim.step.fused import FusedSteps, recognise
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree

# ---- Decides how an optimizer's step may run: unit by unit or not, after the norm or before it, in parts; by which
# lanes.
#
# chain(clip, adamw)                          one lane, through a fused kernel
# chain(clip, partition(muon, adamw))         two: muon's by parts, adamw's through a fused kernel
#
# It is asked once for an optimizer, when a step function or its steps over a memory are made.


def needs_norm(tx: Any) -> bool:
    """Returns whether a step needs `grad_norm`: the first thing `tx` does is clip by it."""
    return bool(split_clips(list(stages(tx)))[0])


def why_not_unitwise(tx: Any) -> str | None:
    """Returns the reason why the step of `tx` cannot be taken unit by unit, or None if it can.

    Clipping by the global norm is fine as the first transformation: its factor is known before the first unit.
    """
    todo = [stage for stage, _ in split_clips(list(stages(tx)))[1]]
    lanes = [todo]
    if len(todo) == 1 and isinstance(todo[0].rule, Partition):
        lanes = [[one for one, _ in stages(part)] for part, _ in todo[0].rule.parts.values()]
    return next((reason for lane in lanes for one in lane if (reason := _why_not(one)) is not None), None)


def _why_not(tx: GradientTransformation) -> str | None:
    if isinstance(tx.rule, ClipByGlobalNorm):
        return "clip_by_global_norm is not the first transformation: it needs the updates of all units at once"
    if isinstance(tx.rule, Leafwise):
        return None
    if isinstance(tx.rule, Noise):
        return "add_noise depends on where an element lies: it needs all units at once"
    inner = [tx.rule.inner] if isinstance(tx.rule, Masked | Around) else []
    if isinstance(tx.rule, Partition):
        inner = [part for part, _ in tx.rule.parts.values()]
    for one in (one for part in inner for one, _ in stages(part)):
        if isinstance(one.rule, Leafwise):
            return (
                f"{name(one)} takes whole leaves inside of another transformation: put `partition` around all of them"
            )
        if (reason := _why_not(one)) is not None:
            return reason
    return None if tx.elementwise or inner else f"{name(tx)} does not declare `elementwise`: it may need whole leaves"


def parts_of(tx: Any, params: Tree) -> dict[int, int]:
    """Returns the parts in which each unit of sharded `params` takes its step, if several: leaves go to owners between
    them.

    Units that are not named have one part.
    """
    found: dict[int, int] = {}
    for own, part in _lanes_on(tx, params):
        for unit in units_of(part) if rounds(own) else ():
            found[unit] = max(found.get(unit, 1), 1 + 2 * rounds(own))
    return found


def leafwise_stages(tx: Any, params: Tree) -> list[tuple[Leafwise, Tree]]:
    """The transformations of whole leaves, in the parts of a step, each with the part of `params` that it concerns."""
    found = _lanes_on(tx, params)
    return [(stage.rule, part) for own, part in found for stage, _ in own if isinstance(stage.rule, Leafwise)]


def _lanes_on(tx: Any, params: Tree) -> list[tuple[list[Stage], Tree]]:
    if why_not_unitwise(tx) is not None:
        return []
    todo = split_clips([(stage, None) for stage, _ in stages(tx)])[1]
    return [(own, params if rule is None else restricted(params, rule)) for own, rule in lanes_of(todo)]


def lanes_of(todo: list[Stage]) -> list[tuple[list[Stage], LeafRule | None]]:
    """Returns pairs of stages and the rule for their leaves: several if `todo` is a partition, else one for all."""
    if len(todo) != 1 or not isinstance(todo[0][0].rule, Partition):
        return [(todo, None)]
    rule, state = todo[0][0].rule, todo[0][1]
    states = dict.fromkeys(rule.parts) if state is None else state.inner_states
    return [(list(stages(part, states[label])), chosen) for label, (part, chosen) in rule.parts.items()]


def units_of(params: Tree) -> list[int]:
    return [unit for handle in handles(params) for _, group, _ in handle.group_leaves() for unit in group.held]


def split_clips(todo: Sequence[Stage]) -> tuple[list[ClipByGlobalNorm], list[Stage]]:
    """Splits a chain into the clipping at its head, and the stages after it.

    This clipping costs nothing: the caller has the norm already, and its factor joins `scale`.
    """
    clips = []
    for tx, _ in todo:
        if not isinstance(tx.rule, ClipByGlobalNorm):
            break
        clips.append(tx.rule)
    return clips, list(todo[len(clips) :])


# ---- Takes an optimizer's step in place, of all units at once or unit by unit, in any order, to the same bits:
#
#     steps = UnitSteps(tx, params, grads, opt_state)
#     for unit in any_order:
#         steps.run([unit], scale=scale, found_inf=found_inf, grad_norm=norm)   # its gradient shard is complete
#     opt_state = steps.finish(found_inf)                                       # now counts advance, once for all units
#
# A unit is a layer of a stack (row i of shards [L, n]) or a shard [n] of its own. Elements are independent, so units
# share only counts: until `finish` all read those of the step before.
#
# Sequences of rules with a fused kernel take one pass and no memory (fused.py); everything else follows the
# definition (definition.py), on whole trees, or on trees of the units' rows.


class Lane:
    """The steps of one sequence of transformations on the leaves that `chosen` names, None for all.

    trees: parameters, gradients and maybe copies; units: those that have such leaves; parts: of the step of a unit
    """

    def __init__(self, todo: list[Stage], chosen: LeafRule | None, trees: Sequence[Tree | None]) -> None:
        self._chosen, self._whole = chosen, False
        params, grads, copies = (None if tree is None else self._own(tree) for tree in trees)
        self.units = frozenset(units_of(params))
        fusion = recognise(todo)
        columns = None if fusion is None else fusion.columns(params, grads, copies)
        self.steps: FusedSteps | Definition
        if fusion is not None and columns is not None:
            self.steps = FusedSteps(fusion, columns, params, chosen)
        else:
            by_parts = rounds(todo) and self.units
            self.steps = (MultiPhase if by_parts else Definition)(todo, params, grads, copies, chosen)
        self.parts = 1 + 2 * self.steps.rounds

    def _own(self, tree: Tree) -> Tree:
        return tree if self._chosen is None else restricted(tree, self._chosen)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self.steps.params)

    def renew(self, params: Tree) -> None:
        """Replaces the handles by `params`, a later state's handles on the same memory."""
        self.steps.params = self._own(params)

    def run(self, units: Sequence[int] | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite) -> None:
        """Takes the full step of `units`, or of all."""
        own = None if units is None else [unit for unit in units if unit in self.units]
        if own is None or own:
            self._whole = own is None
            cutter = None if own is None and self.parts == 1 else self._cutter
            self.steps.run(own, cutter, scale, found_inf, on_write)

    def finish(self, found_inf: Scalar) -> None:
        """Ends the step, after all units have taken it. If other stages hold them all, counts advance as there."""
        if not self.units and not self._whole and isinstance(self.steps, Definition):
            self.steps.run([], self._cutter, None, found_inf, lambda: None)
        self.steps.finish(found_inf)
        self._whole = False

    def part(
        self, unit: int, part: int, last: bool, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> list[Messages]:
        """Runs a part of the step of `unit`; returns the messages to exchange before the next. last: of all lanes"""
        if unit not in self.units:
            return []
        if isinstance(self.steps, MultiPhase):
            now = self.parts - 1 if last else part if part < self.parts - 1 else None
            return [] if now is None else self.steps.part(unit, now, self._cutter, scale, found_inf, on_write)
        if last:
            self.run([unit], scale, found_inf, on_write)
        return []


class UnitSteps:
    """Steps of `tx` over one memory; serves any number of steps, one after the other.

    params, grads, opt_state: trees, sharded or plain, that are written in place; grads are overwritten
    copies: of `params` in another dtype, which get their new values; on CUDA in the same pass if a kernel can

    The object is bound to their memory: after a donated step it serves the next, if `fits`. All calls of a step use one
    stream, from one thread at a time. Raises TypeError if `tx` needs whole leaves, and has shards.

    Bits do not depend on how units are grouped, for every transformation of this package. The same holds for a foreign
    one if its operations round every element alike, wherever in a tensor it lies: of torch's on the CPU, `pow`,
    `sigmoid` and the like do not, in the last place.
    """

    def __init__(self, tx: Any, params: Tree, grads: Tree, opt_state: State, copies: Tree | None = None) -> None:
        self._tx = as_transformation(tx)
        check_shapes(params, grads)
        self._trees, self._opt_state = (params, grads, copies), opt_state
        self._memory = _leaves(params, grads, opt_state)
        self._clips, todo = split_clips(list(stages(self._tx, opt_state)))
        self._left: set[int] | None = None  # units of the step under way, None between steps
        self._scale: Scalar = None
        by_parts = why_not_unitwise(self._tx) is None
        lanes = lanes_of(todo) if by_parts else [(todo, None)]
        self._lanes = [Lane(*lane, self._trees) for lane in lanes]
        self.parts = {  # of the steps of units, where there are several
            unit: max(lane.parts for lane in self._lanes if unit in lane.units)
            for unit in sorted({unit for lane in self._lanes if lane.parts > 1 for unit in lane.units})
        }
        self._open: dict[int, tuple[int, list[Messages]]] = {}  # unit between parts -> next part, messages before it

    @cached_property
    def _cutter(self) -> Cutter:
        if (reason := why_not_unitwise(self._tx)) is not None:
            raise TypeError(
                f"optim: {reason}, but units take their steps one by one; keep the optimizer outside the program"
            )
        return Cutter(self._trees[0])

    def fits(self, params: Tree, grads: Tree, opt_state: State) -> bool:
        """Returns whether these trees are the given memory, and no step over it is under way."""
        leaves = _leaves(params, grads, opt_state)
        return self._left is None and list(map(id, leaves)) == list(map(id, self._memory))

    def renew(self, params: Tree) -> None:
        """Replaces the handles by `params`, a later state's handles on the same memory; those of a donated state are
        refused."""
        self._trees = params, *self._trees[1:]
        for lane in self._lanes:
            lane.renew(params)

    @torch.no_grad()
    def run(
        self,
        units: Sequence[int] | None = None,
        *,
        part: int | None = None,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_norm: Tensor | None = None,
        on_write: OnWrite = lambda: None,
    ) -> None:
        """Takes the step of `units`, each once per step, or of all: parameters and state in place.

        part: of a multi-phase step (`parts_of`): one after the other, with the exchange of `messages` between; None for
            the full step
        The other arguments are the same in all calls of a step:
        scale: 0-dim, divides every gradient; None for 1
        found_inf: 0-dim; if it is 1, parameters and state (its counts too) keep their bits. Never read by the host
        grad_norm: 0-dim, the global norm of `grads / scale`; must be given if `needs_norm(tx)`, unless all are updated
        on_write: called before the first write to parameters or state; an exception before it leaves both as they were
        """
        first = self._left is None
        if not part:
            self._take(units)
        if first:  # all divide alike
            if self._clips and grad_norm is None:
                if units is not None:
                    self._left = None
                    raise ValueError(
                        "optim: clip_by_global_norm needs the norm of the gradients of all units: pass grad_norm, and "
                        "update no unit before it is known"
                    )
                grad_norm = global_norm(self._trees[1])
                grad_norm = grad_norm if scale is None else grad_norm / scale
            self._scale = _clipping_scale(self._clips, scale, grad_norm)
        if part is None:
            if units is None and len(self._lanes) > 1 and handles(self._trees[0]):
                units = list(self._cutter.names)  # the first lane's write ends the generation of whole handles
            for lane in self._lanes:
                lane.run(units, self._scale, found_inf, on_write)
            return
        for unit in units or ():
            last = part + 1 == self.parts.get(unit, 1)
            if part != self._open.pop(unit, (0, None))[0]:
                raise RuntimeError(f"optim: part {part} of {named(self._cutter.names, [unit])} is out of turn")
            of_lanes = [lane.part(unit, part, last, self._scale, found_inf, on_write) for lane in self._lanes]
            if not last:
                self._open[unit] = part + 1, [pair for of_lane in of_lanes for pair in of_lane]

    def messages(self, units: Sequence[int]) -> list[Messages]:
        """Returns the messages that ranks exchange between the parts of `units`, in this order."""
        return [pair for unit in units for pair in self._open[unit][1]]

    def _units_here(self) -> bool:
        """Returns whether there is anything to update: a stage may hold none of the trained units."""
        found = handles(self._trees[0])
        return not found or bool(units_of(self._trees[0]))

    def _take(self, units: Sequence[int] | None) -> None:
        """Records that `units` take their step."""
        if units is None:
            if self._left is not None:
                raise RuntimeError("optim: a step of all units inside of one unit by unit; `finish` ends a step")
            self._left = set()
            return
        names = self._cutter.names
        left = set(names) if self._left is None else self._left
        if unknown := ", ".join(str(unit) for unit in units if unit not in names):
            there = named(names, sorted(names))
            raise ValueError(f"optim: no trainable unit has the number {unknown}; there are {there}")
        if twice := sorted(unit for unit, times in Counter(units).items() if times > 1 or unit not in left):
            raise RuntimeError(f"optim: a second update in one step of {named(names, twice)}; `finish` ends a step")
        self._left = left.difference(units)

    @torch.no_grad()
    def finish(self, found_inf: Tensor | None = None) -> State:
        """Ends the step: counts advance, unless it is skipped. Returns the state, with the same leaves."""
        idle = self._left is None and not self._units_here()
        if not idle and (self._left is None or self._left or self._open):
            names = self._cutter.names
            missing = sorted(names if self._left is None else self._left | self._open.keys())
            raise RuntimeError(f"optim: the step ends without an update of {named(names, missing)}")
        for lane in self._lanes:
            lane.finish(found_inf)
        self._left = None
        return self._opt_state


def _leaves(*trees: Tree) -> list[Any]:
    return [leaf for tree in trees for leaf in optree.tree_leaves(tree)]


def _clipping_scale(clips: Sequence[ClipByGlobalNorm], scale: Scalar, grad_norm: Scalar) -> Scalar:
    """Returns the divisor of gradients of norm `grad_norm` (after division by `scale`); `scale` or more."""
    for clip in clips:
        assert grad_norm is not None
        excess = (grad_norm / clip.max_norm).clamp(min=1.0)
        scale = excess if scale is None else scale * excess
        grad_norm = grad_norm.clamp(max=clip.max_norm)
    return scale


# ---- Takes one full step of all units, on trees that nobody keeps; `UnitSteps` serves any number of steps.


@torch.no_grad()
def step_(
    tx: Any,
    params: Tree,
    grads: Tree,
    opt_state: State,
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    on_write: OnWrite = lambda: None,
    copies: Tree | None = None,
) -> State:
    """Takes one full step of `UnitSteps`: updates `params` and `opt_state` in place, and returns the latter."""
    steps = UnitSteps(tx, params, grads, opt_state, copies)
    steps.run(scale=scale, found_inf=found_inf, grad_norm=grad_norm, on_write=on_write)
    return steps.finish(found_inf)
