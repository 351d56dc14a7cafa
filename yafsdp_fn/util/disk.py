"""Writes files that survive a kill: they are on the disk before anything relies on them."""

import errno
import os
import shutil
from pathlib import Path


def write(path: Path, content: bytes) -> Path:
    """Creates a file anew, and returns when it is on the disk."""
    path.unlink(missing_ok=True)
    with path.open("xb") as stream:  # never through an existing link
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return path


def replace(path: Path, content: bytes) -> None:
    """Writes a file aside and renames it, so that it is whole or unchanged. The new name is durable after
    `sync_folder`."""
    write(path.with_name(f"{path.name}.partial"), content).replace(path)


def remove(path: Path) -> None:
    """Removes a folder with its content, a file or a link, if it exists; does not follow links."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Makes the content of a file durable, which others have written."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def lock(folder: Path) -> int | None:
    """Locks a folder, against this process too, until `unlock` or the end of the process. Raises BlockingIOError if it
    is locked. Returns None if the system, or the file system, has no locks."""
    if os.name == "nt":
        return None
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def unlock(handle: int) -> None:
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile may have the handle, too
    os.close(handle)
