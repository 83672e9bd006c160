"""The rules of FleetStore about nodes: registration, heartbeats, blame."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fleet_records import LONG_S, MOMENT, OVER_S, POOL, granted, job, node, pair, reported
from store_records import CLUSTER, COLLECTIVE_OUTCOME, FINGERPRINT

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.ports.fleet import FleetStore
from autotune.specs import (
    Device,
    FailureKind,
    Fingerprint,
    JobPurpose,
    JobState,
    MemberState,
    NodeIncident,
    NodeState,
)
from storage import SqlStore
from workers.registration import NodeOptions, register


def incident(name: str, kind: str = "crash") -> NodeIncident:
    return NodeIncident(node=name, at=MOMENT, kind=kind, message=f"{kind} of {name}", job_id="job-1")


def test_is_a_fleet_store(store: SqlStore) -> None:
    as_port: FleetStore = store
    assert as_port.nodes() == []


def test_a_node_comes_back_equal_with_the_databases_moments(store: SqlStore) -> None:
    before = store.now()
    new = node("gpu-1", state=NodeState.QUARANTINED, reason="7 of 8 GPUs")
    found = store.register_node(new)
    assert before <= found.registered_at == found.heartbeat_at <= store.now()
    assert found.model_copy(update={"registered_at": MOMENT, "heartbeat_at": MOMENT}) == new
    assert store.node("gpu-1") == found


@dataclass(frozen=True)
class Found:
    """What a worker found on its machine."""

    device: Device = CLUSTER.device
    slots: int = 4
    cores: int = 8
    memory_bytes: int = 2**30
    nics: tuple[str, ...] = ("eth0",)
    fingerprint: Fingerprint = FINGERPRINT
    reason: str = ""


def test_a_pool_is_the_operators_from_its_first_node_on(store: SqlStore) -> None:
    """Whoever stored the name before cannot say any more how many nodes the others' requests ask for."""
    larger = CLUSTER.model_copy(update={"nodes": 64})
    store.put_cluster(larger, owner="eve")
    for name in ("a", "b"):
        register(store, NodeOptions(name=name, cluster=CLUSTER, address="127.0.0.1", interface="lo"), Found())
    assert store.cluster("pair") == CLUSTER
    with pytest.raises(StoreConflictError, match="'pair' belongs to whoever operates"):
        store.put_cluster(larger, owner="eve", only_own=True)
    ours = CLUSTER.model_copy(update={"name": "ours", "nodes": 3})
    store.put_cluster(ours)
    one = NodeOptions(name="c", cluster=ours.model_copy(update={"nodes": 1}), address="127.0.0.1", interface="lo")
    register(store, one, Found())
    assert store.cluster("ours") == ours


def test_nodes_come_by_name_and_pool(store: SqlStore) -> None:
    for name, pool in (("B", "one"), ("a", "two"), ("C", "two")):
        store.register_node(node(name, pool=pool))
    assert [each.name for each in store.nodes()] == ["B", "C", "a"]
    assert [each.name for each in store.nodes("two")] == ["C", "a"]


def test_a_single_process_has_a_pool_that_is_nobody_elses_and_is_discarded_at_its_end(store: SqlStore) -> None:
    own = "@1@host:7:0.00"
    pair(store)
    store.register_node(node(own, pool=own))
    other = granted(store, job("other"))
    before = store.counts(), store.nodes(), store.jobs(), store.leased_nodes(), store.gpu_s_by_principal(MOMENT).keys()
    found = granted(store, job("own", pool=own), (own,), lease_s=OVER_S)
    store.create_job(job("waits", pool=own))
    assert before == (
        store.counts(), store.nodes(), store.jobs(), store.leased_nodes(), store.gpu_s_by_principal(MOMENT).keys()
    )  # fmt: skip
    assert [each.id for each in store.unsent_members(OVER_S)] == ["other"]
    assert store.expire_members() == []
    assert [each.name for each in store.nodes(own)] == [own]
    assert [each.id for each in store.jobs(pool=own)] == ["own", "waits"]
    assert store.leased_nodes(own) == {own: "own"}
    assert [each.id for each in store.queued_jobs(own, most_each=9)] == ["waits"]
    assert store.start_member("own", found.token, own, "s1", lease_s=OVER_S) is not None
    assert store.local_pools() == [own]
    store.discard_pool(own)
    assert (store.local_pools(), store.nodes(own), store.jobs(pool=own)) == ([], [], [])
    assert store.renew_member(other.id, other.token, "a", "s1", lease_s=LONG_S).go_on
    with pytest.raises(ValueError, match="fleet's"):
        store.discard_pool(POOL)


