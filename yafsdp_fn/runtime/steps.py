"""Runs a user's function over microbatches: the loops behind `grad`, `train_step` and `eval_step`.

    for m in range(microbatches):
        out = fun(own parameters, part m of the batch)
        backward from the total, and from the visits' token      # every visit gets a backward, in reverse order

Plain tensors use the same loop; a session turns visits to sharded parameters into a schedule.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.dist.micro_shards import micro_shard_seed, microbatches_on
from yafsdp_fn.params.sharded import Runner, Sharded, handles, is_sharded
from yafsdp_fn.params.tree import Frozen, Tree, dotted, shape_of
from yafsdp_fn.runtime.batch import split_batch
from yafsdp_fn.runtime.building import Verified
from yafsdp_fn.runtime.memory import Memory, Shards
from yafsdp_fn.runtime.program_session import OnDemand, ProgramSession
from yafsdp_fn.runtime.protocols import StepHooks
from yafsdp_fn.runtime.reductions import Mean, as_mean
from yafsdp_fn.runtime.session import Session, Step
from yafsdp_fn.runtime.visit import depends
from yafsdp_fn.util.randomness import VisitCounter, counting

INDEPENDENT = (
    "the loss does not depend on the differentiated arguments: it was detached, computed under no_grad, or uses no "
    "trainable parameter"
)
NOT_FROM_PLAIN = (
    "a gradient of plain tensors with a state on a deterministic mesh: each rank would have the part of its own "
    "micro-shards, which is another at another number of ranks. Put them into the state"
)


class Seed(NamedTuple):
    """The seed of random numbers in blocks, besides microbatch and visit. rank: for plain trees; otherwise 0"""

    seed: int
    step: int
    rank: int = 0


class Results(NamedTuple):
    """The results of all microbatches of one call, not yet combined over ranks. grads: of the differentiated plain
    leaves"""

    losses: list[Mean]
    aux: list[Tree]
    grads: list[Tensor | None]


class Arguments:
    """The arguments of one call: which are differentiated, and how the rest is cut into microbatches.

    nodes: the differentiated arguments' handles, frozen subtrees, and plain tensors
    constants: handles of one state among the rest, if nothing sharded is differentiated: a base under adapters, say
    parts: the number of microbatches, as asked for or as the mesh requires: see `microbatches_on`
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: tuple[int, ...],
        parts: int | None,
    ) -> None:
        if len(set(argnums)) != len(argnums):
            raise ValueError(f"argnums={argnums} names one argument twice")
        for number in argnums:
            if not 0 <= number < len(args):
                raise ValueError(f"argnums={number}: the function was called with {len(args)} positional arguments")
        rest = [None if number in argnums else arg for number, arg in enumerate(args)]
        self._fun, self._argnums = fun, argnums
        self._rest: Any = (rest, kwargs)
        differentiated: Any = [args[number] for number in argnums]
        self.nodes: list[Any]
        self.nodes, self.spec = optree.tree_flatten(differentiated, is_leaf=lambda n: isinstance(n, Sharded | Frozen))
        for node in self.nodes:
            if not isinstance(node, Sharded | Frozen) and not (isinstance(node, Tensor) and node.is_floating_point()):
                raise TypeError(
                    f"a differentiated argument has a leaf {shape_of(node)}; expected floating-point tensors"
                )
        others = [] if any(map(is_sharded, self.nodes)) else handles(self._rest)
        self.constants = [node for node in others if node.owner is others[0].owner]
        given = next(filter(is_sharded, [*self.nodes, *self.constants]), None)
        comms = None if given is None else given.owner.comms
        self._copied = comms is not None and comms.deterministic
        self.parts = microbatches_on(comms, parts) if self._copied else parts or 1
        self._part: Callable[[int], Any] | None = None
        if self.parts > 1:
            self._part = split_batch(self._rest, self.parts, "microbatches", "microbatches", argument_name)

    @property
    def rest(self) -> Any:
        """The arguments that are not differentiated, positional and keyword."""
        return self._rest

    @cached_property
    def plain(self) -> list[Tensor]:
        """Leaves for the plain tensors, for a backward. (Inside torch.func none can be made.)"""
        return [node.detach().requires_grad_() for node in self.nodes if isinstance(node, Tensor)]

    def call(self, microbatch: int, runner: Runner | None, track: bool) -> Any:
        """Calls the function on the differentiated leaves and the microbatch's part of the rest."""
        plain = iter(self.plain)
        nodes: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Tensor):
                leaf = next(plain)
                nodes.append(leaf if track else leaf.detach())
            else:
                nodes.append(node if runner is None or isinstance(node, Frozen) else node.run_by(runner))
        whole = self._rest if self._part is None else self._part(microbatch)
        if self._copied:  # kernels may round differently by alignment, and parts begin anywhere
            whole = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, whole, is_leaf=is_sharded)
        if self.constants and runner is not None:
            owner = self.constants[0].owner
            own = lambda node: node.run_by(runner) if is_sharded(node) and node.owner is owner else node  # noqa: E731
            whole = optree.tree_map(own, whole, is_leaf=is_sharded)
        return self.on(nodes, whole)

    def on(self, nodes: Sequence[Any], whole: Any = None) -> Any:
        """Calls the function on `nodes` for the differentiated arguments, and the rest or a part of it."""
        rest, kwargs = self._rest if whole is None else whole
        rest = list(rest)
        for number, arg in zip(self._argnums, optree.tree_unflatten(self.spec, nodes), strict=True):
            rest[number] = arg
        return self._fun(*rest, **kwargs)

    def gradients(self, plain: Sequence[Tensor | None], shards: Shards | None, record: Any = None) -> list[Any]:
        """Returns the differentiated arguments with gradients in their place; frozen ones get a zero without memory.

        record: the observer of the step
        """
        given = iter(plain)
        nodes: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Tensor):
                found = next(given)
                nodes.append(zero(node) if found is None else found)
            elif isinstance(node, Frozen):
                nodes.append(zeros(node))
            else:
                assert shards is not None
                of_group = [(shards.tensors[k], leaf) for k, _, leaf in node.group_leaves()]
                grads = tuple(zero(leaf) if g is None else g for g, leaf in of_group)
                nodes.append(node.gradient(grads, record))
        return list(optree.tree_unflatten(self.spec, nodes))


