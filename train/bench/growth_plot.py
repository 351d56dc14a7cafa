"""The picture of `python -m train bench growth`: overhead per layer over layers, a line for each number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")
PANELS = (
    ("main_us_per_layer", "CPU time of the main thread: Python"),
    ("wall_us_per_layer", "elapsed time: Python and communication"),
)


def save(found: dict[str, Any], path: Path) -> None:
    """Draws a result of `growth.measure`. Needs matplotlib, from the extra `plan`."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 4.2), facecolor="white", layout="constrained")
        for axes, (key, title) in zip(figure.subplots(1, 2), PANELS, strict=True):
            _panel(axes, found, key)
            axes.set_title(title, fontsize=11, loc="left")
        shape = found["shape"]
        figure.suptitle(
            f"A step of {found['schedule']} beyond its pure computations, per layer (dim {shape['dim']}, "
            f"{shape['seq']} tokens; {found['machine']['cores']} cores)",
            fontsize=12,
            x=0.01,
            ha="left",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=120, metadata=dated.get(path.suffix))


def _panel(axes: Any, found: dict[str, Any], key: str) -> None:
    points, cores = found["points"], found["machine"]["cores"]
    layers = sorted({p["layers"] for p in points})
    for number, ranks in enumerate(sorted({p["ranks"] for p in points})):
        mine = sorted((p for p in points if p["ranks"] == ranks), key=lambda p: p["layers"])
        x, colour = [p["layers"] for p in mine], COLOURS[number % len(COLOURS)]
        shared = ranks > cores
        axes.plot(
            x,
            [p[key]["median"] for p in mine],
            "--" if shared else "-",
            marker="o",
            markersize=4,
            color=colour,
            label=f"{ranks} rank{'s' * (ranks > 1)}{', which share cores' if shared else ''}",
        )
        axes.fill_between(
            x, [p[key]["p10"] for p in mine], [p[key]["p90"] for p in mine], color=colour, alpha=0.12, lw=0
        )
    if key.startswith("main"):
        for (whom, goal), style in zip(found["goals_us"].items(), (":", "-."), strict=True):
            axes.axhline(goal, color="#555555", lw=1, ls=style, label=f"goal, {whom}: {goal:.0f}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(layers, [str(l) for l in layers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layers")
    axes.set_ylabel("microseconds per layer")
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
