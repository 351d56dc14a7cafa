"""A state of plain tensors: what a sharded one is compared with.

state = PlainState.create(params, tx)
state, metrics = step(state, batch)               # the same step function as of a sharded state
"""

import dataclasses

import optree
import torch

from yafsdp_fn import optim
from yafsdp_fn.params.nodes import register_node
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.params.sources import with_values
from yafsdp_fn.params.tree import Tree


@dataclasses.dataclass(frozen=True)
class PlainState:
    """The same face for plain tensors, on one process: the oracle, and a way to begin without any sharding.

    rank: whose random numbers blocks draw, of the ranks that a sharded state would be on
    """

    params: Tree
    opt_state: Tree
    step: int
    seed: int
    rank: int = 0

    @staticmethod
    def create(params: Tree, tx: optim.GradientTransformation, *, seed: int = 0, rank: int = 0) -> "PlainState":
        """From a tree of `Param`s, tensors or lazy leaves. Its params keep their markers, such as frozen."""
        made = optree.tree_map(lambda x: x.detach().clone(), with_values(params, seed, "cpu"))
        return PlainState(made, optim.as_transformation(tx).init(trainable(made)), 0, seed, rank)

    def apply_gradients(self, grads: Tree, tx: optim.GradientTransformation) -> "PlainState":
        """One optimizer step out of place."""
        with torch.no_grad():
            old = trainable(self.params)
            updates, opt_state = optim.as_transformation(tx).update(trainable(grads), self.opt_state, old)
            new = optim.apply_updates(old, updates)
        moved = {id(x): y for x, y in zip(optree.tree_leaves(old), optree.tree_leaves(new), strict=True)}
        params = optree.tree_map(lambda leaf: moved.get(id(leaf), leaf), self.params)
        return dataclasses.replace(self, params=params, opt_state=opt_state, step=self.step + 1)


register_node(
    PlainState,
    lambda s: ((s.params, s.opt_state), (s.step, s.seed, s.rank)),
    lambda static, c: PlainState(c[0], c[1], *static),
)
