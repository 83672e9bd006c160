"""The tables. Their names are free of those of Optuna's storage, which older releases kept in the same database.

Full specs are kept as canonical JSON (`*_json`) beside their keys; whatever was measured is a column. Every
measurement is keyed by its trial or probe run and by its fingerprint, never by position.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from storage.database.columns import Base, Free, FreeText, Key, Moment, RowId, UtcDateTime

# In the words of the index, so that both databases see that a query with it may use the index.
LIVE = "state NOT IN ('done', 'failed', 'cancelled')"


class ModelRow(Base):
    """A stored model, by name. `owner` is the principal who stored it; empty: whoever operates this."""

    __tablename__ = "models"

    name: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[Key]
    spec_json: Mapped[str]
    stored_at: Mapped[Moment]
    owner: Mapped[str] = mapped_column(server_default="")


class ClusterRow(Base):
    """A stored cluster, by name. `owner` as of a model."""

    __tablename__ = "clusters"

    name: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[Key]
    spec_json: Mapped[str]
    stored_at: Mapped[Moment]
    owner: Mapped[str] = mapped_column(server_default="")


class FingerprintRow(Base):
    """An environment that something was measured in."""

    __tablename__ = "fingerprints"

    key: Mapped[Key] = mapped_column(primary_key=True)
    hostname: Mapped[str]
    device_name: Mapped[str]
    device_count: Mapped[int]
    driver: Mapped[str]
    runtime: Mapped[str]
    collective_library: Mapped[str]
    torch: Mapped[str]
    spec_json: Mapped[str]
    stored_at: Mapped[Moment]


class TuningRow(Base):
    """A request. It keeps its own copy of the specs: a model replaced later does not change it.

    Of a fleet's tuning: `sharing_key` is that of equal requests, while they may join; `owner` may advance it until
    `claim_expires_at`; `advanced_at` is when the last advance began; the last `faults` ones failed with `fault`.
    """

    __tablename__ = "tunings"
    __table_args__ = (
        Index(None, "model_key", "cluster_key", "workload_key"),
        Index(None, "created_at"),
        Index(None, "state", "created_at"),
        Index(None, "principal", "created_at"),
        Index(
            "uq_tunings_sharing_key_live",
            "sharing_key",
            unique=True,
            sqlite_where=text(LIVE),
            postgresql_where=text(LIVE),
        ),
    )

    id: Mapped[Key] = mapped_column(primary_key=True)
    model_name: Mapped[str]
    model_key: Mapped[Key]
    model_json: Mapped[str]
    cluster_name: Mapped[str]
    cluster_key: Mapped[Key]
    cluster_json: Mapped[str]
    devices: Mapped[int]
    workload_key: Mapped[Key]
    workload_json: Mapped[str]
    seq_len: Mapped[int]
    global_batch: Mapped[int]
    dtype: Mapped[Key]
    space_json: Mapped[str]
    budget_json: Mapped[str]
    seed: Mapped[int]
    cold: Mapped[bool]
    sampler: Mapped[Key]
    history: Mapped[str] = mapped_column(server_default="")
    pool: Mapped[str] = mapped_column(server_default="")
    principal: Mapped[str] = mapped_column(server_default="")
    sharing_key: Mapped[str | None]
    claimed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    claim_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    advanced_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    fault: Mapped[Free] = mapped_column(server_default="")
    faults: Mapped[int] = mapped_column(server_default="0")
    state: Mapped[Key]
    message: Mapped[Free]
    stop_reason: Mapped[Free]
    owner: Mapped[str]
    gpu_s_spent: Mapped[float]
    created_at: Mapped[Moment]
    updated_at: Mapped[Moment]


class PlanColumns:
    """A plan: its canonical name, its fields to query by, and its JSON to read back."""

    plan_key: Mapped[str]
    plan_json: Mapped[str]
    tp: Mapped[int]
    pp: Mapped[int]
    dp: Mapped[int]
    cp: Mapped[int]
    ep: Mapped[int]
    vpp: Mapped[int]
    micro_batch: Mapped[int]
    zero_stage: Mapped[int]
    recompute: Mapped[Key]
    sequence_parallel: Mapped[bool]
    schedule: Mapped[Key]


class FailureColumns:
    """A failure; `failure_kind` is null where there was none."""

    failure_kind: Mapped[Key | None]
    failure_message: Mapped[str | None] = mapped_column(FreeText)
    failure_rank: Mapped[int | None]
    failure_stage: Mapped[int | None]
    failure_log_path: Mapped[str | None] = mapped_column(FreeText)
    failure_log_tail: Mapped[str | None] = mapped_column(FreeText)


class TrialRow(PlanColumns, FailureColumns, Base):
    """One plan that was really run. Its reading, if it has one, is the row of step_measurements with its id."""

    __tablename__ = "tuning_trials"
    __table_args__ = (UniqueConstraint("tuning_id", "number"), Index(None, "finished_at"))

    id: Mapped[Key] = mapped_column(primary_key=True)
    tuning_id: Mapped[Key] = mapped_column(ForeignKey("tunings.id"))
    number: Mapped[int]
    state: Mapped[Key]
    estimate_json: Mapped[str | None]
    estimate_step_time_s: Mapped[float | None]
    estimate_tokens_per_s_per_gpu: Mapped[float | None]
    estimate_peak_memory_bytes: Mapped[float | None]
    fingerprint_key: Mapped[Key | None] = mapped_column(ForeignKey("fingerprints.key"))
    gpu_s: Mapped[float]
    setup_s: Mapped[float]
    owner: Mapped[str]
    started_at: Mapped[Moment]
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    measurement: Mapped[StepRow | None] = relationship(uselist=False, lazy="selectin")


class ProbeRow(FailureColumns, Base):
    """One probe run outside a trial: what was asked for, what it cost, how it ended."""

    __tablename__ = "probe_runs"
    __table_args__ = (
        Index(None, "cluster_key", "fingerprint_key"),
        Index(None, "tuning_id"),
        Index(None, "cluster_key", "finished_at"),
        Index(None, "finished_at"),
    )

    id: Mapped[Key] = mapped_column(primary_key=True)
    tuning_id: Mapped[Key | None] = mapped_column(ForeignKey("tunings.id"))
    cluster_key: Mapped[Key]
    cluster_json: Mapped[str]
    fingerprint_key: Mapped[Key | None] = mapped_column(ForeignKey("fingerprints.key"))
    kind: Mapped[Key]
    request_json: Mapped[str]
    wall_s: Mapped[float]
    gpu_s: Mapped[float]
    setup_s: Mapped[float]
    log_path: Mapped[str | None] = mapped_column(FreeText)
    finished_at: Mapped[Moment]


class CollectiveRow(Base):
    """One size of a collective sweep."""

    __tablename__ = "collective_measurements"
    __table_args__ = (
        Index(
            "ix_collective_measurements_kind",
            "cluster_key", "fingerprint_key", "op", "group_size", "stride", "size_bytes",
        ),
        Index(None, "cluster_key", "id"),
        Index(None, "probe_run_id"),
    )  # fmt: skip

    id: Mapped[RowId]
    probe_run_id: Mapped[Key] = mapped_column(ForeignKey("probe_runs.id"))
    cluster_key: Mapped[Key]
    fingerprint_key: Mapped[Key] = mapped_column(ForeignKey("fingerprints.key"))
    op: Mapped[Key]
    group_size: Mapped[int]
    stride: Mapped[int]
    size_bytes: Mapped[int]
    iterations: Mapped[int]
    time_s: Mapped[float]
    time_p10_s: Mapped[float]
    time_p90_s: Mapped[float]
    algbw_bytes_per_s: Mapped[float]
    busbw_bytes_per_s: Mapped[float]


class CollectiveSummaryRow(Base):
    """Old readings of one size of a collective in one environment: median time and range, from when to when."""

    __tablename__ = "collective_summaries"
    __table_args__ = (Index(None, "cluster_key", "fingerprint_key"),)

    id: Mapped[RowId]
    cluster_key: Mapped[Key]
    fingerprint_key: Mapped[Key] = mapped_column(ForeignKey("fingerprints.key"))
    op: Mapped[Key]
    group_size: Mapped[int]
    stride: Mapped[int]
    size_bytes: Mapped[int]
    count: Mapped[int]
    time_s: Mapped[float]
    time_least_s: Mapped[float]
    time_most_s: Mapped[float]
    first_at: Mapped[Moment]
    last_at: Mapped[Moment]


class LayerRow(Base):
    """One part of a model at one shape."""

    __tablename__ = "layer_measurements"
    __table_args__ = (
        Index(None, "cluster_key", "fingerprint_key", "model_key", "workload_key"),
        Index(None, "cluster_key", "id"),
        Index(None, "probe_run_id"),
    )

    id: Mapped[RowId]
    probe_run_id: Mapped[Key] = mapped_column(ForeignKey("probe_runs.id"))
    cluster_key: Mapped[Key]
    fingerprint_key: Mapped[Key] = mapped_column(ForeignKey("fingerprints.key"))
    model_key: Mapped[Key]
    workload_key: Mapped[Key]
    part: Mapped[Key]
    tp: Mapped[int]
    micro_batch: Mapped[int]
    recompute: Mapped[Key]
    sequence_parallel: Mapped[bool]
    iterations: Mapped[int]
    forward_s: Mapped[float]
    backward_s: Mapped[float]
    forward_p10_s: Mapped[float]
    forward_p90_s: Mapped[float]
    backward_p10_s: Mapped[float]
    backward_p90_s: Mapped[float]
    forward_calc_s: Mapped[float]
    backward_calc_s: Mapped[float]
    saved_bytes: Mapped[int]
    peak_bytes: Mapped[int]
    parameter_bytes: Mapped[int]
    memory_source: Mapped[str]


class StepRow(Base):
    """The steps of one trial or of one step probe: exactly one of `trial_id` and `probe_run_id` is set."""

    __tablename__ = "step_measurements"
    __table_args__ = (
        UniqueConstraint("trial_id"),
        CheckConstraint("(trial_id IS NULL) <> (probe_run_id IS NULL)", name="one_origin"),
        Index(None, "cluster_key", "fingerprint_key"),
        Index(None, "cluster_key", "id"),
        Index(None, "probe_run_id"),
    )

    id: Mapped[RowId]
    trial_id: Mapped[Key | None] = mapped_column(ForeignKey("tuning_trials.id"))
    probe_run_id: Mapped[Key | None] = mapped_column(ForeignKey("probe_runs.id"))
    cluster_key: Mapped[Key]
    fingerprint_key: Mapped[Key] = mapped_column(ForeignKey("fingerprints.key"))
    tokens_per_s_per_gpu: Mapped[float]
    interval_low_tokens_per_s_per_gpu: Mapped[float]
    interval_high_tokens_per_s_per_gpu: Mapped[float]
    repeats: Mapped[int]
    step_time_s: Mapped[float]
    steady: Mapped[bool]
    traced_step_s: Mapped[float | None]
    t_calc_s: Mapped[float | None]
    t_comm_s: Mapped[float | None]
    t_comm_exposed_s: Mapped[float | None]
    mu: Mapped[float | None]
    mfu: Mapped[float | None]
    peak_allocated_bytes: Mapped[int]
    peak_reserved_bytes: Mapped[int]
    memory_source: Mapped[str]
    pruned: Mapped[bool]
    setup_s: Mapped[float]
    samples: Mapped[list[SampleRow]] = relationship(lazy="selectin", order_by="SampleRow.number")
    ranks: Mapped[list[RankRow]] = relationship(lazy="selectin", order_by="RankRow.rank")


class SampleRow(Base):
    """One value of a series of a step measurement: `series` is `step` or `warmup` (seconds), or `loss`."""

    __tablename__ = "step_samples"

    step_measurement_id: Mapped[int] = mapped_column(ForeignKey("step_measurements.id"), primary_key=True)
    series: Mapped[Key] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]


class SampleSummaryRow(Base):
    """A series of a step measurement (SampleRow) in six figures of its own unit."""

    __tablename__ = "sample_summaries"

    step_measurement_id: Mapped[int] = mapped_column(ForeignKey("step_measurements.id"), primary_key=True)
    series: Mapped[Key] = mapped_column(primary_key=True)
    count: Mapped[int]
    mean: Mapped[float]
    least: Mapped[float]
    median: Mapped[float]
    most: Mapped[float]
    first: Mapped[float]
    last: Mapped[float]


class RankRow(Base):
    """What one rank saw in a step measurement."""

    __tablename__ = "rank_measurements"
    __table_args__ = (UniqueConstraint("step_measurement_id", "rank"),)

    id: Mapped[RowId]
    step_measurement_id: Mapped[int] = mapped_column(ForeignKey("step_measurements.id"))
    rank: Mapped[int]
    stage: Mapped[int]
    hostname: Mapped[str]
    t_calc_s: Mapped[float | None]
    t_comm_s: Mapped[float | None]
    t_comm_exposed_s: Mapped[float | None]
    peak_allocated_bytes: Mapped[int]
    peak_reserved_bytes: Mapped[int]
    comm_times: Mapped[list[RankCommRow]] = relationship(lazy="selectin")


class RankCommRow(Base):
    """Seconds that one rank spent in one kind of communication in the traced step."""

    __tablename__ = "rank_comm_times"

    rank_measurement_id: Mapped[int] = mapped_column(ForeignKey("rank_measurements.id"), primary_key=True)
    op: Mapped[str] = mapped_column(primary_key=True)
    time_s: Mapped[float]


class ProfileRow(Base):
    """One version of a cluster's profile: the newest is the one with the highest id."""

    __tablename__ = "profiles"
    __table_args__ = (Index(None, "cluster_key", "fingerprint_key"),)

    id: Mapped[RowId]
    cluster_key: Mapped[Key]
    fingerprint_key: Mapped[Key | None] = mapped_column(ForeignKey("fingerprints.key"))
    compute_flops_per_s: Mapped[float | None]
    compute_launch_s: Mapped[float | None]
    step_scale: Mapped[float]
    step_scale_trials: Mapped[int]
    step_overhead_s: Mapped[float]
    memory_overhead_bytes: Mapped[float]
    memory_scale: Mapped[float]
    spec_json: Mapped[str]
    stored_at: Mapped[Moment]
