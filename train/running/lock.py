"""A run's folder belongs to one process at a time, rank 0 of the run: `with held(folder) as earlier`.

The lock is the kernel's (flock): it ends with the process, however that ends, so no stale one is ever left. The file
`lock` says who holds it, or held it last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import ConfigError


@contextlib.contextmanager
def held(folder: Path, run_id: str = "") -> Iterator[dict[str, Any]]:
    """Holds `folder`, which exists; gives what the holder before wrote: `pid`, `host`, `run_id`, or nothing.

    Raises ConfigError where another process holds it, OSError where `folder` cannot be written.
    """
    path = folder / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        taken = _take(handle, path)
        earlier = _read(handle)
        if not taken:
            raise ConfigError(
                f"{folder} is in use by process {earlier.get('pid', 'unknown')} on {earlier.get('host', 'unknown')}, a "
                "run that is still going on: end that first, or give this run another --name"
            )
        with contextlib.suppress(OSError):  # on a full disk: the lock holds, its text is for people
            os.ftruncate(handle, 0)
            me = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
            os.pwrite(handle, json.dumps(me).encode(), 0)
        yield earlier
    finally:
        os.close(handle)


def _take(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        warnings.warn(f"{path}: this file system has no locks ({error}): see that no other run uses it", stacklevel=4)
    return True


def _read(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
