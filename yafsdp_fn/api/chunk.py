"""chunk: runs a block over parts of its batch, one after the other. Around a block of `scan` or `apply` this is
layer-major gradient accumulation: one gather of a layer serves all microbatches.

    def chunk(f, n, in_axes):
        def chunked(*args):
            outs = []
            for part in split(args, n, in_axes):        # None: whole in every part
                outs.append(remat(f)(*part))            # saves `part` only; its backward runs f again
            return concatenate(outs)                    # ya.Mean, ya.Sum, ya.Max: combined
        return chunked
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree, dotted, join, shape_of, tensors_in
from yafsdp_fn.runtime.block_call import TensorCall
from yafsdp_fn.runtime.graph_walks import TensorWatch, check_graph
from yafsdp_fn.runtime.pure import Rematerialised, is_smooth
from yafsdp_fn.runtime.reductions import Max, Mean, Sum, is_reduction
from yafsdp_fn.util.randomness import device_of_leaves, ranks_around
from yafsdp_fn.util.torch_private import eval_frame_callback, saved_tensors_hooks_active, transforms_active

# ---- the verb


def chunk(f: Callable[..., Any], n: int, *, in_axes: int | tuple[int | None, ...]) -> Callable[..., Any]:
    """Returns `f` run over n equal chunks of its batch, in order; each is recomputed in the backward. n = 1 is `f`
    itself.

        block = ya.chunk(llama.block(config), 4, in_axes=(0, None, None))     # x [B, S, E], weights, rotary table
        loss = ya.chunk(llama.head_loss(config), 4, in_axes=(None, 0, 0))     # weights, x, targets [B, S]

        x, _ = ya.scan(block, x, params.layers, consts=rope)      # one gather of a layer, four microbatches
        return ya.apply(loss, params.head, x, batch["targets"])   # ya.Mean: totals and weights of the chunks added up

    f: takes positional arguments, any pytrees, and closes over no tensor that requires grad
    in_axes: the axis of the arguments to cut: an int for all, or a tuple with an int or None (every chunk gets the
        whole) per argument, for all of its tensors. The size of a cut axis is a multiple of `n`

    Outputs are concatenated along their first axis; what is no tensor must be the same in all chunks. `Mean`, `Sum` and
    `Max` are combined over chunks (integer sums are int64).

    Each chunk has the bits of `f` on that slice, and random numbers of its own. Gradients of whole arguments are added
    up in chunk order: with microbatches folded into the batch axis, as `microbatches=n` adds them.

    Cost: the inputs of the block are saved (n microbatches of carries instead of one), and f runs once more per chunk.
    One chunk's graph exists at a time, and the gradient of a whole argument at most twice. A visit that recomputes as
    well would run f a third time: use `ya.schedules.remat.none`. Under torch.func gradients are added up from the last
    chunk on.

    Raises TypeError and ValueError that name the argument or the output, and RuntimeError if a tensor that requires
    grad reaches `f` from outside, or `f` writes into an argument.

    >>> x = torch.ones(4, 8, 8, requires_grad=True)
    >>> whole = ya.apply(head, plain["head"], x, batch["targets"])
    >>> parts = ya.apply(ya.chunk(head, 2, in_axes=(None, 0, 0)), plain["head"], x, batch["targets"])
    >>> torch.allclose(whole.total, parts.total), parts.weight
    (True, 32)
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"chunk: n={n!r}: expected an integer >= 1")
    entries = in_axes if isinstance(in_axes, tuple) else (in_axes,)
    if any(axis is not None and type(axis) is not int for axis in entries):
        raise TypeError(f"chunk: in_axes={in_axes!r}; expected an int, or a tuple with an int or None per argument")
    if all(axis is None for axis in entries):
        raise ValueError(f"chunk: in_axes={in_axes} declares no axis to cut; without one, call the function itself")
    if n == 1:
        return f
    name = f"chunk of {getattr(f, '__qualname__', type(f).__name__).replace('.<locals>', '')}"

    @functools.wraps(f)
    def chunked(*args: Any) -> Any:
        if callable(eval_frame_callback()):
            raise TypeError(
                f"torch.compile of a {name}: compile the function itself: ya.chunk(torch.compile(f), {n}, ...)"
            )
        tree: Any = args
        leaves, spec = optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)
        columns = _cut(name, args, leaves, in_axes, n)
        device = device_of_leaves(leaves)
        ranks = getattr(ranks_around(), "ranks", None)
        parts = [_Part(name, f, row, spec, device, None, ranks) for row in zip(*columns, strict=True)]
        return _joined(name, _run(parts))

    return chunked


