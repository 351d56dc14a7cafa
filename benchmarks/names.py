"""Names of contenders: a schedule of ours or a peer, with what is switched on and off after dashes.

    zero3-resident2-update          a schedule: a builder, and options of it
    zero3-unroll8-compile           its features outside of schedules
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
import functools

from train.schedule_names import check_ranks, parse
from yafsdp_fn.planner.cluster import nearest

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
    features: frozenset[str] = frozenset()
    """The features without `unroll`."""

    @property
    def tuned(self) -> bool:
        return "tuned" in self.features


@functools.cache
def read(name: str) -> Contender:
    """The contender called `name`. Raises ValueError, naming the flag, for a word that there is not."""
    return _peer(name.removeprefix(PEER), name) if name.startswith(PEER) else _ours(name)


def _peer(text: str, name: str) -> Contender:
    base, *words = text.split("-")
    if base not in PEERS:
        raise ValueError(f"--peers {text}: there is no peer {base!r}; {nearest(base, list(PEERS))}")
    for word in words:
        if word not in OF_PEERS or words.count(word) > 1:
            raise ValueError(f"--peers {text}: {base} does not take -{word}; it takes each of -compile, -tuned once")
    return Contender(name, base, ours=False, features=frozenset(words))


def _ours(name: str) -> Contender:
    base, *words = name.split("-")
    kept = [base]
    features = set()
    unroll = 1
    for word in words:
        feature = word.rstrip("0123456789")
        number = word[len(feature) :]
        if feature not in OF_OURS or (feature == "unroll") != bool(number) or feature in features:
            kept.append(word)  # the schedule's, or refused there
            continue
        features.add(feature)
        unroll = int(number) if number else unroll
    shown = ["-unrollK", *(f"-{feature}" for feature in OF_OURS[1:])]
    parse("-".join(kept), more=shown)
    if "unroll" in features and unroll < 2:
        raise ValueError(f"--schedules {name}: expected two or more layers per visit; one is it without -unrollK")
    return Contender(name, "-".join(kept), ours=True, unroll=unroll, features=frozenset(features - {"unroll"}))


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
