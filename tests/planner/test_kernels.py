"""What a pass moves beside products, eager and fused; layers that recompute by ops; rings and stragglers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from yafsdp_fn.planner import plan, trace
from yafsdp_fn.planner.cluster import A100, CollectiveRanks
from yafsdp_fn.planner.costs import by_ops
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.timeline.text import shown

S = 8
E = 16
PARAMS = {"layers": ya.Stacked({"w": ya.Param((3, E, E))})}
WORD = S * E * 4


def loss_of(layer: Callable[[Tensor, Any], Tensor]) -> Any:
    """The sum of what a stack of such layers makes of a batch."""
    return lambda params, batch: ya.scan(lambda x, w: (layer(x, w), None), batch, params["layers"])[0].sum()


loss = loss_of(lambda x, w: F.silu(F.linear(x, w["w"]) + 1.0) * 2.0)


def traced() -> Trace:
    return trace(loss, PARAMS, torch.empty(S, E), ranks=2)


def test_fused_kernels_write_only_what_others_read() -> None:
    moved = traced().visits[0].cost.moved
    assert moved.products == 2 * WORD + E * E * 4
    assert moved.product_kernels == 1
    # x + 1, silu, times 2: each reads and writes; as one, they read the product, write what silu saves and the result
    assert moved.eager == 6 * WORD
    assert moved.eager_kernels == 3
    assert moved.fused == 3 * WORD
    assert moved.fused_kernels == 1
    back = traced().visits[0].cost.bwd_moved
    assert back.eager > back.fused > 0
    assert traced() == traced()  # whatever addresses memory has


def test_a_plan_says_its_kernels_and_its_range() -> None:
    given: Any = {"tx": ya.optim.adamw(1e-3), "ranks": 2, "cluster": "a100-80g"}
    eager, fused = (plan(loss, PARAMS, torch.empty(S, E), **given, kernels=kind) for kind in ("eager", "fused"))
    assert eager.step_s > fused.step_s
    assert "eager torch's kernels" in str(eager)
    assert "fused as torch.compile does" in str(fused)
    held = [f"{nbytes / 2**30:.1f}" for nbytes in fused.reserved_bytes]
    assert f"of tensors; a process holds {' to '.join(held)} GiB" in str(fused)
    low, high = fused.range_s
    assert low < fused.step_s < high
    assert f"({shown(low, 3)} to {shown(high, 3)})" in str(fused)
    with pytest.raises(ValueError, match=r"kernels='some', expected one of fused, eager, pieces"):
        plan(loss, PARAMS, torch.empty(S, E), **given, kernels="some")


def test_layers_recompute_by_ops() -> None:
    whole = traced()
    before = whole.visits[0].cost
    after = by_ops(whole, "op").visits[0].cost
    assert after.bwd_flops == before.bwd_flops + before.flops // 2
    assert after.bwd_moved.eager == before.bwd_moved.eager + before.moved.eager
    assert after.inner_bytes < before.inner_bytes
    assert by_ops(whole, "selective").visits[0].cost.bwd_flops == before.bwd_flops


def test_checkpoints_stop_before_the_last_product() -> None:
    gated = loss_of(lambda x, w: x + F.linear(F.silu(F.linear(x, w["up"])), w["down"]))
    layers = ya.Stacked({"up": ya.Param((3, 2 * E, E)), "down": ya.Param((3, E, 2 * E))})
    whole = trace(gated, {"layers": layers}, torch.empty(S, E), ranks=2)
    before = [visit.cost for visit in whole.visits]
    assert before[0].last_flops == before[0].flops // 2, "nothing saves what the last product makes"
    again = by_ops(whole, "checkpoint").visits[0].cost
    assert again.bwd_flops == before[0].bwd_flops + before[0].flops // 2
    assert again.inner_bytes == 0
    every = [visit.cost.bwd_flops for visit in by_ops(whole, "checkpoint", every=2).visits]
    assert every == [before[0].bwd_flops, before[1].bwd_flops + before[1].flops // 2, before[2].bwd_flops]


def test_sums_are_two_rings_and_stragglers_cost_more_on_more_nodes() -> None:
    many = CollectiveRanks(1024, 8)
    latency, moved = A100.ring(1e10, many)
    assert A100.all_reduce(1e10, many) == (latency, moved, latency, moved)
    assert latency.seconds == pytest.approx(896 * A100.node_latency + 127 * A100.network_latency)
    assert moved.seconds == pytest.approx(1023 / 1024 * 1e10 / A100.network_bandwidth)
    assert (
        A100.straggling(8) == 0.0 < A100.straggling(9) == A100.straggling(16) < A100.straggling(1024) < 4 * A100.jitter
    )


def test_a_congested_network_loses_bandwidth_with_nodes() -> None:
    busy = A100.replace(congestion=0.1)
    assert busy.ring(1e10, CollectiveRanks(16, 8)) == A100.ring(1e10, CollectiveRanks(16, 8))
    (_, moved), (_, before) = busy.ring(1e10, CollectiveRanks(96, 8)), A100.ring(1e10, CollectiveRanks(96, 8))
    assert moved.seconds == pytest.approx(2 * before.seconds)  # 12 nodes: 1 + 0.1 x 10


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_counts_the_kernels_of_its_device(device: Literal["cpu", "cuda"]) -> None:
    params = {"x": ya.Unit({"gain": ya.Param((E,)), "w": ya.Param((E, E))})}

    def normed(params: Any, batch: Tensor) -> Tensor:
        out = ya.apply(lambda w, x: F.rms_norm(F.linear(x, w["w"]), (E,), w["gain"]), params["x"], batch)
        return out.sum()

    given: Any = {"tx": ya.optim.sgd(0.1), "ranks": 2, "device": device}
    made = plan(normed, params, torch.empty(S, E), cluster=A100, kernels="eager", **given)
    assert made.program.trace == trace(normed, params, torch.empty(S, E), **given)._replace(kernels="eager")
    # the CPU has no kernel of its own for RMSNorm, and keeps more
    fused = trace(normed, params, torch.empty(S, E), **{**given, "device": "cuda"}).visits[0].cost.kept_bytes
    assert (made.program.trace.visits[0].cost.kept_bytes > fused) == (device == "cpu")

    moved = made.program.trace.visits[0].cost.moved
    assert (moved.pieces > 0) == (device == "cuda")
    assert moved.others("pieces") == (moved.eager + moved.pieces, moved.eager_kernels + moved.piece_kernels)
    out = plan(normed, params, torch.empty(S, E), cluster=A100, kernels="pieces", **given)
    assert (out.step_s > made.step_s) == (device == "cuda")
