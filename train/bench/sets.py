"""Whose turn it is, where contenders live in several sets of rank processes, of which one works at a time.

A contender that needs another environment than the rest, such as another malloc, is in rank processes of its own. All
sets count through the same turns; a set sleeps while others work, its rank 0 in a named pipe, which gets one byte when
the set is next, and its other ranks in the barrier before a step: neither costs CPU time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist


class Turns:
    """This set's part.

    pipes: by contender, the pipe that its set waits in; {} where there is one set
    mine: contenders of this set
    """

    def __init__(self, pipes: Mapping[str, str], mine: Mapping[str, object], rank: int) -> None:
        # read and write, so that opening waits for nobody and no end of file is ever read
        self._ends = {path: os.open(path, os.O_RDWR) for path in set(pipes.values())} if rank == 0 else {}
        self._pipes, self._mine = pipes, mine
        self._working: bool | None = None  # None: before the first turn

    def mine(self, name: str) -> bool:
        """At the turn of `name`: waits until its set may work, if that is this one, else wakes it. Collective."""
        if name in self._mine:
            if self._working is False and self._ends:
                os.read(self._ends[self._pipes[name]], 1)
            self._working = True
            dist.barrier()
            return True
        if self._working:
            dist.barrier()  # every rank has ended its step
            if self._ends:
                os.write(self._ends[self._pipes[name]], b".")
        self._working = False
        return False
