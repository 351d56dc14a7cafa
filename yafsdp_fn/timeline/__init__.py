"""When each op of a step runs: the data, and what shows it. Imports the schedules, nothing of the runtime."""

from yafsdp_fn.timeline.compare import Comparison, compare
from yafsdp_fn.timeline.record import Recording, record
from yafsdp_fn.timeline.spans import Idle, Span
from yafsdp_fn.timeline.stages import PipelineTimeline
from yafsdp_fn.timeline.timeline import Timeline

__all__ = ["Comparison", "Idle", "PipelineTimeline", "Recording", "Span", "Timeline", "compare", "record"]
