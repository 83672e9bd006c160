"""Explanations against figures worked out by hand, and against each other."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.table import PlanTable
from autotune.explain.explanation import explain_best, explain_setting, rejection
from autotune.explain.limits import LimitKind, estimated_limits, measured_limits, memory_limit
from autotune.explain.losses import (
    Source,
    StepParts,
    change,
    changed,
    largest_parts,
    loss,
    losses,
    measured_step,
    neighbours,
)
from autotune.explain.whatif import Setting, what_ifs
from autotune.search.ranking import best_of
from autotune.specs import Plan, Recompute, Schedule, StepReading, Trial, TrialState, Tuning, Workload

SETTING = Setting(
    model=preset("llama2-7b"),
    cluster=cluster_from_shorthand("a100-80gb-sxm:2x8"),
    workload=Workload(seq_len=4096, global_batch=128),
)
TABLE = SETTING.plans()
ESTIMATES = SETTING.estimates(TABLE)


def best_row() -> int:
    return int(np.argmax(np.where(ESTIMATES.fits, ESTIMATES.tokens_per_s_per_gpu * ESTIMATES.p_fits, 0.0)))


def reading(
    tokens: float, calc_s: float | None = 0.6, exposed_s: float | None = 0.3, whole_s: float = 1.0
) -> StepReading:
    return StepReading(
        tokens_per_s_per_gpu=tokens,
        interval_tokens_per_s_per_gpu=(0.99 * tokens, 1.01 * tokens),
        step_time_s=SETTING.workload.tokens_per_step / (16 * tokens),
        step_times_s=(whole_s,) * 3,
        warmup_times_s=(),
        steady=True,
        traced_step_s=whole_s if calc_s else None,
        t_calc_s=calc_s,
        t_comm_s=2 * exposed_s if exposed_s else None,
        t_comm_exposed_s=exposed_s,
        mu=2 * exposed_s / calc_s if calc_s and exposed_s else None,
        mfu=None,
        peak_allocated_bytes=2**30,
        peak_reserved_bytes=2**30,
        memory_source="test",
        losses=(),
        pruned=False,
        setup_s=1.0,
        ranks=(),
    )


def test_a_loss_names_the_parts_that_take_longer_with_their_seconds() -> None:
    own = StepParts(1.0, {"computing": 0.9, "TP communication": 0.07, "optimizer": 0.03}, Source.ESTIMATE)
    other = StepParts(1.18, {"computing": 1.03, "TP communication": 0.12, "optimizer": 0.03}, Source.ESTIMATE)
    found = loss(Plan(tp=4, dp=2), own, Plan(tp=8), other)
    assert found.text == (
        "tp 8 instead of 4: +18.0% of the step (estimate): computing 1,030 ms instead of 900 ms, "
        "TP communication 120 ms instead of 70 ms"
    )
    assert found.to_data()["parts"][1] == {"part": "TP communication", "seconds": 0.12, "instead_of_s": 0.07}


def test_of_a_faster_plan_the_parts_that_take_less_are_named() -> None:
    own = StepParts(1.0, {"computing": 0.8, "idle": 0.2}, Source.MEASURED)
    found = loss(Plan(), own, Plan(micro_batch=2), StepParts(0.9, {"computing": 0.85, "idle": 0.05}, Source.MEASURED))
    assert found.text == "micro_batch 2 instead of 1: -10.0% of the step (measured): idle 50 ms instead of 200 ms"


def test_measured_and_estimated_steps_are_never_compared() -> None:
    with pytest.raises(AssertionError, match="measured"):
        loss(Plan(), StepParts(1.0, {}, Source.MEASURED), Plan(tp=2), StepParts(1.0, {}, Source.ESTIMATE))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Plan(tp=2, dp=4), "tp 2 instead of 1"),
        (Plan(dp=8, recompute=Recompute.FULL, sequence_parallel=True),
         "recompute full instead of none, sequence_parallel on instead of off"),
        (Plan(pp=2, dp=4, vpp=2, schedule=Schedule.INTERLEAVED),
         "pp 2 instead of 1, schedule interleaved instead of 1f1b"),
        (Plan(dp=8), "the same plan"),
    ],
)  # fmt: skip
def test_changes_in_words(other: Plan, words: str) -> None:
    assert change(Plan(dp=8), other) == words


def test_neighbours_change_one_thing_each_where_they_can_and_are_the_best_of_their_kind() -> None:
    table = SETTING.plans().take(np.arange(0, len(TABLE), 7))
    estimates = SETTING.estimates(table)
    plans = [table.plan(i) for i in range(len(table))]
    for own in plans[::200]:
        found = neighbours(own, table, estimates)
        alone = [j for j, other in enumerate(plans) if len(changed(own, other)) == 1]
        for names in {changed(own, plans[j])[0] for j in alone}:
            kin = [j for j in alone if changed(own, plans[j])[0] == names]
            fitting = [j for j in kin if estimates.fits[j]]
            best = min(fitting, key=lambda j: estimates.step_time_s[j]) if fitting else None
            chosen = [i for i in found if i in kin]
            assert chosen, names
            assert best is None or estimates.step_time_s[chosen[0]] == estimates.step_time_s[best]


def test_the_best_plan_loses_to_none_that_fits_and_wide_tp_loses_on_its_communication() -> None:
    own = TABLE.plan(best_row())
    found = losses(own, TABLE, ESTIMATES)
    worth = ESTIMATES.expected
    rows = [TABLE.find(item.plan) for item in found if not item.refusal]
    assert all(row is not None and worth[row] <= worth[best_row()] for row in rows)
    words = ("too much", "faster if it fits")
    assert all(any(word in item.refusal for word in words) for item in found if item.refusal)
    wide = rejection(Plan(tp=16), TABLE, ESTIMATES)
    assert wide is not None
    assert wide.parts[0].part == "TP communication"
    assert rejection(own, TABLE, ESTIMATES) is None


def test_of_two_ways_to_the_same_change_the_faster_is_named() -> None:
    """tp 2 with sequence parallelism beats tp 2 without: one line, not two."""
    own = TABLE.plan(best_row())
    found = [set(changed(own, item.plan)) for item in losses(own, TABLE, ESTIMATES)]
    assert ("tp",) in set().union(*found)
    for i, names in enumerate(found):
        assert not any(names <= other or names >= other for other in found[i + 1 :])


def test_a_plan_that_does_not_fit_is_told_its_stage_its_excess_and_its_largest_parts() -> None:
    plan = Plan(dp=16)
    row = TABLE.find(plan)
    assert row is not None
    assert not ESTIMATES.fits[row]
    found = rejection(plan, TABLE, ESTIMATES)
    assert found is not None
    excess = (ESTIMATES.reserved_bytes[row] - ESTIMATES.capacity_bytes) / 2**30
    parts = ESTIMATES.row(row).bytes.to_data()
    largest = max(parts, key=lambda name: parts[name])
    assert f"stage {ESTIMATES.worst_stage[row]} needs" in found.refusal
    assert f"{excess:.2f} GiB too much" in found.refusal
    assert f"largest: {largest} {parts[largest] / 2**30:.2f} GiB" in found.refusal


def test_limits_are_the_shares_of_the_step() -> None:
    found = ESTIMATES.row(best_row())
    limits = {item.kind: item.share for item in estimated_limits(found)}
    assert limits[LimitKind.COMPUTE] == pytest.approx(found.seconds.compute / found.step_time_s)
    assert sum(share for _, share in largest_parts(found)) == pytest.approx(1.0)
    measured = measured_limits([reading(100.0), reading(100.0)], found)
    assert [(item.kind, round(item.share, 9)) for item in measured] == [
        (LimitKind.COMPUTE, 0.6), (LimitKind.COMMUNICATION, 0.3), (LimitKind.IDLE, 0.1),
    ]  # fmt: skip
    assert "T_comm / T_calc is 1.00" in measured[1].text
    assert measured_limits([reading(100.0, calc_s=None, exposed_s=None)], found) == []


def test_memory_limits_where_the_fastest_plan_does_not_fit() -> None:
    fast, lean = Plan(dp=16, micro_batch=4), Plan(dp=16, zero_stage=3, recompute=Recompute.FULL)
    table = PlanTable.of([fast, lean])
    estimates = SETTING.estimates(table)
    assert estimates.fits.tolist() == [False, True]
    found = memory_limit(table, estimates)
    assert found is not None
    assert found.share == pytest.approx(estimates.step_time_s[1] / estimates.step_time_s[0] - 1.0)
    assert memory_limit(table.take([1]), SETTING.estimates(table.take([1]))) is None


def test_what_ifs_agree_with_estimates_of_the_changed_cluster() -> None:
    """Twice the memory lets the fastest plan of all fit or not; nothing that is improved makes the best plan slower."""
    found = {item.change: item for item in what_ifs(SETTING, TABLE, ESTIMATES)}
    gains = [item.gain for item in found.values()]
    assert gains == sorted(gains, reverse=True)
    assert all(item.gain >= -1e-9 for name, item in found.items() if "model" not in name)
    flops = found["twice the matrix FLOP/s a device"].gain
    share = ESTIMATES.row(best_row()).seconds.compute / ESTIMATES.row(best_row()).step_time_s
    assert 0.3 < flops <= 1.0 / (1.0 - 0.5 * share) - 1.0 + 0.05
    memory = found["twice the memory a device"]
    device = SETTING.cluster.device.model_copy(update={"memory_bytes": 2 * SETTING.cluster.device.memory_bytes})
    larger = Setting(
        model=SETTING.model, cluster=SETTING.cluster.model_copy(update={"device": device}), workload=SETTING.workload
    )
    after = larger.estimates(TABLE)
    speeds = after.tokens_per_s_per_gpu[after.best_row], ESTIMATES.tokens_per_s_per_gpu[best_row()]
    assert memory.gain == pytest.approx(float(speeds[0] / speeds[1]) - 1.0)


def tuning_with(results: list[tuple[Plan, StepReading]]) -> tuple[Tuning, list[Trial]]:
    now = datetime.now(UTC)
    tuning = Tuning(
        id="t", model=SETTING.model, cluster=SETTING.cluster, workload=SETTING.workload, created_at=now, updated_at=now
    )
    trials = [
        Trial(id=str(i), tuning_id="t", number=i, plan=plan, state=TrialState.COMPLETE, reading=found, started_at=now)
        for i, (plan, found) in enumerate(results)
    ]
    return tuning, trials


def test_a_tuning_is_explained_by_what_was_measured_first() -> None:
    own, rival, single = (
        Plan(dp=16, micro_batch=2, zero_stage=2), Plan(tp=4, dp=4, micro_batch=4), Plan(dp=16, zero_stage=2)
    )  # fmt: skip
    tuning, trials = tuning_with([
        (own, reading(32_768.0)), (rival, reading(29_500.0, 0.6, 0.4, 1.1)), (single, reading(26_000.0, None, None)),
    ])  # fmt: skip
    best = best_of(trials, tuning.cluster)
    assert best is not None
    found = explain_best(best, tuning, None)
    measured = [item for item in found.losses if item.source is Source.MEASURED]
    assert [item.plan for item in measured] == [rival, single]
    assert measured[0].slower == pytest.approx(32_768.0 / 29_500.0 - 1.0)
    assert [item.part for item in measured[0].parts] == ["exposed communication"]
    assert measured[1].parts == []
    assert found.limits[0].source is Source.MEASURED
    assert {item.source for item in found.losses[2:]} == {Source.ESTIMATE}
    assert found.what_ifs


def test_without_any_speed_only_measurements_explain() -> None:
    tuning, trials = tuning_with([(Plan(dp=16, zero_stage=2), reading(1000.0))])
    unknown = tuning.cluster.device.model_copy(update={"peak_flops_per_s": {}})
    tuning = tuning.model_copy(update={"cluster": tuning.cluster.model_copy(update={"device": unknown})})
    best = best_of(trials, tuning.cluster)
    assert best is not None
    found = explain_best(best, tuning, None)
    assert [item.source for item in found.limits] == [Source.MEASURED] * 3
    assert (found.losses, found.what_ifs) == ([], ())


def test_a_step_is_its_mean_and_the_medians_of_its_traces() -> None:
    found = measured_step([reading(1.0, 0.5, 0.2), reading(1.0, 0.7, 0.2), reading(1.0, 0.6, 0.1)], 2.0)
    assert found.seconds == 2.0
    assert found.parts == pytest.approx({"computing": 0.6, "exposed communication": 0.2, "idle": 0.2})


def test_the_whole_explanation_is_plain_data() -> None:
    data = explain_setting(SETTING, TABLE, ESTIMATES, TABLE.plan(best_row())).to_data()
    assert set(data) == {"limits", "losses", "what_ifs"}
    assert {item["source"] for items in data.values() for item in items} == {"estimate"}
