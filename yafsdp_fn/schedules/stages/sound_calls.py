"""Whether rows of calls are a step: on its own stage, each segment goes once forward and once backward in every
microbatch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.schedules.split import Call, Kind, Split

BEFORE: dict[Kind, tuple[Kind, ...]] = {
    "forward": (),
    "backward": ("forward",),
    "inputs": ("forward",),
    "weights": ("forward", "inputs"),
}
"""What must have been before a call of a kind; it is what it leaves behind that the call reads."""


class Wrong(NamedTuple):
    """What is wrong with a row. at: the call, by its place in the row; None where calls are missing."""

    stage: int
    at: int | None
    why: str


def wrong_calls(split: Split, rows: Sequence[Sequence[Call]], microbatches: int, trains: bool) -> Iterator[Wrong]:
    """Everything that is wrong, stage by stage; nothing, if the rows are a step."""
    for stage, row in enumerate(rows):
        done: set[Call] = set()
        for at, call in enumerate(row):
            if why := _wrong(split, stage, call, microbatches, trains, done):
                yield Wrong(stage, at, why)
            done.add(call)
        yield from _missing(split, stage, microbatches, trains, done)


def _wrong(split: Split, stage: int, call: Call, microbatches: int, trains: bool, done: set[Call]) -> str | None:
    kind, segment, microbatch = call
    if kind not in BEFORE:
        return f"{kind!r}: expected forward, backward, inputs or weights"
    if not 0 <= segment < len(split.homes):
        return f"there are segments 0 to {len(split.homes) - 1}"
    if split.homes[segment] != stage:
        return f"segment {segment} is on stage {split.homes[segment]}"
    if not 0 <= microbatch < microbatches:
        return f"there are microbatches 0 to {microbatches - 1}"
    if kind != "forward" and not trains:
        return "the step is of forwards alone"
    if call in done:
        return "it is there twice"
    for before in BEFORE[kind]:
        if call._replace(kind=before) not in done:
            return f"no {in_words(call._replace(kind=before))} before it"
    if kind in ("backward", "inputs"):
        other = call._replace(kind="inputs" if kind == "backward" else "backward")
        if other in done:
            return f"after {in_words(other)}, which is the same gradient"
    return None


def _missing(split: Split, stage: int, microbatches: int, trains: bool, done: set[Call]) -> Iterator[Wrong]:
    for segment in split.of(stage):
        for microbatch in range(microbatches):
            forward = Call("forward", segment, microbatch)
            whole, inputs, weights = (forward._replace(kind=kind) for kind in ("backward", "inputs", "weights"))
            if forward not in done:
                yield Wrong(stage, None, f"no {in_words(forward)}")
            if trains and whole not in done and weights not in done:
                yield Wrong(stage, None, f"no {in_words(weights if inputs in done else whole)}")


def in_words(call: Call) -> str:
    kind, segment, microbatch = call
    half = f" of {kind}" if kind in ("inputs", "weights") else ""
    return f"{'backward' if half else kind}{half} of segment {segment}, microbatch {microbatch}"
