"""relative_errors: measures what a format loses of a state's own values, a unit at a time."""

from collections.abc import Callable

import torch

from yafsdp_fn.communication.formats import Format, passed
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.sources import whole_units
from yafsdp_fn.params.tree import Tree, join, named_leaves


@torch.no_grad()
def relative_errors(format: Format, tree: Tree, where: Callable[[str], bool] | None = None) -> dict[str, float]:
    """Measures, by unit, what `format` loses of the values of a sharded tree: the root mean square of decoded values
    minus the values, over that of the values. The same at every number of ranks.

    tree: such as `state.params`, gradients, or `state.opt_state`, of whose moments the one with the largest error
        counts. Each unit is whole on every rank for a while, so all must call it
    where: chooses leaves by their dotted path, which names no layer; None: all

    Raises RanksDisagree if ranks measure different states.

    >>> int8 = ya.formats.Scaled(torch.int8, block=64)
    >>> errors = ya.formats.relative_errors(int8, state.params, lambda path: path.startswith("layers"))
    >>> list(errors), errors["layers[0]"] < 0.01
    (['layers[0]', 'layers[1]', 'layers[2]', 'layers[3]'], True)
    """
    found: dict[str, float] = {}
    every = handles(tree)
    if not every:
        raise TypeError(
            "relative_errors(format, tree): expected a sharded tree, such as state.params, behind the format"
        )
    must_be_one("relative_errors", every)
    for handle in every:
        entry = handle.entry
        whole_unit = whole_units(handle)
        for layer in range(entry.length or 1):
            unit = entry.name if entry.length is None else f"{entry.name}[{layer}]"
            leaves = named_leaves(whole_unit(layer))
            chosen = [leaf for path, leaf in leaves if where is None or where(join(entry.name, path))]
            if chosen:
                off = [passed(format, leaf) - leaf for leaf in chosen]
                error = float(global_norm(off) / global_norm(chosen))
                found[unit] = max(error, found.get(unit, 0.0))  # in this order nan stays nan
    return found
