"""Gradient transformations: pairs of pure functions, as in Optax, and transformations around others."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.optim.cutting import SingleUnitOwner
from yafsdp_fn.params.sharded import Origin, Sharded, handles_and_leaves, is_sharded
from yafsdp_fn.params.sources import shards_of, whole_tree
from yafsdp_fn.params.tree import Tree, dotted, shape_of, tensors_in
from yafsdp_fn.util.foreign_names import hint
from yafsdp_fn.util.randomness import device_of_leaves, generators, states
from yafsdp_fn.util.torch_private import transforms_active

# ---- Tests the promise of `assume_elementwise`, once: an update of two halves must be the halves of the update.
#
#     whole     [..., 16]                        rank 0 of 1
#     halves    [..., 8] and [..., 8]            ranks 0 and 1 of 2
#
# Trees are like those of the step, with a few random numbers in place of every leaf, the same on all ranks and at
# every number of them: either all ranks refuse, or none.

RANKS = SingleUnitOwner(0, 1), SingleUnitOwner(0, 2), SingleUnitOwner(1, 2)
"""The ranks of the trial: the only one has the whole, each of two has a half."""

WIDTH = 16
"""Elements along the last axis of a leaf of the whole."""

RISE = torch.arange(WIDTH, device="cpu") / 4

STEPS = 3
"""Steps of the trial: a state that begins with zeros hides operations on it."""

ROUNDINGS = 64
"""Tolerance, in roundings of the dtype: a kernel may round last bits differently by position in a tensor."""

MOST = 0.02
"""Upper limit of the tolerance in any dtype."""


@dataclasses.dataclass
class Elementwise:
    """Rule: `inner` treats every element on its own, as its author says.

    tried: that has been confirmed, or cannot be tested; writes: to its state in place, as the trial has seen
    """

    inner: Any
    tried: bool = dataclasses.field(default=False, compare=False, repr=False)
    writes: bool = dataclasses.field(default=False, compare=False, repr=False)

    @torch.no_grad()
    def broken(self, updates: Tree, params: Tree | None) -> tuple[int, str] | None:
        """Returns the number of the first leaf for which the promise is broken, and what is not done, with {} for its
        name. None if the promise holds, or if it cannot be tested: fake tensors, or an update that looks at more than
        its arguments, or needs all ranks."""
        leaves = tensors_in(updates)
        if self.tried or transforms_active() or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return None
        found = None
        with suppress(Exception):  # other shapes may be refused; errors of the update itself show in the step
            found = _difference(*(self._run(updates, params, ranks, _drawn) for ranks in RANKS))
            found = found or _filled(self._run(updates, params, RANKS[0], _zeros))
        if self.writes:
            found = 0, WRITES
        self.tried = found is None
        return None if found is None else (found[0] % len(leaves), found[1])

    def _run(
        self, updates: Tree, params: Tree | None, ranks: SingleUnitOwner, made: Callable[..., Tree]
    ) -> list[Tensor]:
        """Returns the updates of some steps, on the part of small leaves that a rank has. made: their values"""
        own = None if params is None else made(params, 0, ranks)
        state = self.inner.init(made(updates, 0, ranks) if own is None else own)
        out: list[Tensor] = []
        for step in range(STEPS):
            versions = _versions(state)
            new, after = self.inner.update(made(updates, 1 + step, ranks), state, own)
            self.writes |= _versions(state) != versions
            state = after
            out += optree.tree_structure(updates).flatten_up_to(new)  # type: ignore[arg-type]
        return out


WRITES = (
    "leave its state as it is, but writes there in place, where a step that is skipped keeps the old values. Return "
    "new tensors"
)


def _versions(tree: Tree) -> list[int]:
    """Returns the versions of the tensors in a tree, which writes in place count."""
    return [tensor._version for tensor in tensors_in(tree)]


def _drawn(tree: Tree, seed: int, ranks: SingleUnitOwner) -> Tree:
    """Returns `tree` with random numbers in small leaves: of the part that a rank has."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(leaf: Any, most: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.ndim:
            return torch.randn((), generator=generator, device="cpu").to(leaf.device, leaf.dtype)
        axes = [min(n, most) for n in leaf.shape[:-1]]
        values = (
            torch.randn(*axes, WIDTH, generator=generator, device="cpu") + RISE
        )  # means and norms of halves are far apart
        return values.chunk(ranks.ranks, -1)[ranks.rank].contiguous().to(leaf.device, leaf.dtype)

    def of_node(node: Any) -> Any:
        if not isinstance(node, Sharded):
            return drawn(node, 2)
        context = dataclasses.replace(node.context, origin=Origin(ranks, 0), runner=None)
        return Sharded(tuple(drawn(leaf, sys.maxsize) for leaf in node.leaves), context)

    return optree.tree_map(of_node, tree, is_leaf=is_sharded)


