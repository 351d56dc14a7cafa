"""lora, merge_lora: add low-rank adapters to a frozen tree of parameters, and merge them into its weights.

    adapted = ya.lora(llama.params(config), 16)         # or of tensors, or of lazy leaves, as llama.hf.load gives
    state = ya.init(adapted, tx, mesh=mesh)             # or ya.shard
    step = ya.train_step(llama.loss(config), tx)        # the loss stays as it is
    llama.hf.save(directory, config, state.params)      # merged, a layer at a time

A unit becomes two; both are gathered together, and one of them is reduced and updated:

    layers    | q | k | norm |        layers.frozen    | q | k | norm |         layers    | q.a | q.b | k.a | k.b |
"""

import math
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.api.sharding import unshard
from yafsdp_fn.nn.low_rank import LowRank, is_low_rank
from yafsdp_fn.params.initializers import uniform, zeros
from yafsdp_fn.params.layout import cut_of
from yafsdp_fn.params.leaf_mask import LeafRule, must_not_be_sharded, plain_param
from yafsdp_fn.params.markers import Frozen, Unit, is_marker, without_markers
from yafsdp_fn.params.sources import Lazy, source
from yafsdp_fn.params.tree import Param, Tree, dotted, in_stack, join
from yafsdp_fn.params.tree_layout import push_frozen, tree_layout
from yafsdp_fn.util.foreign_names import with_hints

STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""The dtypes in which a base may be stored."""


@with_hints
def lora(
    params: Tree,
    rank: int,
    where: LeafRule | None = None,
    *,
    alpha: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tree:
    """Returns `params`, frozen, with a trained pair a [rank, in], b [out, rank] beside each chosen matrix [out, in].

    params: as for `ya.init` and `ya.shard`: a tree of `Param`s, tensors or `Lazy` leaves. Markers, names, and the
        dtypes of leaves that are frozen already stay
    where: `(dotted path, Param of one layer) -> bool` chooses. None: all matrices of stacks
    alpha: the pair counts alpha / rank times. None: once
    dtype: the chosen matrices are stored and gathered in it, one of `STORED`; everything else in `Precision.compute`.
        None: those matrices too. torch.int8: see below. A leaf's own `compute` comes first, but for torch.int8; its
        pair has it, too

    Blocks see a `LowRank` in place of a weight and may use it as one; `ya.linear` does without the matrix. At first `a`
    is uniform in +-1/sqrt(in), as in peft, and `b` zero: the model starts unchanged.

    In int8, each row of a matrix is in steps of its largest element / 127, rounded to bf16; the steps are a
    further frozen leaf. The steps of a `Param` are those of another draw: of the right size, for planning and tests,
    but not of the same matrix.

    Sources: Hu et al., arXiv 2106.09685; rows by their largest element: Dettmers et al., arXiv 2208.07339.

    Raises TypeError for another dtype and for sharded leaves; ValueError for a rank below 1, and if the choice is
    empty, not a matrix, a tied weight or one with an adapter, naming the leaf.

    >>> adapted = ya.lora(params, rank=2, alpha=4.0)
    >>> up = ya.materialize(adapted)["layers"]["up"]
    >>> type(up).__name__, up.a.shape, up.b.shape, up.factor
    ('LowRank', torch.Size([4, 2, 8]), torch.Size([4, 32, 2]), 2.0)
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"lora: rank={rank!r}: expected an integer of at least 1")
    if alpha is not None and not 0 < alpha < math.inf:
        raise ValueError(f"lora: alpha={alpha!r}: expected a positive number, or None to count a pair once")
    if dtype is not None and dtype not in STORED:
        raise TypeError(f"lora: dtype={dtype}: expected None, or one of {', '.join(map(str, STORED))}")
    if where is not None and not callable(where):
        raise TypeError(
            f"lora: where={where!r:.80}: expected a function of a leaf's path and Param, such as "
            "lambda path, param: path.endswith('q_proj.weight')"
        )
    must_not_be_sharded("lora", params)
    layout, _ = tree_layout(params)
    factor = 1.0 if alpha is None else alpha / rank
    chosen = _chosen(params, where)

    def adapted(leaf: Any, path: str, stored: torch.dtype | None) -> LowRank:
        *length, outs, ins = leaf.shape
        wide = torch.promote_types(leaf.dtype, torch.float32)
        own: dict[str, Any] = {field: getattr(leaf, field, None) for field in ("compute", "reduce")}
        a = Param((*length, rank, ins), wide, init=uniform(1 / math.sqrt(ins)), split=_split(leaf, -1, -1), **own)
        b = Param((*length, outs, rank), wide, init=zeros, split=_split(leaf, -2, -2), **own)
        if dtype != torch.int8:
            return LowRank(Frozen(leaf, dtype or stored), None, a, b, factor)
        return LowRank(Frozen(_in_int8(leaf, path, 0), dtype), Frozen(_in_int8(leaf, path, 1)), a, b, factor)

    def marked(tree: Tree, path: str, stored: torch.dtype | None = None) -> Tree:
        """Returns `tree` with each leaf frozen on its own, or adapted. stored: dtype of an outer `Frozen`"""

        def of(accessor: optree.PyTreeAccessor, node: Any) -> Any:
            here = join(path, dotted(accessor))
            if isinstance(node, Frozen):
                return marked(node.tree, here, node.dtype or stored)
            return adapted(node, here, stored) if here in chosen else Frozen(node, stored)

        return optree.tree_map_with_accessor(of, tree, is_leaf=lambda node: isinstance(node, Frozen))

    nodes = []
    for entry, subtree in zip(layout.entries, layout.container.flatten_up_to(push_frozen(params)), strict=True):
        made = marked(subtree, entry.name)
        nodes.append(made if is_marker(made) else Unit(made))  # else each marker in it would make an entry
    return optree.tree_unflatten(layout.container, nodes)


