"""The state of sharded training: a frozen pytree of parameters, optimizer state, step and seed.

    state = init(params, tx, mesh=mesh(), seed=0)
    state, metrics = step(state, batch)               # the old state is donated: its memory is the new one's

Donation happens at the commit, the last thing a step does, so that an exception before it leaves the state usable.
"""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn import optim
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.communication.streams import Work
from yafsdp_fn.optim.base import must_be_state_of
from yafsdp_fn.optim.step.units import UnitSteps
from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.markers import register_node
from yafsdp_fn.params.one_state import words
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded, trainable
from yafsdp_fn.params.tree import Tree, tensors_in
from yafsdp_fn.program.ops import Update
from yafsdp_fn.program.program import Program
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.consistency import optimizer
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.reductions import Mean
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.util.foreign_names import hint
from yafsdp_fn.util.squares import squared_norm, squares_in_bins


class NoOptimizer(NamedTuple):
    """The optimizer state of a state that is only evaluated: a teacher, a frozen base."""


@dataclasses.dataclass(frozen=True, repr=False)
class ShardedState:
    """The state that a training step takes and returns.

    params: the user's container of `Sharded` handles; opt_state: the optimizer's state, sharded alike
    step: steps taken, skipped ones included; seed: of everything random inside blocks
    program: the program of the step that made this state, or of the next one; None before the first step
    unit_steps: `(optimizer, its step in place over this memory)`, from the last step. Not kept by the memory, since it
        holds handles, which hold the memory: a dropped state must not wait for the garbage collector

    >>> state, metrics = ya.train_step(loss_fn, tx)(state, batch)
    >>> state.step, sorted(state.params)
    (1, ['embed', 'head', 'layers'])
    """

    params: Tree
    opt_state: Tree
    step: int = dataclasses.field(compare=False)
    seed: int
    memory: StateMemory = dataclasses.field(compare=False)
    generation: int = dataclasses.field(default=0, compare=False)
    program: Program | None = dataclasses.field(default=None, compare=False)
    unit_steps: tuple[Any, UnitSteps] | None = dataclasses.field(default=None, compare=False)

    @property
    def mesh(self) -> DeviceMesh:
        return self.memory.mesh

    @property
    def precision(self) -> Precision:
        return self.memory.precision

    # ---- use

    def check(self) -> "ShardedState":
        """Returns this state, ready for use. Raises RuntimeError if a later state has taken its memory."""
        if self.generation != self.memory.generation:
            raise RuntimeError(f"this state (step {self.step}) {self.memory.why_gone()}")
        found = handles(self.params)
        _owner_of(found)
        must_be_laid_out(self.params, self.memory.layout)
        # replaced leaves get memory of their own, since steps write in place; those of another state get this one's
        # mesh and precision
        memory = _holding(self.memory, found)
        return self if memory is self.memory else self.over(memory, _copied(self.opt_state))

    def apply_gradients(self, grads: Tree, tx: optim.GradientTransformation) -> "ShardedState":
        """Takes one optimizer step in place; donates this state, and may overwrite `grads`."""
        state = self.check()
        memory, update = state.memory, Update(state.memory.trained)
        found = handles(grads)
        record = found[0].origin.record if found else None  # of the step that made them
        if self.unit_steps is None or self.unit_steps[0] is not tx:
            memory.comms.must_agree("the optimizer", optimizer(tx))
        with memory.comms.guarded(f"the update of step {self.step}"):
            steps = state.unit_steps_for(tx, trainable(grads))
            with memory.using(*update.uses(), run=None if record is None else record.issue_late(update)):
                steps.run(on_write=memory.begin_write)
                memory.refresh(copied=True)
            return state.stepped(tx, steps)

    def unit_steps_for(self, tx: optim.GradientTransformation, grads: Tree) -> UnitSteps:
        """Returns the step of `tx` in place over this state's memory and `grads`; the last one, which is many views, is
        reused."""
        if isinstance(self.opt_state, NoOptimizer):
            raise ValueError("this state was made without an optimizer: give one to ya.init or ya.shard")
        trees, kept = (trainable(self.params), grads, self.opt_state), self.unit_steps
        if kept is not None and kept[0] is tx and kept[1].fits(*trees):
            kept[1].renew(trees[0])
            return kept[1]
        # the first step of this optimizer here
        must_be_state_of(tx, trainable(self.memory.abstract().meta_params()), self.opt_state)
        with torch.inference_mode(False):  # what is made under it could never be written to outside of it
            # moments of another state, or of one's own, are copied: a step writes to them
            opt_state = _copied(self.opt_state, but=self.memory.moments)
            self.memory.moments = tensors_of(opt_state)
            copies = trainable(self.memory.copies(self.seed, self.step))
            return UnitSteps(tx, trainable(self.params), grads, opt_state, copies)

    def stepped(
        self, tx: optim.GradientTransformation, steps: UnitSteps, found_inf: Tensor | None = None
    ) -> "ShardedState":
        """Returns the state after `steps`, which have written to the memory. found_inf: the flag that has skipped it"""
        opt_state = steps.finish(found_inf)
        self.memory.end_write()
        return dataclasses.replace(self, step=self.step + 1, unit_steps=(tx, steps)).over(self.memory, opt_state)

    if not TYPE_CHECKING:  # a type checker is to see misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"'ShardedState' object has no attribute '{name}'{hint(f'state.{name}')}")

    # ---- copies

    def copy(self) -> "ShardedState":
        """Returns the same values in memory of their own; this state stays usable."""
        state = self.check()
        memory = state.memory.over([master.clone() for master in state.memory.masters()])
        return state.over(memory, _copied(state.opt_state))

    def __repr__(self) -> str:
        if self.generation != self.memory.generation:
            return f"ShardedState(step={self.step}, which {self.memory.why_gone()})"
        # where it is, its handles, and its bytes
        mesh = zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)
        axes = ", ".join([f"{name}={size}" for name, size in mesh])
        lines = [f"ShardedState(step={self.step}, seed={self.seed}) on the mesh ({axes})"]
        whole = 0
        for handle in handles(self.params):
            lines.append(f"  {handle.entry.name or 'params'}: {handle.described()}")
            whole += sum([size for _, _, size in handle.wholes()])
        here, of_optimizer = _bytes(self.params), _bytes(self.opt_state)
        lines.append(f"  parameters: {here:,} bytes here, {whole:,} in all; optimizer: {of_optimizer:,} here")
        return "\n".join(lines)

    def __deepcopy__(self, memo: object) -> "ShardedState":
        return self.copy()  # the mesh is shared, not copied

    def over(self, memory: StateMemory, opt_state: Tree) -> "ShardedState":
        """Returns this step and seed over `memory` as it is now."""
        if memory is not self.memory:
            memory.moments = tensors_of(opt_state)
        params = memory.params(self.seed, self.step)
        steps = self.unit_steps if memory is self.memory else None
        return ShardedState(params, opt_state, self.step, self.seed, memory, memory.generation, self.program, steps)


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in tensors_in(tree))


