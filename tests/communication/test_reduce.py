"""Reductions over ranks: what is lost on the wire and what in the sum, how many bytes travel, on which meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.harness.gpu import on_gpu as needs_gpu
from tests.harness.groups import exchanging
from tests.harness.meshes import MESHES, made
from tests.harness.pool import Pool, on_ranks
from yafsdp_fn.communication import flat, micro_shards, sums
from yafsdp_fn.communication.communicators import Communicators, communicators
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.communication.micro_shards import Scratch, local_sum
from yafsdp_fn.communication.ranks import receive_numel, staging_numel
from yafsdp_fn.communication.sums import add_rows
from yafsdp_fn.util import on_gpu
from yafsdp_fn.util.on_gpu import vector_kernels

BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- the local sum: eight ranks in one process

RANKS, N = 8, 100_003  # more than one chunk, and no multiple of it


def summed(rows: Tensor, dtype: torch.dtype | None, out: torch.dtype) -> Tensor:
    total = torch.empty(rows.shape[1], dtype=out)
    local_sum(total, rows, Scratch(CPU), dtype=dtype)
    return total


def error(got: Tensor, exact: Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((got.double() - exact).norm() / exact.norm())


def test_rows_are_added_in_rank_order() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert summed(rows, F32, F32).item() == 1.0  # ((1e8 + 1) - 1e8) + 1
    assert summed(rows[[0, 2, 1, 3]], F32, F32).item() == 2.0
    assert summed(rows, F64, F32).item() == 2.0


@pytest.mark.parametrize("out", [BF16, F32, F64])
@pytest.mark.parametrize("wire", [BF16, F32])
@pytest.mark.parametrize(("ranks", "dtype"), [(1, None), (1, F32), (3, F32), (3, F64)])
@pytest.mark.parametrize("add", [False, True])
def test_the_sum_is_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
    out: torch.dtype,
    wire: torch.dtype,
    dtype: torch.dtype | None,
    ranks: int,
    add: bool,
) -> None:
    monkeypatch.setitem(micro_shards.CHUNK, "cpu", 7)
    rows = drawn(ranks, 24, dtype=wire)
    before = drawn(24, dtype=out, seed=1)
    total = rows.double().sum(0) + (before.double() if add else 0)
    got = before.clone()
    local_sum(got, rows, Scratch(CPU), add=add, dtype=dtype)
    tolerance = torch.finfo(BF16 if out == BF16 else F32).eps
    assert got.dtype == out
    torch.testing.assert_close(got.double(), total, rtol=tolerance, atol=4 * torch.finfo(F32).eps)


def test_a_float64_shard_is_not_rounded_to_the_dtype_of_the_sum() -> None:
    shard = torch.full((3,), 1 + 2.0**-40, dtype=F64)
    local_sum(shard, torch.ones(2, 3, dtype=BF16), Scratch(CPU), add=True, dtype=F32)
    assert shard.tolist() == [3 + 2.0**-40] * 3


@needs_gpu
@pytest.mark.parametrize("out", [BF16, F32, F64])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_gpu_sums_to_the_same_bits(out: torch.dtype, add: bool, ordered: bool) -> None:
    rows = drawn(RANKS, N, dtype=BF16)
    shard = drawn(N, dtype=out, seed=1)
    got = shard.cuda()
    assert vector_kernels(got) is not None, "no triton"
    for of, added, scratch in ((got, rows.cuda(), Scratch(got.device)), (shard, rows, Scratch(CPU))):
        if ordered:
            add_rows(of, added, scratch, add=add)
        else:
            local_sum(of, added, scratch, add=add, dtype=F32)
    assert torch.equal(got.cpu(), shard)


@needs_gpu
@pytest.mark.parametrize("add", [False, True])
def test_a_gpu_without_triton_sums_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch, add: bool) -> None:
    monkeypatch.setattr(on_gpu, "HAS_TRITON", False)
    monkeypatch.setitem(micro_shards.CHUNK, "cuda", 1 << 14)
    rows = drawn(RANKS, N, dtype=BF16)
    shard = drawn(N, seed=1)
    wanted = rows.double().sum(0) + (shard.double() if add else 0)
    local_sum(got := shard.cuda(), rows.cuda(), Scratch(torch.device("cuda")), add=add, dtype=F32)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-6, atol=1e-5)


def test_local_sums_allocate_nothing_after_the_first() -> None:
    from benchmarks import counting

    shard, rows, scratch = torch.zeros(N), drawn(RANKS, N, dtype=BF16), Scratch(CPU)
    local_sum(shard, rows, scratch, add=True, dtype=F32)
    with counting.watch_threads() as mode:
        sizes = counting.step_allocations(lambda: local_sum(shard, rows, scratch, add=True, dtype=F32), CPU, mode)
    assert not [size for size in sizes if size >= 1024], sizes


# ---- four ranks

Sent = list[tuple[str, int, int]]
"""`(collective, ranks, bytes of the whole message)`"""


class Case(NamedTuple):
    comms: Communicators
    full: list[Tensor]  # per rank of the world [R * n], in the wire's dtype
    n: int

    @property
    def group(self) -> range:
        """World ranks of this rank's shard group."""
        first = self.comms.replica * self.comms.ranks
        return range(first, first + self.comms.ranks)

    def mine(self, full: Tensor) -> Tensor:
        return full[self.comms.rank * self.n : (self.comms.rank + 1) * self.n]


