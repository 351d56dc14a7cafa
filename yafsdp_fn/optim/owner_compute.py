"""Owner compute: whole leaves of sharded trees at the ranks that own them, for one update."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.dist.ranks import Ranks
from yafsdp_fn.optim.base import EmptyState, GradientTransformation, State, name, pair_of
from yafsdp_fn.optim.step.cutting import rows
from yafsdp_fn.params.layout import FlatLayout, Group
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.owners import Leaf, assign, leaves_of
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import join, named_leaves, shape_of

# ---- Moves leaves of a unit between shards and their owners, where each is whole for a moment.

Messages = tuple[list[Tensor], list[Tensor]]
"""The tensors that a rank receives from each rank, and sends to each; empty if there is nothing."""


class LeafExchange:
    """The leaves of one unit, from shards to their owners and back:

        loan = LeafExchange(leaves, owners, row, ranks)
        ranks.exchange(*loan.lend())
        new = {leaf: work(whole) for leaf, whole in loan.whole().items()}       # those that this rank owns
        ranks.exchange(*loan.give_back(new))
        row = loan.write(row.clone())

    leaves, owners: of all that travel; row: this rank's shard [n], which stays as it is
    """

    def __init__(self, leaves: Sequence[Leaf], owners: Sequence[int], row: Tensor, ranks: Ranks) -> None:
        self._leaves, self._row, self._rank, self._n = leaves, row, ranks.rank, row.numel()
        self._everyone = range(ranks.ranks)
        self._copied = ranks.deterministic
        self._owned = [i for i, owner in enumerate(owners) if owner == ranks.rank]
        theirs = [[i for i, owner in enumerate(owners) if owner == rank] for rank in self._everyone]
        # by rank: parts of its leaves that are here, and parts of this rank's leaves that are there
        self._here = [self._parts(theirs[rank], ranks.rank) if rank != ranks.rank else [] for rank in self._everyone]
        self._there = [self._parts(self._owned, rank) if rank != ranks.rank else [] for rank in self._everyone]
        self._received: list[Tensor] = []
        self._new: Mapping[int, Tensor] = {}

    def _parts(self, leaves: Iterable[int], rank: int) -> list[tuple[int, range]]:
        """Returns `(leaf, elements of the unit)` for the parts of `leaves` that `rank` holds."""
        parts = [(i, self._leaves[i].part(rank, self._n)) for i in leaves]
        return [(i, part) for i, part in parts if part]

    def lend(self) -> Messages:
        """Returns the messages to owners."""
        sent = [self._packed([self._of_row(part) for _, part in parts]) for parts in self._here]
        self._received = [self._row.new_empty(sum(len(part) for _, part in parts)) for parts in self._there]
        return self._received, sent

    def whole(self) -> dict[int, Tensor]:
        """Returns the leaves that this rank owns, each in its shape; views of the row if all of it is here, and views
        are allowed."""
        found: dict[int, list[Tensor]] = {i: [] for i in self._owned}
        for rank in self._everyone:  # parts of a leaf lie in the order of ranks
            if rank == self._rank:
                for i, part in self._parts(self._owned, rank):
                    found[i].append(self._of_row(part))
                continue
            parts = self._there[rank]
            pieces = torch.split(self._received[rank], [len(part) for _, part in parts]) if parts else ()
            for (i, _), piece in zip(parts, pieces, strict=True):
                found[i].append(piece)
        # kernels may round differently by alignment, and a view begins anywhere
        pack = torch.cat if self._copied else self._packed
        return {i: pack(pieces).view(self._leaves[i].shape) for i, pieces in found.items()}

    def give_back(self, new: Mapping[int, Tensor]) -> Messages:
        """Returns the messages back to shards. new: value of each leaf that this rank owns"""
        self._new = {i: whole.to(self._row.dtype).reshape(-1) for i, whole in new.items()}
        sent = [self._packed([self._of_leaf(i, part) for i, part in parts]) for parts in self._there]
        self._received = [self._row.new_empty(sum(len(part) for _, part in parts)) for parts in self._here]
        return self._received, sent

    def write(self, out: Tensor, scales: Sequence[float] | None = None) -> Tensor:
        """Replaces all leaves in `out`, a shard [n] of any dtype, and returns it. scales: by leaf, in that dtype"""
        for i, part in self._parts(self._owned, self._rank):
            self._put(out, i, part, self._of_leaf(i, part), scales)
        for parts, received in zip(self._here, self._received, strict=True):
            pieces = torch.split(received, [len(part) for _, part in parts]) if parts else ()
            for (i, part), piece in zip(parts, pieces, strict=True):
                self._put(out, i, part, piece, scales)
        return out

    def _put(self, out: Tensor, i: int, part: range, piece: Tensor, scales: Sequence[float] | None) -> None:
        written = self._of_row(part, out).copy_(piece)
        if scales is not None and scales[i] != 1:
            written.mul_(scales[i])

    def _of_row(self, part: range, row: Tensor | None = None) -> Tensor:
        return (self._row if row is None else row).narrow(0, part.start - self._rank * self._n, len(part))

    def _of_leaf(self, i: int, part: range) -> Tensor:
        return self._new[i].narrow(0, part.start - self._leaves[i].offset, len(part))

    def _packed(self, pieces: list[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else self._row.new_empty(0)


# ---- Owner compute on whole leaves of sharded trees: the rule, the layout of states, the update of one unit.


@dataclasses.dataclass(frozen=True)
class Leafwise:
    """Rule: `inner` on each leaf of each layer that `where` chooses, all by default.

    dtype: of updates when they travel and when `inner` gets them, on a device; None: their own
    params: parameters travel too; scale: factor of returned results, from a leaf's shape
    """

    inner: GradientTransformation
    dtype: Callable[[torch.device], torch.dtype | None] = lambda device: None
    params: bool = False
    where: LeafRule = lambda path, param: True
    scale: Callable[[tuple[int, ...]], float] = lambda shape: 1.0

    def update(self, updates: Tensor, state: State, params: Tensor | None) -> tuple[Tensor, State]:
        """Updates one leaf. updates: in the dtype that travels"""
        new, after = pair_of(self.inner, self.inner.update(updates, state, params))
        if not isinstance(new, Tensor) or new.shape != updates.shape:
            raise TypeError(
                f"optim: {name(self.inner)} is given one leaf, {shape_of(updates)}, and should return one like it, "
                f"got {shape_of(new)}"
            )
        return new, after


class GroupPlan(NamedTuple):
    """The owner compute of a group's units.

    leaves: of a unit, those that travel; owners: of these, by unit
    layout: of their states in a unit of states: [L, ...] for a pinned group, as its leaves are
    states, specs: for each leaf: the layout of its state there, and its structure
    """

    leaves: list[Leaf]
    owners: dict[int, list[int]]
    layout: FlatLayout
    states: list[list[Leaf]]
    specs: list[optree.PyTreeSpec]


def plan(rule: Leafwise, handles: Sequence[Sharded]) -> dict[str, GroupPlan]:
    """Returns the plan of each group, by name, for all handles of a tree: owners are balanced over all of it."""
    chosen: dict[str, tuple[Group, list[Leaf], int]] = {}
    for handle in handles:
        for _, group, shard in handle.group_leaves():
            named = zip(group.layout.names, handle.entry.params(group), strict=True)
            passes = [bool(rule.where(*leaf)) for leaf in named]
            leaves = [leaf for leaf in leaves_of(group) if passes[leaf.position]]
            chosen[group.name] = group, leaves, shard.shape[-1]
    ranks = handles[0].owner.comms.ranks if handles else 1
    units = [(unit, n, leaves) for group, leaves, n in chosen.values() for unit in group.held]
    owners = assign(sorted(units, key=itemgetter(0)), ranks)
    return {name: _of_group(rule, group, leaves, owners) for name, (group, leaves, _) in chosen.items()}


def _of_group(rule: Leafwise, group: Group, leaves: list[Leaf], owners: Mapping[int, list[int]]) -> GroupPlan:
    shapes = {leaf.position: leaf.shape for leaf in leaves}
    states = {position: rule.inner.init(torch.zeros(shape)) for position, shape in shapes.items()}
    found = [(p, path, value) for p, state in states.items() for path, value in named_leaves(state)]
    layers = group.layout.shapes[0][:1] if group.pinned else ()
    layout = FlatLayout(
        tuple(join(group.layout.names[p], path) for p, path, _ in found),
        tuple((*layers, *value.shape) for _, _, value in found),
    )
    # by the leaf that they belong to: its state's leaves, by layer where the unit has them all
    lie: dict[int, list[list[Leaf]]] = {position: [] for position in states}
    for number, leaf in itertools.groupby(
        leaves_of(dataclasses.replace(group, layout=layout)), key=lambda leaf: leaf.position
    ):
        lie[found[number][0]].append(list(leaf))
    seen = dict.fromkeys(states, 0)
    of_leaves = []
    for one in leaves:
        of_leaves.append([of_layers[seen[one.position]] for of_layers in lie[one.position]])
        seen[one.position] += 1
    specs = [optree.tree_structure(states[leaf.position]) for leaf in leaves]
    return GroupPlan(leaves, {unit: owners[unit] for unit in group.held}, layout, of_leaves, specs)


def state_of(rule: Leafwise, handle: Sharded) -> Sharded:
    """Returns a handle on this rank's shards of the states of all leaves, a tree of states in place of leaves."""
    rank, ranks = handle.owner.comms.rank, handle.owner.comms.ranks
    plans = plan(rule, [handle])
    trees: list[Any] = [EmptyState()] * handle.entry.leaf_count
    layouts: dict[int, FlatLayout] = {}
    shards = []
    for number, group, shard in handle.group_leaves():
        of_group = plans[group.name]
        values = []
        for position, shape in {leaf.position: leaf.shape for leaf in of_group.leaves}.items():
            state = _first_state(rule, group.layout.names[position], shape, shard)
            trees[group.leaves[position]] = state
            values += optree.tree_leaves(state)
        if not values:
            continue
        _check_dtypes(rule, group, values)
        layouts[number] = of_group.layout
        whole = values[0].new_zeros(of_group.layout.padded_numel(ranks))
        for view, value in zip(of_group.layout.split(whole), values, strict=True):
            view.copy_(value)  # to all layers, where it has them
        row = whole.view(ranks, -1)[rank]
        shards.append(row.repeat(len(group.held), 1) if shard.ndim == 2 else row.repeat(len(group.held)))
    sizes = [optree.tree_structure(tree).num_leaves for tree in trees]
    starts = [0, *itertools.accumulate(sizes)]
    groups = []
    for number, group in enumerate(handle.entry.groups, handle.context.first_group):
        positions = tuple(at for leaf in group.leaves for at in range(starts[leaf], starts[leaf + 1]))
        layout = layouts.get(number, FlatLayout((), ()))
        groups.append(dataclasses.replace(group, layout=layout, leaves=positions if number in layouts else ()))
    spec = optree.tree_structure(optree.tree_unflatten(handle.entry.spec, trees))
    entry = dataclasses.replace(handle.entry, spec=spec, groups=tuple(groups))
    context = dataclasses.replace(handle.context, entry=entry, only=frozenset(layouts), runner=None)
    return Sharded(tuple(shards), context)


