"""Parameter trees, described once.

    params = {"embed": {"weight": Param((V, E))},           # one unit
              "layers": Stacked({"w": Param((L, E, F))})}   # L units, one a layer

What is a unit markers say (markers.py). Leaves are `Param`s (abstract) or tensors; all else is derived from this tree.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.initializers import DEFAULT_INIT, Initializer
from yafsdp_fn.params.markers import Marker

Tree = Any
"""Any pytree: NamedTuples, dicts, lists, tuples, nested."""


@dataclasses.dataclass(frozen=True)
class Param:
    """An abstract parameter.

    shape: in a `Stacked` tree the layer axis comes first, as in the tensor it stands for
    dtype: of the initial value; `Precision.param` decides what the state stores
    init: `(generator, shape, dtype) -> Tensor`, called once per layer with the shape of one layer
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    init: Initializer = DEFAULT_INIT

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise ValueError(f"Param shape {self.shape}: expected non-negative integers")
        if not self.dtype.is_floating_point:
            raise TypeError(f"Param dtype {self.dtype}: parameters are floating point; pass integers in the batch")


class LayerParam(Param):
    """One layer's part of a parameter in a stack, as rules over leaves see it: `isinstance(p, LayerParam)`."""


def dotted(accessor: optree.PyTreeAccessor) -> str:
    """The path of a leaf as text, `layers.mlp.weight`; markers leave no trace in it."""
    entries = (entry for entry in accessor if not issubclass(entry.type, Marker))
    return ".".join(str(getattr(entry, "field", entry.entry)) for entry in entries)


def join(*parts: str) -> str:
    """Joins path parts, leaving out the empty ones."""
    return ".".join(part for part in parts if part)


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """`(dotted path, leaf)` in optree's order, the order of the flat layouts and of checkpoints."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    yield from zip(map(dotted, accessors), leaves, strict=True)


def stacked(trees: Sequence[Tree]) -> Tree:
    """One tree of them, each leaf on a new axis in front."""
    return optree.tree_map(lambda *xs: torch.stack([torch.as_tensor(x) for x in xs]), trees[0], *trees[1:])


def names(tree: Tree) -> Tree:
    """A tree of the same structure whose leaves are their own dotted paths."""
    accessors, _, spec = optree.tree_flatten_with_accessor(tree)
    return optree.tree_unflatten(spec, [dotted(accessor) for accessor in accessors])


def shape_of(leaf: Any) -> str:
    """A leaf as errors show it: dtype and shape of a tensor, the type of anything else."""
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor | Param) else type(leaf).__name__
