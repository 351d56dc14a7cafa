"""Finds hazards: who must wait for whom. Nobody ever writes a wait by hand.

    for buffer in reads:   wait for its last writer; become a reader
    for buffer in writes:  wait for its last writer and for the readers since; become the writer

Every op declares the buffers it reads and writes; one scoreboard runs through the whole life of a state. A wait always
points to an op issued earlier, and all ranks issue in one order, so nothing that is issued can deadlock.
"""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from yafsdp_fn.program.ops import Buffer

Key = TypeVar("Key")


# ---- Who used a buffer last.


class Scoreboard(Generic[Key]):
    """The last uses of each buffer, by keys in issue order: op numbers in a simulation, events in the engine.

    >>> board = ya.schedules.Scoreboard()
    >>> board.use("gather", "gather", reads=[], writes=[("slot", 0)])
    []
    >>> board.use("forward", "compute", reads=[("slot", 0)], writes=[])        # waits for the gather
    ['gather']
    """

    def __init__(self) -> None:
        self._writer: dict[Buffer, tuple[str, Key]] = {}
        self._readers: dict[Buffer, dict[str, Key]] = {}
        self.open: list[Key] = []  # uses that go on: what is used inside of one must not wait for it

    def use(self, key: Key, stream: str, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> list[Key]:
        """Records a use; returns the uses that it must wait for.

        A stream runs in order: its last reader stands for all, and a use waits for nothing on its own stream.
        """
        writer, readers = self._writer, self._readers
        waits: dict[Key, None] = {}
        for buffer in reads:
            last = writer.get(buffer)
            if last is not None and last[0] != stream:
                waits[last[1]] = None
            others = readers.get(buffer)
            if others is None:
                readers[buffer] = {stream: key}
            else:
                others[stream] = key
        for buffer in writes:
            last = writer.get(buffer)
            if last is not None and last[0] != stream:
                waits[last[1]] = None
            if (others := readers.pop(buffer, None)) is not None:
                for at, use in others.items():
                    if at != stream:
                        waits[use] = None
            writer[buffer] = stream, key
        return [use for use in waits if use not in self.open] if self.open else [*waits]

    def forget(self, *buffers: Buffer) -> None:
        """Drops buffers that no longer exist."""
        for buffer in buffers:
            self._writer.pop(buffer, None)
            self._readers.pop(buffer, None)

    def clear(self) -> None:
        """Forgets everything; only when all streams are idle."""
        self._writer.clear()
        self._readers.clear()
        self.open.clear()


# ---- A use that begins and ends here, on the compute stream.


class Use:
    """A use of buffers on the compute stream, for `with`: waits for earlier uses on others, and ends with its block.

    event: what its end completes; None where all runs on one stream, in order; run: observes the op, if anything does
    """

    __slots__ = ("_board", "_event", "_run", "_waits")

    def __init__(
        self, board: Scoreboard[Any], event: Any, reads: Iterable[Buffer], writes: Iterable[Buffer], run: Any = None
    ) -> None:
        self._board, self._event, self._run = board, event, run
        self._waits: list[Any] = [] if event is None else board.use(event, "compute", reads, writes)

    def __enter__(self) -> None:
        event, run = self._event, self._run
        if event is not None:
            self._board.open.append(event)
        try:
            for wait in self._waits:
                if not wait.over:
                    wait.wait()
            if run is not None:
                run.on("compute", event, self._waits)
                run.begin()
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._run is not None and kind is None:
                self._run.end()
        finally:
            if (event := self._event) is not None:
                event.complete()
                if event in self._board.open:  # else a failure has cleared the board
                    self._board.open.remove(event)
