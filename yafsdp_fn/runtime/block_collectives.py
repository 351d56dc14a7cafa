"""Follows what blocks and the loss communicate over axes inside blocks: noted in a first run, the same in others.

    stretch of a step                           in a trace
    forward of a visit, also recomputed         Visit.collectives
    backward of a visit, as autograd takes it   Visit.adjoints
    the loss after a visit, and its backward    Between

Each collective is compared with what its stretch called before, before it runs, and at the end none may be left over: a
rank that leaves one out says so, and does not send what others would take for something else. What no run has shown yet
(forwards while they are recorded, backwards in the step after that), and visits without grad, which belong to no
program, ranks compare among themselves.
"""

import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.communicators import SAME_BLOCKS
from yafsdp_fn.communication.ranks import Rows
from yafsdp_fn.program.split import Call, Kind
from yafsdp_fn.program.trace import Between, Collectives, Trace, Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.block_call import VisitRunner
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.runtime.protocols import OpObserver
from yafsdp_fn.util.mesh_axes import AxisCollective

ALIKE = ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all")
"""Collectives that all ranks of an axis give one shape; to others they may give other numbers of rows."""

FITS = {
    "ppermute": "perm must be the same on all ranks of the axis",
    "uneven all_to_all": "split_sizes[k] of rank r must be concat_sizes[r] of rank k",
}

Key = tuple[str, int, int]
"""A stretch of a step: its kind, a visit, and, of the loss, the segment whose call it is."""


# ---- What a stretch of a step calls.


class Called(NamedTuple):
    """A collective that a stretch has called, on tensors of this dtype. rows: as in `Ranks.called`"""

    call: AxisCollective
    dtype: torch.dtype
    rows: Rows

    def __str__(self) -> str:
        text = f"{self.call.kind} over {self.call.axis!r}, {self.call.nbytes} bytes of {self.dtype}"
        if self.rows:
            text += f", rows to each rank {self.rows[0]}, from each {self.rows[1]}"
        return text


class Noted(NamedTuple):
    """The collectives that a stretch has called. given: `_outline` of the arguments then"""

    calls: tuple[Called, ...]
    given: list[Any]


class Stretch:
    """A part of a step under way. expected: None if it is not known; typed, sized: dtypes, and sizes and destinations,
    must be the expected ones, too"""

    __slots__ = ("expected", "found", "key", "position", "run", "sized", "typed")

    def __init__(
        self, key: Key | None, noted: Noted | None, given: list[Any], position: str, run: OpObserver | None
    ) -> None:
        self.key, self.position, self.run = key, position, run
        self.found: list[Called] = []
        self.expected: tuple[Called, ...] | None = None
        self.sized = self.typed = False
        if noted is not None:
            self.expected = noted.calls
            uneven = any(each.call.kind.startswith("uneven") for each in noted.calls)
            self.sized = noted.given == given and not uneven
            self.typed = list(map(_typed, noted.given)) == list(map(_typed, given))

    def fixed(self, of: Called) -> tuple[Any, ...]:
        """Returns the properties of a collective that must be as they were before."""
        sizes = (of.call.nbytes, of.rows) if self.sized else ()
        return of.call.axis, of.call.kind, of.dtype if self.typed else None, sizes


# ---- A step or a recording, stretch by stretch.


