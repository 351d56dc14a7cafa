"""Inner products, norms, functions and random values over whole trees, sharded or plain: the same on every rank.

Padding and gaps of flat shards hold zeros, so sums need no mask. Plain leaves are replicated and counted once. Values
are differentiable: in a loss, each rank holds the value as a part that counts equally.

util/squares.py makes the sums. On a deterministic mesh those of sharded leaves are exact (util/exact_sums.py) and not
differentiable; on a mesh with stages they are not differentiable either.
"""

import itertools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.differentiable import Collective, SumOfRanks, SumOfShards, ToShards
from yafsdp_fn.params import initializers
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded, trainable
from yafsdp_fn.params.sources import Source, fill_group, source, whole_leaf
from yafsdp_fn.params.tree import Param, Tree, dotted, in_stack, number_dtype
from yafsdp_fn.util.exact_sums import binned, total
from yafsdp_fn.util.inner_product import inner
from yafsdp_fn.util.randomness import in_step
from yafsdp_fn.util.squares import squared_norm, sum_of
from yafsdp_fn.util.torch_private import transforms_active

NOT_DIFFERENTIABLE = (
    "on a deterministic mesh it is an exact sum, and not differentiable. Take it of detached leaves, under "
    "torch.no_grad(), or use a mesh without deterministic"
)

NOT_ON_STAGES = (
    "on a mesh with stages it is not differentiable: a stage's loss would depend on weights that are elsewhere. Take "
    "it of detached leaves, under torch.no_grad(), or use a mesh without stages"
)


# ---- Inner products and norms.


def vdot(a: Tree, b: Tree) -> Tensor:
    """Returns the inner product of two trees of one structure: a 0-dim float32 tensor (float64 for float64 leaves).

    >>> ya.vdot({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 4.0])})
    tensor(11.)
    >>> torch.allclose(ya.vdot(state.params, state.params), ya.global_norm(state.params) ** 2)
    True
    """
    spec = optree.tree_structure(a)
    if spec != optree.tree_structure(b):
        raise ValueError(f"vdot: trees differ in structure: {spec} and {optree.tree_structure(b)}")

    def local(x: Tree, y: Tree) -> Tensor:
        return sum_of([inner(*pair) for pair in zip(optree.tree_leaves(x), optree.tree_leaves(y), strict=True)])

    return _over_ranks("vdot", a, b, local).to(number_dtype(a))


def global_norm(tree: Tree) -> Tensor:
    """Returns the Euclidean norm of all leaves together: a 0-dim tensor, as in Optax.

    >>> ya.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    squares = _over_ranks("global_norm", tree, tree, lambda x, _: squared_norm(optree.tree_leaves(x)))
    return squares.sqrt().to(number_dtype(tree))


# ---- Values of ranks in a loss.


def sum_over_ranks(x: Tree, like: Tree) -> Tree:
    """Sums over all ranks of the mesh, for every rank; differentiable.

    `ya.grad` gives of a plain argument a rank's part of the derivative: where ranks share the argument, this makes it
    whole. On a plain tree there is one rank.

    x: a tree of plain tensors; like: a tree with sharded leaves, on whose ranks `x` is

    >>> def scaled(rate, params, batch):
    ...     return loss_fn(params, batch).total * rate
    >>> g = ya.grad(scaled)(torch.tensor(0.5), state.params, batch)
    >>> ya.params.sum_over_ranks(g, state.params).shape
    torch.Size([])
    """
    return _on_ranks("sum_over_ranks", SumOfRanks, x, like)


def to_shards(x: Tree, like: Tree) -> Tree:
    """Returns `x`, a plain value that ranks share, for arithmetic with sharded leaves: the step size of
    `w - ya.params.to_shards(rate, params) * g`, of which each rank sees its own shards alone.

    Without it torch.func, and `ya.grad` inside another derivative, take the derivative by `x` for that of a rank's
    value, and have it too small by the ranks of a copy.

    x: a tree of plain tensors; like: a tree with sharded leaves

    >>> rate = ya.params.to_shards(torch.tensor(0.5), state.params)
    >>> new = optree.tree_map(lambda w: w - rate * w, state.params)
    """
    return _on_ranks("to_shards", ToShards, x, like)


def _on_ranks(what: str, collective: type[Collective], x: Tree, like: Tree) -> Tree:
    # a shard is no value that ranks share
    found = handles(like)
    if sharded := handles(x):
        raise TypeError(
            f"{what}: {sharded[0].entry.name or 'params'!r} is sharded: each rank has a part of its own. Expected "
            "plain tensors"
        )
    if not found or found[0].check().owner.comms.alone:
        return x
    return optree.tree_map(collective(found[0].owner.comms, step=in_step()), x)


# ---- New trees.


def map_trainable(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Returns `tree` with `function` of each trained leaf, and of its like in `others`; frozen leaves stay as they are.

    others: trees without frozen leaves, such as those of an optimizer's state

    >>> halves = ya.params.map_trainable(lambda leaf: leaf / 2, state.params)
    >>> torch.allclose(ya.global_norm(halves), ya.global_norm(state.params) / 2)
    True
    """
    trained = trainable(tree)
    new = optree.tree_leaves(optree.tree_map(function, trained, *others))
    by_leaf = {id(old): leaf for old, leaf in zip(optree.tree_leaves(trained), new, strict=True)}
    return optree.tree_map(lambda leaf: by_leaf.get(id(leaf), leaf), tree)


