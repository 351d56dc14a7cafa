"""What people who tried the library for the first time typed, and what it says."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from tests.harness.oracle import check_steps
from tests.harness.pool import on_ranks

PARAMS = {"layers": ya.Stacked({"w": ya.Param((2, 4, 4))})}
TX = ya.optim.adamw(1e-3)


def loss_fn(params: Any, batch: Any) -> ya.Mean:
    x, _ = ya.scan(lambda x, w: (x + ya.linear(x, w["w"]), None), torch.as_tensor(batch["x"]), params["layers"])
    return ya.Mean(x.square().sum(), x.numel())


@on_ranks(1, 2)
def test_arrays_of_numpy_are_sharded_as_tensors_are(mesh: Any) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    mine = ya.shard_batch({"x": rows}, mesh)
    same = ya.shard_batch({"x": torch.from_numpy(rows)}, mesh)
    assert torch.equal(mine["x"], same["x"])
    assert len(mine["x"]) == 8 // mesh.size()
    one, other = (stepping(batch)(mesh)[1]["loss"] for batch in (mine, same))
    assert one == other


def new(mesh: Any, tx: Any = TX) -> Any:
    return ya.init(PARAMS, tx, mesh=mesh)


ROWS = torch.ones(4, 4)
BATCH = {"x": ROWS}
FOREIGN = (lambda params: (), lambda updates, state, params=None: (updates, state))


Case = Callable[[Any], Any]
"""What somebody types, given a mesh."""


def stepping(batch: Any = BATCH, loss: Any = loss_fn, **options: Any) -> Case:
    """A step of a new state."""
    return lambda mesh: ya.train_step(loss, TX, **options)(new(mesh), batch)


def cutting(batch: Any) -> Case:
    return lambda mesh: ya.shard_batch(batch, mesh)


def making(params: Any = PARAMS, tx: Any = TX, **options: Any) -> Case:
    return lambda mesh: ya.init(params, tx, mesh=mesh, **options)


def taken(state: Any, given: Any) -> Any:
    return ya.train_step(loss_fn, given)(state, BATCH)


def applied(state: Any, given: Any) -> Any:
    return state.apply_gradients(ya.grad(loss_fn)(state.params, BATCH), given)


RATE = ya.optim.constant_schedule(1e-3)
OTHERS = [
    (TX, ya.optim.sgd(0.1), r"\(ScaleByAdamState, EmptyState, EmptyState\) is none of .*\(Scale\(by=-0\.1\)\): give"),
    (ya.optim.sgd(0.1), TX, r"\(EmptyState, EmptyState\) is none of .*\(Adam\("),
    (ya.optim.sgd(0.1, momentum=0.9), ya.optim.sgd(0.1), r"\(TraceState, EmptyState\) is none of .*\(Scale\("),
    (TX, ya.optim.lion(1e-3), r"\(ScaleByAdamState, EmptyState, EmptyState\) is none of .*lion"),
    (TX, ya.optim.adamw(RATE), r"\(ScaleByAdamState, EmptyState, EmptyState\) is none of .*Scale\(by=<function"),
    (ya.optim.adamw(RATE), TX, r"\(ScaleByAdamState, EmptyState, ScaleByScheduleState\) is none of .*Scale\(by=-0"),
    (ya.optim.contrib.schedule_free(TX, 1e-3), TX, r"\(ScheduleFreeState\) is none of .*Adam\("),
    (TX, FOREIGN, r"\(ScaleByAdamState, EmptyState, EmptyState\) is none of .*<lambda>"),
    (
        ya.optim.partition({"a": TX}, lambda path, param: "a"),
        ya.optim.partition({"b": TX}, lambda path, param: "b"),
        r"\(PartitionState\) is none of .*Partition\(",
    ),
]


@on_ranks(1, 2)
def test_a_state_made_by_another_optimizer_is_refused_by_name(mesh: Any) -> None:
    """Some were taken in silence, as Adam's moments by SGD; others failed in the words of a tuple's."""
    for made, given, parts in OTHERS:
        plain = ya.PlainState.create(PARAMS, made)
        refused = rf"^the optimizer's state {parts}.*ya\.shard\(state, tx\), a"
        for use, state in ((taken, new(mesh, made)), (applied, new(mesh, made)), (applied, plain)):
            with pytest.raises(TypeError, match=refused):
                use(state, given)


@on_ranks(2)
def test_one_with_other_figures_is_taken(mesh: Any) -> None:
    for given in (ya.optim.adamw(3e-3, weight_decay=0.1), ya.optim.adamw(1e-3, b2=0.99)):
        assert taken(new(mesh), given)[0].step == 1


def without_a_graph(make: Any) -> Case:
    return stepping(loss=lambda params, batch: make(loss_fn(params, batch)))


def of_old_leaves(mesh: Any) -> Any:
    state = new(mesh)
    kept = optree.tree_map(lambda leaf: leaf.detach(), state.params)  # the same memory
    taken(state, TX)
    return ya.eval_step(loss_fn)(kept, BATCH)


def with_a_plain_tensor(mesh: Any) -> Any:
    state = new(mesh)
    state.params["more"] = {"w": torch.zeros(4)}
    return taken(state, TX)


def written_to(mesh: Any) -> None:
    new(mesh).params["layers"]["w"] = torch.zeros(2, 4, 4)


def in_eval_mode(mesh: Any) -> Any:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    _, model = ya.functionalize(torch.nn.Sequential(layers), "0")
    return model.eval()  # type: ignore[attr-defined]


def made_under_inference_mode(mesh: Any) -> Any:
    with torch.inference_mode():
        rows = torch.ones(4, 4)
    return stepping({"x": rows})(mesh)


def in_block(write: Any) -> Case:
    """A step whose block first calls `write` on its weights."""

    def block(x: Any, w: Any) -> Any:
        write(w["w"])
        return ya.linear(x, w["w"]), None

    return stepping(loss=of_block(block))


def of_block(block: Any) -> Any:
    return lambda params, batch: ya.scan(block, batch["x"], params["layers"])[0].square().mean()


def clamped(weight: Any) -> None:
    weight.data = weight.data.clamp(-1e-3, 1e-3)


def reduced_by_torch(params: Any, batch: Any) -> Any:
    mean = loss_fn(params, batch).total
    torch.distributed.all_reduce(mean)
    return mean


def gathered_by_torch(params: Any, batch: Any) -> Any:
    own = loss_fn(params, batch).total
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own)
    return own + torch.stack(every).logsumexp(0)


def reduced_in_block(x: Any, w: Any) -> Any:
    x = ya.linear(x, w["w"])
    torch.distributed.all_reduce(x)
    return x, None


SCALER = torch.amp.GradScaler("cpu")


def shrinking(write: Any) -> Case:
    """A step whose loss calls `write` on its parameters."""

    def loss(params: Any, batch: Any) -> Any:
        with torch.no_grad():
            for leaf in optree.tree_leaves(params):
                write(leaf)
        return loss_fn(params, batch)

    return stepping(loss=loss)


HEAD = torch.nn.Linear(1, 1)
NET = torch.nn.Linear(4, 1)


def before_visits(weight: Any) -> Any:
    """A loss whose own parameter goes into visits alone, as that of an embedding that was left a module does."""
    return lambda params, batch: loss_fn(params, {"x": batch["x"] * weight.mean()})


def frozen_too_late(mesh: Any) -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    params, _ = ya.functionalize(module, "1")
    module[0].requires_grad_(False)
    return ya.shard(params, TX, mesh=mesh)


@dataclasses.dataclass
class Rows:
    x: torch.Tensor


@dataclasses.dataclass
class Around:
    inner: dict[str, Rows]


def by_closure(mesh: Any) -> Any:
    """A loss that takes a part of the parameters from the state around it."""
    state = new(mesh)
    loss = lambda params, batch: loss_fn({**params, **state.params}, batch)  # noqa: E731
    return ya.train_step(loss, TX)(state, BATCH)


def let_out(params: Any, batch: Any) -> Any:
    """A loss that multiplies by a weight that a block has kept."""
    kept = []

    def block(x: Any, w: Any) -> Any:
        kept.append(w["w"])
        return x + ya.linear(x, w["w"]), None

    x, _ = ya.scan(block, batch["x"], params["layers"])
    return (x @ kept[0]).square().mean()


def with_whole(what: Any) -> Any:
    """A loss that adds what `what` makes of its parameters."""
    return lambda params, batch: loss_fn(params, batch).total + what(params["layers"])


def hooked(leaf: Any) -> None:
    leaf.register_hook(lambda grad: grad / 2)


def on_the_state(mesh: Any) -> Any:
    state = new(mesh)
    for leaf in optree.tree_leaves(state.params):
        hooked(leaf.requires_grad_())
    return taken(state, TX)


RAGGED = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)


def ungraded(x: Any, w: Any) -> Any:
    with torch.no_grad():
        return x + ya.linear(x, w["w"]), None


def in_place(updates: Any, state: Any, params: Any) -> Any:
    optree.tree_map_(lambda leaf: leaf.mul_(0.9), params)
    return updates, state


def momentum_in_place(updates: Any, state: Any, params: Any) -> Any:
    momentum = optree.tree_map(lambda kept, new: kept.mul_(0.9).add_(new), state, updates)
    return momentum, state


def drawing(updates: Any, state: Any, params: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf + torch.randn_like(leaf), updates), state


def of_two(mesh: Any) -> Any:
    """A visit to layers of a student and of its teacher at once."""
    block = lambda x, both: (x + ya.linear(x, both[0]["w"] - both[1]["w"]), None)  # noqa: E731
    student = new(mesh)
    teacher = new(mesh)
    return ya.scan(block, ROWS, (student.params["layers"], teacher.params["layers"]))


def by(update: Any) -> Any:
    return lambda params: optree.tree_map(torch.zeros_like, params), update


def taking(tx: Any) -> Case:
    """A step of an optimizer of one's own."""
    return lambda mesh: ya.train_step(loss_fn, tx)(new(mesh, tx), BATCH)


