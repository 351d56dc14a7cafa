"""Batches by rank, and the oracle: the plain loop over the batches of all ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.problems import IGNORED, SCHEDULES, TX, Batch, Problem, V
from yafsdp_fn.nn import linear
from yafsdp_fn.schedules import Trace
from yafsdp_fn.util.randomness import VisitCounter, counting

Tree = Any

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""What two orders of the same sums may be apart, relative to the norm of a leaf: some hundred roundings. Mistakes show
in float64; kernels of another CPU do not."""


def batch_of(rank: int, *, seed: int = 0, rows: int = 3, length: int = 5) -> Batch:
    """Tokens and targets [rows, length] of one rank; about a third of the targets is masked, unevenly."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(0, V, (rows, length), generator=generator)
    targets = torch.randint(0, V, (rows, length), generator=generator)
    masked = torch.rand(rows, length, generator=generator) < 0.2 + 0.1 * rank
    return {"tokens": tokens, "targets": targets.masked_fill(masked, IGNORED)}


def joined(batches: list[Batch]) -> Batch:
    """The batches of several ranks as one."""
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def global_batch(ranks: int, *, seed: int = 0, rows: int = 3) -> Batch:
    return joined([batch_of(rank, seed=seed, rows=rows) for rank in range(ranks)])


def own_and_all(mesh: Any, *, seed: int = 0, rows: int = 3) -> tuple[Batch, Batch]:
    """The batch of this rank, and that of all ranks as one."""
    return batch_of(mesh.get_rank(), seed=seed, rows=rows), global_batch(mesh.size(), seed=seed, rows=rows)


# ---- the oracle, and comparisons with it


def plain(abstract: Tree, seed: int = 0) -> Tree:
    """Whole tensors with the bits of `ya.init(abstract, seed=seed)`; markers stay, since they say what is frozen."""
    return ya.PlainState.create(abstract, TX, seed=seed).params


def looped(
    loss: Callable[[Tree, Batch], ya.Mean],
    params: Tree,
    batches: list[Batch],
    *,
    parts: int = 1,
    step: int = 0,
) -> tuple[Tensor, Tree]:
    """Value and gradients by plain autograd, one rank and one microbatch after the other, summed in fp32.

    Blocks draw the random numbers that they draw on that rank in that step of a state with seed 0. It knows nothing
    of frozen leaves.
    """
    leaves, spec = optree.tree_flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    value = torch.zeros((), dtype=torch.float64)
    weights = 0.0
    for rank, batch in enumerate(batches):
        rows = len(next(iter(batch.values()))) // parts
        for part in range(parts):
            own = {key: leaf[part * rows : (part + 1) * rows] for key, leaf in batch.items()}
            with counting(VisitCounter(0, step, part, rank)):
                total, weight = loss(optree.tree_unflatten(spec, leaves), own)
            value = value + total.detach()
            weights = weights + float(weight)
            for at, grad in enumerate(torch.autograd.grad(total, leaves, allow_unused=True)):
                if grad is not None:
                    sums[at] += grad
    return (value / weights).float(), optree.tree_unflatten(spec, [grad / weights for grad in sums])


def relative(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    size = expected.double().norm()
    off = (got.double() - expected.double()).norm()
    if not off.isfinite():
        return float("inf")
    return float(off / size) if size else float("inf") * bool(off) if off else 0.0


def whole(tree: Tree) -> Tree:
    """Whole tensors of a state or any tree, without markers; every rank calls this."""
    return ya.params.without_markers(ya.unshard(tree))


def compare(got: Tree, expected: Tree, tolerance: float, what: str) -> None:
    """Every leaf, whole and without markers, within `tolerance`, relative to the leaf; 0 asks for equal bits. Names the
    leaves that are not."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(whole(expected))
    found, found_spec = optree.tree_flatten(whole(got))
    assert found_spec == spec, f"{what}: structure {found_spec}, expected {spec}"
    wrong = []
    for accessor, a, b in zip(accessors, found, leaves, strict=True):
        off = relative(a, b)
        if off > tolerance or (tolerance == 0 and not torch.equal(a, b)):
            wrong.append(f"{accessor.codify('')} is off by {off:.2e}")
    assert not wrong, f"{what}: beyond {tolerance:g}: {', '.join(wrong)}"