# ---- running the chunks


class _Part(TensorCall):
    """`f` on one chunk, as a function of the chunk's tensors that can run again."""

    def __init__(self, name: str, *call: Any) -> None:
        super().__init__(*call)
        self.name = name
        self._ready: tuple[Tensor, ...] | None = None
        self.watch = False  # the first run looks for tensors from outside

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._ready is not None:
            ready = self._ready
            self._ready = None
            return ready
        watched = self.watch
        self.watch = False
        with TensorWatch(tensors, self.name) if watched else contextlib.nullcontext():
            outs = self.replay(tensors)
            # an argument, or a tensor from outside, that passes straight through is a result, too
            return tuple(out.view_as(out) for out in outs)

    def run_ahead(self, check: bool) -> list[bool]:
        """Runs before the autograd node exists, which then takes the result. Returns, per output, whether it depends on
        tensors that require grad: found in a graph that is dropped at once, whose nodes also reveal tensors from
        outside."""
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors]
        versions = [tensor._version for tensor in self.tensors]
        with _hidden_graph():
            outs = self(*inputs)
        if check:
            check_graph(outs, inputs, self.name, again=lambda: self(*inputs))
        for tensor, before in zip(self.tensors, versions, strict=True):
            if tensor._version != before:
                raise RuntimeError(
                    f"{self.name} writes into an argument of shape {tuple(tensor.shape)} in place; the recomputation "
                    "would write again. Work on a copy, or run it under no_grad"
                )
        self._ready = tuple(out.detach() for out in outs)
        return [out.requires_grad for out in outs]


def _hidden_graph() -> contextlib.AbstractContextManager[Any]:
    """Hides a temporary graph from hooks on saved tensors, such as those that move them to the CPU or count them."""
    if saved_tensors_hooks_active(True) is None:
        return contextlib.nullcontext()  # torch.func inside the function allows no hooks
    # not the tensor itself: an output that its own node saves would never be freed
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def _run(parts: Sequence[_Part]) -> list[Tree]:
    """Returns the outputs of each part."""
    results: list[Sequence[Tensor]] = []
    if transforms_active():
        parts[0].watch = True
        for part in parts:
            results.append(_result(part, any(map(is_smooth, part.tensors))))
    elif not torch.is_grad_enabled():
        results += [_result(part, False) for part in parts]
    else:
        depends = [part.run_ahead(check=part is parts[0]) for part in parts]
        # autograd takes ready nodes from the latest to the earliest: made in reverse, they run in chunk order
        for part, of_part in zip(reversed(parts), reversed(depends), strict=True):
            outs = _result(part, any(of_part))
            results.append([out if of_out else out.detach() for out, of_out in zip(outs, of_part, strict=True)])
        results.reverse()
    return [part.outputs(result) for part, result in zip(parts, results, strict=True)]


def _result(part: _Part, differentiable: bool) -> Sequence[Tensor]:
    """Returns the outputs of a part; `differentiable`, as those of one autograd node that saves its inputs."""
    if not differentiable:
        return part(*part.tensors)
    return Rematerialised.apply(part, *part.tensors)  # type: ignore[no-untyped-call,no-any-return]


