"""The beat begins a night, and the fleet measures: from `autotune beat --nightly` to what a node measured."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from crew import POOL, Crew, autotune, pool_cluster, wait_for

from autotune.catalog import smallest
from autotune.specs import BestEntry, JobState, Plan, Workload
from autotune.specs.regression import Check, CheckMeasurement, CheckState


@pytest.mark.slow
def test_a_beat_begins_a_night(crew: Crew) -> None:
    crew.store.put_best(entry(crew))
    crew.start("beat", *autotune("beat", "--nightly", f"{datetime.now(UTC):%H:%M}", "--nightly-gpu-s", "100000"))
    wait_for("a measurement of the night", lambda: measurements(crew))
    checks = crew.store.checks(state=CheckState.RUNNING)
    assert {check.pool for check in checks} == {POOL}
    assert sum(budget(check) for check in checks) <= 100_000.0 * (1 + 1e-9)
    assert all(item.failure is None for item in measurements(crew))
    for check in checks:  # the tests that follow have the nodes for themselves
        crew.store.abandon_check(check.id)
    wait_for("all jobs end", lambda: all(job.state is JobState.ENDED for job in crew.store.jobs(pool=POOL)))


def entry(crew: Crew) -> BestEntry:
    node = crew.store.node("a")
    return BestEntry(
        model=smallest(), parameters=1.0, cluster=pool_cluster(1), plan=Plan(), repeats=1, peak_bytes=None,
        workload=Workload(seq_len=32, global_batch=1), tokens_per_s_per_gpu=100.0, interval=(99.0, 101.0),
        fingerprint_key=node.fingerprint_key, environment_key=node.environment_key, measured_at=datetime.now(UTC),
    )  # fmt: skip


def measurements(crew: Crew) -> list[CheckMeasurement]:
    running = crew.store.checks(state=CheckState.RUNNING)
    return [item for check in running for item in crew.store.measurements(check.id)]


def budget(check: Check) -> float:
    assert check.budget_gpu_s is not None
    return check.budget_gpu_s
