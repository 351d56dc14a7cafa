"""Offloaded carries in plans: bytes on the device and on the host, seconds on the link."""

from __future__ import annotations

import functools

import pytest

from models import llama
from tests.harness.abstract import step_of
from tests.harness.small import one_rank
from tests.planner.test_footprint import BF16, SMALL_HEAD, TX, measured
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, predict_memory, simulate, trace
from yafsdp_fn.schedules import Backward, Fetch, Forward, Offload, Trace, remat, zero3
from yafsdp_fn.timeline.timeline import Timeline

CONFIG = llama.Config(vocab=512, embed=256, ffn=768, layers=8, heads=4, kv_heads=4, head_dim=64, max_length=4096)
CARRY = CONFIG.max_length * CONFIG.embed * 2
"""Bytes of one row's carry in bf16."""
FREE = CLUSTERS["a100-80g"].replace(contention=0.0)


@functools.cache
def taken(rows: int = 1) -> Trace:
    """Of a loss in as many chunks as there are rows."""
    return trace(*step_of(CONFIG, rows, CONFIG.max_length, chunks=rows), ranks=4, precision=BF16, tx=TX)


def test_a_layer_carries_what_the_scan_hands_on_and_nothing_else() -> None:
    """Not the rotary table, which all share, nor the embedding's tokens."""
    visits = taken().visits
    layers = [visit for visit in visits if visit.name.startswith("layers")]
    assert len(layers) == CONFIG.layers
    for visit in layers:
        assert visit.cost.carry_slot_bytes == CARRY < visit.cost.carry_bytes
        assert len(visit.cost.carries) == 1
    assert len({visit.cost.carries for visit in layers}) == CONFIG.layers
    assert all(visit.cost.carries == () for visit in visits if visit not in layers)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_what_leaves_the_device_is_on_the_host(ahead: int) -> None:
    L = CONFIG.layers
    stays = ahead + 1
    again, away = (predict_memory(zero3(remat=policy)(taken())) for policy in ("all", remat.offload(ahead=ahead)))
    assert again.carry_slots == 0
    assert again.host == 0
    assert away.carry_slots == stays * CARRY
    assert away.host == (L - stays) * CARRY
    assert again.op == away.op - (L - stays)
    assert again.activations - away.activations == L * CARRY
    assert again.peak_bytes - away.peak_bytes == (L - stays) * CARRY
    assert "on the host" in str(away)
    assert "on the host" not in str(again)


def test_the_peak_of_a_step() -> None:
    """As the allocator sees it: the buffers on the host are its own, too, where the device is the CPU."""
    real, predicted = measured(one_rank(), SMALL_HEAD, zero3(remat="offload"), 1)
    assert abs((predicted.peak_bytes + predicted.host) / real - 1) < 0.02, (real, str(predicted))
    assert predicted.host > 0


def step(policy: remat.Remat, host_bandwidth: float) -> Timeline:
    return simulate(zero3(remat=policy)(taken()), FREE.replace(host_bandwidth=host_bandwidth))


def test_copies_take_their_bytes_over_the_link() -> None:
    timeline = step(remat.offload(), 10e9)
    copies = timeline.on("offload")
    assert [type(span.op) for span in copies] == [Offload] * 6 + [Fetch] * 6
    assert all(span.seconds == pytest.approx(CARRY / 10e9) for span in copies)


def test_what_saving_costs_compute() -> None:
    """With a link that takes no time, what is left is the copy into the carry slot: read and written."""
    again = step(remat.all, 1e30)
    away = step(remat.offload(), 1e30)
    saving = CONFIG.layers * 2 * CARRY / FREE.memory_bandwidth
    assert away.busy("compute") - again.busy("compute") == pytest.approx(saving)
    forwards = [sum(s.seconds for s in t.spans if isinstance(s.op, Forward)) for t in (again, away)]
    backwards = [sum(s.seconds for s in t.spans if isinstance(s.op, Backward)) for t in (again, away)]
    assert forwards[1] - forwards[0] == pytest.approx(saving)
    assert backwards[0] == pytest.approx(backwards[1])


def test_a_slow_link_bounds_the_step_and_slots_ahead_help_a_fast_one() -> None:
    slow = step(remat.offload(), 1e8)
    assert slow.seconds == pytest.approx(12 * CARRY / 1e8, rel=0.05)
    assert "fetches" in str(slow) or "offloads" in str(slow)
    times = [step(remat.offload(ahead=ahead), 5e9).seconds for ahead in (0, 1, 2)]
    assert times[0] > times[1] >= times[2]


def test_chunked_layers_carry_the_whole_batch() -> None:
    layers = [visit for visit in taken(2).visits if visit.name.startswith("layers")]
    assert all(visit.cost.carry_slot_bytes == 2 * CARRY for visit in layers)


def test_peers_that_copy_nothing_to_the_host_say_so() -> None:
    for peer in (peers.fsdp, peers.fsdp2):
        with pytest.raises(
            ValueError, match=r"ya.schedules.remat.offload: fully_shard makes no copies of carries to the host"
        ):
            peer(remat="offload")(taken())