class BlockCollectives:
    """The collectives of one step or recording, in stretches as it begins and ends them.

    known: what stretches call, kept from step to step; given: the arguments of the loss that are not differentiated
    """

    def __init__(self, runner: VisitRunner, known: dict[Key, Noted], given: Any) -> None:
        self._runner = runner
        self.known = known
        self._comms = runner.memory.comms
        self._given = [_outline(leaf) for leaf in optree.tree_leaves(given)]
        # where it is
        self._segment: int | None = None  # of the call of the loss under way
        self._of_loss: Stretch | None = None
        self._of_visit: Stretch | None = None

    # ---- calls of the loss

    def begin_call(self, call: Call) -> None:
        """Begins a call of the loss, or its backward."""
        self._segment = call.segment
        if call.kind == "forward":
            self._of_loss = self._stretch(("after", -1, call.segment), "the loss before its first visit")
            return
        assert isinstance(self._runner, Session), "a recording has no backward"
        # its loss has been called: what it visits, if anything, is known
        visits = self._runner.verified.program.trace.cut.segments[call.segment][1]
        position = "the backward of the loss, before its visits'"
        self._of_loss = self._stretch(("before", visits - 1, call.segment), position)

    def end_call(self) -> None:
        """Raises if something is left over."""
        self._end_loss()
        self._segment = None

    # ---- visits

    def begin(self, kind: Kind, visit: int | None, run: OpObserver | None = None) -> None:
        """Begins a compute of a visit. visit: None without grad, amid the loss; run: observes its op"""
        key: Key | None = None
        if visit is not None:
            self._end_loss()
            # a kept graph goes back by more than one that is made again for the gradients that there are: with zeros
            key = ("forward" if kind == "forward" else f"kept {kind}", visit, 0)
        self._of_visit = self._stretch(key, self._runner.position, run)

    def again(self, kind: Literal["forward", "backward"]) -> None:
        """Begins once more with the visit under way: its forward, in its backward, or then the backward."""
        stretch = self._of_visit
        assert stretch is not None
        if stretch.key is not None:
            self._of_visit = self._stretch((kind, *stretch.key[1:]), stretch.position, stretch.run)

    def end(self) -> None:
        """Ends the part of a visit that is under way. Raises if something is left over."""
        self._ended(self._of_visit)

    def after(self, kind: Kind, visit: int | None) -> None:
        """Goes on with the loss, or its backward, after a compute."""
        self._of_visit = None
        if visit is not None and self._segment is not None:
            key = ("after", visit, self._segment) if kind == "forward" else ("before", visit - 1, self._segment)
            self._of_loss = self._stretch(key, f"the loss {self._runner.position}")

    def _stretch(self, key: Key | None, position: str, run: OpObserver | None = None) -> Stretch:
        return Stretch(key, None if key is None else self.known.get(key), self._given, position, run)

    def _end_loss(self) -> None:
        stretch = self._of_loss
        self._of_loss = None
        self._ended(stretch)

    def _ended(self, stretch: Stretch | None) -> None:
        if stretch is None:
            return
        # none may be left over
        found = stretch.found
        expected = stretch.expected
        if expected is None:  # one rank may have left out the last of them
            self._must_agree(f"the end of {stretch.position}", stretch.position)
        elif len(found) < len(expected):
            raise errors.collective_differs(stretch.position, len(found), str(expected[len(found)]), "none")
        if stretch.key is not None and not stretch.sized:
            self.known[stretch.key] = Noted(tuple(found), self._given)

    # ---- each collective

    def called(self, call: AxisCollective, x: Tensor, rows: Rows) -> Callable[[], None] | None:
        """Checks a collective of `x` before it runs. Returns a function to call after it has run, or None."""
        got = Called(call, x.dtype, rows)
        stretch = self._of_visit or self._of_loss
        if stretch is None:
            return None
        if stretch.expected is None:
            self._compare(got, x, stretch.position)
        else:
            at = len(stretch.found)
            wanted = stretch.expected[at] if at < len(stretch.expected) else None
            if wanted is None or stretch.fixed(got) != stretch.fixed(wanted):
                raise errors.collective_differs(stretch.position, at, str(wanted or "none"), str(got))
        stretch.found.append(got)
        return None if stretch.run is None else stretch.run.collective(f"{call.kind} {call.axis}")

    def _compare(self, got: Called, x: Tensor, position: str) -> None:
        """Raises RanksDisagree on all ranks of this stage unless all call the same, and those of one subgroup along its
        axis of one size; of uneven parts, unless each rank sends what the other one takes."""
        # the same collective
        comms = self._comms
        call = got.call
        what = f"{call.kind} over {call.axis!r}"
        shape = list(x.shape if call.kind in ALIKE else x.shape[1:])
        self._must_agree(f"{what} of {x.dtype}, {position}", what)
        # of one size along its axis
        numbers = [zlib.crc32(repr(shape).encode())]
        for side in got.rows:
            numbers += side
        size = comms.axes[call.axis].size
        apart = comms.stride(call.axis)
        every = comms.numbers_of_all(torch.tensor(numbers, device="cpu"), what, in_stage=True)
        every = every.view(-1, size, apart, len(numbers))
        same = every[..., 0] == every[:, :1, :, 0]
        if not bool(same.all()):
            self._must_agree(f"{what} of {x.dtype} {shape}, {position}", what)
        if not got.rows:
            return
        # uneven parts
        sent, taken = torch.split(every[..., 1:], size, -1)  # [groups, from, beside, to], [groups, to, beside, from]
        unfit = (sent != taken.transpose(1, 3)).nonzero()
        if len(unfit):
            group, source, beside, to = unfit[0].tolist()
            first = comms.stage * (comms.world // comms.stages) + group * size * apart + beside
            raise RanksDisagree(
                f"ranks disagree on {what}, {position}: rank {first + source * apart} sends "
                f"{int(sent[group, source, beside, to])} rows to rank {first + to * apart}, which takes "
                f"{int(taken[group, to, beside, source])} from it. {FITS[call.kind]}"
            )

    def _must_agree(self, text: str, what: str) -> None:
        self._comms.must_agree(SAME_BLOCKS, {"op": text}, what, in_stage=True)

    # ---- a trace

    def listed(self, trace: Trace) -> Trace:
        """Returns `trace` with what has been called: the forwards once it is recorded, all once a step has run."""

        def calls(visit: int, *kinds: str) -> Collectives:
            for kind in kinds:
                if (noted := self.known.get((kind, visit, 0))) is not None:
                    return tuple(each.call for each in noted.calls)
            return ()

        visits: list[Visit] = []
        for visit in trace.visits:
            adjoints = calls(visit.id, "backward", "kept backward")
            visits.append(visit._replace(collectives=calls(visit.id, "forward"), adjoints=adjoints))
        between: list[Between] = []
        for number in range(-1, len(visits)):
            of_loss = Between(number, calls(number, "after"), calls(number, "before"))
            if of_loss.collectives or of_loss.adjoints:
                between.append(of_loss)
        return trace._replace(visits=tuple(visits), between=tuple(between))


# ---- What sizes and dtypes follow from.


def _outline(leaf: Any) -> Any:
    """Returns what the sizes of collectives may follow from."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | str) else type(leaf)


def _typed(outline: Any) -> Any:
    """Returns the part of an outline that dtypes of collectives may follow from: no length, and no counter."""
    if isinstance(outline, tuple):
        return outline[1]
    return int if type(outline) is int else outline
