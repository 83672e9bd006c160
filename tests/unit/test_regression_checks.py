"""Checks of a machine made of formulas: verdicts, whom they blame, and what follows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from autotune.regression.conclusion import Background, conclude
from autotune.regression.protocol import (
    MAX_FAILURES,
    controls,
    is_interrupted,
    measured,
    next_request,
    order_of,
    step_of,
)
from autotune.regression.selection import retune_budget
from autotune.regression.verdict import BASELINE_WINDOWS, REPEATS
from autotune.specs import (
    BestEntry,
    ClusterSpec,
    Device,
    DeviceKind,
    DType,
    FailureKind,
    Fingerprint,
    Link,
    ModelSpec,
    Norm,
    Plan,
    RunnerUp,
    StepRequest,
    Workload,
)
from autotune.specs.regression import (
    CauseKind,
    Check,
    CheckMeasurement,
    CheckResult,
    CheckRole,
    CheckState,
    VerdictKind,
    series_of,
)
from benchmarks.regression_machine import Machine, Noises

MODEL = ModelSpec(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, gated=False, vocab=512, tied=False,
    norm=Norm.RMSNORM, source="ours",
)  # fmt: skip
WORKLOAD = Workload(seq_len=32, global_batch=8, dtype=DType.FP32)
PAIR = ClusterSpec(
    name="pair", nodes=2, gpus_per_node=2, device=Device(name="card", kind=DeviceKind.CPU, memory_bytes=2**30),
    intra=Link(name="bus"), inter=Link(name="wire"),
)  # fmt: skip
ALONE = PAIR.model_copy(update={"name": "alone", "nodes": 1, "inter": None})
MOMENT = datetime(2026, 5, 4, tzinfo=UTC)
OLD = Fingerprint(
    hostname="a", device_name="card", device_count=2, device_memory_bytes=2**30, torch="2.11.0",
    libraries={"numpy": "2.3.0"},
)  # fmt: skip
NEW = OLD.model_copy(update={"torch": "2.12.0"})


def entry_of(cluster: ClusterSpec = PAIR, plan: Plan | None = None, **changes: object) -> BestEntry:
    made = BestEntry(
        id=1, model=MODEL, parameters=1e6, cluster=cluster, workload=WORKLOAD,
        plan=plan or Plan(tp=2, dp=cluster.devices // 2), tokens_per_s_per_gpu=800.0, interval=(790.0, 810.0),
        repeats=3, peak_bytes=None, measured_at=MOMENT,
    )  # fmt: skip
    return made.model_copy(update=changes)


class Nights:
    """One plan's checks, night after night, on one machine."""

    def __init__(self, entry: BestEntry | None = None, noises: Noises | None = None, seed: int = 1) -> None:
        self.entry = entry or entry_of()
        self.machine = Machine(cluster=self.entry.cluster, noises=noises or Noises(), seed=seed)
        self.checks: list[Check] = []
        self.fingerprint = OLD
        self._numbers = count()

    def night(self, fingerprint: Fingerprint | None = None, **trouble: object) -> CheckResult:
        self.fingerprint = fingerprint or self.fingerprint
        self.machine.visit(**trouble)
        number = next(self._numbers)
        check = Check(
            id=f"c{number}", entry_id=1, series=series_of(self.entry), cluster_key=self.entry.cluster.key,
            fingerprint_key=self.fingerprint.key, environment_key=self.fingerprint.environment_key,
            started_at=MOMENT + timedelta(days=number),
        )  # fmt: skip
        background = Background(
            entry=self.entry, same_plan=self.checks, same_cluster=self.checks, now=self.fingerprint,
            before={each.key: each for each in (OLD, NEW)},
        )  # fmt: skip
        done: list[CheckMeasurement] = []
        conclusion = conclude(check, done, background)
        while (wanted := next_request(self.entry, done, again=conclusion.again)) is not None:
            done.append(measured(wanted, self.machine.answer(wanted.request), check.started_at))
            conclusion = conclude(check, done, background)
        self.done = done
        self.checks.append(check.model_copy(update={"state": CheckState.DONE, "result": conclusion.result}))
        return conclusion.result


@pytest.fixture
def nights() -> Nights:
    """A plan with a baseline."""
    found = Nights()
    assert found.night().verdict is VerdictKind.BASELINE
    return found