def tensors_of(opt_state: Tree) -> frozenset[weakref.ref[Tensor]]:
    """Returns references to the tensors of an optimizer's state, which keep none of them."""
    return frozenset(map(weakref.ref, tensors_in(opt_state)))


def _copied(tree: Tree, but: Collection[weakref.ref[Tensor]] = ()) -> Tree:
    """Returns `tree` with a copy of each tensor, but of those that stay."""

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor) or weakref.ref(x) in but:
            return x
        return torch.empty_like(x, pin_memory=x.is_pinned()).copy_(x)  # what is on the host is pinned, as it was

    return optree.tree_map(copied, tree)


# ---- The state as a pytree. Its context is all the rest of it, which compares by layout and seed only.

register_node(
    ShardedState,
    lambda s: ((s.params, s.opt_state), dataclasses.replace(s, params=None, opt_state=None, unit_steps=None)),
    lambda of, children: dataclasses.replace(of, params=children[0], opt_state=children[1]),
)


def must_be_sharded(state: Any, what: str) -> ShardedState:
    """Returns `state`. Raises TypeError if it is none, but a part of one, say."""
    if not isinstance(state, ShardedState):
        got = type(state).__name__
        raise TypeError(f"{what}, got {got}: the state itself, as ya.init, ya.shard or the step before returned it")
    return state


def must_be_laid_out(tree: Tree, layout: TreeLayout) -> None:
    """Raises ValueError for parts of a state's parameters in another tree than theirs."""
    nodes, container = optree.tree_flatten(tree, is_leaf=is_sharded)
    if not all(map(is_sharded, nodes)):
        return
    entries = [node.entry for node in nodes]
    if container != layout.container or entries != list(layout.entries):
        got = optree.tree_unflatten(container, [entry.name for entry in entries])
        raise errors.laid_out_otherwise(got, layout)


def memory_of(found: Sequence[Sharded]) -> StateMemory:
    """The memory whose own leaves these handles hold; if leaves were replaced, a new memory with copies of them."""
    return _holding(_owner_of(found), found)


