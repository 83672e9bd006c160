"""Runs: the rows of a runs file as records of our own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from autotune.backtest.csv_rows import EITHER, MAX_ROWS, CsvRow, read_csv_rows
from autotune.cost.parameters import total_parameters
from autotune.cost.work import model_flops_per_token
from autotune.errors import AutotuneError, IllegalPlanError, InputError
from autotune.specs import ClusterSpec, DType, ModelSpec, Norm, Plan, Position, Recompute, Schedule, Workload
from autotune.specs.model import MAX_LAYERS

# The model behind a row. A runs file has the dimensions; whether the MLP is gated and so on is found by counting.

GPT2_VOCABULARY = 51_200
"""Taken where a row has no vocabulary: GPT-2's, padded as Megatron-LM does for tp up to 8."""

MAX_DEVIATION = 0.2
"""A row whose parameter count no variant comes this close to is something else than a dense decoder."""

ROUNDING = 0.005
"""Parameter counts are published with about three digits."""

BILLION = 1e9
Dims = tuple[int, int, int, int, int, int, int]


def model_of(csv_row: CsvRow) -> ModelSpec:
    """The variant of the row's dimensions whose parameter count is closest to params_b.

    Of several within ROUNDING the family's usual one is taken: Llama's head is untied, GPT's is tied. Without params_b
    an MLP of width 4 x hidden is taken as GPT's, another one as Llama's.

    Raises:
        InputError: dimensions that do not go together, or a parameter count far from every variant's.
    """
    heads = csv_row.count("heads")
    dims = (
        csv_row.count("layers", most=MAX_LAYERS), csv_row.count("hidden"), heads,
        csv_row.count("kv_heads", heads), csv_row.count("ffn"), csv_row.count("vocab", GPT2_VOCABULARY),
        csv_row.count("seq_len"),
    )  # fmt: skip
    if dims[1] % heads:
        raise csv_row.bad("heads", f"must divide hidden ({dims[1]})")
    if heads % dims[3]:
        raise csv_row.bad("kv_heads", f"must divide heads ({heads})")
    billions = csv_row.positive("params_b")
    name = csv_row.text("model_name", "unnamed")
    if not name.isprintable():
        raise csv_row.bad("model_name", "must have no control characters")
    model, deviation = _closest(name, dims, billions)
    if deviation > MAX_DEVIATION:
        counted = total_parameters(model) / BILLION
        raise csv_row.bad("params_b", f"these dimensions make a dense decoder of {counted:.3g} billion parameters")
    return model


@lru_cache(maxsize=1024)
def _closest(name: str, dims: Dims, billions: float | None) -> tuple[ModelSpec, float]:
    variants = list(_variants(name, dims))
    if billions is None:
        gated = dims[4] != 4 * dims[1]
        return next(item for item in variants if item.gated == gated), 0.0

    def deviation(model: ModelSpec) -> float:
        return abs(total_parameters(model) / (billions * BILLION) - 1.0)

    best = min(variants, key=lambda model: max(deviation(model), ROUNDING))
    return best, deviation(best)


def _variants(name: str, dims: Dims) -> Iterator[ModelSpec]:
    """Llama's family (gated, RMSNorm, rotary) and GPT's (ungated, LayerNorm, biases, learned positions).

    The usual one of a family comes first.
    """
    layers, hidden, heads, kv_heads, ffn, vocab, seq_len = dims
    for gated in (True, False):
        for tied in (not gated, gated):
            yield ModelSpec(
                name=name[:200],
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=hidden // heads,
                ffn=ffn,
                gated=gated,
                vocab=vocab,
                tied=tied,
                norm=Norm.RMSNORM if gated else Norm.LAYERNORM,
                position=Position.ROPE if gated else Position.LEARNED,
                max_positions=0 if gated else seq_len,
                linear_bias=not gated,
                source="runs file",
            )


T = TypeVar("T")
GIB = 2**30
CONTRADICTION = 0.05
"""tokens_per_s_per_gpu and iter_time_s of one row may differ by this share, which is what rounding explains."""

Clusters = Callable[[str, float | None, int, int], ClusterSpec]
"""(gpu, gpu_mem_gb, num_gpus, gpus_per_node) -> the cluster. Raises InputError for what it does not know."""

_SCHEDULES = {
    "gpipe": Schedule.GPIPE,
    "1f1b": Schedule.ONE_F_ONE_B,
    "interleaved": Schedule.INTERLEAVED,
    "interleaved-1f1b": Schedule.INTERLEAVED,
}
_ZERO_STAGES = {"": 0, "0": 0, "1": 1, "2": 2, "3": 3, "fsdp": 3, "fsdp2": 3}


