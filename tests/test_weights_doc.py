"""What docs/weights.md shows runs, and gives what plain trees give."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import compare, joined, plain, whole
from tests.harness.pages import blocks, doc
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import assert_equal, batch, block, embed, loss, model, one_rank
from tests.test_curvature_recipe import logits
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.params.tree import named_leaves

PAGE = doc("weights")
SETUP, *_ = blocks(PAGE)
SECTIONS = {part.split("\n", 1)[0]: blocks(part) for part in re.split(r"^## ", PAGE, flags=re.M)[1:]}
TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(0.01, weight_decay=0.1))
CLOSE = 1e-5
"""float32, after some steps; relative to each leaf."""
Names = dict[str, Any]


def unembed(weights: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x * weights["norm"], weights["weight"])


class Plain(NamedTuple):
    """The same on a plain tree: a state after one step, the batches of all ranks together, the steps saved so far."""

    state: ya.PlainState
    batches: list[Any]
    snapshots: list[Any]


def mean_of(*trees: Any) -> Any:
    return optree.tree_map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def trained(oracle: Plain, loss: Any, tx: Any = TX, state: Any = None) -> list[ya.PlainState]:
    """The states after each batch."""
    step = ya.train_step(loss, tx)
    states = [oracle.state if state is None else state]
    for own in oracle.batches:
        states.append(step(states[-1], own)[0])
    return states[1:]


def loss_of(names: Names, tree: Any, oracle: Plain) -> Tensor:
    """On the last batch, as the page's `evaluate` has it."""
    return names["loss_fn"](whole(tree), oracle.batches[-1]).detach()


# ---- what each section should give, by the names that its code makes


def without_an_optimizer(names: Names, oracle: Plain) -> Names:
    teacher = ya.materialize(model(5), seed=1)
    compare(names["teacher"], teacher, 0, "the teacher")
    answers = names["logits"](teacher, names["batch"]["tokens"]).argmax(-1)
    assert torch.equal(names["answers"], answers)
    assert not names["answers"].requires_grad
    step = ya.train_step(names["loss_fn"], TX)
    student, _ = step(names["student"], names["batch"])
    expected, _ = step(ya.PlainState.create(model(5), TX, seed=1), oracle.batches[-1])
    compare(student, expected.params, CLOSE, "its student")
    return {"teacher_loss": loss_of(names, teacher, oracle)}


def a_moving_average(names: Names, oracle: Plain) -> Names:
    average = oracle.state.params
    for state in trained(oracle, names["loss_fn"]):
        average = optree.tree_map(lambda a, p: 0.9 * a + 0.1 * p, average, state.params)
    saved = ya.checkpoint.load_params(names["folder"], like=ya.init(model(), mesh=names["mesh"]))
    compare(saved, names["average"], 0, "what was saved")
    compare(ya.shard(names["average"]), names["average"], 0, "a state of it")
    return {"average": average, "average_loss": loss_of(names, average, oracle)}


def averages_of_checkpoints_soups(names: Names, oracle: Plain) -> Names:
    soup = mean_of(*oracle.snapshots)
    kept: list[Any] = []
    for tree in sorted(oracle.snapshots, key=lambda tree: float(loss_of(names, tree, oracle))):
        if not kept or loss_of(names, mean_of(*kept, tree), oracle) <= loss_of(names, mean_of(*kept), oracle):
            kept.append(tree)
    assert len(names["kept"]) == len(kept)
    step = ya.train_step(names["loss_fn"], TX)
    onwards, _ = step(names["state"], names["batch"])
    from_soup = oracle.state.__class__(soup, oracle.state.opt_state, 1, 0)
    compare(onwards, step(from_soup, oracle.batches[-1])[0].params, CLOSE, "a step from the soup")
    return {"soup": soup, "soup_loss": loss_of(names, soup, oracle), "greedy": mean_of(*kept)}


def distillation(names: Names, oracle: Plain) -> Names:
    teacher = ya.materialize(model(5), seed=1)

    def distil(params: Any, own: Any) -> Tensor:
        soft = names["logits"](teacher, own["tokens"]).softmax(-1)
        return -(names["logits"](params, own["tokens"]).log_softmax(-1) * soft).sum(-1).mean()

    return {"state": trained(oracle, distil)[-1].params}


