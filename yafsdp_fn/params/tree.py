"""Trees of parameters: the description of each leaf, and names."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.formats import WHOLE, Wire, checked_wire
from yafsdp_fn.params.initializers import DEFAULT_INIT, Initializer
from yafsdp_fn.params.markers import Marker, Stacked

# ---- Parameter trees, described once.
#
#     params = {"embed": {"weight": Param((V, E))},           # one unit
#               "layers": Stacked({"w": Param((L, E, F))})}   # L units, one a layer
#
# Markers define the units. Leaves are `Param`s (abstract) or tensors; all else is derived from this tree.

Tree = Any
"""Any pytree: NamedTuples, dicts, lists, tuples, nested."""


LeafSplit = tuple[tuple[str, int | tuple[int, int]], ...]
"""Axes of the mesh that a leaf is split over, by name, and the dimension that each cuts, counted from the end; or that
and a number of blocks, each of which is cut."""


def checked_split(split: Any, shape: tuple[int, ...]) -> LeafSplit:
    """Returns `split`, a mapping or pairs, as pairs by name, which can be hashed."""
    pairs = tuple(sorted((axis, tuple(cut) if isinstance(cut, list) else cut) for axis, cut in dict(split).items()))
    for axis, cut in pairs:
        of = cut if isinstance(cut, tuple) and len(cut) == 2 else (cut, 1)
        counted = all(type(number) is int for number in of) and -len(shape) <= of[0] < 0 < of[1]
        if not isinstance(axis, str) or not counted or shape[of[0]] % of[1]:
            raise ValueError(
                f"split={dict(split)} of shape {shape}: expected axes of the mesh, and dimensions counted from the "
                "end, the same with and without an axis of layers: {'tensor': -2}; or (dimension, blocks), equal ones"
            )
    return pairs


def checked_dtype(what: str, dtype: torch.dtype) -> torch.dtype:
    """Returns a dtype of gathered weights or of gradients on the wire. Raises TypeError, naming `what`, for others."""
    if dtype == torch.float16:
        why = "float16 overflows, since gradients of sums are scaled only after their reduction"
        raise TypeError(f"{what}: {why}; use bfloat16")
    if dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise TypeError(f"{what}: expected a 16, 32 or 64-bit floating dtype, got {dtype!r}")
    return dtype


def settle(leaf: "Param | Any") -> None:
    """Makes shape and split of a leaf tuples: lists are taken, too, and cannot be hashed. Raises TypeError unless
    `compute` and `reduce` are dtypes that it may have, and `wire` has formats."""
    object.__setattr__(leaf, "shape", tuple(leaf.shape))
    object.__setattr__(leaf, "split", checked_split(leaf.split, leaf.shape))
    checked_wire(f"{type(leaf).__name__}.wire", leaf.wire)
    for field in ("compute", "reduce"):
        if (dtype := getattr(leaf, field)) is not None:
            checked_dtype(f"{type(leaf).__name__}.{field}", dtype)


# ---- one parameter


@dataclasses.dataclass(frozen=True)
class Param:
    """An abstract parameter.

    shape: in a `Stacked` tree the layer axis comes first, as in the tensor it stands for
    dtype: of the initial value; `Precision.param` decides what the state stores
    init: `(generator, shape, dtype) -> Tensor`, called once per layer with the shape of one layer, whole; one of your
        own twice for the first layer, since the same generator must give the same values
    split: axes of the mesh that it is split over, and the dimension that each cuts, counted from the end:
        `{"tensor": -2}`; `(dimension, blocks)` cuts each of so many equal blocks, of matrices that are one: queries,
        keys and values. A block sees its own part; where the mesh has no such axis, all of it (docs/axes.md)
    compute: dtype in which it is gathered and blocks see it, in place of `Precision.compute`: a router, a gain or an
        `A_log` in float32 in a layer in bfloat16. A frozen leaf is stored in it, too
    reduce: dtype of its gradient on the wire, in place of `Precision.reduce`
    wire: formats in which weights are gathered and gradients reduced, in place of dtypes (docs/formats.md)

    >>> gain = ya.Param((3,), torch.bfloat16, init=ya.params.initializers.ones)
    >>> ya.materialize({"gain": gain})
    {'gain': tensor([1., 1., 1.], dtype=torch.bfloat16)}
    >>> tree = {"gate": ya.Param((3,), compute=torch.float32), "up": ya.Param((3,))}
    >>> state = ya.init(tree, mesh=mesh, precision=ya.Precision(compute=torch.bfloat16))
    >>> ya.apply(lambda w: (w["gate"].dtype, w["up"].dtype), state.params)
    (torch.float32, torch.bfloat16)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    init: Initializer = DEFAULT_INIT
    split: Any = ()
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    wire: Wire = WHOLE

    def __post_init__(self) -> None:
        if isinstance(self.shape, int):
            raise TypeError(f"Param({self.shape}, ...): expected a shape, such as Param(({self.shape}, 8))")
        settle(self)
        if any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise ValueError(f"Param shape {self.shape}: expected non-negative integers")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"Param dtype {self.dtype}: parameters are floating point; pass integers in the batch")
        if not callable(self.init):
            raise TypeError(
                f"Param(init={self.init!r}): expected a function (generator, shape, dtype) -> tensor, such as "
                "ya.params.initializers.normal(0.02)"
            )

    @property
    def ndim(self) -> int:
        """The number of axes, as of a tensor."""
        return len(self.shape)


