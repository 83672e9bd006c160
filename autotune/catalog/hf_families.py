"""How each family of Hugging Face models spells its shape.

Defaults are those that transformers (5.x, `configuration_<family>.py`) applies where a key is absent. The five
sizes that every published config states (layers, hidden, heads, MLP width, vocabulary) are required instead: a
config without them is a broken one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.catalog.hf_fields import Fields
from autotune.errors import InputError, UnsupportedModelError

Shape = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A `model_type`: the class that trains it, and the reading of its keys."""

    architecture: str
    read: Callable[[Fields], Shape]


def _decoder(config: Fields, *, kv_heads: int | None = None, head_dim: int | None = None) -> Shape:
    """What most families share: gated MLP, RMSNorm, rotary positions, untied unless told.

    `kv_heads` and `head_dim` are the family's defaults; None means `heads` and `hidden / heads`. An explicit null
    in the config means the latter too, whatever the family.
    """
    config.activation("hidden_act", "silu")
    _full_attention(config)
    config.count("max_position_embeddings", 1)  # checked; rotary positions have no parameters
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.has("num_key_value_heads") or kv_heads is None:
        kv_heads = heads
    if config.has("head_dim") or head_dim is None:
        head_dim = _even_head_dim(config, hidden, heads)
    return {
        "layers": config.count("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", kv_heads),
        "head_dim": config.count("head_dim", head_dim),
        "ffn": config.count("intermediate_size"),
        "gated": True,
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", False),
        "norm": "rmsnorm",
        "position": "rope",
    }


def _even_head_dim(config: Fields, hidden: int, heads: int) -> int:
    if hidden % heads and config.value("head_dim") is None:
        raise InputError(f"{config.what}: hidden_size", hidden, f"it must be a multiple of the {heads} heads")
    return hidden // heads


