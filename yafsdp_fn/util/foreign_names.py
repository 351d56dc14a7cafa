"""Maps names of JAX, Orbax, torch and others that people look for in `ya`, and keywords that they pass, to ours.

docs/coming_from has more, a table for each.
"""

from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Any)

_FUNCTIONS = "torch.func.{0}: it takes a loss with a sharded scan, too (docs/transforms.md)"
_WRAPPER = (
    "ya.functionalize(module, layers), then ya.shard and ya.train_step(loss, tx): no wrapper, functions of a tree"
)
_LOSS = "what a loss returns, ya.Mean(total, weight): the mean over all ranks and microbatches"
_PRECISION = "ya.init(..., precision=ya.Precision(compute=torch.bfloat16)), on the mesh's device"
_MODE = "_, answer = ya.functionalize(module.eval(), layers), another function of the same params"
_MICROBATCHES = "ya.train_step(loss_fn, tx, microbatches=4)"
_OWN = "a transformation of your own, in a few lines (docs/optimizers.md)"
_CLIP = "ya.optim.chain(ya.optim.clip_by_global_norm(1.0), tx)"
_LOAD = "ya.checkpoint.load(folder, like=state)"

MEANT = {
    # JAX
    "eval_shape": "ya.planner.trace(loss_fn, params, batch, ranks=8): shapes, visits and costs; nothing is computed",
    "jit": "ya.train_step(loss_fn, tx) for a step, torch.compile(block) for a block's kernels",
    "pmap": "ya.launch(function, ranks=2) or torchrun: a process for each device",
    "shard_map": "ya.scan and ya.apply: blocks get whole weights, and axes inside blocks are ya.mesh(tensor=2)'s",
    "vmap": _FUNCTIONS,
    "jvp": _FUNCTIONS,
    "vjp": _FUNCTIONS,
    "hessian": _FUNCTIONS,
    "jacrev": _FUNCTIONS,
    "jacfwd": _FUNCTIONS,
    "device_put": "ya.shard(params, tx, mesh=mesh) for parameters, ya.shard_batch(batch, mesh) for a batch",
    "make_mesh": "ya.mesh(shard=-1), a torch DeviceMesh of all ranks",
    "tree_map": "optree.tree_map, over this rank's flat shards",
    "pmean": _LOSS,
    "make_jaxpr": "step.lower(state, batch), the program of a step",
    "random": "seed= of ya.init and ya.materialize, and ya.normal_like; blocks draw by torch, which a step seeds",
    "lax": "ya.scan, ya.psum, ya.all_gather, ya.ppermute and others, by JAX's names",
    # torch
    "fully_shard": _WRAPPER,
    "FullyShardedDataParallel": _WRAPPER,
    "FSDP": _WRAPPER,
    "DistributedDataParallel": f"ya.schedules.ddp(), with {_WRAPPER}",
    "MixedPrecisionPolicy": "ya.Precision(compute=torch.bfloat16, reduce=torch.float32)",
    "init_device_mesh": "ya.mesh(shard=-1), which makes the process group too",
    "distribute_tensor": "ya.shard(params, tx, mesh=mesh), of a tree of whole tensors",
    "full_tensor": "ya.unshard(state.params), whole tensors on every rank",
    "summon_full_params": "ya.unshard(state.params), or ya.map_whole_layers, a layer at a time",
    "no_sync": "ya.train_step(loss, tx, microbatches=4, schedule=ya.schedules.zero3(defer=True))",
    "clip_grad_norm_": _CLIP,
    "compile": "torch.compile(block), made once, outside of the loss",
    # others
    "TrainState": "ya.init(params, tx, mesh=mesh): state.step, state.params, state.opt_state",
    "Trainer": "a loop over ya.train_step(loss_fn, tx); a trainer is `python -m train`, in a clone",
    "Accelerator": _WRAPPER,
    "prepare": _WRAPPER,
    "get_peft_model": "ya.lora(params, rank)",
    # attributes of parameters, of a state, and of a function of a module
    "leaf.requires_grad_": "ya.frozen(tree) before ya.init or ya.shard; of a state, ya.shard(state, tx, like=tree)",
    "leaf.grad": "ya.grad(loss_fn)(state.params, batch); ya.optim.clip_by_global_norm, in the chain of tx, clips",
    "state.parameters": "state.params, a tree of handles",
    "state.state_dict": "ya.checkpoint.save(folder, state); ya.unshard(state.params) for whole tensors",
    "state.half": _PRECISION,
    "state.bfloat16": _PRECISION,
    "state.to": _PRECISION,
    "state.load_state_dict": _LOAD,
    "state.replace": "dataclasses.replace(state, params=tree)",
    "state.save": "ya.checkpoint.save(folder, state)",
    "state.zero_grad": "nothing: a step makes its gradients anew",
    "state.train": _MODE,
    "state.eval": _MODE,
    "state.cuda": "ya.mesh(), which takes the GPUs if there are any: a state is where its mesh is",
    "model.eval": _MODE,
    "model.train": _MODE,
    "model.parameters": "the tree that ya.functionalize returned beside it, or state.params",
    # optimizers
    "optim.Adam": "ya.optim.adam(learning_rate), a function that makes it",
    "optim.AdamW": "ya.optim.adamw(learning_rate, weight_decay=0.01), a function that makes it",
    "optim.CPUOffloadOptimizer": "ya.optim.on_host(ya.optim.adamw(learning_rate))",
    "optim.AdamW8bit": "ya.optim.in_format(ya.optim.adamw(learning_rate), ya.formats.Roots())",
    "optim.SGD": "ya.optim.sgd(learning_rate, momentum=0.9), a function that makes it",
    "optim.MultiSteps": _MICROBATCHES,
    "optim.multi_steps": _MICROBATCHES,
    "optim.apply_if_finite": "ya.train_step(loss_fn, tx, skip_nonfinite=True), the default",
    "optim.adafactor": "ya.optim.in_format(tx, ya.formats.Roots()) or ya.optim.on_host(tx), for its memory",
    "optim.lamb": _OWN,
    "optim.lookahead": _OWN,
    "optim.inject_hyperparams": "another step, ya.train_step(loss_fn, ya.optim.adamw(new_rate)), on the same state",
    "optim.exponential_decay": "a function of the count, lambda count: 0.1 * 0.5 ** (count / 1000)",
    "optim.piecewise_constant_schedule": "ya.optim.join_schedules(schedules, boundaries)",
    "optim.add_noise": _OWN,
    "optim.multi_transform": "ya.optim.partition(transforms, labels)",
    "optim.clip_grad_norm_": _CLIP,
    "optim.lr_scheduler": "a function of the count: ya.optim.adamw(ya.optim.warmup_cosine_decay_schedule(...))",
    "tx.step": "ya.train_step(loss_fn, tx), or state.apply_gradients(grads, tx): both return another state",
    "tx.zero_grad": "nothing: a step makes its gradients anew",
    "tx.param_groups": "ya.optim.partition(transforms, labels), and a rate that is a function of the count",
    # checkpoints
    "checkpoint.restore": _LOAD,
    "checkpoint.latest_step": "ya.checkpoint.latest(folder) for the newest folder, or ya.checkpoint.steps(folder)[-1]",
    "checkpoint.all_steps": "ya.checkpoint.steps(folder)",
    "checkpoint.CheckpointManager": "ya.checkpoint.save(folder, state, keep_last=3), steps, latest and load",
    "checkpoint.AsyncCheckpointer": "ya.checkpoint.Saver(folder), which writes beside the steps",
    "checkpoint.async_save": "ya.checkpoint.Saver(folder), which writes beside the steps",
    "checkpoint.checkpoint": "ya.schedules.zero3(remat='all'), for activations; ya.checkpoint is of states on disk",
}


def hint(name: str) -> str:
    """Returns what such a name is here, as the end of an error; nothing for others."""
    return f"; it is here: {MEANT[name].format(name)}" if name in MEANT else ""


KEYWORDS = {
    "lr": "learning_rate",
    "betas": "b1",
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "where",
    "optimizer": "tx",
    "gradient_accumulation_steps": "microbatches",
    "data": "shard",
    "dp": "shard",
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "fsdp": "shard",
    "pipeline": "stage",
    "pp": "stage",
}
"""Keywords of torch's optimizers, of peft's LoraConfig, of Trainers, and axes of other libraries' meshes."""


def renamed(function: str, keyword: str) -> TypeError:
    """Returns the error for a call with a keyword of another library."""
    return TypeError(f"{function}({keyword}=...): it is here {KEYWORDS[keyword]}=; help() says more")


def with_hints(function: Function) -> Function:
    """Decorates a function: called with a keyword of another library, it raises TypeError with the name used here."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in KEYWORDS.keys() & kwargs:
            if KEYWORDS[name] in function.__annotations__:
                raise renamed(function.__name__, name)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
