"""Rematerialisation policies: which visits recompute in the backward, and what they save meanwhile."""

import dataclasses
from collections.abc import Callable, Iterable

from yafsdp_fn.program.ops import Backward, ComputeOp, Fetch, Forward, Offload, Op
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.util.words import shown

# ---- Which visits recompute their graph in the backward instead of keeping it.
#
# A policy is a function from a trace to the ids of the visits that recompute. These choose among the layers of
# stacks; an embedding or a head keeps its graph, since it is used at once or costs little. Schedules take their
# names, too: "none", "all", "offload", "first:4", "every:2".
#
# `offload` moves what such visits save, the scan's carry, to the host until their backward.

Remat = Callable[[Trace], frozenset[int]]


def layer_visits(trace: Trace) -> list[int]:
    """Ids of the visits to layers of stacks, in forward order.

    >>> ya.schedules.remat.layer_visits(trace)
    [1, 2, 3, 4]
    """
    return [v.id for v in trace.visits if any(trace.units[unit].stack is not None for unit in v.units)]


def none(trace: Trace) -> frozenset[int]:
    """Returns every visit keeps its graph.

    >>> sorted(ya.schedules.remat.none(trace))
    []
    """
    return frozenset()


def all(trace: Trace) -> frozenset[int]:
    """Returns every layer recomputes: only the carries between layers are saved.

    >>> sorted(ya.schedules.remat.all(trace))
    [1, 2, 3, 4]
    """
    return frozenset(layer_visits(trace))


@shown
def first(n: int) -> Remat:
    """The first `n` layers recompute, those whose graphs would be held longest.

    >>> sorted(ya.schedules.remat.first(2)(trace))
    [1, 2]
    """
    if n < 0:
        raise ValueError(f"remat.first({n}): expected a number of layers >= 0")
    return lambda trace: frozenset(layer_visits(trace)[:n])


@shown
def every(k: int) -> Remat:
    """Every `k`-th layer recomputes, beginning with the first.

    >>> sorted(ya.schedules.remat.every(2)(trace))
    [1, 3]
    """
    if k < 1:
        raise ValueError(f"remat.every({k}): expected k >= 1")
    return lambda trace: frozenset(layer_visits(trace)[::k])


@dataclasses.dataclass(frozen=True)
class Offloading:
    """A result of `offload`. visits: to be offloaded; recompute: others that recompute; slots: carry slots in turn."""

    visits: Remat
    recompute: Remat
    slots: int

    def __call__(self, trace: Trace) -> frozenset[int]:
        return self.visits(trace) | self.recompute(trace)


def offload(visits: Remat = all, *, recompute: Remat = none, ahead: int = 1) -> Offloading:
    """Returns a policy: visits recompute, and their carries wait for the backward on the host, in pinned memory.

        compute  | e 0 1 2 3 4 5 h h 5 4 3 2 1 0 e |
        offload  |     0 1 2           2 1 0       |         ahead=2: the last three stay in their carry slots

    visits: a policy, `ya.schedules.remat.all` or `first(n)`; they recompute
    recompute: a policy for others, whose carries stay on the device: where the link is too slow for all,
        `offload(ya.schedules.remat.every(2), recompute=ya.schedules.remat.all)`
    ahead: how many of those visits ahead to fetch: a visit saves its carry in one of `ahead + 1` carry slots, in turn;
        the last `ahead + 1` stay there

    Device memory: `ahead + 1` carries in place of one per visit. A carry goes over the link twice.

    >>> program = ya.schedules.zero3(remat=ya.schedules.remat.offload(ahead=0))(trace)
    >>> [op.visit for op in program.ops if isinstance(op, ya.schedules.Offload)]
    [1, 2, 3]
    """
    for name, policy in (("", visits), ("recompute=", recompute)):
        if isinstance(policy, Offloading) or not callable(policy):
            raise TypeError(f"remat.offload({name}{policy!r}): expected a policy of visits that recompute: remat.all")
    if type(ahead) is not int or ahead < 0:
        raise ValueError(f"remat.offload(ahead={ahead!r}): expected an integer >= 0")
    return Offloading(visits, recompute, ahead + 1)


def policy(given: Remat | str) -> Remat:
    """Returns a policy, from one or from its name. Raises ValueError or TypeError for anything else.

    >>> sorted(ya.schedules.remat.policy("first:1")(trace))
    [1]
    """
    if isinstance(given, str):
        kind, _, count = given.partition(":")
        if kind in ("first", "every") and count.isdecimal():
            return (first if kind == "first" else every)(int(count))
        named: dict[str, Remat] = {"none": none, "all": all, "offload": offload()}
        if given not in named:
            raise ValueError(f"remat={given!r}: expected none, all, offload, first:N or every:N, or a policy")
        return named[given]
    if not callable(given):
        raise TypeError(
            f"remat={given!r}: expected a policy such as ya.schedules.remat.first(4), or its name, 'first:4'"
        )
    makers: list[object] = [first, every, offload]
    if given in makers:
        raise TypeError(
            f"remat={given.__name__}: that makes policies; call it: ya.schedules.remat.{given.__name__}(...)"
        )
    return given


# ---- Places the copies of a program whose recomputed visits save their carries on the host: see `remat.offload`.
#
#     forward v into carry slot s    save          ; Offload v, where a later visit takes the slot
#     backward w in carry slot s     read          ; Fetch v, the visit before w in the slot
#
# Visits take the carry slots in turn. A pass over a program that knows nothing of it.


def offloaded(ops: Iterable[Op], remat: Offloading, trace: Trace) -> list[Op]:
    """Returns `ops` with the carry slots of `remat`; as they are where there is no backward, or a slot for each
    visit."""
    ids = sorted(remat.visits(trace))
    if not trace.trains or len(ids) <= remat.slots:
        return list(ops)
    slot = {visit: k % remat.slots for k, visit in enumerate(ids)}
    before = dict(zip(ids[remat.slots :], ids, strict=False))  # visit -> the one before it in its slot
    leave = set(before.values())
    out: list[Op] = []
    for op in ops:
        if not isinstance(op, ComputeOp) or op.visit not in slot:
            out.append(op)
            continue
        at = slot[op.visit]
        out.append(op._replace(carry_slot=at))
        if isinstance(op, Forward) and op.visit in leave:
            out.append(Offload(op.visit, at))
        elif isinstance(op, Backward) and op.visit in before:
            out.append(Fetch(before[op.visit], at))
    return out
