"""How each family of Hugging Face models spells its shape; those of layers that are not alike are in hf_hybrids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.catalog.hf_fields import Fields
from autotune.catalog.hf_hybrids import (
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    llama4,
    minimax,
    nemotron_h,
    qwen3_next,
    qwen35,
    qwen35_moe,
    sparse_latent,
)
from autotune.catalog.hf_shapes import (
    Shape,
    all_equal,
    decoder,
    deepseek_mixture,
    even_head_dim,
    latent_mixture,
    no_bias,
    routing,
    shared_count,
    sparse_layers,
    switched_window,
    window_of_all,
    window_of_some,
)
from autotune.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A `model_type`: the class that trains it, and the reading of its keys."""

    architecture: str
    read: Callable[[Fields], Shape]


def _llama(config: Fields) -> Shape:
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention != mlp:
        raise UnsupportedModelError(
            f"{config.what}: attention_bias", attention, f"it must equal mlp_bias ({mlp}): all layers biased, or none"
        )
    return {**decoder(config), "linear_bias": attention, "qkv_bias": attention}


def _mistral(config: Fields) -> Shape:
    return {**decoder(config, kv_heads=8, types=False), **window_of_all(config, 4096)}


def _mixtral(config: Fields) -> Shape:
    shape = {**decoder(config, kv_heads=8), **window_of_all(config, None)}
    experts, top_k = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    return {**shape, "experts": experts, "top_k": top_k, "expert_ffn": shape["ffn"]}


def _qwen2(config: Fields) -> Shape:
    return {**decoder(config, kv_heads=32, types=False), **switched_window(config), "qkv_bias": True}


def _qwen3(config: Fields) -> Shape:
    no_bias(config, "attention_bias", "qkv_bias")
    config.only("use_qk_norm", (True,), "this family has norms of queries and keys")
    shape = decoder(config, kv_heads=32, head_dim=128, types=False)
    return {**shape, **switched_window(config), "qk_norm": True}


def _qwen2_moe(config: Fields) -> Shape:
    width = config.count("moe_intermediate_size", 1408)
    return {
        **decoder(config, kv_heads=16, types=False),
        **switched_window(config),
        **sparse_layers(config),
        "qkv_bias": config.flag("qkv_bias", True),
        "experts": config.count("num_experts", 60),
        "top_k": config.count("num_experts_per_tok", 4),
        "expert_ffn": width,
        "shared_experts": shared_count(config, width, 5632),
    }


def _qwen3_moe(config: Fields) -> Shape:
    no_bias(config, "attention_bias", "qkv_bias")
    config.only("use_qk_norm", (True,), "this family has norms of queries and keys")
    config.only("shared_expert_intermediate_size", (0,), "this family has no shared expert")
    experts = config.count("num_local_experts", 128)  # the 5.x spelling of num_experts
    return {
        **decoder(config, kv_heads=4, types=False),
        **switched_window(config),
        **sparse_layers(config),
        "qk_norm": True,
        "experts": config.count("num_experts", experts),
        "top_k": config.count("num_experts_per_tok", 8),
        "expert_ffn": config.count("moe_intermediate_size", 768),
    }


def _deepseek(config: Fields) -> Shape:
    """DeepSeekMoE 16B: ordinary attention. Not in transformers; defaults of the model's own code."""
    no_bias(config, "attention_bias")
    return {**decoder(config), **deepseek_mixture(config, shared=0, dense=0)}


def _deepseek_v2(config: Fields) -> Shape:
    return latent_mixture(config, shared=2, dense=0)


def _deepseek_v3(config: Fields) -> Shape:
    # The multi-token prediction module is left out, as transformers leaves it out.
    config.ignore("num_nextn_predict_layers")
    return {**latent_mixture(config, shared=1, dense=3), **routing(config, 8, 4)}


