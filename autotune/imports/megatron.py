"""Megatron-LM's training log (megatron/training/training.py and arguments.py), also of its forks.

It prints all arguments, a line an interval of iterations, and the memory of some ranks once (MiB, called MB).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.imports.logs import MIB, LogFile, LoggedStep, TrainingLog
from autotune.specs import Fp8Recipe, Module

_ARGUMENT = re.compile(r"^\s+([a-z][a-z0-9_]*) \.{3,} (.*?)\s*$")
_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_TIME = re.compile(r"elapsed time per iteration \(ms\): *([^\s|]+) *\|")
_BATCH = re.compile(r"global batch size: *([^\s|]+) *\|")
_MEMORY = re.compile(r"(?:\[Rank (\d+)\])? *\(after \d+ iterations\) memory \(MB\)(.*)")
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

_ELSE = {
    "optimizer_cpu_offload": "optimizer states are in host memory",
    "cpu_offloading": "activations are in host memory",
    "fine_grained_activation_offloading": "activations are in host memory",
    "num_distributed_optimizer_instances": "the optimizer is sharded within a part of dp",
    "enable_zero_bubble": "the schedule is zero-bubble",
    "enable_1f1b_v": "the schedule is zero-bubble",
    "zero_bubble_v_schedule": "the schedule is zero-bubble",
    "patch_zero_bubble": "the schedule is zero-bubble",
    "schedules_method": "the schedule is another one",
    "use_dualpipev": "the schedule is DualPipe",
    "distribute_saved_activations": "kept activations are divided over tp",
    "rampup_batch_size": "the batch grows while it trains",
    "fp4": "matrix products are in 4 bits",
    "fp4_format": "matrix products are in 4 bits",
}
"""Arguments, also of forks, that make another plan than any that could be stored."""
_UNEVEN = {
    "decoder_first_pipeline_num_layers": "the first stage has layers of its own number",
    "decoder_last_pipeline_num_layers": "the last stage has layers of its own number",
    "pipeline_model_parallel_layout": "stages have layers as told one by one",
    "account_for_embedding_in_pipeline_split": "the embedding counts as a layer where stages are cut",
    "account_for_loss_in_pipeline_split": "the loss counts as a layer where stages are cut",
}
"""The same, where there is a pipeline."""
_NOTED = {
    "delay_wgrad_compute": "weight gradients computed later",
    "moe_enable_deepep": "the experts' exchange by DeepEP",
    "enable_cuda_graph": "CUDA graphs",
    "external_cuda_graph": "CUDA graphs",
    "moe_expert_capacity_factor": "experts drop tokens beyond a capacity",
    "moe_pad_expert_input_to_capacity": "experts' inputs are padded to a capacity",
    "hierarchical_context_parallel_sizes": "context parallelism on two levels",
}
"""Arguments that a plan does not say and that change its speed only: they are told."""
_OVERLAPS = {"overlap_grad_reduce": "gradients are reduced", "overlap_param_gather": "parameters are gathered"}
"""Off, the estimate's assumption does not hold that this happens under computation."""
_OTHER_SHAPES = (
    "multi_latent_attention", "heterogeneous_layers_config_path", "hybrid_override_pattern", "hybrid_layer_pattern",
    "is_hybrid_model", "mtp_num_layers", "window_size", "linear_attention_freq", "experimental_attention_variant",
)  # fmt: skip
"""Arguments that make another model than the dimensions that are printed tell."""
_DTYPES = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16",
           "uint8": "fp8", "fp8": "fp8"}  # fmt: skip
_STATES = {"main_params_dtype": "master_dtype", "main_grads_dtype": "grad_dtype", "exp_avg_dtype": "exp_avg_dtype",
           "exp_avg_sq_dtype": "exp_avg_sq_dtype"}  # fmt: skip
"""What a precision-aware optimizer keeps in formats of its own; Megatron stores fp8 as uint8."""
_RECIPES = {recipe.value for recipe in Fp8Recipe}
_MODULES = {module.value for module in Module}
_WORDS = re.compile(r"\w+")
_OFF = {"", "None", "False", "0", "0.0", "[]"}

_READ = frozenset(
    {
        *_COUNTS, *_SWITCHES, *_ELSE, *_UNEVEN, *_NOTED, *_OVERLAPS, *_OTHER_SHAPES, *_STATES, "bf16", "fp8",
        "fp8_format", "fp8_recipe", "fp8_param_gather", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "recompute_modules", "use_distributed_optimizer", "use_megatron_fsdp",
        "use_torch_fsdp2", "data_parallel_sharding_strategy", "virtual_pipeline_model_parallel_size", "num_experts",
        "num_query_groups", "optimizer", "expert_tensor_parallel_size", "accumulate_allreduce_grads_in_fp32",
        "tp_comm_overlap", "overlap_moe_expert_parallel_comm", "attention_backend", "cross_entropy_loss_fusion",
        "position_embedding_type", "normalization", "untie_embeddings_and_output_weights",
    }
)  # fmt: skip
"""Arguments that make what is stored: in one run they are the same at every start."""

