"""The first released schema. Never edited: a later change of the tables is a new revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

KEY = sa.String(length=64)
COUNT = sa.BigInteger()
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FIGURE: sa.Double[float] = sa.Double()
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Creates all tables, each after those that it refers to."""
    _clusters()
    _fingerprints()
    _models()
    _tunings()
    _probe_runs()
    _profiles()
    _tuning_trials()
    _collective_measurements()
    _layer_measurements()
    _step_measurements()
    _rank_measurements()
    _step_samples()
    _rank_comm_times()


def _clusters() -> None:
    op.create_table(
        "clusters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("stored_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_clusters")),
    )


def _fingerprints() -> None:
    op.create_table(
        "fingerprints",
        sa.Column("key", KEY, nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("device_count", COUNT, nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("runtime", sa.Text(), nullable=False),
        sa.Column("collective_library", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("stored_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_fingerprints")),
    )


def _models() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("stored_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )


def _tunings() -> None:
    op.create_table(
        "tunings",
        sa.Column("id", KEY, nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("model_key", KEY, nullable=False),
        sa.Column("model_json", sa.Text(), nullable=False),
        sa.Column("cluster_name", sa.Text(), nullable=False),
        sa.Column("cluster_key", KEY, nullable=False),
        sa.Column("cluster_json", sa.Text(), nullable=False),
        sa.Column("devices", COUNT, nullable=False),
        sa.Column("workload_key", KEY, nullable=False),
        sa.Column("workload_json", sa.Text(), nullable=False),
        sa.Column("seq_len", COUNT, nullable=False),
        sa.Column("global_batch", COUNT, nullable=False),
        sa.Column("dtype", KEY, nullable=False),
        sa.Column("space_json", sa.Text(), nullable=False),
        sa.Column("budget_json", sa.Text(), nullable=False),
        sa.Column("seed", COUNT, nullable=False),
        sa.Column("cold", sa.Boolean(), nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("gpu_s_spent", FIGURE, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tunings")),
    )
    op.create_index(op.f("ix_tunings_created_at"), "tunings", ["created_at"], unique=False)
    op.create_index(
        op.f("ix_tunings_model_key_cluster_key_workload_key"),
        "tunings",
        ["model_key", "cluster_key", "workload_key"],
        unique=False,
    )


def _probe_runs() -> None:
    op.create_table(
        "probe_runs",
        sa.Column("id", KEY, nullable=False),
        sa.Column("tuning_id", KEY, nullable=True),
        sa.Column("cluster_key", KEY, nullable=False),
        sa.Column("cluster_json", sa.Text(), nullable=False),
        sa.Column("fingerprint_key", KEY, nullable=True),
        sa.Column("kind", KEY, nullable=False),
        sa.Column("request_json", sa.Text(), nullable=False),
        sa.Column("wall_s", FIGURE, nullable=False),
        sa.Column("gpu_s", FIGURE, nullable=False),
        sa.Column("setup_s", FIGURE, nullable=False),
        sa.Column("log_path", sa.Text(), nullable=True),
        sa.Column("finished_at", MOMENT, nullable=False),
        sa.Column("failure_kind", KEY, nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("failure_rank", COUNT, nullable=True),
        sa.Column("failure_stage", COUNT, nullable=True),
        sa.Column("failure_log_path", sa.Text(), nullable=True),
        sa.Column("failure_log_tail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_probe_runs_fingerprint_key")),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_probe_runs_tuning_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probe_runs")),
    )
    op.create_index(
        op.f("ix_probe_runs_cluster_key_fingerprint_key"),
        "probe_runs",
        ["cluster_key", "fingerprint_key"],
        unique=False,
    )
    op.create_index(op.f("ix_probe_runs_tuning_id"), "probe_runs", ["tuning_id"], unique=False)


def _profiles() -> None:
    op.create_table(
        "profiles",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("cluster_key", KEY, nullable=False),
        sa.Column("fingerprint_key", KEY, nullable=True),
        sa.Column("compute_flops_per_s", FIGURE, nullable=True),
        sa.Column("compute_launch_s", FIGURE, nullable=True),
        sa.Column("step_scale", FIGURE, nullable=False),
        sa.Column("step_scale_trials", COUNT, nullable=False),
        sa.Column("step_overhead_s", FIGURE, nullable=False),
        sa.Column("memory_overhead_bytes", FIGURE, nullable=False),
        sa.Column("memory_scale", FIGURE, nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("stored_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_profiles_fingerprint_key")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profiles")),
    )
    op.create_index(
        op.f("ix_profiles_cluster_key_fingerprint_key"), "profiles", ["cluster_key", "fingerprint_key"], unique=False
    )


def _tuning_trials() -> None:
    op.create_table(
        "tuning_trials",
        sa.Column("id", KEY, nullable=False),
        sa.Column("tuning_id", KEY, nullable=False),
        sa.Column("number", COUNT, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("estimate_json", sa.Text(), nullable=True),
        sa.Column("estimate_step_time_s", FIGURE, nullable=True),
        sa.Column("estimate_tokens_per_s_per_gpu", FIGURE, nullable=True),
        sa.Column("estimate_peak_memory_bytes", FIGURE, nullable=True),
        sa.Column("fingerprint_key", KEY, nullable=True),
        sa.Column("gpu_s", FIGURE, nullable=False),
        sa.Column("setup_s", FIGURE, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.Column("plan_key", sa.Text(), nullable=False),
        sa.Column("plan_json", sa.Text(), nullable=False),
        sa.Column("tp", COUNT, nullable=False),
        sa.Column("pp", COUNT, nullable=False),
        sa.Column("dp", COUNT, nullable=False),
        sa.Column("cp", COUNT, nullable=False),
        sa.Column("ep", COUNT, nullable=False),
        sa.Column("vpp", COUNT, nullable=False),
        sa.Column("micro_batch", COUNT, nullable=False),
        sa.Column("zero_stage", COUNT, nullable=False),
        sa.Column("recompute", KEY, nullable=False),
        sa.Column("sequence_parallel", sa.Boolean(), nullable=False),
        sa.Column("schedule", KEY, nullable=False),
        sa.Column("failure_kind", KEY, nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("failure_rank", COUNT, nullable=True),
        sa.Column("failure_stage", COUNT, nullable=True),
        sa.Column("failure_log_path", sa.Text(), nullable=True),
        sa.Column("failure_log_tail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_tuning_trials_fingerprint_key")
        ),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_tuning_trials_tuning_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tuning_trials")),
        sa.UniqueConstraint("tuning_id", "number", name=op.f("uq_tuning_trials_tuning_id_number")),
    )


def _collective_measurements() -> None:
    op.create_table(
        "collective_measurements",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("probe_run_id", KEY, nullable=False),
        sa.Column("cluster_key", KEY, nullable=False),
        sa.Column("fingerprint_key", KEY, nullable=False),
        sa.Column("op", KEY, nullable=False),
        sa.Column("group_size", COUNT, nullable=False),
        sa.Column("stride", COUNT, nullable=False),
        sa.Column("size_bytes", COUNT, nullable=False),
        sa.Column("iterations", COUNT, nullable=False),
        sa.Column("time_s", FIGURE, nullable=False),
        sa.Column("time_p10_s", FIGURE, nullable=False),
        sa.Column("time_p90_s", FIGURE, nullable=False),
        sa.Column("algbw_bytes_per_s", FIGURE, nullable=False),
        sa.Column("busbw_bytes_per_s", FIGURE, nullable=False),
        sa.ForeignKeyConstraint(
            ["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_collective_measurements_fingerprint_key")
        ),
        sa.ForeignKeyConstraint(
            ["probe_run_id"], ["probe_runs.id"], name=op.f("fk_collective_measurements_probe_run_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collective_measurements")),
    )
    op.create_index(
        op.f("ix_collective_measurements_cluster_key_fingerprint_key"),
        "collective_measurements",
        ["cluster_key", "fingerprint_key"],
        unique=False,
    )
    op.create_index(
        op.f("ix_collective_measurements_probe_run_id"), "collective_measurements", ["probe_run_id"], unique=False
    )


def _layer_measurements() -> None:
    op.create_table(
        "layer_measurements",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("probe_run_id", KEY, nullable=False),
        sa.Column("cluster_key", KEY, nullable=False),
        sa.Column("fingerprint_key", KEY, nullable=False),
        sa.Column("model_key", KEY, nullable=False),
        sa.Column("workload_key", KEY, nullable=False),
        sa.Column("part", KEY, nullable=False),
        sa.Column("tp", COUNT, nullable=False),
        sa.Column("micro_batch", COUNT, nullable=False),
        sa.Column("recompute", KEY, nullable=False),
        sa.Column("sequence_parallel", sa.Boolean(), nullable=False),
        sa.Column("iterations", COUNT, nullable=False),
        sa.Column("forward_s", FIGURE, nullable=False),
        sa.Column("backward_s", FIGURE, nullable=False),
        sa.Column("forward_p10_s", FIGURE, nullable=False),
        sa.Column("forward_p90_s", FIGURE, nullable=False),
        sa.Column("backward_p10_s", FIGURE, nullable=False),
        sa.Column("backward_p90_s", FIGURE, nullable=False),
        sa.Column("forward_calc_s", FIGURE, nullable=False),
        sa.Column("backward_calc_s", FIGURE, nullable=False),
        sa.Column("saved_bytes", COUNT, nullable=False),
        sa.Column("peak_bytes", COUNT, nullable=False),
        sa.Column("parameter_bytes", COUNT, nullable=False),
        sa.Column("memory_source", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_layer_measurements_fingerprint_key")
        ),
        sa.ForeignKeyConstraint(["probe_run_id"], ["probe_runs.id"], name=op.f("fk_layer_measurements_probe_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_layer_measurements")),
    )
    op.create_index(
        op.f("ix_layer_measurements_cluster_key_fingerprint_key_model_key_workload_key"),
        "layer_measurements",
        ["cluster_key", "fingerprint_key", "model_key", "workload_key"],
        unique=False,
    )
    op.create_index(op.f("ix_layer_measurements_probe_run_id"), "layer_measurements", ["probe_run_id"], unique=False)


def _step_measurements() -> None:
    op.create_table(
        "step_measurements",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("trial_id", KEY, nullable=True),
        sa.Column("probe_run_id", KEY, nullable=True),
        sa.Column("cluster_key", KEY, nullable=False),
        sa.Column("fingerprint_key", KEY, nullable=False),
        sa.Column("tokens_per_s_per_gpu", FIGURE, nullable=False),
        sa.Column("interval_low_tokens_per_s_per_gpu", FIGURE, nullable=False),
        sa.Column("interval_high_tokens_per_s_per_gpu", FIGURE, nullable=False),
        sa.Column("repeats", COUNT, nullable=False),
        sa.Column("step_time_s", FIGURE, nullable=False),
        sa.Column("steady", sa.Boolean(), nullable=False),
        sa.Column("traced_step_s", FIGURE, nullable=True),
        sa.Column("t_calc_s", FIGURE, nullable=True),
        sa.Column("t_comm_s", FIGURE, nullable=True),
        sa.Column("t_comm_exposed_s", FIGURE, nullable=True),
        sa.Column("mu", FIGURE, nullable=True),
        sa.Column("mfu", FIGURE, nullable=True),
        sa.Column("peak_allocated_bytes", COUNT, nullable=False),
        sa.Column("peak_reserved_bytes", COUNT, nullable=False),
        sa.Column("memory_source", sa.Text(), nullable=False),
        sa.Column("pruned", sa.Boolean(), nullable=False),
        sa.Column("setup_s", FIGURE, nullable=False),
        sa.CheckConstraint(
            "(trial_id IS NULL) <> (probe_run_id IS NULL)", name=op.f("ck_step_measurements_one_origin")
        ),
        sa.ForeignKeyConstraint(
            ["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_step_measurements_fingerprint_key")
        ),
        sa.ForeignKeyConstraint(["probe_run_id"], ["probe_runs.id"], name=op.f("fk_step_measurements_probe_run_id")),
        sa.ForeignKeyConstraint(["trial_id"], ["tuning_trials.id"], name=op.f("fk_step_measurements_trial_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_step_measurements")),
        sa.UniqueConstraint("trial_id", name=op.f("uq_step_measurements_trial_id")),
    )
    op.create_index(
        op.f("ix_step_measurements_cluster_key_fingerprint_key"),
        "step_measurements",
        ["cluster_key", "fingerprint_key"],
        unique=False,
    )
    op.create_index(op.f("ix_step_measurements_probe_run_id"), "step_measurements", ["probe_run_id"], unique=False)


def _rank_measurements() -> None:
    op.create_table(
        "rank_measurements",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("step_measurement_id", ROW_ID, nullable=False),
        sa.Column("rank", COUNT, nullable=False),
        sa.Column("stage", COUNT, nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("t_calc_s", FIGURE, nullable=True),
        sa.Column("t_comm_s", FIGURE, nullable=True),
        sa.Column("t_comm_exposed_s", FIGURE, nullable=True),
        sa.Column("peak_allocated_bytes", COUNT, nullable=False),
        sa.Column("peak_reserved_bytes", COUNT, nullable=False),
        sa.ForeignKeyConstraint(
            ["step_measurement_id"], ["step_measurements.id"], name=op.f("fk_rank_measurements_step_measurement_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rank_measurements")),
        sa.UniqueConstraint("step_measurement_id", "rank", name=op.f("uq_rank_measurements_step_measurement_id_rank")),
    )


def _step_samples() -> None:
    op.create_table(
        "step_samples",
        sa.Column("step_measurement_id", ROW_ID, nullable=False),
        sa.Column("series", KEY, nullable=False),
        sa.Column("number", COUNT, nullable=False),
        sa.Column("value", FIGURE, nullable=False),
        sa.ForeignKeyConstraint(
            ["step_measurement_id"], ["step_measurements.id"], name=op.f("fk_step_samples_step_measurement_id")
        ),
        sa.PrimaryKeyConstraint("step_measurement_id", "series", "number", name=op.f("pk_step_samples")),
    )


def _rank_comm_times() -> None:
    op.create_table(
        "rank_comm_times",
        sa.Column("rank_measurement_id", ROW_ID, nullable=False),
        sa.Column("op", sa.Text(), nullable=False),
        sa.Column("time_s", FIGURE, nullable=False),
        sa.ForeignKeyConstraint(
            ["rank_measurement_id"], ["rank_measurements.id"], name=op.f("fk_rank_comm_times_rank_measurement_id")
        ),
        sa.PrimaryKeyConstraint("rank_measurement_id", "op", name=op.f("pk_rank_comm_times")),
    )
