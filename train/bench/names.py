"""Names of contenders: a schedule of ours or a peer, with what is switched on and off after dashes.

    zero3-resident2-update          a schedule: a builder, and options of it
    zero3-unroll8-compile           its levers outside of schedules
    torch-fsdp2-tuned               the peer `fsdp2`, in rank processes of its own

    -unrollK       ya.scan(unroll=K): K consecutive layers are one visit
    -compile       torch.compile of the block, once for all layers
    -nolinear      F.linear and F.embedding in place of ya's, which write weight gradients into their slot
    -noexchange    gloo's own collectives in place of sends and receives
    -nofused       the optimizer's definition in place of torch's fused kernel
    -deterministic a mesh on which bits do not depend on the number of ranks
    -tuned         rank processes of its own, whose glibc keeps freed memory (`MALLOC_TUNED`)

Peers take -compile and -tuned.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import yafsdp_fn as ya
from train.config import SCHEDULES

BUILDERS = (*SCHEDULES, "fsdp2")
NUMBERED = ("resident", "prefetch", "chunk")
HALVES = {"hsdp": "two copies of the state", "hpz": "two nodes"}
"""Builders that cut the ranks in two, and into what."""


def parse(name: str, flag: str = "--schedules", *, more: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """`(builder, options)`. Raises ValueError for a builder, an option or a pair of options that does not exist.

    flag: where the name was given, for errors; more: what else names take there, as errors show it
    """
    builder, *words = name.split("-")
    if builder not in BUILDERS:
        raise ValueError(f"{flag} {name}: there is no builder {builder!r}; there are {', '.join(BUILDERS)}")
    options: dict[str, Any] = {}
    for word in words:
        option, number = word.rstrip("0123456789"), re.sub(r"\D", "", word)
        takes = option in NUMBERED
        if option not in _options(builder) or option in options or takes != bool(number):
            raise ValueError(
                f"{flag} {name}: {builder} does not take -{word} here; it takes each of "
                f"{', '.join([*(_shown(o) for o in _options(builder)), *more])} once"
            )
        options[option] = int(number) if takes else ya.schedules.remat.all if option == "remat" else True
    if options.get("chunk", 2) < 2:
        raise ValueError(f"{flag} {name}: expected two or more chunks; one is {builder} without -chunkN")
    if "chunk" in options and "remat" in options:
        raise ValueError(
            f"{flag} {name}: chunks are recomputed anyway, and with -remat a layer would run its forward a third "
            "time; leave one of them out"
        )
    return builder, options


def _options(builder: str) -> list[str]:
    parameters = inspect.signature(getattr(ya.schedules, builder)).parameters.values()
    said = [p for p in parameters if p.name in NUMBERED or p.default in (False, "none")]
    return [*(p.name for p in said if p.kind is p.KEYWORD_ONLY), "chunk"]


def _shown(option: str) -> str:
    return f"-{option}{'N' if option == 'chunk' else 'K'}" if option in NUMBERED else f"-{option}"


def check_ranks(name: str, ranks: int) -> None:
    """Raises ValueError where the mesh of schedule `name` cannot be made of so many ranks."""
    builder, _ = parse(name)
    if builder in HALVES and ranks % 2:
        raise ValueError(
            f"--schedules {name} with --ranks {ranks}: {builder} makes {HALVES[builder]} of the ranks here, and needs "
            "an even number of them"
        )


def mesh(name: str, ranks: int) -> dict[str, Any]:
    """The arguments of `ya.mesh` that the schedule needs."""
    builder, _ = parse(name)
    made = {"ddp": {"replicate": ranks, "shard": 1}, "hsdp": {"replicate": 2}, "hpz": {"local": ranks // 2}}
    return made.get(builder, {})


def check_chunks(name: str, microbatches: int, rows: int) -> None:
    """Raises ValueError where schedule `name` cuts a rank's rows into unequal parts, or into other parts than the
    contenders beside it."""
    chunks = parse(name)[1].get("chunk", microbatches)
    if microbatches > 1 and chunks != microbatches:
        raise ValueError(
            f"--schedules {name} with --microbatches {microbatches}: -chunk{microbatches} does as many in layer-major "
            "order, on the same rows; without --microbatches any number is compared with the whole batch"
        )
    if rows % chunks:
        raise ValueError(
            f"--schedules {name}: a rank's {rows} sequence(s) do not divide into {chunks} chunks (--batch)"
        )


def split(name: str, microbatches: int) -> tuple[int, int]:
    """`(microbatches, chunks)` that schedule `name` cuts the rows of a rank into: in depth order, or layer-major."""
    chunks = parse(name)[1].get("chunk", 1)
    return (1 if chunks > 1 else microbatches), chunks


def make(name: str, layers: int, **more: Any) -> ya.schedules.Schedule:
    """The schedule called `name`, for a model of so many layers; more: options that names cannot say."""
    builder, options = parse(name)
    options |= more
    options.pop("chunk", None)
    factory: Callable[..., ya.schedules.Schedule] = getattr(ya.schedules, builder)
    return factory(layers, **options) if builder == "hpz" else factory(**options)


PEERS = ("fsdp2", "ddp", "plain")
PEER = "torch-"
"""Prefix of the names of peers, where they stand beside ours."""

OF_PEERS = ("compile", "tuned")
OF_OURS = ("unroll", "compile", "nolinear", "noexchange", "nofused", "deterministic", "tuned")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A name, taken apart."""

    name: str
    base: str
    """The schedule with its own options, or the peer."""
    ours: bool
    unroll: int = 1
    levers: frozenset[str] = frozenset()
    """The levers without `unroll`."""

    @property
    def tuned(self) -> bool:
        return "tuned" in self.levers


