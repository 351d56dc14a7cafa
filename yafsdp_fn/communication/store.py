"""The store of the rendezvous: where ranks meet, and a time limit for the process that serves it."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from yafsdp_fn.communication.streams import CommunicationError
from yafsdp_fn.util.torch_private import store_port

# ---- The store of the rendezvous.


_STORES: dict[tuple[str, int, int], Any] = {}
"""Stores by address, port and rank, for the life of the process: a store outlives its process group."""


def rendezvous_store(timeout: timedelta) -> dict[str, Any]:
    """Returns arguments of `init_process_group` beside backend and timeout, from the launcher's environment.

    Rank 0 serves the store, or torchrun's agent does, for all attempts of a run. Each attempt, and each process group
    of a process, gets keys of its own: else it would find the addresses that earlier ranks left, and wait for them.
    Nobody waits for the others to connect, as with torch's own store: that wait does not say who is missing, while
    gloo's does. Raises RuntimeError for an environment that no launcher makes.
    """
    try:
        address = os.environ["MASTER_ADDR"]
        port, rank, world = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    except KeyError as error:
        raise RuntimeError(
            f"WORLD_SIZE is in the environment, and {error.args[0]} is not, which a launcher sets, too. Start ranks by "
            "torchrun or ya.launch; to be alone, unset WORLD_SIZE"
        ) from error
    if not 0 <= rank < world:
        raise RuntimeError(
            f"RANK={rank}, WORLD_SIZE={world}: expected a rank below WORLD_SIZE; one of them is left over"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        keys = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}, {world} ranks"
        store: Any = dist.TCPStore(address, port, world, False, timeout)  # type: ignore[attr-defined]
    else:
        place = address, port, rank
        if place not in _STORES:
            _STORES[place] = dist.TCPStore(address, port, world, rank == 0, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        store = _STORES[place]
        keys = f"meeting {store.add(f'meetings of rank {rank}', 1)}"
    return {"store": dist.PrefixStore(keys, store), "rank": rank, "world_size": world}  # type: ignore[attr-defined]


# ---- A time limit for the process that serves the store of the rendezvous; torch waits for its answers without one.
#
#     with answers(timeout, "making groups"):  # the server has frozen: CommunicationError instead of waiting for ever
#         dist.new_group(...)
#
# A step's own thread waits for the store only where ranks meet and make groups. torch's timeouts there concern other
# ranks, and begin when the server has answered.

LATER = 5.0
"""Seconds added to torch's own timeout, which names a missing rank and should come first."""


@contextmanager
def answers(timeout: timedelta | None, what: str) -> Iterator[None]:
    """Makes calls in this block that wait for the store's server raise CommunicationError a little after `timeout`.

    Only a closed connection ends such a call: this process disconnects from the store for good.
    """
    if timeout is None or store_port() is None:
        yield
        return
    seconds = timeout.total_seconds() + LATER
    end = time.monotonic() + seconds
    timer = threading.Timer(seconds, disconnect_store)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() < end:
            raise
        raise CommunicationError(
            f"rank {os.environ.get('RANK', '?')}: {what}: the process that keeps the store of the process group, often "
            f"that of rank 0, does not answer for {seconds:.0f} s: it is frozen, or out of reach. Restart all ranks"
        ) from error
    finally:
        timer.cancel()


def new_group(
    ranks: list[int] | None, timeout: timedelta | None, backend: str | None, name: str, **more: Any
) -> ProcessGroup:
    """Calls `dist.new_group` under the time limit. name: for torch's own messages"""
    with answers(timeout, f"making the process group {name}"):
        made: ProcessGroup = dist.new_group(ranks, timeout, backend, group_desc=f"yafsdp {name}", **more)
        return made


def disconnect_store() -> None:
    """Shuts down every connection of this process to the store; whoever waits for an answer there gets an error."""
    port = store_port()
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            connection = socket.socket(fileno=number)  # OSError where that is none
            try:
                if connection.getpeername()[1:2] == (port,):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