def renamed(mesh: Any) -> Any:
    state = new(mesh)
    return dataclasses.replace(state, params={"blocks": state.params["layers"]})


def mapped(mesh: Any) -> Any:
    state, step = new(mesh), ya.train_step(loss_fn, TX)
    return torch.func.vmap(lambda rows: step(state, {"x": rows})[1]["loss"])(ROWS[None])


class Attributes:
    """A batch as an object of a user's own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


HOOKED = "RuntimeError: a leaf of the parameters has a hook for its gradient, which would not be called"

SILENT = {
    "ValueError: layers+layers[0]: the block gets layers of two trees, of two states or of": of_two,
    "ValueError: the loss does not depend on the differentiated arguments: it was detached or made anew (.item(), "
    "torch.tensor), computed under no_grad": stepping(
        loss=of_block(ungraded), schedule=ya.schedules.zero3(remat="all")
    ),
    "TypeError: optim: tests.test_newcomers.in_place writes to the parameters in place; leave them as they": taking(
        by(in_place)
    ),
    "TypeError: optim: tests.test_newcomers.momentum_in_place is marked by assume_elementwise, but it does not leave": (
        taking(ya.optim.assume_elementwise(by(momentum_in_place)))
    ),
    "TypeError: optim: tests.test_newcomers.drawing draws random numbers, which are others on each rank": taking(
        by(drawing)
    ),
    HOOKED: stepping(loss=lambda params, batch: loss_fn(optree.tree_map_(hooked, params), batch)),
    f"{HOOKED}: gradients of visits": on_the_state,
    "RuntimeError: unshard in a loss: no gradient comes back through it. Compute with whole weights in": stepping(
        loss=with_whole(lambda layers: ya.unshard(layers)["w"].square().sum())
    ),
    "RuntimeError: map_whole_layers in a loss: no gradient comes back through it.": stepping(
        loss=with_whole(lambda layers: ya.map_whole_layers(lambda layer: layer["w"].square().sum(), layers).sum())
    ),
    "TypeError: x of argument 1 requires a gradient, and a step has gradients of the state's params alone": stepping(
        {"x": torch.ones(4, 4, requires_grad=True)}
    ),
    "TypeError: shard_batch: the batch is a Attributes, of which every one would get all rows": cutting(
        Attributes(ROWS)
    ),
    "TypeError: microbatches: rows of argument 1 is a Attributes, of which every one would get all rows": stepping(
        {"rows": Attributes(ROWS)}, microbatches=2
    ),
    "ValueError: layers[0]: the block keeps a weight (4, 4), and the loss uses it afterwards, when its memory": (
        stepping(loss=let_out, schedule=ya.schedules.zero3(remat="all"))
    ),
    "ValueError: layers[0]: the loss uses params of the state that this step trains, but not those that it": by_closure,
    "TypeError: aux: expected a real tensor or number in ya.Sum, got torch.complex64 (4, 4)": stepping(
        loss=lambda params, batch: (loss_fn(params, batch), ya.Sum(batch["x"] * 1j)), has_aux=True
    ),
    "TypeError: shard_batch: the batch is a list of 4, of which every one would get all rows; give a tensor, whose": (
        cutting([{"x": row} for row in ROWS])
    ),
    "TypeError: shard_batch: the batch is a generator, of which every one would get all rows": cutting(
        row for row in ROWS
    ),
    "TypeError: shard_batch: x is a range, of which every one": cutting({"x": range(4)}),
    "TypeError: argument 1 is a generator, of which each call of the loss takes more, and there are more calls": (
        lambda mesh: stepping((BATCH for _ in range(9)), lambda params, batch: loss_fn(params, next(batch)))(mesh)
    ),
    "RuntimeError: layers[0]: the block writes into its weights in place; work": in_block(
        lambda weight: weight.data.mul_(0.5)
    ),
    "RuntimeError: layers[0]: the block writes into its weights in place; work on a copy": in_block(clamped),
    "RuntimeError: the loss, or a block, gives a tensor with a gradient to a collective of torch.distributed "
    "(all_reduce), through which": stepping(loss=reduced_by_torch),
    "RuntimeError: the loss, or a block, gives a tensor with a gradient to a collective of torch.distributed "
    "(all_gather), through which": stepping(loss=gathered_by_torch),
    "RuntimeError: the loss, or a block, gives a tensor with a gradient to a collective of torch.distributed "
    "(c10d::allreduce_), through which": stepping(loss=of_block(reduced_in_block)),
    "RuntimeError: a torch.amp.GradScaler scales the loss, and no optimizer here would unscale its gradients": (
        without_a_graph(lambda mean: SCALER.scale(mean.total))
    ),
    "RuntimeError: the loss writes into the leaves of its parameters in place": shrinking(lambda leaf: leaf.mul_(0.5)),
    "RuntimeError: the loss writes into the leaves of its parameters in place, while": shrinking(
        lambda leaf: leaf.data.mul_(0.5)
    ),
    "ValueError: the loss depends on a torch.nn.Parameter (1, 1) that is none of its arguments": without_a_graph(
        lambda mean: HEAD(mean.total[None]).sum()
    ),
    "ValueError: the loss depends on a torch.nn.Parameter (3,) that is none of its arguments": stepping(
        loss=before_visits(torch.nn.Parameter(torch.ones(3)))
    ),
    "ValueError: 0.bias: requires_grad was True when ya.functionalize read it, and is not any more": frozen_too_late,
    "TypeError: shard_batch: the batch is a UserDict, of which every one would get all rows; give a tensor, whose rows "
    "are split, or a dict": cutting(UserDict(BATCH)),
    "TypeError: microbatches: argument 1 is a Rows, of which every": stepping(Rows(ROWS), microbatches=2),
    "TypeError: shard_batch: the batch is a Around, of which every": cutting(Around({"rows": Rows(ROWS)})),
    "ValueError: the loss does not depend on the differentiated arguments": stepping(
        loss=lambda params, batch: NET(batch["x"]).square().mean()
    ),
    "ValueError: the loss does not depend on the differentiated arguments: it was detached or made anew": (
        without_a_graph(lambda mean: mean.total.detach().requires_grad_())
    ),
    "ValueError: the loss does not depend on the differentiated arguments: it was detached or made anew (.item(),": (
        without_a_graph(lambda mean: torch.tensor(mean.total.item(), requires_grad=True))
    ),
    "TypeError: x of argument 1 was made on the meta device, where it has no values": stepping(
        {"x": torch.ones(4, 4, device="meta")}
    ),
    "TypeError: x of argument 1 was made on the meta device, where it has no values, or": made_under_inference_mode,
    "TypeError: scan(f, carry, xs): the carry is the stack layers: layers are xs": (
        lambda mesh: ya.scan(lambda x, w: (x, None), new(mesh).params["layers"], torch.ones(2, 4))
    ),
    "TypeError: shard_batch: x is a list of 4, of which every one would get all rows; give a tensor, whose rows are": (
        cutting({"x": [1.0, 2.0, 3.0, 4.0]})
    ),
    "TypeError: shard_batch: text is a list of 2, of which every one": cutting({"x": ROWS[:2], "text": ["a", "b"]}),
    "TypeError: microbatches: x of argument 1 is a list of 2, of which every one": stepping(
        {"x": [[1.0] * 4, [2.0] * 4]}, microbatches=2
    ),
    "TypeError: microbatches: x of argument 1 is a NumPy array of shape (4, 4), of which every one would get": stepping(
        {"x": ROWS.numpy()}, microbatches=2
    ),
    "ValueError: shard_batch: these are a rank's own rows already": (
        lambda mesh: ya.shard_batch(ya.shard_batch(BATCH, mesh), mesh)
    ),
    "ValueError: shard_batch: rows differ: classes has 8, x has 4. Shard batches of different sizes one by one": (
        cutting({"x": ROWS, "classes": torch.ones(8)})
    ),
    "TypeError: global_norm of a state would count the optimizer's moments; give its parameters: state.params": (
        lambda mesh: ya.global_norm(new(mesh))
    ),
    "TypeError: vdot of a state would count the optimizer's moments": lambda mesh: ya.vdot(new(mesh), new(mesh)),
    "TypeError: Stacked 'layers' has a list of 2 trees alike. Layers are stacked, leaf by leaf: ya.Param((layers,": (
        making({"layers": ya.Stacked([{"w": ya.Param((4, 4))}, {"w": ya.Param((4, 4))}])})
    ),
    "TypeError: seed=None: expected an integer, the same on every rank": making(seed=None),
    "RuntimeError: layers: these are parameters of a state that was donated": of_old_leaves,
    "RuntimeError: step.program(state): no step of this function has run on a state of this kind yet; step.lower": (
        lambda mesh: ya.train_step(loss_fn, TX).program(new(mesh))
    ),
    "ValueError: microbatches=True: expected an integer >= 1": stepping(microbatches=True),
}

UNCLEAR = {
    "TypeError: a training step inside torch.func (vmap, grad, ...): it writes to its state": mapped,
    "TypeError: learning_rate(count) returned NoneType: expected a number, or a tensor of one": taking(
        ya.optim.adamw(lambda count: None)
    ),
    "TypeError: shard_batch: x is a sparse tensor: give it dense (x.to_dense())": cutting({"x": ROWS.to_sparse()}),
    "ValueError: the state's params are {'blocks': 'layers'} now, and were made as {'layers': 'layers'}, to": (
        lambda mesh: taken(renamed(mesh), TX)
    ),
    "ValueError: the state's params are {'blocks': 'layers'} now": lambda mesh: ya.shard(renamed(mesh).params, TX),
    "TypeError: microbatches: x of argument 1 is a sparse tensor: give it dense": stepping(
        {"x": ROWS.to_sparse()}, microbatches=2
    ),
    "TypeError: shard(like=...): its leaves are shards of a state; expected a marked tree of ya.Param, or of whole": (
        lambda mesh: ya.shard(state := new(mesh), TX, like=ya.frozen(state.params))
    ),
    "TypeError: shard_batch: x is a nested tensor, whose rows neither ranks nor microbatches can share": cutting(
        {"x": RAGGED}
    ),
    "TypeError: x of argument 1 is a nested tensor, whose rows neither": stepping({"x": RAGGED}),
    "TypeError: params: expected a Param, a tensor or a Lazy leaf, got Linear; an nn.Module becomes parameters by ya": (
        lambda mesh: ya.shard(NET, TX, mesh=mesh)
    ),
    "TypeError: mesh: its axes have no names; make it by ya.mesh()": (
        lambda mesh: making()(init_device_mesh("cpu", (mesh.size(),)))
    ),
    "TypeError: checkpoint.save takes a folder and a ShardedState, got dict: the state itself, as ya.init": (
        lambda mesh: ya.checkpoint.save("folder", new(mesh).params)
    ),
    "TypeError: Param(64, ...): expected a shape, such as Param((64, 8))": lambda mesh: ya.Param(64, 32),
    "TypeError: learning_rate='1e-3': expected a number, or a function of the count": (
        lambda mesh: ya.optim.adamw("1e-3")
    ),
    "TypeError: mesh(dp=...): it is here shard=": lambda mesh: ya.mesh(device="cpu", dp=mesh.size()),
    "TypeError: mesh(pp=...): it is here stage=": lambda mesh: ya.mesh(device="cpu", pp=mesh.size()),
    "TypeError: Param(init='normal'): expected a function (generator, shape, dtype) -> tensor": (
        lambda mesh: ya.Param((4,), init="normal")  # type: ignore[arg-type]
    ),
    "AttributeError: 'GradientTransformation' object has no attribute 'step'; it is here: ya.train_step(loss_fn, tx)": (
        lambda mesh: TX.step()  # type: ignore[attr-defined]
    ),
    "AttributeError: 'ShardedState' object has no attribute 'load_state_dict'; it is here: ya.checkpoint.load(": (
        lambda mesh: new(mesh).load_state_dict({})
    ),
    "TypeError: layers.w: expected a Param, a tensor or a Lazy leaf, got ndarray; torch.from_numpy(array)": (
        lambda mesh: ya.shard({"layers": ya.Stacked({"w": np.ones((2, 4, 4))})}, TX, mesh=mesh)
    ),
    "TypeError: train_step(optimizer=...): it is here tx=": (
        lambda mesh: ya.train_step(loss_fn, optimizer=TX)  # type: ignore[call-arg]
    ),
    "TypeError: train_step(gradient_accumulation_steps=...): it is here microbatches=": stepping(
        gradient_accumulation_steps=4
    ),
    "AttributeError: 'ShardedState' object has no attribute 'cuda'; it is here: ya.mesh(), which": (
        lambda mesh: new(mesh).cuda()
    ),
    "AttributeError: layers.requires_grad_: layers is sharded, its weights are whole only inside ya.scan(f, x, params"
    "...) or ya.map_whole_layers; ya.unshard makes whole tensors of it; it is here: ya.frozen(tree) before": (
        lambda mesh: new(mesh).params["layers"].requires_grad_(False)
    ),
    "AttributeError: layers.grad: layers is sharded, its weights are whole only inside ya.scan(f, x, params...) or "
    "ya.map_whole_layers; ya.unshard makes whole tensors of it; it is here: ya.grad(loss_fn)(state.params, batch)": (
        lambda mesh: torch.nn.utils.clip_grad_norm_(new(mesh).params.values(), 1.0)
    ),
    "ValueError: microbatches: x of argument 1 has 3 rows, not a multiple of 2 microbatches; leave such a": stepping(
        {"x": ROWS[:3]}, microbatches=2
    ),
    "TypeError: frozen(tree, 'bf16'): expected a floating dtype, such as torch.bfloat16": (
        lambda mesh: ya.frozen(PARAMS, "bf16")  # type: ignore[arg-type]
    ),
    "TypeError: torch.compile of a chunk of stepping: compile the function itself: ya.chunk(torch.compile(f), 2": (
        lambda mesh: torch.compile(ya.chunk(stepping, 2, in_axes=0), backend="eager")(ROWS)
    ),
    "ValueError: clip: max_delta must be positive, got -1.0": lambda mesh: ya.optim.clip(-1.0),
    "TypeError: seed=9223372036854775808: expected an integer, the same on every rank, of at most": making(seed=2**63),
    "TypeError: torch.compile of a loss or of a step: what they communicate cannot be traced. Compile blocks, once": (
        lambda mesh: ya.train_step(torch.compile(loss_fn), TX)
    ),
    "TypeError: torch.compile of a loss or of a step: what they communicate cannot be traced": (
        lambda mesh: torch.compile(ya.train_step(loss_fn, TX), backend="eager")(new(mesh), BATCH)
    ),
    "TypeError: a state belongs to ranks, and is not pickled: ya.checkpoint.save(folder, state) writes it": (
        lambda mesh: pickle.dumps(new(mesh))
    ),
    "TypeError: train_step: a plain tensor is among the state's params, all of which are shards": with_a_plain_tensor,
    "TypeError: layers['w'] = ...: a state is not written to; ya.shard makes another": written_to,
    "AttributeError: 'ShardedState' object has no attribute 'half'; it is here: ya.init(..., precision=": (
        lambda mesh: new(mesh).half()
    ),
    "AttributeError: 'Functionalized' object has no attribute 'eval'; it is here: _, answer = ya.functionalize(": (
        in_eval_mode
    ),
    "TypeError: precision='bf16': expected dtypes, such as ya.Precision(compute=torch.bfloat16)": making(
        precision="bf16"
    ),
    "TypeError: a differentiated argument has a leaf torch.int32 (); expected floating-point tensors: "
    "of a state its params (state.params)": lambda mesh: ya.grad(loss_fn)(new(mesh), BATCH),
    "TypeError: a differentiated argument has a leaf torch.float32 (2, 4, 4); expected floating-point tensors: of a": (
        lambda mesh: ya.grad(loss_fn)(PARAMS, BATCH)
    ),
    "TypeError: train_step takes a ShardedState or a PlainState, got dict: the state itself, as ya.init, ya.shard or": (
        lambda mesh: taken(new(mesh).params, TX)
    ),
    "TypeError: expected a GradientTransformation or a pair of functions (init, update), got <function adamw": (
        making(tx=ya.optim.adamw)
    ),
    "TypeError: schedule: expected a function from a trace to a program, or a Program, got 'zero2'; calls make "
    "them: schedule=ya.schedules.zero3()": stepping(schedule="zero2"),
    "TypeError: schedule: expected a function from a trace to a program, or a Program, got None; calls make "
    "them: schedule=ya.schedules.zero3()": stepping(schedule=None),
    "TypeError: head.out.0: expected a Param, a tensor or a Lazy leaf, got int; a shape alone is no parameter": making(
        {"head": ya.Unit({"out": (16, 8)})}
    ),
    "TypeError: like= is missing, or no state: a checkpoint is read into a state of this mesh": (
        lambda mesh: ya.checkpoint.load("folder", like=new(mesh).params)
    ),
    "TypeError: Param dtype bfloat16: parameters are floating point": (
        lambda mesh: ya.Param((4, 3), "bfloat16")  # type: ignore[arg-type]
    ),
    "TypeError: lora: where=['w']: expected a function of a leaf's path and Param, such as lambda path, param:": (
        lambda mesh: ya.lora(PARAMS, 2, ["w"])  # type: ignore[arg-type]
    ),
    "TypeError: the loss: the weight of a Mean should be a number or a tensor, got NoneType": (
        lambda mesh: ya.grad(lambda w, _: ya.Mean(w.sum(), None))(torch.ones(3), BATCH)  # type: ignore[arg-type]
    ),
    "TypeError: w is on the meta device and has no values, or is sparse; give whole tensors, those that are": (
        lambda mesh: ya.shard({"w": torch.eye(4).to_sparse()}, TX, mesh=mesh)
    ),
    "TypeError: checksum takes a ShardedState, got dict: the state itself": (
        lambda mesh: ya.checksum(new(mesh).params)
    ),
    "TypeError: a step's program is found for a ShardedState, got PlainState: the state itself": (
        lambda mesh: ya.train_step(loss_fn, TX).lower(ya.PlainState.create(PARAMS, TX), BATCH)  # type: ignore[arg-type]
    ),
    "TypeError: named_weights(dtype='bf16'): expected a dtype, such as torch.bfloat16": (
        lambda mesh: next(ya.named_weights(new(mesh).params, dtype="bf16"))  # type: ignore[arg-type]
    ),
    "TypeError: optim: the gradients are no tree like the parameters, as ya.grad returns, and ya.value_and_grad": (
        lambda mesh: new(mesh).apply_gradients(ya.value_and_grad(loss_fn)(new(mesh).params, BATCH), TX)
    ),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("cases", ["SILENT", "UNCLEAR"])
def test_mistakes_are_refused_in_words_of_this_library(mesh: Any, cases: str) -> None:
    for begins, case in globals()[cases].items():
        try:
            said = f"nothing: {case(mesh)}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        assert said.startswith(begins), said


def test_an_initializer_of_torch_is_named() -> None:
    with pytest.raises(AttributeError) as refused:
        ya.materialize({"layers": {"w": ya.Param((4, 4), init=torch.nn.init.xavier_uniform_)}})  # type: ignore[arg-type]
    assert any("the initializer of layers.w is called with (generator" in note for note in refused.value.__notes__)


def warned_by(call: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [str(each.message) for each in caught]


def warned_of(mesh: Any, rows: torch.Tensor) -> list[list[str]]:
    """What is said in a first step on these rows, and on the part of them that `shard_batch` deals to this rank."""
    return [warned_by(stepping({"x": x}), mesh) for x in (rows, ya.shard_batch(rows, mesh))]


@on_ranks(1, 2)
def test_a_batch_that_all_ranks_have_is_warned_of(mesh: Any) -> None:
    same, own = warned_of(mesh, torch.arange(16.0).view(4, 4))
    assert own == []
    assert len(same) == mesh.size() - 1
    assert all("all ranks have the same batch, so that each row" in text for text in same)


@on_ranks(1, 2)
def test_a_sum_over_shards_in_a_loss_is_warned_of(mesh: Any) -> None:
    """Of one rank they are whole, and what is gathered, or summed over ranks, is the same everywhere."""
    by_hand = lambda layers: sum(leaf.square().sum() for leaf in optree.tree_leaves(layers))  # noqa: E731
    ways = [
        by_hand,
        lambda layers: ya.vdot(layers, layers),
        lambda layers: loss_fn({"layers": optree.tree_map(lambda leaf: leaf * 2, layers)}, BATCH).total,
        lambda layers: by_hand(layers).detach(),
    ]
    rows = ya.shard_batch(torch.arange(16.0).view(4, 4), mesh)
    found, *others = [warned_by(stepping({"x": rows}, with_whole(way)), mesh) for way in ways]
    assert others == [[]] * 3
    assert len(found) == mesh.size() - 1
    assert all(text.startswith("the loss computes with leaves of layers beside its visits") for text in found)


@on_ranks(1, 2)
def test_rows_of_a_sampler_that_are_cut_once_more_are_warned_of(mesh: Any) -> None:
    as_they_are, cut = warned_of(mesh, torch.arange(16.0).view(4, 4) + 16 * mesh.get_rank())
    assert as_they_are == []
    assert len(cut) == mesh.size() - 1
    assert all(text.startswith("ranks have given other rows to ya.shard_batch") for text in cut)


@on_ranks(1, 2)
def test_a_tensor_that_was_frozen_before_it_is_sharded_is_warned_of(mesh: Any) -> None:
    """What `shard` warns of: one tensor that does not require grad among others, marked, all of them, and none."""
    still = torch.ones(4)
    moving = torch.ones(4, requires_grad=True)
    trees = [{"a": still, "b": moving}, {"a": ya.frozen(still), "b": moving}, {"b": moving}, {"a": still}]
    like = {"a": ya.frozen(ya.Param((4,))), "b": ya.Param((4,))}
    mixed, *right = (warned_by(functools.partial(ya.shard, tree, TX, mesh=mesh)) for tree in trees)
    right.append(warned_by(functools.partial(ya.shard, trees[0], TX, mesh=mesh, like=like)))
    assert right == [[]] * 4
    assert [text.partition(",")[0] for text in mixed] == ["shard: a does not require grad"]


@on_ranks(1, 2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_may_write_to_its_batch(mesh: Any, microbatches: int) -> None:
    """In three steps it writes to each new batch, and takes a part from it; the call before the first one, too."""

    def writes(params: Any, batch: Any) -> Any:
        batch["x"].div_(8)
        return loss_fn(params, {"x": batch.pop("x")})

    rows = torch.arange(32.0).view(8, 4)
    losses = []
    for loss, scale in ((writes, 1), (loss_fn, 8)):
        step = ya.train_step(loss, TX, microbatches=microbatches)
        state = new(mesh)
        for number in (1, 2, 3):
            state, metrics = step(state, ya.shard_batch({"x": rows * number / scale}, mesh))
            losses.append(metrics["loss"].item())
    assert losses[:3] == losses[3:]


@on_ranks(1, 2)
def test_a_sparse_tensor_may_be_in_a_batch(mesh: Any) -> None:
    """A sparse tensor in a rank's own batch."""
    rows = torch.eye(4) * (1 + mesh.get_rank())
    step = ya.train_step(lambda params, batch: loss_fn(params, {"x": batch["x"].to_dense()}), TX)
    dense, sparse = [step(new(mesh), {"x": x})[1]["loss"].item() for x in (rows, rows.to_sparse())]
    assert dense == sparse


