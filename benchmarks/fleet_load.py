"""What an API answers, and how fast, while 50 clients ask and workers tune; and behind what others wait for.

1,000 submissions of 200 distinct requests, then 1,000 times GET /best, each by 50 clients that never rest, while the
nodes measure for a tuning that was there before. One client alone, before and after 10,000 jobs of somebody else wait
in the queue: how long a submission and GET /best take, and until a new request gets its first nodes. And how long it
takes until the first trial of somebody new gets its nodes, alone and behind 1,000 tunings that one other has asked for.
Two nodes of one CPU rank, a tuner and a beat work all the time. Ends with an AssertionError if a submission is lost or
a duplicate is not shared. Prints JSON.

With --hostile only the 50 clients, twice: alone, and beside a client that means harm (benchmarks/hostile_client.py).
With --turns only the first trials of somebody new.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]

import psutil  # noqa: E402
from crew import POOL, QUICK, Crew, pool_cluster, wait_for  # noqa: E402
from load import Answered, Asked, ask_all, percentile_s, submission  # noqa: E402
from private_fleet import private_fleet  # noqa: E402

from autotune.fleet.keys import create_key  # noqa: E402
from autotune.fleet.scheduling import schedule  # noqa: E402
from autotune.specs import Job, JobPurpose, JobState  # noqa: E402
from storage.fleet.jobs import job_row  # noqa: E402

CLIENTS, DISTINCT, TIMES, USERS = 50, 200, 5, 10
ALONE, GRANTS = 100, 5
PATIENT_S = 900.0
"""For what is only the ground of a phase, on a machine that does other work, too."""

LONG_TRIALS = 100
BACKLOG = 10_000
GREEDY, NEWCOMERS = 1_000, 2
HOSTILE_NICE = 10
"""It stands for another machine: it may not take the processors from those whom it attacks."""

HOSTILE_ALONE_S = 3.0
BEST = Asked(method="GET", path=f"/best?model=tiny&cluster={POOL}&nodes=2&seq_len=64&global_batch=4&dtype=bf16")


class LoadRun:
    """The phases of the benchmark on one fleet."""

    def __init__(self, crew: Crew, url: str) -> None:
        self._crew, self._url = crew, url
        self._secrets = [create_key(crew.store, f"user-{number}", "submit").secret for number in range(USERS)]
        self._admin = create_key(crew.store, "admin", "admin").secret
        self._seeds = itertools.count(30_000)

    def many(self, *, beside_hostile: bool = False) -> dict[str, object]:
        """All clients at once."""
        before, first_seed = self._measured_for(), DISTINCT * beside_hostile
        requests = [submission(first_seed + number % DISTINCT) for number in range(DISTINCT * TIMES)]
        random.Random(1).shuffle(requests)
        with self._hostile(before) if beside_hostile else nullcontext({}) as did:
            start_s = time.perf_counter()
            answers = ask_all(self._url, requests, CLIENTS, self._secrets)
            submit_s = time.perf_counter() - start_s
            best = ask_all(self._url, [BEST] * len(requests), CLIENTS, self._secrets)
        self._check(answers)
        assert {answer.status for answer in best} == {200}
        assert not self._crew.store.tuning(before).state.ended  # the nodes had work until here
        self._cancel([before, *sorted({answer.data["tuning"] for answer in answers})])
        rate = round(len(answers) / submit_s, 1)
        return {"submit": shown(answers), "best": shown(best), "submissions_per_s": rate} | did

    @contextmanager
    def _hostile(self, tuning_id: str) -> Iterator[dict[str, object]]:
        """A hostile client at work; afterwards, what it did, and the API's memory how much its memory grew."""
        secret = create_key(self._crew.store, "hostile", "submit").secret
        command = [sys.executable, str(Path(__file__).with_name("hostile_client.py")), self._url, secret, tuning_id]
        api, did = psutil.Process(self._crew.part["api"].process.pid), dict[str, object]()
        before = api.memory_info().rss
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            Path(f"/proc/{process.pid}/autogroup").write_text(str(HOSTILE_NICE), encoding="ascii")
            os.setpriority(os.PRIO_PROCESS, process.pid, HOSTILE_NICE)
            time.sleep(HOSTILE_ALONE_S)
            start_s = time.perf_counter()
            yield did
            did["beside_s"] = round(time.perf_counter() - start_s, 1)
            did["api_grew_mib"] = round((api.memory_info().rss - before) / 2**20, 1)
            process.terminate()
            did["hostile_did"] = json.loads(process.communicate()[0])

    def _measured_for(self) -> str:
        """A new tuning with many trials, of which the nodes have measured one: their ranks are warm, and at work."""
        asked = submission(next(self._seeds))
        body = (asked.body or {}) | {"budget": {"max_trials": LONG_TRIALS, "min_gain": 0.0}}
        (answer,) = ask_all(self._url, [replace(asked, body=body)], 1, [self._admin])
        tuning_id, store = str(answer.data["tuning"]), self._crew.store
        wait_for("a trial", lambda: any(trial.reading is not None for trial in store.trials(tuning_id)), PATIENT_S)
        return tuning_id

    def alone(self, first_seed: int) -> dict[str, object]:
        """One client, with requests that nobody else makes."""
        answers = ask_all(self._url, [submission(first_seed + n) for n in range(ALONE)], 1, self._secrets[:1])
        assert {answer.status for answer in answers} == {201}
        best = ask_all(self._url, [BEST] * ALONE, 1, self._secrets[:1])
        self._cancel([answer.data["tuning"] for answer in answers])
        waits_s = [self._first_grant_s(first_seed + ALONE + number) for number in range(GRANTS)]
        return {"submit": shown(answers), "best": shown(best), "first_nodes_s": round(statistics.median(waits_s), 2)}

    def backlog(self) -> int:
        """Jobs of somebody else, that run as nodes become free; how many wait when all are stored."""
        store, now = self._crew.store, self._crew.store.now()
        jobs = [
            Job(
                id=f"backlog-{number}", purpose=JobPurpose.PROFILE, pool=POOL, cluster=pool_cluster(), request=QUICK,
                principal="somebody", deadline_s=60.0, created_at=now + timedelta(microseconds=number),
            )
            for number in range(BACKLOG)
        ]  # fmt: skip
        with store.writing() as session:  # as create_job would, but in one transaction
            session.add_all(map(job_row, jobs))
        schedule(store, self._crew.queue, POOL)
        return store.counts().jobs[JobState.QUEUED.value]

    def turns(self) -> dict[str, object]:
        """Until a new request's first trial has nodes: alone, and behind many tunings of one other principal."""
        alone_s = [self._first_trial_s(40_000 + number) for number in range(NEWCOMERS)]
        greedy = create_key(self._crew.store, "greedy", "submit").secret
        requests = [submission(50_000 + number) for number in range(GREEDY)]
        start_s = time.perf_counter()
        answers = ask_all(self._url, requests, CLIENTS, [greedy])
        asked_s = time.perf_counter() - start_s
        assert {answer.status for answer in answers} == {201}
        behind_s = [self._first_trial_s(60_000 + number) for number in range(NEWCOMERS)]
        self._cancel([answer.data["tuning"] for answer in answers])
        waits = {"alone": alone_s, "behind": behind_s}
        found: dict[str, object] = {name: [round(wait_s, 1) for wait_s in sorted(each)] for name, each in waits.items()}
        ratio = statistics.median(behind_s) / statistics.median(alone_s)
        return found | {"ratio_of_medians": round(ratio, 2), "1000_asked_for_in_s": round(asked_s, 1)}

    def _check(self, answers: Sequence[Answered]) -> None:
        assert sum(answer.status == 201 for answer in answers) == DISTINCT
        assert {answer.status for answer in answers} == {200, 201}
        led_to = {(answer.asked.body or {})["seed"]: answer.data["tuning"] for answer in answers}
        assert all(led_to[(answer.asked.body or {})["seed"]] == answer.data["tuning"] for answer in answers)
        stored = {tuning.id for tuning in self._crew.store.tunings(10_000)}
        assert len(set(led_to.values())) == DISTINCT
        assert set(led_to.values()) <= stored

    def _cancel(self, tunings: Sequence[str]) -> None:
        taken_back = [Asked(method="DELETE", path=f"/tunings/{each}?force=true") for each in tunings]
        answers = ask_all(self._url, taken_back, 1, [self._admin])
        assert {answer.status for answer in answers} == {200}

    def _first_grant_s(self, seed: int, purposes: Collection[JobPurpose] = tuple(JobPurpose)) -> float:
        """From the submission of somebody new until its first job has nodes; 120 s at most are waited for."""
        secret = create_key(self._crew.store, f"new-{seed}", "submit").secret
        (answer,) = ask_all(self._url, [submission(seed)], 1, [secret])
        tuning_id, store = answer.data["tuning"], self._crew.store

        def grants() -> list[datetime]:
            jobs = [job for job in store.jobs(tuning_id=tuning_id) if job.purpose in purposes]
            return [job.granted_at for job in jobs if job.granted_at is not None]

        granted_at = min(wait_for("its first nodes", grants))
        self._cancel([tuning_id])
        return (granted_at - store.tuning(tuning_id).created_at).total_seconds()

    def _first_trial_s(self, seed: int) -> float:
        """The same of its first trial."""
        return self._first_grant_s(seed, [JobPurpose.TRIAL])


