"""`python -m train clm` reads the metrics of a step while the next one is queued, and waits for nothing of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import llama
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import Event, fake_cuda
from tests.harness.fake_cuda.log import HOST, findings
from tests.harness.fake_cuda.tensors import CUDA
from train.data.rows import Place
from train.running.meter import Meter
from train.running.report import Record


def meter(sink: Callable[[Record], None]) -> Meter:
    config = llama.Config(vocab=8, embed=8, ffn=8, layers=1, heads=1, kv_heads=1, head_dim=8, max_length=8)
    place = Place(device=torch.device("cpu"), rank=0, ranks=1)
    made = Meter(sink, lr=lambda step: 0.1, tokens=8, model=config, seq_len=8, place=place)
    made._device = CUDA
    return made


def pushed() -> tuple[list[float], list[str], bool, list[Any]]:
    """Losses read, what the host waited for, whether that was the step before, and what is wrong."""
    records: list[Record] = []
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.running.meter.memory_bytes", lambda device: 0)
        late = meter(records.append)
        queued = [0]
        behind = True
        for step in range(1, 6):
            loss = torch.full((), 2.0, device=CUDA) * step  # the step
            queued.append(len(device.log.entries))
            late.push(step, {"loss": loss, "grad_norm": loss, "skipped": loss * 0})
            waited = [
                entry.what
                for entry in device.log.entries[queued[-1] :]
                if entry.stream == HOST and entry.kind == "wait"
            ]
            recorded = [e.what for e in device.log.entries[: queued[-1]] if e.kind == "record"]
            behind &= waited == recorded[-1:]
        late.flush()
        return [record.loss for record in records], device.syncs, behind, findings(device.log)


@in_child_process
def test_metrics_are_read_behind_the_step_that_made_them() -> None:
    losses, syncs, behind, wrong = pushed()
    assert losses == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert set(syncs) == {"Event.synchronize"}
    assert behind
    assert not wrong


@in_child_process
def test_a_meter_that_did_not_wait_would_read_too_soon() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "synchronize", lambda self: None)
        assert any("host reads" in found.second for found in pushed()[3])
