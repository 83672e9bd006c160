"""DeepSpeed: its JSON config (deepspeed.ai/docs/config-json), for the user's own training script."""

from __future__ import annotations

import json
from typing import Any

from autotune.frameworks.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.specs import DType, Plan, Recompute, Schedule

NAME = "deepspeed"
VERSIONS = ("0.19",)
CONFIG = "autotune.json"
_COMMUNICATED = {DType.FP32: "fp32", DType.BF16: "bfp16", DType.FP16: "fp16"}


def export(run: ExportRequest) -> LaunchArguments:
    """The command and its JSON. Raises IllegalPlanError for what DeepSpeed cannot do."""
    plan, dtype = run.plan, run.workload.dtype
    refuse(
        NAME,
        run,
        (
            (plan.zero_stage > 1 and plan.pp > 1, "its pipeline engine refuses ZeRO-2 and ZeRO-3"),
            (plan.zero_stage > 2 and plan.tp > 1, "its tensor parallelism (AutoTP) goes with ZeRO 0, 1 or 2"),
            (plan.tp > 1 and plan.pp > 1, "AutoTP and its pipeline engine are not combined"),
            (plan.pp > 1 and plan.schedule is not Schedule.ONE_F_ONE_B, "its pipeline engine has 1f1b only"),
            (plan.vpp > 1, "its pipeline engine holds one chunk a rank"),
            (plan.sequence_parallel and plan.tp > 1, "AutoTP has no sequence parallelism"),
            (plan.cp > 1, "context parallelism is no part of its config"),
            (plan.recompute in {Recompute.SELECTIVE, Recompute.OP}, "it recomputes whole layers only"),
            (dtype is DType.FP8, "fp8 is no part of its config"),
        ),
    )
    refuse_choices(NAME, run, grad_dtype=tuple(_COMMUNICATED), reduce_dtype=tuple(_COMMUNICATED))
    nodes, gpus = str(run.cluster.nodes), str(run.cluster.gpus_per_node)
    launch = ("deepspeed", "--num_nodes", nodes, "--num_gpus", gpus)
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*launch, "train.py", "--deepspeed", "--deepspeed_config", CONFIG),
        config_name=CONFIG,
        config=json.dumps(_config(run), indent=2) + "\n",
        notes=tuple(_notes(plan)),
    )


def _config(run: ExportRequest) -> dict[str, Any]:
    plan, workload = run.plan, run.workload
    config: dict[str, Any] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "zero_optimization": {"stage": plan.zero_stage},
        "data_types": {"grad_accum_dtype": workload.gradients.value},
    }
    if workload.reduce_dtype is not None:
        config["communication_data_type"] = _COMMUNICATED[workload.reduce_dtype]
    if workload.dtype in {DType.BF16, DType.FP16}:
        config[workload.dtype.value] = {"enabled": True}
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    return config


def _notes(plan: Plan) -> list[str]:
    notes = ["train.py is your script: it builds the model and the optimizer and calls deepspeed.initialize."]
    if plan.pp > 1:
        notes.append(f"Build the model as PipelineModule(..., num_stages={plan.pp}): stages are no part of the JSON.")
    if plan.ep > 1:
        notes.append(f"Build the experts with deepspeed.moe.layer.MoE(..., ep_size={plan.ep}).")
    if plan.recompute is Recompute.FULL:
        how = "activation_checkpoint_interval=1 of PipelineModule" if plan.pp > 1 else "deepspeed.checkpointing"
        notes.append(f"Recompute each layer in your model: {how}.")
    return notes
