"""The published schedules: factories of functions from a trace to a program.

All that they decide is which unit lives in which slot, how far ahead to gather, and when to reduce; `build` writes the
ops. Each docstring gives the collectives of a step, and what a rank sends in them, with

    L layers in one stack, U other units; M microbatches; R ranks of a shard group, P replicas, K ranks of a node
    g, r: bytes of a unit as gathered and as reduced, padded (their sum over units where units differ)

Options that several have:
    prefetch: how many computes ahead to gather; 0 gathers when needed
    remat: which visits recompute their graph in the backward: a policy of `remat`, or its name
    defer: with several microbatches, add gradients up unreduced, and reduce once per step. It takes a gradient slot per
        unit, the size of the whole model in the reduce dtype
    update: the optimizer's step is part of the program, if it has a backward, unit by unit, after the norm of the
        whole gradient, and the next step's first gathers follow the updates of their units
On a mesh with a `replicate` axis every one of them sums gradient shards over replicas when they are complete, once per
step. Frozen units that have a slot of their own stay there from step to step.
"""

from collections import Counter
from collections.abc import Callable

from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace, arguments
from yafsdp_fn.schedules.build import alternating_slots, build, own_slots, visited
from yafsdp_fn.schedules.remat import Remat, policy
from yafsdp_fn.util.words import shown

Schedule = Callable[[Trace], Program]
"""Any function from a trace to a program."""
AnySchedule = Schedule | Program
"""A step takes either."""
Slots = Callable[[Trace], dict[int, int]]
"""Unit -> slot."""


# ---- ZeRO.


@shown
def zero3(
    *, resident: int = 0, prefetch: int = 1, remat: Remat | str = "none", defer: bool = False, update: bool = False
) -> Schedule:
    """ZeRO-3 with YaFSDP's two alternating slots: weights are gathered for forward and again for backward.

        gather   | e 0 1 2 3 h |     1 0    |          each layer: forward once, backward once, but the last two
        compute  |   e 0 1 2 3 h h 3 2 1 0 e|
        reduce   |               h 3 2 1 0 e|

    With w = max(2, prefetch + 1) slots and k = resident:
    Gathers: U + L + (2 M - 1) max(0, L - k - w), of g (R - 1) / R each: the last w layers still hold their slots when
    backward begins, and a further microbatch finds its first w there. With two slots and one microbatch U + 2 L - 2.
    Reductions: M (L + U), with `defer` L + U, of r (R - 1) / R each.

    resident: the last `resident` layers get slots of their own, and are gathered once per step instead of twice per
        microbatch: memory for communication, up to `zero2`
    prefetch: 2 takes three alternating slots, and so on
    remat: the visits that recompute, a policy of `ya.schedules.remat` or its name
    defer: reduce once per step instead of once per microbatch, each unit from a gradient slot of its own
    update: the optimizer's step is part of the program

    >>> program = ya.schedules.zero3(prefetch=2, remat="all")(trace)
    >>> ya.verify(program).count(ya.schedules.Gather)
    7
    """
    _check("zero3", resident=resident, prefetch=prefetch)
    return _schedule(_alternating(prefetch, resident), remat, prefetch=prefetch, defer=defer, update=update)


@shown
def zero2(*, prefetch: int = 2, remat: Remat | str = "none", update: bool = False) -> Schedule:
    """ZeRO-2: each unit has a slot of its own and is gathered once per step; gradients are reduced every microbatch.

        gather   | e 0 1 2 3 h |
        compute  |   e 0 1 2 3 h h 3 2 1 0 e|
        reduce   |               h 3 2 1 0 e|

    Gathers: L + U, of g (R - 1) / R each. Reductions: M (L + U), of r (R - 1) / R each. Needs room for all weights in
    the compute dtype; gradients still alternate between two slots.

    The arguments are those of `zero3`.

    >>> program = ya.schedules.zero2()(ya.planner.trace(loss_fn, params, batch, microbatches=2))
    >>> program.count(ya.schedules.Gather), program.count(ya.schedules.Reduce)
    (6, 12)
    """
    _check("zero2", prefetch=prefetch)
    return _schedule(_own, remat, prefetch=prefetch, update=update)


