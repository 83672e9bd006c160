"""`autotune import`, `imports` and `plan --history`, from the file to what it changes."""

from __future__ import annotations

from pathlib import Path

import import_logs
import pytest
from commands import Command

MEGATRON = ("--format", "megatron", "--cluster", "h100-80gb-sxm:2x8", "--model", "llama3.1-8b")
REQUEST = ("--model", "llama3.1-8b", "--cluster", "h100-80gb-sxm:2x8", "--seq-len", 8192, "--global-batch", 128)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run7.log"
    path.write_text(import_logs.megatron())
    return path


def test_a_log_is_imported_once_and_forgotten(autotune: Command, log: Path, tmp_path: Path) -> None:
    first = autotune("import", log, *MEGATRON, "--json")
    assert first.status == 0, first.err
    (answer,) = first.data["files"]
    assert (first.data["source"], answer["stored"], answer["already"]) == ("run7", True, None)
    assert answer["runs"][0]["plan"]["tp"] == 4
    copy = tmp_path / "copy.log"
    copy.write_bytes(log.read_bytes())
    again = autotune("import", copy, *MEGATRON)
    assert again.status == 0
    assert "imported already as run7 (run7.log); nothing was changed" in again.out
    assert [item["source"] for item in autotune("imports", "--json").data["imports"]] == ["run7"]
    assert autotune("imports", "--forget", "run7", "--json").data == {"forgotten": "run7", "files": 1}
    assert autotune("imports", "--json").data == {"imports": []}


def test_content_that_is_stored_is_not_read_differently_in_silence(autotune: Command, log: Path) -> None:
    assert autotune("import", log, *MEGATRON).status == 0
    other = autotune("import", log, *MEGATRON, "--source", "another")
    assert other.status == 2
    assert "--forget run7" in other.err
    place = MEGATRON.index("--cluster") + 1
    elsewhere = (*MEGATRON[:place], "h200-141gb-sxm:2x8", *MEGATRON[place + 1 :])
    moved = autotune("import", log, *elsewhere)
    assert moved.status == 2
    assert "--forget run7" in moved.err
    assert len(autotune("imports", "--json").data["imports"]) == 1


def test_a_dry_run_stores_nothing_and_makes_no_database(autotune: Command, log: Path, tmp_path: Path) -> None:
    done = autotune("import", log, *MEGATRON, "--dry-run")
    assert done.status == 0, done.err
    assert "run7.log: 1 runs and 0 collective readings would be imported as run7" in done.out
    assert "tp4.pp2.dp2.mb1.zero1.rc-selective.sp" in done.out
    assert not (tmp_path / "data").exists()


def test_a_log_that_grew_replaces_what_it_was(autotune: Command, log: Path) -> None:
    whole = log.read_text()
    log.write_text(whole[: whole.index("iteration       11/")])
    assert "line 53 is cut off" in autotune("import", log, *MEGATRON).out
    log.write_text(whole)
    assert "imported as run7, in place of run7.log" in autotune("import", log, *MEGATRON).out
    assert len(autotune("imports", "--json").data["imports"]) == 1


def test_nothing_is_stored_when_one_of_the_files_cannot_be_read(autotune: Command, log: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.log"
    broken.write_text(import_logs.megatron().replace("5010.0", "-1.0"))
    done = autotune("import", log, broken, *MEGATRON, "--source", "x", "--json")
    assert done.status == 2
    assert "broken.log, line" in done.data["error"]["what"]
    assert (done.data["error"]["value"], done.data["error"]["allowed"]) == ("-1.0", "must be a finite number above 0")
    assert autotune("imports", "--json").status == 5  # not even a database was made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "logfmt"), "--format: 'logfmt' cannot be used; one of csv, nccl-tests, megatron"),
        (("--format", "megatron"), "--cluster"),
        ((*MEGATRON, "--source", "autotune"), "this name is our own measurements'"),
        ((*MEGATRON, "--source", "measured"), "this name is our own measurements'"),
        ((*MEGATRON, "--source", ""), "source"),
        ((*MEGATRON, "--plan", "tp=2"), "--plan tp= says 2, the log says otherwise"),
        ((*MEGATRON, "--plan", "ways=2"), "--plan"),
        (("--format", "csv", "--plan", "tp=2"), "a runs file states this in each row"),
        (("--format", "csv"), "columns are missing"),
    ],
)
def test_wrong_input_names_what_is_allowed(
    autotune: Command, log: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = autotune("import", log, *arguments)
    assert done.status == 2
    assert message in done.err


def test_files_that_are_not_there_and_names_that_are_missing(autotune: Command, log: Path) -> None:
    assert "nowhere.log" in autotune("import", "nowhere.log", *MEGATRON).err
    assert "several files need a name" in autotune("import", log, log, *MEGATRON).err
    assert "this source" not in autotune("plan", *REQUEST, "--history", "run7").err
    assert autotune("plan", *REQUEST, "--history", "run7").status == 5


def test_imported_runs_move_the_ranking_and_are_shown_as_others(autotune: Command, log: Path) -> None:
    log.write_text(import_logs.megatron([4 * time for time in import_logs.TIMES_MS]))
    assert autotune("import", log, *MEGATRON, "--source", "mlops").status == 0
    done = autotune("plan", *REQUEST, "--history", "mlops", "--top", 10_000, "--json")
    assert done.status == 0, done.err
    assert done.data["history"] == {"source": "mlops", "runs": 1, "lessons": 0, "readings": 0}
    assert done.data["framework"] == "megatron"
    (known,) = [item for item in done.data["plans"] if item["imported"]]
    speed = 8192 * 8 / (4 * 5.0025)
    assert (known["plan"]["tp"], known["imported"]["runs"]) == (4, 1)
    assert known["imported"]["tokens_per_s_per_gpu"] == pytest.approx(speed)
    assert known["expected_tokens_per_s_per_gpu"] == pytest.approx(speed)
    # One run at a fraction of its estimate teaches that its likes are slower than was thought, too.
    alike = [item for item in done.data["plans"] if (item["plan"]["tp"], item["plan"]["pp"]) == (4, 2)]
    assert len(alike) > 10
    assert all(item["expected_tokens_per_s_per_gpu"] < item["estimate"]["tokens_per_s_per_gpu"] for item in alike)
    unknown = autotune("plan", *REQUEST, "--history", "nobody")
    assert (unknown.status, "known: mlops" in unknown.err) == (2, True)


def test_runs_of_another_size_are_transfers_and_sweeps_are_links(autotune: Command, log: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.txt"
    sweep.write_text(import_logs.nccl_tests(local=8, hosts=4))
    assert autotune("import", log, *MEGATRON, "--source", "mlops").status == 0
    larger = "h100-80gb-sxm:4x8"
    done = autotune("import", sweep, "--format", "nccl-tests", "--cluster", larger, "--source", "mlops")
    assert done.status == 0, done.err
    request = ("--model", "llama3.1-8b", "--cluster", larger, "--seq-len", 8192, "--global-batch", 256)
    found = autotune("plan", *request, "--history", "mlops", "--json").data
    assert found["history"] == {"source": "mlops", "runs": 0, "lessons": 1, "readings": 3}
    assert found["plans"][0]["imported"] is None
    one = autotune("plan", *request, "--history", "mlops", "--plan", "tp=4,pp=2,micro_batch=1,zero_stage=1", "--json")
    assert [item["plan"]["dp"] for item in one.data["plans"]] == [4]
    assert "neither --scaling nor --explain" in autotune("plan", *request, "--history", "mlops", "--explain").err
