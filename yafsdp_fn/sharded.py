"""The handle that stands for a sharded subtree in a parameter tree.

`state.params` is the user's own container with one `Sharded` per unit or stack. A handle is a pytree node whose
leaves are this rank's flat shards: [L, n] for a stack, [n] for a unit, also for a stack's pinned one. `tree_map` over
it is therefore for elementwise functions; whole weights exist only inside `scan`, `apply` and `map_layers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import optree
import torch
from torch import Tensor

from yafsdp_fn.layout import Entry, Group, LeafRule
from yafsdp_fn.tree import Frozen, Param, Stacked, Tree, dotted, register_node

if TYPE_CHECKING:
    from yafsdp_fn.runtime.session import Session
    from yafsdp_fn.runtime.store import Store
    from yafsdp_fn.runtime.tracing import Tracer


class Sharded:
    """One entry of a sharded tree.

    leaves: a local flat shard per group, [L, n] or [n]
    entry: names, shapes and structure of what it stands for
    """

    __slots__ = ("context", "leaves")

    def __init__(self, leaves: tuple[Any, ...], context: Context) -> None:
        self.leaves, self.context = leaves, context

    @property
    def entry(self) -> Entry:
        return self.context.entry

    @property
    def store(self) -> Store:
        return self.context.store

    def group_leaves(self) -> list[tuple[int, Group, Any]]:
        """`(number of the group in the whole tree, group, leaf)`."""
        numbered = [(self.context.first_group + k, group) for k, group in enumerate(self.entry.groups)]
        if self.context.trainable_only:
            numbered = [(number, group) for number, group in numbered if group.trainable]
        return [(number, group, leaf) for (number, group), leaf in zip(numbered, self.leaves, strict=True)]

    def check(self) -> Sharded:
        """This handle. Raises RuntimeError where its leaves are the memory of a state that was donated since."""
        if self.context.generation != self.store.generation:
            own = self.store.master.tensors
            if any(leaf is own[k] for k, _, leaf in self.group_leaves()):
                name = self.entry.name or "params"
                raise RuntimeError(f"{name}: these are parameters of a state that {self.store.why_gone()}")
        return self

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(self._not_whole(f"[{key!r}]"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._not_whole(f".{name}"))

    def __len__(self) -> NoReturn:
        raise TypeError(self._not_whole(" has no len()"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given: Any = [args, kwargs or {}]
        handle = next(node for node in optree.tree_leaves(given, is_leaf=is_sharded) if isinstance(node, Sharded))
        raise TypeError(handle._not_whole(f" in torch.{getattr(func, '__name__', func)}"))

    def _no_arithmetic(self, other: object) -> NoReturn:
        raise TypeError(self._not_whole(" in arithmetic"))

    # a tensor's own operators turn the TypeError of `__torch_function__` into NotImplemented, and then ask the handle
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _no_arithmetic
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _no_arithmetic

    def _not_whole(self, access: str) -> str:
        verb = "ya.scan(f, x, params...)" if self.entry.length is not None else "ya.apply(f, params..., x)"
        name = self.entry.name or "params"
        return f"{name}{access}: {name} is sharded, its weights are whole only inside {verb} or ya.map_layers"

    def __repr__(self) -> str:
        length = "" if self.entry.length is None else f", L={self.entry.length}"
        shapes = ", ".join(str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves)
        return f"Sharded({self.entry.name!r}{length}, local shards {shapes})"


class Context:
    """The static part of a handle. Equal where layouts are; the rest rides along uncompared.

    torch.func compares the contexts of its inputs and outputs, so identity of a session must not matter.
    seed, step: of the state it came from; session, microbatch: of the step that handed it to a loss
    """

    __slots__ = (
        "entry",
        "first_group",
        "generation",
        "microbatch",
        "seed",
        "session",
        "step",
        "store",
        "trainable_only",
    )

    def __init__(
        self,
        entry: Entry,
        store: Store,
        first_group: int,
        *,
        seed: int = 0,
        step: int = 0,
        session: Session | Tracer | None = None,
        microbatch: int = 0,
        trainable_only: bool = False,
    ) -> None:
        self.entry, self.store, self.first_group = entry, store, first_group
        self.seed, self.step, self.trainable_only = seed, step, trainable_only
        self.session, self.microbatch = session, microbatch
        self.generation = store.generation  # of the store's memory when the handle was made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        return self.entry == other.entry and self.trainable_only == other.trainable_only

    def __hash__(self) -> int:
        return hash(self.entry)

    def __repr__(self) -> str:
        return f"<{self.entry.name}>"


register_node(Sharded, lambda h: (h.leaves, h.context), lambda context, leaves: Sharded(leaves, context))


def is_sharded(node: object) -> bool:
    return isinstance(node, Sharded)


def handles(tree: Tree) -> list[Sharded]:
    """All handles in `tree`, in order."""
    return [node for node in optree.tree_leaves(tree, is_leaf=is_sharded) if isinstance(node, Sharded)]


def trainable(tree: Tree) -> Tree:
    """`tree` without what is frozen: what an optimizer sees. Frozen plain subtrees become None."""

    def select(node: Any) -> Any:
        if isinstance(node, Frozen):
            return None
        if not isinstance(node, Sharded):
            return node
        old = node.context
        context = Context(old.entry, old.store, old.first_group, trainable_only=True)
        context.generation = old.generation
        return Sharded(tuple(leaf for _, group, leaf in node.group_leaves() if group.trainable), context)

    return optree.tree_map(select, tree, is_leaf=lambda node: isinstance(node, Sharded | Frozen))


def leaf_mask(rule: LeafRule, tree: Tree) -> Tree:
    """`rule(path, param)` for every logical leaf of `tree`, as a tree of bool tensors of the same structure.

    On a sharded tree a leaf of the result is [n]: True at the elements of this rank's flat shard whose logical leaf
    passes, for every layer alike; on a plain tree it is 0-dim. `param` is per layer.
    """

    def of_handle(handle: Sharded) -> Sharded:
        masks = []
        for _, group, leaf in handle.group_leaves():
            n = leaf.shape[-1]
            start = handle.store.comms.rank * n
            passes = [rule(name, p) for name, p in zip(group.layout.names, handle.entry.params(group), strict=True)]
            mask = torch.zeros(n, dtype=torch.bool, device=leaf.device)
            for piece in group.layout.pieces(start, start + n):
                mask[piece.start : piece.stop] = passes[piece.leaf]
            masks.append(mask)
        return Sharded(tuple(masks), handle.context)

    accessors, nodes, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_sharded)
    out: list[Any] = []
    for accessor, node in zip(accessors, nodes, strict=True):
        if isinstance(node, Sharded):
            out.append(of_handle(node))
        else:
            stacked = any(issubclass(entry.type, Stacked) for entry in accessor)
            param = Param(tuple(node.shape[1:] if stacked else node.shape), node.dtype)
            out.append(torch.tensor(rule(dotted(accessor), param), device=node.device))
    return optree.tree_unflatten(spec, out)
