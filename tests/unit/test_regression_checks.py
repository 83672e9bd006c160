"""Checks of a machine made of formulas: verdicts, whom they blame, and what follows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

import numpy as np
import pytest

from autotune.regression.attribution import CauseEvidence, attribute, memory_cause, slow_ranks
from autotune.regression.conclusion import Background, conclude
from autotune.regression.lifecycle import deadline_s, incident_key, renewed
from autotune.regression.protocol import (
    MAX_FAILURES,
    controls,
    given_up,
    is_interrupted,
    measured,
    next_request,
    order_of,
    step_of,
    windows_of,
)
from autotune.regression.selection import retune_budget
from autotune.regression.windows import Noise, Window
from autotune.specs import (
    BestEntry,
    Budget,
    ClusterSpec,
    CollectiveRequest,
    Device,
    DeviceKind,
    DType,
    FailureKind,
    Fingerprint,
    Link,
    ModelSpec,
    Norm,
    Plan,
    ProbeOutcome,
    RunnerUp,
    StepRequest,
    Workload,
)
from autotune.specs.regression import (
    Attribution,
    CauseKind,
    Check,
    CheckMeasurement,
    CheckResult,
    CheckRole,
    CheckState,
    CheckWindow,
    ControlChange,
    RankTrace,
    StepTrace,
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
    assert len(result.windows) == 4
    assert all(len(window.speeds[CheckRole.WINNER]) == 5 for window in result.windows)
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
    assert order.count(CheckRole.WINNER) == 5
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


LOGS = Noise(within=1e-7, between=1e-7, visits=1e-7, freedom=17.0)


def trace(step_s: float = 0.1, calc_s: float = 0.06, comm_s: float = 0.04, exposed_s: float = 0.03) -> StepTrace:
    return StepTrace(step_s=step_s, calc_s=calc_s, comm_s=comm_s, exposed_s=exposed_s)


def blamed(
    slower: dict[CheckRole, float],
    entry: BestEntry | None = None,
    loss: float = 0.2,
    now: StepTrace | None = None,
    noise: Noise = LOGS,
    unmeasured: tuple[CheckRole, ...] = (),
) -> Attribution:
    """The cause of a loss where controls are slower by so much (ln); a step of 100 ms, 60 of them computing, 40 of
    communication, of which 30 are exposed."""
    entry = entry or entry_of()

    def windows(visit: str, by: float, count: int) -> list[Window]:
        return [Window(visit=visit, logs=(-by,) * 5) for _ in range(count)]

    roles = {role: (windows("then", 0.0, 4), windows("now", slower.get(role, 0.0), 1)) for role in controls(entry)}
    for role in unmeasured:
        del roles[role]
    before = [CheckWindow(at=MOMENT, speeds={}, trace=trace())]
    after = [CheckWindow(at=MOMENT, speeds={}, trace=now or trace(step_s=0.12))]
    return attribute(
        CauseEvidence(
            entry=entry, loss=loss, baseline=before, now=after, roles=roles, noises=dict.fromkeys(roles, noise)
        )
    )


def effect_of(found: Attribution, role: CheckRole) -> ControlChange:
    return next(item for item in found.controls if item.role is role)


def test_what_a_slower_control_costs_a_step_is_its_share_of_it() -> None:
    """ln of a step whose 60 % compute 1.2 times as long; of the links, at half their speed, at most all 40 % take twice
    as long. Which of two links is exposed the trace does not tell, so that it may be nothing as well; where there is
    one it is 30 % at least."""
    both = blamed({CheckRole.KERNELS: np.log(1.2), CheckRole.LINK_ACROSS: np.log(2.0)})
    assert effect_of(both, CheckRole.KERNELS).step_effect == pytest.approx((np.log(1.12),) * 3, rel=1e-4)
    assert effect_of(both, CheckRole.KERNELS).effect == pytest.approx(1 / 1.2 - 1)
    assert effect_of(both, CheckRole.LINK_ACROSS).step_effect == pytest.approx(
        (0.0, np.log(1.4), np.log(1.4)), rel=1e-4
    )
    assert effect_of(both, CheckRole.LINK_INSIDE).step_effect == pytest.approx((0.0, 0.0, 0.0), abs=1e-5)
    one = blamed({CheckRole.LINK_INSIDE: np.log(2.0)}, entry_of(ALONE, Plan(dp=2)))
    expected = (np.log(1.3), np.log(1.4), np.log(1.4))
    assert effect_of(one, CheckRole.LINK_INSIDE).step_effect == pytest.approx(expected, rel=1e-4)


def test_a_link_between_ranks_that_do_not_talk_costs_nothing() -> None:
    found = blamed({CheckRole.LINK_ACROSS: np.log(2.0)}, entry_of(plan=Plan(dp=2)))
    assert effect_of(found, CheckRole.LINK_ACROSS).slower
    assert effect_of(found, CheckRole.LINK_ACROSS).step_effect == (0.0, 0.0, 0.0)


def test_a_control_is_slower_by_two_per_cent_at_least_and_beyond_its_noise() -> None:
    """Student's t with 17 degrees of freedom at 0.5 % is 2.89823; the noise of four windows and one sqrt(131e-6)."""
    noise = Noise(within=0.01, between=0.006, visits=0.005, freedom=17.0)
    half = 2.89823 * 131e-6**0.5
    for by, slower in ((half - 1e-4, False), (half + 1e-4, True)):
        kernels = effect_of(blamed({CheckRole.KERNELS: by}, noise=noise), CheckRole.KERNELS)
        assert kernels.slower is slower
        assert kernels.interval == pytest.approx((np.expm1(-by - half), np.expm1(-by + half)), rel=1e-3, abs=1e-6)
    for by, slower in ((np.log(1.0199), False), (np.log(1.0201), True)):
        assert effect_of(blamed({CheckRole.KERNELS: by}), CheckRole.KERNELS).slower is slower