Arguments = Mapping[str, tuple[int, str]]
"""Line and text by name."""


def read(file: LogFile) -> TrainingLog:
    """What the log states. Raises InputError for a value that cannot be."""
    log = TrainingLog(file=file, framework="megatron")
    arguments: dict[str, tuple[int, str]] = {}
    for line, text in file:
        if match := _ITERATION.search(text):
            number = file.step(line, match[1])
            figure = log.figure(line, _TIME.search(text))
            if figure is None:
                continue
            time_ms = file.positive(line, "elapsed time per iteration (ms)", figure)
            log.step(LoggedStep(line=line, number=number, time_s=time_ms / 1e3))
            if batch := _BATCH.search(text):
                log.state("global_batch", file.count(line, "global batch size", batch[1]), line)
        elif match := _ARGUMENT.match(text):
            _argument(log, arguments, line, match[1], match[2])
        elif match := _MEMORY.search(text):
            if match[1]:
                log.peaks_of.add(file.step(line, match[1]))
            for kind, figure in _PEAK.findall(match[2]):
                count_bytes = file.positive(line, f"max {kind}", figure) * MIB
                (log.reserve if kind == "reserved" else log.allocate)(count_bytes)
    _state(log, arguments)
    return log


def _argument(log: TrainingLog, arguments: dict[str, tuple[int, str]], line: int, name: str, text: str) -> None:
    """Notes an argument. Raises InputError where an earlier start in the same file had another value that counts."""
    before, known = arguments.get(name, (0, text))
    if known != text and name in _READ:
        raise log.file.bad(line, name, text, f"line {before} has {known!r}: a log of one run is needed")
    arguments[name] = (line, text)


def _state(log: TrainingLog, arguments: Arguments) -> None:
    for name, ours in _COUNTS.items():
        if name in arguments and arguments[name][1] != "None":
            line, text = arguments[name]
            log.state(ours, log.file.count(line, name, text), line)
    for name, ours in _SWITCHES.items():
        if name in arguments:
            log.state(ours, arguments[name][1] == "True", arguments[name][0])
    if arguments:
        _require_sayable(log, arguments)
        _plan(log, arguments)
        _formats(log, arguments)
        _kernels(log, arguments)
        _model(log, arguments)


def _require_sayable(log: TrainingLog, arguments: Arguments) -> None:
    """Raises InputError for what makes another plan than the one that would be stored; notes what a plan cannot say."""
    staged = arguments.get("pipeline_model_parallel_size", (0, "1"))[1] != "1" and not _ends_are_counted(log, arguments)
    for name, what in (_ELSE | _UNEVEN if staged else _ELSE).items():
        line, text = arguments.get(name, (0, ""))
        alone = name == "num_distributed_optimizer_instances" and text == "1"
        if text not in _OFF and not alone:
            raise log.file.bad(line, name, text, f"not understood: {what}, and no plan says so")
    for name, what in _NOTED.items():
        line, text = arguments.get(name, (0, ""))
        if text not in _OFF:
            log.note(f"line {line}: {name} ({what}), which a plan does not say")
    line, text = arguments.get("cp_comm_type", (0, "None"))
    if "a2a" in text and arguments.get("context_parallel_size", (0, "1"))[1] != "1":
        raise log.file.bad(line, "cp_comm_type", text, "not understood: Ulysses' exchange is no part of a plan")
    many = arguments.get("data_parallel_size", (0, "1"))[1] != "1"
    for name, what in _OVERLAPS.items():
        sharded = _is_on(arguments, "use_distributed_optimizer")
        if many and name in arguments and not _said(arguments, name) and (sharded or name == "overlap_grad_reduce"):
            log.note(f"line {arguments[name][0]}: {name} is off: {what} after the computation, not under it")


