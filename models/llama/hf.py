"""Loads and saves Hugging Face's Llama directories, `config.json` and safetensors, layer by layer
(`models/files/tree.py`).

    config, params = hf.load(directory)            # reads headers; the leaves are `ya.Lazy`
    state = ya.shard(params, tx, mesh=mesh)        # reads one layer at a time, each rank keeps its part
    hf.save(directory, config, state.params)       # gathers one layer at a time, rank 0 writes

Nothing is permuted: both rotate halves.
"""

from __future__ import annotations

from functools import partial

from models.files import tree
from models.files.config_json import Json
from models.files.format import Format
from models.llama.config import Config
from models.llama.model import params

JSON = Json(
    model_type="llama",
    architecture="LlamaForCausalLM",
    expected={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
FORMAT = Format[Config]("Llama", params, partial(JSON.read, Config), JSON.write)
PREFIX = FORMAT.prefix

load = partial(tree.load, FORMAT)
save = partial(tree.save, FORMAT)