def test_a_control_explains_a_loss_if_it_can_explain_a_half_of_it() -> None:
    """Kernels 1.2 times as slow make the step ln 1.12 = 0.1133 longer."""
    slower = {CheckRole.KERNELS: np.log(1.2)}
    assert blamed(slower, loss=0.226).kind is CauseKind.KERNELS
    rest = blamed(slower, loss=0.227)
    assert rest.kind is CauseKind.PLAN  # which the kernels cannot explain, nor anything else
    assert blamed(slower, loss=0.227, unmeasured=(CheckRole.LINK_ACROSS,)).kind is CauseKind.CANNOT_TELL


def test_of_two_slower_controls_the_one_is_to_blame_where_the_time_went() -> None:
    """The step is 20 ms longer, of which computing has 16 or 4: 80 % of it, or 20 %. In between nobody can tell."""
    slower = {CheckRole.KERNELS: np.log(1.4), CheckRole.LINK_ACROSS: np.log(2.0)}

    def kind(calc_s: float) -> CauseKind:
        return blamed(slower, loss=0.18, now=trace(step_s=0.12, calc_s=calc_s)).kind

    assert kind(0.0761) is CauseKind.KERNELS
    assert kind(0.0639) is CauseKind.LINK_ACROSS
    assert kind(0.070) is CauseKind.CANNOT_TELL
    assert blamed(slower, loss=0.18, now=trace(step_s=0.1)).kind is CauseKind.CANNOT_TELL


def test_a_much_weaker_suspect_is_no_rival() -> None:
    """Where the time went is not clear; the links cost ln 1.8 = 0.588 at most, the kernels' ln 1.35 = 0.300 is more
    than a half of that, and ln 1.33 = 0.285 is less."""
    now = trace(step_s=0.12, calc_s=0.07)
    across = {CheckRole.LINK_ACROSS: np.log(3.0)}
    one, other = (blamed(across | {CheckRole.KERNELS: np.log1p(by / 0.6)}, loss=0.3, now=now) for by in (0.35, 0.33))
    assert one.kind is CauseKind.CANNOT_TELL
    names = "computing on card in pair and link wire across nodes of pair"
    assert one.text == f"{names} are slower, and either may explain the loss"
    assert other.kind is CauseKind.LINK_ACROSS
    assert other.text == "link wire across nodes of pair is at 33% of its speed at the baseline"


