"""The fleet: nodes, jobs, leases, the log of events, shared requests and API keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

KEY = sa.String(length=64)
TEXT = sa.Text()
COUNT = sa.BigInteger()
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FIGURE: sa.Double[float] = sa.Double()
MOMENT = sa.DateTime(timezone=True)
LIVE = sa.text("state NOT IN ('done', 'failed', 'cancelled')")
UNREVOKED = sa.text("revoked_at IS NULL")


def upgrade() -> None:
    """Creates the fleet's tables, each after those that it refers to; tunings learn of pools and claims."""
    _tunings()
    _nodes()
    _node_incidents()
    _jobs()
    _job_members()
    _leases()
    _counters()
    _tuning_events()
    _tuning_interests()
    _idempotency_keys()
    _api_keys()


def _tunings() -> None:
    op.add_column("tunings", sa.Column("pool", TEXT, server_default="", nullable=False))
    op.add_column("tunings", sa.Column("principal", TEXT, server_default="", nullable=False))
    op.add_column("tunings", sa.Column("sharing_key", TEXT, nullable=True))
    op.add_column("tunings", sa.Column("claimed_at", MOMENT, nullable=True))
    op.add_column("tunings", sa.Column("claim_expires_at", MOMENT, nullable=True))
    op.add_column("tunings", sa.Column("advanced_at", MOMENT, nullable=True))
    op.create_index(op.f("ix_tunings_principal_created_at"), "tunings", ["principal", "created_at"], unique=False)
    op.create_index(op.f("ix_tunings_state_created_at"), "tunings", ["state", "created_at"], unique=False)
    op.create_index(
        "uq_tunings_sharing_key_live", "tunings", ["sharing_key"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("pool", TEXT, nullable=False),
        sa.Column("address", TEXT, nullable=False),
        sa.Column("topology", TEXT, nullable=False),
        sa.Column("device_json", TEXT, nullable=False),
        sa.Column("slots", COUNT, nullable=False),
        sa.Column("nics", COUNT, nullable=False),
        sa.Column("cores", COUNT, nullable=False),
        sa.Column("memory_bytes", COUNT, nullable=False),
        sa.Column("fingerprint_key", TEXT, nullable=False),
        sa.Column("environment_key", TEXT, nullable=False),
        sa.Column("session", TEXT, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("failures", COUNT, nullable=False),
        sa.Column("world_id", TEXT, nullable=False),
        sa.Column("registered_at", MOMENT, nullable=False),
        sa.Column("heartbeat_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_nodes")),
    )
    op.create_index(op.f("ix_nodes_pool"), "nodes", ["pool"], unique=False)


def _node_incidents() -> None:
    op.create_table(
        "node_incidents",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("node", TEXT, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("message", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["node"], ["nodes.name"], name=op.f("fk_node_incidents_node")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node_incidents")),
    )
    op.create_index(op.f("ix_node_incidents_node_id"), "node_incidents", ["node", "id"], unique=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", KEY, nullable=False),
        sa.Column("purpose", KEY, nullable=False),
        sa.Column("pool", TEXT, nullable=False),
        sa.Column("cluster_json", TEXT, nullable=False),
        sa.Column("devices", COUNT, nullable=False),
        sa.Column("request_json", TEXT, nullable=False),
        sa.Column("tuning_id", KEY, nullable=True),
        sa.Column("trial_id", KEY, nullable=True),
        sa.Column("principal", TEXT, nullable=False),
        sa.Column("environment_key", TEXT, nullable=False),
        sa.Column("only_node", TEXT, nullable=False),
        sa.Column("avoid_json", TEXT, nullable=False),
        sa.Column("attempt", COUNT, nullable=False),
        sa.Column("deadline_s", FIGURE, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.Column("token", COUNT, nullable=False),
        sa.Column("world_id", TEXT, nullable=False),
        sa.Column("warm", sa.Boolean(), nullable=False),
        sa.Column("endpoint", TEXT, nullable=False),
        sa.Column("progress_json", TEXT, nullable=True),
        sa.Column("failure_kind", KEY, nullable=True),
        sa.Column("message", TEXT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("granted_at", MOMENT, nullable=True),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["trial_id"], ["tuning_trials.id"], name=op.f("fk_jobs_trial_id")),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_jobs_tuning_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_ended_at"), "jobs", ["ended_at"], unique=False)
    op.create_index(
        op.f("ix_jobs_pool_state_created_at_id"), "jobs", ["pool", "state", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_jobs_state_created_at_id"), "jobs", ["state", "created_at", "id"], unique=False)
    op.create_index(op.f("ix_jobs_tuning_id_ended_at"), "jobs", ["tuning_id", "ended_at"], unique=False)


def _job_members() -> None:
    op.create_table(
        "job_members",
        sa.Column("job_id", KEY, nullable=False),
        sa.Column("number", COUNT, nullable=False),
        sa.Column("node", TEXT, nullable=False),
        sa.Column("address", TEXT, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("failure_kind", KEY, nullable=True),
        sa.Column("report_json", TEXT, nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_members_job_id")),
        sa.ForeignKeyConstraint(["node"], ["nodes.name"], name=op.f("fk_job_members_node")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_job_members")),
        sa.UniqueConstraint("job_id", "node", name=op.f("uq_job_members_job_id_node")),
    )
    op.create_index(op.f("ix_job_members_state_expires_at"), "job_members", ["state", "expires_at"], unique=False)


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("node", TEXT, nullable=False),
        sa.Column("job_id", KEY, nullable=False),
        sa.Column("token", COUNT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_leases_job_id")),
        sa.ForeignKeyConstraint(["node"], ["nodes.name"], name=op.f("fk_leases_node")),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_job_id"), "leases", ["job_id"], unique=False)


def _counters() -> None:
    op.create_table(
        "counters",
        sa.Column("name", KEY, nullable=False),
        sa.Column("value", COUNT, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )


def _tuning_events() -> None:
    op.create_table(
        "tuning_events",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("tuning_id", KEY, nullable=False),
        sa.Column("kind", KEY, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("data_json", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_tuning_events_tuning_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tuning_events")),
    )
    op.create_index(op.f("ix_tuning_events_tuning_id_id"), "tuning_events", ["tuning_id", "id"], unique=False)


def _tuning_interests() -> None:
    op.create_table(
        "tuning_interests",
        sa.Column("tuning_id", KEY, nullable=False),
        sa.Column("principal", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_tuning_interests_tuning_id")),
        sa.PrimaryKeyConstraint("tuning_id", "principal", name=op.f("pk_tuning_interests")),
    )


def _idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("principal", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("request_digest", TEXT, nullable=False),
        sa.Column("tuning_id", KEY, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_idempotency_keys_tuning_id")),
        sa.PrimaryKeyConstraint("principal", "key", name=op.f("pk_idempotency_keys")),
    )


def _api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("role", KEY, nullable=False),
        sa.Column("secret_hash", TEXT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
    )
    op.create_index(
        "uq_api_keys_name_unrevoked",
        "api_keys",
        ["name"],
        unique=True,
        sqlite_where=UNREVOKED,
        postgresql_where=UNREVOKED,
    )
