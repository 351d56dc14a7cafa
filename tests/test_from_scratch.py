"""docs/examples/from_scratch.py: two hundred lines of plain torch, which have the bits of `ya.schedules.zero3()`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from docs.examples import from_scratch as plain
from tests.harness.pages import doc
from tests.harness.pool import Pools, on_ranks

SOURCE = (Path(__file__).parents[1] / "docs" / "examples" / "from_scratch.py").read_text()
CPU = torch.device("cpu")
STEPS = 3


def loss(params: Any, batch: Any) -> ya.Mean:
    """The same functions of whole weights, as this library calls them."""
    x = ya.apply(plain.embed, params["embed"], batch["tokens"])
    x, _ = ya.scan(lambda x, w: (plain.block(x, w), None), x, params["layers"])
    return ya.Mean(ya.apply(plain.head, params["head"], x, batch["targets"]), batch["targets"].numel())


def with_the_library(mesh: Any) -> tuple[list[Tensor], list[plain.Weights]]:
    whole = plain.params()
    layers = {name: torch.stack([layer[name] for layer in whole["layers"]]) for name in whole["layers"][0]}
    params = {"embed": ya.Unit(whole["embed"][0]), "layers": ya.Stacked(layers), "head": ya.Unit(whole["head"][0])}
    tx = ya.optim.adamw(3e-3, weight_decay=1e-4)
    state = ya.shard(params, tx, mesh=mesh)
    step = ya.train_step(loss, tx, schedule=ya.schedules.zero3())
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, plain.rows(number, CPU))
        losses.append(metrics["loss"])
    new = ya.params.without_markers(ya.unshard(state.params))
    stack = [{name: leaf[layer] for name, leaf in new["layers"].items()} for layer in range(plain.L)]
    return losses, [new["embed"], *stack, new["head"]]


def new() -> plain.Model:
    return plain.Model(plain.params(), CPU)


def from_scratch() -> tuple[list[Tensor], list[plain.Weights], plain.Model]:
    model = new()
    optimizer = plain.adamw(model, lr=3e-3, weight_decay=1e-4)
    losses = [plain.train_step(model, plain.loss, optimizer, plain.rows(number, CPU)) for number in range(STEPS)]
    whole = [{name: leaf.clone() for name, leaf in model.whole(unit, ahead=0).items()} for unit in model.units]
    return losses, whole, model


@on_ranks(1, 2, 4)
def test_losses_and_parameters_of_three_steps_have_the_bits_of_zero3(mesh: Any) -> None:
    losses, whole = with_the_library(mesh)
    plain_losses, plain_whole, model = from_scratch()
    assert all(map(torch.equal, losses, plain_losses))
    assert losses[2] < losses[0]
    for ours, theirs in zip(whole, plain_whole, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert model.units[1].shard.numel() * mesh.size() == model.units[1].numel


def order_of_work(mesh: Any) -> list[str]:
    """What a step begins, in order, as `gather 3`, `compute 3` and `reduce 3`: units by number."""
    model = new()
    begun: list[str] = []
    number = {id(unit): index for index, unit in enumerate(model.units)}
    gathers = model.gathers.run
    whole = model.whole
    reduce = model.reduce

    def gathering(job: Any) -> Any:
        begun.append(f"gather {number[id(job.__closure__[[*job.__code__.co_freevars].index('unit')].cell_contents)]}")
        return gathers(job)

    def computing(unit: plain.Unit, ahead: int) -> plain.Weights:
        weights = whole(unit, ahead)
        begun.append(f"compute {number[id(unit)]}")
        return weights

    def reducing(unit: plain.Unit, grads: Any) -> None:
        begun.append(f"reduce {number[id(unit)]}")
        reduce(unit, grads)

    model.gathers.run, model.whole, model.reduce = gathering, computing, reducing
    plain.train_step(model, plain.loss, plain.adamw(model, lr=0.0, weight_decay=0.0), plain.rows(0, CPU))
    return begun


ORDER = """
gather 0
gather 1, compute 0
gather 2, compute 1
gather 3, compute 2
gather 4, compute 3
gather 5, compute 4
gather 6, compute 5
gather 7, compute 6
compute 7
compute 7, reduce 7
compute 6, reduce 6
gather 4, compute 5, reduce 5
gather 3, compute 4, reduce 4
gather 2, compute 3, reduce 3
gather 1, compute 2, reduce 2
compute 1, reduce 1
compute 0, reduce 0
"""
"""At the turn the last two layers are in the two slots, and at the end the embedding is still in its own."""


def test_it_gathers_ahead_and_does_not_gather_again_at_the_turn(pools: Pools) -> None:
    assert pools[2].run(order_of_work)[0] == re.split(", |\n", ORDER.strip())


@on_ranks(2)
def test_layers_share_two_slots(mesh: Any) -> None:
    model = new()
    assert len({id(unit.slot) for unit in model.stacks["layers"]}) == 2
    assert len(model.units) == plain.L + 2


def lines_of_code() -> int:
    """Without comments, docstrings and empty lines."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(SOURCE.splitlines(), 1)
    return sum(bool(re.match(r"\s*[^\s#]", line)) for number, line in lines if number not in docstrings)


def test_it_is_at_most_two_hundred_lines_of_code_with_nothing_of_the_library() -> None:
    assert lines_of_code() <= 200
    tree = ast.parse(SOURCE)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    roots = {str(module).split(".")[0] for module in imported}
    assert roots == {"__future__", "os", "collections", "concurrent", "typing", "torch"}


def test_its_page_counts_its_lines() -> None:
    page = doc("from_scratch")
    assert f"{lines_of_code()} lines of code" in page