def test_a_loss_is_the_plans_where_all_noise_together_cannot_explain_half_of_it() -> None:
    """Of kernels and both links nothing changed; at the far end of their noise, half = 0.033171, the step is longer by
    ln(1 + 0.6 * (exp(half) - 1)) = 0.020037 and twice ln(1 + 0.4 * ...) = 0.013401: together 0.027587."""
    noise = Noise(within=0.01, between=0.006, visits=0.005, freedom=17.0)
    assert blamed({}, loss=0.0553, noise=noise).kind is CauseKind.PLAN
    rest = blamed({}, loss=0.0550, noise=noise)
    assert rest.kind is CauseKind.CANNOT_TELL
    assert rest.text == "the controls' noise leaves room for 2.8% of a loss of 5.7%"


def of_ranks(*calc_ms: float, step_ms: float = 100.0) -> CheckWindow:
    """A window whose traced step has ranks that compute so long; two a node."""
    ranks = tuple(
        RankTrace(rank=i, hostname=f"node-{i // 2}", calc_s=ms / 1e3, peak_bytes=0) for i, ms in enumerate(calc_ms)
    )
    whole = StepTrace(step_s=step_ms / 1e3, calc_s=0.06, comm_s=0.04, exposed_s=0.03, ranks=ranks)
    return CheckWindow(at=MOMENT, speeds={}, trace=whole)


def slow(
    now: tuple[float, ...],
    *,
    windows: int = 1,
    enough: float = 0.0,
    before: tuple[CheckWindow, ...] = (of_ranks(*[60] * 4),),
) -> str:
    """What is slow where ranks computed 60 of 100 ms at the baseline and now exp(so much) times as long."""
    after = [of_ranks(*(60.0 * np.exp(growth) for growth in now))] * windows
    found = slow_ranks(entry_of(), before, after, enough=enough)
    return found.subject if found is not None else ""


RANK_3, NODE_1 = "rank 3 on node node-1", "node node-1"


def test_a_rank_is_slow_beyond_four_standard_deviations_of_what_is_usual() -> None:
    """0.02 of one window; of more windows by their number's root less, but 0.05 at least."""
    assert (slow((0.0, 0.0, 0.0, 0.0799)), slow((0.0, 0.0, 0.0, 0.0801))) == ("", RANK_3)
    assert (slow((0.0, 0.0, 0.0, 0.0565), windows=2), slow((0.0, 0.0, 0.0, 0.0566), windows=2)) == ("", RANK_3)
    assert (slow((0.0, 0.0, 0.0, 0.0499), windows=9), slow((0.0, 0.0, 0.0, 0.0501), windows=9)) == ("", RANK_3)
    # What the others share is none of it: beyond their median 0.0801, but less than twice as much as the second.
    assert slow((0.02, 0.02, 0.02, 0.0999), windows=1) == ""
    assert slow((0.02, 0.02, 0.02, 0.1001), windows=1) == RANK_3


def test_baseline_windows_tell_what_is_usual() -> None:
    """One rank's step of 0.1 between two windows: the mean of four times 0.02², of 0.1² / 2 and three zeros is the
    square of 0.02872. Four times that is 0.1149."""
    before = (of_ranks(60, 60, 60, 60), of_ranks(60, 60, 60, 60 * np.exp(0.1)))
    assert slow((0.0, 0.0, 0.114, 0.0), before=before) == ""
    assert slow((0.0, 0.0, 0.116, 0.0), before=before) == "rank 2 on node node-1"


def test_two_slow_ranks_of_different_nodes_are_not_named() -> None:
    assert slow((0.0, 0.099, 0.0, 0.2)) == RANK_3
    assert slow((0.0, 0.101, 0.0, 0.2)) == ""


def test_a_node_is_slow_if_all_its_ranks_are_and_no_other_half_as_much() -> None:
    assert slow((0.0, 0.0, 0.1, 0.2)) == NODE_1
    assert slow((0.0, 0.049, 0.1, 0.1)) == NODE_1
    assert slow((0.0, 0.051, 0.1, 0.1)) == ""
    assert slow((0.1, 0.1, 0.1, 0.1)) == ""
    assert slow((0.0, 0.0, 0.0799, 0.2)) == RANK_3  # the other one is not slow enough


def test_a_slow_rank_must_have_cost_enough() -> None:
    """60 of 100 ms that take 1.2 times as long: ln 1.12."""
    growth = float(np.log(1.2))
    assert slow((0.0, 0.0, 0.0, growth), enough=0.1133) == RANK_3
    assert slow((0.0, 0.0, 0.0, growth), enough=0.1134) == ""
    assert slow((0.0, 0.0, growth, growth), enough=0.1133) == NODE_1
    assert slow((0.0, 0.0, growth, growth), enough=0.1134) == ""