def _zeros(tree: Tree, seed: int, ranks: SingleUnitOwner) -> Tree:
    """Returns `tree` with zeros, as in padding, in small leaves."""
    return optree.tree_map(torch.zeros_like, _drawn(tree, seed, ranks))


def _difference(whole: list[Tensor], first: list[Tensor], second: list[Tensor]) -> tuple[int, str] | None:
    """Returns the number of the first tensor whose halves differ from it, and by how much of its largest element."""
    for number, (one, *halves) in enumerate(zip(whole, first, second, strict=True)):
        if not one.ndim or not one.numel():
            continue
        joined = torch.cat(halves, -1).double()
        one = one.double()
        same = (joined == one) | (joined.isnan() & one.isnan())
        off = torch.where(same, 0, (joined - one).abs() / one.abs().amax()).amax().item()
        if not off <= min(ROUNDINGS * torch.finfo(halves[0].dtype).eps, MOST):
            return number, (
                f"treat every element of {{}} on its own: its update of two halves is off that of the whole, by "
                f"{off:.2g} of the largest element, and shards cut leaves anywhere. Use assume_leafwise if it needs "
                "leaves one by one, each whole"
            )
    return None


def _filled(of_zeros: list[Tensor]) -> tuple[int, str] | None:
    """Returns the number of the first tensor, an update of zeros, that is not zero, and what follows from it."""
    for number, update in enumerate(of_zeros):
        if update.ndim and update.any():
            return number, (
                "keep zeros in {}: where gradients and parameters are zero, its update is not, so it would fill the "
                "padding of shards, which norms count. Return zeros there, torch.where(updates == 0, 0, new), say"
            )
    return None


# ---- Gradient transformations: pairs of pure functions, as in Optax.
#
#     state = tx.init(params)
#     updates, state = tx.update(grads, state, params)
#     params = apply_updates(params, updates)
#
# Trees are any pytrees of tensors. Those of a sharded state have local flat shards as leaves; the same code serves
# both, as long as every element is treated on its own.

State = Any
"""An optimizer state: a pytree of tensors."""


class GradientTransformation(NamedTuple):
    """A pair of pure functions: `init(params) -> state`, `update(updates, state, params=None) -> (updates, state)`.

    elementwise: `update` may run on flat shards, because it treats every element on its own (or reduces over all
        ranks, as `clip_by_global_norm` does), and zeros stay zeros; `assume_elementwise` tries that. Without it, and
        without a rule, it is given whole trees.
    rule: the same transformation as data, for `step_`, which knows fused kernels for some sequences of rules. It
        changes speed, never results: `update` is the definition.

    >>> def halve(updates, state, params=None):
    ...     return optree.tree_map(lambda u: u / 2, updates), state
    >>> update(ya.optim.GradientTransformation(lambda params: ya.optim.EmptyState(), halve, elementwise=True))
    tensor([ 1.5000, -2.0000])
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    elementwise: bool = False
    rule: object = None

    def __repr__(self) -> str:
        foreign = (type(None), WholeTrees)  # no data: a pair of functions
        parts = [name(part) if isinstance(part.rule, foreign) else repr(part.rule) for part, _ in stages(self)]
        without_addresses = [re.sub(r" at 0x\w+", "", part) for part in parts]
        return f"GradientTransformation({', '.join(without_addresses)})"


def _unknown(tx: GradientTransformation, name: str) -> NoReturn:
    raise AttributeError(f"'GradientTransformation' object has no attribute '{name}'{hint(f'tx.{name}')}")


GradientTransformation.__getattr__ = _unknown  # type: ignore[attr-defined]  # which is to see misspelt names


OnWrite = Callable[[], None]
"""Called before the first write to parameters or state."""

Scalar = Tensor | None
"""A 0-dim tensor that the host never reads, or None for the usual value."""

Stage = tuple[GradientTransformation, State]
"""A transformation of a chain, with its state."""


class EmptyState(NamedTuple):
    """The state of a transformation without memory."""


class Chain(NamedTuple):
    """The rule of `chain`. Its state is the tuple of the parts' states."""

    parts: tuple[GradientTransformation, ...]


