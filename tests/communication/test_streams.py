"""The host stream: one worker thread, in order, after what it waits for; errors travel in events."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

import yafsdp_fn as ya
from yafsdp_fn.communication.streams import CommunicationError, HostEvent, HostStream


@pytest.fixture
def stream() -> Iterator[HostStream]:
    made = HostStream("test", rank=3)
    yield made
    made.drain()
    made.close()


def test_work_waits_for_its_events_and_holds_back_what_is_behind_it(stream: HostStream) -> None:
    seen: list[str] = []
    gate = HostEvent()
    last = HostEvent()
    stream.submit(lambda: seen.append("first"), (gate,), HostEvent(), "first")
    stream.submit(lambda: seen.append("second"), (), last, "second")
    time.sleep(0.05)
    assert seen == []
    gate.complete()
    last.wait()
    assert seen == ["first", "second"]


def test_the_workers_one_thread_is_its_own() -> None:
    script = """
        import torch
        torch.set_num_threads(3)
        from yafsdp_fn.communication.streams import HostStream
        stream = HostStream("gather", 0)
        print(torch.get_num_threads())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["3"], done.stderr


def test_work_may_write_to_tensors_of_every_kind(stream: HostStream) -> None:
    with torch.inference_mode():
        inferred = torch.zeros(2)
    leaf, event = torch.zeros(2, requires_grad=True), HostEvent()
    stream.submit(lambda: (inferred.add_(1), leaf.add_(1), None)[2], (), event, "job")
    event.wait()
    assert inferred.eq(1).all()
    assert leaf.eq(1).all()
    assert leaf.requires_grad


def test_work_runs_without_grad_on_one_thread(stream: HostStream) -> None:
    seen: list[object] = []
    event = HostEvent()
    stream.submit(lambda: seen.extend([torch.is_grad_enabled(), torch.get_num_threads()]), (), event, "job")
    event.wait()
    assert seen == [False, 1]


def failing() -> None:
    raise OSError("connection reset")


def test_an_error_reaches_whoever_waits_and_everything_later(stream: HostStream) -> None:
    ran, fine, broken, later = [], HostEvent(), HostEvent(), HostEvent()
    stream.submit(lambda: ran.append("fine"), (), fine, "gather of a")
    stream.submit(failing, (), broken, "gather of b")
    stream.submit(lambda: ran.append("later"), (), later, "gather of c")
    fine.wait()
    with pytest.raises(
        ya.errors.CommunicationError, match=r"rank 3: gather of b failed \(OSError: connection reset\).*restart all"
    ) as caught:
        broken.wait()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ya.errors.CommunicationError, match=r"rank 3: gather of c: not run, since gather of b failed"):
        later.wait()
    assert ran == ["fine"]
    with pytest.raises(ya.errors.CommunicationError):  # for every waiter
        broken.wait()


def test_an_error_travels_to_another_stream_through_an_event(stream: HostStream) -> None:
    other = HostStream("other", 3)
    broken = HostEvent()
    behind = HostEvent()
    stream.submit(failing, (), broken, "gather of a")
    other.submit(lambda: None, (broken,), behind, "reduce of a")
    with pytest.raises(ya.errors.CommunicationError, match="reduce of a"):
        behind.wait()
    other.close()


def test_drain_waits_even_after_an_error(stream: HostStream) -> None:
    done: list[int] = []
    stream.submit(lambda: (time.sleep(0.05), done.append(1))[1], (), HostEvent(), "slow")
    stream.drain()
    assert done
    stream.submit(failing, (), HostEvent(), "broken")
    stream.drain()
    stream.drain()


def test_a_closed_stream_refuses_work_that_nobody_would_do(stream: HostStream) -> None:
    stream.close()
    with pytest.raises(CommunicationError, match="rank 3: gather of b: its mesh is gone; keep the mesh"):
        stream.submit(lambda: None, (), HostEvent(), "gather of b")
    stream.drain()


def test_a_stream_lets_go_of_its_last_work(stream: HostStream) -> None:
    big = torch.zeros(8)
    ref = weakref.ref(big)
    event = HostEvent()
    stream.submit(big.zero_, (), event, "job")
    event.wait()
    del big
    stream.drain()
    assert ref() is None


def test_threads_are_joined_at_exit_with_work_in_the_queue() -> None:
    script = """
        import time
        from yafsdp_fn.communication.streams import CommunicationError, HostEvent, HostStream
        stream = HostStream("gather", 0)
        for n in range(3):
            stream.submit(lambda n=n: (time.sleep(0.02), print(n, flush=True)), (), HostEvent(), "job")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split() == ["0", "1", "2"], done.stderr
