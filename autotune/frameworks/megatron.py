"""Megatron-LM: arguments of pretrain_gpt.py (megatron/training/arguments.py and megatron/core, releases from 0.14).

The rank order is the plan's: Megatron's default, tp-cp-ep-dp-pp. Settings have the names of the parsed arguments. Read
are launch scripts, command lines, and YAML files of arguments; also of the years before, and of Megatron-DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from autotune.frameworks import megatron_core
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, Placeholder, flags, refuse, refuse_choices
from autotune.frameworks.launchers import Started, arguments, started
from autotune.frameworks.reading import Given, ImportedPlan, Launch, assembled, document_of
from autotune.frameworks.table import Entry, Facts, Said, Settings, Table, choice, count, says
from autotune.specs import DType, Fp8Recipe, FrameworkName

NAME = "megatron"
VERSIONS = ("0.19", "0.18", "0.17", "0.16", "0.15", "0.14")


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node. Raises IllegalPlanError for what Megatron-LM has no argument for."""
    megatron_core.check(NAME, run)
    moments = ("fp32", "fp16", "bf16", "fp8")
    refuse_choices(
        NAME, run, grad_dtype=("fp32", "bf16"), master_dtype=("fp32", "fp16"), exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments, fp8_recipe=tuple(Fp8Recipe),
        param_dtype=("fp8", "bf16") if run.workload.dtype is DType.FP8 else (run.workload.dtype.value,),
        cross_entropy=("eager", "fused"),
    )  # fmt: skip
    facts = run.facts
    states = megatron_core.states(facts)
    gathered = run.workload.param_dtype is DType.FP8
    refuse(
        NAME,
        run,
        (
            (bool(states) and not run.plan.zero_stage, f"{next(iter(states), None)} needs ZeRO-1 or more"),
            (gathered and not run.plan.zero_stage, "fp8_param_gather needs ZeRO-1 or more"),
        ),
    )
    settings = TABLE.say(facts, run.version)
    yours = _placeholders(run, settings)
    words = [word for each in yours for word in each.words]
    return LaunchArguments(
        target=NAME, version=run.version, environment=_environment(run), placeholders=tuple(yours),
        argv=(*run.torchrun(), "pretrain_gpt.py", *flags(_named(settings)), *words), notes=tuple(_notes(run)),
    )  # fmt: skip


