"""An optimizer's step in place, of all units at once or unit by unit, in any order, to the same bits."""

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import OnWrite, Scalar, State, as_transformation
from yafsdp_fn.optim.cutting import Cutter
from yafsdp_fn.optim.in_format import block_of
from yafsdp_fn.optim.leaf_exchange import Messages
from yafsdp_fn.optim.leafwise import exchanged
from yafsdp_fn.optim.on_host import HostStates, leaves_on_host
from yafsdp_fn.optim.scaling import ClipByGlobalNorm
from yafsdp_fn.optim.step.analysis import analysis, check_gradients, own_part, parts_of, units_of
from yafsdp_fn.optim.step.definition import Definition, Lane, StepCall
from yafsdp_fn.optim.step.fused import FusedSteps, fused_steps
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree

# ---- The same bits by any grouping of units, in any order:
#
#     steps = UnitSteps(tx, params, grads, opt_state)
#     for unit in any_order:
#         steps.run([unit], scale=scale, found_inf=found_inf, grad_norm=norm)   # its gradient shard is complete
#     opt_state = steps.finish(found_inf)                                       # now counts advance, once for all units
#
# A unit is a layer of a stack (row i of shards [L, n]) or a shard [n] of its own. Elements are independent, so units
# share only counts: until `finish` all read those of the step before.
#
# The step of some units is one generator for each lane, a sequence of rules on the leaves that it is for:
#
#     read their rows -> the rules' arithmetic -> yield the messages by which leaves go to owners and back -> write
#
# A sequence of rules with a fused kernel has one pass and no memory in place of the arithmetic (fused.py); all others
# follow the definition (definition.py), on whole trees, or on trees of the units' rows.


