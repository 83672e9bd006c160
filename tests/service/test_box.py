"""A real fleet in a box: two nodes on a link of known speed, everything asked for through the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autotune.catalog import model as preset
from autotune.specs import JobState, Plan, StepReading
from deploy.box import Box
from storage import open_store

RANKS = 2
FAST_MBIT, SLOW_MBIT = 200.0, 50.0
TOLERANCE = 0.15
TRIES = 3
AMPLE_S = 240.0  # for a machine that is busy with other things; never waited for where all is well

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

FIXED = {"micro_batch": [4], "zero_stage": [0], "recompute": ["none"], "sequence_parallel": [False]}
# TP inside a node (2) or over both (4), with data parallelism or a pipeline across the link.
SMALL = {**FIXED, "tp": [2, 4], "pp": [1, 2], "schedule": ["1f1b"]}
DATA_PARALLEL = {**FIXED, "tp": [1], "pp": [1]}


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(nodes=2, ranks=RANKS, rate_mbit=FAST_MBIT) as made:
        yield made


def wait_for(found: Callable[[], Any], what: str) -> Any:
    ends = time.monotonic() + AMPLE_S
    while not (value := found()):
        assert time.monotonic() < ends, f"{what} did not come within {AMPLE_S:g} s"
        time.sleep(0.1)
    return value


def submit(box: Box, space: dict[str, Any], **more: Any) -> str:
    workload = {"seq_len": 64, "global_batch": 16}
    answer = box.ask("/tunings", {"model": "tiny", "cluster": "box", "workload": workload, "space": space, **more})
    assert answer["created"]
    return str(answer["tuning"])


def ended(box: Box, tuning: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        data = box.ask(f"/tunings/{tuning}")
        return data if data["state"] in {"done", "failed", "cancelled"} else None

    data: dict[str, Any] = wait_for(look, "the end of the tuning")
    assert data["state"] == "done", data["stop_reason"]
    return data


@pytest.fixture(scope="module")
def tuned(box: Box) -> dict[str, Any]:
    return ended(box, submit(box, SMALL, budget={"max_trials": 4}))


@pytest.fixture(scope="module")
def exhaustive(box: Box, tuned: dict[str, Any]) -> dict[Plan, float]:
    """Every legal plan of the same space, measured: tokens/s/GPU."""
    data = ended(box, submit(box, SMALL, sampler="grid", budget={"max_trials": 9, "min_gain": 0.0}))
    found: dict[Plan, float] = {}
    for trial in data["trials"]:
        plan = Plan.from_data(trial["plan"])
        found[plan] = max(found.get(plan, 0.0), trial["tokens_per_s_per_gpu"])
    return found


@pytest.mark.slow
def test_a_box_comes_up_and_tunes_and_its_nodes_are_free_again(box: Box) -> None:
    data = ended(box, submit(box, DATA_PARALLEL, budget={"max_trials": 1}, seed=7))
    assert Plan.from_data(data["best"]["plan"]).dp == 2 * RANKS
    wait_for(lambda: not box.ask("/jobs")["jobs"], "the end of all jobs")
    assert [(node["name"], node["job"]) for node in box.ask("/nodes")["nodes"]] == [("node0", None), ("node1", None)]


@pytest.mark.slow
def test_the_winner_keeps_tensor_parallelism_inside_a_node(tuned: dict[str, Any]) -> None:
    assert Plan.from_data(tuned["best"]["plan"]).tp <= RANKS
    assert {trial["state"] for trial in tuned["trials"]} <= {"complete", "pruned"}


@pytest.mark.slow
def test_the_winner_is_as_good_as_the_best_of_all(tuned: dict[str, Any], exhaustive: dict[Plan, float]) -> None:
    assert {(plan.tp, plan.pp) for plan in exhaustive} == {(2, 1), (2, 2), (4, 1)}
    assert exhaustive[Plan.from_data(tuned["best"]["plan"])] >= 0.9 * max(exhaustive.values())


@pytest.mark.slow
def test_tensor_parallelism_across_the_link_loses(exhaustive: dict[Plan, float]) -> None:
    across = max(speed for plan, speed in exhaustive.items() if plan.tp > RANKS)
    assert across < max(speed for plan, speed in exhaustive.items() if plan.tp <= RANKS)


@pytest.fixture
def slow(box: Box) -> Iterator[None]:
    """The link four times slower, so that a step of data parallelism is little else than its all-reduce."""
    for node in box.nodes:
        box.set_rate(node, SLOW_MBIT)
    yield
    for node in box.nodes:
        box.set_rate(node, FAST_MBIT)


def least_t_comm_s(box: Box, seed: int) -> float:
    """T_comm of a real step of data parallelism, of the rank that waited least for the others."""
    tuning = ended(box, submit(box, DATA_PARALLEL, budget={"max_trials": 1}, seed=seed))["tuning"]
    with open_store(box.database_url, read_only=True) as store:
        reading = store.trials(tuning)[0].reading
    assert isinstance(reading, StepReading)
    times_s = [rank.t_comm_s for rank in reading.ranks if rank.t_comm_s is not None]
    assert len(times_s) == 2 * RANKS
    return min(times_s)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_t_comm_across_the_link_is_what_its_rate_allows(box: Box) -> None:
    model = preset("tiny")
    layer = 2 * model.hidden**2 + 2 * model.hidden * model.kv_heads * model.head_dim + 3 * model.hidden * model.ffn
    parameters = 2 * model.vocab * model.hidden + model.layers * (layer + 2 * model.hidden) + model.hidden
    ranks = 2 * RANKS
    # A ring all-reduce of n ranks sends 2 (n - 1) / n of the buffer from each to the next; one pair spans the link.
    sent_bytes = 4 * parameters * 2 * (ranks - 1) / ranks
    expected_s = sent_bytes / (SLOW_MBIT * 1e6 / 8)
    least_s = float("inf")
    for seed in range(TRIES):  # whatever else a machine does makes it longer, never shorter
        least_s = min(least_s, least_t_comm_s(box, seed))
        if least_s <= expected_s * (1 + TOLERANCE):
            break
    assert least_s == pytest.approx(expected_s, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_a_link_that_goes_down_in_mid_collective_costs_time_only(box: Box) -> None:
    tuning = submit(box, DATA_PARALLEL, seed=1, budget={"max_trials": 1})

    def stepping() -> list[dict[str, Any]]:
        jobs = box.ask(f"/jobs?tuning={tuning}&state=granted")["jobs"]
        return [job for job in jobs if job["progress"] and job["progress"]["phase"] in {"warm-up", "step"}]

    (job,) = wait_for(stepping, "a step across the link")
    box.link_down("node1")
    try:
        gone = wait_for(lambda: ended_jobs(box, tuning).get(job["id"]), "the end of the job that was cut")
    finally:
        box.link_up("node1")
    assert gone["failure"] in {"lost", "hang", "communication", "crash"}
    data = ended(box, tuning)
    assert [trial["state"] for trial in data["trials"]] == ["complete"]
    attempts = [job["attempt"] for job in ended_jobs(box, tuning).values() if job["purpose"] == "trial"]
    assert len(attempts) >= 2
    wait_for(lambda: not box.ask("/jobs")["jobs"], "the end of all jobs")
    assert all(node["job"] is None for node in box.ask("/nodes")["nodes"])


def ended_jobs(box: Box, tuning: str) -> dict[str, dict[str, Any]]:
    jobs = box.ask(f"/jobs?tuning={tuning}&state={JobState.ENDED.value}")["jobs"]
    return {job["id"]: job for job in jobs}
