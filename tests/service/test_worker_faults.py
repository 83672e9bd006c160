"""Workers, servers and ranks that die, hang or are replaced: a job ends truthfully, and nothing is left."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from crew import LEASE_S, LONG, POOL, QUICK, Crew, assert_gone, wait_for

from autotune.catalog import smallest
from autotune.errors import InputError
from autotune.queue.app import TUNER_QUEUE
from autotune.queue.consumer import fault_of
from autotune.specs import FailureKind, Job, LayerPart, LayerRequest, NodeState, Workload
from autotune.wiring import open_fleet

IMPATIENT = ("--patience", "3")


def assert_retried(crew: Crew, job: Job) -> None:
    """It was lost, and a later attempt measures. (One may be lost to a node that nobody misses yet.)"""
    ended = crew.wait_ended(job)
    assert ended.failure is FailureKind.LOST, ended.message
    crew.make_whole()
    while ended.failure is FailureKind.LOST:
        ended = crew.wait_ended(crew.retry_of(ended))
    assert ended.failure is None, ended.message


@pytest.mark.slow
def test_a_killed_child_loses_its_ranks_and_the_job_is_tried_again(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    family = crew.part["a"].family[1:]
    crew.part["a"].children[0].kill()
    assert_gone(family)
    assert_retried(crew, job)


@pytest.mark.slow
def test_a_killed_worker_leaves_no_process(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    family = crew.part["b"].kill()
    assert len(family) == 3  # the worker, its child and its rank
    assert_gone(family)
    assert_retried(crew, job)


def test_a_killed_node_is_named_lost_after_its_lease(crew: Crew) -> None:
    assert crew.store.node("b").lost_after_s == LEASE_S
    crew.part["b"].kill()
    fleet = open_fleet(crew.store, crew.queue)
    wait_for("it is named", lambda: fleet.nodes(POOL)[1].obstacle == f"lost: no heartbeat for over {LEASE_S:g} s")


@pytest.mark.slow
def test_a_gang_that_is_lost_as_a_whole_is_tried_again_and_nobody_is_blamed(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    for name in ("a", "b"):
        crew.part[name].kill()
    crew.make_whole()
    assert_retried(crew, job)
    assert crew.store.job(job.id).message == "all nodes were lost before they reported"
    assert all(incident.job_id != job.id for incident in crew.store.incidents())


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_gives_its_job_up_and_is_not_blamed(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    family = crew.part["b"].family
    assert crew.part["b"].end() == 0
    assert_gone(family)
    assert crew.part["b"].says("signed off")
    assert_retried(crew, job)
    assert all(incident.job_id != job.id for incident in crew.store.incidents())


def test_a_stopped_rank_is_a_hang_of_its_node(crew: Crew) -> None:
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None  # starts the ranks, which takes its time
    job = crew.wait_measuring(crew.create_job(2, LONG, deadline_s=8.0))
    (rank,) = crew.part["b"].ranks
    rank.send_signal(signal.SIGSTOP)
    ended = crew.wait_ended(job)
    assert ended.failure is FailureKind.HANG
    blamed = wait_for("blame", lambda: [each.node for each in crew.store.incidents() if each.job_id == job.id])
    assert blamed == ["b"]
    assert_gone([rank])


@contextmanager
def at_a_tenth_of_the_speed(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """They run for 10 ms of each 100."""
    over = Event()

    def pace() -> None:
        while not over.wait(0.01):
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            over.wait(0.09)
            for process in processes:
                process.send_signal(signal.SIGCONT)

    thread = Thread(target=pace)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_rank_at_a_tenth_of_the_speed_is_found_by_what_its_peers_take(crew: Crew) -> None:
    model, workload = smallest().model_copy(update={"hidden": 512, "ffn": 2048}), Workload(seq_len=256, global_batch=8)
    layer = LayerRequest(model=model, workload=workload, part=LayerPart.LAYER, micro_batch=4)
    assert crew.wait_ended(crew.create_job(2, layer)).failure is None
    with at_a_tenth_of_the_speed(crew.part["b"].ranks):
        ended = crew.wait_ended(crew.create_job(2, layer))
    assert ended.failure is FailureKind.SLOW, ended.message
    assert re.search(r"node b: rank 1 computed \S+ s for what took the other nodes \S+ s, \S+ x as long", ended.message)
    assert crew.retry_of(ended).avoid == ("b",)
    assert "slow" in {incident.kind for incident in crew.store.incidents("b")}
    wait_for("it comes back", lambda: crew.store.node("b").state is NodeState.READY)
    assert crew.wait_ended(crew.retry_of(ended)).failure is None


@pytest.mark.slow
def test_a_hung_worker_that_was_replaced_ends_when_it_comes_back(crew: Crew) -> None:
    old = crew.part["a"]
    family = old.family
    for process in family:
        process.send_signal(signal.SIGSTOP)
    crew.part["a"] = crew.start_node("a")
    crew.wait_ready(crew.part["a"])
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None
    session = crew.store.node("a").session
    for process in family:
        process.send_signal(signal.SIGCONT)
    wait_for("the old worker ends", lambda: old.process.poll() is not None)
    assert old.process.returncode == InputError.exit_code
    assert old.says("another worker has registered as this node")
    assert crew.part["a"].says("it is evicted")
    assert crew.store.node("a").session == session
    assert_gone(family)


@pytest.mark.slow
def test_a_worker_whose_child_hangs_ends_if_it_was_replaced(crew: Crew) -> None:
    old = crew.start_node("c", "127.0.0.3", IMPATIENT)
    crew.wait_ready(old)
    family = old.family
    for child in family[1:]:
        child.send_signal(signal.SIGSTOP)
    new = crew.start_node("c", "127.0.0.3")
    crew.wait_ready(new)
    session = crew.store.node("c").session
    wait_for("the old worker ends", lambda: old.process.poll() is not None)
    assert old.process.returncode == InputError.exit_code
    assert old.says("another worker has registered as this node: this one ends")
    assert_gone(family)
    assert crew.store.node("c").session == session
    assert new.end() == 0


def test_a_worker_whose_watch_is_stuck_starts_itself_again(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    code = f"""if True:
        import pathlib, sys, threading, time
        import workers.watchdog
        from workers.watchdog import Heartbeat
        mark = pathlib.Path({str(mark)!r})
        if mark.exists():
            sys.exit("the second start")
        mark.touch()
        workers.watchdog._STUCK_LOOK_S = 0.01
        workers.watchdog.Watchdog(
            Heartbeat(), threading.Event().wait, lambda: True, patience_s=60.0, quiet_after_s=-1.0
        ).start()
        time.sleep(60)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "the second start")
    assert "in waited_s" in ended.stderr


