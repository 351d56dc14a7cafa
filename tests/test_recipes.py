"""docs/recipes: each recipe is exact on two ranks against a plain oracle, and learns what it says."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid, scaled_dot_product_attention, silu

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.oracle import compare
from tests.harness.pool import Pools, on_ranks
from tests.harness.recipes import FOLDER, recipe

NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tiny")
PAGE = (FOLDER.parent / "recipes.md").read_text()
WIDE = ya.Precision(torch.float64)
TX = ya.optim.sgd(0.1)


def double(tree: Any) -> Any:
    """Numbers in float64, tokens as they are."""
    return optree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def whole(abstract: Any, seed: int = 0) -> Any:
    return double(ya.materialize(abstract, seed=seed))


def init(params: Any, mesh: Any, **options: Any) -> Any:
    return ya.init(params, TX, mesh=mesh, precision=WIDE, **options)


def test_the_page_lists_all_and_each_is_short() -> None:
    assert sorted(re.findall(r"\(recipes/(\w+)\.py\)", PAGE)) == sorted([*NAMES, "tiny"])
    for name in [*NAMES, "tiny"]:
        lines = (FOLDER / f"{name}.py").read_text().splitlines()
        assert len(lines) < 90, f"{name} has {len(lines)} lines"


# ---- a loss and its gradients, against the same loss on plain tensors


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        "expert_parallel",
        *map(nightly, ("ring_attention", "tensor_parallel", "unet", "encoder_decoder", "gated_linear_attention")),
    ],
)
def test_it_is_exact(_: Any, name: str) -> None:
    of = recipe(name)
    staged = "stage" in of.AXES
    options = {"schedule": ya.schedules.one_f_one_b(), "microbatches": 4} if staged else {}
    mesh = ya.mesh(device="cpu", **of.AXES)
    batch = double(of.batch(0))
    state = init(of.PARAMS, mesh, stages=of.stages() if staged else None)
    expected = ya.value_and_grad(of.loss_fn)(whole(of.PARAMS), batch)
    function = ya.value_and_grad(of.loss_fn, **options)
    for call in ("first", "by the program"):
        found = function(state.params, ya.shard_batch(batch, mesh, split=getattr(of, "SPLIT", None)))
        compare(found, expected, 1e-11, f"{name}, {call}")


def test_ring_attention_is_attention() -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 16, dtype=torch.float64).unbind()
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(recipe("ring_attention").ring_attention(q, k, v), expected)


def test_experts_are_those_of_a_loop() -> None:
    of = recipe("expert_parallel")
    x = torch.randn(20, 32, dtype=torch.float64)
    w = {name: leaf[0] for name, leaf in whole(of.PARAMS)["layers"].items()}
    scores = linear(x, w["router"]).softmax(-1)
    rows = []
    for row, score in zip(x, scores, strict=True):
        best = int(score.argmax())
        rows.append(score[best] * (w["down"][best] @ silu(w["up"][best] @ row)))
    torch.testing.assert_close(of.experts(w, x), torch.stack(rows))


def test_chunks_are_the_recurrence() -> None:
    of, (q, k, v, gate) = recipe("gated_linear_attention"), torch.randn(4, 2, 2, 12, 16, dtype=torch.float64).unbind()
    given = (q, k, v, torch.nn.functional.logsigmoid(gate))
    torch.testing.assert_close(of.chunked(*given), of.recurrent(*given))


# ---- those with two states, two models, or steps of their own


def own(batch: Any, mesh: Any) -> Any:
    return ya.shard_batch(double(batch), mesh)


def distillation(mesh: Any) -> None:
    of = recipe("distillation")
    teacher, student = init(of.TEACHER, mesh, seed=1), init(of.PARAMS, mesh)
    found = ya.value_and_grad(of.distil(teacher.params))(student.params, own(of.batch(0), mesh))
    llama, tokens = recipe("tiny").llama, of.batch(0)["tokens"]
    soft = (llama.logits(recipe("tiny").LLAMA, whole(of.TEACHER, 1), tokens) / 2).softmax(-1)

    def in_words(params: Any) -> Tensor:
        student = (llama.logits(of.STUDENT, params, tokens) / 2).log_softmax(-1)
        return 4 * (soft * (soft.log() - student)).sum(-1).mean()

    compare(found, ya.value_and_grad(in_words)(whole(of.PARAMS)), 1e-11, "the student")


def dpo(mesh: Any) -> None:
    of, batch = recipe("dpo"), recipe("dpo").pairs(0)
    reference = init(of.PARAMS, mesh, seed=1)
    state = init(of.PARAMS, mesh)
    mine = own(batch, mesh)
    with torch.no_grad():
        mine["reference"] = of.margin(reference.params, mine)
    (value, _), grads = ya.value_and_grad(of.loss_fn, has_aux=True)(state.params, mine)

    def in_words(params: Any, batch: Any) -> Tensor:
        llama = recipe("tiny").llama
        beta = of.BETA
        of_model = []
        for tree in (params, whole(of.PARAMS, 1)):
            for text in (batch["chosen"], batch["rejected"]):
                scores = llama.logits(recipe("tiny").LLAMA, tree, text).log_softmax(-1)
                each = [scores[:, at - 1].gather(1, text[:, at, None]) for at in range(of.PROMPT, text.shape[1])]
                of_model.append(torch.cat(each, 1).sum(1))
        chosen, rejected, first_chosen, first_rejected = of_model
        return -logsigmoid(beta * ((chosen - first_chosen) - (rejected - first_rejected))).mean()

    compare((value, grads), ya.value_and_grad(in_words)(whole(of.PARAMS), batch), 1e-11, "the policy")


def gan(mesh: Any) -> None:
    of = recipe("gan")
    trees = (recipe("gan").GENERATOR, recipe("gan").CRITIC)
    tx = ya.optim.sgd(0.1, momentum=0.9)
    steps = ya.train_step(of.critic_loss, tx), ya.train_step(of.generator_loss, tx)
    g, c = (ya.init(tree, tx, mesh=mesh, seed=seed, precision=WIDE) for seed, tree in enumerate(trees))
    plain_g, plain_c = (ya.PlainState.create(whole(tree, seed), tx) for seed, tree in enumerate(trees))
    for number in range(3):
        g, c = of.round_of(g, c, steps, own(of.batch(number), mesh))
        plain_g, plain_c = of.round_of(plain_g, plain_c, steps, double(of.batch(number)))
    compare(g, plain_g.params, 1e-11, "the generator")
    compare(c, plain_c.params, 1e-11, "the critic")


def diloco(mesh: Any) -> None:
    """Two workers of one rank; the oracle runs both, and has SGD with Nesterov's momentum in its own words."""
    of = recipe("diloco")
    me = mesh.get_local_rank()
    alone = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("worker", "shard"))["shard"]

    def mean(leaf: Tensor) -> Tensor:
        torch.distributed.all_reduce(leaf)
        return leaf / 2

    state = init(of.PARAMS, alone)
    step = ya.train_step(of.loss_fn, TX)
    start = optree.tree_map(torch.clone, state.params)
    outer = of.OUTER.init(start)
    at = whole(of.PARAMS)
    momentum = optree.tree_map(torch.zeros_like, at)
    for number in range(2):
        for inner in range(2):
            state, _ = step(state, recipe("tiny").counting(10 * number + 2 * inner + me))
        state, start, outer = of.meet(state, start, outer, mean)
        moved = []
        for worker in range(2):
            there = ya.PlainState.create(at, TX)
            for inner in range(2):
                there, _ = step(there, recipe("tiny").counting(10 * number + 2 * inner + worker))
            moved.append(optree.tree_map(torch.sub, at, there.params))
        slope = optree.tree_map(lambda a, b: (a + b) / 2, *moved)
        momentum = optree.tree_map(lambda m, g: 0.9 * m + g, momentum, slope)
        at = optree.tree_map(lambda w, m, g: w - 0.7 * (0.9 * m + g), at, momentum, slope)
        compare(state, at, 1e-11, f"round {number}")


