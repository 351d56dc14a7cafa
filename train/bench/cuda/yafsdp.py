"""YaFSDP, version 2 (`ya_fsdp.fully_shard`), as a contender where it can be imported.

Its interface is that of its repository on GitHub, github.com/yandex/YaFSDP; nothing here has been run with it.
"""

from __future__ import annotations

import importlib

import torch
from torch.distributed.device_mesh import DeviceMesh

from models import llama
from train.bench.cuda.fsdp2 import Sharded
from train.bench.cuda.module import Module, fill
from train.bench.cuda.setting import Setting


def build(config: llama.Config, mesh: DeviceMesh, setting: Setting, *, recompute: int) -> dict[str, Sharded]:
    """Raises ImportError where YaFSDP is not installed."""
    api, sharding = importlib.import_module("ya_fsdp._api"), importlib.import_module("ya_fsdp.fully_shard")
    policy = api.MixedPrecisionPolicy(param_dtype=setting.compute, reduce_dtype=torch.float32)
    module = Module(config, compiled=False, recompute=recompute)
    for layer in module.layers:
        fill(layer, setting.device)
        sharding.fully_shard(layer, mesh=mesh, mp_policy=policy)
    for rest in (module.embed, module.head):
        fill(rest, setting.device)
        sharding.fully_shard(rest, mesh=mesh, mp_policy=policy)
    sharding.fully_shard(module, mesh=mesh, mp_policy=policy)
    return {"yafsdp": Sharded(module)}
