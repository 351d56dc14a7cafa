"""The sharded state: parameters, optimizer state, step, seed. A frozen pytree, passed in and returned.

    state = init(params, tx, mesh=mesh(), seed=0)
    state, metrics = step(state, batch)               # the old state is donated: its memory is the new one's

Donation happens at the commit, the last thing a step does, so that an exception before it leaves the state usable.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn import optim
from yafsdp_fn.comm.communicators import communicators
from yafsdp_fn.grouping import tree_layout
from yafsdp_fn.mesh import mesh as default_mesh
from yafsdp_fn.mesh import mesh_axes
from yafsdp_fn.precision import DEFAULT_PRECISION, Precision
from yafsdp_fn.runtime.abstract import AbstractStore
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.sharded import Sharded, handles, is_sharded, trainable
from yafsdp_fn.sources import Source, fill_group, source, with_values
from yafsdp_fn.tree import Param, Tree, register_node


@dataclasses.dataclass(frozen=True)
class ShardedState:
    """What a training step takes and returns.

    params: the user's container of `Sharded` handles; opt_state: the optimizer's state, sharded alike
    step: steps taken, skipped ones included; seed: of everything random inside blocks
    unit_steps: `(optimizer, its unit-wise form over this memory)`, from a step whose program has updates. It is not
        the store's, since it holds handles, which hold the store: a dropped state must not wait for the collector
    """

    params: Tree
    opt_state: Tree
    step: int
    seed: int
    store: Store = dataclasses.field(repr=False)
    generation: int = 0
    unit_steps: tuple[Any, optim.UnitSteps] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def mesh(self) -> DeviceMesh:
        return self.store.mesh

    @property
    def precision(self) -> Precision:
        return self.store.precision

    def check(self) -> ShardedState:
        """This state, ready for use. Raises RuntimeError if a later state has taken its memory."""
        if self.generation != self.store.generation:
            raise RuntimeError(f"this state (step {self.step}) {self.store.why_gone()}")
        store = store_of(self.params)
        if store is self.store:
            return self
        # its leaves were replaced: the new state gets memory of its own, since steps write in place
        return self.over(store, _copied(self.opt_state))

    def apply_gradients(self, grads: Tree, tx: optim.GradientTransformation) -> ShardedState:
        """One optimizer step in place; this state is donated, and `grads` may be overwritten."""
        return self.update(grads, tx)

    def update(
        self,
        grads: Tree,
        tx: optim.GradientTransformation,
        *,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_norm: Tensor | None = None,
    ) -> ShardedState:
        """`apply_gradients` with what the in-place step of `optim` takes: see `optim.step_`."""
        state = self.check()
        store = state.store
        with store.comms.guarded(f"the update of step {self.step}"), store.updating():
            opt_state = optim.step_(
                tx,
                trainable(state.params),
                trainable(grads),
                state.opt_state,
                scale=scale,
                found_inf=found_inf,
                grad_norm=grad_norm,
                on_write=store.begin_write,
                copies=trainable(store.copies(self.seed, self.step)),
            )
            store.refresh(copied=True)
        store.writing = False
        return dataclasses.replace(state, step=state.step + 1).over(store, opt_state)

    def copy(self) -> ShardedState:
        """The same values in memory of their own; this state stays usable."""
        state = self.check()
        store = Store(state.store.layout, [m.clone() for m in state.store.masters()], state.mesh, state.precision)
        return state.over(store, _copied(state.opt_state))

    def over(self, store: Store, opt_state: Tree) -> ShardedState:
        """This step and seed over the memory of `store` as it is now."""
        params, steps = store.params(self.seed, self.step), self.unit_steps if store is self.store else None
        return ShardedState(params, opt_state, self.step, self.seed, store, store.generation, steps)


def _copied(tree: Tree) -> Tree:
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


@dataclasses.dataclass(frozen=True)
class _Static:
    """The context of a state as a pytree: layouts compare, the store rides along."""

    seed: int
    step: int = dataclasses.field(compare=False)
    store: Store = dataclasses.field(compare=False)
    generation: int = dataclasses.field(compare=False)


register_node(
    ShardedState,
    lambda s: ((s.params, s.opt_state), _Static(s.seed, s.step, s.store, s.generation)),
    lambda static, c: ShardedState(c[0], c[1], static.step, static.seed, static.store, static.generation),
)


@dataclasses.dataclass(frozen=True)
class PlainState:
    """The same face for plain tensors, on one process: the oracle, and a way to begin without any sharding."""

    params: Tree
    opt_state: Tree
    step: int
    seed: int

    @staticmethod
    def create(params: Tree, tx: optim.GradientTransformation, *, seed: int = 0) -> PlainState:
        """From a tree of `Param`s, tensors or lazy leaves. Its params keep their markers, such as frozen."""
        made = optree.tree_map(lambda x: x.detach().clone(), with_values(params, seed, "cpu"))
        return PlainState(made, optim.check(tx, made).init(trainable(made)), 0, seed)

    def apply_gradients(self, grads: Tree, tx: optim.GradientTransformation) -> PlainState:
        """One optimizer step out of place."""
        with torch.no_grad():
            updates, opt_state = tx.update(trainable(grads), self.opt_state, trainable(self.params))
            moved = optree.tree_leaves(optim.apply_updates(trainable(self.params), updates))
        leaves, spec = optree.tree_flatten(self.params)
        changed = {id(leaf): new for leaf, new in zip(optree.tree_leaves(trainable(self.params)), moved, strict=True)}
        params = optree.tree_unflatten(spec, [changed.get(id(leaf), leaf) for leaf in leaves])
        return PlainState(params, opt_state, self.step + 1, self.seed)


register_node(
    PlainState,
    lambda s: ((s.params, s.opt_state), (s.step, s.seed)),
    lambda static, c: PlainState(c[0], c[1], *static),
)


def init(
    params: Tree,
    tx: optim.GradientTransformation,
    *,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    precision: Precision = DEFAULT_PRECISION,
) -> ShardedState:
    """A state from abstract parameters, drawn leaf by leaf: bit-identical at every world size.

    params: a tree of `Param`; mesh: `ya.mesh()` if not given
    """
    for leaf in optree.tree_leaves(params):
        if not isinstance(leaf, Param):
            raise TypeError(f"init takes a tree of Param, got a {type(leaf).__name__}: to shard tensors use ya.shard")
    return _build(params, tx, mesh, seed, precision)


def shard(
    params: Tree,
    tx: optim.GradientTransformation,
    *,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    precision: Precision = DEFAULT_PRECISION,
) -> ShardedState:
    """A state from tensors, the same on every rank, or `Lazy` leaves, which are loaded layer by layer."""
    return _build(params, tx, mesh, seed, precision)


def _build(
    params: Tree, tx: optim.GradientTransformation, mesh: DeviceMesh | None, seed: int, precision: Precision
) -> ShardedState:
    mesh = default_mesh() if mesh is None else mesh
    comms = communicators(mesh)
    layout, leaves = tree_layout(params)
    described = {"seed": str(seed), "precision": str(precision)}
    for _, group in layout.groups:
        pairs = zip(group.layout.names, group.layout.shapes, strict=True)
        described |= {name: f"{len(group.units)} x {shape}" for name, shape in pairs}
    comms.must_agree("the parameters", described)
    abstract, masters = AbstractStore(layout, mesh_axes(mesh), precision, comms), []
    for entry, entry_leaves in zip(layout.entries, leaves, strict=True):
        for group in entry.groups:
            sources: list[Source] = [
                source(name, entry_leaves[position], seed, comms.device)
                for name, position in zip(group.layout.names, group.leaves, strict=True)
            ]
            master = abstract.shard(entry, group, comms.device)
            fill_group(master, entry, group, comms.rank, sources)
            masters.append(master)
    store = Store(layout, masters, mesh, precision)
    built = store.params(seed, step=0)
    return ShardedState(built, optim.check(tx, built).init(trainable(built)), 0, seed, store)


def store_of(params: Tree) -> Store:
    """The store whose own leaves `params` holds; where leaves were replaced, a new one that has copied them."""
    found = handles(params)
    if not found:
        raise TypeError("expected the params of a sharded state, found no sharded leaves")
    store = found[0].check().store
    for index, handle in enumerate(found):
        if handle.check().store is not store:
            raise ValueError(
                f"{handle.entry.name!r} is of another state than {found[0].entry.name!r}: differentiate one"
            )
        if any(handle.context.first_group == other.context.first_group for other in found[:index]):
            raise ValueError(f"{handle.entry.name!r} is differentiated twice; pass the parameters once")
    own = store.master.tensors
    if all(leaf is own[k] for handle in found for k, _, leaf in handle.group_leaves()):
        return store
    masters = store.masters()
    for handle in found:
        for k, group, leaf in handle.group_leaves():
            if not isinstance(leaf, Tensor) or leaf.shape != masters[k].shape:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(f"{group.name}: a local shard has shape {tuple(masters[k].shape)}, got {got}")
            masters[k] = leaf.detach().to(masters[k].dtype).clone(memory_format=torch.contiguous_format)
    return Store(store.layout, masters, store.mesh, store.precision)


@torch.no_grad()
def unshard(tree: Any) -> Tree:
    """Whole tensors from a sharded state's params, or any sharded tree, on every rank: [L, ...] for a stack.

    A state gives its params. Every rank must call it.
    """
    tree = tree.params if isinstance(tree, ShardedState) else tree

    def whole(node: Any) -> Any:
        if not isinstance(node, Sharded):
            return node
        columns: list[Any] = [None] * node.entry.leaf_count
        for _, group, leaf in node.check().group_leaves():
            stacked = node.entry.stacked(group)
            rows = leaf.unbind() if stacked else (leaf,)
            comms = node.store.comms
            flats = [row if comms.ranks == 1 else comms.all_gather(row.contiguous()) for row in rows]
            split = [group.layout.split(flat) for flat in flats]
            for position, parts in zip(group.leaves, zip(*split, strict=True), strict=True):
                columns[position] = torch.stack(parts) if stacked else parts[0].clone()
        return optree.tree_unflatten(node.entry.spec, columns)

    return optree.tree_map(whole, tree, is_leaf=is_sharded)
