"""What this device reaches, by `ya.calibrate`, and which attention kernels torch takes on it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import yafsdp_fn as ya
from train.bench.cuda.emulated import Report
from train.bench.cuda.one_rank import MODELS, SEQS
from train.bench.cuda.setting import Setting


def run(setting: Setting, report: Report) -> None:
    here = ya.calibrate(device="cuda" if setting.device == "cuda" else "cpu")
    report({"cluster": dataclasses.asdict(here)})
    found = {f"{name}, {tokens}": attention(setting, name, tokens) for name in MODELS for tokens in SEQS}
    report({"cluster": dataclasses.asdict(here), "attention backend": found})


def attention(setting: Setting, model: str, tokens: int) -> str:
    """The backend of scaled dot product attention as the model's blocks call it, in training."""
    config, seq = setting.config(*MODELS[model]), setting.seq(tokens)

    def heads(count: int) -> torch.Tensor:
        shape = (1, seq, count, config.head_dim)
        return torch.randn(shape, dtype=setting.compute, device=setting.device).transpose(1, 2).requires_grad_()

    q, k, v = heads(config.heads), heads(config.kv_heads), heads(config.kv_heads)
    choice: int = torch._fused_sdp_choice(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True, enable_gqa=config.kv_heads < config.heads
    )
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=config.kv_heads < config.heads)  # it runs
    return SDPBackend(choice).name
