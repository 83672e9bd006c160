"""Users who want the same nodes at the same time: nobody waits for ever, no node is held twice, turns are fair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from crew import AMPLE_S, MAX_TRIALS, Crew, pool_cluster, wait_for
from truth import assert_truthful

from autotune.catalog import smallest
from autotune.fleet.service import submission_of
from autotune.specs import Budget, Job, Workload
from autotune.wiring import open_fleet, open_queue

WANTS = {"ben": 2, "cleo": 2, "dora": 1}
# The scheduler reads who waits and who used what a moment before it grants.
A_MOMENT, A_LITTLE_GPU_S = timedelta(seconds=1), 2.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_users_who_fight_for_the_same_nodes_take_turns(crew: Crew) -> None:
    with closing(open_fleet(crew.store, open_queue(crew.settings))) as fleet:
        tunings = [
            fleet.submit(
                submission_of(
                    smallest(), pool_cluster(nodes), Workload(seq_len=64, global_batch=4),
                    budget=Budget(max_trials=MAX_TRIALS), principal=who, seed=seed,
                )
            )[0]
            for seed, (who, nodes) in enumerate(WANTS.items(), 7_000_000)
        ]  # fmt: skip
    wait_for("all end", lambda: all(crew.store.tuning(each.id).state.ended for each in tunings), within_s=4 * AMPLE_S)
    jobs: list[Job] = []
    for tuning in tunings:
        jobs += assert_truthful(crew.store, crew.wait_done(tuning))[1]
    for node in ("a", "b"):
        held = sorted(holdings(jobs, node))
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(held))
    assert out_of_turn(jobs) == []


def holdings(jobs: Iterable[Job], node: str) -> list[tuple[datetime, datetime]]:
    """When the jobs held a node."""
    return [
        (job.granted_at, job.ended_at)
        for job in jobs
        if job.granted_at and job.ended_at and any(member.node == node for member in job.members)
    ]


def out_of_turn(jobs: Sequence[Job]) -> list[tuple[str, str, float, float]]:
    """Grants to somebody who had used more GPU-seconds than somebody who waited: who got it, who waited, their use."""
    found = []
    for job in jobs:
        assert job.granted_at is not None
        for other in jobs:
            waits = other.granted_at is None or other.granted_at > job.granted_at
            if other.principal == job.principal or not waits or other.created_at > job.granted_at - A_MOMENT:
                continue
            mine, theirs = (
                used_gpu_s(jobs, job.principal, job.granted_at),
                used_gpu_s(jobs, other.principal, job.granted_at),
            )
            if mine > theirs + A_LITTLE_GPU_S:
                found.append((job.principal, other.principal, mine, theirs))
    return found


def used_gpu_s(jobs: Iterable[Job], principal: str, at: datetime) -> float:
    """What a principal had held by then, as the scheduler counts it."""
    held = [(job, job.granted_at, min(job.ended_at or at, at)) for job in jobs if job.principal == principal]
    return sum(job.cluster.devices * (end - start).total_seconds() for job, start, end in held if start and start < at)
