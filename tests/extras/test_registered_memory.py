"""Registered memory, with stand-ins for NCCL's backend and torch's pools; streams that are one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.gpu import on_gpu
from tests.harness.small import batch, loss, model, one_rank
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.cuda_streams import must_differ
from yafsdp_fn.extras import registered_memory
from yafsdp_fn.extras.registered_memory import registering

CUDA = torch.device("cuda", 0)


class Backend:
    mem_allocator = "NCCL's"

    def __init__(self, log: list[Any], name: str, *, alloc: bool = True, symmetric: bool = True) -> None:
        self.log, self.name, self.alloc, self.symmetric = log, name, alloc, symmetric

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.alloc

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.log.append(("connect", self.name))

    def register_mem_pool(self, *args: Any) -> None:
        if len(args) > 1 and not self.symmetric:
            raise TypeError("incompatible function arguments")
        self.log.append(("register", self.name, *args))


class Without:
    pass


class Group:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done, in order."""
    done: list[Any] = []

    @contextlib.contextmanager
    def use(pool: Any, device: torch.device) -> Iterator[None]:
        done.append(("begin", pool))
        yield
        done.append(("end", pool))

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    return done


def test_a_pool_is_registered_once_when_all_is_there_with_each_group_in_order(log: list[Any]) -> None:
    first, second = Group(Backend(log, "a")), Group(Backend(log, "b"))
    registered = registering(lambda: [first, first, second], CUDA)
    assert log == [("connect", "a"), ("connect", "b")]  # a group with two names counts once
    log.clear()
    with registered():
        log.append("allocates")
    pool = "pool of NCCL's"
    assert log == [
        ("begin", pool),
        "allocates",
        ("end", pool),
        ("register", "a", pool, True),
        ("register", "b", pool, True),
    ]


def test_groups_that_come_later_register_what_is_allocated_then(log: list[Any]) -> None:
    """Those of units that are split over axes inside blocks, with the first state that has some."""
    groups = [Group(Backend(log, "a"))]
    registered = registering(lambda: groups, CUDA)
    groups.append(Group(Backend(log, "b")))
    log.clear()
    with registered():
        pass
    assert log[0] == ("connect", "b") and [each[1] for each in log[-2:]] == ["a", "b"]


def test_a_torch_without_symmetric_windows_registers_plainly(log: list[Any]) -> None:
    with registering(lambda: [Group(Backend(log, "a", symmetric=False))], CUDA)():
        pass
    assert log[-1] == ("register", "a", "pool of NCCL's")


def test_refusals_say_why(log: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Without of torch .* has no mem_allocator and no register_mem_pool"):
        registering(lambda: [Group(Without())], CUDA)
    with pytest.raises(RuntimeError, match="NCCL cannot allocate on Old GPU"):
        registering(lambda: [Group(Backend(log, "a", alloc=False))], CUDA)
    with pytest.raises(RuntimeError, match="this mesh is on cpu"):
        registering(list, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="one rank has no communicator"):
        ya.mesh(device="cpu", registered=True)


def test_a_second_mesh_keeps_the_pools_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal meshes share communicators, and with them the memory of states that exist."""
    used: list[str] = []

    def registering(groups: Any, device: torch.device) -> Any:
        name = made.pop(0)

        def memory() -> contextlib.AbstractContextManager[None]:
            used.append(name)
            return contextlib.nullcontext()

        return memory

    made = ["first", "second"]
    monkeypatch.setattr(registered_memory, "registering", registering)
    comms = Communicators(one_rank())
    comms.alone = False
    for _ in range(2):
        registered_memory.register(comms)
        with comms.memory():
            pass
    assert used == ["first", "first"]


def test_slots_are_allocated_in_one_block_of_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working copies in one, then the slots of a program in another; nothing in later steps."""
    begun: list[str] = []
    mesh = one_rank()
    state = ya.init(model(), ya.optim.sgd(0.1), mesh=mesh)

    @contextlib.contextmanager
    def memory() -> Iterator[None]:
        begun.append("block")
        yield

    monkeypatch.setattr(state.memory.comms, "memory", memory)
    state = ya.init(model(), ya.optim.sgd(0.1), mesh=mesh, precision=ya.Precision(compute=torch.bfloat16))
    assert len(begun) == 1
    step = ya.train_step(loss, ya.optim.sgd(0.1))
    for expected in (2, 2, 2):
        state, _ = step(state, batch())
        assert len(begun) == expected


def test_streams_must_differ() -> None:
    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

    must_differ([Stream(1), Stream(2)])
    with pytest.raises(RuntimeError, match="two communication streams are one CUDA stream"):
        must_differ([Stream(1), Stream(2), Stream(1)])


@on_gpu
def test_cuda_streams_have_priority_and_differ() -> None:
    from yafsdp_fn.communication.cuda_streams import CudaStream

    streams = [CudaStream(torch.device("cuda", 0), rank=0) for _ in range(3)]
    must_differ(streams)
    assert all(stream._stream.priority < 0 for stream in streams)
    with pytest.raises(RuntimeError, match="one CUDA stream"):
        must_differ([*streams, *(CudaStream(torch.device("cuda", 0), rank=0) for _ in range(32))])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not torch.distributed.is_nccl_available(), reason="no NCCL")
def test_nccl_of_this_machine_registers_or_says_why_not() -> None:
    """One rank: a group of its own stands for those of a mesh."""
    ya.mesh(device="cuda")
    group = torch.distributed.new_group([0], backend="nccl")
    try:
        registered = registering(lambda: [group], CUDA)
    except RuntimeError as error:
        assert "leave registered out" in str(error)
        return
    with registered():
        full = torch.ones(1 << 22, device=CUDA)
    out = torch.empty_like(full)
    torch.distributed.all_reduce(full, group=group)
    out.copy_(full)
    assert bool((out == 1).all())
