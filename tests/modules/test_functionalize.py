"""functionalize, load_into: unmodified modules, sharded, are what they were."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

import yafsdp_fn as ya
from tests.harness.collector import no_collection
from tests.harness.oracle import compare
from tests.harness.pages import blocks, doc
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import one_rank
from tests.models.theirs import draw

CODE, FROM_FILES, BALANCED = blocks(doc("modules"))
F64 = ya.Precision(torch.float64)
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA_LIKE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}


def tree_of(module: nn.Module, params: dict[str, Any], layers: str, of: Callable[[Tensor], Any]) -> dict[str, Any]:
    """`of` each parameter of `module`, in the structure of `params`."""
    parts = module.get_submodule(layers).children()
    columns = [{name: of(param) for name, param in part.named_parameters()} for part in parts]
    made: dict[str, Any] = {layers: {name: torch.stack([column[name] for column in columns]) for name in columns[0]}}
    for unit, leaves in ya.params.without_markers(params).items():
        if unit != layers and isinstance(leaves, dict):
            made[unit] = {name: of(module.get_parameter(f"{unit}.{name}")) for name in leaves}
        elif unit != layers:
            made[unit] = of(module.get_parameter(unit))
    return made


def mixture() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {**LLAMA_LIKE, "num_local_experts": 4, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings, num_experts_per_tok=2))


def balanced(mesh: Any, tokens: Tensor) -> Tensor:
    params, model = ya.functionalize(mixture(), "model.layers")
    names: dict[str, Any] = {"model": model, "torch": torch, "ya": ya}
    exec(BALANCED, names)
    batch = ya.shard_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
    grads = []
    for remat in ("none", "all"):
        schedule = ya.schedules.zero3(remat=remat)
        of = ya.value_and_grad(names["loss_fn"], schedule=schedule)(ya.shard(params, mesh=mesh).params, batch)
        grads.append((of[0], ya.unshard(of[1])))
    compare(grads[0], grads[1], 1e-6, "when recomputed")
    return grads[0]


@pytest.mark.parametrize("world", [1, 2])
def test_router_logits_reach_the_loss_and_balance_is_of_the_whole_batch(world: int, pools: Pools) -> None:
    module = mixture()
    tokens = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    out = module(tokens[:, :-1], use_cache=False)
    loss = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss = loss + 0.01 * load_balancing_loss_func(out.router_logits, 4, 2)
    loss.backward()
    for found, grads in pools[world].run(balanced, tokens):
        compare(found, loss.detach(), 1e-6, "the loss")
        compare(grads, tree_of(module, grads, "model.layers", lambda param: param.grad), 1e-5, "gradients")


# ---- a module that has what transformers' have not


class Layer(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0, ties: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        if ties:
            self.down.weight = self.up.weight
        self.register_buffer("shift", torch.tensor(0.5))
        self.factor, self.note, self.mean, self.aux = 1.0, None, torch.tensor(0.5), list[Tensor]()
        self.means = [torch.ones(2)]

    def forward(self, x: Tensor, *, scale: float = 1.0, other: Any = None) -> tuple[Tensor, None]:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)) + self.shift))) * scale * self.factor, None


class Model(nn.Module):
    """A tied head, a parameter of its own, a frozen bias beside a trained weight, dropout between layers."""

    def __init__(self, count: int = 3, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.drop = nn.Dropout(settings.get("dropout", 0.0))
        self.position = nn.Parameter(torch.randn(5, 8))
        self.layers = nn.ModuleList([Layer(**settings) for _ in range(count)])
        for number, layer in enumerate(self.layers):
            layer.factor = 1.0 / (1 + number)  # settings of its own
        self.tail = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 11, bias=False))
        self.tail[1].weight = self.embed.weight
        self.tail[0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        x = self.drop(self.embed(tokens) + self.position)
        for number, layer in enumerate(self.layers[:]):
            x, _ = layer(x, scale=1.0 + number, **how) if number else layer(x=x, **how)
        return self.tail(x)


def made(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings)


def functional(**settings: Any) -> tuple[dict[str, Any], Any]:
    """The parameters and the function of a fresh module."""
    return ya.functionalize(made(**settings), "layers")


def on_one_rank(params: Any) -> ya.ShardedState:
    return ya.shard(params, None, mesh=one_rank())


def tokens_of(rank: int) -> Tensor:
    return draw(4, 5, seed=rank, most=11)


def squares(model: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, tokens: model(params, tokens).square().mean()


def check_gradients(module: nn.Module, x: Tensor, mesh: Any = None, **options: Any) -> tuple[dict[str, Any], Any, Any]:
    """Value and gradients of the sharded module, in two calls, are those of the module; returns params, function and
    state. options: of `ya.value_and_grad`"""
    params, model = ya.functionalize(module, "layers")
    value = module(x).square().mean()
    value.backward()
    expected = tree_of(module, params, "layers", lambda p: torch.zeros_like(p) if p.grad is None else p.grad.to_dense())
    mesh = one_rank() if mesh is None else mesh
    state = ya.shard(params, None, mesh=mesh)
    gradients = ya.value_and_grad(squares(model), **options)
    for _ in range(2):
        got, grads = gradients(state.params, ya.shard_batch(x, mesh))
        compare(got, value.detach(), 0 if mesh.size() == 1 else 1e-6, "value")
        compare(ya.unshard(grads), expected, 1e-6 if mesh.size() == 1 else 1e-5, "gradients")
    return params, model, state


def test_units_leaves_and_what_is_frozen() -> None:
    module = made(ties=True)
    params, model = ya.functionalize(module, "layers")
    assert sorted(params) == ["embed", "layers", "position", "tail"]
    assert repr(model) == "Functionalized(Model, layers='layers')"
    assert isinstance(params["position"], ya.Lazy)
    assert sorted(ya.params.without_markers(params["tail"])) == [
        "0.bias",
        "0.weight",
    ]
    assert "down.weight" not in params["layers"].tree
    assert params["layers"].tree["up.weight"].shape == (3, 8, 8)
    state = on_one_rank(params)
    assert {g.name for g in state.memory.groups if not g.trainable} == {"tail.frozen"}
    compare(state, tree_of(module, params, "layers", Tensor.detach), 0, "the same weights")


@pytest.mark.parametrize(
    "remat",
    [ya.schedules.remat.none, ya.schedules.remat.all, ya.schedules.remat.offload()],
    ids=["none", "all", "offload"],
)
def test_gradients_are_those_of_the_module(remat: Any) -> None:
    tokens = tokens_of(0)
    schedule = ya.schedules.zero3(remat=remat)
    params, model, state = check_gradients(made(ties=True), tokens, schedule=schedule)
    composed = torch.func.grad(squares(model))
    plain = ya.materialize(params)
    compare(composed(state.params, tokens), composed(plain, tokens), 1e-6, "torch.func.grad")


class Rows(nn.Module):
    """Embeds tokens, by sparse gradients; its layers write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8, sparse=True)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("hooks", [False, True])
