"""What the readings of Hugging Face families share: a decoder's keys, windows, mixtures, latent attention.

Defaults are those that transformers (5.x, `configuration_<family>.py`) applies where a key is absent. The five
sizes that every published config states (layers, hidden, heads, MLP width, vocabulary) are required instead: a
config without them is a broken one.
"""

from __future__ import annotations

from typing import Any

from autotune.catalog.hf_fields import Fields
from autotune.errors import InputError, UnsupportedModelError

Shape = dict[str, Any]


def decoder(
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
        layer_kinds(config, config.count("num_hidden_layers"), "full_attention")
    config.count("max_position_embeddings", 1)  # checked; rotary positions have no parameters
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.has("num_key_value_heads") or kv_heads is None:
        kv_heads = heads
    if config.has("head_dim") or head_dim is None:
        head_dim = even_head_dim(config, hidden, heads)
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


def even_head_dim(config: Fields, hidden: int, heads: int) -> int:
    """hidden / heads. Raises InputError where that is not whole and the config does not say it."""
    if hidden % heads and config.value("head_dim") is None:
        raise InputError(f"{config.what}: hidden_size", hidden, f"it must be a multiple of the {heads} heads")
    return hidden // heads


def layer_kinds(config: Fields, layers: int, *allowed: str) -> list[str] | None:
    """`layer_types`, one a layer; None where it is absent. Raises UnsupportedModelError for a kind not in `allowed`."""
    kinds = config.value("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise UnsupportedModelError(f"{config.what}: layer_types", kinds, "understood: " + ", ".join(allowed))
    if len(kinds) != layers:
        raise InputError(f"{config.what}: layer_types", len(kinds), f"one for each of the {layers} layers is needed")
    return kinds


def windows(layers: int, window: int, *, chunked: bool = False) -> Shape:
    """The part of a shape that says of how many layers attention has a window."""
    return {"mixers": [{"layers": layers, "window": window, "chunked": chunked}]} if layers else {}


def window_of_all(config: Fields, default: int | None) -> Shape:
    """The window of all layers, if there is one that is shorter than the longest sequence."""
    absent = not config.has("sliding_window")
    if (absent and default is None) or (not absent and config.value("sliding_window") is None):
        return {}
    window = config.count("sliding_window", default)
    if window >= config.count("max_position_embeddings", 131072):
        return {}
    return windows(config.count("num_hidden_layers"), window)


def window_of_some(config: Fields, *, full_each: int, default: int, key: str = "sliding_window_pattern") -> Shape:
    """A window in some layers: by `layer_types`, else in all but each so-manieth."""
    layers, window = config.count("num_hidden_layers"), config.count("sliding_window", default)
    kinds = layer_kinds(config, layers, "full_attention", "sliding_attention")
    each = config.count(key, full_each)
    count = layers - layers // each if kinds is None else kinds.count("sliding_attention")
    return windows(count, window)


def switched_window(config: Fields) -> Shape:
    """Qwen configs name a window that `use_sliding_window` turns on, in the layers from `max_window_layers` on."""
    config.ignore("sliding_window", "max_window_layers")
    if not config.flag("use_sliding_window", False):
        layer_kinds(config, config.count("num_hidden_layers"), "full_attention")
        return {}
    layers = config.count("num_hidden_layers")
    kinds = layer_kinds(config, layers, "full_attention", "sliding_attention")
    first = config.count("max_window_layers", 28, minimum=0)
    count = max(layers - first, 0) if kinds is None else kinds.count("sliding_attention")
    return windows(count, config.count("sliding_window", 4096))


def no_bias(config: Fields, *keys: str) -> None:
    """Refuses biases that only some of the linear layers would have."""
    for key in keys:
        config.only(key, (False,), "biases on only some of the linear layers are not understood")


def sparse_layers(config: Fields) -> Shape:
    """Which layers are mixtures: each `decoder_sparse_step`-th."""
    config.only("mlp_only_layers", ([],), "dense layers at places of their own are not understood")
    step = config.count("decoder_sparse_step", 1)
    return {"moe_every": step} if step > 1 else {}


def shared_count(config: Fields, width: int, default: int) -> int:
    """How many experts of that width the shared one is as wide as."""
    shared = config.count("shared_expert_intermediate_size", default, minimum=0)
    if shared % width:
        raise UnsupportedModelError(
            f"{config.what}: shared_expert_intermediate_size", shared, f"a multiple of moe_intermediate_size ({width})"
        )
    return shared // width


def deepseek_mixture(config: Fields, *, shared: int, dense: int) -> Shape:
    """The keys of DeepSeek's mixtures: routed and shared experts after the first dense layers."""
    config.only("moe_layer_freq", (1,), "mixtures on only some layers are not understood")
    return {
        **routing(config),
        "experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn": config.count("moe_intermediate_size"),
        "shared_experts": 0 if is_null(config, "n_shared_experts") else config.count("n_shared_experts", shared),
        "dense_layers": config.count("first_k_dense_replace", dense, minimum=0),
    }


def routing(config: Fields, groups: int = 1, chosen: int = 1) -> Shape:
    """Node-limited routing: of `n_group` groups of experts, each on a node, `topk_group` take a token."""
    groups, chosen = config.count("n_group", groups, minimum=0), config.count("topk_group", chosen, minimum=0)
    limited = config.value("topk_method") != "greedy" and 0 < chosen < groups
    return {"expert_nodes": chosen} if limited else {}


_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")


def constants(config: Fields) -> dict[str, Any]:
    """What a launch needs beside the shape, of what the config states; the rest is not known."""
    rope = [each for key in ("rope_parameters", "rope_scaling") if isinstance(each := config.value(key), dict)]
    stretched = next((each for each in rope if each.get("rope_type", each.get("type")) == "llama3"), {})
    base = next((each["rope_theta"] for each in rope if "rope_theta" in each), config.value("rope_theta"))
    score, groups = config.value("scoring_func"), config.value("n_group")
    found: dict[str, Any] = {
        "rope_base": base,
        "rope_scaling": stretched.get("factor"),
        "norm_epsilon": next((value for key in _EPSILONS if (value := config.value(key)) is not None), None),
        "router_groups": groups if isinstance(groups, int) and groups > 1 else None,
        "router_score": score if score in {"softmax", "sigmoid"} else None,
        "router_bias": True if config.value("topk_method") == "noaux_tc" else None,
        "router_scale": config.value("routed_scaling_factor"),
    }
    return {name: value for name, value in found.items() if _is_constant(value)}


def _is_constant(value: object) -> bool:
    return value is True or (isinstance(value, int | float | str) and not isinstance(value, bool) and bool(value))


def latent_mixture(config: Fields, *, shared: int, dense: int, types: bool = True) -> Shape:
    """DeepSeek's multi-head latent attention with its mixtures."""
    no_bias(config, "attention_bias", "mlp_bias")
    config.ignore("head_dim", "qk_head_dim")  # follow from the dims below
    nope, rope = config.count("qk_nope_head_dim", 128), config.count("qk_rope_head_dim", 64)
    shape = {**decoder(config, types=types), **deepseek_mixture(config, shared=shared, dense=dense)}
    latent = {
        "q_lora_rank": 0 if is_null(config, "q_lora_rank") else config.count("q_lora_rank", 1536),
        "kv_lora_rank": config.count("kv_lora_rank", 512),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": config.count("v_head_dim", 128),
    }
    return {**shape, "kv_heads": shape["heads"], "head_dim": nope + rope, "latent_attention": latent}


def all_equal(config: Fields, key: str, value: object, why: str) -> None:
    """Refuses a list with another value than this one. An absent key is fine."""
    found = config.value(key)
    if found is not None and (not isinstance(found, list) or any(each != value for each in found)):
        raise UnsupportedModelError(f"{config.what}: {key}", found, why)


def is_null(config: Fields, key: str) -> bool:
    """Whether the key stands in the config as null."""
    return config.has(key) and config.value(key) is None