def cause(result: CheckResult) -> CauseKind:
    assert result.verdict is VerdictKind.WORSE, result.message
    assert result.cause is not None
    return result.cause.kind


def test_the_first_check_is_a_baseline_of_several_windows(nights: Nights) -> None:
    result = nights.checks[0].result
    assert result is not None
    assert len(result.windows) == BASELINE_WINDOWS
    assert all(len(window.speeds[CheckRole.WINNER]) == REPEATS for window in result.windows)
    assert set(result.windows[0].speeds) == set(CheckRole)


def test_where_nothing_changed_one_window_tells(nights: Nights) -> None:
    result = nights.night()
    assert result.verdict is VerdictKind.UNCHANGED
    assert len(result.windows) == 1
    assert result.interval[0] < result.effect < result.interval[1]
    assert result.cause is None


def test_a_link_across_nodes_at_half_its_speed_is_named_and_the_plan_is_not(nights: Nights) -> None:
    result = nights.night(across=2.0)
    assert cause(result) is CauseKind.LINK_ACROSS
    assert result.cause is not None
    assert "wire" in result.cause.subject
    assert result.retune_reason


def test_a_link_inside_nodes_is_named(nights: Nights) -> None:
    result = nights.night(inside=2.5)
    assert cause(result) is CauseKind.LINK_INSIDE
    assert result.cause is not None
    assert "bus" in result.cause.subject


def test_slow_kernels_are_named(nights: Nights) -> None:
    assert cause(nights.night(kernels=1.2)) is CauseKind.KERNELS


def test_one_slow_rank_is_named_with_its_node_and_no_other_plan_would_mend_it(nights: Nights) -> None:
    result = nights.night(ranks={3: 1.4})
    assert cause(result) is CauseKind.RANK
    assert result.cause is not None
    assert result.cause.subject == "rank 3 on node node-1"
    assert result.retune_reason == ""


def test_a_node_whose_ranks_are_all_slow_is_named(nights: Nights) -> None:
    result = nights.night(ranks={2: 1.4, 3: 1.4})
    assert cause(result) is CauseKind.NODE
    assert result.cause is not None
    assert result.cause.subject == "node node-1"


def test_a_slower_step_with_sound_controls_is_the_plans(nights: Nights) -> None:
    result = nights.night(plan=1.15)
    assert cause(result) is CauseKind.PLAN
    assert result.effect == pytest.approx(1 / (1 + 0.15 * 0.06 / 0.09) - 1, abs=0.03)


def test_a_slower_step_in_another_environment_is_the_softwares_and_says_which() -> None:
    nights = Nights()
    nights.night()
    result = nights.night(NEW, plan=1.15)
    assert cause(result) is CauseKind.SOFTWARE
    assert result.cause is not None
    assert result.cause.subject == "torch"
    assert result.cause.changed == ("torch: 2.11.0 then, 2.12.0 now",)
    assert cause(nights.night(NEW, plan=1.15)) is CauseKind.SOFTWARE  # a bad night is no baseline


def test_what_is_as_fast_in_another_environment_becomes_its_baseline() -> None:
    nights = Nights()
    nights.night()
    assert nights.night(NEW).verdict is VerdictKind.UNCHANGED
    assert cause(nights.night(NEW, plan=1.15)) is CauseKind.PLAN


def test_memory_that_is_full_now_is_the_cause(nights: Nights) -> None:
    result = nights.night(plan=1.15, peak_bytes=2**30)
    assert cause(result) is CauseKind.MEMORY
    assert (result.baseline_peak_bytes, result.peak_bytes) == (2**28, 2**30)


def test_a_plan_that_runs_out_of_memory_does_not_hold(nights: Nights) -> None:
    result = nights.night(failure=FailureKind.OOM)
    assert cause(result) is CauseKind.MEMORY
    assert result.effect == -1.0
    assert len(nights.done) < len(order_of(nights.entry))


def test_probes_that_fail_otherwise_tell_nothing(nights: Nights) -> None:
    result = nights.night(failure=FailureKind.HANG)
    assert result.verdict is VerdictKind.CANNOT_TELL
    assert sum(item.speed is None for item in nights.done) == MAX_FAILURES