@pytest.mark.slow
def test_a_worker_whose_child_hangs_starts_itself_again(crew: Crew) -> None:
    worker = crew.start_tuner(*IMPATIENT, "--name", "impatient")
    crew.wait_ready(worker)
    for child in worker.children:
        child.send_signal(signal.SIGSTOP)
    stuck = worker.children
    wait_for("a new start", lambda: worker.log.count(" ready.") >= 2)
    assert worker.process.poll() is None
    assert_gone(stuck)
    assert worker.end() == 0


@pytest.mark.slow
def test_a_consumer_that_could_not_acknowledge_consumes_again(crew: Crew) -> None:
    job = crew.wait_measuring(crew.create_job(2, LONG))
    nodes = [crew.part[name] for name in ("a", "b")]
    children = [node.children for node in nodes]
    crew.broker.stop()
    for node in nodes:
        wait_for("a task that cannot be acknowledged", lambda each=node: each.says("Couldn't ack"))
    crew.broker.start()
    assert crew.wait_ended(job).failure is None
    for node in nodes:
        wait_for("a new connection", lambda each=node: each.says("the broker is back"))
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None
    assert [node.children for node in nodes] == children


def hostile_messages() -> list[bytes]:
    """What kombu or Celery would choke on, unpack or obey."""
    zeros = base64.b64encode(zlib.compress(bytes(100 << 20))).decode()
    return [
        b"\x00 nonsense",
        b"[" * 100_000,
        b'{"headers": []}',
        b"9" * 5000,
        *(json.dumps(each).encode() for each in (None, [], {}, {"headers": {}, "properties": None})),
        message(body=zeros, headers={"compression": "zlib"}),
        message(**{"content-encoding": "zlib"}),
        message(**{"content-type": "application/x-python-serialize"}),
        message(body=base64.b64encode(b"[" * 50_000).decode()),
        message(body=base64.b64encode(b'[[{"__type__": "uuid", "__value__": {}}], {}, {}]').decode()),
        message(body="no base64"),
        message(body="A" * (4 << 20)),
        message(body=None),
        message(headers={"task": ["autotune.run"]}),
        message(headers={"task": "os.system"}),
        message(headers={"id": "two\nlines"}),
        message(headers={"eta": "2100-01-01"}),
        message(headers={"timelimit": [1, 1]}),
        message(properties={"delivery_tag": {}}),
        message(properties={"delivery_info": None}),
        message(properties={"priority": "high"}),
        message(body=call("one", "two")),
        message(headers={"task": "autotune.run"}, body=call("job", "no token")),
    ]


