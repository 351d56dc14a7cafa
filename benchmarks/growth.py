"""`python -m benchmarks growth`: what a step costs beyond its computations, as layers and ranks grow.

    for ranks in 1, 2, 3, 4:  for layers in 4, 8, 16, 32, 64:
        start the ranks; a step of ours and the pure computations (`Pure`) in turn, in the same processes
        overhead per layer = (ours - pure) / layers

The layers are tiny, so that what Python does for a layer, forward and backward together, is a good part of the step.
Two clocks: the main thread's CPU time, which is Python and what it calls, and the time that passes, which is that and
the communication that the layers are too small to hide. On fewer cores than ranks, ranks share them.
"""

from __future__ import annotations

import cProfile
import dataclasses
import os
import pstats
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness, names
from benchmarks.contenders import ADAMW, LEARNING_RATE, Batch, Stepper, build, materialize
from benchmarks.options import Timed
from benchmarks.report import Rows, apart, reached, spread, table
from models.llama import model as llama
from train.shapes import Shape

SHAPE = Shape(dim=64, ffn=128, heads=2, seq=16, batch=1)
GOALS_US = {"one rank": 100.0, "several": 250.0}
"""Goals of the main thread, per layer, forward and backward together."""

CLOCKS = {"main": "thread_seconds", "wall": "seconds"}


