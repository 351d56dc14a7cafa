"""Agreement between ranks: one 8-byte all-gather where a text is the same on all of them, an error that names who
differs where not.
"""

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.dist import streams, watchdog
from yafsdp_fn.dist.collectives import Group
from yafsdp_fn.dist.groups import Groups
from yafsdp_fn.dist.store import answers
from yafsdp_fn.dist.streams import CommunicationError
from yafsdp_fn.dist.watchdog import PendingLabels, Steps, Watchdog
from yafsdp_fn.util.torch_private import side_store

# ---- Compares texts across ranks. Equal texts cost one 8-byte all-gather.


class RanksDisagree(CommunicationError):
    """Ranks would do different things; the message shows the ranks on each side."""


def first_difference(parts: Mapping[str, str], group: Group) -> str | None:
    """Returns the first part that differs between ranks, with each rank's text, or None. Collective."""
    every: list[dict[str, str]] = [{}] * group.process_group.size()
    dist.all_gather_object(every, dict(parts), group=group.process_group)
    for part in dict.fromkeys(itertools.chain(*every)):
        sides: dict[str, list[int]] = {}
        for rank, mine in enumerate(every):
            sides.setdefault(mine.get(part, "nothing"), []).append(rank)
        if len(sides) > 1:
            shown = "\n".join(f"    rank {', '.join(map(str, ranks))}: {text}" for text, ranks in sides.items())
            return f"{part} differs:\n{shown}"
    return None


def first_without_common_version(parts: Mapping[str, Mapping[int, str]], group: Group) -> str | None:
    """Returns the first part without a version common to all ranks that have it, with each rank's versions, or None.
    Collective. parts: part -> {checksum: where that version is}"""
    every: list[Mapping[str, Mapping[int, str]]] = [{}] * group.process_group.size()
    dist.all_gather_object(every, parts, group=group.process_group)
    for part in dict.fromkeys(itertools.chain(*every)):
        have = {rank: theirs[part] for rank, theirs in enumerate(every) if part in theirs}
        if not set.intersection(*map(set, have.values())):
            sides: dict[tuple[int, ...], list[int]] = {}
            for rank, mine in have.items():
                sides.setdefault(tuple(sorted(mine)), []).append(rank)
            shown = [
                f"    rank {', '.join(map(str, ranks))}: "
                + ", ".join(f"#{number:08x} of {place}" for number, place in sorted(have[ranks[0]].items()))
                for ranks in sides.values()
            ]
            return "\n".join([f"{part} differs:", *shown])
    return None


def same_on_all(text: str, group: Group) -> bool:
    """Returns whether all ranks of `group`, a gloo group, pass the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64)
    every = torch.empty(group.process_group.size(), dtype=torch.int64)
    group.all_gathers([every], [mine])
    return bool((every == mine).all())


# ---- Consistency checks between ranks, on a CPU group of their own, with a report of all ranks' positions when one
# fails.

WHERE = "Where ranks are:"


class Blocks(Protocol):
    """Records the blocks of a first step, so that ranks can compare them."""

    def saw(self, block: Callable[..., Any]) -> None: ...
    def compare(self, more: Iterable[Any] = ()) -> None: ...


class ConsistencyChecks(Groups):
    """Process groups with consistency checks between ranks.

    comparing: label of the check under way; steps: the running steps, for the watchdog; blocks: set during a first step
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.blocks: Blocks | None = None
        self.comparing: tuple[str] | None = None
        self.lookout: Watchdog | None = None
        self.steps = Steps()

    def start_watchdog(self, under_way: weakref.WeakMethod[Callable[[], PendingLabels]]) -> None:
        if not self.alone and self.timeout is not None:
            with answers(self.timeout, "connecting to the store once more"):
                store = side_store(f"yafsdp {self.control_group.process_group.group_name}", watchdog.PATIENCE)
            self.lookout = Watchdog(store, self.world_rank, self.world, self.timeout, self.steps, under_way)

    def same_on_all(self, text: str, what: str) -> bool:
        """Returns whether all ranks pass the same text. Uses the host only; all ranks call it in the same order."""
        if self.alone:
            return True
        with self._checks_consistency(what):
            return same_on_all(text, self.control_group)

    @contextmanager
    def _checks_consistency(self, what: str) -> Iterator[None]:
        self.comparing = (what,)
        try:
            yield
        except RuntimeError as error:
            failed = CommunicationError(
                f"rank {self.world_rank}: {what}: ranks could not compare notes ({error}). {streams.ADVICE}"
            )
            self.note_positions(failed)
            raise failed from error
        finally:
            self.comparing = None

    def must_agree(self, what: str, parts: Mapping[str, str], place: str = "") -> None:
        """Raises RanksDisagree on every rank unless all pass the same `parts`; the message shows the first that
        differs.

        place: this rank's position, for the error raised when the others cannot be reached
        """
        if (differs := self.difference(what, parts, place)) is not None:
            raise RanksDisagree(differs)

    def difference(self, what: str, parts: Mapping[str, str], place: str = "") -> str | None:
        """Describes the first of `parts` that differs between ranks; None if all are equal. Collective."""
        if self.same_on_all(repr(parts), place or f"comparing {what}"):
            return None
        with self._checks_consistency(place or f"comparing {what}"):
            return f"ranks disagree on {what}; {first_difference(parts, self.control_group)}"

    def must_have_common_version(self, what: str, parts: Mapping[str, Mapping[int, str]], advice: str) -> None:
        """Raises RanksDisagree on every rank if the ranks that have a part hold no common version of it: see
        `first_without_common_version`."""
        place = f"comparing {what}"
        if self.same_on_all(repr(sorted((part, sorted(mine)) for part, mine in parts.items())), place):
            return
        with self._checks_consistency(place):
            apart = first_without_common_version(parts, self.control_group)
        if apart is not None:
            raise RanksDisagree(f"ranks disagree on {what}; {apart}\n{advice}")

    def numbers_of_all(self, mine: Tensor, what: str) -> Tensor:
        """Gathers [n] of each rank, on the CPU, into [ranks of the mesh, n]. Host only, as `same_on_all`."""
        every = mine.new_empty(self.world, mine.numel())
        if self.alone:
            return every.copy_(mine)
        with self._checks_consistency(what):
            self.control_group.all_gathers([every.view(-1)], [mine])
        return every

    def note_positions(self, error: BaseException) -> None:
        """Adds the positions of all ranks to `error`, a failed communication, as a note."""
        said = any(note.startswith(WHERE) for note in getattr(error, "__notes__", ()))
        if self.lookout is not None and not said and (found := self.lookout.ask()):
            error.add_note(f"{WHERE}\n{found}")
