"""CUDA graphs of visits, with graphs that know memory by its address alone."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.cuda.days import MESHES, PRECISIONS, REMATS
from tests.extras.test_cuda_graphs import reads, synchronises, told
from tests.harness.child_process import child, in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.graphs import Freed
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.gpu import on_gpu
from tests.harness.marks import by_day
from tests.harness.oracle import batch_of
from yafsdp_fn.extras import cuda_graphs
from yafsdp_fn.extras.cuda_graphs import CudaCapture
from yafsdp_fn.runtime.memory import StateMemory

TX = ya.optim.adamw(1e-2)
REMAT = ya.schedules.zero3(remat=REMATS["all"])


def batch(seed: int) -> dict[str, torch.Tensor]:
    tokens = batch_of(0, seed=seed)["tokens"]
    return {"tokens": tokens.to(CUDA), "targets": tokens.roll(1, 1).to(CUDA)}


CONFIG = llama.Config(vocab=37, embed=16, ffn=24, layers=3, heads=2, kv_heads=1, head_dim=8, max_length=8)
WIDER, NARROWER = PRECISIONS[1], ya.Precision(reduce=torch.bfloat16)
"""bf16 products for fp32 slots, which one kernel writes; fp32 products for bf16 slots, which go through scratch."""


def begun(mesh: Any, graphs: bool, precision: ya.Precision = NARROWER) -> tuple[Any, ya.ShardedState]:
    state = ya.init(llama.params(CONFIG), TX, mesh=mesh, precision=precision)
    return ya.train_step(llama.loss(CONFIG), TX, schedule=REMAT, graphs=graphs), state


def trained(graphs: bool, precision: ya.Precision) -> tuple[list[Any], int]:
    """A Llama's weights after five steps, and how many graphs there were."""
    with rank_of(MESHES["shard"]) as mesh:
        step, state = begun(mesh, graphs, precision)
        for number in range(5):
            state, _ = step(state, batch(number))
        whole = [leaf.tolist() for leaf in optree.tree_leaves(ya.unshard(state.params))]
        return whole, len(step._function._replays) if graphs else 0


@pytest.mark.parametrize("precision", by_day([WIDER, NARROWER], WIDER), ids=["wider", "narrower"])
@in_child_process
def test_a_llama_is_captured(precision: ya.Precision) -> None:
    with fake_cuda():
        found, graphs = trained(True, precision)
        assert found == trained(False, precision)[0]
    assert graphs == 4  # two slots, forward and backward


def scratch_made_anew(known: bool, reused: bool) -> str:
    """A state's scratch gives way to another, as that of a new state does whose slots lie where the old one's lay.

    known: graphs know which scratch they write; reused: somebody else gets the memory of the old one
    """
    with fake_cuda(), rank_of(MESHES["shard"]) as mesh, pytest.MonkeyPatch.context() as patch:
        if not known:
            patch.setattr(StateMemory, "scratches", property(lambda self: []))
        step, state = begun(mesh, True)
        others: list[torch.Tensor] = []
        try:
            for number in range(8):
                if number == 4:
                    (old,) = state.memory._scratch.values()
                    numel, dtype, where = old.numel(), old.dtype, old.data_ptr()
                    state.memory._scratch.clear()
                    del old
                    others = [torch.zeros(numel, dtype=dtype, device=CUDA) for _ in range(2 * reused)]
                    assert not reused or where in [other.data_ptr() for other in others]
                state, metrics = step(state, batch(number))
        except Freed as error:
            return str(error)
        spoilt = any(other.any() for other in others)
        return "somebody else's memory is written" if spoilt else "fine" if metrics["loss"].isfinite() else "wrong"


@pytest.mark.nightly
@in_child_process
def test_a_graph_is_of_the_scratch_that_its_backward_writes() -> None:
    assert scratch_made_anew(True, False) == scratch_made_anew(True, True) == "fine"
    assert scratch_made_anew(False, True) == "somebody else's memory is written"


def warned(f: Any, recovers: bool) -> list[tuple[int, str]]:
    with fake_cuda(), rank_of({"shard": 1}) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "RECOVERS", recovers)
        return told(f, mesh, CUDA)


@pytest.mark.parametrize("recovers", [True, False])
@in_child_process
def test_a_block_that_reads_is_refused_when_it_is_looked_at(recovers: bool) -> None:
    ((number, text),) = warned(reads, recovers)
    assert number == 1 and "reads a value on the host" in text


@in_child_process
def test_a_block_that_waits_unseen_fails_its_capture() -> None:
    ((number, text),) = warned(synchronises, True)
    assert number == 2 and "cannot be captured (RuntimeError: operation not permitted" in text
    with pytest.raises(RuntimeError, match=r"the capture of a CUDA graph failed, and torch .* restart without"):
        warned(synchronises, False)


def warned_there() -> list[tuple[int, str]]:
    return told(synchronises, ya.mesh(device="cuda"), "cuda")


@on_gpu
def test_a_failed_capture_on_a_gpu() -> None:
    """In a process of its own, which an older torch leaves unusable, and says so."""
    with child() as run:
        if cuda_graphs.RECOVERS:
            ((number, text),) = run(warned_there)
            assert number == 2 and "cannot be captured" in text
        else:
            with pytest.raises(RuntimeError, match="the capture of a CUDA graph failed, and torch"):
                run(warned_there)


@in_child_process
def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    """The streams are as they were, and the next capture is good. Nobody waits for the device."""
    with fake_cuda() as device:
        capture, x, stream = CudaCapture(CUDA), torch.zeros(2, device=CUDA), torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            capture.record(lambda: x.add_(1).sum().item())
        assert device.tape is None and torch.cuda.current_stream() == stream and device.syncs == []

        def add() -> None:
            x.add_(1)

        capture.record(add)()
        assert not any("torch.cuda.graph" in entry.text for entry in device.log.entries)
        assert x.tolist() == [1.0, 1.0]
