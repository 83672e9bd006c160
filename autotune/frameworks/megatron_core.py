"""Settings that Megatron-LM's arguments and Megatron-Bridge's configs share: those of Megatron-Core, by its names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from autotune.frameworks.arguments import ExportRequest, refuse
from autotune.frameworks.table import Entry, Facts, Remainder, Settings, Why, count
from autotune.specs import DType, Fp8Recipe, Module, Plan, Recompute, Schedule

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's names of the ZeRO stages (its developer guide, ShardingStrategy)."""
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

NO_WORD = {
    "optimizer_cpu_offload": "optimizer states are in host memory",
    "cpu_offloading": "activations are in host memory",
    "cpu_offloading_num_layers": "activations of so many layers are in host memory",
    "fine_grained_activation_offloading": "activations are in host memory",
    "offload_modules": "activations of these modules are in host memory",
    "distribute_saved_activations": "kept activations are divided over tp",
    "delay_wgrad_compute": "weight gradients are computed later",
    "hierarchical_context_parallel_sizes": "context parallelism is on two levels",
    "hybrid_context_parallel": "context parallelism is as wide as each sequence needs",
    "mtp_num_layers": "there are layers for multi-token prediction",
    "enable_cuda_graph": "the step is a CUDA graph",
    "external_cuda_graph": "layers are CUDA graphs",
    "cuda_graph_impl": "layers or steps are CUDA graphs",
    "cuda_graph_scope": "these parts are CUDA graphs",
    "cuda_graph_modules": "these parts are CUDA graphs",
    "moe_enable_deepep": "experts exchange by DeepEP",
    "moe_flex_dispatcher_backend": "experts exchange by this library",
    "moe_shared_expert_overlap": "shared experts run beside the exchange",
    "moe_pad_expert_input_to_capacity": "experts' inputs are padded to their capacity",
    "moe_paged_stash": "experts' activations are kept in pages",
    "use_torch_fsdp2": "PyTorch's FSDP2 shards the parameters",
    "defer_embedding_wgrad_compute": "the embedding's gradient is computed at the end",
    "overlap_param_gather_with_optimizer_step": "parameters are gathered beside the optimizer's step",
    "tensor_parallel_num_weight_shards": "weights are sharded beyond tp",
    "expert_tensor_parallel_num_weight_shards": "experts' weights are sharded beyond expert tp",
    "fp4": "products are in 4 bits; the workload says fp8",
    "first_last_layers_bf16": "the first and last layers are in bf16",
    "window_size": "attention has a window",
    "linear_attention_freq": "some layers have linear attention",
    "experimental_attention_variant": "attention is of another kind",
    "hybrid_layer_pattern": "layers are of several kinds",
    "hybrid_override_pattern": "layers are of several kinds",
    "attention_output_gate": "attention has a gate",
    "fp32_residual_connection": "residuals are in fp32",
    "use_kitchen*": "kernels are of another library",
}
"""What changes speed or memory and no plan says, by the settings' names there."""


def check(target: str, run: ExportRequest) -> None:
    """Raises IllegalPlanError for a plan or model that Megatron-Core cannot run; `target` is named in it."""
    model, plan = run.model, run.plan
    chunks, modules = plan.pp * plan.vpp, set(plan.recompute_modules)
    overlap = run.workload.ep_overlap is True and model.experts > 0 and plan.ep > 1
    refuse(
        target,
        run,
        (
            (plan.recompute is Recompute.OP, "Megatron recomputes by modules, not by operations"),
            (plan.pp > 1 and plan.schedule is Schedule.GPIPE, "Megatron has no GPipe schedule: use 1f1b"),
            (
                model.layers % chunks > 0 and (model.layers + 2) % chunks > 0,
                f"Megatron needs layers ({model.layers}), or layers and both ends, divisible by pp * vpp ({chunks})",
            ),
            (plan.zero_stage > 1 and plan.pp > 1, "Megatron-FSDP (ZeRO-2, ZeRO-3) and a pipeline exclude each other"),
            (
                model.experts > 0 and plan.tp > 1 and not plan.sequence_parallel,
                "Megatron needs sequence_parallel where a mixture of experts meets tensor parallelism",
            ),
            (model.linear_bias and not model.qkv_bias, "Megatron biases q, k and v wherever linear layers have biases"),
            (
                run.workload.tp_overlap is True and plan.tp > 1 and not plan.sequence_parallel,
                "tp_overlap needs sequence_parallel",
            ),
            (
                overlap and (plan.recompute is Recompute.FULL or Module.MOE in modules),
                "ep_overlap goes without recomputation of whole layers or mixtures",
            ),
            (
                run.workload.dtype is DType.FP8
                and run.workload.fp8_recipe in {None, Fp8Recipe.DELAYED}
                and bool(modules & {Module.MOE_ACT, Module.LAYERNORM}),
                "fp8 with delayed scaling, the default, does not recompute moe_act or layernorm: name an fp8_recipe",
            ),
            (overlap and plan.pp > 1 and plan.vpp == 1, "ep_overlap with a pipeline needs vpp > 1"),
        ),
    )


