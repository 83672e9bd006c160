"""Hugging Face configs of models whose layers are not all alike: their shapes, parameters and FLOPs.

Counts are those of the models that transformers 5.24 builds from the same configs. What we leave out of them stands
beside: sinks of attention, biases and gates of routers, norms over all heads at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import cluster_from_shorthand, from_hf_config, load_model, model
from autotune.cost.estimate import estimate
from autotune.cost.parameters import active_parameters, layer_counts, total_parameters
from autotune.cost.pipeline import stages
from autotune.cost.work import core_flops_per_token, matmul_parameters, model_flops_per_token
from autotune.errors import IllegalPlanError, InputError, UnsupportedModelError
from autotune.frameworks import launch_arguments
from autotune.search.space import Runtime, Space, legal_plans
from autotune.specs import ModelSpec, Plan, Workload
from probes.runnable import check_model


def sizes(hidden: int, layers: int, heads: int, ffn: int, vocab: int, **others: object) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "vocab_size": vocab, **others,
    }  # fmt: skip


GPT_OSS = {"model_type": "gpt_oss", **sizes(2880, 36, 64, 2880, 201088)}
GEMMA2 = {"model_type": "gemma2", **sizes(2304, 26, 8, 9216, 256000, num_key_value_heads=4)}
GEMMA3 = {
    "model_type": "gemma3_text",
    **sizes(2304, 26, 8, 9216, 262208, num_key_value_heads=4, sliding_window_pattern=6),
}
SCOUT = {"model_type": "llama4_text", **sizes(5120, 48, 40, 8192, 202048, attention_chunk_size=8192)}
MAVERICK = {**SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2}
QWEN3_NEXT = {"model_type": "qwen3_next", **sizes(2048, 48, 16, 5632, 151936)}
QWEN35 = {"model_type": "qwen3_5_text", **sizes(4096, 32, 16, 12288, 248320)}
GLM45 = {
    "model_type": "glm4_moe",
    **sizes(4096, 46, 96, 10944, 151552, head_dim=128, num_key_value_heads=8, attention_bias=True),
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
}  # fmt: skip
DSA = {
    "model_type": "deepseek_v32", **sizes(7168, 61, 128, 18432, 129280), "n_routed_experts": 256, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
}  # fmt: skip
MINIMAX_M2 = {"model_type": "minimax_m2", **sizes(3072, 62, 48, 1536, 200064)}
NANO = {
    "model_type": "nemotron_h", **sizes(2688, 52, 32, 1856, 131072, num_key_value_heads=2, mamba_num_heads=64),
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "mlp_hidden_act": "relu2", "time_step_limit": [0.0, None],
}  # fmt: skip
MINIMAX_01 = {
    "model_type": "minimax_text_01", "architectures": ["MiniMaxText01ForCausalLM"],
    **sizes(6144, 80, 64, 9216, 200064, head_dim=128, num_key_value_heads=8, num_local_experts=32),
    "attn_type_list": [*[0] * 7, 1] * 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "built", "left_out"),
    [
        (GPT_OSS, 116_829_156_672, 36 * (64 + 128)),
        (GEMMA2, 2_614_341_888, 0),
        (GEMMA3, 2_628_658_432, 0),
        (SCOUT, 107_769_861_120, 0),
        (QWEN3_NEXT, 79_674_391_296, 48 * 2048),
        (QWEN35, 8_953_803_264, 0),
        (DSA, 671_877_929_216, 61 * 2 * 128),  # the indexer's LayerNorm
        (MINIMAX_M2, 228_689_748_992, 62 * (48 + 8 - 2) * 128),
        ({"model_type": "glm4", **sizes(4096, 40, 32, 13696, 151552)}, 9_400_279_040, 0),
        ({"model_type": "phi3", **sizes(3072, 32, 32, 8192, 32064)}, 3_821_079_552, 0),
        ({"model_type": "gemma", **sizes(3072, 28, 16, 24576, 256000)}, 8_537_680_896, 0),
        ({"model_type": "internlm3", **sizes(4096, 48, 32, 10240, 128512, head_dim=128)}, 8_804_241_408, 0),
        ({"model_type": "seed_oss", **sizes(4096, 64, 80, 27648, 155136)}, 28_921_040_896, 0),
        ({"model_type": "smollm3", **sizes(2048, 36, 16, 11008, 128256)}, 3_075_098_624, 0),
        ({"model_type": "olmoe", **sizes(2048, 16, 16, 2048, 50304)}, 13_361_612_800, 16 * 30 * 128),
        ({"model_type": "ernie4_5", **sizes(1024, 18, 16, 3072, 103424)}, 360_748_032, 0),
        ({"model_type": "granitemoe", **sizes(4096, 32, 32, 11008, 32000)}, 37_039_116_288, 0),
        ({"model_type": "starcoder2", **sizes(3072, 30, 24, 12288, 49152)}, 3_030_371_328, 0),
        ({"model_type": "arcee", **sizes(2560, 32, 32, 18432, 32000)}, 4_022_766_080, 0),
        ({"model_type": "ministral3", **sizes(4096, 34, 32, 14336, 131072)}, 8_489_553_920, 0),
        ({"model_type": "granite", **sizes(4096, 32, 32, 11008, 32000)}, 6_738_415_616, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_those_of_the_built_model(config: dict[str, Any], built: int, left_out: int) -> None:
    assert total_parameters(from_hf_config(config, "x")) == built - left_out


@pytest.mark.parametrize(
    ("config", "billions", "active", "embeddings"),
    [
        (MAVERICK, 400.7, 17.2, 2),  # 400B with 17B active (the vision tower left out)
        (GLM45, 106.9, 12.2, 0),  # GLM-4.5-Air: 106B, 12B active
        (NANO, 31.6, 3.6, 2),  # 31.6B, 3.6B active with embeddings
        (MINIMAX_01, 456.1, 45.9, 0),  # 456B, 45.9B active (arXiv:2501.08313)
    ],
    ids=["maverick", "glm-4.5-air", "nemotron-3-nano", "minimax-01"],
)
def test_parameters_are_those_of_the_model_card(
    config: dict[str, Any], billions: float, active: float, embeddings: int
) -> None:
    """`embeddings`: how many of the two matrices of the vocabulary the card's active parameters count."""
    found = from_hf_config(config, "x")
    counted = active_parameters(found) - (2 - embeddings) * found.vocab * found.hidden
    assert total_parameters(found) / 1e9 == pytest.approx(billions, abs=0.06)
    assert counted / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (GPT_OSS, "gpt-oss-120b"), (SCOUT, "llama4-scout-109b-a17b"), (MAVERICK, "llama4-maverick-400b-a17b"),
        (QWEN3_NEXT, "qwen3-next-80b-a3b"), (NANO, "nemotron-3-nano-30b-a3b"),
    ],
)  # fmt: skip
def test_a_released_config_is_the_preset(config: dict[str, Any], preset: str) -> None:
    assert from_hf_config(config, "x").key == model(preset).key


