"""The content of a checkpoint: keys, slices of flat vectors, and the manifest of all that is no tensor."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
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
from yafsdp_fn.util.mesh_axes import ALIGN, ranks_on
from yafsdp_fn.util.schema import Limits, typed

# ---- The tensors of a state by key: leaves that are the same on every rank, and slices of flat vectors.
#
# params.layers               a slice [L, N]     one per group of units; [N] where it has a single unit
# opt_state.1.0.mu.layers     a slice [L, N]     the optimizer's trees, the same cuts
# opt_state.1.0.count         a 0-dim tensor     the same on every rank, written once
#
#     whole tensor   [L, N]  (or [N])                 N: elements of a unit, without the padding of any world size
#     this rank's    [:, a:b], one slice: offsets (0, a), sizes (L, b - a); nothing if a >= N
#     of a stage     [c:d, a:b] for each run of its layers
#     if split       [P, L, N], N elements of one of P parts; this rank's [p:p+1, :, a:b]
#
# Each rank writes its own slices; tensors.py reads any other cut of them.

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

Read = Callable[[str, Tensor, tuple[int, ...]], None]
"""Fills a tensor from that place in what was saved under a key."""


class Units(NamedTuple):
    """Units whose shards a tensor has: their group, and the ranks among which they are cut."""

    group: Group
    ranks: Ranks


class SavedLeaf(NamedTuple):
    """A leaf as it was saved: the key of its group, the group, its layers (None of [N]), and the leaf's number
    there."""

    key: str
    group: Group
    layers: int | None
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which its group was saved."""
        return _shape_of(self.group, self.layers)


class Content(NamedTuple):
    """A tensor of a state.

    tensor: the same on every rank, or, with `units`, this rank's shards of them, [L here, n] or [n]
    leaves: those of its units as they were saved, if it is to be read and they were split otherwise, over other axes or
        over none, or with other leaves in a unit
    """

    key: str
    tensor: Tensor
    description: Description
    units: Units | None = None
    leaves: tuple[SavedLeaf, ...] = ()

    def parts(self, *, saved: bool = False) -> dict[tuple[int, ...], Tensor]:
        """Returns this rank's parts by their offsets in the whole tensor: of a stack, one for each run of neighbouring
        layers that are here. saved: only what this stage saves"""
        if self.units is None:
            return {(0,) * self.tensor.ndim: self.tensor}
        # its elements of each unit, without padding
        group, ranks = self.units
        numel = group.layout.numel
        n = self.tensor.shape[-1]
        start = min(numel, ranks.without(group.over).rank * n)
        shard = self.tensor.narrow(-1, 0, min(n, numel - start))
        found: dict[tuple[int, ...], Tensor] = {}
        if group.stacked:
            rows = group.counted if saved else tuple(range(len(group.here)))
            layers = [group.here[row] for row in rows]
            begins = [at for at in range(len(rows)) if at == 0 or layers[at] != layers[at - 1] + 1]
            for begin, end in itertools.pairwise([*begins, len(rows)]):
                found[layers[begin], start] = shard.narrow(0, rows[begin], end - begin)
        elif group.counted or not saved:
            found[(start,)] = shard
        if not group.axes:
            return found
        subgroups = ranks.subgroups(across=group.over)
        part = next(number for number, members in enumerate(subgroups) if ranks.rank in members)
        return {(part, *offsets): run.unsqueeze(0) for offsets, run in found.items()}

    def reads(self) -> dict[str, tuple[int, ...]]:
        """Returns the keys of what it is read from, and the shapes in which that was saved."""
        if self.leaves:
            return {leaf.key: leaf.shape for leaf in self.leaves}
        if self.units is None:
            return {self.key: tuple(self.tensor.shape)}
        return {self.key: _shape_of(self.units.group, self.description["layers"])}

    def fill(self, read: Read) -> None:
        """Fills this rank's parts, or its shards from whole leaves, of one layer at a time."""
        if self.units is not None and self.leaves:
            sources = [partial(_whole, leaf, self.tensor, read) for leaf in self.leaves]
            fill_group(self.tensor.detach(), *self.units, sources)
            return
        for offsets, target in self.parts().items():
            read(self.key, target.detach(), offsets)


def _whole(leaf: SavedLeaf, like: Tensor, read: Read, layer: int | None) -> Tensor:
    """Returns a whole leaf, of one layer, from the places of its parts in what was saved."""
    layout = leaf.group.layout
    number = leaf.number
    place = [layout.offsets[number]] if leaf.layers is None else [layer or 0, layout.offsets[number]]
    places = [tuple(place)]
    if leaf.group.axes:
        places = [(part, *place) for part in range(leaf.shape[0])]
    pieces = []
    for at in places:
        piece = like.new_empty(*[1] * (len(at) - 1), layout.sizes[number])
        read(leaf.key, piece, at)
        pieces.append(piece.view(layout.shapes[number]))
    found = leaf.group.joined(number, pieces)
    return found if leaf.layers is not None or layer is None else found[layer]  # of a pinned one: it has all layers