@functools.cache
def read(name: str) -> Contender:
    """The contender called `name`. Raises ValueError, naming the flag, for a word that there is not."""
    return _peer(name.removeprefix(PEER), name) if name.startswith(PEER) else _ours(name)


def _peer(text: str, name: str) -> Contender:
    base, *words = text.split("-")
    if base not in PEERS:
        near = difflib.get_close_matches(base, PEERS, n=1)
        raise ValueError(
            f"--peers {text}: there is no peer {base!r}; there are {', '.join(PEERS)}"
            + (f" (did you mean {near[0]}?)" if near else "")
        )
    for word in words:
        if word not in OF_PEERS or words.count(word) > 1:
            raise ValueError(f"--peers {text}: {base} does not take -{word}; it takes each of -compile, -tuned once")
    return Contender(name, base, ours=False, levers=frozenset(words))


def _ours(name: str) -> Contender:
    base, *words = name.split("-")
    kept, levers, unroll = [base], set(), 1
    for word in words:
        lever = word.rstrip("0123456789")
        number = word[len(lever) :]
        if lever not in OF_OURS or (lever == "unroll") != bool(number) or lever in levers:
            kept.append(word)  # the schedule's, or refused there
            continue
        levers.add(lever)
        unroll = int(number) if number else unroll
    shown = ["-unrollK", *(f"-{lever}" for lever in OF_OURS[1:])]
    parse("-".join(kept), more=shown)
    if "unroll" in levers and unroll < 2:
        raise ValueError(f"--schedules {name}: expected two or more layers per visit; one is it without -unrollK")
    return Contender(name, "-".join(kept), ours=True, unroll=unroll, levers=frozenset(levers - {"unroll"}))


def check(name: str, *, ranks: int, layers: int) -> None:
    """Raises ValueError where contender `name` cannot be built on so many ranks, for a model of so many layers."""
    contender = read(name)
    if not contender.ours:
        if contender.base == "plain" and ranks != 1:
            raise ValueError(
                f"--peers {name.removeprefix(PEER)} with --ranks {ranks}: the plain module has no ranks; use --ranks 1"
            )
        return
    check_ranks(contender.base, ranks)
    if contender.unroll > layers:
        raise ValueError(f"--schedules {name}: there are {layers} layers to unroll")
