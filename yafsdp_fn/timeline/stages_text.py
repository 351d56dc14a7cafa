"""The timelines of a pipeline in words: a line for each stage, and for what crosses between two."""

from collections import Counter
from collections.abc import Sequence

from yafsdp_fn.timeline.stages_spans import Crossing, StageSpans
from yafsdp_fn.timeline.text import because, shown

SHOWN = 16
"""Lines; of more, those in the middle are left out."""


def render(timeline: StageSpans) -> str:
    """Title, step time and bubble, what each stage waited for, and what crosses between stages."""
    total = timeline.seconds or 1.0
    rows = []
    for number, stage in enumerate(timeline.stages):
        busy = stage.compute_s
        rows.append(f"  stage {number:<4}{shown(busy):>10}  {busy / total:4.0%} busy; idle " + idle(timeline, number))
    head = f"{timeline.title}: {shown(timeline.seconds)}, bubble {timeline.bubble:.1%}"
    return "\n".join([head, *shortened(rows), *shortened([*map(_crossing, timeline.crossings)])])


def idle(timeline: StageSpans, stage: int | None = None, most: int = 3) -> str:
    """Why compute was idle, of the longest `most` reasons."""
    found = Counter({why: seconds for why, seconds in timeline.bubbles(stage).items() if seconds > 1e-9})
    return ", ".join(f"{shown(seconds)} {because(why)}" for why, seconds in found.most_common(most)) or "never"


def _crossing(crossing: Crossing) -> str:
    source, target, link, messages, nbytes = crossing
    return f"  {f'stage {source} -> {target}':<16}{messages} messages, {nbytes / 2**30:.2f} GiB a rank, over the {link}"


def shortened(rows: Sequence[str]) -> list[str]:
    """The first and the last of many."""
    if len(rows) <= SHOWN:
        return list(rows)
    return [*rows[: SHOWN // 2], f"  ... {len(rows) - SHOWN} more ...", *rows[-(SHOWN // 2) :]]