def grpo(mesh: Any) -> None:
    """Two steps on the answers of both ranks, beside the module of transformers with an autograd of its own."""
    of, rank = recipe("grpo"), mesh.get_rank()
    module = of.made().double()
    tokens = torch.cat([of.rollout(module, seed) for seed in range(2)])
    gain = torch.cat([of.advantages(part[:, of.PROMPT :])[0] for part in tokens.chunk(2)]).double()
    for group in gain.view(-1, of.GROUP):
        assert abs(float(group.mean())) < 1e-6
        assert float(group.std()) < 1.01

    def of_answers(logits: Tensor) -> Tensor:
        return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, of.PROMPT - 1 :, 0]

    with torch.no_grad():
        old = of_answers(module(tokens).logits)
    params, model = ya.functionalize(of.made().double(), layers="model.layers")
    big = ya.optim.sgd(3.0)  # so that the second step clips
    state = ya.shard(params, big, mesh=mesh, precision=WIDE)
    step = ya.train_step(of.loss_of(model), big)
    whole_batch = {"tokens": tokens, "old": old, "advantages": gain}
    for _ in range(2):
        state, metrics = step(state, optree.tree_map(lambda leaf: leaf.chunk(2)[rank], whole_batch))
        ratio = (of_answers(module(tokens).logits) - old).exp()
        used = torch.where((gain[:, None] > 0) == (ratio > 1), ratio.clamp(1 - of.CLIP, 1 + of.CLIP), ratio)
        loss = -(used * gain[:, None]).mean()
        module.zero_grad()
        loss.backward()
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            for weight in module.parameters():
                weight -= 3.0 * weight.grad
    assert float(((ratio - 1).abs() > of.CLIP).float().mean()) > 0.01  # some are clipped
    for name, weight in ya.named_weights(state.params):
        torch.testing.assert_close(weight, module.get_parameter(name).detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("check", [gan, *map(nightly, (distillation, dpo, diloco, grpo))])
def test_both_are_exact(pools: Pools, check: Any) -> None:
    pools[2].run(check)


def handed_out(mesh: Any, path: str) -> None:
    """A process of its own reads what the trainer has."""
    of, (params, _) = recipe("generator"), ya.functionalize(recipe("grpo").made(), layers="model.layers")
    of.publish(ya.shard(params, mesh=mesh).params, path, mesh.get_rank() == 0)


@pytest.mark.nightly
def test_the_generator_reads_the_weights_of_the_trainer(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(handed_out, str(tmp_path / "weights"))
    of = recipe("generator")
    engine = recipe("grpo").made()
    expected = {name: weight.bfloat16() for name, weight in engine.named_parameters()}
    found = of.load_file(tmp_path / "weights")
    assert found.keys() == expected.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name


# ---- what each says when it is run

BETTER = {
    "tensor_parallel": (3.0, 0.8),
    "expert_parallel": (3.0, 0.8),
    "ring_attention": (3.0, 0.5),
    "encoder_decoder": (3.0, 2.5),
    "gated_linear_attention": (3.0, 0.8),
    "unet": (1.0, 0.4),
    "distillation": (3.0, 1.2),
    "diloco": (2.0, 1.0),
    "dpo": (0.69, 0.1),
    "gan": (0.4, 0.25),
}
"""What the first number that `main` returns is above, and the last below."""


def run(_: Any, name: str) -> Any:
    multiprocessing.current_process().daemon = False  # so that it may have a child
    return recipe(name).main()


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_as_it_stands_and_learns(pools: Pools, name: str) -> None:
    found = pools[2].run(run, name)
    if name in BETTER:
        above, below = BETTER[name]
        assert found[0][0] > above and found[0][-1] < below, found[0]
    elif name == "grpo":  # of each rank its own answers
        assert all(rewards[0] < 0.7 and rewards[-1] > 0.8 for rewards in found), found
    elif name == "generator":  # it is the first rank's
        assert found[0][0] < 0.2 and found[0][-1] > 0.8 and not found[1], found
    elif name == "influence":  # the row that is the test speaks most for it
        assert found[0] == found[1] and min(found[0]) == found[0][0] < 0, found
    else:
        assert name == "curvature"
        assert found == [None, None]
