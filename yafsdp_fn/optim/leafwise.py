"""Transformations of whole leaves: each leaf of each layer on its own, once, by one rank (util/owners.py).

    tx = assume_leafwise(GradientTransformation(init, update))

`init(leaf)` and `update(updates, state, leaf)` get one leaf of one layer, [m, n] of a stacked [L, m, n]. On a plain
tree that is a loop over leaves and layers. On a sharded tree leaves travel from shards to their owners and back; states
are in flat shards beside the parameters: the leaves of a state are laid out as those of a unit, so they are cut evenly,
and saved and loaded at any number of ranks.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.optim.base import (
    EmptyState,
    GradientTransformation,
    State,
    WholeTrees,
    as_transformation,
    checked_update,
    name,
)
from yafsdp_fn.optim.cutting import Cutter
from yafsdp_fn.optim.leaf_exchange import LeafExchange, Messages, UnitPlan, from_blocks, in_blocks
from yafsdp_fn.params.layout import Entry, FlatLayout, Group
from yafsdp_fn.params.leaf_mask import LeafRule, plain_param
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded
from yafsdp_fn.params.tree import Param, Tree, dotted, in_stack, join, named_leaves, stacked
from yafsdp_fn.util.mesh_axes import ranks_on
from yafsdp_fn.util.owners import Leaf, assign

Result = TypeVar("Result")


Blocks = Callable[[str, Param], tuple[int, int] | None]
"""`(path, per-layer Param) -> (dim, count)`: the leaf is `count` equal blocks along `dim`; None: it is one."""


@dataclasses.dataclass(frozen=True)
class Leafwise:
    """Rule: `inner` on each leaf of each layer that `where` chooses, all by default.

    dtype: of updates when they travel and when `inner` gets them, on a device; None: their own
    params: parameters travel too; scale: factor of returned results, from a leaf's shape
    blocks: of leaves that `inner` gets as [count, ...], a block along their dimension each
    """

    inner: GradientTransformation
    dtype: Callable[[torch.device], torch.dtype | None] = lambda device: None
    params: bool = False
    where: LeafRule = lambda path, param: True
    scale: Callable[[tuple[int, ...]], float] = lambda shape: 1.0
    blocks: Blocks = lambda path, param: None

    def cut(self, path: str, param: Param) -> tuple[int, int] | None:
        """Returns the blocks of a leaf. Raises ValueError, naming it, if it does not have them."""
        shape = param.shape
        blocks = self.blocks(path, param)
        if blocks is None:
            return None
        dim, count = blocks
        if not -len(shape) <= dim < len(shape) or count < 1 or shape[dim] % count:
            raise ValueError(
                f"optim: blocks={blocks} for {path}, {tuple(shape)}: expected (dim, count), a dimension of one layer's "
                "leaf, and a number of blocks that divides it"
            )
        return dim % len(shape), count


class LeafwiseState(NamedTuple):
    """The state of a leafwise transformation.

    of: a tree like the parameters with each leaf's state in its place, those of a stack's layers stacked. On a sharded
    tree: handles on flat shards of the states' leaves
    """

    of: Tree


def assume_leafwise(
    tx: Any,
    dtype: torch.dtype | Callable[[torch.device], torch.dtype | None] | None = None,
    *,
    params: bool = False,
    where: LeafRule | None = None,
) -> GradientTransformation:
    """Applies `tx` to each leaf of each layer on its own: whole, once, at one rank. The promise that this is what `tx`
    does on a whole tree is not checked; needing several leaves at once, as a global norm does, breaks it.

    tx: its `init` and `update` get single leaves. Leaves of its state are floating-point tensors of one dtype, and
        begin with values that depend on the leaf's shape alone
    dtype: of updates when they travel and when `tx` gets them (None: their own), or a function from the device to it
    params: `update` reads the parameter, which then travels too; else it gets None
    where: a rule `(path, per-layer Param)`; other leaves pass through unchanged

    >>> def unit_norm(update, state, params=None):             # each leaf has norm 1
    ...     return update / update.norm(), state
    >>> update(ya.optim.assume_leafwise(ya.optim.GradientTransformation(lambda leaf: (), unit_norm)))
    tensor([ 0.6000, -0.8000])
    """
    inner = as_transformation(tx)
    inner = inner.rule.inner if isinstance(inner.rule, WholeTrees) else inner
    rule = Leafwise(inner, dtype if callable(dtype) else lambda device: dtype, params)
    return leafwise(rule if where is None else dataclasses.replace(rule, where=where))


def leafwise(rule: Leafwise) -> GradientTransformation:
    """Returns the transformation of a rule."""

    def init(params: Tree) -> State:
        return LeafwiseState(optree.tree_map_with_accessor(partial(_init, rule), params, is_leaf=is_sharded))

    def update(updates: Tree, state: LeafwiseState, params: Tree | None = None) -> tuple[Tree, State]:
        accessors, nodes, spec = optree.tree_flatten_with_accessor(updates, is_leaf=is_sharded)
        states: Any = spec.flatten_up_to(state.of)
        weights: list[Any] = [None] * len(nodes)
        if params is not None and rule.params:
            weights = spec.flatten_up_to(params)
        plans = plan(rule, handles(updates))
        new: list[Any] = []
        after: list[Any] = []
        for at, node, kept, weight in zip(accessors, nodes, states, weights, strict=True):
            if isinstance(node, Sharded):
                found: tuple[Any, Any] = _update_handle(plans, rule, node, kept, weight)
            else:
                found = _plain(rule, at, node, kept, weight)
            new.append(found[0])
            after.append(found[1])
        return optree.tree_unflatten(spec, new), LeafwiseState(optree.tree_unflatten(spec, after))

    return GradientTransformation(init, update, rule=rule)


# ---- On a plain tree: the definition.


def _by_layer(at: optree.PyTreeAccessor, work: Callable[..., Tree], *trees: Tree) -> Tree:
    """Returns `work(*trees)`. Of a leaf in a stack each layer is worked on by itself, and the results are stacked."""
    if not in_stack(at):
        return work(*trees)
    layers = range(len(trees[0]))
    return stacked([work(*[optree.tree_map(itemgetter(layer), tree) for tree in trees]) for layer in layers])


def _init(rule: Leafwise, at: optree.PyTreeAccessor, node: Any) -> Any:
    if isinstance(node, Sharded):
        return state_of(rule, node)
    path = dotted(at)
    param = plain_param(at, node)
    if not rule.where(path, param):
        return EmptyState()
    cut = rule.cut(path, param)
    return _by_layer(at, lambda leaf: rule.inner.init(in_blocks(leaf, cut)), node)


def _plain(rule: Leafwise, at: optree.PyTreeAccessor, node: Tensor, state: Any, params: Any) -> tuple[Tensor, Any]:
    path = dotted(at)
    param = plain_param(at, node)
    if not rule.where(path, param):
        return node, state
    cut = rule.cut(path, param)

    def of_leaf(updates: Tensor, state: Any, params: Tensor | None) -> tuple[Tensor, Any]:
        given = in_blocks(updates.to(rule.dtype(node.device) or node.dtype), cut)
        weights = None if params is None else in_blocks(params, cut)
        new, after = checked_update(rule.inner, given, state, weights)
        return from_blocks(new, cut).to(node.dtype) * rule.scale(tuple(given.shape)), after

    found: tuple[Tensor, Any] = _by_layer(at, of_leaf, node, state, params)
    return found


# ---- On a sharded tree: the layout of states, and the update of one unit.


def plan(rule: Leafwise, handles: Sequence[Sharded]) -> dict[int, UnitPlan]:
    """Returns the plan of each unit that is here, for all handles of a tree: owners are balanced over all of it."""
    chosen: dict[int, tuple[Group, list[Leaf]]] = {}
    units = []
    for handle in handles:
        for _, group, shard in handle.group_leaves():
            leaves = _chosen(rule, group)
            subgroups = handle.owner.comms.subgroups(across=group.over)
            for unit in group.held:
                chosen[unit] = group, leaves
                units.append((unit, shard.shape[-1], leaves, subgroups))
    ranks = handles[0].owner.comms.ranks if handles else 1
    owners = assign(sorted(units, key=itemgetter(0)), ranks)
    return {unit: UnitPlan(*of, owners[unit]) for unit, of in chosen.items()}


def _chosen(rule: Leafwise, group: Group) -> list[Leaf]:
    """Returns the leaves of a unit that travel, in the shapes in which they are worked on."""
    found = []
    params = group.params
    for leaf in _leaves_of(group):
        path = group.layout.names[leaf.position]
        param = params[leaf.position]
        if rule.where(path, param):
            blocks = rule.cut(path, param)
            shape = in_blocks(torch.empty(leaf.shape, device="meta"), blocks).shape
            found.append(leaf._replace(shape=tuple(shape), blocks=blocks))
    return found


def _leaves_of(group: Group) -> list[Leaf]:
    """Returns the leaves of a unit of `group`, of one layer each: a pinned unit has those of all its layers."""
    found = []
    layout = group.layout
    parts = ranks_on(group.axes)
    for position, (path, shape) in enumerate(zip(layout.names, group.whole.shapes, strict=True)):
        offset = layout.offsets[position]
        if not group.pinned:
            found.append(Leaf(path, offset, shape, position, parts))
            continue
        size = math.prod(shape[1:]) // parts
        for layer in range(shape[0]):
            found.append(Leaf(f"{path}[{layer}]", offset + layer * size, shape[1:], position, parts))
    return found


def state_of(rule: Leafwise, handle: Sharded) -> Sharded:
    """Returns a handle on this rank's shards of the states of all leaves, a tree of states in place of leaves.

    The states of a unit's leaves are laid out as a unit, which is not split: with an axis of layers if it is pinned.
    """
    comms = handle.owner.comms
    trees: list[Any] = [EmptyState()] * handle.entry.spec.num_leaves
    layouts: dict[int, FlatLayout] = {}
    shards = []
    for number, group, shard in handle.group_leaves():
        layers = group.layout.shapes[0][:1] if group.pinned else ()
        names: list[str] = []
        values: list[Tensor] = []
        for position, shape in {leaf.position: leaf.shape for leaf in _chosen(rule, group)}.items():
            path = group.layout.names[position]
            trees[group.leaves[position]] = state = _first_state(rule, path, shape, shard)
            for below, value in named_leaves(state):
                names.append(join(path, below))
                values.append(value)
        if not values:
            continue
        _check_dtypes(rule, group, values)
        shapes = tuple((*layers, *value.shape) for value in values)
        layouts[number] = layout = FlatLayout(tuple(names), shapes)
        whole = values[0].new_zeros(layout.padded_numel(comms.ranks))
        for view, value in zip(layout.split(whole), values, strict=True):
            view.copy_(value)  # to all layers, where it has them
        row = whole.view(comms.ranks, -1)[comms.rank]
        shards.append(row.repeat(len(group.held), 1) if shard.ndim == 2 else row.repeat(len(group.held)))
    # the leaves of a state are in the place of its leaf
    spec = optree.tree_structure(optree.tree_unflatten(handle.entry.spec, trees))
    places = _places(handle.entry, spec)
    groups = []
    for number, group in enumerate(handle.entry.groups, handle.context.first_group):
        own: list[int] = []
        for leaf in group.leaves:
            own += optree.tree_leaves(places[leaf])
        layout = layouts.get(number, FlatLayout((), ()))
        groups.append(dataclasses.replace(group, layout=layout, leaves=tuple(own), splits=(), axes=()))
    entry = dataclasses.replace(handle.entry, spec=spec, groups=tuple(groups))
    context = dataclasses.replace(handle.context, entry=entry, only=frozenset(layouts), runner=None)
    return Sharded(tuple(shards), context)


def _places(of_leaves: Entry, of_states: optree.PyTreeSpec) -> list[Any]:
    """Returns the state of each leaf of an entry, a number for each of its leaves: their places among all of them."""
    numbered: Any = optree.tree_unflatten(of_states, range(of_states.num_leaves))
    return of_leaves.spec.flatten_up_to(numbered)


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


def at_owners(
    rule: Leafwise, of: UnitPlan, ranks: Ranks, updates: Sharded, state: Sharded, params: Sharded | None
) -> Generator[list[Messages], None, tuple[Sharded, Sharded]]:
    """Updates one unit's leaves at their owners; returns new updates and states.

    Yields twice messages to exchange: with updates, states and parameters to owners, with the results back to shards.
    updates, state, params: handles on the unit's shards
    """
    (row,) = updates.leaves
    given = LeafExchange(of, row.to(rule.dtype(row.device) or row.dtype), ranks)
    own = _states_of(of, updates, state)
    states = weights = None
    if state.leaves:
        ((_, group, of_state),) = state.group_leaves()
        leaves = _leaves_of(group)
        owners = [0] * len(leaves)
        for owner, numbers in zip(of.owners, own, strict=True):
            for number in optree.tree_leaves(numbers):
                owners[number] = owner
        states = LeafExchange(UnitPlan(group, leaves, owners), of_state, ranks)
    if params is not None and rule.params:
        weights = LeafExchange(of, params.leaves[0], ranks)
    yield [each.lend() for each in (given, states, weights) if each is not None]
    yield _worked(rule, own, given, states, weights)
    kept = state
    if states is not None:
        kept = Sharded((states.write(state.leaves[0].clone()),), state.context)
    scales = [rule.scale(leaf.shape) for leaf in of.leaves]
    return Sharded((given.write(row.clone(), scales),), updates.context), kept


def _states_of(of: UnitPlan, updates: Sharded, state: Sharded) -> list[Any]:
    """Returns the state of each leaf that travels, with numbers in place of its leaves: among all leaves of states of
    the unit, of one layer each."""
    places = _places(updates.entry, state.entry.spec)
    number_of = {place: number for group in state.groups for number, place in enumerate(group.leaves)}
    layers = of.group.layout.shapes[0][0] if of.group.pinned else 1
    found = []
    for at, leaf in enumerate(of.leaves):
        layer = at % layers  # of each leaf of a unit they lie layer by layer, as its states do
        of_leaf = places[of.group.leaves[leaf.position]]
        found.append(optree.tree_map(lambda place, layer=layer: number_of[place] * layers + layer, of_leaf))
    return found


def _worked(
    rule: Leafwise, own: list[Any], updates: LeafExchange, states: LeafExchange | None, weights: LeafExchange | None
) -> list[Messages]:
    """Updates the leaves that this rank owns; returns the messages back to shards. Whole leaves end with it."""
    whole_states = {} if states is None else states.whole()
    whole_weights = {} if weights is None else weights.whole()
    new: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    for number, leaf in updates.whole().items():
        numbers, spec = optree.tree_flatten(own[number])
        state = optree.tree_unflatten(spec, [whole_states[each] for each in numbers])
        new[number], changed = checked_update(rule.inner, leaf, state, whole_weights.get(number))
        values: list[Any] = spec.flatten_up_to(changed)
        after.update(zip(numbers, values, strict=True))
    messages = [updates.give_back(new)]
    if states is not None:
        messages.append(states.give_back(after))
    return messages


def exchanged(parts: Generator[list[Messages], None, Result], ranks: Ranks) -> Result:
    """Runs `parts`, and exchanges the messages between them."""
    while True:
        try:
            messages = next(parts)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        for received, sent in messages:
            ranks.exchange(received, sent)


def _update_handle(
    plans: Mapping[int, UnitPlan], rule: Leafwise, updates: Sharded, state: Sharded, params: Sharded | None
) -> tuple[Sharded, Sharded]:
    """Updates all units of a handle, one after the other; steps do the same in parts, overlapped."""
    new: Any = optree.tree_map(torch.clone, updates)  # type: ignore[arg-type]
    after: Any = optree.tree_map(torch.clone, state)  # type: ignore[arg-type]
    cutter = Cutter(updates)

    def by_unit(tree: Sharded) -> dict[int, Sharded]:
        found: dict[int, Sharded] = cutter.cut("a leafwise tree", tree, {}).nodes[0]
        return found

    given, states, rows, of_states = map(by_unit, (updates, state, new, after))
    weights = {} if params is None else by_unit(params)
    for unit, handle in given.items():
        work = at_owners(rule, plans[unit], updates.owner.comms, handle, states[unit], weights.get(unit))
        for old, out in zip((rows[unit], of_states[unit]), exchanged(work, updates.owner.comms), strict=True):
            for row, value in zip(old.leaves, out.leaves, strict=True):
                row.copy_(value)
    return new, after
