"""Where a thread is in Python, seen from another one: the user's line, and whether it is in a collective of torch's."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

OWN = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STANDARD = str(Path(os.__file__).parent) + os.sep
COMMUNICATION = OWN + "comm" + os.sep
COLLECTIVES = TORCH + "distributed" + os.sep


def line(thread: int) -> str:
    """`model.py:41 in block`, the innermost one outside of this library, torch and the standard library; "" without."""
    for frame in _frames(thread):
        code = frame.f_code
        if not code.co_filename.startswith((OWN, TORCH, "<")) and not _standard(code.co_filename):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
    return ""


def collective(thread: int) -> str | None:
    """The function of torch.distributed that it is in, such as a barrier; nothing is known of others' work in it."""
    code = next((frame.f_code for frame in _frames(thread)), None)
    return (
        f"torch.distributed.{code.co_name}" if code is not None and code.co_filename.startswith(COLLECTIVES) else None
    )


def waits(thread: int) -> bool:
    """Whether it is in communication: waits for a stream, or is in a collective."""
    for frame in _frames(thread):
        file = frame.f_code.co_filename
        if not _standard(file):
            return file.startswith((COMMUNICATION, COLLECTIVES))
    return False


def _frames(thread: int) -> Iterator[FrameType]:
    """The innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _standard(file: str) -> bool:
    return file.startswith(STANDARD) and "site-packages" not in file
