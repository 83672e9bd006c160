"""Ranking the legal space by estimate, without any hardware; and what would make a model fit that fits nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost.estimate import NINETY_PERCENT, EstimateTable, estimate_table, memory_table
from autotune.cost.table import IndexColumn, PlanTable
from autotune.errors import IllegalPlanError, NothingFitsError
from autotune.search.physics import Assumed
from autotune.search.posterior import OWN_SD, believe
from autotune.search.residual import features
from autotune.search.space import Runtime, illegal_reason, legal_pieces
from autotune.specs import ClusterSpec, Estimate, ModelSpec, Plan, Profile, Recompute, Space, Workload

MAX_NODES_FACTOR = 64
"""How many times the given nodes are tried, at most, when asked how many a model needs."""

NODES_BETWEEN = 16
"""How many numbers of nodes are tried between one that is too few and twice as many."""


SPARE = 10
"""Plans that are ranked beyond twice those that are listed, where some may be left out of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedPlan:
    """A plan and what the cost model says of it.

    `alike` counts other plans of the same layout (tp, pp, ep, etp) that the estimate cannot tell from it, where asked.
    """

    plan: Plan
    estimate: Estimate
    alike: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best plans by estimated tokens/s/GPU times P(fits), among those that are likelier to fit than not.

    `seconds` is the time of the whole answer, `estimates_per_s` the rate of the estimates alone; both were measured.
    """

    legal: int
    fitting: int
    seconds: float
    estimates_per_s: float
    plans: tuple[EstimatedPlan, ...]


def estimated(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    plans: Sequence[Plan],
    profile: Profile | None = None,
) -> list[Estimate]:
    """Estimates of these plans with the intervals that hold before anything was measured.

    Raises:
        MissingMeasurementError: a speed that is needed is neither measured nor in the catalog.
    """
    table = PlanTable.of(plans)
    estimates = estimate_table(model, cluster, workload, table, profile)
    posterior = believe(table, features(table), [Assumed(estimates)], (), devices=cluster.devices, setup_s=0.0, steps=1)
    found = []
    for i, sd in enumerate(posterior.log_sd):
        one, spread = estimates.row(i), float(np.exp(NINETY_PERCENT * sd))
        interval = one.step_time_s / spread, one.step_time_s * spread
        found.append(one.model_copy(update={"step_time_interval_s": interval}))
    return found


def rank(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    space: Space = Space(),
    runtime: Runtime = Runtime.ANY,
    profile: Profile | None = None,
    limit: int = 10,
    distinct: bool = False,
    refusal: Callable[[Plan], str | None] | None = None,
) -> Ranking:
    """Estimates every legal plan and returns the best `limit`.

    Args:
        model, cluster, workload: the question.
        space: which plans are looked at.
        runtime: what must be able to run them.
        profile: measured speeds of the cluster, in place of the catalog's.
        limit: how many plans are listed.
        distinct: list each layout (tp, pp, ep, etp) once, by the simplest of its plans that are within OWN_SD of its
            best, which is less than the estimate can tell apart.
        refusal: why a plan of the list is left out of it, if it is: what cannot be asked of whole tables.

    Raises:
        IllegalPlanError: no plan of the space is legal; says why the simplest one is not.
        NothingFitsError: no legal plan is estimated to fit; carries the nearest misses.
        MissingMeasurementError: a speed that is needed is neither measured nor in the catalog.
    """
    started = time.perf_counter()
    wide = limit if refusal is None else 2 * limit + SPARE
    best, legal, fitting, estimating_s = _Best(wide, distinct=distinct), 0, 0, 0.0
    for table in legal_pieces(model, cluster, workload, space, runtime):
        before = time.perf_counter()
        estimates = estimate_table(model, cluster, workload, table, profile)
        fits = np.flatnonzero(estimates.fits)
        estimating_s += time.perf_counter() - before
        legal, fitting = legal + len(table), fitting + len(fits)
        best.add(table, fits, estimates)
    if not legal:
        raise nothing_legal(model, cluster, workload, runtime, space)
    if not fitting:
        tables = legal_pieces(model, cluster, workload, space, runtime)
        nearest_misses(model, cluster, workload, tables, space=space, runtime=runtime, profile=profile)
    plans = [best.table.plan(i) for i in range(len(best.table))]
    alike = [0] * len(plans)
    if distinct:
        lines = [_simplest(model, cluster, workload, space, runtime, profile, plan) for plan in plans]
        lines.sort(key=lambda line: -line[2])
        plans, alike = [plan for plan, _, _ in lines], [count for _, count, _ in lines]
    if refusal is not None:
        kept = [(plan, count) for plan, count in zip(plans, alike, strict=True) if refusal(plan) is None]
        if not kept:
            raise IllegalPlanError("plan", plans[0].key, f"no plan is legal; {refusal(plans[0])}")
        plans, alike = [plan for plan, _ in kept[:limit]], [count for _, count in kept[:limit]]
    found = estimated(model, cluster, workload, plans, profile)
    return Ranking(
        legal=legal,
        fitting=fitting,
        seconds=time.perf_counter() - started,
        estimates_per_s=legal / estimating_s,
        plans=tuple(
            EstimatedPlan(plan=plan, estimate=one, alike=count)
            for plan, one, count in zip(plans, found, alike, strict=True)
        ),
    )


class _Best:
    """The best plans of several tables; of equally good ones those with the least memory, then the first.

    With `distinct` only the best plan of each layout counts.
    """

    def __init__(self, limit: int, *, distinct: bool) -> None:
        self.table = PlanTable.of([])
        self._limit, self._distinct = limit, distinct
        self._worth, self._peak = np.empty(0), np.empty(0)

    def add(self, table: PlanTable, fits: IndexColumn, estimates: EstimateTable) -> None:
        """Takes the rows `fits` of a table into account."""
        worth = estimates.expected[fits]
        if len(fits) > self._limit and not self._distinct:  # most rows need not be sorted
            good = worth >= np.partition(worth, len(worth) - self._limit)[len(worth) - self._limit]
            fits, worth = fits[good], worth[good]
        worth = np.concatenate([self._worth, worth])
        peak = np.concatenate([self._peak, estimates.peak_memory_bytes[fits]])
        together = PlanTable.concat([self.table, table.take(fits)])
        order = np.lexsort((peak, -worth))
        if self._distinct:
            firsts = np.unique(_layouts(together)[order], return_index=True)[1]
            order = order[np.sort(firsts)]
        order = order[: self._limit]
        self.table, self._worth, self._peak = together.take(order), worth[order], peak[order]


def _layouts(table: PlanTable) -> IndexColumn:
    """A number for each row, equal for plans of one tp, pp, ep and etp (each less than 2^17, pp less than 2^12)."""
    tp, pp, ep, etp = (column.astype(np.int64) for column in (table.tp, table.pp, table.ep, table.etp))
    return tp << 46 | pp << 34 | ep << 17 | etp


def _simplest(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    space: Space,
    runtime: Runtime,
    profile: Profile | None,
    best: Plan,
) -> tuple[Plan, int, float]:
    """(the simplest plan that the estimate cannot tell from the best of its layout, how many others, its worth).

    Simpler is what uses less of context parallelism, chunks of stages, recomputation and sharded parameters; of equally
    simple ones it is the best.
    """
    layout = space.model_copy(update={"tp": (best.tp,), "pp": (best.pp,), "ep": (best.ep,)})
    near, worth = PlanTable.of([]), np.empty(0)
    for table in legal_pieces(model, cluster, workload, layout, runtime):
        estimates = estimate_table(model, cluster, workload, table, profile)
        rows = np.flatnonzero(estimates.fits & (table.etp == best.etp))
        near = PlanTable.concat([near, table.take(rows)])
        worth = np.concatenate([worth, estimates.expected[rows]])
        close = worth >= (1.0 - OWN_SD) * worth.max(initial=0.0)
        near, worth = near.take(np.flatnonzero(close)), worth[close]
    uses = (near.cp > 1, near.vpp > 1, near.recompute > 0, near.recompute_modules > 0, near.zero_stage > 1)
    first = int(np.lexsort((-worth, np.sum(uses, axis=0)))[0])
    return near.plan(first), len(near) - 1, float(worth[first])


def nearest_misses(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    tables: Iterable[PlanTable],
    *,
    space: Space = Space(),
    runtime: Runtime = Runtime.ANY,
    profile: Profile | None = None,
    limit: int = 3,
) -> None:
    """Raises NothingFitsError with the nearest misses if no plan of the tables is estimated to fit; needs no speeds."""
    has, count, nearest, least = cluster.device.memory_bytes, 0, PlanTable.of([]), np.empty(0)
    for table in tables:
        if not len(table):
            continue
        needs = memory_table(model, cluster, workload, table, profile).device_bytes
        if needs.min() <= has:
            return
        count += len(table)
        least = np.concatenate([least, needs])
        order = np.argsort(least, kind="stable")[:limit]
        nearest, least = PlanTable.concat([nearest, table]).take(order), least[order]
    if not count:
        return
    nodes = _nodes_needed(model, cluster, workload, space, runtime, profile)
    more = f", or {nodes} nodes of {cluster.gpus_per_node} such devices" if nodes else ""
    misses: list[dict[str, object]] = [
        {
            "plan": nearest.plan(i).key,
            "needs_bytes": need,
            "has_bytes": has,
            "missing_bytes": need - has,
            "would_fit_if": f"a device had {need / 2**30:.2f} GiB instead of {has / 2**30:.2f} GiB{more}",
        }
        for i, need in enumerate(least.tolist())
    ]
    need = float(least[0])
    raise NothingFitsError(
        f"{model.name} fits on {cluster.name} under none of {count} legal plans: the nearest needs "
        f"{need / 2**30:.2f} GiB a device, {(need - has) / 2**30:.2f} GiB more than it has; "
        f"it would take devices of {need / 2**30:.2f} GiB{more} (estimates)",
        misses,
    )


def _nodes_needed(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    space: Space,
    runtime: Runtime,
    profile: Profile | None,
) -> int | None:
    """The fewest nodes on which a plan that saves memory fits; None if no tried number is enough.

    Tries twice as many until one fits, then up to NODES_BETWEEN numbers between the last two.
    """
    saving = space.model_copy(update={"micro_batch": (min(space.micro_batch or (1,)),)})
    if space.recompute is None or Recompute.FULL in space.recompute:
        saving = saving.model_copy(update={"recompute": (Recompute.FULL,)})

    def fits(nodes: int) -> bool:
        # Memory needs no link, so a single-node cluster may borrow its inner one here.
        more = {"nodes": nodes, "inter": cluster.inter or cluster.intra}
        larger = cluster.model_copy(update=more)
        return any(
            memory_table(model, larger, workload, table, profile).device_bytes.min() <= cluster.device.memory_bytes
            for table in legal_pieces(model, larger, workload, saving, runtime)
        )

    enough = cluster.nodes * 2
    while not fits(enough):
        enough *= 2
        if enough > cluster.nodes * MAX_NODES_FACTOR:
            return None
    step = max(1, enough // 2 // NODES_BETWEEN)
    return next(filter(fits, range(enough // 2 + step, enough, step)), enough)


def nothing_legal(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime, space: Space = Space()
) -> IllegalPlanError:
    """The error for a request without a legal plan: why the simplest plan is not, or which choice no legal plan has."""
    request = f"{model.name} on {cluster.devices} devices"
    reason = illegal_reason(model, cluster, workload, Plan(dp=cluster.devices), runtime)
    values_of: dict[str, set[Any]] = {name: set() for name in Space.model_fields}
    for table in legal_pieces(model, cluster, workload, Space(), runtime):
        for name, found in values_of.items():
            rows = np.unique(getattr(table, name), return_index=True)[1]  # a plan for each value of the column
            found.update(getattr(table.plan(int(row)), name) for row in rows)
    for name, allowed in space:
        legal = sorted(values_of[name])
        if legal and allowed and not set(allowed) & set(legal):
            values = ", ".join(map(str, legal))
            return IllegalPlanError(f"space.{name}", list(allowed), f"no plan is legal: {request} takes {values}")
    why = f"for example {Plan(dp=cluster.devices).key}: {reason}" if reason else "the space excludes every legal plan"
    return IllegalPlanError("plans", request, f"no plan is legal; {why}")
