"""Megatron-LM: arguments of pretrain_gpt.py (megatron/training/arguments.py and megatron/core, releases from 0.14).

The rank order is the plan's: Megatron's default, tp-cp-ep-dp-pp.
"""

from __future__ import annotations

from autotune.frameworks.arguments import ExportRequest, LaunchArguments, flags, refuse, refuse_choices
from autotune.specs import (
    CrossEntropy,
    DType,
    Fp8Recipe,
    ModelSpec,
    Norm,
    Optimizer,
    Plan,
    Position,
    Recompute,
    Schedule,
    Workload,
)

NAME = "megatron"
VERSIONS = ("0.19", "0.18", "0.17", "0.16", "0.15", "0.14")
# Megatron-FSDP's names of the ZeRO stages (its developer guide, ShardingStrategy).
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node. Raises IllegalPlanError for what Megatron-LM has no argument for."""
    check(NAME, run)
    moments = ("fp32", "fp16", "bf16", "fp8")
    refuse_choices(
        NAME, run, grad_dtype=("fp32", "bf16"), master_dtype=("fp32", "fp16"), exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments, fp8_recipe=tuple(Fp8Recipe),
        param_dtype=("fp8", "bf16") if run.workload.dtype is DType.FP8 else (run.workload.dtype.value,),
        cross_entropy=("eager", "fused"),
    )  # fmt: skip
    states = _states(run.workload)
    refuse(
        NAME, run, ((bool(states) and not run.plan.zero_stage, f"{next(iter(states), '')} needs ZeRO-1 or more"),)
    )  # fmt: skip
    words = {
        **_shape(run.model, run.workload), **_moe(run.model), **_parallelism(run.plan), **_batch(run), **states,
    }  # fmt: skip
    words |= {flag: True for flag in ENDS if counts_ends(run)}
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "pretrain_gpt.py", *flags(words)),
        notes=tuple(_notes(run.plan)),
    )


ENDS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def counts_ends(run: ExportRequest) -> bool:
    """Whether the embedding and the head count as layers, because layers alone do not divide over the stages."""
    return run.model.layers % (run.plan.pp * run.plan.vpp) > 0


def check(target: str, run: ExportRequest) -> None:
    """Raises IllegalPlanError for a plan or model that Megatron-Core cannot run; `target` is named in it."""
    model, plan = run.model, run.plan
    chunks = plan.pp * plan.vpp
    refuse(
        target,
        run,
        (
            (plan.recompute is Recompute.OP, "Megatron recomputes by modules, not by operations"),
            (plan.pp > 1 and plan.schedule is Schedule.GPIPE, "Megatron has no GPipe schedule: use 1f1b"),
            (
                model.layers % chunks > 0 and (model.layers + 2) % chunks > 0,
                f"Megatron needs layers ({model.layers}), or layers and both ends, divisible by pp * vpp ({chunks})",
            ),
            (plan.zero_stage > 1 and plan.pp > 1, "Megatron-FSDP (ZeRO-2, ZeRO-3) and a pipeline exclude each other"),
            (
                model.experts > 0 and plan.tp > 1 and not plan.sequence_parallel,
                "Megatron needs sequence_parallel where a mixture of experts meets tensor parallelism",
            ),
            (model.linear_bias and not model.qkv_bias, "Megatron biases q, k and v wherever linear layers have biases"),
        ),
    )


def moe_layers(model: ModelSpec) -> str:
    """Which layers are mixtures, as --moe-layer-freq writes it."""
    return f"([0]*{model.dense_layers}+[1]*{model.layers - model.dense_layers})"


def _shape(model: ModelSpec, workload: Workload) -> dict[str, object]:
    learned = model.position is Position.LEARNED
    position = {Position.ROPE: "rope", Position.LEARNED: "learned_absolute", Position.NONE: "none"}[model.position]
    grouped = model.kv_heads != model.heads and model.latent_attention is None
    return {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim if model.latent_attention is None else None,
        "--group-query-attention": grouped,
        "--num-query-groups": model.kv_heads if grouped else None,
        "--seq-length": workload.seq_len,
        "--max-position-embeddings": model.max_positions if learned else workload.seq_len,
        "--position-embedding-type": position,
        "--normalization": "RMSNorm" if model.norm is Norm.RMSNORM else "LayerNorm",
        "--swiglu": model.gated,
        "--disable-bias-linear": not model.linear_bias,
        "--add-qkv-bias": model.qkv_bias and not model.linear_bias,
        "--qk-layernorm": model.qk_norm or model.latent_attention is not None,
        "--untie-embeddings-and-output-weights": not model.tied,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        **_latent(model),
    }


def _latent(model: ModelSpec) -> dict[str, object]:
    latent = model.latent_attention
    if latent is None:
        return {}
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": latent.q_lora_rank or None,
        "--kv-lora-rank": latent.kv_lora_rank,
        "--qk-head-dim": latent.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": latent.qk_rope_head_dim,
        "--v-head-dim": latent.v_head_dim,
    }


def _moe(model: ModelSpec) -> dict[str, object]:
    if not model.experts:
        return {}
    return {
        "--num-experts": model.experts,
        "--moe-router-topk": model.top_k,
        "--moe-ffn-hidden-size": model.expert_ffn,
        "--moe-shared-expert-intermediate-size": model.shared_experts * model.expert_ffn or None,
        "--moe-layer-freq": moe_layers(model) if model.dense_layers else None,
        "--moe-token-dispatcher-type": "alltoall",
    }


def _parallelism(plan: Plan) -> dict[str, object]:
    full, fsdp = plan.recompute is Recompute.FULL, plan.zero_stage > 1
    return {
        "--recompute-modules": tuple(module.value for module in plan.recompute_modules),
        "--tensor-model-parallel-size": plan.tp,
        "--pipeline-model-parallel-size": plan.pp,
        "--context-parallel-size": plan.cp,
        "--expert-model-parallel-size": plan.ep if plan.ep > 1 else None,
        "--expert-tensor-parallel-size": plan.expert_tp if plan.ep > 1 or plan.etp else None,
        "--num-virtual-stages-per-pipeline-rank": plan.vpp if plan.vpp > 1 else None,
        "--sequence-parallel": plan.sequence_parallel and plan.tp > 1,
        "--recompute-granularity": None if plan.recompute is Recompute.NONE else plan.recompute.value,
        "--recompute-method": "uniform" if full else None,
        "--recompute-num-layers": 1 if full else None,
        "--use-distributed-optimizer": plan.zero_stage > 0,
        "--use-megatron-fsdp": fsdp,
        "--data-parallel-sharding-strategy": SHARDING.get(plan.zero_stage),
        "--no-gradient-accumulation-fusion": fsdp,
        "--ckpt-format": "fsdp_dtensor" if fsdp else None,
    }


def _batch(run: ExportRequest) -> dict[str, object]:
    workload = run.workload
    half, fp32_gradients = workload.dtype in {DType.BF16, DType.FP8}, workload.gradients is DType.FP32
    return {
        "--micro-batch-size": run.plan.micro_batch,
        "--global-batch-size": workload.global_batch,
        "--bf16": half,
        "--fp16": workload.dtype is DType.FP16,
        "--fp8-format": "hybrid" if workload.dtype is DType.FP8 else None,
        "--accumulate-allreduce-grads-in-fp32": fp32_gradients and workload.dtype is not DType.FP32,
        "--grad-reduce-in-bf16": half and not fp32_gradients,
        "--fp8-recipe": workload.fp8_recipe,
        "--cross-entropy-loss-fusion": workload.cross_entropy is CrossEntropy.FUSED,
        "--cross-entropy-fusion-impl": "te" if workload.cross_entropy is CrossEntropy.FUSED else None,
        "--optimizer": "adam" if workload.optimizer is Optimizer.ADAMW else "sgd",
        "--lr": 1e-4,
        "--train-iters": 100,
        "--mock-data": True,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": run.model.vocab,
        "--make-vocab-size-divisible-by": 1,
    }


def _states(workload: Workload) -> dict[str, object]:
    """What is sharded in other formats than fp32: parameters in fp8, and the optimizer's states."""
    states = {
        "--main-params-dtype": workload.master_dtype, "--exp-avg-dtype": workload.exp_avg_dtype,
        "--exp-avg-sq-dtype": workload.exp_avg_sq_dtype,
    }  # fmt: skip
    found: dict[str, object] = {name: dtype for name, dtype in states.items() if dtype not in {None, DType.FP32}}
    if found:
        grads = {"--main-grads-dtype": workload.gradients}
        found = {"--use-precision-aware-optimizer": True, **found, **grads}
    if workload.param_dtype is DType.FP8:
        found["--fp8-param-gather"] = True
    return found


def _notes(plan: Plan) -> list[str]:
    notes = [
        "--lr, --train-iters, --mock-data and NullTokenizer (which adds one token) stand in for your own settings.",
    ]
    if plan.zero_stage > 1:
        notes.append("Leave CUDA_DEVICE_MAX_CONNECTIONS unset: Megatron-FSDP needs more than one.")
    elif plan.tp * plan.cp > 1:
        notes.append("Set CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell: Megatron asks for it.")
    return notes
