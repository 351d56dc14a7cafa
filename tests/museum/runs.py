"""Bugs of numbers, and of ranks that differ: runs on one to four ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.axes.model import PLAIN, Options
from tests.axes.test_exact import exact
from tests.harness.failing import TX, batch, embed, layer, loss, state
from tests.harness.groups import breakable, breakable_stages, outcome
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, check_exact, compare, looped, plain
from tests.harness.problems import PROBLEMS, Batch, E, Problem, V, masked_loss, param
from tests.museum.edits import changed, find, move
from tests.museum.exhibit import Agreement, Message
from tests.museum.sharded import DEEPSPEED, MEGATRON, TORCH
from yafsdp_fn.schedules import Reduce, verify

Tree = Any


def accumulated(mesh: Any) -> None:
    check_exact(mesh, PROBLEMS["base"], layers=1, schedules=("zero3", "zero2"), microbatches=(3,))


def replicated(mesh: Any) -> None:
    for name in ("shard", "copies"):
        check_exact(made(name), PROBLEMS["base"], layers=1, schedules=("zero3",), microbatches=(1,))


def small(layers: int) -> Tree:
    return {"embed": param(V, E), "out": param(V, E), "factor": param(1)}


def small_loss(params: Tree, data: Batch) -> ya.Mean:
    x = ya.apply(lambda table, tokens: F.embedding(tokens, table), params["embed"], data["tokens"])
    x = ya.apply(lambda factor, x: x * factor.exp(), params["factor"], x)
    mean: ya.Mean = ya.apply(lambda out, x, targets: masked_loss(x @ out.T, targets), params["out"], x, data["targets"])
    return mean


def one_number(mesh: Any) -> None:
    """A unit of one number, shorter than a shard's alignment."""
    check_exact(mesh, Problem(small, small_loss), layers=1, schedules=("zero3",), microbatches=(1, 3))
    params = ya.init(small(1), ya.optim.sgd(0.1), mesh=mesh).params
    assert float(ya.unshard(ya.grad(small_loss)(params, batch_of(mesh.get_rank())))["factor"]) != 0


# ---- on axes inside blocks: loss, gradients and norms, and three steps that clip, as in tests/axes


def experts_apart(mesh: Any) -> None:
    """Of two ranks, or of two that have each expert."""
    exact(mesh, {"expert": 2}, PLAIN, "zero3", 1)


def experts_of_zero(mesh: Any) -> None:
    exact(mesh, {"expert": 2}, PLAIN, "zero2", 1)


def experts_and_tensor(mesh: Any) -> None:
    exact(mesh, {"expert": 2, "tensor": 2}, PLAIN, "recomputed", 1)


def sequences_apart(mesh: Any) -> None:
    exact(mesh, {"context": 2}, Options(zigzag=True), "zero3", 2)


def positions_apart(mesh: Any) -> None:
    """Norms see a part of the positions on each rank of `tensor`."""
    exact(mesh, {"tensor": 2}, Options(sequence_parallel=True), "zero3", 1)


def of_any_length(mesh: Any) -> None:
    """Other lengths on each rank and in each step, by one program."""
    problem = PROBLEMS["base"]
    rank = mesh.get_rank()
    whole = ya.params.without_markers(plain(problem.params(1)))
    params = ya.init(problem.params(1), TX, mesh=mesh).params
    function = ya.value_and_grad(problem.loss, schedule=ya.schedules.zero3())
    for number in range(4):
        batches = [batch_of(k, seed=number, length=2 + (number + 3 * k) % 5) for k in range(mesh.size())]
        value, grads = function(params, batches[rank])
        compare((value, ya.unshard(grads)), looped(problem.loss, whole, batches), 1e-5, f"step {number}")


# ---- ranks that differ


def other_counts(mesh: Any) -> str:
    mesh = breakable()
    rank = mesh.get_local_rank()
    step, now = ya.train_step(loss, TX, microbatches=1 + rank), state(mesh)
    return outcome(lambda: step(now, batch(rank)))


