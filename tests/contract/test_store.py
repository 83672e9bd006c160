"""The rules of autotune.ports.store.Store, kept by every store."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FAILURE,
    FINGERPRINT,
    LAYER_OUTCOME,
    LAYER_REQUEST,
    MODEL,
    MOMENT,
    WORKLOAD,
    profile,
    step_reading,
    trial,
    tuning,
)

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.ports.store import Store
from autotune.specs import (
    Failure,
    FailureKind,
    Plan,
    ProbeOutcome,
    StepReading,
    StepRequest,
    Trial,
    TrialState,
    TuningState,
)
from storage import SqlStore


def finish(store: Store, trial_id: str, result: StepReading | Failure, gpu_s: float = 10.0) -> Trial:
    reading, failure = (result, None) if isinstance(result, StepReading) else (None, result)
    key = store.put_fingerprint(FINGERPRINT)
    return store.finish_trial(
        trial_id, reading=reading, failure=failure, outcome_gpu_s=gpu_s, setup_s=1.5, fingerprint_key=key
    )


def test_is_a_store(store: SqlStore) -> None:
    as_port: Store = store
    assert as_port.models() == []


def test_models_and_clusters_are_kept_by_name_and_replaced(store: SqlStore) -> None:
    other = MODEL.model_copy(update={"name": "Another", "layers": 8})
    for model in (MODEL, other, MODEL.model_copy(update={"ffn": 256})):
        store.put_model(model)
    store.put_cluster(CLUSTER)
    store.put_cluster(CLUSTER.model_copy(update={"nodes": 4}))
    assert list(store.models()) == [other, MODEL.model_copy(update={"ffn": 256})]
    assert store.model("Another") == other
    assert store.cluster("pair").nodes == 4
    assert [cluster.name for cluster in store.clusters()] == ["pair"]


def test_a_replaced_model_does_not_change_an_older_tuning(store: SqlStore) -> None:
    store.put_model(MODEL)
    store.create_tuning(tuning())
    store.put_model(MODEL.model_copy(update={"layers": 99}))
    assert store.tuning("tuning-1").model == MODEL


def test_a_fingerprint_is_stored_once_whatever_its_clocks(store: SqlStore) -> None:
    key = store.put_fingerprint(FINGERPRINT)
    assert store.put_fingerprint(FINGERPRINT.model_copy(update={"clocks": {"sm": 900.0}})) == key
    assert store.fingerprint(key) == FINGERPRINT


@pytest.mark.parametrize("look", ["model", "cluster", "fingerprint", "tuning", "trials"])
def test_an_unknown_name_is_an_error_that_repeats_it(store: SqlStore, look: str) -> None:
    with pytest.raises(UnknownNameError, match="nobody-knows"):
        getattr(store, look)("nobody-knows")


def test_a_tuning_comes_back_equal_and_in_utc(store: SqlStore) -> None:
    store.create_tuning(tuning())
    found = store.tuning("tuning-1")
    assert found == tuning()
    assert found.created_at.utcoffset() == timedelta(0)
    with pytest.raises(StoreConflictError, match="tuning-1"):
        store.create_tuning(tuning(seed=8))
    assert store.tuning("tuning-1").seed == 7


def test_a_unique_prefix_of_four_characters_names_a_tuning(store: SqlStore) -> None:
    for name in ("abcd-1", "abcd-2", "ABCD-3", "abc%"):
        store.create_tuning(tuning(name))
    assert store.tuning("ABCD").id == "ABCD-3"
    assert store.tuning("abc%").id == "abc%"
    with pytest.raises(UnknownNameError, match="abcd-1, abcd-2"):
        store.tuning("abcd")
    with pytest.raises(UnknownNameError):
        store.tuning("ABC")


def test_tunings_come_newest_first(store: SqlStore) -> None:
    for day in (2, 3, 1):
        store.create_tuning(tuning(f"day-{day}", created_at=MOMENT + timedelta(days=day)))
    assert [each.id for each in store.tunings()] == ["day-3", "day-2", "day-1"]
    assert [each.id for each in store.tunings(limit=1)] == ["day-3"]


def test_save_tuning_replaces_what_may_change_and_nothing_else(store: SqlStore) -> None:
    store.create_tuning(tuning())
    changed = tuning(state=TuningState.DONE, message="m", stop_reason="r", owner="you", updated_at=MOMENT)
    store.save_tuning(
        changed.model_copy(update={"seed": 99, "gpu_s_spent": 0.1, "model": MODEL.model_copy(update={"layers": 1})})
    )
    assert store.tuning("tuning-1") == changed


def test_save_tuning_needs_the_expected_owner(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.save_tuning(tuning(owner="you"), expected_owner="me")
    with pytest.raises(StoreConflictError, match="'you'"):
        store.save_tuning(tuning(owner="me"), expected_owner="me")
    assert store.tuning("tuning-1").owner == "you"
    with pytest.raises(UnknownNameError):
        store.save_tuning(tuning("never-created"), expected_owner="")


def test_a_running_trial_comes_back_equal(store: SqlStore) -> None:
    store.create_tuning(tuning())
    plan = Plan.parse("tp=2,pp=2,dp=2,vpp=2,zero_stage=1,recompute=full,sequence_parallel=true")
    started = [trial(0, plan=plan), trial(1)]
    for each in reversed(started):
        store.start_trial(each)
    assert list(store.trials("tuning-1")) == started


def test_a_trial_starts_once_running_and_in_a_tuning(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    with pytest.raises(StoreConflictError):
        store.start_trial(trial(0).model_copy(update={"id": "another id, same number"}))
    with pytest.raises(StoreConflictError):
        store.start_trial(trial(1).model_copy(update={"state": TrialState.COMPLETE}))
    with pytest.raises(UnknownNameError):
        store.start_trial(trial(0, "no-tuning"))
    assert [each.id for each in store.trials("tuning-1")] == ["tuning-1-0"]


@pytest.mark.parametrize(
    ("result", "state"),
    [
        (step_reading(), TrialState.COMPLETE),
        (step_reading(traced=False), TrialState.COMPLETE),
        (step_reading(pruned=True), TrialState.PRUNED),
        (FAILURE, TrialState.FAILED),
        (Failure(kind=FailureKind.LOST, message=""), TrialState.FAILED),
    ],
    ids=["complete", "untraced", "pruned", "oom", "lost"],
)
def test_a_result_comes_back_equal(store: SqlStore, result: StepReading | Failure, state: TrialState) -> None:
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    ended = finish(store, "tuning-1-0", result)
    assert list(store.trials("tuning-1")) == [ended]
    assert (ended.reading or ended.failure) == result
    assert ended.state is state
    assert ended.finished_at is not None
    assert ended.finished_at.utcoffset() == timedelta(0)
    unchanged = ended.model_copy(
        update={
            **dict.fromkeys(("reading", "failure", "finished_at")),
            "state": TrialState.RUNNING,
            "fingerprint_key": "",
            "gpu_s": 0.0,
            "setup_s": 0.0,
        }
    )
    assert unchanged == trial(0)
    assert (ended.gpu_s, ended.setup_s, ended.fingerprint_key) == (10.0, 1.5, FINGERPRINT.key)


def test_a_nul_in_a_log_does_not_lose_the_trial(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    ended = finish(store, "tuning-1-0", Failure(kind=FailureKind.CRASH, message="m", log_tail="a\x00b"))
    assert ended.failure is not None
    assert ended.failure.log_tail == "a\ufffdb"


def test_a_result_is_never_overwritten(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    ended = finish(store, "tuning-1-0", step_reading())
    with pytest.raises(StoreConflictError, match="complete"):
        finish(store, "tuning-1-0", FAILURE)
    with pytest.raises(UnknownNameError, match="no-such"):
        finish(store, "no-such", FAILURE)
    assert list(store.trials("tuning-1")) == [ended]
    assert store.tuning("tuning-1").gpu_s_spent == 10.0


def test_a_trial_that_cannot_end_so_stays_as_it_was(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    cost = {"outcome_gpu_s": 1.0, "setup_s": 0.0}
    with pytest.raises(UnknownNameError, match="never-stored"):
        store.finish_trial("tuning-1-0", reading=step_reading(), failure=None, fingerprint_key="never-stored", **cost)
    for reading, failure in ((None, None), (step_reading(), FAILURE)):
        with pytest.raises(ValueError, match="not with both"):
            store.finish_trial("tuning-1-0", reading=reading, failure=failure, fingerprint_key="", **cost)
    assert list(store.trials("tuning-1")) == [trial(0)]
    assert store.tuning("tuning-1").gpu_s_spent == 0.0


def test_ranks_that_never_started_have_no_fingerprint(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    failure = Failure(kind=FailureKind.UNAVAILABLE, message="no ranks")
    ended = store.finish_trial(
        "tuning-1-0", reading=None, failure=failure, outcome_gpu_s=0.0, setup_s=0.0, fingerprint_key=""
    )
    assert ended.failure == failure
    assert ended.fingerprint_key == ""


def test_everything_measured_adds_to_what_a_tuning_spent(store: SqlStore) -> None:
    store.create_tuning(tuning(gpu_s_spent=0.5))
    key = store.put_fingerprint(FINGERPRINT)
    store.start_trial(trial(0))
    finish(store, "tuning-1-0", FAILURE, gpu_s=2.25)
    for tuning_id in ("tuning-1", None):
        store.save_probe(
            tuning_id=tuning_id,
            cluster=CLUSTER,
            fingerprint_key=key,
            request=COLLECTIVE_REQUEST,
            outcome=COLLECTIVE_OUTCOME,
        )
    found = store.tuning("tuning-1")
    assert found.gpu_s_spent == 0.5 + 2.25 + 16.0
    assert found.updated_at > MOMENT


def test_readings_come_back_equal_oldest_first_and_by_their_keys(store: SqlStore) -> None:
    key = store.put_fingerprint(FINGERPRINT)
    elsewhere = store.put_fingerprint(FINGERPRINT.model_copy(update={"hostname": "node-2"}))
    later = ProbeOutcome(readings=COLLECTIVE_OUTCOME.readings[:1], wall_s=1.0, gpu_s=1.0, setup_s=0.0)
    for fingerprint_key, outcome in ((key, COLLECTIVE_OUTCOME), (elsewhere, COLLECTIVE_OUTCOME), (key, later)):
        store.save_probe(
            tuning_id=None,
            cluster=CLUSTER,
            fingerprint_key=fingerprint_key,
            request=COLLECTIVE_REQUEST,
            outcome=outcome,
        )
    expected = [*COLLECTIVE_OUTCOME.readings, COLLECTIVE_OUTCOME.readings[0]]
    assert list(store.collective_readings(CLUSTER.key, key)) == expected
    assert list(store.collective_readings(CLUSTER.key, elsewhere)) == list(COLLECTIVE_OUTCOME.readings)
    assert store.collective_readings("another cluster", key) == []


def test_layer_readings_are_of_one_model_and_workload(store: SqlStore) -> None:
    key = store.put_fingerprint(FINGERPRINT)
    longer = LAYER_REQUEST.model_copy(update={"workload": WORKLOAD.model_copy(update={"seq_len": 256})})
    for request in (LAYER_REQUEST, longer):
        store.save_probe(tuning_id=None, cluster=CLUSTER, fingerprint_key=key, request=request, outcome=LAYER_OUTCOME)
    found = store.layer_readings(CLUSTER.key, key, MODEL.key, WORKLOAD.key)
    assert list(found) == list(LAYER_OUTCOME.readings)
    assert store.layer_readings(CLUSTER.key, key, "another model", WORKLOAD.key) == []


def test_a_step_probe_and_a_failed_probe_are_kept(store: SqlStore) -> None:
    key = store.put_fingerprint(FINGERPRINT)
    request = StepRequest(model=MODEL, workload=WORKLOAD, plan=Plan(dp=8))
    outcomes = (
        ProbeOutcome(readings=(step_reading(),), wall_s=1.0, gpu_s=8.0, setup_s=0.0),
        ProbeOutcome(failure=FAILURE, wall_s=1.0, gpu_s=8.0, setup_s=0.0),
    )
    ids = {
        store.save_probe(tuning_id=None, cluster=CLUSTER, fingerprint_key=key, request=request, outcome=outcome)
        for outcome in outcomes
    }
    assert len(ids) == 2


def test_a_probe_of_unknown_keys_is_refused_whole(store: SqlStore) -> None:
    key = store.put_fingerprint(FINGERPRINT)
    probe = {"cluster": CLUSTER, "request": COLLECTIVE_REQUEST, "outcome": COLLECTIVE_OUTCOME}
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.save_probe(tuning_id="no-tuning", fingerprint_key=key, **probe)
    with pytest.raises(UnknownNameError, match="fingerprint"):
        store.save_probe(tuning_id=None, fingerprint_key="", **probe)
    assert store.collective_readings(CLUSTER.key, key) == []


def test_the_newest_profile_counts(store: SqlStore) -> None:
    first, second = (
        store.put_fingerprint(FINGERPRINT.model_copy(update={"hostname": name})) for name in ("node-1", "node-2")
    )
    assert store.profile(CLUSTER.key) is None
    for key, scale in ((first, 1.1), (first, 1.2), (second, 1.3)):
        store.save_profile(profile(key, scale))
    assert store.profile(CLUSTER.key) == profile(second, 1.3)
    assert store.profile(CLUSTER.key, first) == profile(first, 1.2)
    assert store.profile(CLUSTER.key, "another") is None
    with pytest.raises(UnknownNameError):
        store.save_profile(profile("never-stored"))


def test_best_trials_are_complete_of_the_same_request_and_fastest_first(store: SqlStore) -> None:
    store.create_tuning(tuning("first"))
    # Other names, same hardware and shape: the keys count.
    renamed = MODEL.model_copy(update={"name": "alias"}), CLUSTER.model_copy(update={"name": "alias"})
    store.create_tuning(tuning("second", model=renamed[0], cluster=renamed[1]))
    store.create_tuning(tuning("longer", workload=WORKLOAD.model_copy(update={"seq_len": 256})))
    results = {
        ("first", 0): step_reading(100.0),
        ("first", 1): step_reading(300.0),
        ("first", 2): FAILURE,
        ("first", 3): step_reading(900.0, pruned=True),
        ("second", 0): step_reading(200.0),
        ("longer", 0): step_reading(999.0),
    }
    for (tuning_id, number), result in results.items():
        store.start_trial(trial(number, tuning_id))
        finish(store, f"{tuning_id}-{number}", result)
    store.start_trial(trial(4, "first"))
    found = store.best_trials(MODEL, CLUSTER, WORKLOAD)
    assert [each.id for each in found] == ["first-1", "second-0", "first-0"]
    assert found[0] == store.trials("first")[1]
    assert [each.id for each in store.best_trials(MODEL, CLUSTER, WORKLOAD, limit=1)] == ["first-1"]
    first_end = store.trials("first")[0].finished_at
    before = store.best_trials(MODEL, CLUSTER, WORKLOAD, limit=1, before=first_end)
    assert [each.id for each in before] == ["first-0"]  # the others had not ended


def test_a_moment_without_time_zone_is_refused(store: SqlStore) -> None:
    with pytest.raises(Exception, match="no time zone"):
        store.create_tuning(tuning(created_at=MOMENT.astimezone(UTC).replace(tzinfo=None)))
    assert store.tunings() == []
