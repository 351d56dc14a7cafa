"""Checkpoints of other libraries, a tensor for each parameter under a name of theirs, as FSDP2 and torch's DCP write
them.

params = load_named("theirs", llama.params(config), name)       # `ya.Lazy` leaves: the index is read, no weights
state = ya.shard(params, tx, mesh=mesh)                         # a layer at a time, each rank keeps its part
save_named("for-them", state.params, name)                      # FSDP2's state dict is loaded from it with dcp.load

def name(path, layer):              # "layers.wq", 3 -> "model.layers.3.wq"
    return "model." + (path if layer is None else path.replace("layers.", f"layers.{layer}."))

state = load_moments("theirs", state, moments)                  # Adam's, as torch.optim.AdamW keeps them
save_moments("moments-for-them", state, moments)

def moments(path, layer):           # "layers.wq", 3 -> "optim.state.layers.3.wq", of it .exp_avg, .exp_avg_sq, .step
    return name(path, layer).replace("model.", "optim.state.")
"""

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from yafsdp_fn.checkpoint.content import some
from yafsdp_fn.checkpoint.folder import AllRanks, CheckpointError, Directory, owned, ranks_of
from yafsdp_fn.checkpoint.io import reads, writing
from yafsdp_fn.optim.in_format import InFormatState
from yafsdp_fn.optim.partition import PartitionState
from yafsdp_fn.optim.rules import ScaleByAdamState
from yafsdp_fn.optim.scaling import ScaleByScheduleState
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import Sharded, handles, handles_and_leaves
from yafsdp_fn.params.sources import Lazy, fill_group, whole_units
from yafsdp_fn.params.tree import Tree, dotted, in_stack, join, named_leaves
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.state import ShardedState
from yafsdp_fn.util.disk import sync_folder

Name = Callable[[str, int | None], str]
"""A leaf's path in our tree, and its layer if it is in a stack -> the tensor's name in the checkpoint."""


def load_named(directory: Directory, params: Tree, name: Name) -> Tree:
    """Returns `params` with `ya.Lazy` leaves of the checkpoint's dtypes, for `ya.shard` or `ya.materialize`.

    params: `ya.Param` leaves and markers, as for `ya.init`; their shapes must be the checkpoint's

    torch reads these folders by unpickling, which can run anything: load those alone that you trust. Raises
    CheckpointError, naming leaf and tensor. Warns of tensors that are not read, such as layers that `params` has not.

    >>> def name(path, layer):                                 # "layers.up", 3 -> "layers.3.up"
    ...     return path if layer is None else path.replace("layers", f"layers.{layer}")
    >>> ya.checkpoint.save_named(f"{folder}/theirs", state.params, name)
    >>> restored = ya.shard(ya.checkpoint.load_named(f"{folder}/theirs", params, name), tx, mesh=mesh)
    >>> torch.equal(ya.global_norm(restored.params), ya.global_norm(state.params))
    True
    """
    root = Path(directory).absolute()  # weights are read later, wherever the working directory is then
    find, unread = _finder(root, name)
    found: Tree = optree.tree_map_with_accessor(partial(_lazy, find), params)
    if left := unread():
        warnings.warn(f"{root} has {some(left)}, of which these params have no leaf: not read", stacklevel=2)
    return found


class Theirs(NamedTuple):
    """A tensor in a folder of torch.distributed.checkpoint."""

    folder: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        dcp_load({self.key: whole}, storage_reader=FileSystemReader(self.folder), no_dist=True)
        return whole


def _finder(root: Path, name: Name) -> tuple[Callable[..., Theirs], Callable[[], list[str]]]:
    """Returns two functions. `(path, layer, shape, suffix="")` -> the tensor, raises CheckpointError for one that does
    not fit. `()` -> the names that were not asked for, but for those that name a tensor that was: its moments, say."""
    try:
        about = FileSystemReader(root).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise CheckpointError(
            f"{root} cannot be read as torch's checkpoint: {type(error).__name__}: {error}"
        ) from error
    stored = {
        key: Theirs(root, key, of.properties.dtype, tuple(of.size))
        for key, of in about.items()
        if isinstance(of, TensorStorageMetadata)
    }

    asked: dict[str, tuple[str, int | None]] = {}

    def find(path: str, layer: int | None, shape: tuple[int, ...], suffix: str = "") -> Theirs:
        key = f"{name(path, layer)}{suffix}"
        if key not in stored:
            raise CheckpointError(
                f"{root}: {path} should be {key}, which is not there; it holds {', '.join(stored)[:300]}"
            )
        if stored[key].shape != shape:
            raise CheckpointError(f"{root}: {key} has shape {stored[key].shape}, {path} here has {shape}")
        first, other = asked.setdefault(key, (path, layer))
        if first == path and other != layer:
            raise CheckpointError(f"{path} is {key} in layer {other} and in layer {layer}: `name` must tell them apart")
        return stored[key]

    def unread() -> list[str]:
        # without its first part a name that was read is in the names of its moments:
        # "model.embed.weight" and "optim.state.embed.weight.exp_avg"
        parts = [key.partition(".")[2] or key for key in asked]
        others = [key for key in stored if key not in asked]
        return [key for key in others if not any(part in key for part in parts)]

    return find, unread