def headless(params: Any, data: Any) -> Tensor:
    x = ya.apply(embed, params["embed"], data["tokens"])
    return ya.scan(layer, x, params["layers"])[0].sum()


def other_parameters(mesh: Any) -> str:
    mesh = breakable()
    rank = mesh.get_local_rank()
    step, now = ya.train_step(headless if rank else loss, TX), state(mesh)
    return outcome(lambda: step(now, batch(rank)))


def other_order(mesh: Any) -> str:
    """Both ranks have a right program; rank 1 reduces two gradients in the other order."""
    rank, now = mesh.get_local_rank(), state(mesh)
    program = ya.train_step(loss, TX, schedule=ya.schedules.zero1()).lower(now, batch(rank))
    if rank:
        program = verify(changed(program, move(find(program, Reduce), find(program, Reduce, nth=1))))
    step = ya.train_step(loss, TX, schedule=program)
    return outcome(lambda: step(now, batch(rank)))


def no_tokens(mesh: Any) -> str:
    """Rank 1 has no tokens for its experts, and returns a new tensor in place of their outputs."""
    rank, now = mesh.get_local_rank(), breakable_stages(1, tensor=2)
    tree = {"w": ya.Param((2, 4), split={"tensor": -2}, init=ya.params.initializers.normal(1.0))}

    def experts(w: Any, x: Tensor) -> Tensor:
        mine = ya.all_to_all(x, "tensor", 0, 0, tiled=True)
        out = mine * w["w"] if rank == 0 else torch.zeros_like(mine)
        done: Tensor = ya.all_to_all(out, "tensor", 0, 0, tiled=True)
        return x + done

    start = ya.init({"first": {"w": ya.Param((4,))}, "experts": tree}, TX, mesh=now)

    def loss(params: Any, x: Tensor) -> Tensor:
        x = ya.apply(lambda w, x: x * w["w"].exp(), params["first"], x)
        return ya.apply(experts, params["experts"], x).square().sum()

    step = ya.train_step(loss, TX)
    return outcome(lambda: step(start, torch.ones(2, 4)))


def other_recomputation(mesh: Any) -> str:
    """Rank 1 recomputes what rank 0 keeps, as a rule that looks at data might have it."""
    rank, now = mesh.get_local_rank(), state(mesh)
    schedule = ya.schedules.zero3(remat="all" if rank else "none")
    step = ya.train_step(loss, TX, schedule=schedule)
    return outcome(lambda: step(now, batch(rank)))


