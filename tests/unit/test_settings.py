"""Settings come from the environment that is given, and nothing is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.settings import FleetTimes, database_file, read_settings

HOME = Path.home()


@pytest.mark.parametrize(
    ("environ", "url", "log_dir"),
    [
        ({}, f"sqlite:///{HOME}/.local/share/autotune/autotune.db", HOME / ".local/state/autotune/logs"),
        (
            {"XDG_DATA_HOME": "/d", "XDG_STATE_HOME": "/s"},
            "sqlite:////d/autotune/autotune.db",
            Path("/s/autotune/logs"),
        ),
        ({"XDG_DATA_HOME": "relative"}, f"sqlite:///{HOME}/.local/share/autotune/autotune.db", None),
        ({"AUTOTUNE_DB": "postgresql://me@host/name"}, "postgresql://me@host/name", None),
        ({"AUTOTUNE_DB": "", "XDG_DATA_HOME": "/d"}, "sqlite:////d/autotune/autotune.db", None),
        ({"AUTOTUNE_LOG_DIR": "/logs", "XDG_DATA_HOME": "/d"}, "sqlite:////d/autotune/autotune.db", Path("/logs")),
    ],
)
def test_settings(environ: dict[str, str], url: str, log_dir: Path | None) -> None:
    settings = read_settings(environ)
    assert settings.database_url == url
    assert log_dir is None or settings.log_dir == log_dir


def test_the_times_of_a_fleet_follow_its_lease() -> None:
    usual, short = read_settings({}).times, read_settings({"AUTOTUNE_LEASE_S": "3"}).times
    assert (usual.lease_s, usual.renew_every_s, usual.claim_s, usual.sweep_every_s) == (15.0, 1.0, 30.0, 5.0)
    assert short == FleetTimes(
        lease_s=3.0, renew_every_s=0.2, claim_s=6.0, sweep_every_s=1.0, unsent_after_s=1.0, quiet_after_s=1.0
    )


@pytest.mark.parametrize("wrong", ["0.9", "31", "nan", "soon"])
def test_a_lease_that_makes_no_sense_is_refused(wrong: str) -> None:
    with pytest.raises(InputError, match=f"AUTOTUNE_LEASE_S.*{wrong}.*1 to 30 seconds"):
        read_settings({"AUTOTUNE_LEASE_S": wrong})


def test_the_file_of_a_database() -> None:
    assert database_file("sqlite:////a/b.db") == Path("/a/b.db")
    assert database_file("sqlite:///b.db") == Path("b.db")
    assert database_file("postgresql://me@host/name") is None


SECRETS = {
    "AUTOTUNE_DB": "database_url",
    "AUTOTUNE_BROKER": "broker_url",
    "AUTOTUNE_API_KEY": "api_key",
    "AUTOTUNE_WEBHOOK_URL": "webhook_url",
    "AUTOTUNE_WEBHOOK_SECRET": "webhook_secret",
    "AUTOTUNE_SMTP_URL": "smtp_url",
}


@pytest.mark.parametrize(("variable", "attribute"), SECRETS.items())
def test_a_secret_may_be_in_a_file(tmp_path: Path, variable: str, attribute: str) -> None:
    file = tmp_path / "secret"
    file.write_text("what://only:we@know\n")
    assert getattr(read_settings({f"{variable}_FILE": str(file)}), attribute) == "what://only:we@know"


def test_a_secret_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("redis://:hidden@here")
    with pytest.raises(InputError, match="either AUTOTUNE_BROKER or AUTOTUNE_BROKER_FILE, not both") as told:
        read_settings({"AUTOTUNE_BROKER": "redis://:hidden@there", "AUTOTUNE_BROKER_FILE": str(file)})
    assert "hidden" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b" \n", "not empty"), (b"\xff", "can be read")]
)
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=f"AUTOTUNE_DB_FILE.*{reason}"):
        read_settings({"AUTOTUNE_DB_FILE": str(file)})
