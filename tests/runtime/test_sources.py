"""Other versions of the code of blocks: found wherever a block has it from, on ranks that name the function."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import yafsdp_fn as ya
from tests.harness.failing import TX, batch, bits, params, same, state
from tests.harness.groups import outcome
from tests.harness.pool import Pool
from yafsdp_fn.runtime import consistency

HELPER = """
import torch

def scale(x):
    return {factor} * x
"""

MODEL = """
import dataclasses
import functools
import torch
import torch.nn.functional as F
from torch import nn
{before}
import yafsdp_fn as ya
import helper_of_blocks

@dataclasses.dataclass(frozen=True)
class Layer:
    eps: float = 1e-5
    def block(self, x, w):
        return x + self.mixed(x, w), None
    def mixed(self, x, w):
        return {method}(x @ w["w"] + w["b"])

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        return {custom} * ctx.saved_tensors[0] * grad

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, 5))
    def forward(self, x):
        return self.inner(x)
    def inner(self, x):
        return x @ self.w + {module}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def plain(x, w):
    return x + torch.tanh(x @ w["w"] + {number} * w["b"]), None

def through_a_module(x, w):
    return helper_of_blocks.scale(plain(x, w)[0]), None

def custom(x, w):
    return Square.apply(x @ w["w"]), None

def closed(factor):
    def block(x, w):
        return plain(factor * x, w)
    return block

def with_options(options, x, w):
    return plain(x, w)

BLOCKS = dict(
    plain=plain, module=through_a_module, custom=custom, closure=closed(2.0), compiled=torch.compile(plain),
    partial=functools.partial(with_options, 3), method=Layer().block, cell=functools.lru_cache(plain),
)

def loss_of(name):
    block = BLOCKS[name]
    def loss(params, batch):
        x = ya.apply(lambda w, t: F.embedding(t, w["w"]), params["embed"], batch["tokens"])
        x, _ = ya.scan(block, x, params["layers"])
        return x.square().mean()
    return loss
