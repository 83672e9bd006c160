"""`best` with a question and `known`, over a store with known records."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command
from store_records import CLUSTER, FINGERPRINT, MODEL, step_reading, trial, tuning

from autotune.knowledge.recording import remember
from autotune.specs import Plan
from storage import open_store

FAST, SLOW = Plan(tp=2, dp=4), Plan(tp=2, pp=2, dp=2)
OURS = MODEL.model_copy(update={"name": "ours"})
QUESTION = ("--model", "ours", "--cluster", "pair", "--seq-len", 128, "--global-batch", 16, "--dtype", "bf16")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two entries: of the question, and of a smaller batch."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as store:
        store.put_model(OURS)
        store.put_cluster(CLUSTER)
        store.put_fingerprint(FINGERPRINT)
        smaller = tuning().workload.model_copy(update={"global_batch": 8})
        for name, workload in (("first", tuning().workload), ("second", smaller)):
            asked = tuning(name, workload=workload, model=OURS)
            store.create_tuning(asked)
            for number, (plan, speed) in enumerate(((SLOW, 900.0), (FAST, 1000.0))):
                running = trial(number, name, plan)
                store.start_trial(running)
                store.finish_trial(
                    running.id, reading=step_reading(speed), failure=None, outcome_gpu_s=1.0, setup_s=0.1,
                    fingerprint_key=FINGERPRINT.key,
                )  # fmt: skip
            remember(store, asked)
    return url


def test_the_best_known_plan_is_given_with_its_provenance(autotune: Command, url: str) -> None:
    data = autotune("best", *QUESTION, "--db", url, "--json").data
    assert data["known"]["plan"] == FAST.to_data()
    assert data["known"]["tuning_id"] == "first"
    assert data["known"]["fingerprint_key"] == FINGERPRINT.key
    assert data["stale"] == []
    assert data["nearest"] == []
    shown = autotune("best", *QUESTION, "--db", url).out
    assert FAST.key in shown
    assert "tuning first" in shown


def test_launch_arguments_of_the_known_plan(autotune: Command, url: str) -> None:
    data = autotune("best", *QUESTION, "--db", url, "--for", "megatron", "--json").data
    assert "--tensor-model-parallel-size" in data["launch"]["argv"]


def test_a_question_nearby_names_what_differs(autotune: Command, url: str) -> None:
    asked = ("--model", "ours", "--cluster", "pair", "--seq-len", 128, "--global-batch", 32, "--dtype", "bf16")
    done = autotune("best", *asked, "--db", url, "--json")
    assert done.data["known"] is None
    assert [item["differs"] for item in done.data["nearest"]] == [
        ["16 sequences a step instead of 32"],
        ["8 sequences a step instead of 32"],
    ]
    assert done.data["carried"] is None  # the card has no memory bandwidth and no profile
    assert "memory bandwidth" in done.data["carried_why_not"]
    assert done.status == 4


def test_with_speeds_in_the_catalog_an_unknown_question_gets_an_estimate_and_its_price(
    autotune: Command, url: str
) -> None:
    asked = ("--model", "llama3.1-8b", "--cluster", "h100-80gb-sxm:1x8")
    data = autotune("best", *asked, "--db", url, "--json").data
    low, high = data["carried"]["interval"]
    assert low < data["carried"]["tokens_per_s_per_gpu"] < high
    assert data["carried"]["source"] == "estimate"
    assert data["settle"]["gpu_s"] > 0
    assert {item["probe"] for item in data["settle"]["probes"]} == {"collective", "layer"}
    assert "--settle" in autotune("best", *asked, "--db", url).out


def test_where_nothing_fits_the_nearest_misses_are_named_as_plan_names_them(autotune: Command, url: str) -> None:
    asked = ("--model", "llama3-70b", "--cluster", "rtx-4090:1x8", "--db", url)
    done = autotune("best", *asked, "--json")
    assert done.status == autotune("plan", *asked).status == 3
    assert (done.data["known"], done.data["carried"]) == (None, None)
    assert all(miss["needs_bytes"] > miss["has_bytes"] > 0 for miss in done.data["misses"])
    assert done.data["misses"][0]["plan"] in autotune("best", *asked).err


def test_entries_are_listed_filtered_and_compared(autotune: Command, url: str) -> None:
    entries = autotune("known", "list", "--db", url, "--json").data["entries"]
    assert [item["tuning_id"] for item in entries] == ["second", "first"]
    assert autotune("known", "list", "--model", "nobody", "--db", url, "--json").data == {"entries": []}
    ids = [item["id"] for item in entries]
    data = autotune("known", "compare", *ids, "--db", url, "--json").data
    assert {"name": "global batch", "one": "8", "other": "16"} in data["differs"]
    assert "different questions" in data["verdict"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("best", *QUESTION, "--tuning", "first"), "--tuning"),
        (("best", "--settle"), "--settle"),
        (("best", *QUESTION[:2], "--cluster", "nowhere"), "nowhere"),
        (("known", "compare", 1, 1), "ENTRY"),
        (("known", "compare", 1, 999), "999"),
        (("known", "list", "--limit", 0), "--limit"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_error(autotune: Command, url: str, arguments: object, what: str) -> None:
    done = autotune(*arguments, "--db", url)  # type: ignore[misc]
    assert done.status == 2
    assert what in done.err
    assert "Traceback" not in done.err


def test_a_question_makes_no_database_where_one_was_named(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.db"
    asked = autotune("best", "--model", "gpt2", "--cluster", "a100-80gb-sxm:1x8", "--db", f"sqlite:///{file}")
    assert asked.status == 5
    assert not file.exists()
