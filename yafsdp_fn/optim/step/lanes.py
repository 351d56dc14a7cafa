"""An optimizer as lanes: a sequence of transformations for some leaves, each taken in the fastest way there is.

chain(clip, adamw)                          one lane, through a fused kernel
chain(clip, partition(muon, adamw))         two: muon's by parts, adamw's through a fused kernel
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from yafsdp_fn.optim.around import Around
from yafsdp_fn.optim.base import GradientTransformation, OnWrite, Scalar, Stage, name, stages
from yafsdp_fn.optim.clipping import ClipByGlobalNorm
from yafsdp_fn.optim.masking import Masked
from yafsdp_fn.optim.noise import Noise
from yafsdp_fn.optim.partition import Partition, restricted
from yafsdp_fn.optim.step.by_parts import ByParts, rounds
from yafsdp_fn.optim.step.cutting import Cutter
from yafsdp_fn.optim.step.definition import Definition
from yafsdp_fn.optim.step.fused import recognise
from yafsdp_fn.optim.step.pieces import FusedSteps
from yafsdp_fn.optim.whole.borrowed import Messages
from yafsdp_fn.optim.whole.loans import Leafwise
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


def needs_norm(tx: Any) -> bool:
    """Whether a step wants `grad_norm`: the first thing `tx` does is clip by it."""
    return bool(split_clips(list(stages(tx)))[0])


def why_not_unitwise(tx: Any) -> str | None:
    """Why the step of `tx` cannot be taken unit by unit, or None if it can.

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
    """In how many parts each unit of sharded `params` takes its step: more than one where leaves go to owners between.

    Units that are not named have one.
    """
    found: dict[int, int] = {}
    for own, part in _lanes_on(tx, params):
        for unit in units_of(part) if rounds(own) else ():
            found[unit] = max(found.get(unit, 1), 1 + 2 * rounds(own))
    return found


def leafwise_stages(tx: Any, params: Tree) -> list[tuple[Leafwise, Tree]]:
    """What is done to whole leaves, in the parts of a step, and the part of `params` that has them."""
    found = _lanes_on(tx, params)
    return [(stage.rule, part) for own, part in found for stage, _ in own if isinstance(stage.rule, Leafwise)]


def _lanes_on(tx: Any, params: Tree) -> list[tuple[list[Stage], Tree]]:
    if why_not_unitwise(tx) is not None:
        return []
    todo = split_clips([(stage, None) for stage, _ in stages(tx)])[1]
    return [(own, params if rule is None else restricted(params, rule)) for own, rule in lanes_of(todo)]


def lanes_of(todo: list[Stage]) -> list[tuple[list[Stage], LeafRule | None]]:
    """What is done to which leaves: several where `todo` is a partition, else one for all."""
    if len(todo) != 1 or not isinstance(todo[0][0].rule, Partition):
        return [(todo, None)]
    rule, state = todo[0][0].rule, todo[0][1]
    states = dict.fromkeys(rule.parts) if state is None else state.inner_states
    return [(list(stages(part, states[label])), chosen) for label, (part, chosen) in rule.parts.items()]


def units_of(params: Tree) -> list[int]:
    return [unit for handle in handles(params) for _, group, _ in handle.group_leaves() for unit in group.held]


def split_clips(todo: Sequence[Stage]) -> tuple[list[ClipByGlobalNorm], list[Stage]]:
    """The clipping at the head of a chain, and the stages after it.

    It costs nothing: the caller has the norm already, and its factor joins `scale`.
    """
    clips = []
    for tx, _ in todo:
        if not isinstance(tx.rule, ClipByGlobalNorm):
            break
        clips.append(tx.rule)
    return clips, list(todo[len(clips) :])


def clipping_scale(clips: Sequence[ClipByGlobalNorm], scale: Scalar, grad_norm: Scalar) -> Scalar:
    """What gradients of norm `grad_norm` (after division by `scale`) are to be divided by; `scale` itself at most."""
    for clip in clips:
        assert grad_norm is not None
        excess = (grad_norm / clip.max_norm).clamp(min=1.0)
        scale = excess if scale is None else scale * excess
        grad_norm = grad_norm.clamp(max=clip.max_norm)
    return scale