def as_transformation(tx: Any) -> GradientTransformation:
    """Returns `tx` itself, or a foreign `(init, update)` pair as one. A pair without declaration gets whole trees:
    `on_whole_trees`.

    >>> pair = (lambda params: ()), (lambda updates, state, params=None: (updates.sign(), state))
    >>> update(ya.optim.as_transformation(pair))               # Optax's kind of pair
    tensor([ 1., -1.])
    """
    if isinstance(tx, GradientTransformation):
        return tx if tx.elementwise or tx.rule is not None else on_whole_trees(tx)
    if isinstance(tx, tuple) and len(tx) == 2 and all(map(callable, tx)):
        return on_whole_trees(GradientTransformation(*tx))
    raise TypeError(
        f"expected a GradientTransformation or a pair of functions (init, update), got {tx!r}; an optimizer here "
        "is what a call of one returns, such as ya.optim.adamw(3e-4)"
    )


@dataclasses.dataclass(frozen=True)
class WholeTrees:
    """Rule: `inner` on whole trees."""

    inner: GradientTransformation


def checked_update(tx: GradientTransformation, updates: Tree, state: State, params: Tree | None) -> tuple[Tree, State]:
    """Returns `tx.update(updates, state, params)`. Raises TypeError, naming `tx`, for writes to `params` in place, for
    random numbers that it draws from torch's default generators, for a result that is not a pair, for updates unlike
    those given (another shape would be broadcast, in shards to other values than in whole leaves), and in its first
    step if it breaks the promise of `assume_elementwise`.

    >>> ya.optim.checked_update(ya.optim.sgd(0.1), {"w": g}, ya.optim.sgd(0.1).init({"w": w}), {"w": w})[0]
    {'w': tensor([-0.3000,  0.4000])}
    """
    versions = _versions(params)
    own = tx.rule is None or isinstance(tx.rule, Elementwise)  # other rules have tried it, or draw nothing
    may_draw = own and not any(isinstance(leaf, FakeTensor) for leaf in tensors_in(updates))
    before = states(generators(device_of_leaves(updates))) if may_draw else []
    pair = tx.update(updates, state, params)
    if _versions(params) != versions:
        raise TypeError(
            f"optim: {name(tx)} writes to the parameters in place; leave them as they are: they change by the updates "
            "that it returns, unless the step is skipped"
        )
    if any(not torch.equal(generator.get_state(), drawn) for generator, drawn in before):
        raise TypeError(
            f"optim: {name(tx)} draws random numbers, which are others on each rank, so that replicas would differ. "
            "Take ya.normal_like(seed, updates) with a seed of the step's number, and declare nothing"
        )
    several = isinstance(pair, tuple | list)
    if not several or len(pair) != 2:
        got = f"a {type(pair).__name__} of {len(pair)}" if several else shape_of(pair)
        raise TypeError(f"optim: {name(tx)} should return a pair (updates, state), got {got}")
    new, after = pair
    _must_be_like(updates, new, f"{name(tx)} returned")
    if isinstance(tx.rule, Elementwise) and (found := tx.rule.broken(updates, params)) is not None:
        raise TypeError(
            f"optim: {name(tx)} is marked by assume_elementwise, but it does not "
            f"{found[1].format(_names(updates)[found[0]])}, or mark it by nothing: then it is given whole trees"
        )
    return new, after


def needed(by: str, params: Tree | None) -> Tree:
    """Returns `params`. Raises ValueError, naming the transformation that needs them, if there are none.

    >>> ya.optim.needed("decay", w)
    tensor([ 1., -2.])
    """
    if params is None:
        raise ValueError(f"{by}: needs the parameters: call `tx.update(updates, state, params)`")
    return params


