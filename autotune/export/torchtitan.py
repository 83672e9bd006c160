"""torchtitan: the TOML job config of 0.2 (torchtitan/config/job_config.py), the Python one of 0.3 (config/configs.py).

Both have the same names for what a plan says: one table of them is written and read. What a plan says in other words
(sharding, batches, stages, recomputation) are the functions below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autotune.export.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.export.torchtitan_models import family, model_module, registry_module, unsayable_model
from autotune.specs import DeviceKind, DType, Optimizer, Plan, Recompute, Schedule

NAME = "torchtitan"
VERSIONS = ("0.2", "0.3")
CONFIG = "autotune.toml"
MODEL = "autotune_model"
REGISTRY = "autotune_config"
SCHEDULES = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED: "Interleaved1F1B"}
PRECISION = {DType.BF16: "bfloat16", DType.FP32: "float32"}
DEGREES = {
    "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}  # fmt: skip

Sections = dict[str, dict[str, object]]


def check(run: ExportRequest, version: str) -> None:
    """Raises IllegalPlanError for a plan, model or workload that this torchtitan cannot run as it is meant."""
    refuse(NAME, run, ((True, reason) for reason in reasons(run, version)))
    refuse_choices(NAME, run)


def reasons(run: ExportRequest, version: str) -> Iterator[str]:
    """Why this torchtitan cannot run the plan."""
    plan, workload, model = run.plan, run.workload, run.model
    replicas, shards = plan.dp, plan.dp * plan.cp
    others = plan.tp * plan.pp * plan.cp > 1 or plan.ep > 1
    old = version == "0.2"
    if shards > 1 and plan.zero_stage == 1:
        yield "FSDP shards gradients too: it has no ZeRO-1, use zero_stage 2 or 3"
    if plan.cp > 1 and plan.zero_stage < 2:
        yield "it always shards parameters over context-parallel ranks: use zero_stage 2 or 3"
    if old and replicas > 1 and plan.zero_stage == 0 and others:
        yield "its DDP combines with no other axis: use zero_stage 2 or 3"
    if old and shards == 1 and others and workload.dtype is not DType.FP32:
        yield f"with dp and cp 1 only FSDP would compute in {workload.dtype.value}, and it is off: it trains in fp32"
    if old and plan.tp > 1 and not plan.sequence_parallel:
        yield "its tensor parallelism is always sequence parallel"
    if plan.recompute is Recompute.SELECTIVE:
        yield "its selective mode saves other tensors than the attention core's: use recompute op"
    if plan.pp > 1 and model.tied:
        yield "it ties no embedding to a head across a pipeline"
    if old and plan.pp > 1 and family(model) == "qwen3":
        yield "in 0.2 its Qwen3, which has this shape, has no pipeline"
    if plan.schedule is not Schedule.INTERLEAVED and run.micro_batches < plan.pp:
        yield f"its schedules need at least pp ({plan.pp}) micro-batches a step, this plan has {run.micro_batches}"
    whole = plan.tp * 2 * plan.cp if old else (plan.tp if plan.sequence_parallel else 1) * (plan.cp > 1 and 2 * plan.cp or 1)
    if workload.seq_len % whole:
        yield f"seq_len {workload.seq_len} must be a multiple of {whole}, which its tp {plan.tp} and cp {plan.cp} ask for"
    if model.experts and plan.ep == 1 and plan.tp > 1 and plan.expert_tp != plan.tp:
        yield f"without expert parallelism its experts are divided by tp ({plan.tp}), not by {plan.expert_tp}"
    if model.experts and plan.ep > 1 and plan.expert_tp not in ({1, plan.tp} if old else {1}):
        yield f"its experts are on {'1 or tp ranks' if old else 'one rank'} each, not on {plan.expert_tp}"
    region = (plan.dp if plan.zero_stage > 1 else 1) * plan.cp * plan.tp
    if model.experts and plan.ep > 1 and region % (plan.ep * plan.expert_tp):
        yield f"ep ({plan.ep}) times the ranks of an expert must divide tp, cp and the sharded dp ({region})"
    if workload.dtype not in PRECISION:
        yield f"{workload.dtype.value} is not among its precisions: bf16, fp32"
    if workload.gradients is not DType.FP32:
        yield "it reduces gradients in fp32 only"
    if workload.optimizer is not Optimizer.ADAMW:
        yield "its optimizers are Adam and AdamW"
    if reason := unsayable_model(model, version):
        yield reason


def export(run: ExportRequest, version: str = "0.2") -> LaunchArguments:
    """The command of one node and its files. Raises IllegalPlanError as `check`."""
    check(run, version)
    if version == "0.2":
        files = {CONFIG: _toml(_sections(run, version)), f"{MODEL}.py": model_module(run.model)}
        words = ("--job.config_file", CONFIG)
        notes = (f"{MODEL}.py trains on random tokens: set your data, and [model] hf_assets_path to your tokenizer.",)
    else:
        files = {f"{REGISTRY}.py": registry_module(run.model, _sections(run, version), _recompute(run.plan))}
        words = ("--module", REGISTRY, "--config", "plan")
        notes = (f"Set DATASET and TOKENIZER in {REGISTRY}.py to yours.",)
    return LaunchArguments(
        target=NAME,
        argv=(*run.torchrun(), "-m", "torchtitan.train", *words),
        config_name=next(iter(files)),
        config=next(iter(files.values())),
        files=tuple(files.items()),
        notes=notes,
    )


def _sections(run: ExportRequest, version: str) -> Sections:
    plan, workload = run.plan, run.workload
    # A pipeline cuts the local batch into its micro-batches; without one, the step accumulates gradients.
    local_batch = plan.micro_batch * (run.micro_batches if plan.pp > 1 else 1)
    training: dict[str, object] = {
        "local_batch_size": local_batch,
        "global_batch_size": workload.global_batch,
        "seq_len": workload.seq_len,
        "steps": 100,
        "mixed_precision_param": PRECISION[workload.dtype],
        "mixed_precision_reduce": "float32",
    }
    if version != "0.2":
        if plan.pp > 1 or plan.ep > 1:
            training["disable_cuda_graphs"] = True
        return {"training": training, "parallelism": _parallelism(run, version)}
    optimizer: dict[str, object] = {"name": "AdamW"}
    if run.cluster.device.kind is DeviceKind.CPU:
        optimizer["implementation"] = "foreach"  # fused AdamW is CUDA's
    return {
        "experimental": {"custom_import": MODEL},
        "model": {"name": "autotune", "flavor": "plan"},
        "training": training,
        "optimizer": optimizer,
        "parallelism": _parallelism(run, version),
        "activation_checkpoint": _recompute(plan),
    }


def _recompute(plan: Plan) -> dict[str, object]:
    if plan.recompute is Recompute.OP:
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": plan.recompute.value}


def _parallelism(run: ExportRequest, version: str) -> dict[str, object]:
    plan = run.plan
    sharded = plan.zero_stage > 1
    said: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if plan.zero_stage == 3 else "never",
        **{name: getattr(plan, ours) for ours, name in DEGREES.items()},
    }
    if version == "0.2" and plan.ep > 1:
        said["expert_tensor_parallel_degree"] = plan.expert_tp
    if version != "0.2" and plan.tp > 1:
        said["enable_sequence_parallel"] = plan.sequence_parallel
    if plan.pp > 1:
        said |= {
            "pipeline_parallel_schedule": SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": plan.micro_batch,
            **_stages(run.model.layers, plan.pp * plan.vpp, version),
        }
    return said


def _stages(layers: int, chunks: int, version: str) -> dict[str, object]:
    """Stages as our plans have them, longer ones first; torchtitan's default takes a layer off each end."""
    if layers % chunks == 0:
        return {
            "pipeline_parallel_layers_per_stage": layers // chunks,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    names: list[list[str]] = []
    for chunk in range(chunks):
        start = sum(map(len, names))
        count = layers // chunks + (chunk < layers % chunks)
        names.append([f"layers.{at}" for at in range(start, start + count)])
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output" if version == "0.2" else "lm_head"]
    return {"module_fqns_per_model_part": names}


def _toml(sections: Sections) -> str:
    """TOML of strings, truths, whole numbers and lists of strings, which JSON spells the same way."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
        for name, values in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"