"""

VERSION: dict[str, Any] = {"factor": 1.5, "before": "", "method": "torch.tanh", "custom": 2, "module": 1, "number": 1}
WHAT: dict[str, tuple[str, str]] = {
    "number": ("plain", "plain"),
    "factor": ("module", "helper_of_blocks.scale"),
    "custom": ("custom", "Square.backward"),
    "method": ("method", "Layer.mixed"),
}
"""What differs: the block that is used, the function that is named."""


def version(folder: Path, **other: Any) -> ModuleType:
    """The model and the module that it imports, in a folder of their own."""
    folder.mkdir(exist_ok=True)
    texts = VERSION | other
    made = []
    for name, text in (("helper_of_blocks", HELPER), ("model_of_blocks", MODEL)):
        path = folder / f"{name}.py"
        path.write_text(text.format(**texts))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        made.append(importlib.util.module_from_spec(spec))
        sys.modules[name] = made[-1]
        spec.loader.exec_module(made[-1])
    return made[-1]


def sums(blocks: list[Any]) -> dict[str, set[int]]:
    return {name: set(of) for name, of in consistency.versions(blocks).items()}


# ---- what is found


@pytest.mark.parametrize("block", ["plain", "closure", "partial", "compiled", "cell", "module"])
def test_blocks_of_every_kind_have_their_code(tmp_path: Path, block: str) -> None:
    one = sums([version(tmp_path / "a").BLOCKS[block]])
    other = sums([version(tmp_path / "b", number=2).BLOCKS[block]])
    assert {name for name in one if one[name] != other[name]} == {"model_of_blocks.plain"}, one


def test_folders_lines_and_comments_do_not_count(tmp_path: Path) -> None:
    one, other = (version(tmp_path / name, before=text) for name, text in (("a", ""), ("b", "# more\n\n\n")))
    for block in one.BLOCKS:
        assert sums([one.BLOCKS[block]]) == sums([other.BLOCKS[block]])
    assert sums([one.closed(2.0)]) == sums([one.closed(3.0)])  # may be of one rank


def test_modules_have_the_code_of_their_forwards(tmp_path: Path) -> None:
    def of(module: ModuleType) -> dict[str, set[int]]:
        _, model = ya.functionalize(module.Model(), layers="layers")
        return sums([model])

    one, other = of(version(tmp_path / "a")), of(version(tmp_path / "b", module=2))
    assert {name for name in one if one[name] != other[name]} == {"model_of_blocks.Block.inner"}


def test_cells_of_a_notebook_have_no_file() -> None:
    def cell(factor: float) -> Callable[..., Any]:
        space: dict[str, Any] = {"__name__": "__main__", "torch": torch}
        exec(compile(f"def block(x, w):\n    return torch.tanh({factor} * x @ w), None", "<cell 3>", "exec"), space)
        return space["block"]  # type: ignore[no-any-return]

    assert sums([cell(2.0)]).keys() == {"block"}
    assert sums([cell(2.0)]) == sums([cell(2.0)]) != sums([cell(3.0)])


def test_the_code_of_torch_and_of_this_library_is_left_out() -> None:
    found = consistency.versions(
        [nn.Linear(2, 2), ya.linear, torch.compile(nn.Linear(2, 2)), functools.partial(ya.scan, 1)]
    )
    assert not found


def test_objects_that_hold_each_other_have_an_end() -> None:
    class Holder:
        def block(self, x: Tensor) -> Tensor:
            return self.block(x)

    class Odd:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("nobody may look")

    one = Holder()
    one.odd = Odd()  # type: ignore[attr-defined]
    one.self, one.many = one, [one, *range(3)]  # type: ignore[attr-defined]
    assert any(name.endswith("Holder.block") for name in consistency.versions([one.block]))


# ---- on ranks


def refused(mesh: Any, folder: str, planned: bool) -> dict[str, tuple[str, bool, str]]:
    """Rank 1 has another version of one function at a time: what is said, whether the state is as it was, and what is
    said of equal versions then."""
    rank, found = mesh.get_local_rank(), {}
    for what, (block, _) in WHAT.items():
        one = version(Path(folder) / f"rank-{rank}", **({what: "torch.sin" if what == "method" else 3} if rank else {}))
        now, schedule = state(mesh), None
        if planned:
            schedule = ya.train_step(one.loss_of(block), TX).lower(now, batch(rank))
        step = ya.train_step(one.loss_of(block), TX, **({"schedule": schedule} if planned else {}))
        before = bits(now)
        text = outcome(functools.partial(step, now, batch(rank)))
        unchanged = (
            text != "returned"
            and same(before, bits(now))
            and outcome(functools.partial(step, now, batch(rank))) == text
        )
        one = version(Path(folder) / f"rank-{rank}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = outcome(functools.partial(ya.train_step(one.loss_of(block), TX), now, batch(rank)))
        found[what] = text, unchanged, again
    return found


@pytest.mark.parametrize("planned", [False, True], ids=["on demand", "of a program"])
def test_another_version_on_one_rank_is_refused_and_named(
    pools: dict[int, Pool], tmp_path: Path, planned: bool
) -> None:
    for found in pools[2].run(refused, str(tmp_path), planned):
        for what, (text, unchanged, again) in found.items():
            name = WHAT[what][1]
            name = name if "." in name and name[0].islower() else f"model_of_blocks.{name}"
            assert f"RanksDisagree: ranks disagree on the code of blocks; {name} differs:\n" in text, text
            sides = r"    rank {}: #[0-9a-f]{{8}} of \w+\.py:\d+\n"
            assert re.search(sides.format(0) + sides.format(1) + "Give every rank the same version", text), text
            assert unchanged and again == "returned"


def staged(mesh: Any, folder: str) -> str:
    rank, two = mesh.get_local_rank(), ya.mesh(stage=2, device="cpu")
    one = version(Path(folder) / f"rank-{rank}", **({"number": 3} if rank else {}))
    loss, tree, data = one.loss_of("plain"), params(), batch(0)
    del tree["head"]
    trace = ya.planner.trace(loss, tree, data)
    now = ya.init(tree, TX, mesh=two, seed=0, stages=ya.schedules.assign(trace, 2))
    return outcome(lambda: ya.train_step(loss, TX)(now, data))


def test_another_version_on_one_stage_is_refused(pools: dict[int, Pool], tmp_path: Path) -> None:
    for text in pools[2].run(staged, str(tmp_path)):
        assert "RanksDisagree: ranks disagree on the code of blocks; model_of_blocks.plain differs:\n" in text, text


def own(mesh: Any) -> list[str]:
    """What may be of one rank: values, wrappers, and functions that others lack."""
    rank, calls = mesh.get_local_rank(), []

    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        return torch.tanh(x @ w["w"]) * (1 + 0 * rank), None

    def told(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def wrapper(*args: Any) -> Any:
            calls.append(rank)
            return f(*args)

        return wrapper

    mine = told(block) if rank else block

    def loss(tree: Any, data: Any) -> Tensor:
        x = ya.apply(lambda w, t: nn.functional.embedding(t, w["w"]), tree["embed"], data["tokens"])
        return ya.scan(mine, x, tree["layers"])[0].square().mean()  # type: ignore[no-any-return]

    now, found = state(mesh), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (ya.train_step(loss, TX), ya.eval_step(loss)):
            found += [outcome(functools.partial(step, now, batch(rank)))]
            now = state(mesh)
    return found


def test_what_one_rank_alone_has_is_no_other_version(pools: dict[int, Pool]) -> None:
    assert pools[2].run(own) == [["returned"] * 2] * 2