@on_ranks(1, 2)
def test_an_initializer_that_takes_no_generator_draws_alike(mesh: Any) -> None:
    """As those of torch.nn.init do; each rank has a seed of its own."""
    init = lambda generator, shape, dtype: torch.nn.init.xavier_uniform_(torch.empty(shape, dtype=dtype))  # noqa: E731
    tree = {"layers": ya.Stacked({"w": ya.Param((2, 4, 4), init=init)})}
    torch.manual_seed(mesh.get_rank())
    whole = ya.unshard(ya.init(tree, TX, mesh=mesh).params)["layers"]["w"]
    alone = ya.PlainState.create(tree, TX).params["layers"].tree["w"]
    assert torch.equal(whole, alone)


def as_alone(mesh: Any, tx: Any) -> None:
    """Three steps of an optimizer of one's own are those of plain tensors."""
    step = ya.train_step(loss_fn, tx)
    check_steps((step, new(mesh, tx)), (step, ya.PlainState.create(PARAMS, tx)), [(BATCH, BATCH)] * 3, 1e-5)


@on_ranks(1, 2)
def test_a_state_that_begins_with_the_parameters_has_copies_of_them(mesh: Any) -> None:
    """An optimizer that pulls weights back to where they began."""

    def update(updates: Any, began: Any, params: Any) -> Any:
        return optree.tree_map(lambda u, a, w: -0.1 * u + 0.1 * (a - w), updates, began, params), began

    tx = ya.optim.assume_elementwise((lambda params: params, update))
    as_alone(mesh, tx)


