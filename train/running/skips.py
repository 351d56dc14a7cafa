"""Steps that were skipped, mostly since their loss or gradient is no finite number: the run goes on, up to a point."""

from __future__ import annotations

from train.running.report import Record


class Diverged(RuntimeError):
    """Too many steps in a row were skipped, and going back did not help. Raised on every rank alike."""


ADVICE = "Lower --optim.learning-rate, or look at the data"


class Skips:
    """Counts skipped steps in a row, which all ranks see alike, and how often the run went back for them."""

    def __init__(self, most: int, rollbacks: int) -> None:
        self._most, self._rollbacks = most, rollbacks
        self._records: list[Record] = []

    def see(self, record: Record) -> None:
        self._records = [*self._records, record] if record.skipped else []

    @property
    def too_many(self) -> bool:
        return len(self._records) >= self._most

    def go_back(self) -> str:
        """Why the run goes back to its last checkpoint. Raises Diverged where it went back too often."""
        first, last = self._records[0], self._records[-1]
        what = (
            f"steps {first.step} to {last.step}, the last with loss {last.loss}, gradient norm {last.grad_norm}: their "
            "updates were skipped"
        )
        if not self._rollbacks:
            raise Diverged(f"{what}, and the run went back to a checkpoint as often as it may. {ADVICE}")
        self._rollbacks, self._records = self._rollbacks - 1, []
        return what
