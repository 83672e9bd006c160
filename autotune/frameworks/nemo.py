"""NeMo: overrides of a Megatron-Bridge recipe (ConfigContainer), for scripts/training/run_recipe.py and as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from autotune.frameworks import megatron
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.specs import CrossEntropy, DType, Plan, Recompute, Workload

NAME = "nemo"
VERSIONS = ("0.6",)
_PRECISION = {DType.BF16: "bf16_mixed", DType.FP16: "fp16_mixed"}


_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node, and its overrides as YAML. Raises IllegalPlanError as Megatron-LM does."""
    megatron.check(NAME, run)
    refuse(
        NAME, run, ((run.workload.dtype not in _PRECISION, f"{run.workload.dtype.value} is not exported: bf16, fp16"),)
    )
    refuse_choices(
        NAME, run, grad_dtype=("fp32", "bf16"), cross_entropy=("eager", "fused"),
    )  # fmt: skip
    config = _config(run)
    words = ("--recipe", "RECIPE", "--dataset", "llm-pretrain-mock", *_overrides(config))
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "scripts/training/run_recipe.py", *words),
        config_name="autotune.yaml",
        config=yaml.safe_dump(config, sort_keys=False),
        notes=(
            f"RECIPE is the pre-training recipe of your model ({run.model.name}) in megatron.bridge.recipes: it sets "
            "the shape; what stands here is the plan and the workload.",
            "The YAML holds the same overrides, for recipe scripts that take --config-file.",
        ),
    )


def _config(run: ExportRequest) -> dict[str, Any]:
    plan, workload = run.plan, run.workload
    fsdp = plan.zero_stage > 1
    return {
        "model": {
            "seq_length": workload.seq_len,
            **_parallelism(plan),
            **_loss(workload),
            **(_ENDS if megatron.counts_ends(run) else {}),
        },
        "dataset": {"seq_length": workload.seq_len},
        "train": {"global_batch_size": workload.global_batch, "micro_batch_size": plan.micro_batch},
        "mixed_precision": _PRECISION[workload.dtype],
        "optimizer": {"use_distributed_optimizer": plan.zero_stage > 0},
        "ddp": {
            "use_distributed_optimizer": plan.zero_stage > 0,
            "grad_reduce_in_fp32": workload.gradients is DType.FP32,
            **({"data_parallel_sharding_strategy": megatron.SHARDING[plan.zero_stage]} if fsdp else {}),
        },
        **({"dist": {"use_megatron_fsdp": True}, "checkpoint": {"ckpt_format": "fsdp_dtensor"}} if fsdp else {}),
    }


def _parallelism(plan: Plan) -> dict[str, Any]:
    full = plan.recompute is Recompute.FULL
    return {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": plan.vpp if plan.vpp > 1 else None,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        **({"expert_tensor_parallel_size": plan.expert_tp} if plan.ep > 1 or plan.etp else {}),
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
        "recompute_granularity": None if plan.recompute is Recompute.NONE else plan.recompute.value,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
        **(
            {"recompute_modules": [module.value for module in plan.recompute_modules]} if plan.recompute_modules else {}
        ),
    }


def _loss(workload: Workload) -> dict[str, Any]:
    if workload.cross_entropy is None:
        return {}
    fused = workload.cross_entropy is CrossEntropy.FUSED
    return {"cross_entropy_loss_fusion": fused, **({"cross_entropy_fusion_impl": "te"} if fused else {})}


def _overrides(config: dict[str, Any]) -> list[str]:
    """The nested values as Hydra writes them: `model.tensor_model_parallel_size=8`."""
    words = []
    for section, values in config.items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            text = "[" + ",".join(value) + "]" if isinstance(value, list) else text
            words.append(f"{section}.{key}={text}" if key else f"{section}={text}")
    return words
