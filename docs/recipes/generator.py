"""A generator in a process of its own, on the trainer's machine, that answers with the newest weights.

The idea: the first rank writes whole tensors to a file, and renames it when it is whole, so that whoever opens the file
has all of one step. A generator is any program that reads safetensors; this one is a module of transformers.

    torchrun --nproc-per-node 2 docs/recipes/generator.py
"""

import multiprocessing
import os
import tempfile
from typing import Any

import torch
from grpo import made
from safetensors.torch import load_file, save_file
from tiny import TX, counting, say

import yafsdp_fn as ya


def publish(params: Any, path: str, first: bool) -> None:  # collective; the first rank alone keeps the tensors
    weights = {name: weight for name, weight in ya.named_weights(params, dtype=torch.bfloat16) if first}
    if first:
        save_file(weights, f"{path}.partial")
        os.replace(f"{path}.partial", path)


def generate(path: str, pipe: Any) -> None:
    engine = made()
    while (tokens := pipe.recv()) is not None:
        engine.load_state_dict(load_file(path))
        answers = engine.generate(tokens[:, :8], max_new_tokens=8, do_sample=False)
        pipe.send((answers[:, 8:] == tokens[:, 8:]).float().mean().item())


def main(rounds: int = 3, steps: int = 20) -> list[float]:
    mesh, (params, model) = ya.mesh(), ya.functionalize(made(), layers="model.layers")
    step, right = ya.train_step(lambda w, tokens: model(w, tokens, labels=tokens, use_cache=False).loss, TX), []
    state, first = ya.shard(params, TX, mesh=mesh), mesh.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:  # dir="/dev/shm": in memory
        path, (pipe, theirs) = f"{folder}/weights", multiprocessing.Pipe()
        if first:
            multiprocessing.get_context("spawn").Process(target=generate, args=(path, theirs), daemon=True).start()
            theirs.close()  # so that a generator that ends is an error here
        for number in range(rounds * steps + 1):
            tokens = ya.shard_batch(counting(number), mesh)["tokens"]
            if number % steps == 0:
                publish(state.params, path, first)
                if first:
                    pipe.send(tokens)  # which are trained on afterwards
                    right.append(pipe.recv())
            state, _ = step(state, tokens)
        pipe.send(None)
    say(f"continued rightly: {', '.join(f'{part:.0%}' for part in right)}")
    return right


if __name__ == "__main__":
    main()
