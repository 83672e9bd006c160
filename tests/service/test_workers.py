"""Workers that are well: tunings through the whole fleet, and messages that are doubled, late, lost or nonsense."""

from __future__ import annotations

import uuid
from pathlib import Path

import psutil
import pytest
from crew import LONG, QUICK, Crew, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.queue.app import TUNER_QUEUE, TaskName, create_app, node_queue
from autotune.specs import MemberReport, MemberState


@pytest.mark.slow
def test_a_tuning_on_one_node(crew: Crew) -> None:
    crew.wait_done(crew.submit(1))


def test_a_tuning_on_two_nodes(crew: Crew) -> None:
    tuning = crew.wait_done(crew.submit(2))
    readings = [trial.reading for trial in crew.store.trials(tuning.id) if trial.reading is not None]
    assert all([rank.rank for rank in reading.ranks] == [0, 1] for reading in readings)


def test_no_process_of_celery_loads_torch(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    worker = crew.part["a"]
    (child,) = worker.children
    (rank,) = worker.ranks
    assert loads_torch(rank)
    assert not loads_torch(child)
    assert not loads_torch(psutil.Process(worker.process.pid))
    assert crew.wait_ended(job).failure is None


def loads_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")


def test_a_tuner_goes_after_others(crew: Crew) -> None:
    for process in crew.part["tuner"].family:
        assert process.nice() == max(10, psutil.Process().nice())
        assert session_nice(process) in {process.nice(), None}


def session_nice(process: psutil.Process) -> int | None:
    """By which Linux shares the processor out among sessions; None where it does not."""
    try:
        return int(Path(f"/proc/{process.pid}/autogroup").read_text().split()[-1])
    except FileNotFoundError:
        return None


def test_a_message_that_comes_twice_changes_nothing(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    for node in ("a", "b"):
        crew.queue.run(node, job.id, job.token)
    ended_job = crew.wait_ended(job)
    for node in ("a", "b"):
        crew.queue.run(node, job.id, job.token)
        wait_for(
            "the last delivery is dropped", lambda name=node: crew.part[name].log.count(f"{job.id}: delivery") == 2
        )
    assert ended_job.failure is None
    assert crew.store.job(job.id) == ended_job


def test_an_old_token_is_worth_nothing(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    session = crew.store.node("a").session
    crew.queue.run("a", job.id, job.token - 1)
    assert crew.store.report_member(job.id, job.token - 1, "a", session, MemberReport()) is None
    assert not crew.store.renew_member(job.id, job.token - 1, "a", session, lease_s=1000.0).go_on
    assert crew.wait_ended(job).failure is None
    assert all(member.state is MemberState.REPORTED for member in crew.store.job(job.id).members)


def test_a_flushed_broker_loses_nothing(crew: Crew) -> None:
    job = crew.create_job(2)
    crew.broker.client.flushall()
    assert crew.wait_ended(job).failure is None


def test_a_consumer_whose_connection_was_killed_gets_work(crew: Crew) -> None:
    crew.broker.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert crew.wait_ended(crew.create_job(2)).failure is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HEADERS = st.dictionaries(
    st.sampled_from(["task", "id", "eta", "expires", "retries", "group", "lang", "timelimit", "stamps"]),
    JSON,
    max_size=3,
)


def test_nonsense_in_the_queues_harms_nobody(crew: Crew) -> None:
    children = [crew.part[name].children for name in ("a", "tuner")]
    stored = ("jobs", "job_members", "leases", "tunings", "tuning_trials", "tuning_events", "probe_runs")
    before = crew.rows(*stored)
    app = create_app(crew.settings)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        task=st.sampled_from([*map(str, TaskName), "autotune.schedule", "celery.chord", "os.system"]),
        body=JSON
        | st.tuples(JSON, JSON, JSON).map(list)
        | st.tuples(st.lists(JSON, max_size=3), st.just({}), st.just({})).map(list),
        headers=HEADERS,
        queue=st.sampled_from([node_queue("a"), TUNER_QUEUE]),
    )
    def send(task: str, body: object, headers: dict[str, object], queue: str) -> None:
        with app.producer_or_acquire() as producer:
            named = {"task": task, "id": uuid.uuid4().hex, "lang": "py"} | headers
            producer.publish(body, routing_key=queue, exchange="", serializer="json", headers=named)

    send()
    app.close()
    wait_for("all is consumed", lambda: not any(map(crew.broker.client.llen, (node_queue("a"), TUNER_QUEUE))))
    assert crew.rows(*stored) == before
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None
    assert [crew.part[name].children for name in ("a", "tuner")] == children
