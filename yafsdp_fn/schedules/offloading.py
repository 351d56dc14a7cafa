"""Places the copies of a program whose recomputed visits save their carries on the host: see `remat.offload`.

    forward v into carry slot s    save          ; Offload v, where a later visit takes the slot
    backward w in carry slot s     read          ; Fetch v, the visit before w in the slot

Visits take the carry slots in turn. A pass over a program that knows nothing of it.
"""

from collections.abc import Iterable

from yafsdp_fn.schedules.further_ops import Fetch, Offload
from yafsdp_fn.schedules.ops import Backward, Forward, Op
from yafsdp_fn.schedules.remat import Offloading
from yafsdp_fn.schedules.trace import Trace


def offloaded(ops: Iterable[Op], remat: Offloading, trace: Trace) -> list[Op]:
    """`ops` with the carry slots of `remat`; as they are where there is no backward, or a slot for each visit."""
    ids = sorted(remat.visits(trace))
    if not trace.trains or len(ids) <= remat.slots:
        return list(ops)
    slot = {visit: k % remat.slots for k, visit in enumerate(ids)}
    before = dict(zip(ids[remat.slots :], ids, strict=False))  # visit -> the one before it in its slot
    leave = set(before.values())
    out: list[Op] = []
    for op in ops:
        if not isinstance(op, Forward | Backward) or op.visit not in slot:
            out.append(op)
            continue
        at = slot[op.visit]
        out.append(op._replace(carry_slot=at))
        if isinstance(op, Forward) and op.visit in leave:
            out.append(Offload(op.visit, at))
        elif isinstance(op, Backward) and op.visit in before:
            out.append(Fetch(before[op.visit], at))
    return out
