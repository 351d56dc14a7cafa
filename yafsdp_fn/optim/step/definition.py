"""Steps in place as the transformations define them.

    updates, opt_state = tx.update(grads / scale, opt_state, params)
    params += updates

It serves all optimizers without a kernel, and kernels are compared with it. It allocates what the pure functions
allocate: all new values are made before the first one is written.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.optim.base import OnWrite, Scalar, Stage, State, apply_updates, checked_update, name
from yafsdp_fn.optim.cutting import GLOBAL, Cutter, Host, UnitTree
from yafsdp_fn.optim.leaf_exchange import Messages, UnitPlan
from yafsdp_fn.optim.leafwise import Leafwise, at_owners, plan
from yafsdp_fn.params.leaf_mask import LeafRule, by_leaf, leaf_mask
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded
from yafsdp_fn.params.tree import Tree, named_leaves, shape_of, tensors_in
from yafsdp_fn.util.torch_private import foreach_copy


def write(pairs: Sequence[tuple[Tensor, Tensor]], found_inf: Scalar, on_write: OnWrite = lambda: None) -> None:
    """Writes new values over old ones, except where `found_inf` is 1."""
    # all values are made before the first write: a state may hand its leaves around, or hold the parameters
    values = [new.clone() if found_inf is None else torch.where(found_inf == 1, old, new) for old, new in pairs]
    on_write()
    for (old, _), value in zip(pairs, values, strict=True):
        old.copy_(value)


def _pairs(what: str, old: Tree, new: Tree) -> list[tuple[Tensor, Tensor]]:
    """Pairs the tensors of `old` with those of `new` that replace them."""
    pairs: list[tuple[Tensor, Tensor]] = []
    afters = optree.tree_structure(old).flatten_up_to(new)
    for (path, before), after in zip(named_leaves(old), afters, strict=True):
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape:
            pairs.append((before, after))
        elif isinstance(before, Tensor) or isinstance(after, Tensor) or before != after:
            raise TypeError(
                f"optim: {path or 'the leaf'} of {what} went from {shape_of(before)} to {shape_of(after)}; "
                "a step may be skipped on the device alone, so whatever changes must be a tensor and keep its shape"
            )
    return pairs


class Lane(NamedTuple):
    """The rows that a sequence of rules reads and writes in a step: those of the units that it updates.

    stages: the rules, with their states; params, grads, copies: trees of those units alone
    chosen: the leaves that take the step, others are left alone; None for all
    units: None if the step is never cut into units: of a plain tree, or where a rule needs all units at once
    host: of its states
    """

    stages: Sequence[Stage]
    params: Tree
    grads: Tree
    copies: Tree | None
    chosen: LeafRule | None
    units: frozenset[int] | None
    host: Host


class StepCall(NamedTuple):
    """A call for the step of some units, or of all (None). parts: of it, more than one where leaves of a unit travel

    cutter: of trees into units; scale, found_inf, on_write: as for `UnitSteps.run`
    """

    units: Sequence[int] | None
    parts: int
    cutter: Cutter | None
    scale: Scalar
    found_inf: Scalar
    on_write: OnWrite


class Definition:
    """Takes steps through the pure functions.

    Values that all units share (0-dim tensors of states) get a new value from every call of a step; these must agree.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._masks = None if lane.chosen is None else _masks(lane.chosen, lane.params)
        self._plans: dict[int, dict[int, UnitPlan]] = {}  # of the units that a transformation exchanges leaves of
        for tx, _ in lane.stages:
            if isinstance(tx.rule, Leafwise) and lane.units:
                self._plans[id(tx)] = plan(tx.rule, handles(lane.params))
        states: Tree = [state for _, state in lane.stages]
        self._shared = {id(x): x for x in tensors_in(states) if not x.ndim}
        self._cut: list[UnitTree] = []
        self._new: dict[int, Tensor] = {}
        self._compared = False

    def steps(self, call: StepCall) -> Iterator[list[Messages]]:
        """Takes the step of some units, or of all; yields the messages to exchange between its parts.

        Leaves of one unit travel to owners and back between two of them; those of all do inside the update.
        """
        units = call.units
        messages_left = call.parts - 1
        params, grads, copies, masks, *states = self._trees(call)
        # before the first write, which ends the generation that the handles are of
        leaves = optree.tree_leaves(params)
        copied = optree.tree_leaves(copies)
        # what the rules see: of leaves that take no step, zeros
        updates = grads
        if call.scale is not None:
            updates = optree.tree_map(lambda g: (g / call.scale).to(g.dtype), grads)
        seen = params
        if masks is not None:
            updates = optree.tree_map(_where, masks, updates)
            seen = optree.tree_map(_where, masks, params)
        # the rules, one after the other
        pairs: list[tuple[Tensor, Tensor]] = []
        for (tx, _), kept in zip(self.lane.stages, states, strict=True):
            state = kept
            if call.parts > 1 and self.lane.host:
                # between parts, the rows of what is on the host may hold the states of other units
                state = optree.tree_map(torch.clone, kept)
            if isinstance(tx.rule, Leafwise) and units:
                (unit,) = units
                updates, after = yield from self._at_owners(tx.rule, self._plans[id(tx)][unit], updates, state, seen)
                messages_left -= 2
            else:
                updates, after = checked_update(tx, updates, state, seen)
            pairs += _pairs(f"the state of {name(tx)}", kept, after)
        for _ in range(messages_left):
            yield []
        # the write, now: other lanes have written their elements of these rows
        new = apply_updates(params, updates)
        if masks is not None:
            new = optree.tree_map(torch.where, masks, new, params)
        own = []
        for old, value in _pairs("params", params, new) + pairs:
            if units is not None and id(old) in self._shared:
                self._agree(old, value, self._new.setdefault(id(old), value))
            else:
                own.append((old, value))
        write(own, call.found_inf, call.on_write)
        if copied:
            foreach_copy(copied, leaves)

    def _at_owners(
        self, rule: Leafwise, of: UnitPlan, updates: Tree, state: State, params: Tree
    ) -> Generator[list[Messages], None, tuple[Tree, State]]:
        (given,), (kept,) = handles(updates), handles(state)
        weights = handles(params)[0]
        ranks = handles(self.lane.params)[0].owner.comms
        new, after = yield from at_owners(rule, of, ranks, given, kept, weights)
        return _with_handle(updates, new), _with_handle(state, after)

    def _trees(self, call: StepCall) -> list[Tree]:
        """Returns parameters, gradients, copies, masks and the states of the stages, of the units of a call."""
        lane = self.lane
        called = ["params", "the gradients", "the copies", "masks"]
        trees = [lane.params, lane.grads, lane.copies, self._masks]
        for tx, state in lane.stages:
            called.append(f"the state of {name(tx)}")
            trees.append(state)
        if call.cutter is None or call.units is None:
            return trees
        if not self._cut:
            self._cut = [call.cutter.cut(what, tree, lane.host) for what, tree in zip(called, trees, strict=True)]
        return [tree.of(call.units) for tree in self._cut]

    def _agree(self, old: Tensor, new: Tensor, first: Tensor) -> None:
        """Raises RuntimeError if the new value differs from an earlier unit's. On a device it reads them in the first
        step only."""
        if new is first or isinstance(new, FakeTensor) or (self._compared and new.device.type != "cpu"):
            return
        if not bool((new == first) | ((new != new) & (first != first))):
            raise RuntimeError(
                f"optim: one unit's update takes a 0-dim tensor of the state from {old.item()} to {first.item()}, "
                f"another's to {new.item()}: {GLOBAL}"
            )

    def finish(self, found_inf: Scalar) -> None:
        """Ends a step, after all units have taken it: shared values are written."""
        write([(self._shared[key], new) for key, new in self._new.items()], found_inf)
        self._new = {}
        self._compared = True


def _with_handle(tree: Tree, handle: Sharded) -> Tree:
    """Returns `tree` with `handle` in place of its only one."""
    return optree.tree_map(lambda _: handle, tree, is_leaf=is_sharded)


def _where(mask: Tensor, leaf: Tensor) -> Tensor:
    return torch.where(mask, leaf, 0)


def _masks(chosen: LeafRule, params: Tree) -> Tree | None:
    """Returns a tree of bools like `params`, None if all leaves are chosen: those of a plain tree are."""
    passes: list[bool] = []
    for handle in handles(params):
        for _, group, _ in handle.group_leaves():
            passes += by_leaf(chosen, group)
    if all(passes):
        return None
    return optree.tree_map(lambda mask, leaf: mask.expand_as(leaf), leaf_mask(chosen, params), params)
