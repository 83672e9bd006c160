"""The baseline: all tables as the first release makes them. Never edited: a change of the tables is a new revision.

It replaces the revisions 0001 to 0007, of before the first release, and has the newest one's name: a database that they
led to is one of this revision.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None

KEY, TEXT, COUNT, FLAG, MOMENT = sa.String(64), sa.Text(), sa.BigInteger(), sa.Boolean(), sa.DateTime(timezone=True)
FIGURE: sa.Double[float] = sa.Double()
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TABLES = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def upgrade() -> None:
    """Creates all tables, each after those that it refers to. Fails if there is one of these names."""
    TABLES.create_all(op.get_bind(), checkfirst=False)


def _table(name: str, primary: str, *parts: Any) -> None:
    sa.Table(name, TABLES, *parts, sa.PrimaryKeyConstraint(*primary.split()))


def _required(kind: Any, names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names.split()]


def _optional(kind: Any, names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names.split()]


def _refers(**targets: str) -> list[sa.ForeignKeyConstraint]:
    return [sa.ForeignKeyConstraint([column], [target]) for column, target in targets.items()]


def _indexes(*columns: str) -> list[sa.Index]:
    return [sa.Index(None, *names.split()) for names in columns]


def _partial(name: str, columns: str, where: str) -> sa.Index:
    condition, unique = sa.text(where), name.startswith("uq_")
    return sa.Index(name, *columns.split(), unique=unique, sqlite_where=condition, postgresql_where=condition)


_table(
    "api_keys",
    "id",
    *_required(KEY, "id role"),
    *_required(TEXT, "name secret_hash"),
    *_required(MOMENT, "created_at"),
    *_optional(MOMENT, "expires_at revoked_at"),
    sa.UniqueConstraint("secret_hash"),
    _partial("uq_api_keys_name_unrevoked", "name", "revoked_at IS NULL"),
)
_table(
    "clusters",
    "name",
    *_required(TEXT, "name spec_json"),
    *_required(KEY, "key"),
    *_required(MOMENT, "stored_at"),
)
_table(
    "counters",
    "name",
    *_required(KEY, "name"),
    *_required(COUNT, "value"),
)
_table(
    "fingerprints",
    "key",
    *_required(KEY, "key"),
    *_required(TEXT, "hostname device_name driver runtime collective_library torch spec_json"),
    *_required(COUNT, "device_count"),
    *_required(MOMENT, "stored_at"),
)
_table(
    "import_batches",
    "id",
    *_required(ROW_ID, "id"),
    *_required(TEXT, "source file_name"),
    *_required(KEY, "format sha256"),
    *_required(COUNT, "size_bytes"),
    *_required(MOMENT, "imported_at"),
    sa.UniqueConstraint("sha256"),
    *_indexes("source"),
)
_table(
    "models",
    "name",
    *_required(TEXT, "name spec_json"),
    *_required(KEY, "key"),
    *_required(MOMENT, "stored_at"),
)
_table(
    "nodes",
    "name",
    *_required(TEXT, "name pool address topology device_json fingerprint_key environment_key session reason"),
    *_required(TEXT, "world_id"),
    *_required(COUNT, "slots nics cores memory_bytes failures"),
    *_required(KEY, "state"),
    *_required(MOMENT, "registered_at heartbeat_at"),
    *_optional(MOMENT, "forgotten_at"),
    *_indexes("pool"),
)
_table(
    "spec_documents",
    "digest",
    *_required(KEY, "digest"),
    *_required(TEXT, "spec_json"),
)
_table(
    "tunings",
    "id",
    *_required(KEY, "id model_key cluster_key workload_key dtype state"),
    *_required(TEXT, "model_name model_json cluster_name cluster_json workload_json space_json budget_json"),
    *_required(TEXT, "message stop_reason owner"),
    *_required(COUNT, "devices seq_len global_batch seed"),
    *_required(FLAG, "cold"),
    *_optional(TEXT, "sharing_key"),
    *_optional(MOMENT, "claimed_at claim_expires_at advanced_at"),
    *_required(FIGURE, "gpu_s_spent"),
    *_required(MOMENT, "created_at updated_at"),
    sa.Column("sampler", KEY, nullable=False, server_default="plan"),
    sa.Column("history", TEXT, nullable=False, server_default=""),
    sa.Column("pool", TEXT, nullable=False, server_default=""),
    sa.Column("principal", TEXT, nullable=False, server_default=""),
    _partial("uq_tunings_sharing_key_live", "sharing_key", "state NOT IN ('done', 'failed', 'cancelled')"),
    *_indexes("created_at", "model_key cluster_key workload_key", "principal created_at", "state created_at"),
)
_table(
    "best_known",
    "id",
    *_required(ROW_ID, "id"),
    *_required(TEXT, "model_name cluster_name device_name plan_key plan_json memory_source reason source"),
    *_required(KEY, "model_key model_digest cluster_key cluster_digest workload_key workload_digest dtype"),
    *_required(KEY, "fingerprint_key environment_key"),
    *_required(FIGURE, "parameters tokens_per_s_per_gpu interval_low_tokens_per_s_per_gpu"),
    *_required(FIGURE, "interval_high_tokens_per_s_per_gpu"),
    *_required(COUNT, "gpus_per_node devices seq_len global_batch repeats"),
    *_optional(COUNT, "peak_bytes"),
    *_optional(TEXT, "runner_up_json"),
    *_optional(KEY, "tuning_id"),
    *_required(MOMENT, "measured_at"),
    *_optional(MOMENT, "superseded_at"),
    *_refers(
        cluster_digest="spec_documents.digest",
        model_digest="spec_documents.digest",
        workload_digest="spec_documents.digest",
    ),
    sa.Index("ix_best_known_cluster_name", "cluster_name", "id"),
    sa.Index("ix_best_known_model_name", "model_name", "id"),
    sa.Index("ix_best_known_question", "model_key", "cluster_key", "workload_key"),
    _partial("ix_best_known_same_model", "model_key device_name dtype devices seq_len", "superseded_at IS NULL"),
    _partial("ix_best_known_siblings", "device_name dtype parameters", "superseded_at IS NULL"),
    _partial(
        "uq_best_known_current", "model_key cluster_key workload_key environment_key source", "superseded_at IS NULL"
    ),
)
_table(
    "collective_summaries",
    "id",
    *_required(ROW_ID, "id"),
    *_required(KEY, "cluster_key fingerprint_key op"),
    *_required(COUNT, "group_size stride size_bytes count"),
    *_required(FIGURE, "time_s time_least_s time_most_s"),
    *_required(MOMENT, "first_at last_at"),
    *_refers(fingerprint_key="fingerprints.key"),
    *_indexes("cluster_key fingerprint_key"),
)
_table(
    "idempotency_keys",
    "principal key",
    *_required(TEXT, "principal key request_digest"),
    *_required(KEY, "tuning_id"),
    *_required(MOMENT, "created_at"),
    *_refers(tuning_id="tunings.id"),
)
_table(
    "imported_readings",
    "id",
    *_required(ROW_ID, "id batch_id"),
    *_required(TEXT, "source place cluster_json"),
    *_required(KEY, "cluster_key op"),
    *_required(COUNT, "group_size stride size_bytes iterations"),
    *_required(FIGURE, "time_s time_p10_s time_p90_s algbw_bytes_per_s busbw_bytes_per_s"),
    *_refers(batch_id="import_batches.id"),
    *_indexes("batch_id", "source cluster_key"),
)
_table(
    "imported_runs",
    "id",
    *_required(ROW_ID, "id batch_id"),
    *_required(TEXT, "source place run_group model_name model_json cluster_name cluster_json workload_json"),
    *_required(TEXT, "plan_key plan_json"),
    *_required(KEY, "framework model_key cluster_key workload_key recompute schedule"),
    *_required(COUNT, "devices steps tp pp dp cp ep vpp micro_batch zero_stage"),
    *_optional(FIGURE, "tokens_per_s_per_gpu interval_low_tokens_per_s_per_gpu"),
    *_optional(FIGURE, "interval_high_tokens_per_s_per_gpu"),
    *_optional(COUNT, "peak_reserved_bytes peak_allocated_bytes failure_rank failure_stage"),
    *_required(FLAG, "sequence_parallel"),
    *_optional(KEY, "failure_kind"),
    *_optional(TEXT, "failure_message failure_log_path failure_log_tail"),
    *_refers(batch_id="import_batches.id"),
    *_indexes("batch_id", "model_key cluster_key workload_key", "source"),
)
_table(
    "node_incidents",
    "id",
    *_required(ROW_ID, "id"),
    *_required(TEXT, "node kind message job_id"),
    *_required(MOMENT, "at"),
    *_refers(node="nodes.name"),
    *_indexes("node id"),
)
_table(
    "probe_runs",
    "id",
    *_required(KEY, "id cluster_key kind"),
    *_optional(KEY, "tuning_id fingerprint_key failure_kind"),
    *_required(TEXT, "cluster_json request_json"),
    *_required(FIGURE, "wall_s gpu_s setup_s"),
    *_optional(TEXT, "log_path failure_message failure_log_path failure_log_tail"),
    *_required(MOMENT, "finished_at"),
    *_optional(COUNT, "failure_rank failure_stage"),
    *_refers(fingerprint_key="fingerprints.key", tuning_id="tunings.id"),
    *_indexes("cluster_key fingerprint_key", "cluster_key finished_at", "finished_at", "tuning_id"),
)
_table(
    "profiles",
    "id",
    *_required(ROW_ID, "id"),
    *_required(KEY, "cluster_key"),
    *_optional(KEY, "fingerprint_key"),
    *_optional(FIGURE, "compute_flops_per_s compute_launch_s"),
    *_required(FIGURE, "step_scale step_overhead_s memory_overhead_bytes memory_scale"),
    *_required(COUNT, "step_scale_trials"),
    *_required(TEXT, "spec_json"),
    *_required(MOMENT, "stored_at"),
    *_refers(fingerprint_key="fingerprints.key"),
    *_indexes("cluster_key fingerprint_key"),
)
_table(
    "tuning_events",
    "id",
    *_required(ROW_ID, "id"),
    *_required(KEY, "tuning_id kind"),
    *_required(MOMENT, "at"),
    *_required(TEXT, "data_json"),
    *_refers(tuning_id="tunings.id"),
    *_indexes("tuning_id id"),
)
_table(
    "tuning_interests",
    "tuning_id principal",
    *_required(KEY, "tuning_id"),
    *_required(TEXT, "principal"),
    *_refers(tuning_id="tunings.id"),
)
_table(
    "tuning_trials",
    "id",
    *_required(KEY, "id tuning_id state recompute schedule"),
    *_required(COUNT, "number tp pp dp cp ep vpp micro_batch zero_stage"),
    *_optional(TEXT, "estimate_json failure_message failure_log_path failure_log_tail"),
    *_optional(FIGURE, "estimate_step_time_s estimate_tokens_per_s_per_gpu estimate_peak_memory_bytes"),
    *_optional(KEY, "fingerprint_key failure_kind"),
    *_required(FIGURE, "gpu_s setup_s"),
    *_required(TEXT, "owner plan_key plan_json"),
    *_required(MOMENT, "started_at"),
    *_optional(MOMENT, "finished_at"),
    *_required(FLAG, "sequence_parallel"),
    *_optional(COUNT, "failure_rank failure_stage"),
    *_refers(fingerprint_key="fingerprints.key", tuning_id="tunings.id"),
    sa.UniqueConstraint("tuning_id", "number"),
    *_indexes("finished_at"),
)
_table(
    "collective_measurements",
    "id",
    *_required(ROW_ID, "id"),
    *_required(KEY, "probe_run_id cluster_key fingerprint_key op"),
    *_required(COUNT, "group_size stride size_bytes iterations"),
    *_required(FIGURE, "time_s time_p10_s time_p90_s algbw_bytes_per_s busbw_bytes_per_s"),
    *_refers(fingerprint_key="fingerprints.key", probe_run_id="probe_runs.id"),
    sa.Index(
        "ix_collective_measurements_kind", "cluster_key", "fingerprint_key", "op", "group_size", "stride", "size_bytes"
    ),
    *_indexes("cluster_key id", "probe_run_id"),
)
_table(
    "jobs",
    "id",
    *_required(KEY, "id purpose state"),
    *_required(TEXT, "pool cluster_json request_json principal environment_key only_node avoid_json world_id"),
    *_required(TEXT, "endpoint message"),
    *_required(COUNT, "devices attempt token"),
    *_optional(KEY, "tuning_id trial_id failure_kind"),
    *_required(FIGURE, "deadline_s"),
    *_required(FLAG, "cancelled warm"),
    *_optional(TEXT, "progress_json"),
    *_required(MOMENT, "created_at"),
    *_optional(MOMENT, "granted_at ended_at"),
    *_refers(trial_id="tuning_trials.id", tuning_id="tunings.id"),
    *_indexes("ended_at", "pool state created_at id", "state created_at id", "tuning_id ended_at"),
)
_table(
    "layer_measurements",
    "id",
    *_required(ROW_ID, "id"),
    *_required(KEY, "probe_run_id cluster_key fingerprint_key model_key workload_key part recompute"),
    *_required(COUNT, "tp micro_batch iterations saved_bytes peak_bytes parameter_bytes"),
    *_required(FLAG, "sequence_parallel"),
    *_required(FIGURE, "forward_s backward_s forward_p10_s forward_p90_s backward_p10_s backward_p90_s"),
    *_required(FIGURE, "forward_calc_s backward_calc_s"),
    *_required(TEXT, "memory_source"),
    *_refers(fingerprint_key="fingerprints.key", probe_run_id="probe_runs.id"),
    *_indexes("cluster_key fingerprint_key model_key workload_key", "cluster_key id", "probe_run_id"),
)
_table(
    "regression_checks",
    "id",
    *_required(KEY, "id series cluster_key fingerprint_key environment_key state"),
    *_required(ROW_ID, "entry_id"),
    *_required(TEXT, "pool owner"),
    *_optional(FIGURE, "budget_gpu_s effect"),
    *_required(FIGURE, "gpu_s"),
    *_required(MOMENT, "started_at"),
    *_optional(MOMENT, "ended_at"),
    *_optional(KEY, "verdict cause tuning_id"),
    *_optional(TEXT, "result_json"),
    *_refers(entry_id="best_known.id", tuning_id="tunings.id"),
    _partial("uq_regression_checks_running", "series", "state = 'running'"),
    *_indexes("cluster_key started_at", "series started_at", "started_at"),
)
_table(
    "step_measurements",
    "id",
    *_required(ROW_ID, "id"),
    *_optional(KEY, "trial_id probe_run_id"),
    *_required(KEY, "cluster_key fingerprint_key"),
    *_required(FIGURE, "tokens_per_s_per_gpu interval_low_tokens_per_s_per_gpu"),
    *_required(FIGURE, "interval_high_tokens_per_s_per_gpu step_time_s setup_s"),
    *_required(COUNT, "repeats peak_allocated_bytes peak_reserved_bytes"),
    *_required(FLAG, "steady pruned"),
    *_optional(FIGURE, "traced_step_s t_calc_s t_comm_s t_comm_exposed_s mu mfu"),
    *_required(TEXT, "memory_source"),
    *_refers(fingerprint_key="fingerprints.key", probe_run_id="probe_runs.id", trial_id="tuning_trials.id"),
    sa.UniqueConstraint("trial_id"),
    sa.CheckConstraint("(trial_id IS NULL) <> (probe_run_id IS NULL)", name="one_origin"),
    *_indexes("cluster_key fingerprint_key", "cluster_key id", "probe_run_id"),
)
_table(
    "job_members",
    "job_id number",
    *_required(KEY, "job_id state"),
    *_required(COUNT, "number"),
    *_required(TEXT, "node address"),
    *_required(MOMENT, "expires_at"),
    *_optional(KEY, "failure_kind"),
    *_optional(TEXT, "report_json"),
    *_refers(job_id="jobs.id", node="nodes.name"),
    sa.UniqueConstraint("job_id", "node"),
    *_indexes("state expires_at"),
)
_table(
    "leases",
    "node",
    *_required(TEXT, "node"),
    *_required(KEY, "job_id"),
    *_required(COUNT, "token"),
    *_refers(job_id="jobs.id", node="nodes.name"),
    *_indexes("job_id"),
)
_table(
    "rank_measurements",
    "id",
    *_required(ROW_ID, "id step_measurement_id"),
    *_required(COUNT, "rank stage peak_allocated_bytes peak_reserved_bytes"),
    *_required(TEXT, "hostname"),
    *_optional(FIGURE, "t_calc_s t_comm_s t_comm_exposed_s"),
    *_refers(step_measurement_id="step_measurements.id"),
    sa.UniqueConstraint("step_measurement_id", "rank"),
)
_table(
    "regression_incidents",
    "id",
    *_required(ROW_ID, "id"),
    *_required(TEXT, "key subject message"),
    *_required(KEY, "kind check_id"),
    *_required(MOMENT, "opened_at"),
    *_optional(MOMENT, "recovered_at"),
    *_refers(check_id="regression_checks.id"),
    _partial("uq_regression_incidents_open", "key", "recovered_at IS NULL"),
    *_indexes("opened_at"),
)
_table(
    "regression_measurements",
    "check_id number",
    *_required(KEY, "check_id role"),
    *_required(COUNT, "number"),
    *_optional(FIGURE, "speed"),
    *_required(MOMENT, "at"),
    *_required(TEXT, "spec_json"),
    *_refers(check_id="regression_checks.id"),
)
_table(
    "sample_summaries",
    "step_measurement_id series",
    *_required(ROW_ID, "step_measurement_id"),
    *_required(KEY, "series"),
    *_required(COUNT, "count"),
    *_required(FIGURE, "mean least median most first last"),
    *_refers(step_measurement_id="step_measurements.id"),
)
_table(
    "step_samples",
    "step_measurement_id series number",
    *_required(ROW_ID, "step_measurement_id"),
    *_required(KEY, "series"),
    *_required(COUNT, "number"),
    *_required(FIGURE, "value"),
    *_refers(step_measurement_id="step_measurements.id"),
)
_table(
    "rank_comm_times",
    "rank_measurement_id op",
    *_required(ROW_ID, "rank_measurement_id"),
    *_required(TEXT, "op"),
    *_required(FIGURE, "time_s"),
    *_refers(rank_measurement_id="rank_measurements.id"),
)
_table(
    "regression_alerts",
    "key",
    *_required(KEY, "key event channel"),
    *_required(ROW_ID, "incident_id"),
    *_required(MOMENT, "at due_at"),
    *_required(COUNT, "attempts"),
    *_optional(MOMENT, "sent_at"),
    *_required(TEXT, "error"),
    *_refers(incident_id="regression_incidents.id"),
    _partial("ix_regression_alerts_due", "due_at", "sent_at IS NULL"),
)
_table(
    "regression_incident_series",
    "id",
    *_required(ROW_ID, "id incident_id entry_id"),
    *_required(KEY, "series"),
    *_optional(MOMENT, "recovered_at"),
    *_refers(entry_id="best_known.id", incident_id="regression_incidents.id"),
    sa.UniqueConstraint("incident_id", "series"),
    _partial("uq_regression_incident_series_open", "series", "recovered_at IS NULL"),
)
