"""NeMo: overrides of a Megatron-Bridge recipe (ConfigContainer), for scripts/training/run_recipe.py of 0.6 and as YAML.

Read are a config that Bridge has written (run_config.yaml) and the overrides of a command. What a recipe of that name
sets by itself is in Bridge alone: a command with a recipe needs --model and says its plan in overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from autotune.errors import InputError
from autotune.frameworks import megatron_core
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, Placeholder, refuse, refuse_choices
from autotune.frameworks.launchers import Started, started
from autotune.frameworks.reading import Given, ImportedPlan, Launch, assembled, document_of
from autotune.frameworks.table import Entry, Facts, Said, Settings, Table, Why
from autotune.specs import DType, FrameworkName

NAME = "nemo"
VERSIONS = ("0.6",)
_PRECISION = {DType.BF16: "bf16_mixed", DType.FP16: "fp16_mixed"}


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node, and its overrides as YAML. Raises IllegalPlanError as Megatron-LM does."""
    megatron_core.check(NAME, run)
    refuse(
        NAME, run, ((run.workload.dtype not in _PRECISION, f"{run.workload.dtype.value} is not exported: bf16, fp16"),)
    )
    kept = "fp16" if run.workload.dtype is DType.FP16 else "fp32"  # as the precision of that name has it, come what may
    refuse_choices(NAME, run, grad_dtype=(kept,), reduce_dtype=(kept,), cross_entropy=("eager", "fused"))
    settings = TABLE.say(run.facts, run.version)
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(
            *run.torchrun(), "scripts/training/run_recipe.py", "--recipe", "RECIPE", "--mode", "pretrain",
            "--dataset", "mock", *(f"{name}={_hydra(value)}" for name, value in settings.items()),
        ),
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32" if run.plan.zero_stage > 1 else "1"},
        config_name="autotune.yaml",
        config=yaml.safe_dump(_nested(settings), sort_keys=False),
        placeholders=(
            Placeholder("RECIPE", ("--recipe", "RECIPE"), f"--recipe and the pre-training recipe of {run.model.name}."),
            Placeholder("DATA", ("--dataset", "mock"), "--dataset and its options; mock are random tokens."),
        ),
        notes=(
            "The recipe sets the model's shape; what stands here is the plan and the workload.",
            "The YAML holds the same overrides, for scripts that take --config-file.",
        ),
    )  # fmt: skip


