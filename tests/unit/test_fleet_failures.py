"""The failure policy, kind by kind: what is tried again, who is blamed, who is cleared."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from store_records import MODEL, WORKLOAD, step_reading

from autotune.catalog import cluster_from_shorthand
from autotune.fleet.failures import POLICY, Judgement, judge, same_work
from autotune.search.core import Search
from autotune.specs import (
    ClusterSpec,
    Device,
    DeviceKind,
    Failure,
    FailureKind,
    Job,
    JobMember,
    JobPurpose,
    Link,
    Plan,
    ProbeOutcome,
    StepRequest,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
CLUSTER = ClusterSpec(
    name="blue", nodes=2, gpus_per_node=2, device=Device(name="card", kind=DeviceKind.CUDA, memory_bytes=2**30),
    intra=Link(name="nvlink"), inter=Link(name="ib"),
)  # fmt: skip
REQUEST = StepRequest(model=MODEL, workload=WORKLOAD, plan=Plan(dp=4))
KILLED = "node a: rank 1 was killed by SIGKILL"
RAISED = "node a: RuntimeError: shape mismatch"


def attempt(number: int = 1, nodes: str = "ab", avoid: Sequence[str] = (), **changes: object) -> Job:
    members = tuple(JobMember(node=name, index=i, address="", expires_at=NOW) for i, name in enumerate(nodes))
    made = Job(
        id=f"j{number}", purpose=JobPurpose.TRIAL, pool="blue", cluster=CLUSTER, request=REQUEST, tuning_id="t",
        trial_id="t-0", principal="ann", environment_key="env", avoid=tuple(avoid), attempt=number, deadline_s=60.0,
        members=members, created_at=NOW,
    )  # fmt: skip
    return made.model_copy(update=changes)


def failed(kind: FailureKind, message: str = KILLED) -> ProbeOutcome:
    return ProbeOutcome(failure=Failure(kind=kind, message=message), wall_s=1.0, gpu_s=4.0, setup_s=0.0)


def crashed(number: int, message: str, nodes: str = "ab", avoid: Sequence[str] = ()) -> Job:
    return attempt(number, nodes, avoid, failure=FailureKind.CRASH, message=message)


def verdict(
    job: Job, outcome: ProbeOutcome, blamed: str | None = "a", *, earlier: Sequence[Job] = (), wanted: bool = True
) -> Judgement:
    return judge(job, outcome, blamed, earlier=earlier, wanted=wanted, now=NOW)


def guilty(found: Judgement) -> list[str]:
    return [incident.node for incident in found.incidents]


def test_every_kind_has_a_policy() -> None:
    assert set(POLICY) == set(FailureKind)


@pytest.mark.parametrize("kind", [FailureKind.OOM, FailureKind.ILLEGAL, FailureKind.CANCELLED])
def test_what_no_node_can_help_is_final_and_nobody_is_blamed(kind: FailureKind) -> None:
    found = verdict(attempt(), failed(kind))
    assert (found.retry, guilty(found)) == (None, [])
    assert found.failure is not None
    assert found.failure.kind is kind


RETRIED = [
    FailureKind.CRASH, FailureKind.HANG, FailureKind.COMMUNICATION, FailureKind.LOST, FailureKind.UNAVAILABLE,
]  # fmt: skip


@pytest.mark.parametrize("kind", RETRIED)
def test_what_a_node_may_have_done_is_tried_again_elsewhere_and_twice_at_most(kind: FailureKind) -> None:
    first = verdict(attempt(), failed(kind))
    assert guilty(first) == ["a"]
    assert first.retry is not None
    assert (first.retry.attempt, first.retry.avoid) == (2, ("a",))
    assert first.retry.id != "j1"
    assert (first.retry.trial_id, first.retry.request, first.retry.environment_key) == ("t-0", REQUEST, "env")

    last = verdict(attempt(3, "cd", "ab"), failed(kind), "c")
    assert (last.retry, guilty(last)) == (None, ["c"])
    assert last.failure is not None
    assert "attempt 3" in last.failure.message


def test_without_a_known_cause_nobody_is_blamed_or_avoided() -> None:
    found = verdict(attempt(), failed(FailureKind.COMMUNICATION), None)
    assert guilty(found) == []
    assert found.retry is not None
    assert found.retry.avoid == ()


def test_nothing_is_tried_again_for_a_tuning_that_has_ended() -> None:
    assert verdict(attempt(), failed(FailureKind.LOST), wanted=False).retry is None
    assert verdict(attempt(cancelled=True), failed(FailureKind.LOST)).retry is None


def test_an_exception_waits_for_the_next_attempt_to_say_whose_it_is() -> None:
    found = verdict(attempt(), failed(FailureKind.CRASH, RAISED))
    assert guilty(found) == []
    assert found.retry is not None
    assert found.retry.avoid == ("a",)


def test_the_same_exception_elsewhere_is_the_plans() -> None:
    again = attempt(2, "bc", "a")
    found = verdict(again, failed(FailureKind.CRASH, RAISED), "b", earlier=[crashed(1, RAISED)])
    assert (found.retry, guilty(found), list(found.cleared)) == (None, [], ["a"])


def test_the_same_exception_on_the_same_node_is_final_and_has_the_node_looked_at() -> None:
    again = attempt(2, "ab", "a")
    found = verdict(again, failed(FailureKind.CRASH, RAISED), "a", earlier=[crashed(1, RAISED)])
    assert (found.retry, guilty(found)) == (None, ["a"])


def test_no_exception_elsewhere_puts_it_down_to_the_node() -> None:
    well = ProbeOutcome(readings=(step_reading(),), wall_s=1.0, gpu_s=4.0, setup_s=0.0)
    found = verdict(attempt(2, "bc", "a"), well, None, earlier=[crashed(1, RAISED)])
    assert (found.failure, guilty(found), list(found.cleared)) == (None, ["a"], ["b", "c"])
    lost = attempt(1, failure=FailureKind.LOST, message="node a was lost")
    assert guilty(verdict(attempt(2, "bc", "a"), well, None, earlier=[lost])) == []  # blamed at once, back then


@pytest.mark.parametrize("other", ["node a: ValueError: no", KILLED])
def test_another_failure_is_no_repeat(other: str) -> None:
    again = attempt(2, "bc", "a")
    assert verdict(again, failed(FailureKind.CRASH, RAISED), "b", earlier=[crashed(1, other)]).retry is not None


def test_a_process_that_is_killed_twice_is_tried_a_third_time() -> None:
    found = verdict(attempt(2, "bc", "a"), failed(FailureKind.CRASH, KILLED), "b", earlier=[crashed(1, KILLED)])
    assert guilty(found) == ["b"]
    assert found.retry is not None
    assert found.retry.avoid == ("a", "b")


def ranks_that_take(*seconds: float, stages: int = 1) -> ProbeOutcome:
    reading = step_reading()
    each = reading.ranks[0]
    ranks = tuple(
        each.model_copy(update={"rank": i, "stage": i * stages // len(seconds), "t_calc_s": t})
        for i, t in enumerate(seconds)
    )
    whole = reading.model_copy(update={"ranks": ranks})
    return ProbeOutcome(readings=(whole,), wall_s=1.0, gpu_s=4.0, setup_s=0.0)


def test_a_node_whose_rank_lags_behind_its_stage_has_an_incident() -> None:
    found = verdict(attempt(), ranks_that_take(1.0, 1.0, 1.0, 1.4), None)
    assert [(incident.node, incident.kind) for incident in found.incidents] == [("b", "straggler")]
    assert found.incidents[0].message == "rank 3 computed 1.4 x as long as the median of its stage 0"
    assert list(found.cleared) == ["a"]


@pytest.mark.parametrize(
    "outcome",
    [ranks_that_take(1.0, 1.0, 1.0, 1.3), ranks_that_take(1.0, 1.0, 2.0, 2.0, stages=2), ranks_that_take(0.0, 0.0)],
)
def test_no_node_lags_by_noise_or_because_its_stage_has_more_to_do(outcome: ProbeOutcome) -> None:
    found = verdict(attempt(), outcome, None)
    assert (guilty(found), list(found.cleared)) == ([], ["a", "b"])


def ranks_compute(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds))


def slow_verdict(number: int, calc_s: dict[int, float], **changes: object) -> Judgement:
    well = ProbeOutcome(readings=(step_reading(),), wall_s=1.0, gpu_s=4.0, setup_s=0.0)
    return judge(attempt(number, **changes), well, None, earlier=[], wanted=True, now=NOW, calc_s=calc_s)


def test_a_node_at_a_tenth_of_the_speed_is_left_out_and_the_trial_measured_again() -> None:
    found = slow_verdict(1, ranks_compute(0.1, 0.1, 0.1, 1.0))
    assert [(incident.node, incident.kind) for incident in found.incidents] == [("b", "slow")]
    told = "rank 3 computed 1 s for what took the other nodes 0.1 s, 10.0 x as long"
    assert found.incidents[0].message == told
    assert found.failure is not None
    assert (found.failure.kind, found.failure.message) == (FailureKind.SLOW, f"node b: {told}")
    assert found.retry is not None
    assert (found.retry.avoid, found.retry.attempt) == (("b",), 2)


def test_what_is_slow_on_the_last_attempt_too_is_the_result() -> None:
    found = slow_verdict(3, ranks_compute(0.1, 0.1, 0.1, 1.0))
    assert (found.failure, found.retry, guilty(found), list(found.cleared)) == (None, None, ["b"], ["a"])


@pytest.mark.parametrize(
    ("calc_s", "changes"),
    [
        (ranks_compute(0.1, 0.1, 0.1, 0.29), {}),
        (ranks_compute(0.001, 0.001, 0.001, 0.0059), {}),  # a few milliseconds may be chance
        (ranks_compute(0.1, 1.0, 1.0, 0.1), {}),  # the same on both nodes
        (ranks_compute(0.1, 0.1, 1.0, 1.0), {"request": REQUEST.model_copy(update={"plan": Plan(pp=2, dp=2)})}),
        (ranks_compute(0.1, 0.1, 0.1, 1.0), {"cluster": CLUSTER.model_copy(update={"node_cores": 1})}),
        (ranks_compute(0.0, 0.0, 0.0, 0.0), {}),
        ({}, {}),
    ],
)
def test_no_node_is_slow_by_chance_or_because_its_ranks_have_more_to_do(
    calc_s: dict[int, float], changes: dict[str, object]
) -> None:
    found = slow_verdict(1, calc_s, **changes)
    assert (found.failure, guilty(found), list(found.cleared)) == (None, [], ["a", "b"])


def test_only_an_oom_teaches_memory_and_what_was_tried_often_enough_is_not_asked_again() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x4")
    for kind in FailureKind:
        search = Search(MODEL, cluster, WORKLOAD)
        plan = search.ask()
        assert plan is not None
        row = search.table.find(plan)
        search.tell(plan, Failure(kind=kind, message=""), final=True)
        posterior = search.posterior()
        assert posterior.barred[row]
        assert search.observations[0].out_of_memory is (kind is FailureKind.OOM)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"id": "j9", "attempt": 2, "avoid": ("a",)}, True),
        ({"purpose": JobPurpose.PROFILE}, False),
        ({"trial_id": "t-1"}, False),
        ({"request": REQUEST.model_copy(update={"plan": Plan(tp=4)})}, False),
    ],
)
def test_attempts_at_the_same_work_have_its_purpose_trial_and_request(
    changes: dict[str, object], *, same: bool
) -> None:
    assert same_work(attempt(), attempt(**changes)) is same