class RunStatus(StrEnum):
    """How a run ended: with a speed, out of memory, or otherwise."""

    OK = "ok"
    OOM = "oom"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row. What the row does not state is None.

    Args:
        where: file and line.
        source: who published it.
        group: runs that may be compared with each other.
        reserved_bytes: peak that the allocator reserved on the worst rank.
        allocated_bytes: allocated on it.
        all_ranks_busbw_bytes_per_s: bus bandwidth of a large all-reduce over all ranks.
        one_node_busbw_bytes_per_s: the same over the ranks of one node.
    """

    where: str
    source: str
    group: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan
    status: RunStatus
    tokens_per_s_per_gpu: float | None
    reserved_bytes: float | None
    allocated_bytes: float | None
    all_ranks_busbw_bytes_per_s: float | None
    one_node_busbw_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row or group that could not be used, and why."""

    where: str
    reason: str


def read_runs(
    path: Path, clusters: Clusters, *, sources: Sequence[str] = (), groups: Sequence[str] = (), skip_bad: bool = False
) -> tuple[list[Run], list[Skipped]]:
    """The runs of a CSV file, of the given sources and groups (of all if none is given).

    Args:
        path: the file; docs/backtest.md describes its columns.
        clusters: makes a cluster of what a row says of it.
        sources: keep rows of these.
        groups: keep rows of these.
        skip_bad: list bad rows instead of raising.

    A run that failed and whose plan the model cannot have is listed too, whatever `skip_bad`: it is no bad row, but no
    search would ask for it.

    Raises:
        InputError: the first bad row and column; always for a file that is no CSV or lacks columns, and for a source
            or group that the file does not have.
    """
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for each in each_run(path, clusters, sources=sources, groups=groups, skip_bad=skip_bad):
        if isinstance(each, Run):
            runs.append(each)
        else:
            skipped.append(each)
    return runs, skipped


def each_run(
    path: Path,
    clusters: Clusters,
    *,
    sources: Sequence[str] = (),
    groups: Sequence[str] = (),
    skip_bad: bool = False,
    most: float = MAX_ROWS,
) -> Iterator[Run | Skipped]:
    """What `read_runs` gives, row by row: only one is in memory. Raises InputError for more than `most`, too."""
    seen: dict[str, set[str]] = {"source": set(), "group": set()}
    for csv_row in read_csv_rows(path, most=most):
        if sources or groups:
            seen["source"].add(csv_row.values["source"])
            seen["group"].add(csv_row.values["group"])
        if (sources and csv_row.values["source"] not in sources) or (groups and csv_row.values["group"] not in groups):
            continue
        try:
            found: Run | Skipped = run_of(csv_row, clusters)
        except AutotuneError as error:
            if not (skip_bad or isinstance(error, IllegalPlanError)):
                raise
            found = Skipped(where=csv_row.where, reason=str(error))
        yield found
    for option, wanted, known in (("--source", sources, seen["source"]), ("--group", groups, seen["group"])):
        for name in wanted:
            if name not in known:
                raise InputError(option, name, "the file has: " + ", ".join(sorted(known)))


