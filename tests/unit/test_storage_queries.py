"""The queries that grow with the history use indexes: asked of SQLite's own planner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event
from store_records import CLUSTER, MODEL, WORKLOAD, tuning

from storage import SqlStore, open_store

QUERIES: dict[str, Callable[[SqlStore], object]] = {
    "best_trials": lambda store: store.best_trials(MODEL, CLUSTER, WORKLOAD),
    "trials": lambda store: store.trials("tuning-1"),
    "tunings": lambda store: store.tunings(),
    "collective_readings": lambda store: store.collective_readings("c", "f"),
    "layer_readings": lambda store: store.layer_readings("c", "f", "m", "w"),
    "profile": lambda store: store.profile("c"),
    "profile under a fingerprint": lambda store: store.profile("c", "f"),
}


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_scans_a_table_and_readings_are_not_sorted(tmp_path: Path, query: str) -> None:
    sent: list[tuple[str, Any]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: Any, *_rest: object) -> None:
        if statement.startswith("SELECT"):
            sent.append((statement, parameters))

    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        store.create_tuning(tuning())
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
    scans = [plan for plan in plans if plan.startswith("SCAN") and "USING INDEX ix_tunings_created_at" not in plan]
    sorts = [plan for plan in plans if "TEMP B-TREE" in plan]
    assert scans == []
    assert sorts == [] or query in {"best_trials", "tunings", "profile"}