def must_not_be_negative(setting: str, value: Any) -> None:
    """Raises ValueError, naming the setting of an optimizer, for a plain number that is below zero, or is no number."""
    if isinstance(value, int | float) and not value >= 0:
        raise ValueError(f"{setting}={value}: expected a number >= 0, as torch.optim does")


def _must_be_like(given: Tree, new: Tree, what: str) -> None:
    """Raises TypeError, naming the leaf, if `new` differs from `given` in structure or in a leaf's shape."""
    spec = optree.tree_structure(given)
    try:
        pairs = list(zip(optree.tree_leaves(given), spec.flatten_up_to(new), strict=True))
    except ValueError as error:
        raise TypeError(f"optim: {what} a tree of another structure: {error}") from error
    for number, (old, leaf) in enumerate(pairs):
        if not isinstance(leaf, Tensor) or leaf.shape != old.shape or not leaf.is_floating_point():
            raise TypeError(
                f"optim: {what} {shape_of(leaf)} for {_names(given)[number]}, expected a floating-point tensor of "
                f"shape {tuple(old.shape)}: it is added to the parameter, element by element"
            )


def _names(tree: Tree) -> list[str]:
    """Returns the names of the leaves; a unit of a sharded tree has its own."""
    out: list[str] = []
    for accessor, node in handles_and_leaves(tree):
        if isinstance(node, Sharded):
            out += [f"{group.name or 'params'} (shards)" for _, group, _ in node.group_leaves()]
        else:
            out.append(dotted(accessor) or "the leaf")
    return out


def on_whole_trees(tx: GradientTransformation) -> GradientTransformation:
    """Returns `tx`, given all leaves whole on every rank of a sharded tree. Right for any `tx`, at the work and memory
    of one rank: gradients, parameters and state unsharded. `assume_elementwise` and `assume_leafwise` declare what
    avoids that."""

    def init(params: Tree) -> State:
        return tx.init(whole_tree(params))

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        given = None if params is None else whole_tree(params)
        whole = whole_tree(updates)
        new, state = checked_update(tx, whole, state, given)
        new = optree.tree_map(lambda u, old: u.to(old.dtype), new, whole)  # shards of a group have one dtype
        return shards_of(new, updates), state

    return GradientTransformation(init, update, rule=WholeTrees(tx))


def assume_elementwise(tx: Any) -> GradientTransformation:
    """Returns `tx`, promising that it treats every element on its own, so that it may run on flat shards.

    An operation over rows, columns or whole leaves (Muon, Adafactor, trust ratios, centred gradients) breaks the
    promise, since a flat shard cuts through leaves; so does reading the shape of a leaf. So does an update that is not
    zero where gradients and parameters are, since it would fill the padding of shards, which norms count. In its first
    step the update is tried on two halves of a few random numbers, and on zeros, and refused with a TypeError if it
    breaks the promise. That does not find a dependence on the number of axes. Updates are not tried if they accept only
    the shapes of the step. An update that depends on the position of its elements (noise from
    `ya.normal_like`) breaks the promise if units take their steps one by one.

    >>> def sign(updates, state, params=None):
    ...     return updates.sign(), state
    >>> pair = ya.optim.GradientTransformation(lambda params: (), sign)
    >>> ya.optim.assume_elementwise(pair).elementwise, update(ya.optim.assume_elementwise(pair))
    (True, tensor([ 1., -1.]))
    """
    tx = as_transformation(tx)
    if isinstance(tx.rule, WholeTrees):
        tx = tx.rule.inner
    return tx if tx.elementwise else GradientTransformation(tx.init, tx.update, True, Elementwise(tx))


def stateless(update: Callable[[Tree, Tree | None], Tree], rule: object = None) -> GradientTransformation:
    """Makes an elementwise transformation without state from `update(updates, params) -> updates`."""
    return GradientTransformation(
        init=lambda params: EmptyState(),
        update=lambda updates, state, params=None: (update(updates, params), state),
        elementwise=True,
        rule=rule,
    )


def identity() -> GradientTransformation:
    """Passes updates through.

    >>> update(ya.optim.identity())
    tensor([ 3., -4.])
    """
    return stateless(lambda updates, params: updates, rule=Chain(()))