@on_ranks(1, 2)
def test_moments_that_begin_as_one_tree_are_two(mesh: Any) -> None:
    """And a count that begins as a tensor of the optimizer's own is one of each state's."""
    none = torch.zeros(())

    def init(params: Any) -> Any:
        zeros = optree.tree_map(torch.zeros_like, params)
        return none, zeros, zeros

    def update(updates: Any, state: Any, params: Any) -> Any:
        count, slow, fast = state
        slow, fast = (optree.tree_map(lambda m, u, b=b: b * m + u, m, updates) for m, b in ((slow, 0.9), (fast, 0.5)))
        return optree.tree_map(lambda s, f: -0.1 * (s - f) / (1 + count), slow, fast), (count + 1, slow, fast)

    tx = ya.optim.assume_elementwise((init, update))
    as_alone(mesh, tx)
    assert none == 0


@on_ranks(1, 2)
def test_a_rate_that_is_a_tensor_may_change_in_place(mesh: Any) -> None:
    rate = torch.tensor(0.0)
    sharded = ya.train_step(loss_fn, ya.optim.sgd(rate))
    states: Any = new(mesh, ya.optim.sgd(rate)), ya.PlainState.create(PARAMS, ya.optim.sgd(0.0))
    for now in (0.5, 0.125):
        rate.fill_(now)
        plain = ya.train_step(loss_fn, ya.optim.sgd(now))
        states = check_steps((sharded, states[0]), (plain, states[1]), [(BATCH, BATCH)], 1e-5)


