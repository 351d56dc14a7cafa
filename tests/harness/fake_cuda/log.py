"""What a run did on streams, in the order of the host, and what in it was left to chance.

    make, free      memory of a stream begins and ends, as the caching allocator has it
    use             work on a stream reads or writes bytes of a storage
    record, wait    an event, on a stream; `wait` of the host: it blocks
    keep            `record_stream`: freed memory waits for what the stream has been given until then
    sync            the host waits for the whole device; it orders nothing, since it may not do so the next time
    launch, meet    a kernel of a communicator, `Launch`; hosts make or connect one (together.py)

Streams have vector clocks: `clock[s][t]` is the last epoch of stream t that stream s has waited for. Two uses of one
byte are ordered if they are on one stream, or the later one's clock has reached the earlier one's epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

HOST = 0
"""The host is a stream, too: what it launches comes after what it has done and waited for."""

END = 1 << 62
"""Of any storage."""


class Launch(NamedTuple):
    """A collective or a message. group: the communicator, by name; members: global ranks that take part in it"""

    group: str
    members: tuple[int, ...]
    kind: str


class Entry(NamedTuple):
    """stream: whose; of `wait`: who waits. what: a storage, or the number of a recorded event"""

    kind: Literal["make", "free", "use", "record", "wait", "keep", "drain", "sync", "launch", "meet"]
    stream: int
    what: int
    start: int = 0  # bytes of the storage
    stop: int = 0
    writes: bool = False
    text: str = ""
    launch: Launch | None = None


class Log:
    """Entries of one run. names: of streams; text: what is under way, for entries"""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.names: dict[int, str] = {HOST: "host", 1: "compute"}
        self.text = ""
        self._events = 0
        self._seen: dict[int, set[tuple[int, int, int, bool]]] = {}  # uses since a stream's last event

    def use(self, stream: int, storage: int, start: int, stop: int, writes: bool, op: str) -> None:
        key = storage, start, stop, writes
        seen = self._seen.setdefault(stream, set())
        if key not in seen:  # in one epoch the first one stands for all
            seen.add(key)
            self.entries.append(Entry("use", stream, storage, start, stop, writes, f"{op} ({self.text})"))

    def record(self, stream: int) -> int:
        self._events += 1
        self._seen.pop(stream, None)
        self.entries.append(Entry("record", stream, self._events, text=self.text))
        return self._events

    def wait(self, stream: int, event: int) -> None:
        self.entries.append(Entry("wait", stream, event, text=self.text))

    def sync(self, cause: str) -> None:
        self.entries.append(Entry("sync", HOST, 0, text=f"{cause} ({self.text})"))

    def launch(self, kind: Literal["launch", "meet"], stream: int, launch: Launch) -> None:
        self.entries.append(Entry(kind, stream, 0, text=self.text or f"{launch.kind} of {launch.group}", launch=launch))

    def add(self, kind: Literal["make", "free", "keep", "drain"], stream: int, what: int = 0) -> None:
        if kind == "free":
            for seen in self._seen.values():  # another storage may get its number
                seen.difference_update([key for key in seen if key[0] == what])
        self.entries.append(Entry(kind, stream, what, text=self.text))


class Finding(NamedTuple):
    """Two uses that nothing orders, or memory freed under a use."""

    kind: Literal["race", "early free"]
    first: str
    second: str


class _Use(NamedTuple):
    epoch: int
    entry: Entry


class Clocks:
    """How far each stream has waited for the others, at one place of a log, and the uses until there."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        streams = 1 + max(names)
        self._clocks = [[int(stream == other) for other in range(streams)] for stream in range(streams)]
        self._events: dict[int, list[int]] = {}
        self._uses: dict[int, dict[tuple[int, int, int, bool], _Use]] = {}
        self._made: dict[int, int] = {}
        self._kept: dict[int, set[int]] = {}
        self._freed: dict[int, list[_Use]] = {}  # by owner: what other streams did with memory that it gets back

    def fork(self) -> Clocks:
        out = Clocks(self._names)
        out._clocks = [list(clock) for clock in self._clocks]
        out._events = dict(self._events)
        out._made = dict(self._made)
        out._uses = {storage: dict(uses) for storage, uses in self._uses.items()}
        out._kept = {storage: set(streams) for storage, streams in self._kept.items()}
        out._freed = {owner: list(uses) for owner, uses in self._freed.items()}
        return out

    def covers(self, wait: Entry) -> bool:
        """Whether its stream has waited for as much already."""
        mine = self._clocks[wait.stream]
        host = self._clocks[HOST]
        return all(a <= max(b, c) for a, b, c in zip(self._events[wait.what], mine, host, strict=True))

    def walk(self, entry: Entry) -> list[Finding]:
        """Goes on by one entry; gives what is wrong with it."""
        clock = self._clocks[entry.stream]
        if entry.stream != HOST:  # launched now
            _join(clock, self._clocks[HOST])
        match entry.kind:
            case "record":
                self._events[entry.what] = list(clock)
                clock[entry.stream] += 1
            case "wait":
                _join(clock, self._events[entry.what])
            case "drain":
                _join(self._clocks[HOST], clock)
                clock[entry.stream] += 1
            case "make":
                # it may have had another owner, whose work the stream has still to do
                self._made[entry.what] = entry.stream
                use = entry._replace(stop=END, writes=True, text=f"makes memory ({entry.text})")
                return self._use(use, clock) + self._given_again(use, clock)
            case "keep":
                self._kept.setdefault(entry.what, set()).add(entry.stream)
            case "use":
                return self._use(entry, clock)
            case "free":
                self._free(entry)
        return []

    def _use(self, entry: Entry, clock: Sequence[int]) -> list[Finding]:
        uses = self._uses.setdefault(entry.what, {})
        found = []
        for before in uses.values():
            other = before.entry
            if (
                (entry.writes or other.writes)
                and other.stream != entry.stream
                and other.start < entry.stop
                and entry.start < other.stop
                and clock[other.stream] < before.epoch
            ):
                found.append(Finding("race", self._said(other), self._said(entry)))
        key = entry.stream, entry.start, entry.stop, entry.writes
        uses[key] = _Use(clock[entry.stream], entry)
        return found

    def _free(self, entry: Entry) -> None:
        owner = self._made.pop(entry.what, None)
        kept = self._kept.pop(entry.what, set())
        uses = self._uses.pop(entry.what, {})
        if owner is not None:
            others = [use for use in uses.values() if use.entry.stream not in (owner, *kept)]
            self._freed.setdefault(owner, []).extend(others)

    def _given_again(self, make: Entry, clock: Sequence[int]) -> list[Finding]:
        """The allocator gives what was freed to the next who asks on the same stream, and asks nobody else."""
        return [
            Finding("early free", self._said(use.entry), self._said(make))
            for use in self._freed.pop(make.stream, [])
            if clock[use.entry.stream] < use.epoch
        ]

    def _said(self, entry: Entry) -> str:
        how = "writes" if entry.writes else "reads"
        return f"{self._names.get(entry.stream, entry.stream)} {how} {entry.start}:{entry.stop}: {entry.text}"


