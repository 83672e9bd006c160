"""torchtitan: the TOML job config of releases 0.2.x (torchtitan/config/job_config.py); 0.3 took to Python configs."""

from __future__ import annotations

import json

from autotune.frameworks.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.specs import DType, Optimizer, Recompute, Schedule

NAME = "torchtitan"
VERSIONS = ("0.2",)
CONFIG = "autotune.toml"
_SCHEDULES = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED: "Interleaved1F1B"}
_PRECISION = {DType.BF16: "bfloat16", DType.FP32: "float32"}
_RECOMPUTES: dict[Recompute, dict[str, object]] = {
    Recompute.NONE: {"mode": "none"},
    Recompute.FULL: {"mode": "full"},
    Recompute.OP: {"mode": "selective", "selective_ac_option": "op"},
}

Sections = dict[str, dict[str, object]]


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node and its TOML. Raises IllegalPlanError for what torchtitan cannot say."""
    plan, workload, model = run.plan, run.workload, run.model
    others = plan.tp * plan.pp * plan.cp * plan.ep
    chunks = plan.pp * plan.vpp
    refuse(
        NAME,
        run,
        (
            (
                plan.dp > 1 and plan.zero_stage == 1,
                "FSDP shards gradients too: it has no ZeRO-1, use zero_stage 2 or 3",
            ),
            (
                plan.dp > 1 and plan.zero_stage == 0 and others > 1,
                "its DDP combines with no other axis: use ZeRO-2 or 3",
            ),
            (plan.tp > 1 and not plan.sequence_parallel, "its tensor parallelism is always sequence parallel"),
            (
                plan.recompute is Recompute.SELECTIVE,
                "its selective mode saves other tensors than the attention core's: use recompute op",
            ),
            (model.layers % chunks > 0, f"its split needs layers ({model.layers}) divisible by pp * vpp ({chunks})"),
            (workload.dtype not in _PRECISION, f"{workload.dtype.value} is not among its precisions: bf16, fp32"),
            (workload.gradients is not DType.FP32, "it reduces gradients in fp32 only"),
            (workload.optimizer is not Optimizer.ADAMW, "its optimizers are Adam and AdamW"),
        ),
    )
    refuse_choices(NAME, run)
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "-m", "torchtitan.train", "--job.config_file", CONFIG),
        config_name=CONFIG,
        config=_toml(_sections(run)),
        notes=(
            f"Add [model] with the name and flavor of {model.name}, or of a flavor that you define with its shape.",
            "For torchtitan 0.2.x; from 0.3 on the same fields are set in a Python config.",
        ),
    )


def _sections(run: ExportRequest) -> Sections:
    plan, workload = run.plan, run.workload
    # A pipeline cuts the local batch into its micro-batches; without one, the step accumulates gradients.
    local_batch = plan.micro_batch * (run.micro_batches if plan.pp > 1 else 1)
    return {
        "training": {
            "local_batch_size": local_batch,
            "global_batch_size": workload.global_batch,
            "seq_len": workload.seq_len,
            "mixed_precision_param": _PRECISION[workload.dtype],
            "mixed_precision_reduce": "float32",
        },
        "optimizer": {"name": "AdamW"},
        "parallelism": _parallelism(run),
        "activation_checkpoint": _RECOMPUTES[plan.recompute],
    }


def _parallelism(run: ExportRequest) -> dict[str, object]:
    plan = run.plan
    sharded = plan.zero_stage > 1
    degrees: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if plan.zero_stage == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.pp == 1:
        return degrees
    return degrees | {
        "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
        "pipeline_parallel_microbatch_size": plan.micro_batch,
        "pipeline_parallel_layers_per_stage": run.model.layers // (plan.pp * plan.vpp),
        # Equal stages, as in our plans; torchtitan's default takes one layer off each end.
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }


def _toml(sections: Sections) -> str:
    """TOML of strings and whole numbers, which JSON spells the same way."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
        for name, values in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"
