"""Hugging Face Trainer (transformers 5 on Accelerate): its TrainingArguments as JSON, and a script that uses them."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.frameworks.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.frameworks.commands import Command
from autotune.frameworks.documents import dumped, flat, json_object, nest, yaml_object
from autotune.frameworks.hf_models import LAYERS, hf_config, model_type, with_hf_model
from autotune.frameworks.reading import Given, ImportedPlan, Launch, assembled
from autotune.frameworks.table import Entry, Facts, Said, Settings, Table
from autotune.specs import DeviceKind, DType, Optimizer, Recompute

NAME = "transformers"
VERSIONS = ("5",)
CONFIG = "autotune.json"


def check(run: ExportRequest) -> None:
    """Raises IllegalPlanError for a plan, model or workload that the Trainer cannot run as it is meant."""
    refuse(NAME, run, limits(run))
    # FSDP reduces in the format of computation, DDP in that of the parameters: fp32.
    sharded = run.plan.zero_stage > 1
    refuse_choices(NAME, run, reduce_dtype=(run.workload.dtype.value if sharded else "fp32",))


def limits(run: ExportRequest) -> tuple[tuple[bool, str], ...]:
    """Whether each limit of the Trainer, or of this export, is passed, and what it is."""
    plan, workload = run.plan, run.workload
    return (
        (plan.pp > 1, "the Trainer has no pipeline"),
        (
            plan.tp > 1 or plan.cp > 1 or plan.ep > 1,
            "the export covers data parallelism: DDP (zero_stage 0) and FSDP2 (zero_stage 2 and 3)",
        ),
        (plan.zero_stage == 1, "FSDP shards gradients too: it has no ZeRO-1, use zero_stage 2 or 3"),
        (plan.recompute in {Recompute.SELECTIVE, Recompute.OP}, "it recomputes whole layers only"),
        (workload.dtype is DType.FP8, "fp8 is not among the formats that the export covers: bf16, fp16, fp32"),
        (workload.gradients is not DType.FP32, "it adds gradients up in fp32, the format of its parameters"),
        (model_type(run.model) is None, f"no family of transformers that is known has the shape of {run.model.name}"),
        (
            plan.zero_stage > 1 and run.cluster.device.kind is DeviceKind.CPU,
            "Accelerate does not shard on CPU: it wraps the model in DistributedDataParallel without a word",
        ),
    )


def _say_batch(facts: Facts) -> Mapping[str, object]:
    return {
        "per_device_train_batch_size": facts["micro_batch"],
        "gradient_accumulation_steps": facts["micro_batches"],
    }


def _read_batch(settings: Settings, facts: Facts) -> Mapping[str, object]:
    auto = settings.value("auto_find_batch_size", False)
    if auto not in {False, "false"}:
        raise settings.bad("auto_find_batch_size", "false: the size that it finds is not in the file")
    return {
        "micro_batch": settings.count("per_device_train_batch_size", 8),
        "micro_batches": settings.count("gradient_accumulation_steps", 1),
    }


def _say_dtype(facts: Facts) -> Mapping[str, object]:
    return {"bf16": facts["dtype"] == "bf16", "fp16": facts["dtype"] == "fp16"}


def _read_dtype(settings: Settings, facts: Facts) -> Mapping[str, object]:
    on = [name for name in ("bf16", "fp16") if settings.switch(name)]
    mixed = settings.word("mixed_precision", None, known=("no", "bf16", "fp16", "fp8"))  # Accelerate's
    if len(on) > 1:
        raise settings.bad("fp16", "bf16 is on too: one of them")
    return {"dtype": on[0] if on else {None: "fp32", "no": "fp32"}.get(mixed, mixed)}


def _say_sharding(facts: Facts) -> Mapping[str, object]:
    full = facts["recompute"] == Recompute.FULL.value
    if facts["zero_stage"] < 2:
        return {"gradient_checkpointing": full}
    return {
        "fsdp": True,
        "fsdp_config.version": 2,
        "fsdp_config.reshard_after_forward": facts["zero_stage"] == 3,
        "fsdp_config.transformer_layer_cls_to_wrap": facts["layer_class"] and [facts["layer_class"]],
        "fsdp_config.activation_checkpointing": full,
    }


_STRATEGIES = {
    "full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "true": 3, "false": 2, "1": 3, "2": 2, "3": 0,
}  # fmt: skip


def _read_sharding(settings: Settings, facts: Facts) -> Mapping[str, object]:
    said = settings.value("fsdp")
    words = said if isinstance(said, list) else str(said or "").replace(",", " ").split()
    hybrid = next((str(word) for word in words if "hybrid" in str(word)), None)
    if hybrid is not None:
        raise settings.bad("fsdp", "full_shard or shard_grad_op: a plan shards over all of dp, or not at all")
    accelerate = str(settings.value("distributed_type", "")).upper() == "FSDP"
    named = _setting(settings, "sharding_strategy") or _setting(settings, "reshard_after_forward")
    if not accelerate and (
        said is None or said is False or not words or "false" in [str(word).lower() for word in words]
    ):
        full = _recomputes(settings)
        return {"zero_stage": 0, "recompute": Recompute.FULL.value if full else Recompute.NONE.value}
    legacy = next((str(word) for word in words if str(word) in _STRATEGIES and str(word).lower() != "true"), None)
    strategy = str(named if named is not None else legacy or "full_shard").lower()
    if strategy not in _STRATEGIES:
        raise settings.bad("fsdp_config.reshard_after_forward", "one of " + ", ".join(_STRATEGIES))
    full = _recomputes(settings) or _setting(settings, "activation_checkpointing") in {True, "true"}
    return {
        "zero_stage": _STRATEGIES[strategy], "recompute": Recompute.FULL.value if full else Recompute.NONE.value,
    }  # fmt: skip


def _recomputes(settings: Settings) -> bool:
    names = ("gradient_checkpointing", "activation_checkpointing")  # the second is the newer spelling
    said = [settings.switch(name) for name in names]
    return any(said)


def _setting(settings: Settings, name: str) -> object:
    """One of FSDP's, in the Trainer's spelling or Accelerate's."""
    for place in (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"):
        if (value := settings.value(place)) is not None:
            return "true" if value is True else "false" if value is False else value
    return None


def _say_optimizer(facts: Facts) -> Mapping[str, object]:
    adamw = facts["optimizer"] == Optimizer.ADAMW.value
    return {"optim": "adamw_torch" if adamw else "sgd", "optim_args": None if adamw else "momentum=0.9"}


def _read_optimizer(settings: Settings, facts: Facts) -> Mapping[str, object]:
    name = str(settings.value("optim", "adamw_torch"))
    if name != "sgd" and not name.startswith("adamw_torch"):
        raise settings.bad("optim", "adamw_torch, adamw_torch_fused or sgd: the states of others are not known")
    return {"optimizer": "sgd" if name == "sgd" else "adamw"}


def _say_runtime(facts: Facts) -> Mapping[str, object]:
    cpu = {"use_cpu": True, "ddp_backend": "gloo", "dataloader_pin_memory": False} if facts["on_cpu"] else {}
    return {
        "output_dir": "out", "max_steps": 100, "learning_rate": 3e-4, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "remove_unused_columns": False, **cpu,
    }  # fmt: skip


TABLE = Table(
    entries=(
        Entry(say=_say_batch, read=_read_batch),
        Entry(say=_say_dtype, read=_read_dtype),
        Entry(say=_say_sharding, read=_read_sharding),
        Entry(say=_say_optimizer, read=_read_optimizer),
        Entry(say=_say_runtime, read=lambda settings, facts: {}),
    ),
    no_word={
        "torch_compile": "the model is compiled",
        "tf32": "products of fp32 in a shorter format",
        "fsdp_config.*offload*": "parameters or states are in host memory",
        "deepspeed*": "DeepSpeed trains: import its own file",
        "parallelism_config*": "tensor, context and sequence parallelism of Accelerate",
        "use_liger_kernel": "fused kernels",
        "group_by_length": "sequences of one length go together",
        "neftune_noise_alpha": "noise is added to embeddings",
        "galore*": "the optimizer's states are projected",
    },
    elsewhere=(
        r"(output_dir|run_name|report_to|push_to_hub.*|hub_.*|seed|data_seed|label_names|disable_tqdm|full_determinism)",
        r"(eval|save|logging|dataloader|lr_scheduler|warmup|metric|load_best|ddp|push|per_device_eval|log|hub|use)_.*",
        r"(do_train|do_eval|do_predict|max_steps|num_train_epochs|learning_rate|weight_decay|adam_.*|max_grad_norm)",
        r"(optim_args|remove_unused_columns|overwrite_output_dir|resume_from_checkpoint|fsdp_config(\..*)?|no_cuda)",
        r"(accelerator_config(\..*)?|local_rank|gradient_checkpointing_kwargs.*|include_.*|greater_is_better|past_index)",
        r"(compute_environment|machine_rank|main_.*|num_machines|num_processes|rdzv_.*|same_network|tpu_.*|debug|gpu_ids)",
        r"(downcast_bf16|enable_cpu_affinity|distributed_type|mixed_precision|dynamo_config.*|bf16_full_eval|half_.*)",
    ),
)


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node and its files. Raises IllegalPlanError as `check`."""
    check(run)
    family = model_type(run.model) or ""
    facts = {
        **run.facts,
        "micro_batches": run.micro_batches, "layer_class": LAYERS.get(family),
        "on_cpu": run.cluster.device.kind is DeviceKind.CPU,
    }  # fmt: skip
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*run.torchrun(), "train.py", CONFIG, "--seq-len", str(run.workload.seq_len)),
        config_name=CONFIG,
        config=dumped(nest(TABLE.say(facts, run.version))),
        beside={"config.json": dumped(hf_config(run.model, run.workload.seq_len)), "train.py": _SCRIPT},
        notes=(
            "train.py trains the model of config.json on random tokens: put your data set in their place.",
            *((f"Its FSDP reduces gradients in {run.workload.dtype.value}.",) if run.plan.zero_stage > 1 else ()),
        ),
    )


_LENGTHS = ("seq-len", "seq_length", "max_seq_length", "max_length", "block_size")
"""What scripts call the length of a sequence: it is none of the Trainer's arguments."""


def read(launch: Launch, given: Given) -> ImportedPlan:
    """The model, workload and plan of TrainingArguments or Accelerate's config, or of a command that has them.

    A command names a file of them, or has them as options (`HfArgumentParser`); Accelerate's config may stand beside.
    """
    command = Command.of_config(launch, "per_device_train_batch_size", given.variables)
    command = command if command.argv else Command.of(launch, "train.py", given.variables)
    said: dict[str, Said] = {}
    if command.argv:
        path = next((word for word in command.positional if word.endswith((".json", ".yaml", ".yml"))), None)
        if path is not None:
            said |= _document(path, launch.other(path))
        said |= {name.replace("-", "_"): value for name, value in command.options.items()}
        for name in ("steps", *_LENGTHS):
            said.pop(name.replace("-", "_"), None)
    else:
        said |= _document(launch.file, launch.text)
    settings = Settings(launch.file, said)
    machines = None if command.argv else settings.count("num_processes")
    facts, remainder = TABLE.read(settings, {})
    seq_len = command.count(launch, *_LENGTHS)
    given = with_hf_model(launch, given, command)
    devices = given.devices or command.devices or machines
    if devices == 1:
        facts["zero_stage"] = 0
    return assembled(
        launch, given, facts | ({"seq_len": seq_len} if seq_len else {}), framework=NAME, devices=devices,
        gpus_per_node=command.gpus_per_node, remainder=remainder,
    )  # fmt: skip


def _document(file: str, text: str) -> dict[str, Said]:
    looks_json = text.lstrip().startswith("{")
    return flat(file, json_object(file, text) if looks_json else yaml_object(file, text))


_SCRIPT = '''"""Trains the model of config.json with the Hugging Face Trainer on random tokens. Written by autotune.

Put your data set in the place of RandomTokens, and your checkpoint in that of random weights (from_config).
"""

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, vocab, seq_len):
        self.vocab, self.seq_len = vocab, seq_len

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        tokens = torch.randint(self.vocab, (self.seq_len,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Speed(TrainerCallback):
    def __init__(self, tokens):
        self.tokens, self.start = tokens, 0.0

    def on_step_begin(self, args, state, control, **more):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        seconds = time.perf_counter() - self.start
        if state.is_world_process_zero:
            speed = self.tokens / seconds
            print(f"step {state.global_step} step_time_s {seconds:.4f} tokens_per_s {speed:.0f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("arguments")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(given.arguments)
    if given.steps:
        arguments.max_steps = given.steps
    config = AutoConfig.from_pretrained(".")
    model = AutoModelForCausalLM.from_config(config)
    sequences = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    trainer = Trainer(
        model,
        arguments,
        train_dataset=RandomTokens(config.vocab_size, given.seq_len),
        callbacks=[Speed(sequences * given.seq_len)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''