@shown
def zero1(*, prefetch: int = 2, remat: Remat | str = "none", update: bool = False) -> Schedule:
    """ZeRO-1: only the optimizer's state and step are sharded; weights are gathered and gradients reduced once a step.

        gather   | e 0 1 2 3 h |                                           |
        compute  |   e 0 1 2 3 h h 3 2 1 0 e e 0 1 2 3 h h 3 2 1 0 e       |      two microbatches
        reduce   |                                         h 3 2 1 0 e     |

    Gathers: L + U, of g (R - 1) / R each. Reductions: L + U, of r (R - 1) / R each. Needs room for all weights in the
    compute dtype and all gradients in the reduce dtype; with one microbatch `zero2` does the same with less.

    The arguments are those of `zero3`.

    >>> program = ya.schedules.zero1()(trace)
    >>> program.count(ya.schedules.Gather), program.count(ya.schedules.Reduce)
    (6, 6)
    """
    _check("zero1", prefetch=prefetch)
    return _schedule(_own, remat, prefetch=prefetch, defer=True, update=update)


# ---- Replicas, and nodes.


@shown
def ddp(*, remat: Remat | str = "none", update: bool = False) -> Schedule:
    """Data parallelism: every rank holds everything, gradients are summed over all ranks when they are complete.

        compute    | e 0 1 2 3 h h 3 2 1 0 e|
        replicate  |             h 3 2 1 0 e|

    All-reduces: L + U, once per step, of 2 r (P - 1) / P each. The mesh needs `ya.mesh(replicate=-1, shard=1)`: a shard
    is the whole vector, slots are the shards, and the gathers and reductions of the program move nothing.

    The arguments are those of `zero3`.

    >>> copies = ya.planner.trace(loss_fn, params, batch, mesh=[("replicate", 2), ("shard", 1)])
    >>> program = ya.schedules.ddp()(copies)
    >>> program.count(ya.schedules.Gather), program.count(ya.schedules.AllReduce)
    (6, 6)
    """
    why = (
        "ddp: the state is cut into {trace.ranks} shards (mesh {mesh}), but here every rank holds all of it: build it "
        "on ya.mesh(replicate=-1, shard=1), or take zero1(), which is nearest to it"
    )
    inside = _schedule(_own, remat, prefetch=0, defer=True, update=update)
    return _on(lambda trace: trace.ranks == 1, why, inside)


@shown
def hsdp(
    *, resident: int = 0, prefetch: int = 1, remat: Remat | str = "none", defer: bool = False, update: bool = False
) -> Schedule:
    """Hybrid sharding: `zero3` inside a shard group, and gradient shards summed over the replicas of the group.

        gather     | e 0 1 2 3 h |     1 0      |
        compute    |   e 0 1 2 3 h h 3 2 1 0 e  |
        reduce     |               h 3 2 1 0 e  |
        replicate  |                 h 3 2 1 0 e|

    Gathers and reductions as `zero3`, over the R ranks of a shard group. All-reduces: L + U shards, once per step, of
    2 (r / R) (P - 1) / P each. The mesh needs an axis `replicate`: `ya.mesh(replicate=2)`; as a rule the shard group is
    inside a node.

    The arguments are those of `zero3`.

    >>> replicas = ya.planner.trace(loss_fn, params, batch, mesh=[("replicate", 2), ("shard", 4)])
    >>> program = ya.schedules.hsdp()(replicas)
    >>> program.count(ya.schedules.Reduce), program.count(ya.schedules.AllReduce)
    (6, 6)
    """
    why = "hsdp: the state's mesh {mesh} has no replicas; build it on ya.mesh(replicate=2, shard=-1), or take zero3()"
    inside = zero3(resident=resident, prefetch=prefetch, remat=remat, defer=defer, update=update)
    return _on(lambda trace: "replicate" in dict(trace.mesh), why, inside)


