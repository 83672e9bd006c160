"""From what a training log states, and what the user states beside it, to one imported run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

from autotune.catalog.gpus import recognise
from autotune.cost.parameters import total_parameters
from autotune.cost.work import model_flops_per_token
from autotune.errors import InputError
from autotune.imports.logs import GIB, MAX_TORN, LogFile, LoggedStep, TrainingLog, Value
from autotune.specs import ClusterSpec, Failure, FailureKind, ModelSpec, Norm, Plan, Position, Workload
from autotune.specs.imported import ImportedRun

# From the steps of a log to one figure: warm-up dropped, the median, and its interval.

WARMUP_STEPS = 5
"""Steps after a start that are not timed: allocators, autotuners and clocks settle in them."""

MIN_LINES = 3
"""A median of fewer says little."""

RESTARTS = 0.25
"""A run that starts again has more than these lines a start: where numbers go back at more, ranks' lines are mixed."""

OUTSIDE = 0.025
"""Chance that is left on either side of the interval."""


def settled(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """The steps without warm-up: after a start, the first line and the WARMUP_STEPS steps from there.

    The first line's time may be a mean over many steps, warm-up included, so it goes in any case. A number that does
    not grow is another start (a restarted job that appends to its log), with a warm-up of its own.
    """
    kept: list[LoggedStep] = []
    start = last = None
    for step in steps:
        if start is None or last is None or step.number <= last:
            start = step.number
        elif step.number >= start + WARMUP_STEPS:
            kept.append(step)
        last = step.number
    return kept


def median_interval(times_s: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of at least one time; low and high hold the true median in 95 % of samples.

    Order statistics (David and Nagaraja 2003, section 7.1): the k-th smallest and largest, for the largest k with
    P(Binomial(n, 1/2) < k) <= 2.5 %. Fewer than six times cannot say as much, and get their whole range.
    """
    times = sorted(times_s)
    count = len(times)
    middle = (times[(count - 1) // 2] + times[count // 2]) / 2.0
    below, k = 0.0, 0
    while k < count // 2:
        below += comb(count, k) / 2.0**count
        if below > OUTSIDE:
            break
        k += 1
    first = max(k - 1, 0)
    return middle, times[first], times[count - 1 - first]


# The model behind a log: the one that the user names, if the log can be of it, else the shape that the log prints.

COMPARED = ("layers", "hidden", "heads", "kv_heads", "ffn", "experts", "gated", "tied")
SHAPE_FACTS = ("layers", "hidden", "heads", "ffn", "vocab", "gated", "tied", "norm", "position")
PADDING = 0.05
"""Frameworks pad the vocabulary, and count buffers or not: parameter counts differ by less than this share."""


def model_of(log: TrainingLog, model: ModelSpec | None) -> ModelSpec:
    """The model of a log.

    Args:
        log: what the log states of it.
        model: what the user says that it is.

    Raises:
        InputError: the log is of another model (both are named), or nothing says what it is.
    """
    if model is None:
        return _printed(log)
    for name in COMPARED:
        fact = log.facts.get(name)
        if fact is not None and not fact.implied and fact.value != getattr(model, name):
            allowed = f"the log trains {_name(log)}; {model.name} has {name}={getattr(model, name)}"
            raise log.file.bad(fact.line, name, fact.value, allowed)
    fact, counted = log.facts.get("parameters"), total_parameters(model)
    if fact is not None and abs(float(fact.value) / counted - 1.0) > PADDING:
        allowed = f"the log trains {_name(log)}; {model.name} has {counted:,} parameters"
        raise log.file.bad(fact.line, "parameters", fact.value, allowed)
    return model


def _name(log: TrainingLog) -> str:
    """What to call the model of a log: as it does, else by its shape."""
    name = log.value("model_name")
    if name is not None:
        return str(name)
    shape = (f"{what}={log.facts[what].value}" for what in ("layers", "hidden", "heads") if what in log.facts)
    return "a model with " + ", ".join(shape)


def _printed(log: TrainingLog) -> ModelSpec:
    missing = [name for name in SHAPE_FACTS if name not in log.facts]
    other = "it is a mixture of experts" if log.value("experts") else log.value("other_shape")
    if missing or other:
        why = other or f"it does not print {', '.join(missing)}"
        raise InputError(log.file.name, "no model", f"the log does not tell its model ({why}): give --model")
    value = {name: fact.value for name, fact in log.facts.items() if name in ModelSpec.model_fields}
    learned = value["position"] == Position.LEARNED.value
    return ModelSpec.from_data(
        {
            **value,
            "name": f"{value['layers']}x{value['hidden']}",
            "max_positions": log.value("seq_len") or 0 if learned else 0,
            "norm": Norm(str(value["norm"])).value,
            "source": log.file.name,
        },
        log.file.name,
    )


# Whether a log's GPUs are those of the cluster that the user names.

ANY_MEMORY = 1
"""Asks for a GPU by its name alone."""

MEMORY_AGREES = 0.06
"""A log's memory of a GPU is less than the catalog's by no more than this share: the driver keeps some of it."""


def require_gpu(file: LogFile, line: int, name: str, cluster: ClusterSpec) -> None:
    """Raises InputError unless the GPU of that driver name is the cluster's. A log that gives no name is not asked."""
    device, has = cluster.device.name, f"--cluster {cluster.name} has {cluster.device.name}"
    if not name.strip() or _plain(name) == _plain(device):
        return
    entry = recognise(name, ANY_MEMORY)
    if entry is None:
        allowed = f"{has}, and the catalog does not know this one: give a cluster file whose device has its name"
        raise file.bad(line, "GPU", name, allowed)
    if device != entry.name:
        raise file.bad(line, "GPU", name, f"{has}, this is {entry.name}")


def _plain(name: str) -> str:
    """A GPU's name without its vendor, for comparison."""
    return name.lower().removeprefix("nvidia ").removeprefix("amd ").strip()


def _require_memory(log: TrainingLog, cluster: ClusterSpec) -> None:
    """Raises InputError if the log tells a GPU's memory, and it is not about that of the cluster's."""
    fact, most = log.facts.get("gpu_memory_gib"), cluster.device.memory_bytes / GIB
    if fact is not None and not (1 - MEMORY_AGREES) * most <= float(fact.value) <= 1.01 * most:
        allowed = f"--cluster {cluster.name} has {cluster.device.name} of {most:.1f} GiB"
        raise log.file.bad(fact.line, "GPU memory", f"{fact.value} GiB", allowed)


OPTION = {"seq_len": "--seq-len", "global_batch": "--global-batch", "dtype": "--dtype", "devices": "--cluster"}
PLAN_FACTS = ("tp", "pp", "micro_batch", "zero_stage", "recompute")
"""Fields of a plan without a value that could be taken for granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What the user says of a log: what it does not state itself, and what it must agree with.

    Args:
        cluster: where the run was.
        model: what was trained; None takes the shape that the log prints.
        workload: by the names of Workload.
        plan: by the names of Plan.
    """

    cluster: ClusterSpec
    model: ModelSpec | None = None
    workload: Mapping[str, Value] = field(default_factory=dict)
    plan: Mapping[str, Value] = field(default_factory=dict)


def run_of(log: TrainingLog, stated: Stated) -> ImportedRun:
    """The run of a log: its speed with warm-up dropped, or that it ran out of memory.

    Raises:
        InputError: the log and the user disagree, neither states something that is needed, a figure that cannot be, or
            too few steps; names the file, the line and what is allowed.
    """
    cluster, file = stated.cluster, log.file
    devices, gpu = log.facts.get("devices"), log.facts.get("gpu")
    if devices is not None and devices.value != cluster.devices:
        allowed = f"--cluster {cluster.name} has {cluster.devices} devices"
        raise file.bad(devices.line, "devices", devices.value, allowed)
    if gpu is not None:
        require_gpu(file, gpu.line, str(gpu.value), cluster)
    _require_memory(log, cluster)
    log.steps = _of_one_rank(log)
    _require_understood(log)
    model = model_of(log, stated.model)
    workload, plan = _workload(log, stated), _plan(log, stated)
    _require_possible(log, model, workload, plan, cluster)
    if plan.tp > model.kv_heads and model.latent_attention is None:
        log.notes.append(f"the {model.kv_heads} key-value heads are fewer than tp {plan.tp}: some ranks share one")
    for peak in (log.reserved_bytes, log.allocated_bytes):
        if peak is not None and peak > cluster.device.memory_bytes:
            has = f"a {cluster.device.name} has {cluster.device.memory_bytes / GIB:.1f} GiB"
            raise InputError(f"{file.name}, peak memory", f"{peak / GIB:.1f} GiB", has)
    _check_peaks(log, plan, cluster)
    reserved, allocated = (round(peak) if peak else None for peak in (log.reserved_bytes, log.allocated_bytes))
    common = {
        "framework": log.framework, "model": model, "cluster": cluster, "workload": workload, "plan": plan,
        "peak_reserved_bytes": reserved, "peak_allocated_bytes": allocated,
    }  # fmt: skip
    if file.out_of_memory is not None:
        line, told = file.out_of_memory
        failure = Failure(kind=FailureKind.OOM, message=told[:300])
        return ImportedRun.model_validate({**common, "where": file.where(line), "failure": failure})
    return ImportedRun.model_validate({**common, **_speed(log, model, workload, cluster)})


def _of_one_rank(log: TrainingLog) -> list[LoggedStep]:
    """The steps as one rank prints them, where several print each: those of the first."""
    ranks = list(dict.fromkeys(step.rank for step in log.steps if step.rank))
    if len(ranks) > 1:
        log.notes.append(f"{len(ranks)} ranks print each step: those of {ranks[0].strip()} are taken")
        return [step for step in log.steps if step.rank == ranks[0]]
    again = [step for last, step in zip(log.steps, log.steps[1:], strict=False) if step.number == last.number]
    if not ranks and 2 * len(again) >= len(log.steps) > 0:
        log.notes.append("several ranks print each step: the first of each is taken")
        lines = {step.line for step in again}
        return [step for step in log.steps if step.line not in lines]
    return log.steps


def _require_understood(log: TrainingLog) -> None:
    """Raises InputError for a log of which too much is damaged, with the cause and not what follows from it."""
    file, torn = log.file, len(log.torn)
    if not torn:
        return
    if torn > MAX_TORN * (torn + len(log.steps)):
        allowed = f"of {torn + len(log.steps)} lines of steps {torn} have no figure where it should be"
        raise file.bad(log.torn[0], "step", "damaged", f"{allowed}: ranks that write into one file need labels")
    lines = ", ".join(map(str, log.torn[:5])) + (", ..." if torn > 5 else "")
    log.notes.append(f"{torn} damaged lines of steps are left out: {lines}")


def _check_peaks(log: TrainingLog, plan: Plan, cluster: ClusterSpec) -> None:
    """Raises InputError for peaks that contradict each other or the world; notes stages whose peak is not there."""
    allocated, reserved, name = log.allocated_bytes, log.reserved_bytes, f"{log.file.name}, peak memory"
    if allocated and reserved and allocated > reserved:
        allowed = f"at most the {reserved / GIB:.3g} GiB that were reserved: one of the two is in another unit"
        raise InputError(name, f"{allocated / GIB:.3g} GiB allocated", allowed)
    beyond = max(log.peaks_of, default=0)
    if beyond >= cluster.devices:
        raise InputError(name, f"rank {beyond}", f"the run has {cluster.devices} ranks: a log of one run is needed")
    stages = {rank * plan.pp // cluster.devices for rank in log.peaks_of}
    if stages and len(stages) < plan.pp:
        told = ", ".join(map(str, sorted(stages)))
        log.notes.append(f"the peak is that of stage {told} of {plan.pp}: others may have a higher one")


def _workload(log: TrainingLog, stated: Stated) -> Workload:
    found = _merged(log, stated.workload, tuple(Workload.model_fields), OPTION)
    if "micro_batches" in log.facts and "global_batch" not in found:
        dp, micro_batch = _degree(log, stated, "dp"), _degree(log, stated, "micro_batch")
        if dp and micro_batch:
            found["global_batch"] = dp * micro_batch * int(log.facts["micro_batches"].value)
    missing = [OPTION[name] for name in ("seq_len", "global_batch", "dtype") if name not in found]
    if missing:
        raise InputError(log.file.name, "not stated", f"the log does not state it: give {', '.join(missing)}")
    if "accumulates" in log.facts:
        found.setdefault("grad_dtype", "fp32" if log.facts["accumulates"].value else found["dtype"])
    return Workload.from_data(found, log.file.name)


def _degree(log: TrainingLog, stated: Stated, name: str) -> int | None:
    value = stated.plan.get(name, log.value(name))
    return value if isinstance(value, int) else None


def _plan(log: TrainingLog, stated: Stated) -> Plan:
    found = _merged(log, stated.plan, tuple(Plan.model_fields), {})
    needed = PLAN_FACTS if found.get("tp") in {None, 1} else (*PLAN_FACTS, "sequence_parallel")
    missing = [name for name in needed if name not in found]
    if missing:
        example = ",".join(f"{name}=..." for name in missing)
        raise InputError(log.file.name, "not stated", f"the log does not state it: give --plan {example}")
    if "dp" not in found:
        others = [found.get(name, 1) for name in ("tp", "pp", "cp")]
        rest = 1
        for degree in others:
            rest *= degree if isinstance(degree, int) else 1
        found["dp"] = stated.cluster.devices // max(rest, 1) or 1
    if found.get("tp") == 1:
        found["sequence_parallel"] = False  # there is nothing that it would split
    data: dict[str, object] = dict(found)
    if isinstance(modules := found.get("recompute_modules"), str):
        data["recompute_modules"] = modules.split("+")
    plan = Plan.from_data(data, log.file.name)
    if plan.etp:  # one spelling of a plan: what the framework would do anyway is not said
        plain = plan.model_copy(update={"etp": 0})
        return plain if plain.expert_tp == plan.etp else plan
    return plan


def _merged(
    log: TrainingLog, stated: Mapping[str, Value], names: tuple[str, ...], options: Mapping[str, str]
) -> dict[str, Value]:
    """Facts and options under these names. Raises InputError where they disagree."""
    found = {name: log.facts[name].value for name in names if name in log.facts}
    for name, value in stated.items():
        fact = log.facts.get(name)
        if fact is not None and not fact.implied and fact.value != value:
            option = options.get(name, "--plan " + name + "=")
            raise log.file.bad(fact.line, name, fact.value, f"{option} says {value!r}, the log says otherwise")
        found[name] = value
    return found


def _require_possible(log: TrainingLog, model: ModelSpec, workload: Workload, plan: Plan, cluster: ClusterSpec) -> None:
    product = f"tp*pp*cp*dp = {plan.tp}*{plan.pp}*{plan.cp}*{plan.dp} = {plan.world_size}"
    reasons = (
        (plan.world_size != cluster.devices, f"{product}, --cluster {cluster.name} has {cluster.devices} devices"),
        (workload.global_batch % (plan.dp * plan.micro_batch) > 0,
         f"the global batch of {workload.global_batch} must be a multiple of dp * micro_batch"),
        (plan.pp * plan.vpp > model.layers, f"{model.layers} layers are fewer than pp * vpp"),
    )  # fmt: skip
    for holds, reason in reasons:
        if holds:
            raise InputError(f"{log.file.name}, plan", plan.key, reason)


def _speed(log: TrainingLog, model: ModelSpec, workload: Workload, cluster: ClusterSpec) -> dict[str, object]:
    """The median over settled steps as tokens a second and GPU, with its interval."""
    kept = settled(log.steps)
    if not log.steps:
        raise InputError(log.file.name, "no timed step", _other_format(log))
    back = sum(step.number < last.number for last, step in zip(log.steps, log.steps[1:], strict=False))
    if back >= MIN_LINES and back > RESTARTS * len(log.steps):
        allowed = f"the numbers of steps go back {back} times: give a log of one rank, or one with labels of ranks"
        raise InputError(log.file.name, "several ranks or runs", allowed)
    if len(kept) < MIN_LINES:
        allowed = (
            f"{MIN_LINES} timed steps are needed beyond the first line and {WARMUP_STEPS} steps of warm-up, or an "
            "out-of-memory error; nothing of this log is imported"
        )
        raise InputError(log.file.name, f"{len(log.steps)} timed steps", allowed)
    per_gpu = workload.tokens_per_step / cluster.devices
    times_s = []
    for step in kept:
        if step.samples_per_s:
            time_s = workload.global_batch / step.samples_per_s
        else:
            time_s = step.time_s or per_gpu / (step.tokens_per_s_per_gpu or 1.0)
        _require_below_peak(log, step.line, per_gpu / time_s, model, workload, cluster)
        times_s.append(time_s)
    _require_clock(log, kept, times_s)
    middle, low, high = median_interval(times_s)
    return {
        "where": log.file.where(kept[0].line),
        "tokens_per_s_per_gpu": per_gpu / middle,
        "interval_tokens_per_s_per_gpu": (per_gpu / high, per_gpu / low),
        "steps": len(kept),
    }


CLOCK_AGREES = 100.0
"""Steps take longer than the clock says by no more than this: the clock of a log is coarse, a wrong unit is not."""


def _require_clock(log: TrainingLog, kept: Sequence[LoggedStep], times_s: Sequence[float]) -> None:
    """Raises InputError where the steps take many times longer than the time stamps of their lines leave."""
    took_s = clock_s = 0.0
    for last, step, time_s in zip(kept, kept[1:], times_s[1:], strict=False):
        if last.stamp_s is not None and step.stamp_s is not None and step.number > last.number:
            took_s += (step.number - last.number) * time_s
            clock_s += step.stamp_s - last.stamp_s
    if 0 < CLOCK_AGREES * clock_s < took_s:
        allowed = f"the time stamps of these lines are {clock_s:.6g} s apart: is the figure in another unit?"
        raise log.file.bad(kept[0].line, "time", f"{took_s:.6g} s for {len(kept) - 1} lines", allowed)


_PRINTED = {
    "megatron": "elapsed time per iteration (ms):", "torchtitan": "tps:", "deepspeed": "CurrSamplesPerSec=",
    "nanotron": "elapsed_time_per_iteration_ms:", "nccl-tests": "# nThread",
}  # fmt: skip
"""What only logs of that format have in a line."""


def _other_format(log: TrainingLog) -> str:
    """What to do about a log without a single timed step: it may be of another format."""
    for _, text in log.file:
        for name, word in _PRINTED.items():
            if word in text:
                return f"a line has {word!r}, which is printed by {name}: give --format {name}"
    return "nothing of this log is imported: no line has the time or the speed of a step, and none tells of memory"


def _require_below_peak(
    log: TrainingLog, line: int, speed: float, model: ModelSpec, workload: Workload, cluster: ClusterSpec
) -> None:
    peak = cluster.device.peak_flops_per_s.get(workload.dtype)
    flops_per_s = speed * model_flops_per_token(model, workload.seq_len)
    if peak is not None and flops_per_s > peak:
        allowed = (
            f"would be {flops_per_s / 1e12:.0f} TFLOP/s of {model.name} on a {cluster.device.name} whose peak is "
            f"{peak / 1e12:.0f}"
        )
        raise log.file.bad(line, "tokens/s/GPU", f"{speed:.6g}", allowed)
