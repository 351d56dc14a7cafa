"""Inputs from other people, damaged: a loader must load them right or refuse them clearly, whatever they are.

    for text in (json_damage(good, rng) for ...):  # `rng` is seeded by the input's number: each can be made again
    with confined(folder) as watch:                # memory is limited, and what is opened or run is looked at
        loader(text)

Every search has a small sample by default; `FUZZ=all` makes it 10,000 inputs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

INPUTS = 10_000 if os.environ.get("FUZZ") == "all" else 250
PARTS = [range(at, min(at + 1000, INPUTS)) for at in range(0, INPUTS, 1000)]
"""The numbers of the inputs; a process is asked for one part at a time."""

ROOM, SLACK, SECONDS = 256 * 2**20, 2 * 2**20, 5.0
"""Address space beyond what the process has; memory of a loader beyond twice its input; its time on a processor."""

RUN = ("exec", "compile", "os.system", "os.exec", "os.fork", "subprocess.Popen", "pickle.find_class", "import")
"""Events of Python's audit that no loader may cause."""

DEEP = "<deep>"
TWICE = "<twice>"
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 1.0, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 1_000_000),
    *("", "x", "0", "null", "\x00", "\ud800", "é" * 50, "x" * 5000, "../secret.safetensors", "/etc/passwd"),
    *([], {}, [0], [[]], [None], {"": 0}, [0] * 300, [[]] * 300, {"x": {"x": []}}, DEEP, TWICE),
]


def put(text: str, *path: Any) -> str:
    """JSON with the last of `path` where the rest of it leads."""
    data = at = json.loads(text)
    *way, last, value = path
    for key in way:
        at = at[key]
    at[last] = value
    return json.dumps(data)


def json_damage(good: Any, rng: Random) -> bytes:
    """`good` as JSON, with some of its values replaced, removed, moved or repeated, and at times its text cut."""
    value = copy.deepcopy(good)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 5))):
        value = _changed(value, rng)
    text = json.dumps(value)
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{TWICE}"', '{"a": 1, "a": 2}')
    data = text.encode()
    return byte_damage(data, rng) if rng.random() < 0.15 else data


def _changed(value: Any, rng: Random) -> Any:
    """`value` with one of the values in it changed: mostly to one that could be there."""
    place = _place(value, rng)
    other = _place(value, rng)
    if place is None or other is None:
        return rng.choice(ODD)
    (holder, key), (other_holder, other_key) = place, other
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 2 if isinstance(holder, list):
            holder[key], holder[0] = holder[0], holder[key]
        case 3 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(holder)))
        case 3:
            holder[str(rng.choice(ODD))] = holder.pop(key)
        case _ if type(holder[key]) is int and rng.random() < 0.8:
            holder[key] += rng.choice((1, 1, -1, -1, 2, 7, 10**6))
        case _ if type(holder[key]) is bool and rng.random() < 0.8:
            holder[key] = not holder[key]
        case _:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return value


def _place(value: Any, rng: Random) -> tuple[Any, Any] | None:
    """A container in `value`, and the key of an item in it: one of the first level, or of a deeper one."""
    found = None
    while isinstance(value, dict | list) and value and (found is None or rng.random() < 0.85):
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found = (value, key)
        value = value[key]
    return found


def byte_damage(data: bytes, rng: Random) -> bytes:
    """`data` with bits flipped, cut short or in its middle, spliced, or with numbers of 8 bytes at the limits."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        a, b = sorted(rng.randrange(len(out) + 1) for _ in range(2)) if out else (0, 0)
        match rng.randrange(6):
            case 0:
                del out[a:]
            case 1:
                del out[a : min(b, a + 50)]
            case 2:
                out[a:a] = out[a : min(b, a + 200)]
            case 3:
                limits = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, len(out), len(out) - 8, 100_000_001)
                at = rng.choice((0, 0, a))
                out[at : at + 8] = max(rng.choice(limits), 0).to_bytes(8, "little")
            case 4:
                out[a:b] = rng.randbytes(min(b - a, 20))
            case _:
                for _ in range(rng.choice((1, 1, 4))):
                    if out:
                        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def search(
    name: str,
    numbers: range,
    make: Callable[[Random], int],
    load: Callable[[], Any],
    folder: Path,
    refusals: tuple[type[Exception], ...],
) -> Counter[str]:
    """How many of the inputs of these numbers were loaded, and how many refused, by kind of error. Raises at the first
    one with which a loader does anything else, and says its number.

    make: writes an input, and returns its bytes; load: loads it, raises AssertionError where it was loaded wrong
    """
    found: Counter[str] = Counter()
    with confined(folder) as seen:
        for number in numbers:
            nbytes = make(Random(f"{name} {number}"))
            seen.clear()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            began = time.process_time()
            try:
                load()
                outcome = "loaded"
            except refusals as error:
                outcome = type(error).__name__
                assert 10 < len(str(error)) < 2000 + 4 * nbytes, f"{name} {number}: says {str(error)[:100]!r}"
            except BaseException as error:
                raise AssertionError(f"{name} {number}: {type(error).__name__}: {str(error)[:300]}") from error
            took = time.process_time() - began
            peak = tracemalloc.get_traced_memory()[1] - before
            assert took < SECONDS, f"{name} {number}: {took:.1f} s"
            assert peak < 2 * nbytes + SLACK, f"{name} {number}: {peak} bytes for an input of {nbytes}"
            assert not seen, f"{name} {number}: {seen[:3]}"
            found[outcome] += 1
    return found


@contextlib.contextmanager
def confined(folder: Path) -> Iterator[list[str]]:
    """Memory is limited and traced; what is run, or opened outside of `folder`, is listed. For a process of its own."""
    seen: list[str] = []
    on = [True]
    allowed = (str(folder), sys.prefix, sys.base_prefix, "/proc/self", "/dev/null")

    def look(event: str, args: tuple[Any, ...]) -> None:
        if not on[0]:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            if not os.path.abspath(os.fsdecode(args[0])).startswith(allowed):
                seen.append(f"open {args[0]!r}")
        elif event in RUN and (event != "import" or args[0] not in sys.modules):
            seen.append(f"{event} {str(args[:1])[:80]}")

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, limits[1]))
    sys.addaudithook(look)  # it cannot be removed
    tracemalloc.start()
    try:
        yield seen
    finally:
        on[0] = False
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, limits)
