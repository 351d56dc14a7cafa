"""Writes files that survive a kill: they are on the disk before anything relies on them."""

import errno
import mmap
import os
import shutil
import stat
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import BinaryIO


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


# ---- Files that processes of one user share, such as those in `/dev/shm`.


def private_folder(path: Path) -> None:
    """Makes a folder for this user. Raises PermissionError if it is another user's, who could change what is there."""
    path.mkdir(0o700, parents=True, exist_ok=True)
    if (owner := path.stat().st_uid) not in (0, os.geteuid()):  # root's: /dev/shm itself
        raise PermissionError(f"{path} is user {owner}'s, who could change what is kept there; name another folder")


def made(path: Path) -> BufferedRandom:
    """Creates a new file that nobody else can read; does not write through an existing link."""
    remove(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(handle, "w+b")


def opened(path: Path) -> BufferedReader:
    """Opens a file. Raises OSError if this user did not write it: a link, a folder, a pipe, another user's file."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe would wait for a writer
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(handle)
        raise OSError(f"{path} is no file of this user")
    return os.fdopen(handle, "rb")


def room(stream: BinaryIO, size: int) -> mmap.mmap:
    """Gives a new file so many bytes, and maps them."""
    if hasattr(os, "posix_fallocate"):  # else the first write beyond what the host has ends the process
        os.posix_fallocate(stream.fileno(), 0, size)
    else:
        stream.truncate(size)
    return mmap.mmap(stream.fileno(), size)
