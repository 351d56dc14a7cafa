"""Ranks on this machine, as every launcher starts and awaits them: of the standard library alone, so that none of them
waits for imports.

bind = dies_with(os.getpid())
for rank in range(ranks):
    start a process with environment(rank, ranks, port), that calls bind() first
first = wait(processes, grace=2.0)      # all have ended; or one has failed, and the others had their time
kill those that are left
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
LOOK = 0.05
"""Seconds between two looks at processes."""


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank, to be added to the environment. port: of the ranks' store

    gloo listens on the loopback interface alone, unless GLOO_SOCKET_IFNAME names another.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback and "GLOO_SOCKET_IFNAME" not in os.environ else {}),
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def dies_with(parent: int) -> Callable[[], None]:
    """Returns a function for a child of the process `parent`, to be called before it becomes a rank: Linux is to kill
    it when the thread that started it ends. Elsewhere it does nothing."""
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl  # found here: a child between fork and exec had better not import

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


def wait(
    ranks: Sequence[Any],
    grace: float,
    pause: Callable[[], object] = lambda: time.sleep(LOOK),
    stopped: Callable[[Any], bool] = lambda rank: False,
) -> Any:
    """Waits until all ranks have ended, or nothing more is to come. Returns the one that failed first, or None.

    Where one has failed, the others may go on for `grace` seconds, unless all of them are stopped (SIGSTOP). Where the
    others have ended well, ranks that are stopped are waited for as long, in case that somebody continues them.

    ranks: each with `poll`: None while it runs, then 0 where it has ended well, as of a `subprocess.Popen`
    pause: is called between two looks; stopped: tells whether a rank that runs is stopped
    """
    first = None
    since = None
    while True:
        running = [rank for rank in ranks if rank.poll() is None]
        first = first or next((rank for rank in ranks if rank.poll()), None)
        frozen = all(map(stopped, running))
        doomed = first or (frozen and len(running) < len(ranks))
        since = (since or time.monotonic()) if doomed else None
        late = since is not None and time.monotonic() - since > grace
        if not running or late or (first and frozen):
            return first
        pause()
