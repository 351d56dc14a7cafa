"""Rank 0 of N on the emulated network: ours and FSDP2, on a published configuration.

    for depth in depths: ours and FSDP2 on a free network         -> compute, and the scale of the network
    waiting         for depth in depths: all in turn              -> seconds per step; collectives take time
    moving bytes    the larger depth: all in turn                 they also copy as many bytes through memory
    whole model: a line through the two depths, per contender

FSDP2 prefetches explicitly, one unit or two, and has a process group of its own for reductions where this torch has
that; "best" is its fastest setting. Left out: NCCL, since collectives only take their time on streams.

Widths, batch, sequence and ranks are the published ones, the depth is not: a step of the whole model is extrapolated,
which holds as far as layers are alike. Floors are extrapolated alike, from compute and communication apart. Steps are
those of `gpu`; blocks are not compiled: the network is scaled to the compute that is there, and a ratio of steps hardly
depends on it.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from benchmarks.cuda import gpu, sides
from benchmarks.cuda.gpu import A100, Contender, Line, Row, Setting, shown, turns
from benchmarks.emulated import emulate
from benchmarks.report import ratios
from models import llama
from yafsdp_fn.planner import Cluster, DoesNotFit

ROUNDS, WARMUP = 3, 2
TINY_DEPTHS = (1, 2)
TINY_ROUNDS = 2
PEERS = ("fsdp2", "fsdp2-separate")
"""A module each, in the order in which memory is given to them; FSDP2's other setting takes turns on the first."""
WHOLE = "whole model, extrapolated"
Report = Callable[[dict[str, Any]], None]


def run(setting: Setting, report: Report, name: str) -> None:
    """Row `name` of `gpu.published`; `report` gets all that is known so far after each part."""
    row = gpu.published()[name]
    fitting = fit(setting, row)
    depths = fitting.depths
    configs = {depth: setting.config(row.model, depth) for depth in depths}
    found: dict[str, Any] = {"row": row._asdict(), "depths": depths, "compiled": False}
    found["fits"] = {**fitting.deepest.words(), "contenders": fitting.peers}
    compute: dict[int, float] = {}
    for depth, config in configs.items():
        with contenders(row, config, setting, gpu.free(), False, fitting.peers) as (them, missing):
            for other in them.keys() - {"zero3", "fsdp2"}:
                del them[other]
            times = timed(them, row, config, setting)
        found["missing"] = missing
        found.setdefault("free network, ms", {})[depth] = {n: shown(t) for n, t in times.items()}
        compute[depth] = min(map(statistics.median, times.values()))
        report(found)
    deep = depths[1]
    seq = setting.seq(row.seq)
    target = gpu.target(row, deep)
    f = target * compute[deep] / gpu.work_of(row, configs[deep], seq, A100).comm_s
    cluster = gpu.scaled(f)
    comm = {depth: gpu.work_of(row, config, seq, cluster).comm_s for depth, config in configs.items()}
    found["network"] = {
        "scale": f,
        "communication over compute, published": target,
        "communication over compute, here": comm[deep] / compute[deep],
        "compute_ms": {depth: 1e3 * seconds for depth, seconds in compute.items()},
        "communication_ms": {depth: 1e3 * seconds for depth, seconds in comm.items()},
    }
    report(found)
    lines = tuple(Line.through(depths, (of[depths[0]], of[depths[1]])) for of in (compute, comm))
    modes = {"waiting": depths, "moving bytes": depths[1:]}
    for mode in ("waiting",) if setting.device == "cpu" else modes:  # on the CPU contents are copied, and nothing else
        by_depth: dict[int, dict[str, list[float]]] = {}
        for depth in modes[mode]:
            with contenders(row, configs[depth], setting, cluster, mode != "waiting", fitting.peers) as (them, missing):
                by_depth[depth] = timed(them, row, configs[depth], setting)
        found["missing"] = missing
        found[mode] = compared(by_depth, row, compute, comm, lines)
        found["goals"] = {**found.get("goals", {}), **goals(found[mode], row, mode)}
        report(found)


class Fitting(NamedTuple):
    """The depths and peers that fit. deepest: the larger of `depths`; peers: those that fit beside ours"""

    deepest: gpu.Fit
    depths: tuple[int, int]
    peers: tuple[str, ...]


