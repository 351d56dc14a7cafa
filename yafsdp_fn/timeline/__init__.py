"""The times at which a step's ops run: the data, and what shows it. Imports the schedules, nothing of the runtime."""

from yafsdp_fn.timeline.record import Recording, record
from yafsdp_fn.timeline.spans import Idle, Span
from yafsdp_fn.timeline.timeline import Timeline

__all__ = ["Idle", "Recording", "Span", "Timeline", "record"]
