"""Runs a user's function on one stage of a pipeline: its calls, in the order of the stage's program."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from yafsdp_fn.dist.agreement import RanksDisagree
from yafsdp_fn.dist.communicators import Communicators
from yafsdp_fn.params.sharded import is_sharded
from yafsdp_fn.program.split import Call, StageMessage
from yafsdp_fn.runtime.building import Building, Verified
from yafsdp_fn.runtime.memory import Memory, Shards
from yafsdp_fn.runtime.pipeline import StageSession, Visits
from yafsdp_fn.runtime.protocols import StepHooks
from yafsdp_fn.runtime.reductions import Mean, is_reduction
from yafsdp_fn.runtime.session import Step
from yafsdp_fn.runtime.stage_io import Crossing, crossing_of, neutral
from yafsdp_fn.runtime.steps import Arguments, Results, Seed, argument_name, returned
from yafsdp_fn.util.randomness import VisitCounter, counting

# ---- All stages of a pipeline compute on one batch, each its own visits: ranks at one place in their stages must be
# given
# the same rows. Compared before the first step with a batch of new shapes.

WHAT = "the batch, on which all stages compute"
NEW = "comparing a batch of new shapes"


def must_be_same(rest: Any, comms: Communicators) -> None:
    """Raises RanksDisagree on every rank where shapes differ between any two, or values between stages.

    rest: the arguments of the function, positional and keyword, but for parameters
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(rest, is_leaf=is_sharded)
    named = {argument_name(at): x for at, x in zip(accessors, leaves, strict=True) if not is_sharded(x)}
    comms.must_agree(WHAT, {name: _outline(leaf) for name, leaf in named.items()}, NEW)
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}
    if not tensors:
        return
    sums = torch.tensor([_checksum(tensor) for tensor in tensors.values()], dtype=torch.int64)
    every = comms.numbers_of_all(sums, NEW).view(comms.stages, -1, len(sums))
    for stage, place, number in (every != every[0]).nonzero()[:1].tolist():
        one, other = place, stage * every.shape[1] + place
        raise RanksDisagree(
            f"ranks disagree on {WHAT}; {list(tensors)[number]} has other values on rank {one} (stage 0) than on rank "
            f"{other} (stage {stage}). Read the same batch on all stages, as ya.shard_batch deals it"
        )