def fit(setting: Setting, row: Row) -> Fitting:
    """Depths at which ours and FSDP2 fit beside each other, and which of the other peers do, in the order of `PEERS`.

    A peer is planned as `zero3` with as many layers gathered ahead: the sources tell what it holds, and no allocator's.
    """
    depths = TINY_DEPTHS if setting.tiny else row.depths

    def needs(depth: int, peers: int = 1) -> int:
        config = setting.config(row.model, depth)
        remat = ya.schedules.remat.first(row.at(depth))
        schedules = (ya.schedules.zero3(remat=remat), ya.schedules.zero3(prefetch=2, remat=remat))
        one, two = (gpu.planned(config, setting.seq(row.seq), each, ranks=row.gpus) for each in schedules)
        return gpu.together([(one, two), *[(two,)] * peers])

    deepest = gpu.layers(depths[1], needs, setting.budget)
    if deepest.layers < depths[1]:
        if deepest.layers < 2:
            raise DoesNotFit(f"{row.model}: two depths are needed, and one layer is all that fits")
        depths = (deepest.layers // 2, deepest.layers)
    count = 1
    while count < len(PEERS) and (setting.budget is None or needs(depths[1], count + 1) <= setting.budget):
        count += 1
    return Fitting(deepest, depths, PEERS[:count])


def timed(them: dict[str, Contender], row: Row, config: llama.Config, setting: Setting) -> dict[str, list[float]]:
    rounds = TINY_ROUNDS if setting.tiny else ROUNDS
    return turns(them, setting.batch(config, row.seq), setting, rounds=rounds, warmup=WARMUP, each=1)


def compared(
    times: dict[int, dict[str, list[float]]],
    row: Row,
    compute: dict[int, float],
    comm: dict[int, float],
    lines: tuple[Line, ...],
) -> dict[str, Any]:
    """Step times, floors and ratios: at each depth as measured; of the whole model as extrapolated from two depths."""
    out: dict[str, Any] = {"published ratio": row.ratio}
    medians = {
        depth: {name: statistics.median(each) for name, each in samples.items()} for depth, samples in times.items()
    }
    for depth, samples in times.items():
        best = _fastest(medians[depth], "fsdp2")
        out[f"{depth} layers"] = verdict(medians[depth], compute[depth], comm[depth]) | {
            "step_ms": {name: shown(each) for name, each in samples.items()},
            "over best of fsdp2, by round": {name: ratios(each, samples[best]) for name, each in samples.items()},
        }
    if len(medians) == 2:
        (low, one), (high, two) = medians.items()
        whole = {name: Line.through((low, high), (one[name], two[name])) for name in one}
        steps = {name: line.at(row.layers) for name, line in whole.items()}
        out[WHOLE] = verdict(steps, *(line.at(row.layers) for line in lines)) | {
            "layers": row.layers,
            "step_ms": {name: 1e3 * seconds for name, seconds in steps.items()},
            "ms per layer": {name: 1e3 * line.per_layer for name, line in whole.items()},
        }
    return out


def verdict(steps: dict[str, float], compute: float, comm: float) -> dict[str, Any]:
    """Ours, the floor and FSDP2's settings, over each other. Seconds of a step by contender."""
    floor = max(compute, comm)
    best = _fastest(steps, "fsdp2")
    mine = _fastest(steps, "zero3")
    return {
        "best of fsdp2": best,
        "best of ours": mine,
        "ours over best of fsdp2": steps[mine] / steps[best],
        "ours over fsdp2": steps[mine] / steps["fsdp2"],
        "floor over best of fsdp2": floor / steps[best],
        "ours over floor": steps[mine] / floor,
        "compute_ms": 1e3 * compute,
        "communication_ms": 1e3 * comm,
    }


def goals(found: dict[str, Any], row: Row, mode: str) -> dict[str, bool]:
    """Near the floor where communication binds; the published ratio where the floor allows it.

    Of the whole model, or of the layers that ran where there is no other depth.
    """
    whole = found[WHOLE if WHOLE in found else next(key for key in found if key.endswith("layers"))]
    out = {}
    if whole["communication_ms"] > whole["compute_ms"]:
        out[f"{mode}: within 5% of the floor"] = whole["ours over floor"] <= 1.05
    if whole["floor over best of fsdp2"] <= row.ratio:
        out[f"{mode}: at most {row.ratio:.3f} of FSDP2"] = whole["ours over best of fsdp2"] <= row.ratio
    return out


def _fastest(seconds: dict[str, float], whose: str) -> str:
    """The fastest setting of "fsdp2", or of "zero3"."""
    return min((name for name in seconds if name.startswith(whose)), key=seconds.__getitem__)


@contextlib.contextmanager
def contenders(
    row: Row, config: llama.Config, setting: Setting, cluster: Cluster, moves: bool, peers: tuple[str, ...]
) -> Iterator[tuple[dict[str, Contender], dict[str, str]]]:
    """All that can be built on rank 0 of the row's ranks, by name, and why the others cannot."""
    remat = ya.schedules.remat.first(row.at(config.layers))
    recompute = row.at(config.layers)
    schedules = {
        "zero3": ya.schedules.zero3(remat=remat),
        "zero3-prefetch2": ya.schedules.zero3(prefetch=2, remat=remat),
    }
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    with emulate(cluster, row.gpus, move_bytes=moves):
        try:
            found.update(sides.build(config, ya.mesh(device=setting.device), setting, schedules))
            mesh = init_device_mesh(setting.device, (row.gpus,))
            separate = "fsdp2-separate" in peers
            found.update(sides.build_fsdp2(config, mesh, setting, recompute=recompute, separate=separate))
            missing.update({peer: "does not fit beside the others, by the plan" for peer in PEERS if peer not in peers})
            if separate and "fsdp2-separate" not in found:
                missing["fsdp2-separate"] = f"torch {torch.__version__} has not both of {', '.join(sides.SEPARATE)}"
            yield found, missing
        finally:
            found.clear()
            gc.collect()
            setting.synchronize()
    setting.empty_cache()
