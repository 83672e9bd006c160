"""Hugging Face families whose layers are not all alike: windows, linear attention, chosen tokens, single blocks."""

from __future__ import annotations

from autotune.catalog.hf_fields import Fields
from autotune.catalog.hf_shapes import (
    Shape,
    decoder,
    latent_mixture,
    layer_kinds,
    no_bias,
    routing,
    shared_count,
    sparse_layers,
    window_of_all,
    window_of_some,
    windows,
)
from autotune.errors import InputError, UnsupportedModelError


def _gated_delta(config: Fields, layers: int) -> Shape:
    """Qwen3-Next's layers: three of four by the gated delta rule, the fourth attention with an output gate."""
    kinds = layer_kinds(config, layers, "full_attention", "linear_attention")
    every = config.count("full_attention_interval", 4)
    linear = layers - layers // every if kinds is None else kinds.count("linear_attention")
    mixer = {
        "recurrence": "gated_delta",
        "heads": config.count("linear_num_value_heads", 32),
        "head_dim": config.count("linear_value_head_dim", 128),
        "key_heads": config.count("linear_num_key_heads", 16),
        "key_dim": config.count("linear_key_head_dim", 128),
        "conv_kernel": config.count("linear_conv_kernel_dim", 4),
    }
    return {"attention_gate": True, "qk_norm": True, "mixers": [{"layers": linear, "linear": mixer}] if linear else []}


def _qwen3_next_moe(config: Fields, *, experts: int, top_k: int, width: int = 512) -> Shape:
    no_bias(config, "attention_bias")
    config.ignore("intermediate_size", "attn_output_gate", "output_gate_type")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # left out, as transformers leaves it out
    width = config.count("moe_intermediate_size", width)
    shape = decoder(config, kv_heads=2, head_dim=256, types=False, ffn=width)
    return {
        **shape,
        **_gated_delta(config, shape["layers"]),
        **sparse_layers(config),
        "experts": config.count("num_experts", experts),
        "top_k": config.count("num_experts_per_tok", top_k),
        "expert_ffn": width,
        "shared_experts": shared_count(config, width, 512),
    }


def qwen3_next(config: Fields) -> Shape:
    """Qwen3-Next."""
    return _qwen3_next_moe(config, experts=512, top_k=10)


def qwen35_moe(config: Fields) -> Shape:
    """Qwen3.5's mixtures."""
    return _qwen3_next_moe(config, experts=256, top_k=8)


def qwen35(config: Fields) -> Shape:
    """Qwen3.5, dense."""
    no_bias(config, "attention_bias")
    config.ignore("attn_output_gate", "output_gate_type", "mlp_only_layers")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    shape = decoder(config, kv_heads=4, head_dim=256, types=False)
    return {**shape, **_gated_delta(config, shape["layers"])}


def gpt_oss(config: Fields) -> Shape:
    """gpt-oss: half of the layers have a window. The sinks of attention and biases of the router are left out."""
    config.ignore("experts_per_token")  # what num_experts_per_tok says
    bias = config.flag("attention_bias", True)
    if not bias:
        raise UnsupportedModelError(f"{config.what}: attention_bias", False, "experts have biases: so must attention")
    shape = decoder(config, kv_heads=8, head_dim=64, types=False)
    experts = config.count("num_local_experts", 128)
    return {
        **shape,
        **window_of_some(config, full_each=2, default=128),
        "linear_bias": True,
        "qkv_bias": True,
        "experts": experts,
        "top_k": config.count("num_experts_per_tok", 4),
        "expert_ffn": shape["ffn"],
    }


def gemma(config: Fields, kv_heads: int = 16) -> Shape:
    """Gemma: a gated GELU, heads wider than hidden / heads, tied."""
    no_bias(config, "attention_bias")
    config.activation("hidden_activation", "gelu_pytorch_tanh")
    config.ignore("query_pre_attn_scalar", "use_bidirectional_attention")
    return decoder(config, kv_heads=kv_heads, head_dim=256, tied=True, types=False)


def gemma2(config: Fields) -> Shape:
    """Gemma 2: every other layer has a window, a norm after each block too."""
    return {**gemma(config, 4), **window_of_some(config, full_each=2, default=4096), "post_norms": True}