def moe_layers(model: Facts) -> str | None:
    """Which layers are mixtures, as a pattern; None where all are."""
    dense, every, layers = model["dense_layers"], model["moe_every"], model["layers"]
    if every > 1:
        return f"([0]*{every - 1}+[1])*{layers // every}"
    return f"([0]*{dense}+[1]*{layers - dense})" if dense else None


def read_moe_layers(settings: Settings, name: str, layers: int) -> Mapping[str, object]:
    """The facts of such a pattern: a number (each n-th layer), or a list. Raises InputError for another pattern."""
    value = settings.value(name, 1)
    pattern = _pattern(value)
    if isinstance(pattern, int):
        pattern = [int(at % pattern == 0) for at in range(layers)] if pattern else None
    if not pattern or any(each not in (0, 1) for each in pattern) or len(pattern) != layers:
        raise settings.bad(name, f"a number, or a pattern of 0 and 1 for the {layers} layers")
    dense = pattern.index(1) if 1 in pattern else layers
    if all(pattern[dense:]):
        return {"dense_layers": dense}
    every = len(pattern) // sum(pattern)
    if all(each == (at % every == every - 1) for at, each in enumerate(pattern)) or all(
        each == (at % every == 0) for at, each in enumerate(pattern)
    ):
        return {"moe_every": every}
    raise settings.bad(name, "dense layers first, or mixtures at equal distances")


def _pattern(value: object) -> list[int] | int | None:
    """A list of numbers from `[0]*3+[1]*58`, a list or a number; None for anything else."""
    if isinstance(value, list | tuple):
        return [int(each) if str(each) in {"0", "1"} else -1 for each in value]
    text = str(value).replace(" ", "")
    if text.isdigit():
        return int(text)
    if re.fullmatch(r"[\[\]()*+,\d]+", text) is None or len(text) > 4000:
        return None
    found: list[int] = []
    outer = re.fullmatch(r"\((.*)\)\*(\d{1,5})", text)
    times = int(outer[2]) if outer else 1
    inner = outer[1] if outer else text.removeprefix("(").removesuffix(")")
    for part in inner.split("+"):
        match = re.fullmatch(r"\(?\[([\d,]+)\]\)?(?:\*(\d{1,5}))?", part)
        if match is None:
            return None
        found += [int(each) for each in match[1].split(",") if each] * int(match[2] or 1)
    return found * times if len(found) * times <= 20_000 else None


# Pipelines.


def pipeline(at: Callable[[str], str], chunks_name: str) -> Entry:
    """Chunks of a pipeline rank in both spellings, the schedule, and how the stages are cut."""
    stages, layers = at("num_virtual_stages_per_pipeline_rank"), at("num_layers_per_virtual_pipeline_stage")
    vpp, layout = at("virtual_pipeline_model_parallel_size"), at("pipeline_model_parallel_layout")
    first, last = at("num_layers_in_first_pipeline_stage"), at("num_layers_in_last_pipeline_stage")
    old_first, old_last = at("decoder_first_pipeline_num_layers"), at("decoder_last_pipeline_num_layers")
    ends = at("account_for_embedding_in_pipeline_split"), at("account_for_loss_in_pipeline_split")

    def say(facts: Facts) -> Mapping[str, object]:
        chunks = facts["vpp"] if facts["vpp"] > 1 else None
        counts = facts["layers"] % (facts["pp"] * facts["vpp"]) > 0
        return {at(chunks_name): chunks, **{each: True for each in ends if counts}}

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        pp, total = facts["pp"], facts.get("layers")
        counted = [settings.switch(name) for name in ends]
        chunks = settings.count(vpp) or settings.count(stages) or 1
        each = settings.count(layers)
        cut = None
        if (text := settings.value(layout)) is not None:
            cut = stages_of(settings, layout, text)
            if len(cut) % pp:
                raise settings.bad(layout, f"a multiple of pp = {pp} stages")
            chunks = len(cut) // pp
        elif each is not None:
            whole = (total or 0) + sum(counted)
            if whole % (pp * each):
                raise settings.bad(layers, f"{whole} layers must be a multiple of pp = {pp} times it")
            chunks = whole // (pp * each)
        own = [settings.count(name, settings.count(old)) for name, old in ((first, old_first), (last, old_last))]
        if cut is None and total is not None and pp > 1:
            cut = _cut(total, pp * chunks, counted, own, chunks)
        found: dict[str, object] = {"vpp": chunks}
        if chunks > 1:
            found["schedule"] = Schedule.INTERLEAVED.value
        if cut is not None and total is not None and sum(cut) != total:
            raise settings.bad(layout, f"{total} layers, these are {sum(cut)}")
        if cut is not None and total is not None and tuple(cut) not in _said(total, pp * chunks):
            found["uneven"] = tuple(cut)
        return found

    return Entry(say=say, read=read)


