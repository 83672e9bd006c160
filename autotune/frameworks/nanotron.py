"""nanotron: the YAML of run_train.py (src/nanotron/config), for models of Llama's shape."""

from __future__ import annotations

from typing import Any

import yaml

from autotune.frameworks.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.specs import DType, ModelSpec, Norm, Optimizer, Plan, Position, Recompute, Schedule, Workload

NAME = "nanotron"
VERSIONS = ("0.4",)
CONFIG = "autotune.yaml"
_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
_ENGINES = {Schedule.GPIPE: "afab", Schedule.ONE_F_ONE_B: "1f1b"}


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node and its YAML. Raises IllegalPlanError for what nanotron cannot do."""
    plan, workload = run.plan, run.workload
    refuse(
        NAME,
        run,
        (
            (not _is_llama(run.model), "the export covers models of Llama's shape only"),
            (plan.zero_stage > 1, "it has ZeRO-0 and ZeRO-1"),
            (plan.vpp > 1 or plan.schedule not in _ENGINES, "it has no interleaved schedule"),
            (plan.recompute in {Recompute.SELECTIVE, Recompute.OP}, "it recomputes whole layers only"),
            (
                plan.schedule is Schedule.ONE_F_ONE_B and run.micro_batches < plan.pp - 1,
                f"its 1F1B engine needs at least pp - 1 ({plan.pp - 1}) micro-batches a step "
                f"(tokens.batch_accumulation_per_replica), this plan has {run.micro_batches}",
            ),
            (plan.cp > 1 or plan.ep > 1, "its Llama model has neither context nor expert parallelism"),
            (workload.dtype not in _DTYPES, f"{workload.dtype.value} is not among its dtypes: bf16, fp16, fp32"),
        ),
    )
    refuse_choices(NAME, run, grad_dtype=("fp32", workload.dtype.value))
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "run_train.py", "--config-file", CONFIG),
        config_name=CONFIG,
        config=yaml.safe_dump(_config(run), sort_keys=False),
        notes=(
            "Steps, learning rate, initialisation, checkpoints and data (random tokens) stand in for yours.",
            "Set CUDA_DEVICE_MAX_CONNECTIONS=1: nanotron asks for it.",
        ),
    )


def _is_llama(model: ModelSpec) -> bool:
    plain = not (model.experts or model.latent_attention or model.linear_bias or model.qkv_bias or model.qk_norm)
    like = model.gated and model.norm is Norm.RMSNORM and model.position is Position.ROPE
    return plain and like and model.head_dim * model.heads == model.hidden


def _config(run: ExportRequest) -> dict[str, Any]:
    plan, workload = run.plan, run.workload
    return {
        "general": {"project": "autotune", "run": run.model.name, "seed": 42},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "parallelism": _parallelism(plan),
        "model": _model(run.model, workload),
        "tokenizer": {"tokenizer_name_or_path": "gpt2"},
        "tokens": {
            "sequence_length": workload.seq_len,
            "train_steps": 100,
            "micro_batch_size": plan.micro_batch,
            "batch_accumulation_per_replica": run.micro_batches,
        },
        "optimizer": _optimizer(plan, workload),
        "data_stages": [
            {"name": "training", "start_training_step": 1, "data": {"dataset": None, "seed": 42}},
        ],
    }


def _parallelism(plan: Plan) -> dict[str, Any]:
    sequence_parallel = plan.sequence_parallel and plan.tp > 1
    return {
        "dp": plan.dp,
        "pp": plan.pp,
        "tp": plan.tp,
        "pp_engine": _ENGINES[plan.schedule],
        "tp_mode": "REDUCE_SCATTER" if sequence_parallel else "ALL_REDUCE",
        "tp_linear_async_communication": sequence_parallel,
        "recompute_layer": plan.recompute is Recompute.FULL,
    }


def _model(model: ModelSpec, workload: Workload) -> dict[str, Any]:
    return {
        "dtype": _DTYPES[workload.dtype],
        "init_method": {"std": 0.02},
        "make_vocab_size_divisible_by": 1,
        "model_config": {
            "is_llama_config": True,
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "intermediate_size": model.ffn,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "vocab_size": model.vocab,
            "tie_word_embeddings": model.tied,
            "max_position_embeddings": workload.seq_len,
        },
    }


def _optimizer(plan: Plan, workload: Workload) -> dict[str, Any]:
    adamw = {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True}
    return {
        "zero_stage": plan.zero_stage,
        "accumulate_grad_in_fp32": workload.gradients is DType.FP32,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "optimizer_factory": adamw if workload.optimizer is Optimizer.ADAMW else {"name": "sgd"},
        "learning_rate_scheduler": {"learning_rate": 3e-4, "lr_warmup_steps": 2, "lr_warmup_style": "linear"},
    }
