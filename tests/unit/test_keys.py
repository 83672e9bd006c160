"""What is stored of a key's secret, and when a key is not accepted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from autotune.fleet.keys import hash_of, refusal
from autotune.specs import ApiKey, Role

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def key(**changes: object) -> ApiKey:
    return ApiKey(id="k", name="ada", role=Role.SUBMIT, created_at=NOW).model_copy(update=changes)


def test_a_secret_is_stored_as_its_sha_256() -> None:
    """FIPS 180-2, appendix B.1."""
    assert hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "this key is not known"),
        (key(), ""),
        (key(expires_at=NOW + SECOND), ""),
        (key(expires_at=NOW), "this key has expired"),
        (key(revoked_at=NOW), "this key was revoked"),
        (key(revoked_at=NOW - SECOND, expires_at=NOW - SECOND), "this key was revoked"),
    ],
)
def test_why_a_key_is_not_accepted(found: ApiKey | None, text: str) -> None:
    assert refusal(found, NOW) == text
