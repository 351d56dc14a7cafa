"""The error that a format brings by unit: of shards that of the plain weights, by its definition."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.formats import EXACT, LAYERS, TX, Halves, loss, on_two_stages, tree
from tests.harness.meshes import made
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from yafsdp_fn.communication.formats import Format, Wire

FORMATS: dict[str, Format] = {
    "int8": ya.formats.Scaled(torch.int8, 8),
    "fp8": ya.formats.Scaled(torch.float8_e4m3fn, 16),
    "halves": Halves(),
    "roots": ya.formats.Roots(),
}


def off(format: Format, leaves: list[Tensor]) -> float:
    """The root mean square of what leaves of a unit lose, over their own."""
    lost = total = 0.0
    for leaf in leaves:
        blocks = torch.zeros(-(-leaf.numel() // format.block), format.block, dtype=leaf.dtype)
        blocks.view(-1)[: leaf.numel()] = leaf.reshape(-1)
        decoded = format.decode(format.encode(blocks), leaf.dtype)
        lost += float((decoded.double() - blocks.double()).square().sum())
        total += float(blocks.double().square().sum())
    return (lost / total) ** 0.5


def by_definition(format: Format, whole: Any, where: Any = None, count: int = LAYERS) -> dict[str, float]:
    """Of the whole tensors of a tree, without markers, with so many layers."""
    found = {}
    for entry, unit in dict(whole if isinstance(whole, dict) else whole._asdict()).items():
        accessors, leaves, _ = optree.tree_flatten_with_accessor(unit)
        paths = [".".join([entry, *(str(each.entry) for each in accessor)]) for accessor in accessors]
        for layer in range(count if entry == "layers" else 1):
            rows = [leaf[layer] if entry == "layers" else leaf for leaf in leaves]
            chosen = [row for path, row in zip(paths, rows, strict=True) if where is None or where(path)]
            if chosen:
                found[f"layers[{layer}]" if entry == "layers" else entry] = off(format, chosen)
    return found


def is_near(got: dict[str, float], expected: dict[str, float], tolerance: float = 1e-9) -> None:
    assert len(got) > 1
    assert got == pytest.approx(expected, rel=tolerance, abs=0)


def in_layers(path: str) -> bool:
    return path.startswith("layers") and "gain" not in path


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name", "kind"),
    [(1, "shard", "plain"), (2, "shard", "plain"), (2, "shard", "tied"), (2, "stages", "plain"), (4, "nodes", "tied")],
)
def test_of_shards_it_is_that_of_plain_weights(mesh: Any, name: str, kind: str) -> None:
    """Of weights, chosen weights and gradients, and of moments after a step."""
    abstract = tree(Wire(), kind)
    if name == "stages":
        state, _, batch = on_two_stages(loss, abstract, TX, EXACT)
        schedule: Any = ya.schedules.one_f_one_b(ya.schedules.zero3())
    else:
        state = ya.init(abstract, TX, mesh=made(name), precision=EXACT)
        schedule = ya.schedules.zero3()
        batch = batch_of(mesh.get_rank(), rows=6)
        _, grads = ya.value_and_grad(loss)(state.params, batch)
        of_grads = ya.formats.relative_errors(FORMATS["int8"], grads, in_layers)
        is_near(of_grads, by_definition(FORMATS["int8"], ya.unshard(grads), in_layers))
    state, _ = ya.train_step(loss, TX, schedule=schedule, microbatches=3)(state, batch)
    whole = ya.unshard(state.params)
    nodes = optree.tree_leaves(state.opt_state, is_leaf=lambda node: hasattr(node, "mu"))
    (moments,) = [node for node in nodes if hasattr(node, "mu")]
    both = [ya.unshard(each) for each in (moments.mu, moments.nu)]
    for format in FORMATS.values():
        for where in (None, in_layers):
            is_near(ya.formats.relative_errors(format, state.params, where), by_definition(format, whole, where))
        mu, nu = (by_definition(format, each) for each in both)
        is_near(ya.formats.relative_errors(format, state.opt_state), {unit: max(mu[unit], nu[unit]) for unit in mu})


@on_ranks(2)
def test_marked_leaves_are_in_the_unit_of_their_layer(mesh: Any) -> None:
    """Pinned, frozen and separate leaves are in the unit of their layer."""
    state = ya.init(tree(Wire(), "marked"), mesh=mesh, precision=EXACT)
    found = ya.formats.relative_errors(FORMATS["int8"], state.params)
    is_near(found, by_definition(FORMATS["int8"], ya.unshard(state.params)))
    with pytest.raises(TypeError, match=r"expected a sharded tree, such as state.params, behind the format"):
        ya.formats.relative_errors(state.params, FORMATS["int8"])


@on_ranks(2)
def test_of_odd_values(mesh: Any) -> None:
    """A tree without stacks; what is not finite has no error that is a number."""
    values = {"a": torch.ones(3), "b": torch.tensor([1.0, float("inf")])}
    state = ya.shard(values, mesh=mesh)
    found = ya.formats.relative_errors(FORMATS["int8"], state.params)
    assert list(found) == ["a", "b"]
    assert found["a"] < 1e-6
    assert not found["b"] < 1
    assert ya.formats.relative_errors(FORMATS["int8"], state.params, lambda path: False) == {}
