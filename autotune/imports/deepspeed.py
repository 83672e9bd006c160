"""DeepSpeed's training log (deepspeed/utils/timer.py, runtime/config.py, runtime/pipe/engine.py).

It prints its config, and a line a print interval with the speed of one step: samples a second of all ranks, or with
its pipeline engine the step's seconds. Model, sequence length, tp and pp are no part of it.
"""

from __future__ import annotations

import re

from autotune.imports.logs import GIB, LogFile, LoggedStep, TrainingLog

_CONFIG = re.compile(r"\[config\.py:\d+:print(?:_user_config)?\]\s+([a-z][a-z0-9_]*) \.* *(.*?)\s*$")
_STEP = re.compile(r"/global_step=(\d+), RunningAvgSamplesPerSec=\S+, CurrSamplesPerSec=([^\s,]+)")
_PEAK = re.compile(r"MaxMemAllocated=([\d.eE+-]+)GB")
_PIPELINE = re.compile(r"\bsteps: (\d+) loss: .*?\biter time \(s\): (\S+)")

_COUNTS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "micro_batches",
    "world_size": "dp",  # DeepSpeedConfig's own: the ranks of data parallelism
}
_DTYPES = {"bfloat16_enabled": "bf16", "bf16_enabled": "bf16", "fp16_enabled": "fp16", "float16_enabled": "fp16"}


def read(file: LogFile) -> TrainingLog:
    """What the log states. Raises InputError for a value that cannot be."""
    log = TrainingLog(file=file, framework="megatron-deepspeed")
    samples: list[LoggedStep] = []
    for line, text in file:
        if match := _STEP.search(text):
            per_s = file.positive(line, "CurrSamplesPerSec", match[2])
            samples.append(LoggedStep(line=line, number=file.step(line, match[1]), samples_per_s=per_s))
            peak = _PEAK.search(text)
            if peak and float(peak[1]) != 0.0:  # 0.0 GB stands for what the device did not count
                log.allocate(file.positive(line, "MaxMemAllocated", peak[1]) * GIB)
        elif match := _PIPELINE.search(text):
            time_s = file.positive(line, "iter time (s)", match[2])
            log.steps.append(LoggedStep(line=line, number=file.step(line, match[1]), time_s=time_s))
        elif match := _CONFIG.search(text):
            _config(log, line, match[1], match[2])
    log.steps = log.steps or samples
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
