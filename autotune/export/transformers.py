"""Hugging Face Trainer (transformers 5 on Accelerate): TrainingArguments as JSON, and a script that trains with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autotune.export.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.export.hf_models import LAYERS, hf_config, model_type
from autotune.specs import DeviceKind, DType, Optimizer, Recompute

NAME = "transformers"
VERSIONS = ("5",)
CONFIG = "autotune.json"


def check(run: ExportRequest, version: str = VERSIONS[-1]) -> None:
    """Raises IllegalPlanError for a plan, model or workload that the Trainer cannot run as it is meant."""
    refuse(NAME, run, ((True, reason) for reason in reasons(run)))
    # FSDP reduces in the format of computation, DDP in that of the parameters: fp32.
    sharded = run.plan.zero_stage > 1
    refuse_choices(NAME, run, reduce_dtype=(run.workload.dtype.value if sharded else "fp32",))


def reasons(run: ExportRequest) -> Iterator[str]:
    """Why the Trainer cannot run the plan."""
    plan, workload = run.plan, run.workload
    if plan.pp > 1:
        yield "the Trainer has no pipeline"
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1:
        yield "the export covers data parallelism: DDP (zero_stage 0) and FSDP2 (zero_stage 2 and 3)"
    if plan.zero_stage == 1:
        yield "FSDP shards gradients too: it has no ZeRO-1, use zero_stage 2 or 3"
    if plan.recompute in {Recompute.SELECTIVE, Recompute.OP}:
        yield "it recomputes whole layers only"
    if workload.dtype is DType.FP8:
        yield "fp8 is not among the formats that the export covers: bf16, fp16, fp32"
    if workload.gradients is not DType.FP32:
        yield "it adds gradients up in fp32, the format of its parameters"
    if model_type(run.model) is None:
        yield f"the export knows no family of transformers of the shape of {run.model.name}"


def export(run: ExportRequest, version: str = VERSIONS[-1]) -> LaunchArguments:
    """The command of one node and its files. Raises IllegalPlanError as `check`."""
    check(run, version)
    files = {
        CONFIG: json.dumps(_arguments(run), indent=2) + "\n",
        "config.json": json.dumps(hf_config(run.model, run.workload.seq_len), indent=2) + "\n",
        "train.py": _SCRIPT,
    }
    words = ("train.py", CONFIG, "--seq-len", str(run.workload.seq_len))
    return LaunchArguments(
        target=NAME,
        argv=(*run.torchrun(), *words),
        config_name=CONFIG,
        config=files[CONFIG],
        files=tuple(files.items()),
        notes=("train.py trains the model of config.json on random tokens: put your data set in their place.",),
    )


def _arguments(run: ExportRequest) -> dict[str, Any]:
    plan, workload = run.plan, run.workload
    full, sharded = plan.recompute is Recompute.FULL, plan.zero_stage > 1
    said: dict[str, Any] = {
        "output_dir": "out",
        "max_steps": 100,
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "bf16": workload.dtype is DType.BF16,
        "fp16": workload.dtype is DType.FP16,
        "optim": "adamw_torch" if workload.optimizer is Optimizer.ADAMW else "sgd",
        "learning_rate": 3e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
    }
    if workload.optimizer is not Optimizer.ADAMW:
        said["optim_args"] = "momentum=0.9"
    if run.cluster.device.kind is DeviceKind.CPU:
        said |= {"use_cpu": True, "ddp_backend": "gloo", "dataloader_pin_memory": False}
    if sharded:
        family = model_type(run.model)
        said["fsdp"] = True
        said["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": plan.zero_stage == 3,
            "transformer_layer_cls_to_wrap": [LAYERS[family or ""]],
            "activation_checkpointing": full,
        }
    else:
        said["gradient_checkpointing"] = full
    return said


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
        return 1 << 30

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
            print(
                f"step {state.global_step} step_time_s {seconds:.4f} tokens_per_s {self.tokens / seconds:.0f}", flush=True
            )


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
