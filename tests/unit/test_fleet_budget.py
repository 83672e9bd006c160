"""Several gangs, one budget of GPU-seconds: what may be spent at once is never more than what is left."""

from __future__ import annotations

from pathlib import Path

from fleet_world import World, pool_cluster

from autotune.specs import Budget, FailureKind, Job, JobPurpose, JobState, TuningState
from storage import open_store

LIMIT = 700.0


def test_jobs_in_flight_and_their_next_attempts_stay_within_the_budget(tmp_path: Path) -> None:
    """Three nodes of two ranks; every first attempt at a trial hangs, and each job costs 2 GPU-seconds. A probe may
    take 240, so that two are in flight at once and a third is not."""
    worst: list[tuple[int, float]] = []

    def fault(job: Job, node: str) -> FailureKind | None:
        flying = [each for each in store.jobs(tuning_id=tuning) if each.state is not JobState.ENDED]
        due = sum(each.deadline_s * each.cluster.devices for each in flying)
        worst.append((len(flying), store.tuning(tuning).gpu_s_spent + due))
        return FailureKind.HANG if job.purpose is JobPurpose.TRIAL and job.attempt == 1 else None

    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        world = World(store=store, cluster=pool_cluster(), fault=fault)
        world.join("a", "b", "c")
        tuning = world.submit(nodes=1, budget=Budget(gpu_s=LIMIT))
        world.settle()
        assert store.tuning(tuning).state is TuningState.DONE
    assert max(flying for flying, _ in worst) == 2
    assert max(due for _, due in worst) <= LIMIT + 1e-6