def a_step_inside_a_step(names: Names, oracle: Plain) -> Names:
    """By autograd, twice. The mean over ranks of losses on their own rows is the loss on all rows."""
    loss, spec = names["loss_fn"], optree.tree_structure(oracle.state.params)

    def on(leaves: Any, own: Any) -> Tensor:
        return loss(whole(optree.tree_unflatten(spec, leaves)), own)

    state = oracle.state
    for own in oracle.batches:
        leaves = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(state.params)]
        inner = torch.autograd.grad(on(leaves, own), leaves, create_graph=True)
        grads = torch.autograd.grad(on([w - 0.1 * g for w, g in zip(leaves, inner, strict=True)], own), leaves)
        state = state.apply_gradients(optree.tree_unflatten(spec, grads), TX)
    return {"state": state.params}


def layer_by_layer(names: Names, oracle: Plain) -> Names:
    params = whole(oracle.state.params)
    teacher = ya.materialize(model(), seed=1)
    bound = {}
    for name, leaf in params.layers.items():
        norms = leaf.flatten(1).square().sum(1).sqrt()
        torch.testing.assert_close(names["before"][name], norms, rtol=CLOSE, atol=0)
        largest = torch.linalg.svdvals(leaf)[:, 0].clamp(min=1) if leaf.ndim > 2 else torch.ones(len(leaf))
        bound[name] = leaf / largest.view(-1, *[1] * (leaf.ndim - 1))
        moved = (bound[name] - teacher.layers[name]).flatten(1).square().sum(1).sqrt()
        torch.testing.assert_close(names["distance"][name], moved, rtol=CLOSE, atol=0)
    assert not torch.equal(bound["up"], params.layers["up"])
    return {"state": params._replace(layers=bound)}


def on_the_line_between_two_models(names: Names, oracle: Plain) -> Names:
    trees = [ya.materialize(model(), seed=1), ya.materialize(model(), seed=2), whole(oracle.state.params)]
    one, two, three = trees
    between = (optree.tree_map(lambda a, b, t=t: (1 - t) * a + t * b, one, two) for t in (0, 0.25, 0.5, 0.75, 1))
    origin, first, second = (torch.cat([leaf.flatten() for leaf in optree.tree_leaves(tree)]) for tree in trees)
    both = mean_of(two, three)
    return {
        "line": [loss_of(names, at, oracle) for at in between],
        "cosine": torch.nn.functional.cosine_similarity(first - origin, second - origin, dim=0),
        "both": both,
        "both_loss": loss_of(names, both, oracle),
    }


def freezing(names: Names, oracle: Plain) -> Names:
    params = oracle.state.params
    marked = params._replace(embed=ya.frozen(params.embed), layers=ya.frozen(params.layers))
    moments = dict(named_leaves(oracle.state.opt_state))
    new = TX.init(trainable(marked))
    kept = optree.tree_unflatten(optree.tree_structure(new), [moments[path] for path, _ in named_leaves(new)])
    state = ya.PlainState(marked, kept, 1, 0)
    assert len(optree.tree_leaves(names["tuned"].opt_state)) < len(optree.tree_leaves(names["state"].opt_state))
    held = names["held"]
    begun = ya.PlainState(params, (oracle.state.opt_state, held.init(params)[1]), 1, 0)
    assert torch.equal(ya.unshard(names["state"]).layers["bias"], names["at first"].layers["bias"])
    return {
        "tuned": trained(oracle, names["loss_fn"], state=state)[-1].params,  # the head alone
        "state": trained(oracle, names["loss_fn"], held, begun)[-1].params,  # all but biases
    }


def out_while_training(names: Names, oracle: Plain) -> Names:
    before = names["at first"]  # kept, and the state has moved on
    assert names["engine"].keys() >= {"embed.weight", "layers.0.up", "head.norm"}
    assert torch.equal(names["engine"]["layers.1.up"], before.layers["up"][1].bfloat16())
    assert torch.equal(names["engine"]["embed.weight"], before.embed["weight"].bfloat16())
    assert not torch.equal(ya.unshard(names["state"]).layers["up"], before.layers["up"])
    return {}


CHECKS = {heading: globals()[re.sub(r"\W+", "_", heading.lower())] for heading in SECTIONS}


