"""The timeline of a pipeline: what its stages do, with what shows it."""

from pathlib import Path

from yafsdp_fn.timeline import perfetto, stages_draw, stages_text
from yafsdp_fn.timeline.stages_spans import StageSpans


class PipelineTimeline(StageSpans):
    """One step of a pipeline: see `StageSpans` for what it holds."""

    __slots__ = ()

    def __str__(self) -> str:
        return stages_text.render(self)

    def save(self, path: str | Path) -> None:
        """Draws it to a .png, .svg or .pdf: the stages under one another.

        Raises ValueError for another suffix and for a timeline without ops, ModuleNotFoundError without matplotlib.
        """
        stages_draw.save(self, path)

    def perfetto(self, path: str | Path) -> None:
        """Writes it as trace events in JSON, which https://ui.perfetto.dev opens: a process for each stage."""
        perfetto.save_all(self.stages, path, self.title, self.across)
