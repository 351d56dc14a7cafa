"""What counts as a spike, judged by the definition in `statistics`, and that a resumed run judges alike."""

from __future__ import annotations

import json
import random
import statistics

import torch

from train.running.saves import WINDOW, Spikes


def numbers(draw: random.Random, step: int) -> tuple[float, float]:
    loss = 3.0 + draw.gauss(0, 0.1)
    norm = 1.0 + draw.gauss(0, 0.05)
    if step % 37 == 36:
        loss += draw.choice([0.2, 0.5, 3.0])
    if step % 53 == 52:
        norm *= draw.choice([1.1, 1.5, 9.0])
    return loss if step % 61 else float("nan"), norm


def expected(history: list[tuple[float, float]], now: tuple[float, float], sigmas: float) -> bool:
    last = history[-WINDOW:]
    if len(last) < WINDOW // 2:
        return False
    series = zip(*last, strict=True)
    return any(
        value > statistics.mean(each) + sigmas * statistics.stdev(each) for value, each in zip(now, series, strict=True)
    )


def test_spikes_are_those_of_the_definition_before_and_after_a_resume() -> None:
    draw, spikes, history, flags = random.Random(0), Spikes(4.0), [], []
    for step in range(3 * WINDOW):
        if step in (10, WINDOW // 2, WINDOW + 7, 2 * WINDOW):
            kept = json.loads(json.dumps(spikes.kept()))  # every bit of a float survives
            assert kept == [list(each) for each in history[-WINDOW:]]
            spikes = Spikes(4.0)
            spikes.restore(kept)
        loss, norm = numbers(draw, step)
        metrics = {"loss": loss, "grad_norm": norm}
        flags.append(bool(spikes({name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()})))
        assert flags[-1] == expected(history, (loss, norm), 4.0), step
        if loss == loss:
            history.append((loss, norm))
    assert 5 < sum(flags) < 15
    assert not any(flags[: WINDOW // 2])
