"""Every published schedule on its mesh: the gradients of the plain loop, and the collectives of its program, of which
tests/schedules/test_closed_forms.py has the numbers."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import bits, same
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, check_exact
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, Batch, Params, Problem, base_loss, base_params, layer
from tests.harness.watching import recorded
from yafsdp_fn.communication.communicators import communicators

Mesh = Any
s = ya.schedules

BUILDERS: dict[str, tuple[str, dict[str, ya.schedules.Schedule]]] = {
    "ddp": ("copies", {"ddp": s.ddp(), "ddp-remat": s.ddp(remat="all")}),
    "zero1": ("shard", {"zero1": s.zero1()}),
    "zero2": ("shard", {"zero2": s.zero2()}),
    "zero3": ("shard", {"zero3": s.zero3(), "defer": s.zero3(defer=True), "resident": s.zero3(resident=1, prefetch=2)}),
    "hsdp": (
        "replicate",
        {"hsdp": s.hsdp(), "hsdp-defer": s.hsdp(defer=True, remat="all"), "zero1": s.zero1()},
    ),
    "fsdp2": (
        "shard",
        {
            "fsdp2": s.fsdp2(),
            "every": s.fsdp2(wrap="all", prefetch=2, remat="all"),
            "held": s.fsdp2(reshard_after_forward=False, defer=True),
            "defer": s.fsdp2(defer=True),
        },
    ),
    "hpz": ("nodes", {"hpz-2": s.hpz(2), "hpz-all": s.hpz(9, remat=ya.schedules.remat.every(2)), "zero2": s.zero2()}),
}
REPLICAS = ("ddp", "hsdp", "hpz")


def unvisited_params(layers: int) -> Params:
    """Nothing visits `more`."""
    return base_params(layers)._replace(more=ya.Stacked(layer(2)))


def regularised_loss(params: Params, batch: Batch) -> ya.Mean:
    """Reads leaves beside its visits: every rank's part of the total has the whole regulariser, by its weight."""
    total, weight = base_loss(params, batch)
    return ya.Mean(total + 0.01 * weight.double() * ya.vdot(params.head, params.head), weight)


KINDS = ("stacks", "tied", "frozen", "pairs", "pinned")
BESIDE = Problem(unvisited_params, regularised_loss, revisits=True)


# ---- gradients


def gradients(mesh: Mesh, builder: str, name: str) -> None:
    kind, schedules = BUILDERS[builder]
    if name == "base":
        parts = (1, 3) if mesh.size() < 4 else (3,)
        check_exact(made(kind), PROBLEMS[name], layers=4, schedules=schedules, microbatches=parts)
    else:
        first = dict(list(schedules.items())[:1])
        check_exact(made(kind), PROBLEMS[name], layers=3, schedules=first, microbatches=(3,))


@pytest.mark.sampled
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("builder", BUILDERS)
def test_gradients_are_those_of_the_plain_loop(mesh: Any, builder: str) -> None:
    """By every schedule of a builder, with one and three microbatches."""
    gradients(mesh, builder, "base")


@pytest.mark.sampled
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("name", KINDS)
def test_so_are_those_of_units_of_all_kinds(mesh: Any, builder: str, name: str) -> None:
    """Two stacks of different layers, tied, frozen and pinned units."""
    gradients(mesh, builder, name)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "builder"),
    [
        (2, "zero3"),
        (4, "hsdp"),
        *((nightly(2, each)) for each in ("zero1", "zero2", "fsdp2")),
        nightly(4, "ddp"),
        nightly(4, "hpz"),
    ],
)
def test_so_are_those_of_what_no_visit_reads(_: Any, builder: str) -> None:
    """Leaves that the loss reads beside its visits, and those that it does not read at all."""
    kind, schedules = BUILDERS[builder]
    for problem in (BESIDE, Problem(unvisited_params, base_loss)):
        check_exact(made(kind), problem, layers=3, schedules=schedules, microbatches=(3,))


# ---- collectives


@contextlib.contextmanager
def sent(mesh: Mesh) -> Iterator[collections.Counter[str]]:
    """Counts the bytes that this rank sends, by kind of collective, as they really happen."""
    comms, found = communicators(mesh), collections.Counter[str]()
    summed = dist.all_reduce
    replicas = comms.replicate_group.process_group if comms.replicas > 1 else None

    def all_reduce(values: Tensor, *op: Any, group: Any) -> None:
        if group is replicas:
            whole = 2 * values.numel() * values.element_size()
            found["all-reduce"] += whole * (group.size() - 1) // group.size()
        summed(values, *op, group=group)

    with pytest.MonkeyPatch.context() as patch, recorded() as calls:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield found
    for call in calls:
        in_node = call.kind == "gather" and call.group is not comms.gather_group
        found["gather in node" if in_node else call.kind] += call.sent()


