"""Hugging Face configs: the shapes of released models, defaults of absent keys, and what is refused.

The parameter counts are those of the released weights. The defaults were read from transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import from_hf_config, model
from autotune.cost.parameters import total_parameters
from autotune.errors import InputError, UnsupportedModelError
from autotune.specs import ModelSpec, Norm, Position

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 100}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FULL_ATTENTION = {"mistral": {"sliding_window": None}}


def golden(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return data


def small(family: str, /, **changes: object) -> ModelSpec:
    """A small config of the family, with changes; a change to ... removes the key."""
    data = {"model_type": family, **SIZES, **FULL_ATTENTION.get(family, {}), **changes}
    return from_hf_config({key: value for key, value in data.items() if value is not ...}, "small")


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        ("llama-7b", "llama1-7b"),
        ("llama-3.1-8b", "llama3.1-8b"),
        ("mistral-7b-v0.2", "mistral-7b"),
        ("mixtral-8x7b", "mixtral-8x7b"),
        ("qwen2.5-0.5b", "qwen2.5-0.5b"),
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("gpt2", "gpt2"),
        ("deepseek-v2-lite", "deepseek-v2-lite"),
    ],
)
def test_a_released_config_is_the_preset(file: str, preset: str) -> None:
    assert from_hf_config(golden(file), "x").key == model(preset).key


def test_deepseek_v3_is_the_preset_though_it_is_published_in_fp8() -> None:
    found = from_hf_config(golden("deepseek-v3"), "x")
    assert (found.key, found.expert_nodes) == (model("deepseek-v3").key, 4)
    assert found.source.endswith("published in fp8, trained in the workload's dtype")


def test_routing_is_limited_to_nodes_only_where_fewer_groups_than_there_are_take_a_token() -> None:
    groups = {"n_group": 8, "topk_group": 3}
    assert small("deepseek_v2", **EXPERTS, **groups, topk_method="group_limited_greedy").expert_nodes == 3
    assert small("deepseek_v2", **EXPERTS, **groups, topk_method="greedy").expert_nodes == 0
    assert small("deepseek_v2", **EXPERTS, n_group=1, topk_group=1).expert_nodes == 0


@pytest.mark.parametrize(
    ("file", "parameters"),
    [
        ("pythia-1b", 1_011_781_632),
        ("deepseek-moe-16b", 16_375_728_128),
        # The released 14,315,784,192 less the gate of the shared expert, a vector of 2,048 in each of 24 layers.
        ("qwen1.5-moe-a2.7b", 14_315_784_192 - 24 * 2048),
    ],
)
def test_a_released_config_without_a_preset_has_the_released_parameters(file: str, parameters: int) -> None:
    assert total_parameters(from_hf_config(golden(file), "x")) == parameters


def test_the_name_and_the_family_are_kept() -> None:
    found = from_hf_config(golden("gpt2"), "my-gpt")
    assert (found.name, found.source) == ("my-gpt", "Hugging Face config, gpt2")


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim", "tied"),
    [("llama", 8, 8, False), ("mistral", 8, 8, False), ("mixtral", 8, 8, False), ("gpt_neox", 8, 8, False)],
)
def test_defaults_of_dense_families(model_type: str, kv_heads: int, head_dim: int, tied: bool) -> None:
    found = small(model_type)
    assert (found.kv_heads, found.head_dim, found.tied) == (kv_heads, head_dim, tied)


def test_llama_defaults_to_as_many_kv_heads_as_heads_but_mistral_to_eight() -> None:
    assert small("llama", num_attention_heads=16).kv_heads == 16
    assert small("mistral", num_attention_heads=16).kv_heads == 8
    assert small("mixtral", num_attention_heads=16).kv_heads == 8
    assert small("mistral", num_attention_heads=16, num_key_value_heads=None).kv_heads == 16


def test_qwen_defaults() -> None:
    wide = {"num_attention_heads": 32, "hidden_size": 128}
    assert (small("qwen2", **wide).kv_heads, small("qwen2", **wide).head_dim) == (32, 4)
    assert (small("qwen3", **wide).kv_heads, small("qwen3", **wide).head_dim) == (32, 128)
    assert small("qwen3", **wide, head_dim=None).head_dim == 4
    assert (small("qwen2", **wide).qkv_bias, small("qwen2", **wide).qk_norm) == (True, False)
    assert (small("qwen3", **wide).qkv_bias, small("qwen3", **wide).qk_norm) == (False, True)
    sparse = small("qwen2_moe", num_attention_heads=16)
    assert (sparse.kv_heads, sparse.experts, sparse.top_k, sparse.expert_ffn, sparse.shared_experts) == (
        16, 60, 4, 1408, 4,
    )  # fmt: skip
    assert (sparse.qkv_bias, small("qwen2_moe", num_attention_heads=16, qkv_bias=False).qkv_bias) == (True, False)
    sparse = small("qwen3_moe")
    assert (sparse.kv_heads, sparse.experts, sparse.top_k, sparse.expert_ffn) == (4, 128, 8, 768)
    assert small("qwen3_moe", num_local_experts=16).experts == 16  # the spelling of transformers 5
    assert small("qwen3_moe", num_experts=16).experts == 16


def test_gpt2_defaults() -> None:
    found = from_hf_config(GPT2, "x")
    assert (found.ffn, found.tied, found.max_positions, found.gated) == (256, True, 1024, False)
    assert (found.norm, found.position) == (Norm.LAYERNORM, Position.LEARNED)
    assert (found.linear_bias, found.qkv_bias) == (True, True)
    assert from_hf_config(GPT2 | {"n_inner": None}, "x").ffn == 256
    assert from_hf_config(GPT2 | {"n_inner": 100}, "x").ffn == 100
    assert from_hf_config(GPT2 | {"tie_word_embeddings": False}, "x").tied is False


def test_gpt_neox_has_biases_a_layer_norm_and_no_gate() -> None:
    found = small("gpt_neox", use_parallel_residual=True)
    assert (found.gated, found.norm, found.position) == (False, Norm.LAYERNORM, Position.ROPE)
    assert (found.linear_bias, found.qkv_bias, found.tied) == (True, True, False)


def test_deepseek_defaults() -> None:
    second, third = small("deepseek_v2", **EXPERTS), small("deepseek_v3", **EXPERTS, num_hidden_layers=4)
    assert (second.shared_experts, second.dense_layers) == (2, 0)
    assert (third.shared_experts, third.dense_layers) == (1, 3)
    assert second.latent_attention is not None
    assert (second.latent_attention.q_lora_rank, second.latent_attention.kv_lora_rank) == (1536, 512)
    direct = small("deepseek_v2", **EXPERTS, q_lora_rank=None).latent_attention
    assert direct is not None
    assert direct.q_lora_rank == 0
    assert small("deepseek_v2", **EXPERTS, n_shared_experts=None).shared_experts == 0


def test_llama_with_biases_everywhere_is_understood() -> None:
    found = small("llama", attention_bias=True, mlp_bias=True)
    assert (found.linear_bias, found.qkv_bias) == (True, True)


@pytest.mark.parametrize(
    "harmless",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"layer_types": ["full_attention", "full_attention"]},
        {"torch_dtype": "bfloat16"},
        {"auto_map": {"AutoConfig": "x.Y"}},
        {"some_new_switch": False},
        {"some_new_size": 0},
        {"mlp_only_layers": []},
        {"is_llama_config": True, "rope_interleaved": True},
        {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1},
        {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1},
        {"max_sequence_length": 2048},
        {"unsloth_fixed": True, "unsloth_version": "2025.3.19"},
        {"use_flashattn": True},
        {"attn_logit_softcapping": 50.0},
        {"boi_token_id": 3, "image_token_index": 4},
        {"quantization_config": {"quant_method": "fp8"}},
        {"some_new_size": None},
    ],
)
def test_keys_that_change_no_shape_are_accepted(harmless: dict[str, object]) -> None:
    assert small("llama", **harmless).key == small("llama").key


def test_a_key_that_is_not_known_and_names_no_shape_is_told() -> None:
    assert small("llama", trained_by="us", fast=True).source == (
        "Hugging Face config, llama; not known and taken as harmless: trained_by, fast"
    )


# Parameters of the released weights, in billions as their model cards give them.
@pytest.mark.parametrize(
    ("changes", "billions"),
    [
        (
            {
                "hidden_size": 576,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "vocab_size": 49152,
                "intermediate_size": 1536,
                "tie_word_embeddings": True,
                "is_llama_config": True,
            },
            0.135,
        ),  # SmolLM2-135M
        (
            {
                "model_type": "gpt_neox",
                "hidden_size": 6144,
                "num_hidden_layers": 44,
                "num_attention_heads": 64,
                "vocab_size": 50432,
                "intermediate_size": 24576,
                "attention_probs_dropout_prob": 0,
            },
            20.555,
        ),  # GPT-NeoX-20B
        (
            {
                "model_type": "qwen3_moe",
                "hidden_size": 6144,
                "num_hidden_layers": 62,
                "num_attention_heads": 96,
                "head_dim": 128,
                "num_key_value_heads": 8,
                "intermediate_size": 8192,
                "num_experts": 160,
                "num_experts_per_tok": 8,
                "vocab_size": 151936,
                "moe_intermediate_size": 2560,
                "shared_expert_intermediate_size": 0,
                "use_qk_norm": True,
            },
            480.155,
        ),  # Qwen3-Coder
        (
            {
                "model_type": "kimi_k2",
                "architectures": ["DeepseekV3ForCausalLM"],
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "num_attention_heads": 64,
                "intermediate_size": 18432,
                "vocab_size": 163840,
                "first_k_dense_replace": 1,
                "n_routed_experts": 384,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
                "n_group": 1,
                "topk_group": 1,
                "quantization_config": {"quant_method": "fp8"},
            },
            1026.408,
        ),  # Kimi-K2
    ],
)
def test_a_released_config_with_harmless_keys_has_the_released_parameters(
    changes: dict[str, Any], billions: float
) -> None:
    assert round(total_parameters(small("llama", **changes)) / 1e9, 3) == billions


@pytest.mark.parametrize("window", [131072, 200_000])
def test_a_window_as_long_as_the_longest_sequence_is_full_attention(window: int) -> None:
    assert small("mistral", sliding_window=window, max_position_embeddings=131072).layers == 2


def test_a_window_that_is_switched_off_is_accepted() -> None:
    assert small("qwen2", num_key_value_heads=8, use_sliding_window=False, sliding_window=16, max_window_layers=1)


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        ("bloom", {}, "model_type"),
        ("gemma4_text", {}, "model_type"),
        ("llama", {"model_type": 3}, "model_type"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
        ("llama", {"architectures": []}, "architectures"),
        ("llama", {"model_type": ..., "architectures": ["OPTForCausalLM"]}, "architectures"),
        ("llama", {"hidden_act": "swiglu_oai"}, "hidden_act"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "attention_bias"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"layer_types": "full_attention"}, "layer_types"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("llama", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("llama", {"num_experts_per_token": 2}, "num_experts_per_token"),
        ("llama", {"layers_block_type": ["mamba"]}, "layers_block_type"),
        ("llama", {"adapter_config": {"depth": 2}}, "adapter_config"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("llama", {"sliding_window": 4096}, "sliding_window"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 1000}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias"),
        ("deepseek_v2", {**EXPERTS, "moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {**EXPERTS, "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(model_type: str, changes: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        small(model_type, **changes)
    assert error.value.what == f"config.json: {key}"


@pytest.mark.parametrize("changes", [{"add_cross_attention": True}, {"activation_function": "tanhshrink"}])
def test_what_gpt2_may_not_be_is_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        from_hf_config(GPT2 | changes, "x")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [..., -1, 0, 1.5, "64", True, [64], {"a": 1}])
def test_a_missing_or_impossible_size_is_one_clear_error(key: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        small("llama", **{key: value})
    assert error.value.what == f"config.json: {key}"
    assert not isinstance(error.value, UnsupportedModelError)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_key_value_heads": 3}, "must be a multiple of kv_heads"),
        ({"num_key_value_heads": -8}, "num_key_value_heads"),
        ({"hidden_size": 63}, "multiple of the 8 heads"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"attention_bias": 1}, "true or false"),
        ({"head_dim": 0}, "head_dim"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
    ],
)
def test_an_inconsistent_config_is_one_clear_error(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        small("llama", **changes)


def test_impossible_mixtures_are_one_clear_error() -> None:
    with pytest.raises(InputError, match="1 <= top_k <= experts"):
        small("mixtral", num_experts_per_tok=9)
    with pytest.raises(InputError, match="n_routed_experts"):
        small("deepseek_v2")
    with pytest.raises(InputError, match="dense_layers"):
        small("deepseek_v3", **EXPERTS)
