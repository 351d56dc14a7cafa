"""Sends and receives in place of gloo's collectives: exact, packed or not, cut or not, one by one or together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.groups import exchanging
from tests.harness.pool import on_ranks
from yafsdp_fn.communication import collectives, flat, gloo
from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.communication.groups import group_of
from yafsdp_fn.communication.ranks import receive_numel

F32 = torch.float32
BF16 = torch.bfloat16

CUTS = {"as it is": (gloo.PIECE_BYTES, gloo.PACKED_BYTES), "packs": (64, 48), "pieces": (40, 0)}
"""(PIECE_BYTES, PACKED_BYTES): with small ones, small vectors take every path."""

SIZES = ([1], [7], [33, 1, 5, 8, 100, 3, 3], [64] * 3, [5, 300, 7])
"""Of shards, in elements, per list."""


@contextlib.contextmanager
def cut(how: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("PIECE_BYTES", "PACKED_BYTES"), CUTS[how], strict=True):
            patch.setattr(gloo, name, size)
        yield


def drawn(rank: int, number: int, n: int, dtype: torch.dtype) -> Tensor:
    """Vector `number` of a rank: every rank can say what the others have."""
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * rank + number)).to(dtype)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def inside(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A vector of n elements within a larger one, and the larger one, of NaNs."""
    larger = torch.full((n + 16,), torch.nan, dtype=dtype)
    return larger[8 : n + 8], larger


def untouched(larger: Tensor) -> bool:
    return bool(larger[:8].isnan().all() and larger[-8:].isnan().all())


@pytest.mark.sampled
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("how", CUTS)
def test_every_path_gives_the_bits_of_a_plain_loop(mesh: Any, how: str) -> None:
    group = communicators(mesh).gather_group
    assert isinstance(group, GlooGroup)
    ranks = group.process_group.size()
    rank = group.process_group.rank()
    with cut(how):
        for dtype in (F32, BF16):
            for sizes in SIZES:
                every = [[drawn(r, i, ranks * n, dtype) for i, n in enumerate(sizes)] for r in range(ranks)]
                mine = [whole.clone() for whole in every[rank]]
                # gathered into the middle of larger vectors
                shards = [whole[:n] for whole, n in zip(mine, sizes, strict=True)]
                outs, larger = zip(*(inside(ranks * n, dtype) for n in sizes), strict=True)
                group.all_gathers(outs, shards)
                for i, (out, n) in enumerate(zip(outs, sizes, strict=True)):
                    assert torch.equal(out, torch.cat([every[r][i][:n] for r in range(ranks)])), (sizes, i)
                assert all(map(untouched, larger))
                # from where it is in the whole
                wholes = [whole.clone() for whole in mine]
                places = [whole.view(ranks, -1)[rank] for whole in wholes]
                group.all_gathers(wholes, places)
                for i, whole in enumerate(wholes):
                    assert torch.equal(whole, torch.cat([every[r][i].view(ranks, -1)[r] for r in range(ranks)]))
                # summed into the middle of larger vectors; one by one too
                shards, larger = zip(*(inside(n, dtype) for n in sizes), strict=True)
                group.reduce_scatters(shards, mine)
                for i, (shard, n) in enumerate(zip(shards, sizes, strict=True)):
                    expected = in_rank_order([every[r][i].view(ranks, n)[rank] for r in range(ranks)])
                    assert torch.equal(shard, expected), (sizes, i)
                    alone = torch.empty_like(shard)
                    group.reduce_scatters([alone], mine[i : i + 1])
                    assert torch.equal(alone, expected)
                assert all(map(untouched, larger))
                assert all(map(torch.equal, mine, every[rank]))
                out = torch.empty_like(mine[0])
                group.all_to_all(out, mine[0])
                assert torch.equal(out, torch.cat([every[r][0].view(ranks, -1)[rank] for r in range(ranks)]))


def messages(mesh: Any, together: bool, on: bool) -> tuple[int, int]:
    """Messages that a rank sends to gather, and to reduce, eight vectors."""
    group = communicators(mesh).gather_group
    sent = []
    shards = [torch.zeros(10) for _ in range(8)]
    fulls = [torch.zeros(10 * group.process_group.size()) for _ in shards]
    post = GlooGroup._post

    def watched(self: Any, out: list[Tensor], received: list[Tensor]) -> Any:
        works = post(self, out, received)
        sent.append(len(works) // 2)  # a send and a receive for each
        return works

    with exchanging(on), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooGroup, "_post", watched)
        counts = []
        for collective, outs, ins in ((group.all_gathers, fulls, shards), (group.reduce_scatters, shards, fulls)):
            sent.clear()
            for part in [slice(None)] if together else [slice(i, i + 1) for i in range(len(outs))]:
                collective(outs[part], ins[part])
            counts.append(sum(sent))
    return counts[0], counts[1]


@on_ranks(3)
def test_vectors_that_are_reduced_together_are_one_message_to_each_peer(mesh: Any) -> None:
    assert messages(mesh, True, True) == (16, 2)
    assert messages(mesh, False, True) == (16, 16)
    assert messages(mesh, True, False) == (0, 0), "the backend's own"


