"""Weights with low-rank adapters, as trees hold them and blocks see them."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from yafsdp_fn.params.markers import Marker, register_node
from yafsdp_fn.util.torch_private import SingleLevelFunction, transforms_active

# ---- LowRank
#
#     LowRank(weight, row_scale, a, b, factor)        stands for the matrix  base + factor * b @ a
#
#     ya.linear(x, w), F.linear(x, w)                 x @ base^T + (factor * x @ a^T) @ b^T
#     any other use of w                              the matrix is formed: right in any block, and costs one matrix
#
# The base may be stored narrower than blocks compute. It is widened at each use, and again in the backward: kept
# graphs hold it as stored.
#
# Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.


@dataclasses.dataclass(frozen=True, eq=False)
class WeightNode:
    """A node of a tree in place of a weight [out, in]. weight: that weight, as stored"""

    weight: Any

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.weight.shape
        return shape


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank(WeightNode):
    """A weight with an adapter, in place of that weight in a tree; blocks may use it as that weight.

    weight: [out, in], as stored; row_scale: [out], multiplies the rows of an int8 weight, else None
    a, b: [rank, in] and [out, rank]; factor: alpha / rank. In a `Stacked` tree each of the four has a layer axis first

    Shape and dtype are those of the matrix: [out, in], in the dtype of `a`.

    >>> adapted = ya.LowRank(torch.zeros(2, 3), None, torch.ones(1, 3), torch.ones(2, 1), factor=0.5)
    >>> adapted.shape, ya.linear(torch.ones(3), adapted)
    (torch.Size([2, 3]), tensor([1.5000, 1.5000]))
    """

    row_scale: Any
    a: Any
    b: Any
    factor: float

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.a.dtype
        return dtype

    def base(self) -> Tensor:
        """Returns the matrix without its adapter, in the dtype of the adapter."""
        return _widened(self.weight, self.row_scale, self.dtype)

    def merged(self) -> Tensor:
        """Returns the matrix with its adapter."""
        return torch.add(self.base(), self.b @ self.a, alpha=self.factor)

    def times(self, x: Tensor, bias: Tensor | None = None, linear: Callable[..., Tensor] = F.linear) -> Tensor:
        """Multiplies x [..., in] -> [..., out], forming no matrix of the weight's size but the base. linear: the
        product used"""
        low = linear(self.factor * linear(x, self.a), self.b)
        trained = self.weight.requires_grad or (self.row_scale is not None and self.row_scale.requires_grad)
        as_it_is = trained or self.weight.dtype == x.dtype
        if as_it_is or transforms_active() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return linear(x, self.base(), bias) + low
        out: Tensor = _TimesStored.apply(x, self.weight, self.row_scale)
        return out + low if bias is None else out + low + bias

    # ---- use as a tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = [args, kwargs or {}]
        if func is F.linear:
            return _linear(*args, **given[1])
        args, kwargs = optree.tree_map(lambda x: x.merged() if is_low_rank(x) else x, given, is_leaf=is_low_rank)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.merged(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.merged()[index]

    def __len__(self) -> int:
        return len(self.weight)


# ---- products


def is_low_rank(node: object) -> bool:
    return isinstance(node, LowRank)


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear` of an input or weight that is a `LowRank`."""
    return weight.times(input, bias) if is_low_rank(weight) else F.linear(input.merged(), weight, bias)


def _widened(weight: Tensor, row_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if row_scale is None:
        return weight.to(dtype)
    # in place: a product of two dtypes would widen the weight once more on a CPU
    return weight.to(dtype, copy=True).mul_(row_scale.to(dtype).unsqueeze(-1))


class _TimesStored(SingleLevelFunction):  # type: ignore[misc]
    """Computes x @ base^T of an untrained base; plain autograd would keep the widened base."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row_scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, row_scale)
        return F.linear(x, _widened(weight, row_scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, row_scale = ctx.saved_tensors
        return grad @ _widened(weight, row_scale, grad.dtype), None, None


# ---- as a pytree node


class WeightEntry(optree.GetAttrEntry):
    """The path entry of a part. The weight's leaves no trace in a path, as if it were a marker: with an adapter a
    weight is named, drawn and regrouped as without. Except in int8, whose integers mean nothing elsewhere."""

    def __init__(self, entry: str, type: Any, kind: Any) -> None:
        super().__init__(entry, Marker if entry == "weight" else type, kind)


def _flat(node: Any) -> tuple[Any, ...]:
    """Flattens without an absent `row_scale`: torch's pytrees take None for a leaf."""
    if node.row_scale is None:
        return (node.weight, node.a, node.b), node.factor, ("weight", "a", "b")
    return (node.weight, node.row_scale, node.a, node.b), node.factor, ("int8", "row_scale", "a", "b")


def _node(factor: Any, parts: Iterable[Any]) -> LowRank:
    weight, *row_scale, a, b = parts
    return LowRank(weight, row_scale[0] if row_scale else None, a, b, factor)


register_node(LowRank, _flat, _node, WeightEntry)
