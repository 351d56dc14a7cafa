"""The program that torch's `fully_shard` runs, from its settings.

    gather   | r 0 1 2 3     3 2 1 0  |      a group is gathered when its forward begins, and freed after it
    compute  |   e 0 1 2 3 h h 3 2 1 0 e|    its backward gathers it again, and the group before it
    reduce   |                 3 2 1 0 r|    r: what no module inside was wrapped for, as one, is held to the end

A group is what one call of `fully_shard` gathers at once: a unit, or several.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from yafsdp_fn.program.ops import AllReduce, Gather, Op, Reduce
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace, reads_of, writes_of
from yafsdp_fn.schedules.build import alternating_slots, op_of, own_slots, sums_over_stages, visited
from yafsdp_fn.schedules.builders import Schedule
from yafsdp_fn.schedules.remat import Offloading, Remat, policy
from yafsdp_fn.util.words import shown


class WrappedUnits(NamedTuple):
    """Units that are gathered and reduced together.

    reshard: whether they are freed after their forward
    """

    units: tuple[int, ...]
    reshard: bool = True


# ---- The schedule.


@shown
def fsdp2(
    *,
    reshard_after_forward: bool = True,
    wrap: Literal["layers", "all"] = "layers",
    prefetch: int | None = None,
    remat: Remat | str = "none",
    defer: bool = False,
) -> Schedule:
    """FSDP2: torch's `fully_shard`, on each layer and on the whole.

    Gathers, with L layers, U other units, M microbatches: M (2 L + U), of g (R - 1) / R each; without resharding after
    forward M (L + U); with `defer` (M + 1) L + U, or L + U. Reductions: M (L + U), with `defer` L + U, of r (R - 1) / R
    each.

    reshard_after_forward: free layers after their forward. Torch's number, of ranks that keep them meanwhile, there is
        not: `hpz` gathers layers again inside the node
    wrap: "layers": `fully_shard` was called with each layer and with the whole, which has all other units as one group,
        held from the first forward of a microbatch to its last backward. "all": with every other unit, too; the last
        one visited is held, as torchtitan does, which knows that its backward comes next
    prefetch: groups that are gathered ahead by lists for forward and backward, as
        `set_modules_to_forward_prefetch` does; None: without lists, where a backward gathers the next group, and a
        forward none (a GPU's gathers overlap all the same, since its host runs ahead)
    remat: as of all builders: what is checkpointed in the module
    defer: gradients are added up unreduced, and weights stay after a backward, as torch's pipelines do with stages

    A unit's slot is one of two that take turns, or of `prefetch + 1` if these are more; its own where it is held, or
    gathered with others.

    >>> freed, kept = (ya.schedules.fsdp2(reshard_after_forward=after)(trace) for after in (True, False))
    >>> freed.count(ya.schedules.Gather), kept.count(ya.schedules.Gather)
    (10, 6)
    """
    counted = prefetch is None or (type(prefetch) is int and prefetch >= 0)
    if type(reshard_after_forward) is not bool or not counted:
        raise ValueError(
            f"fsdp2(reshard_after_forward={reshard_after_forward!r}, prefetch={prefetch!r}): expected True or False "
            "(inside a node ya.schedules.hpz gathers again), and a number of groups of at least 0"
        )
    if wrap not in ("layers", "all"):
        raise ValueError(f"fsdp2(wrap={wrap!r}): expected 'layers' or 'all'")

    def schedule(trace: Trace) -> Program:
        groups = groups_of(trace, reshard_after_forward, wrap)
        return program_of(trace, groups, policy(remat), prefetch=prefetch, defer=defer)

    return schedule


# ---- groups

PART = re.compile(r"\.(split|compute|reduce)\([^)]*\)")
"""The parts of a unit's name that say over which axes inside of blocks it is split, and which dtypes of its own it
has."""


def groups_of(trace: Trace, reshard: bool, wrap: str = "layers") -> list[WrappedUnits]:
    """Returns the groups that settings make of a trace's units, in the order of their visits."""
    modules: dict[str, list[int]] = {}  # such parts are units of the same module
    for unit in visited(trace):
        modules.setdefault(PART.sub("", trace.units[unit].name), []).append(unit)
    each = [*map(tuple, modules.values())]
    outside = [units for units in each if trace.units[units[0]].stack is None]
    if wrap == "layers":
        whole = tuple(unit for units in outside for unit in units)
        layers = [WrappedUnits(units, reshard) for units in each if units not in outside]
        return [WrappedUnits(whole, False), *layers] if whole else layers
    held = [units for units in each[-1:] if units in outside]
    return [WrappedUnits(units, False if units in held else reshard) for units in each]


# ---- ops


def program_of(
    trace: Trace,
    groups: list[WrappedUnits],
    remat: Remat,
    *,
    prefetch: int | None = None,
    defer: bool = False,
    hold: bool = False,
) -> Program:
    """Returns the program of groups. prefetch, defer: as of `fsdp2`; hold: none is freed after its backward"""
    if isinstance(remat, Offloading):
        raise ValueError(
            "ya.schedules.remat.offload: fully_shard makes no copies of carries to the host; take remat.all or first(n)"
        )
    recompute = remat(trace)
    stays = defer or hold
    # slots: of groups that their visits use as a whole, some take turns
    turns: list[tuple[int, ...]] = []
    once: list[tuple[int, ...]] = []
    for units, reshard in groups:
        visits = [visit.units for visit in trace.visits if not {*units}.isdisjoint(visit.units)]
        if all({*units} <= {*each} for each in visits):
            turns += [units] * reshard
            once += [units] * (len(visits) == 1)
    own = own_slots(trace.units)
    width = 2
    if not hold:
        _, most = _gathers(trace, groups, own, turns, prefetch, stays)
        width = max(width, most)
    slots = _in_turns(trace, turns, width)
    grad_slots = own if defer else _in_turns(trace, once, 2)
    gathers, _ = _gathers(trace, groups, slots, turns, prefetch, stays)
    reductions = _reductions(trace, groups, grad_slots, defer)
    ops: list[Op] = []
    for gathered, now, reduced in zip(gathers, trace.order, reductions, strict=True):
        ops += gathered
        ops.append(op_of(now, trace, slots, grad_slots, recompute))
        ops += reduced
    return Program(trace, (*ops, *sums_over_stages(trace)))


def _in_turns(trace: Trace, groups: list[tuple[int, ...]], width: int) -> dict[int, int]:
    """Returns unit -> slot: those of `groups` take turns with `width` slots, or sets of slots; others have their
    own."""
    slots: dict[int, int] = {}
    for turn, units in enumerate(groups):
        by_size = sorted(units, key=lambda unit: -trace.units[unit].gather_bytes)
        slots |= {unit: place * width + turn % width for place, unit in enumerate(by_size)}
    # a visit of several groups may have two units in one slot
    for visit in trace.visits:
        at = [slots[unit] for unit in visit.units if unit in slots]
        if len(set(at)) < len(at):
            lanes = alternating_slots(trace.visits, trace.units, width=width)
            slots = {unit: lanes[unit] for unit in slots}
            break
    own = [unit.id for unit in trace.units if unit.id not in slots]
    first = max(slots.values(), default=-1) + 1
    return slots | {unit: first + at for at, unit in enumerate(own)}


def _numbers(groups: list[WrappedUnits]) -> dict[int, int]:
    """Returns unit -> the number of its group."""
    return {unit: number for number, group in enumerate(groups) for unit in group.units}


def _gathers(
    trace: Trace,
    groups: list[WrappedUnits],
    slots: dict[int, int],
    turns: list[tuple[int, ...]],
    prefetch: int | None,
    stays: bool,
) -> tuple[list[list[Op]], int]:
    """Returns the gathers before each compute, and how many groups in `turns` are gathered at once at most.

    stays: none is freed after its backward
    """
    of = _numbers(groups)
    # (group, microbatch, whether it is forward) -> the first compute on the group, and the last
    begins: dict[tuple[int, int, bool], int] = {}
    ends: dict[tuple[int, int, bool], int] = {}
    for i, now in enumerate(trace.order):
        for unit in trace.visits[now.visit].units:
            at = of[unit], now.microbatch, now.kind == "forward"
            begins.setdefault(at, i)
            ends[at] = i
    found: list[list[Op]] = []
    most = 0
    held: dict[int, int] = {}  # slot -> unit
    for i, now in enumerate(trace.order):
        # its own groups, and those that are gathered ahead where they begin
        forward = now.kind == "forward"
        reads = reads_of(now, trace)
        wanted = list(dict.fromkeys(of[unit] for unit in reads))
        ahead: list[int] = []
        for group in wanted:
            if len(groups[group].units) > 1 and begins[group, now.microbatch, forward] != i:
                continue  # its lists are of the module with all of its units, which is entered once
            if prefetch is not None:
                step = 1 if forward else -1
                listed = [group + step * k for k in range(1, prefetch + 1)]
                ahead += [number for number in listed if 0 <= number < len(groups)]
            elif not forward:
                following = [each for each in trace.order[i + 1 : i + 2] if each.kind in ("backward", "inputs")]
                ahead += [of[unit] for each in following for unit in reads_of(each, trace)]
        # ahead only into slots that nothing of this compute is in
        busy = {slots[unit] for unit in reads}
        for group in ahead:
            into = {slots[unit] for unit in groups[group].units}
            if group not in wanted and into.isdisjoint(busy):
                wanted.append(group)
                busy |= into
        # gathered, unless all of it is there
        found.append([])
        for group in wanted:
            units = groups[group].units
            if any(held.get(slots[unit]) != unit for unit in units):
                found[i].append(Gather(units, tuple(slots[unit] for unit in units)))
                held |= {slots[unit]: unit for unit in units}
                most = max(most, sum(not {*units}.isdisjoint(held.values()) for units in turns))
        # freed, after their forward or their last backward of the microbatch
        for group in {of[unit] for unit in trace.visits[now.visit].units}:
            units, reshard = groups[group]
            last = ends[group, now.microbatch, forward] == i
            freed = reshard and (last or len(units) == 1) if forward else last and not stays
            if freed:
                held = {slot: unit for slot, unit in held.items() if unit not in units}
    return found, most


def _reductions(
    trace: Trace, groups: list[WrappedUnits], grad_slots: dict[int, int], defer: bool
) -> Iterator[list[Op]]:
    """Yields the reductions after each compute: of the groups whose gradients of a microbatch are complete.

    Where a stage's segments take turns, a unit's next microbatch may have come before another unit's first: it is
    reduced with the first, and the group's next reduction goes without it.
    """
    of = _numbers(groups)
    last: dict[tuple[int, int], int] = {}  # (unit, microbatch) -> the last compute that writes its gradient
    for i, now in enumerate(trace.order):
        last |= {(unit, now.microbatch): i for unit in writes_of(now, trace)}
    unreduced: set[int] = set()  # units whose gradient slots hold something
    for i, now in enumerate(trace.order):
        written = writes_of(now, trace)
        unreduced |= {*written}
        ops: list[Op] = []
        for group in dict.fromkeys(of[unit] for unit in written):
            units = tuple(unit for unit in groups[group].units if (unit, now.microbatch) in last)
            if max(last[unit, now.microbatch] for unit in units) != i:
                continue
            complete = all(last.get((unit, m), -1) <= i for unit in units for m in range(trace.microbatches))
            if complete or not defer:
                ready = tuple(unit for unit in units if unit in unreduced)
                ops.append(Reduce(ready, tuple(grad_slots[unit] for unit in ready)))
                unreduced -= {*ready}
            if complete and trace.replicas > 1:
                ops.append(AllReduce(units))
        yield ops
