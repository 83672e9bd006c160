"""The plan space: which plans are legal, the reason each other one is not, and the enumeration of all legal ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import numpy as np
import numpy.typing as npt

from autotune.cost.table import (
    COLUMNS,
    GPIPE,
    INTERLEAVED,
    RECOMPUTES,
    SCHEDULES,
    BoolColumn,
    PlanTable,
    module_bits,
)
from autotune.errors import InputError
from autotune.search.rules import (
    ANY_RULES,
    FRAMEWORK_RULES,
    FSDP,
    MODEL_RULES,
    RULES,
    TODAYS,
    UNEVEN,
    Case,
    Rule,
    Runtime,
)
from autotune.specs import ClusterSpec, FrameworkName, ModelSpec, Plan, Recompute, Schedule, Space, Workload

__all__ = [
    "Runtime", "illegal_mask", "illegal_reason", "illegal_reasons", "is_probed", "legal_pieces", "legal_plans",
    "runtime_of",
]  # fmt: skip
Options = Sequence[Mapping[str, int | bool]]


def runtime_of(workload: Workload) -> Runtime:
    """What runs a tuning's trials: the user's program, whose own limits are in its space, or our step probe."""
    return Runtime.ANY if workload.command else Runtime.TORCH


def is_probed(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> bool:
    """Whether our probes can time the layers of a model, whatever the plan."""
    case = Case(model, cluster, workload.probed, Runtime.TORCH, PlanTable.of([Plan(dp=cluster.devices)]))
    return not any(rule.broken(case).any() for rule in MODEL_RULES)


def illegal_mask(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, table: PlanTable, runtime: Runtime = Runtime.ANY
) -> BoolColumn:
    """True where a plan breaks a rule."""
    case = Case(model, cluster, workload, runtime, table)
    return reduce(np.logical_or, (rule.broken(case) for rule in RULES))


def illegal_reasons(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, table: PlanTable, runtime: Runtime = Runtime.ANY
) -> npt.NDArray[np.object_]:
    """For each plan why it cannot be run (a sentence with the numbers), or None where it can."""
    case = Case(model, cluster, workload, runtime, table)
    reasons = np.full(len(table), None, dtype=object)
    legal = np.ones(len(table), dtype=np.bool_)
    for rule in RULES:
        for i in np.flatnonzero(legal & rule.broken(case)):
            reasons[i] = rule.reason(case, int(i))
            legal[i] = False
    return reasons


def illegal_reason(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan, runtime: Runtime = Runtime.ANY
) -> str | None:
    """Why this plan cannot be run, or None if it can."""
    reason: str | None = illegal_reasons(model, cluster, workload, PlanTable.of([plan]), runtime)[0]
    return reason


def legal_plans(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    space: Space = Space(),
    runtime: Runtime = Runtime.ANY,
) -> PlanTable:
    """All legal plans that fill the cluster, each once: 32 bytes each. See `legal_pieces`."""
    return PlanTable.concat(list(legal_pieces(model, cluster, workload, space, runtime)))


PIECE_ROWS = 1 << 17
"""Plans that are listed and estimated at a time. An estimate takes some 300 bytes a plan: this bounds the memory of a
ranking, however many plans there are, and costs no time."""


def legal_pieces(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    space: Space = Space(),
    runtime: Runtime = Runtime.ANY,
) -> Iterator[PlanTable]:
    """All legal plans that fill the cluster, each once, in tables of 1 to PIECE_ROWS rows.

    Every divisor counts, powers of two or not. A tp wider than a node is legal: the two-level network shows what
    it costs. Choices are added one group at a time and refused as soon as a rule is broken; a plan whose plain
    form (micro-batch 1, no sharding, GPipe) is illegal has no legal form, so nothing is lost.
    """

    def keep(table: PlanTable, rules: Sequence[Rule] = ANY_RULES) -> PlanTable:
        case = Case(model, cluster, workload, runtime, table)
        return table.take(~reduce(np.logical_or, (rule.broken(case) for rule in rules)))

    batches = _field("micro_batch", divisors(workload.global_batch), space.micro_batch)
    experts = _field("ep", divisors(model.experts) if model.experts else [1], space.ep)
    choices = (
        _pipelines(model, workload, space, runtime),
        _field("sequence_parallel", [False, True], space.sequence_parallel),
        _field("zero_stage", [0, 1, 2, 3], space.zero_stage),
    )
    recomputes = _recomputes(workload, space)

    def legal_forms(table: PlanTable) -> PlanTable:
        table = keep(_expanded(table, experts))
        if model.experts and workload.framework in TODAYS:
            folded = table.take((table.tp > 1) & (table.ep > 1))
            ones = replace(folded, etp=np.ones(len(folded), dtype=np.int32))
            table = PlanTable.concat([table, keep(ones)])
        for options in choices:
            table = keep(_expanded(table, options))
        table = _expanded(table, recomputes)
        if space.recompute_modules or (space.recompute and Recompute.OP in space.recompute):
            table = keep(table)  # the others are always legal
        if workload.framework is not FrameworkName.TORCH:
            table = keep(table, FRAMEWORK_RULES)
        if runtime is not Runtime.ANY:
            return table
        if workload.framework in UNEVEN:
            table = table.take(_even(model, workload, table))
        # GPipe with one micro-batch is the same order of work as 1F1B, which is listed.
        one = table.dp.astype(np.int64) * table.micro_batch == workload.global_batch
        return table.take(~(one & (table.schedule == GPIPE)))

    layouts = keep(_layouts(cluster.devices, model.layers, space))
    forms = prod(map(len, (experts, *choices, recomputes)))
    for batched in _slices(layouts, len(batches)):
        plain = keep(_expanded(batched, batches))
        # Most forms break a rule: a few times as many are begun with.
        for few in _slices(plain, forms // OFTEN_ILLEGAL):
            yield from _slices(legal_forms(few), 1)


OFTEN_ILLEGAL = 4


def _slices(table: PlanTable, factor: int) -> Iterator[PlanTable]:
    """The table in pieces that have PIECE_ROWS rows at most, or one, once each row has become `factor` rows."""
    rows = max(PIECE_ROWS // max(factor, 1), 1)
    for start in range(0, len(table), rows):
        yield table.take(slice(start, start + rows))


def _even(model: ModelSpec, workload: Workload, table: PlanTable) -> BoolColumn:
    """Interleaved plans with equal chunks, the two ends counted or not: others run, but nobody would choose them."""
    chunks, ends = table.pp.astype(np.int64) * table.vpp, workload.framework in TODAYS
    even: BoolColumn = (model.layers % chunks == 0) | (ends & ((model.layers + 2) % chunks == 0))
    listed: BoolColumn = (table.schedule != INTERLEAVED) | even
    return listed


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def _layouts(devices: int, layers: int, space: Space) -> PlanTable:
    """Every (tp, pp, cp, dp) whose product is the devices, in plain form."""
    found = [
        (tp, pp, devices // (tp * pp * cp), cp)
        for tp in divisors(devices)
        if _allowed(tp, space.tp)
        for pp in divisors(devices // tp)
        if _allowed(pp, space.pp) and pp <= layers
        for cp in divisors(devices // (tp * pp))
        if _allowed(cp, space.cp)
    ]
    tp, pp, dp, cp = np.array(found, dtype=np.int32).reshape(-1, 4).T
    one, off = np.ones(len(found), dtype=np.int32), np.zeros(len(found), dtype=np.int8)
    schedule = np.where(pp > 1, GPIPE, SCHEDULES.index(Schedule.ONE_F_ONE_B)).astype(np.int8)
    return PlanTable(tp, pp, dp, cp, one, one, one, off, off, off.astype(np.bool_), schedule, off, off.astype(np.int32))


def _pipelines(model: ModelSpec, workload: Workload, space: Space, runtime: Runtime) -> Options:
    """The schedules with the numbers of chunks that they can have."""
    chunks: Sequence[int] = divisors(model.layers) if runtime is Runtime.ANY else range(1, model.layers + 1)
    if runtime is Runtime.ANY and workload.framework in TODAYS:
        chunks = sorted({*chunks, *divisors(model.layers + 2)})
    return [
        {"schedule": code, "vpp": vpp}
        for code, schedule in enumerate(SCHEDULES)
        if space.schedule is None or schedule in space.schedule
        for vpp in (chunks if code == INTERLEAVED else [1])
        if _allowed(vpp, space.vpp)
    ]


def _recomputes(workload: Workload, space: Space) -> Options:
    """The kinds of recomputation; selective of each set of modules that is asked for, else of the attention core.

    `op` is torchtitan's in place of selective, and counts elsewhere only where it is asked for.
    """
    middle = Recompute.OP if workload.framework is FSDP else Recompute.SELECTIVE
    chosen = space.recompute or (Recompute.NONE, middle, Recompute.FULL)
    sets = space.recompute_modules or ((),)
    return [
        {"recompute": code, "recompute_modules": module_bits(modules)}
        for code, kind in enumerate(RECOMPUTES)
        if kind in chosen
        for modules in (sets if kind is Recompute.SELECTIVE else ((),))
    ]


def _field(name: str, values: Sequence[int], allowed: Sequence[int] | None) -> Options:
    return [{name: value} for value in values if _allowed(value, allowed)]


def _allowed(value: int, allowed: Sequence[int] | None) -> bool:
    return allowed is None or value in allowed


def _expanded(table: PlanTable, options: Options) -> PlanTable:
    """Each row with each option."""
    rows, count = len(table), len(options)
    columns = {name: np.repeat(getattr(table, name), count) for name in COLUMNS}
    for name in options[0] if options else ():
        dtype = columns[name].dtype
        columns[name] = np.tile(np.array([option[name] for option in options], dtype=dtype), rows)
    return PlanTable(**columns)


# Bounds of the space: beyond them listing every plan of a request takes minutes, whoever asks for it.

MAX_LAYERS = 500
"""Stages are laid out one by one: with a thousand layers for seconds, with ten thousand for minutes."""

MAX_LAYOUTS = 2_000_000
"""Layouts of the devices times micro-batches. A million devices with four million sequences a step give 28,000."""

MAX_PLANS = 40_000_000
"""A bound from above: of 13.7 million for deepseek-v3 on 2,048 devices 2.2 million are legal, ranked in 2 s."""

PLAIN = Space(
    recompute=(Recompute.NONE,),
    zero_stage=(0,),
    sequence_parallel=(False,),
    schedule=(Schedule.GPIPE, Schedule.ONE_F_ONE_B),
    ep=(1,),
)
CHOICES = 2 * 4 * 3  # sequence parallel, ZeRO stage, recompute
_FEWER = "give numbers of nodes and of sequences with fewer divisors"


def require_bounded(model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime = Runtime.ANY) -> None:
    """Refuses a request whose plans cannot be listed in a few seconds. Raises InputError."""
    if model.layers > MAX_LAYERS:
        raise InputError("model.layers", model.layers, f"at most {MAX_LAYERS} layers are planned for here")
    stages = [pp for pp in divisors(cluster.devices) if pp <= model.layers]
    # The ways to write what pp leaves as tp * cp * dp.
    ways = sum(len(divisors(cluster.devices // pp // tp)) for pp in stages for tp in divisors(cluster.devices // pp))
    layouts = ways * len(divisors(workload.global_batch))
    if layouts > MAX_LAYOUTS:
        raise InputError("cluster.nodes", cluster.nodes, f"{layouts} layouts are more than {MAX_LAYOUTS}: {_FEWER}")
    plain = sum(map(len, legal_pieces(model, cluster, workload, PLAIN, runtime)))
    chunks = model.layers if runtime is Runtime.TORCH else len(divisors(model.layers)) + len(divisors(model.layers + 2))
    experts = len(divisors(model.experts)) if model.experts else 1
    plans = plain * experts * (chunks + 2) * CHOICES
    if plans > MAX_PLANS:
        raise InputError("cluster.nodes", cluster.nodes, f"{plans} plans are more than {MAX_PLANS}: {_FEWER}")