def contents(tree: Tree) -> list[Content]:
    """Returns the tensors of a sharded tree, which share its memory."""
    out: list[Content] = []
    for accessor, node in handles_and_leaves(tree):
        path = dotted(accessor)
        if isinstance(node, Sharded):
            found = node.group_leaves()
            for _, group, shard in found:
                key = path if len(found) == 1 else f"{path}:{group.name}"
                units = Units(group, node.owner.comms)
                out.append(Content(key, shard, _described(group, shard), units))
        elif isinstance(node, Tensor):
            out.append(Content(path, node, {"dtype": str(node.dtype), "shape": list(node.shape)}))
        else:
            raise TypeError(f"{path}: a state holds tensors, got {type(node).__name__}; checkpoints keep tensors only")
    return out


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
    parts = (ranks_on(group.axes),) if group.axes else ()
    of_layers = () if layers is None else (layers,)
    return *parts, *of_layers, group.layout.numel


# ---- Checks that a checkpoint fits a state, and finds where its leaves are.


def found_in(saved: dict[str, Description], wanted: Iterable[Content], where: str) -> list[Content]:
    """Returns the contents of a state as they are read from the checkpoint at `where`. Raises CheckpointError unless it
    has exactly their leaves."""
    there = _by_leaf(saved, where)
    _check(there, saved, {each.key: each.description for each in wanted}, where)
    found = []
    for each in wanted:
        key, _, described, units, _ = each
        if units is None or (key in saved and _lies(saved[key]) == _lies(described)):
            found.append(each)
            continue
        leaves = []
        try:
            for name in described["leaves"]:
                at, _ = there[handle_of(key), name]
                group = _group_of(saved[at], units.group)
                leaves.append(SavedLeaf(at, group, saved[at].get("layers"), group.layout.names.index(name)))
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise CheckpointError(f"{where}: {key}: how it was split cannot be: {error}") from error
        found.append(each._replace(leaves=tuple(leaves)))
    return found


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


def _check(
    have: Mapping[tuple[str, str], tuple[str, str]],
    saved: dict[str, Description],
    wanted: dict[str, Description],
    where: str,
) -> None:
    """Raises CheckpointError unless `have`, the leaves of `saved`, are those of `wanted`, naming the first
    difference."""
    want = _by_leaf(wanted, where)
    handles = {handle for handle, _ in have}
    for (handle, leaf), (key, form) in want.items():
        _, there = have.get((handle, leaf), (key, "nothing"))
        if there != form:
            at = f"{key}, leaf {leaf}" if leaf else key
            text = f"{where}: {at}: the checkpoint has {there}, this state {form}"
            if handle not in handles:
                text += f"; it holds {some(saved)}" + ANOTHER_OPTIMIZER * key.startswith("opt_state")
            raise CheckpointError(text)
    left = {at: key for at, (key, _) in have.items() if at not in want}
    if left:
        names = some({f"{leaf} in {key}" if leaf else key for (_, leaf), key in left.items()})
        text = f"{where}: the checkpoint holds {names}, which this state has not"
        raise CheckpointError(text + ANOTHER_OPTIMIZER * all(key.startswith("opt_state") for key in left.values()))


def some(keys: Iterable[str]) -> str:
    """Returns six of them, and how many more there are."""
    names = sorted(keys)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


# ---- `manifest.json`: all of a checkpoint but its tensors. It is untrusted: types are checked.

MANIFEST = "manifest.json"
FORMAT = 3
"""The format that is written and read. In that before, tensors were pickles."""


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


def write(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({"format": FORMAT, **manifest._asdict()}, indent=1)
    disk.write(folder / MANIFEST, text.encode())


def read(folder: Path) -> str:
    """Reads the text of the manifest in a checkpoint's folder. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None


def parsed(folder: Path, text: str) -> Manifest:
    """Returns the manifest of a checkpoint's folder from its text: ranks send each other the text, since a message is
    pickled, which fails where lists are nested hundreds of levels deep. Raises CheckpointError, naming the file and the
    field."""
    path = folder / MANIFEST
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({type(error).__name__}: {error})") from None
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
    if folder.name.partition(".")[0] != folder_name(found.step):
        raise CheckpointError(f"{path} is of step {found.step}: expected the folder {folder_name(found.step)}")
    return found
