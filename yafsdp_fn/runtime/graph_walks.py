"""Walks of autograd graphs: which tensors a block was made of, and whether a tensor depends on the arguments.

Beside them, what a step asks of a block that runs again: whether it returns the same.

Steady steps enter this file only for a loss whose weight has a graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.util.torch_private import is_transform_wrapper, memory_key

# ---- Tests whether a tensor made by a loss depends on the differentiated arguments, by following its graph through
# visits.
#
#     tensor  <-  output of a visit  <-  graph of its block  <-  weights: it does
#                                                            <-  argument  <-  output of an earlier visit, and so on
#
# The graph of a visit that keeps it lies between two nodes: `closes`, whose inputs are the outputs of the block, and
# `opens`, whose outputs are its arguments and weights. Besides, both pass on the token that chains visits, at place 0.
# A visit that keeps no graph is one node, `running`, and claims that all its outputs may depend. The question is noted
# there, and answered when the block runs again; of a visit that is recorded its step answers.

Edge = tuple[Any, int]
"""An autograd node and the index of one of its outputs."""


class Asked(NamedTuple):
    """A question left at a visit that keeps no graph. outputs: indices that must not depend on anything; arguments: the
    edges that its arguments come from"""

    outputs: set[int]
    arguments: Sequence[Edge]


def depends(tensor: Tensor) -> bool:
    """Returns whether `tensor` depends on them. False where only later runs of blocks can tell: call `depends_again` in
    each."""
    return tensor.requires_grad and _ends_in_leaf([_edge(tensor)], {})


def depends_again(asked: Asked, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """Answers a visit's question once it has run with a graph from `inputs` to `outs`."""
    edges = [_edge(outs[number]) for number in asked.outputs if outs[number].requires_grad]
    return _ends_in_leaf(edges, dict(zip(map(id, inputs), asked.arguments, strict=True)))


def _ends_in_leaf(edges: Iterable[Edge], origins: dict[int, Edge]) -> bool:
    """Returns whether the graph behind `edges` ends in a leaf. origins: id of a visit's argument -> the edge it comes
    from; such leaves are no ends"""
    seen = set[Edge]()
    todo = list(edges)
    while todo:
        node, number = edge = todo.pop()
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if (running := getattr(node, "running", None)) is not None:
            before = running.asked.outputs if running.asked else set()
            running.asked = Asked({number - 1} | before, node.next_functions[1:])
        elif hasattr(node, "closes"):
            todo.append(node.next_functions[number])
        elif hasattr(node, "opens"):
            if number >= len(node.next_functions):
                return True  # a weight
            todo.append(node.next_functions[number])
        elif (leaf := getattr(node, "variable", None)) is None:
            todo += node.next_functions
        elif id(leaf) in origins:
            todo.append(origins[id(leaf)])
        else:
            return True
    return False


def _edge(tensor: Tensor) -> Edge:
    node, number, *_ = get_gradient_edge(tensor)
    return node, number


# ---- Which memory a graph keeps alive, and which leaves it ends in.


