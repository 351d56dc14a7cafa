"""Float8, float8: weights that travel, lie in slots and multiply as numbers of 8 bits."""

import dataclasses
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType

from yafsdp_fn.communication.formats import Format
from yafsdp_fn.nn.linear import Destination, Scratch, destination
from yafsdp_fn.nn.low_rank import WeightEntry, WeightNode, is_low_rank
from yafsdp_fn.params.leaf_mask import LeafRule, must_be_rule, must_not_be_sharded, plain_param
from yafsdp_fn.params.markers import register_node
from yafsdp_fn.params.sources import as_described
from yafsdp_fn.params.tree import Tree, dotted, in_stack
from yafsdp_fn.util.on_gpu import is_on_gpu

# ---- Numbers of 8 bits.
#
#     weights       numbers = e4m3(w / SCALE)            one scale for all: e4m3 has an exponent of its own
#     rows of x     numbers = e4m3(x / scale)            a scale for each row, which takes its largest element to 448
#
# What a row becomes depends on this row alone, so parts of a batch may be cut anywhere.
#
# Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.

NUMBERS = torch.float8_e4m3fn
LARGEST = 448.0

SCALE = 2.0**-6
"""Value of a weight's number 1: numbers are then exact in every dtype that blocks compute in. Weights from 2e-4 to 7
keep 4 bits, smaller ones are off by 1.5e-5 at most."""


class _InFloat8(Format):
    """A byte for each element, a number in steps of `SCALE`: slots hold these bytes as they have come."""

    name, block, block_bytes, kept = "float8", 16, 16, True

    def encode(self, blocks: Tensor) -> Tensor:
        return _numbers(blocks).view(torch.uint8)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return _values(encoded.view(NUMBERS), dtype)


IN_FLOAT8 = _InFloat8()


def _numbers(weight: Tensor) -> Tensor:
    scaled = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)) / SCALE
    # the cast makes the largest number of what is larger, and of infinity
    return torch.where(scaled.abs() <= LARGEST, scaled, torch.nan).to(NUMBERS)


def _values(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers.to(torch.promote_types(dtype, torch.float32)) * SCALE).to(dtype)


# ---- Float8


@dataclasses.dataclass(frozen=True, eq=False)
class Float8(WeightNode):
    """A weight [out, in] in place of that weight in a tree, which `ya.linear` and `F.linear` multiply in float8.

        y  = rows(x) @ w8^T        x [..., in]; rows: each row as numbers of 8 bits, by its largest element
        dx = rows(dy) @ w8         w8: the weight as numbers of 8 bits, in steps of 2**-6
        dw = dy^T @ x              of the values themselves

    Sums are in float32, y and dx in the dtype of x. Kernels for float8 multiply bfloat16 on GPUs from Hopper on, if
    `in` and `out` are multiples of 16; elsewhere the same numbers are multiplied in the dtype of x. A weight beyond 7
    becomes NaN. All other uses in a block are refused with a TypeError.

    >>> weight = ya.formats.Float8(torch.tensor([[1.0, 0.3], [0.0, -2.0]]))
    >>> ya.linear(torch.tensor([1.0, 1.0]), weight)            # 0.3 becomes 0.3125
    tensor([ 1.3125, -2.0000])
    """

    def __post_init__(self) -> None:
        if isinstance(self.weight, Float8) or is_low_rank(self.weight):
            raise TypeError(f"a ya.formats.Float8 of a {type(self.weight).__name__}: expected a weight; {LEAVE_OUT}")

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.weight.dtype
        return dtype

    def merged(self) -> Tensor:
        """Returns the weight itself."""
        whole: Tensor = self.weight
        return whole

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x [..., in] -> [..., out]."""
        out: Tensor = _Times.apply(x, self.weight, destination(self.weight))  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "weight", "bias"), args, strict=False), **(kwargs or {}))
        weight = given.get("weight")
        if func is F.linear and isinstance(weight, Float8) and isinstance(given["input"], Tensor):
            return weight.times(given["input"], given.get("bias"))
        raise TypeError(f"{getattr(func, '__name__', func)} of {PRODUCTS_ALONE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} of {PRODUCTS_ALONE}")


LEAVE_OUT = "ya.formats.float8(params, where) leaves out weights that are used in another way"
PRODUCTS_ALONE = f"a ya.formats.Float8, which ya.linear and F.linear multiply: it has no other use. {LEAVE_OUT}"


def _flat(node: Float8) -> tuple[Any, ...]:
    weight = node.weight
    numbers = _kept_numbers(destination(weight))
    if numbers is not None:  # who takes a block's weights apart, as `ya.chunk`, gets values
        weight = _Decoded.apply(weight, numbers)  # type: ignore[no-untyped-call]
    return (weight,), None, ("weight",)


register_node(Float8, _flat, lambda _, parts: Float8(next(iter(parts))), WeightEntry)


def float8(params: Tree, where: LeafRule | None = None) -> Tree:
    """Returns `params` with a `Float8` in place of each chosen matrix [out, in], which is gathered and lies in slots as
    numbers of 8 bits. State, checkpoints, names and optimizers stay as they are.

    params: as for `ya.init` and `ya.shard`: a tree of `Param`s, tensors or `Lazy` leaves
    where: `(dotted path, Param of one layer) -> bool` chooses. None: all matrices of stacks but those that have a
        `compute` of their own, as routers

    Raises ValueError if the choice is empty, not a matrix, or has an adapter, naming the leaf.

    >>> bf16 = ya.Precision(compute=torch.bfloat16)
    >>> states = [ya.init(tree, mesh=mesh, precision=bf16) for tree in (params, ya.formats.float8(params))]
    >>> [state.memory.units[-1].gather_bytes for state in states]
    [1024, 512]
    """
    must_not_be_sharded("float8", params)
    if where is not None:
        must_be_rule(where, "float8: where")
    found: list[str] = []

    def of(accessor: optree.PyTreeAccessor, leaf: Any) -> Any:
        path = dotted(accessor)
        if is_low_rank(leaf):
            raise ValueError(f"float8: {path} has an adapter; {LEAVE_OUT}")
        param = plain_param(accessor, leaf)
        matrix = len(param.shape) == 2
        by_default = in_stack(accessor) and matrix and getattr(leaf, "compute", None) is None
        if not (by_default if where is None else where(path, param)):
            return leaf
        if not matrix:
            raise ValueError(f"float8: where chose {path}, of shape {param.shape}; expected a matrix [out, in]")
        found.append(path)
        described = as_described(path, leaf)
        return Float8(dataclasses.replace(described, wire=described.wire._replace(gather=IN_FLOAT8)))

    light = optree.tree_map_with_accessor(of, params, is_leaf=is_low_rank)
    if not found:
        raise ValueError("float8: no matrix was chosen; without `where` it takes those of a ya.Stacked")
    return light


# ---- Where a weight lies as numbers.


class Numbers(Destination):
    """The destination of a leaf that stands for `numbers` [out, in], which lie in a weight slot."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Tensor, scratch: Scratch) -> None:
        super().__init__(scratch)
        self.numbers = numbers