@dataclasses.dataclass(frozen=True)
class Growth(Timed):
    """Time steps of tiny layers beyond their pure computations, for growing numbers of layers and ranks."""

    layers: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Layers of the model."""
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Rank processes, with gloo."""
    schedule: str = "zero3"
    """Ours, as in `python -m benchmarks --schedules`."""
    plot: Path | None = None
    """File to draw the result to: .png, .svg or .pdf."""
    functions: int = 0
    """Rows of a profile that is printed in place of the times, if above 0: one further layer, by function, as the
    difference between the most and the least of --layers, on the first of --ranks."""
    timeout: float = 300.0
    """Seconds after which rank processes that have not ended are killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.layers)) < 2 or min(self.layers) < 1:
            raise ValueError(f"--layers {' '.join(map(str, self.layers))}: expected two different numbers or more")
        for ranks in self.ranks:
            names.check(self.schedule, ranks=ranks, layers=min(self.layers))
        if self.functions < 0 or (self.functions and self.plot is not None):
            raise ValueError(f"--functions {self.functions}: expected a number of rows, and no --plot beside it")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {self.plot}: expected a file that ends in .png, .svg or .pdf")


class Pure:
    """The floor of a training step, on each of `ranks` ranks, which do not communicate: the model's own forward and
    backward on whole weights, and the optimizer's kernel on as many elements as a rank of ours has, in one flat tensor.

    No Python of any sharding, of an optimizer class, or of a gradient's way to its place: the kernel updates other
    memory, from gradients that never change, and the weights stay what they are. It is a clock, with no loss to
    compare.
    """

    def __init__(self, shape: Shape, *, ranks: int, seed: int, device: torch.device) -> None:
        self._config = shape.llama()
        params = materialize(self._config, seed=seed, device=device)
        rows = [optree.tree_map(lambda stack, l=l: stack[l], params.layers) for l in range(shape.layers)]
        self._params: Any = optree.tree_map(
            lambda leaf: leaf.detach().clone().requires_grad_(), params._replace(layers=rows)
        )
        self._leaves = optree.tree_leaves(self._params)
        self._block, self._head_loss = llama.block(self._config), llama.head_loss(self._config)
        count = sum(leaf.numel() for leaf in self._leaves)
        self._flat = [torch.full((-(-count // ranks),), 1e-3, device=device) for _ in range(4)]
        self._steps = torch.ones((), device=device)

    def step(self, batch: Batch) -> float:
        tokens, params = batch["tokens"], self._params
        x = llama.embed(params.embed, tokens)
        rope = llama.rotary(self._config, torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
        for weights in params.layers:
            x, _ = self._block(x, weights, rope)
        mean = self._head_loss(params.head, x, batch["targets"])
        loss = mean.total / mean.weight
        torch.autograd.grad(loss, self._leaves)
        values, grads, first, second = ([column] for column in self._flat)
        torch._fused_adamw_(
            values,
            grads,
            first,
            second,
            [],
            [self._steps],
            lr=LEARNING_RATE,
            beta1=ADAMW["b1"],
            beta2=ADAMW["b2"],
            eps=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"],
            amsgrad=False,
            maximize=False,
        )
        return float(loss.detach())

    def program(self) -> None:
        return None


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """Seconds of one contender and, as `pure`, of its computations alone."""
    name, pure = task.contenders
    contenders: dict[str, Stepper] = {
        name: build(name, task.shape, microbatches=1, seed=task.seed, device=device),
        pure: Pure(task.shape, ranks=task.ranks, seed=task.seed, device=device),
    }
    return harness.in_turn(task, contenders, task.batches(device), device)


def profiled(task: harness.Task, device: torch.device) -> dict[str, tuple[float, float]]:
    """Returns function -> calls and microseconds of its own in one step of the main thread, the profiler's included."""
    stepper = build(task.contenders[0], task.shape, microbatches=1, seed=task.seed, device=device)
    batches = task.batches(device)
    for number in range(task.warmup):
        stepper.step(batches[number % len(batches)])
    profile = cProfile.Profile()
    profile.enable()
    for number in range(task.steps):
        stepper.step(batches[number % len(batches)])
    profile.disable()
    found: dict[str, tuple[float, float]] = {}
    for (path, _, name), (_, calls, own, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        where = "/".join(Path(path).parts[-2:]) if path != "~" else "C"
        before = found.get(f"{where} {name}", (0.0, 0.0))
        found[f"{where} {name}"] = before[0] + calls / task.steps, before[1] + 1e6 * own / task.steps
    return found


def by_function(growth: Growth, console: Console) -> list[dict[str, Any]]:
    """Returns what a further layer calls for a microsecond or more, the longest first: the difference of two models, by
    their difference in layers."""
    few, many = min(growth.layers), max(growth.layers)
    found = []
    for layers in (few, many):
        with console.status(f"profiling {layers} layers"):
            shape = dataclasses.replace(SHAPE, layers=layers)
            how: dict[str, Any] = {"ranks": growth.ranks[0], "shape": shape, **growth.turns}
            found.append(harness.run("benchmarks.growth:profiled", (growth.schedule,), **how))
    nothing = (0.0, 0.0)
    rows = [
        {
            "function": name,
            **{key: (b - a) / (many - few) for key, a, b in zip(("calls", "us"), one, other, strict=True)},
        }
        for name, other in found[1].items()
        for one in [found[0].get(name, nothing)]
    ]
    most = [row for row in rows if row["us"] >= 1.0]
    rest = {
        "function": "all others",
        **{key: sum(row[key] for row in rows if row["us"] < 1.0) for key in ("calls", "us")},
    }
    return [*sorted(most, key=lambda row: -row["us"]), rest]


def measure(growth: Growth, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    if growth.functions:
        return {"functions": by_function(growth, console)}
    points: list[dict[str, Any]] = []
    for ranks in growth.ranks:
        for layers in growth.layers:
            with console.status(f"timing {layers} layers on {ranks} rank(s)"):
                shape, both = dataclasses.replace(SHAPE, layers=layers), (growth.schedule, "pure")
                found = harness.run("benchmarks.growth:rank", both, ranks=ranks, shape=shape, **growth.turns)
            points.append({"ranks": ranks, "layers": layers, **point(found, growth.schedule, layers)})
    result = {
        "goals_us": GOALS_US,
        "points": points,
        "lines": [{"ranks": ranks, **line([p for p in points if p["ranks"] == ranks])} for ranks in growth.ranks],
    }
    if growth.plot is not None:
        draw(growth, result, growth.plot)
    return result


def point(found: dict[str, Any], name: str, layers: int) -> dict[str, Any]:
    """Microseconds per layer beyond pure computation, and those of the whole steps."""
    out: dict[str, Any] = {}
    for clock, field in CLOCKS.items():
        ours, pure = found[field][name], found[field]["pure"]
        out[f"{clock}_us_per_layer"] = spread([1e6 * (a - b) / layers for a, b in zip(ours, pure, strict=True)])
        out[f"{clock}_step_us"] = 1e6 * statistics.median(ours)
        out[f"{clock}_pure_us"] = 1e6 * statistics.median(pure)
    return out


def goal_us(ranks: int) -> float:
    return GOALS_US["one rank" if ranks == 1 else "several"]


def line(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The straight line through the main thread's overheads of whole steps: what a further layer costs, and what a
    step costs before its first one."""
    layers = [float(p["layers"]) for p in points]
    total = [p["main_us_per_layer"]["median"] * p["layers"] for p in points]
    slope, fixed = statistics.linear_regression(layers, total)
    return {"main_us_per_further_layer": slope, "main_us_per_step": fixed}


def show(growth: Growth, found: dict[str, Any]) -> Iterator[str | Table]:
    """A row for each number of ranks and layers."""
    cores = os.cpu_count() or 1
    rows: Rows = {}
    if growth.functions:
        every = found["functions"]
        for row in every[: growth.functions]:
            rows[row["function"]] = {"calls": f"{row['calls']:.1f}", "us": f"{row['us']:.1f}"}
        yield (
            f"{growth.schedule} on {growth.ranks[0]} rank(s): what one further layer costs the main thread, by "
            f"function, {sum(row['us'] for row in every):.0f} us, computations and the profiler's own time included"
        )
        yield table("function", rows)
        return
    for p in found["points"]:
        main, wall = p["main_us_per_layer"], p["wall_us_per_layer"]
        rows[f"{p['ranks']} x {p['layers']}{' *' if p['ranks'] > cores else ''}"] = {
            "main thread, us per layer": f"{main['median']:.0f}",
            "p10 - p90": apart(main, 0),
            "goal": reached(main["median"], goal_us(p["ranks"])),
            "elapsed, us per layer": f"{wall['median']:.0f}",
            "p10 - p90 ": apart(wall, 0),
            "step ms": f"{p['wall_step_us'] / 1e3:.2f}",
            "pure ms": f"{p['wall_pure_us'] / 1e3:.2f}",
        }
    yield (
        f"{growth.schedule} beyond pure computation, forward and backward: dim {SHAPE.dim}, seq {SHAPE.seq}, "
        f"{growth.steps} interleaved steps, medians. Main thread: CPU time, without communication; elapsed: with it"
        + (f"; *: more ranks than the {cores} cores" if any(p["ranks"] > cores for p in found["points"]) else "")
    )
    yield table("ranks x layers", rows)
    for each in found["lines"]:
        yield (
            f"{each['ranks']} rank(s): a further layer costs the main thread {each['main_us_per_further_layer']:.0f} "
            f"us, a step {each['main_us_per_step']:.0f} us before its first"
        )


PANELS = {
    "main_us_per_layer": "CPU time of the main thread: Python",
    "wall_us_per_layer": "elapsed time: Python and communication",
}


def draw(growth: Growth, found: dict[str, Any], path: Path) -> None:
    """Draws a result of `growth.measure`. Needs matplotlib, from the extra `plan`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth"}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            for ranks in sorted({p["ranks"] for p in found["points"]}):
                mine = sorted((p for p in found["points"] if p["ranks"] == ranks), key=lambda p: p["layers"])
                layers = [p["layers"] for p in mine]
                shared = ", which share cores" * (ranks > (os.cpu_count() or 1))
                label = f"{ranks} rank{'s' * (ranks > 1)}{shared}"
                (line,) = axes.plot(layers, [p[key]["median"] for p in mine], "o--" if shared else "o-", label=label)
                low, high = ([p[key][end] for p in mine] for end in ("p10", "p90"))
                axes.fill_between(layers, low, high, color=line.get_color(), alpha=0.12, lw=0)
            if key.startswith("main"):
                for (whom, goal), style in zip(found["goals_us"].items(), (":", "-."), strict=True):
                    axes.axhline(goal, color="grey", ls=style, label=f"goal, {whom}: {goal:.0f}")
            axes.set_xscale("log", base=2)
            axes.set(title=title, xlabel="layers", ylabel="microseconds per layer", ylim=(0, None))
            axes.legend()
        figure.suptitle(f"A step of {growth.schedule} beyond its pure computations, per layer")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