@on_ranks(1, 2)
def test_another_seed_is_that_of_evaluations_too_and_numpys_are_saved(mesh: Any, tmp_path: Path) -> None:
    noisy = lambda params, batch: loss_fn(params, {"x": batch["x"] + torch.rand_like(batch["x"])})  # noqa: E731
    losses = []
    for seed in (1, np.int64(2)):
        state = dataclasses.replace(making(seed=np.int64(0))(mesh), seed=seed)
        ya.checkpoint.save(tmp_path, state)
        loaded, _ = ya.checkpoint.load(tmp_path, new(mesh))
        assert loaded.seed == seed
        losses.append(ya.eval_step(noisy)(state, BATCH)["loss"])
        assert losses[-1] == ya.train_step(noisy, TX)(state, BATCH)[1]["loss"]
    assert losses[0] != losses[1]


@on_ranks(2)
def test_steps_of_two_threads_at_once_are_refused(mesh: Any) -> None:
    """They waited for each other: each rank has an order of its own."""
    other = new(mesh)

    def loss(params: Any, batch: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ya.eval_step(loss_fn), other, batch).result()
        return loss_fn(params, batch)

    with pytest.raises(RuntimeError, match="begins in one thread while another thread is in one"):
        stepping(loss=loss)(mesh)
    assert taken(other, TX)[0].step == 1


