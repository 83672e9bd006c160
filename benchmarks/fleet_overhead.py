"""What the fleet adds to a trial, and how much of the nodes' time is measuring, beside a launcher of a process a trial.

A tuning of the smallest model on two nodes of one CPU rank each. Of each of its trials: queue (from the creation of its
job to the grant of its nodes), start (to the last node that began), ranks (until the warm ranks had the request), build
(groups and model: then the first step starts), steps, and end (from there until the job has ended: reports, merging,
storing). Then the same plans one after another on fresh ranks each. Utilisation is the share of the wall time from the
first trial's creation to the last one's end in which ranks took steps. Prints JSON.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]

from crew import Crew, pool_cluster  # noqa: E402
from private_fleet import private_fleet  # noqa: E402

from autotune.catalog import smallest  # noqa: E402
from autotune.fleet.service import submission_of  # noqa: E402
from autotune.specs import Budget, ClusterSpec, Job, JobPurpose, StepRequest, Workload  # noqa: E402
from autotune.wiring import merge_reports, open_fleet, open_queue  # noqa: E402
from probes.launch import LocalProber  # noqa: E402

TRIALS, COLD_TRIALS = 16, 6
DEADLINE_S = 600.0
STARTED = re.compile(r"^(\S+ \S+) INFO autotune\.node: job (\w+): started", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of one trial."""

    queue_s: float
    start_s: float
    ranks_s: float
    build_s: float
    steps_s: float
    end_s: float

    @property
    def to_first_step_s(self) -> float:
        """From the creation of the trial's job to its first step."""
        return self.queue_s + self.start_s + self.ranks_s + self.build_s


def tuned(crew: Crew) -> Sequence[Job]:
    """The trials' jobs of a tuning that went well, in order."""
    fleet = open_fleet(crew.store, open_queue(crew.settings))
    submission = submission_of(
        smallest(), pool_cluster(2), Workload(seq_len=64, global_batch=16), budget=Budget(max_trials=TRIALS),
        principal="ada",
    )  # fmt: skip
    tuning, _ = fleet.submit(submission)
    fleet.close()
    crew.wait_done(tuning)
    jobs = crew.store.jobs(tuning_id=tuning.id)
    return [job for job in jobs if job.purpose is JobPurpose.TRIAL and job.failure is None]


def starts(crew: Crew) -> dict[str, float]:
    """When the last node began each job (seconds since the epoch), from the workers' logs."""
    found: dict[str, float] = {}
    for node in ("a", "b"):
        for text, job in STARTED.findall(crew.part[node].log):
            at = datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").astimezone(UTC).timestamp()
            found[job] = max(at, found.get(job, 0.0))
    return found


def phases(job: Job, started_at: float) -> Phases:
    """Where the time of a job went. All clocks are this machine's."""
    assert job.granted_at is not None
    assert job.ended_at is not None
    outcome = merge_reports(job).outcome
    ranks_s = max(member.report.setup_s for member in job.members if member.report is not None)
    return Phases(
        queue_s=(job.granted_at - job.created_at).total_seconds(),
        start_s=started_at - job.granted_at.timestamp(),
        ranks_s=ranks_s,
        build_s=outcome.setup_s - ranks_s,
        steps_s=outcome.wall_s - outcome.setup_s,
        end_s=job.ended_at.timestamp() - started_at - outcome.wall_s,
    )


def fleet_figures(jobs: Sequence[Job], found: Sequence[Phases]) -> dict[str, object]:
    """Medians over the trials on warm ranks."""
    assert jobs[-1].ended_at is not None
    wall_s = (jobs[-1].ended_at - jobs[0].created_at).total_seconds()
    names = [each.name for each in fields(Phases)] + ["to_first_step_s"]
    medians = {name: round(statistics.median(getattr(each, name) for each in found), 3) for name in names}
    to_first_step_s = sorted(each.to_first_step_s for each in found)
    return medians | {
        "trials": len(jobs),
        "warm": sum(job.warm for job in jobs),
        "to_first_step_range_s": [round(to_first_step_s[0], 3), round(to_first_step_s[-1], 3)],
        "wall_s": round(wall_s, 1),
        "utilisation": round(sum(each.steps_s for each in found) / wall_s, 3),
    }


def cold_figures(requests: Sequence[StepRequest]) -> dict[str, object]:
    """The same plans, each on fresh ranks of its own, without any service around them."""
    data = pool_cluster(1).to_data() | {"gpus_per_node": 2}
    first_step_s, steps_s = [], []
    with (
        tempfile.TemporaryDirectory(prefix="autotune-cold-") as folder,
        LocalProber(ClusterSpec.from_data(data), log_dir=Path(folder)) as prober,
    ):
        begin_s = time.perf_counter()
        for request in requests:
            outcome = prober.run(request.model_copy(update={"cold": True}), deadline_s=DEADLINE_S)
            if outcome.failure is not None:
                sys.exit(f"{request.plan.key}: {outcome.failure.message}")
            first_step_s.append(outcome.setup_s)
            steps_s.append(outcome.wall_s - outcome.setup_s)
        wall_s = time.perf_counter() - begin_s
    return {
        "trials": len(requests),
        "to_first_step_s": round(statistics.median(first_step_s), 3),
        "steps_s": round(statistics.median(steps_s), 3),
        "wall_s": round(wall_s, 1),
        "utilisation": round(sum(steps_s) / wall_s, 3),
    }


def main() -> None:
    """Tunes, then repeats plans cold."""
    load = [round(each, 1) for each in os.getloadavg()]
    with private_fleet() as (crew, _):
        jobs = tuned(crew)
        started_at = starts(crew)
        found = [phases(job, started_at[job.id]) for job in jobs]
    requests = [job.request for job in jobs if isinstance(job.request, StepRequest)]
    cold = cold_figures(requests[:COLD_TRIALS])
    print(json.dumps({"load_before": load, "fleet": fleet_figures(jobs, found), "cold": cold}, indent=2))


if __name__ == "__main__":
    main()
