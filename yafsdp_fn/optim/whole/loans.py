"""Whole leaves of sharded trees on loan at their owners: the rule, where states lie, the update of one unit."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.optim.base import EmptyState, GradientTransformation, State, name
from yafsdp_fn.optim.step.cutting import rows
from yafsdp_fn.optim.whole.borrowed import Borrowed, Messages
from yafsdp_fn.params.layout import FlatLayout, Group
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.owners import Leaf, assign, leaves_of
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import join, named_leaves, shape_of


@dataclasses.dataclass(frozen=True)
class Leafwise:
    """Rule: `inner` on each leaf of each layer that `where` chooses, all by default.

    dtype: what updates travel in and are given to `inner` as, on a device; None: their own
    params: whether parameters go along; scale: what results are multiplied by when they are back, from a leaf's shape
    """

    inner: GradientTransformation
    dtype: Callable[[torch.device], torch.dtype | None] = lambda device: None
    params: bool = False
    where: LeafRule = lambda path, param: True
    scale: Callable[[tuple[int, ...]], float] = lambda shape: 1.0

    def update(self, updates: Tensor, state: State, params: Tensor | None) -> tuple[Tensor, State]:
        """The work on one leaf. updates: in the dtype that travels"""
        new, after = self.inner.update(updates, state, params)
        if not isinstance(new, Tensor) or new.shape != updates.shape:
            raise TypeError(
                f"optim: {name(self.inner)} is given one leaf, {shape_of(updates)}, and should return one like it, "
                f"got {shape_of(new)}"
            )
        return new, after


class OfGroup(NamedTuple):
    """What happens to the units of a group.

    leaves: of a unit, those that travel; owners: of these, by unit
    layout: of their states in a unit of states: [L, ...] for a pinned group, as its leaves are
    states, specs: of each leaf: where its state lies there, and how it is put together
    """

    leaves: list[Leaf]
    owners: dict[int, list[int]]
    layout: FlatLayout
    states: list[list[Leaf]]
    specs: list[optree.PyTreeSpec]


def plan(rule: Leafwise, handles: Sequence[Sharded]) -> dict[str, OfGroup]:
    """By the name of the group, for all handles of a tree: owners are balanced over all of it."""
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


def _of_group(rule: Leafwise, group: Group, leaves: list[Leaf], owners: Mapping[int, list[int]]) -> OfGroup:
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
    return OfGroup(leaves, {unit: owners[unit] for unit in group.held}, layout, of_leaves, specs)


def state_of(rule: Leafwise, handle: Sharded) -> Sharded:
    """A handle on this rank's shards of the states of all leaves, as a tree of states in the leaves' places."""
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
    """The state of a leaf which nobody has whole: its values may depend on the leaf's shape alone."""
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


class Loan:
    """The update of one unit's leaves at their owners. What `lend` and `work` return is to be exchanged.

    row, state, params: the unit's shards of updates, of states (None where there are none), of parameters (None where
        they do not go along)
    """

    def __init__(
        self,
        rule: Leafwise,
        of: OfGroup,
        unit: int,
        ranks: Ranks,
        row: Tensor,
        state: Tensor | None,
        params: Tensor | None,
    ) -> None:
        self._rule, self._of, self._row, self._state = rule, of, row, state
        owners = of.owners[unit]
        self._updates = Borrowed(of.leaves, owners, row.to(rule.dtype(row.device) or row.dtype), ranks)
        self._params = None if params is None else Borrowed(of.leaves, owners, params, ranks)
        self._states = None
        if state is not None:
            of_states = [owner for owner, leaves in zip(owners, of.states, strict=True) for _ in leaves]
            self._states = Borrowed([leaf for leaves in of.states for leaf in leaves], of_states, state, ranks)

    def lend(self) -> list[Messages]:
        """To owners: updates, states, parameters."""
        return [part.lend() for part in (self._updates, self._states, self._params) if part is not None]

    def work(self) -> list[Messages]:
        """At owners; then back to shards."""
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
        """The unit's new updates and states, when all of it is back."""
        state = None
        if self._states is not None and self._state is not None:
            state = self._states.write(self._state.clone())
        scales = [self._rule.scale(leaf.shape) for leaf in self._of.leaves]
        return self._updates.write(self._row.clone(), scales), state


def update_handle(
    plans: Mapping[str, OfGroup], rule: Leafwise, updates: Sharded, state: Sharded, params: Sharded | None
) -> tuple[Sharded, Sharded]:
    """All units of a handle, one after the other: what steps take apart, and overlap."""
    ranks = updates.owner.comms
    kept = {number: leaf for number, _, leaf in state.group_leaves()}
    weights = {} if params is None else {number: leaf for number, _, leaf in params.group_leaves()}
    new, after = [], {}
    for number, group, shard in updates.group_leaves():
        nothing = [None] * len(group.held)
        columns = [rows(group, tree[number]) if number in tree else nothing for tree in (kept, weights)]
        out = []
        for unit, row, *others in zip(group.held, rows(group, shard), *columns, strict=True):
            loan = Loan(rule, plans[group.name], unit, ranks, row, *others)
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