# ---- writes to leaves between two steps


def emptied(leaf: Any) -> None:
    leaf.data = torch.zeros_like(leaf)


WRITES = {
    "under no_grad": lambda leaf: leaf.mul_(0.0),
    "detached": lambda leaf: leaf.detach().mul_(0.0),
    "by .data": lambda leaf: leaf.data.mul_(0.0),
    "by .numpy()": lambda leaf: leaf.numpy().fill(0.0),
    "other memory": emptied,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_between_steps_is_computed_with_or_refused(mesh: Any, how: str, compute: torch.dtype) -> None:
    """To all leaves, before the first step and after it. Without weights a block changes nothing."""

    def loss(params: Any, batch: Any) -> Any:
        return loss_fn(params, {"x": batch["x"].to(compute)})

    counts = how in ("under no_grad", "detached")
    same_memory = compute == torch.float32 and how != "other memory"
    refused = r"^a leaf of the state's params was written through \.data or \.numpy\(\), or giv"
    for steps in (0, 1):
        state = ya.init(PARAMS, TX, mesh=mesh, precision=ya.Precision(compute=compute))
        step = ya.train_step(loss, TX)
        for _ in range(steps):
            state, _ = step(state, BATCH)
        with torch.no_grad():
            for leaf in optree.tree_leaves(state.params):
                WRITES[how](leaf)
        if counts or same_memory:
            assert ya.eval_step(loss)(state, BATCH)["loss"] == step(state, BATCH)[1]["loss"] == 1.0
            continue
        for call in (ya.eval_step(loss), step):
            with pytest.raises(RuntimeError, match=refused):
                call(state, BATCH)


@on_ranks(1, 2)
def test_states_and_steps_under_inference_mode_are_as_without_it(mesh: Any) -> None:
    """Made and trained in it twice, and then outside of it."""
    found = []
    for inside in (True, False):
        with torch.inference_mode(inside):
            state = new(mesh)
        step = ya.train_step(loss_fn, TX)
        losses = []
        for number in range(3):
            with torch.inference_mode(inside and number < 2):
                state, metrics = step(state, BATCH)
            losses.append(metrics["loss"].item())
        grads = ya.grad(loss_fn)(state.params, BATCH)
        found.append([*losses, state.apply_gradients(grads, TX).step])
    assert found[0] == found[1]


@on_ranks(1, 2)
def test_an_optimizers_update_takes_a_states_own_trees(mesh: Any) -> None:
    """Optax's loop, on a state's own trees; and the library's."""
    step = ya.train_step(loss_fn, TX)
    found = []
    for hand in (True, False):
        state = new(mesh)
        grads = ya.grad(loss_fn)(state.params, BATCH)
        if hand:
            updates, opt_state = TX.update(grads, state.opt_state, state.params)
            params = ya.optim.apply_updates(state.params, updates)
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
        else:
            state = state.apply_gradients(grads, TX)
        whole = ya.unshard(state.params)["layers"]["w"]
        found.append((whole, step(state, BATCH)[1]["loss"]))
    ours, theirs = found
    torch.testing.assert_close(ours, theirs)  # a fused kernel rounds otherwise
