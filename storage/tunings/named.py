"""What is found by its own name or key: models, clusters, fingerprints, and the rows of tunings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import ClusterSpec, Fingerprint, ModelSpec
from storage.database.session import NAMES_SHOWN, SessionStore, upsert
from storage.tunings.tables import ClusterRow, FingerprintRow, ModelRow, TuningRow


class NamedStore(SessionStore):
    """Models, clusters and fingerprints."""

    def put_model(self, model: ModelSpec, *, owner: str = "", only_own: bool = False) -> None:
        """Stores a model by name, which is `owner`'s then; one of the same name is replaced for new requests only.

        With `only_own`, raises StoreConflictError where somebody else's has the name.
        """
        with self.writing() as session:
            _put(session, "model", ModelRow, model, owner, only_own=only_own)

    def model(self, name: str) -> ModelSpec:
        """The stored model of that name."""
        with self.asking() as session:
            row = session.get(ModelRow, name)
            if row is None:
                raise UnknownNameError("model", name, session.scalars(select(ModelRow.name)))
            return ModelSpec.from_json(row.spec_json)

    def models(self) -> Sequence[ModelSpec]:
        """All stored models, by name."""
        with self.reading() as session:
            specs = [ModelSpec.from_json(text) for text in session.scalars(select(ModelRow.spec_json))]
        return sorted(specs, key=lambda spec: spec.name)

    def put_cluster(self, cluster: ClusterSpec, *, owner: str = "", only_own: bool = False) -> None:
        """Stores a cluster as `put_model` does a model."""
        with self.writing() as session:
            _put(session, "cluster", ClusterRow, cluster, owner, only_own=only_own)

    def cluster(self, name: str) -> ClusterSpec:
        """The stored cluster of that name."""
        with self.asking() as session:
            row = session.get(ClusterRow, name)
            if row is None:
                raise UnknownNameError("cluster", name, session.scalars(select(ClusterRow.name)))
            return ClusterSpec.from_json(row.spec_json)

    def clusters(self) -> Sequence[ClusterSpec]:
        """All stored clusters, by name."""
        with self.reading() as session:
            specs = [ClusterSpec.from_json(text) for text in session.scalars(select(ClusterRow.spec_json))]
        return sorted(specs, key=lambda spec: spec.name)

    def put_fingerprint(self, fingerprint: Fingerprint) -> str:
        """Stores it once; returns its key."""
        plain = ("hostname", "device_name", "device_count", "driver", "runtime", "collective_library", "torch")
        values = {name: getattr(fingerprint, name) for name in plain}
        values |= {"key": fingerprint.key, "spec_json": fingerprint.to_json(), "stored_at": datetime.now(UTC)}
        with self.writing() as session:
            session.execute(upsert(session)(FingerprintRow).values(values).on_conflict_do_nothing())
        return fingerprint.key

    def fingerprint(self, key: str) -> Fingerprint:
        """The fingerprint of that key."""
        with self.asking() as session:
            return Fingerprint.from_json(fingerprint_row(session, key).spec_json)


def _put(
    session: Session,
    what: str,
    table: type[ModelRow] | type[ClusterRow],
    spec: ModelSpec | ClusterSpec,
    owner: str,
    *,
    only_own: bool,
) -> None:
    """Inserts or replaces in one statement: two processes may store the same name at once."""
    changing = {"key": spec.key, "spec_json": spec.to_json(), "stored_at": datetime.now(UTC), "owner": owner}
    new = upsert(session)(table).values(name=spec.name, **changing)
    own = table.owner == owner if only_own else None
    stored = new.on_conflict_do_update(index_elements=["name"], set_=changing, where=own).returning(table.name)
    if session.scalar(stored) is None:
        whose = session.scalar(select(table.owner).where(table.name == spec.name)) or "whoever operates this service"
        raise StoreConflictError(
            f"{what} {spec.name!r} belongs to {whose}: give another name, or ask an admin to replace it"
        )


def fingerprint_row(session: Session, key: str) -> FingerprintRow:
    """The fingerprint of that key. Raises UnknownNameError."""
    row = session.get(FingerprintRow, key)
    if row is None:
        raise UnknownNameError("fingerprint", key, _newest(session, FingerprintRow.key, FingerprintRow.stored_at))
    return row


def tuning_row(session: Session, tuning_id: str) -> TuningRow:
    """The tuning of exactly that id. Raises UnknownNameError that lists the newest ones."""
    row = session.get(TuningRow, tuning_id)
    if row is None:
        raise UnknownNameError("tuning", tuning_id, _newest(session, TuningRow.id, TuningRow.created_at))
    return row


def locked_tuning(session: Session, tuning_id: str, *, joinable: bool = True) -> TuningRow:
    """The tuning, locked until the transaction ends. Raises UnknownNameError.

    Requests can join it meanwhile (storage.fleet.submissions), unless it is not to be `joinable`: they must not wait
    for a tuner.

    Whoever locks several rows does it in this order, so that nobody waits in a circle: jobs by id, nodes by name, the
    counter, the tuning, its trials.
    """
    query = select(TuningRow).where(TuningRow.id == tuning_id).with_for_update(key_share=joinable)
    row = session.scalar(query.execution_options(populate_existing=True))
    return tuning_row(session, tuning_id) if row is None else row


def _newest(session: Session, name: InstrumentedAttribute[str], moment: InstrumentedAttribute[datetime]) -> list[str]:
    return list(session.scalars(select(name).order_by(moment.desc()).limit(NAMES_SHOWN)))
