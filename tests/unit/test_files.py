"""Files that are written whole, with writers that are killed in the middle."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Command
from store_records import MODEL

from autotune.cli.output import write_text
from autotune.files import is_part, whole_file
from storage import open_store
from storage.frames import FileFormat, export

HALF = """
import sys
from pathlib import Path
from autotune.files import whole_file
with whole_file(Path(sys.argv[1])) as part:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{part}{suffix}").write_text("half of it")
    print(part, flush=True)
    sys.stdin.read()
"""


@contextmanager
def writing(target: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process in the middle of writing the target, and the file that it writes."""
    words = [sys.executable, "-c", HALF, str(target)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        part = Path(process.stdout.readline().strip())
        try:
            yield process, part
        finally:
            process.kill()


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as store:
        store.put_model(MODEL)
    return url


def left_by(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["backup", "export", "text"])
def test_what_a_killed_writer_left_goes_with_the_next(autotune: Command, url: str, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    target = folder / "file"
    kept = {".file", ".file.old", ".file.20260101", ".another.0123456789abcdef.part", "file.part"}
    for name in kept:
        (folder / name).touch()
    with writing(target) as (process, part):
        process.kill()
        process.wait()
    assert part.exists()
    if kind == "backup":
        assert autotune("db", "backup", target, "--db", url).status == 0
    elif kind == "export":
        with open_store(url) as store:
            export(store, "tunings", FileFormat.CSV, target)
    else:
        write_text(target, "all of it")
    assert left_by(folder) == kept | {"file"}


def test_two_writers_take_turns(tmp_path: Path) -> None:
    target = tmp_path / "file"
    second = threading.Thread(target=write_text, args=(target, "the second's"))
    with writing(target) as (process, part):
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert part.read_text() == "half of it"
        process.communicate("")
    second.join(20)
    assert target.read_text() == "the second's\n"
    assert left_by(tmp_path) == {"file"}


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def fail_halfway() -> None:
        with whole_file(target) as part:
            part.write_text("half of it")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert target.read_text() == "old"
    assert left_by(tmp_path) == {"file"}


def test_what_was_never_finished_is_no_backup(autotune: Command, url: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert autotune("db", "backup", saved, "--db", url).status == 0
    part = saved.rename(tmp_path / ".saved.0123456789abcdef.part")
    assert is_part(part)
    done = autotune("db", "restore", part, "--db", f"sqlite:///{tmp_path / 'b.db'}")
    assert (done.status, "a backup made by" in done.err) == (2, True)
    assert not (tmp_path / "b.db").exists()