def _owner_of(found: Sequence[Sharded]) -> StateMemory:
    """Returns the memory of the state that these handles are of. Raises TypeError or ValueError if they are of none, of
    several, or of one twice."""
    if not found:
        raise TypeError("expected the params of a sharded state, found no sharded leaves")
    first, memory = found[0], found[0].check().owner
    if not isinstance(memory, StateMemory):
        raise TypeError(f"{first.entry.name!r} is no parameter of a state: it has no memory that a step could use")
    for index, handle in enumerate(found):
        if handle.check().owner is not memory:
            raise ValueError(
                f"{handle.entry.name!r} is of another state than {first.entry.name!r}: parameters are of one. To use "
                "weights of another, copy them into its place: "
                "optree.tree_map(lambda own, other: other.clone(), params, others)"
            )
        if any(handle.context.first_group == other.context.first_group for other in found[:index]):
            raise ValueError(f"{handle.entry.name!r} is differentiated twice; pass the parameters once")
    return memory


def _holding(memory: StateMemory, found: Sequence[Sharded]) -> StateMemory:
    """Returns `memory` where these handles hold its own leaves, else another like it with copies of theirs."""
    own = memory.master.tensors
    if all(leaf is own[k] for handle in found for k, _, leaf in handle.group_leaves()):
        return memory
    # copies, since steps write in place
    masters = memory.masters()
    for handle in found:
        for k, group, leaf in handle.group_leaves():
            if not isinstance(leaf, Tensor) or leaf.shape != masters[k].shape:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(f"{group.name}: a local shard has shape {tuple(masters[k].shape)}, got {got}")
            masters[k] = leaf.detach().to(masters[k].dtype).clone(memory_format=torch.contiguous_format)
    return memory.over(masters)


# ---- The optimizer's part of a training step.
#
#     norm      the norm of the whole gradient, and with it all metrics
#     update    the optimizer's step on the shards of some units, or of all
#
# A session calls both when its program says so, else at the end of the step, to the same bits. The difference is in
# time: the first update destroys the old state.

Measured = tuple[dict[str, Any], Tensor, Tensor | None]
"""The metrics of a step, the weight to divide gradients by, and the flag that skips the update."""

Measure = Callable[[Sequence[Mean], Sequence[Tree], Tensor, Ranks | None, str], Measured]
"""`(losses, aux, squares of this rank's gradients, ranks, state and step in words)` -> `Measured`."""


class StepUpdates:
    """The optimizer of one step, as its session calls it. state: is donated; grads: handles on `shards`"""

    def __init__(self, state: ShardedState, tx: Any, grads: Tree, shards: Shards, measure: Measure) -> None:
        self._state, self._memory, self._shards, self._measure = state, state.memory, shards, measure
        self._tx, self._steps = tx, state.unit_steps_for(tx, trainable(grads))
        # known after the last forward, and after the norm
        self._losses: Sequence[Mean] = ()
        self._aux: Sequence[Tree] = ()
        self._measured: dict[str, Any] | None = None
        self._scale: Tensor | None = None
        self._found_inf: Tensor | None = None

    # ---- called for its session

    def begin(self, losses: Sequence[Mean], aux: Sequence[Tree]) -> None:
        """Receives all losses, before the norm."""
        self._losses, self._aux = losses, aux

    def norm(self) -> None:
        """Takes the norm of the whole gradient, with the other metrics of the step."""
        comms = self._memory.comms
        counted = self._shards.counted
        squares = squares_in_bins(counted, comms.device) if comms.deterministic else squared_norm(counted)
        own = words(self._memory.number, self._state.step)
        self._measured, self._scale, self._found_inf = self._measure(self._losses, self._aux, squares, comms, own)

    def exchange(self, units: tuple[int, ...]) -> Work:
        pairs, group = self._steps.messages(units), self._memory.comms.reduce_group

        def work() -> None:
            for received, sent in pairs:
                group.exchange(received, sent)

        return work

    def update(self, units: tuple[int, ...], part: int) -> None:
        memory = self._memory
        assert self._measured is not None, "the norm comes first"
        # all units at once, where none is updated in parts: fewer launches
        parts = self._steps.parts
        self._steps.run(
            None if units == memory.trained and not parts else units,
            part=part,
            scale=self._scale,
            found_inf=self._found_inf,
            grad_norm=self._measured["grad_norm"],
            on_write=memory.begin_write,
        )
        # of a unit in several parts the last one writes its weights
        memory.refresh([unit for unit in units if part + 1 == parts.get(unit, 1)], copied=True)

    def finish(self) -> tuple[ShardedState, dict[str, Any]]:
        """Returns the new state and the step's metrics, when the session is over."""
        assert self._measured is not None
        return self._state.stepped(self._tx, self._steps, self._found_inf), self._measured