def _gpt2(config: Fields) -> Shape:
    config.activation("activation_function", "gelu_new")
    config.ignore("scale_attn_by_inverse_layer_idx")  # a factor on the scores
    hidden, heads = config.count("n_embd"), config.count("n_head")
    return {
        "layers": config.count("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": even_head_dim(config, hidden, heads),
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
    shape = decoder(config)
    return {**shape, "gated": False, "norm": "layernorm", "linear_bias": True, "qkv_bias": True}


def _glm4_moe(config: Fields) -> Shape:
    config.ignore("num_nextn_predict_layers")
    return {
        **decoder(config, kv_heads=8),
        **deepseek_mixture(config, shared=1, dense=1),
        "qkv_bias": config.flag("attention_bias", False),
        "qk_norm": config.flag("use_qk_norm", False),
    }


def _minimax_m2(config: Fields) -> Shape:
    config.ignore("use_qk_norm", "qk_norm_type", "use_routing_bias", "use_mtp", "num_mtp_modules", "attn_type_list")
    config.ignore("mtp_transformer_layers", "layernorm_full_attention_beta")
    config.only("shared_intermediate_size", (0,), "a shared expert is not understood in this family")
    all_equal(config, "attn_type_list", 1, "linear layers are not understood in this family")
    shape = {**decoder(config, kv_heads=8, head_dim=128), **window_of_all(config, None)}
    return {
        **shape,
        "qk_norm": True,
        "experts": config.count("num_local_experts", 256),
        "top_k": config.count("num_experts_per_tok", 8),
        "expert_ffn": shape["ffn"],
    }


def _nemotron(config: Fields) -> Shape:
    """Nemotron-4 and Minitron: squared ReLU without a gate, LayerNorm."""
    no_bias(config, "attention_bias", "mlp_bias")
    shape = decoder(config, activation="relu2")
    return {**shape, "gated": False, "norm": "layernorm"}


def _internlm(config: Fields) -> Shape:
    config.only("attn_implementation", ("eager", "flash_attention_2"), "another kernel")
    return {**decoder(config), "qkv_bias": config.flag("bias", False)}


def _internlm3(config: Fields) -> Shape:
    no_bias(config, "bias")
    return {**decoder(config, kv_heads=2), "qkv_bias": config.flag("qkv_bias", False)}


def _mimo(config: Fields) -> Shape:
    config.ignore("num_nextn_predict_layers")
    return {
        **decoder(config, types=False),
        **switched_window(config),
        "qkv_bias": config.flag("attention_bias", True),
    }


def _phi3(config: Fields) -> Shape:
    no_bias(config, "attention_bias", "mlp_bias")
    return {**decoder(config), **window_of_all(config, None)}


def _olmo2(config: Fields) -> Shape:
    no_bias(config, "attention_bias")
    return {**decoder(config), "qk_norm": True}


def _olmo3(config: Fields) -> Shape:
    no_bias(config, "attention_bias")
    return {**decoder(config, types=False), **window_of_some(config, full_each=4, default=4096), "qk_norm": True}


def _glm4(config: Fields) -> Shape:
    shape = decoder(config, kv_heads=2, head_dim=128)
    return {**shape, "qkv_bias": config.flag("attention_bias", True), "post_norms": True}


def _granite(config: Fields) -> Shape:
    config.ignore("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    return _llama(config)


def _seed_oss(config: Fields) -> Shape:
    no_bias(config, "attention_out_bias", "mlp_bias")
    return {**decoder(config, kv_heads=8, head_dim=128), "qkv_bias": config.flag("attention_bias", True)}


def _smollm3(config: Fields) -> Shape:
    no_bias(config, "attention_bias", "mlp_bias")
    config.ignore("no_rope_layers", "no_rope_layer_interval", "max_window_layers")
    return {**decoder(config, kv_heads=4, tied=True, types=False), **switched_window(config)}


def _olmoe(config: Fields) -> Shape:
    no_bias(config, "attention_bias")
    shape = decoder(config)
    experts, top_k = config.count("num_experts", 64), config.count("num_experts_per_tok", 8)
    return {**shape, "qk_norm": True, "experts": experts, "top_k": top_k, "expert_ffn": shape["ffn"]}


def _granite_moe(config: Fields) -> Shape:
    no_bias(config, "attention_bias")
    config.ignore("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    shape = decoder(config)
    experts, top_k = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    return {**shape, "experts": experts, "top_k": top_k, "expert_ffn": shape["ffn"]}


def _ernie(config: Fields) -> Shape:
    no_bias(config, "use_bias")
    return decoder(config, kv_heads=2, head_dim=128, tied=True)


def _starcoder2(config: Fields) -> Shape:
    if not config.flag("use_bias", True):
        raise UnsupportedModelError(f"{config.what}: use_bias", False, "LayerNorm without biases elsewhere")
    config.only("norm_type", ("layer_norm",), "another norm")
    shape = decoder(config, kv_heads=2, tied=True, activation="gelu_pytorch_tanh")
    biased = {"gated": False, "norm": "layernorm", "linear_bias": True, "qkv_bias": True}
    return {**shape, **window_of_all(config, None), **biased}


def _arcee(config: Fields) -> Shape:
    no_bias(config, "attention_bias", "mlp_bias")
    return {**decoder(config, activation="relu2"), "gated": False}


def _ministral3(config: Fields) -> Shape:
    return {**decoder(config, kv_heads=8, head_dim=128, types=False), **window_of_all(config, None)}


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
        ("qwen3_next", "Qwen3NextForCausalLM", qwen3_next),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", qwen35),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", qwen35_moe),
        ("qwen3_vl_text", "Qwen3VLTextModel", _qwen3),
        ("qwen3_vl_moe_text", "Qwen3VLMoeTextModel", _qwen3_moe),
        ("gpt2", "GPT2LMHeadModel", _gpt2),
        ("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox),
        ("gpt_oss", "GptOssForCausalLM", gpt_oss),
        ("gemma", "GemmaForCausalLM", gemma),
        ("gemma2", "Gemma2ForCausalLM", gemma2),
        ("gemma3_text", "Gemma3ForCausalLM", gemma3),
        ("llama4_text", "Llama4ForCausalLM", llama4),
        ("glm4", "Glm4ForCausalLM", _glm4),
        ("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", sparse_latent),
        ("deepseek", "DeepseekForCausalLM", _deepseek),
        ("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_v2),
        ("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek_v3),
        ("deepseek_v32", "DeepseekV32ForCausalLM", sparse_latent),
        ("kimi_k2", "DeepseekV3ForCausalLM", _deepseek_v3),
        ("minimax", "MiniMaxForCausalLM", minimax),
        ("minimax_text_01", "MiniMaxText01ForCausalLM", minimax),
        ("minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2),
        ("nemotron", "NemotronForCausalLM", _nemotron),
        ("nemotron_h", "NemotronHForCausalLM", nemotron_h),
        ("internlm", "InternLMForCausalLM", _internlm),
        ("internlm2", "InternLM2ForCausalLM", _internlm),
        ("internlm3", "InternLM3ForCausalLM", _internlm3),
        ("mimo", "MiMoForCausalLM", _mimo),
        ("phi3", "Phi3ForCausalLM", _phi3),
        ("olmo2", "Olmo2ForCausalLM", _olmo2),
        ("olmo3", "Olmo3ForCausalLM", _olmo3),
        ("granite", "GraniteForCausalLM", _granite),
        ("granitemoe", "GraniteMoeForCausalLM", _granite_moe),
        ("seed_oss", "SeedOssForCausalLM", _seed_oss),
        ("smollm3", "SmolLM3ForCausalLM", _smollm3),
        ("olmoe", "OlmoeForCausalLM", _olmoe),
        ("ernie4_5", "Ernie4_5ForCausalLM", _ernie),
        ("starcoder2", "Starcoder2ForCausalLM", _starcoder2),
        ("arcee", "ArceeForCausalLM", _arcee),
        ("ministral3", "Ministral3ForCausalLM", _ministral3),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", _qwen2),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _qwen2),
        ("qwen2_vl_text", "Qwen2VLForCausalLM", _qwen2),
        ("qwen2_5_vl_text", "Qwen2_5_VLForCausalLM", _qwen2),
    )
}
"""By `model_type`. A config of several models names the one of text in its `text_config`."""