def _outline(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__


def _checksum(tensor: Tensor) -> int:
    values: Any = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return zlib.crc32(values)


# ---- Runs a user's function in the segments of one stage of a pipeline: what `steps.run_sharded` is without stages.
#
# for call in the stage's calls:
#     forward     the whole function, of which this segment's visits compute
#     backward    from what others took of it, with the gradients that have come back, and from the loss
#     weights     what a backward in two halves has left for later


class Passed(NamedTuple):
    """A forward of a segment, until its backward.

    arrived: by flow, what it took that has a gradient; roots: by flow, where gradients of what left it come back to
    own: further roots, with their gradients: the last token, and the loss where it is made here
    """

    arrived: dict[int, list[Tensor]]
    roots: dict[int, list[GradientEdge]]
    own: list[tuple[GradientEdge, Tensor]]


def run_staged(
    building: Building,
    arguments: Arguments,
    memory: Memory,
    verified: Verified | None,
    learn: Callable[[Crossing], Verified],
    shards: Shards | None,
    seed: Seed,
    *,
    has_aux: bool,
    track: bool,
    step_hooks: StepHooks,
) -> Results:
    """Runs as `run_sharded` does, on a mesh with stages. The first run traces the function on fake tensors, and
    `learn(crossing)` builds a program from that."""
    if arguments.plain:
        raise ValueError("a gradient of plain tensors on a mesh with stages: put them into the state")
    with torch.inference_mode(False):
        if verified is None:
            must_be_same(arguments.rest, memory.comms)
            verified = learn(crossing_of(arguments, memory, building))
        step = Step(seed.step, shards, track, arguments.parts, not verified.watched and track, step_hooks=step_hooks)
        session = StageSession(verified, memory, step)
        try:
            with memory.comms.seen(session.sight, f"after step {seed.step}"):
                session.start()
                results = _Calls(session, arguments, has_aux, seed).run()
                session.finish()
        except BaseException as error:
            error.add_note(f"rank {memory.comms.world_rank} of {memory.comms.world}, {session.place}")
            session.abort(error)
            raise
        session.close()
        verified.watched = True
        return results


class _Calls:
    def __init__(self, session: StageSession, arguments: Arguments, has_aux: bool, seed: Seed) -> None:
        self._session, self._arguments, self._has_aux, self._seed = session, arguments, has_aux, seed
        self._device = session.memory.comms.device
        self._visits = Visits(session)
        self._passed: dict[tuple[int, int], Passed] = {}
        crossing, parts = session.crossing, range(arguments.parts)
        # of what other stages make: nothing, which adds up to what they have
        zero = torch.zeros((), dtype=crossing.total.dtype, device=self._device)
        self._totals = [Mean(zero, zero) for _ in parts]
        self._nodes = [[self._begin(*home) for home in crossing.aux] for _ in parts]
        self._spec: Any = None

    def run(self) -> Results:
        session = self._session
        calls = list(session.calls())
        forwards = sum(call.kind == "forward" for call in calls)
        results = Results([], [], [])
        for call in calls:
            if call.kind == "forward":
                self._forward(call)
                forwards -= 1
                if not forwards:
                    results = self._results()
                    if session.step_hooks.updates is not None:
                        session.step_hooks.updates.begin(results.losses, results.aux, session.unmeasured)
            elif call.kind == "weights":
                session.weights(call)
            else:
                self._backward(call)
        session.end_backward([None for _ in session.leaves])
        return results

    def _forward(self, call: Call) -> None:
        session, seed, track = self._session, self._seed, self._session.differentiates
        crossing, microbatch = session.crossing, call.microbatch
        arrived = session.begin(call)
        for flow, tensors in arrived.items():
            for piece, tensor in zip(crossing.pieces(StageMessage(flow)), tensors, strict=True):
                tensor.requires_grad_(track and piece.grad)
        session.arrived = arrived
        counter = VisitCounter(seed.seed, seed.step, microbatch, session.memory.comms.batch_rank)
        with torch.set_grad_enabled(track), counting(counter):
            try:
                mean, aux = returned(self._arguments.call(microbatch, self._visits, track), self._has_aux)
            except Exception as error:
                if (said := session.raised(error)) is not error:
                    raise said from error
                raise
        session.all_visited()
        self._keep(call, aux)
        total = None
        if call.segment == crossing.loss:
            total = mean.total
            self._totals[microbatch] = Mean(total.detach(), mean.weight)
        left = session.leaving()
        session.end(call, {flow: [x.detach() for x in tensors] for flow, tensors in left.items()})
        if track:
            own = [(get_gradient_edge(session.token), torch.zeros_like(session.token))]
            if total is not None:
                own.append((get_gradient_edge(total), torch.ones_like(total)))
            # edges, not tensors: what has left needs no memory here
            roots = {flow: list(map(get_gradient_edge, self._smooth(flow, tensors))) for flow, tensors in left.items()}
            taken = {flow: self._smooth(flow, tensors) for flow, tensors in arrived.items()}
            self._passed[call.segment, microbatch] = Passed(taken, roots, own)

    def _keep(self, call: Call, aux: Any) -> None:
        """Keeps what this call has made of `aux`; what every stage makes counts where the loss is made."""
        crossing = self._session.crossing
        nodes, self._spec = optree.tree_flatten(aux, is_leaf=is_reduction)
        for at, ((home, _), node) in enumerate(zip(crossing.aux, nodes, strict=True)):
            here = call.segment == (crossing.loss if home is None else home)
            if here or (home is None and not is_reduction(node)):
                self._nodes[call.microbatch][at] = optree.tree_map(_detached, node)

    def _backward(self, call: Call) -> None:
        session = self._session
        arrived, roots_of, own = self._passed.pop((call.segment, call.microbatch))
        back = session.begin(call)
        roots, seeds = [root for root, _ in own], [seed for _, seed in own]
        for flow, edges in roots_of.items():
            roots += edges
            seeds += back.get(flow, [])
        inputs = [session.leaf_token, *(x for tensors in arrived.values() for x in tensors)]
        with session.backward():
            grads = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
        rest = iter(grads[1:])
        session.end(call, {flow: [next(rest) for _ in tensors] for flow, tensors in arrived.items()})

    def _smooth(self, flow: int, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors that have a gradient."""
        return [
            x for x, piece in zip(tensors, self._session.crossing.pieces(StageMessage(flow)), strict=True) if piece.grad
        ]

    def _results(self) -> Results:
        aux = [optree.tree_unflatten(self._spec, nodes) for nodes in self._nodes]
        return Results(self._totals, aux, [])

    def _begin(self, home: int | None, node: Any) -> Any:
        return neutral(node, self._device) if is_reduction(node) else None


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
