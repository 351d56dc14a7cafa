"""From a step's metrics, tensors on the device, to numbers, one step late.

    state, metrics = train_step(state, batch)     # CUDA: queued, not run
    meter.push(step, metrics)                     # reads the metrics of the step before, which has ended or soon will

Reading a tensor of the device waits for all that is queued, the step just issued included. So metrics are copied to
pinned memory behind their step, and one step later the host waits for that copy alone. A CPU's step has ended when it
returns, and is read at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from models.parts.config import Shape
from train.data.rows import Place
from train.running import flops
from train.running.report import Record, memory_bytes


class Late:
    """Values of the device on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """Waits for what was queued before the copy, and for nothing after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


class Meter:
    """Gives `sink` a `Record` per step."""

    def __init__(
        self,
        sink: Callable[[Record], None],
        *,
        lr: Callable[[int], float],
        tokens: int,
        model: Shape,
        seq_len: int,
        place: Place,
    ) -> None:
        self._sink, self._lr, self._tokens, self._device = sink, lr, tokens, place.device
        peak = flops.peak(place.device)
        self._mfu_seconds = None if peak is None else flops.per_token(model, seq_len) * tokens / (peak * place.devices)
        """How long a step would take at the peak of all devices."""
        self._late: tuple[int, Late] | None = None
        self._since = time.perf_counter()

    def push(self, step: int, metrics: Mapping[str, Tensor]) -> None:
        """Takes the metrics of `step`, counted from 1, and hands on those of the step before (on a CPU, of `step`)."""
        late = step, Late(torch.stack([metrics[key].float() for key in ("loss", "grad_norm", "skipped")]))
        previous, self._late = (late, None) if self._device.type == "cpu" else (self._late, late)
        self._hand_on(previous)

    def flush(self) -> None:
        """Hands on what was taken; the device is idle then."""
        previous, self._late = self._late, None
        self._hand_on(previous)

    def restart(self) -> None:
        """Begins the time of the next step here, after work that belongs to none."""
        self._since = time.perf_counter()

    def _hand_on(self, late: tuple[int, Late] | None) -> None:
        if late is None:
            return
        step, (loss, grad_norm, skipped) = late[0], late[1].read()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._sink(
            Record(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                lr=self._lr(step - 1),
                tokens_per_s=round(self._tokens / seconds, 1),
                step_ms=round(seconds * 1e3, 3),
                mem_bytes=memory_bytes(self._device),
                mfu=None if self._mfu_seconds is None else round(self._mfu_seconds / seconds, 4),
                skipped=bool(skipped) or not math.isfinite(loss),
            )
        )
