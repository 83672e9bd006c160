"""DeepSpeed's training log (deepspeed/utils/timer.py, runtime/config.py, runtime/pipe/engine.py).

It prints its config, and a line a print interval with the speed of one step: samples a second of all ranks, or with
its pipeline engine the step's seconds. Model, sequence length, tp and pp are no part of it.
"""

from __future__ import annotations

import re

from autotune.imports.logs import GIB, LogFile, LoggedStep, TrainingLog

_CONFIG = re.compile(r"\[config\.py:\d+:print(?:_user_config)?\]\s+([a-z][a-z0-9_]*) \.* *(.*?)\s*$")
_STEP = re.compile(r"/(?:global_step=)?(\d+), RunningAvgSamplesPerSec=")
_SPEED = re.compile(r"CurrSamplesPerSec=([^\s,]+), ")
_RUNNING = re.compile(r"\[timer\.py:\d+:stop\] \d+/\d+, SamplesPerSec=")
_PEAK = re.compile(r"MaxMemAllocated=([\d.eE+-]+)GB")
_PIPELINE = re.compile(r"\bsteps: (\d+) loss: .*?\biter time \(s\): (\S+)")

_COUNTS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "micro_batches",
    "world_size": "dp",  # DeepSpeedConfig's own: the ranks of data parallelism
}
_DTYPES = {"bfloat16_enabled": "bf16", "bf16_enabled": "bf16", "fp16_enabled": "fp16", "float16_enabled": "fp16"}

_SUBGROUP = re.compile(r"\b(zero_hpz_partition_size|mics_shard_size|sequence_parallel_size)\W{1,4}(\d+)")
_ELSE = {
    "cpu_checkpointing": "kept activations are in host memory",
    "partition_activations": "kept activations are divided over tp",
    "curriculum_enabled_legacy": "the length of sequences grows while it trains",
    "pld_enabled": "layers are left out at random",
    "sparse_attention": "attention is sparse",
}
"""Entries of the config that make another plan or workload than any that could be stored, where they are on."""
_IS_ON = re.compile(r"\b(" + "|".join(_ELSE) + r")\b[^\w]{1,30}(True|true|\{)")
_OFFLOAD = re.compile(r"\b(offload_optimizer|offload_param|cpu_offload)\b.{0,60}?\b(cpu|nvme|True)\b")


def read(file: LogFile) -> TrainingLog:
    """What the log states. Raises InputError for a value that cannot be."""
    log = TrainingLog(file=file, framework="megatron-deepspeed")
    pipeline = TrainingLog(file=file, framework=log.framework)
    for line, text in file:
        if match := _STEP.search(text):
            figure = log.figure(line, _SPEED.search(text))
            if figure is None:
                continue
            per_s = file.positive(line, "CurrSamplesPerSec", figure)
            log.step(LoggedStep(line=line, number=file.step(line, match[1]), samples_per_s=per_s))
            peak = _PEAK.search(text)
            if peak and float(peak[1]) != 0.0:  # 0.0 GB stands for what the device did not count
                log.allocate(file.positive(line, "MaxMemAllocated", peak[1]) * GIB)
        elif _RUNNING.search(text):
            allowed = "DeepSpeed before 0.7 prints the mean of all steps so far, warm-up included: not understood"
            raise file.bad(line, "SamplesPerSec", text.partition("SamplesPerSec=")[2].partition(",")[0], allowed)
        elif match := _PIPELINE.search(text):
            time_s = file.positive(line, "iter time (s)", match[2])
            pipeline.step(LoggedStep(line=line, number=file.step(line, match[1]), time_s=time_s))
        elif match := _CONFIG.search(text):
            _require_sayable(log, line, text)
            _config(log, line, match[1], match[2])
    log.steps = pipeline.steps or log.steps
    return log


def _config(log: TrainingLog, line: int, name: str, text: str) -> None:
    if name in _COUNTS:
        log.state(_COUNTS[name], log.file.count(line, name, text), line)
    elif name in _DTYPES and text == "True":
        log.state("dtype", _DTYPES[name], line)
    elif name == "zero_optimization_stage":
        if text not in {"0", "1", "2", "3"}:
            raise log.file.bad(line, name, text, "must be 0, 1, 2 or 3")
        log.state("zero_stage", int(text), line)
    elif name == "optimizer_name" and text in {"adam", "adamw", "sgd"}:
        log.state("optimizer", "sgd" if text == "sgd" else "adamw", line)


def _require_sayable(log: TrainingLog, line: int, text: str) -> None:
    """Raises InputError for states that lie elsewhere than a plan says; names what else a plan does not say."""
    if match := _OFFLOAD.search(text):
        allowed = "not understood: a plan keeps parameters and optimizer states on the devices"
        raise log.file.bad(line, match[1], match[2], allowed)
    if match := _IS_ON.search(text):
        raise log.file.bad(line, match[1], match[2], f"not understood: {_ELSE[match[1]]}, and no plan says so")
    for name, size in _SUBGROUP.findall(text):
        if int(size) > 1 and name == "sequence_parallel_size":
            raise log.file.bad(line, name, size, "not understood: Ulysses' sequence parallelism is no part of a plan")
        if int(size) > 1:
            raise log.file.bad(line, name, size, "not understood: a plan shards states over all of dp, or not at all")
