"""The content of a checkpoint: keys, slices of flat vectors, and the manifest of all that is no tensor."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from torch import Tensor

from yafsdp_fn.checkpoint.folder import CheckpointError, folder_name
from yafsdp_fn.communication.ranks import Axis, Ranks
from yafsdp_fn.params.layout import FlatLayout, Group
from yafsdp_fn.params.sharded import Sharded, handles_and_leaves
from yafsdp_fn.params.sources import fill_group
from yafsdp_fn.params.tree import Tree, checked_split, dotted
from yafsdp_fn.util import disk
from yafsdp_fn.util.mesh_axes import ALIGN
from yafsdp_fn.util.schema import Limits, typed

# ---- `ShardSlice`: one rank's slice of a flat vector.
#
#     whole tensor   [L, N]  (or [N])                 N: elements of a unit, without the padding of any world size
#     this rank's    [:, a:b], one slice: offsets (0, a), sizes (L, b - a); nothing if a >= N
#     of a stage     [c:d, a:b] for each run of its layers
#     if split       [P, L, N], N elements of one of P parts; this rank's [p:p+1, :, a:b]
#
# Each rank writes its own slices; tensors.py reads any other cut of them.


class ShardSlice:
    """A tensor of the whole shape, of which only `shard` is here, this rank's part of the last axis.

    shard: [L here, n] or [n], without padding; shape: (L, N) or (N,), or with the parts in front, if the unit is split
        over axes; start: a
    """

    def __init__(self, shard: Tensor, group: Group, ranks: Ranks) -> None:
        self.group = group
        self.ranks = ranks
        self.dtype = shard.dtype
        self.shape = _shape_of(group, len(group.units) if group.stacked else None)
        n = shard.shape[-1]
        numel = self.shape[-1]
        start = ranks.without(group.over).rank * n
        self.start = min(start, numel)
        self.shard = shard.narrow(-1, 0, min(start + n, numel) - self.start)

    def parts(self, *, saved: bool) -> dict[tuple[int, ...], Tensor]:
        """Returns the pieces of this slice by their offsets in the whole: one for each run of neighbouring layers that
        are here, or a single one of a leaf outside stacks.

        saved: only what this stage saves
        """
        group = self.group
        found: dict[tuple[int, ...], Tensor] = {}
        if group.stacked:
            for rows in self._runs(group.counted if saved else range(len(group.here))):
                first = rows[0]
                found[group.here[first], self.start] = self.shard.narrow(0, first, len(rows))
        elif group.counted or not saved:
            found[(self.start,)] = self.shard
        if not group.axes:
            return found
        subgroups = self.ranks.subgroups(across=group.over)
        part = next(number for number, members in enumerate(subgroups) if self.ranks.rank in members)
        return {(part, *offsets): run.unsqueeze(0) for offsets, run in found.items()}

    def _runs(self, rows: Iterable[int]) -> list[list[int]]:
        """Returns rows in runs whose layers follow each other."""
        layer = self.group.here
        runs: list[list[int]] = []
        for row in rows:
            if runs and layer[row] == layer[runs[-1][-1]] + 1:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs


Content = ShardSlice | Tensor
"""A slice of a flat vector, or a tensor that is the same on every rank."""


def parts(content: Content, *, saved: bool = False) -> dict[tuple[int, ...], Tensor]:
    """Returns this rank's parts of a content, by their offsets in the whole tensor. saved: only what this stage
    saves"""
    return content.parts(saved=saved) if isinstance(content, ShardSlice) else {(0,) * content.ndim: content}


# ---- Lists the tensors of a state's checkpoint by key, and checks that a checkpoint fits a state.
#
# params.layers               a ShardSlice [L, N]     one per group of units; [N] where it has a single unit
# opt_state.1.0.mu.layers     a ShardSlice [L, N]     the optimizer's trees, the same cuts
# opt_state.1.0.count         a 0-dim tensor   the same on every rank, written once

Description = dict[str, Any]
"""A tensor in JSON:

    dtype     as torch writes it, or the name of the format whose bytes it has
    shape     of a tensor that is the same on every rank
    layers    of a group of units: how many, null where it has a single unit
    leaves    of a group of units: their names, and the shapes of one layer, whole
    axes      of units that are split: the axes inside blocks, and their sizes
    splits    of these, for each leaf: axes, and the dimension that each cuts
    align     of units that are cut between blocks of formats: elements at whose multiples leaves begin
