"""nanotron's training log (src/nanotron/trainer.py and logging).

It prints its config as Python dataclasses, a line an iteration whose figures are rounded to three digits with K, M, G,
T for powers of a thousand, and the memory of the ranks in MiB.
"""

from __future__ import annotations

import re

from autotune.imports.logs import MIB, LogFile, LoggedStep, TrainingLog

_ITERATION = re.compile(r"\biteration: *([^\s|]+) / [^\s|]+ *\|")
_TIME = re.compile(r"elapsed_time_per_iteration_ms: *([^\s|]+) *\|")
_BATCH = re.compile(r"global_batch_size: *([^\s|]+)")
_MEMORY = re.compile(r"Memory usage: \S+MiB\. Peak allocated:? ([\d.]+)MiB\.? Peak reserved: ([\d.]+)MiB")
_SETTING = re.compile(r"\b([a-z][a-z0-9_]*)=([\w.+-]+|<[^>]*>)")
_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

_COUNTS = {
    "dp": "dp", "pp": "pp", "tp": "tp", "expert_parallel_size": "ep", "context_parallel_size": "cp",
    "sequence_length": "seq_len", "micro_batch_size": "micro_batch",
    "batch_accumulation_per_replica": "micro_batches", "num_hidden_layers": "layers", "hidden_size": "hidden",
    "intermediate_size": "ffn", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
}  # fmt: skip
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def read(file: LogFile) -> TrainingLog:
    """What the log states. Raises InputError for a value that cannot be."""
    log, configured = TrainingLog(file=file, framework="nanotron"), False
    for line, text in file:
        if match := _ITERATION.search(text):
            batch, configured = _BATCH.search(text), True
            figure = log.figure(line, _TIME.search(text))
            if figure is None:
                continue
            time_s = _figure(file, line, "elapsed_time_per_iteration_ms", figure) / 1e3
            count = _figure(file, line, "iteration", match[1])
            log.step(LoggedStep(line=line, number=round(count), time_s=time_s))
            if batch is not None and "K" not in batch[1]:  # 1.02K may be 1,020 or 1,024
                log.state("global_batch", file.count(line, "global_batch_size", batch[1]), line)
        elif match := _MEMORY.search(text):
            log.allocate(file.positive(line, "Peak allocated", match[1]) * MIB)
            log.reserve(file.positive(line, "Peak reserved", match[2]) * MIB)
        elif not configured or "Config(" in text:
            configured = False  # the config of a start goes up to its first iteration
            for name, value in _SETTING.findall(text):
                _setting(log, line, name, value)
    if "layers" in log.facts:  # it trains Llama's shape; Qwen2's has biases, and needs --model
        for name, value in (("gated", True), ("norm", "rmsnorm"), ("position", "rope"), ("linear_bias", False)):
            log.state(name, value, log.facts["layers"].line, implied=True)
    return log


def _figure(file: LogFile, line: int, what: str, text: str) -> float:
    unit = text[-1] if text[-1:].isalpha() else ""
    if unit not in _POWERS:
        raise file.bad(line, what, text, "must be a number, or one with K, M, G, B or T")
    return file.positive(line, what, text.removesuffix(unit)) * _POWERS[unit]


def _setting(log: TrainingLog, line: int, name: str, value: str) -> None:
    if name in _COUNTS and value != "None" and not (name == "vocab_size" and "vocab" in log.facts):
        # The vocabulary is printed again once it was padded.
        log.state(_COUNTS[name], log.file.count(line, name, value), line)
    elif name == "zero_stage":
        if value not in {"0", "1"}:
            raise log.file.bad(line, name, value, "must be 0 or 1")
        log.state("zero_stage", int(value), line)
    elif name == "recompute_layer":
        log.state("recompute", "full" if value == "True" else "none", line)
    elif name == "tp_mode":
        log.state("sequence_parallel", "REDUCE_SCATTER" in value.upper(), line)
    elif name == "pp_engine":
        if "AllForwardAllBackward" in value:
            log.state("schedule", "gpipe", line)
        elif "OneForwardOneBackward" not in value and value != "None":
            raise log.file.bad(line, name, value, "must be AllForwardAllBackward... or OneForwardOneBackward...")
    elif name == "dtype" and value in _DTYPES:
        log.state("dtype", _DTYPES[value], line)
    elif name == "accumulate_grad_in_fp32":
        log.state("accumulates", value == "True", line)
    elif name == "tie_word_embeddings":
        log.state("tied", value == "True", line)