def argument_name(accessor: optree.PyTreeAccessor) -> str:
    """Returns the name that errors use for a leaf of `(positional, keyword)` arguments."""
    within = dotted(accessor[2:])
    return f"{within + ' of ' if within else ''}argument {accessor[1].entry}"


def zero(leaf: Tensor) -> Tensor:
    return leaf.new_zeros(()).expand(leaf.shape)


def zeros(frozen: Any) -> Any:
    return optree.tree_map(zero, frozen)


def run_plain(arguments: Arguments, seed: Seed, *, has_aux: bool, track: bool) -> Results:
    """Runs on plain tensors alone: the oracle."""
    results = Results([], [], [None] * len(arguments.plain))
    for microbatch in range(arguments.parts):
        counter = VisitCounter(seed.seed, seed.step, microbatch, seed.rank)
        with torch.set_grad_enabled(track), counting(counter):
            mean = _append(results, arguments.call(microbatch, None, track), has_aux)
        if track:
            _backward([mean.total], [], arguments.plain, results.grads)
    return results


def run_sharded(
    arguments: Arguments,
    memory: Memory,
    verified: Verified | None,
    learn: Callable[..., Verified],
    shards: Shards | None,
    seed: Seed,
    *,
    has_aux: bool,
    track: bool,
    step_hooks: StepHooks,
) -> Results:
    """Runs in a session on `memory`; gradients of sharded leaves go to `shards`, None if none is differentiated.

    verified: the program; None in the first run, whose trace goes to `learn(trace, uses_leaves=)`, which builds one
    track: something is differentiated. An exception on all ranks leaves the state usable.
    """
    if memory.comms.deterministic and track and arguments.plain:
        raise ValueError(NOT_FROM_PLAIN)
    with torch.inference_mode(False):  # slots made under it could never be trained with
        watch = track and (verified is None or not verified.watched)
        checked = verified is None  # nothing has proved yet what ranks issue
        step = Step(seed.step, shards, track, arguments.parts, watch, checked, step_hooks)
        beside = partial(OnDemand, memory, Step(seed.step, checked=checked)) if track else None
        session: OnDemand | ProgramSession
        if verified is None:
            session = OnDemand(memory, step, beside)
        else:
            session = ProgramSession(verified, memory, step, beside)
        results = Results([], [], [None] * len(arguments.plain))
        try:
            with memory.comms.seen(session.sight, f"after step {seed.step}"):
                session.start()
                _run_in(session, arguments, results, has_aux, seed)
                if isinstance(session, OnDemand):
                    memory.comms.must_agree("what the function returns", {"aux": _outline(results.aux)})
                    verified = learn(session.trace(), uses_leaves=session.uses_leaves)
                session.finish()
        except BaseException as error:
            error.add_note(f"rank {memory.comms.world_rank} of {memory.comms.world}, {session.place}")
            session.abort(error)
            raise
        session.close()
        assert verified is not None
        verified.watched |= watch
        return results


