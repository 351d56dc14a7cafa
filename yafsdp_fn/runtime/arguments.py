"""The arguments of one call of a user's function: which are differentiated, and which part a microbatch gets; and what
the function returns."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
from torch import Tensor

from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.micro_shards import micro_shard_seed, microbatches_on
from yafsdp_fn.params.markers import Frozen
from yafsdp_fn.params.sharded import Runner, Sharded, handles, is_sharded
from yafsdp_fn.params.tree import Tree, shape_of
from yafsdp_fn.runtime.batch import argument_name, note_missing_rows, split_batch
from yafsdp_fn.runtime.graph_walks import depends
from yafsdp_fn.runtime.reductions import Mean, as_mean, of_tensors
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.util.randomness import VisitCounter

INDEPENDENT = (
    "the loss does not depend on the differentiated arguments: it was detached or made anew (.item(), torch.tensor), "
    "computed under no_grad or inference_mode, or uses no trainable parameter"
)


# ---- What a call is given, and what it gives.


class Seed(NamedTuple):
    """The seed of random numbers, besides microbatch and visit.

    rank: for plain trees; otherwise 0. of_state: False of trees without a state, where visits alone are seeded
    """

    seed: int
    step: int
    rank: int = 0
    of_state: bool = True

    def counter(self, comms: Communicators, microbatch: int) -> VisitCounter:
        """Returns the counter that seeds a microbatch of a sharded state, on all stages alike."""
        if comms.deterministic:
            of_micro_shard = micro_shard_seed(comms, microbatch)
            return VisitCounter(self.seed, self.step, *of_micro_shard, batch_rank=0, ranks=comms)
        rank, batch_rank = comms.seed_rank, comms.batch_rank
        return VisitCounter(self.seed, self.step, microbatch, rank, batch_rank=batch_rank, ranks=comms)


class Results(NamedTuple):
    """The results of all microbatches of one call, not yet combined over ranks. grads: of the differentiated plain
    leaves"""

    losses: list[Mean]
    aux: list[Tree]
    grads: list[Tensor | None]

    def append(self, mean: Mean, aux: Tree) -> None:
        """Adds those of the next microbatch."""
        self.losses.append(Mean(mean.total.detach(), mean.weight))
        self.aux.append(detached(aux))


class Arguments:
    """The arguments of one call: which are differentiated, and how the rest is cut into microbatches.

    nodes: the differentiated arguments' handles, frozen subtrees, and plain tensors
    rest: the arguments that are not differentiated, positional and keyword
    constants: handles of one state among the rest, if nothing sharded is differentiated: a base under adapters, say
    microbatches: their number, as asked for or as the mesh requires: see `microbatches_on`
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: tuple[int, ...],
        microbatches: int | None,
    ) -> None:
        # which of them are differentiated
        if len(set(argnums)) != len(argnums):
            raise ValueError(f"argnums={argnums} names one argument twice")
        for number in argnums:
            if not 0 <= number < len(args):
                raise ValueError(f"argnums={number}: the function was called with {len(args)} positional arguments")
        rest = [None if number in argnums else arg for number, arg in enumerate(args)]
        self._fun, self._argnums = fun, argnums
        self.rest: Any = (rest, kwargs)
        differentiated: Any = [args[number] for number in argnums]
        self.nodes: list[Any]
        self.nodes, self.spec = optree.tree_flatten(differentiated, is_leaf=lambda n: isinstance(n, Sharded | Frozen))
        for node in self.nodes:
            if not isinstance(node, Sharded | Frozen) and not (isinstance(node, Tensor) and node.is_floating_point()):
                raise TypeError(
                    f"a differentiated argument has a leaf {shape_of(node)}; expected floating-point "
                    "tensors: of a state its params (state.params), of a tree of ya.Param what ya.init "
                    "or ya.materialize makes of it"
                )
        # whose ranks cut the batch
        others = [] if any(map(is_sharded, self.nodes)) else handles(self.rest)
        self.constants = [node for node in others if node.owner is others[0].owner]
        given = next(filter(is_sharded, [*self.nodes, *self.constants]), None)
        comms = None if given is None else given.owner.comms
        self._copied = comms is not None and comms.deterministic
        self.microbatches = microbatches_on(comms, microbatches) if self._copied else microbatches or 1
        self._microbatch: Callable[[int], Any] | None = None
        if self.microbatches > 1:
            self._microbatch = split_batch(self.rest, self.microbatches, "microbatches", "microbatches", argument_name)

    @cached_property
    def plain(self) -> list[Tensor]:
        """Leaves for the plain tensors, for a backward. (Inside torch.func none can be made.)"""
        return [node.detach().requires_grad_() for node in self.nodes if isinstance(node, Tensor)]

    # ---- one microbatch

    def call(self, microbatch: int, runner: Runner | None, track: bool, *, copied: bool = False) -> Any:
        """Calls the function on the differentiated leaves and the microbatch's part of the rest. copied: on a copy of
        that part, which the function may write to"""
        # differentiated
        plain = iter(self.plain)
        nodes: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Tensor):
                leaf = next(plain)
                nodes.append(leaf if track else leaf.detach())
            else:
                nodes.append(node if runner is None or isinstance(node, Frozen) else node.run_by(runner))
        # the rest, or the microbatch's part of it
        whole = self.rest if self._microbatch is None else self._microbatch(microbatch)
        copied = copied or self._copied  # kernels may round differently by alignment, and parts begin anywhere
        if copied or self.constants:
            whole = optree.tree_map(lambda node: self._given(node, runner, copied), whole, is_leaf=is_sharded)
        try:
            return self.on(nodes, whole)
        except Exception as error:
            note_missing_rows(error, whole)
            raise

    def _given(self, node: Any, runner: Runner | None, copied: bool) -> Any:
        """Returns a leaf of the rest as the function gets it."""
        if copied and isinstance(node, Tensor):
            return node.clone()
        own = runner is not None and is_sharded(node) and any(node.owner is of.owner for of in self.constants)
        return node.run_by(runner) if own else node

    def on(self, nodes: Sequence[Any], whole: Any = None) -> Any:
        """Calls the function on `nodes` for the differentiated arguments, and the rest or a part of it."""
        rest, kwargs = self.rest if whole is None else whole
        rest = list(rest)
        for number, arg in zip(self._argnums, optree.tree_unflatten(self.spec, nodes), strict=True):
            rest[number] = arg
        return self._fun(*rest, **kwargs)

    # ---- gradients, as trees

    def gradients(self, plain: Sequence[Tensor | None], shards: Shards | None, record: Any = None) -> list[Any]:
        """Returns the differentiated arguments with gradients in their place; frozen ones get a zero without memory.

        record: the observer of the step
        """
        given = iter(plain)
        nodes: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Tensor):
                found = next(given)
                nodes.append(zero(node) if found is None else found)
            elif is_sharded(node):
                assert shards is not None
                of_group = [(shards.tensors[k], leaf) for k, _, leaf in node.group_leaves()]
                grads = tuple(zero(leaf) if g is None else g for g, leaf in of_group)
                nodes.append(node.gradient(grads, record))
            else:
                nodes.append(optree.tree_map(zero, node))
        return list(optree.tree_unflatten(self.spec, nodes))


