"""The fake device and its log: what they find, in programs of a few lines that are right or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.fake_cuda.api import CUDAGraph, Event, Stream, fake_cuda, graph, stream
from tests.harness.fake_cuda.log import findings, without_each_wait
from tests.harness.fake_cuda.tensors import CUDA


def kinds(run: Callable[[Stream, Tensor], object]) -> list[str]:
    """What is wrong in `run(another stream, memory)`."""
    with fake_cuda() as device:
        side = Stream()
        x = torch.zeros(8, device=CUDA)
        side.wait_stream(torch.cuda.current_stream())
        run(side, x)
        return [found.kind for found in findings(device.log)]


def on_side(side: Stream, work: Callable[[], Any]) -> Event:
    with stream(side):
        work()
        return side.record_event()


def test_an_ordered_program_is_right() -> None:
    def run(side: Stream, x: Tensor) -> None:
        on_side(side, lambda: x.add_(1)).wait()
        x.mul_(2)

    assert kinds(run) == []


@pytest.mark.parametrize(
    ("there", "here", "found"),
    [
        (lambda x: x.add_(1), lambda x: x.mul_(2), True),
        (lambda x: x.add_(1), lambda x: x.sum(), True),
        (lambda x: x.sum(), lambda x: x.mul_(2), True),
        (lambda x: x.sum(), lambda x: x.sum(), False),  # two readers
        (lambda x: x[:4].add_(1), lambda x: x[4:].mul_(2), False),  # other bytes
        (lambda x: x[:5].add_(1), lambda x: x[4:].mul_(2), True),
        (lambda x: x.view(4, 2)[:, 0].add_(1), lambda x: x.view(4, 2)[:, 1].add_(1), False),  # rows that interleave
        (lambda x: x.view(-1)[2:3].detach(), lambda x: x.mul_(2), False),  # a view touches no memory
        (lambda x: torch._foreach_copy_([x[:2]], [x[2:4]]), lambda x: x[3].add_(1), True),
    ],
)
def test_what_is_a_race(there: Callable[[Tensor], Any], here: Callable[[Tensor], Any], found: bool) -> None:
    def run(side: Stream, x: Tensor) -> None:
        on_side(side, lambda: there(x))
        here(x)

    assert ("race" in kinds(run)) is found


def test_order_goes_from_stream_to_stream() -> None:
    def run(side: Stream, x: Tensor) -> None:
        third = Stream()
        first = on_side(side, lambda: x.add_(1))
        third.wait_event(first)
        on_side(third, lambda: None).wait()
        x.mul_(2)

    assert kinds(run) == []


def test_a_host_that_waits_orders_what_it_launches_later() -> None:
    def run(side: Stream, x: Tensor, waits: bool) -> None:
        event = on_side(side, lambda: x.add_(1))
        if waits:
            event.synchronize()
        x.mul_(2)

    assert kinds(lambda side, x: run(side, x, True)) == []
    assert kinds(lambda side, x: run(side, x, False)) == ["race"]


def freed(side: Stream, x: Tensor, *, keep: bool = False, wait: bool = False, again: bool = True) -> None:
    temporary = x + 1
    side.wait_stream(torch.cuda.current_stream())
    if keep:
        temporary.record_stream(side)
    event = on_side(side, lambda: temporary.sum())  # noqa: F821 (deleted below)
    if wait:
        event.wait()
    del temporary
    if again:
        torch.empty(8, device=CUDA)


def test_memory_freed_too_early() -> None:
    assert kinds(freed) == ["early free"]
    assert kinds(lambda side, x: freed(side, x, keep=True)) == []
    assert kinds(lambda side, x: freed(side, x, wait=True)) == []
    assert kinds(lambda side, x: freed(side, x, again=False)) == []  # nobody gets it


def test_new_memory_may_have_had_another_owner() -> None:
    def run(side: Stream, x: Tensor) -> None:
        fresh = torch.empty(8, device=CUDA)
        on_side(side, lambda: fresh.zero_())

    assert kinds(run) == ["race"]


def test_a_wait_is_found_implied_or_idle() -> None:
    with fake_cuda() as device:
        side = Stream()
        x = torch.zeros(8, device=CUDA)
        side.wait_stream(torch.cuda.current_stream())  # found: what it reads was just written
        first = on_side(side, lambda: x.sum())
        second = on_side(side, lambda: x.sum())
        first.wait()  # implied by the next one
        second.wait()  # found
        x.mul_(2)
        on_side(side, lambda: None).wait()  # idle: nothing was done there
        x.mul_(2)
        assert [verdict for _, verdict in without_each_wait(device.log)] == ["found", "implied", "found", "idle"]


def test_what_makes_the_host_wait_for_the_whole_device() -> None:
    with fake_cuda() as device:
        x = torch.zeros(3, device=CUDA)
        x.add_(1)
        with graph(CUDAGraph()):
            x.add_(1)
        torch.empty(3, pin_memory=True)
        torch.cuda.empty_cache()
        waits = [entry.text for entry in device.log.entries if entry.kind == "sync"]
        assert waits == [
            "the first use of zeros ()",
            "the first use of add_ ()",
            "torch.cuda.graph ()",
            "an allocation of pinned memory ()",
            "torch.cuda.empty_cache ()",
        ]
        for work, named in ((torch.cuda.empty_cache, "torch.cuda.empty_cache"), (x.sum().item, "_local_scalar_dense")):
            said = f"not permitted when stream is capturing: {named}"
            with pytest.raises(RuntimeError, match=said), graph(CUDAGraph()):
                work()


def test_a_thread_that_uses_device_0_is_found() -> None:
    def work(says: bool) -> None:
        if says:
            torch.cuda.set_device(CUDA)
        torch.zeros(3, device=CUDA).add_(1)

    with fake_cuda() as device:
        for says in (True, False):
            thread = threading.Thread(target=work, args=(says,), name=f"says {says}")
            thread.start()
            thread.join()
        assert device.strangers == ["zeros in says False", "add_ in says False"]


def test_devices_do_not_mix() -> None:
    with fake_cuda():
        with pytest.raises(RuntimeError, match="same device, found cuda:0 and cpu"):
            torch.ones(3, device=CUDA) + torch.ones(3)
        assert (torch.ones(3, device=CUDA) * torch.tensor(2.0)).tolist() == [2.0] * 3  # numbers may