def test_two_links_at_once_are_not_told_apart(nights: Nights) -> None:
    result = nights.night(across=2.0, inside=3.0)
    assert cause(result) is CauseKind.CANNOT_TELL


def test_a_link_that_the_plan_does_not_use_is_not_blamed() -> None:
    nights = Nights(entry_of(ALONE, Plan(dp=2)))
    nights.machine.hidden = 1.0
    nights.machine.inside_s = nights.machine.across_s = 0.001  # next to no communication
    nights.night()
    assert cause(nights.night(inside=1.5, plan=1.2)) is CauseKind.PLAN


def test_a_better_night_begins_a_new_baseline(nights: Nights) -> None:
    assert nights.night(kernels=0.85).verdict is VerdictKind.BETTER
    assert nights.night(kernels=0.85).verdict is VerdictKind.UNCHANGED
    assert nights.night().verdict is VerdictKind.WORSE


def test_a_loss_of_half_a_per_cent_a_night_is_seen_in_the_end() -> None:
    nights = Nights(noises=Noises(within=0.004, between=0.002, visits=0.001))
    verdicts = [nights.night(kernels=1.005**number).verdict for number in range(20)]
    assert VerdictKind.WORSE in verdicts


def test_too_much_noise_is_said_to_be_that() -> None:
    nights = Nights(noises=Noises(within=0.2, between=0.15, visits=0.1), seed=3)
    for _ in range(6):
        nights.night()
    kinds = {nights.night(plan=1.05).verdict for _ in range(10)}
    assert VerdictKind.CANNOT_TELL in kinds


@pytest.mark.parametrize(
    "trouble",
    [
        {"across": 2.0},
        {"inside": 2.5},
        {"kernels": 1.15},
        {"ranks": {1: 1.3}},
        {"plan": 1.15},
    ],
)
def test_no_part_is_ever_blamed_for_another(trouble: dict[str, object]) -> None:
    right = {
        "across": CauseKind.LINK_ACROSS, "inside": CauseKind.LINK_INSIDE, "kernels": CauseKind.KERNELS,
        "ranks": CauseKind.RANK, "plan": CauseKind.PLAN,
    }[next(iter(trouble))]  # fmt: skip
    found = []
    for seed in range(15):
        nights = Nights(noises=Noises(heavy=True), seed=seed)
        nights.night()
        nights.night()
        found.append(cause(nights.night(**trouble)))
    assert set(found) <= {right, CauseKind.CANNOT_TELL}
    assert found.count(right) >= 12


def test_the_controls_are_those_that_the_cluster_and_plan_have() -> None:
    assert set(controls(entry_of())) == {CheckRole.LINK_INSIDE, CheckRole.LINK_ACROSS, CheckRole.KERNELS}
    assert set(controls(entry_of(ALONE, Plan(dp=2)))) == {CheckRole.LINK_INSIDE, CheckRole.KERNELS}
    layer = controls(entry_of())[CheckRole.KERNELS]
    assert layer.kind == "layer"
    assert (layer.tp, layer.micro_batch) == (2, 1)


def test_steps_and_controls_are_interleaved_and_a_failure_is_measured_again() -> None:
    entry = entry_of()
    order = [role for role, _ in order_of(entry)]
    assert order.count(CheckRole.WINNER) == REPEATS
    assert order[0] is not CheckRole.WINNER
    assert order[-1] is not CheckRole.WINNER
    first = next_request(entry, [], again=True)
    assert first is not None
    lost = CheckMeasurement(number=0, window=0, role=first.role, at=MOMENT, gpu_s=1.0, failure=FailureKind.HANG)
    retried = next_request(entry, [lost], again=True)
    assert retried is not None
    assert (retried.number, retried.role, retried.request) == (1, first.role, first.request)


@pytest.mark.parametrize(("tokens_per_s_per_gpu", "steps"), [(1e6, 40), (640.0, 20), (64.0, 3), (6.4, 3)])
def test_short_steps_are_timed_for_two_seconds(tokens_per_s_per_gpu: float, steps: int) -> None:
    request = step_of(entry_of(tokens_per_s_per_gpu=tokens_per_s_per_gpu))  # 256 tokens a step on 4 devices
    assert (request.min_steps, request.max_steps) == (steps, steps + 3)


