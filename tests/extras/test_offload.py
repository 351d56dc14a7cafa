"""ya.schedules.remat.offload: carries wait on the host; no bit changes, the device lets go of them, the host allocates
once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import yafsdp_fn as ya
from tests.harness import failing
from tests.harness.gpu import on_gpu
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import (
    PROBLEMS,
    TX,
    Batch,
    E,
    Head,
    Layer,
    Params,
    Problem,
    V,
    base_loss,
    base_params,
    block,
    embed,
    head,
    layer,
    param,
    with_ends,
)
from tests.steps.test_delays import delayed, without_waits
from tests.steps.test_exceptions import FORWARD, RECOMPUTED, later_steps
from tests.steps.test_layer_major import layer_major
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.schedules import Backward, Fetch, Offload, Op, Program, Trace

zero2 = ya.schedules.zero2
zero3 = ya.schedules.zero3
remat = ya.schedules.remat
ROWS = 3


def scanned(body: Callable[..., Any], begin: Callable[[Tensor], Any], end: Callable[[Any], Tensor]) -> Any:
    """`base_loss` with another carry: `begin(x)`, of which `end` gives x back."""

    return with_ends(lambda params, x: end(ya.scan(body, begin(x), params.layers)[0]))


def several(carry: tuple[Tensor, Tensor, Tensor], w: Layer) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """A mask that every layer hands on, and a count that is an integer."""
    x, mask, count = carry
    return (block(x * mask, w)[0] + 0.01 * count, mask, count + 1), None


def turned(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    """The carry is not contiguous."""
    assert not x.is_contiguous()
    return block(x, w)[0].transpose(0, 1).contiguous().transpose(0, 1), None


def part(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    """The carry is a view of a larger tensor."""
    new = block(x, w)[0]
    return torch.cat([new, new], -1)[..., :E], None


CARRIES = {
    "several": scanned(several, lambda x: (x, torch.rand(5, 1), torch.zeros(5, 1, dtype=torch.int64)), lambda c: c[0]),
    "turned": scanned(turned, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x),
    "part": scanned(part, lambda x: x, lambda x: x),
    "chunked": layer_major(block),
}
CASES: dict[str, Problem] = {
    **{
        name: PROBLEMS[name]
        for name in ("base", "tied", "stacks", "frozen", "pinned", "rich", "dropout", "many", "part")
    },
    **{f"carry {name}": Problem(base_params, loss) for name, loss in CARRIES.items()},
}
POLICIES: dict[str, tuple[remat.Offloading, remat.Remat]] = {  # and the same recomputation without the host
    "all": (remat.offload(), remat.all),
    "one slot": (remat.offload(ahead=0), remat.all),
    "some": (
        remat.offload(remat.every(2), recompute=remat.first(2), ahead=0),
        lambda t: remat.every(2)(t) | remat.first(2)(t),
    ),
}


# ---- bits


def train(mesh: Any, problem: Problem, schedule: Any, parts: int, steps: int = 3, rows: Sequence[int] = ()) -> Any:
    """Metrics of each step, an evaluation after it, and the parameters. rows: of each step's batch"""
    torch.manual_seed(7)
    rank = mesh.get_local_rank()
    out = []
    state = ya.init(problem.params(4), TX, mesh=mesh)
    step = ya.train_step(problem.loss, TX, schedule=schedule, microbatches=parts)
    evaluate = ya.eval_step(problem.loss, schedule=schedule)
    for number in range(steps):
        usual = 8 if problem.loss is CARRIES["chunked"] else ROWS
        batch = batch_of(rank, seed=number, rows=rows[number] if rows else usual)
        state, metrics = step(state, batch)
        out += [metrics["loss"], metrics["grad_norm"], evaluate(state, batch)["loss"]]
    program = step.program(state)
    copies = sum(isinstance(op, Offload) for op in program.ops)
    assert copies == sum(isinstance(op, Fetch) for op in program.ops) or schedule is elsewhere
    return copies, (out, ya.unshard(state.params))