class UnitSteps:
    """Steps of `tx` over one memory; serves any number of steps, one after the other.

    params, grads, opt_state: trees, sharded or plain, that are written in place; grads are overwritten
    copies: of `params` in another dtype, which get their new values

    The object is bound to their memory: after a donated step it serves the next, if `fits`. All calls of a step use one
    stream, from one thread at a time. `run` of single units raises TypeError where `why_not_unitwise(tx)` has a reason.
    That each unit is updated once, and its parts in turn, is `verify`'s to say (rule `update`).

    Bits do not depend on how units are grouped, for every transformation of this package. The same holds for a foreign
    one if its operations round every element alike, wherever in a tensor it lies: of torch's on the CPU, `pow`,
    `sigmoid` and the like do not, in the last place.
    """

    def __init__(self, tx: Any, params: Tree, grads: Tree, opt_state: State, copies: Tree | None = None) -> None:
        self._tx = as_transformation(tx)
        check_gradients(params, grads)
        self._params, self._grads, self._opt_state = params, grads, opt_state
        whole: Any = [params, grads, opt_state]
        self._memory: list[Any] = optree.tree_leaves(whole)
        self._clips, lanes, self._why_not = analysis(self._tx, opt_state)
        leaves = leaves_on_host(opt_state)
        if leaves and self._why_not is not None:
            raise TypeError(f"optim: {self._why_not}, but states that are on the host are fetched unit by unit")
        self._host = HostStates(leaves, handles(params)[0].owner) if leaves else None
        self._begun = False  # a step is under way
        self._scale: Scalar = None
        self._lanes: list[FusedSteps | Definition] = []
        for own, chosen in lanes:
            parts, of_grads, of_copies = (own_part(tree, chosen) for tree in (params, grads, copies))
            units = None if self._why_not or not handles(params) else frozenset(units_of(parts))
            lane = Lane(own, parts, of_grads, of_copies, chosen, units, self._host.rows if self._host else {})
            self._lanes.append(fused_steps(lane) or Definition(lane))
        self.parts = parts_of(self._tx, params)  # of the steps of units, where there are several
        # what is kept in a format is decoded in the memory of one unit, and so is what comes from the host
        in_turn = block_of(self._tx) > 1 or self._host is not None
        self._one_by_one = in_turn and self._why_not is None and bool(handles(params))
        # unit between parts -> the parts to come, and the messages before them
        self._open: dict[int, tuple[Generator[list[Messages], None, None], list[Messages]]] = {}

    @cached_property
    def _cutter(self) -> Cutter:
        if self._why_not is not None:
            raise TypeError(
                f"optim: {self._why_not}, but units take their steps one by one; keep the optimizer outside the program"
            )
        return Cutter(self._params)

    def fits(self, params: Tree, grads: Tree, opt_state: State) -> bool:
        """Returns whether the leaves of these trees are the given memory, while no step over it is under way."""
        whole: Any = [params, grads, opt_state]
        leaves: list[Any] = optree.tree_leaves(whole)
        return not self._begun and list(map(id, leaves)) == list(map(id, self._memory))

    def renew(self, params: Tree) -> None:
        """Replaces the handles by `params`, a later state's handles on the same memory; those of a donated state are
        refused."""
        self._params = params
        for steps in self._lanes:
            lane = steps.lane
            steps.lane = lane._replace(params=params if lane.chosen is None else own_part(params, lane.chosen))

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

        part: of a step in several parts (`parts_of`), one after the other, with an exchange of `messages` between;
            None for the full step
        The other arguments are the same in all calls of a step:
        scale: 0-dim, divides every gradient; None for 1
        found_inf: 0-dim; if it is 1, parameters and state (its counts too) keep their bits. Never read by the host
        grad_norm: 0-dim, the global norm of `grads / scale`; None if no gradient changes any more: it is taken here
        on_write: called before the first write to parameters or state; an exception before it leaves both as they were
        """
        if not self._begun:
            self._begun = True  # all units divide alike
            if self._clips and grad_norm is None:
                grad_norm = global_norm(self._grads)
                grad_norm = grad_norm if scale is None else grad_norm / scale
            self._scale = _clipping_scale(self._clips, scale, grad_norm)
        if units is None and (self.parts or self._one_by_one or (len(self._lanes) > 1 and handles(self._params))):
            units = self._cutter.units  # the first lane's write ends the generation of whole handles
        alone = [unit for unit in units or () if part or self._one_by_one or unit in self.parts]
        together = None if units is None else [unit for unit in units if unit not in alone]
        if together is None or together:
            list(self._steps(together, 1, found_inf, on_write))  # in one part: no messages
        for unit in alone:
            parts = self.parts.get(unit, 1)
            steps, _ = self._open.pop(unit, (self._steps([unit], parts, found_inf, on_write), []))
            last = part is None or part + 1 == parts
            with self._host.using(unit, last=last) if self._host and (last or not part) else nullcontext():
                if part is None:
                    exchanged(steps, handles(self._params)[0].owner.comms)
                    continue
                for messages in steps:
                    self._open[unit] = steps, messages
                    break

    def _steps(
        self, units: Sequence[int] | None, parts: int, found_inf: Scalar, on_write: OnWrite
    ) -> Generator[list[Messages], None, None]:
        """Takes the step of `units`, or of all, in all lanes; yields the messages between parts. Lanes that need fewer
        write in the last one, too."""
        cutter, of_each = None if units is None else self._cutter, []
        for steps in self._lanes:
            held = steps.lane.units
            own = None if units is None else [unit for unit in units if unit in (held or ())]
            if own or (own is None and held != frozenset()):
                of_each.append(steps.steps(StepCall(own, parts, cutter, self._scale, found_inf, on_write)))
        for _ in range(1, parts):  # messages are in no variable, which would keep their memory until the next
            yield [messages for each in of_each for messages in next(each)]
        for each in of_each:
            list(each)  # the write

    def messages(self, units: Sequence[int]) -> list[Messages]:
        """Returns the messages that ranks exchange between the parts of `units`, in this order."""
        return [pair for unit in units for pair in self._open[unit][1]]

    @torch.no_grad()
    def finish(self, found_inf: Tensor | None = None) -> State:
        """Ends the step: counts advance, unless it is skipped. Returns the state, with the same leaves."""
        for steps in self._lanes:
            if steps.lane.units == frozenset():  # other stages hold them all; here counts advance as there
                list(steps.steps(StepCall([], 1, self._cutter, None, found_inf, lambda: None)))
            steps.finish(found_inf)
        if self._host:
            self._host.finish()
        self._begun = False
        return self._opt_state


def _clipping_scale(clips: Sequence[ClipByGlobalNorm], scale: Scalar, grad_norm: Scalar) -> Scalar:
    """Returns the divisor of gradients of norm `grad_norm` (after division by `scale`); `scale` or more."""
    for clip in clips:
        assert grad_norm is not None
        excess = (grad_norm / clip.max_norm).clamp(min=1.0)
        scale = excess if scale is None else scale * excess
        grad_norm = grad_norm.clamp(max=clip.max_norm)
    return scale