Stepping = tuple[Callable[[Any, Any], Any], Any]
"""A step, and the state that it begins with."""


def check_steps(
    sharded: Stepping, alone: Stepping, batches: Iterable[tuple[Tree, Tree]], tolerance: float, what: str = ""
) -> tuple[Any, Any]:
    """A sharded state goes the way of a plain one: metrics and parameters are alike after a step on each of `batches`,
    which are of this rank, and of all. Returns the states."""
    (step, state), (plain_step, oracle) = sharded, alone
    for number, (mine, everything) in enumerate(batches):
        state, got = step(state, mine)
        oracle, expected = plain_step(oracle, everything)
        compare(got, expected, tolerance, f"{what}, step {number}: metrics")
        compare(state, oracle.params, tolerance, f"{what}, step {number}: parameters")
    return state, oracle


@contextlib.contextmanager
def by_autograd() -> Iterator[None]:
    """In this process no weight is large, as by default none of these small ones is: their gradients are autograd's.
    Else all are, here: what `ya.linear` gets goes into slots."""
    before = linear.LARGE
    linear.LARGE = sys.maxsize
    try:
        yield
    finally:
        linear.LARGE = before


def check_exact(
    mesh: Any,
    problem: Problem,
    *,
    layers: int,
    schedules: Mapping[str, ya.schedules.Schedule] | tuple[str, ...],
    microbatches: Sequence[int] = (1, 3),
    dtype: torch.dtype = torch.float64,
    bits: bool = True,
) -> None:
    """One rank's part: value and gradients against the plain loop, by the program of each schedule, in a first call
    and in one more.

    schedules: by name, or their names in SCHEDULES

    At one rank they have equal bits; at more, those of TOLERANCE, relative to each leaf. `bits=False`: nowhere equal
    bits, since a visit adds up the gradients of its argument before those of other uses join, and autograd of the plain
    loop in the order of use. A product that is added to a slot has not the bits of one that is made first: one rank
    checks both ways, equal bits where autograd makes all gradients.
    """
    how: dict[str, Any] = {"layers": layers, "schedules": schedules, "microbatches": microbatches, "dtype": dtype}
    if mesh.size() == 1 and bits:
        with by_autograd():
            _check_exact(mesh, problem, **how, bits=bits, slots=False)
    _check_exact(mesh, problem, **how, bits=bits, slots=True)


def _check_exact(
    mesh: Any,
    problem: Problem,
    *,
    layers: int,
    schedules: Mapping[str, ya.schedules.Schedule] | tuple[str, ...],
    microbatches: Sequence[int],
    dtype: torch.dtype,
    bits: bool,
    slots: bool,
) -> None:
    ranks = mesh.size()
    batch = batch_of(mesh.get_rank())
    state = ya.init(problem.params(layers), TX, mesh=mesh, precision=ya.Precision(dtype))
    whole = optree.tree_map(lambda leaf: leaf.to(dtype), plain(problem.params(layers)))
    for parts in microbatches:
        # at one rank the plain loop has the same microbatches, so that it adds in the same order
        oracle = ya.value_and_grad(problem.loss, microbatches=parts if ranks == 1 else 1)
        expected = oracle(whole, global_batch(ranks))
        # a unit that is visited twice adds up visits of all microbatches in one order, autograd in another
        sums = parts > 1, problem.revisits
        equal = bits and ranks == 1 and not (any(sums) if slots else all(sums))
        tolerance = 0.0 if equal else TOLERANCE[dtype]
        traces: list[Trace] = []
        for schedule in schedules:
            build = SCHEDULES[schedule] if isinstance(schedules, tuple) else schedules[schedule]
            program = build(traces[0]) if traces else noting(build, traces)
            function = ya.value_and_grad(problem.loss, schedule=program, microbatches=parts)
            for call in ("program",) if traces else ("first call", "program"):
                value, grads = function(state.params, batch)
                what = f"{problem.loss.__name__}, {layers} layers, {parts} microbatches, {schedule}, {call}"
                compare((value, ya.unshard(grads)), expected, tolerance, what)


def noting(schedule: ya.schedules.Schedule, traces: list[Trace]) -> ya.schedules.Schedule:
    """`schedule`, which keeps the trace that it is given."""

    def noted(trace: Trace) -> ya.Program:
        traces.append(trace)
        return schedule(trace)

    return noted
