"""Bugs of numbers, and of ranks that differ: runs on one or two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import TX, batch, embed, layer, loss, state
from tests.harness.groups import breakable, outcome
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


def experts(layers: int) -> Tree:
    return {"embed": param(V, E), "out": param(V, E), "first": param(E, E), "second": param(E, E)}


def routed_loss(params: Tree, data: Batch) -> ya.Mean:
    """Two experts, each of which sees the tokens that are routed to it: unevenly many on each rank."""
    x = ya.apply(lambda table, tokens: F.embedding(tokens, table), params["embed"], data["tokens"])
    for number, expert in enumerate((params["first"], params["second"])):
        mine = (data["tokens"] % 3 == number)[..., None]
        x = x + ya.apply(lambda w, x, mine: mine * torch.tanh(x @ w), expert, x, mine)
    mean: ya.Mean = ya.apply(lambda out, x, targets: masked_loss(x @ out.T, targets), params["out"], x, data["targets"])
    return mean


def routed(mesh: Any) -> None:
    check_exact(mesh, Problem(experts, routed_loss), layers=1, schedules=("zero3",), microbatches=(1, 3))


def of_any_length(mesh: Any) -> None:
    """Other lengths on each rank and in each step, by one program."""
    problem, rank = PROBLEMS["base"], mesh.get_rank()
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
    return ya.scan(layer, x, params["layers"])[0].sum()  # type: ignore[no-any-return]


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
        "number of "
        "ranks that share experts.",
        "two experts that unevenly many tokens of each rank visit; there are no experts of some ranks alone",
        routed,
        (2,),
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
        ("RanksDisagree: ranks disagree on what to communicate", "rank 1: gather of"),
    ),
    Message(
        f"{TORCH}/issues/158719",
        "Ranks used other parameters: collectives of other sizes met, or none.",
        "rank 1's loss does not use the head",
        other_parameters,
        ("RanksDisagree: ranks disagree on what to communicate", "rank 0: gather of head (step 0)"),
    ),
    Message(
        f"{MEGATRON}/pull/2218",
        "Gradients were in a `set`, so that ranks reduced them in other orders, and hung where sizes differed.",
        "programs that are right, but for two reductions that rank 1 has in the other order",
        other_order,
        ("RanksDisagree: ranks disagree on the program",),
    ),
]
