"""The rules of FleetStore about gangs: all nodes or none, tokens, members, orders to stop."""

from __future__ import annotations

import pytest
from fleet_records import LONG_S, MOMENT, OVER_S, POOL, granted, job, node, pair, report, reported
from sqlalchemy import delete, update
from store_records import COLLECTIVE_OUTCOME, FINGERPRINT, MODEL, WORKLOAD

from autotune.errors import UnknownNameError
from autotune.specs import (
    FailureKind,
    FrameworkName,
    Job,
    JobPurpose,
    JobState,
    MemberReport,
    MemberState,
    NodeState,
    Plan,
    ProbeProgress,
    RankReport,
    Space,
    StepRequest,
)
from autotune.specs.command import CommandOffer
from storage import SqlStore
from storage.fleet.leases import JUST_GRACED, SWEPT_AT
from storage.fleet.tables import CounterRow, JobRow, LeaseRow, MemberRow

BOUND = {"purpose": JobPurpose.HEALTH, "only_node": "a"}


def start_all(store: SqlStore, found: Job) -> None:
    for member in found.members:
        assert store.start_member(found.id, found.token, member.node, "s1", lease_s=LONG_S)


def order_for(store: SqlStore, found: Job, name: str) -> tuple[bool, FailureKind | None]:
    order = store.renew_member(found.id, found.token, name, "s1", lease_s=LONG_S)
    return order.go_on, order.failure


def test_a_grant_leases_all_nodes_in_the_order_of_the_ranks(store: SqlStore) -> None:
    pair(store)
    before = store.now()
    found = granted(store, job("job-1"), ("b", "a"), world_id="w1")
    assert found == store.job("job-1")
    assert [(each.node, each.index, each.state) for each in found.members] == [
        ("b", 0, MemberState.LEASED),
        ("a", 1, MemberState.LEASED),
    ]
    assert found.members[0].address == store.node("b").address
    assert (found.state, found.world_id, found.warm) == (JobState.GRANTED, "w1", False)
    assert found.granted_at is not None
    assert before <= found.granted_at <= store.now()
    assert store.leased_nodes(POOL) == {"a": "job-1", "b": "job-1"}
    assert store.leased_nodes("another pool") == {}


def refused(store: SqlStore, new: Job, nodes: list[str], *, world_id: str = "w", warm: bool = False) -> None:
    store.create_job(new)
    leases = store.leased_nodes()
    assert store.grant(new.id, nodes, lease_s=LONG_S, world_id=world_id, warm=warm) is None
    assert store.job(new.id) == new
    assert store.leased_nodes() == leases


@pytest.mark.parametrize(
    ("new", "nodes"),
    [
        (job("new"), ["a", "taken"]),
        (job("new"), ["a", "nobody"]),
        (job("new"), ["a", "ill"]),
        (job("new"), ["a", "elsewhere"]),
        (job("new"), ["a", "a"]),
        (job("new", only_node="a"), ["b"]),
        (job("new", purpose=JobPurpose.HEALTH), ["ill"]),
        (job("new", only_node="ill"), ["ill"]),
    ],
    ids=[
        "leased",
        "unknown",
        "quarantined",
        "another pool",
        "twice",
        "bound elsewhere",
        "not bound",
        "no health probe",
    ],
)
def test_a_grant_is_all_or_nothing(store: SqlStore, new: Job, nodes: list[str]) -> None:
    pair(store)
    for name in ("taken", "ill"):
        store.register_node(node(name))
    store.register_node(node("elsewhere", pool="elsewhere"))
    granted(store, job("other"), ("taken",))
    store.set_node_state("ill", NodeState.QUARANTINED, "slow")
    refused(store, new, nodes)


