"""The content of a checkpoint: keys, slices of flat vectors, and the manifest of all that is no tensor."""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from yafsdp_fn.checkpoint.folder import CheckpointError, folder_name
from yafsdp_fn.dist.ranks import Axis, Ranks
from yafsdp_fn.params.layout import Entry, FlatLayout, Group
from yafsdp_fn.params.sharded import Sharded, handles_and_leaves
from yafsdp_fn.params.sources import fill_group
from yafsdp_fn.params.tree import Tree, checked_split, dotted
from yafsdp_fn.util import disk

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

    shard: [L here, n] or [n], padding included; shape: (L, N) or (N,); start: a
    layers: of the rows of the shard, if there are layers; saved: rows that this stage saves, (0,) of an [n]
    part: of a unit that is split over axes, the number of this rank's part, else None
    of: the group and its entry, and the ranks
    """

    def __init__(
        self,
        shard: Tensor,
        *,
        shape: tuple[int, ...],
        start: int,
        layers: tuple[int, ...] | None,
        saved: tuple[int, ...],
        part: int | None,
        of: tuple[Entry, Group, Ranks],
    ) -> None:
        self.shape, self.dtype, self.start = shape, shard.dtype, min(start, shape[-1])
        self.layers, self.saved, self.part, self.of = layers, saved, part, of
        self.shard = shard.narrow(-1, 0, min(start + shard.shape[-1], shape[-1]) - self.start)

    def over(self, memory: Tensor) -> "ShardSlice":
        """Returns the same slice over `memory`, which has the shape of `shard`, on any device."""
        found = copy.copy(self)
        found.shard = memory
        return found

    def parts(self, *, saved: bool = False) -> dict[tuple[int, ...], Tensor]:
        """Returns the slice per run of neighbouring layers held here, or all of it without layers, by its offsets in
        the whole.

        saved: only what this stage saves
        """
        found = self._runs(saved)
        if self.part is None:
            return found
        return {(self.part, *offsets): run.unsqueeze(0) for offsets, run in found.items()}

    def _runs(self, saved: bool) -> dict[tuple[int, ...], Tensor]:
        if self.layers is None:
            return {(self.start,): self.shard} if self.saved or not saved else {}
        runs: list[list[int]] = []  # [first row, first layer, length]
        for row in self.saved if saved else range(len(self.layers)):
            layer = self.layers[row]
            if runs and (row, layer) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1][2] += 1
            else:
                runs.append([row, layer, 1])
        return {(layer, self.start): self.shard.narrow(0, row, length) for row, layer, length in runs}


Content = ShardSlice | Tensor
"""A slice of a flat vector, or a tensor that is the same on every rank."""


def held(content: Content) -> Tensor:
    """Returns this rank's part of a content; all of a plain tensor."""
    return content.shard if isinstance(content, ShardSlice) else content


def parts(content: Content, *, saved: bool = False) -> dict[tuple[int, ...], Tensor]:
    """Returns the same as slices, by their offsets in the whole tensor. saved: only what this stage saves"""
    return content.parts(saved=saved) if isinstance(content, ShardSlice) else {(0,) * content.ndim: content}


# ---- Lists the tensors of a state's checkpoint by key, and checks that a checkpoint fits a state.
#
# params.layers               a ShardSlice [L, N]     one per group of units; [N] where it has a single unit
# opt_state.1.0.mu.layers     a ShardSlice [L, N]     the optimizer's trees, the same cuts
# opt_state.1.0.count         a 0-dim tensor   the same on every rank, written once

Description = dict[str, Any]
"""A tensor in JSON: dtype, and `shape` (the same on every rank), or `layers` and `leaves` (name: per-layer shape,
whole); of units that are split also `axes` (name: size) and `splits` (name: dimension, for each leaf)."""


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
                out[key] = _shard_slice(node, group, shard)
                leaves = dict(zip(group.layout.names, map(list, group.whole.shapes), strict=True))
                layers = node.entry.length if node.entry.stacked(group) else None
                described[key] = {"dtype": str(shard.dtype), "layers": layers, "leaves": leaves}
                described[key] |= _cut_of(group)
        elif isinstance(node, Tensor):
            out[path] = node
            described[path] = {"dtype": str(node.dtype), "shape": list(node.shape)}
        else:
            raise TypeError(f"{path}: a state holds tensors, got {type(node).__name__}; checkpoints keep tensors only")
    return out, described


def _shard_slice(handle: Sharded, group: Group, shard: Tensor) -> ShardSlice:
    ranks, stacked, part = handle.owner.comms, handle.entry.stacked(group), None
    start = ranks.within(group.over).rank * shard.shape[-1]
    if group.axes:
        part = next(
            number for number, members in enumerate(ranks.subgroups(across=group.over)) if ranks.rank in members
        )
    layers, shape = group.here if stacked else None, _shape_of(group, len(group.units) if stacked else None)
    of = handle.entry, group, ranks
    return ShardSlice(shard, shape=shape, start=start, layers=layers, saved=group.counted, part=part, of=of)