@pytest.mark.parametrize(
    ("role", "tp", "speed", "iterations"),
    [
        (CheckRole.KERNELS, 1, 1e6, 200),
        (CheckRole.KERNELS, 1, 100.0, 30),
        (CheckRole.KERNELS, 1, 10.0, 15),
        (CheckRole.KERNELS, 2, 1e6, 15),  # its collectives may take long, which its speed does not tell
        (CheckRole.LINK_ACROSS, 1, 1e12, 200),
        (CheckRole.LINK_ACROSS, 1, 1e3, 15),
    ],
)
def test_a_control_lasts_as_long_as_its_last_time_lets_expect(
    role: CheckRole, tp: int, speed: float, iterations: int
) -> None:
    entry = entry_of(plan=Plan(tp=tp, dp=4 // tp))
    done: list[CheckMeasurement] = []
    seen: list[int] = []
    while len(seen) < 2:
        wanted = next_request(entry, done, again=True)
        assert wanted is not None
        if wanted.role is role:
            assert not isinstance(wanted.request, StepRequest)
            seen.append(wanted.request.iterations)
        done.append(CheckMeasurement(number=len(done), window=0, role=wanted.role, at=MOMENT, gpu_s=1.0, speed=speed))
    assert seen == [15, iterations]


def test_a_check_that_paused_is_one_of_two_times() -> None:
    at = MOMENT + timedelta(minutes=5)
    item = CheckMeasurement(number=0, window=0, role=CheckRole.WINNER, at=at, gpu_s=1.0, speed=1.0)
    assert not is_interrupted([item], MOMENT, at + timedelta(minutes=20))
    assert is_interrupted([item], MOMENT, at + timedelta(minutes=40))
    assert is_interrupted([], MOMENT, MOMENT + timedelta(hours=1))


def test_a_budget_ends_a_check_at_a_window() -> None:
    nights = Nights(noises=Noises(within=0.2, between=0.15, visits=0.1), seed=5)
    nights.night()
    check = nights.checks[0].model_copy(update={"id": "now", "budget_gpu_s": 60.0, "result": None})
    background = Background(
        entry=nights.entry, same_plan=nights.checks, same_cluster=nights.checks, now=OLD, before={OLD.key: OLD}
    )
    nights.machine.visit()
    done: list[CheckMeasurement] = []
    while (wanted := next_request(nights.entry, done, again=conclude(check, done, background).again)) is not None:
        done.append(measured(wanted, nights.machine.answer(wanted.request), MOMENT))
    assert sum(item.gpu_s for item in done) <= 60.0
    assert len(done) == len(order_of(nights.entry))


RUNNER_UP = RunnerUp(plan=Plan(dp=4), tokens_per_s_per_gpu=780.0, interval=(770.0, 790.0), repeats=2, too_close=False)


def ended(result: CheckResult, gpu_s: float = 10.0) -> Check:
    return Check(
        id="c", entry_id=1, series="s", cluster_key="k", state=CheckState.DONE, gpu_s=gpu_s, started_at=MOMENT,
        result=result,
    )  # fmt: skip


def test_a_challenger_is_looked_for_where_one_may_win_and_the_budget_allows() -> None:
    nights = Nights(entry_of(runner_up=RUNNER_UP))
    nights.night()
    worse = nights.night(across=2.0)
    assert "runner-up tp1.pp1.dp4.mb1.zero0" in worse.retune_reason
    budget = retune_budget(ended(worse), nights.entry, 1000.0)
    assert budget is not None
    assert budget.gpu_s == 1000.0
    assert retune_budget(ended(worse), nights.entry, 5.0) is None
    assert retune_budget(ended(worse).model_copy(update={"tuning_id": "t"}), nights.entry, 1000.0) is None
    unlimited = retune_budget(ended(worse), nights.entry, None)
    assert unlimited is not None
    assert unlimited.max_trials is not None
    assert nights.night().retune_reason == ""


def test_another_environment_lets_a_close_runner_up_try_again() -> None:
    nights = Nights(entry_of(runner_up=RUNNER_UP))
    nights.night()
    assert "environment changed" in nights.night(NEW).retune_reason