def test_what_a_slow_rank_or_node_did_is_told() -> None:
    after = [of_ranks(60, 63, 60, 90)]
    found = slow_ranks(entry_of(), [of_ranks(60, 60, 60, 60)], after, enough=0.0)
    assert found is not None
    assert found.text == "rank 3 on node node-1 computes 1.50 x as long as before, the others 1.00 x"
    node = slow_ranks(entry_of(), [of_ranks(60, 60, 60, 60)], [of_ranks(60, 60, 75, 90)], enough=0.0)
    assert node is not None
    assert node.text == "all ranks of node node-1 compute 1.25 x as long as before"
    assert slow_ranks(entry_of(), [], after, enough=0.0) is None
    assert slow_ranks(entry_of(), [of_ranks(60)], [of_ranks(90)], enough=0.0) is None  # nobody to compare with


def test_memory_is_to_blame_from_97_per_cent_on_where_it_was_not_so_full() -> None:
    def full(before: int | None, now: int | None) -> bool:
        windows = [[CheckWindow(at=MOMENT, speeds={}, peak_bytes=peak)] for peak in (before, now)]
        return memory_cause(entry_of(), *windows) is not None

    limit = 1_041_529_570  # 0.97 * 2**30, rounded up
    assert full(limit - 1, limit)
    assert not full(limit - 1, limit - 1)
    assert not full(limit, limit + 1)
    assert not full(None, limit)
    assert not full(limit - 1, None)


def test_a_challenger_needs_time_for_four_trials() -> None:
    """Steps of 256 / (800 * 4) = 0.08 s: 4 * (10 + 4 * (3 + 14 * 0.08)) = 105.92 GPU-seconds."""
    worse = ended(CheckResult(verdict=VerdictKind.WORSE, retune_reason="it lost"))
    assert retune_budget(worse, entry_of(), 106.0) == Budget(gpu_s=106.0)
    assert retune_budget(worse, entry_of(), 105.9) is None
    assert retune_budget(worse, entry_of(), None) == Budget(max_trials=12)
    assert retune_budget(ended(CheckResult(verdict=VerdictKind.WORSE)), entry_of(), None) is None


@pytest.mark.parametrize(("tokens", "deadline"), [(800.0, 120.0), (8.0, 2400.0), (0.8, 3600.0)])
def test_a_step_probe_may_take_three_hundred_steps_and_an_hour_at_most(tokens: float, deadline: float) -> None:
    entry = entry_of(tokens_per_s_per_gpu=tokens)
    assert deadline_s(entry, step_of(entry)) == pytest.approx(deadline)
    assert deadline_s(entry, controls(entry)[CheckRole.KERNELS]) == 120.0


def test_an_entry_shows_what_was_measured_last_and_how_well_it_is_known() -> None:
    """One window of five repeats under the prior: 0.006² of the visit, 0.006² and (1.2 * 0.01)² / 5 of the window,
    together 100.8e-6; and Student's t of 12.7 degrees of freedom at 2.5 % is 2.165173."""
    window = CheckWindow(at=MOMENT, speeds={CheckRole.WINNER: (880.0, 890.0, 900.0, 905.0, 2000.0)})
    result = CheckResult(verdict=VerdictKind.UNCHANGED, windows=(window,), peak_bytes=7)
    background = Background(entry=entry_of(), same_plan=(), same_cluster=(), now=OLD, before={})
    check = ended(result).model_copy(update={"fingerprint_key": "f", "environment_key": "e"})
    found = renewed(background, check, result, MOMENT + timedelta(days=1))
    half = 2.165173 * 100.8e-6**0.5
    assert found.tokens_per_s_per_gpu == pytest.approx(900.0)
    assert found.interval == pytest.approx((900.0 * np.exp(-half), 900.0 * np.exp(half)), rel=1e-6)
    assert (found.repeats, found.peak_bytes, found.id, found.superseded_at) == (5, 7, 0, None)
    assert (found.fingerprint_key, found.environment_key) == ("f", "e")
    kept = renewed(background, check, result.model_copy(update={"peak_bytes": None}), MOMENT)
    assert kept.peak_bytes == entry_of().peak_bytes


