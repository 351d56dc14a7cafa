"""Decides how an optimizer's step may run: unit by unit or not, after the norm or before it, in parts; by which lanes.

    chain(clip, adamw)                          one lane, through a fused kernel
    chain(clip, partition(muon, adamw))         two: muon's by parts, adamw's through a fused kernel

It is asked once for an optimizer, when a step function or its steps over a memory are made.
"""

from typing import Any, NamedTuple

import optree
from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, Stage, State, name, stages
from yafsdp_fn.optim.in_format import inside
from yafsdp_fn.optim.leafwise import Leafwise
from yafsdp_fn.optim.partition import Partition
from yafsdp_fn.optim.scaling import ClipByGlobalNorm
from yafsdp_fn.params.leaf_mask import LeafRule, restricted
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree, named_leaves, shape_of

Chosen = tuple[list[Stage], LeafRule | None]
"""The stages of a lane, and the rule for its leaves; None for all."""


class Analysis(NamedTuple):
    """The parts of a step of an optimizer, with their states.

    clips: by the global norm, before all else: they cost nothing, since the caller has the norm already, and their
        factor is known before the first unit and joins `scale`
    lanes: several if all that follows is a partition; one if units cannot take their steps one by one
    whole: the reason why they cannot, or None
    """

    clips: list[ClipByGlobalNorm]
    lanes: list[Chosen]
    whole: str | None


def analysis(tx: Any, state: State = None) -> Analysis:
    """Takes `tx` apart. Raises ValueError for the state of another optimizer."""
    todo = list(stages(tx, state))
    clips: list[ClipByGlobalNorm] = []
    for one, _ in todo:
        if not isinstance(one.rule, ClipByGlobalNorm):
            break
        clips.append(one.rule)
    todo = todo[len(clips) :]
    lanes: list[Chosen] = [(todo, None)]
    if len(todo) == 1 and isinstance(rule := todo[0][0].rule, Partition):
        states = dict.fromkeys(rule.parts) if todo[0][1] is None else todo[0][1].inner_states
        lanes = [(list(stages(part, states[label])), chosen) for label, (part, chosen) in rule.parts.items()]
    whole = next((reason for lane, _ in lanes for one, _ in lane if (reason := _why_not(one)) is not None), None)
    return Analysis(clips, lanes if whole is None else [(todo, None)], whole)


def why_not_unitwise(tx: Any) -> str | None:
    """Returns the reason why the step of `tx` cannot be taken unit by unit, or None if it can.

    >>> ya.optim.why_not_unitwise(tx) is None
    True
    >>> ya.optim.why_not_unitwise(ya.optim.chain(tx, ya.optim.clip_by_global_norm(1.0)))
    'clip_by_global_norm is not the first transformation: it needs the updates of all units at once'
    """
    return analysis(tx).whole


def _why_not(tx: GradientTransformation) -> str | None:
    if isinstance(tx.rule, ClipByGlobalNorm):
        return "clip_by_global_norm is not the first transformation: it needs the updates of all units at once"
    if isinstance(tx.rule, Leafwise):
        return None
    inner = inside(tx.rule)
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

    >>> ya.optim.parts_of(tx, state.params)                    # adamw: one part each
    {}
    >>> ya.optim.parts_of(ya.optim.muon(0.02), state.params)   # layers: momentum, whole matrices, the step
    {2: 3, 3: 3, 4: 3, 5: 3}
    """
    found: dict[int, int] = {}
    for rules, own in leafwise_lanes(tx, params):
        for unit in units_of(own):
            found[unit] = max(found.get(unit, 1), 1 + 2 * len(rules))
    return dict(sorted(found.items()))


def leafwise_lanes(tx: Any, params: Tree) -> list[tuple[list[Leafwise], Tree]]:
    """The transformations of whole leaves in each lane, with the part of `params` that they concern."""
    _, lanes, whole = analysis(tx)
    found = []
    for own, chosen in lanes if whole is None else ():
        if rules := [stage.rule for stage, _ in own if isinstance(stage.rule, Leafwise)]:
            found.append((rules, own_part(params, chosen)))
    return found


def own_part(tree: Tree, chosen: LeafRule | None) -> Tree:
    return tree if chosen is None else restricted(tree, chosen)


def units_of(params: Tree) -> list[int]:
    return [unit for handle in handles(params) for _, group, _ in handle.group_leaves() for unit in group.held]


def check_gradients(params: Tree, grads: Tree) -> None:
    """Raises ValueError for gradients unlike their parameters."""
    try:
        found = optree.tree_structure(params).flatten_up_to(grads)
    except ValueError as error:
        raise TypeError(
            "optim: the gradients are no tree like the parameters, as ya.grad returns, and ya.value_and_grad beside "
            f"the value: {error!s:.300}"
        ) from error
    for (path, p), g in zip(named_leaves(params), found, strict=True):
        if not isinstance(g, Tensor) or g.shape != p.shape:
            raise ValueError(f"optim: the gradient of {path} should be like {shape_of(p)}, got {shape_of(g)}")