def test_modules_that_write_in_place_sparse_gradients_and_hooks_of_all_modules(mesh: Any, hooks: bool) -> None:
    """In-place after a linear layer raised, as sparse gradients did; hooks of all modules ran twice in silence."""
    torch.manual_seed(0)
    double = nn.modules.module.register_module_forward_hook(
        lambda part, args, out: out * 2 if hooks and isinstance(part, nn.Linear | nn.Sequential) else None
    )
    try:
        check_gradients(Rows(), torch.arange(6 * mesh.size()).view(-1, 3) % 7, mesh)
    finally:
        double.remove()


def test_a_layer_that_stands_in_two_places_is_one_unit() -> None:
    module = made()
    module.layers.append(module.layers[1])
    params, model, state = check_gradients(module, tokens_of(0))
    assert params["layers"].tree["up.weight"].shape[0] == 3
    ya.load_into(module, state.params, model=model)  # both names are one parameter's


@on_ranks(1, 2)
def test_dropout_is_that_of_plain_states_with_a_rank(mesh: Any) -> None:
    """Every rank draws the numbers of a plain state that takes that rank's place, in visits and between them."""
    params, model = functional(dropout=0.5)
    sgd = ya.optim.sgd(0.1)
    rank = mesh.get_rank()
    state = ya.shard(params, sgd, mesh=mesh)
    step = ya.train_step(squares(model), sgd, schedule=ya.schedules.zero3(remat="all"))
    alone = [ya.PlainState.create(params, sgd, rank=r) for r in range(mesh.size())]
    for number in range(2):
        torch.manual_seed(number + 10 * rank)  # means nothing
        state, metrics = step(state, tokens_of(rank))
        moved, losses = zip(*(step(own, tokens_of(r)) for r, own in enumerate(alone)), strict=True)
        compare(metrics["loss"], torch.stack([found["loss"] for found in losses]).mean(), 1e-6, f"loss {number}")
        mean = optree.tree_map(lambda *leaves: sum(leaves) / len(leaves), *(own.params for own in moved))
        compare(state, mean, 1e-5, f"step {number}")
        alone = [dataclasses.replace(own, params=mean) for own in moved]
    assert mesh.size() == 1 or losses[0]["loss"] != losses[1]["loss"]