def _run_in(session: Session, arguments: Arguments, results: Results, has_aux: bool, seed: Seed) -> None:
    track = session.differentiates
    leaves = [leaf for leaf in session.leaves if leaf.requires_grad]
    totals: list[Tensor | None] = [None] * len(leaves)
    for microbatch in range(arguments.parts):
        session.begin_microbatch(microbatch)
        comms = session.memory.comms
        drawn = (
            micro_shard_seed(comms, microbatch, comms.batch_rank)
            if comms.deterministic
            else (microbatch, comms.batch_rank)
        )
        counter = VisitCounter(seed.seed, seed.step, *drawn)
        with torch.set_grad_enabled(track), counting(counter):
            mean = _append(results, arguments.call(microbatch, session, track), has_aux)
        session.end_forward()
        if session.step_hooks.updates is not None and microbatch + 1 == arguments.parts:
            session.step_hooks.updates.begin(results.losses, results.aux, session.unmeasured)
        if track:
            inputs, sums = [*leaves, *arguments.plain], [*totals, *results.grads]
            with session.backward():
                # the token is a root, too: visits that the loss does not use get their backward, in its place
                _backward([mean.total, session.token], [session.leaf_token], inputs, sums)
            totals, results.grads[:] = sums[: len(leaves)], sums[len(leaves) :]
        del mean
    found = iter(totals)
    session.end_backward([next(found) if leaf.requires_grad else None for leaf in session.leaves])


def _outline(aux: Any) -> str:
    """Returns structure and shapes of aux, which must be equal on all ranks: reductions pack them together."""
    return str(optree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, aux))


def _append(results: Results, out: Any, has_aux: bool) -> Mean:
    """Records the function's result; returns its loss, still attached."""
    mean, aux = returned(out, has_aux)
    results.losses.append(Mean(mean.total.detach(), mean.weight))
    results.aux.append(optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux))
    return mean


def returned(out: Any, has_aux: bool) -> tuple[Mean, Tree]:
    """Returns loss and aux from the function's result. Raises TypeError for anything else."""
    aux: Any = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Mean):
            raise TypeError(f"has_aux=True: the function must return (loss, aux), got {type(out).__name__}")
        out, aux = out
    return as_mean(out, depends=depends), aux


def _backward(roots: list[Tensor], tokens: list[Tensor], leaves: Sequence[Tensor], sums: list[Tensor | None]) -> None:
    """Adds to `sums` the gradients of the first root with respect to `leaves`."""
    if not roots[0].requires_grad:
        raise ValueError(INDEPENDENT)
    seeds = [torch.ones_like(root) if root is roots[0] else torch.zeros_like(root) for root in roots]
    found = torch.autograd.grad(roots, [*leaves, *tokens], seeds, allow_unused=True)
    for index, grad in enumerate(found[: len(leaves)]):
        if grad is not None:
            before = sums[index]
            sums[index] = grad if before is None else before + grad