def case(mesh: str, wire: torch.dtype, n: int = 16, *, exact: bool = True) -> Case:
    """Integers below 64, so that every sum is exact in bf16 as well, or else normal numbers."""
    comms = communicators(made(mesh))
    full = [drawn(comms.ranks * n, seed=rank) for rank in range(4)]
    return Case(comms, [(f * 8).round().to(wire) if exact else f.to(wire) for f in full], n)


@contextlib.contextmanager
def recorded() -> Iterator[Sent]:
    calls: Sent = []

    def watched(owner: Any, name: str, ranks: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> None:
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]
            size = ranks(*args, **options).size()
            calls.append((name.removesuffix("s"), size, max(t.nbytes for t in tensors)))
            real(*args, **options)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gathers", "reduce_scatters", "all_to_all"):
            watched(GlooGroup, name, lambda group, *_: group.process_group)
        watched(torch.distributed, "all_reduce", lambda *_, group: group)
        yield calls


def reduced(
    c: Case, dtype: torch.dtype, accumulate: torch.dtype | None, before: Tensor | None = None
) -> tuple[Tensor, Sent, Sent]:
    """The gradient shard after a reduction and the sum over replicas, and what was sent for each."""
    shard = torch.full((c.n,), torch.nan, dtype=dtype) if before is None else before.clone()
    full = c.full[c.comms.world_rank].clone()
    receive = full.new_full((receive_numel(c.comms, c.n, accumulate),), torch.nan).view(torch.uint8)
    with recorded() as sent:
        flat.reduce_into(c.comms, [shard], [full], [before is not None], [accumulate], receive=receive)
    assert torch.equal(full, c.full[c.comms.world_rank]), "the gradient slot was written to"
    staging = full.new_full((staging_numel(c.comms, c.n, dtype, full.dtype, accumulate),), torch.nan).view(torch.uint8)
    with recorded() as sent_between:
        sums.all_reduce_replicas(c.comms, shard, staging, wire=full.dtype, accumulate=accumulate)
    return shard, sent, sent_between


