"""Saves the pairs of `ya.lora` as an adapter of peft, without the base weights.

hf.save_adapters(directory, config, state.params, base="the/model")
peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("the/model"), directory)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import yafsdp_fn as ya
from models.files.format import Format
from models.files.settings import ADAPTER, dumped, must_be_apart
from models.files.settings import CONFIG as MODEL
from models.files.tree import is_rank_0, raise_on_all
from models.parts.tree import Parts
from yafsdp_fn.params.sharded import handles, trainable
from yafsdp_fn.util import disk

WEIGHTS = "adapter_model.safetensors"


def save(family: Format[Any], directory: str | os.PathLike[str], params: Parts, *, base: str = "") -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, replacing any adapter in `directory`: a kill leaves
    the earlier one, none, or this one.

    params: plain or sharded, as for `tree.save`: every rank of a sharded tree must call, rank 0 writes
    base: the base model, a name or a directory, for peft's readers

    Raises ValueError if there are no adapters, if they differ in rank or factor, for one of a weight that is not a
    linear layer in transformers, for other weights that are trained, and if a model is in `directory`;
    OSError if rank 0 cannot write, on all ranks.
    """
    found: dict[str, Tensor] = {}
    targets: dict[str, ya.LowRank] = {}
    layers = itertools.count()

    def collect(prefix: str, weights: Mapping[str, Any]) -> None:
        for key, leaf in weights.items():
            if isinstance(leaf, ya.LowRank):
                module = key.removesuffix(".weight")
                targets[module] = leaf
                for part, tensor in (("A", leaf.a), ("B", leaf.b)):
                    name = f"base_model.model.{prefix}{module}.lora_{part}.weight"
                    found[name] = tensor.detach().to("cpu", copy=True)

    collect(family.prefix.embed, ya.params.without_markers(ya.unshard(params.embed)))
    in_embed = set(targets)
    collect(family.prefix.head, ya.params.without_markers(ya.unshard(params.head)))
    ya.map_whole_layers(lambda leaves: collect(family.prefix.layers.format(layer=next(layers)), leaves), params.layers)
    if not targets:
        raise ValueError(f"{directory}: these params have no adapters to save; ya.lora makes them")
    trained = [path for handle in handles(trainable(params)) for path, _, _ in handle.wholes()]
    if beside := [path for path in trained if not path.endswith((".a", ".b"))]:
        raise ValueError(
            f"{directory}: {', '.join(beside)} are trained beside the adapters, and a file of adapters does not hold "
            "them; save the merged model, or leave them frozen"
        )
    if refused := [key for key in targets if key in in_embed or f"{key}.weight" in family.no_linear]:
        raise ValueError(
            f"{directory}: peft has no adapter for {', '.join(refused)} of a {family.name}; choose others with the "
            f"`where` of ya.lora, or save the merged model"
        )
    ranks = {leaf.a.shape[0] for leaf in targets.values()}
    factors = {leaf.factor for leaf in targets.values()}
    if len(ranks) > 1 or len(factors) > 1:
        raise ValueError(f"{directory}: adapters of ranks {sorted(ranks)} and factors {sorted(factors)}; expected one")
    rank = ranks.pop()
    factor = factors.pop()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": factor * rank,
        "target_modules": sorted(targets),
        "fan_in_fan_out": family.fan_in_fan_out,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    failed: list[Exception] = []
    if is_rank_0():
        try:
            _write(Path(directory), config, found)
        except Exception as error:
            failed.append(error)
    raise_on_all(params, failed)


def _write(root: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save as serialised

    must_be_apart(root, MODEL)
    root.mkdir(parents=True, exist_ok=True)
    (root / ADAPTER).unlink(missing_ok=True)  # without it there is no adapter: none is a mixture of two
    disk.replace(root / WEIGHTS, serialised(tensors, metadata={"format": "pt"}))
    disk.replace(root / ADAPTER, dumped(config))
    disk.sync_folder(root)