def test_a_cause_that_all_plans_share_is_one_incident() -> None:
    background = Background(entry=entry_of(), same_plan=(), same_cluster=(), now=OLD, before={})

    def key(kind: CauseKind | None) -> str:
        cause = None if kind is None else Attribution(kind=kind, subject="it", text="")
        return incident_key(ended(CheckResult(verdict=VerdictKind.WORSE)), background, CheckResult(
            verdict=VerdictKind.WORSE, cause=cause))  # fmt: skip

    shared = {kind for kind in CauseKind if key(kind) == f"{PAIR.key}/{kind}/it"}
    assert set(CauseKind) - shared == {CauseKind.PLAN, CauseKind.MEMORY, CauseKind.CANNOT_TELL}
    assert (key(CauseKind.PLAN), key(None)) == ("s/plan", "s/unknown")


@pytest.mark.parametrize(
    ("plan", "vocab", "size_bytes"),
    [
        (Plan(tp=2, dp=2), 512, 525_440),  # 262,720 parameters / 2, of 4 bytes
        (Plan(tp=2, pp=2), 512, 262_720),
        (Plan(tp=8), 512, 262_144),  # a quarter of a MiB at least
        (Plan(tp=2, dp=2), 100_000, 8 * 2**20),  # and 8 at most on CPUs
        (Plan(dp=4), 515, 1_052_416),  # 263,104 parameters
        (Plan(tp=4), 515, 263_104),
    ],
)
def test_the_links_carry_what_the_plan_sends_at_most(plan: Plan, vocab: int, size_bytes: int) -> None:
    entry = entry_of(plan=plan, model=MODEL.model_copy(update={"vocab": vocab}))
    inside, across = (controls(entry)[role] for role in (CheckRole.LINK_INSIDE, CheckRole.LINK_ACROSS))
    assert isinstance(inside, CollectiveRequest)
    assert isinstance(across, CollectiveRequest)
    assert (inside.group_size, inside.stride, inside.sizes_bytes) == (2, 1, (size_bytes,))
    assert (across.group_size, across.stride, across.sizes_bytes) == (2, 2, (size_bytes,))


def test_a_probe_without_a_reading_is_a_failure() -> None:
    wanted = next_request(entry_of(), [], again=True)
    assert wanted is not None
    found = measured(wanted, ProbeOutcome(wall_s=1.0, gpu_s=4.0, setup_s=0.0), MOMENT)
    assert (found.speed, found.failure, found.message) == (None, FailureKind.CRASH, "the probe gave no reading")


def item(number: int, role: CheckRole = CheckRole.WINNER, **changes: object) -> CheckMeasurement:
    made = CheckMeasurement(number=number, window=0, role=role, at=MOMENT, gpu_s=1.0, speed=float(number + 1))
    return made.model_copy(update=changes)


def test_a_window_that_has_begun_counts_from_five_steps_on() -> None:
    steps = [item(number, peak_bytes=number) for number in range(5)]
    assert windows_of(steps[:4]) == []
    (found,) = windows_of([item(9, CheckRole.KERNELS), *steps, item(10, failure=FailureKind.HANG, speed=None)])
    assert found.speeds == {CheckRole.WINNER: (1.0, 2.0, 3.0, 4.0, 5.0), CheckRole.KERNELS: (10.0,)}
    assert (found.peak_bytes, found.trace) == (4, None)


def test_two_ooms_of_the_plan_or_three_failures_of_anything_end_a_check() -> None:
    oom = item(0, speed=None, failure=FailureKind.OOM)
    hang = item(1, CheckRole.KERNELS, speed=None, failure=FailureKind.HANG)
    assert given_up([oom, item(2)]) is None
    assert given_up([oom, item(2), oom]) == oom
    assert given_up([oom, hang]) is None
    assert given_up([oom, hang, hang]) == hang
    control = item(3, CheckRole.KERNELS, speed=None, failure=FailureKind.OOM)
    assert given_up([control, control]) is None


def test_a_pause_of_half_an_hour_is_allowed() -> None:
    assert not is_interrupted([item(0)], MOMENT - timedelta(days=1), MOMENT + timedelta(minutes=30))
    assert is_interrupted([item(0)], MOMENT - timedelta(days=1), MOMENT + timedelta(minutes=30, microseconds=1))