def gemma3(config: Fields) -> Shape:
    """Gemma 3: five of six layers have a window, norms of queries and keys."""
    window = window_of_some(config, full_each=6, default=4096)
    config.ignore("_sliding_window_pattern", "rope_local_base_freq", "mm_tokens_per_image")
    return {**gemma(config, 4), **window, "post_norms": True, "qk_norm": True}


def llama4(config: Fields) -> Shape:
    """Llama 4's language model: dense and mixed layers take turns, three of four layers attend within chunks."""
    no_bias(config, "attention_bias")
    config.ignore(
        "use_qk_norm", "no_rope_layer_interval", "attn_temperature_tuning", "attn_scale", "for_llm_compressor"
    )
    width = config.count("intermediate_size")
    shape = decoder(config, kv_heads=8, head_dim=128, types=False)
    layers, chunk = shape["layers"], config.value("attention_chunk_size")
    kinds = layer_kinds(config, layers, "full_attention", "chunked_attention")
    rotary = config.value("no_rope_layers") or []  # 1 where positions are rotary, which are the chunked layers
    chunked = layers - layers // 4
    if kinds is not None:
        chunked = kinds.count("chunked_attention")
    elif isinstance(rotary, list) and rotary:
        chunked = sum(1 for flag in rotary if flag)
    every = config.has("attention_chunk_size") and chunk is None
    window = {} if every else windows(chunked, config.count("attention_chunk_size", 8192), chunked=True)
    step, moe = config.count("interleave_moe_layer_step", 1), config.value("moe_layers")
    if moe is not None and moe != list(range(step - 1, layers, step)):
        raise UnsupportedModelError(f"{config.what}: moe_layers", moe, "mixtures must be each so-manieth layer")
    return {
        **shape,
        **window,
        "ffn": config.count("intermediate_size_mlp", 16384),
        "moe_every": step,
        "experts": config.count("num_local_experts", 16),
        "top_k": config.count("num_experts_per_tok", 1),
        "expert_ffn": width,
        "shared_experts": 1,
    }


def sparse_latent(config: Fields) -> Shape:
    """DeepSeek-V3.2 and GLM-5: DeepSeek-V3's shape with an indexer that chooses what a token attends to."""
    config.ignore("index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern")
    config.ignore("indexer_rope_interleave", "num_nextn_predict_layers")
    layer_kinds(
        config, config.count("num_hidden_layers"), "deepseek_sparse_attention", "indexed_attention", "full_attention"
    )
    config.only("num_experts", (config.value("n_routed_experts"),), "it must be n_routed_experts")
    mlps, kinds = config.value("mlp_layer_types"), config.value("indexer_types")
    dense = mlps.count("dense") if isinstance(mlps, list) else 3
    if isinstance(mlps, list) and mlps != ["dense"] * dense + ["sparse"] * (len(mlps) - dense):
        raise UnsupportedModelError(f"{config.what}: mlp_layer_types", mlps, "dense layers must come first")
    shape = latent_mixture(config, shared=1, dense=dense, types=False)
    own = kinds.count("full") if isinstance(kinds, list) else shape["layers"]
    return {
        **shape,
        "indexer": {
            "heads": config.count("index_n_heads", 64),
            "head_dim": config.count("index_head_dim", 128),
            "top_k": config.count("index_topk", 2048),
            "layers": own,
        },
    }


def minimax(config: Fields) -> Shape:
    """MiniMax-Text-01: seven of eight layers are lightning attention, each with a mixture."""
    config.ignore("block_size", "postnorm", "shared_moe_mode")
    for kind in ("full_attn", "linear_attn", "mlp"):
        config.ignore(f"{kind}_alpha_factor", f"{kind}_beta_factor")
    for kind in ("full_attention", "linear_attention", "mlp"):
        config.ignore(f"layernorm_{kind}_alpha", f"layernorm_{kind}_beta")
    config.only("shared_intermediate_size", (0,), "a shared expert is not understood in this family")
    shape = {**decoder(config, kv_heads=8, types=False), **window_of_all(config, None)}
    layers, told = shape["layers"], config.value("attn_type_list")  # 0 is linear, 1 is attention
    kinds = layer_kinds(config, layers, "full_attention", "linear_attention")
    linear = layers // 2  # transformers' default: they take turns
    if kinds is not None:
        linear = kinds.count("linear_attention")
    elif isinstance(told, list):
        linear = told.count(0)
    heads, dim = shape["heads"], shape["head_dim"]
    mixer = {"recurrence": "lightning", "heads": heads, "head_dim": dim, "key_heads": heads, "key_dim": dim}
    return {
        **shape,
        "mixers": [{"layers": linear, "linear": mixer}] if linear else [],
        "experts": config.count("num_local_experts", 8),
        "top_k": config.count("num_experts_per_tok", 2),
        "expert_ffn": shape["ffn"],
    }


