"""Bad input: one clear line, the right exit status, no traceback; with --json one object that says the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import pwd
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Done
from store_records import MODEL

from autotune.cli.main import main
from storage import open_store

BIG = ("--model", "gpt3-175b", "--cluster", "a100-80gb-sxm:128x8")
SMALL = ("--model", "tiny", "--cluster", "a100-80gb-sxm:1x8")
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def assert_refused(done: Done, status: int, *words: str) -> None:
    assert done.status == status
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpus", "a100-96gb"), ("a100-96gb", "a100-80gb-sxm")),
        (("db", "compact", "--older-than", "1000000"), ("--older-than", "36500")),
        (("db", "compact", "--keep", "9" * 20), ("--keep", "1000000000")),
        (("known", "list", "--before", "9" * 20), ("--before", "9223372036854775807")),
        (("known", "compare", "9" * 20, "1"), ("ENTRY", "9223372036854775807")),
        (("regress", "history", "--entry", "9" * 20), ("--entry", "9223372036854775807")),
        (("plan", "--cluster", "q100:1x8"), ("q100",)),
        (("plan", "--cluster", "a100-80gb-sxm:0x8"), ("a100-80gb-sxm:0x8", "GPU:NODESxGPUS_PER_NODE")),
        (("plan", "--cluster", "nowhere"), ("nowhere", "stored cluster")),
        (("plan", "--model", "gpt5"), ("gpt5", "gpt3-175b")),
        (("plan", "--model", "nothing/config.json"), ("nothing/config.json",)),
        (("plan", *SMALL, "--seq-len", "0"), ("seq_len", "0")),
        (("plan", *SMALL, "--global-batch", "-1"), ("global_batch", "-1")),
        (("plan", *SMALL, "--dtype", "fp7"), ("dtype", "fp7", "bf16")),
        (("plan", *SMALL, "--tp", "two"), ("--tp", "two")),
        (("plan", *SMALL, "--plan", "tp=2", "--scaling"), ("--plan", "tp=2", "--scaling")),
        (("plan", *SMALL, "--plan", "tp=2", "--tp", "4", "--zero-stage", "1"), ("tp=2", "--tp, --zero-stage")),
        (("plan", *SMALL, "--explain", "--scaling"), ("--explain", "--scaling")),
        (("plan", *SMALL, "--tp", ""), ("--tp",)),
        (("plan", *SMALL, "--zero-stage", "-1"), ("--zero-stage", "-1")),
        (("plan", *SMALL, "--recompute", "some"), ("recompute", "some", "selective")),
        (("plan", *SMALL, "--sequence-parallel", "maybe"), ("--sequence-parallel", "maybe", "true")),
        (("plan", *SMALL, "--tp", "3"), ("no plan is legal",)),
        (("estimate", *SMALL), ("--plan",)),
        (("estimate", *SMALL, "--plan", "tp"), ("--plan", "'tp'", "micro_batch")),
        (("estimate", *SMALL, "--plan", "tq=2"), ("--plan", "'tq=2'", "micro_batch")),
        (("estimate", *SMALL, "--plan", "tp=2,tp=4"), ("--plan", "tp=4", "once")),
        (("estimate", *SMALL, "--plan", "tp=two"), ("--plan", "tp", "two")),
        (("estimate", *SMALL, "--plan", "schedule=zb"), ("--plan", "schedule", "zb", "1f1b")),
        (("estimate", *SMALL, "--plan", "tp=16"), ("--plan", "tp=16", "8 devices")),
        (("estimate", *SMALL, "--plan", "tp=4,dp=4"), ("--plan", "tp4", "8")),
        (("estimate", *BIG, "--global-batch", "1536", "--plan", "tp=2,pp=1,micro_batch=7"), ("1536", "512")),
        (("plan", "--model", "llama3-70b", "--cluster", "a100-80gb-sxm:8x8", "--plan", "tp=16,pp=1"), ("heads",)),
        (("schema", "plans"), ("plans", "plan")),
        (("probe", "collective", "--sizes", "1QB"), ("--sizes", "1QB", "MiB")),
        (("probe", "collective", "--cluster", "a100-80gb-sxm:1x8", "--group-size", "3"), ("--group-size", "3", "8")),
        (("cluster", "discover", "--memory-gib", "0"), ("--memory-gib", "0")),
        (("cluster", "discover", "--ranks", "0"), ("ranks", "0")),
        (("cluster", "discover", "--memory-gib", "nan"), ("--memory-gib", "nan")),
        (("cluster", "discover", "--memory-gib", "1e300"), ("--memory-gib", "1e+300")),
        (("backtest", "runs.csv", "--seed", str(2**63)), ("--seed",)),
        (("tune", "--no-such-option"), ("--no-such-option", "--help")),
        (("nodes", "list"), ("--server: none given", "$AUTOTUNE_SERVER")),
        (("--server", "http://127.0.0.1:1", "plan", "--plan", "tp=2"), ("--server", "--plan", "this machine only")),
        (("no-such-command",), ("no-such-command",)),
    ],
)
def test_input_that_cannot_be_used(autotune: Command, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(autotune(*arguments), 2, *words)


def test_an_unknown_key_in_a_file_is_named(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL.to_yaml() + "depth: 9\n")
    assert_refused(autotune("models", "show", file), 2, "model.yaml", "depth", "not known")


def test_a_misspelled_key_is_told_before_what_is_missing_for_it(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL.to_yaml().replace("hidden:", "hiden:").replace("layers:", "layer:"))
    assert_refused(autotune("models", "show", file), 2, "hiden", "not known", "wrong, too: layer")


def test_a_model_may_not_hide_behind_a_preset(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL.to_yaml())
    assert_refused(autotune("models", "import", file), 2, "tiny", "--name")


def test_a_model_whose_heads_do_not_divide_is_refused(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL.to_yaml().replace("kv_heads: 2", "kv_heads: 3"))
    assert_refused(autotune("plan", "--model", file), 2, "heads (4) must be a multiple of kv_heads (3)")


def test_a_corrupt_config_is_refused(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG)[:-20])
    assert_refused(autotune("models", "show", file), 2, "config.json", "JSON")


def test_a_config_with_an_unknown_part_is_refused_by_name(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | {"model_type": "perceptron"}))
    assert_refused(autotune("models", "show", file), 2, "perceptron")


def test_the_error_is_an_object_with_json(autotune: Command) -> None:
    done = autotune("plan", *SMALL, "--dtype", "fp7", "--json")
    error = done.data["error"]
    assert done.status == 2
    assert set(error) == {"what", "value", "allowed", "message"}
    assert (error["what"], error["value"]) == ("workload: dtype", "fp7")
    assert "bf16" in error["allowed"]
    assert error["message"] in done.err


def test_an_option_that_is_out_of_range_is_named_with_its_value_for_programs(autotune: Command) -> None:
    done = autotune("plan", *SMALL, "--top", "0", "--json")
    error = done.data["error"]
    assert (done.status, error["what"], error["value"]) == (2, "--top", "0")
    assert error["allowed"] in error["message"]


def test_a_wrong_command_line_is_an_object_too(autotune: Command) -> None:
    done = autotune("plan", "--bogus", "--json")
    assert done.status == 2
    assert done.data["error"]["what"] == "autotune plan"
    assert "--bogus" in done.data["error"]["message"]


def test_a_model_that_fits_nowhere_gets_the_nearest_misses(autotune: Command) -> None:
    request = ("plan", "--model", "llama3-70b", "--cluster", "rtx-4090:1x8", "--json")
    done = autotune(*request)
    assert done.status == 3
    misses = done.data["error"]["misses"]
    assert misses
    for miss in misses:
        assert miss["needs_bytes"] > miss["has_bytes"] > 0
        assert "GiB" in miss["would_fit_if"]
    assert misses[0]["plan"] in autotune(*request[:-1]).err


def test_a_speed_that_nobody_knows_is_not_guessed(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    device = {"name": "abacus", "kind": "cpu", "memory_bytes": 2**30}
    file.write_text(
        json.dumps({"name": "here", "nodes": 1, "gpus_per_node": 2, "device": device, "intra": {"name": "x"}})
    )
    assert_refused(autotune("plan", "--model", "tiny", "--cluster", file), 4, "abacus")


def test_a_database_that_cannot_be_written(autotune: Command, tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    assert_refused(
        autotune("cluster", "add", "a100-80gb-sxm:1x8", "--db", f"sqlite:///{folder / 'a.db'}"), 5, str(folder)
    )


def _add_as_nobody(url: str, err: str) -> None:
    """Runs `autotune cluster add` as a user whom permissions hold for, standard error into a file."""
    os.dup2(os.open(err, os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    if os.geteuid() == 0:  # to root nothing is read-only
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(*[nobody.pw_gid] * 3)
        os.setresuid(*[nobody.pw_uid] * 3)
    main(["cluster", "add", "a100-80gb-sxm:1x8", "--db", url])


def test_a_read_only_database(autotune: Command) -> None:
    with tempfile.TemporaryDirectory(prefix="autotune-shelf-") as shelf:  # others may not enter pytest's own folders
        file, err = Path(shelf) / "a.db", Path(shelf) / "err"
        url = f"sqlite:///{file}"
        err.touch()
        assert autotune("cluster", "add", "a100-80gb-sxm:1x4", "--db", url).status == 0
        file.chmod(0o444)
        Path(shelf).chmod(0o555)
        process = multiprocessing.get_context("fork").Process(target=_add_as_nobody, args=(url, str(err)))
        process.start()
        process.join(60)
        Path(shelf).chmod(0o700)
        assert process.exitcode == 5
        assert err.read_text().startswith(f"error: {file} cannot be written: ")
        assert err.read_text().count("\n") == 1


def test_a_database_that_is_none(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database at all, but long enough to look at " * 40)
    assert_refused(autotune("history", "--db", f"sqlite:///{file}"), 5, str(file))
    assert_refused(autotune("history", "--db", "mysql://here/there"), 5, "mysql", "sqlite:///")


def test_no_database_yet(autotune: Command) -> None:
    assert_refused(autotune("history"), 5, "autotune tune")


@pytest.mark.parametrize(
    "arguments", [("history",), ("db", "migrate"), ("cluster", "add", "a100-80gb-sxm:1x8"), ("tune",)]
)
def test_a_database_of_a_newer_release(autotune: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file = tmp_path / "newer.db"
    open_store(f"sqlite:///{file}").close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE autotune_schema SET version_num = '9999'")
    connection.close()
    assert_refused(autotune(*arguments, "--db", f"sqlite:///{file}"), 5, "9999", "newer release")


@pytest.mark.parametrize(
    "arguments", [("show", "abcd1234"), ("tune", "--resume", "abcd1234"), ("best", "--tuning", "abcd1234")]
)
def test_a_tuning_that_nobody_knows(autotune: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    open_store(url).close()
    assert_refused(autotune(*arguments, "--db", url), 2, "tuning", "abcd1234")


def test_best_without_a_measurement(autotune: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    open_store(url).close()
    assert_refused(autotune("best", "--db", url), 2, "--tuning", "autotune tune")


def test_tune_refuses_a_cluster_that_this_machine_is_not(autotune: Command, tmp_path: Path) -> None:
    for cluster, word in (("a100-80gb-sxm:2x8", "2 nodes"), ("v100-32gb-sxm:1x256", "256 GPUs")):
        done = autotune("tune", "--cluster", cluster, "--db", "sqlite:///a.db")
        assert_refused(done, 2, "--cluster", word, "autotune plan")
    with open_store(f"sqlite:///{tmp_path / 'a.db'}", read_only=True) as store:
        assert store.tunings() == []  # nothing was submitted


def test_resume_takes_no_other_inputs(autotune: Command) -> None:
    done = autotune("tune", "--resume", "abcd", "--tp", "2", "--db", "sqlite:///a.db")
    assert_refused(done, 2, "--resume", "abcd", "started with")


@pytest.mark.parametrize(("option", "value"), [("--max-trials", "0"), ("--budget-gpu-s", "-3"), ("--min-gain", "-0.1")])
def test_a_budget_that_cannot_be(autotune: Command, option: str, value: str) -> None:
    assert_refused(autotune("tune", option, value, "--db", "sqlite:///a.db"), 2, "budget", value)


def test_tune_refuses_a_batch_that_no_plan_divides(autotune: Command) -> None:
    done = autotune("tune", "--global-batch", "3", "--pp", "1", "--tp", "1", "--db", "sqlite:///a.db")
    assert_refused(done, 2, "no plan is legal", "3")


def test_an_unknown_sampler_is_named_with_the_known_ones(autotune: Command) -> None:
    done = autotune("tune", "--sampler", "oracle", "--db", "sqlite:///a.db")
    assert done.status == 2
    assert "oracle" in done.err
    assert "plan, tpe, gp, random, grid, rule" in done.err


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("history", "--db", "sqlite:///" + "a" * 300), 5, "cannot be opened"),
        (("history", "--db", "sqlite:///a\0b"), 5, "plain file"),
        (("history", "--limit", str(2**63)), 2, "--limit"),
        (("show", "\udcffabcd"), 2, "tuning"),
        (("show", "\0abcd"), 2, "tuning"),
        (("best", "--tuning", ""), 2, "tuning"),
    ],
)
def test_names_that_no_database_can_have(
    autotune: Command, tmp_path: Path, arguments: tuple[str, ...], status: int, word: str
) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    open_store(url).close()
    assert_refused(autotune(*arguments, *(() if "--db" in arguments else ("--db", url))), status, word)


@pytest.mark.parametrize("arguments", [("db", "migrate"), ("cluster", "add", "a100-80gb-sxm:1x8"), ("history",)])
def test_a_data_folder_that_cannot_be_made(
    autotune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert_refused(autotune(*arguments), 5, "autotune.db")


def test_a_stored_name_may_look_like_a_path(autotune: Command, tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path / 'a.db'}", tmp_path / "model.yaml"
    file.write_text(MODEL.to_yaml())
    assert autotune("models", "import", file, "--name", "someone/little.yaml", "--db", url).status == 0
    assert autotune("models", "show", "someone/little.yaml", "--db", url).status == 0
    assert autotune("cluster", "add", "a100-80gb-sxm:1x8", "--name", "lab/a.yaml", "--db", url).status == 0
    assert autotune("cluster", "show", "lab/a.yaml", "--db", url).status == 0
    assert_refused(autotune("models", "import", file, "--name", "GPT2", "--db", url), 2, "GPT2", "preset")


def _run(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from autotune.cli.main import main; main()", *arguments]
    return subprocess.run(command, check=False, timeout=60, text=True, **how)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")
def test_an_output_that_is_full_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = _run("gpus", "--json", stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_an_output_that_knows_ascii_only_gets_escapes(autotune: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    assert autotune("cluster", "add", "a100-80gb-sxm:1x8", "--name", "größer", "--db", url).status == 0
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = _run("cluster", "list", "--db", url, env=environment, capture_output=True)
    assert done.returncode == 0
    assert r"gr\xf6\xdfer" in done.stdout