def test_a_job_is_granted_once(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"), ("a",))
    assert store.grant("job-1", ["b"], lease_s=LONG_S, world_id="w", warm=False) is None
    assert store.job("job-1") == found
    with pytest.raises(UnknownNameError, match="no-such-job"):
        store.grant("no-such-job", ["b"], lease_s=LONG_S, world_id="w", warm=False)


def test_a_health_probe_may_have_the_quarantined_node_that_it_is_bound_to(store: SqlStore) -> None:
    pair(store)
    store.set_node_state("a", NodeState.QUARANTINED, "slow")
    assert granted(store, job("job-1", **BOUND), ("a",)).members[0].node == "a"


def test_tokens_grow_and_never_come_again(store: SqlStore) -> None:
    pair(store)
    tokens = [granted(store, job(f"job-{name}"), (name,)).token for name in ("a", "b")]
    with store.writing() as session:
        for table in (LeaseRow, MemberRow, JobRow):
            session.execute(delete(table))
    tokens.append(granted(store, job("job-1")).token)
    assert 0 < tokens[0] < tokens[1] < tokens[2]


def test_a_warm_world_is_granted_only_while_all_its_nodes_hold_it(store: SqlStore) -> None:
    pair(store)
    first = granted(store, job("job-1"), world_id="w1")
    reported(store, first)
    store.end_job(
        "job-1", first.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key, warm_nodes=["a", "b"]
    )
    second = granted(store, job("job-2"), world_id="w1", warm=True)
    assert (second.warm, second.world_id) == (True, "w1")
    reported(store, second)
    store.end_job("job-2", second.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key)
    assert [each.world_id for each in store.nodes()] == ["", ""]
    refused(store, job("job-3"), ["a", "b"], world_id="w1", warm=True)


def test_a_node_that_joins_another_world_ends_its_old_one(store: SqlStore) -> None:
    pair(store)
    store.register_node(node("c"))
    first = granted(store, job("job-1"), ("a", "b"), world_id="w1")
    reported(store, first)
    store.end_job(
        "job-1", first.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key, warm_nodes=["a", "b"]
    )
    granted(store, job("job-2"), ("b", "c"), world_id="w2")
    assert [each.world_id for each in store.nodes()] == ["", "w2", "w2"]


def test_a_member_starts_once_under_its_token_and_session(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    late = found.token - 1
    assert store.start_member("job-1", late, "a", "s1", lease_s=LONG_S) is None
    assert store.start_member("job-1", found.token, "a", "s0", lease_s=LONG_S) is None
    assert store.start_member("job-1", found.token, "stranger", "s1", lease_s=LONG_S) is None
    assert store.job("job-1") == found
    started = store.start_member("job-1", found.token, "a", "s1", lease_s=2 * LONG_S)
    assert started == store.job("job-1")
    assert started.members[0].state is MemberState.RUNNING
    assert started.members[0].expires_at > found.members[0].expires_at
    assert store.start_member("job-1", found.token, "a", "s1", lease_s=LONG_S) is None
    with pytest.raises(UnknownNameError, match="no-such-job"):
        store.start_member("no-such-job", found.token, "a", "s1", lease_s=LONG_S)


def test_a_renewal_keeps_lease_and_node_alive_and_brings_the_endpoint(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"), lease_s=OVER_S)
    heartbeat = store.node("a").heartbeat_at
    while store.now() <= heartbeat:
        pass
    progress = ProbeProgress(phase="step", done=1, total=3, seconds=0.1)
    order = store.renew_member(
        "job-1", found.token, "a", "s1", lease_s=LONG_S, progress=progress, endpoint="10.0.0.1:29500"
    )
    assert (order.go_on, order.failure, order.endpoint) == (True, None, "10.0.0.1:29500")
    order = store.renew_member("job-1", found.token, "b", "s1", lease_s=LONG_S, endpoint="10.0.0.2:1")
    assert order.endpoint == "10.0.0.1:29500"
    after = store.job("job-1")
    assert (after.progress, after.endpoint) == (progress, "10.0.0.1:29500")
    assert store.node("a").heartbeat_at > heartbeat
    assert store.expire_members() == []
    assert after.members[0].expires_at > store.now()


def test_what_is_not_current_is_told_to_stop_and_changes_nothing(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    heartbeat = store.node("a").heartbeat_at
    late, evicted = (found.token - 1, "s1"), (found.token, "s0")
    for token, session in (late, evicted):
        order = store.renew_member("job-1", token, "a", session, lease_s=LONG_S, endpoint="x:1")
        assert (order.go_on, order.failure) == (False, FailureKind.CANCELLED)
        assert store.report_member("job-1", token, "a", session, report()) is None
    assert store.job("job-1") == found
    assert store.node("a").heartbeat_at == heartbeat


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (report(FailureKind.OOM), FailureKind.OOM),
        (MemberReport(failure=FailureKind.UNAVAILABLE), FailureKind.UNAVAILABLE),
        (
            MemberReport(
                ranks=(
                    RankReport(rank=0, failure=FailureKind.COMMUNICATION),
                    RankReport(rank=1, failure=FailureKind.CRASH),
                )
            ),
            FailureKind.CRASH,
        ),
        (report(), None),
    ],
    ids=["oom", "no ranks", "the cause, not its victim", "good"],
)
def test_the_others_are_told_to_stop_when_a_member_fails(
    store: SqlStore, answer: MemberReport, told: FailureKind | None
) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    start_all(store, found)
    assert order_for(store, found, "b") == (True, None)
    assert store.report_member("job-1", found.token, "a", "s1", answer) is not None
    assert order_for(store, found, "b") == (told is None, told)


def test_a_member_that_stopped_as_told_is_no_cause(store: SqlStore) -> None:
    pair(store)
    store.register_node(node("c"))
    found = granted(store, job("job-1"), ("a", "b", "c"))
    start_all(store, found)
    obedient = report(FailureKind.HANG, ordered=True)
    assert store.report_member("job-1", found.token, "a", "s1", obedient)
    assert order_for(store, found, "c") == (True, None)
    assert store.report_member("job-1", found.token, "b", "s1", report(FailureKind.HANG))
    assert order_for(store, found, "c") == (False, FailureKind.HANG)


def test_a_job_is_reported_after_the_last_member_and_keeps_its_nodes(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    start_all(store, found)
    first = store.report_member("job-1", found.token, "b", "s1", report())
    assert first is not None
    assert first.state is JobState.GRANTED
    assert order_for(store, found, "b") == (False, FailureKind.CANCELLED)
    last = store.report_member("job-1", found.token, "a", "s1", report(FailureKind.CRASH))
    assert last is not None
    assert last.state is JobState.REPORTED
    assert [each.report for each in last.members] == [report(FailureKind.CRASH), report()]
    assert store.leased_nodes() == {"a": "job-1", "b": "job-1"}
    assert store.job("job-1") == last


def test_a_report_that_comes_twice_counts_once(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    after = reported(store, found)
    assert store.report_member("job-1", found.token, "a", "s1", report(FailureKind.OOM)) == after
    assert store.job("job-1") == after


def test_a_lease_that_runs_out_loses_the_member(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    store.start_member("job-1", found.token, "a", "s1", lease_s=OVER_S)
    assert store.expire_members() == []  # b is still at it
    assert [each.state for each in store.job("job-1").members] == [MemberState.LOST, MemberState.LEASED]
    assert order_for(store, found, "b") == (False, FailureKind.LOST)
    assert order_for(store, found, "a") == (False, FailureKind.LOST)
    assert store.report_member("job-1", found.token, "a", "s1", report()) is None
    store.renew_member("job-1", found.token, "b", "s1", lease_s=OVER_S)
    (after,) = store.expire_members()
    assert after == store.job("job-1")
    assert after.state is JobState.REPORTED
    assert after.members[0].report is None
    assert store.expire_members() == []
    assert store.leased_nodes() == {"a": "job-1", "b": "job-1"}


def test_a_member_that_reported_is_not_lost(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"), lease_s=OVER_S)
    store.report_member("job-1", found.token, "a", "s1", report())
    (after,) = store.expire_members()
    assert [each.state for each in after.members] == [MemberState.REPORTED, MemberState.LOST]


def test_messages_that_may_be_lost_are_found(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    store.create_job(job("queued", created_at=MOMENT))
    assert store.unsent_members(older_than_s=LONG_S) == []
    assert list(store.unsent_members(older_than_s=0.0)) == [found]
    store.start_member("job-1", found.token, "a", "s1", lease_s=LONG_S)
    assert [each.id for each in store.unsent_members(older_than_s=0.0)] == ["job-1"]
    store.start_member("job-1", found.token, "b", "s1", lease_s=LONG_S)
    assert store.unsent_members(older_than_s=0.0) == []


def looked_hours_ago(store: SqlStore) -> None:
    """Makes the last look of a sweep one of three hours ago."""
    looked = update(CounterRow).where(CounterRow.name == SWEPT_AT, CounterRow.value != JUST_GRACED)
    with store.writing() as session:
        session.execute(looked.values(value=CounterRow.value - 3 * 3_600_000))


def test_nobody_is_lost_for_a_lease_that_could_not_be_renewed(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    start_all(store, found)
    assert store.expire_members(grace_s=15.0) == []
    looked_hours_ago(store)
    for name in ("a", "b"):
        store.renew_member("job-1", found.token, name, "s1", lease_s=OVER_S)
    assert store.expire_members(grace_s=15.0) == []  # the database was away
    after = store.job("job-1")
    assert [each.state for each in after.members] == [MemberState.RUNNING] * 2
    left_s = [(each.expires_at - store.now()).total_seconds() for each in after.members]
    assert all(0.0 < left <= 15.0 for left in left_s)
    assert order_for(store, found, "a") == (True, None)
    assert store.expire_members(grace_s=15.0) == []
    store.renew_member("job-1", found.token, "b", "s1", lease_s=OVER_S)
    assert store.expire_members(grace_s=15.0) == []  # a is still at it
    assert [each.state for each in store.job("job-1").members] == [MemberState.RUNNING, MemberState.LOST]


def test_a_grace_takes_nothing_from_a_lease_that_is_longer(store: SqlStore) -> None:
    pair(store)
    granted(store, job("job-1"))
    store.expire_members(grace_s=15.0)
    looked_hours_ago(store)
    before = store.job("job-1")
    assert store.expire_members(grace_s=15.0) == []
    assert store.job("job-1") == before


def test_leases_run_out_even_where_every_look_comes_late(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1"))
    start_all(store, found)
    store.expire_members(grace_s=15.0)
    ended = []
    for _ in range(2):
        looked_hours_ago(store)
        for name in ("a", "b"):
            store.renew_member("job-1", found.token, name, "s1", lease_s=OVER_S)
        ended = list(store.expire_members(grace_s=15.0))
    assert [each.state for each in ended] == [JobState.REPORTED]


def test_the_first_look_of_all_knows_of_no_pause(store: SqlStore) -> None:
    pair(store)
    granted(store, job("job-1"), lease_s=OVER_S)
    assert [each.state for each in store.expire_members(grace_s=15.0)] == [JobState.REPORTED]


def test_who_knows_the_speed_of_a_program_ends_the_others(store: SqlStore) -> None:
    pair(store)
    request = StepRequest(
        model=MODEL, workload=WORKLOAD.model_copy(update={"command": "own@00000000000000aa"}), plan=Plan(dp=8)
    )
    found = granted(store, job("job-1", request=request))
    for name in ("a", "b"):
        store.start_member("job-1", found.token, name, "s1", lease_s=LONG_S)
    told = MemberReport(ranks=(RankReport(rank=4, report={"step_times_s": [0.1, 0.1]}),))
    store.report_member("job-1", found.token, "b", "s1", told)
    order = store.renew_member("job-1", found.token, "a", "s1", lease_s=LONG_S)
    assert (order.go_on, order.measured, order.failure) == (False, True, None)


def test_ranks_of_our_own_probe_go_on_when_others_have_reported(store: SqlStore) -> None:
    pair(store)
    found = granted(store, job("job-1", request=StepRequest(model=MODEL, workload=WORKLOAD, plan=Plan(dp=8))))
    for name in ("a", "b"):
        store.start_member("job-1", found.token, name, "s1", lease_s=LONG_S)
    told = MemberReport(ranks=(RankReport(rank=4, report={"step_times_s": [0.1, 0.1]}),))
    store.report_member("job-1", found.token, "b", "s1", told)
    assert store.renew_member("job-1", found.token, "a", "s1", lease_s=LONG_S).go_on


def test_the_programs_of_a_node_are_stored_and_replaced(store: SqlStore) -> None:
    offer = CommandOffer(ref="own@00000000000000aa", space=Space(tp=(1, 2)), framework=FrameworkName.FSDP)
    assert store.register_node(node("a", commands=(offer,))).commands == (offer,)
    assert store.node("a").commands == (offer,)
    assert store.register_node(node("a", session="s2")).commands == ()