_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
"""transformers' newer words for the same blocks."""


def nemotron_h(config: Fields) -> Shape:
    """Nemotron-H: each layer is one block: Mamba-2, attention, an MLP, or a mixture."""
    no_bias(config, "attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
    config.only("use_conv_bias", (True,), "a convolution without biases is not understood")
    config.ignore("chunk_size", "expand", "mamba_hidden_act", "time_step_limit", "time_step_min", "time_step_max")
    config.ignore("use_mamba_kernels", "num_nextn_predict_layers", "moe_shared_expert_overlap", "time_step_rank")
    config.ignore("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    config.only("sliding_window", (), "windows are not understood in this family")
    pattern, kinds = config.value("hybrid_override_pattern"), config.value("layers_block_type")
    if kinds is None and isinstance(pattern, str):
        kinds = [_BLOCKS.get(letter, letter) for letter in pattern]
    if isinstance(kinds, list):
        kinds = [_RENAMED.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not isinstance(kinds, list) or any(kind not in _BLOCKS.values() for kind in kinds):
        raise UnsupportedModelError(
            f"{config.what}: layers_block_type", kinds, "understood: mamba, attention, mlp, moe"
        )
    counts = {kind: kinds.count(kind) for kind in _BLOCKS.values()}
    layers = config.count("num_hidden_layers", len(kinds))
    if layers != len(kinds):
        raise InputError(f"{config.what}: num_hidden_layers", layers, f"the pattern has {len(kinds)} blocks")
    if counts["mlp"] and counts["moe"]:
        raise UnsupportedModelError(
            f"{config.what}: layers_block_type", kinds, "MLPs beside mixtures are not understood"
        )
    config.activation("mlp_hidden_act", "relu2")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    mamba = {
        "recurrence": "mamba2",
        "heads": config.count("mamba_num_heads", 128),
        "head_dim": config.count("mamba_head_dim", 64),
        "key_heads": config.count("n_groups", 8),
        "key_dim": config.count("ssm_state_size", 128),
        "conv_kernel": config.count("conv_kernel", 4),
    }
    alone = counts["mlp"] + counts["moe"]
    mixers = [{"layers": counts["mamba"], "linear": mamba}] if counts["mamba"] else []
    config.count("max_position_embeddings", 1)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", 8),
        "head_dim": config.count("head_dim", config.count("attention_head_dim", 128)),
        "ffn": config.count("intermediate_size"),
        "gated": False,
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", False),
        "norm": "rmsnorm",
        "position": "none",
        "mixers": [*mixers, {"layers": alone}] if alone else mixers,
        "mlp_layers": alone,
        **(_nemotron_mixture(config) if counts["moe"] else _without_mixture(config)),
    }


def _nemotron_mixture(config: Fields) -> Shape:
    width, shared = (
        config.count("moe_intermediate_size"),
        config.count("moe_shared_expert_intermediate_size", minimum=0),
    )
    config.count("n_shared_experts", 1)
    if shared % width:
        what = f"{config.what}: moe_shared_expert_intermediate_size"
        raise UnsupportedModelError(what, shared, f"a multiple of moe_intermediate_size ({width})")
    return {
        **routing(config),
        "experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_experts": shared // width,
        "expert_hidden": config.count("moe_latent_size", 0, minimum=0),
    }


def _without_mixture(config: Fields) -> Shape:
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"):
        config.ignore(key)
    config.ignore("moe_shared_expert_intermediate_size", "moe_latent_size", "topk_group", "routed_scaling_factor")
    return {}
