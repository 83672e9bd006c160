"""A budget of GPU-seconds holds while jobs run: none may run longer than what is left of it."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.ports.fleet import FleetStore
from autotune.specs import Failure, FailureKind, Job, JobState, ProbeOutcome, Tuning
from autotune.specs.base import LONGEST_S
from autotune.tuning.planner import DEADLINE_LEAST_S

SHORTEST_S = 0.1
"""A job has some time, however little is left: what others spend is only known when they have ended."""


def limit_s(store: FleetStore, tuning: Tuning) -> float | None:
    """Seconds that one more job of the tuning may take; None while those in flight may yet need them.

    Those may run until their deadlines, each of which was within what was left.
    """
    if tuning.budget.gpu_s is None:
        return LONGEST_S
    jobs = store.jobs(tuning_id=tuning.id, states=set(JobState) - {JobState.ENDED})
    left_s = _left_s(tuning, 0.0, jobs)
    return None if jobs and left_s < DEADLINE_LEAST_S else left_s


def retried_within(store: FleetStore, tuning: Tuning, outcome: ProbeOutcome, retry: Job | None) -> Job | None:
    """The next attempt at a job that ended so, within what its tuning has left then; None where nothing is left."""
    if retry is None or tuning.budget.gpu_s is None:
        return retry
    others = store.jobs(tuning_id=tuning.id, states=set(JobState) - {JobState.ENDED, JobState.REPORTED})
    left_s = _left_s(tuning, outcome.gpu_s, others)
    return retry.model_copy(update={"deadline_s": min(retry.deadline_s, left_s)}) if left_s > SHORTEST_S else None


def cut_short(tuning: Tuning, job: Job, outcome: ProbeOutcome) -> Failure | None:
    """What became of a job that ran until its deadline, if that was where the budget ended: it is nobody's fault."""
    limit = tuning.budget.gpu_s
    if limit is None or outcome.failure is None or outcome.failure.kind is not FailureKind.HANG:
        return None
    cut = job.deadline_s < DEADLINE_LEAST_S  # nothing else makes one so short
    if not cut and tuning.gpu_s_spent + outcome.gpu_s < limit:
        return None
    return Failure(kind=FailureKind.CANCELLED, message=f"the budget of {limit:g} GPU-seconds ended it")


def _left_s(tuning: Tuning, more_gpu_s: float, in_flight: Sequence[Job]) -> float:
    assert tuning.budget.gpu_s is not None
    left_s = (tuning.budget.gpu_s - tuning.gpu_s_spent - more_gpu_s) / tuning.cluster.devices
    return min(max(left_s - sum(job.deadline_s for job in in_flight), SHORTEST_S), LONGEST_S)