@on_ranks(2, 4)
def test_scratch_is_small_and_stays(mesh: Any) -> None:
    """Made under inference mode, on a stream, and used again outside of it; never larger than the pieces in flight."""
    own = ya.mesh(device=mesh.device_type)  # other tests leave larger scratch in the groups of theirs
    comms = communicators(own)
    with cut("packs"):
        for n in (300, 9):
            comms.reduce_scatter(torch.ones(n * comms.ranks))
        group: Any = comms.reduce_group
        assert 0 < group._scratch.nbytes <= 2 * comms.ranks * gloo.PIECE_BYTES
        shards = [torch.empty(5) for _ in range(4)]
        for _ in range(2):
            group.reduce_scatters(shards, [torch.ones(5 * comms.ranks)] * 4)
            after = group._scratch.data_ptr()
        assert all(bool((shard == comms.ranks).all()) for shard in shards)
        group.reduce_scatters(shards[:1], [torch.ones(5 * comms.ranks)])
        assert group._scratch.data_ptr() == after


@on_ranks(1, 2, 3)
def test_reductions_of_a_list_are_those_one_by_one(mesh: Any) -> None:
    """flat: sums of a list that land in shards, add to them, or change dtype, in a buffer that holds one or all."""
    comms = communicators(mesh)
    sizes = [8, 16, 8, 24, 8]
    adds = [False, True, True, False, False]
    for wire, dtype, accumulate in ((F32, F32, None), (BF16, F32, None), (BF16, F32, F32), (F32, BF16, None)):
        wires = [BF16, wire, wire, wire, wire]
        fulls = [drawn(comms.rank, i, n * comms.ranks, of) for i, (n, of) in enumerate(zip(sizes, wires, strict=True))]
        before = [drawn(7, i, n, dtype) for i, n in enumerate(sizes)]
        expected = [shard.clone() for shard in before]
        needed = receive_numel(comms, max(sizes), accumulate)
        for shard, full, add in zip(expected, fulls, adds, strict=True):
            alone = torch.empty(needed, dtype=wire).view(torch.uint8)
            flat.reduce_into(comms, [shard], [full], [add], [accumulate], receive=alone)
        for numel in (needed, needed + 16, 5 * needed):
            shards = [shard.clone() for shard in before]
            receive = torch.full((numel,), torch.nan, dtype=wire).view(torch.uint8)
            flat.reduce_into(comms, shards, fulls, adds, [accumulate] * len(adds), receive=receive)
            assert all(map(torch.equal, shards, expected)), (wire, dtype, accumulate, numel)


class Ranks:
    """As a process group has them."""

    def __init__(self, backend: str, size: int) -> None:
        self.name, self.size, self.rank = (lambda: backend), (lambda: size), (lambda: 0)


@pytest.mark.parametrize(
    ("backend", "ranks", "kind"), [("gloo", 2, GlooGroup), ("gloo", 1, RankGroup), ("nccl", 2, RankGroup)]
)
def test_several_gloo_ranks_exchange_messages(backend: str, ranks: int, kind: type) -> None:
    process_group: Any = Ranks(backend, ranks)
    assert type(group_of(process_group)) is kind


def test_nccl_takes_a_list_as_one_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int, bool]] = []

    class Nccl(Ranks):
        def __getattr__(self, name: str) -> Any:
            return lambda outs, ins, options: said.append((name, len(outs), options.asyncOp))

    monkeypatch.setattr(collectives, "_all_gather", lambda out, shard, group: said.append(("gather", 1, False)))
    monkeypatch.setattr(collectives, "_reduce_scatter", lambda out, full, group: said.append(("reduce", 1, False)))
    process_group: Any = Nccl("nccl", 2)
    group = group_of(process_group)
    for count in (2, 1):
        group.all_gathers([torch.empty(2)] * count, [torch.empty(1)] * count)
        group.reduce_scatters([torch.empty(1)] * count, [torch.empty(2)] * count)
    several = [(collectives.ALL_GATHERS, 2, False), (collectives.REDUCE_SCATTERS, 2, False)]
    assert said == [*several, ("gather", 1, False), ("reduce", 1, False)]
    assert all(hasattr(torch.distributed.ProcessGroup, name) for name, _, _ in several)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not torch.distributed.is_nccl_available(), reason="no NCCL")
def test_nccl_of_this_machine_takes_lists() -> None:
    """One rank: a group of its own stands for those of a mesh."""
    ya.mesh(device="cuda")
    process_group = torch.distributed.new_group([0], backend="nccl")
    assert process_group.name() == "nccl"
    group = group_of(process_group)
    ins = [torch.arange(float(n), device="cuda") for n in (3, 64, 1000)]
    for many in (group.all_gathers, group.reduce_scatters):
        outs = [torch.zeros_like(each) for each in ins]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            many(outs, ins)
        stream.synchronize()
        assert all(map(torch.equal, outs, ins))
