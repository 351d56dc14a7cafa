"""named_weights: iterates over a state's whole weights by name, a unit at a time, for use outside training.

for name, weight in ya.named_weights(state.params, dtype=torch.bfloat16):      # on every rank
    engine.load(name, weight)                                                 # a generator in the loop, say
"""

from collections.abc import Iterator
from contextlib import suppress

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.nn.low_rank import is_low_rank
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.sources import whole_units
from yafsdp_fn.params.tree import Tree, dotted, join
from yafsdp_fn.runtime.memory import StateMemory

# ---- The verb.


@torch.no_grad()
def named_weights(tree: Tree, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, whole tensor)` for every leaf of `tree`, in the order of its units, the same on all ranks.
    Collective.

    tree: sharded, such as `state.params`. A leaf `w` of layer 3 of a stack `layers` is `layers.3.w`. A matrix with an
        adapter (`ya.lora`) is one tensor, the sum of both
    dtype: leaves are converted to it before they travel; None: they stay as they are

    Each unit is gathered when it is asked for, into memory of its own, freed with its tensors: beside the shards at
    most two units exist, the current one and the one before, unless tensors are kept. They are copies, so steps may go
    on.

    If a rank stops before the end and others do not, these raise RanksDisagree at the next unit. A rank that does not
    ask is waited for, until the mesh's timeout raises CommunicationError.

    >>> [(name, tuple(weight.shape)) for name, weight in ya.named_weights(state.params)][:4]
    [('embed.table', (16, 8)), ('head.out', (16, 8)), ('layers.0.down', (8, 32)), ('layers.0.up', (32, 8))]
    """
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise TypeError(f"named_weights(dtype={dtype!r}): expected a dtype, such as torch.bfloat16, of floating point")
    handles, comms = _handles(tree)
    must_be_one("named_weights", handles)
    for handle in handles:
        whole_unit = whole_units(handle, dtype)
        for layer in range(handle.entry.length or 1):
            name = join(handle.entry.name, "" if handle.entry.length is None else str(layer))
            _compare(comms, name)
            try:
                yield from _named(whole_unit(layer), name)
            except GeneratorExit:
                with suppress(RanksDisagree):  # it is the others' that go on
                    _compare(comms, THE_END)
                raise
    _compare(comms, THE_END)


# ---- Its order: stages take turns, and each unit is gathered by all of its ranks.

THE_END = "no more"
"""A rank's word for the next unit when it stops, or has all of them."""


def _handles(tree: Tree) -> tuple[list[Sharded], Communicators]:
    """Returns the handles of a tree and their communicators. Raises TypeError for a tree without a state's memory."""
    handles: list[Sharded] = optree.tree_leaves(tree, is_leaf=is_sharded)
    others = [type(leaf).__name__ for leaf in handles if not isinstance(leaf, Sharded)]
    if others or not handles:
        has = f"one with a {others[0]}" if others else "nothing"
        raise TypeError(f"named_weights: expected a sharded tree such as state.params, got {has}")
    memory = handles[0].owner
    if not isinstance(memory, StateMemory):
        raise TypeError(f"named_weights: {handles[0].entry.name!r} has no weights here: {memory.why_not_whole()}")
    return handles, memory.comms


def _compare(comms: Communicators, name: str) -> None:
    """Raises RanksDisagree unless all ranks ask for the same unit."""
    what = "the next unit of named_weights (all ranks ask for it, in one order, or none does)"
    comms.must_agree(what, {"it": name}, f"named_weights of {name}")


def _named(whole: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the leaves of a unit, and keeps none."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(whole, is_leaf=is_low_rank)
    del whole
    for accessor in accessors:
        leaf = leaves.pop(0)
        yield join(name, dotted(accessor)), leaf.merged() if is_low_rank(leaf) else leaf
