"""Where ranks meet, in place of torch's way where that is open to the network, or does not survive a restart."""

import ipaddress
import itertools
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist


class Meetings(NamedTuple):
    """A store, and how often the ranks have met there: each process group after the first has keys of its own."""

    store: Any
    numbers: Iterator[int]


_MEETINGS: dict[tuple[str, int, int], Meetings] = {}
"""By address, port and rank; as long as the process lives: a store stays when a process group is destroyed."""


def meeting_store(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` beside backend and timeout, from the environment that a launcher made.

    - MASTER_ADDR is a loopback address: rank 0 serves a store that listens there alone. torch's own listens on all
      addresses, and whoever reaches it reads and writes its keys.
    - torchrun serves the store, for all attempts of a run: an attempt has keys of its own. It would find the addresses
      that ranks of the one before left, and wait for them.
    - else torch makes it.

    Raises RuntimeError where rank 0 cannot listen: another job has the port.
    """
    if "MASTER_ADDR" not in os.environ:
        return {}  # torch names what is missing
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}, {world} ranks"
        kept: Any = dist.TCPStore(address, port, world, False, timeout)  # type: ignore[attr-defined]
        return {"store": dist.PrefixStore(attempt, kept), "rank": rank, "world_size": world}  # type: ignore[attr-defined]
    if not _is_loopback(address):
        return {}
    listening: dict[str, Any] = {}
    place = address, port, rank
    made = _MEETINGS.get(place)
    if rank == 0 and made is None:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            served = socket.create_server(where[:2], family=family)
        except OSError as error:
            raise RuntimeError(
                f"rank 0 cannot listen on {address}, port {port}: {error}; give another MASTER_PORT"
            ) from error
        port = served.getsockname()[1]
        listening = {"master_listen_fd": served.detach()}  # the store's from here on
    if made is None:
        store = dist.TCPStore(address, port, world, rank == 0, timeout, wait_for_workers=False, **listening)  # type: ignore[attr-defined]
        made = _MEETINGS[place] = Meetings(store, itertools.count())
    number = f"meeting {next(made.numbers)}"
    return {"store": dist.PrefixStore(number, made.store), "rank": rank, "world_size": world}  # type: ignore[attr-defined]


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # another name
        return False