def _lazy(find: Callable[..., Theirs], accessor: optree.PyTreeAccessor, leaf: Any) -> Lazy:
    """Returns the leaf that loads the tensors of a parameter, which have its shape, one for each layer."""
    path = dotted(accessor)
    shape = tuple(leaf.shape)
    if not in_stack(accessor):
        one = find(path, None, shape)
        return Lazy.in_place_of(leaf, one.dtype, lambda _: one.read())
    layers = [find(path, layer, shape[1:]) for layer in range(shape[0])]
    dtypes = {layer.dtype for layer in layers}
    if len(dtypes) > 1:
        raise CheckpointError(f"{path}: its layers have dtypes {', '.join(sorted(map(str, dtypes)))}: expected one")

    def load(layer: int | None) -> Tensor:
        return torch.stack([one.read() for one in layers]) if layer is None else layers[layer].read()

    return Lazy.in_place_of(leaf, layers[0].dtype, load)


def save_named(directory: Directory, params: Tree, name: Name) -> None:
    """Writes the leaves of sharded `params` into `directory`, a new folder, by torch.distributed.checkpoint.

    Every rank calls it. Layers are gathered one at a time, and each rank keeps and writes some of them: its share of
    the parameters, and one layer, in the memory of the host. The folder appears when it is complete.

    >>> def name(path, layer):                                 # "layers.up", 3 -> "layers.3.up"
    ...     return path if layer is None else path.replace("layers", f"layers.{layer}")
    >>> ya.checkpoint.save_named(f"{folder}/theirs", state.params, name)
    """
    owner = next((handle.owner for handle in handles(params)), None)
    ranks = ranks_of(owner.mesh) if isinstance(owner, StateMemory) else AllRanks()
    _save(Path(directory), lambda: _mine(params, name, ranks), ranks)


