"""A model's shape as a Hugging Face config.json, for the frameworks that train models of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.catalog import from_hf_config, models
from autotune.errors import InputError
from autotune.frameworks.commands import Command
from autotune.frameworks.documents import json_object
from autotune.frameworks.reading import Given, Launch
from autotune.specs import ModelSpec, Norm, Position

LAYERS = {
    "llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer", "gpt2": "GPT2Block",
    "mixtral": "MixtralDecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer",
}  # fmt: skip
"""The class of a layer, by `model_type`."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip


def model_type(model: ModelSpec) -> str | None:
    """The family of transformers that has models of this shape; None for the others."""
    if not model.uniform or model.latent_attention or model.shared_experts or model.dense_layers:
        return None
    if model.position is Position.LEARNED:
        gpt = model.norm is Norm.LAYERNORM and not model.gated and model.linear_bias and model.qkv_bias and model.tied
        own = model.kv_heads == model.heads and model.head_dim * model.heads == model.hidden and not model.qk_norm
        return "gpt2" if gpt and own and not model.experts else None
    if model.norm is not Norm.RMSNORM or not model.gated or model.position is not Position.ROPE:
        return None
    family = {
        # linear_bias, qkv_bias, qk_norm, experts
        (False, False, False, False): "llama",
        (True, True, False, False): "llama",
        (False, True, False, False): "qwen2",
        (False, False, True, False): "qwen3",
        (False, False, False, True): "mixtral",
        (False, False, True, True): "qwen3_moe",
    }.get((model.linear_bias, model.qkv_bias, model.qk_norm, model.experts > 0))
    return None if family == "mixtral" and model.expert_ffn != model.ffn else family


def hf_config(model: ModelSpec, seq_len: int) -> dict[str, Any]:
    """The object of config.json. `model_type` must not be None for the model."""
    family = model_type(model)
    if family is None:
        raise ValueError(f"{model.name} is of no family that is written")
    head: dict[str, Any] = {"architectures": [_ARCHITECTURES[family]], "model_type": family}
    if family == "gpt2":
        return head | {
            "vocab_size": model.vocab, "n_positions": model.max_positions, "n_embd": model.hidden,
            "n_layer": model.layers, "n_head": model.heads, "n_inner": model.ffn, "tie_word_embeddings": True,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    config = head | {
        "vocab_size": model.vocab, "hidden_size": model.hidden, "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim, "hidden_act": "silu", "max_position_embeddings": seq_len,
        "tie_word_embeddings": model.tied,
    }  # fmt: skip
    if family == "llama":
        config |= {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias}
    elif family == "mixtral":
        config |= {"num_local_experts": model.experts, "num_experts_per_tok": model.top_k}
    elif family == "qwen3_moe":
        config |= {
            "num_experts": model.experts, "num_experts_per_tok": model.top_k,
            "moe_intermediate_size": model.expert_ffn, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return config


def with_hf_model(launch: Launch, given: Given, command: Command) -> Given:
    """With the model of the config.json that lies beside a command, where nobody says another one."""
    if given.model is not None or not command.argv or launch.beside is None:
        return given
    try:
        text = launch.other("config.json")
    except InputError:
        return given
    found = from_hf_config(json_object("config.json", text), "config.json", "config.json")
    known = next((each for each in models() if each.key == found.key), None)
    return replace(given, model=known or found)
