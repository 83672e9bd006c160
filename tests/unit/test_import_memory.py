"""Imports read piece by piece: what they hold does not grow with the file, and has a limit."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import import_logs
import pytest

from autotune.backtest import csv_rows
from autotune.backtest.csv_rows import REQUIRED, read_csv_rows
from autotune.catalog.published import published_cluster
from autotune.errors import InputError
from autotune.imports import FileContent, Format, batch_of, read_table
from autotune.imports import logs as log_lines
from autotune.imports.keeping import keep
from autotune.imports.logs import LogFile, LoggedStep, TrainingLog
from storage import open_store

CHATTER = "[rank0]:2026-01-01 00:00:00,000 - root - INFO - " + 950 * "x" + "\n"
READING = """
import resource, sys
from pathlib import Path
from autotune.catalog import cluster_from_shorthand, load_model
from autotune.imports import FileContent, Format, Stated, read_log
stated = Stated(cluster=cluster_from_shorthand("h100-80gb-sxm:1x8"), model=load_model("llama3-8b"))
read_log(Format.TORCHTITAN, "a.log", Path(sys.argv[1]).read_text(), stated)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
content = FileContent.of(Path(sys.argv[2]))
(run,) = read_log(Format.TORCHTITAN, "b.log", content, stated).runs
content.digests([content.size_bytes])
print(run.steps, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_a_large_log_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    small, large = tmp_path / "small.log", tmp_path / "large.log"
    text = import_logs.torchtitan()
    small.write_text(text)
    with large.open("w") as file:
        for _ in range(24):
            file.write(CHATTER * 1000)
        file.write(text)
    words = [sys.executable, "-c", READING, str(small), str(large)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=240).stdout
    steps, grown_mib = map(int, printed.split())
    assert steps == 6
    assert grown_mib < 12  # of a file of 23 MiB


IMPORTING = """
import resource, sys
from datetime import UTC, datetime
from pathlib import Path
from autotune.catalog.published import published_cluster
from autotune.imports import FileContent, Format, batch_of, read_table
from autotune.imports.keeping import keep
from storage import open_store

def import_file(name):
    content = FileContent.of(Path(name))
    read = read_table(content.path, published_cluster)
    batch = batch_of(content, name[-9:-4], Format.CSV, datetime.now(UTC))
    return keep(store, batch, content, read, dry_run=False, named=True)

with open_store("sqlite:///" + sys.argv[1]) as store:
    import_file(sys.argv[2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = import_file(sys.argv[3])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert import_file(sys.argv[3])["already"]
    print(told["run_count"], len(told["runs"]), sum(1 for _ in store.runs_of_import(told["sha256"])))
    print((after - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [12_000, 60_000])
def test_a_large_runs_file_takes_no_more_memory_than_a_small_one(tmp_path: Path, rows: int) -> None:
    small, large = tmp_path / "small.csv", tmp_path / "large.csv"
    for path, count in ((small, 1500), (large, rows)):
        with path.open("w") as file:
            file.write(import_logs.RUNS_HEADER)
            for number in range(count):
                file.write(import_logs.runs_row(speed=str(9000 + number / 100)))
    words = [sys.executable, "-c", IMPORTING, str(tmp_path / "a.db"), str(small), str(large)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    *counts, grown_mib = map(int, printed.split())
    assert counts == [rows, 1000, rows]
    assert grown_mib < 12  # 15 KiB a row were 180 MiB and more


def test_a_runs_file_that_changes_while_it_is_read_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(import_logs.RUNS_HEADER + import_logs.runs_row())
    content, read = FileContent.of(path), read_table(path, published_cluster)
    assert (read.run_count, len(list(read.runs))) == (1, 1)
    batch = batch_of(content, "x", Format.CSV, datetime.now(UTC))
    with path.open("a") as file:
        file.write(import_logs.runs_row(speed="8000"))
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        with pytest.raises(InputError, match="nobody changes while it is read"):
            keep(store, batch, content, read, dry_run=False, named=True)
        assert store.imports() == []


def test_a_file_that_grows_is_read_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_bytes(b"first\nsecond\n")
    content = FileContent.of(file)
    with file.open("ab") as more:
        more.write(b"third\n")
    assert list(content()) == [b"first\n", b"second\n"]
    assert content.digests([13, 6]) == {
        6: hashlib.sha256(b"first\n").hexdigest(),
        13: hashlib.sha256(b"first\nsecond\n").hexdigest(),
    }


def test_lines_steps_and_rows_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MAX_LINE_BYTES", 10)
    with pytest.raises(InputError, match="line 2, length"):
        LogFile("a.log", lambda: [b"short\n", b"eleven char\n"])
    log = TrainingLog(file=LogFile("a.log", lambda: [b"short\n"]), framework="megatron")
    monkeypatch.setattr(log_lines, "MAX_STEPS", 1)
    log.step(LoggedStep(line=1, number=1, time_s=1.0))
    with pytest.raises(InputError, match="at most 1 timed steps"):
        log.step(LoggedStep(line=2, number=2, time_s=1.0))
    table = tmp_path / "runs.csv"
    table.write_text(",".join([*REQUIRED, "iter_time_s"]) + "\n" + "1\n" * 3)
    with pytest.raises(InputError, match="at most 2 rows"):
        list(read_csv_rows(table, most=2))
    table.write_text("a" * (csv_rows.MAX_LINE + 1))
    with pytest.raises(InputError, match="1 MiB a line"):
        list(read_csv_rows(table))