def findings(log: Log) -> list[Finding]:
    """What is wrong in a run, each once."""
    clocks = Clocks(log.names)
    return list(dict.fromkeys(found for entry in _shared(log.entries) for found in clocks.walk(entry)))


Verdict = Literal["found", "implied", "idle"]


def without_each_wait(log: Log) -> Iterator[tuple[Entry, Verdict]]:
    """What a run without one of its waits looks like, for each wait of a stream.

    found: a race or an early free; implied: before its stream does anything, other waits have it wait for as much;
    idle: it waits for less then, but what it does is ordered by later waits all the same
    """
    entries = _shared(log.entries)
    clocks = Clocks(log.names)
    for place, entry in enumerate(entries):
        if entry.kind == "wait" and entry.stream != HOST:
            yield entry, _without(entry, clocks.fork(), entries[place + 1 :])
        clocks.walk(entry)


def _without(wait: Entry, clocks: Clocks, rest: Sequence[Entry]) -> Verdict:
    acted = False
    for entry in rest:
        if entry.stream == wait.stream and entry.kind != "wait" and not acted:
            if clocks.covers(wait):
                return "implied"
            acted = True
        if clocks.walk(entry):
            return "found"
    return "idle"


def _join(clock: list[int], other: Sequence[int]) -> None:
    for stream, epoch in enumerate(other):
        if epoch > clock[stream]:
            clock[stream] = epoch


def _shared(entries: Sequence[Entry]) -> list[Entry]:
    """Without the storages that one stream alone uses: they cannot go wrong."""
    users: dict[int, set[int]] = {}
    for entry in entries:
        if entry.kind in ("use", "make"):
            users.setdefault(entry.what, set()).add(entry.stream)
    alone = {storage for storage, streams in users.items() if len(streams) == 1}
    return [e for e in entries if e.kind not in ("use", "free", "keep") or e.what not in alone]