@shown
def hpz(
    layers: int, *, prefetch: int = 1, remat: Remat | str = "none", defer: bool = False, update: bool = False
) -> Schedule:
    """`zero3` whose first `layers` layers are gathered from all ranks once a step, and after that inside the node.

        gather   | e 0 1 2 3 h |      1' 0'  |         0', 1': from the secondary shards of the node
        compute  |   e 0 1 2 3 h h 3 2 1 0 e |
        reduce   |               h 3 2 1 0 e |

    ZeRO++'s hierarchical partitioning, and YaFSDP's `hpz_first_layers_num`. After the first gather each rank keeps its
    part of the layer among the ranks of its node: 1 / local ranks of its weights in the compute dtype.

    Gathers and reductions: as many as `zero3`. With k = layers and w slots, M max(0, min(k, L - w)) +
    (M - 1) max(0, min(k, L) - w) of the gathers are inside the node, of g (K - 1) / K each: with one microbatch the
    last w layers need no second gather. The mesh needs axes `node` and `local`: `ya.mesh(local=8)`.

    The other arguments are those of `zero3`.

    >>> nodes = ya.planner.trace(loss_fn, params, batch, mesh=[("node", 2), ("local", 4)], microbatches=2)
    >>> program = ya.schedules.hpz(2)(nodes)
    >>> program.count(ya.schedules.Stash), program.count(ya.schedules.Gather, "node")
    (2, 4)
    """
    _check("hpz", layers=layers, prefetch=prefetch)
    slots = _alternating(prefetch)
    why = (
        "hpz: the state's mesh {mesh} does not tell nodes apart; build it on ya.mesh(local=8), with the number of "
        "ranks per node"
    )
    inside = _schedule(slots, remat, prefetch=prefetch, defer=defer, update=update, secondary=layers)
    return _on(lambda trace: "local" in dict(trace.mesh), why, inside)


FACTORIES = {factory.__name__: factory for factory in (ddp, zero1, zero2, zero3, hsdp, hpz)}
"""The builders by name."""


# ---- What builders share.


def must_be_made(what: str, given: object) -> None:
    """Raises TypeError for one of our factories, which says that it returns a schedule, in place of a schedule."""
    own = str(getattr(given, "__module__", "")).startswith("yafsdp_fn.")  # None: made by exec
    if own and getattr(given, "__annotations__", {}).get("return") == Schedule:
        name = getattr(given, "__name__", "")
        raise TypeError(f"{what}={name}: that is the factory; call it: {what}=ya.schedules.{name}()")


def _schedule(
    slots: Slots, remat: Remat | str, *, prefetch: int, update: bool, defer: bool = False, secondary: int = 0
) -> Schedule:
    """Returns the schedule of a choice of slots. Gradient slots are two that alternate, or one for each unit, where
    gradients stay until the last microbatch.

    secondary: how many layers, the first ones, are gathered inside the node after their first gather
    """
    again = policy(remat)
    grad_slots = _own if defer else _of_gradients

    def schedule(trace: Trace) -> Program:
        stacked = [unit for unit in visited(trace) if trace.units[unit].stack is not None]
        at = slots(trace)
        into = grad_slots(trace)
        first = frozenset(stacked[:secondary])
        return build(trace, at, into, prefetch=prefetch, remat=again, defer=defer, secondary=first, update=update)

    return schedule


def _own(trace: Trace) -> dict[int, int]:
    return own_slots(trace.units)


def _of_gradients(trace: Trace) -> dict[int, int]:
    """Returns unit -> gradient slot: two alternate; one is alone for what several visits of a microbatch reduce
    together."""
    visits = Counter(unit for visit in trace.visits for unit in visit.trained)
    apart = {unit for unit, times in visits.items() if times > 1} if trace.ordered else ()
    return alternating_slots(trace.visits, trace.units, apart=apart)


def _alternating(prefetch: int, resident: int = 0) -> Slots:
    width = max(2, prefetch + 1)
    return lambda trace: alternating_slots(trace.visits, trace.units, width=width, resident=resident)


def _check(factory: str, **numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{factory}({name}={value!r}): expected an integer >= 0")


def _on(fits: Callable[[Trace], bool], why: str, schedule: Schedule) -> Schedule:
    """Returns `schedule` for meshes that fit it. why: the refusal of others"""

    def checked(trace: Trace) -> Program:
        if not fits(trace):
            raise ValueError(why.format(trace=trace, mesh=f"({arguments(dict(trace.mesh))})"))
        return schedule(trace)

    return checked