def _full_attention(config: Fields) -> None:
    """Refuses layers of other kinds than full attention (sliding, chunked, linear)."""
    kinds = config.value("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise UnsupportedModelError(f"{config.what}: layer_types", kinds, "only full_attention layers are understood")


def _window(config: Fields, default: int | None) -> None:
    """Refuses a sliding window shorter than the longest sequence: attention would cost less than we count."""
    if not config.has("sliding_window") and default is None:
        return
    if config.has("sliding_window") and config.value("sliding_window") is None:
        return
    window = config.count("sliding_window", default)
    longest = config.count("max_position_embeddings", 131072)
    if window < longest:
        why = "windowed attention is not understood; set sliding_window to null if your sequences are no longer than it"
        absent = "" if config.has("sliding_window") else f" (transformers' default for an absent key is {default})"
        raise UnsupportedModelError(f"{config.what}: sliding_window", window, why + absent)


def _no_window(config: Fields) -> None:
    """Qwen configs name a window that `use_sliding_window` turns on; off is the default."""
    config.only("use_sliding_window", (False,), "windowed attention is not understood")
    config.ignore("sliding_window", "max_window_layers")


def _no_bias(config: Fields, *keys: str) -> None:
    for key in keys:
        config.only(key, (False,), "biases on only some of the linear layers are not understood")


def _llama(config: Fields) -> Shape:
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention != mlp:
        raise UnsupportedModelError(
            f"{config.what}: attention_bias", attention, f"it must equal mlp_bias ({mlp}): all layers biased, or none"
        )
    return {**_decoder(config), "linear_bias": attention, "qkv_bias": attention}


def _mistral(config: Fields) -> Shape:
    _window(config, 4096)
    return _decoder(config, kv_heads=8)


def _mixtral(config: Fields) -> Shape:
    _window(config, None)
    shape = _decoder(config, kv_heads=8)
    experts, top_k = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    return {**shape, "experts": experts, "top_k": top_k, "expert_ffn": shape["ffn"]}


def _qwen2(config: Fields) -> Shape:
    _no_window(config)
    return {**_decoder(config, kv_heads=32), "qkv_bias": True}


def _qwen3(config: Fields) -> Shape:
    _no_window(config)
    _no_bias(config, "attention_bias", "qkv_bias")
    config.only("use_qk_norm", (True,), "this family has norms of queries and keys")
    return {**_decoder(config, kv_heads=32, head_dim=128), "qk_norm": True}


def _every_layer_sparse(config: Fields) -> None:
    config.only("decoder_sparse_step", (1,), "mixtures on only some layers are not understood")
    config.only("mlp_only_layers", ([],), "dense layers between mixtures are not understood")


def _qwen2_moe(config: Fields) -> Shape:
    _no_window(config)
    _every_layer_sparse(config)
    width, shared = config.count("moe_intermediate_size", 1408), config.count("shared_expert_intermediate_size", 5632)
    if shared % width:
        raise UnsupportedModelError(
            f"{config.what}: shared_expert_intermediate_size", shared, f"a multiple of moe_intermediate_size ({width})"
        )
    return {
        **_decoder(config, kv_heads=16),
        "qkv_bias": config.flag("qkv_bias", True),
        "experts": config.count("num_experts", 60),
        "top_k": config.count("num_experts_per_tok", 4),
        "expert_ffn": width,
        "shared_experts": shared // width,
    }


def _qwen3_moe(config: Fields) -> Shape:
    _no_window(config)
    _every_layer_sparse(config)
    _no_bias(config, "attention_bias", "qkv_bias")
    config.only("use_qk_norm", (True,), "this family has norms of queries and keys")
    config.only("shared_expert_intermediate_size", (0,), "this family has no shared expert")
    experts = config.count("num_local_experts", 128)  # the 5.x spelling of num_experts
    return {
        **_decoder(config, kv_heads=4),
        "qk_norm": True,
        "experts": config.count("num_experts", experts),
        "top_k": config.count("num_experts_per_tok", 8),
        "expert_ffn": config.count("moe_intermediate_size", 768),
    }


def _deepseek_moe(config: Fields, *, shared: int, dense: int) -> Shape:
    config.only("moe_layer_freq", (1,), "mixtures on only some layers are not understood")
    return {
        **_routing(config),
        "experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn": config.count("moe_intermediate_size"),
        "shared_experts": 0 if _is_null(config, "n_shared_experts") else config.count("n_shared_experts", shared),
        "dense_layers": config.count("first_k_dense_replace", dense, minimum=0),
    }


def _routing(config: Fields) -> Shape:
    """Node-limited routing: of `n_group` groups of experts, each on a node, `topk_group` take a token."""
    groups, chosen = config.count("n_group", 1, minimum=0), config.count("topk_group", 1, minimum=0)
    limited = config.value("topk_method") != "greedy" and 0 < chosen < groups
    return {"expert_nodes": chosen} if limited else {}


def _deepseek(config: Fields) -> Shape:
    """DeepSeekMoE 16B: ordinary attention. Not in transformers; defaults of the model's own code."""
    _no_bias(config, "attention_bias")
    return {**_decoder(config), **_deepseek_moe(config, shared=0, dense=0)}


def _deepseek_latent(config: Fields, *, shared: int, dense: int) -> Shape:
    _no_bias(config, "attention_bias", "mlp_bias")
    config.ignore("head_dim", "qk_head_dim")  # follow from the dims below
    nope, rope = config.count("qk_nope_head_dim", 128), config.count("qk_rope_head_dim", 64)
    shape = {**_decoder(config), **_deepseek_moe(config, shared=shared, dense=dense)}
    latent = {
        "q_lora_rank": 0 if _is_null(config, "q_lora_rank") else config.count("q_lora_rank", 1536),
        "kv_lora_rank": config.count("kv_lora_rank", 512),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": config.count("v_head_dim", 128),
    }
    return {**shape, "kv_heads": shape["heads"], "head_dim": nope + rope, "latent_attention": latent}


def _deepseek_v2(config: Fields) -> Shape:
    return _deepseek_latent(config, shared=2, dense=0)


def _deepseek_v3(config: Fields) -> Shape:
    # The multi-token prediction module is left out, as transformers leaves it out.
    config.ignore("num_nextn_predict_layers")
    return _deepseek_latent(config, shared=1, dense=3)


def _gpt2(config: Fields) -> Shape:
    config.activation("activation_function", "gelu_new")
    config.ignore("scale_attn_by_inverse_layer_idx")  # a factor on the scores
    hidden, heads = config.count("n_embd"), config.count("n_head")
    return {
        "layers": config.count("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _even_head_dim(config, hidden, heads),
        "ffn": config.count("n_inner", 4 * hidden),
        "gated": False,
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", True),
        "norm": "layernorm",
        "position": "learned",
        "max_positions": config.count("n_positions", 1024),
        "linear_bias": True,
        "qkv_bias": True,
    }


def _gpt_neox(config: Fields) -> Shape:
    if not config.flag("attention_bias", True):
        raise UnsupportedModelError(f"{config.what}: attention_bias", False, "the MLP has biases: so must attention")
    config.activation("hidden_act", "gelu")
    config.ignore("use_parallel_residual")  # both forms have the same matrices
    shape = _decoder(config)
    return {**shape, "gated": False, "norm": "layernorm", "linear_bias": True, "qkv_bias": True}


def _is_null(config: Fields, key: str) -> bool:
    return config.has(key) and config.value(key) is None


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", read=_llama),
    "mistral": Family(architecture="MistralForCausalLM", read=_mistral),
    "mixtral": Family(architecture="MixtralForCausalLM", read=_mixtral),
    "qwen2": Family(architecture="Qwen2ForCausalLM", read=_qwen2),
    "qwen2_moe": Family(architecture="Qwen2MoeForCausalLM", read=_qwen2_moe),
    "qwen3": Family(architecture="Qwen3ForCausalLM", read=_qwen3),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", read=_qwen3_moe),
    "gpt2": Family(architecture="GPT2LMHeadModel", read=_gpt2),
    "gpt_neox": Family(architecture="GPTNeoXForCausalLM", read=_gpt_neox),
    "deepseek": Family(architecture="DeepseekForCausalLM", read=_deepseek),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", read=_deepseek_v2),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", read=_deepseek_v3),
    "kimi_k2": Family(architecture="DeepseekV3ForCausalLM", read=_deepseek_v3),
}
