"""`best`, `show`, `history`, `export`, `db` and the catalogs, over a store with known records."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import Command
from store_records import CLUSTER, FAILURE, FINGERPRINT, MODEL, MOMENT, step_reading, trial, tuning

from autotune.specs import ModelSpec, Plan, Tuning, TuningState
from storage import SqlStore, open_store

FAST, SLOW = Plan(tp=2, pp=1, dp=4), Plan(tp=2, pp=2, dp=2)


def finish(store: SqlStore, number: int, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
    """One trial of the tuning: complete with this speed, or failed."""
    running = trial(number, plan=plan)
    store.start_trial(running)
    reading = None if tokens_per_s_per_gpu is None else step_reading(tokens_per_s_per_gpu)
    store.finish_trial(
        running.id,
        reading=reading,
        failure=None if reading else FAILURE,
        outcome_gpu_s=10.0,
        setup_s=0.5,
        fingerprint_key=FINGERPRINT.key,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with one tuning of three complete trials, two of the fastest plan, and a failed one."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as store:
        store.put_fingerprint(FINGERPRINT)
        store.create_tuning(tuning("empty-one", created_at=MOMENT.replace(year=2027)))
        store.create_tuning(tuning())
        for number, (plan, speed) in enumerate(((SLOW, 900.0), (FAST, 1000.0), (FAST, 1020.0), (Plan(dp=8), None))):
            finish(store, number, plan, speed)
    return url


def test_best_is_that_of_the_newest_tuning_that_measured_something(autotune: Command, url: str) -> None:
    answer = autotune("best", "--db", url, "--json").data
    best = answer["best"]
    assert answer["tuning"] == "tuning-1"
    assert best["plan"] == FAST.to_data()
    assert best["repeats"] == 2
    assert 1000 <= best["tokens_per_s_per_gpu"] <= 1020
    assert best["interval"][0] < best["tokens_per_s_per_gpu"] < best["interval"][1]
    assert answer["runner_up"]["plan"] == SLOW.to_data()
    assert answer["runner_up"]["tokens_per_s_per_gpu"] == pytest.approx(900)
    assert answer["fingerprint"] == FINGERPRINT.to_data()
    assert answer["measured_at"].startswith("20")
    assert answer["launch"] is None


def test_best_for_people_names_the_evidence(autotune: Command, url: str) -> None:
    out = autotune("best", "--db", url).out
    for word in (FAST.key, SLOW.key, "tokens/s/GPU", "95 % interval", "torch.cuda", "node-1", "--for megatron"):
        assert word in out


def test_best_says_what_goes_on(autotune: Command, url: str) -> None:
    done = autotune("best", "--db", url)
    assert "Tuning tuning-1 is still under way (queued): this is its best plan so far" in done.out
    assert "Tuning empty-one is under way (queued) and has no complete trial yet: this is of an earlier" in done.err
    with open_store(url) as store:
        for name in ("tuning-1", "empty-one"):
            store.save_tuning(store.tuning(name).model_copy(update={"state": TuningState.DONE}))
    done = autotune("best", "--db", url)
    assert "under way" not in done.out + done.err


def test_nothing_measured_yet_is_told_with_what_goes_on(autotune: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'b.db'}"
    with open_store(url) as store:
        store.create_tuning(tuning())
    assert "tuning-1 is queued, see autotune show" in autotune("best", "--db", url).err
    shown = autotune("show", "tuning-1", "--db", url).out
    assert "queued" in shown
    assert "Trials" not in shown


def test_best_gives_launch_arguments(autotune: Command, url: str) -> None:
    launch = autotune("best", "--tuning", "tuning-1", "--for", "megatron", "--db", url, "--json").data["launch"]
    argv = launch["argv"]
    assert launch["target"] == "megatron"
    assert argv[argv.index("--tensor-model-parallel-size") + 1] == "2"
    assert "--tensor-model-parallel-size 2" in autotune("best", "--for", "megatron", "--db", url).out
    refused = autotune("best", "--for", "slide-rule", "--db", url)
    assert refused.status == 2
    assert "megatron" in refused.err


def test_best_of_a_tuning_without_a_trial(autotune: Command, url: str) -> None:
    done = autotune("best", "--tuning", "empty-one", "--db", url)
    assert done.status == 2
    assert "no complete trial" in done.err


def test_show_has_every_trial_and_the_request(autotune: Command, url: str) -> None:
    answer = autotune("show", "tuni", "--db", url, "--json").data
    assert [each["state"] for each in answer["trials"]] == ["complete", "complete", "complete", "failed"]
    assert answer["trials"][3]["failure"]["kind"] == "oom"
    assert answer["gpu_s_spent"] == 40.0
    assert Tuning.from_data(answer["request"]).cluster == CLUSTER
    out = autotune("show", "tuning-1", "--db", url).out
    for word in ("tuning-1", "oom", FAST.key, Plan(dp=8).key):
        assert word in out


def test_show_explains_the_best_plan(autotune: Command, url: str) -> None:
    answer = autotune("show", "tuning-1", "--db", url, "--json").data
    assert answer["sampler"] == "tpe"
    assert answer["best"]["why"] == [item["text"] for item in answer["explanation"]["losses"]]
    assert answer["explanation"]["losses"][0]["source"] == "measured"
    assert answer["explanation"]["losses"][0]["plan"] == SLOW.to_data()
    out = autotune("show", "tuning-1", "--db", url).out
    for words in ("What limits it:", "Against other plans:", "(measured)", "pp 2 instead of 1"):
        assert words in out


def test_of_plans_that_cannot_be_told_apart_the_other_is_named(autotune: Command, url: str) -> None:
    with open_store(url) as store:
        finish(store, 4, Plan(tp=4, dp=2), 1005.0)
    best = autotune("best", "--db", url, "--json").data["best"]
    assert best["plan"] == FAST.to_data()
    assert best["too_close_to_call"] == [Plan(tp=4, dp=2).to_data()]
    assert best["preferred_because"] is None
    assert "too close to call against tp4" in autotune("show", "tuning-1", "--db", url).out


def test_show_leaves_no_trial_out(autotune: Command, url: str) -> None:
    with open_store(url) as store:
        for number in range(4, 30):
            finish(store, number, Plan(tp=8, micro_batch=number), 100.0 + number)
    out = autotune("show", "tuning-1", "--db", url).out
    for number in range(4, 30):
        assert Plan(tp=8, micro_batch=number).key in out


def test_history_is_newest_first(autotune: Command, url: str) -> None:
    rows = autotune("history", "--db", url, "--json").data["tunings"]
    assert [(row["tuning"], row["trials"]) for row in rows] == [("empty-one", 0), ("tuning-1", 4)]
    assert rows[0]["plan"] is None
    assert rows[1]["plan"] == FAST.to_data()
    assert len(autotune("history", "--limit", "1", "--db", url, "--json").data["tunings"]) == 1
    assert FAST.key in autotune("history", "--db", url).out


@pytest.mark.parametrize(("format", "read"), [("csv", pd.read_csv), ("parquet", pd.read_parquet)])
def test_export_writes_the_trials(autotune: Command, url: str, tmp_path: Path, format: str, read: object) -> None:
    out = tmp_path / f"out.{format}"
    answer = autotune("export", "--format", format, "--out", out, "--db", url, "--json").data
    assert answer["path"] == str(out)
    assert callable(read)
    frame = read(out)
    assert frame["state"].tolist() == ["complete", "complete", "complete", "failed"]
    assert frame["tokens_per_s_per_gpu"].dropna().tolist() == [900.0, 1000.0, 1020.0]
    again = autotune("export", "--format", format, "--out", out, "--db", url)
    assert again.status == 2
    assert "exists" in again.err


def test_db_commands(autotune: Command, url: str) -> None:
    assert autotune("db", "check", "--db", url, "--json").data["sound"] is True
    stats = autotune("db", "stats", "--db", url, "--json").data
    assert stats["rows"]["tunings"] == 2
    assert stats["rows"]["tuning_trials"] == 4
    assert "up to date" in autotune("db", "migrate", "--db", url).out


def test_db_migrate_makes_the_users_own_database(autotune: Command, tmp_path: Path) -> None:
    done = autotune("db", "migrate", "--json")
    assert done.data["found"] is None
    assert (tmp_path / "data" / "autotune" / "autotune.db").exists()
    assert autotune("history", "--json").data == {"tunings": []}


def test_damage_is_told_with_the_databases_exit_status(autotune: Command, url: str, tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("DELETE FROM step_measurements WHERE trial_id = 'tuning-1-0'")
    connection.close()
    done = autotune("db", "check", "--db", url, "--json")
    assert done.status == 5
    assert done.data["problems"]


def test_models_and_clusters_can_be_stored_and_listed(autotune: Command, url: str, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    imported = autotune("models", "import", file, "--name", "little", "--db", url, "--json").data
    listed = autotune("models", "list", "--db", url, "--json").data["models"]
    assert {**imported, "origin": "stored"} in listed
    assert any(each["name"] == "gpt3-175b" and each["origin"] == "preset" for each in listed)
    shown = ModelSpec.from_yaml(autotune("models", "show", "little", "--db", url).out)
    assert (shown.name, shown.hidden, shown.layers) == ("little", 256, 2)

    autotune("cluster", "add", "h100-80gb-sxm:2x8", "--name", "ours", "--db", url)
    assert "ours" in [each["name"] for each in autotune("cluster", "list", "--db", url, "--json").data["clusters"]]
    assert "ours" in autotune("cluster", "list", "--db", url).out


def test_what_is_replaced_is_said(autotune: Command, url: str, tmp_path: Path) -> None:
    def add(nodes: int) -> str:
        done = autotune("cluster", "add", f"h100-80gb-sxm:{nodes}x8", "--name", "ours", "--db", url)
        assert done.status == 0
        return done.err

    assert add(2) == add(2) == ""
    assert add(4) == "cluster ours was stored before and is replaced (nodes changed)\n"
    file = tmp_path / "model.yaml"
    file.write_text(MODEL.to_yaml())
    assert autotune("models", "import", file, "--name", "mine", "--db", url).err == ""
    file.write_text(MODEL.model_copy(update={"layers": 3}).to_yaml())
    done = autotune("models", "import", file, "--name", "mine", "--db", url)
    assert done.err == "model mine was stored before and is replaced (layers changed)\n"


def test_brackets_in_a_name_are_no_markup(autotune: Command, url: str) -> None:
    assert autotune("cluster", "add", "l40s:1x8", "--name", "the [/red] one", "--db", url).status == 0
    assert "the [/red] one" in autotune("cluster", "list", "--db", url).out


def test_discover_writes_a_file_that_can_be_used(autotune: Command, tmp_path: Path) -> None:
    written = autotune("cluster", "discover", "--out", "here.yaml", "--save", "--json").data
    assert autotune("cluster", "show", "here.yaml", "--json").data == written
    assert autotune("cluster", "show", written["name"], "--json").data == written


def test_gpus_and_schemas(autotune: Command) -> None:
    names = [each["name"] for each in autotune("gpus", "--json").data["gpus"]]
    assert "a100-80gb-sxm" in names
    table = autotune("gpus").out
    assert [name for name in names if name not in table] == []
    assert "sources" in autotune("gpus", "mi300x").out
    for name in autotune("schema", "--json").data["schemas"]:
        assert "properties" in autotune("schema", name).data


def test_without_a_command_there_is_help(autotune: Command) -> None:
    done = autotune()
    assert done.status == 2
    assert "Usage: autotune" in done.out
    assert done.err == ""
    assert autotune("--version").out.startswith("autotune 0.")
