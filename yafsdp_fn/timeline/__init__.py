"""The times at which a step's ops run: the data, and what shows it. Imports the schedules, nothing of the runtime."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from yafsdp_fn.timeline.spans import Idle, Span
from yafsdp_fn.timeline.timeline import Timeline

if TYPE_CHECKING or find_spec("torch"):  # where there is none, no step runs
    from yafsdp_fn.timeline.record import Recording, record

__all__ = ["Idle", "Recording", "Span", "Timeline", "record"]


def __dir__() -> list[str]:
    return sorted(__all__)
