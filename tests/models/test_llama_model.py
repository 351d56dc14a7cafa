"""A Llama alone: decoding, its cache, rotary tables, chunks, initial values; test_families has its numbers."""

import dataclasses
import math

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from models.parts import layers
from tests.models.theirs import TINY, draw


def made(config: llama.Config = TINY) -> llama.Llama:
    return ya.materialize(llama.params(config), seed=0)


def test_decoding_overwrites_a_used_cache() -> None:
    params = optree.tree_map(Tensor.double, made())
    tokens = draw(1, 12, seed=2, most=TINY.vocab)
    cache = llama.init_cache(TINY, 1, 16, torch.float64)
    llama.decode(TINY, params, tokens.flip(1), cache, 0)
    storage = cache.k.data_ptr()
    again = llama.decode(TINY, params, tokens[:, :8], cache, 0)
    torch.testing.assert_close(again, llama.logits(TINY, params, tokens[:, :8]), atol=1e-6, rtol=1e-6)
    assert cache.k.data_ptr() == storage
    assert not again.requires_grad


@pytest.mark.parametrize(
    ("batch", "position", "dtype", "error", "text"),
    [
        (1, 14, torch.float32, ValueError, r"tokens at positions 14 to 17 do not fit a cache of 16 positions"),
        (1, -1, torch.float32, ValueError, r"tokens at positions -1 to 2 do not fit"),
        (2, 0, torch.float32, ValueError, r"2 sequences of tokens, but the cache was made for 1"),
        (
            1,
            0,
            torch.bfloat16,
            TypeError,
            r"the cache is torch.bfloat16, the weights are torch.float32; pass init_cache",
        ),
    ],
)
def test_decode_refusals(batch: int, position: int, dtype: torch.dtype, error: type[Exception], text: str) -> None:
    params = made()
    cache = llama.init_cache(TINY, 1, 16, dtype)
    with pytest.raises(error, match=text):
        llama.decode(TINY, params, torch.zeros(batch, 4, dtype=torch.long), cache, position)


def test_paddings_of_another_shape_are_refused() -> None:
    cache = llama.init_cache(TINY, 2, 16)
    with pytest.raises(ValueError, match=r"decode: padding has the shape \(1,\): expected a number for each of 2"):
        llama.decode(TINY, made(), draw(2, 4), cache, 0, padding=draw(1))


def test_a_gain_in_bf16_rounds_nothing_but_itself() -> None:
    x = torch.randn(3, 32)
    gain = torch.ones(32)
    assert torch.equal(layers.norm(TINY, gain.bfloat16(), x), layers.norm(TINY, gain, x))


def test_a_block_alone_makes_the_table_of_the_first_positions() -> None:
    layers = made().layers
    w = {key: leaf[0].double() for key, leaf in layers.items()}
    x = torch.randn(2, 9, TINY.embed, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alone = llama.block(TINY)(x, w)[0]
    with_table = llama.block(TINY)(x, w, llama.rotary(TINY, torch.arange(9), x.dtype))[0]
    torch.testing.assert_close(alone, with_table, atol=1e-12, rtol=1e-12)
    later = llama.rotary(TINY, torch.arange(9).expand(2, 9) + torch.tensor([[0], [5]]), x.dtype)  # positions [B, S]
    shifted = llama.block(TINY)(x, w, later)[0]
    # only differences of positions matter, up to the rounding of angles, which are fp32
    torch.testing.assert_close(shifted, alone, atol=1e-6, rtol=1e-6)
    assert not torch.equal(shifted[1], alone[1])


def test_chunks_that_do_not_divide_the_batch_are_refused() -> None:
    params = made()
    tokens = torch.zeros(4, 8, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"chunk of Decoder\.block\.f: argument 0 has .*\(4, 8, 32\): .* not a multiple of n=3"
    ):
        llama.loss(TINY, chunks=3)(params, {"tokens": tokens, "targets": tokens})
    with pytest.raises(ValueError, match="n=0: expected an integer >= 1"):
        llama.loss(TINY, chunks=0)


def test_a_batch_without_targets_has_weight_zero() -> None:
    params = made()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    mean = llama.loss(TINY)(params, {"tokens": tokens, "targets": torch.full_like(tokens, -100)})
    assert mean.total == 0.0
    assert mean.weight == 0


def test_angles_do_not_collide_in_bf16() -> None:
    table = llama.rotary(TINY, torch.tensor([1000, 1001]), torch.bfloat16)
    expected = torch.tensor([1000.0, 1001.0]).cos().bfloat16()
    assert torch.equal(table.cos[:, 0, 0], expected)
    assert expected[0] != expected[1]


def test_initial_values() -> None:
    config = dataclasses.replace(TINY, embed=128, ffn=256, layers=8, head_dim=32)
    params = made(config)
    residual = 0.02 / math.sqrt(2 * config.layers)
    for key, stack in params.layers.items():
        if "layernorm" in key:
            assert torch.equal(stack, torch.ones_like(stack))
            continue
        expected = residual if key in ("self_attn.o_proj.weight", "mlp.down_proj.weight") else 0.02
        for layer in stack:
            assert layer.std().item() == pytest.approx(expected, rel=0.05), key
    assert torch.equal(params.head["model.norm.weight"], torch.ones(config.embed))
    tokens = draw(4, 32, seed=6, most=config.vocab)
    mean = llama.loss(config)(params, {"tokens": tokens, "targets": tokens})
    assert (mean.total / mean.weight).item() == pytest.approx(math.log(config.vocab), rel=0.05)