def test_layer_types_say_which_layers_have_a_window() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * 9
    assert from_hf_config({**GPT_OSS, "layer_types": kinds}, "x").mixers[0].layers == 18
    assert from_hf_config({**GPT_OSS, "layer_types": ["full_attention"] * 36}, "x").mixers == ()
    for wrong, message in ((["full_attention"] * 3, "one for each"), (["odd"] * 36, "understood: full_attention")):
        with pytest.raises(InputError, match=message):
            from_hf_config({**GPT_OSS, "layer_types": wrong}, "x")


def test_a_window_shorter_than_the_longest_sequence_is_of_all_layers() -> None:
    small = sizes(64, 2, 8, 96, 100, num_key_value_heads=8, max_position_embeddings=32768)
    for name, keys in (
        ("mistral", {"sliding_window": 4096}), ("mixtral", {"sliding_window": 4096}),
        ("phi3", {"sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}),
    ):  # fmt: skip
        (mixer,) = from_hf_config({"model_type": name, **small, **keys}, "x").mixers
        assert (mixer.layers, mixer.window, mixer.chunked) == (2, 4096, False)


def test_a_language_model_inside_of_another_config_is_taken_alone() -> None:
    whole = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA3,
        "vision_config": {"hidden_size": 1152}, "tie_word_embeddings": True, "image_token_index": 262144,
    }  # fmt: skip
    found = from_hf_config(whole, "x")
    assert found.key == from_hf_config(GEMMA3, "x").key
    assert found.source == "Hugging Face config, gemma3_text; the language model alone, without vision_config"
    with pytest.raises(InputError, match=r"text_config.model_type"):
        from_hf_config({**whole, "text_config": {"hidden_size": 8}}, "x")


def test_a_vision_tower_beside_the_keys_of_the_text_is_left_out() -> None:
    text = {"model_type": "qwen2_5_vl", **sizes(3584, 28, 28, 18944, 152064, num_key_value_heads=4)}
    found = from_hf_config({**text, "vision_config": {"depth": 32}, "vision_start_token_id": 151652}, "x")
    assert found.key == model("qwen2.5-7b").key
    assert found.source == "Hugging Face config, qwen2_5_vl; the language model alone, without vision_config"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hybrid_override_pattern": "MX" * 26}, "layers_block_type"),
        ({"hybrid_override_pattern": "ME-" * 17 + "M"}, "layers_block_type"),
        ({"use_bias": True}, "use_bias"),
        ({"moe_shared_expert_intermediate_size": 1000}, "moe_shared_expert_intermediate_size"),
    ],
)
def test_what_a_hybrid_has_beyond_these_words_is_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        from_hf_config({**NANO, **changes}, "x")


