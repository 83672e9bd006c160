"""`plan` and `estimate`: the objects that others script against, and their agreement with each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from autotune.catalog import load_model
from autotune.cli.check import GPU_MODEL
from autotune.cli.inputs import read_workload
from autotune.specs import ClusterSpec, ComputeFit, DType, Profile
from storage import open_store

CLUSTER = "a100-80gb-sxm:2x8"
REQUEST = ("--model", "llama2-7b", "--cluster", CLUSTER, "--seq-len", "4096", "--global-batch", "128")
SECONDS = {"compute", "tp", "ep", "cp", "pp_p2p", "bubble", "dp_exposed", "optimizer", "launch"}
BYTES = {"parameters", "gradients", "optimizer", "activations", "logits", "buffers", "gathered", "fragmentation"}


def text_of(plan: dict[str, object]) -> str:
    words = {key: "+".join(value) if isinstance(value, list) else str(value).lower() for key, value in plan.items()}
    return ",".join(f"{key}={word}" for key, word in words.items())


def test_plan_ranks_what_fits_by_speed_times_p_fits(autotune: Command) -> None:
    answer = autotune("plan", *REQUEST, "--top", "7", "--json").data
    found = [each["estimate"] for each in answer["plans"]]
    worth = [each["tokens_per_s_per_gpu"] * each["p_fits"] for each in found]
    assert len(worth) == 7
    assert worth == sorted(worth, reverse=True)
    for each in found:  # wide, because nothing was read
        assert each["step_time_interval_s"][0] < 0.8 * each["step_time_s"] < 1.25 * each["step_time_interval_s"][1]
        low, high = each["peak_memory_interval_bytes"]
        assert low < each["peak_memory_bytes"] < high
    assert all(each["estimate"]["fits"] for each in answer["plans"])
    assert answer["basis"] == "catalog"
    assert 7 < answer["fitting"] <= answer["legal"]
    assert answer["seconds"] > 0
    assert answer["estimates_per_s"] > 0


def test_estimate_gives_the_parts_and_agrees_with_plan(autotune: Command) -> None:
    best = autotune("plan", *REQUEST, "--top", "1", "--json").data["plans"][0]
    answer = autotune("estimate", *REQUEST, "--plan", text_of(best["plan"]), "--json").data
    estimate = answer["estimate"]
    assert answer["plan"] == best["plan"]
    assert estimate == best["estimate"]
    assert set(estimate["seconds"]) == SECONDS
    assert set(estimate["bytes"]) == BYTES
    assert sum(estimate["seconds"].values()) == pytest.approx(estimate["step_time_s"])
    assert sum(estimate["bytes"].values()) == pytest.approx(estimate["peak_memory_bytes"])


def test_tables_show_the_same_plan(autotune: Command) -> None:
    out = autotune("plan", *REQUEST, "--plan", "tp=4,pp=2,micro_batch=2").out
    assert "tp4.pp2.dp2.mb2.zero0" in out
    assert "Estimates from the catalog" in out
    out = autotune("estimate", *REQUEST, "--plan", "tp=4,pp=2,micro_batch=2").out
    assert "tp4.pp2.dp2.mb2.zero0" in out
    for part in SECONDS | BYTES:
        assert part in out


def test_options_restrict_the_space(autotune: Command) -> None:
    space = (
        "--tp", "2,4", "--pp", "2", "--micro-batch", "1,2", "--zero-stage", "1", "--recompute", "full",
        "--sequence-parallel", "true", "--schedule", "gpipe,1f1b", "--top", "1000", "--all",
    )  # fmt: skip
    plans = [each["plan"] for each in autotune("plan", *REQUEST, *space, "--json").data["plans"]]
    seen = {key: {plan[key] for plan in plans} for key in plans[0] if key != "recompute_modules"}
    assert seen["tp"] == {2, 4}
    assert seen["pp"] == {2}
    assert seen["micro_batch"] == {1, 2}
    assert seen["zero_stage"] == {1}
    assert seen["recompute"] == {"full"}
    assert seen["sequence_parallel"] == {True}
    assert seen["schedule"] == {"gpipe", "1f1b"}


def test_one_plan_is_shown_even_if_it_does_not_fit(autotune: Command) -> None:
    done = autotune("plan", *REQUEST, "--plan", "tp=1", "--json")
    answer = done.data
    (only,) = answer["plans"]
    assert done.status == autotune("plan", *REQUEST, "--plan", "tp=1").status == 3
    assert (answer["legal"], answer["fitting"]) == (1, 0)
    assert only["plan"]["dp"] == 16
    assert not only["estimate"]["fits"]


def test_a_measured_profile_is_used_and_named(autotune: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    cluster = ClusterSpec.from_data(autotune("cluster", "show", CLUSTER, "--json").data)
    compute = ComputeFit(flops_per_s=1e14, launch_s=5e-6, bytes_per_s=1e12, relative_error=0.01, readings=9)
    with open_store(url) as store:
        store.save_profile(Profile(cluster_key=cluster.key, fingerprint_key="", compute=compute))
    plan = ("--plan", "tp=8,pp=2,micro_batch=1")
    measured = autotune("estimate", *REQUEST, *plan, "--db", url, "--json").data["estimate"]
    assumed = autotune("estimate", *REQUEST, *plan, "--json").data["estimate"]
    assert (measured["basis"], assumed["basis"]) == ("profile", "catalog")
    assert measured["seconds"]["compute"] > assumed["seconds"]["compute"]


def test_stored_names_are_found(autotune: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    (tmp_path / "mine.yaml").write_text(autotune("models", "show", "tiny").out.replace("name: tiny", "name: mine"))
    assert autotune("models", "import", "mine.yaml", "--db", url).status == 0
    assert autotune("cluster", "add", "a100-80gb-sxm:1x4", "--name", "four", "--db", url).status == 0
    answer = autotune("plan", "--model", "mine", "--cluster", "four", "--db", url, "--json").data
    assert (answer["model"], answer["cluster"], answer["devices"]) == ("mine", "four", 4)


@pytest.mark.parametrize(
    ("model", "cluster", "expected"),
    [
        ("tiny", "a100-80gb-sxm:1x8", (128, 16, "bf16")),
        ("tiny", "a100-80gb-sxm:8x8", (128, 64, "bf16")),
        ("llama2-7b", "a100-80gb-sxm:1x8", (4096, 128, "bf16")),
        ("gpt3-175b", "a100-80gb-sxm:128x8", (2048, 1024, "bf16")),
        ("llama2-7b", "v100-32gb-sxm:1x8", (4096, 128, "fp16")),
    ],
)
def test_defaults_of_the_workload(autotune: Command, model: str, cluster: str, expected: tuple[int, int, str]) -> None:
    workload = autotune("plan", "--model", model, "--cluster", cluster, "--plan", "tp=1", "--json").data["workload"]
    assert (workload["seq_len"], workload["global_batch"], workload["dtype"]) == expected


def test_the_self_check_trains_a_preset_that_exists() -> None:
    assert load_model(GPU_MODEL).name == GPU_MODEL


def test_on_cpus_any_model_gets_a_small_workload() -> None:
    device = {"name": "cpu-rank", "kind": "cpu", "memory_bytes": 2**30}
    cluster = ClusterSpec.from_data(
        {"name": "here", "nodes": 1, "gpus_per_node": 2, "device": device, "intra": {"name": "loopback"}}
    )
    workload = read_workload(load_model("llama2-7b"), cluster, seq_len=None, global_batch=None, dtype=None)
    assert (workload.seq_len, workload.global_batch, workload.dtype) == (128, 16, DType.FP32)


def test_plan_explains_its_best_plan(autotune: Command) -> None:
    answer = autotune("plan", *REQUEST, "--explain", "--json").data
    assert answer["rejection"] is None
    assert {item["kind"] for item in answer["explanation"]["limits"]} >= {"compute"}
    assert all(item["slower"] >= 0 or item["refusal"] for item in answer["explanation"]["losses"])
    out = autotune("plan", *REQUEST, "--explain").out
    for words in ("What limits it:", "Against other plans:", "What would help the best plan most", "(estimate)"):
        assert words in out


def test_plan_explains_why_a_plan_is_not_the_best(autotune: Command) -> None:
    slow = autotune("plan", *REQUEST, "--plan", "tp=16,micro_batch=4", "--explain", "--json").data["rejection"]
    assert slow["slower"] > 0.5
    assert slow["parts"][0]["part"] == "TP communication"
    large = autotune("plan", *REQUEST, "--plan", "tp=1", "--explain").out
    assert "does not fit: pipeline stage 0" in large
    illegal = autotune("plan", *REQUEST, "--plan", "tp=16,pp=2", "--explain")
    assert illegal.status == 2


def test_plan_scales(autotune: Command) -> None:
    answer = autotune("plan", *REQUEST, "--scaling", "--json").data["scaling"]
    assert [point["devices"] for point in answer["points"]][:4] == [2, 4, 8, 16]
    assert answer["pays_up_to"] >= 16
    out = autotune("plan", *REQUEST, "--scaling").out
    for words in ("E(N)", "GPUs", "90 %", "estimates", "contribute at least 50%"):
        assert words in out


def test_estimate_names_the_part_that_dominates(autotune: Command) -> None:
    plan = ("--plan", "tp=8,pp=2,micro_batch=1")
    answer = autotune("estimate", *REQUEST, *plan, "--json").data
    assert sum(answer["largest_parts"].values()) == pytest.approx(1.0)
    assert "The step is mostly computing" in autotune("estimate", *REQUEST, *plan).out
