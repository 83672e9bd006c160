"""Ranking the legal space by estimate, without any hardware; and what would make a model fit that fits nowhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.estimate import NINETY_PERCENT, estimate_table, memory_table
from autotune.cost.table import PlanTable
from autotune.errors import IllegalPlanError, NothingFitsError
from autotune.search.posterior import believe
from autotune.search.residual import features
from autotune.search.space import Runtime, illegal_reason, legal_plans
from autotune.specs import ClusterSpec, Estimate, ModelSpec, Plan, Profile, Recompute, Space, Workload

MAX_NODES_FACTOR = 64
"""How many times the given nodes are tried, at most, when asked how many a model needs."""

NODES_BETWEEN = 16
"""How many numbers of nodes are tried between one that is too few and twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedPlan:
    """A plan and what the cost model says of it."""

    plan: Plan
    estimate: Estimate


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
    posterior = believe(table, features(table), [estimates], (), devices=cluster.devices, setup_s=0.0, steps=1)
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
) -> Ranking:
    """Estimates every legal plan and returns the best `limit`.

    Raises:
        IllegalPlanError: no plan of the space is legal; says why the simplest one is not.
        NothingFitsError: no legal plan is estimated to fit; carries the nearest misses.
        MissingMeasurementError: a speed that is needed is neither measured nor in the catalog.
    """
    started = time.perf_counter()
    table = legal_plans(model, cluster, workload, space, runtime)
    if not len(table):
        raise nothing_legal(model, cluster, workload, runtime, space)
    before = time.perf_counter()
    estimates = estimate_table(model, cluster, workload, table, profile)
    fits = np.flatnonzero(estimates.fits)
    after = time.perf_counter()
    if not len(fits):
        nearest_misses(model, cluster, workload, table, space=space, runtime=runtime, profile=profile)
    # The best of the rows that fit; of equally good ones those with the least memory first.
    worth = estimates.expected[fits]
    if len(fits) > limit:
        threshold = np.partition(worth, len(worth) - limit)[len(worth) - limit]
        among = worth >= threshold
        best, worth = fits[among], worth[among]
    else:
        best = fits
    best = best[np.lexsort((estimates.peak_memory_bytes[best], -worth))][:limit]
    plans = [table.plan(int(i)) for i in best]
    found = estimated(model, cluster, workload, plans, profile)
    return Ranking(
        legal=len(table),
        fitting=len(fits),
        seconds=time.perf_counter() - started,
        estimates_per_s=len(table) / (after - before),
        plans=tuple(EstimatedPlan(plan=plan, estimate=one) for plan, one in zip(plans, found, strict=True)),
    )


def nearest_misses(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    table: PlanTable,
    *,
    space: Space = Space(),
    runtime: Runtime = Runtime.ANY,
    profile: Profile | None = None,
    limit: int = 3,
) -> None:
    """Raises NothingFitsError with the nearest misses if no plan of `table` is estimated to fit; needs no speeds."""
    needs = memory_table(model, cluster, workload, table, profile).device_bytes
    has = cluster.device.memory_bytes
    if not len(table) or needs.min() <= has:
        return
    order = np.argsort(needs, kind="stable")[:limit]
    nodes = _nodes_needed(model, cluster, workload, space, runtime, profile)
    more = f", or {nodes} nodes of {cluster.gpus_per_node} such devices" if nodes else ""
    misses: list[dict[str, object]] = [
        {
            "plan": table.plan(int(i)).key,
            "needs_bytes": float(needs[i]),
            "has_bytes": has,
            "missing_bytes": float(needs[i]) - has,
            "would_fit_if": f"a device had {needs[i] / 2**30:.2f} GiB instead of {has / 2**30:.2f} GiB{more}",
        }
        for i in order
    ]
    least = float(needs[order[0]])
    raise NothingFitsError(
        f"{model.name} fits on {cluster.name} under none of {len(table)} legal plans: the nearest needs "
        f"{least / 2**30:.2f} GiB a device, {(least - has) / 2**30:.2f} GiB more than it has; "
        f"it would take devices of {least / 2**30:.2f} GiB{more} (estimates)",
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
        table = legal_plans(model, larger, workload, saving, runtime)
        if not len(table):
            return False
        needs = memory_table(model, larger, workload, table, profile).device_bytes
        return bool(needs.min() <= cluster.device.memory_bytes)

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
    table = legal_plans(model, cluster, workload, Space(), runtime)
    for name, allowed in space:
        rows = np.unique(getattr(table, name), return_index=True)[1]  # a plan for each value of the column
        legal = sorted(getattr(table.plan(int(row)), name) for row in rows)
        if legal and allowed and not set(allowed) & set(legal):
            values = ", ".join(map(str, legal))
            return IllegalPlanError(f"space.{name}", list(allowed), f"no plan is legal: {request} takes {values}")
    why = f"for example {Plan(dp=cluster.devices).key}: {reason}" if reason else "the space excludes every legal plan"
    return IllegalPlanError("plans", request, f"no plan is legal; {why}")
