"""The command: what to show, by its one argument."""

from __future__ import annotations

import sys

from train.published import better, variants
from train.published.fit import left_out, roofline_left_out, rows, simulated, spread, summary, yafsdp_s


def main(argv: list[str]) -> int:
    shows = {(): show, ("--better",): better.show, ("--variants",): variants.show}
    chosen = shows.get(tuple(argv))
    if chosen is None:
        usage = "usage: python -m train published [--better | --variants]"
        print(f"{usage}\nunknown arguments: {' '.join(argv)}", file=sys.stderr)
        return 2
    chosen()
    return 0


def show() -> None:
    """Each row predicted from the others, the errors, and the figures."""
    table = rows()
    found = left_out(table)
    print(f"{'':<46} {'YaFSDP, s':>16} {'FSDP, s':>17} {'speedup, %':>14}")
    print(f"{'left out':<46} {'measured  model':>16} {'measured  model':>17} {'meas.  model':>14}")
    for row, ours, theirs in found:
        speedups = f"{100 * row.speedup:7.1f} {100 * (1 - ours / theirs):6.1f}"
        print(f"{row!s:<46} {row.yafsdp_s:8.2f} {ours:7.2f} {row.fsdp_s:9.2f} {theirs:7.2f} {speedups}")
    print(f"\n{'error: median, largest':<46} {'YaFSDP, %':>16} {'FSDP, %':>17} {'speedup, pt':>14}")
    models = {"simulation": found, "simulation, whole models left out": left_out(table, lambda row: row.model)}
    models["roofline, larger of two"] = roofline_left_out(table, max)
    models["roofline, sum of two"] = roofline_left_out(table, lambda a, b: a + b)
    for name, predictions in models.items():
        cells = [f"{median:.2f}, {largest:.2f}" for median, largest in summary(predictions)]
        print(f"{name:<46} {cells[0]:>16} {cells[1]:>17} {cells[2]:>14}")
    figures = simulated(table)
    growth = figures.pop("growth")
    errors, correlations = spread(yafsdp_s, {row: row.yafsdp_s for row in table}, figures)
    print("\nfitted to all rows, with relative standard errors and correlations")
    for name, error, line in zip(figures, errors, correlations, strict=True):
        print(f"  {name:<20} {figures[name]:<10.4g} {error:>5.0%}   {' '.join(f'{r:5.2f}' for r in line)}")
    print(f"  {'growth':<20} {growth:<10.4g}")