def chain(*txs: Any) -> GradientTransformation:
    """Applies `txs` one after the other; the state is the tuple of theirs. Foreign pairs are accepted.

    >>> update(ya.optim.chain(ya.optim.clip(1.0), ya.optim.sgd(0.1)))
    tensor([-0.1000,  0.1000])
    """
    parts = tuple(map(as_transformation, txs))

    def init(params: Tree) -> State:
        return tuple(part.init(params) for part in parts)

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        states = []
        for part, old in zip(parts, state, strict=True):
            updates, new = checked_update(part, updates, old, params)
            states.append(new)
        return updates, tuple(states)

    return GradientTransformation(init, update, all(part.elementwise for part in parts), Chain(parts))


def stages(tx: Any, state: State = None) -> Iterator[Stage]:
    """Yields the transformations of nested chains, in order, each with its part of `state` (None without one)."""
    tx = as_transformation(tx)
    if isinstance(tx.rule, OnHost):  # its state is that of the inner one
        yield from stages(tx.rule.inner, state)
        return
    if not isinstance(tx.rule, Chain):
        yield tx, state
        return
    parts = tx.rule.parts
    states = [None] * len(parts) if state is None else state
    if len(states) != len(parts):
        raise ValueError(
            f"optim: the state has {len(states)} parts, this chain {len(parts)}: the state was made "
            "with another optimizer; pass the one that ya.init was given"
        )
    for part, of_part in zip(parts, states, strict=True):
        yield from stages(part, of_part)


def must_be_state_of(tx: Any, params: Tree, opt_state: State) -> None:
    """Raises TypeError unless `opt_state` is made as `tx` makes it of `params`, which are on the meta device."""
    tx = as_transformation(tx)
    try:
        expected = tx.init(params)
    except RuntimeError:  # a foreign one reads values, which there are none of
        return
    if optree.tree_structure(expected, is_leaf=is_sharded) != optree.tree_structure(opt_state, is_leaf=is_sharded):
        parts = optree.tree_leaves(opt_state, is_leaf=lambda node: hasattr(node, "_fields"))
        has = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(
            f"the optimizer's state ({has}) is none of {tx!r}: give the step the optimizer that ya.init was given, or "
            "take ya.shard(state, tx), a state for this one, with all that both have"
        )


def name(tx: GradientTransformation) -> str:
    """Returns the name of a transformation in errors: where its `update` was defined."""
    function = tx.rule.inner.update if isinstance(tx.rule, WholeTrees) else tx.update
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"


def scaled(updates: Tree, factor: Any) -> Tree:
    """Returns `updates * factor`, each in its own dtype."""
    return optree.tree_map(lambda u: (u * factor).to(u.dtype), updates)


def new_count(params: Tree) -> Tensor:
    """Returns a step counter on the parameters' device, since only the device knows about skipped steps.

    >>> ya.optim.new_count({"w": w})
    tensor(0, dtype=torch.int32)
    """
    leaves = optree.tree_leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Returns `params + updates`, each in its parameter's dtype. Raises TypeError for an update of another shape.

    >>> ya.optim.apply_updates({"w": w}, {"w": -0.1 * g})
    {'w': tensor([ 0.7000, -1.6000])}
    """
    _must_be_like(params, updates, "apply_updates got")
    return optree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


# ---- The rule of transformations that wrap another one.


@dataclasses.dataclass(frozen=True)
class Around:
    """Rule: `inner`, with something elementwise before and after it. It needs of a tree whatever `inner` needs.

    >>> def damped(inner):
    ...     def update(updates, state, params=None):
    ...         updates, state = ya.optim.checked_update(inner, updates, state, params)
    ...         return optree.tree_map(lambda u: u / 2, updates), state
    ...     return ya.optim.GradientTransformation(inner.init, update, inner.elementwise, ya.optim.Around(inner))
    >>> update(damped(ya.optim.sgd(0.1)))
    tensor([-0.1500,  0.2000])
    """

    inner: GradientTransformation


class OnHost(Around):
    """Rule: `inner`, whose state is on the host (on_host.py), and is otherwise the same."""
