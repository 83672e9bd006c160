"""nanotron: the YAML of run_train.py (src/nanotron/config), for models of Llama's shape."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from autotune.errors import InputError
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, Placeholder, refuse, refuse_choices
from autotune.frameworks.commands import Command
from autotune.frameworks.documents import flat, nest, yaml_object
from autotune.frameworks.reading import Given, ImportedPlan, Launch, assembled
from autotune.frameworks.table import Entry, Facts, Settings, Table, count, switch
from autotune.specs import DType, ModelSpec, Norm, Optimizer, Position, Recompute, Schedule

NAME = "nanotron"
VERSIONS = ("0.5",)
CONFIG = "autotune.yaml"
_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
_ENGINES = {Schedule.GPIPE: "afab", Schedule.ONE_F_ONE_B: "1f1b"}


def check(run: ExportRequest) -> None:
    """Raises IllegalPlanError for a plan, model or workload that nanotron cannot run as it is meant."""
    refuse(NAME, run, limits(run))
    refuse_choices(NAME, run)


def limits(run: ExportRequest) -> tuple[tuple[bool, str], ...]:
    """Whether each limit of nanotron is passed, and what it is."""
    plan, workload = run.plan, run.workload
    return (
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
        (workload.optimizer is not Optimizer.ADAMW, "its SGD keeps no momentum: use adamw"),
    )


def _is_llama(model: ModelSpec) -> bool:
    plain = not (model.experts or model.latent_attention or model.linear_bias or model.qkv_bias or model.qk_norm)
    like = model.gated and model.norm is Norm.RMSNORM and model.position is Position.ROPE
    return plain and like and model.head_dim * model.heads == model.hidden


def _say_schedule(facts: Facts) -> Mapping[str, object]:
    return {"parallelism.pp_engine": _ENGINES[Schedule(facts["schedule"])]}


def _read_schedule(settings: Settings, facts: Facts) -> Mapping[str, object]:
    ours = {theirs: each.value for each, theirs in _ENGINES.items()}
    engine = settings.word("parallelism.pp_engine", "afab", known=tuple(ours))
    return {"schedule": ours[engine or "afab"] if facts["pp"] > 1 else Schedule.ONE_F_ONE_B.value, "vpp": 1}


def _say_tp_mode(facts: Facts) -> Mapping[str, object]:
    divided = facts["sequence_parallel"] and facts["tp"] > 1
    return {
        "parallelism.tp_mode": "REDUCE_SCATTER" if divided else "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": divided,
    }


def _read_tp_mode(settings: Settings, facts: Facts) -> Mapping[str, object]:
    mode = str(settings.value("parallelism.tp_mode", "ALL_REDUCE")).upper()
    if mode not in {"ALL_REDUCE", "REDUCE_SCATTER"}:
        raise settings.bad("parallelism.tp_mode", "ALL_REDUCE or REDUCE_SCATTER")
    settings.switch("parallelism.tp_linear_async_communication")
    return {"sequence_parallel": mode == "REDUCE_SCATTER" and facts["tp"] > 1}


def _read_recompute(settings: Settings, facts: Facts) -> Mapping[str, object]:
    full = settings.switch("parallelism.recompute_layer")
    return {"recompute": Recompute.FULL.value if full else Recompute.NONE.value}


def _say_dtype(facts: Facts) -> Mapping[str, object]:
    return {"model.dtype": _DTYPES[DType(facts["dtype"])], "model.make_vocab_size_divisible_by": 1}


def _read_dtype(settings: Settings, facts: Facts) -> Mapping[str, object]:
    ours = {theirs: each.value for each, theirs in _DTYPES.items()}
    padded = settings.count("model.make_vocab_size_divisible_by", 1) or 1
    dtype = ours[settings.word("model.dtype", "bfloat16", known=tuple(ours)) or "bfloat16"]
    vocab = facts.get("vocab")
    return {"dtype": dtype, "vocab": vocab and -(-vocab // padded) * padded}


def _say_shape(facts: Facts) -> Mapping[str, object]:
    return {
        "model.init_method.std": 0.02,
        "model.model_config.is_llama_config": True,
        "model.model_config.max_position_embeddings": facts["seq_len"],
    }


def _read_shape(settings: Settings, facts: Facts) -> Mapping[str, object]:
    place = "model.model_config."
    for name in ("is_llama_config", "is_qwen2_config", "max_position_embeddings", "rope_theta", "rms_norm_eps"):
        settings.value(place + name)
    biased = settings.switch(place + "attention_bias")
    found: dict[str, object] = {
        "gated": True, "norm": Norm.RMSNORM.value, "position": Position.ROPE.value, "qkv_bias": biased,
    }  # fmt: skip
    if facts.get("kv_heads") is None and facts.get("heads"):
        found["kv_heads"] = facts["heads"]
    return found


def _say_optimizer(facts: Facts) -> Mapping[str, object]:
    return {
        "optimizer.zero_stage": facts["zero_stage"],
        "optimizer.accumulate_grad_in_fp32": True,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip_grad": 1.0,
        "optimizer.optimizer_factory": {
            "name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True,
        },
        "optimizer.learning_rate_scheduler": {"learning_rate": 3e-4, "lr_warmup_steps": 2, "lr_warmup_style": "linear"},
    }  # fmt: skip


def _read_optimizer(settings: Settings, facts: Facts) -> Mapping[str, object]:
    stage = settings.count("optimizer.zero_stage", 0, least=0) or 0
    if stage > 1:
        raise settings.bad("optimizer.zero_stage", "0 or 1")
    name = str(settings.value("optimizer.optimizer_factory.name", "adamW"))
    if name not in {"adamW", "sgd"}:
        raise settings.bad("optimizer.optimizer_factory.name", "adamW or sgd")
    found: dict[str, object] = {
        "zero_stage": stage if facts["dp"] > 1 else 0, "optimizer": "sgd" if name == "sgd" else "adamw",
    }  # fmt: skip
    if not settings.switch("optimizer.accumulate_grad_in_fp32", False) and facts["dtype"] != "fp32":
        # Nothing is then kept in fp32: gradients, parameters and moments are of one format.
        found |= dict.fromkeys(("grad_dtype", "master_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), facts["dtype"])
    return found


def _config(name: str, fact: str) -> Entry:
    return count(f"model.model_config.{name}", fact)


TABLE = Table(
    entries=(
        count("parallelism.dp", "dp", 1),
        count("parallelism.pp", "pp", 1),
        count("parallelism.tp", "tp", 1),
        Entry(say=lambda facts: {}, read=lambda settings, _: {
            "cp": settings.count("parallelism.context_parallel_size", 1),
            "ep": settings.count("parallelism.expert_parallel_size", 1),
        }),
        Entry(say=_say_schedule, read=_read_schedule),
        Entry(say=_say_tp_mode, read=_read_tp_mode),
        Entry(
            say=lambda facts: {"parallelism.recompute_layer": facts["recompute"] == Recompute.FULL.value},
            read=_read_recompute,
        ),
        _config("num_hidden_layers", "layers"),
        _config("hidden_size", "hidden"),
        _config("intermediate_size", "ffn"),
        _config("num_attention_heads", "heads"),
        _config("num_key_value_heads", "kv_heads"),
        _config("vocab_size", "vocab"),
        switch("model.model_config.tie_word_embeddings", "tied"),
        Entry(say=_say_shape, read=_read_shape),
        Entry(say=_say_dtype, read=_read_dtype),
        count("tokens.sequence_length", "seq_len"),
        count("tokens.micro_batch_size", "micro_batch"),
        count("tokens.batch_accumulation_per_replica", "micro_batches", 1),
        Entry(say=_say_optimizer, read=_read_optimizer),
    ),
    no_word={
        "model.model_config.moe_config*": "layers are mixtures of experts",
        "model.model_config.sliding_window_size": "attention sees a window",
        "model.model_config._attn_implementation": "the kernel of attention",
        "parallelism.tp_recompute_allgather": "what tensor parallelism gathered is gathered again in backward",
    },
    elsewhere=(
        r"(general|checkpoints|tokenizer|logging|metrics_logging|data_stages|profiler|lighteval|s3_upload)(\..*)?",
        r"tokens\.(train_steps|val_check_interval|limit_.*)|model\.(init_method.*|ddp_bucket_cap_mb)",
        r"model\.model_config\.(.*_token_id|hidden_act|initializer_range|pretraining_tp|rope_.*|use_cache|z_loss.*)",
        r"model\.model_config\.(_use.*|_fused.*|log_attn_probs|flex_attention_mask|no_rope_layer)",
        r"optimizer\..*",
    ),
)  # fmt: skip


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node and its YAML. Raises IllegalPlanError as `check`."""
    check(run)
    facts = {**run.facts, "micro_batches": run.micro_batches}
    config = nest(
        {
            "general": {"project": "autotune", "run": run.model.name, "seed": 42},
            "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
            **TABLE.say(facts, run.version),
            "tokens.train_steps": 100,
            "tokenizer": {"tokenizer_name_or_path": "gpt2"},
            "data_stages": [{"name": "training", "start_training_step": 1, "data": {"dataset": None, "seed": 42}}],
        }
    )
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "run_train.py", "--config-file", CONFIG),
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        config_name=CONFIG,
        config=yaml.safe_dump(config, sort_keys=False),
        placeholders=(
            Placeholder("data_stages", (), "your data set; without one it trains on random tokens"),
            Placeholder("tokenizer", (), "your tokenizer"),
            Placeholder("checkpoints", (), "where checkpoints go"),
        ),
    )


def read(launch: Launch, given: Given) -> ImportedPlan:
    """The model, workload and plan of a YAML config, or of a command that names one."""
    command = Command.of_config(launch, "config-file", given.variables)
    text, file = launch.text, launch.file
    if command.argv:
        file = str(command.options["config-file"].value)
        text = launch.other(file)
    found = yaml_object(file, text)
    if "parallelism" not in found:
        raise InputError(file, None, "a nanotron config has a section parallelism")
    settings = Settings(file, flat(file, found))
    facts, remainder = TABLE.read(settings, {})
    devices = command.devices
    return assembled(
        launch, given, {name: value for name, value in facts.items() if value is not None}, framework=NAME,
        devices=devices, gpus_per_node=command.gpus_per_node, remainder=remainder,
    )  # fmt: skip