def _cut(layers: int, chunks: int, counted: list[bool], own: list[int | None], per_rank: int) -> list[int] | None:
    """Layers of each chunk, as Megatron-Core cuts them; None where it cannot."""
    first, last = own
    pp = chunks // per_rank
    if first is not None or last is not None:
        rest, left = pp - (first is not None) - (last is not None), layers - (first or 0) - (last or 0)
        if left < 0 or (rest and left % (rest * per_rank)) or any((each or 0) % per_rank for each in own):
            return None
        middle = left // (rest * per_rank) if rest else 0
        one = [middle] * pp
        if first is not None:
            one[0] = first // per_rank
        if last is not None:
            one[-1] = last // per_rank
        return one * per_rank
    if (layers + sum(counted)) % chunks:
        return None
    cut = [(layers + sum(counted)) // chunks] * chunks
    cut[0] -= counted[0]
    cut[-1] -= counted[1]
    return cut


def _said(layers: int, chunks: int) -> set[tuple[int, ...]]:
    """The cuts that a plan stands for: equal ones, or with both ends counted where layers alone do not divide."""
    if layers % chunks == 0:
        return {(layers // chunks,) * chunks}
    found = _cut(layers, chunks, [True, True], [None, None], 1)
    return set() if found is None else {tuple(found)}


def stages_of(settings: Settings, name: str, value: object) -> list[int]:
    """Transformer layers of each stage of a layout: `Et*3|(tt|)*29,m|L`, or lists of names.

    Raises InputError for anything else.
    """
    if isinstance(value, list | tuple):
        rows = [row if isinstance(row, list | tuple) else [row] for row in value]
        return [sum(str(each).lower() in {"decoder", "t", "layertype.decoder"} for each in row) for row in rows]
    text = str(value).replace(",", "").replace(" ", "")
    repeat = re.compile(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,4})")
    for _ in range(8):
        text, times = repeat.subn(lambda match: (match[1] or match[2]) * int(match[3]), text)
        text = re.sub(r"\(([EtmL|]*)\)(?!\*)", r"\1", text)
        if not times:
            break
        if len(text) > 20_000:
            raise settings.bad(name, "a shorter layout")
    if re.fullmatch(r"[EtmL|]+", text) is None:
        raise settings.bad(name, "stages of E, t, m and L between bars, as Et|tt|tL")
    return [row.count("t") for row in text.split("|")]


# Degrees and recomputation.


def degrees(at: Callable[[str], str], chunks_name: str) -> tuple[Entry, ...]:
    """tp, pp, cp, ep and expert tp, sequence parallelism, and the pipeline's chunks."""
    return (
        count(at("tensor_model_parallel_size"), "tp", 1),
        count(at("pipeline_model_parallel_size"), "pp", 1),
        count(at("context_parallel_size"), "cp", 1),
        Entry(
            say=lambda facts: {at("sequence_parallel"): facts["sequence_parallel"] and facts["tp"] > 1},
            read=lambda settings, facts: {
                "sequence_parallel": settings.switch(at("sequence_parallel")) and facts["tp"] > 1
            },
        ),
        pipeline(at, chunks_name),
    )


def experts(at: Callable[[str], str]) -> Entry:
    """How experts are placed: ep ways, each on expert tp ranks."""
    ep, etp = at("expert_model_parallel_size"), at("expert_tensor_parallel_size")

    def say(facts: Facts) -> Mapping[str, object]:
        plan = Plan(**{name: facts[name] for name in ("tp", "pp", "dp", "cp", "ep", "etp")})
        return {ep: plan.ep, etp: plan.expert_tp} if facts["experts"] else {}

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        found, wide = settings.count(ep, 1), settings.count(etp, facts["tp"])
        return {"ep": found, "experts_tp": wide} if facts.get("experts") else {}

    return Entry(say=say, read=read)


def recompute(at: Callable[[str], str]) -> Entry:
    """Whole layers, or modules."""
    granularity, method = at("recompute_granularity"), at("recompute_method")
    number, modules = at("recompute_num_layers"), at("recompute_modules")

    def say(facts: Facts) -> Mapping[str, object]:
        full, none = facts["recompute"] == Recompute.FULL.value, facts["recompute"] == Recompute.NONE.value
        return {
            granularity: None if none else facts["recompute"],
            method: "uniform" if full else None,
            number: 1 if full else None,
            modules: tuple(facts["recompute_modules"]) or None,
        }

    def read(settings: Settings, facts: Facts) -> Mapping[str, object]:
        kind = settings.word(granularity, "none", known=("none", "full", "selective")) or "none"
        how = settings.word(method, None, known=("uniform", "block"))
        layers, named = settings.count(number, least=0), settings.words(modules)
        found: dict[str, object] = {"recompute": kind}
        if kind == Recompute.SELECTIVE.value:
            unknown = sorted(set(named) - {module.value for module in Module})
            if unknown:
                found["recomputed"] = f"selective of {' '.join(unknown)}"
            known = [name for name in named if name not in unknown]
            found["recompute_modules"] = [] if set(known) == {Module.CORE_ATTN.value} else known
        if kind == Recompute.FULL.value:
            held = -(-(facts.get("layers") or 0) // (facts["pp"] * facts["vpp"]))
            if how == "block" and layers is not None and layers < held:
                found["recomputed"] = f"of {layers} of the {held} layers of a stage"
            if how == "uniform" and layers is not None and layers > 1:
                found["recomputed"] = f"from the input of one layer in {layers}"
        return found

    return Entry(say=say, read=read)


def states(facts: Facts) -> dict[str, object]:
    """What is sharded in other formats than fp32, by Megatron's names; empty where nothing is."""
    names = {
        "main_params_dtype": "master_dtype", "exp_avg_dtype": "exp_avg_dtype", "exp_avg_sq_dtype": "exp_avg_sq_dtype",
    }  # fmt: skip
    found: dict[str, object] = {
        name: facts[ours] for name, ours in names.items() if facts[ours] not in {None, DType.FP32.value}
    }
    grads = facts["grad_dtype"] or DType.FP32.value
    return {"use_precision_aware_optimizer": True, **found, "main_grads_dtype": grads} if found else {}


def told(settings: Settings, facts: Facts, at: Callable[[str], str]) -> tuple[list[Remainder], list[str]]:
    """What the facts say beyond a plan: as settings that it does not say, and as what is taken for granted."""
    left, assumed = [], []

    def leave(names: tuple[str, ...], what: str) -> None:
        name = next((at(each) for each in names if at(each) in settings.said), at(names[0]))
        said = settings.said.get(name)
        value = "not set" if said is None else str(said.value)
        where = "" if said is None else said.where
        left.append(Remainder(name=name, value=value, where=where, why=Why.NO_WORD, what=what))

    if "uneven" in facts:
        leave(_CUTS, f"stages hold {_runs(facts['uneven'])} layers")
    if "recomputed" in facts:
        leave(("recompute_num_layers", "recompute_modules"), f"recomputation is {facts['recomputed']}")
    for name in facts.get("unoverlapped", ()):
        leave((name,), "this communication waits for computation; estimates let it run beside")
    if "ramp" in facts:
        start, step, samples = [*facts["ramp"], "", ""][:3]
        assumed.append(f"the full global batch; the run begins with {start} and adds {step} over {samples} samples")
    return left, assumed


_CUTS = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip


def _runs(cut: tuple[int, ...]) -> str:
    """A list of numbers in words: 3 of 4, 1 of 2."""
    parts: list[list[int]] = []
    for each in cut:
        if parts and parts[-1][1] == each:
            parts[-1][0] += 1
        else:
            parts.append([1, each])
    return ", ".join(f"{times}x{layers}" if times > 1 else str(layers) for times, layers in parts)
