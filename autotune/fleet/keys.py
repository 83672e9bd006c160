"""API keys: made, shown once, stored as a hash.

A secret is 256 random bits: none is likelier than another, so guessing is hopeless. Its SHA-256 is therefore as safe to
store as the slow, salted hash that passwords need because people choose them, and costs a request microseconds instead
of a tenth of a second.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from autotune.errors import InputError
from autotune.ports.fleet import FleetStore
from autotune.specs import ApiKey, Role

PREFIX = "autotune_"
"""The prefix by which a secret that was committed or logged by mistake can be found."""

LOCAL = "local"
"""The principal of requests without a key, where an API takes any."""

SECRET_BYTES = 32
MAX_DAYS = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was just made, with the only copy of its secret."""

    key: ApiKey
    secret: str = field(repr=False)


def create_key(store: FleetStore, name: str, role: str, expires_days: int | None = None) -> NewKey:
    """Makes and stores a key for the principal `name`.

    Raises:
        InputError: a name, role or lifetime that cannot be used.
        StoreConflictError: an unrevoked key of that name exists.
    """
    if not name.strip():
        raise InputError("name", name, "at least one character that can be seen")
    if name == LOCAL:
        raise InputError("name", name, "another name: requests without a key are made under this one")
    if role not in list(Role):
        raise InputError("role", role, "one of " + ", ".join(Role))
    if expires_days is not None and not 1 <= expires_days <= MAX_DAYS:
        raise InputError("expires_days", expires_days, f"from 1 to {MAX_DAYS} days")
    now = datetime.now(UTC)
    data = {
        "id": uuid.uuid4().hex[:12],
        "name": name,
        "role": role,
        "created_at": now.isoformat(),
        "expires_at": None if expires_days is None else (now + timedelta(days=expires_days)).isoformat(),
    }
    key, secret = ApiKey.from_data(data, "key"), PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    store.create_key(key, hash_of(secret))
    return NewKey(key=key, secret=secret)


def hash_of(secret: str) -> str:
    """What is stored of a secret: the hex digits of its SHA-256."""
    return hashlib.sha256(secret.encode()).hexdigest()


def refusal(key: ApiKey | None, now: datetime) -> str:
    """Why a key is not accepted; empty where it is."""
    if key is None:
        return "this key is not known"
    if key.revoked_at is not None:
        return "this key was revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "this key has expired"
    return ""
