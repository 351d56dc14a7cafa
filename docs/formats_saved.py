"""Predicts what formats and places of moments save of two large steps: a table, and docs/images/formats.svg.

python docs/formats_saved.py        prints the table of docs/formats.md, and draws the picture

Each step is `zero3` on a mesh with nodes, with as few recomputed layers as fit; its memory is that of the same step
when all layers recompute, so that what is saved does not go into fewer recomputed layers.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

import yafsdp_fn as ya
from models import llama

PICTURE = Path(__file__).parent / "images/formats.svg"
STEPS = {
    "Llama 2 70B, 256 A100s": ("llama2-70b", 256, "a100-80g"),
    "Llama 3.1 405B, 16,384 H100s": ("llama3.1-405b", 16_384, "h100-80g"),
}
INT8 = ya.formats.Scaled()
TREES: dict[str, Callable[[Any], Any]] = {
    "": lambda params: params,
    "gathers in int8": lambda params: ya.params.with_wire(params, ya.Wire(gather=INT8)),
    "both ways in int8": lambda params: ya.params.with_wire(params, ya.Wire(INT8, INT8)),
    "products in float8": ya.formats.float8,  # as bytes: products have the rate of 16 bits
}
TX = ya.optim.adamw(1e-4)
PLACES = {
    "": TX,
    "moments in 8 bits": ya.optim.in_format(TX, ya.formats.Roots()),
    "moments on the host": ya.optim.on_host(TX),
}
CHOICES = [
    ("", ""),
    ("gathers in int8", ""),
    ("both ways in int8", ""),
    ("products in float8", ""),
    ("", "moments in 8 bits"),
    ("", "moments on the host"),
    ("gathers in int8", "moments in 8 bits"),
    ("gathers in int8", "moments on the host"),
]
PRECISION = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


class Saved(NamedTuple):
    """A step. seconds: with as few recomputed layers as fit; least: GiB of a rank with all layers recomputed"""

    name: str
    recomputed: int
    seconds: float
    least: float


def predicted(config: Any, ranks: int, cluster: str, seq: int = 2048) -> list[Saved]:
    """A row for each of CHOICES, the whole step first."""
    where = ya.planner.CLUSTERS[cluster]
    tokens = torch.empty(1, seq, dtype=torch.long, device="meta")
    batch, whole = {"tokens": tokens, "targets": tokens}, llama.params(config)
    mesh = (("node", ranks // where.gpus_per_node), ("local", where.gpus_per_node))
    found = []
    for wire, place in CHOICES:
        params = TREES[wire](whole)
        step = ya.planner.trace(llama.loss(config), params, batch, mesh=mesh, precision=PRECISION, tx=PLACES[place])
        recomputed = ya.planner.min_ckpt_layers(step, where.memory_bytes)
        assert recomputed is not None, f"{wire}, {place}: does not fit"
        program = ya.schedules.zero3(remat=ya.schedules.remat.first(recomputed))(step)
        seconds = ya.planner.simulate(program, where).seconds
        least = ya.planner.predict_memory(ya.schedules.zero3(remat="all")(step)).peak_bytes / 2**30
        found.append(Saved(", ".join(filter(None, (wire, place))) or "whole", recomputed, seconds, least))
        print(found[-1], flush=True)
    return found


def table(steps: dict[str, list[Saved]]) -> str:
    """The rows of docs/formats.md."""
    lines = []
    for title, rows in steps.items():
        lines += [f"| {title} | step | saved | recomputed | least memory | saved |", "|---|---:|---:|---:|---:|---:|"]
        for row in rows:
            ms, gib = 1e3 * (rows[0].seconds - row.seconds), rows[0].least - row.least
            saved = ("", "") if row is rows[0] else (f"{ms:,.0f} ms", f"{gib:.2f} GiB")
            cells = [row.name, f"{row.seconds:.2f} s", saved[0], f"{row.recomputed}", f"{row.least:.2f} GiB", saved[1]]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


# ---- the picture: two columns of bars for each step, on white, so that it can be read on any page

INK, SOFT, TIME, MEMORY, LOSS = "#1b1f24", "#57606a", "#0b7285", "#7048a8", "#b3541e"
ROW, LEFT, BAR, GAP, TOP = 22, 250, 200, 105, 58


def picture(steps: dict[str, list[Saved]]) -> str:
    """Draws milliseconds of a step and GiB of a rank that are saved; what costs more has no bar, and another colour."""
    width = LEFT + 2 * (BAR + GAP)
    parts: list[str] = []

    def text(x: float, y: float, words: str, size: int = 12, color: str = INK, anchor: str = "start") -> None:
        style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>')

    y = 0.0
    for title, rows in steps.items():
        text(12, y + 24, title, 14)
        whole = rows[0]
        text(12, y + 44, f"whole: {whole.seconds:.2f} s a step, {whole.least:.1f} GiB at least", 11, SOFT)
        text(LEFT, y + 44, "saved of a step", 11, SOFT)
        text(LEFT + BAR + GAP, y + 44, "saved of a rank's memory", 11, SOFT)
        columns = [
            [1e3 * (whole.seconds - row.seconds) for row in rows[1:]],
            [whole.least - row.least for row in rows[1:]],
        ]
        for number, row in enumerate(rows[1:]):
            base = y + TOP + ROW * number
            text(LEFT - 10, base + 14, row.name, anchor="end")
            for column, (values, color) in enumerate(zip(columns, (TIME, MEMORY), strict=True)):
                x = LEFT + column * (BAR + GAP)
                value, most = values[number], max([0.0, *values])
                length = BAR * max(value, 0.0) / most if most else 0.0
                words = f"{value:,.0f} ms" if column == 0 else f"{value:.2f} GiB"
                parts.append(
                    f'<rect x="{x}" y="{base + 3:.1f}" width="{max(length, 1):.1f}" height="15" fill="{color}"/>'
                )
                text(x + length + 6, base + 15, words, color=LOSS if value < 0 else INK)
        y += TOP + ROW * (len(rows) - 1) + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y:.0f}" viewBox="0 0 {width} {y:.0f}"'
    ground = f'<rect width="{width}" height="{y:.0f}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="DejaVu Sans, Arial, sans-serif">', ground, *parts, "</svg>", ""])


if __name__ == "__main__":
    every = {title: predicted(llama.CONFIGS[model], ranks, on) for title, (model, ranks, on) in STEPS.items()}
    print(table(every))
    PICTURE.write_text(picture(every))