def normal_like(seed: int, tree: Tree) -> Tree:
    """Draws standard normal values in the shape of `tree`: the same logical values at every world size.

    They depend on the seed and the paths of leaves, and are unrelated to those of `init` with that seed.

    >>> direction = ya.normal_like(0, state.params)
    >>> whole = ya.normal_like(0, plain)                       # the same values
    >>> torch.allclose(ya.unshard(direction)["head"]["out"], whole["head"]["out"])
    True
    """

    def normal(path: str, like: Tensor, shape: tuple[int, ...]) -> Source:
        return source(f"normal_like {path}", Param(shape, like.dtype, initializers.normal(1.0)), seed, like.device)

    def draw(accessor: optree.PyTreeAccessor, node: Any) -> Any:
        if not isinstance(node, Sharded):
            stacked = in_stack(accessor)
            return whole_leaf(normal(dotted(accessor), node, node.shape), node.shape[0] if stacked else None)
        # by whole leaves, of which each rank keeps its part
        shards = tuple(torch.empty_like(leaf) for leaf in node.leaves)
        for (_, group, leaf), shard in zip(node.group_leaves(), shards, strict=True):
            named = zip(group.layout.names, group.whole.shapes, strict=True)
            sources = [normal(name, leaf, (*leaf.shape[:-1], *shape)) for name, shape in named]
            fill_group(shard, group, node.owner.comms, sources)
        return Sharded(shards, node.context)

    return optree.tree_map_with_accessor(draw, tree, is_leaf=is_sharded)


def _plain_leaves(tree: Tree) -> list[Any]:
    return [node for node in optree.tree_leaves(tree, is_leaf=is_sharded) if not is_sharded(node)]


def _over_ranks(what: str, a: Tree, b: Tree, local: Callable[[Tree, Tree], Tensor]) -> Tensor:
    """Returns `local` of the sharded leaves, summed over ranks, plus `local` of the plain ones. what: for errors"""
    if hasattr(a, "opt_state"):
        raise TypeError(f"{what} of a state would count the optimizer's moments; give its parameters: state.params")
    # plain leaves, which every rank has
    found = [h.check() for h in handles(a)]
    other = [h.check() for h in handles(b)]
    of_plain = local(_plain_leaves(a), _plain_leaves(b))
    if not found:
        return of_plain
    # shards, each unit once
    must_be_one(what, found)
    comms = found[0].owner.comms
    mine = [leaf for handle in found for leaf in handle.counted()]
    leaves = mine, mine if b is a else [leaf for handle in other for leaf in handle.counted()]
    if comms.deterministic or comms.stages > 1:
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in itertools.chain(*leaves))
        if transforms_active() or tracked:
            raise RuntimeError(f"{what}: {NOT_ON_STAGES if comms.stages > 1 else NOT_DIFFERENTIABLE}")
    if not comms.deterministic:
        summed = SumOfShards(comms, step=in_step())(local(*leaves))
        return summed + of_plain.to(summed.device)
    exact = total(comms.sum_over_shards(binned(zip(*leaves, strict=True), comms.device)))
    return exact + of_plain.to(exact.device)