def of_other_workers(task: str, *arguments: object) -> list[bytes]:
    """Good messages of a task that a worker does not have."""
    tags = ({"delivery_tag": f"t{number}"} for number in range(50))
    return [message(headers={"task": task}, body=call(*arguments), properties=tag) for tag in tags]


def call(*arguments: object) -> str:
    """The body of a message that asks for a task with these arguments."""
    return base64.b64encode(json.dumps([arguments, {}, {"callbacks": None}]).encode()).decode()


def message(
    *, headers: dict[str, object] | None = None, properties: dict[str, object] | None = None, **changes: object
) -> bytes:
    """A canary as it is sent, but for the changes."""
    route = {"exchange": "", "routing_key": "node.a"}
    found = {
        "body": call("session"),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": "autotune.canary", "id": "i", "lang": "py"} | (headers or {}),
        "properties": {"delivery_info": route, "body_encoding": "base64", "delivery_tag": "t"} | (properties or {}),
    }
    return json.dumps(found | changes).encode()


@pytest.mark.parametrize(
    ("name", "queue", "others"),
    [
        ("a", "node.a", of_other_workers("autotune.advance", "tuning")),
        ("tuner", TUNER_QUEUE, of_other_workers("autotune.run", "job", 1)),
    ],
)
def test_a_worker_goes_on_whatever_lies_in_its_queue(crew: Crew, name: str, queue: str, others: list[bytes]) -> None:
    worker, hostile = crew.part[name], [*hostile_messages(), *others]
    starts, children, before = worker.log.count(" ready."), worker.children, len(worker.log)
    assert fault_of(message()) == ""
    with crew.broker.client as client:
        client.lpush(queue, *hostile)

    def dropped() -> list[int]:
        return [int(count) for count in re.findall(r"dropped (\d+) messages: ", worker.log[before:])]

    wait_for("all are dropped", lambda: sum(dropped()) >= len(hostile))
    assert crew.wait_ended(crew.create_job(2, QUICK)).failure is None
    assert crew.wait_done(crew.submit(1))
    told = worker.log[before:]
    assert sum(dropped()) == len(hostile)
    assert len(dropped()) < 8, "not a line each"
    assert "is for another kind of worker" in told
    assert (worker.log.count(" ready."), worker.children) == (starts, children)
    assert "Traceback" not in told
    assert "ERROR" not in told