def run_of(csv_row: CsvRow, clusters: Clusters) -> Run:
    """One row as a run.

    Raises:
        InputError: a bad row, by row and column.
        IllegalPlanError: a run that failed because its plan cannot be.
    """
    model, gpu, memory_gb = model_of(csv_row), csv_row.text("gpu"), csv_row.positive("gpu_mem_gb")
    num_gpus, gpus_per_node = csv_row.count("num_gpus"), csv_row.count("gpus_per_node")
    try:
        cluster = clusters(gpu, memory_gb, num_gpus, gpus_per_node)
    except InputError as unknown:
        raise csv_row.bad(unknown.what if unknown.what in csv_row.values else "gpu", unknown.allowed) from None
    dtypes = {item.value: item for item in DType}
    workload = Workload(
        seq_len=csv_row.count("seq_len"),
        global_batch=csv_row.count("global_batch"),
        dtype=_one_of(csv_row, "dtype", {"": DType.BF16, **dtypes}),
        grad_dtype=_one_of(csv_row, "grad_dtype", {"": None, **dtypes}),
    )
    plan = _plan(csv_row)
    if plan.world_size != cluster.devices:
        product = f"tp*pp*cp*dp = {plan.tp}*{plan.pp}*{plan.cp}*{plan.dp} = {plan.world_size}"
        raise csv_row.bad("num_gpus", f"must be the product of the degrees ({product})")
    if workload.global_batch % (plan.dp * plan.micro_batch):
        raise csv_row.bad("global_batch", f"must be a multiple of dp*micro_batch ({plan.dp}*{plan.micro_batch})")
    if plan.ep > 1:
        raise csv_row.bad("ep", "must be 1: these columns cannot describe a mixture of experts")
    status = _one_of(csv_row, "status", {item.value: item for item in RunStatus})
    if plan.pp * plan.vpp > model.layers:
        error = csv_row.bad("layers", f"must be at least pp*vpp ({plan.pp}*{plan.vpp})")
        raise error if status is RunStatus.OK else IllegalPlanError(error.what, error.value, error.allowed)
    peaks: list[float | None] = []
    for column in ("peak_mem_gb", "mem_alloc_gb"):
        gib = csv_row.figure(column)  # 0 is taken as unknown
        if gib and gib * GIB > cluster.device.memory_bytes:
            raise csv_row.bad(column, f"must be at most the device's {cluster.device.memory_bytes / GIB:.1f} GiB")
        peaks.append(gib * GIB if gib else None)
    return Run(
        where=csv_row.where,
        source=csv_row.text("source"),
        group=csv_row.text("group"),
        model=model,
        cluster=cluster,
        workload=workload,
        plan=plan,
        status=status,
        tokens_per_s_per_gpu=_speed(csv_row, model, cluster, workload) if status is RunStatus.OK else None,
        reserved_bytes=peaks[0],
        allocated_bytes=peaks[1],
        all_ranks_busbw_bytes_per_s=_gigabytes_per_s(csv_row, "net_allreduce_GBps"),
        one_node_busbw_bytes_per_s=_gigabytes_per_s(csv_row, "intra_allreduce_GBps"),
    )


def _one_of(csv_row: CsvRow, column: str, words: dict[str, T]) -> T:
    word = csv_row.values.get(column, "")
    if word not in words:
        raise csv_row.bad(column, "must be one of " + ", ".join(key or "(empty)" for key in words))
    return words[word]


def _plan(csv_row: CsvRow) -> Plan:
    vpp = csv_row.count("vpp", 1)
    unsaid = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    zero = csv_row.values.get("zero_stage", "").removesuffix(".0")
    if zero not in _ZERO_STAGES:
        raise csv_row.bad("zero_stage", "must be 0, 1, 2, 3, fsdp, fsdp2 or empty")
    return Plan(
        tp=csv_row.count("tp"),
        pp=csv_row.count("pp"),
        dp=csv_row.count("dp"),
        cp=csv_row.count("cp", 1),
        ep=csv_row.count("ep", 1),
        vpp=vpp,
        micro_batch=csv_row.count("micro_batch"),
        zero_stage=_ZERO_STAGES[zero],
        recompute=_one_of(csv_row, "recompute", {"": Recompute.NONE, **{item.value: item for item in Recompute}}),
        sequence_parallel=csv_row.truth("sp"),
        schedule=_one_of(csv_row, "schedule", {"": unsaid, **_SCHEDULES}),
    )


def _speed(csv_row: CsvRow, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> float:
    """Tokens a second and GPU, stated or from the iteration time; both must agree and be possible."""
    stated, step_s = csv_row.positive("tokens_per_s_per_gpu"), csv_row.positive("iter_time_s")
    derived = workload.tokens_per_step / (step_s * cluster.devices) if step_s else None
    speed = stated or derived
    if speed is None:
        raise csv_row.bad(EITHER[0], f"a run that is ok needs {EITHER[0]} or {EITHER[1]}")
    if stated and derived and abs(stated / derived - 1.0) > CONTRADICTION:
        raise csv_row.bad(EITHER[0], f"contradicts iter_time_s, which gives {derived:.6g}")
    mfu = csv_row.figure("mfu")
    if mfu is not None and mfu > 1:
        raise csv_row.bad("mfu", "must be a share between 0 and 1")
    peak = cluster.device.peak_flops_per_s.get(workload.dtype)
    flops_per_s = speed * model_flops_per_token(model, workload.seq_len)
    if peak is not None and flops_per_s > peak:
        raise csv_row.bad(EITHER[0], f"would be {flops_per_s / 1e12:.0f} TFLOP/s of a peak of {peak / 1e12:.0f}")
    return speed


def _gigabytes_per_s(csv_row: CsvRow, column: str) -> float | None:
    value = csv_row.positive(column)
    return None if value is None else value * 1e9