def same_bits(mesh: Any, policy: str, cases: Sequence[tuple[str, int]]) -> None:
    away, stays = POLICIES[policy]
    for name, parts in cases:
        copies, found = train(mesh, CASES[name], zero3(remat=away), parts)
        none, expected = train(mesh, CASES[name], zero3(remat=stays), parts)
        assert copies > none == 0
        compare(found, expected, 0.0, f"{name}, {policy}, {parts} microbatches")


def test_no_bit_changes(pools: Pools) -> None:
    pools[1].run(same_bits, "all", [(name, 1) for name in CASES])
    pools[1].run(same_bits, "one slot", [("base", 3), ("carry several", 3)])
    pools[1].run(same_bits, "some", [("base", 3), ("many", 1)])


def test_no_bit_changes_on_two_ranks(pools: Pools) -> None:
    pools[2].run(same_bits, "all", [("dropout", 1), ("carry several", 1)])
    pools[2].run(same_bits, "one slot", [("frozen", 3)])
    pools[2].run(same_bits, "some", [("base", 3)])


# ---- hazards


@on_ranks(nightly(1), 2)
def test_late_copies_change_nothing(mesh: Any) -> None:
    """With copies that take long, and with computes that do."""
    _, expected = train(mesh, CASES["base"], zero2(remat=remat.all, update=True), 3)
    for delays in ({"offload": (1.0, 4e-3)}, {"offload": (0.5, 3e-3), "compute": (0.5, 3e-3)}):
        with delayed(delays, seed=mesh.get_local_rank()):
            _, found = train(mesh, CASES["base"], zero2(remat=remat.offload(ahead=1), update=True), 3)
        compare(found, expected, 0.0, f"{delays}")


def elsewhere(trace: Trace) -> Program:
    """Every fetch into a carry slot that nothing has used, and each carry once more to the host and back."""
    usual = zero2(remat=remat.offload())(trace)
    away = {op.visit: 10 + op.visit for op in usual.ops if isinstance(op, Fetch)}
    ops: list[Op] = []
    for op in usual.ops:
        if isinstance(op, Fetch):
            ops += [Fetch(op.visit, 20 + op.visit), Offload(op.visit, 20 + op.visit), Fetch(op.visit, away[op.visit])]
        elif isinstance(op, Backward) and op.visit in away:
            ops.append(op._replace(carry_slot=away[op.visit]))
        else:
            ops.append(op)
    return Program(trace, tuple(ops))


@on_ranks(nightly(1), 2)
def test_other_slots_and_sizes(mesh: Any) -> None:
    """Batches that grow and shrink from step to step; carry slots that a fetch is the first to use; late copies."""
    rows = (3, 3, 9, 6, 12)
    slow = {"offload": (1.0, 3e-3)}
    _, expected = train(mesh, CASES["base"], zero2(remat=remat.all), 3, 5, rows)
    for schedule in (zero2(remat=remat.offload(ahead=0)), elsewhere):
        with delayed(slow, seed=0):
            _, found = train(mesh, CASES["base"], schedule, 3, 5, rows)
        compare(found, expected, 0.0, str(schedule))


@on_ranks(1)
def test_late_copies_would_show_a_missing_wait(mesh: Any) -> None:
    """Where nobody waits for anybody, numbers change."""
    _, expected = train(mesh, CASES["base"], zero3(remat=remat.offload()), 1)
    with without_waits(), delayed({"offload": (1.0, 0.05)}, seed=0):  # longer than a busy machine holds a thread up
        try:
            _, found = train(mesh, CASES["base"], zero3(remat=remat.offload()), 1)
        except RuntimeError as error:  # or not: the copy came between a forward and its backward, and torch saw it
            assert "modified by an inplace operation" in str(error)
            return
        finally:
            communicators(mesh).drain()
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


# ---- memory


