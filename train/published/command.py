"""The command: what to show, by its arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from train.config.error import ConfigError
from train.published import better, predicted, registered, variants
from train.published.fit import left_out, roofline_left_out, rows, simulated, spread, summary, yafsdp_s


def main(argv: list[str]) -> int:
    options, unknown = _parser().parse_known_args(argv)
    of_foundry = options.rows is not None or options.fit
    if unknown or (options.json and not of_foundry):
        why = f"unknown arguments: {' '.join(unknown)}" if unknown else "--json goes with --rows or --fit"
        print(f"{_parser().format_usage()}{why}", file=sys.stderr)
        return 2
    try:
        if options.rows is not None:
            predicted.show_rows(options.rows, options.json)
        elif options.fit:
            predicted.show_fit(options.json)
        else:
            chosen = (
                (options.better, better.show),
                (options.variants, variants.show),
                (options.register, registered.show),
            )
            next((shown for wanted, shown in chosen if wanted), show)()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train published", description=__doc__, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--better", action="store_true", help="what the planner expects to beat the published schedule")
    what.add_argument("--variants", action="store_true", help="what the times of YaFSDP do not tell")
    what.add_argument(
        "--rows", type=Path, metavar="FILE.csv", help="predict runs with the columns of LLM Foundry's table"
    )
    what.add_argument(
        "--fit", action="store_true", help="fit the figures of --rows to the committed runs, left out alike"
    )
    what.add_argument(
        "--register", action="store_true", help="predictions of the same runs on 16 to 512 GPUs, as a CSV"
    )
    parser.add_argument("--json", action="store_true", help="with --rows or --fit: as JSON")
    return parser


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
