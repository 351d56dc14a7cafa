"""Ranks that compare notes, over a group of their own on the host; and where all of them are, when one cannot."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.comm import agreement, lookout, streams
from yafsdp_fn.comm.groups import Groups
from yafsdp_fn.comm.lookout import Lookout, Steps, UnderWay
from yafsdp_fn.comm.streams import CommunicationError
from yafsdp_fn.torch_private import side_store

WHERE = "Where ranks are:"


class Comparing(Groups):
    """comparing: what this rank compares now; steps: that it is in, for the lookout"""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.comparing: tuple[str] | None = None
        self.lookout: Lookout | None = None
        self.steps = Steps()

    def look_out(self, under_way: weakref.WeakMethod[Callable[[], UnderWay]]) -> None:
        if not self.alone and self.timeout is not None:
            store = side_store(f"yafsdp {self.control_group.process_group.group_name}", lookout.PATIENCE)
            self.lookout = Lookout(store, self.world_rank, self.world, self.timeout, self.steps, under_way)

    def same_on_all(self, text: str, what: str) -> bool:
        """Whether all ranks pass the same text. Host only: call it in the same order on all ranks."""
        if self.alone:
            return True
        with self._compares(what):
            return agreement.same_on_all(text, self.control_group)

    @contextmanager
    def _compares(self, what: str) -> Iterator[None]:
        self.comparing = (what,)
        try:
            yield
        except RuntimeError as error:
            failed = CommunicationError(
                f"rank {self.world_rank}: {what}: ranks could not compare notes ({error}). {streams.ADVICE}"
            )
            self.say_where(failed)
            raise failed from error
        finally:
            self.comparing = None

    def must_agree(self, what: str, parts: Mapping[str, str], place: str = "") -> None:
        """Raises RanksDisagree on every rank unless all pass the same `parts`; it shows the first that differs.

        place: where this rank is, for the error when the others cannot be reached
        """
        if (differs := self.difference(what, parts, place)) is not None:
            raise agreement.RanksDisagree(differs)

    def difference(self, what: str, parts: Mapping[str, str], place: str = "") -> str | None:
        """The first of `parts` that is not the same on all ranks, in words; None where all are. Every rank must ask."""
        if self.same_on_all(repr(parts), place or f"comparing {what}"):
            return None
        with self._compares(place or f"comparing {what}"):
            return f"ranks disagree on {what}; {agreement.first_difference(parts, self.control_group)}"

    def numbers_of_all(self, mine: Tensor, what: str) -> Tensor:
        """[n] of each rank, on the CPU -> [ranks of the mesh, n]. Host only, as `same_on_all`."""
        every = mine.new_empty(self.world, mine.numel())
        if self.alone:
            return every.copy_(mine)
        with self._compares(what):
            self.control_group.all_gathers([every.view(-1)], [mine])
        return every

    def say_where(self, error: BaseException) -> None:
        """Where all ranks are, as a note on a failed communication."""
        said = any(note.startswith(WHERE) for note in getattr(error, "__notes__", ()))
        if self.lookout is not None and not said and (found := self.lookout.ask()):
            error.add_note(f"{WHERE}\n{found}")