def _shape_of(group: Group, layers: int | None) -> tuple[int, ...]:
    """Returns the shape in which a group is saved: [L, N], [N], or with the parts in front, if it is split."""
    parts = (math.prod(size for _, size in group.axes),) if group.axes else ()
    return *parts, *(() if layers is None else (layers,)), group.layout.numel


def _cut_of(group: Group) -> Description:
    """Returns what a description says of a unit that is split."""
    if not group.axes:
        return {}
    splits = [{name: list(cut) if isinstance(cut, tuple) else cut for name, cut in split} for split in group.splits]
    return {"axes": dict(group.axes), "splits": splits}  # as JSON has it


class Recut(NamedTuple):
    """A slice of units that were saved split otherwise, over other axes or over none, or with other leaves in a unit.

    slice: to be filled; saved: by key, the groups that have its leaves, and their layers, None of [N]; lies: the key
        and the number there of each leaf
    """

    slice: ShardSlice
    saved: dict[str, tuple[Group, int | None]]
    lies: tuple[tuple[str, int], ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes in which these groups were saved."""
        return {key: _shape_of(*saved) for key, saved in self.saved.items()}

    def fill(self, read: Callable[[str, Tensor, tuple[int, ...]], None]) -> None:
        """Fills the slice from whole leaves, of one layer at a time. read: fills a tensor from that place in what was
        saved under a key"""
        entry, group, ranks = self.slice.of

        def whole(leaf: int, layer: int | None) -> Tensor:
            key, number = self.lies[leaf]
            (saved, layers), pieces = self.saved[key], []
            layout, row = saved.layout, () if layers is None else (layer or 0,)
            for part in range(self.shapes[key][0]) if saved.axes else (None,):
                at = (*(() if part is None else (part,)), *row, layout.offsets[number])
                piece = self.slice.shard.new_empty(*[1] * (len(at) - 1), layout.sizes[number])
                read(key, piece, at)
                pieces.append(piece.view(layout.shapes[number]))
            found = saved.joined(number, pieces)
            return found if row or layer is None else found[layer]  # of a pinned one, which has all layers

        n = group.layout.shard_numel(ranks.within(group.over).ranks)
        row = self.slice.shard.new_empty(*self.slice.shard.shape[:-1], n)  # the slice ends before padding
        fill_group(row, entry, group, ranks, [partial(whole, leaf) for leaf in range(len(self.lies))])
        self.slice.shard.copy_(row.narrow(-1, 0, self.slice.shard.shape[-1]))


def recuts(
    tensors: dict[str, Content], saved: dict[str, Description], wanted: dict[str, Description], where: str
) -> dict[str, Recut]:
    """Returns how to read the tensors that were saved split or grouped otherwise, of descriptions that `check` has
    accepted."""
    there, out = _by_leaf(saved, where), {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, ShardSlice):
            continue
        names = list(wanted[key]["leaves"])
        keys = [there[handle_of(key), name][0] for name in names]
        if key in saved and _lies(saved[key]) == _lies(wanted[key]):
            continue
        try:
            groups = {each: (_group_of(saved[each], tensor.of[1]), saved[each].get("layers")) for each in keys}
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise CheckpointError(f"{where}: {key}: how it was split cannot be: {error}") from error
        lies = [(each, groups[each][0].layout.names.index(name)) for each, name in zip(keys, names, strict=True)]
        out[key] = Recut(tensor, groups, tuple(lies))
    return out


def _lies(described: Description) -> tuple[Any, ...]:
    """Returns what decides where leaves lie in their unit, and in which part."""
    return list(described.get("leaves", {})), *(described.get(of) for of in ("layers", "axes", "splits"))


def _group_of(described: Description, like: Group) -> Group:
    """Returns the group that was saved so. like: one of this state, for all that a description does not say"""
    leaves, axes = described["leaves"], described.get("axes", {})
    given = zip(described.get("splits", [{}] * len(leaves)), leaves.values(), strict=True)
    of_leaves = tuple(checked_split(split, tuple(shape)) for split, shape in given)
    layout = FlatLayout(tuple(leaves), tuple(map(tuple, leaves.values())))
    whole = dataclasses.replace(like, layout=layout, axes=(), splits=of_leaves)
    return whole.on({name: Axis(size, 0) for name, size in axes.items()}) if axes else whole


def handle_of(key: str) -> str:
    """Returns the path of the handle, or of the tensor, that a key is of."""
    return key.partition(":")[0]


def _by_leaf(described: dict[str, Description], where: str) -> dict[tuple[str, str], tuple[str, Description]]:
    """`(handle, leaf) -> (key, description)`: leaves are found by name, whatever unit of their handle they are in. A
    tensor outside of handles has the leaf ""."""
    out: dict[tuple[str, str], tuple[str, Description]] = {}
    for key, of in described.items():
        for leaf, shape in of.get("leaves", {"": of.get("shape")}).items():
            if (at := (handle_of(key), leaf)) in out:
                raise CheckpointError(f"{where}: {key} and {out[at][0]} both have {leaf or at[0]}")
            out[at] = key, {"shape": shape, "layers": of.get("layers"), "dtype": of.get("dtype")}
    return out


ANOTHER_OPTIMIZER = (
    ". Load it with the optimizer that saved it; ya.shard(state, tx) then carries over to another one what both have"
)


def check(saved: dict[str, Description], wanted: dict[str, Description], where: str) -> None:
    """Raises CheckpointError unless the checkpoint at `where` has exactly the leaves that the state needs, naming the
    first difference."""
    have, want = _by_leaf(saved, where), _by_leaf(wanted, where)
    handles, asked = ({handle for handle, _ in of} for of in (have, want))
    for (handle, leaf), (key, needs) in want.items():
        if handle not in handles:
            text = f"{where}: this state has {key}, the checkpoint has not; it holds {_some(saved)}"
            raise CheckpointError(text + ANOTHER_OPTIMIZER * key.startswith("opt_state"))
        there = have.get((handle, leaf), (key, {}))[1]
        for field in needs if _form(there) != _form(needs) else ():
            if there.get(field) != needs[field]:
                of_leaf = f", leaf {leaf}" if leaf else ""
                texts = ", this state ".join(_field(field, of) for of in (there, needs))
                raise CheckpointError(f"{where}: {key}{of_leaf}: the checkpoint has {texts}")
    extra = {at: key for at, (key, _) in have.items() if at not in want}
    if names := {f"{leaf} in {key}" if handle in asked else key for (handle, leaf), key in extra.items()}:
        text = f"{where}: the checkpoint holds {_some(names)}, which this state has not"
        raise CheckpointError(text + ANOTHER_OPTIMIZER * all(name.startswith("opt_state") for name in names))


def _form(of: Description) -> tuple[Any, ...]:
    """Returns dtype and shape, with all layers: a leaf of a stack may be in units of layers, or in one."""
    shape, layers = of.get("shape"), of.get("layers")
    return of.get("dtype"), [layers, *shape] if layers is not None and isinstance(shape, list) else shape


def _field(field: str, of: Description) -> str:
    if not of:
        return "nothing"
    return f"shape {tuple(of[field])}" if field == "shape" and isinstance(of[field], list) else f"{field} {of[field]}"


def _some(keys: Any, most: int = 6) -> str:
    names = sorted(keys)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- `manifest.json`: all of a checkpoint but its tensors. It is untrusted: types are checked.

MANIFEST = "manifest.json"
FORMAT, PICKLED = 3, 2
"""The format that is written, and that of earlier versions."""
LARGEST = 2**63
DEEPEST = 100
"""Levels of lists and objects: messages to other ranks are pickled, which fails at some hundreds."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    step, seed: of the state; ranks: that wrote it; circumstances: of a deterministic mesh; tensors: by key
    program: its JSON; extra: the user's
    """

    step: int
    seed: int
    ranks: int
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
    return json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=1)


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
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    if (version := values.pop("format", None)) == PICKLED:
        why = "its tensors lie in pickles, which this one does not open; go on with the version that wrote it"
        raise CheckpointError(f"{path}: format {PICKLED}: {why}")
    if version != FORMAT:
        raise CheckpointError(f"{path}: format {version!r:.40}, this version of yafsdp_fn reads format {FORMAT}")
    fields = [field.name for field in dataclasses.fields(Manifest)]
    if sorted(values) != sorted(fields):
        raise CheckpointError(f"{path}: expected the fields {', '.join(fields)}, got {', '.join(values)[:200]}")
    for name in ("step", "seed", "ranks"):
        number = values[name]
        if type(number) is not int or not (-LARGEST if name == "seed" else 0) <= number < LARGEST:
            raise CheckpointError(f"{path}: {name} is {str(number)[:40]}, expected an integer of 64 bits")
    if values["program"] is not None and not isinstance(values["program"], str):
        raise CheckpointError(f"{path}: program is {type(values['program']).__name__}, expected text or null")
    for name in ("extra", "circumstances"):
        if not isinstance(values[name], dict):
            raise CheckpointError(f"{path}: {name} is {type(values[name]).__name__}, expected an object")
    tensors = values["tensors"]
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: tensors is {type(tensors).__name__}, expected an object")
    for key, described in tensors.items():
        leaves = described.get("leaves", {}) if isinstance(described, dict) else None
        if not isinstance(leaves, dict) or not all(isinstance(shape, list) for shape in leaves.values()):
            raise CheckpointError(f"{path}: tensors: {key[:200]}: expected its dtype and the shapes of its leaves")
    return Manifest(**values)