def _first_state(rule: Leafwise, leaf: str, shape: tuple[int, ...], shard: Tensor) -> State:
    """Returns the first state of a leaf that no rank has whole: its values may depend only on the leaf's shape."""
    zeros = torch.zeros(shape, dtype=shard.dtype, device=shard.device)
    state = rule.inner.init(zeros)
    if isinstance(zeros, FakeTensor):  # without values
        return state
    for value, other in zip(optree.tree_leaves(state), optree.tree_leaves(rule.inner.init(zeros + 1)), strict=True):
        if not isinstance(value, Tensor) or not isinstance(other, Tensor) or not torch.equal(value, other):
            raise TypeError(
                f"optim: the first state of {name(rule.inner)} for {leaf} depends on the leaf's values, but no rank "
                "has it whole; begin with zeros, and take what is needed in the first update"
            )
    return state


def _check_dtypes(rule: Leafwise, group: Group, values: Sequence[Tensor]) -> None:
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1 or not values[0].dtype.is_floating_point:
        raise TypeError(
            f"optim: the state of {name(rule.inner)} for {group.name or 'params'} has leaves of "
            f"{', '.join(sorted(map(str, dtypes)))}; expected floating-point tensors of one dtype, since they lie in "
            "flat shards (keep counts as floats)"
        )