def runs(mesh: Any, heading: str, folder: str) -> None:
    rank = mesh.get_local_rank()
    ranks = mesh.size()
    each = [[batch(ranks * step + r) for r in range(ranks)] for step in range(6)]
    names = {"embed": embed, "block": block, "unembed": unembed, "model": model, "mesh": mesh, "tx": TX}
    names |= {"folder": f"{folder}/{heading}", "batch": each[-1][rank], "batches": [own[rank] for own in each[3:]]}
    exec(SETUP, names)
    state = ya.init(model(), TX, mesh=mesh)
    snapshots = []
    expected = ya.PlainState.create(model(), TX)
    step = ya.train_step(names["loss_fn"], TX)
    first = None
    for own in each[:3]:
        state, _ = step(state, own[rank])
        expected, _ = step(expected, joined(own))
        first = first or (state.copy(), expected)
        snapshots.append(expected.params)
        if "soup" in heading:
            ya.checkpoint.save(names["folder"], state)
    assert first is not None
    names |= {"state": first[0], "teacher": ya.init(model(5 if heading == "Distillation" else 3), mesh=mesh, seed=1)}
    names["at first"] = ya.unshard(first[0])
    for code in SECTIONS[heading]:
        exec(code, names)
    given = CHECKS[heading](names, Plain(first[1], [joined(own) for own in each[3:]], snapshots))
    for name, expected in given.items():
        compare(names[name], expected, CLOSE, name)


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("heading", SECTIONS)
def test_the_code_runs(pools: Pools, world: int, heading: str, tmp_path: Path) -> None:
    pools[world].run(runs, heading, str(tmp_path))


# ---- a second state inside of a step, in float64


def in_the_loss(params: Any, own: Any) -> Tensor:
    """From a teacher that is in the batch, and pulled towards it."""
    with torch.no_grad():
        soft = logits(own["teacher"], own).softmax(-1)
    entropy = torch.nn.functional.cross_entropy(logits(params, own).flatten(0, 1), soft.flatten(0, 1))
    difference = optree.tree_map(torch.sub, *map(ya.params.without_markers, (params, own["teacher"])))
    return entropy + 0.1 * ya.vdot(difference, difference)


@on_ranks(1, 2)
@pytest.mark.parametrize("inside", [False, True])
def test_a_second_state_inside_of_a_step_is_exact(mesh: Any, inside: bool) -> None:
    """The teacher is the average of the student so far. inside: with updates in the program, and microbatches"""
    rank = mesh.get_local_rank()
    ranks = mesh.size()
    wide = ya.Precision(torch.float64)
    state = ya.init(model(), TX, mesh=mesh, precision=wide)
    expected = ya.PlainState.create(optree.tree_map(torch.Tensor.double, plain(model())), TX)
    teacher = ya.init(model(), mesh=mesh, seed=1, precision=wide).params
    plain_teacher = optree.tree_map(torch.Tensor.double, ya.materialize(model(), seed=1))
    schedule = ya.schedules.zero3(update=inside, remat="all" if inside else "none")
    step = ya.train_step(in_the_loss, TX, schedule=schedule, microbatches=2 if inside else 1)
    oracle = ya.train_step(in_the_loss, TX)
    for number in range(4):
        each = [batch(ranks * number + r) for r in range(ranks)]
        state, _ = step(state, each[rank] | {"teacher": teacher})
        # the plain step has one microbatch: a plain teacher would be cut along with the batch
        expected, _ = oracle(expected, joined(each) | {"teacher": plain_teacher})
        teacher = mean_of(teacher, state.params)
        plain_teacher = mean_of(plain_teacher, whole(expected.params))
    compare(state, expected.params, 1e-12, "the student")
    compare(teacher, plain_teacher, 1e-12, "the teacher")


# ---- what one would try


def test_weights_of_another_state_are_copied_into_the_place_of_ones_own() -> None:
    one, two = (ya.init(model(), mesh=one_rank(), seed=seed) for seed in (0, 1))
    evaluate = ya.eval_step(loss)
    mixed = one.params._replace(head=two.params.head)
    with pytest.raises(ValueError, match=r"'head' is of another state than 'embed': .*copy them into its place"):
        evaluate(mixed, batch())
    head = optree.tree_map(lambda own, other: other.clone(), one.params.head, two.params.head)
    other = ya.unshard(one)._replace(head=ya.unshard(two).head)
    got, expected = (evaluate(tree, batch())["loss"] for tree in (one.params._replace(head=head), other))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_a_deep_copy_is_a_state_of_its_own() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    kept = copy.deepcopy(state)
    state, _ = ya.train_step(loss, TX)(state, batch())
    assert_equal(kept.params, ya.init(model(), mesh=one_rank()).params)
    again, _ = ya.train_step(loss, TX)(kept, batch())
    assert_equal(again.params, state.params)