def _hydra(value: object) -> str:
    """A value as Hydra's overrides have it."""
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _nested(settings: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        plain = list(value) if isinstance(value, tuple) else value
        if section:
            found.setdefault(section, {})[key] = plain
        else:
            found[key] = plain
    return found


# The table.


def _at(name: str) -> str:
    return f"model.{name}"


def _batch() -> Entry:
    names = "train.micro_batch_size", "train.global_batch_size", "dataset.seq_length", "model.seq_length"

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        ramp = settings.words("train.rampup_batch_size")
        longest = settings.count(names[3])
        return {
            "micro_batch": settings.count(names[0]),
            "global_batch": settings.count(names[1]),
            "seq_len": settings.count(names[2], longest),
            **({"ramp": ramp} if ramp else {}),
        }

    def say(facts: Facts) -> Mapping[str, object]:
        values = (facts["micro_batch"], facts["global_batch"], facts["seq_len"], facts["seq_len"])
        return dict(zip(names, values, strict=True))

    return Entry(say=say, read=read)


def _sharding() -> Entry:
    def say(facts: Facts) -> Mapping[str, object]:
        stage = facts["zero_stage"]
        fsdp = {
            "dist.use_megatron_fsdp": True, "ddp.use_megatron_fsdp": True, "checkpoint.ckpt_format": "fsdp_dtensor",
            "ddp.data_parallel_sharding_strategy": megatron_core.SHARDING.get(stage),
        }  # fmt: skip
        return {
            "optimizer.use_distributed_optimizer": stage > 0,
            "ddp.use_distributed_optimizer": stage > 0,
            "ddp.overlap_grad_reduce": True,
            "ddp.overlap_param_gather": stage > 0,
            **(fsdp if stage > 1 else {}),
        }

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        fsdp = [settings.switch(f"{section}.use_megatron_fsdp") for section in ("dist", "ddp")]
        both = [settings.switch(f"{section}.use_distributed_optimizer") for section in ("optimizer", "ddp")]
        known = tuple(megatron_core.SHARDED)
        strategy = settings.word("ddp.data_parallel_sharding_strategy", "no_shard", known=known) or "no_shard"
        overlaps = settings.switch("ddp.overlap_grad_reduce", True), settings.switch("ddp.overlap_param_gather", True)
        del overlaps  # what a recipe's comm_overlap sets anew
        return {"zero_stage": megatron_core.SHARDED[strategy] if any(fsdp) else int(any(both))}

    return Entry(say=say, read=read)


def _formats() -> Entry:
    """The gradients' format stands in the precision's own record, which overwrites that of ddp."""

    def say(facts: Facts) -> Mapping[str, object]:
        return {"mixed_precision": _PRECISION[DType(facts["dtype"])]}

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        named = str(settings.value("mixed_precision", ""))
        fp8 = "fp8" in named or settings.word("mixed_precision.fp8") is not None
        fp4 = "fp4" in named or settings.word("mixed_precision.fp4") is not None
        bf16, fp16 = settings.switch("mixed_precision.bf16"), settings.switch("mixed_precision.fp16")
        exact = settings.switch("mixed_precision.grad_reduce_in_fp32", settings.switch("ddp.grad_reduce_in_fp32", True))
        found: dict[str, object] = {}
        if fp8 or fp4 or "mx" in named:
            found["dtype"] = "fp8"
        elif bf16 or "bf16" in named:
            found["dtype"] = "bf16"
        elif fp16 or "fp16" in named:
            found["dtype"] = "fp16"
        recipe = settings.word("mixed_precision.fp8_recipe")
        if found.get("dtype") == "fp8" and recipe in {"delayed", "tensorwise", "blockwise", "mxfp8"}:
            found["fp8_recipe"] = recipe
        return found | {"grad_dtype": "fp32" if exact else "bf16"}

    return Entry(say=say, read=read)


def _loss() -> Entry:
    def say(facts: Facts) -> Mapping[str, object]:
        fused = facts["cross_entropy"] == "fused"
        if facts["cross_entropy"] is None:
            return {}
        return {
            "model.cross_entropy_loss_fusion": fused,
            **({"model.cross_entropy_fusion_impl": "te"} if fused else {}),
        }

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        settings.word("model.cross_entropy_fusion_impl")
        if settings.value("model.cross_entropy_loss_fusion") is None:
            return {}
        return {"cross_entropy": "fused" if settings.switch("model.cross_entropy_loss_fusion") else "eager"}

    return Entry(say=say, read=read)


def _shape() -> Entry:
    """The model's shape, which a written config has and an export leaves to the recipe."""

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        heads, hidden = settings.count("model.num_attention_heads"), settings.count("model.hidden_size")
        even = hidden // heads if heads and hidden and hidden % heads == 0 else None
        norm = settings.word("model.normalization")
        position = settings.word("model.position_embedding_type")
        shared = settings.value("model.share_embeddings_and_output_weights")
        gated = settings.value("model.gated_linear_unit")
        experts = settings.count("model.num_moe_experts", 0, least=0)
        layers, linear = settings.count("model.num_layers"), settings.switch("model.add_bias_linear")
        found: dict[str, object] = {
            "layers": layers, "hidden": hidden, "heads": heads, "ffn": settings.count("model.ffn_hidden_size"),
            "kv_heads": settings.count("model.num_query_groups", heads),
            "head_dim": settings.count("model.kv_channels", even),
            "vocab": settings.count("model.vocab_size"), "gated": gated, "tied": shared,
            "norm": None if norm is None else {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}.get(norm),
            "position": None if position is None else "learned" if position == "learned_absolute" else "rope",
            "rope_base": settings.number("model.rotary_base"),
            "norm_epsilon": settings.number("model.layernorm_epsilon"),
            "qk_norm": settings.switch("model.qk_layernorm"),
            "linear_bias": linear, "qkv_bias": settings.switch("model.add_qkv_bias") or linear,
        }  # fmt: skip
        if not experts or layers is None:
            return {name: value for name, value in found.items() if value is not None} if layers else {}
        ffn = settings.count("model.moe_ffn_hidden_size", settings.count("model.ffn_hidden_size")) or 1
        found |= {
            "experts": experts, "top_k": settings.count("model.moe_router_topk", 2), "expert_ffn": ffn,
            "shared_experts": (settings.count("model.moe_shared_expert_intermediate_size", 0, least=0) or 0) // ffn,
            "expert_nodes": settings.count("model.moe_router_group_topk", 0, least=0),
            **megatron_core.read_moe_layers(settings, "model.moe_layer_freq", layers),
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}

    return Entry(say=lambda facts: {}, read=read)


def _overlap() -> Entry:
    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        tp = settings.value("comm_overlap.tp_comm_overlap")
        name = "overlap_moe_expert_parallel_comm"
        ep = settings.value(f"comm_overlap.{name}", settings.value(f"model.{name}"))
        return {"tp_overlap": True if tp is True else None, "ep_overlap": True if ep is True else None}

    return Entry(say=lambda facts: {}, read=read)


def _experts() -> Entry:
    shared = megatron_core.experts(_at)

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        ep = settings.count("model.expert_model_parallel_size", 1) or 1
        return shared.read(settings, {**facts, "experts": facts.get("experts") or ep > 1})

    return Entry(say=shared.say, read=read)


TABLE = Table(
    entries=(
        _shape(),
        *megatron_core.degrees(_at, "virtual_pipeline_model_parallel_size"),
        _experts(),
        megatron_core.recompute(_at),
        _batch(),
        _sharding(),
        _formats(),
        _loss(),
        _overlap(),
    ),
    no_word={_at(name): what for name, what in megatron_core.NO_WORD.items()}
    | {
        "optimizer.optimizer_cpu_offload": "optimizer states are in host memory",
        "optimizer.use_precision_aware_optimizer": "the optimizer keeps its states in formats of its own",
        "comm_overlap.delay_wgrad_compute": "weight gradients are computed later",
        "ddp.num_distributed_optimizer_instances": "the optimizer is sharded within a part of dp",
        "mixed_precision.fp4": "products are in 4 bits; the workload says fp8",
    },
    elsewhere=(
        r"(scheduler|logger|tokenizer|checkpoint|rng|profiling|validation|rerun_state_machine|ft|straggler|nvrx).*",
        r"(inprocess_restart|tensor_inspect|dist|dataset|train|comm_overlap|optimizer|ddp|mixed_precision|peft|env_vars).*",
        r"(optimizer_config_override_provider|model\._target_|_target_|model\.vocab_size|inprocess|energon|step_func|recipe).*",
    ),
)


# Reading.

_PROGRAM = re.compile(r".*(run_recipe|pretrain\w*|train\w*|run_script)\.py")
_SHORT = {
    "max_steps": "train.train_iters", "global_batch_size": "train.global_batch_size", "gb": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size", "mb": "train.micro_batch_size", "seq_length": "dataset.seq_length",
    "sl": "dataset.seq_length", "tp": "model.tensor_model_parallel_size", "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size", "vp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size", "etp": "model.expert_tensor_parallel_size",
}  # fmt: skip


def read(launch: Launch, given: Given) -> ImportedPlan:
    """The plan of a config that Bridge wrote, or of a command's overrides. Raises InputError for what is neither."""
    document, recipe = document_of(launch), ""
    if document is not None:
        start, said = Started(words=(), line=0), _flat(document, "")
    else:
        start = started(launch, given, _PROGRAM)
        said, recipe = _overrides(start)
    settings = Settings(launch.file, said)
    facts, left = TABLE.read(settings, {})
    more, assumed = megatron_core.told(settings, facts, _at)
    if document is not None:  # a written config states every default of the model
        defaults = [each for each in left if each.why is Why.UNKNOWN and each.name.startswith("model.")]
        left = tuple(each for each in left if each not in defaults)
        if defaults:
            assumed.append(f"{len(defaults)} settings of model that are not known here are of no account")
    facts["framework"] = FrameworkName.NEMO.value
    if recipe:
        assumed.append(f"what the recipe {recipe} sets and no override says is Megatron-Core's default")
        named = re.search(r"_(\d+)gpu_", recipe)
        start = start if start.devices or named is None else Started(words=(), line=0, devices=int(named[1]))
        if "dtype" not in facts and "bf16" in recipe:
            facts["dtype"] = "bf16"
    if given.model is None and "layers" not in facts:
        raise InputError(launch.file, None, "the shape is the recipe's: give --model")
    return assembled(
        launch, given, facts, framework=NAME, devices=start.devices, gpus_per_node=start.gpus_per_node,
        remainder=(*left, *more), assumed=(*start.notes, *assumed), environment=start.environment,
    )  # fmt: skip


def _flat(document: Mapping[str, Any], place: str) -> dict[str, Said]:
    """Nested settings by their dotted places."""
    found: dict[str, Said] = {}
    for name, value in document.items():
        path = f"{place}.{name}" if place else str(name)
        if isinstance(value, Mapping) and path.count(".") < 8:
            found |= _flat(value, path)
        elif value is not None:
            found[path] = Said(value)
    return found


def _overrides(start: Started) -> tuple[dict[str, Said], str]:
    """The overrides of a command, and its recipe."""
    found: dict[str, Said] = {}
    recipe, where = "", f"line {start.line}"
    for at, word in enumerate(start.words):
        name, sign, value = word.partition("=")
        following = value if sign else start.words[at + 1] if at + 1 < len(start.words) else ""
        if word.startswith("-"):
            short = name.lstrip("-").replace("-", "_")
            if short in {"recipe", "model"}:
                recipe = following
            elif short in _SHORT or f"{short}" in {each.rpartition(".")[2] for each in _SHORT.values()}:
                place = _SHORT.get(short) or next(each for each in _SHORT.values() if each.endswith("." + short))
                found.setdefault(place, Said(following, where))
        elif sign:
            found[name.lstrip("+~")] = Said(yaml.safe_load(value) if len(value) < 10_000 else value, where)
    return found, recipe
