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


def _decoder(
    config: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    types: bool = True,
    ffn: int | None = None,
    activation: str = "silu",
) -> Shape:
    """What most families share: gated MLP, RMSNorm, rotary positions, untied unless told.

    `kv_heads` and `head_dim` are the family's defaults; None means `heads` and `hidden / heads`. An explicit null
    in the config means the latter too, whatever the family. `types`: all layers must be full attention; families with
    others read `layer_types` themselves. `ffn` is for those whose `intermediate_size` means nothing.
    """
    config.activation("hidden_act", activation)
    if types:
        _kinds(config, config.count("num_hidden_layers"), "full_attention")
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
        "ffn": config.count("intermediate_size") if ffn is None else ffn,
        "gated": True,
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", tied),
        "norm": "rmsnorm",
        "position": "rope",
    }


def _even_head_dim(config: Fields, hidden: int, heads: int) -> int:
    if hidden % heads and config.value("head_dim") is None:
        raise InputError(f"{config.what}: hidden_size", hidden, f"it must be a multiple of the {heads} heads")
    return hidden // heads


_FULL = ("full_attention", "global", "attention")
_WINDOWED = ("sliding_attention", "chunked_attention", "local")


def _kinds(config: Fields, layers: int, *allowed: str) -> list[str] | None:
    """`layer_types`, one a layer; None where it is absent. Raises UnsupportedModelError for a kind not in `allowed`."""
    kinds = config.value("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise UnsupportedModelError(f"{config.what}: layer_types", kinds, "understood: " + ", ".join(allowed))
    if len(kinds) != layers:
        raise InputError(f"{config.what}: layer_types", len(kinds), f"one for each of the {layers} layers is needed")
    return kinds


def _windowed(layers: int, window: int, *, chunked: bool = False) -> Shape:
    """The part of a shape that says of how many layers attention has a window."""
    return {"mixers": [{"layers": layers, "window": window, "chunked": chunked}]} if layers else {}


def _window(config: Fields, default: int | None) -> Shape:
    """The window of all layers, if there is one that is shorter than the longest sequence."""
    absent = not config.has("sliding_window")
    if (absent and default is None) or (not absent and config.value("sliding_window") is None):
        return {}
    window = config.count("sliding_window", default)
    if window >= config.count("max_position_embeddings", 131072):
        return {}
    return _windowed(config.count("num_hidden_layers"), window)


def _window_of_some(config: Fields, *, full_each: int, default: int, key: str = "sliding_window_pattern") -> Shape:
    """A window in some layers: by `layer_types`, else in all but each so-manieth."""
    layers, window = config.count("num_hidden_layers"), config.count("sliding_window", default)
    kinds = _kinds(config, layers, "full_attention", "sliding_attention")
    each = config.count(key, full_each)
    count = layers - layers // each if kinds is None else kinds.count("sliding_attention")
    return _windowed(count, window)


def _switched_window(config: Fields) -> Shape:
    """Qwen configs name a window that `use_sliding_window` turns on, in the layers from `max_window_layers` on."""
    config.ignore("sliding_window", "max_window_layers")
    if not config.flag("use_sliding_window", False):
        _kinds(config, config.count("num_hidden_layers"), "full_attention")
        return {}
    layers = config.count("num_hidden_layers")
    kinds = _kinds(config, layers, "full_attention", "sliding_attention")
    first = config.count("max_window_layers", 28, minimum=0)
    count = max(layers - first, 0) if kinds is None else kinds.count("sliding_attention")
    return _windowed(count, config.count("sliding_window", 4096))


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
    return {**_decoder(config, kv_heads=8, types=False), **_window(config, 4096)}


def _mixtral(config: Fields) -> Shape:
    shape = {**_decoder(config, kv_heads=8), **_window(config, None)}
    experts, top_k = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    return {**shape, "experts": experts, "top_k": top_k, "expert_ffn": shape["ffn"]}


def _qwen2(config: Fields) -> Shape:
    return {**_decoder(config, kv_heads=32, types=False), **_switched_window(config), "qkv_bias": True}


def _qwen3(config: Fields) -> Shape:
    _no_bias(config, "attention_bias", "qkv_bias")
    config.only("use_qk_norm", (True,), "this family has norms of queries and keys")
    shape = _decoder(config, kv_heads=32, head_dim=128, types=False)
    return {**shape, **_switched_window(config), "qk_norm": True}


def _sparse_layers(config: Fields) -> Shape:
    """Which layers are mixtures: each `decoder_sparse_step`-th."""
    config.only("mlp_only_layers", ([],), "dense layers at places of their own are not understood")
    step = config.count("decoder_sparse_step", 1)
    return {"moe_every": step} if step > 1 else {}


def _shared(config: Fields, width: int, default: int) -> int:
    """How many experts of that width the shared one is as wide as."""
    shared = config.count("shared_expert_intermediate_size", default, minimum=0)
    if shared % width:
        raise UnsupportedModelError(
            f"{config.what}: shared_expert_intermediate_size", shared, f"a multiple of moe_intermediate_size ({width})"
        )
    return shared // width


def _qwen2_moe(config: Fields) -> Shape:
    width = config.count("moe_intermediate_size", 1408)
    return {
        **_decoder(config, kv_heads=16, types=False),
        **_switched_window(config),
        **_sparse_layers(config),
        "qkv_bias": config.flag("qkv_bias", True),
        "experts": config.count("num_experts", 60),
        "top_k": config.count("num_experts_per_tok", 4),
        "expert_ffn": width,
        "shared_experts": _shared(config, width, 5632),
    }


def _qwen3_moe(config: Fields) -> Shape:
    _no_bias(config, "attention_bias", "qkv_bias")
    config.only("use_qk_norm", (True,), "this family has norms of queries and keys")
    config.only("shared_expert_intermediate_size", (0,), "this family has no shared expert")
    experts = config.count("num_local_experts", 128)  # the 5.x spelling of num_experts
    return {
        **_decoder(config, kv_heads=4, types=False),
        **_switched_window(config),
        **_sparse_layers(config),
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


def _routing(config: Fields, groups: int = 1, chosen: int = 1) -> Shape:
    """Node-limited routing: of `n_group` groups of experts, each on a node, `topk_group` take a token."""
    groups, chosen = config.count("n_group", groups, minimum=0), config.count("topk_group", chosen, minimum=0)
    limited = config.value("topk_method") != "greedy" and 0 < chosen < groups
    return {"expert_nodes": chosen} if limited else {}


def _deepseek(config: Fields) -> Shape:
    """DeepSeekMoE 16B: ordinary attention. Not in transformers; defaults of the model's own code."""
    _no_bias(config, "attention_bias")
    return {**_decoder(config), **_deepseek_moe(config, shared=0, dense=0)}


def _deepseek_latent(config: Fields, *, shared: int, dense: int, types: bool = True) -> Shape:
    _no_bias(config, "attention_bias", "mlp_bias")
    config.ignore("head_dim", "qk_head_dim")  # follow from the dims below
    nope, rope = config.count("qk_nope_head_dim", 128), config.count("qk_rope_head_dim", 64)
    shape = {**_decoder(config, types=types), **_deepseek_moe(config, shared=shared, dense=dense)}
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
    return {**_deepseek_latent(config, shared=1, dense=3), **_routing(config, 8, 4)}


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


def _gated_delta(config: Fields, layers: int) -> Shape:
    """Qwen3-Next's layers: three of four by the gated delta rule, the fourth attention with an output gate."""
    kinds = _kinds(config, layers, "full_attention", "linear_attention")
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
    _no_bias(config, "attention_bias")
    config.ignore("intermediate_size", "attn_output_gate", "output_gate_type")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # left out, as transformers leaves it out
    width = config.count("moe_intermediate_size", width)
    shape = _decoder(config, kv_heads=2, head_dim=256, types=False, ffn=width)
    return {
        **shape,
        **_gated_delta(config, shape["layers"]),
        **_sparse_layers(config),
        "experts": config.count("num_experts", experts),
        "top_k": config.count("num_experts_per_tok", top_k),
        "expert_ffn": width,
        "shared_experts": _shared(config, width, 512),
    }


def _qwen3_next(config: Fields) -> Shape:
    return _qwen3_next_moe(config, experts=512, top_k=10)


def _qwen35_moe(config: Fields) -> Shape:
    return _qwen3_next_moe(config, experts=256, top_k=8)


def _qwen35(config: Fields) -> Shape:
    _no_bias(config, "attention_bias")
    config.ignore("attn_output_gate", "output_gate_type", "mlp_only_layers")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    shape = _decoder(config, kv_heads=4, head_dim=256, types=False)
    return {**shape, **_gated_delta(config, shape["layers"])}


def _gpt_oss(config: Fields) -> Shape:
    """gpt-oss: half of the layers have a window. The sinks of attention and biases of the router are left out."""
    config.ignore("experts_per_token")  # what num_experts_per_tok says
    bias = config.flag("attention_bias", True)
    if not bias:
        raise UnsupportedModelError(f"{config.what}: attention_bias", False, "experts have biases: so must attention")
    shape = _decoder(config, kv_heads=8, head_dim=64, types=False)
    experts = config.count("num_local_experts", 128)
    return {
        **shape,
        **_window_of_some(config, full_each=2, default=128),
        "linear_bias": True,
        "qkv_bias": True,
        "experts": experts,
        "top_k": config.count("num_experts_per_tok", 4),
        "expert_ffn": shape["ffn"],
    }


def _gemma(config: Fields, kv_heads: int = 16) -> Shape:
    _no_bias(config, "attention_bias")
    config.activation("hidden_activation", "gelu_pytorch_tanh")
    config.ignore("query_pre_attn_scalar", "use_bidirectional_attention")
    return _decoder(config, kv_heads=kv_heads, head_dim=256, tied=True, types=False)


def _gemma2(config: Fields) -> Shape:
    return {**_gemma(config, 4), **_window_of_some(config, full_each=2, default=4096), "post_norms": True}


def _gemma3(config: Fields) -> Shape:
    window = _window_of_some(config, full_each=6, default=4096)
    config.ignore("_sliding_window_pattern", "rope_local_base_freq", "mm_tokens_per_image")
    return {**_gemma(config, 4), **window, "post_norms": True, "qk_norm": True}


def _llama4(config: Fields) -> Shape:
    """Llama 4's language model: dense and mixed layers take turns, three of four layers attend within chunks."""
    _no_bias(config, "attention_bias")
    config.ignore(
        "use_qk_norm", "no_rope_layer_interval", "attn_temperature_tuning", "attn_scale", "for_llm_compressor"
    )
    width = config.count("intermediate_size")
    shape = _decoder(config, kv_heads=8, head_dim=128, types=False)
    layers, chunk = shape["layers"], config.value("attention_chunk_size")
    kinds = _kinds(config, layers, "full_attention", "chunked_attention")
    rotary = config.value("no_rope_layers") or []  # 1 where positions are rotary, which are the chunked layers
    chunked = layers - layers // 4
    if kinds is not None:
        chunked = kinds.count("chunked_attention")
    elif isinstance(rotary, list) and rotary:
        chunked = sum(1 for flag in rotary if flag)
    every = config.has("attention_chunk_size") and chunk is None
    window = {} if every else _windowed(chunked, config.count("attention_chunk_size", 8192), chunked=True)
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


def _glm4_moe(config: Fields) -> Shape:
    config.ignore("num_nextn_predict_layers")
    return {
        **_decoder(config, kv_heads=8),
        **_deepseek_moe(config, shared=1, dense=1),
        "qkv_bias": config.flag("attention_bias", False),
        "qk_norm": config.flag("use_qk_norm", False),
    }


def _sparse_latent(config: Fields) -> Shape:
    """DeepSeek-V3.2 and GLM-5: DeepSeek-V3's shape with an indexer that chooses what a token attends to."""
    config.ignore("index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern")
    config.ignore("indexer_rope_interleave", "num_nextn_predict_layers")
    _kinds(
        config, config.count("num_hidden_layers"), "deepseek_sparse_attention", "indexed_attention", "full_attention"
    )
    config.only("num_experts", (config.value("n_routed_experts"),), "it must be n_routed_experts")
    mlps, kinds = config.value("mlp_layer_types"), config.value("indexer_types")
    dense = mlps.count("dense") if isinstance(mlps, list) else 3
    if isinstance(mlps, list) and mlps != ["dense"] * dense + ["sparse"] * (len(mlps) - dense):
        raise UnsupportedModelError(f"{config.what}: mlp_layer_types", mlps, "dense layers must come first")
    shape = _deepseek_latent(config, shared=1, dense=dense, types=False)
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


def _minimax_m2(config: Fields) -> Shape:
    config.ignore("use_qk_norm", "qk_norm_type", "use_routing_bias", "use_mtp", "num_mtp_modules", "attn_type_list")
    config.ignore("mtp_transformer_layers", "layernorm_full_attention_beta")
    config.only("shared_intermediate_size", (0,), "a shared expert is not understood in this family")
    _every(config, "attn_type_list", 1, "linear layers are not understood in this family")
    shape = {**_decoder(config, kv_heads=8, head_dim=128), **_window(config, None)}
    return {
        **shape,
        "qk_norm": True,
        "experts": config.count("num_local_experts", 256),
        "top_k": config.count("num_experts_per_tok", 8),
        "expert_ffn": shape["ffn"],
    }


def _every(config: Fields, key: str, value: object, why: str) -> None:
    found = config.value(key)
    if found is not None and (not isinstance(found, list) or any(each != value for each in found)):
        raise UnsupportedModelError(f"{config.what}: {key}", found, why)


def _minimax(config: Fields) -> Shape:
    """MiniMax-Text-01: seven of eight layers are lightning attention, each with a mixture."""
    config.ignore("block_size", "postnorm", "shared_moe_mode")
    for kind in ("full_attn", "linear_attn", "mlp"):
        config.ignore(f"{kind}_alpha_factor", f"{kind}_beta_factor")
    for kind in ("full_attention", "linear_attention", "mlp"):
        config.ignore(f"layernorm_{kind}_alpha", f"layernorm_{kind}_beta")
    config.only("shared_intermediate_size", (0,), "a shared expert is not understood in this family")
    shape = {**_decoder(config, kv_heads=8, types=False), **_window(config, None)}
    layers, told = shape["layers"], config.value("attn_type_list")  # 0 is linear, 1 is attention
    kinds = _kinds(config, layers, "full_attention", "linear_attention")
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


def _nemotron_h(config: Fields) -> Shape:
    """Nemotron-H: each layer is one block: Mamba-2, attention, an MLP, or a mixture."""
    _no_bias(config, "attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
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
        **_routing(config),
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


def _nemotron(config: Fields) -> Shape:
    """Nemotron-4 and Minitron: squared ReLU without a gate, LayerNorm."""
    _no_bias(config, "attention_bias", "mlp_bias")
    shape = _decoder(config, activation="relu2")
    return {**shape, "gated": False, "norm": "layernorm"}


def _internlm(config: Fields) -> Shape:
    config.only("attn_implementation", ("eager", "flash_attention_2"), "another kernel")
    return {**_decoder(config), "qkv_bias": config.flag("bias", False)}


def _internlm3(config: Fields) -> Shape:
    _no_bias(config, "bias")
    return {**_decoder(config, kv_heads=2), "qkv_bias": config.flag("qkv_bias", False)}


def _mimo(config: Fields) -> Shape:
    config.ignore("num_nextn_predict_layers")
    return {
        **_decoder(config, types=False),
        **_switched_window(config),
        "qkv_bias": config.flag("attention_bias", True),
    }


def _phi3(config: Fields) -> Shape:
    _no_bias(config, "attention_bias", "mlp_bias")
    return {**_decoder(config), **_window(config, None)}


def _olmo2(config: Fields) -> Shape:
    _no_bias(config, "attention_bias")
    return {**_decoder(config), "qk_norm": True}


def _olmo3(config: Fields) -> Shape:
    _no_bias(config, "attention_bias")
    return {**_decoder(config, types=False), **_window_of_some(config, full_each=4, default=4096), "qk_norm": True}


def _glm4(config: Fields) -> Shape:
    shape = _decoder(config, kv_heads=2, head_dim=128)
    return {**shape, "qkv_bias": config.flag("attention_bias", True), "post_norms": True}


def _granite(config: Fields) -> Shape:
    config.ignore("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    return _llama(config)


def _is_null(config: Fields, key: str) -> bool:
    return config.has(key) and config.value(key) is None


FAMILIES: dict[str, Family] = {
    name: Family(architecture=architecture, read=read)
    for name, architecture, read in (
        ("llama", "LlamaForCausalLM", _llama),
        ("mistral", "MistralForCausalLM", _mistral),
        ("mixtral", "MixtralForCausalLM", _mixtral),
        ("qwen2", "Qwen2ForCausalLM", _qwen2),
        ("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe),
        ("qwen3", "Qwen3ForCausalLM", _qwen3),
        ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
        ("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen35),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen35_moe),
        ("qwen3_vl_text", "Qwen3VLTextModel", _qwen3),
        ("qwen3_vl_moe_text", "Qwen3VLMoeTextModel", _qwen3_moe),
        ("gpt2", "GPT2LMHeadModel", _gpt2),
        ("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox),
        ("gpt_oss", "GptOssForCausalLM", _gpt_oss),
        ("gemma", "GemmaForCausalLM", _gemma),
        ("gemma2", "Gemma2ForCausalLM", _gemma2),
        ("gemma3_text", "Gemma3ForCausalLM", _gemma3),
        ("llama4_text", "Llama4ForCausalLM", _llama4),
        ("glm4", "Glm4ForCausalLM", _glm4),
        ("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", _sparse_latent),
        ("deepseek", "DeepseekForCausalLM", _deepseek),
        ("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_v2),
        ("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek_v3),
        ("deepseek_v32", "DeepseekV32ForCausalLM", _sparse_latent),
        ("kimi_k2", "DeepseekV3ForCausalLM", _deepseek_v3),
        ("minimax", "MiniMaxForCausalLM", _minimax),
        ("minimax_text_01", "MiniMaxText01ForCausalLM", _minimax),
        ("minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2),
        ("nemotron", "NemotronForCausalLM", _nemotron),
        ("nemotron_h", "NemotronHForCausalLM", _nemotron_h),
        ("internlm", "InternLMForCausalLM", _internlm),
        ("internlm2", "InternLM2ForCausalLM", _internlm),
        ("internlm3", "InternLM3ForCausalLM", _internlm3),
        ("mimo", "MiMoForCausalLM", _mimo),
        ("phi3", "Phi3ForCausalLM", _phi3),
        ("olmo2", "Olmo2ForCausalLM", _olmo2),
        ("olmo3", "Olmo3ForCausalLM", _olmo3),
        ("granite", "GraniteForCausalLM", _granite),
    )
}
"""By `model_type`. A config of several models names the one of text in its `text_config`."""
