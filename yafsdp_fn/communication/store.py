"""The store of the rendezvous: where ranks meet, and a time limit for the process that serves it."""

import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from yafsdp_fn.communication.streams import CommunicationError
from yafsdp_fn.util.torch_private import store_port

# ---- The store of the rendezvous, where torch's own is open to the network or does not survive a restart.


_STORES: dict[tuple[str, int, int], Any] = {}
"""Stores by address, port and rank, for the life of the process: a store outlives its process group."""


def rendezvous_store(timeout: timedelta) -> dict[str, Any]:
    """Returns arguments of `init_process_group` beside backend and timeout, from the launcher's environment.

    - MASTER_ADDR is a loopback address: rank 0 serves a store that listens there alone. torch's own listens on all
      addresses, and whoever reaches it can read and write its keys.
    - torchrun serves the store, for all attempts of a run: each attempt gets keys of its own. Else it would find the
      addresses that ranks of the previous attempt left, and wait for them.
    - else torch makes the store.

    Raises RuntimeError if rank 0 cannot listen: another job has the port.
    """
    if "MASTER_ADDR" not in os.environ:
        return {}  # torch names what is missing
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        keys = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}, {world} ranks"
        store: Any = dist.TCPStore(address, port, world, False, timeout)  # type: ignore[attr-defined]
    elif _is_loopback(address):
        place = address, port, rank
        if place not in _STORES:
            _STORES[place] = _loopback_store(address, port, rank, world, timeout)
        store = _STORES[place]
        keys = f"meeting {store.add(f'meetings of rank {rank}', 1)}"  # a process group after the first has its own
    else:
        return {}
    return {"store": dist.PrefixStore(keys, store), "rank": rank, "world_size": world}  # type: ignore[attr-defined]


def _loopback_store(address: str, port: int, rank: int, world: int, timeout: timedelta) -> Any:
    listening: dict[str, Any] = {}
    if rank == 0:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            served = socket.create_server(where[:2], family=family)
        except OSError as error:
            raise RuntimeError(
                f"rank 0 cannot listen on {address}, port {port}: {error}; give another MASTER_PORT"
            ) from error
        port = served.getsockname()[1]
        listening = {"master_listen_fd": served.detach()}  # the store's from here on
    return dist.TCPStore(address, port, world, rank == 0, timeout, wait_for_workers=False, **listening)  # type: ignore[attr-defined]


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # another name
        return False


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
    silent = threading.Event()

    def give_up() -> None:
        silent.set()
        disconnect_store()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if not silent.is_set():
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
