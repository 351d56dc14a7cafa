"""Two timelines of one program, op by op: predicted against measured, or any two."""

from typing import NamedTuple

from yafsdp_fn.program.text import in_notebook
from yafsdp_fn.timeline.spans import of_one_stage
from yafsdp_fn.timeline.text import shown
from yafsdp_fn.timeline.timeline import Timeline


class Comparison(NamedTuple):
    """Differences of a prediction from a measurement, or of one timeline from another, all in seconds: positive where
    the first is longer.

    step: `(predicted, measured)`; busy: stream -> `(predicted, measured)`; late: op number -> predicted end minus
    measured end, of the ops that both have; only: numbers of the ops that one has and the other has not, or another
    titles: of both, where they are not a prediction and a measurement
    """

    step: tuple[float, float]
    busy: dict[str, tuple[float, float]]
    late: dict[int, float]
    only: tuple[int, ...]
    titles: tuple[str, str] | None = None

    @property
    def step_error(self) -> float:
        """The error of the step time, as a part of the measured one."""
        return self.step[0] / self.step[1] - 1.0

    def _repr_html_(self) -> str:
        """Shown by a notebook."""
        return in_notebook(str(self))

    def __str__(self) -> str:
        if self.titles is None:
            lines = [f"{'':<10}{'predicted':>10}{'measured':>10}{'error':>8}"]
        else:
            lines = [f"{name:<10}{title}" for name, title in zip(("first", "second"), self.titles, strict=True)]
            lines.append(f"{'':<10}{'first':>10}{'second':>10}{'differs':>8}")
        for name, (one, two) in [("step", self.step), *self.busy.items()]:
            error = f"{one / two - 1.0:+8.1%}" if two else ""
            lines.append(f"{name:<10}{shown(one):>10}{shown(two):>10}{error}")
        if self.late:
            number = max(self.late, key=lambda n: abs(self.late[n]))
            lines.append(f"ends differ most at op {number}: by {shown(abs(self.late[number]))}")
        if self.only:
            some = ", ".join(map(str, self.only[:5])) + " ..." * (len(self.only) > 5)
            lines.append(f"in one of them alone: ops {some}")
        return "\n".join(lines)


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Spans are matched by op number, and are of one op. Either may be measured, or be predicted.

    Raises ValueError where nothing matches, TypeError for a timeline of several stages, which are compared singly.
    """
    of_one_stage("compare", predicted, measured)
    ours, theirs = ({span.number: span for span in timeline.spans} for timeline in (predicted, measured))
    both = [number for number in ours if number in theirs and ours[number].op == theirs[number].op]
    if not both:
        raise ValueError(
            f"no op of {predicted.title!r} is in {measured.title!r} with the same number: they are of different "
            "programs (a step function's first step runs none; compare its second)"
        )
    return Comparison(
        (predicted.seconds, measured.seconds),
        {name: (predicted.busy(name), measured.busy(name)) for name in predicted.streams if name in measured.streams},
        {number: ours[number].end - theirs[number].end for number in both},
        tuple(sorted({*ours, *theirs} - set(both))),
        None if measured.measured and not predicted.measured else (predicted.title, measured.title),
    )
