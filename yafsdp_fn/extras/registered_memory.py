"""Registers memory with NCCL: copy engines and switches can then move and add slots, and collectives take fewer SMs.

    register(comms)                  # before any state: what comms.memory() allocates
    with comms.memory():             # goes to a new pool,
        slots = ...
                                     # which all communicators register when the block ends

Registering for symmetric kernels is a collective, so every rank allocates the same and registers in one order: each
pool once, when it is complete, and group by group. Nothing is allocated in a pool afterwards (torch would register it
at once, with the communicators in any order). Symmetric reductions only sum, and so do ours. Groups of units that are
split over axes inside blocks come with the first state that has some, and register what is allocated from then on;
activations, which go along these axes, are not registered.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.util.torch_private import backend_of


def register(comms: Communicators) -> None:
    """Makes `comms` register with NCCL what it allocates for collectives. All ranks call it, before any state exists.

    Raises RuntimeError, on all ranks alike, if that is not possible.
    """
    if comms.alone:
        raise RuntimeError("mesh(registered=True): one rank has no communicator to register memory with")
    comms.allocate_in(registering(lambda: [group.process_group for group in comms.groups], comms.device))


def registering(
    groups: Callable[[], Sequence[ProcessGroup]], device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    """Returns a factory of contexts: inside of one, NCCL registers what this thread allocates on the device.

    groups: returns those that there are. Pools live as long as what is returned, that is, as the communicators: they
        keep the memory of dropped states. Raises RuntimeError if a backend cannot register memory, saying why
    """
    if device.type != "cuda":
        raise RuntimeError(f"mesh(registered=True): NCCL registers memory of CUDA devices, this mesh is on {device}")
    backends: dict[ProcessGroup, Any] = {}
    pools: list[torch.cuda.MemPool] = []

    def meet() -> None:
        """Connects the groups that have come."""
        for group in groups():
            if group not in backends:
                backend = backend_of(group, device)
                _must_register(backend, device)
                backend.eager_connect_single_device(device)  # it must have its communicator, made at first use
                backends[group] = backend

    @contextmanager
    def memory() -> Iterator[None]:
        meet()
        there = [*backends.values()]
        pool = torch.cuda.MemPool(there[0].mem_allocator)
        with torch.cuda.use_mem_pool(pool, device):
            yield
        pools.append(pool)
        for backend in there:
            try:
                backend.register_mem_pool(pool, True)
            except TypeError:  # before torch had symmetric windows
                backend.register_mem_pool(pool)

    meet()
    return memory


def _must_register(backend: Any, device: torch.device) -> None:
    lacks = [name for name in ("mem_allocator", "register_mem_pool") if not hasattr(type(backend), name)]
    if lacks:
        raise RuntimeError(
            f"mesh(registered=True): {type(backend).__name__} of torch {torch.__version__} has no "
            f"{' and no '.join(lacks)}; leave registered out"
        )
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(
            f"mesh(registered=True): NCCL cannot allocate on {torch.cuda.get_device_name(device)} (it wants NCCL 2.19 "
            "and a GPU with multicast); leave registered out"
        )