def test_an_unknown_node_is_an_error_that_repeats_it(store: SqlStore) -> None:
    store.register_node(node("a"))
    for ask in (
        lambda: store.node("nobody"),
        lambda: store.set_node_state("nobody", NodeState.READY, ""),
        lambda: store.blame_node(incident("nobody"), quarantine_at=2),
    ):
        with pytest.raises(UnknownNameError, match=r"nobody.*known: a"):
            ask()
    assert store.incidents() == []
    assert not store.renew_node("nobody", "s1")


def test_a_new_session_replaces_the_inventory_and_leaves_the_judgement(store: SqlStore) -> None:
    store.register_node(node("a"))
    store.blame_node(incident("a"), quarantine_at=1)
    found = store.register_node(node("a", "s2", slots=3, address="10.9.9.9", state=NodeState.READY, failures=0))
    assert (found.session, found.slots, found.address) == ("s2", 3, "10.9.9.9")
    assert (found.state, found.reason, found.failures) == (NodeState.QUARANTINED, "crash of a", 1)


def test_a_node_whose_worker_has_ended_gets_nothing_until_one_registers(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    assert store.start_member("job-1", found.token, "a", "s1", lease_s=LONG_S)
    store.retire_node("a", "another session")
    assert store.node("a").session == "s1"
    store.retire_node("a", "s1")
    assert store.node("a").session == ""
    assert not store.renew_node("a", "s1")
    assert [member.state for member in store.job("job-1").members] == [MemberState.LOST, MemberState.LEASED]
    store.create_job(job("job-2", cluster=CLUSTER.model_copy(update={"nodes": 1})))
    store.register_node(node("c"))
    store.retire_node("c", "s1")
    assert store.grant("job-2", ["c"], lease_s=LONG_S, world_id="w", warm=False) is None
    store.register_node(node("c", "s2"))
    assert store.grant("job-2", ["c"], lease_s=LONG_S, world_id="w", warm=False) is not None


def test_a_new_session_evicts_the_older_one(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    assert store.start_member("job-1", found.token, "a", "s1", lease_s=LONG_S)
    store.register_node(node("a", "s2"))
    assert not store.renew_node("a", "s1")
    assert store.renew_node("a", "s2")
    members = store.job("job-1").members
    assert [member.state for member in members] == [MemberState.LOST, MemberState.LEASED]
    # Neither session can go on: the older one is not the node's any more, the newer one never had the lease.
    for session in ("s1", "s2"):
        assert store.start_member("job-1", found.token, "a", session, lease_s=LONG_S) is None
        assert not store.renew_member("job-1", found.token, "a", session, lease_s=LONG_S).go_on
    order = store.renew_member("job-1", found.token, "b", "s1", lease_s=LONG_S)
    assert (order.go_on, order.failure) == (False, FailureKind.LOST)
    assert store.leased_nodes() == {"a": "job-1", "b": "job-1"}
    store.register_node(node("b", "s2"))
    assert store.job("job-1").state is JobState.REPORTED


def test_a_world_that_lost_a_node_is_forgotten_by_all(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    assert [each.world_id for each in store.nodes()] == [found.world_id, found.world_id]
    store.register_node(node("b", "s2"))
    assert [each.world_id for each in store.nodes()] == ["", ""]


def test_the_same_session_may_register_again(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    again = store.register_node(node("a", cores=8))
    assert (again.cores, again.world_id) == (8, found.world_id)
    assert reported(store, found).state is JobState.REPORTED


def test_a_heartbeat_is_the_databases(store: SqlStore) -> None:
    first = store.register_node(node("a")).heartbeat_at
    while store.now() <= first:  # SQLite's clock has milliseconds
        pass
    assert store.renew_node("a", "s1")
    assert first < store.node("a").heartbeat_at <= store.now()


def test_a_node_that_fails_in_a_row_is_quarantined_until_it_is_released(store: SqlStore) -> None:
    store.register_node(node("a"))
    first = store.blame_node(incident("a"), quarantine_at=2)
    assert (first.state, first.failures) == (NodeState.READY, 1)
    store.clear_blame(["a", "nobody"])
    store.blame_node(incident("a"), quarantine_at=2)
    second = store.blame_node(incident("a", "hang"), quarantine_at=2)
    assert (second.state, second.failures, second.reason) == (NodeState.QUARANTINED, 2, "hang of a")
    store.clear_blame(["a"])
    assert store.node("a").state is NodeState.QUARANTINED
    store.blame_node(incident("a"), quarantine_at=9)
    store.set_node_state("a", NodeState.READY, "passed its health probe")
    found = store.node("a")
    assert (found.state, found.failures, found.reason) == (NodeState.READY, 0, "passed its health probe")


def test_incidents_come_newest_first(store: SqlStore) -> None:
    pair(store)
    for name, kind in (("a", "crash"), ("b", "hang"), ("a", "slow")):
        store.blame_node(incident(name, kind), quarantine_at=9)
    assert [each.kind for each in store.incidents()] == ["slow", "hang", "crash"]
    assert list(store.incidents("a", limit=1)) == [incident("a", "slow")]


def test_a_dead_node_is_forgotten_and_what_it_did_stays(store: SqlStore) -> None:
    pair(store)
    found = reported(store, granted(store, job("job-1")))
    store.end_job("job-1", found.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key)
    store.blame_node(incident("a"), quarantine_at=1)
    store.retire_node("a", "s1")
    before = store.job("job-1")
    store.forget_node("a", silent_s=60.0)
    assert [each.name for each in store.nodes()] == [each.name for each in store.nodes(POOL)] == ["b"]
    assert store.counts().nodes == {"ready": 1}
    for ask in (
        lambda: store.node("a"),
        lambda: store.set_node_state("a", NodeState.READY, ""),
        lambda: store.blame_node(incident("a"), quarantine_at=2),
        lambda: store.forget_node("a", silent_s=60.0),
    ):
        with pytest.raises(UnknownNameError, match=r"a.*known: b"):
            ask()
    assert store.job("job-1") == before
    assert len(store.collective_readings(CLUSTER.key, FINGERPRINT.key)) == 2
    back = store.register_node(node("a", "s2"))
    assert (back.state, back.reason) == (NodeState.QUARANTINED, "crash of a")  # nobody becomes well by being forgotten
    assert [each.name for each in store.nodes()] == ["a", "b"]


def test_what_only_a_forgotten_node_could_run_ends(store: SqlStore) -> None:
    pair(store)
    alone = CLUSTER.model_copy(update={"nodes": 1})
    for name in ("a", "b"):
        store.create_job(job(f"probe-{name}", purpose=JobPurpose.HEALTH, cluster=alone, only_node=name))
    store.create_job(job("job-1"))
    store.retire_node("a", "s1")
    store.forget_node("a", silent_s=60.0)
    states = {each.id: (each.state, each.failure) for each in store.jobs()}
    assert states == {
        "probe-a": (JobState.ENDED, FailureKind.CANCELLED),
        "probe-b": (JobState.QUEUED, None),
        "job-1": (JobState.QUEUED, None),
    }


def test_a_node_that_lives_or_is_held_is_not_forgotten(store: SqlStore) -> None:
    pair(store)
    with pytest.raises(StoreConflictError, match="node 'a' lives: it was heard of 0 s ago"):
        store.forget_node("a", silent_s=60.0)
    granted(store, job("job-1"), lease_s=OVER_S)
    with pytest.raises(StoreConflictError, match="node 'a' is held by job 'job-1'"):
        store.forget_node("a", silent_s=OVER_S)
    assert [each.name for each in store.nodes()] == ["a", "b"]


def test_a_worker_that_was_forgotten_finds_out(store: SqlStore) -> None:
    pair(store)
    store.forget_node("a", silent_s=OVER_S)  # it was silent for so long
    assert not store.renew_node("a", "s1")
    store.create_job(job("job-1", cluster=CLUSTER.model_copy(update={"nodes": 1})))
    assert store.grant("job-1", ["a"], lease_s=LONG_S, world_id="w", warm=False) is None
