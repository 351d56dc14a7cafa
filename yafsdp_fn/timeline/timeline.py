"""A timeline: the spans of a step's ops, with what shows them.

`simulate` predicts one, `record` measures one; both are drawn, compared and saved alike.
"""

from pathlib import Path

from yafsdp_fn.timeline import draw, kept, perfetto, text
from yafsdp_fn.timeline.spans import Spans


class Timeline(Spans):
    """One step: see `Spans` for what it holds."""

    __slots__ = ()

    def __str__(self) -> str:
        return text.render(self)

    def save(self, path: str | Path, *, beside: "Timeline | None" = None) -> None:
        """Draws it to a .png, .svg or .pdf, and `beside`, a measured one say, below it on the same time axis.

        Raises ValueError for another suffix and for a timeline without ops, ModuleNotFoundError without matplotlib.
        """
        draw.save(self, path, beside)

    def perfetto(self, path: str | Path, *, beside: "Timeline | None" = None) -> None:
        """Writes it as trace events in JSON, which https://ui.perfetto.dev opens; `beside` as a second process."""
        perfetto.save(self, path, beside)

    def to_json(self) -> str:
        """The whole timeline as JSON, with its trace and ops: kept with a run, and drawn later."""
        return kept.to_json(self)

    @staticmethod
    def from_json(text: str) -> "Timeline":
        """The timeline that `to_json` wrote. Raises ValueError where `text` is not one."""
        return Timeline(*kept.from_json(text))
