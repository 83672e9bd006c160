"""A node's side of a job, over a real store: it hears whether to go on, tells how far it is, and signs off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fleet_records import granted, job, node, pair
from fleet_world import Mail

from autotune.fleet.node import NodeHandlers
from autotune.fleet.service import FleetService
from autotune.settings import FleetTimes
from autotune.specs import FailureKind, Job, JobState, MemberOrder, MemberReport, ProbeProgress, ProbeRequest
from storage import SqlStore, open_store

TIMES = FleetTimes(lease_s=60.0, renew_every_s=0.01)
PROGRESS = ProbeProgress(phase="sweep", done=1, total=2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as opened:
        pair(opened)
        yield opened


@dataclass
class Heartbeat:
    """Counts its beats."""

    beats: int = 0
    stopping: bool = False
    evicted: bool = False

    def renew(self) -> None:
        self.beats += 1

    def evict(self) -> None:
        self.evicted = True


Share = tuple[str, str]


@dataclass
class Ranks:
    """Does what a test says, between the orders that it is given."""

    act: Callable[[Callable[[str], object], Callable[..., MemberOrder]], None] = lambda publish, order: None
    shares: list[Share] = field(default_factory=list)
    deadlines_s: list[float] = field(default_factory=list)
    closed: bool = False

    def run(
        self,
        share: Share,
        request: ProbeRequest,
        *,
        deadline_s: float,
        publish: Callable[[str], object],
        order: Callable[..., MemberOrder],
    ) -> MemberReport:
        self.shares.append(share)
        self.deadlines_s.append(deadline_s)
        self.act(publish, order)
        return MemberReport(kept_warm=True)

    def close(self) -> None:
        self.closed = True


def handlers(store: SqlStore, ranks: Ranks, heartbeat: Heartbeat, session: str = "s1") -> NodeHandlers:
    fleet = FleetService(store, Mail(), merge=lambda ended: pytest.fail("no job ends here"))
    return NodeHandlers(
        name="a", session=session, store=store, fleet=fleet, ranks=ranks, heartbeat=heartbeat, times=TIMES,
        share_of=lambda of, name: (of.id, name),
    )  # fmt: skip


def comes(condition: Callable[[], bool]) -> None:
    """Returns as soon as a renewal has brought it."""
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    pytest.fail("it did not come")


def measured(store: SqlStore, ranks: Ranks, heartbeat: Heartbeat) -> Job:
    """A job of both nodes after a has done its share."""
    found = granted(store, job("j"))
    handlers(store, ranks, heartbeat).run("j", found.token)
    return store.job("j")


def test_what_ranks_tell_reaches_the_others_while_they_work(store: SqlStore) -> None:
    heartbeat = Heartbeat()

    def act(publish: Callable[[str], object], order: Callable[..., MemberOrder]) -> None:
        assert order(PROGRESS).go_on
        publish("10.0.0.1:29500")
        comes(lambda: store.job("j").endpoint == "10.0.0.1:29500")
        comes(lambda: store.job("j").progress == PROGRESS)
        comes(lambda: order().endpoint == "10.0.0.1:29500")

    ranks = Ranks(act)
    found = measured(store, ranks, heartbeat)
    assert (ranks.shares, ranks.deadlines_s) == ([("j", "a")], [120.0])
    assert heartbeat.beats >= 3
    (mine, others) = sorted(found.members, key=lambda member: member.node)
    assert mine.report == MemberReport(kept_warm=True)
    assert others.report is None
    assert found.state is JobState.GRANTED
    assert store.node("a").session == "s1"


def test_ranks_hear_that_another_session_has_the_node(store: SqlStore) -> None:
    orders: list[MemberOrder] = []

    def act(publish: Callable[[str], object], order: Callable[..., MemberOrder]) -> None:
        store.register_node(node("a", "s2"))
        comes(lambda: not order().go_on)
        orders.append(order())

    found = measured(store, Ranks(act), Heartbeat())
    assert orders[0].failure is FailureKind.CANCELLED
    assert all(member.report is None for member in found.members)  # what an older session reports is not wanted


def test_ranks_of_a_worker_that_shuts_down_stop_and_their_node_is_signed_off(store: SqlStore) -> None:
    heartbeat, orders = Heartbeat(), []

    def act(publish: Callable[[str], object], order: Callable[..., MemberOrder]) -> None:
        heartbeat.stopping = True
        orders.append(order())

    measured(store, Ranks(act), heartbeat)
    assert (orders[0].go_on, orders[0].failure) == (False, FailureKind.LOST)
    assert store.node("a").session == ""


def test_a_delivery_that_comes_again_is_reported_as_left_behind(store: SqlStore) -> None:
    """The same session has begun it already: the process that did so has died, for a node runs one task at a time."""
    found = granted(store, job("j"))
    assert store.start_member("j", found.token, "a", "s1", lease_s=60.0) is not None
    ranks = Ranks()
    handlers(store, ranks, Heartbeat()).run("j", found.token)
    assert ranks.shares == []
    report = next(member.report for member in store.job("j").members if member.node == "a")
    assert report is not None
    assert report.failure is FailureKind.LOST


def test_a_canary_renews_its_own_node_and_ends_a_worker_whose_name_another_has(store: SqlStore) -> None:
    heartbeat = Heartbeat()
    mine = handlers(store, Ranks(), heartbeat)
    before = store.node("a").heartbeat_at
    mine.canary("s1")
    assert store.node("a").heartbeat_at > before
    store.register_node(node("a", "s2"))
    mine.canary("s2")  # a canary for the other one
    assert not heartbeat.evicted
    mine.canary("s1")
    assert heartbeat.evicted


def test_a_node_that_is_closed_ends_its_ranks_and_leaves(store: SqlStore) -> None:
    ranks = Ranks()
    handlers(store, ranks, Heartbeat()).close()
    assert ranks.closed
    assert (store.node("a").session, store.node("b").session) == ("", "s1")