def test_a_config_that_says_infinity_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nano.json"
    text = str({**NANO, "time_step_limit": [0.0, 1]}).replace("'", '"').replace("[0.0, 1]", "[0.0, Infinity]")
    path.write_text(text)
    assert load_model(str(path)).key == model("nemotron-3-nano-30b-a3b").key


# FLOPs, against sums by hand.


def test_a_window_bounds_what_a_token_attends_to() -> None:
    plain = model("llama3.1-8b")
    half = ModelSpec.from_data(plain.to_data() | {"mixers": [{"layers": 16, "window": 1024}]})
    width, s = 2 * 32 * 128, 8192
    assert core_flops_per_token(plain, s) == s * width
    # (sum of min(i, w) over the sequence) / s is w - w² / 2s
    assert core_flops_per_token(half, s) == (s * width + 2 * (1024 - 1024**2 / (2 * s)) * width) / 2
    chunks = ModelSpec.from_data(plain.to_data() | {"mixers": [{"layers": 32, "window": 1024, "chunked": True}]})
    assert core_flops_per_token(chunks, s) == 1024 * width
    assert core_flops_per_token(half, 512) == core_flops_per_token(plain, 512)
    assert total_parameters(half) == total_parameters(plain)


def test_linear_attention_costs_the_same_at_any_length() -> None:
    spec = model("qwen3-next-80b-a3b")
    full, linear = 2 * 16 * 256, 8 * 32 * 128 * 128
    for s in (4096, 65536):
        assert core_flops_per_token(spec, s) == pytest.approx((12 * s * full + 36 * linear) / 48)
    nano = model("nemotron-3-nano-30b-a3b")
    assert core_flops_per_token(nano, 8192) == pytest.approx((6 * 8192 * 2 * 32 * 128 + 23 * 7 * 64 * 64 * 128) / 52)


def test_sparse_attention_is_a_window_and_its_indexer() -> None:
    spec, s = from_hf_config(DSA, "x"), 16384
    width = 128 * (128 + 64 + 128)
    expected = s * 64 * 128 + 2 * (2048 - 2048**2 / (2 * s)) * width
    assert core_flops_per_token(spec, s) == pytest.approx(expected)


def test_matrix_products_of_a_hybrid_are_those_of_its_blocks() -> None:
    spec, h = model("nemotron-3-nano-30b-a3b"), 2688
    mamba = h * (2 * 8 * 128 + 2 * 4096 + 64) + h * 4096
    attention = 2 * h * 32 * 128 + 2 * h * 2 * 128
    mixture = h * 128 + (6 + 2) * 2 * h * 1856
    expected = 23 * mamba + 6 * attention + 23 * mixture + 131072 * h
    assert matmul_parameters(spec) == pytest.approx(expected)
    assert model_flops_per_token(spec, 4096) > 6 * expected


