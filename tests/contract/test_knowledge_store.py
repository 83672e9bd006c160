"""What a store keeps of best-known plans, over SQLite and PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FINGERPRINT,
    MODEL,
    MOMENT,
    WORKLOAD,
    step_reading,
    trial,
    tuning,
)

from autotune.errors import UnknownNameError
from autotune.specs import BestEntry, ClusterSpec, DType, ModelSpec, Plan, RunnerUp
from storage import SqlStore

FAST, OTHER = Plan(tp=2, dp=4), Plan(tp=1, dp=8)


def entry(**changes: object) -> BestEntry:
    made = BestEntry(
        model=MODEL, parameters=1e6, cluster=CLUSTER, workload=WORKLOAD, plan=FAST, tokens_per_s_per_gpu=1 / 3,
        interval=(0.3, 0.36), repeats=3, peak_bytes=2**33, memory_source="torch.cuda",
        runner_up=RunnerUp(plan=OTHER, tokens_per_s_per_gpu=0.32, interval=(0.3, 0.34), repeats=3, too_close=True),
        tuning_id="t", fingerprint_key="f", environment_key="e", measured_at=MOMENT,
    )  # fmt: skip
    return made.model_copy(update=changes)


def nodes(count: int) -> ClusterSpec:
    return CLUSTER.model_copy(update={"nodes": count, "name": f"{count} nodes"})


def sized(name: str, layers: int) -> ModelSpec:
    return MODEL.model_copy(update={"name": name, "layers": layers})


def test_an_entry_comes_back_as_it_was_put(store: SqlStore) -> None:
    stored = store.put_best(entry())
    assert stored == entry(id=stored.id)
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD) == [stored]
    assert store.best_entry(stored.id) == stored


def test_an_equal_entry_is_not_stored_twice(store: SqlStore) -> None:
    first = store.put_best(entry())
    assert store.put_best(entry()) == first
    assert store.best_page(history=True) == [first]


def test_what_is_pooled_from_all_runs_takes_the_place_of_one_lucky_run(store: SqlStore) -> None:
    lucky = store.put_best(entry(tokens_per_s_per_gpu=0.4, repeats=1))
    pooled = store.put_best(entry(plan=OTHER, tokens_per_s_per_gpu=0.3, repeats=4, tuning_id="later"), pooled=True)
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD) == [pooled]
    assert store.best_entry(lucky.id).superseded_at is not None


def test_an_entry_that_was_superseded_is_not_stored_twice_either(store: SqlStore) -> None:
    first = store.put_best(entry())
    slower = store.put_best(entry(plan=OTHER, tokens_per_s_per_gpu=0.3, tuning_id="slower"))
    # Whoever remembers a tuning may die before its state is saved, and then it is remembered again.
    assert store.put_best(entry(plan=OTHER, tokens_per_s_per_gpu=0.3, tuning_id="slower")) == slower
    second = store.put_best(entry(tokens_per_s_per_gpu=0.35, tuning_id="later"))
    assert store.put_best(entry()) == store.best_entry(first.id)
    assert store.best_page() == [second]
    assert [item.id for item in store.best_page(history=True)] == [second.id, slower.id, first.id]


def test_the_same_plan_measured_again_takes_the_place_even_if_it_is_slower(store: SqlStore) -> None:
    old = store.put_best(entry())
    new = store.put_best(entry(tokens_per_s_per_gpu=0.2, tuning_id="later"))
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD) == [new]
    assert store.best_entry(old.id).superseded_at is not None


def test_another_plan_takes_the_place_only_if_it_is_faster(store: SqlStore) -> None:
    current = store.put_best(entry())
    slower = store.put_best(entry(plan=OTHER, tokens_per_s_per_gpu=0.3, tuning_id="slower"))
    assert slower.superseded_at is not None
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD) == [current]
    faster = store.put_best(entry(plan=OTHER, tokens_per_s_per_gpu=0.4, tuning_id="faster"))
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD) == [faster]
    assert [item.id for item in store.best_page(history=True)] == [faster.id, slower.id, current.id]


def test_environments_and_sources_have_their_own_current_entries_newest_first(store: SqlStore) -> None:
    old = store.put_best(entry())
    upgraded = store.put_best(entry(environment_key="e2", measured_at=MOMENT + timedelta(days=1)))
    imported = store.put_best(entry(source="a paper", tuning_id=None, measured_at=MOMENT - timedelta(days=1)))
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD) == [upgraded, old, imported]


def test_a_question_is_exact_in_model_cluster_and_workload(store: SqlStore) -> None:
    store.put_best(entry())
    assert store.best_exact(MODEL, CLUSTER, WORKLOAD.model_copy(update={"seq_len": 256})) == []
    assert store.best_exact(MODEL, nodes(3), WORKLOAD) == []
    assert store.best_exact(sized("other", 5), CLUSTER, WORKLOAD) == []
    renamed = CLUSTER.model_copy(update={"name": "the same hardware by another name"})
    assert len(store.best_exact(MODEL, renamed, WORKLOAD)) == 1


def test_concurrent_puts_leave_one_current_entry(store: SqlStore) -> None:
    speeds = [0.1 * i for i in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda speed: store.put_best(entry(tokens_per_s_per_gpu=speed, tuning_id=str(speed))), speeds))
    assert len(store.best_exact(MODEL, CLUSTER, WORKLOAD)) == 1
    assert len(store.best_page(history=True)) == 8


def test_near_entries_are_the_nearest_sizes_of_the_same_model_and_the_nearest_models(store: SqlStore) -> None:
    for count in (1, 2, 4, 8, 16, 32, 64):
        store.put_best(entry(cluster=nodes(count)))
    for number, size in enumerate((1e5, 5e5, 2e6, 9e9)):
        store.put_best(entry(model=sized(f"sibling-{number}", 10 + number), parameters=size, cluster=nodes(2)))
    found = store.best_near(MODEL, 1e6, nodes(6), WORKLOAD, limit=1)
    assert {(item.model_name, item.devices) for item in found if item.model_name == MODEL.name} >= {
        (MODEL.name, 16), (MODEL.name, 32),
    }  # fmt: skip
    assert {item.model_name for item in found} <= {MODEL.name, "sibling-1"}
    assert {item.model_name for item in store.best_near(MODEL, 3e6, nodes(6), WORKLOAD)} >= {"sibling-2", "sibling-3"}


def test_entries_of_another_device_or_dtype_and_superseded_ones_are_never_near(store: SqlStore) -> None:
    other = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"name": "another card"})})
    store.put_best(entry(cluster=other))
    store.put_best(entry(workload=WORKLOAD.model_copy(update={"dtype": DType.FP8})))
    store.put_best(entry(tokens_per_s_per_gpu=0.1))
    assert len(store.best_near(MODEL, 1e6, CLUSTER, WORKLOAD)) == 1
    store.put_best(entry(tokens_per_s_per_gpu=0.2, tuning_id="later"))
    near = store.best_near(MODEL, 1e6, CLUSTER, WORKLOAD)
    assert [item.tokens_per_s_per_gpu for item in near] == [0.2]


def test_pages_are_filtered_and_walked_backwards(store: SqlStore) -> None:
    ids = [store.put_best(entry(cluster=nodes(count))).id for count in (1, 2, 4)]
    assert [item.id for item in store.best_page(limit=2)] == ids[:0:-1]
    assert [item.id for item in store.best_page(limit=2, before=ids[1])] == ids[:1]
    assert [item.id for item in store.best_page(cluster="2 nodes")] == [ids[1]]
    assert store.best_page(model="nobody's") == []
    assert store.best_page(source="measured", device="card", model=MODEL.name)[0].id == ids[2]


def test_the_newest_fingerprint_is_that_of_the_newest_measurement(store: SqlStore) -> None:
    assert store.newest_fingerprint(CLUSTER.key) is None
    for driver in ("1", "2"):
        now = FINGERPRINT.model_copy(update={"driver": driver})
        store.save_probe(
            tuning_id=None, cluster=CLUSTER, fingerprint_key=store.put_fingerprint(now), request=COLLECTIVE_REQUEST,
            outcome=COLLECTIVE_OUTCOME,
        )  # fmt: skip
    found = store.newest_fingerprint(CLUSTER.key)
    assert found is not None
    assert found.driver == "2"


def test_a_probe_after_the_last_trial_tells_the_environment_too(store: SqlStore) -> None:
    store.put_fingerprint(FINGERPRINT)
    store.create_tuning(tuning("tuned"))
    store.start_trial(trial(0, "tuned", FAST))
    store.finish_trial(
        "tuned-0", reading=step_reading(900.0), failure=None, outcome_gpu_s=8.0, setup_s=1.0,
        fingerprint_key=FINGERPRINT.key,
    )  # fmt: skip
    assert store.newest_fingerprint(CLUSTER.key) == FINGERPRINT
    upgraded = FINGERPRINT.model_copy(update={"driver": "2"})
    store.save_probe(
        tuning_id=None, cluster=CLUSTER, fingerprint_key=store.put_fingerprint(upgraded), request=COLLECTIVE_REQUEST,
        outcome=COLLECTIVE_OUTCOME,
    )  # fmt: skip
    assert store.newest_fingerprint(CLUSTER.key) == upgraded


def test_an_unknown_entry_is_named(store: SqlStore) -> None:
    with pytest.raises(UnknownNameError, match="77"):
        store.best_entry(77)
