"""API keys: who may do what. A secret is never stored, only its hash."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import select

from autotune.errors import UnknownNameError
from autotune.specs import ApiKey, Role
from storage.database.session import NAMES_SHOWN, SessionStore, database_now, flush_new
from storage.fleet.tables import ApiKeyRow
from storage.tunings.rows import values

PLAIN = ("id", "name", "created_at", "expires_at", "revoked_at")


class KeyStore(SessionStore):
    """API keys."""

    def create_key(self, key: ApiKey, secret_hash: str) -> None:
        """Stores a key. Raises StoreConflictError if an unrevoked one of that name exists."""
        with self.writing() as session:
            session.add(ApiKeyRow(**values(key, PLAIN), role=key.role.value, secret_hash=secret_hash))
            flush_new(session, f"an API key named {key.name!r} exists already; revoke it first")

    def keys_of(self, secret_hashes: Collection[str]) -> Mapping[str, ApiKey]:
        """The keys with those hashes, by their hash, expired and revoked ones included."""
        query = select(ApiKeyRow).where(ApiKeyRow.secret_hash.in_(secret_hashes))
        with self.asking() as session:
            return {row.secret_hash: _key_of(row) for row in session.scalars(query)}

    def keys(self) -> Sequence[ApiKey]:
        """All keys, oldest first."""
        with self.reading() as session:
            rows = session.scalars(select(ApiKeyRow).order_by(ApiKeyRow.created_at, ApiKeyRow.id))
            return [_key_of(row) for row in rows]

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revokes a key for good; one revoked before keeps its moment. Raises UnknownNameError."""
        with self.writing() as session:
            row = session.scalar(select(ApiKeyRow).where(ApiKeyRow.id == key_id).with_for_update())
            if row is None:
                known = session.scalars(select(ApiKeyRow.id).where(ApiKeyRow.revoked_at.is_(None)).limit(NAMES_SHOWN))
                raise UnknownNameError("API key", key_id, known)
            row.revoked_at = row.revoked_at or database_now(session)
            session.flush()
            return _key_of(row)

    def has_role(self, role: Role) -> bool:
        """Whether an unrevoked key with that role exists."""
        query = select(ApiKeyRow.id).where(ApiKeyRow.role == role.value, ApiKeyRow.revoked_at.is_(None))
        with self.reading() as session:
            return session.scalar(query.limit(1)) is not None


def _key_of(row: ApiKeyRow) -> ApiKey:
    return ApiKey(**values(row, PLAIN), role=Role(row.role))