def merge_lora(tree: Tree) -> Tree:
    """Returns whole tensors without markers, as `ya.unshard`, with every adapter added to its weight. All ranks must
    call it.

    tree: a state, its params, or a plain tree of tensors. Adapted weights come in the dtype of their adapter, in a
        state `Precision.param`. The whole tree is whole at a time; `llama.hf.save(directory, config, state.params)`
        merges a layer at a time

    >>> adapted = ya.materialize(ya.lora(params, rank=2))
    >>> torch.equal(ya.merge_lora(adapted)["layers"]["up"], plain["layers"]["up"])     # as long as b is zero
    True
    """
    whole = without_markers(unshard(tree))
    with torch.no_grad():
        return optree.tree_map(lambda node: node.merged() if is_low_rank(node) else node, whole, is_leaf=is_low_rank)


def _chosen(params: Tree, where: LeafRule | None) -> set[str]:
    """Returns the paths of the matrices that get an adapter."""
    found: dict[str, Any] = {}
    chosen: list[str] = []
    accessors, leaves, _ = optree.tree_flatten_with_accessor(params, is_leaf=is_low_rank)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        path = dotted(accessor)
        if is_low_rank(leaf):
            raise ValueError(f"lora: {path} has an adapter already; ya.merge_lora adds it to its weight")
        param = plain_param(accessor, leaf)
        found[path], matrix = leaf, len(param.shape) == 2
        if not (in_stack(accessor) and matrix if where is None else where(path, param)):
            continue
        if not matrix:
            shape = param.shape
            raise ValueError(f"lora: where chose {path}, of shape {shape}; an adapter needs a matrix [out, in]")
        chosen.append(path)
    if not chosen:
        raise ValueError(f"lora: no matrix was chosen; where says which of {', '.join(list(found)[:6])} and so on")
    for path in chosen:
        others = [other for other, leaf in found.items() if leaf is found[path] and other != path]
        if others and not isinstance(found[path], Param):  # which only describes, and may do so twice
            raise ValueError(f"lora: {path} and {others[0]} are one tensor, which an adapter would untie; clone it")
    return set(chosen)


def _split(leaf: Any, dim: int, to: int) -> dict[str, Any]:
    """Returns the part of a matrix's `split` that cuts `dim`, for a leaf that has that as `to`. A pair is split where
    its matrix is: with the rows, b; with the columns, a, so that the block's sum over ranks adds up the products with
    both."""
    if isinstance(leaf, Tensor):
        return {}
    cuts = {axis: cut_of(leaf.split, axis) for axis, _ in leaf.split}
    return {axis: to if blocks == 1 else (to, blocks) for axis, (at, blocks) in cuts.items() if at == dim}


# ---- int8


def _in_int8(leaf: Any, path: str, part: int) -> Param | Lazy:
    """Returns a leaf with one part of the quantised matrices of `leaf`: 0, their elements; 1, their steps."""
    shape = tuple(leaf.shape if part == 0 else leaf.shape[:-1])
    split: Any = _split(leaf, -2, -1) if part or isinstance(leaf, Tensor) else leaf.split
    if isinstance(leaf, Param):
        beyond = leaf.shape[len(shape) :]
        init = leaf.init
        return Param(
            shape, init=lambda draw, of, _: _quantised(init(draw, (*of, *beyond), leaf.dtype))[part], split=split
        )
    give = source(path, leaf, 0, torch.device("cpu"))
    return Lazy(shape, torch.float32, lambda layer: _quantised(give(layer))[part], split)


def _quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises [..., out, in] to float32 integers up to 127, in steps [..., out] of their own for each row."""
    matrix = matrix.float()
    # bf16: every dtype that blocks compute in represents them exactly
    steps = (matrix.abs().amax(-1) / 127).clamp_min(1e-30).bfloat16().float()
    return (matrix / steps.unsqueeze(-1)).round().clamp(-127, 127), steps