def test_threads_may_call_at_once() -> None:
    """With weights of their own: nothing of a call is in the function."""
    module = made()
    params, model = ya.functionalize(module, "layers")
    trees = [optree.tree_map(lambda leaf, k=k: leaf * (1 + k), ya.materialize(params)) for k in range(4)]
    expected = [model(tree, tokens_of(0)) for tree in trees]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            for got, alone in zip(threads.map(lambda tree: model(tree, tokens_of(0)), trees), expected, strict=True):
                compare(got, alone, 0, "in a thread")
    assert len({float(out.sum()) for out in expected}) == 4


def test_adapters_are_trained_and_added_to_the_module() -> None:
    module = made()
    params, model = ya.functionalize(module, "layers")
    tx = ya.optim.adamw(1e-2)
    state = ya.shard(ya.lora(params, 2), tx, mesh=one_rank())
    before = module.layers[1].up.weight.clone()
    step = ya.train_step(squares(model), tx)
    for _ in range(3):
        state, _ = step(state, tokens_of(0))
    names = [visit.name for visit in step.program(state).trace.visits]
    assert names == ["position", "embed", "layers[0]", "layers[1]", "layers[2]", "tail+embed"]
    ya.load_into(module, state.params, model=model)
    assert not torch.equal(before, module.layers[1].up.weight)
    compare(model(state.params, tokens_of(0)).detach(), module(tokens_of(0)).detach(), 1e-5, "merged")