class OwnerUpdate:
    """The update of one unit's leaves at their owners. `lend` and `work` return messages to exchange.

    row, state, params: the unit's shards of updates, of states (None if there are none), of parameters (None if they do
        not travel)
    """

    def __init__(
        self,
        rule: Leafwise,
        of: GroupPlan,
        unit: int,
        ranks: Ranks,
        row: Tensor,
        state: Tensor | None,
        params: Tensor | None,
    ) -> None:
        self._rule, self._of, self._row, self._state = rule, of, row, state
        owners = of.owners[unit]
        self._updates = LeafExchange(of.leaves, owners, row.to(rule.dtype(row.device) or row.dtype), ranks)
        self._params = None if params is None else LeafExchange(of.leaves, owners, params, ranks)
        self._states = None
        if state is not None:
            of_states = [owner for owner, leaves in zip(owners, of.states, strict=True) for _ in leaves]
            self._states = LeafExchange([leaf for leaves in of.states for leaf in leaves], of_states, state, ranks)

    def lend(self) -> list[Messages]:
        """Returns the messages to owners: updates, states, parameters."""
        return [part.lend() for part in (self._updates, self._states, self._params) if part is not None]

    def work(self) -> list[Messages]:
        """Updates the leaves that this rank owns; returns the messages back to shards."""
        states = {} if self._states is None else self._states.whole()
        weights = {} if self._params is None else self._params.whole()
        new: dict[int, Tensor] = {}
        after: dict[int, Tensor] = {}
        ends = list(itertools.accumulate(map(len, self._of.states)))
        for i, updates in self._updates.whole().items():
            numbers = range(ends[i] - len(self._of.states[i]), ends[i])
            state = optree.tree_unflatten(self._of.specs[i], [states[number] for number in numbers])
            new[i], changed = self._rule.update(updates, state, weights.get(i))
            after.update(zip(numbers, self._of.specs[i].flatten_up_to(changed), strict=True))  # type: ignore[arg-type]
        back = [self._updates.give_back(new)]
        return back if self._states is None else [*back, self._states.give_back(after)]

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Returns the unit's new updates and states, when everything is back."""
        state = None
        if self._states is not None and self._state is not None:
            state = self._states.write(self._state.clone())
        scales = [self._rule.scale(leaf.shape) for leaf in self._of.leaves]
        return self._updates.write(self._row.clone(), scales), state


