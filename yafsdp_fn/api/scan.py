"""scan, apply: run blocks on whole weights, which exist nowhere else.

    def scan(f, carry, xs):                      def apply(f, unit, *args):
        ys = []                                      return f(unit, *args)
        for x in xs:                # by layer
            carry, y = f(carry, x)
            ys.append(y)
        return carry, stack(ys)

On plain tensors they are that loop, to the bit. On sharded parameters each `f` becomes a visit: its weights are
gathered into a slot just in time, and its gradients are reduced from one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.markers import BARE, without_markers
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree, dotted, join, must_be_function, named_leaves, shape_of, stacked
from yafsdp_fn.runtime import pure
from yafsdp_fn.runtime.block_call import BlockCall, rows_of
from yafsdp_fn.util.randomness import device_of_leaves, run_plain_visit

# ---- The verbs.


def scan(
    f: Callable[..., tuple[Tree, Tree]],
    init: Tree,
    xs: Tree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    *,
    consts: Tree = (),
    order: Iterable[int] | None = None,
) -> tuple[Tree, Tree]:
    """Scans over layers as `jax.lax.scan`: `f(carry, x) -> (carry, y)`; returns `(carry, ys)`.

        init --> f(., x[0]) --> f(., x[1]) --> ... --> f(., x[L-1]) --> carry
                    |               |                      |
                   y[0]            y[1]         ...       y[L-1]     --> ys, stacked on a new axis L

    f: one layer; the carry keeps its structure, shapes and dtypes
    xs: any pytree whose leaves have a leading axis L: sharded stacks anywhere in it are gathered layer by layer, plain
        tensors are split by `unbind` (views: a KV cache is written in place under no_grad)
    length: L, needed if xs has no leaves
    reverse: from the last layer to the first; ys keep the order of xs
    unroll: consecutive layers per visit; their weights are gathered and recomputed together
    consts: inputs of every layer, differentiable; passed to `f` as a third argument unless it is ()
    order: the layers to visit, each as often as it is named; default all, `range(L)`. `range(k)` has the first k,
        `range(0, L, 2)` every second, `[0, 1, 1, 2]` layer 1 twice. ys are stacked in this order (docs/schedules.md)

    Raises TypeError if the carry changes, naming the leaf, and ValueError if lengths disagree.

    >>> ya.scan(lambda carry, x: (carry * x, carry), torch.tensor(1.0), torch.tensor([2.0, 3.0, 4.0]))
    (tensor(24.), tensor([1., 2., 6.]))
    >>> ya.scan(block, torch.ones(8), state.params["layers"])[0].shape
    torch.Size([8])
    """
    if not callable(f):
        must_be_function(f, "scan(f, carry, xs)")
    if unroll < 1:
        raise ValueError(f"scan(unroll={unroll}): expected at least 1")
    no_consts = isinstance(consts, tuple) and not consts
    extra = () if no_consts else (consts,)
    # the layers to visit
    leaves, spec = optree.tree_flatten(xs, is_leaf=is_sharded, namespace=BARE)
    count = _length(xs, leaves, length)
    places = _places(order, count)
    if reverse:
        places.reverse()
    stacks = [leaf.entry.name or "params" for leaf in leaves if isinstance(leaf, Sharded)]
    if not stacks and isinstance(init, Sharded) and init.entry.length is not None:
        raise TypeError(f"scan(f, carry, xs): the carry is the stack {init.entry.name}: layers are xs")
    if not stacks:
        extra = without_markers(extra)  # else a call of a block does it
    columns = [rows_of(leaf) if isinstance(leaf, Sharded) else leaf.unbind() for leaf in leaves]
    by_layer = list(zip(*columns, strict=True)) if leaves else [()] * count
    layers = [optree.tree_unflatten(spec, by_layer[i]) for i in places]
    # a visit for every `unroll` of them
    stack = "+".join(stacks) or "layer"
    carry, ys = init, list[Tree]()
    blocks = [slice(start, start + unroll) for start in range(0, len(places), unroll)]
    names = [f"{stack}[{_numbers(places[block])}]" for block in blocks]
    for block, name in zip(blocks, names, strict=True):
        body, args = partial(_several, f, name), (carry, layers[block], extra)
        if stacks:
            call = BlockCall(name, body, args, first=block.start == 0, signature=f, carries=True)
            carry, found = (call.runner() or pure).visit(call)
        else:
            carry, found = run_plain_visit(device_of_leaves((carry, layers)), body, *args)
        ys += found
    if reverse:
        ys.reverse()
    without_ys = all(y is None for y in ys)
    return carry, None if without_ys else stacked(ys)


def apply(f: Callable[..., Any], unit: Tree, *args: Any) -> Any:
    """Visits one unit that is not stacked: `f(weights, *args)`.

    unit: a unit, or a pytree of units that the block uses together, such as `(params.head, params.embed)`

    >>> ya.apply(embed, state.params["embed"], tokens).shape
    torch.Size([4, 8, 8])
    """
    if not callable(f):
        must_be_function(f, "apply(f, unit, *args)")
    nodes, spec = optree.tree_flatten(unit, is_leaf=is_sharded, namespace=BARE)
    found = [node for node in nodes if isinstance(node, Sharded)]
    if not found:
        unit = optree.tree_unflatten(spec, nodes)
        return run_plain_visit(device_of_leaves((unit, args)), f, unit, *args)
    stacks = [handle.entry.name for handle in found if handle.entry.length is not None]
    if stacks:
        raise TypeError(f"apply on the stack {stacks[0]!r}: use ya.scan, which visits it layer by layer")
    rows = optree.tree_unflatten(spec, [rows_of(node)[0] if isinstance(node, Sharded) else node for node in nodes])
    name = "+".join(dict.fromkeys(handle.entry.name or "params" for handle in found))
    call = BlockCall(name, f, (rows, *args), first=True, signature=f)
    return run_block(call)


def run_block(call: BlockCall) -> Any:
    """Runs a visit: in the session or tracer that owns its leaves, else on the pure path."""
    return (call.runner() or pure).visit(call)


# ---- One visit: several layers of an unrolled scan, or one.


def _numbers(block: list[int]) -> str:
    """Returns the layers of a visit as text: "3", "2:4", "0,2"."""
    first, last = block[0], block[-1]
    step = 1 if last >= first else -1
    if len(block) > 1 and block == list(range(first, last + step, step)):
        return f"{first}:{last}"
    return ",".join(map(str, block))


def _several(
    f: Callable[..., tuple[Tree, Tree]], name: str, carry: Tree, layers: list[Tree], extra: tuple[Tree, ...]
) -> tuple[Tree, list[Tree]]:
    """Runs one visit, of consecutive layers; returns the carry, and the y of each."""
    ys = []
    for x in layers:
        out = f(carry, x, *extra)
        if not isinstance(out, tuple) or len(out) != 2:
            got = type(out).__name__
            raise TypeError(f"scan: f must return (carry, y), got {got}; without outputs return (carry, None)")
        _check_carry(carry, out[0], name)
        carry = out[0]
        ys.append(out[1])
    return carry, ys


# ---- Checks of what a scan is given, and of what its body returns.


def _places(order: Iterable[int] | None, count: int) -> list[int]:
    """Returns the numbers of the layers to visit, of `count`."""
    places = list(range(count) if order is None else order)
    if not places:
        given = "" if order is None else ", order=[]"
        raise ValueError(f"scan: xs has length {count}{given}, so that nothing says what ys would be; skip the scan")
    for place in places:
        if type(place) is not int or not 0 <= place < count:
            raise ValueError(
                f"scan(order=...): {place!r} is no layer of {count}; expected integers from 0 to {count - 1}"
            )
    return places


def _length(xs: Tree, leaves: Sequence[Any], length: int | None) -> int:
    lengths: dict[int, str] = {} if length is None else {length: "length"}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.ndim:
            if leaf.shape[0] not in lengths:
                path = optree.tree_accessors(xs, is_leaf=is_sharded)[number]
                lengths[leaf.shape[0]] = join("xs", dotted(path))
        elif not isinstance(leaf, Sharded):
            raise TypeError(f"scan: a leaf of xs is {shape_of(leaf)}; expected a tensor with a leading layer axis")
        elif leaf.entry.length is None:
            raise TypeError(f"scan over {leaf.entry.name or 'params'!r}, which is not Stacked: use ya.apply")
        else:
            lengths.setdefault(leaf.entry.length, leaf.entry.name)
    if len(lengths) > 1:
        found = ", ".join(f"{name} has {count}" for count, name in lengths.items())
        raise ValueError(f"scan: lengths differ: {found}")
    if not lengths:
        raise ValueError("scan: xs has no leaves; give length=")
    return next(iter(lengths))


def _check_carry(before: Tree, after: Tree, where: str) -> None:
    if type(before) is type(after) is Tensor and before.shape == after.shape and before.dtype == after.dtype:
        return  # the usual case
    old, old_spec = optree.tree_flatten(before)
    new, new_spec = optree.tree_flatten(after)
    if old_spec != new_spec:
        changed = f"from {old_spec} to {new_spec}"
        raise TypeError(f"scan, {where}: the carry changed its structure {changed}; return it as it came")
    for number, (a, b) in enumerate(zip(old, new, strict=True)):
        if _form(a) != _form(b):
            leaf = join("the carry", list(named_leaves(before))[number][0])
            raise TypeError(
                f"scan, {where}: {leaf} came in as {shape_of(a)} and left as {shape_of(b)}; f must keep its shape and "
                "dtype (cast before returning)"
            )


def _form(leaf: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None
