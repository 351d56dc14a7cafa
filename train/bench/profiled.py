"""Reads a profiler's chrome trace: which collectives ran, and how many bytes they carried."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}
"""torch's c10d operators. A receive is some rank's send, and is not counted twice."""

NOT_TRAFFIC = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_"}

ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "int64_t": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short int": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


SCALARS_BYTES = 64
"""Messages below this size are a step's few scalars (loss, weight, norm): counted, but not in what is sent."""


def collectives(path: Path, *, inside: str, group: int) -> dict[str, dict[str, int]]:
    """Count, bytes of whole messages and bytes that a rank sends, by kind, of those that start within `inside`.

    group: ranks that all-reduces and all-to-alls run over, which a trace does not tell

    Under a dispatch mode (see `counting.ThreadAllocations`) an operator calls itself once more: the
    inner one is left out.
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    (span,) = (e for e in events if e["name"] == inside and e.get("cat") != "gpu_user_annotation")
    out: dict[str, dict[str, int]] = {}
    ends: dict[tuple[int, str], float] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        if not event["name"].startswith("c10d::") or not span["ts"] <= event["ts"] <= span["ts"] + span["dur"]:
            continue
        name = event["name"].removeprefix("c10d::")
        end = event["ts"] + event["dur"]
        if name in NOT_TRAFFIC or end <= ends.get((event["tid"], name), -math.inf):
            continue
        ends[event["tid"], name] = end
        if name not in KINDS:
            raise RuntimeError(f"the trace has the operator {event['name']}, which train/bench/profiled.py lacks")
        entry = out.setdefault(KINDS[name], {"count": 0, "bytes": 0, "sent": 0})
        sizes = argument_bytes(event["args"])
        entry["count"] += 1
        entry["bytes"] += max(sizes)
        entry["sent"] += sent_bytes(KINDS[name], sizes, group)
    return dict(sorted(out.items()))


def argument_bytes(args: dict[str, Any]) -> list[int]:
    """Bytes of each tensor argument: of a gather's output and input, of a reduction's."""
    found = []
    for dims, kind in zip(args["Input Dims"], args["Input type"], strict=True):
        if kind == "TensorList":
            # The trace gives a list's shapes but no dtype; whoever reduces lists here (DDP's buckets) reduces fp32.
            found.append(4 * sum(numel(d) for d in dims))
        elif kind in ITEM_BYTES:
            found.append(ITEM_BYTES[kind] * math.prod(dims))
    return found


def sent_bytes(kind: str, sizes: list[int], group: int) -> int:
    """What a rank has to send: of a gather or a reduction the other ranks' part of the message, of an all-reduce twice
    that. Implementations may send more (gloo's reduce-scatter is an all-reduce)."""
    whole = max(sizes)
    if whole < SCALARS_BYTES:
        return 0
    if kind in ("all_gather", "reduce_scatter"):
        return whole - min(sizes)  # a rank's own part is the other argument
    return {"all_reduce": 2 * whole * (group - 1) // group, "all_to_all": whole * (group - 1) // group}.get(kind, whole)


def numel(dims: Any) -> int:
    """Elements of a shape, or of a list of shapes."""
    if dims and isinstance(dims[0], list):
        return sum(numel(d) for d in dims)
    return math.prod(dims)
