"""torchtitan's training log (torchtitan/train.py and components/metrics.py).

It prints a line a logging interval with the speed of one GPU and the reserved peak, and before that the mesh, the
batch and what was applied to the model; with `print_config` the whole config too.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from autotune.imports.logs import GIB, LogFile, LoggedStep, TrainingLog

_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
_SPEED = re.compile(r"\b(?:tps|wps):\s*([^\s]+)")
_MEMORY = re.compile(r"\bmemory:\s*([^\s(]+?)GiB")
_START = re.compile(r"Training starts at step \d+, (?=with local)(.*)")
_BATCHES = {
    "local_batch": re.compile(r"local batch size (\S+?),"),
    "global_batch": re.compile(r"global batch size (\S+?),"),
    "seq_len": re.compile(r"sequence length (\S+?),"),
}
_TRAINER = re.compile(r"Trainer is initialized with (\d+) tokens per DP rank, (\d+) tokens per train step\b(.*)")
_MESH = re.compile(r"Building \d+-D device mesh with (\[[^]]*\]), (\[[^]]*\])")
_NAMED_MESH = re.compile(r"Building device mesh with parallelism: ((?:\w+=\d+(?:, )?)+)")
_MODEL = re.compile(r"Model (.+?) size: ([\d,]+) total parameters")
_GPU = re.compile(r"\b(?:GPU|CUDA|HIP|XPU) capacity: (.+?)(?: \(\d+\))? with ([\d.]+)GiB memory")
_CHECKPOINTS = re.compile(r"Applied (\w+?)(?:AC)? activation checkpointing")
MAX_CONFIG = 4 << 20
_CONFIG = re.compile(r"Running with (?:args|configs?): *\{")

_DEGREES = {
    "tensor_parallel_degree": "tp", "pipeline_parallel_degree": "pp", "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep", "pipeline_parallel_microbatch_size": "micro_batch",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved"}
_FP8 = re.compile(
    r"Float8 (?:\w+ )*training active|Swapped to (?:Float8|MX)Linear|MX training active|MXFP8", re.IGNORECASE
)
_APPLIED = {  # what a line says was done to the model or the optimizer, and no plan of ours says
    re.compile(
        r"async(?:hronous)? (?:TP|tensor parallel)", re.IGNORECASE
    ): "tensor-parallel communication under matrix products",
    re.compile(r"CPU offload", re.IGNORECASE): "parameters and optimizer states in host memory",
}


def read(file: LogFile) -> TrainingLog:
    """What the log states. Raises InputError for a value that cannot be."""
    log = TrainingLog(file=file, framework="fsdp")
    for line, text in file:
        if match := _STEP.search(text):
            number, memory = file.step(line, match[1]), _MEMORY.search(text)
            figure = log.figure(line, _SPEED.search(text))
            if figure is None:
                continue
            per_gpu = file.positive(line, "tps", figure)
            log.step(LoggedStep(line=line, number=number, tokens_per_s_per_gpu=per_gpu))
            if memory is not None:
                log.reserve(file.positive(line, "memory", memory[1]) * GIB)
        elif match := _START.search(text):
            for name, pattern in _BATCHES.items():
                if size := pattern.search(match[1]):
                    log.state(name, file.count(line, name, size[1]), line)
        elif match := _TRAINER.search(text):
            _trainer(log, line, match)
        elif match := _NAMED_MESH.search(text):
            sizes = dict(item.split("=") for item in match[1].rstrip(", ").split(", "))
            _mesh(log, line, {name: int(size) for name, size in sizes.items()})
        elif match := _MESH.search(text):
            _mesh(log, line, _sizes(log, line, match[1], match[2]))
        elif match := _CONFIG.search(text):
            _config(log, line, _document(file, line, match.end() - 1))
        else:
            _applied(log, line, text)
    _imply(log)
    return log


def _trainer(log: TrainingLog, line: int, match: re.Match[str]) -> None:
    """Tokens become sequences once the length of one is known, which the same line ends with."""
    length = _BATCHES["seq_len"].search(match[3])
    if length is None:
        return
    seq_len, file = log.file.count(line, "seq_len", length[1]), log.file
    log.state("seq_len", seq_len, line)
    for name, text in (("local_batch", match[1]), ("global_batch", match[2])):
        tokens = file.count(line, name, text)
        if tokens % seq_len:
            raise file.bad(line, name, f"{tokens} tokens", f"must be whole sequences of {seq_len}")
        log.state(name, tokens // seq_len, line)


def _sizes(log: TrainingLog, line: int, names_text: str, sizes_text: str) -> dict[str, int]:
    """The sizes of a mesh by the names of its dimensions."""
    names, sizes = _literal(names_text), _literal(sizes_text)
    named = all(isinstance(name, str) for name in names)
    if len(names) != len(sizes) or not named or any(type(size) is not int or size < 1 for size in sizes):
        raise log.file.bad(line, "device mesh", sizes_text, "must be a positive size a dimension")
    return dict(zip(names, sizes, strict=True))


def _mesh(log: TrainingLog, line: int, mesh: dict[str, int]) -> None:
    """The mesh has the dimensions that are larger than one; those that it lacks are one."""
    for name in ("tp", "pp", "cp"):
        log.state(name, mesh.get(name, 1), line)
    # With experts the shards' axis is cut in two, and the experts take the inner part and the context's ranks.
    shards = mesh.get("dp_shard", 1) * mesh.get("dp_shard_mod_ep", 1) * mesh.get("dp_shard_in_ep", 1)
    if "dp_shard_in_ep" in mesh:
        log.state("ep", mesh["dp_shard_in_ep"] * mesh.get("cp", 1), line)
    elif "ep" in mesh:
        log.state("ep", mesh["ep"], line)
    copies = mesh.get("dp_replicate", 1)
    if copies > 1 and shards > 1:
        what = f"dp_replicate {copies} x dp_shard {shards}"
        raise log.file.bad(line, "HSDP", what, "not understood: a plan shards states over all of dp, or not at all")
    log.state("dp", copies * shards, line)
    if shards == 1:
        log.state("zero_stage", 0, line)


def _literal(text: str) -> list[Any]:
    """The items of a list as Python prints it; None for anything else."""
    try:
        return list(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return [None]


def _applied(log: TrainingLog, line: int, text: str) -> None:
    if match := _MODEL.search(text):
        log.state("model_name", match[1], line)
        log.state("parameters", log.file.count(line, "parameters", match[2]), line)
    elif match := _GPU.search(text):
        log.state("gpu", match[1], line)
        log.state("gpu_memory_gib", log.file.positive(line, "GPU memory", match[2]), line)
    elif (match := _CHECKPOINTS.search(text)) and match[1].lower() == "full":
        log.state("recompute", "full", line)
    elif match:
        log.note(f"line {line}: {match[1]} activation checkpointing is none of ours, say which with --plan")
        log.state("other_recompute", match[1].lower(), line)
    elif _FP8.search(text):
        log.state("dtype", "fp8", line)
        if "mx" in text.lower():
            log.state("fp8_recipe", "mxfp8", line)
    else:
        for pattern, what in _APPLIED.items():
            if pattern.search(text):
                log.note(f"line {line}: {what}, which a plan does not say")


def _document(file: LogFile, line: int, column: int) -> dict[str, Any]:
    """The config that begins there: JSON over lines, or a Python dict on one. Empty if it is neither."""
    text = file.rest(line, MAX_CONFIG)[column:]
    try:
        found = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(text.partition("\n")[0].strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # what ast raises for text that is too deep
            return {}
    return found if isinstance(found, dict) else {}


def _config(log: TrainingLog, line: int, config: dict[str, Any]) -> None:
    parallelism, training = _section(config, "parallelism"), _section(config, "training")
    for name, ours in _DEGREES.items():
        degree = parallelism.get(name)
        if isinstance(degree, int) and (ours != "micro_batch" or parallelism.get("pipeline_parallel_degree", 1) > 1):
            log.state(ours, degree, line)
    checkpoint = _section(config, "activation_checkpoint")
    if checkpoint.get("mode") in {"none", "full"}:
        log.state("recompute", checkpoint["mode"], line)
    elif checkpoint.get("mode") == "selective" and checkpoint.get("selective_ac_option") == "op":
        log.state("recompute", "op", line)
    if training.get("mixed_precision_param") in _DTYPES:
        log.state("dtype", _DTYPES[training["mixed_precision_param"]], line)
    schedule = str(parallelism.get("pipeline_parallel_schedule", "")).lower()
    if parallelism.get("pipeline_parallel_degree", 1) > 1 and schedule:
        if schedule not in _SCHEDULES:
            known = ", ".join(_SCHEDULES)
            raise log.file.bad(line, "pipeline_parallel_schedule", schedule, f"not understood; understood: {known}")
        log.state("schedule", _SCHEDULES[schedule], line)
    if training.get("enable_cpu_offload"):
        raise log.file.bad(line, "enable_cpu_offload", True, "not understood: a plan keeps its states on the devices")
    if parallelism.get("enable_async_tensor_parallel"):
        log.note(f"line {line}: enable_async_tensor_parallel, which a plan does not say")
    if parallelism.get("fsdp_reshard_after_forward") in {"always", "never"}:
        log.state("reshard", parallelism["fsdp_reshard_after_forward"], line)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _imply(log: TrainingLog) -> None:
    """torchtitan's defaults for what it does not print. An option says otherwise."""
    if not log.facts:
        return
    staged = log.value("pp") != 1
    if "local_batch" in log.facts and "pp" in log.facts and not staged:
        log.state("micro_batch", log.facts["local_batch"].value, log.facts["local_batch"].line, implied=True)
    kept = log.value("reshard") == "never" or ("reshard" not in log.facts and staged)
    log.state("zero_stage", 2 if kept else 3, 0, implied=True)  # "default" reshards after forward without a pipeline
    if "other_recompute" not in log.facts:
        log.state("recompute", "none", 0, implied=True)
    log.state("dtype", "bf16", 0, implied=True)
    log.state("sequence_parallel", log.value("tp") not in {None, 1}, 0, implied=True)