"""


def tensors(tree: Tree) -> tuple[dict[str, Content], dict[str, Description]]:
    """Returns `({key: ShardSlice or tensor}, {key: description})` of a sharded tree; the tensors share its memory."""
    out: dict[str, Content] = {}
    described: dict[str, Description] = {}
    for accessor, node in handles_and_leaves(tree):
        path = dotted(accessor)
        if isinstance(node, Sharded):
            found = node.group_leaves()
            for _, group, shard in found:
                key = path if len(found) == 1 else f"{path}:{group.name}"
                out[key] = ShardSlice(shard, group, node.owner.comms)
                described[key] = _described(group, shard)
        elif isinstance(node, Tensor):
            out[path] = node
            described[path] = {"dtype": str(node.dtype), "shape": list(node.shape)}
        else:
            raise TypeError(f"{path}: a state holds tensors, got {type(node).__name__}; checkpoints keep tensors only")
    return out, described


def _described(group: Group, shard: Tensor) -> Description:
    """Returns the description of a group's leaves."""
    found: Description = {
        "dtype": str(shard.dtype) if group.encodes is None else group.encodes.format.name,
        "layers": group.length if group.stacked else None,
        "leaves": dict(zip(group.layout.names, map(list, group.whole.shapes), strict=True)),
    }
    if group.axes:
        found["axes"] = dict(group.axes)
        found["splits"] = json.loads(json.dumps([dict(split) for split in group.splits]))  # lists for tuples
    if group.layout.align != ALIGN:
        found["align"] = group.layout.align
    return found


def _shape_of(group: Group, layers: int | None) -> tuple[int, ...]:
    """Returns the shape in which a group is saved: [L, N], [N], or with the parts in front, if it is split."""
    parts = (math.prod(size for _, size in group.axes),) if group.axes else ()
    of_layers = () if layers is None else (layers,)
    return *parts, *of_layers, group.layout.numel


class SavedLeaf(NamedTuple):
    """A leaf as it was saved: the key of its group, the group, its layers (None of [N]), and the leaf's number
    there."""

    key: str
    group: Group
    layers: int | None
    number: int


Read = Callable[[str, Tensor, tuple[int, ...]], None]
"""Fills a tensor from that place in what was saved under a key."""


