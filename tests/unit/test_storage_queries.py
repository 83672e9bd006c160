"""The queries that grow with the history use indexes: asked of SQLite's own planner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_records import POOL, fleet_tuning, job, node
from sqlalchemy import Connection, event
from store_records import CLUSTER, MODEL, MOMENT, WORKLOAD, tuning

from autotune.specs import JobState
from storage import SqlStore, open_store

QUERIES: dict[str, Callable[[SqlStore], object]] = {
    "best_trials": lambda store: store.best_trials(MODEL, CLUSTER, WORKLOAD),
    "trials": lambda store: store.trials("tuning-1"),
    "tunings": lambda store: store.tunings(),
    "collective_readings": lambda store: store.collective_readings("c", "f"),
    "layer_readings": lambda store: store.layer_readings("c", "f", "m", "w"),
    "profile": lambda store: store.profile("c"),
    "profile under a fingerprint": lambda store: store.profile("c", "f"),
    "queued jobs of a pool": lambda store: store.jobs(pool=POOL, states=[JobState.QUEUED]),
    "queued_jobs": lambda store: store.queued_jobs(POOL, most_each=3),
    "queued jobs": lambda store: store.jobs(states=[JobState.QUEUED]),
    "jobs of a tuning": lambda store: store.jobs(tuning_id="tuning-1"),
    "unsent_members": lambda store: store.unsent_members(1.0),
    "expire_members": lambda store: store.expire_members(),
    "gpu_s_by_principal": lambda store: store.gpu_s_by_principal(MOMENT),
    "events": lambda store: store.events("tuning-1", after=7),
    "due_tunings": lambda store: store.due_tunings(),
    "admit_tunings": lambda store: store.admit_tunings(1),
    "next_turn": lambda store: store.next_turn("tuning-1"),
    "queue_places": lambda store: store.queue_places(["tuning-1"]),
    "abandoned_tunings": lambda store: store.abandoned_tunings(),
    "tunings_page": lambda store: store.tunings_page(limit=9, before="tuning-1"),
    "tunings_page of a principal": lambda store: store.tunings_page(limit=9, principal="ada"),
    "tunings_page of a state": lambda store: store.tunings_page(limit=9, state="done"),
    "measurements_page of steps": lambda store: store.measurements_page("step", cluster_key="c", after=7),
    "measurements_page of layers": lambda store: store.measurements_page("layer", cluster_key="c", after=7),
    "measurements_page of collectives": lambda store: store.measurements_page("collective", cluster_key="c", after=7),
    "keys_of": lambda store: store.keys_of(["hash", "other"]),
    "incidents": lambda store: store.incidents("a"),
    "grant": lambda store: store.grant("job-1", ["a"], lease_s=1.0, world_id="w", warm=False),
    "submit_tuning": lambda store: store.submit_tuning(fleet_tuning("new"), sharing_key="k", idempotency_key="i"),
    "cancel_job": lambda store: store.cancel_job("job-1"),
    "cancel_jobs": lambda store: store.cancel_jobs("tuning-1"),
    "cancel_tuning": lambda store: store.cancel_tuning("tuning-1", ["ada"], "enough"),
    "alike_jobs": lambda store: store.alike_jobs(job("job-2", tuning_id="tuning-1"), limit=9),
}
# Scans in the order of an index, which a limit ends; of the nodes of a fleet, which are few; of no table at all; and of
# the numbered rows of one queue, which an index found.
SCANNED = ("SCAN places", "SCAN (subquery", "USING INDEX ix_tunings_created_at", "SCAN nodes", "SCAN CONSTANT ROW")
# What is sorted there is a few rows: of one request, tuning or gang, those that live, or those of one moment; and the
# readings of one cluster, of which `db compact` keeps few of each kind.
SORTED = {"best_trials", "tunings", "profile", "jobs of a tuning", "due_tunings", "unsent_members", "grant"}
SORTED |= {"queued_jobs", "abandoned_tunings", "collective_readings", "submit_tuning"}
SORTED |= {"admit_tunings", "next_turn", "queue_places"}
SORTED |= {
    "alike_jobs",
    "cancel_jobs",
    "cancel_tuning",
    "expire_members",
    "tunings_page",
    "tunings_page of a principal",
    "tunings_page of a state",
}


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_scans_a_table_or_sorts_what_grows(tmp_path: Path, query: str) -> None:
    sent: list[tuple[str, Any]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: Any, *_rest: object) -> None:
        if statement.startswith("SELECT"):
            sent.append((statement, parameters))

    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        store.create_tuning(tuning())
        store.register_node(node("a"))
        store.create_job(job("job-1", tuning_id="tuning-1"))
        with store.reading() as session:
            event.listen(session.get_bind(), "before_cursor_execute", note)
        QUERIES[query](store)
        with store.reading() as session:
            connection = session.connection()
            plans = [
                row[3]
                for statement, parameters in list(sent)
                for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
    assert plans
    scans = [plan for plan in plans if plan.startswith("SCAN") and not any(few in plan for few in SCANNED)]
    sorts = [plan for plan in plans if "TEMP B-TREE" in plan]
    assert scans == []
    assert sorts == [] or query in SORTED
