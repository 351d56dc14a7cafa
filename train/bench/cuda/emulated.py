"""Rank 0 of N on the emulated network: ours, FSDP2 and, where it is installed, YaFSDP, on a published configuration.

    for depth in depths: each alone on a free network             -> compute, and the scale of the network
    for mode in waiting, moving:                                  collectives take time; or copy as many bytes as well
        for depth in depths: all in turn on the scaled network    -> seconds per step
    whole model: a line through the two depths, per contender

Widths, batch, sequence and ranks are the published ones, the depth is not: a step of the whole model is extrapolated,
which holds as far as layers are alike. Floors are extrapolated alike, from compute and communication apart.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from models import llama
from train.bench.cuda import fsdp2, network, ours, yafsdp
from train.bench.cuda.network import Line, Row
from train.bench.cuda.setting import Setting
from train.bench.cuda.turns import Contender, shown, turns
from train.bench.report import ratios
from yafsdp_fn.planner.cluster import A100, Cluster

DEPTHS = (8, 16)
ROUNDS = 6
TINY_DEPTHS, TINY_ROUNDS = (1, 2), 2
MODES = {"waiting": False, "moving bytes": True}
Report = Callable[[dict[str, Any]], None]


def run(setting: Setting, report: Report, name: str) -> None:
    """Row `name` of `network.published`; `report` gets all that is known so far after each part."""
    row = network.published()[name]
    depths, rounds = (TINY_DEPTHS, TINY_ROUNDS) if setting.tiny else (DEPTHS, ROUNDS)
    configs = {depth: setting.config(row.model, depth) for depth in depths}
    found: dict[str, Any] = {"row": row._asdict(), "depths": depths, "compiled": setting.compiles}
    compute: dict[int, float] = {}
    for depth, config in configs.items():
        with contenders(row, config, setting, network.free(), False) as (them, missing):
            for name in them.keys() - {"zero3", "fsdp2"}:
                del them[name]
            times = turns(them, setting.batch(config, row.seq), setting, rounds=rounds)
        found["missing"] = missing
        found.setdefault("free network, ms", {})[depth] = {n: shown(t) for n, t in times.items()}
        compute[depth] = min(map(statistics.median, times.values()))
        report(found)
    deep, seq = depths[1], setting.seq(row.seq)
    target = network.target(row, deep)
    f = target * compute[deep] / network.work_of(row, configs[deep], seq, A100).comm_s
    cluster = network.scaled(f)
    comm = {depth: network.work_of(row, config, seq, cluster).comm_s for depth, config in configs.items()}
    found["network"] = {
        "scale": f,
        "communication over compute, published": target,
        "communication over compute, here": comm[deep] / compute[deep],
        "compute_ms": {depth: 1e3 * seconds for depth, seconds in compute.items()},
        "communication_ms": {depth: 1e3 * seconds for depth, seconds in comm.items()},
    }
    if setting.matmul_flops is not None:
        found["network"]["scale, by rates of matrix products"] = A100.matmul_flops / setting.matmul_flops
    report(found)
    lines = tuple(Line.through(depths, (of[depths[0]], of[depths[1]])) for of in (compute, comm))
    for mode, moves in MODES.items():
        if moves and setting.tiny:
            continue  # on the CPU contents are copied, and nothing else
        by_depth: dict[int, dict[str, list[float]]] = {}
        for depth, config in configs.items():
            with contenders(row, config, setting, cluster, moves) as (them, missing):
                by_depth[depth] = turns(them, setting.batch(config, row.seq), setting, rounds=rounds)
        found["missing"] = missing
        found[mode] = compared(by_depth, row, compute, comm, lines)
        found["goals"] = {**found.get("goals", {}), **goals(found[mode], row, mode)}
        report(found)


def compared(
    times: dict[int, dict[str, list[float]]],
    row: Row,
    compute: dict[int, float],
    comm: dict[int, float],
    lines: tuple[Line, ...],
) -> dict[str, Any]:
    """Step times, floors and ratios: at each depth as measured, and of the whole model as extrapolated."""
    out: dict[str, Any] = {"published ratio": row.ratio}
    for depth, samples in times.items():
        medians = {name: statistics.median(each) for name, each in samples.items()}
        best = _best(medians)
        out[f"{depth} layers"] = {
            "step_ms": {name: shown(each) for name, each in samples.items()},
            "best of fsdp2": best,
            "over best of fsdp2": {name: ratios(each, samples[best]) for name, each in samples.items()},
            "over fsdp2": {name: ratios(each, samples["fsdp2"]) for name, each in samples.items()},
            "floor over fsdp2": max(compute[depth], comm[depth]) / medians[best],
            "ours over floor": medians[_ours(medians)] / max(compute[depth], comm[depth]),
            "bound by": "communication" if comm[depth] > compute[depth] else "compute",
        }
    low, high = times
    whole = {
        name: Line.through((low, high), (statistics.median(times[low][name]), statistics.median(times[high][name])))
        for name in times[low]
    }
    steps = {name: line.at(row.layers) for name, line in whole.items()}
    floor, best, mine = max(line.at(row.layers) for line in lines), _best(steps), _ours(steps)
    out["whole model, extrapolated"] = {
        "layers": row.layers,
        "step_ms": {name: 1e3 * seconds for name, seconds in steps.items()},
        "ms per layer": {name: 1e3 * line.per_layer for name, line in whole.items()},
        "best of fsdp2": best,
        "best of ours": mine,
        "ours over best of fsdp2": steps[mine] / steps[best],
        "ours over fsdp2": steps[mine] / steps["fsdp2"],
        "floor over best of fsdp2": floor / steps[best],
        "ours over floor": steps[mine] / floor,
        "compute_ms": 1e3 * lines[0].at(row.layers),
        "communication_ms": 1e3 * lines[1].at(row.layers),
    }
    return out


def goals(found: dict[str, Any], row: Row, mode: str) -> dict[str, bool]:
    """Of the whole model: near the floor where communication binds; the published ratio where the floor allows it."""
    whole = found["whole model, extrapolated"]
    out = {}
    if whole["communication_ms"] > whole["compute_ms"]:
        out[f"{mode}: within 5% of the floor"] = whole["ours over floor"] <= 1.05
    if whole["floor over best of fsdp2"] <= row.ratio:
        out[f"{mode}: at most {row.ratio:.3f} of FSDP2"] = whole["ours over best of fsdp2"] <= row.ratio
    return out


def _best(seconds: dict[str, float]) -> str:
    """The fastest setting of FSDP2."""
    return min((name for name in seconds if name.startswith("fsdp2")), key=seconds.__getitem__)


def _ours(seconds: dict[str, float]) -> str:
    return min((name for name in seconds if name.startswith("zero3")), key=seconds.__getitem__)


@contextlib.contextmanager
def contenders(
    row: Row, config: llama.Config, setting: Setting, cluster: Cluster, moves: bool
) -> Iterator[tuple[dict[str, Contender], dict[str, str]]]:
    """All that can be built on rank 0 of the row's ranks, by name, and why the others cannot."""
    remat, recompute = ya.remat.first(row.at(config.layers)), row.at(config.layers)
    schedules = {
        "zero3": ya.schedules.zero3(remat=remat),
        "zero3-prefetch2": ya.schedules.zero3(prefetch=2, remat=remat),
    }
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    with ya.emulate(cluster, row.gpus, move_bytes=moves):
        try:
            found.update(ours.build(config, ya.mesh(device=setting.device), setting, schedules))
            mesh = init_device_mesh(setting.device, (row.gpus,))
            found.update(fsdp2.build(config, mesh, setting, recompute=recompute))
            try:
                found.update(yafsdp.build(config, mesh, setting, recompute=recompute))
                found["yafsdp"].step(setting.batch(config, row.seq))
            except Exception as error:  # somebody else's program, in a version that nobody here has seen
                found.pop("yafsdp", None)
                missing["yafsdp"] = f"{type(error).__name__}: {error}"
            if "fsdp2-separate" not in found:
                missing["fsdp2-separate"] = f"torch {torch.__version__} has not both of {', '.join(fsdp2.SEPARATE)}"
            yield found, missing
        finally:
            found.clear()
            gc.collect()
            setting.synchronize()
    setting.empty_cache()
