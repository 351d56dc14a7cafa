"""One optimizer step in place:

    updates, opt_state = tx.update(grads / scale, opt_state, params)
    params += updates

`update` is the definition. Sequences of rules that torch has a fused kernel for take one pass and no memory
(fused.py); everything else runs the lines above and copies the result. Clipping at the head of a chain costs nothing:
the caller has the norm already, and its factor joins `scale`. units.py takes the same step unit by unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.algebra import global_norm
from yafsdp_fn.optim.base import State, apply_updates, check, name, stages
from yafsdp_fn.optim.clipping import ClipByGlobalNorm
from yafsdp_fn.optim.fused import Stage, follow, fused_step_
from yafsdp_fn.tree import Tree, named_leaves, shape_of


def needs_norm(tx: Any) -> bool:
    """Whether `step_` wants `grad_norm`: the first thing `tx` does is clip by it."""
    return bool(split_clips(list(stages(tx)))[0])


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
    on_write: Callable[[], None] = lambda: None,
    copies: Tree | None = None,
) -> State:
    """Updates `params` and `opt_state` in place, and returns the latter. `grads` are overwritten.

    scale: fp32 [], what every gradient is to be divided by; None for 1
    found_inf: fp32 []; where it is 1, parameters and state (its count too) keep their bits. Never read by the host
    grad_norm: fp32 [], the global norm of `grads / scale` if the caller has it; else computed if `needs_norm(tx)`
    on_write: called before the first write to `params` or `opt_state`; an exception before it leaves both as they were
    copies: of `params` in another dtype, which take their new values; on CUDA in the same pass where a kernel can
    """
    tx = check(tx, params)
    check_shapes(params, grads)
    clips, todo = split_clips(list(stages(tx, opt_state)))
    if clips and grad_norm is None:
        grad_norm = global_norm(grads) if scale is None else global_norm(grads) / scale
    scale = clipping_scale(clips, scale, grad_norm)
    if not fused_step_(todo, params, grads, scale, found_inf, on_write, copies):
        write(new_values(todo, params, grads, scale), found_inf, on_write)
        follow(*(optree.tree_leaves(tree) for tree in (params, copies) if tree is not None))
    return opt_state


def split_clips(todo: Sequence[Stage]) -> tuple[list[ClipByGlobalNorm], list[Stage]]:
    """The clipping at the head of a chain, and the stages after it."""
    clips = []
    for tx, _ in todo:
        if not isinstance(tx.rule, ClipByGlobalNorm):
            break
        clips.append(tx.rule)
    return clips, list(todo[len(clips) :])


def clipping_scale(clips: Sequence[ClipByGlobalNorm], scale: Tensor | None, grad_norm: Tensor | None) -> Tensor | None:
    """What gradients of norm `grad_norm` (after division by `scale`) are to be divided by; `scale` itself at most."""
    for clip in clips:
        assert grad_norm is not None
        excess = (grad_norm / clip.max_norm).clamp(min=1.0)
        scale = excess if scale is None else scale * excess
        grad_norm = grad_norm.clamp(max=clip.max_norm)
    return scale


def check_shapes(params: Tree, grads: Tree) -> None:
    """Refuses gradients that are not like their parameters."""
    leaves, spec = optree.tree_flatten(params)
    found = spec.flatten_up_to(grads)
    if all(isinstance(g, Tensor) and g.shape == p.shape for p, g in zip(leaves, found, strict=True)):
        return
    for (path, p), g in zip(named_leaves(params), found, strict=True):
        if not isinstance(g, Tensor) or g.shape != p.shape:
            raise ValueError(f"optim.step_: the gradient of {path} should be like {shape_of(p)}, got {shape_of(g)}")


def new_values(todo: Sequence[Stage], params: Tree, grads: Tree, scale: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """The definition, for everything that is not fused: every tensor of parameters and states, and its new value.

    Allocates what the pure functions allocate.
    """
    updates = grads if scale is None else optree.tree_map(lambda g: (g / scale).to(g.dtype), grads)
    states = []
    for tx, state in todo:
        updates, after = tx.update(updates, state, params)
        states.append((tx, state, after))
    pairs = _pairs("params", params, apply_updates(params, updates))
    for tx, state, after in states:
        pairs += _pairs(f"the state of {name(tx)}", state, after)
    return pairs


def write(
    pairs: Sequence[tuple[Tensor, Tensor]], found_inf: Tensor | None, on_write: Callable[[], None] = lambda: None
) -> None:
    """Writes new values over old ones, but not where `found_inf` is 1."""
    # all values are made before the first write: a state may hand its leaves around, or hold the parameters
    values = [new.clone() if found_inf is None else torch.where(found_inf == 1, old, new) for old, new in pairs]
    on_write()
    for (old, _), value in zip(pairs, values, strict=True):
        old.copy_(value)


def _pairs(what: str, old: Tree, new: Tree) -> list[tuple[Tensor, Tensor]]:
    """The tensors of `old` with those of `new` that replace them."""
    pairs: list[tuple[Tensor, Tensor]] = []
    afters = optree.tree_structure(old).flatten_up_to(new)
    for (path, before), after in zip(named_leaves(old), afters, strict=True):
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape:
            pairs.append((before, after))
        elif isinstance(before, Tensor) or isinstance(after, Tensor) or before != after:
            raise TypeError(
                f"optim.step_: {path or 'the leaf'} of {what} went from {shape_of(before)} to {shape_of(after)}; "
                "a step may be skipped on the device alone, so whatever changes must be a tensor and keep its shape"
            )
    return pairs
