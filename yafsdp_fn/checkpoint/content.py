"""What a checkpoint of a state holds, by key, and whether a checkpoint fits a state.

params.layers               a Box [L, N]     one per group of units; [N] where it has a single unit
opt_state.1.0.mu.layers     a Box [L, N]     the optimizer's trees, the same cuts
opt_state.1.0.count         a 0-dim tensor   the same on every rank, written once
"""

from collections.abc import Iterator
from typing import Any

import optree
from torch import Tensor

from yafsdp_fn.checkpoint.box import Box
from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree, dotted

Description = dict[str, Any]
"""JSON: dtype, and either `shape` (the same on every rank) or `layers` and `leaves` (name: per-layer shape)."""


def tensors(tree: Tree) -> tuple[dict[str, Tensor], dict[str, Description]]:
    """`({key: Box or tensor}, {key: description})` of a sharded tree; the tensors share memory with it."""
    out: dict[str, Tensor] = {}
    described: dict[str, Description] = {}
    accessors, nodes, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_sharded)
    for accessor, node in zip(accessors, nodes, strict=True):
        path = dotted(accessor)
        if isinstance(node, Sharded):
            found = node.group_leaves()
            for _, group, shard in found:
                key = path if len(found) == 1 else f"{path}:{group.name}"
                out[key] = _box(node, group, shard)
                leaves = dict(zip(group.layout.names, map(list, group.layout.shapes), strict=True))
                layers = node.entry.length if node.entry.stacked(group) else None
                described[key] = {"dtype": str(shard.dtype), "layers": layers, "leaves": leaves}
        elif isinstance(node, Tensor):
            out[path] = node
            described[path] = {"dtype": str(node.dtype), "shape": list(node.shape)}
        else:
            raise TypeError(f"{path}: a state holds tensors, got {type(node).__name__}; checkpoints keep tensors only")
    return out, described


def _box(handle: Sharded, group: Group, shard: Tensor) -> Box:
    start, numel = handle.owner.comms.rank * shard.shape[-1], group.layout.numel
    stacked = handle.entry.stacked(group)
    shape = (len(group.units), numel) if stacked else (numel,)
    return Box(shard, shape=shape, start=start, layers=group.here if stacked else None, saved=group.counted)


def check(saved: dict[str, Description], wanted: dict[str, Description], where: str) -> None:
    """Raises unless the checkpoint at `where` has exactly what the state wants, naming the first leaf that differs."""
    for key, want in wanted.items():
        if key not in saved:
            stack = key.partition(":")[0]  # its leaves may be there, grouped by other markers
            there = [other for other in saved if other.partition(":")[0] == stack] or saved
            raise CheckpointError(f"{where}: this state has {key}, the checkpoint has not; it holds {_some(there)}")
        for difference in _differences(saved[key], want):
            raise CheckpointError(f"{where}: {key}{difference}")
    if extra := saved.keys() - wanted.keys():
        raise CheckpointError(f"{where}: the checkpoint holds {_some(extra)}, which this state has not")


def _differences(have: Description, want: Description) -> Iterator[str]:
    saved, wanted = have.get("leaves", {}), want.get("leaves", {})
    for name in dict.fromkeys((*wanted, *saved)):
        a, b = saved.get(name), wanted.get(name)
        if a != b:
            yield f", leaf {name}: the checkpoint has {_shape(a)}, this state {_shape(b)}"
    if list(saved) != list(wanted):
        yield ": the same leaves in another order, so they lie elsewhere in the flat vector"
    for field in ("layers", "shape", "dtype"):
        if have.get(field) != want.get(field):
            yield f": the checkpoint has {field} {have.get(field)}, this state {want.get(field)}"


def _shape(shape: list[int] | None) -> str:
    return "nothing" if shape is None else f"shape {tuple(shape)}"


def _some(keys: Any, most: int = 6) -> str:
    names = sorted(keys)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
