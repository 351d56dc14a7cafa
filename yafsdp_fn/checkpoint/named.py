"""Checkpoints of other libraries, a tensor for each parameter under a name of theirs, as FSDP2 and torch's DCP write
them.

params = load_named("theirs", llama.params(config), name)       # `ya.Lazy` leaves: the index is read, no weights state
= ya.shard(params, tx, mesh=mesh)                         # a layer at a time, each rank keeps its part
save_named("for-them", state.params, name)                      # FSDP2's state dict is loaded from it with dcp.load

def name(path, layer):              # "layers.wq", 3 -> "model.layers.3.wq"
    return "model." + (path if layer is None else path.replace("layers.", f"layers.{layer}."))
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import optree
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from yafsdp_fn.checkpoint import reader
from yafsdp_fn.checkpoint.folder import AllRanks, CheckpointError, owned, ranks_of
from yafsdp_fn.checkpoint.reader import Writer
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded
from yafsdp_fn.params.sources import Lazy
from yafsdp_fn.params.tree import Tree, dotted, in_stack, leaf_names, without_markers
from yafsdp_fn.runtime.memory import Memory
from yafsdp_fn.runtime.whole_layers import map_whole_layers
from yafsdp_fn.sharding import unshard
from yafsdp_fn.util.disk import sync_folder

Name = Callable[[str, int | None], str]
"""A leaf's path in our tree, and its layer if it is in a stack -> the tensor's name in the checkpoint."""


def load_named(directory: str | os.PathLike[str], params: Tree, name: Name) -> Tree:
    """Returns `params` with `ya.Lazy` leaves of the checkpoint's dtypes, for `ya.shard` or `ya.materialize`.

    params: `ya.Param` leaves and markers, as for `ya.init`; their shapes must be the checkpoint's

    Pickled objects beside the tensors are not read, and nothing is executed. Raises CheckpointError, naming leaf and
    tensor.
    """
    root = Path(directory)
    stored = reader.scan(root)

    def find(path: str, layer: int | None, shape: tuple[int, ...]) -> reader.Stored:
        key = name(path, layer)
        if key not in stored:
            raise CheckpointError(
                f"{root}: {path} should be {key}, which is not there; it holds {', '.join(stored)[:300]}"
            )
        if stored[key].shape != shape:
            raise CheckpointError(f"{root}: {key} has shape {stored[key].shape}, {path} here has {shape}")
        return stored[key]

    accessors, leaves, spec = optree.tree_flatten_with_accessor(params)
    out = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        out.append(_lazy(find, dotted(accessor), tuple(leaf.shape), in_stack(accessor)))
    return optree.tree_unflatten(spec, out)


def _lazy(find: Callable[..., reader.Stored], path: str, shape: tuple[int, ...], layered: bool) -> Lazy:
    if not layered:
        one = find(path, None, shape)
        return Lazy(shape, one.dtype, lambda _: one.read())
    layers = [find(path, layer, shape[1:]) for layer in range(shape[0])]
    if len(dtypes := {layer.dtype for layer in layers}) > 1:
        raise CheckpointError(f"{path}: its layers have dtypes {', '.join(sorted(map(str, dtypes)))}: expected one")

    def load(layer: int | None) -> Tensor:
        return torch.stack([one.read() for one in layers]) if layer is None else layers[layer].read()

    return Lazy(shape, layers[0].dtype, load)


def save_named(directory: str | os.PathLike[str], params: Tree, name: Name) -> None:
    """Writes the leaves of sharded `params` into `directory`, a new folder, by torch.distributed.checkpoint.

    Every rank calls it. Layers are gathered one at a time, and each rank keeps and writes some of them: its share of
    the parameters, and one layer, in the memory of the host. The folder appears when it is complete.
    """
    root = Path(directory)
    partial = root.with_name(f"{root.name}.partial")
    what = f"saving {root}"
    owner = next((handle.owner for handle in handles(params)), None)
    ranks = ranks_of(owner.mesh) if isinstance(owner, Memory) else AllRanks()

    def begin() -> None:
        if root.exists():
            raise CheckpointError("it is there already; name a new folder")

    def publish() -> None:
        sync_folder(partial)
        partial.rename(root)
        sync_folder(root.parent)

    ranks.first(begin, what)
    mine = _mine(params, name, ranks)
    with owned(partial, ranks, what):
        writer = Writer(partial, overwrite=True)
        ranks.through_dcp(lambda: dcp_save(mine, storage_writer=writer, process_group=ranks.group), what)
        ranks.first(publish, what)


def _mine(params: Tree, name: Name, ranks: AllRanks) -> dict[str, Tensor]:
    """Returns the tensors that this rank writes, by name: every R-th unit."""
    units, out, seen = itertools.count(), dict[str, Tensor](), set[str]()

    def take(path: str, tree: Tree, layer: int | None) -> None:
        mine = next(units) % ranks.count == ranks.rank
        for key, leaf in zip(optree.tree_leaves(leaf_names(tree)), optree.tree_leaves(tree), strict=True):
            full = name(".".join(part for part in (path, key) if part), layer)
            if full in seen:
                raise ValueError(f"save_named: two leaves are called {full!r}; `name` must tell them apart")
            seen.add(full)
            if mine:
                out[full] = leaf.detach().cpu().clone()

    accessors, nodes, _ = optree.tree_flatten_with_accessor(params, is_leaf=is_sharded)
    for accessor, node in zip(accessors, nodes, strict=True):
        path = dotted(accessor)
        if not isinstance(node, Sharded):
            raise TypeError(f"save_named: {path} is not sharded; it takes state.params, or a tree like it")
        if node.entry.length is None:
            take(path, without_markers(unshard(node)), None)
        else:
            layers = itertools.count()
            map_whole_layers(lambda layer, path=path, layers=layers: take(path, layer, next(layers)), node)
    return out
