"""A night in a box: the link across nodes becomes half as fast, and the fleet's own checks say so."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from autotune.specs import BestEntry, DType, ModelSpec, Norm, Plan, Workload
from autotune.specs.regression import CauseKind, Check, CheckRole, CheckState, VerdictKind
from benchmarks.box_regression import Nights, settle, wait_for
from deploy.box import Box

FAST_MBIT = 50.0
# A pipeline across the link that sends half a MiB each way: a step is little but that, whatever else the machine does.
# So few parameters that the controls, which send as many bytes as these have, are short.
MODEL = ModelSpec(
    name="narrow", layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=32, gated=False, vocab=32, tied=False,
    norm=Norm.RMSNORM, source="ours",
)  # fmt: skip
WORKLOAD = Workload(seq_len=16, global_batch=256, dtype=DType.FP32)
SLOW_STEP_S = 1.0  # said of a step that takes a tenth of that: few of them are then timed at once

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nights() -> Iterator[Nights]:
    with Box(nodes=2, ranks=1, rate_mbit=FAST_MBIT) as box:
        settle(box)
        found = Nights(box)
        found.store.put_best(entry(found))
        yield found
        found.close()


def entry(nights: Nights) -> BestEntry:
    """What is known of the box: a pipeline over its nodes, whose speed nobody has measured."""
    node, cluster = nights.store.node("node0"), nights.store.cluster("box")
    tokens_per_s = WORKLOAD.tokens_per_step / (SLOW_STEP_S * cluster.devices)
    return BestEntry(
        model=MODEL, parameters=14_496, cluster=cluster, plan=Plan(pp=2, micro_batch=128), workload=WORKLOAD,
        tokens_per_s_per_gpu=tokens_per_s, interval=(tokens_per_s, tokens_per_s), repeats=1, peak_bytes=None,
        fingerprint_key=node.fingerprint_key, environment_key=node.environment_key, measured_at=datetime.now(UTC),
    )  # fmt: skip


def test_a_link_that_was_halved_overnight_is_named_and_the_plan_is_not_blamed(nights: Nights) -> None:
    first = nights.night()
    assert verdict(first) is VerdictKind.BASELINE
    for node in nights.box.nodes:
        nights.box.set_rate(node, FAST_MBIT / 2)
    second = nights.night()
    assert verdict(second) is VerdictKind.WORSE
    assert second.result is not None
    cause = second.result.cause
    assert cause is not None
    assert cause.kind is CauseKind.LINK_ACROSS, cause
    assert cause.subject == "link veth across nodes of box"
    (link,) = [control for control in cause.controls if control.role is CheckRole.LINK_ACROSS]
    assert link.effect == pytest.approx(-0.5, abs=0.1)
    (incident,) = nights.store.incidents_page(open_only=True)
    assert (incident.kind, incident.series) == (CauseKind.LINK_ACROSS, (second.series,))
    tuning = wait_for("another plan is looked for", lambda: nights.store.check(second.id).tuning_id)
    assert nights.store.tuning(tuning).principal == "regression"


def verdict(check: Check) -> VerdictKind:
    assert check.state is CheckState.DONE
    assert check.result is not None
    return check.result.verdict