def update_handle(
    plans: Mapping[str, GroupPlan], rule: Leafwise, updates: Sharded, state: Sharded, params: Sharded | None
) -> tuple[Sharded, Sharded]:
    """Updates all units of a handle, one after the other; steps do the same in parts, overlapped."""
    ranks = updates.owner.comms
    kept = {number: leaf for number, _, leaf in state.group_leaves()}
    weights = {} if params is None else {number: leaf for number, _, leaf in params.group_leaves()}
    new, after = [], {}
    for number, group, shard in updates.group_leaves():
        nothing = [None] * len(group.held)
        columns = [rows(group, tree[number]) if number in tree else nothing for tree in (kept, weights)]
        out = []
        for unit, row, *others in zip(group.held, rows(group, shard), *columns, strict=True):
            loan = OwnerUpdate(rule, plans[group.name], unit, ranks, row, *others)
            for step in (loan.lend, loan.work):
                for messages in step():
                    ranks.exchange(*messages)
            out.append(loan.rows())
        new.append(_like(shard, [row for row, _ in out]))
        if number in kept:
            after[number] = _like(kept[number], [row for _, row in out if row is not None])
    states = tuple(after[number] for number, _, _ in state.group_leaves())
    return Sharded(tuple(new), updates.context), Sharded(states, state.context)


def _like(shard: Tensor, of_units: list[Tensor]) -> Tensor:
    if not of_units:  # all of them are elsewhere
        return shard
    return torch.stack(of_units) if shard.ndim == 2 else of_units[0]
