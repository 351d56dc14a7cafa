"""What a search chooses from, and how far a number can go within a limit."""

from collections.abc import Callable
from typing import NamedTuple

from yafsdp_fn.planner.space import Point
from yafsdp_fn.planner.stages_space import StagedPoint


class Choice(NamedTuple):
    """A point of the space and what it comes to. Seconds as `Work` and `Timeline` have them; bytes per rank."""

    point: Point | StagedPoint
    step_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int

    def against(self, best: "Choice") -> str:
        """Why it is slower than `best`."""
        more = {"compute": self.compute_s - best.compute_s, "communication": self.comm_s - best.comm_s}
        reasons = [f"{what} {seconds:+.3g} s" for what, seconds in more.items() if seconds > 1e-3 * best.step_s]
        slower = 100 * (self.step_s / best.step_s - 1)
        return f"+{slower:.1f}%: {' and '.join(reasons) or 'the same work, with more waiting'}"


def fewest(needs: Callable[[int], int], most: int, budget: int) -> int | None:
    """The fewest recomputed layers that fit, None where not even `most` do. needs: bytes with so many."""
    return None if needs(most) > budget else most - last(lambda kept: needs(most - kept), most, budget)


def last(value: Callable[[int], int], most: int, limit: int) -> int:
    """The largest n up to `most` with `value(n) <= limit`: it is for 0, and grows with n, about linearly."""
    low, high = 0, most
    below, above = value(low), value(high)
    if above <= limit:
        return high
    while high - low > 1:
        guess = low + (high - low) * (limit - below) // (above - below)
        middle = min(max(guess, low + 1), high - 1)
        if (found := value(middle)) <= limit:
            low, below = middle, found
        else:
            high, above = middle, found
    return low


def by_seconds(choice: Choice) -> tuple[float, float, int]:
    """By time; of equals the one that computes less, then the one that takes less memory."""
    return choice.step_s, choice.compute_s, choice.peak_bytes