AGREES = [
    Agreement(
        f"{MEGATRON}/issues/6660",
        "Where one rank holds all of a gradient, the sum of earlier microbatches was added to itself in each: "
        "2^N after N.",
        "three microbatches; on one rank, where slots are the shards, bit for bit",
        accumulated,
        (1, 2),
    ),
    Agreement(
        f"{MEGATRON}/pull/3023",
        "The sum of earlier microbatches was divided by the number of ranks in place of the new gradient.",
        "three microbatches; here gradients are of sums, undivided, and divided once by the sum of weights",
        accumulated,
        (2,),
    ),
    Agreement(
        f"{TORCH}/issues/144045",
        "FSDP2 on one GPU: a parameter of one element in a submodule had the gradient 0.",
        "a unit of one number",
        one_number,
        (1, 2),
    ),
    Agreement(
        f"{TORCH}/issues/155903",
        "A factor that divides gradients meant one thing with shards and another one with replicas.",
        "the same step on shards and on replicas; there is no such factor",
        replicated,
        (2,),
    ),
    Agreement(
        f"{MEGATRON}/pull/5956",
        "Gradients of experts, which see tokens of several ranks, were averaged over too few: too large by the "
        "number of ranks that share experts.",
        "experts over an axis `expert`, whose tokens come from all of its ranks; a gradient is summed over the axes "
        "that its leaf is not split over, and there is no factor",
        experts_apart,
        (2, 4),
    ),
    Agreement(
        f"{DEEPSPEED}/issues/6545",
        "The same with ZeRO 1 and 2, where it had been mended for another optimizer.",
        "`zero2` with experts apart: what schedules see of it is over how many ranks a unit is cut",
        experts_of_zero,
        (2,),
    ),
    Agreement(
        "https://github.com/huggingface/transformers/pull/48205",
        "Experts apart: each rank had the part of the router's gradient that its own experts give, and nobody summed "
        "them.",
        "as above, with a router that all ranks share; each collective has its adjoint, placed by autograd",
        experts_apart,
        (2,),
    ),
    Agreement(
        f"{MEGATRON}/issues/906",
        "Context parallelism: the loss was multiplied by the number of ranks that share a sequence, for a division "
        "that was no longer there.",
        "sequences over `context`, uneven weights of tokens; the quotient of two sums over all ranks",
        sequences_apart,
        (2,),
    ),
    Agreement(
        f"{MEGATRON}/issues/1446",
        "Tensor and sequence parallelism: the gradient of a norm's gain was of each rank's own positions.",
        "gains that are not split, of norms that see a part of the positions; they are sharded over these ranks, too",
        positions_apart,
        (2,),
    ),
    Agreement(
        f"{MEGATRON}/pull/5916",
        "Experts apart, and split over tensor ranks: the norm of the gradient left out some of them, so that less was "
        "clipped.",
        "experts over `expert` and `tensor`, clipped steps; a norm counts each element once",
        experts_and_tensor,
        (4,),
    ),
    Agreement(
        "https://github.com/verl-project/verl/issues/5625",
        "Microbatches were weighted by their rows, and each was a mean over its own tokens: not the gradient of "
        "the batch.",
        "masks that leave other numbers of tokens in each of three microbatches; a loss returns `ya.Mean(total, "
        "weight)`",
        accumulated,
        (1, 2),
    ),
    Agreement(
        f"{MEGATRON}/issues/7452",
        "Of its list, the loss of several tokens ahead: divided by the tokens of this rank, where ranks have "
        "other numbers.",
        "masks that leave other numbers of tokens on each rank",
        accumulated,
        (2,),
    ),
    Agreement(
        f"{DEEPSPEED}/issues/7611",
        "DeepCompile profiles over ranks when a length is new: with other lengths on each rank, ranks waited for "
        "each other.",
        "other lengths on each rank and in each step; a program has no lengths in it",
        of_any_length,
        (2,),
    ),
]

TOLD = [
    Message(
        "https://github.com/verl-project/verl/issues/6176",
        "Each rank made as many microbatches as its own tokens wanted; the rank with fewer left, the others hung.",
        "a step of one microbatch on rank 0, of two on rank 1",
        other_counts,
        ("RanksDisagree: ranks disagree on the program",),
    ),
    Message(
        f"{TORCH}/issues/158719",
        "Ranks used other parameters: collectives of other sizes met, or none.",
        "rank 1's loss does not use the head",
        other_parameters,
        ("RanksDisagree: ranks disagree on what to communicate", "rank 0: forward of head (visit "),
    ),
    Message(
        f"{MEGATRON}/pull/2218",
        "Gradients were in a `set`, so that ranks reduced them in other orders, and hung where sizes differed.",
        "programs that are right, but for two reductions that rank 1 has in the other order",
        other_order,
        ("RanksDisagree: ranks disagree on the program",),
    ),
    Message(
        "https://github.com/PaddlePaddle/PaddleFormers/pull/3010",
        "A rank that got no tokens for its experts returned a new tensor: no gradient went back through it, its "
        "backward left out an exchange, and the others waited.",
        "two ranks that exchange tokens; rank 1 returns zeros in place of what its experts give",
        no_tokens,
        (
            "RanksDisagree: ranks disagree on what blocks and losses communicate",
            "all_to_all over 'tensor' of torch.float32, backward of experts",
            "rank 1: the end of backward of experts",
        ),
    ),
    Message(
        f"{TORCH}/issues/146707",
        "What is recomputed was decided on each rank, by data: with tensor parallelism, backwards had other "
        "collectives.",
        "a schedule that recomputes on rank 1 alone",
        other_recomputation,
        ("RanksDisagree: ranks disagree on the program", "recompute"),
    ),
]