class Recut(NamedTuple):
    """A slice of units that were saved split otherwise, over other axes or over none, or with other leaves in a unit.

    slice: to be filled; leaves: those of its group
    """

    slice: ShardSlice
    leaves: tuple[SavedLeaf, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes in which the groups of the leaves were saved."""
        return {leaf.key: _shape_of(leaf.group, leaf.layers) for leaf in self.leaves}

    def fill(self, read: Read) -> None:
        """Fills the slice from whole leaves, of one layer at a time."""
        shard = self.slice.shard
        group = self.slice.group
        ranks = self.slice.ranks
        n = group.layout.shard_numel(ranks.without(group.over).ranks)
        row = shard.new_empty(*shard.shape[:-1], n)  # the slice ends before padding
        sources = [partial(self._whole, read, leaf) for leaf in self.leaves]
        fill_group(row, group, ranks, sources)
        shard.copy_(row.narrow(-1, 0, shard.shape[-1]))

    def _whole(self, read: Read, leaf: SavedLeaf, layer: int | None) -> Tensor:
        """Returns a whole leaf, of one layer, from the places of its parts in what was saved."""
        layout = leaf.group.layout
        number = leaf.number
        place = [layout.offsets[number]] if leaf.layers is None else [layer or 0, layout.offsets[number]]
        places = [tuple(place)]
        if leaf.group.axes:
            places = [(part, *place) for part in range(self.shapes[leaf.key][0])]
        pieces = []
        for at in places:
            piece = self.slice.shard.new_empty(*[1] * (len(at) - 1), layout.sizes[number])
            read(leaf.key, piece, at)
            pieces.append(piece.view(layout.shapes[number]))
        found = leaf.group.joined(number, pieces)
        return found if leaf.layers is not None or layer is None else found[layer]  # of a pinned one: it has all layers


def recuts(
    tensors: dict[str, Content], saved: dict[str, Description], wanted: dict[str, Description], where: str
) -> dict[str, Recut]:
    """Returns how to read the tensors that were saved split or grouped otherwise, of descriptions that `check` has
    accepted."""
    there = _by_leaf(saved, where)
    out = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, ShardSlice) or (key in saved and _lies(saved[key]) == _lies(wanted[key])):
            continue
        leaves = []
        try:
            for name in wanted[key]["leaves"]:
                at, _ = there[handle_of(key), name]
                group = _group_of(saved[at], tensor.group)
                leaves.append(SavedLeaf(at, group, saved[at].get("layers"), group.layout.names.index(name)))
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise CheckpointError(f"{where}: {key}: how it was split cannot be: {error}") from error
        out[key] = Recut(tensor, tuple(leaves))
    return out


def _lies(described: Description) -> tuple[Any, ...]:
    """Returns what decides where leaves lie in their unit, and in which part."""
    return list(described.get("leaves", {})), *(described.get(of) for of in ("layers", "axes", "splits", "align"))


def _group_of(described: Description, like: Group) -> Group:
    """Returns the group that was saved so. like: one of this state, for all that a description does not say"""
    leaves = described["leaves"]
    axes = described.get("axes", {})
    given = zip(described.get("splits", [{}] * len(leaves)), leaves.values(), strict=True)
    of_leaves = tuple(checked_split(split, tuple(shape)) for split, shape in given)
    align = described.get("align", ALIGN)
    if type(align) is not int or not 1 <= align < 2**31:
        raise ValueError(f"align: expected a number of elements, got {align!r:.80}")
    layout = FlatLayout(tuple(leaves), tuple(map(tuple, leaves.values())), align)
    whole = dataclasses.replace(like, layout=layout, axes=(), splits=of_leaves)
    return whole.on({name: Axis(size, 0) for name, size in axes.items()}) if axes else whole


def handle_of(key: str) -> str:
    """Returns the path of the handle, or of the tensor, that a key is of."""
    return key.partition(":")[0]


def _by_leaf(described: dict[str, Description], where: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Returns `(handle, leaf) -> (key, form)`, the key of its group, and its dtype and whole shape in words: leaves are
    found by name, whatever unit of their handle they are in. A tensor outside of handles has the leaf ""."""
    out: dict[tuple[str, str], tuple[str, str]] = {}
    for key, of in described.items():
        layers = [] if of.get("layers") is None else [of["layers"]]
        for leaf, shape in of.get("leaves", {"": of.get("shape")}).items():
            at = handle_of(key), leaf
            if at in out:
                raise CheckpointError(f"{where}: {key} and {out[at][0]} both have {leaf or at[0]}")
            out[at] = key, f"{of.get('dtype')} {[*layers, *shape]}"
    return out


ANOTHER_OPTIMIZER = (
    ". Load it with the optimizer that saved it; ya.shard(state, tx) then carries over to another one what both have"
)


def check(saved: dict[str, Description], wanted: dict[str, Description], where: str) -> None:
    """Raises CheckpointError unless the checkpoint at `where` has exactly the leaves that the state needs, naming the
    first difference."""
    have = _by_leaf(saved, where)
    want = _by_leaf(wanted, where)
    handles = {handle for handle, _ in have}
    for (handle, leaf), (key, form) in want.items():
        _, there = have.get((handle, leaf), (key, "nothing"))
        if there != form:
            at = f"{key}, leaf {leaf}" if leaf else key
            text = f"{where}: {at}: the checkpoint has {there}, this state {form}"
            if handle not in handles:
                text += f"; it holds {_some(saved)}" + ANOTHER_OPTIMIZER * key.startswith("opt_state")
            raise CheckpointError(text)
    left = {at: key for at, (key, _) in have.items() if at not in want}
    if left:
        names = _some({f"{leaf} in {key}" if leaf else key for (_, leaf), key in left.items()})
        text = f"{where}: the checkpoint holds {names}, which this state has not"
        raise CheckpointError(text + ANOTHER_OPTIMIZER * all(key.startswith("opt_state") for key in left.values()))


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


# ---- `manifest.json`: all of a checkpoint but its tensors. It is untrusted: types are checked.

MANIFEST = "manifest.json"
FORMAT = 3
"""The format that is written and read. In that before, tensors were pickles."""
DEEPEST = 100
"""Levels of lists and objects: messages to other ranks are pickled, which fails at some hundreds."""


class Manifest(NamedTuple):
    """The content of `manifest.json`.

    step, seed: of the state; ranks: that wrote it
    circumstances: of a deterministic mesh, on which bits depend
    tensors: descriptions, by key
    program: that of the step that made the state, in JSON
    extra: the user's
    """

    step: Annotated[int, Limits(0, 2**63)]
    seed: int
    ranks: Annotated[int, Limits(0, 2**63)]
    circumstances: dict[str, str]
    tensors: dict[str, Description]
    program: str | None
    extra: dict[str, Any]


def deeper_than(most: int, value: Any) -> bool:
    """Returns whether lists and objects of JSON are nested more than `most` times."""
    level = [value]
    for _ in range(most + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = list(itertools.chain.from_iterable(inside))
    return bool(level)


def to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **manifest._asdict()}, indent=1)


def write(folder: Path, manifest: Manifest) -> None:
    disk.write(folder / MANIFEST, to_json(manifest).encode())


def read(folder: Path) -> Manifest:
    """Reads the manifest in a checkpoint's folder. Raises CheckpointError, naming the file and the field."""
    path = folder / MANIFEST
    try:
        manifest = from_json(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    if folder.name.partition(".")[0] != folder_name(manifest.step):
        raise CheckpointError(f"{path} is of step {manifest.step}: expected the folder {folder_name(manifest.step)}")
    return manifest


def from_json(text: str, path: str) -> Manifest:
    """Reads what `to_json` wrote; `path` is its name in errors."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({type(error).__name__}: {error})") from None
    if deeper_than(DEEPEST, values):
        raise CheckpointError(f"{path}: it is nested deeper than {DEEPEST} levels")
    version = values.pop("format", None) if isinstance(values, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: format {version!r:.40}, expected {FORMAT}; go on with the version of yafsdp_fn that wrote it"
        )
    try:
        found: Manifest = typed(Manifest, values)
    except ValueError as error:
        raise CheckpointError(f"{path}{error}") from None
    for key, described in found.tensors.items():
        leaves = described.get("leaves", {"": described.get("shape")}) if isinstance(described, dict) else None
        if not isinstance(leaves, dict) or not all(isinstance(shape, list) for shape in leaves.values()):
            raise CheckpointError(f"{path}: tensors: {key[:200]}: expected its dtype and the shapes of its leaves")
    return found
