"""What the database role of a node may do: its jobs, and nothing else. PostgreSQL only."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text

from autotune.errors import InputError
from storage.database.engine import build_engine, locate, translated
from storage.database.schema import VERSION_TABLE, require_current

# A node's worker registers itself, runs its share of jobs under leases, and whoever reports last ends the job: stores
# what was measured, tells it in the tuning's log, charges the tuning, and grants the nodes that are free now.
_NEW_ROWS = "SELECT, INSERT"
NODE_RIGHTS = {
    VERSION_TABLE: "SELECT",
    "clusters": "SELECT, INSERT, UPDATE",
    "fingerprints": _NEW_ROWS,
    "nodes": "SELECT, INSERT, UPDATE",
    "node_incidents": _NEW_ROWS,
    "jobs": "SELECT, INSERT, UPDATE",
    "job_members": "SELECT, INSERT, UPDATE",
    "leases": "SELECT, INSERT, DELETE",
    "counters": "SELECT, INSERT, UPDATE",
    "tunings": "SELECT, UPDATE (gpu_s_spent, updated_at)",
    "tuning_trials": "SELECT, UPDATE (state, gpu_s, setup_s, fingerprint_key, finished_at, failure_kind, "
    "failure_message, failure_rank, failure_stage, failure_log_path, failure_log_tail)",
    "tuning_events": _NEW_ROWS,
    "probe_runs": _NEW_ROWS,
    "collective_measurements": _NEW_ROWS,
    "layer_measurements": _NEW_ROWS,
    "step_measurements": _NEW_ROWS,
    "step_samples": _NEW_ROWS,
    "rank_measurements": _NEW_ROWS,
    "rank_comm_times": _NEW_ROWS,
}
# Those whose ids PostgreSQL counts.
_COUNTED = (
    "node_incidents", "tuning_events", "collective_measurements", "layer_measurements", "step_measurements",
    "rank_measurements",
)  # fmt: skip
_MASTERS = "SELECT pg_has_role(rolname, current_user, 'MEMBER') FROM pg_roles WHERE rolname = :role"


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a role may do in a database: the rights by table, as GRANT writes them."""

    database: str
    role: str
    rights: dict[str, str]


def grant_node(url: str, role: str) -> Granted:
    """Takes every right in our schema from a role, and gives it those of a node; all or nothing.

    Args:
        url: the database, as the owner of its tables. Its schema must be this release's.
        role: an existing role, neither a superuser nor a member of the owner's.

    Raises:
        InputError: not PostgreSQL, or no such role, or one that may do everything anyway.
        StoreError: no such server or database, or its schema is not this release's.
    """
    location = locate(url)
    if location.path is not None:
        raise InputError("--db", location.name, "only PostgreSQL has roles: give postgresql://USER@HOST/NAME")
    with translated(location):
        engine = build_engine(location, read_only=False)
        try:
            require_current(engine, location)
            with engine.begin() as connection:
                masters = connection.scalar(text(_MASTERS), {"role": role})
                if masters is None:
                    raise InputError("role", role, "a role of this server; deploy/postgres/roles.sql makes one")
                if masters:
                    raise InputError("role", role, "a role that is neither a superuser nor the owner's")
                quoted = engine.dialect.identifier_preparer.quote(role)
                schema = engine.dialect.identifier_preparer.quote(connection.scalar(text("SELECT current_schema()")))
                for kind in ("TABLES", "SEQUENCES"):
                    connection.exec_driver_sql(f"REVOKE ALL ON ALL {kind} IN SCHEMA {schema} FROM {quoted}")
                connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {quoted}")
                for table, rights in NODE_RIGHTS.items():
                    connection.exec_driver_sql(f"GRANT {rights} ON {schema}.{table} TO {quoted}")
                for table in _COUNTED:
                    connection.exec_driver_sql(f"GRANT USAGE ON SEQUENCE {schema}.{table}_id_seq TO {quoted}")
        finally:
            engine.dispose()
    return Granted(database=location.name, role=role, rights=dict(NODE_RIGHTS))
