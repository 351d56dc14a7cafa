"""Runs a user's function over microbatches: the loops behind `grad`, `train_step` and `eval_step`.

    for m in range(microbatches):
        out = fun(own parameters, part m of the batch)
        backward from the total, and from the visits' token      # every visit gets a backward, in reverse order

The same loop serves plain tensors; a session is what turns visits to sharded parameters into a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.batch import split_batch
from yafsdp_fn.reductions import Mean, as_mean
from yafsdp_fn.runtime.graphs import Graphs
from yafsdp_fn.runtime.programs import Programs
from yafsdp_fn.runtime.randomness import VisitCounter, counting
from yafsdp_fn.runtime.session import Session
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.runtime.tracing import Tracer
from yafsdp_fn.runtime.updates import Updates
from yafsdp_fn.sharded import Sharded
from yafsdp_fn.timeline.record import keep, new_recorder
from yafsdp_fn.tree import Frozen, Tree, dotted, shape_of


class Seed(NamedTuple):
    """What random numbers in blocks depend on, besides microbatch, visit and rank."""

    seed: int
    step: int


class Results(NamedTuple):
    """Of all microbatches of one call, nothing combined over ranks yet. grads: of the differentiated plain leaves."""

    losses: list[Mean]
    aux: list[Tree]
    grads: list[Tensor | None]


class Arguments:
    """The arguments of one call: which are differentiated, and how the rest is cut into microbatches.

    nodes: what the differentiated arguments consist of: handles, frozen subtrees, and plain tensors
    """

    def __init__(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...], parts: int
    ) -> None:
        if len(set(argnums)) != len(argnums):
            raise ValueError(f"argnums={argnums} names one argument twice")
        for number in argnums:
            if not 0 <= number < len(args):
                raise ValueError(f"argnums={number}: the function was called with {len(args)} positional arguments")
        rest = [None if number in argnums else arg for number, arg in enumerate(args)]
        self._fun, self._argnums, self.parts = fun, argnums, parts
        self._part = split_batch((rest, kwargs), parts, "microbatches", "microbatches", _argument_name)
        differentiated: Any = [args[number] for number in argnums]
        self.nodes: list[Any]
        self.nodes, self.spec = optree.tree_flatten(differentiated, is_leaf=lambda n: isinstance(n, Sharded | Frozen))
        for node in self.nodes:
            if not isinstance(node, Sharded | Frozen) and not (isinstance(node, Tensor) and node.is_floating_point()):
                raise TypeError(
                    f"a differentiated argument has a leaf {shape_of(node)}; expected floating-point tensors"
                )
        self.plain = [node.detach().requires_grad_() for node in self.nodes if isinstance(node, Tensor)]

    def call(self, microbatch: int, session: Session | Tracer | None, track: bool) -> Any:
        """The function on the differentiated leaves and the microbatch's part of the rest."""
        plain = iter(self.plain)
        nodes: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Tensor):
                leaf = next(plain)
                nodes.append(leaf if track else leaf.detach())
            else:
                nodes.append(session.handle(node) if session is not None and isinstance(node, Sharded) else node)
        rest, kwargs = self._part(microbatch)
        for number, arg in zip(self._argnums, optree.tree_unflatten(self.spec, nodes), strict=True):
            rest[number] = arg
        return self._fun(*rest, **kwargs)

    def gradients(self, plain: Sequence[Tensor | None], shards: Shards | None) -> list[Any]:
        """The differentiated arguments with gradients in their place: a zero without memory for what is frozen."""
        given = iter(plain)
        nodes: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Tensor):
                found = next(given)
                nodes.append(_zero(node) if found is None else found)
            elif isinstance(node, Frozen):
                frozen: Any = node
                nodes.append(optree.tree_map(_zero, frozen))
            else:
                assert shards is not None
                of_group = [(shards.tensors[k], leaf) for k, _, leaf in node.group_leaves()]
                nodes.append(Sharded(tuple(_zero(leaf) if g is None else g for g, leaf in of_group), node.context))
        return list(optree.tree_unflatten(self.spec, nodes))


def _argument_name(accessor: optree.PyTreeAccessor) -> str:
    """A leaf of `(positional, keyword)` arguments, as errors call it."""
    within = dotted(accessor[2:])
    return f"{within + ' of ' if within else ''}argument {accessor[1].entry}"


def _zero(leaf: Tensor) -> Tensor:
    return leaf.new_zeros(()).expand(leaf.shape)


def run_plain(arguments: Arguments, seed: Seed, *, has_aux: bool, track: bool) -> Results:
    """On plain tensors alone: the oracle."""
    results = Results([], [], [None] * len(arguments.plain))
    for microbatch in range(arguments.parts):
        with torch.set_grad_enabled(track), counting(VisitCounter(*seed, microbatch)):
            mean = _append(results, arguments.call(microbatch, None, track), has_aux)
        if track:
            _backward([mean.total], [], arguments.plain, results.grads)
    return results


