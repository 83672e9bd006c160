"""Gang scheduling as a pure choice: all or nothing, fair, nobody starved, warm where it can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.fleet.eligibility import common_environment, obstacle, too_few, why_waiting
from autotune.fleet.scheduling import Grant, choose
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveRequest,
    Device,
    DeviceKind,
    Job,
    JobPurpose,
    Link,
    Node,
    NodeState,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DEVICE = Device(name="card", kind=DeviceKind.CUDA, memory_bytes=2**30)
REQUEST = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(4096,))


def node(name: str, **changes: object) -> Node:
    made = Node(
        name=name, pool="blue", address=f"10.0.0.{len(name)}", device=DEVICE, slots=4, environment_key="env",
        session="s", registered_at=NOW, heartbeat_at=NOW,
    )  # fmt: skip
    return made.model_copy(update=changes)


def job(name: str, nodes: int = 1, age_s: float = 0.0, **changes: object) -> Job:
    cluster = ClusterSpec(
        name="blue", nodes=nodes, gpus_per_node=4, device=DEVICE, intra=Link(name="nvlink"), inter=Link(name="ib")
    )
    made = Job(
        id=name, purpose=JobPurpose.TRIAL, pool="blue", cluster=cluster, request=REQUEST, principal="ann",
        environment_key="env", deadline_s=60.0, created_at=NOW - timedelta(seconds=age_s),
    )  # fmt: skip
    return made.model_copy(update=changes)


def chosen(grants: list[Grant]) -> dict[str, tuple[str, ...]]:
    return {grant.job.id: grant.nodes for grant in grants}


def pick(
    jobs: list[Job], nodes: list[Node], leased: dict[str, str] | None = None, **usage: float
) -> dict[str, tuple[str, ...]]:
    return chosen(choose(jobs, nodes, leased or {}, usage, NOW))


ABCD = [node(name) for name in "abcd"]


def test_disjoint_gangs_run_at_once() -> None:
    assert pick([job("1", 2, age_s=9), job("2", 2)], ABCD) == {"1": ("a", "b"), "2": ("c", "d")}


def test_a_gang_gets_all_its_nodes_or_none() -> None:
    assert pick([job("1", 3)], ABCD[:2]) == {}
    assert pick([job("1", 3)], ABCD, {"b": "x", "c": "y"}) == {}


def test_ranks_follow_the_topology() -> None:
    nodes = [node("a", topology="rack2"), node("b", topology="rack1"), node("c", topology="rack2")]
    assert pick([job("1", 3)], nodes) == {"1": ("b", "a", "c")}
    assert pick([job("1", 2)], nodes) == {"1": ("a", "c")}  # of one rack


@pytest.mark.parametrize(
    "changes",
    [
        {"heartbeat_at": NOW - timedelta(seconds=61)},
        {"session": ""},
        {"slots": 3},
        {"state": NodeState.QUARANTINED},
        {"environment_key": "other"},
        {"pool": "red"},
        {"device": DEVICE.model_copy(update={"name": "older card"})},
    ],
)
def test_a_node_that_is_not_fit_is_never_chosen(changes: dict[str, object]) -> None:
    assert pick([job("1")], [node("a", **changes)]) == {}
    assert pick([job("1")], [node("a", **changes), node("b")]) == {"1": ("b",)}


def test_nodes_of_a_gang_agree_in_their_environment() -> None:
    nodes = [node("a", environment_key="x"), node("b", environment_key="y"), node("c", environment_key="y")]
    assert pick([job("1", 2, environment_key="")], nodes) == {"1": ("b", "c")}


def test_who_used_least_comes_first_then_the_oldest_job() -> None:
    jobs = [job("old", age_s=100, principal="ann"), job("new", principal="bob"), job("newer", principal="bob")]
    assert pick(jobs, ABCD[:1], ann=50.0, bob=10.0).keys() == {"new"}
    assert pick(jobs, ABCD[:1]).keys() == {"old"}


def test_what_is_granted_now_counts() -> None:
    """Ann's three older jobs do not take all: after her first one it is bob's turn."""
    jobs = [job(f"a{i}", age_s=100 - i) for i in range(3)] + [job("b", principal="bob")]
    assert set(pick(jobs, ABCD[:2])) == {"a0", "b"}


@pytest.mark.parametrize(("bob", "first"), [(119.0, ["a0", "b"]), (121.0, ["a0", "a1"])])
def test_a_job_counts_half_a_minute_of_its_devices_until_it_has_used_anything(bob: float, first: list[str]) -> None:
    """One node of 4 devices: ann's first job counts as 120 GPU-seconds when her second and bob's are compared."""
    jobs = [job("a0", age_s=100), job("a1", age_s=99), job("b", principal="bob")]
    found = choose(jobs, ABCD[:2], {}, {"ann": 0.0, "bob": bob}, NOW)
    assert [grant.job.id for grant in found] == first


def test_health_probes_come_first_and_may_have_their_quarantined_node() -> None:
    bad = node("a", state=NodeState.QUARANTINED)
    probe = job("h", purpose=JobPurpose.HEALTH, only_node="a", principal="", environment_key="")
    assert pick([job("1", age_s=100), probe], [bad, node("b")]) == {"h": ("a",), "1": ("b",)}
    assert pick([probe], [node("b")]) == {}


def test_a_large_gang_reserves_what_is_free() -> None:
    """It is first in turn and waits for c and d: the younger small job may not have a or b."""
    jobs = [job("large", 4, age_s=100), job("small", 1)]
    assert pick(jobs, ABCD, {"c": "x", "d": "x"}) == {}
    assert pick(jobs, ABCD) == {"large": ("a", "b", "c", "d")}


def test_a_gang_that_could_not_run_on_an_idle_pool_reserves_nothing() -> None:
    assert pick([job("large", 5, age_s=100), job("small", 1)], ABCD) == {"small": ("a",)}


def test_a_retry_avoids_the_blamed_node_where_the_pool_allows() -> None:
    retry = job("1", 2, avoid=("a",))
    assert pick([retry], ABCD) == {"1": ("b", "c")}
    assert pick([retry], ABCD[:3], {"b": "x"}) == {}  # b will be free
    assert pick([retry], ABCD[:2]) == {"1": ("a", "b")}
    assert pick([job("1", 2, avoid=("b", "a"))], ABCD[:3]) == {"1": ("b", "c")}  # b failed longer ago


def test_a_living_world_of_just_this_gang_is_used_again() -> None:
    nodes = [node("a"), node("b", world_id="w"), node("c"), node("d", world_id="w")]
    (grant,) = choose([job("1", 2)], nodes, {}, {}, NOW)
    assert (grant.nodes, grant.world_id, grant.warm) == (("b", "d"), "w", True)


@pytest.mark.parametrize("count", [1, 3])
def test_a_world_of_another_size_is_not(count: int) -> None:
    nodes = [node("a", world_id="w"), node("b", world_id="w"), node("c")]
    (grant,) = choose([job("1", count)], nodes, {}, {}, NOW)
    assert (grant.world_id, grant.warm) == ("1", False)


def test_a_world_that_lost_a_node_is_not() -> None:
    gone = node("b", world_id="w", heartbeat_at=NOW - timedelta(seconds=99))
    (grant,) = choose([job("1")], [node("a", world_id="w"), gone], {}, {}, NOW)
    assert (grant.nodes, grant.warm) == (("a",), False)


def test_worlds_of_others_are_left_alone_where_it_costs_nothing() -> None:
    nodes = [node("a", world_id="w"), node("b", world_id="w"), node("c"), node("d")]
    assert pick([job("1", 1)], nodes) == {"1": ("c",)}


names = st.sampled_from("abcdef")
some_jobs = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(["ann", "bob", "eve"]), st.integers(0, 50)), max_size=12
)


@given(some_jobs, st.sets(names), st.sets(names), st.dictionaries(names, st.sampled_from(["v", "w"])))
@settings(deadline=None)
def test_no_node_is_given_twice_and_no_gang_by_halves(
    wanted: list[tuple[int, str, int]], present: set[str], leased: set[str], worlds: dict[str, str]
) -> None:
    jobs = [job(f"j{i}", n, age_s=age, principal=who) for i, (n, who, age) in enumerate(wanted)]
    nodes = [node(name, world_id=worlds.get(name, "")) for name in sorted(present)]
    grants = choose(jobs, nodes, dict.fromkeys(leased, "x"), {}, NOW)
    given_away = [name for grant in grants for name in grant.nodes]
    assert len(given_away) == len(set(given_away))
    assert set(given_away) <= present - leased
    assert all(len(grant.nodes) == grant.job.cluster.nodes for grant in grants)
    for grant in grants:
        holders = {each.name for each in nodes if each.world_id == grant.world_id}
        assert grant.warm == (holders == set(grant.nodes))
    if not leased:
        possible = [each for each in jobs if each.cluster.nodes <= len(nodes)]
        assert bool(grants) == bool(possible)


@dataclass
class Simulation:
    """Rounds of a pool: grants are held for a while, usage is counted, new small jobs keep coming."""

    nodes: list[Node]
    queued: list[Job]
    leases: dict[str, tuple[str, int]] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)

    def round(self, number: int, newcomers: int) -> None:
        self.leases = {name: held for name, held in self.leases.items() if held[1] > number}
        for i in range(newcomers):
            self.queued.append(job(f"n{number}.{i}", 1, age_s=-number, principal=f"p{i}"))
        for grant in choose(self.queued, self.nodes, {n: j for n, (j, _) in self.leases.items()}, self.usage, NOW):
            self.queued.remove(grant.job)
            who = grant.job.principal
            self.usage[who] = self.usage.get(who, 0.0) + 4.0 * len(grant.nodes)
            for i, name in enumerate(grant.nodes):
                # Members of small jobs end at different times, so that all nodes are rarely free at once by chance.
                self.leases[name] = (grant.job.id, number + 2 + (number + i) % 3)


@given(st.integers(1, 4), st.integers(1, 5), st.floats(0.0, 60.0))
@settings(deadline=None, max_examples=40)
def test_nobody_starves_however_many_small_jobs_come(size: int, newcomers: int, used: float) -> None:
    world = Simulation(nodes=list(ABCD), queued=[], usage={"old": used})
    for number in range(5):
        world.round(number, newcomers)
    world.queued.append(job("large", size, age_s=-5, principal="old"))
    for number in range(5, 120):
        world.round(number, newcomers)
    assert "large" not in {each.id for each in world.queued}


def test_why_a_job_waits_is_told_node_by_node() -> None:
    nodes = [
        node("a"),
        node("b"),
        node("c", slots=3, reason="GPU 2 fell off the bus"),
        node("d", state=NodeState.QUARANTINED, reason="two failures"),
        node("e", heartbeat_at=NOW - timedelta(seconds=99)),
        node("f", pool="red"),
    ]
    text = why_waiting(job("1", 3), nodes, {"b": "x"}, NOW)
    assert text == (
        "needs 3 nodes of pool blue: 1 free; 1 busy (b); "
        "node c came up with 3 of 4 devices (GPU 2 fell off the bus); "
        "node d quarantined: two failures; node e lost: no heartbeat for over 60 s"
    )
    assert why_waiting(job("1"), [], {}, NOW) == "needs 1 node of pool blue, and no node of it has registered"


def test_of_many_nodes_the_first_eight_are_named() -> None:
    names = "abcdefghij"
    busy = why_waiting(job("1"), [node(name) for name in names], dict.fromkeys(names, "x"), NOW)
    assert busy == "needs 1 node of pool blue: 0 free; 10 busy (a, b, c, d, e, f, g, h and 2 more)"
    few = why_waiting(job("1"), [node(name) for name in names[:8]], dict.fromkeys(names, "x"), NOW)
    assert few == "needs 1 node of pool blue: 0 free; 8 busy (a, b, c, d, e, f, g, h)"
    ended = [node(name, session="") for name in names]
    text = too_few("blue", 2, ended, {each.name: "its worker has ended" for each in ended})
    start = "waiting for nodes: pool blue has 0 of the 2 nodes that this needs ready; node a its worker has ended; "
    assert text.startswith(start)
    assert text.endswith("; node h its worker has ended; and 2 more")
    assert too_few("blue", 1, [node("a")], {"a": ""}) == (
        "waiting for nodes: pool blue has 1 of the 1 node that this needs ready"
    )
    assert too_few("blue", 2, [], {}).endswith("the 2 nodes that this needs ready; none has registered")
    eight = too_few("blue", 2, ended[:8], {each.name: "its worker has ended" for each in ended[:8]})
    assert eight.endswith("; node h its worker has ended")


def test_the_environment_that_most_nodes_have_is_the_pools() -> None:
    nodes = [node("a", environment_key="x"), node("b", environment_key="y"), node("c", environment_key="y")]
    assert common_environment(nodes) == "y"
    assert common_environment(nodes[:2]) == "x"  # of as many the first by name
    assert common_environment([]) == ""


def test_a_heartbeat_may_be_a_minute_old() -> None:
    for age_s, text in ((60.0, ""), (60.1, "lost: no heartbeat for over 60 s")):
        assert obstacle(node("a", heartbeat_at=NOW - timedelta(seconds=age_s)), NOW, 4) == text
    assert obstacle(node("a", slots=3), NOW, 4) == "came up with 3 of 4 devices"
    assert obstacle(node("a", state=NodeState.QUARANTINED), NOW, 4) == "quarantined"