@on_ranks(4)
@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_sums_over_shards_and_replicas_on_every_mesh(_: Any, name: str, exchange: bool) -> None:
    with exchanging(exchange):
        for wire, dtype, accumulate in (
            (F32, F32, None),
            (BF16, F32, None),
            (F32, BF16, None),
            (BF16, F32, F32),
            (BF16, BF16, F32),
            (F32, F32, F64),
        ):
            c = case(name, wire)
            of_group = c.mine(torch.stack([c.full[r].double() for r in c.group]).sum(0))
            of_all = c.mine(torch.stack([f.double() for f in c.full]).sum(0))
            assert float(of_all.abs().max()) < 256
            assert torch.equal(reduced(c, dtype, accumulate)[0].double(), of_all), (name, wire, dtype, accumulate)
            # onto what is there: the same on every replica counts as often
            before = torch.arange(c.n).to(dtype)
            got = reduced(c, dtype, accumulate, before)[0].double()
            assert torch.equal(got, of_all + c.comms.replicas * before.double()), (name, wire, dtype, accumulate)
            assert c.comms.replicas == 1 or not torch.equal(of_group, of_all)


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "accumulate", "sent", "between", "receive", "staging"),
    [
        ("shard", None, [("reduce_scatter", 4, 128)], [], 16, 0),
        ("shard", F32, [("all_to_all", 4, 128)], [], 64, 0),
        ("replicate", None, [("reduce_scatter", 2, 64)], [("all_reduce", 2, 32)], 16, 16),
        ("replicate", F32, [("all_to_all", 2, 64)], [("all_to_all", 2, 32), ("all_gather", 2, 64)], 32, 64),
        ("copies", None, [], [("all_reduce", 4, 32)], 0, 16),
        ("copies", F32, [], [("all_to_all", 4, 64), ("all_gather", 4, 128)], 0, 128),
        ("nodes", None, [("reduce_scatter", 4, 128)], [], 16, 0),
        ("nodes", F32, [("all_to_all", 2, 64), ("all_to_all", 2, 64), ("all_to_all", 2, 64)], [], 96, 0),
        ("replicate-nodes", F32, [("all_to_all", 2, 64)], [("all_to_all", 2, 32), ("all_gather", 2, 64)], 32, 64),
    ],
)
def test_what_is_sent_for_a_bf16_gradient_of_16_elements_per_rank(
    _: Any, name: str, accumulate: torch.dtype | None, sent: Sent, between: Sent, receive: int, staging: int
) -> None:
    c = case(name, BF16)
    assert reduced(c, F32, accumulate)[1:] == (sent, between)
    assert receive_numel(c.comms, c.n, accumulate) == receive
    assert staging_numel(c.comms, c.n, F32, BF16, accumulate) == staging
    if accumulate is None:
        assert staging_numel(c.comms, c.n, BF16, BF16, None) == 0, "summed where they are"


def wide_sums(mesh: Any, name: str) -> tuple[Tensor, float, float]:
    """`(shard, rounding of the wire, error of the sum)` for gradients that bf16 must round, 40,000 per shard."""
    c = case(name, BF16, 40_000, exact=False)
    of_wire = c.mine(torch.stack([f.double() for f in c.full]).sum(0))
    exact = c.mine(torch.stack([drawn(c.comms.ranks * c.n, seed=rank).double() for rank in range(4)]).sum(0))
    first, again = (reduced(c, F32, F32)[0] for _ in range(2))
    assert torch.equal(first, again)
    if c.comms.nodes == c.comms.replicas == 1:  # in rank order, to the bit
        assert torch.equal(first, summed(torch.stack([c.mine(f) for f in c.full]), F32, F32))
    return first, error(of_wire, exact), error(first, of_wire)


def test_wide_sums_on_one_node_add_no_error_and_on_nodes_one_more_rounding(pools: dict[int, Pool]) -> None:
    for _, _, accumulation in pools[4].run(wide_sums, "shard"):
        assert accumulation < 1e-7
    for _, rounding, partial_sums in pools[4].run(wide_sums, "nodes"):
        assert 1e-3 < partial_sums < 1.1 * rounding


def test_replicas_end_with_the_same_bits(pools: dict[int, Pool]) -> None:
    for mesh, pairs in (("replicate", ((0, 2), (1, 3))), ("copies", ((0, 1), (0, 2), (0, 3)))):
        shards = [shard for shard, _, _ in pools[4].run(wide_sums, mesh)]
        assert all(torch.equal(shards[a], shards[b]) for a, b in pairs)