# ---- A loss in a step, and what it returns.


class StepLoss(NamedTuple):
    """The loss of a step: its function with the arguments of all microbatches. has_aux: it returns (loss, aux)"""

    arguments: Arguments
    has_aux: bool
    seed: Seed


def pair_of(out: Any) -> tuple[Any, Tree]:
    """Returns loss and aux, as they came. Raises TypeError for anything else."""
    if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Mean):
        raise TypeError(f"has_aux=True: the function must return (loss, aux), got {type(out).__name__}")
    return out


def returned(out: Any, has_aux: bool) -> tuple[Mean, Tree]:
    """Returns loss and aux from the function's result. Raises TypeError for anything else."""
    out, aux = pair_of(out) if has_aux else (out, None)
    mean = as_mean(out, depends=depends)
    return mean, of_tensors(aux, mean.total.device)


def detached(tree: Tree) -> Tree:
    return optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def add_to(sums: list[Tensor | None], found: Iterator[Tensor | None]) -> None:
    """Adds to each of `sums` the next of the gradients `found`, if there is one."""
    for index, (before, grad) in enumerate(zip(sums, found, strict=False)):
        if grad is not None:
            sums[index] = grad if before is None else before + grad


def zero(leaf: Tensor) -> Tensor:
    """Returns zeros like `leaf`, without memory of their own."""
    return leaf.new_zeros(()).expand(leaf.shape)
