"""Numbers over whole trees, sharded or plain: the same value on every rank, padding ignored.

Padding and gaps of flat shards hold zeros, so sums need no mask. Plain leaves are replicated and counted once. They are
differentiable: in a loss, such a value stands on every rank, as a part that counts equally.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn import initializers
from yafsdp_fn.comm.differentiable import AllReduce
from yafsdp_fn.runtime.randomness import in_step
from yafsdp_fn.sharded import Sharded, handles, is_sharded
from yafsdp_fn.sources import fill_group, source, whole_leaf
from yafsdp_fn.tree import Param, Stacked, Tree, dotted


def vdot(a: Tree, b: Tree) -> Tensor:
    """The inner product of two trees of one structure: a 0-dim float32 tensor (float64 for float64 leaves)."""
    spec = optree.tree_structure(a)
    if spec != optree.tree_structure(b):
        raise ValueError(f"vdot: trees differ in structure: {spec} and {optree.tree_structure(b)}")

    def local(x: Tree, y: Tree) -> Tensor:
        pairs = zip(optree.tree_leaves(x), optree.tree_leaves(y), strict=True)
        return _sum([(p.to(_wide(p.dtype)) * q.to(_wide(q.dtype))).sum() for p, q in pairs])

    return _over_ranks(a, b, local)


def global_norm(tree: Tree) -> Tensor:
    """The Euclidean norm of all leaves together: a 0-dim tensor, as in Optax."""

    def squares(x: Tree, _: Tree) -> Tensor:
        return squared_norm(optree.tree_leaves(x))

    return _over_ranks(tree, tree, squares).sqrt()


def squared_norm(leaves: list[Tensor]) -> Tensor:
    """The sum of squares of local leaves, in float32 or float64."""
    return _sum([torch.linalg.vector_norm(leaf, dtype=_wide(leaf.dtype)).square() for leaf in leaves])


def normal_like(seed: int, tree: Tree) -> Tree:
    """Standard normal values in the shape of `tree`: the same logical values at every world size.

    They depend on the seed and on the paths of leaves in the parameters, and are unrelated to `init`'s of that seed.
    """

    def draw(accessor: optree.PyTreeAccessor, node: Any) -> Any:
        if isinstance(node, Sharded):
            return _normal_shards(seed, node)
        abstract = Param(tuple(node.shape), node.dtype, initializers.normal(1.0))
        layers = node.shape[0] if any(issubclass(entry.type, Stacked) for entry in accessor) else None
        return whole_leaf(source(f"normal_like {dotted(accessor)}", abstract, seed, node.device), layers)

    return optree.tree_map_with_accessor(draw, tree, is_leaf=is_sharded)


def _normal_shards(seed: int, handle: Sharded) -> Sharded:
    out = []
    for _, group, leaf in handle.group_leaves():
        new = torch.empty_like(leaf)
        sources = [
            source(
                f"normal_like {name}",
                Param((*leaf.shape[:-1], *shape), leaf.dtype, initializers.normal(1.0)),
                seed,
                leaf.device,
            )
            for name, shape in zip(group.layout.names, group.layout.shapes, strict=True)
        ]
        fill_group(new, handle.entry, group, handle.store.comms.rank, sources)
        out.append(new)
    return Sharded(tuple(out), handle.context)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() if values else torch.zeros(())


def _over_ranks(a: Tree, b: Tree, local: Any) -> Tensor:
    """`local` of what is sharded, summed over ranks, plus `local` of what is plain."""
    found, other = [h.check() for h in handles(a)], [h.check() for h in handles(b)]
    plain = [
        optree.tree_leaves(optree.tree_map(lambda n: None if is_sharded(n) else n, t, is_leaf=is_sharded))
        for t in (a, b)
    ]
    total: Tensor = local(*plain)
    if not found:
        return total
    mine: Tensor = local(found, other)
    summed: Tensor = AllReduce.apply(found[0].store.comms, mine, in_step())  # type: ignore[no-untyped-call]
    return summed + total.to(mine.device)
