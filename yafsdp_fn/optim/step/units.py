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
from yafsdp_fn.optim.base import OnWrite, Scalar, State, as_transformation, stages
from yafsdp_fn.optim.step.cutting import Cutter, named
from yafsdp_fn.optim.step.definition import check_shapes
from yafsdp_fn.optim.step.lanes import Lane, clipping_scale, lanes_of, split_clips, units_of, why_not_unitwise
from yafsdp_fn.optim.whole.borrowed import Messages
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree


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
    """One whole step of `UnitSteps`: updates `params` and `opt_state` in place, and returns the latter."""
    steps = UnitSteps(tx, params, grads, opt_state, copies)
    steps.run(scale=scale, found_inf=found_inf, grad_norm=grad_norm, on_write=on_write)
    return steps.finish(found_inf)


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
            self._scale = clipping_scale(self._clips, scale, grad_norm)
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