def stand_in(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a leaf for a block in place of `numbers`: of their shape, in the dtype that the block computes in, for
    autograd. It has no values: each is a NaN, so that nothing reads them unnoticed."""
    return torch.full((), torch.nan, dtype=dtype, device=numbers.device).expand(numbers.shape)


def _kept_numbers(found: Destination | None) -> Tensor | None:
    """Returns the numbers that the leaf with this destination stands for; None for a weight with values."""
    return getattr(found, "numbers", None)


class _Decoded(torch.autograd.Function):
    """Makes the values of a leaf that stands for numbers; their gradient is the leaf's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, numbers: Tensor) -> Tensor:
        return _values(numbers, weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---- The product.


class _Times(torch.autograd.Function):
    """Computes y of `Float8`. The numbers of a weight that is whole are made again in the backward, not kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, found: Destination | None) -> Tensor:
        return _product(x, _numbers_of(weight, found))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Destination | None], output: Tensor) -> None:
        x, weight, ctx.found = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), found = ctx.saved_tensors, ctx.found
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, _numbers_of(weight, found).t())
        if ctx.needs_input_grad[1]:
            outs, ins = weight.shape
            rows = x.reshape(-1, ins)
            columns = grad.reshape(-1, outs).t()
            if found is not None and found.takes:
                found.write_mm(columns, rows)
            else:
                grad_weight = torch.mm(columns, rows)
        return grad_x, grad_weight, None

    @staticmethod
    def jvp(ctx: Any, along_x: Tensor, along_weight: Tensor, _: None) -> Tensor:
        x, weight = ctx.saved_tensors
        seen = _values(_numbers_of(weight, ctx.found), along_x.dtype)
        return F.linear(along_x, seen) + F.linear(x, along_weight.to(x.dtype))


def _numbers_of(weight: Tensor, found: Destination | None) -> Tensor:
    kept = _kept_numbers(found)
    return _numbers(weight) if kept is None else kept


def _product(x: Tensor, numbers: Tensor) -> Tensor:
    """Multiplies x [..., k], each row as numbers of 8 bits, and numbers [n, k] of a weight -> [..., n]."""
    outs, ins = numbers.shape
    rows = x.reshape(-1, ins)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = rows.abs().amax(-1, keepdim=True).to(wide) / LARGEST
    of_rows = (rows / torch.where(scale == 0, 1, scale)).to(NUMBERS)
    if _has_kernel(x, outs, ins):
        how = ScalingType.RowWise, SCALE * torch.ones(1, outs, device=x.device), ScalingType.RowWise
        # its second factor is read by columns
        out = F.scaled_mm(of_rows, numbers.contiguous().t(), scale.float(), *how, output_dtype=x.dtype)
    else:
        # float16 has no room for sums of products of numbers up to 448
        dtype = wide if x.dtype == torch.float16 else x.dtype
        out = F.linear(of_rows.to(dtype), numbers.to(dtype)).to(wide).mul(scale * SCALE).to(x.dtype)
    # a view that a Function returns cannot be written in place
    whole: Tensor = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], outs))
    return whole


def _has_kernel(x: Tensor, outs: int, ins: int) -> bool:
    if not is_on_gpu(x) or x.dtype != torch.bfloat16 or outs % 16 or ins % 16:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)
