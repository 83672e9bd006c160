"""The rules of FleetStore about API keys, pages of measurements and counts."""

from __future__ import annotations

from datetime import timedelta

import pytest
from fleet_records import fleet_tuning, granted, job, pair
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FAILURE,
    FINGERPRINT,
    LAYER_OUTCOME,
    LAYER_REQUEST,
    MOMENT,
    step_reading,
    trial,
    tuning,
)

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.ports.fleet import FleetCounts
from autotune.specs import ApiKey, Role
from storage import SqlStore


def key(name: str, role: Role = Role.SUBMIT, **changes: object) -> ApiKey:
    new = ApiKey(id=f"id-{name}", name=name, role=role, created_at=MOMENT, expires_at=MOMENT + timedelta(days=1))
    return new.model_copy(update=changes)


def test_a_key_is_found_by_its_hash_alone(store: SqlStore) -> None:
    store.create_key(key("ada"), "hash-a")
    store.create_key(key("bob", expires_at=None, created_at=MOMENT - timedelta(days=1)), "hash-b")
    assert store.keys_of({"hash-a", "hash-c"}) == {"hash-a": key("ada")}
    assert store.keys_of({"hash-c"}) == store.keys_of(()) == {}
    names = [each.name for each in store.keys()]  # noqa: SIM118  (a store is no dictionary)
    assert names == ["bob", "ada"]


def test_a_name_has_one_unrevoked_key(store: SqlStore) -> None:
    store.create_key(key("ada"), "hash-a")
    with pytest.raises(StoreConflictError, match="ada"):
        store.create_key(key("ada", id="id-2"), "hash-b")
    before = store.now()
    revoked = store.revoke_key("id-ada")
    assert revoked.revoked_at is not None
    assert before <= revoked.revoked_at <= store.now()
    assert store.revoke_key("id-ada") == revoked == store.keys_of({"hash-a"})["hash-a"]
    store.create_key(key("ada", id="id-2"), "hash-b")
    with pytest.raises(StoreConflictError):
        store.create_key(key("eve"), "hash-a")
    with pytest.raises(UnknownNameError, match="no-such-key"):
        store.revoke_key("no-such-key")


def test_roles_are_those_of_unrevoked_keys(store: SqlStore) -> None:
    assert not store.has_role(Role.ADMIN)
    store.create_key(key("ada", Role.ADMIN), "hash-a")
    assert store.has_role(Role.ADMIN)
    assert not store.has_role(Role.READ)
    store.revoke_key("id-ada")
    assert not store.has_role(Role.ADMIN)


def test_measurements_come_with_where_they_are_from(store: SqlStore) -> None:
    store.create_tuning(tuning())
    fingerprint_key = store.put_fingerprint(FINGERPRINT)
    origin = {"tuning_id": "tuning-1", "cluster": CLUSTER, "fingerprint_key": fingerprint_key}
    store.save_probe(**origin, request=COLLECTIVE_REQUEST, outcome=COLLECTIVE_OUTCOME)
    probe_id = store.save_probe(**origin, request=LAYER_REQUEST, outcome=LAYER_OUTCOME)
    for number, (reading, failure) in enumerate(((step_reading(), None), (None, FAILURE))):
        store.start_trial(trial(number))
        store.finish_trial(
            f"tuning-1-{number}",
            reading=reading,
            failure=failure,
            outcome_gpu_s=4.0,
            setup_s=1.0,
            fingerprint_key=fingerprint_key,
        )
    small, large = store.measurements_page("collective")
    assert (small["size_bytes"], large["size_bytes"]) == (1024, 2**33)
    assert list(store.measurements_page("collective", after=small["id"])) == [large]
    assert list(store.measurements_page("collective", cluster_key=CLUSTER.key, limit=1)) == [small]
    assert store.measurements_page("collective", cluster_key="another") == []
    (layer,) = store.measurements_page("layer")
    assert (layer["probe_run_id"], layer["log_path"], layer["hostname"]) == (probe_id, "/logs/layer", "node-1")
    (step,) = store.measurements_page("step")
    assert (step["trial_id"], step["plan_key"]) == ("tuning-1-0", trial(0).plan.key)
    for row in (small, layer, step):
        assert (row["tuning_id"], row["fingerprint_key"]) == ("tuning-1", fingerprint_key)
        assert row["measured_at"] > MOMENT
    with pytest.raises(UnknownNameError, match="collective, layer, step"):
        store.measurements_page("weather")


def test_counts_are_by_state(store: SqlStore) -> None:
    assert store.counts() == FleetCounts(tunings={}, jobs={}, nodes={}, leases=0, gpu_s=0.0)
    pair(store)
    store.submit_tuning(fleet_tuning(gpu_s_spent=2.5), sharing_key="k")
    granted(store, job("job-1"))
    store.create_job(job("job-2"))
    assert store.counts() == FleetCounts(
        tunings={"queued": 1}, jobs={"granted": 1, "queued": 1}, nodes={"ready": 2}, leases=2, gpu_s=2.5
    )
