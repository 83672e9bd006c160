"""A plan in other frameworks' words: what is said, and what is refused because there is no word for it."""

from __future__ import annotations

import json
import shlex
import tomllib
from typing import Any

import pytest
import yaml

from autotune.catalog import cluster_from_shorthand, model, models
from autotune.errors import IllegalPlanError, UnknownNameError
from autotune.frameworks import LaunchArguments, launch_arguments, own_command, plan_text, targets
from autotune.specs import DType, ModelSpec, Optimizer, Plan, Recompute, Schedule, Workload

CLUSTER = cluster_from_shorthand("a100-80gb-sxm:2x8")
WORKLOAD = Workload(seq_len=4096, global_batch=64)
FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE


def export(
    target: str, plan: Plan, preset: str | ModelSpec = "llama3-8b", cluster: str = "", **workload: object
) -> LaunchArguments:
    spec = model(preset) if isinstance(preset, str) else preset
    where = cluster_from_shorthand(cluster) if cluster else CLUSTER
    return launch_arguments(target, spec, where, WORKLOAD.model_copy(update=workload), plan)


def options(found: LaunchArguments) -> dict[str, str]:
    """The words after the script: each option and its value, "" for a bare flag."""
    words = list(found.argv)
    words = words[next(at for at, word in enumerate(words) if word.endswith(".py")) + 1 :]
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def parsed(found: LaunchArguments) -> Any:
    readers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    return readers[found.config_name.rpartition(".")[2]](found.config)


def test_the_targets_and_an_unknown_one() -> None:
    assert targets() == ("megatron", "deepspeed", "torchtitan", "nemo", "nanotron", "transformers")
    with pytest.raises(UnknownNameError, match=r"'colossal'.*megatron"):
        export("colossal", Plan(dp=16))


@pytest.mark.parametrize("target", targets())
def test_every_target_takes_plain_data_parallelism_on_every_node(target: str) -> None:
    found = export(target, Plan(dp=16))
    assert found.target == target
    nodes, gpus = ("--num_nodes", "--num_gpus") if target == "deepspeed" else ("--nnodes", "--nproc-per-node")
    assert found.argv[found.argv.index(nodes) + 1] == "2"
    assert found.argv[found.argv.index(gpus) + 1] == "8"
    assert bool(found.config) == bool(found.config_name)
    assert found.notes or found.placeholders


@pytest.mark.parametrize("target", targets())
def test_a_plan_that_does_not_suit_cluster_or_batch_is_refused(target: str) -> None:
    with pytest.raises(IllegalPlanError, match="needs 8 devices, the cluster has 16"):
        export(target, Plan(dp=8))
    with pytest.raises(IllegalPlanError, match="global batch of 64 must be a multiple"):
        export(target, Plan(dp=16, micro_batch=3))


def test_megatron_says_the_plan_and_the_shape() -> None:
    plan = Plan(tp=2, pp=2, dp=4, vpp=2, micro_batch=2, zero_stage=1, recompute=FULL, sequence_parallel=True,
                schedule=Schedule.INTERLEAVED)  # fmt: skip
    said = options(export("megatron", plan))
    expected = {
        "--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2", "--context-parallel-size": "1",
        "--num-virtual-stages-per-pipeline-rank": "2", "--micro-batch-size": "2", "--global-batch-size": "64",
        "--use-distributed-optimizer": "", "--recompute-granularity": "full", "--recompute-method": "uniform",
        "--recompute-num-layers": "1", "--sequence-parallel": "", "--bf16": "", "--seq-length": "4096",
        "--num-layers": "32", "--hidden-size": "4096", "--ffn-hidden-size": "14336", "--num-attention-heads": "32",
        "--group-query-attention": "", "--num-query-groups": "8", "--swiglu": "", "--normalization": "RMSNorm",
        "--position-embedding-type": "rope", "--disable-bias-linear": "", "--untie-embeddings-and-output-weights": "",
    }  # fmt: skip
    assert {key: said.get(key) for key in expected} == expected
    assert not {"--expert-model-parallel-size", "--num-experts", "--use-megatron-fsdp", "--add-qkv-bias"} & set(said)