class LayerParam(Param):
    """One layer's part of a parameter in a stack, as rules over leaves see it: `isinstance(p, LayerParam)`."""


# ---- Names and leaves of a tree.


def dotted(accessor: optree.PyTreeAccessor) -> str:
    """Returns the path of a leaf as text, `layers.mlp.weight`; markers leave no trace in it."""
    entries = (entry for entry in accessor if not issubclass(entry.type, Marker))
    return ".".join(str(getattr(entry, "field", entry.entry)) for entry in entries)


def in_stack(accessor: optree.PyTreeAccessor) -> bool:
    """Returns whether a leaf of a plain tree is in a stack: its first axis is that of layers."""
    return any(issubclass(entry.type, Stacked) for entry in accessor)


def join(*names: str) -> str:
    """Joins path parts, leaving out the empty ones."""
    return ".".join(name for name in names if name)


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yields `(dotted path, leaf)` in optree's order, the order of the flat layouts and of checkpoints."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    yield from zip(map(dotted, accessors), leaves, strict=True)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Stacks trees into one, each leaf on a new leading axis."""

    def stack(*leaves: Any) -> Tensor:
        return torch.stack([leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf) for leaf in leaves])

    return optree.tree_map(stack, *trees)


def tensors_in(tree: Tree) -> list[Tensor]:
    """Returns the leaves that are tensors, in order."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def number_dtype(tree: Tree) -> torch.dtype:
    """Returns the dtype of a number over `tree`: float64 if it has float64 leaves, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in optree.tree_leaves(tree)) else torch.float32


def leaf_names(tree: Tree) -> Tree:
    """Returns a tree of the same structure whose leaves are their own dotted paths.

    >>> ya.params.leaf_names({"embed": {"table": ya.Param((16, 8))}})
    {'embed': {'table': 'embed.table'}}
    """
    return optree.tree_map_with_accessor(lambda accessor, _: dotted(accessor), tree)


def must_be_function(f: Any, call: str) -> None:
    """Raises TypeError for arguments in another order. call: how the verb is called"""
    if not callable(f):
        raise TypeError(f"{call}: the function comes first, got {shape_of(f)}")


def no_leaf(path: str, node: object) -> str:
    """The text of the error for what is no parameter."""
    hint = ""
    if hasattr(node, "named_parameters"):
        hint = "; an nn.Module becomes parameters by ya.functionalize"
    elif hasattr(node, "__array__"):
        hint = "; torch.from_numpy(array) is a tensor"
    elif isinstance(node, int):
        hint = "; a shape alone is no parameter: ya.Param((16, 8))"
    return f"{path or 'params'}: expected a Param, a tensor or a Lazy leaf, got {type(node).__name__}{hint}"


def shape_of(leaf: Any) -> str:
    """Describes a leaf in errors: dtype and shape of a tensor, the type of anything else."""
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor | Param) else type(leaf).__name__
