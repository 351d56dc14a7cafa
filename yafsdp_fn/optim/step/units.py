"""An optimizer's step in place, of all units at once or unit by unit, in any order, to the same bits:

    steps = UnitSteps(tx, params, grads, opt_state)
    for unit in any_order:
        steps.run([unit], scale=scale, found_inf=found_inf, grad_norm=norm)   # its gradient shard is complete
    opt_state = steps.finish(found_inf)                                       # now counts advance, once for all units

A unit is a layer of a stack (row i of shards [L, n]) or a shard [n] of its own. Elements do not know of each other, so
nothing but counts is shared by units: until `finish` everyone reads those of the step before.

Sequences of rules that torch has a fused kernel for take one pass and no memory (fused.py); everything else follows the
definition (definition.py), on whole trees, or on trees of the units' rows.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.algebra import global_norm
from yafsdp_fn.optim.base import OnWrite, Scalar, Stage, State, as_transformation, stages
from yafsdp_fn.optim.clipping import ClipByGlobalNorm
from yafsdp_fn.optim.partition import restricted
from yafsdp_fn.optim.step.by_parts import ByParts, rounds
from yafsdp_fn.optim.step.cutting import Cutter, named
from yafsdp_fn.optim.step.definition import Definition, check_shapes
from yafsdp_fn.optim.step.fused import FusedSteps
from yafsdp_fn.optim.step.recognised import recognise
from yafsdp_fn.optim.step.unitwise import lanes_of, split_clips, units_of, why_not_unitwise
from yafsdp_fn.optim.whole.borrowed import Messages
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree


class Lane:
    """What one sequence of transformations does to the leaves that `chosen` names, None for all.

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
            self.steps = (ByParts if by_parts else Definition)(todo, params, grads, copies, chosen)
        self.parts = 1 + 2 * self.steps.rounds

    def _own(self, tree: Tree) -> Tree:
        return tree if self._chosen is None else restricted(tree, self._chosen)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self.steps.params)

    def renew(self, params: Tree) -> None:
        """`params` are a later state's handles on the same memory."""
        self.steps.params = self._own(params)

    def run(self, units: Sequence[int] | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite) -> None:
        """The whole step of `units`, or of all."""
        own = None if units is None else [unit for unit in units if unit in self.units]
        if own is None or own:
            self._whole = own is None
            cutter = None if own is None and self.parts == 1 else self._cutter
            self.steps.run(own, cutter, scale, found_inf, on_write)

    def finish(self, found_inf: Scalar) -> None:
        """When all units have taken their step. Where other stages hold them all, counts go on as they do there."""
        if not self.units and not self._whole and isinstance(self.steps, Definition):
            self.steps.run([], self._cutter, None, found_inf, lambda: None)
        self.steps.finish(found_inf)
        self._whole = False

    def part(
        self, unit: int, part: int, last: bool, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> list[Messages]:
        """A part of the step of `unit`; returns what is to be exchanged before the next. last: of all lanes"""
        if unit not in self.units:
            return []
        if isinstance(self.steps, ByParts):
            now = self.parts - 1 if last else part if part < self.parts - 1 else None
            return [] if now is None else self.steps.part(unit, now, self._cutter, scale, found_inf, on_write)
        if last:
            self.run([unit], scale, found_inf, on_write)
        return []


class UnitSteps:
    """Steps of `tx` over one memory; serves any number of steps, one after the other.

    params, grads, opt_state: trees, sharded or plain, that are written in place; grads are overwritten
    copies: of `params` in another dtype, which take their new values; on CUDA in the same pass where a kernel can

    The object is for their memory: after a step that was donated it serves the next, `fits` says whether. All calls of
    a step go to one stream, from one thread at a time. Raises TypeError where `tx` needs whole leaves, and has shards.

    Bits do not depend on how units are grouped, for every transformation of this package. For a foreign one neither, if
    it uses operations that round every element alike, wherever in a tensor it lies: of torch's on the CPU, `pow`,
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
        self._open: dict[int, tuple[int, list[Messages]]] = {}  # unit between parts: the next, what comes before it

    @cached_property
    def _cutter(self) -> Cutter:
        if (reason := why_not_unitwise(self._tx)) is not None:
            raise TypeError(
                f"optim: {reason}, but units take their steps one by one; keep the optimizer outside the program"
            )
        return Cutter(self._trees[0])

    def fits(self, params: Tree, grads: Tree, opt_state: State) -> bool:
        """Whether these trees are the memory that was given, and no step over it is under way."""
        leaves = _leaves(params, grads, opt_state)
        return self._left is None and list(map(id, leaves)) == list(map(id, self._memory))

    def renew(self, params: Tree) -> None:
        """`params` are a later state's handles on the memory that was given: those of a donated state refuse."""
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
        """The step of `units`, each once per step, or of all that there is: parameters and state in place.

        part: of the step, where units have several (`parts_of`): one after the other, with the exchange of `messages`
            between; None for all of it at once
        The others are the same values in all calls of a step:
        scale: 0-dim, what every gradient is to be divided by; None for 1
        found_inf: 0-dim; where it is 1, parameters and state (its counts too) keep their bits. Never read by the host
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
        """What ranks are to exchange between the parts of `units`, in this order."""
        return [pair for unit in units for pair in self._open[unit][1]]

    def _units_here(self) -> bool:
        """Whether there is anything to update: a stage may hold none of the trained units."""
        found = handles(self._trees[0])
        return not found or bool(units_of(self._trees[0]))

    def _take(self, units: Sequence[int] | None) -> None:
        """Takes note that `units` take their step."""
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
        """Ends the step: counts advance, unless it is skipped. Returns the state, whose leaves stay what they were."""
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
    """What gradients of norm `grad_norm` (after division by `scale`) are to be divided by; `scale` itself at most."""
    for clip in clips:
        assert grad_norm is not None
        excess = (grad_norm / clip.max_norm).clamp(min=1.0)
        scale = excess if scale is None else scale * excess
        grad_norm = grad_norm.clamp(max=clip.max_norm)
    return scale