def _nodes(roots: Iterable[Tensor], ends: Callable[[Any], object] = lambda node: False) -> Iterator[Any]:
    """Yields the nodes of the graph behind `roots`, without those behind nodes that are `ends`."""
    seen: set[Any] = {None}
    todo: list[Any] = [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            todo += [below for below, _ in node.next_functions]


def saved_by(roots: Iterable[Tensor]) -> set[int]:
    """Returns the memory, by `memory_key`, that the nodes of the graph behind `roots` have saved for their backward."""
    found: set[int] = set()
    for node in _nodes(roots):
        names = [name for name in dir(node) if name.startswith("_saved_")]
        saved: Any = [getattr(node, "saved_tensors", ()), *(getattr(node, name) for name in names)]
        found.update(map(memory_key, tensors_in(saved)))
    return found


def read_beside_visits(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[list[int], bool, list[Tensor]]:
    """Returns the indices of the `leaves` that `roots` depend on other than through visits, whether they depend on a
    visit, and parameters of modules that they depend on, through visits too."""
    visited = False
    ends = set[int]()
    for node in _nodes(roots, ends=_visit_of):
        visited = visited or _visit_of(node) is not None
        if hasattr(node, "variable"):
            ends.add(id(node.variable))
    read = [index for index, leaf in enumerate(leaves) if id(leaf) in ends]
    return read, visited, foreign([*roots, *leaves_behind(roots)])


def read_as_shards(roots: Iterable[Tensor], leaves: Sequence[Tensor]) -> list[int]:
    """Returns the indices of the `leaves` that `roots` depend on with neither a visit nor a collective between them."""

    def ends(node: Any) -> bool:
        return _visit_of(node) is not None or hasattr(node, "of_ranks")

    found = {id(getattr(node, "variable", None)) for node in _nodes(roots, ends)}
    return [index for index, leaf in enumerate(leaves) if id(leaf) in found]


def _visit_of(node: Any) -> Any:
    """Returns the visit that a node is the last one of; None if it is none."""
    return getattr(node, "running", None) or getattr(node, "closes", None)


def leaves_behind(roots: Iterable[Tensor]) -> list[Tensor]:
    """Returns the leaves that `roots` depend on."""
    return [node.variable for node in _nodes(roots) if hasattr(node, "variable")]


def foreign(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Returns those that are parameters of modules, or weights of visits that blocks have let out."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter) or hasattr(leaf, OF_VISIT)]


def of_other_calls(roots: Iterable[Tensor], session: object) -> list[str]:
    """Returns the names of the visits that `roots` depend on and that are not of `session`: of an earlier step."""
    found: list[str] = []
    for node in _nodes(roots):
        running = _visit_of(node)
        if running is not None and running.session is not session:
            found.append(running.visit.name)
    return found


OF_VISIT = "_yafsdp_of_visit"
"""Attribute of the weights of a visit that is recorded or traced: its name."""


# ---- Finds tensors that reach a block from outside: neither arguments, nor weights, nor made inside.
#
# They would silently receive no gradient, so they are an error. On the fast path, a walk of the block's local graph
# to its leaves finds them. Under torch.func the graph hides behind wrappers, and a function mode inspects each call.

HOW = "pass it as an argument, in xs, or in consts; or detach it if it needs no gradient"


def check_graph(
    outs: Sequence[Tensor],
    allowed: Iterable[Tensor],
    name: str,
    again: Callable[[], Sequence[Tensor]],
    visit: object = None,
) -> None:
    """Raises if the graph of `outs` ends in a leaf that is neither in `allowed` nor made by the block itself.

    again: runs the block once more. If a leaf is unknown, a mode then finds out whether it was made inside, as forces
    are; visit: the one whose graph this is, as its nodes know it, if it keeps that
    """
    # a steady graph ends in what is known
    allowed = list(allowed)
    if _foreign_leaf(outs, allowed, name, visit) is None:
        return
    # an unknown leaf may have been made inside
    watch = TensorWatch(allowed, name)
    with watch:
        outs = again()
    if (leaf := _foreign_leaf(outs, watch.known(), name, visit)) is not None:
        raise RuntimeError(_message(name, _shown(leaf)))


def _foreign_leaf(outs: Iterable[Tensor], allowed: Iterable[Tensor], name: str, visit: object) -> Tensor | None:
    """Returns a leaf at an end of the graph of `outs` that is not in `allowed`, or None."""
    known = {id(tensor) for tensor in allowed}

    def begins(node: Any) -> bool:
        return visit is not None and getattr(node, "opens", None) is visit

    for node in _nodes(outs, ends=begins):
        if begins(node):
            continue
        other = _visit_of(node)
        if other is not None:  # of the graph around this block
            raise RuntimeError(_message(name, f"the output of an earlier visit ({other.visit.name})"))
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return leaf
    return None


# ---- on the pure path: by a mode, since no graph is at hand


class TensorWatch(TorchFunctionMode):
    """Raises if a block uses an unknown tensor that requires grad."""

    def __init__(self, allowed: Iterable[Tensor], name: str) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in allowed}  # keeps them alive: ids must not be reused
        self._name = name

    def known(self) -> list[Tensor]:
        """Returns the allowed tensors and all tensors made since."""
        return list(self._known.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = [args, kwargs or {}]
        for leaf in tensors_in(given):
            if id(leaf) not in self._known and (leaf.requires_grad or is_transform_wrapper(leaf)):
                raise RuntimeError(_message(self._name, _shown(leaf)))
        out = func(*args, **(kwargs or {}))
        self._known |= {id(leaf): leaf for leaf in tensors_in(out)}
        return out


def _shown(tensor: Tensor) -> str:
    why = "that requires grad"
    if not tensor.is_floating_point():
        why = "that a transform of torch.func has wrapped"
    return f"a tensor of shape {tuple(tensor.shape)} {why}"


def _message(name: str, what: str) -> str:
    return f"{name}: {what} reaches the block from outside, where no gradient would come back to it: {HOW}"


# ---- Tests whether a block that runs again, for its backward, returns what it did in the forward.

SAMPLES = 256
"""Elements of each output that are compared."""


def spaced(tensor: Tensor, most: int = SAMPLES) -> Tensor:
    """Selects about `most` elements of a tensor, at equal distances, or all of them: a view where it is contiguous."""
    return tensor.detach().flatten()[:: max(1, tensor.numel() // most)]


def sample(outs: Sequence[Tensor]) -> list[Tensor]:
    """Returns a copy of some elements of each of `outs`, at equal distances."""
    return [spaced(out).clone() for out in outs]


def alike(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Returns whether samples of two runs are of the same numbers, to half of the digits that their dtype has: kernels
    of a GPU may sum in another order each time."""
    return all(map(_close, before, now))


def _close(before: Tensor, now: Tensor) -> bool:
    if not before.numel() or not before.is_floating_point():
        return torch.equal(before, now)
    largest = before.nan_to_num(0, 0, 0).abs().max().item()
    close = torch.finfo(before.dtype).eps ** 0.5 * largest
    return torch.allclose(before.double(), now.double(), rtol=0, atol=close, equal_nan=True)
