"""Several ranks together, by the log of each one's own fake device: whether all that they launched and wait for ends.

    host      goes through its log; it waits where it synchronises the device, waits for an event or a stream, and where
              a communicator is made or connected, until the hosts of all members have come to that
    stream    in order, after what it was told to wait for
    kernel    of a communicator: begins when all that its rank launched before on communicators has begun
              (NCCL_LAUNCH_ORDER_IMPLICIT); ends when those of all members have begun, which match by their number

Everything else that was launched ends by itself. Nothing is left to chance: what each one waits for is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.harness.fake_cuda.log import HOST, Entry, Launch, Log
from yafsdp_fn.program.events import StageEvent, play


class Trouble(NamedTuple):
    """What is wrong with what a rank does, in words.

    kind: "hang": it does not end; "cold": an op of a step is the first use of a communicator; "order": members launch
    it in another order
    """

    kind: str
    rank: int
    what: str


def troubles(logs: Mapping[int, Log], *, causes: str = "", retries: bool = False) -> list[Trouble]:
    """What is wrong with the days of some ranks, by rank.

    causes: the host waits for the device only where this is in the cause
    retries: the allocator, too, waits for the device, whenever it is asked for memory
    """
    return [*_hangs(logs, causes, retries), *_orders(logs), *_cold(logs)]


def _hangs(logs: Mapping[int, Log], causes: str, retries: bool) -> Iterator[Trouble]:
    events: list[StageEvent] = []
    what: dict[int, str] = {}  # of events that someone may wait for, by number
    hosts: dict[int, list[int]] = {}  # where the host of a rank waits
    met: defaultdict[tuple[str, Launch, int], dict[int, int]] = defaultdict(dict)  # kernel or meeting -> rank -> begins

    def event(rank: int, waits: Sequence[int]) -> int:
        events.append(StageEvent(rank, str(len(events)), waits))
        return len(events) - 1

    ends: list[tuple[int, tuple[str, Launch, int]]] = []
    for rank, log in logs.items():
        tails: defaultdict[int, list[int]] = defaultdict(list)  # what the next thing on a stream waits for
        recorded: dict[int, list[int]] = {}
        launched: list[int] = []  # the last kernel of a communicator has begun
        gate: list[int] = []  # the host has come so far
        numbers: defaultdict[tuple[str, Launch], int] = defaultdict(int)
        hosts[rank] = []
        for entry in log.entries:
            if entry.launch is not None:
                of = entry.kind, entry.launch._replace(kind="")
                numbers[of] += 1
                key = *of, numbers[of]
                on_host = entry.kind == "meet"
                begin = event(rank, gate if on_host else [*gate, *tails[entry.stream], *launched])
                end = event(rank, [begin])
                met[key][rank] = begin
                ends.append((end, key))
                what[end] = entry.text
                if on_host:
                    gate = [end]
                    hosts[rank].append(end)
                else:
                    launched, tails[entry.stream] = [begin], [end]
            elif entry.kind == "record":
                recorded[entry.what] = tails[entry.stream] = [event(rank, [*tails[entry.stream], *gate])]
            elif entry.kind == "wait" and entry.stream != HOST:
                tails[entry.stream] = [*tails[entry.stream], *recorded[entry.what]]
            elif (waited := _waited(entry, tails, recorded, causes, retries)) is not None:
                gate = [event(rank, [*gate, *waited])]
                hosts[rank] += gate
                what[gate[0]] = f"the host waits for the device: {entry.text or 'an allocation'}"
    for end, (_, launch, _), members in ((end, key, met[key]) for end, key in ends):
        missing = [rank for rank in launch.members if rank in logs and rank not in members]
        waits = [*events[end].waits, *members.values(), *[len(events)] * bool(missing)]
        events[end] = events[end]._replace(waits=waits)
    never = len(events)
    times = play([*events, StageEvent(-1, "never", [never])])
    for rank, gates in hosts.items():
        stuck = next((gate for gate in gates if times[gate] is None), None)
        # what it launched that does not end, and is not launched behind something that does not either
        pending = [end for end, key in ends if met[key].get(rank) == end - 1 and times[end] is None]
        first = [f"{what[end]} waits for {_others(key, met, times, logs)}" for end, key in ends if end in pending[:1]]
        if stuck is not None or pending:
            host = "" if stuck is None or stuck in pending else what[stuck]
            yield Trouble("hang", rank, "; ".join([*[host] * bool(host), *first]))


def _others(
    key: tuple[str, Launch, int],
    met: Mapping[tuple[str, Launch, int], dict[int, int]],
    times: Sequence[object],
    logs: Mapping[int, Log],
) -> str:
    begins = met[key]
    late = [r for r in key[1].members if r in logs and (r not in begins or times[begins[r]] is None)]
    return "rank " + ", ".join(map(str, late)) if late else "what its stream does before it"


def _waited(
    entry: Entry, tails: Mapping[int, list[int]], recorded: Mapping[int, list[int]], causes: str, retries: bool
) -> list[int] | None:
    """What the host waits for; None where it goes on."""
    if (entry.kind == "sync" and causes in entry.text) or (retries and entry.kind == "make" and entry.stream != HOST):
        return [one for tail in tails.values() for one in tail]
    if entry.kind == "drain":
        return list(tails[entry.stream])
    return list(recorded[entry.what]) if entry.kind == "wait" else None


def _orders(logs: Mapping[int, Log]) -> Iterator[Trouble]:
    """Kernels of all the communicators that two ranks share are launched in one order on both; messages are free."""
    rows = {rank: [e for e in log.entries if e.kind == "launch" and e.launch is not None] for rank, log in logs.items()}
    for rank, other in ((a, b) for a in logs for b in logs if a < b):
        here, there = (
            [e for e in rows[one] if e.launch and {rank, other} <= {*e.launch.members} and e.launch.kind != "message"]
            for one in (rank, other)
        )
        for mine, theirs in zip(here, there, strict=False):
            if mine.launch != theirs.launch:
                yield Trouble("order", rank, f"{mine.text} where rank {other} has {theirs.text}")
                break


def _cold(logs: Mapping[int, Log]) -> Iterator[Trouble]:
    for rank, log in logs.items():
        for entry in log.entries:
            if entry.kind == "meet" and entry.launch is not None and "(step " in entry.text:
                yield Trouble("cold", rank, f"{entry.text} is the first {entry.launch.kind} of {entry.launch.group}")