def shown(answers: Sequence[Answered]) -> dict[str, float]:
    """Milliseconds."""
    found = {"p50": percentile_s(answers, 0.5), "p99": percentile_s(answers, 0.99), "max": percentile_s(answers, 1.0)}
    return {name: round(1e3 * value, 1) for name, value in found.items()}


def main() -> None:
    """Runs all phases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hostile", action="store_true", help="only many clients, alone and beside a hostile one")
    parser.add_argument("--turns", action="store_true", help="only the first trials of somebody new")
    asked = parser.parse_args()
    before = os.getloadavg()
    with private_fleet() as (crew, supervisor):
        first = crew.submit(2)
        wait_for("a best plan", lambda: crew.store.tuning(first.id).state.ended, PATIENT_S)
        run = LoadRun(crew, supervisor.url)
        phases: dict[str, Callable[[], object]] = {
            "alone": lambda: run.alone(10_000),
            "many": run.many,
            "turns": run.turns,
            "waiting": run.backlog,
            "alone_behind_backlog": lambda: run.alone(20_000),
        }
        if asked.turns:
            phases = {"turns": run.turns}
        if asked.hostile:
            phases = {"many": run.many, "many_beside_hostile": lambda: run.many(beside_hostile=True)}
        found: dict[str, object] = {"load_before": [round(each, 1) for each in before]}
        for name, phase in phases.items():
            found[name] = phase()
            print(f"{name}: {found[name]}", file=sys.stderr)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
