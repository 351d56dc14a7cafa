"""What an optimizer's step may be: unit by unit, after the norm or before it, in parts; by which lanes.

chain(clip, adamw)                          one lane, through a fused kernel
chain(clip, partition(muon, adamw))         two: muon's by parts, adamw's through a fused kernel

It is asked once for an optimizer, when a step function or its steps over a memory are made.
"""

from collections.abc import Sequence
from typing import Any

from yafsdp_fn.optim.around import Around
from yafsdp_fn.optim.base import GradientTransformation, Stage, name, stages
from yafsdp_fn.optim.clipping import ClipByGlobalNorm
from yafsdp_fn.optim.masking import Masked
from yafsdp_fn.optim.noise import Noise
from yafsdp_fn.optim.partition import Partition, restricted
from yafsdp_fn.optim.step.by_parts import rounds
from yafsdp_fn.optim.whole.loans import Leafwise
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree


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
