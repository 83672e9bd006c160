"""torchtitan: the TOML job config of 0.2 (torchtitan/config/job_config.py), the Python one of 0.3 (config/configs.py).

Both have the same names for what a plan says, and one table of them is written and read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.catalog import models
from autotune.errors import InputError
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, Placeholder, refuse, refuse_choices
from autotune.frameworks.commands import Command
from autotune.frameworks.documents import PythonConfig, nest, toml
from autotune.frameworks.reading import Given, ImportedPlan, Launch, assembled
from autotune.frameworks.table import Entry, Facts, Said, Settings, Table, choice, count
from autotune.frameworks.torchtitan_models import FLAVORS, family, model_module, registry_module, unsayable_model
from autotune.specs import DeviceKind, DType, ModelSpec, Optimizer, Recompute, Schedule

NAME = "torchtitan"
VERSIONS = ("0.3", "0.2")
CONFIG = "autotune.toml"
MODEL = "autotune_model"
REGISTRY = "autotune_config"
_SCHEDULES = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED: "Interleaved1F1B"}
_PRECISION: dict[str, str] = {DType.BF16: "bfloat16", DType.FP32: "float32"}


def _say_sharding(facts: Facts) -> Mapping[str, object]:
    sharded = facts["zero_stage"] > 1
    return {
        "parallelism.data_parallel_replicate_degree": 1 if sharded else facts["dp"],
        "parallelism.data_parallel_shard_degree": facts["dp"] if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if facts["zero_stage"] == 3 else "never",
    }


def _read_sharding(settings: Settings, facts: Facts) -> Mapping[str, object]:
    name = "parallelism.data_parallel_replicate_degree"
    copies = settings.count(name, 1) or 1
    shards = settings.count("parallelism.data_parallel_shard_degree", -1, least=-1)
    if shards == 0:
        raise settings.bad("parallelism.data_parallel_shard_degree", "-1 or a positive number")
    others = facts["tp"] * facts["pp"] * facts["cp"]
    if shards == -1:
        devices = facts["devices"]
        if devices is None:
            allowed = "data_parallel_shard_degree -1 is what the devices leave: give --devices"
            raise InputError(settings.file, None, allowed)
        if devices % (copies * others):
            raise InputError(settings.file, devices, f"the other degrees, {copies * others}, must divide the devices")
        shards = devices // (copies * others)
    assert shards is not None
    if copies > 1 and shards > 1:
        raise settings.bad(name, f"with {shards} shards not understood: a plan shards over all of dp, or not at all")
    how = settings.word("parallelism.fsdp_reshard_after_forward", "default", known=("default", "always", "never"))
    reshards = how == "always" or (how == "default" and facts["pp"] == 1)
    sharded = shards * facts["cp"] > 1
    return {"dp": copies * shards, "zero_stage": (3 if reshards else 2) if sharded else 0}


def _read_sequence_parallel(settings: Settings, facts: Facts) -> Mapping[str, object]:
    on = settings.switch("parallelism.enable_sequence_parallel", True)
    return {"sequence_parallel": on and facts["tp"] > 1}


def _read_expert_tp(settings: Settings, facts: Facts) -> Mapping[str, object]:
    stated = settings.count("parallelism.expert_tensor_parallel_degree", 1)
    if facts["ep"] == 1:
        return {}
    usual = 1 if facts["dp"] * facts["cp"] % facts["ep"] else facts["tp"]
    return {"etp": 0 if stated == usual else stated}


def _say_pipeline(facts: Facts) -> Mapping[str, object]:
    if facts["pp"] == 1:
        return {}
    chunks = facts["pp"] * facts["vpp"]
    said = {
        "parallelism.pipeline_parallel_schedule": _SCHEDULES[Schedule(facts["schedule"])],
        "parallelism.pipeline_parallel_microbatch_size": facts["micro_batch"],
    }
    if facts["layers"] % chunks == 0:  # torchtitan's own default takes a layer off each end
        return said | {
            "parallelism.pipeline_parallel_layers_per_stage": facts["layers"] // chunks,
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        }
    return said | {"parallelism.module_fqns_per_model_part": _stages(facts["layers"], chunks, facts["head"])}


def _stages(layers: int, chunks: int, head: str) -> list[list[str]]:
    """The modules of each stage as our plans have them: longer stages first."""
    names: list[list[str]] = []
    for chunk in range(chunks):
        start = sum(map(len, names))
        number = layers // chunks + (chunk < layers % chunks)
        names.append([f"layers.{at}" for at in range(start, start + number)])
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", head]
    return names


def _read_pipeline(settings: Settings, facts: Facts) -> Mapping[str, object]:
    known = {theirs.lower(): ours for ours, theirs in _SCHEDULES.items()}
    schedule = str(settings.value("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    per_stage = settings.count("parallelism.pipeline_parallel_layers_per_stage")
    first = settings.count("parallelism.pipeline_parallel_first_stage_less_layers", 1, least=0) or 0
    last = settings.count("parallelism.pipeline_parallel_last_stage_less_layers", 1, least=0) or 0
    parts = settings.value("parallelism.module_fqns_per_model_part")
    pp = facts["pp"]
    if pp == 1:
        return {"schedule": Schedule.ONE_F_ONE_B.value, "vpp": 1}
    if schedule not in known:
        raise settings.bad("parallelism.pipeline_parallel_schedule", "one of " + ", ".join(_SCHEDULES.values()))
    if isinstance(parts, list):
        chunks = len(parts)
    elif per_stage is not None:
        if facts.get("layers") is None:
            allowed = "how many chunks there are depends on the model's layers: give --model"
            raise InputError(f"{settings.file}: pipeline_parallel_layers_per_stage", per_stage, allowed)
        chunks = -(-(facts["layers"] + first + last) // per_stage)
    else:
        chunks = pp * (2 if known[schedule] is Schedule.INTERLEAVED else 1)
    if chunks % pp:
        raise InputError(f"{settings.file}: stages", chunks, f"must be a multiple of pipeline_parallel_degree ({pp})")
    return {"schedule": known[schedule].value, "vpp": chunks // pp}


def _say_batch(facts: Facts) -> Mapping[str, object]:
    # A pipeline cuts the local batch into its micro-batches; without one, the step accumulates gradients.
    rounds = facts["global_batch"] // facts["dp"] if facts["pp"] > 1 else facts["micro_batch"]
    return {"training.local_batch_size": rounds, "training.global_batch_size": facts["global_batch"]}


def _read_batch(settings: Settings, facts: Facts) -> Mapping[str, object]:
    local = settings.count("training.local_batch_size", 8) or 8
    whole = settings.count("training.global_batch_size", -1, least=-1)
    if whole == 0:
        raise settings.bad("training.global_batch_size", "-1 or a positive number")
    micro = settings.count("parallelism.pipeline_parallel_microbatch_size", 1)
    return {
        "micro_batch": micro if facts["pp"] > 1 else local,
        "global_batch": local * facts["dp"] if whole is None or whole < 0 else whole,
    }


def _say_recompute(facts: Facts) -> Mapping[str, object]:
    if facts["recompute"] == Recompute.OP.value:
        return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    return {"activation_checkpoint.mode": facts["recompute"]}


def _read_recompute(settings: Settings, facts: Facts) -> Mapping[str, object]:
    name = "activation_checkpoint"
    if facts["framework_version"] == "0.3":  # a policy's class, SelectiveAC by default
        policy = settings.said.get(name)
        settings.value(name)
        kind = "SelectiveAC" if policy is None else str(policy.value).partition(".")[0]
        known = {"None": "none", "FullAC": "full", "SelectiveAC": "op"}
        if kind not in known:
            raise settings.bad(name, "one of None, FullAC.Config(), SelectiveAC.Config()")
        return {"recompute": known[kind]}
    mode = settings.word(f"{name}.mode", "selective", known=("none", "full", "selective", "memory_budget"))
    if mode in {"none", "full"}:
        settings.value(f"{name}.selective_ac_option")
        return {"recompute": mode}
    if mode == "selective" and settings.word(f"{name}.selective_ac_option", "2") == "op":
        return {"recompute": Recompute.OP.value}
    option = settings.word(f"{name}.selective_ac_option", "2")
    how = mode if mode == "memory_budget" else f"{mode} with option {option}"
    allowed = f"{how} is no part of a plan: none, full, or selective with option op"
    raise InputError(f"{settings.file}: {name}.mode", mode, allowed)


def _say_runtime(facts: Facts) -> Mapping[str, object]:
    graphs = facts["framework_version"] == "0.3" and (facts["pp"] > 1 or facts["ep"] > 1)
    return {
        "training.steps": 100,
        "training.mixed_precision_reduce": "float32",
        "training.disable_cuda_graphs": True if graphs else None,  # they know neither stages nor experts elsewhere
        "optimizer.implementation": "foreach" if facts["on_cpu"] else None,  # fused AdamW is CUDA's
    }


def _say_sequence_parallel(facts: Facts) -> Mapping[str, object]:
    return {"parallelism.enable_sequence_parallel": facts["sequence_parallel"]} if facts["tp"] > 1 else {}


def _say_expert_tp(facts: Facts) -> Mapping[str, object]:
    return {"parallelism.expert_tensor_parallel_degree": facts["expert_tp"]} if facts["ep"] > 1 else {}


def _degree(name: str, fact: str) -> Entry:
    return count(f"parallelism.{name}", fact, 1)


TABLE = Table(
    entries=(
        count("training.seq_len", "seq_len", 2048),
        choice("training.mixed_precision_param", "dtype", _PRECISION, "bfloat16"),
        _degree("tensor_parallel_degree", "tp"),
        _degree("pipeline_parallel_degree", "pp"),
        _degree("context_parallel_degree", "cp"),
        _degree("expert_parallel_degree", "ep"),
        Entry(say=_say_sharding, read=_read_sharding),
        Entry(say=_say_sequence_parallel, read=_read_sequence_parallel, since="0.3"),
        Entry(say=_say_expert_tp, read=_read_expert_tp, until="0.3"),
        Entry(say=_say_pipeline, read=_read_pipeline),
        Entry(say=_say_batch, read=_read_batch),
        Entry(say=_say_recompute, read=_read_recompute),
        Entry(say=_say_runtime, read=lambda settings, facts: {}),
        choice("optimizer.name", "optimizer", {"adamw": "AdamW"}, "AdamW", until="0.3"),
    ),
    no_word={
        "training.enable_cpu_offload": "parameters and states are in host memory",
        "parallelism.enable_async_tensor_parallel": "tensor-parallel communication under matrix products",
        "compile.enable": "layers are compiled",
        "compile.enable_async_tensor_parallel": "tensor-parallel communication under matrix products",
        "model.converters": "matrix products in other formats",
        "parallelism.context_parallel_rotate_method": "how keys and values go round",
        "parallelism.expert_parallel_comm_backend": "how tokens go to their experts",
        "optimizer.early_step_in_backward": "the optimizer steps during backward",
    },
    elsewhere=(
        r"(job|profiling|profiler|metrics|checkpoint|lr_scheduler|comm|validation|validator|debug|experimental)(\..*)?",
        r"(fault_tolerance|quantize|tokenizer|dataloader|loss|memory_estimation|override)(\..*)?",
        r"optimizer(\.(lr|beta1|beta2|eps|weight_decay|implementation|0))?",
        r"training(\.(steps|dataset|dataset_path|max_norm|gc_freq|gc_debug|seed|deterministic|warmup_steps))?",
        r"training\.(dataloader.*|mixed_precision_reduce|disable_cuda_graphs)",
        r"parallelism(\.(disable_loss_parallel|spmd_backend|context_parallel_load_balancer))?",
        r"compile(\.(components|backend))?|model(\..*)?|model_spec(\..*)?|base|hf_assets_path|dump_folder",
        r"activation_checkpoint\.(early_stop|per_op_sac.*|force_recompute.*|preserve_rng_state|determinism_check|debug)",
    ),
)


def check(run: ExportRequest) -> None:
    """Raises IllegalPlanError for a plan, model or workload that this torchtitan cannot run as it is meant."""
    refuse(NAME, run, limits(run))
    refuse_choices(NAME, run)


def limits(run: ExportRequest) -> tuple[tuple[bool, str], ...]:
    """Whether each limit of this torchtitan is passed, and what it is."""
    plan, workload, model = run.plan, run.workload, run.model
    shards, old = plan.dp * plan.cp, run.version == "0.2"
    others = plan.tp * plan.pp * plan.cp * plan.ep > 1
    dtype = workload.dtype.value
    return (
        (shards > 1 and plan.zero_stage == 1, "FSDP shards gradients too: it has no ZeRO-1, use zero_stage 2 or 3"),
        (
            plan.cp > 1 and plan.zero_stage < 2,
            "it always shards parameters over context-parallel ranks: use zero_stage 2 or 3",
        ),
        (
            old and plan.dp > 1 and plan.zero_stage == 0 and others,
            "its DDP combines with no other axis: use zero_stage 2 or 3",
        ),
        (
            old and shards == 1 and others and workload.dtype is not DType.FP32,
            f"with dp and cp 1 it trains in fp32: it is FSDP that computes in {dtype}",
        ),
        (old and plan.tp > 1 and not plan.sequence_parallel, "its tensor parallelism is always sequence parallel"),
        (
            plan.recompute is Recompute.SELECTIVE,
            "its selective mode saves other tensors than the attention core's: use recompute op",
        ),
        (plan.pp > 1 and model.tied, "it ties no embedding to a head across a pipeline"),
        (old and plan.pp > 1 and family(model) == "qwen3", "its Qwen3, which has this shape, has no pipeline in 0.2"),
        (
            plan.schedule is not Schedule.INTERLEAVED and run.micro_batches < plan.pp,
            f"its schedules need at least pp ({plan.pp}) micro-batches a step, this plan has {run.micro_batches}",
        ),
        (workload.dtype not in _PRECISION, f"{dtype} is not among its precisions: bf16, fp32"),
        (workload.gradients is not DType.FP32, "it reduces gradients in fp32 only"),
        (workload.optimizer is not Optimizer.ADAMW, "its optimizers are Adam and AdamW"),
        _length(run),
        *_experts(run),
        (bool(unsayable_model(model, run.version)), unsayable_model(model, run.version)),
    )


def _length(run: ExportRequest) -> tuple[bool, str]:
    plan, seq_len = run.plan, run.workload.seq_len
    if run.version == "0.2":
        whole = plan.tp * 2 * plan.cp
    else:
        whole = (plan.tp if plan.sequence_parallel else 1) * (2 * plan.cp if plan.cp > 1 else 1)
    return seq_len % whole > 0, f"seq_len {seq_len} must be a multiple of {whole}, for tp {plan.tp} and cp {plan.cp}"


def _experts(run: ExportRequest) -> tuple[tuple[bool, str], ...]:
    plan = run.plan
    if not run.model.experts:
        return ()
    if plan.ep == 1:
        what = f"without expert parallelism its experts are divided by tp ({plan.tp}), not by {plan.expert_tp}"
        return ((plan.expert_tp != plan.tp, what),)
    allowed = {1, plan.tp} if run.version == "0.2" else {1}
    ranks = " or ".join(map(str, sorted(allowed)))
    region = (plan.dp if plan.zero_stage > 1 else 1) * plan.cp * plan.tp
    return (
        (plan.expert_tp not in allowed, f"each of its experts is on {ranks} ranks, not on {plan.expert_tp}"),
        (
            region % (plan.ep * plan.expert_tp) > 0,
            f"ep ({plan.ep}) times the ranks of an expert must divide tp, cp and the sharded dp ({region})",
        ),
    )


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node and its files. Raises IllegalPlanError as `check`."""
    check(run)
    facts = {
        **run.facts,
        "expert_tp": run.plan.expert_tp, "framework_version": run.version,
        "head": "output" if run.version == "0.2" else "lm_head",
        "on_cpu": run.cluster.device.kind is DeviceKind.CPU and run.version == "0.2",
    }  # fmt: skip
    said = TABLE.say(facts, run.version)
    if run.version == "0.2":
        head = {"experimental.custom_import": MODEL, "model.name": "autotune", "model.flavor": run.model.name}
        name, config = CONFIG, _toml(nest(head | said))
        beside = {f"{MODEL}.py": model_module(run.model)}
        words: tuple[str, ...] = ("--job.config_file", CONFIG)
        placeholders: tuple[Placeholder, ...] = ()
        notes = (f"{MODEL}.py trains on random tokens: it says how to take your data.",)
    else:
        name, beside = f"{REGISTRY}.py", {}
        config = registry_module(run.model, nest(said))
        words = ("--module", REGISTRY, "--config", "plan")
        placeholders = tuple(
            Placeholder(name, (), what)
            for name, what in (("DATASET", "the data set"), ("TOKENIZER", "the folder of its tokenizer"))
        )
        notes = (f"{REGISTRY}.py sets rotary positions as torchtitan's own models of this family do.",)
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "-m", "torchtitan.train", *words),
        config_name=name,
        config=config,
        beside=beside,
        placeholders=placeholders,
        notes=notes,
    )


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """TOML of strings, truths, whole numbers and lists of strings, which JSON spells the same way."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
        for name, values in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"


def read(launch: Launch, given: Given) -> ImportedPlan:
    """The model, workload and plan of a TOML or a Python config, or of a command that names one."""
    command = Command.of(launch, "torchtitan.train", given.variables)
    said, version = _said(launch, command, given)
    settings = Settings(launch.file, said)
    flavor, model = _flavor(settings, command)
    given = replace(given, model=given.model or model)
    devices = given.devices or command.devices
    known: dict[str, Any] = {
        "devices": devices, "framework_version": version, "layers": given.model.layers if given.model else None,
    }  # fmt: skip
    facts, remainder = TABLE.read(settings, known)
    assumed = []
    if facts["pp"] > 1 and not _even(settings):
        assumed.append("stages of equal length: torchtitan takes a layer off the first and the last one")
    if (
        facts["pp"] > 1
        and (local := settings.count("training.local_batch_size", 8) or 8) * facts["dp"] != facts["global_batch"]
    ):
        assumed.append(f"all micro-batches of a step in one pipeline: torchtitan fills it anew after every {local}")
    if given.model is not None and flavor and model is None:
        assumed.append(f"the model {flavor} is {given.model.name}")
    names = {"layers", "devices", "framework_version"}
    return assembled(
        launch, given, {name: value for name, value in facts.items() if name not in names}, framework=NAME,
        devices=command.devices, gpus_per_node=command.gpus_per_node, remainder=remainder, assumed=assumed,
    )  # fmt: skip


def _even(settings: Settings) -> bool:
    name = "parallelism.pipeline_parallel_{}_stage_less_layers"
    cut = any(settings.count(name.format(end), 1, least=0) for end in ("first", "last"))
    return "parallelism.module_fqns_per_model_part" in settings or not cut


def _said(launch: Launch, command: Command, given: Given) -> tuple[dict[str, Said], str]:
    """The settings, and the version whose words they are."""
    over = {name.replace("-", "_"): said for name, said in command.options.items()}
    text, file = launch.text, launch.file
    module, config, path = (over.pop(name, None) for name in ("module", "config", "job.config_file"))
    if path is not None:
        file = str(path.value)
        text = launch.other(file)
    elif module is not None and config is not None:
        if str(config.value) in FLAVORS:
            return {"base": config, **over}, "0.3"
        file = str(module.value).replace(".", "/") + ".py"
        text = launch.other(file)
    elif command.argv:
        raise InputError(launch.file, None, "a torchtitan command names --job.config_file, or --module and --config")
    if file.endswith(".py") or (not file.endswith(".toml") and "import " in text and "def " in text):
        python = PythonConfig(file, text)
        chosen = str(config.value) if config else _only(file, python, given)
        if chosen not in python.functions:
            raise InputError(f"{file}: --config", chosen, "one of " + ", ".join(python.functions))
        return {"base": Said(chosen), **python.settings(chosen), **over}, "0.3"
    return {**toml(file, text), **over}, "0.2"


def _only(file: str, python: PythonConfig, given: Given) -> str:
    """The function that gives the configuration: the one that is named, `plan`, or the only one."""
    if "CONFIG" in given.variables:
        return given.variables["CONFIG"]
    if "plan" in python.functions or len(python.functions) == 1:
        return "plan" if "plan" in python.functions else next(iter(python.functions))
    raise InputError(file, None, "it has several configurations: name one of them, --set CONFIG=NAME")


def _flavor(settings: Settings, command: Command) -> tuple[str, ModelSpec | None]:
    """The model that the file names, and which of ours that is."""
    names = [
        settings.value(name) for name in ("model.name", "model.flavor", "model_spec.flavor", "model_spec.0", "base")
    ]
    kind, flavor, named, registered, base = (None if name is None else str(name) for name in names)
    known = {each.name: each for each in models()}
    for text in (named, flavor if kind == "autotune" else None):
        if text in known:
            return text or "", known[text or ""]
    said = base or (f"{kind or 'llama3'}_{flavor.lower()}" if flavor else registered or named or "")
    return said, known.get(FLAVORS.get(said.lower().replace("-", "_").replace(".", "_"), ""))
