"""Best-known plans: kept as history, asked for exactly or by nearness; and the documents that their rows share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    ForeignKey,
    Index,
    Integer,
    Row,
    Select,
    bindparam,
    func,
    insert,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, aliased, mapped_column

from autotune.errors import UnknownNameError
from autotune.specs import (
    BestEntry,
    ClusterSpec,
    Fingerprint,
    ModelSpec,
    NearEntry,
    Plan,
    RunnerUp,
    Spec,
    Workload,
)
from storage.database.columns import Base, Free, Key, Moment, RowId, UtcDateTime
from storage.database.session import NAMES_SHOWN, SessionStore, upsert
from storage.tunings.named import fingerprint_row
from storage.tunings.tables import ProbeRow, StepRow, TrialRow

CURRENT = text("superseded_at IS NULL")


class DocumentRow(Base):
    """The canonical JSON of a model, cluster or workload, once for all rows that name its key."""

    __tablename__ = "spec_documents"

    digest: Mapped[Key] = mapped_column(primary_key=True)
    spec_json: Mapped[str]


class BestRow(Base):
    """One entry. Of one model, cluster, workload, environment and source one is current."""

    __tablename__ = "best_known"
    __table_args__ = (
        Index(
            "uq_best_known_current",
            "model_key", "cluster_key", "workload_key", "environment_key", "source",
            unique=True, sqlite_where=CURRENT, postgresql_where=CURRENT,
        ),
        Index(
            "ix_best_known_same_model",
            "model_key", "device_name", "dtype", "devices", "seq_len",
            sqlite_where=CURRENT, postgresql_where=CURRENT,
        ),
        Index(
            "ix_best_known_siblings",
            "device_name", "dtype", "parameters",
            sqlite_where=CURRENT, postgresql_where=CURRENT,
        ),
        Index("ix_best_known_question", "model_key", "cluster_key", "workload_key"),
        Index("ix_best_known_model_name", "model_name", "id"),
        Index("ix_best_known_cluster_name", "cluster_name", "id"),
    )  # fmt: skip

    id: Mapped[RowId]
    model_name: Mapped[str]
    model_key: Mapped[Key]
    model_digest: Mapped[Key] = mapped_column(ForeignKey("spec_documents.digest"))
    parameters: Mapped[float]
    cluster_name: Mapped[str]
    cluster_key: Mapped[Key]
    cluster_digest: Mapped[Key] = mapped_column(ForeignKey("spec_documents.digest"))
    device_name: Mapped[str]
    gpus_per_node: Mapped[int]
    devices: Mapped[int]
    workload_key: Mapped[Key]
    workload_digest: Mapped[Key] = mapped_column(ForeignKey("spec_documents.digest"))
    seq_len: Mapped[int]
    global_batch: Mapped[int]
    dtype: Mapped[Key]
    plan_key: Mapped[str]
    plan_json: Mapped[str]
    tokens_per_s_per_gpu: Mapped[float]
    interval_low_tokens_per_s_per_gpu: Mapped[float]
    interval_high_tokens_per_s_per_gpu: Mapped[float]
    repeats: Mapped[int]
    peak_bytes: Mapped[int | None]
    memory_source: Mapped[str]
    runner_up_json: Mapped[str | None]
    reason: Mapped[Free]
    source: Mapped[str]
    tuning_id: Mapped[Key | None]
    fingerprint_key: Mapped[Key]
    environment_key: Mapped[Key]
    measured_at: Mapped[Moment]
    superseded_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


PLAIN = (
    "id", "parameters", "tokens_per_s_per_gpu", "repeats", "peak_bytes", "memory_source", "reason", "source",
    "tuning_id", "fingerprint_key", "environment_key", "measured_at", "superseded_at",
)  # fmt: skip
QUESTION = ("model_key", "cluster_key", "workload_key", "environment_key", "source")
EVIDENCE = ("plan_key", "tokens_per_s_per_gpu", "repeats", "tuning_id", "fingerprint_key")
"""What makes two entries of one question equal."""


class KnowledgeStore(SessionStore):
    """Entries of best-known plans."""

    def put_best(self, entry: BestEntry, *, pooled: bool = False) -> BestEntry:
        """Stores an entry; see autotune.ports.store."""
        now = datetime.now(UTC)
        with self.writing() as session:
            values = best_values(entry) | _documents(session, entry)
            # Whoever stores an entry of this model waits here for the one before, and then sees it.
            session.execute(
                select(DocumentRow.digest).where(DocumentRow.digest == values["model_digest"]).with_for_update()
            )
            same = [getattr(BestRow, name) == values[name] for name in QUESTION]
            equal = [getattr(BestRow, name) == values[name] for name in EVIDENCE]
            known = session.scalar(select(BestRow.id).where(*same, *equal).order_by(BestRow.id.desc()).limit(1))
            if known is not None:
                return self._entry(session, known)
            current = session.scalar(select(BestRow).where(*same, BestRow.superseded_at.is_(None)))
            if current is not None:
                takes_over = pooled or current.plan_key == entry.plan.key or _faster(entry, current)
                if takes_over:
                    session.execute(update(BestRow).where(BestRow.id == current.id).values(superseded_at=now))
                else:
                    values["superseded_at"] = now
            added = session.scalar(insert(BestRow).values(values).returning(BestRow.id))
            assert added is not None
            return self._entry(session, added)

    def best_entry(self, entry_id: int) -> BestEntry:
        """The entry of that id. Raises UnknownNameError."""
        with self.asking() as session:
            return self._entry(session, entry_id)

    def best_exact(self, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Sequence[BestEntry]:
        """Current entries for exactly that question, newest measurement first."""
        asked = {"model_key": model.key, "cluster_key": cluster.key, "workload_key": workload.key}
        with self.asking() as session:
            return [_entry_of(row) for row in session.execute(_EXACT, asked)]

    def best_near(
        self, model: ModelSpec, parameters: float, cluster: ClusterSpec, workload: Workload, *, limit: int = 20
    ) -> Sequence[NearEntry]:
        """Current entries that may be near; see autotune.ports.store."""
        asked = {
            "model_key": model.key,
            "device_name": cluster.device.name,
            "dtype": workload.kind,
            "devices": cluster.devices,
            "seq_len": workload.seq_len,
            "parameters": parameters,
            "limit": limit,
        }
        with self.asking() as session:
            found = {row.id: row for row in session.execute(_NEAR, asked)}
        return [NearEntry(**row._mapping) for row in found.values()]

    def best_page(
        self,
        *,
        model: str | None = None,
        cluster: str | None = None,
        device: str | None = None,
        source: str | None = None,
        history: bool = False,
        before: int | None = None,
        limit: int = 50,
    ) -> Sequence[BestEntry]:
        """Entries by falling id, current ones only unless `history`."""
        asked = {"model_name": model, "cluster_name": cluster, "device_name": device, "source": source}
        query = _WHOLE.where(*(getattr(BestRow, name) == value for name, value in asked.items() if value is not None))
        if not history:
            query = query.where(BestRow.superseded_at.is_(None))
        if before is not None:
            query = query.where(BestRow.id < before)
        with self.reading() as session:
            found = session.execute(query.order_by(BestRow.id.desc()).limit(limit)).all()
        return [_entry_of(row) for row in found]  # many take seconds, in which no transaction is held open

    def newest_fingerprint(self, cluster_key: str) -> Fingerprint | None:
        """The environment of the newest measurement on that cluster."""
        with self.asking() as session:
            moments = session.execute(_NEWEST, {"cluster_key": cluster_key})
            found = [(at, key) for key, at in moments if key is not None]
            return Fingerprint.from_json(fingerprint_row(session, max(found)[1]).spec_json) if found else None

    def _entry(self, session: Session, entry_id: int) -> BestEntry:
        row = session.execute(_ONE, {"id": entry_id}).first()
        if row is None:
            newest = session.scalars(select(BestRow.id).order_by(BestRow.id.desc()).limit(NAMES_SHOWN))
            raise UnknownNameError("best-known entry", str(entry_id), map(str, newest))
        return _entry_of(row)


def _near() -> CompoundSelect[*tuple[Any, ...]]:
    """What best_near asks, in one round trip; each part walks an index in its own order, to a limit of its own."""
    current = (_as_asked(BestRow.device_name), _as_asked(BestRow.dtype), BestRow.superseded_at.is_(None))
    same = (_as_asked(BestRow.model_key), *current)
    parts = [
        *_around((*same, _as_asked(BestRow.devices)), BestRow.seq_len),
        *_around(same, BestRow.devices),
        *_around(current, BestRow.parameters),
    ]
    return union_all(*(select(part.subquery()) for part in parts))


def _as_asked(column: InstrumentedAttribute[Any]) -> ColumnElement[bool]:
    return column == bindparam(column.key, type_=column.type)


def _around(
    alike: tuple[ColumnElement[bool], ...], column: InstrumentedAttribute[Any]
) -> list[Select[*tuple[Any, ...]]]:
    """The nearest rows at or above the value asked for, and those below it: two walks along an index."""
    base = select(*(getattr(BestRow, name) for name in NearEntry.model_fields)).where(*alike)
    base, value = base.limit(bindparam("limit", type_=Integer)), bindparam(column.key, type_=column.type)
    return [base.where(column >= value).order_by(column), base.where(column < value).order_by(column.desc())]


def _newest() -> CompoundSelect[str | None, datetime | None]:
    """The fingerprints and moments of the newest probe and the newest measured step of a cluster."""
    probe = (
        select(ProbeRow.fingerprint_key, ProbeRow.finished_at)
        .where(_as_asked(ProbeRow.cluster_key), ProbeRow.fingerprint_key.is_not(None))
        .order_by(ProbeRow.finished_at.desc())
        .limit(1)
    )
    step = (
        select(StepRow.fingerprint_key, func.coalesce(TrialRow.finished_at, ProbeRow.finished_at))
        .outerjoin(TrialRow, TrialRow.id == StepRow.trial_id)
        .outerjoin(ProbeRow, ProbeRow.id == StepRow.probe_run_id)
        .where(_as_asked(StepRow.cluster_key))
        .order_by(StepRow.id.desc())
        .limit(1)
    )
    return union_all(select(probe.subquery()), select(step.subquery()))


def _whole() -> Select[BestRow, str, str, str]:
    """Entries with their documents: model, cluster, workload."""
    model, cluster, workload = (aliased(DocumentRow) for _ in range(3))
    return (
        select(BestRow, model.spec_json, cluster.spec_json, workload.spec_json)
        .join(model, model.digest == BestRow.model_digest)
        .join(cluster, cluster.digest == BestRow.cluster_digest)
        .join(workload, workload.digest == BestRow.workload_digest)
    )


def _exact() -> Select[BestRow, str, str, str]:
    question = map(_as_asked, (BestRow.model_key, BestRow.cluster_key, BestRow.workload_key))
    query = _WHOLE.where(*question, BestRow.superseded_at.is_(None))
    return query.order_by(BestRow.measured_at.desc(), BestRow.id.desc())


# To build one takes longer than to ask it.
_WHOLE, _NEAR, _NEWEST = _whole(), _near(), _newest()
_EXACT, _ONE = _exact(), _WHOLE.where(_as_asked(BestRow.id))


def _entry_of(found: Row[BestRow, str, str, str]) -> BestEntry:
    row, model, cluster, workload = found
    return BestEntry(
        **{name: getattr(row, name) for name in PLAIN},
        model=ModelSpec.from_json(model),
        cluster=ClusterSpec.from_json(cluster),
        workload=Workload.from_json(workload),
        plan=Plan.from_json(row.plan_json),
        interval=(row.interval_low_tokens_per_s_per_gpu, row.interval_high_tokens_per_s_per_gpu),
        runner_up=RunnerUp.from_json(row.runner_up_json) if row.runner_up_json else None,
    )


def best_values(entry: BestEntry) -> dict[str, Any]:
    """The columns of an entry, without its id and the digests of its documents."""
    low, high = entry.interval
    return {
        **{name: getattr(entry, name) for name in PLAIN if name != "id"},
        "model_name": entry.model.name,
        "model_key": entry.model.key,
        "cluster_name": entry.cluster.name,
        "cluster_key": entry.cluster.key,
        "device_name": entry.cluster.device.name,
        "gpus_per_node": entry.cluster.gpus_per_node,
        "devices": entry.cluster.devices,
        "workload_key": entry.workload.key,
        "seq_len": entry.workload.seq_len,
        "global_batch": entry.workload.global_batch,
        "dtype": entry.workload.kind,
        "plan_key": entry.plan.key,
        "plan_json": entry.plan.to_json(),
        "interval_low_tokens_per_s_per_gpu": low,
        "interval_high_tokens_per_s_per_gpu": high,
        "runner_up_json": entry.runner_up and entry.runner_up.to_json(),
    }


def _documents(session: Session, entry: BestEntry) -> dict[str, str]:
    """Stores the entry's specs where they are new; their digests by column."""
    specs: dict[str, Spec] = {"model": entry.model, "cluster": entry.cluster, "workload": entry.workload}
    digests = {}
    for name, spec in specs.items():
        new = upsert(session)(DocumentRow).values(digest=spec.digest(), spec_json=spec.to_json())
        session.execute(new.on_conflict_do_nothing())
        digests[f"{name}_digest"] = spec.digest()
    return digests


def _faster(entry: BestEntry, row: BestRow) -> bool:
    return entry.tokens_per_s_per_gpu > row.tokens_per_s_per_gpu
