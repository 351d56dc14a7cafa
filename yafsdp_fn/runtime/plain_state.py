"""A state of plain tensors, to compare sharded ones with.

state = PlainState.create(params, tx)
state, metrics = step(state, batch)               # the same step function as of a sharded state
"""

import dataclasses
import warnings

import optree
import torch
import torch.distributed as dist

from yafsdp_fn import optim
from yafsdp_fn.communication.formats import WHOLE
from yafsdp_fn.optim.base import checked_update, must_be_state_of
from yafsdp_fn.params.algebra import map_trainable
from yafsdp_fn.params.markers import register_node
from yafsdp_fn.params.sharded import is_sharded, trainable
from yafsdp_fn.params.sources import with_values
from yafsdp_fn.params.tree import Tree, named_leaves
from yafsdp_fn.runtime.arguments import INDEPENDENT, Arguments, Results, Seed, add_to, returned
from yafsdp_fn.runtime.consistency import OF_A_RANK
from yafsdp_fn.util.randomness import BACKWARD, LOSS, VisitCounter, counting, device_of_leaves, seeded


@dataclasses.dataclass(frozen=True, repr=False)
class PlainState:
    """The interface of a sharded state for plain tensors in one process: the oracle, and a start without any sharding.

    rank: the rank of a sharded state whose random numbers steps draw

    >>> oracle = ya.PlainState.create(params, tx, seed=0)
    >>> oracle, metrics = ya.train_step(loss_fn, tx)(oracle, batch)
    >>> state, sharded = ya.train_step(loss_fn, tx)(state, batch)
    >>> torch.allclose(metrics["loss"], sharded["loss"])
    True
    """

    params: Tree
    opt_state: Tree
    step: int
    seed: int
    rank: int = 0

    @staticmethod
    def create(params: Tree, tx: optim.GradientTransformation, *, seed: int = 0, rank: int = 0) -> "PlainState":
        """Makes a state from a tree of `Param`s, tensors or lazy leaves. Its params keep their markers, such
        as frozen. Raises ValueError for a leaf that a sharded state would gather in another dtype than its own, or in
        a wire format."""
        for path, leaf in named_leaves(trainable(params)):
            if getattr(leaf, "compute", None) not in (None, leaf.dtype):
                raise ValueError(
                    f"PlainState: {path} is {leaf.dtype} and has compute={leaf.compute}, but blocks see plain tensors "
                    "as they are; leave compute out, and let the loss convert it"
                )
            if any(format is not None and not format.kept for format in getattr(leaf, "wire", WHOLE)):
                raise ValueError(
                    f"PlainState: {path} travels in wire formats, {leaf.wire}, but nothing travels here; leave wire "
                    "out, and let the loss pass it through (ya.formats.passed)"
                )
        made = optree.tree_map(lambda x: x.detach().clone(), with_values(params, seed, "cpu"))
        return PlainState(made, optim.as_transformation(tx).init(trainable(made)), 0, seed, rank)

    def __repr__(self) -> str:
        return f"PlainState(step={self.step}, seed={self.seed}: {', '.join(dict(named_leaves(self.params)))})"

    def apply_gradients(self, grads: Tree, tx: optim.GradientTransformation) -> "PlainState":
        """Returns the state after one optimizer step, out of place."""
        with torch.no_grad():
            old = trainable(self.params)
            must_be_state_of(tx, optree.tree_map(lambda x: x.to("meta"), old), self.opt_state)
            updates, opt_state = checked_update(optim.as_transformation(tx), trainable(grads), self.opt_state, old)
            new = optim.apply_updates(old, updates)
        params = map_trainable(lambda _, after: after, self.params, new)
        return dataclasses.replace(self, params=params, opt_state=opt_state, step=self.step + 1)


register_node(
    PlainState,
    lambda s: ((s.params, s.opt_state), (s.step, s.seed, s.rank)),
    lambda static, c: PlainState(c[0], c[1], *static),
)


# ---- The loop of a step on plain tensors.

OWN_ROWS = (
    "a PlainState is trained on a rank's part of a batch (ya.shard_batch): no rank hears of the others' gradients, and "
    "their states drift apart. Give it the whole batch, or make the state by ya.init or ya.shard"
)


def run_plain(arguments: Arguments, seed: Seed, has_aux: bool, track: bool) -> Results:
    """Runs a loss, and its backward, on each microbatch in turn: what every schedule must equal."""
    if seed.of_state and dist.is_initialized() and dist.get_world_size() > 1:
        rows = optree.tree_leaves(arguments.rest, is_leaf=is_sharded)
        if any(hasattr(leaf, OF_A_RANK) for leaf in rows):
            warnings.warn(OWN_ROWS, stacklevel=2)
    results = Results([], [], [None] * len(arguments.plain))
    device = device_of_leaves((arguments.nodes, arguments.rest))
    for microbatch in range(arguments.microbatches):
        counter = VisitCounter(seed.seed, seed.step, microbatch, seed.rank)
        # a tree without a state has no step, by which every call would draw other numbers: torch's generators go on
        drawn, back = [counter.seed_beside(what) if seed.of_state else None for what in (LOSS, BACKWARD)]
        with torch.set_grad_enabled(track), counting(counter), seeded(drawn, device):
            mean, aux = returned(arguments.call(microbatch, None, track), has_aux)
        results.append(mean, aux)
        if track:
            if not mean.total.requires_grad:
                raise ValueError(INDEPENDENT)
            with seeded(back, device):
                add_to(results.grads, iter(torch.autograd.grad(mean.total, arguments.plain, allow_unused=True)))
    return results
