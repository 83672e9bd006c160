"""Megatron-LM's training log (megatron/training/training.py and arguments.py), also of its forks.

It prints all arguments, a line an interval of iterations, and the memory of some ranks once (MiB, called MB).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.imports.logs import MIB, LogFile, LoggedStep, TrainingLog

_ARGUMENT = re.compile(r"^\s+([a-z][a-z0-9_]*) \.{3,} (.*?)\s*$")
_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_TIME = re.compile(r"elapsed time per iteration \(ms\): *([^\s|]+)")
_BATCH = re.compile(r"global batch size: *([^\s|]+)")
_MEMORY = re.compile(r"\(after \d+ iterations\) memory \(MB\)(.*)")
_PEAK = re.compile(r"max (allocated|reserved): *([^\s|]+)")

_COUNTS = {
    "world_size": "devices", "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp", "context_parallel_size": "cp", "expert_model_parallel_size": "ep",
    "micro_batch_size": "micro_batch", "global_batch_size": "global_batch", "seq_length": "seq_len",
    "num_layers": "layers", "hidden_size": "hidden", "ffn_hidden_size": "ffn", "num_attention_heads": "heads",
    "kv_channels": "head_dim", "padded_vocab_size": "vocab",
}  # fmt: skip
_SWITCHES = {"sequence_parallel": "sequence_parallel", "swiglu": "gated", "add_bias_linear": "linear_bias",
             "add_qkv_bias": "qkv_bias", "qk_layernorm": "qk_norm"}  # fmt: skip
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}

Arguments = Mapping[str, tuple[int, str]]
"""Line and text by name."""


def read(file: LogFile) -> TrainingLog:
    """What the log states. Raises InputError for a value that cannot be."""
    log = TrainingLog(file=file, framework="megatron")
    arguments: dict[str, tuple[int, str]] = {}
    for line, text in file:
        if match := _ITERATION.search(text):
            number, time = file.step(line, match[1]), _TIME.search(text)
            if time is None:
                log.notes.append(f"line {line}: an iteration without its time, left out")
                continue
            time_ms = file.positive(line, "elapsed time per iteration (ms)", time[1])
            log.steps.append(LoggedStep(line=line, number=number, time_s=time_ms / 1e3))
            if batch := _BATCH.search(text):
                log.state("global_batch", file.count(line, "global batch size", batch[1]), line)
        elif match := _ARGUMENT.match(text):
            arguments[match[1]] = (line, match[2])
        elif match := _MEMORY.search(text):
            for kind, figure in _PEAK.findall(match[1]):
                count_bytes = file.positive(line, f"max {kind}", figure) * MIB
                (log.reserve if kind == "reserved" else log.allocate)(count_bytes)
    _state(log, arguments)
    return log


def _state(log: TrainingLog, arguments: Arguments) -> None:
    for name, ours in _COUNTS.items():
        if name in arguments and arguments[name][1] != "None":
            line, text = arguments[name]
            log.state(ours, log.file.count(line, name, text), line)
    for name, ours in _SWITCHES.items():
        if name in arguments:
            log.state(ours, arguments[name][1] == "True", arguments[name][0])
    if arguments:
        _plan(log, arguments)
        _formats(log, arguments)
        _model(log, arguments)


def _plan(log: TrainingLog, arguments: Arguments) -> None:
    line, text = arguments.get("recompute_granularity", (0, ""))
    if line:
        log.state("recompute", "none" if text == "None" else text, line)
    line, text = arguments.get("virtual_pipeline_model_parallel_size", (0, "None"))
    if text != "None":
        log.state("vpp", log.file.count(line, "virtual_pipeline_model_parallel_size", text), line)
        log.state("schedule", "interleaved", line)
    line, text = arguments.get("use_distributed_optimizer", (0, ""))
    if line:
        stage = int(text == "True")
        if _is_on(arguments, "use_megatron_fsdp") or _is_on(arguments, "use_custom_fsdp"):
            line, text = arguments.get("data_parallel_sharding_strategy", (line, ""))
            if text not in _SHARDED:
                allowed = "must be one of " + ", ".join(_SHARDED)
                raise log.file.bad(line, "data_parallel_sharding_strategy", text, allowed)
            stage = _SHARDED[text]
        log.state("zero_stage", stage, line)


def _formats(log: TrainingLog, arguments: Arguments) -> None:
    if "bf16" in arguments:
        fp8 = arguments.get("fp8", arguments.get("fp8_format", (0, "None")))[1] not in {"None", "False"}
        half = next((name for name in ("bf16", "fp16") if _is_on(arguments, name)), "fp32")
        log.state("dtype", "fp8" if fp8 else half, arguments["bf16"][0])
    if "accumulate_allreduce_grads_in_fp32" in arguments:
        line, text = arguments["accumulate_allreduce_grads_in_fp32"]
        half = next((name for name in ("bf16", "fp16") if _is_on(arguments, name)), "fp32")
        reduced = half if _is_on(arguments, "grad_reduce_in_bf16") or text != "True" else "fp32"
        log.state("grad_dtype", reduced, line)
    if "optimizer" in arguments:
        line, text = arguments["optimizer"]
        if text not in {"adam", "sgd"}:
            raise log.file.bad(line, "optimizer", text, "must be adam or sgd")
        log.state("optimizer", "adamw" if text == "adam" else "sgd", line)


def _model(log: TrainingLog, arguments: Arguments) -> None:
    heads = arguments.get("num_attention_heads")
    if heads is not None:
        groups = "num_query_groups" if _is_on(arguments, "group_query_attention") else "num_attention_heads"
        line, text = arguments.get(groups, heads)
        log.state("kv_heads", log.file.count(line, groups, text), line)
    if "untie_embeddings_and_output_weights" in arguments:
        line, text = arguments["untie_embeddings_and_output_weights"]
        log.state("tied", text != "True", line)
    for name, ours, words in (("position_embedding_type", "position", _POSITIONS), ("normalization", "norm", _NORMS)):
        if name in arguments and arguments[name][1] in words:
            log.state(ours, words[arguments[name][1]], arguments[name][0])
    line, text = arguments.get("num_experts", (0, "None"))
    if text != "None":
        log.state("experts", log.file.count(line, "num_experts", text), line)


def _is_on(arguments: Arguments, name: str) -> bool:
    return name in arguments and arguments[name][1] == "True"