def test_megatron_defaults_stay_unsaid() -> None:
    said = options(export("megatron", Plan(dp=16)))
    absent = {"--use-distributed-optimizer", "--sequence-parallel", "--recompute-granularity", "--fp16", "--fp8-format",
              "--num-virtual-stages-per-pipeline-rank", "--grad-reduce-in-bf16"}  # fmt: skip
    assert not absent & set(said)


def test_megatron_says_other_shapes() -> None:
    gpt = options(export("megatron", Plan(dp=16), "gpt2"))
    assert (gpt["--position-embedding-type"], gpt["--normalization"]) == ("learned_absolute", "LayerNorm")
    assert gpt["--max-position-embeddings"] == "1024"
    assert not {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"} & set(gpt)
    qwen = options(export("megatron", Plan(dp=16), "qwen2.5-7b"))
    assert {"--add-qkv-bias", "--disable-bias-linear"} <= set(qwen)
    assert "--qk-layernorm" in options(export("megatron", Plan(dp=16), "qwen3-8b"))


def test_megatron_says_mixtures_and_latent_attention() -> None:
    said = options(export("megatron", Plan(dp=16, ep=8), "deepseek-v3"))
    expected = {
        "--num-experts": "256", "--moe-router-topk": "8", "--moe-ffn-hidden-size": "2048",
        "--moe-shared-expert-intermediate-size": "2048", "--moe-layer-freq": "([0]*3+[1]*58)",
        "--expert-model-parallel-size": "8", "--multi-latent-attention": "", "--q-lora-rank": "1536",
        "--kv-lora-rank": "512", "--qk-head-dim": "128", "--qk-pos-emb-head-dim": "64", "--v-head-dim": "128",
    }  # fmt: skip
    assert {key: said.get(key) for key in expected} == expected
    assert "--q-lora-rank" not in options(export("megatron", Plan(dp=16), "deepseek-v2-lite"))
    assert "--moe-layer-freq" not in options(export("megatron", Plan(dp=16), "mixtral-8x7b"))


@pytest.mark.parametrize(("stage", "strategy"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_shards_more_with_its_fsdp(stage: int, strategy: str) -> None:
    said = options(export("megatron", Plan(dp=16, zero_stage=stage)))
    assert said["--data-parallel-sharding-strategy"] == strategy
    assert {"--use-megatron-fsdp", "--use-distributed-optimizer"} <= set(said)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "words"),
    [
        (DType.BF16, DType.FP32, {"--bf16", "--accumulate-allreduce-grads-in-fp32"}),
        (DType.BF16, DType.BF16, {"--bf16", "--grad-reduce-in-bf16"}),
        (DType.FP16, DType.FP32, {"--fp16", "--accumulate-allreduce-grads-in-fp32"}),
        (DType.FP8, DType.FP32, {"--bf16", "--fp8-format", "--accumulate-allreduce-grads-in-fp32"}),
        (DType.FP32, DType.FP32, set()),
    ],
)
def test_megatron_says_the_number_formats(dtype: DType, grad_dtype: DType, words: set[str]) -> None:
    said = set(options(export("megatron", Plan(dp=16), dtype=dtype, grad_dtype=grad_dtype)))
    every = {"--bf16", "--fp16", "--fp8-format", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"}
    assert said & every == words


def test_deepspeed_says_batch_and_stage() -> None:
    found = export("deepspeed", Plan(tp=2, dp=8, micro_batch=2, zero_stage=2))
    assert parsed(found) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    }
    assert "autotune.json" in found.argv
    assert parsed(export("deepspeed", Plan(dp=16)))["train_batch_size"] == 64


def test_deepspeed_adds_gradients_up_as_it_can() -> None:
    def said(plan: Plan, **workload: object) -> tuple[int, str]:
        config = parsed(export("deepspeed", plan, **workload))
        return config["zero_optimization"]["stage"], config["data_types"]["grad_accum_dtype"]

    assert said(Plan(dp=16)) == (0, "bf16")
    assert said(Plan(dp=16, zero_stage=1)) == (1, "fp32")
    assert said(Plan(pp=16)) == (1, "fp32")  # one replica: nothing is sharded, and there is an fp32 accumulator
    assert said(Plan(dp=16), dtype=DType.FP32) == (0, "fp32")


def test_deepspeeds_config_holds_what_its_script_needs() -> None:
    config = parsed(export("deepspeed", Plan(pp=4, dp=4, zero_stage=1, recompute=FULL)))
    assert config["gradient_accumulation_steps"] == 16
    assert config["pipeline"] == {"stages": 4, "activation_checkpoint_interval": 1}
    whole = parsed(export("deepspeed", Plan(dp=16, recompute=FULL)))
    assert whole["activation_checkpointing"] == {"number_checkpoints": 32}
    experts = export("deepspeed", Plan(dp=16, ep=8), "mixtral-8x7b")
    assert parsed(experts)["expert_parallel"]["autoep_size"] == 8
    assert json.loads(experts.files()["config.json"])["model_type"] == "mixtral"


def test_torchtitan_says_pipeline_and_shards() -> None:
    plan = Plan(tp=2, pp=2, dp=4, vpp=2, micro_batch=2, zero_stage=2, recompute=FULL, sequence_parallel=True,
                schedule=Schedule.INTERLEAVED)  # fmt: skip
    config = parsed(export("torchtitan@0.2", plan))
    assert config["parallelism"] == {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 2, "context_parallel_degree": 1, "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_microbatch_size": 2, "pipeline_parallel_layers_per_stage": 8,
        "pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0,
    }  # fmt: skip
    # 64 sequences over 4 replicas: 16 each, cut into 8 micro-batches of 2 by the pipeline.
    assert (config["training"]["local_batch_size"], config["training"]["global_batch_size"]) == (16, 64)
    assert config["activation_checkpoint"] == {"mode": "full"}


def test_torchtitan_accumulates_without_a_pipeline() -> None:
    config = parsed(export("torchtitan@0.2", Plan(dp=16, micro_batch=2, zero_stage=3)))
    assert config["training"]["local_batch_size"] == 2
    assert config["parallelism"]["fsdp_reshard_after_forward"] == "always"
    replicated = parsed(export("torchtitan@0.2", Plan(dp=16)))["parallelism"]
    assert (replicated["data_parallel_replicate_degree"], replicated["data_parallel_shard_degree"]) == (16, 1)


def test_nemo_says_the_same_in_overrides_and_yaml() -> None:
    found = export("nemo", Plan(tp=4, pp=2, dp=2, zero_stage=1, recompute=SELECTIVE, sequence_parallel=True))
    config = parsed(found)
    assert config["model"]["tensor_model_parallel_size"] == 4
    assert config["model"]["recompute_granularity"] == "selective"
    assert config["train"] == {"global_batch_size": 64, "micro_batch_size": 1}
    assert config["ddp"] == {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    for word in ("model.pipeline_model_parallel_size=2", "model.sequence_parallel=true", "mixed_precision=bf16_mixed",
                 "model.virtual_pipeline_model_parallel_size=null", "ddp.use_distributed_optimizer=true"):  # fmt: skip
        assert word in found.argv
    sharded = parsed(export("nemo", Plan(dp=16, zero_stage=3)))
    assert sharded["ddp"]["data_parallel_sharding_strategy"] == "optim_grads_params"
    assert sharded["dist"] == {"use_megatron_fsdp": True}


def test_nanotron_says_the_plan_and_the_shape() -> None:
    plan = Plan(tp=2, pp=2, dp=4, micro_batch=2, zero_stage=1, recompute=FULL, sequence_parallel=True)
    config = parsed(export("nanotron", plan))
    assert config["parallelism"] == {
        "dp": 4, "pp": 2, "tp": 2, "pp_engine": "1f1b", "tp_mode": "REDUCE_SCATTER",
        "tp_linear_async_communication": True, "recompute_layer": True,
    }  # fmt: skip
    assert config["tokens"]["batch_accumulation_per_replica"] == 8
    assert config["optimizer"]["zero_stage"] == 1
    assert config["model"]["model_config"]["num_key_value_heads"] == 8
    assert parsed(export("nanotron", Plan(pp=16, schedule=Schedule.GPIPE)))["parallelism"]["pp_engine"] == "afab"
    assert parsed(export("nanotron", Plan(tp=2, dp=8)))["parallelism"]["tp_mode"] == "ALL_REDUCE"


def test_transformers_says_replicas_and_shards() -> None:
    plain = parsed(export("transformers", Plan(dp=16, micro_batch=2, recompute=FULL)))
    assert (plain["per_device_train_batch_size"], plain["gradient_accumulation_steps"]) == (2, 2)
    assert plain["gradient_checkpointing"]
    assert "fsdp" not in plain
    sharded = parsed(export("transformers", Plan(dp=16, zero_stage=2, recompute=FULL)))
    assert sharded["fsdp_config"] == {
        "version": 2, "reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "activation_checkpointing": True,
    }  # fmt: skip
    assert "gradient_checkpointing" not in sharded


def test_stages_of_unequal_length_are_named() -> None:
    parts = parsed(export("torchtitan@0.2", Plan(pp=5, dp=2, zero_stage=3), cluster="h100-80gb-sxm:1x10"))
    found = parts["parallelism"]["module_fqns_per_model_part"]
    assert [sum(name.startswith("layers.") for name in part) for part in found] == [7, 7, 6, 6, 6]
    assert (found[0][0], found[-1][-2:], found[1][0]) == ("tok_embeddings", ["norm", "output"], "layers.7")


INTERLEAVED = {"pp": 2, "dp": 8, "vpp": 2, "schedule": Schedule.INTERLEAVED}


@pytest.mark.parametrize(
    ("target", "plan", "reason"),
    [
        ("megatron", Plan(pp=2, dp=8, schedule=Schedule.GPIPE), "no GPipe"),
        ("megatron", Plan(pp=2, dp=8, zero_stage=2), "exclude each other"),
        ("nemo", Plan(pp=2, dp=8, schedule=Schedule.GPIPE), "nemo: .*no GPipe"),
        ("nemo", Plan(pp=2, dp=8, zero_stage=3), "exclude each other"),
        ("deepspeed", Plan(pp=2, dp=8, zero_stage=2), "refuses ZeRO-2 and ZeRO-3"),
        ("deepspeed", Plan(pp=2, dp=8, zero_stage=3), "refuses ZeRO-2 and ZeRO-3"),
        ("deepspeed", Plan(tp=2, dp=8, zero_stage=3), "AutoTP"),
        ("deepspeed", Plan(tp=2, pp=2, dp=4), "not combined"),
        ("deepspeed", Plan(pp=2, dp=8, schedule=Schedule.GPIPE), "1f1b only"),
        ("deepspeed", Plan(**INTERLEAVED), "1f1b only"),
        ("deepspeed", Plan(tp=2, dp=8, sequence_parallel=True), "no sequence parallelism"),
        ("deepspeed", Plan(cp=2, dp=8), "context parallelism"),
        ("deepspeed", Plan(dp=16, recompute=SELECTIVE), "whole layers"),
        ("torchtitan", Plan(dp=16, zero_stage=1), "no ZeRO-1"),
        ("torchtitan@0.2", Plan(pp=2, dp=8), "DDP combines with no other axis"),
        ("torchtitan@0.2", Plan(tp=2, dp=8, zero_stage=2), "always sequence parallel"),
        ("torchtitan@0.2", Plan(pp=16), "with dp and cp 1 it trains in fp32"),
        ("torchtitan", Plan(cp=2, dp=8), "always shards parameters over context-parallel ranks"),
        ("torchtitan", Plan(pp=8, dp=2, micro_batch=8, zero_stage=3), r"at least pp \(8\) micro-batches .* has 4"),
        ("deepspeed", Plan(pp=2, dp=8), "shards optimizer states in bf16"),
        ("transformers", Plan(pp=2, dp=8), "no pipeline"),
        ("transformers", Plan(tp=2, dp=8), "covers data parallelism"),
        ("transformers", Plan(dp=16, zero_stage=1), "no ZeRO-1"),
        ("torchtitan", Plan(dp=16, zero_stage=2, recompute=SELECTIVE), "selective"),
        ("nanotron", Plan(dp=16, zero_stage=2), "ZeRO-0 and ZeRO-1"),
        ("nanotron", Plan(**INTERLEAVED), "no interleaved"),
        ("nanotron", Plan(pp=16, micro_batch=32), r"at least pp - 1 \(15\) micro-batches"),
        ("nanotron", Plan(dp=16, recompute=SELECTIVE), "whole layers"),
        ("nanotron", Plan(cp=2, dp=8), "neither context nor expert"),
    ],
)  # fmt: skip
def test_a_plan_without_words_is_refused_with_the_reason(target: str, plan: Plan, reason: str) -> None:
    with pytest.raises(IllegalPlanError, match=reason) as error:
        export(target, plan)
    assert plan.key in str(error.value)


@pytest.mark.parametrize(
    ("target", "preset", "plan", "workload", "reason"),
    [
        ("megatron", "qwen3-4b", Plan(pp=16), {}, r"layers \(36\), or .*divisible by pp \* vpp \(16\)"),
        ("megatron", "mixtral-8x7b", Plan(tp=2, dp=8), {}, "needs sequence_parallel"),
        ("torchtitan", "qwen3-4b", Plan(pp=4, dp=4, zero_stage=3), {}, "ties no embedding to a head"),
        ("torchtitan@0.2", "qwen3-8b", Plan(pp=4, dp=4, zero_stage=3), {}, "Qwen3, .*, has no pipeline"),
        ("torchtitan", "gpt2", Plan(dp=16), {}, "RMSNorm"),
        ("torchtitan", "llama3-8b", Plan(tp=8, dp=2, zero_stage=3, sequence_parallel=True), {"seq_len": 4092}, "of 8"),
        (
            "deepspeed",
            "llama3-8b",
            Plan(dp=16),
            {"grad_dtype": DType.FP32},
            "without ZeRO it adds gradients up in bf16",
        ),
        ("deepspeed", "mixtral-8x7b", Plan(tp=2, dp=8), {}, "divides no experts"),
        ("nanotron", "llama3-8b", Plan(dp=16), {"optimizer": Optimizer.SGD}, "no momentum"),
        ("transformers", "deepseek-v3", Plan(dp=16), {}, "no family of transformers"),
        ("torchtitan", "llama3-8b", Plan(dp=16), {"dtype": DType.FP16}, "fp16"),
        ("torchtitan", "llama3-8b", Plan(dp=16), {"grad_dtype": DType.BF16}, "fp32 only"),
        ("torchtitan", "llama3-8b", Plan(dp=16), {"optimizer": Optimizer.SGD}, "AdamW"),
        ("deepspeed", "llama3-8b", Plan(dp=16), {"dtype": DType.FP8}, "fp8"),
        ("nemo", "llama3-8b", Plan(dp=16), {"dtype": DType.FP8}, "fp8"),
        ("nanotron", "llama3-8b", Plan(dp=16), {"dtype": DType.FP8}, "fp8"),
        ("nanotron", "gpt2", Plan(dp=16), {}, "Llama's shape only"),
        ("nanotron", "qwen2.5-7b", Plan(dp=16), {}, "Llama's shape only"),
        ("nanotron", "mixtral-8x7b", Plan(dp=16), {}, "Llama's shape only"),
    ],
)
def test_a_model_or_workload_without_words_is_refused(
    target: str, preset: str, plan: Plan, workload: dict[str, object], reason: str
) -> None:
    with pytest.raises(IllegalPlanError, match=reason):
        export(target, plan, preset, **workload)


def test_biases_that_megatron_cannot_separate_are_refused() -> None:
    odd = model("gpt2").model_copy(update={"qkv_bias": False})
    with pytest.raises(IllegalPlanError, match="biases q, k and v"):
        export("megatron", Plan(dp=16), odd)


@pytest.mark.parametrize("preset", [preset.name for preset in models() if preset.uniform])
def test_every_preset_has_megatron_arguments(preset: str) -> None:
    assert "pretrain_gpt.py" in export("megatron", Plan(dp=16, zero_stage=1), preset).argv


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=16),
        Plan(tp=2, pp=2, dp=4, micro_batch=4, zero_stage=1, sequence_parallel=True, recompute=SELECTIVE),
        Plan(**INTERLEAVED),
        Plan(pp=2, dp=8, vpp=2),
        Plan(pp=16, schedule=Schedule.GPIPE),
        Plan(cp=2, dp=8, ep=4),
    ],
)
def test_a_plans_text_is_read_back_as_the_plan(plan: Plan) -> None:
    assert Plan.parse(plan_text(plan)) == plan
    command = shlex.split(own_command(model("tiny"), CLUSTER, WORKLOAD, plan))
    assert command[:3] == ["autotune", "probe", "step"]
    said = dict(zip(command[3::2], command[4::2], strict=True))
    assert (said["--model"], said["--cluster"]) == ("tiny", "a100-80gb-sxm:2x8")
    assert (said["--seq-len"], said["--global-batch"], said["--dtype"]) == ("4096", "64", "bf16")
    assert Plan.parse(said["--plan"]) == plan
