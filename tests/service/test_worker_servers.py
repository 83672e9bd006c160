"""A tuning goes on while its servers, its tuner and its beat come and go, and whatever the clocks say."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from crew import LONG, QUICK, Crew, wait_for

from autotune.queue.app import TUNER_QUEUE, node_queue
from autotune.specs import JobState, Tuning

# Every Python clock of the worker and its ranks but the monotonic one. (libfaketime makes timed waits of threads last
# for hours, which no wrong clock does.)
WRONG_CLOCK = """
import time
true_time, true_time_ns = time.time, time.time_ns
time.time = lambda: true_time() + 3 * 3600
time.time_ns = lambda: true_time_ns() + 3 * 3600 * 10**9
"""


def jobs_ended(crew: Crew, tuning: Tuning) -> int:
    return len(crew.store.jobs(tuning_id=tuning.id, states={JobState.ENDED}))


def wait_for_progress(crew: Crew, tuning: Tuning) -> None:
    """Until one more of its jobs has ended, or it has."""
    before = jobs_ended(crew, tuning)
    wait_for("progress", lambda: jobs_ended(crew, tuning) > before or crew.store.tuning(tuning.id).state.ended)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tuning_outlives_its_servers_its_tuner_and_its_beat(crew: Crew) -> None:
    tuning = crew.submit(2)
    wait_for_progress(crew, tuning)
    crew.part["tuner"].kill()
    crew.part["beat"].kill()
    crew.make_whole()
    wait_for_progress(crew, tuning)
    crew.broker.stop()
    crew.broker.start()  # as empty as after a flush
    wait_for_progress(crew, tuning)
    crew.postgres.restart()
    wait_for_progress(crew, tuning)
    crew.wait_done(tuning)
    nodes = [crew.part[name] for name in ("a", "b")]
    assert all(node.process.poll() is None for node in nodes)


def test_a_probe_outlives_a_restart_of_the_database(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    crew.postgres.restart()
    ended = crew.wait_ended(job)
    assert (ended.failure, ended.attempt) == (None, 1)


@pytest.mark.slow
def test_each_process_says_once_that_a_server_is_away_and_once_that_it_is_back(crew: Crew) -> None:
    children = {"a": 1, "b": 1, "tuner": 2, "beat": 0}  # which use the database
    logs = {name: len(crew.part[name].log) for name in children}

    def news(name: str) -> str:
        return crew.part[name].log[logs[name] :]

    def all_say(text: str, names: Collection[str]) -> None:
        for name in names:
            wait_for(f"{name}: {text}", lambda each=name: text in news(each))

    def many_fail() -> None:
        for _ in range(4):
            assert crew.queue.advance("nobody")
            assert crew.queue.run("a", "nothing", 1)
        wait_for("all is consumed", lambda: not any(map(crew.broker.client.llen, (node_queue("a"), TUNER_QUEUE))))

    crew.postgres.stop()
    many_fail()
    all_say("the database is away", ("a", "b", "tuner"))
    crew.postgres.start()
    all_say("the database is back", ("a", "b", "tuner"))
    crew.broker.stop()
    all_say("the broker is away", children)
    crew.broker.start()
    all_say("the broker is back", children)
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None
    for name, count in children.items():
        for state in ("away", "back"):
            assert news(name).count(f"the database is {state}") <= count
            assert news(name).count(f"the broker is {state}") <= 1 + count
        unforeseen = [line for line in news(name).splitlines() if " ERROR " in line and "nothing" not in line]
        assert "Traceback" not in news(name)
        assert unforeseen == []


@pytest.mark.slow
def test_a_broker_that_is_away_at_the_start_is_waited_for(crew: Crew) -> None:
    crew.broker.stop()
    tuner = crew.start_tuner()
    wait_for("a line about it", lambda: tuner.says("the broker is away"))
    crew.broker.start()
    crew.wait_ready(tuner)
    assert tuner.end() == 0
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None


@pytest.mark.slow
def test_a_node_whose_clock_is_wrong_works(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    crew.part["b"].end()
    crew.part["b"] = crew.start_node("b", "127.0.0.2", PYTHONPATH=str(tmp_path))
    crew.wait_ready(crew.part["b"])
    ended = crew.wait_ended(crew.create_job(2, QUICK))
    assert (ended.failure, ended.attempt) == (None, 1)
    assert abs((crew.store.now() - crew.store.node("b").heartbeat_at).total_seconds()) < 60.0
    crew.part["b"].end()