def _save(root: Path, content: Callable[[], dict[str, Tensor]], ranks: AllRanks) -> None:
    """Writes what `content()` returns on each rank into `root`, a new folder."""
    what = f"saving {root}"

    def begin() -> Path:
        if root.exists():
            raise CheckpointError("it is there already; name a new folder")
        return root

    def publish() -> None:
        sync_folder(unfinished)
        unfinished.rename(root)
        sync_folder(root.parent)

    root = ranks.first(begin, what)  # one folder for all, whatever clock is in a rank's name of it
    unfinished = root.with_name(f"{root.name}.partial")
    mine = content()
    with owned(unfinished, ranks, what):
        writer = FileSystemWriter(unfinished, overwrite=True)
        try:
            dcp_save(mine, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
        except CheckpointException as error:  # on every rank, where one has failed
            causes = []
            for at, (cause, _) in error.failures.items():
                causes.append(f"rank {ranks.members[at]}: {type(cause).__name__}: {cause}")
            raise CheckpointError(f"{what} failed: {'; '.join(causes)}") from error
        ranks.first(publish, what)


def _mine(params: Tree, name: Name, ranks: AllRanks) -> dict[str, Tensor]:
    """Returns the tensors that this rank writes, by name: every R-th unit."""
    must_be_one("save_named", handles(params))
    units = itertools.count()
    out = dict[str, Tensor]()
    seen = set[str]()
    for accessor, node in handles_and_leaves(params):
        if not isinstance(node, Sharded):
            raise TypeError(f"save_named: {dotted(accessor)} is not sharded; it takes state.params, or a tree like it")
        if not isinstance(node.owner, StateMemory):
            raise TypeError(f"save_named: {dotted(accessor)} has no weights here: {node.owner.why_not_whole()}")
        length = node.entry.length
        whole_unit = whole_units(node)
        for layer in range(1 if length is None else length):
            mine = next(units) % ranks.count == ranks.rank
            for key, leaf in named_leaves(whole_unit(layer)):
                full = name(join(dotted(accessor), key), None if length is None else layer)
                if not isinstance(full, str):
                    raise TypeError(f"save_named: `name` returned {full!r} for {key}: expected a string")
                if full in seen:
                    raise ValueError(f"save_named: two leaves are called {full!r}; `name` must tell them apart")
                seen.add(full)
                if mine:
                    out[full] = leaf.detach().cpu().clone()
    return out


# ---- Adam's moments, as torch.optim.AdamW keeps them for each parameter.

MEAN, SQUARE, STEP = ".exp_avg", ".exp_avg_sq", ".step"


def load_moments(directory: Directory, state: ShardedState, name: Name) -> ShardedState:
    """Returns `state`, which is donated, with the moments and the count of Adam from a checkpoint.

    name: of a parameter in the saved optimizer, without `.exp_avg`, `.exp_avg_sq`, `.step`

    The count goes to the learning rate's schedule, too. Every rank calls it. Raises CheckpointError, naming parameter
    and tensor, before `state` is touched: also for parameters that took unequal numbers of steps, since here all have
    one count.

    >>> def name(path, layer):                                 # "layers.up", 3 -> "of.layers.3.up", of it .exp_avg, ...
    ...     return "of." + (path if layer is None else path.replace("layers", f"layers.{layer}"))
    >>> ya.checkpoint.save_moments(f"{folder}/moments", state, name)
    >>> again = ya.checkpoint.load_moments(f"{folder}/moments", ya.init(params, tx, mesh=mesh), name)
    >>> ya.checksum(again) == ya.checksum(state)
    True
    """
    state, ranks, root = state.check(), ranks_of(state.mesh), Path(directory)
    adam = _adam(state.opt_state)

    fills: list[Callable[[], None]] = []

    def find_all() -> float:
        """Finds all tensors, and returns the count of steps, which is one."""
        find, _ = _finder(root, name)
        steps = dict[float, str]()
        for tree, suffix in ((adam.mu, MEAN), (adam.nu, SQUARE)):
            for handle in handles(tree):
                for _, group, shard in handle.group_leaves():
                    layers = [None] if handle.entry.length is None else list(range(handle.entry.length))
                    sources = []
                    for path, shape in zip(group.layout.names, group.layer_shapes, strict=True):
                        kept = {layer: find(path, layer, shape, suffix) for layer in layers}
                        for layer in layers:
                            steps.setdefault(find(path, layer, (), STEP).read().item(), path)
                        sources.append(lambda layer, kept=kept: kept[layer].read())
                    comms = handle.owner.comms
                    fills.append(partial(fill_group, shard, group, comms, sources))
        if len(steps) != 1:
            told = ", ".join(f"{path} {step:g}" for step, path in steps.items())
            raise CheckpointError(
                f"expected one number of steps for all parameters, which Adam counts here; got {told}"
            )
        return next(iter(steps))

    count = ranks.each(find_all, f"reading {root}")[ranks.rank]
    memory = state.memory

    def fill() -> None:
        for one in fills:
            one()
        for kept in _states(state.opt_state, ScaleByAdamState | ScaleByScheduleState):
            kept.count.fill_(count)

    with writing(memory):
        ranks.each(fill, f"reading {root}")
    return state.over(memory, state.opt_state)


def save_moments(directory: Directory, state: ShardedState, name: Name) -> None:
    """Writes the moments and the count of Adam into `directory`, a new folder, as `save_named` writes parameters.

    name: as for `load_moments`

    FSDP2 loads them so; its learning rates stay its own:

        found = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optim": {"state": found["state"]}}, checkpoint_id=directory)
        set_optimizer_state_dict(model, optimizer, found)

    >>> def name(path, layer):                                 # "layers.up", 3 -> "of.layers.3.up", of it .exp_avg, ...
    ...     return "of." + (path if layer is None else path.replace("layers", f"layers.{layer}"))
    >>> ya.checkpoint.save_moments(f"{folder}/moments", state, name)
    """
    state, ranks = state.check(), ranks_of(state.mesh)
    adam = _adam(state.opt_state)

    def content() -> dict[str, Tensor]:
        with state.memory.using(reads(state)):
            mean = _mine(adam.mu, lambda path, layer: name(path, layer) + MEAN, ranks)
            square = _mine(adam.nu, lambda path, layer: name(path, layer) + SQUARE, ranks)
            count = adam.count.cpu().float()  # as torch.optim.AdamW has it
        return mean | square | {key.removesuffix(MEAN) + STEP: count.clone() for key in mean}

    _save(Path(directory), content, ranks)


def _states(tree: Tree, kind: Any) -> list[Any]:
    found = optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def _adam(opt_state: Tree) -> ScaleByAdamState:
    """Returns the state of the one Adam in an optimizer's. Raises TypeError where it is not alone, or not whole."""
    found = _states(opt_state, ScaleByAdamState)
    if _states(opt_state, InFormatState):
        raise TypeError(
            "expected Adam's moments whole, got them in a format, which torch.optim.AdamW has not: "
            "ya.shard(state, ya.optim.adamw(...)) is the state with whole ones, and back"
        )
    parts = _states(opt_state, PartitionState)
    if len(found) != 1 or any(_states(tuple(part), ScaleByAdamState) for part in parts):
        raise TypeError(
            f"expected an optimizer with one Adam for all parameters, such as adamw, got {len(found)} of them"
            f"{' in a partition or mask' if found else ''}: their moments have no place in torch.optim.AdamW's state"
        )
    adam: ScaleByAdamState = found[0]
    return adam