def test_the_module_may_change_afterwards_and_the_function_holds_no_weights() -> None:
    module = made(dropout=0.5).eval()
    params, model = ya.functionalize(module, "layers")
    plain = ya.materialize(params)
    before = model(plain, tokens_of(0))
    with torch.no_grad():
        module.train().embed.weight.zero_()
        module.layers[0].shift.zero_()
    with pytest.warns(UserWarning, match=r"module\.eval\(\) or module\.train\(\) since ya\.functionalize read"):
        compare(model(plain, tokens_of(0)), before, 0, "eval mode, its own buffers")
    ya.functionalize(module, "layers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each mode has a function now
        model(plain, tokens_of(0))
    assert all(
        ya.params.without_markers(params)["embed"]["weight"].load(None).eq(0).flatten()
    )  # leaves are read when they are asked for


class Named(dict[str, Tensor]):
    """An output of a class that torch knows, as those of transformers."""


torch_pytree.register_pytree_node(
    Named, lambda node: (list(node.values()), list(node)), lambda leaves, keys: Named(zip(keys, leaves, strict=True))
)


class Recurrent(nn.Module):
    """Layers that list their weights once more, called by their list; an output of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Both() for _ in range(3)))
        self.tail = Tail()

    def forward(self, x: Tensor) -> Tensor:
        found = self.tail(self.layers(x))
        assert type(found) is Named
        return found["y"]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(8, 8))
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(self.inner(x))[0]
        return x + out


class Tail(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 3)

    def forward(self, input: Tensor) -> Any:
        return Named(y=super().forward(input))


def test_recurrent_layers_parametrizations_and_outputs_of_classes_that_torch_knows() -> None:
    torch.manual_seed(0)
    module = Recurrent()
    x = torch.randn(2, 5, 8)
    params, model, _ = check_gradients(module, x)
    compare(model(ya.materialize(params), x), module(x).detach(), 0, "outputs")


def test_weights_are_freed_with_their_trees_without_a_collection() -> None:
    module = made()
    params, model = ya.functionalize(module, "layers")
    plain = ya.materialize(params)
    leaves = [weakref.ref(leaf) for leaf in (*optree.tree_leaves(plain), *module.parameters())]
    with no_collection():
        first = model(plain, tokens_of(0)).detach()
        _, grads = ya.value_and_grad(squares(model))(plain, tokens_of(0))
        again = ya.materialize(params)
        del plain, grads, params, module
        assert [leaf() for leaf in leaves] == [None] * len(leaves)
    compare(model(again, tokens_of(0)), first, 0, "without the module")


# ---- layers of several kinds


class Mixed(nn.Module):
    """An encoder of three kinds, one of them without parameters and one frozen, and a decoder of one kind, both tied to
    nothing; a list beside them, whose modules are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.encoder = nn.Module()
        made = [Layer(), Layer(width=9), nn.Tanh(), Layer(), Layer(ties=True), Layer(width=9)]
        made[3].up.weight.requires_grad_(False)
        self.encoder.layers = nn.ModuleList(made)
        self.decoder = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ways[1](torch.tanh(self.ways[0](x)))
        for layer in self.encoder.layers:
            x = layer(x) if isinstance(layer, nn.Tanh) else layer(x)[0]
        return self.decoder(x)


@on_ranks(1, 2)
def test_layers_of_several_kinds_are_stacks_visited_in_the_modules_order(mesh: Any) -> None:
    torch.manual_seed(0)
    module = Mixed().double()
    rank = mesh.get_rank()
    params, model = ya.functionalize(module, ["encoder.layers", "decoder"])
    kinds = [f"encoder.layers.{number}" for number in (0, 1, 3, 4)]
    assert sorted(params) == sorted([*kinds, "decoder", "ways.0", "ways.1"])
    assert params[kinds[1]].tree["up.weight"].shape == (2, 9, 8)
    x = torch.randn(2 * mesh.size(), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module(x).square().mean().backward()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    tx = ya.optim.sgd(0.1)
    for parts in (1, 2):
        state = ya.shard(params, tx, mesh=mesh, precision=F64)
        step = ya.train_step(squares(model), tx, schedule=ya.schedules.zero3(update=True), microbatches=parts)
        own = x[2 * rank :][:2]
        names = [visit.name for visit in step.trace(state, own).visits]
        assert names == [
            "ways.0",
            "ways.1",
            *(f"encoder.layers[{k}]" for k in (0, 1, 3, 4, 5)),
            "decoder[0]",
            "decoder[1]",
        ]
        trained, _ = step(state, own)
        assert names == [visit.name for visit in step.program(trained).trace.visits]
        trained_again, _ = ya.train_step(squares(model), tx)(ya.shard(params, tx, mesh=mesh, precision=F64), own)
        compare(trained.params, trained_again.params, 1e-12, "schedules")
        named = {model.name_of(name): weight for name, weight in ya.named_weights(trained.params)}
        assert named.keys() == before.keys()
        for made in (trained.params, ya.unshard(trained.params), named):
            other = Mixed().double()
            if made is named:
                other.load_state_dict(named, strict=False)  # without the buffers
            else:
                ya.load_into(other, made, model=model)
            for name, param in other.named_parameters():
                grad = module.get_parameter(name).grad
                expected = before[name] if grad is None else before[name] - 0.1 * grad
                compare(param.detach(), expected, 1e-12, name)


def test_a_folder_for_other_libraries_has_the_modules_names(tmp_path: Path) -> None:
    module = Mixed()
    params, model = ya.functionalize(module, ["encoder.layers", "decoder"])
    ya.checkpoint.save_named(tmp_path / "theirs", on_one_rank(params).params, model.name_of)
    found = {name: torch.zeros_like(param) for name, param in module.named_parameters()}
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    compare(found, {name: param.detach() for name, param in module.named_parameters()}, 0, "by name")


# ---- what is refused


class Objects:
    pass


def second(module: Model) -> Layer:
    layer = module.layers[1]
    assert isinstance(layer, Layer)
    return layer


REFUSED: list[tuple[str, Callable[[Model], Any], str]] = [
    (
        "shared",
        lambda m: setattr(second(m), "up", m.layers[0].up),
        "layers.0.up.weight and layers.1.up.weight are one",
    ),
    (
        "shared beside",
        lambda m: setattr(m, "out", second(m).up),
        "layers.1.up.weight and out.weight are one parameter",
    ),
    (
        "memory",
        lambda m: setattr(m, "out", nn.Parameter(m.embed.weight.data)),
        "embed.weight and out|out and embed.weight",
    ),
    ("view", lambda m: setattr(m, "table", m.embed.weight.data[1:]), "table is a view of embed.weight"),
    ("hook", lambda m: second(m).up.register_forward_hook(lambda *_: None), "layers.1.up has hooks"),
    ("grad hook", lambda m: second(m).up.weight.register_hook(lambda g: g), "layers.1.up.weight has hooks"),
    ("forward", lambda m: setattr(second(m), "forward", lambda x: x), "layers.1 has another forward than its class"),
    (
        "checkpointing",
        lambda m: setattr(second(m), "gradient_checkpointing", True),
        "layers.1 has gradient checkpointing",
    ),
    (
        "statistics",
        lambda m: setattr(m.layers[2], "norm", nn.BatchNorm1d(8)),
        "layers.2.norm keeps running statistics",
    ),
    (
        "statistics of a batch",
        lambda m: setattr(m.layers[2], "norm", nn.BatchNorm1d(8, track_running_stats=False).eval()),
        "layers.2.norm normalises by the rows of one rank and microbatch",
    ),
    (
        "counts of a batch",
        lambda m: setattr(m, "tail", nn.Embedding(8, 2, scale_grad_by_freq=True)),
        "tail divides gradients by the counts of one rank and microbatch",
    ),
    ("lazy", lambda m: setattr(m, "tail", nn.LazyLinear(2)), "tail.weight is a Uninit.* after its first call"),
    (
        "wrapped",
        lambda m: m.layers.__setitem__(1, nn.DataParallel(second(m))),
        "layers.1 is a DataParallel; give the module inside",
    ),
    ("meta", lambda m: setattr(m, "tail", nn.Linear(2, 2, device="meta")), "tail.weight is on the meta device"),
    ("integers", lambda m: setattr(m, "n", nn.Parameter(torch.ones(2, dtype=torch.int8), False)), "n is torch.int8"),
    (
        "compiled",
        lambda m: m.layers.__setitem__(1, torch.compile(second(m), backend="eager")),
        "layers.1 is compiled",
    ),
    ("uncopied", lambda m: setattr(m, "lines", (n for n in range(2))), "Model cannot be copied: TypeError"),
]
"""Name, what is done to a good module, what `functionalize` says."""


@pytest.mark.parametrize(("change", "message"), [pytest.param(*case, id=name) for name, *case in REFUSED])
def test_a_module_is_refused_by_name(change: Callable[[Model], Any], message: str) -> None:
    module = made()
    change(module)
    with pytest.raises((TypeError, ValueError), match=f"functionalize: .*{message}"):
        ya.functionalize(module, "layers")


def test_the_hook_that_gradient_checkpointing_leaves_is_named() -> None:
    module = mixture()
    module.gradient_checkpointing_enable()
    module.gradient_checkpointing_disable()
    with pytest.raises(TypeError, match=r"embed_tokens has hooks.*once it is off: module.disable_input_require_grads"):
        ya.functionalize(module, "model.layers")
    module.disable_input_require_grads()
    ya.functionalize(module, "model.layers")


def test_a_compiled_module_says_so_before_its_layers_are_looked_for() -> None:
    with pytest.raises(TypeError, match="the module is compiled; give the module that it was made of"):
        ya.functionalize(torch.compile(made(), backend="eager"), "layers")  # type: ignore[arg-type]


def test_layers_must_be_lists() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 3)])])
            self.plain = nn.Sequential(nn.ReLU())

    for layers, message in [
        (["outer", "outer.1"], "has 'outer.1' and 'outer' around it; a layer belongs to one list"),
        (["outer", "outer"], "has 'outer' twice"),
        ("plain", "plain has no parameters"),
        ([], r"layers=\[\]: expected the name of a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            ya.functionalize(Twice(), layers)
    module: Any = made()
    with pytest.raises(TypeError, match=r"expected names of lists of layers, such as 'model.layers', got a ModuleList"):
        ya.functionalize(module, module.layers)
    with pytest.raises(ValueError, match=r"layers='blocks' is no nn.ModuleList .*this module has layers, tail"):
        ya.functionalize(made(), "blocks")


def keeping(keep: Callable[[Any, Tensor, list[Tensor]], Any]) -> Any:
    """A layer's forward that first lets `keep` do something. An object that this returns comes out, too."""

    def forward(self: Any, x: Tensor, *, other: list[Tensor], **_: Any) -> tuple[Tensor, Any]:
        kept = keep(self, x, other)
        return x + self.up(x), kept if isinstance(kept, Objects) else None

    return forward


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda layer, x, other: layer.shift.add_(1.0), r"layers.0 writes to its shift while it runs"),
        (
            lambda layer, x, other: setattr(layer, "shift", layer.shift + 1.0),
            r"layers.0 writes to its shift while it runs",
        ),
        (lambda layer, x, other: setattr(layer, "note", layer.up(x)), r"layers.0 writes to its note while it runs"),
        # where no version counts
        (lambda layer, x, other: layer.shift.data.add_(1.0), r"layers.0 writes to its shift while it runs"),
        (lambda layer, x, other: layer.mean.mul_(0.5), r"layers.0 writes to its mean while it runs"),
        (lambda layer, x, other: layer.means[0].mul_(0.5), r"layers.0 writes to its means\[0\] while it runs"),
        (lambda layer, x, other: layer.aux.append(layer.up(x)), r"layers.0 writes to its aux while it runs"),
        (lambda layer, x, other: other.append(x), r"layers.0 writes to a list or dict that it is called with"),
        (lambda layer, x, other: Objects(), r"layers.0 returns a Objects"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_layer_that_keeps_something_is_refused(
    keep: Any, message: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, model = functional()
    whole = on_one_rank(params).params if sharded else ya.materialize(params)
    monkeypatch.setattr(Layer, "forward", keeping(keep))
    with pytest.raises((RuntimeError, TypeError), match=message):
        ya.value_and_grad(squares(partial(model, other=[])))(whole, tokens_of(0))


@on_ranks(2)
def test_buffers_that_differ_between_ranks_are_refused(mesh: Any) -> None:
    module = made()
    second(module).shift.fill_(mesh.get_rank())
    for from_rank_0 in (False, True):
        with pytest.raises(
            ya.errors.RanksDisagree, match=r"layers.1.shift \(no parameter: each rank computes with its"
        ):
            ya.shard(ya.functionalize(module, "layers")[0], mesh=mesh, from_rank_0=from_rank_0)


def notes(model: Any) -> None:
    model.note = torch.ones(2)
    model.scale = 2.0 / 4
    model.new = 3


WRITES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "counts": (
        lambda model: setattr(model, "seen", model.seen + 1),
        "the module writes to its seen while it runs",
    ),
    "averages": (
        lambda model: setattr(model, "mean", 0.5 * model.mean + 1.0),
        "the module writes to its mean while it runs",
    ),
    "counts in a buffer": (
        lambda model: model.layers[0].shift.add_(1.0),
        "layers.0 writes to its shift while it runs",
    ),
    "bounds a weight": (
        lambda model: model.position.data.clamp_(max=0.1),
        "the module writes to its position while it runs",
    ),
    "notes": (notes, None),
}
"""What is done, and what is said of it, if it is refused."""


class Writing(Model):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.write, self.seen, self.mean, self.note, self.scale = write, 0, torch.zeros(()), None, 0.5

    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        self.write(self)
        return super().forward(tokens, **how)


@on_ranks(1, 2)
@pytest.mark.parametrize("how", WRITES)
def test_what_a_module_around_the_layers_counts_is_refused(mesh: Any, how: str) -> None:
    write, message = WRITES[how]
    torch.manual_seed(0)
    params, model = ya.functionalize(Writing(write), "layers")
    for whole in (ya.materialize(params), ya.shard(params, None, mesh=mesh).params):
        with nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
            ya.value_and_grad(squares(model))(whole, tokens_of(0))


class Checkpointed(Model):
    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=True)
        return self.tail(x)


def test_torchs_words_come_with_what_to_do() -> None:
    half = ya.Precision(compute=torch.bfloat16)
    for module, x, precision, told in (
        (Mixed().float(), torch.ones(2, 8), half, "x.to(torch.bfloat16); before ya.functionalize, module.to(torch.bfl"),
        (Checkpointed(), tokens_of(0), None, "Take torch.utils.checkpoint away"),
    ):
        params, model = ya.functionalize(module, ["encoder.layers", "decoder"] if precision else "layers")
        state = ya.shard(params, None, mesh=one_rank(), precision=precision)
        with pytest.raises(RuntimeError) as raised:
            ya.value_and_grad(squares(model))(state.params, x)
        assert any(told in note for note in raised.value.__notes__)
    with torch.inference_mode():
        scale = torch.ones(())
    with pytest.raises(RuntimeError) as raised:
        ya.value_and_grad(lambda params, x: (model(params, x) * scale).sum())(state.params, x)
    assert any("A tensor was made under torch.inference_mode" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_batch_without_rows_is_named(microbatches: int | None) -> None:
    params, model = functional()

    def loss(params: Any, batch: dict[str, Tensor]) -> Tensor:
        rows = len(batch["mask"])
        return model(params, batch["tokens"]).view(rows, -1).sum()  # which has no shape without any

    batch = {name: torch.ones(0, 5, dtype=torch.long) for name in ("tokens", "mask")}
    text = "mask of argument 1 and tokens of argument 1: no rows on this rank, in this micro"
    with pytest.raises(RuntimeError, match=text):
        ya.eval_step(loss, microbatches=microbatches)(on_one_rank(params), batch)
    with pytest.raises(RuntimeError, match=text):
        ya.grad(loss)(ya.materialize(params), batch)


def test_an_object_for_a_layer_is_for_no_grad_only() -> None:
    params, model = functional()
    state = on_one_rank(params)
    with pytest.raises(TypeError, match=r"layers.0 is called with a Objects.*pass tensors"):
        model(state.params, tokens_of(0), other=Objects())
    with torch.no_grad():
        found = model(state.params, tokens_of(0), other=Objects())
    compare(found, made()(tokens_of(0)).detach(), 0, "without gradients")


def test_a_weight_that_is_used_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    params, model = functional()
    monkeypatch.setattr(Model, "forward", lambda self, tokens: self.embed(tokens) @ self.layers[1].up.weight)
    with pytest.raises(RuntimeError, match=r"layers.1.up.weight is not there now"):
        model(ya.materialize(params), tokens_of(0))
    monkeypatch.setattr(Model, "forward", lambda self, tokens: self.tail[1](self.embed(tokens)))
    with pytest.raises(RuntimeError, match=r"is not there now.*the outermost one around it"):
        model(ya.materialize(params), tokens_of(0))


HOOKS: list[tuple[str, bool, Callable[[nn.Module], Any]]] = [
    ("was given a hook while", False, lambda m: m.register_forward_pre_hook(lambda *_: None)),
    ("was given a hook while", False, lambda m: m.register_full_backward_hook(lambda *_: None)),
    ("was given a hook while", False, lambda m: m.register_forward_hook(lambda *_, **__: None, with_kwargs=True)),
    ("a hook returns another", False, lambda m: m.register_forward_hook(lambda module, args, output: output + 1)),
    ("was given a hook while the model ran", True, lambda m: m.register_forward_hook(lambda *_: None)),
]
"""What is said, whether the hook comes after its visit, and the hook."""


@pytest.mark.parametrize(("message", "after", "register"), HOOKS)
def test_a_hook_that_cannot_be_called_behind_its_visit_is_refused_and_does_not_stay(
    message: str, after: bool, register: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, model = functional()
    plain = ya.materialize(params)
    forward = Model.forward

    def hooks(self: Any, tokens: Tensor) -> Tensor:
        if not after:
            register(self.layers[1].up)
        out = forward(self, tokens)
        if after:
            register(self.layers[1].up)
        return out

    before = model(plain, tokens_of(0))
    monkeypatch.setattr(Model, "forward", hooks)
    with pytest.raises(RuntimeError, match=f"layers.1.up:? {message}"):
        model(plain, tokens_of(0))
    monkeypatch.setattr(Model, "forward", forward)
    compare(model(plain, tokens_of(0)), before, 0, "the next call")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_hook_on_outputs_gets_them_behind_the_visit_with_their_gradient(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, model = functional()
    forward = Model.forward

    def penalised(self: Any, tokens: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.layers:
            layer.up.register_forward_hook(lambda module, args, output: seen.append(output))
        out = forward(self, tokens)
        assert len(seen) == len(self.layers)
        return out + sum(x.square().mean() for x in seen)

    monkeypatch.setattr(Model, "forward", penalised)
    whole = on_one_rank(params).params if sharded else ya.materialize(params)
    loss, grads = ya.value_and_grad(squares(model))(whole, tokens_of(0))
    module = made()
    plain = module(tokens_of(0)).square().mean()
    plain.backward()
    compare(loss, plain.detach(), 1e-6, "the loss")
    found = ya.unshard(grads) if sharded else grads
    own = torch.stack([layer.up.weight.grad for layer in module.layers])
    compare(ya.params.without_markers(found["layers"])["up.weight"], own, 1e-5, "a gradient")


def test_params_of_another_model_are_refused() -> None:
    params, model = functional()
    more, _ = functional(count=4)
    length = "layers: expected a sharded stack, or tensors with a leading axis of 3 layers"
    for wrong, error, message in (
        ([], TypeError, r"expected the params of ya.functionalize, got list"),
        ({"embed": {}}, TypeError, r"with the units \['embed', 'layers', 'position', 'tail'\], got \['embed'\]"),
        (on_one_rank(more).params, ValueError, "layers: the module has 3 layers, these params 4"),
        (ya.materialize(more), ValueError, length),
        (params, ValueError, r"expected a sharded stack, or tensors .* got Lazy"),
    ):
        with pytest.raises(error, match=message):
            model(wrong, tokens_of(0))


def test_load_into_another_module_is_refused() -> None:
    params, model = functional()
    plain = ya.materialize(params)
    state = on_one_rank(params)
    quantized = made()
    untied = made()
    quantized.layers[1].up.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    untied.tail[1].weight = nn.Parameter(untied.embed.weight.detach().clone())
    tied_layers, of_tied_layers = functional(ties=True)
    of_two = functional(count=2)[1]
    for module, given, of, text in (
        (made(width=9), plain, model, r"load_into: layers.0.up.weight, of shape \(8, 8\), is there of shape \(9, 8\)"),
        (
            quantized,
            plain,
            model,
            r"load_into: layers\.1\.up\.weight, of shape \(8, 8\), is there of shape \(8, 8\) and torch.int8; "
            "expected one of",
        ),
        (made(count=4), plain, model, "load_into: layers.3.down.bias is in the module alone; give the module"),
        (made(count=2), plain, model, "load_into: layers.2.down.bias is in these params alone"),
        (nn.Linear(2, 2), plain, model, "load_into: bias is in the module alone"),
        (made().to("meta"), plain, model, "load_into: position is on the meta device"),
        (made(), plain, of_two, "layers: expected a sharded stack, or tensors with a leading axis of 2 layers"),
        (made(), state.params, of_two, "layers: the module has 2 layers, these params 3"),
        (
            untied,
            state.params,
            model,
            r"load_into: embed.weight and tail.1.weight are one parameter in these params",
        ),
        (
            made(),
            ya.materialize(tied_layers),
            of_tied_layers,
            r"load_into: layers.0.up.weight and layers.0.down.weight are one parameter",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            ya.load_into(module, given, model=of)
    with pytest.raises(TypeError, match=r"a state has \.params"):
        ya.load_into(made(), state, model=model)


@on_ranks(1, 2)
def test_load_into_after_unfreezing_and_into_a_fresh_module(mesh: Any) -> None:
    """The module's layers are frozen in turn, and in another way before what was trained goes back, and elsewhere."""
    module = made(count=4)
    tx = ya.optim.sgd(0.1)
    for frozen in ((0, 1), (3,), (0, 3), (0, 2), (), (0, 1, 2, 3)):
        for number, layer in enumerate(module.layers):
            layer.requires_grad_(number not in frozen)
        params, model = ya.functionalize(module, "layers")
        state, _ = ya.train_step(squares(model), tx)(ya.shard(params, tx, mesh=mesh), tokens_of(mesh.get_rank()))
        trained = ya.unshard(state.params)
        like_first = [number for number in range(4) if (number in frozen) == (0 in frozen)]
        others = [number for number in range(4) if number not in like_first]
        numbers = {"layers": like_first, "layers.0": like_first, **{f"layers.{k}": others for k in others[:1]}}
        for now in ((), (0, 3), (0, 2), (1, 2, 3)):  # a stack has the layers that it had
            for number, layer in enumerate(module.layers):
                layer.requires_grad_(number not in now)
            for other, again in ((module, state.params), (made(count=4), trained), (made(count=4), state.params)):
                ya.load_into(other, again, model=model)
                for name in numbers.keys() & trained.keys():
                    for number, weight in zip(numbers[name], trained[name]["up.weight"], strict=True):
                        compare(other.layers[number].up.weight.detach(), weight, 0, name)
                compare(model(trained, tokens_of(5)).detach(), other(tokens_of(5)).detach(), 1e-6, "the function")
