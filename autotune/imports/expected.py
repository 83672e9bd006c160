"""Ranking the legal space by what is expected once imports of one source were learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost.capacity import MAY_FIT
from autotune.cost.estimate import NINETY_PERCENT
from autotune.cost.table import PlanTable
from autotune.imports.learning import Readings, framework_of, same_request, transfers_from, trials_of, with_links
from autotune.search.core import Search
from autotune.search.offline import nearest_misses
from autotune.search.ranking import RankedPlan
from autotune.search.transfer import alike
from autotune.specs import ClusterSpec, Estimate, ModelSpec, Plan, Profile, Workload
from autotune.specs.imported import ImportedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPlan:
    """A plan, its estimate, and what is expected of it after the source's runs.

    Args:
        plan: what would be run.
        estimate: of the cost model alone.
        tokens_per_s_per_gpu: expected.
        interval: around that, 90 %.
        p_fits: probability that it fits in memory.
        imported: how the source's runs of this very request measured it, None where they did not.
    """

    plan: Plan
    estimate: Estimate
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    p_fits: float
    imported: RankedPlan | None

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        known = self.imported
        imported = known and {
            "tokens_per_s_per_gpu": known.tokens_per_s_per_gpu,
            "interval_tokens_per_s_per_gpu": list(known.interval),
            "runs": known.repeats,
        }
        return {
            "plan": self.plan.to_data(),
            "estimate": self.estimate.to_data(),
            "expected_tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "expected_interval_tokens_per_s_per_gpu": list(self.interval),
            "p_fits": self.p_fits,
            "imported": imported,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRanking:
    """The plans with the highest expected speed of those that may fit.

    Args:
        legal: plans that were weighed.
        same: imported runs of this very request.
        transfers: plans that other runs on such a cluster taught of.
        readings: imported collective readings on this cluster.
        framework: whose habits the estimates assume.
        plans: best first.
    """

    legal: int
    same: int
    transfers: int
    readings: int
    framework: str
    plans: tuple[ExpectedPlan, ...]

    def to_data(self, source: str) -> dict[str, Any]:
        """For --json, with the name of the source."""
        learned = {"runs": self.same, "lessons": self.transfers, "readings": self.readings}
        return {
            "history": {"source": source, **learned},
            "framework": self.framework,
            "legal": self.legal,
            "plans": [item.to_data() for item in self.plans],
        }


def rank_with_history(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    table: PlanTable,
    *,
    runs: Sequence[ImportedRun],
    readings: Readings,
    profile: Profile | None,
    limit: int,
) -> ExpectedRanking:
    """The best `limit` plans of a table by expectation.

    Runs of this very request are its history; all other runs on such a cluster are transfers.

    Args:
        model: what is trained.
        cluster: on what.
        workload: how.
        table: legal plans, at least one.
        runs: of one source.
        readings: of that source.
        profile: the cluster's own calibration; imported links fill its gaps.
        limit: plans at most.

    Raises:
        NothingFitsError: no plan is expected to fit.
        MissingMeasurementError: a speed that is needed is neither measured nor in the catalog.
    """
    same = same_request(runs, model, cluster, workload)
    others = [run for run in runs if run not in same]
    framework = framework_of(same or [run for run in others if alike(run.cluster, cluster)], workload)
    transfers = transfers_from(others, cluster, readings, profile)
    found = readings(cluster)
    search = Search(
        model, cluster, workload, plans=table, profile=with_links(profile, cluster, found), history=trials_of(same),
        transfers=transfers, framework=framework,
    )  # fmt: skip
    posterior = search.posterior()
    measured = {ranked.plan: ranked for ranked in search.ranking()}
    rows = np.flatnonzero(posterior.p_fits >= MAY_FIT)
    plans = []
    for row in rows[np.argsort(-posterior.log_mean[rows], kind="stable")][:limit].tolist():
        plan, middle = search.table.plan(row), float(np.exp(posterior.log_mean[row]))
        spread = float(np.exp(NINETY_PERCENT * posterior.log_sd[row]))
        plans.append(
            ExpectedPlan(
                plan=plan,
                estimate=search.estimates.row(row),
                tokens_per_s_per_gpu=middle,
                interval=(middle / spread, middle * spread),
                p_fits=float(posterior.p_fits[row]),
                imported=measured.get(plan),
            )
        )
    if not plans:
        nearest_misses(model, cluster, workload, [table], profile=profile)
    return ExpectedRanking(
        legal=search.legal,
        same=len(same),
        transfers=len(transfers),
        readings=len(found),
        framework=framework.name,
        plans=tuple(plans),
    )