class Alive:
    """Counts the carries that are alive when the head runs. E and ROWS are of a size that nothing else has."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []
        self.counts: list[int] = []

    def loss(self, params: Params, batch: Batch) -> ya.Mean:
        def watched(x: Tensor, w: Layer) -> tuple[Tensor, None]:
            if not torch.is_grad_enabled():  # the forward of a visit that recomputes
                self.seen.append(StorageWeakRef(x.untyped_storage()))
            return block(x, w)

        def counting(w: Any, x: Tensor, targets: Tensor) -> ya.Mean:
            self.counts.append(sum(not seen.expired() for seen in self.seen))
            return head(w, x, targets)

        self.seen = []
        x = ya.apply(embed, params.embed, batch["tokens"])
        x, _ = ya.scan(watched, x, params.layers)
        mean: ya.Mean = ya.apply(counting, params.head, x, batch["targets"])
        return mean


def alive(mesh: Any, layers: int, policy: remat.Remat) -> tuple[int, list[int], list[int]]:
    """Carries alive at the head of the last step; bytes of carry slots and of the host after each step."""
    watch = Alive()
    state = ya.init(base_params(layers), TX, mesh=mesh)
    step = ya.train_step(watch.loss, TX, schedule=zero3(remat=policy))
    slots = []
    host = []
    for number in range(4):
        state, _ = step(state, batch_of(0, seed=number))
        gc.collect()
        (free,) = state.memory.idle or [None]
        if free is not None and free.activations is not None:
            slots.append(sum(slot.numel() for slot in free.activations._slots.values()))
            host.append(sum(buffer.data_ptr() for buffer in free.activations._host.values()))
            assert {buffer.numel() for buffer in free.activations._host.values()} <= {512}
    return watch.counts[-1], slots, host


@on_ranks(1, 2)
def test_the_device_lets_go_and_the_host_allocates_once(mesh: Any) -> None:
    layers = 6
    assert alive(mesh, layers, remat.all)[0] == layers
    count, slots, host = alive(mesh, layers, remat.offload())
    assert count == 0
    assert slots == [2 * 512] * 4  # of one carry of 3 x 5 x 7 floats each, aligned
    assert len(set(host)) == 1 and host[0] > 0  # the same buffers in every step


# ---- what goes wrong


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize("error", [failing.Planned, KeyboardInterrupt])
def test_an_exception_in_any_event_leaves_the_state_usable(mesh: Any, error: type[BaseException]) -> None:
    """With copies under way; the next step is exact."""
    with delayed({"offload": (1.0, 4e-3)}, seed=0):
        events = later_steps(failing.state(mesh), error, schedule=zero3(remat=remat.offload()))
    assert events == [*FORWARD, *RECOMPUTED]


# ---- on a GPU

WIDE = 1024
TOKENS = 1 << 15
DEEP = 8


def on_device(policy: remat.Remat) -> tuple[Any, int]:
    """Metrics and parameters of four steps, and the most bytes allocated on the device in the last."""
    abstract = Params(
        ya.frozen(param(V, WIDE)), ya.Stacked(layer(DEEP, f=WIDE, e=WIDE)), Head(param(WIDE), param(V, WIDE))
    )
    state = ya.init(abstract, TX, mesh=ya.mesh(device="cuda"))
    step = ya.train_step(base_loss, TX, schedule=zero3(remat=policy))
    out = []
    for number in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rows = batch_of(0, seed=number, rows=TOKENS // 512, length=512)
        state, metrics = step(state, {key: leaf.cuda() for key, leaf in rows.items()})
        out.append(metrics["loss"])
    return (out, ya.unshard(state.params)), torch.cuda.max_memory_allocated()


@on_gpu
def test_on_a_gpu() -> None:
    """The same bits, and the device holds two carry slots and the embedding's output in place of a carry per layer."""
    expected, again = on_device(remat.all)
    gc.collect()
    found, away = on_device(remat.offload())
    compare(found, expected, 0.0, "on a GPU")
    carry = TOKENS * WIDE * 4
    assert again - away == pytest.approx((DEEP - 1 - 2) * carry, rel=0.05)
