"""Steps in place as the transformations define them: a whole unit at once, or in phases where owners compute."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.optim.base import GradientTransformation, OnWrite, Scalar, Stage, State, apply_updates, name, updated
from yafsdp_fn.optim.owner_compute import Leafwise, Messages, OwnerUpdate, plan
from yafsdp_fn.optim.step.cutting import GLOBAL, Cut, Cutter, leaf_runs
from yafsdp_fn.params.leaf_mask import LeafRule, leaf_mask
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree, named_leaves, shape_of
from yafsdp_fn.util.torch_private import foreach_copy

# ---- Takes an optimizer's step as its transformations define it, in place:
#
#     updates, opt_state = tx.update(grads / scale, opt_state, params)
#     params += updates
#
# It serves all optimizers without a kernel, and kernels are compared with it. It allocates what the pure functions
# allocate: all new values are made before the first one is written.


def check_shapes(params: Tree, grads: Tree) -> None:
    """Raises ValueError for gradients unlike their parameters."""
    found = optree.tree_structure(params).flatten_up_to(grads)
    for (path, p), g in zip(named_leaves(params), found, strict=True):
        if not isinstance(g, Tensor) or g.shape != p.shape:
            raise ValueError(f"optim: the gradient of {path} should be like {shape_of(p)}, got {shape_of(g)}")


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


class Definition:
    """Takes steps through the pure functions.

    Values that all units share (0-dim tensors of states) get a new value from every call of a step; these must agree.
    chosen: the leaves that take the step, others are left alone; None for all
    """

    rounds = 0

    def __init__(
        self, todo: Sequence[Stage], params: Tree, grads: Tree, copies: Tree | None, chosen: LeafRule | None = None
    ) -> None:
        self._todo, self.params, self._grads, self._copies = todo, params, grads, copies
        self._masks = None if chosen is None else _masks(chosen, params)
        states: Tree = [state for _, state in todo]
        self._shared = {id(x): x for x in optree.tree_leaves(states) if isinstance(x, Tensor) and not x.ndim}
        self._cut: tuple[list[Cut | None], list[Cut]] | None = None  # trees, and states
        self._new: dict[int, Tensor] = {}
        self._compared = False

    def run(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> None:
        """Takes the step of `units`, or of all."""
        for _ in self.steps(units, cutter, scale, found_inf, on_write):
            raise AssertionError("only MultiPhase stops on its way")

    def steps(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> Iterator[list[Messages]]:
        """Takes the step, yielding messages where ranks must exchange them."""
        todo, params, grads, copies, masks = self._todo, self.params, self._grads, self._copies, self._masks
        if cutter is not None and units is not None:
            self._cut = self._cut or self._cut_by(cutter)
            trees, states = self._cut
            todo = [(tx, state.of(units)) for (tx, _), state in zip(todo, states, strict=True)]
            params, grads, copies, masks = (None if tree is None else tree.of(units) for tree in trees)
        # before the first write, which ends the generation that the handles are of
        leaves, copied = optree.tree_leaves(params), None if copies is None else optree.tree_leaves(copies)
        updates = grads if scale is None else optree.tree_map(lambda g: (g / scale).to(g.dtype), grads)
        seen = params
        if masks is not None:
            updates, seen = (optree.tree_map(lambda m, x: torch.where(m, x, 0), masks, t) for t in (updates, params))
        pairs: list[tuple[Tensor, Tensor]] = []
        for number, (tx, state) in enumerate(todo):
            updates, after = yield from self._stage(number, tx, updates, state, seen, units)
            pairs += _pairs(f"the state of {name(tx)}", state, after)
        new = apply_updates(params, updates)
        if masks is not None:
            new = optree.tree_map(torch.where, masks, new, params)
        own = []
        for old, value in _pairs("params", params, new) + pairs:
            if units is not None and id(old) in self._shared:
                self._agree(old, value, self._new.setdefault(id(old), value))
            else:
                own.append((old, value))
        write(own, found_inf, on_write)
        if copied:
            foreach_copy(copied, leaves)

    def _stage(
        self,
        number: int,
        tx: GradientTransformation,
        updates: Tree,
        state: State,
        params: Tree,
        units: Sequence[int] | None,
    ) -> Generator[list[Messages], None, tuple[Tree, State]]:
        """Applies one transformation."""
        yield from ()
        return updated(tx, updates, state, params)

    def _cut_by(self, cutter: Cutter) -> tuple[list[Cut | None], list[Cut]]:
        trees = {"params": self.params, "the gradients": self._grads, "the copies": self._copies}
        states = [cutter.cut(f"the state of {name(tx)}", state) for tx, state in self._todo]
        cut = [None if tree is None else cutter.cut(what, tree) for what, tree in trees.items()]
        return [*cut, None if self._masks is None else cutter.cut("the masks", self._masks)], states

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
        write([(self._shared[key], new) for key, new in self._new.items()], found_inf)
        self._new, self._compared = {}, True


def _masks(chosen: LeafRule, params: Tree) -> Tree | None:
    """Returns a tree of bools like `params`, None if all leaves are chosen."""
    if not all(passes for runs in leaf_runs(chosen, params) for passes, _ in runs):
        return optree.tree_map(lambda mask, leaf: mask.expand_as(leaf), leaf_mask(chosen, params), params)
    return None


# ---- The multi-phase step of a unit whose leaves are computed by their owners. Messages overlap other units' work:
#
# part 0    what comes before, on shards            ->  lend
# part 1    each leaf at its owner                  ->  give back
# part 2    what comes after, on shards; the write      (and lend again, where a second transformation wants to)


def rounds(todo: Sequence[Stage]) -> int:
    """Returns how many times the leaves of a unit travel to owners."""
    return sum(isinstance(tx.rule, Leafwise) for tx, _ in todo)


class MultiPhase(Definition):
    """The definition, run in phases."""

    def __init__(
        self, todo: Sequence[Stage], params: Tree, grads: Tree, copies: Tree | None, chosen: LeafRule | None = None
    ) -> None:
        super().__init__(todo, params, grads, copies, chosen)
        self.rounds = rounds(todo)
        found = handles(params)
        self._ranks = found[0].owner.comms
        self._group = {unit: group for handle in found for _, group, _ in handle.group_leaves() for unit in group.held}
        self._plans = [plan(tx.rule, found) if isinstance(tx.rule, Leafwise) else {} for tx, _ in todo]
        self._open: dict[int, Iterator[list[Messages]]] = {}

    def part(
        self, unit: int, part: int, cutter: Cutter, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> list[Messages]:
        """Runs one part of the step of `unit`; returns the messages to exchange before the next, none after
        the last."""
        if part == 0:
            self._open[unit] = self.steps([unit], cutter, scale, found_inf, on_write)
        messages = next(self._open[unit], None)
        if messages is None:
            del self._open[unit]
        return messages or []

    def run(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> None:
        """Runs the units one after the other."""
        assert cutter is not None
        for unit in self._group if units is None else units:
            for messages in self.steps([unit], cutter, scale, found_inf, on_write):
                for received, sent in messages:
                    self._ranks.exchange(received, sent)

    def _stage(
        self,
        number: int,
        tx: GradientTransformation,
        updates: Tree,
        state: State,
        params: Tree,
        units: Sequence[int] | None,
    ) -> Generator[list[Messages], None, tuple[Tree, State]]:
        if not isinstance(tx.rule, Leafwise):
            return (yield from super()._stage(number, tx, updates, state, params, units))
        assert units is not None
        (unit,) = units
        (row,), spec = optree.tree_flatten(updates)
        states, of_state = optree.tree_flatten(state)
        (weights,) = optree.tree_leaves(params) if tx.rule.params else (None,)
        of_group = self._plans[number][self._group[unit].name]
        loan: Any = OwnerUpdate(tx.rule, of_group, unit, self._ranks, row, states[0] if states else None, weights)
        yield loan.lend()
        yield loan.work()
        row, kept = loan.rows()
        return optree.tree_unflatten(spec, [row]), optree.tree_unflatten(of_state, [] if kept is None else [kept])
