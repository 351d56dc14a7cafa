"""relative_errors: measures what a format loses of a user's own values, a unit at a time."""

import math
from collections.abc import Callable, Iterator

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.formats import Format, check_format, passed
from yafsdp_fn.params.layout import tree_layout
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree, dotted, join, shape_of
from yafsdp_fn.runtime.whole_layers import whole_unit


@torch.no_grad()
def relative_errors(format: Format, tree: Tree, where: Callable[[str, Tensor], bool] | None = None) -> dict[str, float]:
    """Measures, by unit, what `format` loses of the values of `tree`: the root mean square of decoded values minus the
    values, over that of the values. The same at every number of ranks.

    tree: sharded, such as `state.params`, gradients, or `state.opt_state`, of whose moments the one with the largest
        error counts; each unit is whole on every rank for a while, so all must call it. Or a tree of tensors, as
        `ya.shard` takes it
    where: chooses leaves by their dotted path and one layer's values; None: all

    Raises TypeError for leaves without values, ValueError if nothing is chosen.

    >>> int8 = ya.formats.Scaled(torch.int8, block=64)
    >>> errors = ya.formats.relative_errors(int8, state.params, lambda path, _: path.startswith("layers"))
    >>> list(errors), errors["layers[0]"] < 0.01
    (['layers[0]', 'layers[1]', 'layers[2]', 'layers[3]'], True)
    """
    check_format("relative_errors", format)
    found: dict[str, float] = {}
    for entry, layer, unit in _units(tree):
        off: list[Tensor] = []
        whole: list[Tensor] = []
        accessors, leaves, _ = optree.tree_flatten_with_accessor(unit)
        for accessor, leaf in zip(accessors, leaves, strict=True):
            if leaf.is_floating_point() and (where is None or where(join(entry, dotted(accessor)), leaf)):
                off.append(passed(format, leaf) - leaf)
                whole.append(leaf)
        if whole:
            name = (entry or "params") + layer
            size = _norm(whole)
            found[name] = max(found.get(name, 0.0), _norm(off) / size if size else 0.0)
    if not found:
        raise ValueError("relative_errors: no leaf was chosen")
    return found


def _norm(leaves: list[Tensor]) -> float:
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves))


def _units(tree: Tree) -> Iterator[tuple[str, str, Tree]]:
    """Yields the name of each entry, its layer as "[2]" in a stack, and the whole values of this unit."""
    found = handles(tree)
    for handle in found:
        pinned: dict[int, list[Tensor]] = {}
        for layer, index in _layers(handle.entry.length):
            yield handle.entry.name, layer, whole_unit(handle, index, pinned)
    if found:
        return
    layout, leaves = tree_layout(tree)
    for entry, own in zip(layout.entries, leaves, strict=True):
        for leaf in own:
            if not isinstance(leaf, Tensor):
                raise TypeError(f"relative_errors: {entry.name} has a {shape_of(leaf)}; expected tensors, with values")
        for layer, index in _layers(entry.length):
            values = own if entry.length is None else [leaf[index] for leaf in own]
            yield entry.name, layer, optree.tree_unflatten(entry.spec, values)


def _layers(length: int | None) -> list[tuple[str, int]]:
    return [("", 0)] if length is None else [(f"[{layer}]", layer) for layer in range(length)]