def test_mixtures_that_take_turns_with_dense_layers_lie_evenly_on_the_stages() -> None:
    spec = model("llama4-maverick-400b-a17b")
    assert layer_counts(spec) == (24, 24)
    held = stages(24, 24, 4, 1, 0.0, 2)
    assert [(stage.dense_layers, stage.moe_layers) for stage in held] == [(6, 6)] * 4
    assert [(stage.dense_layers, stage.moe_layers) for stage in stages(24, 24, 16, 1, 0.0, 2)] == [
        (2, 1), (1, 2)] * 8  # fmt: skip
    assert [stage.dense_before for stage in held] == [0, 6, 12, 18]


def test_blocks_on_their_own_keep_half_of_what_whole_layers_do() -> None:
    spec = model("nemotron-3-nano-30b-a3b")
    plain = ModelSpec.from_data(spec.to_data() | {"mixers": [], "mlp_layers": 0})
    work, plan = Workload(seq_len=4096, global_batch=1024), Plan(dp=256, ep=16, zero_stage=1)
    blocks, layers = (estimate(each, H100, work, plan).bytes.activations for each in (spec, plain))
    assert 0.3 * layers < blocks < 0.6 * layers
    windowed = ModelSpec.from_data(plain.to_data() | {"mixers": [{"layers": 52, "window": 128}]})
    assert estimate(windowed, H100, work, plan).bytes.activations == layers


H100 = cluster_from_shorthand("h100-80gb-sxm:32x8")


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"])
def test_a_hybrid_is_estimated_but_neither_probed_nor_exported(name: str) -> None:
    spec, work, plan = model(name), Workload(seq_len=4096, global_batch=1024), Plan(dp=256, ep=16, zero_stage=1)
    told = estimate(spec, H100, work, plan)
    assert 0 < told.mfu < 1
    with pytest.raises(IllegalPlanError, match="full attention and an MLP"):
        launch_arguments("megatron", spec, H100, work, plan)
    assert len(legal_plans(spec, H100, work, Space(tp=(1,), pp=(1,)), Runtime.TORCH)) == 0


def test_a_dense_hybrid_is_not_for_the_step_probe_either() -> None:
    plain = model("tiny")
    hybrid = ModelSpec.from_data(plain.to_data() | {"mixers": [{"layers": 2, "window": 16}]})
    cluster, work = cluster_from_shorthand("h100-80gb-sxm:1x4"), Workload(seq_len=128, global_batch=16)
    assert len(legal_plans(plain, cluster, work, Space(tp=(1,)), Runtime.TORCH)) > 0
    assert len(legal_plans(hybrid, cluster, work, Space(tp=(1,)), Runtime.TORCH)) == 0
    with pytest.raises(InputError, match="full attention and an MLP"):
        check_model(hybrid, work)


def test_tensor_parallelism_divides_the_heads_of_linear_attention() -> None:
    data = model("llama3.1-8b").to_data()
    linear = {"recurrence": "mamba2", "heads": 32, "head_dim": 64, "key_heads": 2, "key_dim": 128}
    hybrid = ModelSpec.from_data(data | {"mixers": [{"layers": 16, "linear": linear}]})
    cluster, work = cluster_from_shorthand("h100-80gb-sxm:1x8"), Workload(seq_len=4096, global_batch=64)
    found = legal_plans(hybrid, cluster, work, Space(pp=(1,)))
    assert {int(tp) for tp in found.tp} == {1, 2}  # its keys have two heads


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mixers": [{"layers": 33}]}, "33 layers, the model has 32"),
        ({"mlp_layers": 40}, "40 layers, the model has 32"),
        ({"moe_every": 2}, "moe_every needs experts"),
        ({"expert_hidden": 64}, "expert_hidden needs experts"),
        ({"indexer": {"heads": 1, "head_dim": 8, "top_k": 8, "layers": 40}}, "must not exceed layers"),
    ],
)
def test_impossible_layers_are_one_clear_error(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        ModelSpec.from_data(model("llama3.1-8b").to_data() | changes)


def test_a_model_of_before_these_words_keeps_its_key() -> None:
    spec = model("llama3.1-8b")
    later = {
        "constants",
        "mixers",
        "mlp_layers",
        "moe_every",
        "expert_hidden",
        "post_norms",
        "attention_gate",
        "indexer",
    }
    assert spec.key == spec.digest(without=frozenset({"name", "source", "expert_nodes", "expert_capacity", *later}))
    assert ModelSpec.from_data(spec.to_data() | {"post_norms": True}).key != spec.key
