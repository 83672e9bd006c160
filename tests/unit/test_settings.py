"""Settings come from the environment that is given, and nothing is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.settings import database_file, read_settings

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


def test_the_file_of_a_database() -> None:
    assert database_file("sqlite:////a/b.db") == Path("/a/b.db")
    assert database_file("sqlite:///b.db") == Path("b.db")
    assert database_file("postgresql://me@host/name") is None