def _named(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings as flags: one that is on by default has a flag that turns it off."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        if name in _OFF_FLAGS:
            found[_OFF_FLAGS[name]] = value is False
        else:
            found["--" + _FLAGS.get(name, name).replace("_", "-")] = value
    return found


def _placeholders(run: ExportRequest, settings: Mapping[str, object]) -> list[Placeholder]:
    unknown = {
        "--norm-epsilon": ("norm_epsilon", "1e-05"), "--rotary-base": ("rope_base", "10000"),
    }  # fmt: skip
    facts = run.facts
    missing = [
        word
        for flag, (fact, stands_in) in unknown.items()
        if facts[fact] is None and not (fact == "rope_base" and facts["position"] != "rope")
        for word in (flag, stands_in)
    ]
    vocab = ("--vocab-size", str(run.model.vocab - 1))  # NullTokenizer adds one token
    found = [
        Placeholder(
            "DATA", ("--mock-data", "--tokenizer-type", "NullTokenizer", *vocab),
            "--data-path, --split, --tokenizer-type, --tokenizer-model; until then random tokens are trained on.",
        ),
        Placeholder("TRAINING", ("--lr", "0.0001", "--train-iters", "100"), "learning rate, its schedule, and length."),
    ]  # fmt: skip
    if missing:
        what = f"{run.model.name} does not say these constants of its own; what stands here is Megatron's default."
        found.append(Placeholder("CONSTANTS", tuple(missing), what))
    return found


def _environment(run: ExportRequest) -> dict[str, str]:
    """What Megatron asks of the environment before Blackwell: one queue keeps collectives ahead of products."""
    plan = run.plan
    one = plan.zero_stage < 2 and plan.tp * plan.cp > 1
    many = plan.zero_stage > 1 or (run.workload.ep_overlap is True and not one)
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one else {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if many else {}


def _notes(run: ExportRequest) -> list[str]:
    notes = ["Run it in a checkout of Megatron-LM; --save, --load and what you log are yours to add."]
    if run.plan.zero_stage > 1 and run.plan.tp * run.plan.cp > 1:
        notes.append("Megatron-FSDP wants many connections, tp and cp want one: Megatron warns, and runs.")
    return notes


# The table.

_FLAGS = {"fp8": "fp8_format", "layernorm_epsilon": "norm_epsilon", "fp8_param": "fp8_param_gather"}
_OFF_FLAGS = {
    "add_bias_linear": "--disable-bias-linear",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
}


def _at(name: str) -> str:
    return name


def _mlp() -> Entry:
    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        gated = any(settings.switch(name) for name in ("swiglu", "quick_geglu"))
        settings.switch("squared_relu"), settings.switch("openai_gelu")
        hidden = facts.get("hidden") or 0
        default = int((4 * hidden * 2 / 3) / 64) * 64 if settings.switch("swiglu") else 4 * hidden
        return {"gated": gated, "ffn": settings.count("ffn_hidden_size", default or None)}

    return Entry(
        say=lambda facts: {"ffn_hidden_size": facts["ffn"], "swiglu": facts["gated"]},
        read=read,
    )


def _heads() -> Entry:
    def say(facts: Facts) -> Mapping[str, object]:
        grouped = facts["kv_heads"] != facts["heads"] and facts["latent_attention"] is None
        return {
            "num_attention_heads": facts["heads"],
            "kv_channels": facts["head_dim"] if facts["latent_attention"] is None else None,
            "group_query_attention": grouped,
            "num_query_groups": facts["kv_heads"] if grouped else None,
        }

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        heads, hidden = settings.count("num_attention_heads"), facts.get("hidden")
        even = hidden // heads if heads and hidden and hidden % heads == 0 else None
        groups = settings.count("num_query_groups", heads)
        kv_heads = groups if settings.switch("group_query_attention") else heads
        return {"heads": heads, "kv_heads": kv_heads, "head_dim": settings.count("kv_channels", even)}

    return Entry(say=say, read=read)


def _positions() -> Entry:
    words = {"rope": "rope", "yarn": "rope", "mrope": "rope", "learned_absolute": "learned", "none": "none",
             "relative": "none", "alibi": "none", "rotary": "rope"}  # fmt: skip
    theirs = {"rope": "rope", "learned": "learned_absolute", "none": "none"}

    def say(facts: Facts) -> Mapping[str, object]:
        rope, scaling = facts["position"] == "rope", facts["rope_scaling"]
        base = facts["rope_base"] if rope else None
        return {
            "position_embedding_type": theirs[facts["position"]],
            "max_position_embeddings": facts["max_positions"] if facts["position"] == "learned" else facts["seq_len"],
            "rotary_base": int(base) if base else None,
            "use_rope_scaling": rope and scaling is not None,
            "rope_scaling_factor": scaling if rope else None,
        }

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        kind = settings.word("position_embedding_type", "learned_absolute", known=tuple(words)) or ""
        position = "rope" if settings.switch("use_rotary_position_embeddings") else words[kind]
        longest, base = settings.count("max_position_embeddings"), settings.number("rotary_base", 10_000)
        scaling = settings.number("rope_scaling_factor", 8.0) if settings.switch("use_rope_scaling") else None
        found: dict[str, object] = {"position": position, "max_positions": longest if position == "learned" else 0}
        return found | ({"rope_base": base, "rope_scaling": scaling} if position == "rope" else {})

    return Entry(say=say, read=read)


def _biases() -> Entry:
    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        linear = settings.switch("add_bias_linear", True)
        latent = settings.switch("multi_latent_attention")
        return {
            "linear_bias": linear,
            "qkv_bias": linear or settings.switch("add_qkv_bias"),
            "qk_norm": settings.switch("qk_layernorm") and not latent,
        }

    return Entry(
        say=lambda facts: {
            "add_bias_linear": facts["linear_bias"],
            "add_qkv_bias": facts["qkv_bias"] and not facts["linear_bias"],
            "qk_layernorm": facts["qk_norm"] or facts["latent_attention"] is not None,
        },
        read=read,
    )


def _vocabulary() -> Entry:
    """Megatron pads the vocabulary to a multiple of tp, and by default of 128 times it; an export says the size."""

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        tied = not settings.switch("untie_embeddings_and_output_weights")
        padded, plain = settings.count("padded_vocab_size"), settings.count("vocab_size")
        multiple = (settings.count("make_vocab_size_divisible_by", 128) or 1) * facts["tp"]
        to = settings.count("pad_vocab_size_to")
        if padded is None and plain is not None:
            padded = to or -(-plain // multiple) * multiple
        return {"tied": tied, "vocab": padded or to}

    return Entry(
        say=lambda facts: {
            "untie_embeddings_and_output_weights": not facts["tied"],
            "padded_vocab_size": -(-facts["vocab"] // facts["tp"]) * facts["tp"],
        },
        read=read,
    )


def _latent() -> Entry:
    names = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim",
             "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim"}  # fmt: skip
    defaults = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}

    def say(facts: Facts) -> Mapping[str, object]:
        latent = facts["latent_attention"]
        if latent is None:
            return {}
        return {"multi_latent_attention": True, **{name: latent[ours] or None for name, ours in names.items()}}

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        found = {ours: settings.count(name, defaults[name], least=0) for name, ours in names.items()}
        if not settings.switch("multi_latent_attention"):
            return {}
        dim = (found["qk_nope_head_dim"] or 0) + (found["qk_rope_head_dim"] or 0)
        return {"latent_attention": found, "head_dim": dim, "kv_heads": facts["heads"]}

    return Entry(say=say, read=read)


def _mixture() -> Entry:
    def say(facts: Facts) -> Mapping[str, object]:
        if not facts["experts"]:
            return {}
        grouped = facts["router_groups"] is not None and facts["expert_nodes"] > 0
        return {
            "num_experts": facts["experts"],
            "moe_router_topk": facts["top_k"],
            "moe_ffn_hidden_size": facts["expert_ffn"],
            "moe_shared_expert_intermediate_size": facts["shared_experts"] * facts["expert_ffn"] or None,
            "moe_layer_freq": megatron_core.moe_layers(facts),
            "moe_latent_size": facts["expert_hidden"] or None,
            "moe_expert_capacity_factor": facts["expert_capacity"] or None,
            "moe_router_num_groups": facts["router_groups"] if grouped else None,
            "moe_router_group_topk": facts["expert_nodes"] if grouped else None,
            "moe_router_score_function": facts["router_score"],
            "moe_router_enable_expert_bias": facts["router_bias"] is True,
            "moe_router_topk_scaling_factor": facts["router_scale"],
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "overlap_moe_expert_parallel_comm": facts["ep_overlap"] is True and facts["ep"] > 1,
        }

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        experts = settings.count("num_experts", 0, least=0)
        for name in ("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_num_groups"):
            settings.value(name)
        overlap = settings.switch("overlap_moe_expert_parallel_comm")
        if not experts:
            return {}
        ffn = settings.count("moe_ffn_hidden_size", facts.get("ffn"))
        shared = settings.count("moe_shared_expert_intermediate_size", 0, least=0) or 0
        if ffn and shared % ffn:
            raise settings.bad("moe_shared_expert_intermediate_size", f"a multiple of the experts' width {ffn}")
        capacity = settings.number("moe_expert_capacity_factor", 0.0) or 0.0
        found: dict[str, object] = {
            "experts": experts,
            "top_k": settings.count("moe_router_topk", 2),
            "expert_ffn": ffn,
            "shared_experts": shared // ffn if ffn else 0,
            "expert_hidden": settings.count("moe_latent_size", 0, least=0),
            "expert_capacity": max(capacity, 0.0),
            "expert_nodes": settings.count("moe_router_group_topk", 0, least=0),
            "router_groups": settings.count("moe_router_num_groups"),
            "router_score": settings.word("moe_router_score_function", "softmax", known=("softmax", "sigmoid")),
            "router_bias": True if settings.switch("moe_router_enable_expert_bias") else None,
            "router_scale": settings.number("moe_router_topk_scaling_factor"),
            **megatron_core.read_moe_layers(settings, "moe_layer_freq", facts["layers"]),
        }
        return found | ({"ep_overlap": True} if overlap else {})

    return Entry(say=say, read=read)


def _sharding() -> Entry:
    """ZeRO, and that its communication runs beside computation, as estimates have it."""

    def say(facts: Facts) -> Mapping[str, object]:
        stage = facts["zero_stage"]
        return {
            "use_distributed_optimizer": stage > 0,
            "overlap_grad_reduce": True,
            "overlap_param_gather": stage > 0,
            "use_megatron_fsdp": stage > 1,
            "data_parallel_sharding_strategy": megatron_core.SHARDING.get(stage),
            "gradient_accumulation_fusion": stage < 2,
            "ckpt_format": "fsdp_dtensor" if stage > 1 else None,
        }

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        fsdp = any(settings.switch(name) for name in ("use_megatron_fsdp", "use_custom_fsdp"))
        known = tuple(megatron_core.SHARDED)
        strategy = settings.word("data_parallel_sharding_strategy", "no_shard", known=known) or "no_shard"
        sharded = settings.switch("use_distributed_optimizer")
        stage = megatron_core.SHARDED[strategy] if fsdp else int(sharded)
        zero = settings.count("zero_stage", least=0)  # Megatron-DeepSpeed's
        settings.value("ckpt_format"), settings.value("gradient_accumulation_fusion")
        wanted = ["overlap_grad_reduce", *(["overlap_param_gather"] if stage else [])]
        missing = [name for name in wanted if not settings.switch(name)]
        found: dict[str, object] = {"zero_stage": stage if zero is None else zero}
        return found if "deepspeed" in settings else found | {"unoverlapped": missing}

    return Entry(say=say, read=read)


def _formats() -> Entry:
    def say(facts: Facts) -> Mapping[str, object]:
        dtype, exact = facts["dtype"], facts["grad_dtype"] in {None, "fp32"}
        half = dtype in {"bf16", "fp8"}
        return {
            "bf16": half,
            "fp16": dtype == "fp16",
            "fp8": "hybrid" if dtype == "fp8" else None,
            "fp8_recipe": facts["fp8_recipe"],
            "fp8_param": facts["param_dtype"] == "fp8",
            "accumulate_allreduce_grads_in_fp32": exact and dtype != "fp32",
            "grad_reduce_in_bf16": half and not exact,
            **megatron_core.states(facts),
        }

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        fp8 = settings.word("fp8") is not None or settings.word("fp4") is not None
        bf16, fp16 = settings.switch("bf16"), settings.switch("fp16")
        exact, reduced = settings.switch("accumulate_allreduce_grads_in_fp32"), settings.switch("grad_reduce_in_bf16")
        recipe = settings.word("fp8_recipe", "delayed")
        aware = settings.switch("use_precision_aware_optimizer")
        found: dict[str, object] = {"dtype": "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"}
        found["grad_dtype"] = "bf16" if reduced else "fp16" if fp16 and not exact else "fp32"
        if fp8 and recipe in {each.value for each in Fp8Recipe}:
            found["fp8_recipe"] = recipe
        if settings.switch("fp8_param"):
            found["param_dtype"] = "fp8"
        for name, ours in (("main_params_dtype", "master_dtype"), ("exp_avg_dtype", "exp_avg_dtype"),
                           ("exp_avg_sq_dtype", "exp_avg_sq_dtype"), ("main_grads_dtype", "grad_dtype")):  # fmt: skip
            text = settings.word(name)
            if aware and text is not None:
                found[ours] = _DTYPES.get(text.removeprefix("torch."))
        return found

    return Entry(say=say, read=read)


_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16",
           "fp8": "fp8", "uint8": "fp8"}  # fmt: skip


def _kernels() -> Entry:
    backends = {"unfused": "unfused", "flash": "flash", "flash2": "flash", "flash3": "flash", "cudnn": "fused"}

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        backend, version = settings.word("attention_backend"), settings.count("flash_attention_version")
        kernel = {"unfused": "unfused", "local": "unfused", "fused": "cudnn"}.get(str(backend).rpartition(".")[2])
        if backend == "flash" and version in {2, 3}:
            kernel = f"flash{version}"
        settings.switch("use_flash_attn"), settings.word("transformer_impl")
        return {
            "attention": kernel,
            "cross_entropy": "fused" if settings.switch("cross_entropy_loss_fusion") else None,
            "tp_overlap": True if settings.switch("tp_comm_overlap") else None,
        }

    def say(facts: Facts) -> Mapping[str, object]:
        fused = facts["cross_entropy"] == "fused"
        return {
            "attention_backend": None if facts["attention"] is None else backends[facts["attention"]],
            "cross_entropy_loss_fusion": fused,
            "tp_comm_overlap": facts["tp_overlap"] is True and facts["tp"] > 1,
        }

    return Entry(say=say, read=read)


def _glance(*names: str) -> Callable[[Settings, Facts], Mapping[str, object]]:
    """Reads nothing of these settings, which others imply."""

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        for name in names:
            settings.value(name)
        return {}

    return read


def _fused_loss(impl: str, **versions: str) -> Entry:
    """Whose fused loss: 0.18 refuses Transformer Engine's."""
    return Entry(
        say=lambda facts: {"cross_entropy_fusion_impl": impl if facts["cross_entropy"] == "fused" else None},
        read=_glance("cross_entropy_fusion_impl"),
        **versions,
    )


def _old() -> Entry:
    """Spellings of before 0.14 and of Megatron-DeepSpeed, so that scripts of published runs can be read."""

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        counted = ((facts.get("layers") or 0) + 2) % facts["pp"] == 0
        if counted and "embedding" in str(settings.said.get("pp_partition_method", "")):
            settings.value("pp_partition_method")  # stages as with both ends counted
        old = settings.switch("checkpoint_activations") or settings.word("activations_checkpoint_method") is not None
        if old:
            return {"recompute": "full"}
        return {"recompute": "selective"} if settings.switch("recompute_activations") else {}

    return Entry(say=lambda facts: {}, read=read)


def _batch() -> Entry:
    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        found = {"micro_batch": settings.count("micro_batch_size", settings.count("batch_size"))}
        found["global_batch"] = settings.count("global_batch_size")
        ramp = settings.words("rampup_batch_size")
        return found | ({"ramp": ramp} if ramp else {})

    return Entry(
        say=lambda facts: {"micro_batch_size": facts["micro_batch"], "global_batch_size": facts["global_batch"]},
        read=read,
    )


TABLE = Table(
    entries=(
        count("num_layers", "layers"),
        count("hidden_size", "hidden"),
        _mlp(),
        _heads(),
        count("seq_length", "seq_len"),
        _positions(),
        choice("normalization", "norm", {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}, "LayerNorm"),
        Entry(
            say=lambda facts: {"layernorm_epsilon": facts["norm_epsilon"]},
            read=lambda settings, _: {"norm_epsilon": settings.number("layernorm_epsilon", 1e-5)},
        ),
        _biases(),
        _latent(),
        says(attention_dropout=0.0, hidden_dropout=0.0),
        *megatron_core.degrees(_at, "num_virtual_stages_per_pipeline_rank"),
        _vocabulary(),
        _mixture(),
        megatron_core.experts(_at),
        megatron_core.recompute(_at),
        _old(),
        _sharding(),
        _formats(),
        _kernels(),
        _fused_loss("te", until="0.18"),
        _fused_loss("native", since="0.18"),
        _batch(),
        choice("optimizer", "optimizer", {"adamw": "adam", "sgd": "sgd"}, "adam"),
    ),
    no_word=megatron_core.NO_WORD
    | {
        "cpu_optimizer": "optimizer states are in host memory",
        "embed_layernorm": "there is a norm after the embedding",
        "pp_partition_method": "DeepSpeed cuts the stages by a rule of its own",
        "num_distributed_optimizer_instances": "the optimizer is sharded within a part of dp",
        "cp_comm_type": "how context parallelism communicates",
    },
    elsewhere=(
        r"lr|min_lr|lr_.*|.*_lr|train_(iters|samples|data_path|sync_interval)|exit_.*|eval_.*|.*weight_decay.*|clip_grad",
        r"adam_.*|sgd_.*|muon_.*|lion_.*|init_method.*|embedding_init_method_std|seed|.*dropout|warmup|override_.*",
        r"data_.*|.*data_path|split|tokenizer_.*|vocab_file|merge_file|.*special_tokens|tiktoken_.*|mock_data|num_workers",
        r"dataloader_.*|(no_)?create_attention_mask_in_dataloader|reset_.*|eod_mask_loss|sample_rate|num_dataset_.*|mmap_.*",
        r"(no_)?save.*|(no_)?load.*|ckpt_.*|.*dist_ckpt.*|.*checkpoint.*|finetune|async_save|auto_detect_ckpt_format",
        r"log_.*|tensorboard_.*|wandb_.*|.*logger.*|timing_.*|profile.*|use_pytorch_profiler|record_.*|nvtx_.*|app_tag_.*",
        r"distributed_(backend|timeout.*)|local_rank|lazy_mpu_init|use_mcore_models|use_legacy_models|no_.*_fusion|.*_fusion",
        r"(disable|no|enable)_(msc|gloo.*|one_logger|jit_fuser)|.*persist_layer_norm|attention_softmax_in_fp32|manual_gc.*",
        r"loss_scale.*|initial_loss_scale|min_loss_scale|hysteresis|fp16_lm_cross_entropy|(no_)?check_for_.*|rerun_mode",
        r"rotary_percent|rotary_interleaved|rotary_seq_len.*|rotary_scaling_factor|mscale.*|yarn_.*|no_rope_freq",
        r"apply_layernorm_1p|layernorm_zero.*|apply_query_key.*|moe_aux_loss_coeff|moe_z_loss.*|moe_router_(dtype|load_.*)",
        r"moe_router_(pre_softmax|bias_.*|force_.*|padding.*|fusion)|moe_per_layer_logging|moe_token_drop_policy|enable_ft_.*",
        r"(no_)?align_.*|ddp_.*|(no_)?overlap_p2p.*|microbatch_group_size.*|tp_comm_.*|.*_tp_comm_.*|nccl_.*|use_sharp|fp8_.*",
        r"high_priority_.*|empty_unused_memory_level|enable_experimental|spec|mtp_loss_.*|te_rng_tracker|use_tp_pp_dp_mapping",
        r"encoder_.*|decoder_seq_length|bert_.*|mask_prob|short_seq_prob|deepspeed.*|synchronize_each_layer|kill_switch_path",
        r"sync_tp_duplicated_parameters|codecarbon_dir|adlr_.*|inference_.*|rl_.*|one_logger.*|straggler.*|cuda_graph_warmup.*",
        r"moe_(deepep|hybridep|flex_dispatcher)_num.*|moe_permute_fusion.*|use_cpu_initialization|no_initialization|num_classes",
        r"init_model_with_meta_device|fsdp_.*|use_nccl_ub|main_.*|exp_avg.*|suggested_.*|calculate_per_token_loss|.*reshard.*",
        r"step_batch_size_schedule|decrease_batch_size.*|legacy_tokenizer|trust_remote_code|ft_.*|error_injection.*|logging_level",
        r"async_.*|scatter_gather.*|use_te_.*|symmetric_ar_type|overlap_cpu_.*|external_.*|barrier.*|use_tokenizer_.*|config_.*",
    ),
)  # fmt: skip


# Reading.

_ALIASES = {
    "fp8_format": "fp8", "fp4_format": "fp4", "norm_epsilon": "layernorm_epsilon", "fp8_param_gather": "fp8_param",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma", "num_moe_experts": "num_experts",
    "model_parallel_size": "tensor_model_parallel_size",
}  # fmt: skip
_NEGATED = {
    "disable_bias_linear": "add_bias_linear", "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
}  # fmt: skip
_PROGRAM = re.compile(r".*(pretrain|train|finetune)\w*\.py")
_SWITCHES = frozenset(
    """
    bf16 fp16 swiglu sequence_parallel use_distributed_optimizer group_query_attention disable_bias_linear mock_data
    untie_embeddings_and_output_weights overlap_grad_reduce overlap_param_gather use_flash_attn moe_grouped_gemm
    deepspeed checkpoint_activations
    """.split()  # noqa: SIM905 (a list of as many literals is not easier to read)
)


def read(launch: Launch, given: Given) -> ImportedPlan:
    """The model, workload and plan of a launch script, a command line, or a YAML file of arguments.

    Raises InputError for what cannot be read or used, with its line.
    """
    document = document_of(launch)
    if document is not None:
        start, said, notes = Started(words=(), line=0), _of_yaml(launch.file, document), []
    else:
        start = started(launch, given, _PROGRAM)
        said, unset = arguments(start.words, f"line {start.line}", _SWITCHES)
        said = _renamed(said)
        notes = [f"nothing: what {word} holds is not known, and left out" for word in unset]
    settings = Settings(launch.file, said)
    facts, left = TABLE.read(settings, {})
    more, assumed = megatron_core.told(settings, facts, _at)
    framework = FrameworkName.MEGATRON_DEEPSPEED if "deepspeed" in settings else FrameworkName.MEGATRON
    facts["framework"] = framework.value
    if facts.get("global_batch") is None and facts.get("micro_batch") is not None:
        facts["micro_batches"] = 1  # Megatron's default is one micro-batch a replica
    return assembled(
        launch, given, facts, framework=NAME, devices=start.devices, gpus_per_node=start.gpus_per_node,
        remainder=(*left, *more), assumed=(*start.notes, *notes, *assumed), environment=start.environment,
    )  # fmt: skip


def _renamed(said: Mapping[str, Said]) -> dict[str, Said]:
    """By the names of the parsed arguments: aliases are one, and what turns something off says so."""
    found: dict[str, Said] = {}
    for name, each in said.items():
        if name in _NEGATED:
            found[_NEGATED[name]] = Said(each.value is not True, each.where)
        else:
            found[_ALIASES.get(name, name)] = each
    return found


def _of_yaml(file: str, document: Mapping[str, object]) -> dict[str, Said]:
    """Settings of a YAML file: flags under MODEL_ARGS, or arguments by name, in sections or not."""
    flags_of = document.get("MODEL_ARGS")
    if isinstance(flags_of, Mapping):
        plain = {str(name).lstrip("-").replace("-", "_"): value for name, value in flags_of.items()}
        return _renamed({name: Said(_typed(value)) for name, value in plain.items() if value is not False})
    found: dict[str, Said] = {}
    for name, value in document.items():
        inner = value if isinstance(value, Mapping) else {name: value}
        found |= {str(key): Said(each) for key, each in inner.items() if each is not None}
    if (kind := found.pop("activation_func", None)) is not None:
        found["swiglu"] = Said(kind.value == "swiglu")
    return _renamed(found)


def _typed(value: object) -> object:
    return value.split() if isinstance(value, str) and " " in value and "[" not in value else value