# ---- cutting and joining


def _cut(name: str, args: Any, leaves: Sequence[Any], in_axes: Any, n: int) -> list[Sequence[Any]]:
    """Cuts each leaf of the arguments into the values of the chunks."""
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(f"{name}: in_axes has {len(in_axes)} entries for {len(args)} positional arguments")
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    accessors = optree.tree_accessors(args, is_leaf=is_sharded, none_is_leaf=True)
    columns: list[Sequence[Any]] = []
    cut = False
    for accessor, leaf in zip(accessors, leaves, strict=True):
        axis = axes[accessor[0].entry]
        where = join(f"{name}: argument {accessor[0].entry}", dotted(accessor[1:]))
        if isinstance(leaf, Sharded):
            inside = "chunk the block inside, as ya.scan(ya.chunk(block, ...), ...)"
            raise TypeError(f"{where} is a sharded handle: {inside}")
        if axis is None or leaf is None:
            columns.append([leaf] * n)
        else:
            columns.append(_pieces(where, leaf, axis, n))
            cut = True
    if not cut:
        raise ValueError(f"{name}: in_axes={in_axes} declares an axis of no tensor among the arguments")
    return columns


def _pieces(where: str, leaf: Any, axis: int, n: int) -> Sequence[Tensor]:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{where} is {shape_of(leaf)}, but in_axes declares axis {axis} of it; declare None")
    shape = tuple(leaf.shape)
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(f"{where} has shape {shape}, which has no axis {axis} that in_axes declares")
    size, rest = divmod(shape[axis], n)
    if rest:
        raise ValueError(f"{where} has shape {shape}: axis {axis} is not a multiple of n={n}")
    return leaf.split_with_sizes([size] * n, axis)  # its backward is one concatenation


def _joined(name: str, outs: Sequence[Tree]) -> Tree:
    how: Any = {"is_leaf": is_reduction, "none_is_leaf": True}
    accessors, first, spec = optree.tree_flatten_with_accessor(outs[0], **how)
    rows = [first]
    for number, out in enumerate(outs[1:], start=1):
        leaves, other = optree.tree_flatten(out, **how)
        if other != spec:
            raise ValueError(f"{name}: chunk {number} returned the structure {other}, chunk 0 {spec}")
        rows.append(leaves)
    joined = []
    for accessor, column in zip(accessors, zip(*rows, strict=True), strict=True):
        joined.append(_join(join(f"{name}: output", dotted(accessor)), column))
    return optree.tree_unflatten(spec, joined)


def _join(where: str, column: tuple[Any, ...]) -> Any:
    first = column[0]
    kinds = {Tensor if isinstance(leaf, Tensor) else type(leaf) for leaf in column}
    if len(kinds) > 1:
        found = ", ".join(map(shape_of, column))
        raise TypeError(f"{where} is {found} in the chunks; expected one type")
    if isinstance(first, Mean | Sum):
        fields = zip(*column, strict=True)
        return type(first)(*map(_sum, fields))
    if isinstance(first, Max):
        return Max(torch.stack([leaf.value for leaf in column]).amax(0))
    if not isinstance(first, Tensor):
        if all(leaf is first or leaf == first for leaf in column):
            return first
        found = ", ".join(map(repr, column))
        raise ValueError(f"{where} is {found} in the chunks; what is no tensor must be equal")
    if first.ndim == 0:
        raise TypeError(
            f"{where} is a 0-dim tensor, which has no axis to concatenate along: say how chunks combine by returning "
            "ya.Mean(total, weight), ya.Sum(value) or ya.Max(value)"
        )
    return torch.cat(column)


def _sum(values: Sequence[Any]) -> Any:
    tensors = tensors_in(list(values))
    if not tensors:
        return sum(values)
    terms = [torch.as_tensor(value, device=tensors[0].device) for value in values]
    return torch.stack(terms).sum(0)
