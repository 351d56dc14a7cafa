"""Files that are to outlive a kill: on the disk before anything relies on them."""

import errno
import os
from pathlib import Path


def write(path: Path, content: bytes) -> Path:
    """Makes a file anew, and returns when it is on the disk."""
    path.unlink(missing_ok=True)
    with path.open("xb") as stream:  # never through a link that lies there
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return path


def replace(path: Path, content: bytes) -> None:
    """Writes a file aside and renames it: it is whole, or as before. Its new name lasts after `sync_folder`."""
    write(path.with_name(f"{path.name}.partial"), content).replace(path)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last; returns where the system cannot."""
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
