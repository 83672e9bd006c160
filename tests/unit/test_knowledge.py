"""What is remembered of a tuning, what is near a question, and what is carried over to it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from store_records import CLUSTER, FINGERPRINT, MODEL, MOMENT, WORKLOAD, step_reading, trial, tuning

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.knowledge.answer import best_known, earlier_transfers
from autotune.knowledge.nearness import changes, compared, nearest
from autotune.knowledge.recording import remember
from autotune.knowledge.settling import settlement
from autotune.knowledge.transfer import carry, moved_profile, taught
from autotune.search.space import Runtime
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    Failure,
    FailureKind,
    LinkFit,
    ModelSpec,
    NearEntry,
    Plan,
    Profile,
    Trial,
    TrialState,
    Workload,
)
from storage import SqlStore, open_store

FAST, SLOW = Plan(tp=2, dp=4), Plan(tp=2, pp=2, dp=2)
LLAMA = model("llama3.1-8b")
H100 = cluster_from_shorthand("h100-80gb-sxm:2x8")
BF16 = Workload(seq_len=4096, global_batch=256)


def near(**changes: object) -> NearEntry:
    made = NearEntry(
        id=1, model_name=LLAMA.name, model_key=LLAMA.key, parameters=8e9, cluster_key="c", device_name="h100-80gb-sxm",
        gpus_per_node=8, devices=16, workload_key="w", seq_len=4096, global_batch=256, dtype="bf16",
        environment_key="e", source="measured", tokens_per_s_per_gpu=9e3, measured_at=MOMENT,
    )  # fmt: skip
    return made.model_copy(update=changes)


def near_ids(*entries: NearEntry) -> list[int]:
    return [item.entry.id for item in nearest(entries, LLAMA, 8e9, H100, BF16)]


def test_the_same_model_on_other_devices_is_nearer_than_a_sibling() -> None:
    sibling = near(id=1, model_key="other", model_name="sibling", parameters=7e9)
    assert near_ids(sibling, near(id=2, devices=64), near(id=3, devices=32)) == [3, 2, 1]


def test_every_difference_is_told() -> None:
    entry = near(model_key="o", model_name="other", devices=4, seq_len=8192, global_batch=128, source="a paper")
    (found,) = nearest([entry], LLAMA, 8e9, H100, BF16)
    text = "; ".join(found.differs)
    for part in ("4 GPUs instead of 16", "8192 tokens", "128 sequences", "model other", "imported from a paper"):
        assert part in text
    assert nearest([near()], LLAMA, 8e9, H100, BF16)[0].differs == ()


def test_of_equally_near_entries_the_newer_comes_first_and_far_ones_not_at_all() -> None:
    assert near_ids(near(id=1), near(id=2, measured_at=MOMENT + timedelta(days=1))) == [2, 1]
    assert near_ids(near(parameters=8e9 / 2**20, model_key="o")) == []


def test_changes_name_what_is_another_one_now() -> None:
    now = FINGERPRINT.model_copy(
        update={"driver": "590", "libraries": {"nccl": "2.29"}, "hostname": "elsewhere", "clocks": {}}
    )
    assert {(item.name, item.then, item.now) for item in changes(FINGERPRINT, now)} == {
        ("driver", "580.1", "590"),
        ("nccl", "2.28", "2.29"),
    }


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    return open_store(f"sqlite:///{tmp_path / 'a.db'}")


def measure(store: SqlStore, number: int, plan: Plan, speed: float | None, *, cluster: ClusterSpec = CLUSTER) -> None:
    running = trial(number, plan=plan)
    store.start_trial(running)
    failed = Failure(kind=FailureKind.OOM, message="out of memory") if speed is None else None
    store.finish_trial(
        running.id, reading=step_reading(speed) if speed else None, failure=failed, outcome_gpu_s=1.0, setup_s=0.1,
        fingerprint_key=FINGERPRINT.key,
    )  # fmt: skip


def tuned(store: SqlStore, **changes: object) -> None:
    store.put_fingerprint(FINGERPRINT)
    store.create_tuning(tuning(**changes))
    for number, (plan, speed) in enumerate(((SLOW, 950.0), (FAST, 1000.0), (FAST, 1020.0), (Plan(dp=8), None))):
        measure(store, number, plan, speed)


def test_a_tuning_is_remembered_with_its_evidence_once(store: SqlStore) -> None:
    tuned(store)
    entry = remember(store, tuning())
    assert entry is not None
    assert remember(store, tuning()) == entry
    assert entry.plan == FAST
    assert entry.repeats == 2
    assert entry.interval[0] < entry.tokens_per_s_per_gpu < entry.interval[1]
    assert entry.memory_margin == pytest.approx(1 - 75 / 80)
    assert entry.runner_up is not None
    assert entry.runner_up.plan == SLOW
    assert entry.runner_up.too_close  # two repeats decide nothing
    assert entry.environment_key == FINGERPRINT.environment_key
    assert store.best_page(history=True) == [entry]


def test_a_tuning_without_a_measurement_leaves_nothing(store: SqlStore) -> None:
    store.create_tuning(tuning())
    assert remember(store, tuning()) is None
    assert store.best_page() == []


def test_one_lucky_run_does_not_outlive_what_was_measured_after_it(store: SqlStore) -> None:
    store.put_fingerprint(FINGERPRINT)
    for name, runs in (("one", [(FAST, 210.0)]), ("two", [(FAST, 166.0), (SLOW, 180.0)]), ("three", [(FAST, 197.0)])):
        store.create_tuning(tuning(name))
        for number, (plan, speed) in enumerate(runs):
            running = trial(number, name, plan)
            store.start_trial(running)
            store.finish_trial(
                running.id, reading=step_reading(speed), failure=None, outcome_gpu_s=1.0, setup_s=0.1,
                fingerprint_key=FINGERPRINT.key,
            )  # fmt: skip
        entry = remember(store, tuning(name))
    assert entry is not None
    assert (entry.plan, entry.repeats) == (FAST, 3)
    assert entry.tokens_per_s_per_gpu == pytest.approx((210 + 166 + 197) / 3)
    low, high = entry.interval
    assert low < 166.0  # Student's of three runs
    assert high > 210.0
    assert best_known(store, MODEL, CLUSTER, WORKLOAD).known == entry
    assert remember(store, tuning("one")) == entry  # whichever tuning is remembered again


def test_what_was_measured_for_the_question_is_the_answer(store: SqlStore) -> None:
    tuned(store)
    entry = remember(store, tuning())
    answer = best_known(store, MODEL, CLUSTER, WORKLOAD)
    assert answer.known == entry
    assert answer.stale == []
    assert answer.to_data()["known"]["plan"] == FAST.to_data()


def test_a_newer_environment_makes_an_entry_stale_and_says_what_changed(store: SqlStore) -> None:
    tuned(store)
    remember(store, tuning())
    upgraded = FINGERPRINT.model_copy(update={"torch": "2.12.0"})
    store.put_fingerprint(upgraded)
    running = trial(9, plan=FAST)
    store.start_trial(running)
    store.finish_trial(
        running.id, reading=step_reading(10.0), failure=None, outcome_gpu_s=1.0, setup_s=0.1,
        fingerprint_key=upgraded.key,
    )  # fmt: skip
    answer = best_known(store, MODEL, CLUSTER, WORKLOAD)
    assert answer.known is not None
    assert [item.text for item in answer.stale] == ["torch: 2.11.0 then, 2.12.0 now"]


def trials_at(
    speed: float, cluster: ClusterSpec, spec: ModelSpec, workload: Workload, plans: list[Plan]
) -> list[Trial]:
    """Trials of plans, each `speed` times as fast as estimated."""
    found = []
    for number, plan in enumerate(plans):
        told = estimate(spec, cluster, workload, plan)
        reading = step_reading(speed * told.tokens_per_s_per_gpu)
        found.append(trial(number, plan=plan).model_copy(update={"state": TrialState.COMPLETE, "reading": reading}))
    return found


def test_what_trials_elsewhere_showed_moves_the_estimate_and_its_interval_holds_it() -> None:
    plans = [Plan(tp=2, dp=8, zero_stage=1), Plan(tp=4, dp=4, zero_stage=1), Plan(tp=8, dp=2, zero_stage=1)]
    asked = cluster_from_shorthand("h100-80gb-sxm:4x8")
    transfers = taught(LLAMA, H100, BF16, trials_at(0.9, H100, LLAMA, BF16, plans), None)
    choice = [Plan(tp=2, dp=16, zero_stage=1), Plan(tp=8, dp=4, zero_stage=1)]

    def answer(learned: bool) -> float:
        found = carry(
            LLAMA, asked, BF16, transfers if learned else (), None, measured_network=True, plans=choice,
            runtime=Runtime.ANY,
        )  # fmt: skip
        assert found is not None
        assert found.interval[0] < found.tokens_per_s_per_gpu < found.interval[1]
        return found.tokens_per_s_per_gpu

    assert answer(learned=True) < 0.97 * answer(learned=False)


def test_an_unmeasured_network_widens_the_interval_of_a_plan_that_uses_it() -> None:
    asked = cluster_from_shorthand("h100-80gb-sxm:8x8")
    plan, small = [Plan(tp=2, dp=32, zero_stage=1)], BF16.model_copy(update={"global_batch": 64})

    def width(measured: bool) -> float:
        found = carry(LLAMA, asked, small, (), None, measured_network=measured, plans=plan, runtime=Runtime.ANY)
        assert found is not None
        return found.interval[1] / found.interval[0]

    assert width(measured=False) > 1.1 * width(measured=True)


def test_lost_and_cancelled_trials_teach_nothing() -> None:
    lost = trial(0, plan=FAST).model_copy(
        update={"state": TrialState.FAILED, "failure": Failure(kind=FailureKind.LOST, message="gone")}
    )
    assert taught(MODEL, CLUSTER, WORKLOAD, [lost], None) == []


def test_a_profile_moves_to_another_number_of_the_same_nodes_only() -> None:
    def link(size: int, stride: int, crosses: bool) -> LinkFit:
        return LinkFit(
            op=CollectiveOp.ALL_REDUCE, group_size=size, stride=stride, crosses_nodes=crosses, latency_s=1e-5,
            bytes_per_s=1e10, relative_error=0.0, readings=5,
        )  # fmt: skip

    known = cluster_from_shorthand("h100-80gb-sxm:8x8")
    profile = Profile(
        cluster_key=known.key, fingerprint_key="f", links=(link(8, 1, False), link(64, 1, True), link(8, 8, True))
    )
    moved = moved_profile(profile, known, H100)
    assert moved is not None
    assert moved.cluster_key == H100.key
    assert [(item.group_size, item.stride) for item in moved.links] == [(8, 1), (16, 1), (2, 8)]
    alone = moved_profile(profile, known, cluster_from_shorthand("h100-80gb-sxm:1x8"))
    assert alone is None or [item.crosses_nodes for item in alone.links] == [False]
    assert moved_profile(profile, known, cluster_from_shorthand("a100-80gb-sxm:8x8")) is None


def test_what_settles_a_question_is_named_and_priced(store: SqlStore) -> None:
    found = settlement(MODEL, CLUSTER, WORKLOAD, plan=FAST, trial_gpu_s=20.0)
    data = found.to_data()
    assert {probe["probe"] for probe in data["probes"]} == {"collective", "layer"}
    assert found.gpu_s > 3 * 20.0
    assert data["source"] == "estimate"


def test_without_anything_exact_the_nearest_and_an_estimate_are_given(store: SqlStore) -> None:
    tuned(store)
    remember(store, tuning())
    answer = best_known(store, MODEL, CLUSTER, WORKLOAD.model_copy(update={"global_batch": 32}))
    assert answer.known is None
    assert [item.differs for item in answer.near] == [("16 sequences a step instead of 32",)]
    assert answer.carried is not None or answer.carried_why_not


def test_two_entries_that_overlap_are_too_close_to_call(store: SqlStore) -> None:
    tuned(store)
    one = remember(store, tuning())
    assert one is not None
    other = one.model_copy(update={"id": 99, "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu * 1.001})
    assert "too close to call" in compared(store, one, other)["verdict"]
    slower = one.model_copy(update={"id": 98, "tokens_per_s_per_gpu": 1.0, "interval": (0.9, 1.1)})
    assert "faster than entry 98" in compared(store, one, slower)["verdict"]
    elsewhere = slower.model_copy(update={"workload": WORKLOAD.model_copy(update={"seq_len": 64})})
    assert "different questions" in compared(store, one, elsewhere)["verdict"]


def test_a_new_tuning_learns_from_earlier_ones_of_such_a_cluster_but_not_from_itself(store: SqlStore) -> None:
    store.put_fingerprint(FINGERPRINT)
    cluster = H100.model_copy(update={"nodes": 1})
    plans = [Plan(tp=2, dp=4, zero_stage=1), Plan(tp=4, dp=2, zero_stage=1)]
    asked = tuning("earlier", model=LLAMA, cluster=cluster, workload=BF16)
    store.create_tuning(asked)
    for told in trials_at(0.8, cluster, LLAMA, BF16, plans):
        running = trial(told.number, "earlier", told.plan)
        store.start_trial(running)
        store.finish_trial(
            running.id, reading=told.reading, failure=None, outcome_gpu_s=1.0, setup_s=0.1,
            fingerprint_key=FINGERPRINT.key,
        )  # fmt: skip
    remember(store, asked)
    assert earlier_transfers(store, asked) == []
    larger = tuning("now", model=LLAMA, cluster=H100, workload=BF16)
    found = earlier_transfers(store, larger)
    assert {transfer.plan for transfer in found} == set(plans)
    assert [transfer.log_speed for transfer in found] == pytest.approx([-0.223, -0.223], abs=0.01)