def _ends_are_counted(log: TrainingLog, arguments: Arguments) -> bool:
    """Whether embedding and loss count as a layer each so that the chunks are equal: such a plan is cut like that."""
    ends = [f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")]
    others = (name for name in _UNEVEN if name not in ends)
    if not all(_is_on(arguments, name) for name in ends) or any(_said(arguments, name) for name in others):
        return False
    line, text = arguments.get("virtual_pipeline_model_parallel_size", (0, "None"))
    vpp = 1 if text == "None" else log.file.count(line, "virtual_pipeline_model_parallel_size", text)
    return (int(log.value("layers") or 0) + 2) % (int(log.value("pp") or 1) * vpp) == 0


def _said(arguments: Arguments, name: str) -> bool:
    return arguments.get(name, (0, ""))[1] not in _OFF


def _plan(log: TrainingLog, arguments: Arguments) -> None:
    line, text = arguments.get("virtual_pipeline_model_parallel_size", (0, "None"))
    if text != "None":
        log.state("vpp", log.file.count(line, "virtual_pipeline_model_parallel_size", text), line)
        log.state("schedule", "interleaved", line)
    line, text = arguments.get("recompute_granularity", (0, ""))
    if line:
        log.state("recompute", "none" if text == "None" else text, line)
    if text == "full":
        _require_every_layer(log, arguments)
    if text == "selective":
        line, modules = arguments.get("recompute_modules", (0, "None"))
        named = [name for name in _WORDS.findall(modules) if name != "None"]
        unknown = [name for name in named if name not in _MODULES]
        if unknown:
            raise log.file.bad(line, "recompute_modules", modules, "must be of " + ", ".join(sorted(_MODULES)))
        if named and set(named) != {Module.CORE_ATTN.value}:
            log.state("recompute_modules", "+".join(sorted(named)), line)
    line, text = arguments.get("use_distributed_optimizer", (0, ""))
    if line:
        stage = int(text == "True")
        if _is_on(arguments, "use_megatron_fsdp") or _is_on(arguments, "use_custom_fsdp"):
            line, text = arguments.get("data_parallel_sharding_strategy", (line, ""))
            if text not in _SHARDED:
                allowed = "must be one of " + ", ".join(_SHARDED)
                raise log.file.bad(line, "data_parallel_sharding_strategy", text, allowed)
            stage = _SHARDED[text]
        if _is_on(arguments, "use_torch_fsdp2"):
            line, text = arguments.get("torch_fsdp2_reshard_after_forward", (line, "True"))
            stage = 3 if text == "True" else 2
        log.state("zero_stage", stage, line)
    line, text = arguments.get("expert_tensor_parallel_size", (0, "None"))
    if text not in _OFF and _said(arguments, "num_experts"):
        log.state("etp", log.file.count(line, "expert_tensor_parallel_size", text), line)


def _require_every_layer(log: TrainingLog, arguments: Arguments) -> None:
    """Raises InputError where only some layers are recomputed, or the inputs of only some are kept."""
    method = arguments.get("recompute_method", (0, "None"))[1]
    line, text = arguments.get("recompute_num_layers", (0, "None"))
    if text == "None":
        return
    count = log.file.count(line, "recompute_num_layers", text) if text != "0" else 0
    chunks = int(log.value("pp") or 1) * int(log.value("vpp") or 1)
    layers = int(log.value("layers") or 0) // chunks
    if method == "block" and count < layers:
        allowed = f"not understood: `full` recomputes all {layers} layers of a stage, here {count} of them"
        raise log.file.bad(line, "recompute_num_layers", text, allowed)
    if method == "uniform" and count > 1:
        allowed = f"not understood: `full` keeps the input of every layer, here of one in {count}"
        raise log.file.bad(line, "recompute_num_layers", text, allowed)


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
    if _is_on(arguments, "fp8_param_gather") and log.value("dtype") == "fp8":
        log.state("param_dtype", "fp8", arguments["fp8_param_gather"][0])
    if "optimizer" in arguments:
        line, text = arguments["optimizer"]
        if text not in {"adam", "sgd"}:
            raise log.file.bad(line, "optimizer", text, "must be adam or sgd")
        log.state("optimizer", "adamw" if text == "adam" else "sgd", line)


def _kernels(log: TrainingLog, arguments: Arguments) -> None:
    """How parts are computed, and in which formats a precision-aware optimizer keeps its states."""
    for name, ours in (("tp_comm_overlap", "tp_overlap"), ("overlap_moe_expert_parallel_comm", "ep_overlap")):
        if _is_on(arguments, name):
            log.state(ours, True, arguments[name][0])
    line, text = arguments.get("attention_backend", (0, ""))
    local = arguments.get("transformer_impl", (0, ""))[1] == "local" and "use_flash_attn" in arguments
    if "unfused" in text or "local" in text or (not line and local and not _is_on(arguments, "use_flash_attn")):
        log.state("attention", "unfused", line or arguments["use_flash_attn"][0])
    for name, ours in _STATES.items():
        line, text = arguments.get(name, (0, "None"))
        if _is_on(arguments, "use_precision_aware_optimizer") and text != "None":
            dtype = _DTYPES.get(text.removeprefix("torch."))
            if dtype is None:
                raise log.file.bad(line, name, text, "must be of " + ", ".join(_DTYPES))
            if dtype != "fp32":
                log.state(ours, dtype, line)
    if _is_on(arguments, "cross_entropy_loss_fusion"):
        log.state("cross_entropy", "fused", arguments["cross_entropy_loss_fusion"][0])
    line, text = arguments.get("fp8_recipe", (0, "None"))
    if text in _RECIPES and log.value("dtype") == "fp8":
        log.state("fp8_recipe", text, line)


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
    for name in _OTHER_SHAPES:
        if _said(arguments, name):
            log.state("other_shape", f"{name} {arguments[name][1]}", arguments[name][0])
            break


def _is_on(arguments: Arguments, name: str) -> bool:
    return name in arguments and arguments[name][1] == "True"
