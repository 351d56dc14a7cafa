"""A result as tables, to read and to paste into a page, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 200
"""Of the console for the tables, whatever the terminal's: they are Markdown, which must not be cut short."""

Rows = dict[str, dict[str, str]]
"""Contender -> column -> cell."""

KINDS = {
    "all_gather": "gathers",
    "reduce_scatter": "reduce-scatters",
    "all_to_all": "all-to-alls",
    "all_reduce": "all-reduces",
    "broadcast": "broadcasts",
    "send": "sends",
}
"""The columns of collectives, in order."""


def times(found: dict[str, Any]) -> Rows:
    out: Rows = {}
    for name, c in found["contenders"].items():
        step, over = c["step_ms"], found["over_first"].get(name)
        out[name] = {
            "step ms": f"{step['median']:.1f}",
            "p10 - p90": f"{step['p10']:.1f} - {step['p90']:.1f}",
            f"over {found['first']}": f"{over['median']:.3f}" if over else "1",
            "p10 - p90 ": f"{over['p10']:.3f} - {over['p90']:.3f}" if over else "",
            "CPU ms": f"{c['cpu_ms']['median']:.1f}",
            "tokens/s": f"{c['tokens_per_s']:,.0f}",
        }
    return out


def comparison(found: dict[str, Any], ours: str) -> Rows:
    """Of `ours` over each peer; a goal that is missed is marked."""
    out: Rows = {}
    for peer, c in found["over_peers"][ours].items():
        time = c["time"]
        out[peer] = {
            "step": f"{time['median']:.3f}",
            "p10 - p90": f"{time['p10']:.3f} - {time['p90']:.3f}",
            "goal": reached(time["median"], c["time_goal"]),
        }
        if "peak_memory_bytes" in c:
            out[peer] |= {
                "peak memory": f"{c['peak_memory_bytes']:.3f}",
                "goal ": reached(c["peak_memory_bytes"], c["peak_memory_goal"]),
                "live tensors": f"{c['peak_tensor_bytes']:.3f}",
            }
    return out


def reached(value: float, target: float | None) -> str:
    """The goal, and whether `value` is at or below it."""
    return "" if target is None else f"{target:.2f} {'reached' if round(value, 3) <= target else 'MISSED'}"


def traffic(found: dict[str, Any]) -> Rows:
    kinds = {kind for c in found["contenders"].values() for kind in c["collectives"]}
    return {
        name: {"sent MiB": mib(c["sent_bytes"])}
        | {KINDS[kind]: str(c["collectives"].get(kind, {"count": 0})["count"]) for kind in KINDS if kind in kinds}
        for name, c in found["contenders"].items()
    }


def memory(found: dict[str, Any]) -> Rows:
    out: Rows = {}
    for name, c in found["contenders"].items():
        program = c.get("program")
        out[name] = {
            "peak MiB": mib(c["peak_memory_bytes"]),
            "live tensors MiB": mib(c["peak_tensor_bytes"]),
            "shards MiB": mib(program["shard_bytes"]) if program else "",
            "slots MiB": mib(program["slot_bytes"]) if program else "",
            "allocations >= 2 MiB": str(c["weight_size_allocations"]),
        }
    return out


def dumps(value: Any, indent: str = "") -> str:
    """JSON in which what holds no further containers stands on one line."""
    if not isinstance(value, dict | list | tuple) or not any(isinstance(v, dict | list | tuple) for v in items(value)):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {dumps(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + dumps(each, inner) for each in value) + f"\n{indent}]"


def items(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def rounded(value: Any) -> Any:
    """Floats to six digits, which is more than was measured."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def mib(size: int) -> str:
    return f"{size / 2**20:,.{1 if size >= 10 << 20 else 2}f}"


def table(corner: str, rows: Rows) -> Table:
    """As Markdown, to paste into a page; print it on a console wide enough to leave every cell whole."""
    out = Table(box=box.MARKDOWN)
    out.add_column(corner, no_wrap=True)
    for column in next(iter(rows.values())):
        out.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        out.add_row(name, *cells.values())
    return out


def show(found: dict[str, Any], console: Console) -> None:
    """The result as tables, one contender per row."""
    options, shape = found["options"], found["shape"]
    tuned = ", malloc tuned" if options["malloc_tuned"] else ""
    parts = f" in {options['microbatches']} microbatches" if options["microbatches"] > 1 else ""
    console.print(
        f"config {options['config']}: {shape['layers']} layers, dim {shape['dim']}, ffn {shape['ffn']}, "
        f"seq {shape['seq']}, batch {shape['batch']} per rank{parts}, fp32; {options['ranks']} rank(s) on "
        f"{options['device']}{tuned}; {options['steps']} interleaved steps, medians",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table("per step", times(found)))
    for ours in found["options"]["schedules"]:
        if found["over_peers"][ours]:
            console.print(table(f"{ours} over", comparison(found, ours)))
    if all("sent_bytes" in c for c in found["contenders"].values()):
        console.print(table("per step and rank", traffic(found)))
        if any("send" in c["collectives"] for c in found["contenders"].values()):
            console.print("sends: the messages that gathers and reductions of ours are between CPU ranks")
        console.print(table("per rank", memory(found)))
    for sentence in found["unlike_program"]:
        console.print(f"NOT AS THE PROGRAM SAYS: {sentence}", style="red", highlight=False, soft_wrap=True)
    footer(found, console)


def footer(found: dict[str, Any], console: Console) -> None:
    """Where the figures come from."""
    versions, machine = found["versions"], found["machine"]
    gpus = f"{machine['gpus']} x {machine['gpu']}, " if "gpu" in machine else ""
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{gpus}load {machine['load_average']:.1f}; torch {versions['torch']}, "
        f"python {versions['python']}, revision {versions['revision']}\n{found['command']}",
        highlight=False,
        soft_wrap=True,
    )


def hand_over(
    found: dict[str, Any], *, as_json: bool, save: Path | None, show: Callable[[dict[str, Any], Console], None]
) -> None:
    """Writes the result to `save`, and prints it: as JSON alone, or as `show` does."""
    text = dumps(rounded(found))
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        show(found, Console(width=WIDTH))
