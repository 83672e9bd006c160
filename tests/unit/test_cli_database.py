"""`autotune db backup`, `restore` and `compact`."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command
from store_records import FINGERPRINT, MODEL, step_reading, trial, tuning

from storage import open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with a complete trial."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as store:
        store.put_model(MODEL)
        store.create_tuning(tuning())
        store.start_trial(trial(0))
        key = store.put_fingerprint(FINGERPRINT)
        store.finish_trial(
            "tuning-1-0", reading=step_reading(), failure=None, outcome_gpu_s=1.0, setup_s=0.0, fingerprint_key=key
        )
    return url


def test_backup_and_restore(autotune: Command, url: str, tmp_path: Path) -> None:
    saved, other = tmp_path / "saved", f"sqlite:///{tmp_path / 'b.db'}"
    assert autotune("db", "backup", saved, "--db", url).status == 0
    assert "the file exists" in autotune("db", "backup", saved, "--db", url).err
    assert autotune("db", "backup", saved, "--overwrite", "--db", url).status == 0
    done = autotune("db", "restore", saved, "--db", other, "--json")
    assert (done.status, done.data["rows"]["tuning_trials"]) == (0, 1)
    again = autotune("db", "restore", saved, "--db", other)
    assert (again.status, "is not empty" in again.err) == (5, True)
    assert "-> " in autotune("db", "restore", saved, "--overwrite", "--db", other).out
    assert autotune("db", "check", "--db", other).status == 0


def test_a_restore_says_which_keys_are_not_there(autotune: Command, url: str, tmp_path: Path) -> None:
    saved, other = tmp_path / "saved", f"sqlite:///{tmp_path / 'b.db'}"
    key = autotune("keys", "create", "ada", "--db", url, "--json").data["key"]["id"]
    autotune("db", "backup", saved, "--db", url)
    autotune("keys", "revoke", key, "--db", url)
    done = autotune("db", "restore", saved, "--overwrite", "--db", url)
    assert f"API keys that stay revoked: {key} of ada" in done.err
    done = autotune("db", "restore", saved, "--db", other)
    for word in (f"API keys that were left out: {key} of ada", "cannot tell", "autotune keys create", "--keys"):
        assert word in done.err
    assert autotune("keys", "list", "--db", other, "--json").data["keys"] == []
    assert "API keys" not in autotune("db", "restore", saved, "--overwrite", "--keys", "--db", other).err
    assert [each["id"] for each in autotune("keys", "list", "--db", other, "--json").data["keys"]] == [key]


def test_restore_into_the_users_own_database(autotune: Command, url: str, tmp_path: Path) -> None:
    autotune("db", "backup", tmp_path / "saved", "--db", url)
    assert autotune("db", "restore", tmp_path / "saved").status == 0
    assert autotune("models", "--json").status == 0
    assert autotune("db", "stats", "--json").data["rows"]["tunings"] == 1


@pytest.mark.parametrize("content", ["", "no backup at all" * 200])
def test_what_is_no_backup_makes_no_database(autotune: Command, tmp_path: Path, content: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    done = autotune("db", "restore", file, "--db", f"sqlite:///{tmp_path / 'new.db'}", "--json")
    assert (done.status, done.data["error"]["value"]) == (2, str(file))
    assert not (tmp_path / "new.db").exists()


def test_compact(autotune: Command, url: str) -> None:
    young = autotune("db", "compact", "--db", url, "--json")
    assert (young.status, young.data["samples"]) == (0, 0)
    done = autotune("db", "compact", "--older-than", 0, "--keep", 1, "--db", url)
    assert "8 single steps and 0 collective readings are summaries now" in done.out
    assert autotune("db", "compact", "--older-than", -1, "--db", url).status == 2