TX = ya.optim.adamw(1e-3)


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("world", "builder"),
    [
        *((world, each) for world in (1, 2) for each in BUILDERS),
        *((4, each) for each in REPLICAS),
    ],
)
def test_collectives_are_those_of_the_program(_: Mesh, builder: str) -> None:
    """In the second step under each schedule of `builder`."""
    kind, schedules = BUILDERS[builder]
    mesh = made(kind)
    problem = PROBLEMS["base"]
    batch = batch_of(mesh.get_rank())
    for name, schedule in schedules.items():
        state = ya.init(problem.params(5), TX, mesh=mesh)
        step = ya.train_step(problem.loss, TX, schedule=schedule, microbatches=3)
        state, _ = step(state, batch)
        with sent(mesh) as found:
            state, _ = step(state, batch)
        told = {key: nbytes for key, nbytes in step.program(state).wire_bytes().items() if nbytes}
        if communicators(mesh).nodes == 1 and "gather in node" in told:  # all ranks are of one node, and of one group
            told["gather"] += told.pop("gather in node")
        assert found == told, name


# ---- the optimizer in the program


def trained(mesh: Mesh, problem: Problem, tx: Any, schedule: Any, batches: list[Batch], skip: bool) -> Any:
    """The state after a step on each of `batches`, and the metrics of the last."""
    state = ya.init(problem.params(3), tx, mesh=mesh)
    metrics = {}
    step = ya.train_step(problem.loss, tx, schedule=schedule, microbatches=3, skip_nonfinite=skip)
    for batch in batches:
        state, metrics = step(state, batch)
    program = step.program(state)
    return state, metrics, program


UPDATED: dict[str, Any] = {
    "ddp": s.ddp,
    "zero1": s.zero1,
    "zero2": s.zero2,
    "zero3": s.zero3,
    "hsdp": s.hsdp,
    "hpz": functools.partial(s.hpz, 2),
}


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("world", "builder"), [*((2, each) for each in UPDATED), *((4, each) for each in REPLICAS[1:])]
)
@pytest.mark.parametrize("clips", [True, False])
def test_updates_in_the_program_have_the_bits_of_the_separate_step(mesh: Any, builder: str, clips: bool) -> None:
    """Where the step clips and skips, and where it does neither."""
    mesh = made(BUILDERS[builder][0])
    factory = UPDATED[builder]
    clip = [ya.optim.clip_by_global_norm(0.1)] if clips else []
    tx = ya.optim.chain(*clip, ya.optim.adamw(1e-2, weight_decay=0.1))
    batches = [batch_of(mesh.get_rank(), seed=seed) for seed in range(3)]
    for problem in (PROBLEMS["frozen" if mesh.size() == 2 else "base"], BESIDE):
        apart, told, _ = trained(mesh, problem, tx, factory(), batches, clips)
        state, metrics, program = trained(mesh, problem, tx, factory(update=True), batches, clips)
        assert program.has_updates
        assert same(bits(state), bits(apart))
        assert state.step == apart.step == 3
        assert torch.equal(metrics["loss"], told["loss"])
        torch.testing.assert_close(metrics["grad_norm"], told["grad_norm"])


# ---- where a builder does not make sense


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "call", "advice"),
    [
        ("shard", ("ddp",), "replicate=-1, shard=1"),
        ("shard", ("hsdp",), "replicate=2, shard=-1"),
        ("shard", ("hpz", 2), "local=8"),
        ("replicate", ("ddp",), "zero1"),
        ("nodes", ("hsdp",), "zero3"),
    ],
)
def test_a_builder_says_which_mesh_it_needs(_: Mesh, kind: str, call: Any, advice: str) -> None:
    """In the first step and in `lower`; the state goes on."""
    factory, *args = call
    mesh = made(kind)
    problem = PROBLEMS["base"]
    state = ya.init(problem.params(2), TX, mesh=mesh)
    batch = batch_of(mesh.get_rank())
    step = ya.train_step(problem.loss, TX, schedule=getattr(s, factory)(*args))
    with pytest.raises(ValueError, match=factory) as lowered:
        step.lower(state, batch)
    with pytest.raises(ValueError, match=factory) as first:
        step(state, batch)
    assert advice in str(first.value) == str(lowered.value)
    ya.train_step(problem.loss, TX)(state, batch)