def run_sharded(
    arguments: Arguments,
    store: Store,
    programs: Programs,
    shards: Shards | None,
    seed: Seed,
    *,
    has_aux: bool,
    updates: Updates | None = None,
    graphs: Graphs | None = None,
) -> Results:
    """In a session on `store`; gradients of sharded leaves go to `shards`, None for a forward without gradients.

    The first run teaches `programs` its program. An exception on all ranks leaves the state usable.
    """
    with torch.inference_mode(False):  # slots made under it could never be trained with
        return _run_sharded(arguments, store, programs, shards, seed, has_aux, updates, graphs)


def _run_sharded(
    arguments: Arguments,
    store: Store,
    programs: Programs,
    shards: Shards | None,
    seed: Seed,
    has_aux: bool,
    updates: Updates | None,
    graphs: Graphs | None,
) -> Results:
    program = programs.get(store, arguments.parts)
    recorder = new_recorder(store.key, cuda=store.comms.device.type == "cuda")
    session = Session(
        store,
        program=program,
        grads=shards,
        step=seed.step,
        microbatches=arguments.parts,
        watch=shards is not None and not programs.watched(store, arguments.parts),
        updates=updates,
        recorder=recorder,
        graphs=graphs,
    )
    results = Results([], [], [None] * len(arguments.plain))
    try:
        session.start()
        _run_in(session, arguments, results, has_aux, seed, updates)
        if program is None:
            store.comms.must_agree("what the function returns", {"aux": _outline(results.aux)})
    except BaseException as error:
        error.add_note(f"rank {store.comms.world_rank} of {store.comms.world}, {session.place}")
        session.abort(error)
        raise
    programs.learn(session)
    if recorder is not None:
        where = f"measured, rank {store.comms.world_rank} of {store.comms.world}"
        learnt = programs.peek(store, arguments.parts)
        assert learnt is not None
        keep(recorder, learnt.trace, where if program is not None else f"{where}, on demand")
    return results


def _run_in(
    session: Session,
    arguments: Arguments,
    results: Results,
    has_aux: bool,
    seed: Seed,
    updates: Updates | None,
) -> None:
    track = session.grads is not None
    leaves = [leaf for leaf in session.leaves if leaf.requires_grad]
    totals: list[Tensor | None] = [None] * len(leaves)
    for microbatch in range(arguments.parts):
        session.begin_microbatch(microbatch)
        counter = VisitCounter(*seed, microbatch, session.store.comms.world_rank)
        with torch.set_grad_enabled(track), counting(counter):
            mean = _append(results, arguments.call(microbatch, session, track), has_aux)
        session.end_forward()
        if updates is not None and microbatch + 1 == arguments.parts:
            updates.begin(results)
        if track:
            inputs, sums = [*leaves, *arguments.plain], [*totals, *results.grads]
            with session.backward():
                # the token is a root, too: visits that the loss does not use get their backward, in its place
                _backward([mean.total, session.token], [session.leaf_token], inputs, sums)
            totals, results.grads[:] = sums[: len(leaves)], sums[len(leaves) :]
        del mean
    found = iter(totals)
    session.finish([next(found) if leaf.requires_grad else None for leaf in session.leaves])


def _outline(aux: Any) -> str:
    """Structure and shapes: what the reductions of aux pack together must be alike on all ranks."""
    return str(optree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, aux))


def _append(results: Results, out: Any, has_aux: bool) -> Mean:
    """Records what the function returned; gives its loss, still attached."""
    aux: Any = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Mean):
            raise TypeError(f"has_aux=True: the function must return (loss, aux), got {type(out).__name__}")
        out, aux = out
    mean = as_mean(out)
    results.losses.append(Mean(mean.total.detach(), mean.weight))
    results.aux.append(optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux))
    return mean


def _backward(roots: list[Tensor], tokens: list[Tensor], leaves: Sequence[Tensor], sums: list[Tensor | None]) -> None:
    """Adds to `sums` the gradients of the first root with respect to `leaves`."""
    if not roots[0].requires_grad:
        raise ValueError(
            "the loss does not depend on the differentiated arguments: it was detached, computed under no_grad, or "
            "uses no trainable parameter"
        )
    seeds = [torch.ones_like(root) if root is roots[0] else torch.zeros_like(root) for root in roots]
    found = torch.autograd.grad(roots, [*leaves, *tokens], seeds, allow_unused=True)
    for index, grad in enumerate(found[: len(leaves)]):
        if grad is not None:
            before = sums[index]
            sums[index] = grad if before is None else before + grad
