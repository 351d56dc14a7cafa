"""functionalize on 28 architectures of transformers, tiny and random: trained at two ranks beside the module on the
whole batch, and back. docs/modules.md has the table of what each needs, but for those that are Llamas in all but name.
"""

# ruff: noqa: PIE800  several settings a line

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.oracle import compare
from tests.harness.pages import doc
from tests.harness.pool import Pools

PAGE = doc("modules")
PLAIN = ("GPT2", "GPTNeoX", "Qwen3", "Gemma2")
QUICK = (*PLAIN, "T5", "DeepseekV3")

BASE = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DEEP = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
ENCODER = {**BASE, **DEEP, "max_position_embeddings": 64}
DECODER = {**ENCODER, "num_key_value_heads": 2}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 = {**MAMBA, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
IMAGE = {**DEEP, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
BOTH = {
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 48))},
    **BASE,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
}


class Case(NamedTuple):
    """A model: class after the config's name, settings, lists of layers, inputs. stacks: layers of each, in order, or
    what it is refused with; tolerance: those that compute in float32 inside are off by more"""

    head: str
    settings: dict[str, Any]
    layers: str | list[str]
    inputs: str
    stacks: list[int] | str
    tolerance: float = 1e-10
    config: str = "Config"


MODEL = "model.layers"
FLOAT32 = 2e-5
TWO = ["model.encoder.layers", "model.decoder.layers"]
KINDS: list[str] = ["mamba", "attention"] * 2
CASES: dict[str, Case] = {
    "GPT2": Case("LMHeadModel", {**BASE, "n_embd": 32, "n_layer": 3, "n_head": 4}, "transformer.h", "padded", [3]),
    "GPTNeoX": Case("ForCausalLM", ENCODER, "gpt_neox.layers", "padded", [4]),
    "Qwen3": Case("ForCausalLM", {**DECODER, "head_dim": 8}, MODEL, "padded", [4], FLOAT32),
    "Gemma2": Case("ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 3}, MODEL, "padded", [4], FLOAT32),
    "Mixtral": Case("ForCausalLM", {**DECODER, "num_local_experts": 4}, MODEL, "text", [4], FLOAT32),
    "Gemma3": Case(
        "ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 3}, MODEL, "text", [4], FLOAT32, "TextConfig"
    ),
    "GptOss": Case(
        "ForCausalLM", {**DECODER, **EXPERTS, "head_dim": 8, "sliding_window": 4}, MODEL, "text", [4], FLOAT32
    ),
    "Mamba2": Case(
        "ForCausalLM",
        {
            **BASE,
            **{key: DEEP[key] for key in ("hidden_size", "num_hidden_layers")},
            **{"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
        },
        "backbone.layers",
        "text",
        [4],
        FLOAT32,
    ),
    "Wav2Vec2": Case(
        "ForCTC",
        {
            **{**BASE, **DEEP, "num_hidden_layers": 2, "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8},
            **{"conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [4, 4], "num_conv_pos_embedding_groups": 2},
        },
        "wav2vec2.encoder.layers",
        "sound",
        [2],
    ),
    "ViT": Case("ForImageClassification", {**IMAGE, "num_labels": 61}, "vit.layers", "image", [2]),
    "BART": Case("ForConditionalGeneration", {**BOTH, "max_position_embeddings": 64}, TWO, "both", [2, 2]),
    "Whisper": Case(
        "ForConditionalGeneration",
        {
            **{**BOTH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20},
            **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        },
        TWO,
        "mel",
        [2, 2],
    ),
    "CLIP": Case(
        "Model",
        {"text_config": {**ENCODER, "num_hidden_layers": 2}, "vision_config": IMAGE, "projection_dim": 16},
        ["text_model.encoder.layers", "vision_model.encoder.layers"],
        "pair",
        [2, 2],
    ),
    "Swin": Case(
        "ForImageClassification",
        {
            **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]},
            **{"window_size": 2, "num_labels": 61},
        },
        ["swin.encoder.layers.0.blocks", "swin.encoder.layers.1.blocks"],
        "large image",
        [2, 2],
    ),
    "Qwen2VL": Case(
        "ForConditionalGeneration",
        {
            "text_config": {**DECODER, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            "vision_config": {
                **{"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
                **{"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1},
            },
            **{"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
        },
        ["model.visual.blocks", "model.language_model.layers"],
        "patches",
        [2, 4],
        FLOAT32,
    ),
    "Llava": Case(
        "ForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": {"model_type": "clip_vision_model", **IMAGE},
            "image_token_index": 5,
        },
        "model.language_model.layers",
        "picture in text",
        [4],
        FLOAT32,
    ),
    "T5": Case(
        "ForConditionalGeneration",
        {**BASE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
        ["encoder.block", "decoder.block"],
        "both",
        [1, 2, 1, 2],
        FLOAT32,
    ),
    "ModernBert": Case(
        "ForMaskedLM",
        {**ENCODER, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        MODEL,
        "plain text",
        [1, 3],
    ),
    "DeepseekV3": Case(
        "ForCausalLM",
        {
            **{**DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2},
            **{"num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 16},
            **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        },
        MODEL,
        "text",
        [2, 2],
        FLOAT32,
    ),
    "Llama4": Case(
        "ForCausalLM",
        {
            **{**DECODER, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
            **{"interleave_moe_layer_step": 2, "attention_chunk_size": 4, "no_rope_layer_interval": 2},
        },
        MODEL,
        "text",
        [2, 2],
        FLOAT32,
        "TextConfig",
    ),
    "Jamba": Case(
        "ForCausalLM",
        {
            **{**DECODER, **MAMBA, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2},
            **{"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
            **{"use_mamba_kernels": False, "mamba_dt_rank": 4},
        },
        MODEL,
        "text",
        [2, 2],
        FLOAT32,
    ),
    "Bamba": Case("ForCausalLM", {**DECODER, **MAMBA2, "attn_layer_indices": [1, 3]}, MODEL, "text", [2, 2], FLOAT32),
    "GraniteMoeHybrid": Case(
        "ForCausalLM",
        {**DECODER, **MAMBA2, **EXPERTS, "layer_types": KINDS, "shared_intermediate_size": 16},
        MODEL,
        "text",
        [2, 2],
        FLOAT32,
    ),
    "NemotronH": Case(
        "ForCausalLM",
        {
            **{key: value for key, value in DECODER.items() if key != "num_hidden_layers"},
            **{"hybrid_override_pattern": "M*-M", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
            **{"n_groups": 1, "chunk_size": 4, "use_mamba_kernels": False},
        },
        MODEL,
        "text",
        [2, 1, 1],
        FLOAT32,
    ),
    "Qwen3Next": Case(
        "ForCausalLM",
        {
            **{**DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        },
        MODEL,
        "text",
        [3, 1],
        FLOAT32,
    ),
    "Lfm2": Case(
        "ForCausalLM",
        {**DECODER, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
        MODEL,
        "text",
        [2, 2],
        FLOAT32,
    ),
    "Zamba2": Case(
        "ForCausalLM",
        {
            **{**DECODER, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_headdim": 16},
            **{"mamba_ngroups": 1, "mamba_d_state": 8, "chunk_size": 4, "num_mem_blocks": 1},
            "use_mamba_kernels": False,
        },
        MODEL,
        "text",
        r"model.layers.1.shared_transformer.self_attn.q_proj.weight and model.layers.3.* are one parameter",
    ),
    "Gemma3n": Case(
        "ForCausalLM",
        {
            **{**DECODER, "head_dim": 8, "sliding_window": 3, "vocab_size_per_layer_input": 61},
            **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 4},
            **{"activation_sparsity_pattern": None, "layer_types": ["sliding_attention", "full_attention"] * 2},
        },
        MODEL,
        "text",
        r"model.layers.0 is called with a KVSharingDict",
        config="TextConfig",
    ),
}


def module_of(name: str) -> nn.Module:
    """The model in float64, without dropout."""
    import transformers

    case = CASES[name]
    torch.manual_seed(0)
    kind = "Bart" if name == "BART" else name
    config = getattr(transformers, f"{kind}{case.config}")(**case.settings)
    config._experts_implementation = "eager"  # grouped products have no float64
    module: nn.Module = getattr(transformers, f"{kind}{case.head}")(config)
    return module.eval().double()


def inputs_of(kind: str, rows: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors that are cut by rows, and further arguments."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, 61, (rows, 8), generator=draw)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    if kind in ("patches", "picture in text"):
        tokens[:, 1:5] = 5
    mask = torch.ones_like(tokens)
    mask[::2, -2:] = 0
    found: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
        "text": ({"input_ids": tokens}, {"use_cache": False}),
        "padded": ({"input_ids": tokens, "attention_mask": mask}, {"use_cache": False}),
        "plain text": ({"input_ids": tokens}, {}),
        "both": ({"input_ids": tokens, "decoder_input_ids": tokens.roll(1, 1)}, {"use_cache": False}),
        "mel": ({"input_features": real(rows, 8, 20), "decoder_input_ids": tokens}, {"use_cache": False}),
        "sound": ({"input_values": real(rows, 400)}, {}),
        "image": ({"pixel_values": real(rows, 3, 8, 8)}, {}),
        "large image": ({"pixel_values": real(rows, 3, 16, 16)}, {}),
        "pair": ({"input_ids": tokens, "pixel_values": real(rows, 3, 8, 8)}, {}),
        "picture in text": ({"input_ids": tokens, "pixel_values": real(rows, 3, 8, 8)}, {"use_cache": False}),
        "patches": (
            {
                "input_ids": tokens,
                "pixel_values": real(16 * rows, 12),
                "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
                "mm_token_type_ids": (tokens == 5).int(),
            },
            {"use_cache": False},
        ),
    }
    return found[kind]


def scores(out: Any) -> Tensor:
    return out.logits if "logits" in out else torch.cat([out.text_embeds, out.image_embeds])


def squares(out: Any) -> ya.Mean:
    """A loss that is a mean over rows."""
    found = scores(out)
    return ya.Mean(found.double().square().sum() + found.double().sin().sum(), found.numel())


def by_name(module: nn.Module, params: Any, model: Any) -> dict[str, Tensor]:
    """Loads `params` into a copy of the module; returns its parameters by name."""
    made = copy.deepcopy(module)
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(torch.nan)
    ya.load_into(made, params, model=model)
    return {name: param.detach() for name, param in made.named_parameters()}


def close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: str) -> None:
    """Every parameter, relative to its own largest value; a key's bias has only noise, a softmax does not see it."""
    noise = 1e-12 * max(float(x.abs().max()) for x in expected.values()) * (tolerance / 1e-10)
    off = {name: float((got[name] - expected[name]).abs().max()) for name in expected}
    wrong = {n: e for n, e in off.items() if not e <= tolerance * float(expected[n].abs().max()) + noise}
    assert got.keys() == expected.keys() and not wrong, f"{what}: {wrong}"


def as_the_module(mesh: Any, name: str) -> None:
    case = CASES[name]
    module = module_of(name)
    world = mesh.size()
    whole, others = inputs_of(case.inputs, 2 * world)
    own = {key: leaf.chunk(world)[mesh.get_rank()] for key, leaf in whole.items()}
    params, model = ya.functionalize(module, case.layers)
    lengths = [unit.tree for unit in params.values() if isinstance(unit, ya.Stacked)]
    assert [optree.tree_leaves(tree)[0].shape[0] for tree in lengths] == case.stacks
    reference = copy.deepcopy(module)
    bits = 0.0 if name in PLAIN else case.tolerance
    plain = model(ya.materialize(params), **whole, **others)
    compare(scores(plain), scores(reference(**whole, **others)), bits, "outputs of the plain tree")
    sgd = ya.optim.sgd(0.1)
    theirs = torch.optim.SGD(reference.parameters(), 0.1)

    def loss(params: Any, batch: dict[str, Tensor]) -> ya.Mean:
        return squares(model(params, **batch, **others))

    def differentiated() -> Tensor:
        total, weight = squares(reference(**whole, **others))
        reference.zero_grad()
        (total / weight).backward()
        return (total / weight).detach()

    state = ya.shard(params, sgd, mesh=mesh, precision=ya.Precision(torch.float64))
    gradients = ya.value_and_grad(loss, schedule=ya.schedules.zero3(remat="all"))
    expected = differentiated()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in reference.named_parameters()}
    assert sum(bool(grad.any()) for grad in wanted.values()) > len(wanted) / 2
    for how in ("in the first call", "in the second"):
        value, grads = gradients(state.params, own)
        compare(value.double(), expected, 1e-6, f"value {how}")
        close(by_name(module, grads, model), wanted, case.tolerance, f"gradients {how}")
    step = ya.train_step(loss, sgd, schedule=ya.schedules.zero3(update=True))
    for _ in range(2):
        differentiated()
        theirs.step()
        state, _ = step(state, own)
    ya.load_into(module, state.params, model=model)
    trained = {n: p.detach() for n, p in reference.named_parameters()}
    close({n: p.detach() for n, p in module.named_parameters()}, trained, case.tolerance, "two steps of SGD")
    compare(scores(model(state.params, **own, **others)), scores(module(**own, **others)), bits, "outputs of the state")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else nightly(name) for name, case in CASES.items() if not isinstance(case.stacks, str)],
)
def test_an_architecture_trains_as_the_module_and_goes_back(pools: Pools, name: str) -> None:
    pytest.importorskip("transformers", reason="trains models of transformers")
    pools[2].run(as_the_module, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if isinstance(case.stacks, str)])
def test_an_architecture_is_refused_by_name(name: str) -> None:
    pytest.importorskip("transformers", reason="builds models of transformers")
    case, (batch, others) = CASES[name], inputs_of(CASES[name].inputs, 2)
    assert isinstance(case.stacks, str)
    with pytest.raises((TypeError, ValueError), match=case.stacks):
        params, model = ya.functionalize(module_of(name), case.layers)
        ya.value_and_grad(lambda params: squares(model(params, **batch, **others)))(ya.materialize(params))


def test_the_page_has_them() -> None:
    table = re.findall(r"^\| (\w+) \| (?:`|refused)", PAGE, re.M)
    assert len(table) == 24
    assert sorted([*table, *PLAIN]) == sorted(CASES)
