"""What a step probe's reading says: honest times for one rank, memory, early ends, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from local_ranks import AMPLE_S
from training_plans import step_request

from autotune.cost.work import model_flops_per_token as cost_flops_per_token
from autotune.specs import FailureKind, ModelSpec, Plan, ProbeOutcome, ProbeProgress, Recompute, StepReading
from probes.launch import LocalProber
from probes.reports import merge_step, model_flops_per_token

SMALL = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 2048}
SMALL_STEPS: dict[str, Any] = {"model": SMALL, "seq_len": 128, "global_batch": 4, "trace": True}


def outcome(prober: LocalProber, plan: Plan, **changes: Any) -> ProbeOutcome:
    return prober.run(step_request(plan, **changes), deadline_s=AMPLE_S)


def reading(prober: LocalProber, plan: Plan, **changes: Any) -> StepReading:
    found = outcome(prober, plan, **changes)
    assert found.failure is None, found.failure
    (read,) = found.readings
    assert isinstance(read, StepReading)
    return read


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_rank_computes_all_the_time_and_communicates_none(one: LocalProber, dtype: str) -> None:
    read = reading(one, Plan(micro_batch=2), dtype=dtype, **SMALL_STEPS)
    assert read.t_comm_s == read.t_comm_exposed_s == read.mu == 0.0
    assert read.ranks[0].comm_s_by_op == {}
    assert read.t_calc_s is not None
    assert read.traced_step_s is not None
    # In bf16 the host's work to keep masters and computing copies apart weighs more beside so small a model.
    share = 0.85 if dtype == "fp32" else 0.6
    assert share * read.traced_step_s < read.t_calc_s <= read.traced_step_s


def test_two_ranks_communicate_what_their_plan_says(pair: LocalProber) -> None:
    operations = {
        Plan(tp=2): {"all_reduce"},
        Plan(pp=2): {"send_recv"},
        Plan(dp=2): {"all_reduce"},
        # gloo's reduce-scatter is an all-reduce inside
        Plan(dp=2, zero_stage=3): {"all_gather", "all_reduce"},
    }
    for plan, expected in operations.items():
        read = reading(pair, plan, trace=True)
        assert {name for rank in read.ranks for name in rank.comm_s_by_op} == expected
        assert read.t_comm_s is not None
        assert read.t_comm_exposed_s is not None
        assert 0 < read.t_comm_exposed_s <= read.t_comm_s
        assert [rank.stage for rank in read.ranks] == ([0, 1] if plan.pp == 2 else [0, 0])


def test_peak_memory_holds_states_and_activations(one: LocalProber) -> None:
    parameters = 4 * (4 * 256**2 + 3 * 256 * 1024 + 2 * 256) + 2 * 2048 * 256 + 256
    states_bytes = 4 * 4 * parameters  # weights, gradients, two moments in fp32
    none, full = (
        reading(one, Plan(recompute=mode), **SMALL_STEPS | {"optimizer": "adamw"})
        for mode in (Recompute.NONE, Recompute.FULL)
    )
    assert states_bytes < full.peak_allocated_bytes < none.peak_allocated_bytes < 2 * states_bytes
    assert none.peak_reserved_bytes > 0.8 * none.peak_allocated_bytes
    assert "ledger" in none.memory_source


def test_steps_end_when_the_interval_is_narrow_enough(one: LocalProber) -> None:
    loose = reading(one, Plan(), min_steps=3, max_steps=8, target_relative_interval=100.0)
    tight = reading(one, Plan(), min_steps=3, max_steps=8, target_relative_interval=1e-12)
    assert (len(loose.step_times_s), len(tight.step_times_s)) == (3, 8)
    assert len(loose.losses) == 2 + 3
    low, high = tight.interval_tokens_per_s_per_gpu
    assert low < high


def test_a_plan_that_cannot_win_is_given_up_after_two_steps(one: LocalProber) -> None:
    read = reading(
        one, Plan(), max_steps=8, min_steps=4, target_relative_interval=1e-12, give_up_step_s=0.0, trace=True
    )
    assert read.pruned
    assert len(read.step_times_s) == 2
    assert read.t_calc_s is not None  # so far behind that it may be the node and not the plan: a trace tells
    assert not read.steady


def test_progress_names_what_is_measured(one: LocalProber) -> None:
    seen: list[ProbeProgress] = []
    one.run(step_request(Plan(), trace=True), deadline_s=AMPLE_S, on_progress=seen.append)
    phases = [progress.phase for progress in seen if progress.phase != "start"]
    assert phases == ["build", "warm-up", "warm-up", "step", "trace", "trace"]
    assert all(progress.seconds for progress in seen if progress.phase == "step")


@pytest.mark.parametrize(
    ("plan", "changes", "complaint"),
    [
        (Plan(tp=2, dp=2), {}, "2 ranks"),
        (Plan(tp=2), {"model": {"kv_heads": 1}}, "kv_heads"),
        (Plan(pp=2, zero_stage=2), {}, "zero_stage"),
        (Plan(pp=2, micro_batch=8), {}, "micro-batches"),
        (Plan(dp=2, micro_batch=3), {}, "divide 8"),
        (Plan(cp=2), {}, "context"),
        (Plan(dp=2, ep=2), {}, "expert"),
        (Plan(dp=2), {"model": {"experts": 4, "top_k": 2, "expert_ffn": 32}}, "dense"),
        (Plan(dp=2), {"dtype": "fp8"}, "fp8"),
    ],
)
def test_what_cannot_run_is_refused_and_the_ranks_stay_warm(
    pair: LocalProber, plan: Plan, changes: dict[str, Any], complaint: str
) -> None:
    pair.fingerprint()
    before = pair.pids
    found = outcome(pair, plan, **changes)
    assert found.failure is not None
    assert found.failure.kind is FailureKind.ILLEGAL
    assert complaint in found.failure.message
    assert pair.pids == before


def report(times_s: list[float], **changes: Any) -> dict[str, Any]:
    memory = {"allocated_bytes": 10, "reserved_bytes": 20, "live_bytes": 5, "source": "test"}
    plain = {"rank": 0, "stage": 0, "hostname": "here", "setup_s": 1.0, "warmup_times_s": [9.0], "trace": None}
    return {**plain, "step_times_s": times_s, "pruned": False, "losses": [4.0], "memory": memory, **changes}


def test_merging_takes_the_worst_rank_and_the_mean_trace() -> None:
    request = step_request(Plan(dp=2), seq_len=16, global_batch=8)
    traces = [
        {"step_s": 2.0, "calc_s": calc_s, "comm_s": 1.0, "exposed_s": 0.5, "comm_s_by_op": {"all_reduce": 1.0}}
        for calc_s in (1.0, 3.0)
    ]
    worse = {"allocated_bytes": 30, "reserved_bytes": 40, "live_bytes": 5, "source": "test"}
    reports = {
        1: report([2.0, 1.0, 1.0], rank=1, trace=traces[1], memory=worse, setup_s=2.0),
        0: report([2.0, 1.0, 1.0], trace=traces[0]),
    }
    (read,) = merge_step(request, reports, peak_flops_per_s=1e6)
    assert read.step_time_s == 1.0
    assert read.tokens_per_s_per_gpu == 16 * 8 / 2
    assert (read.t_calc_s, read.t_comm_s, read.mu) == (2.0, 1.0, 0.5)
    assert (read.peak_allocated_bytes, read.peak_reserved_bytes, read.setup_s) == (30, 40, 2.0)
    assert read.mfu == pytest.approx(64 * model_flops_per_token(request.model, 16) / 1e6)
    low, high = read.interval_tokens_per_s_per_gpu
    # rates 32, 64, 64: mean 53.3, deviation 18.475, t(2) = 4.303
    assert (low, high) == pytest.approx((53.333 - 45.899, 53.333 + 45.899), abs=0.01)


def test_mfu_counts_the_flops_that_the_cost_model_counts() -> None:
    for changes in ({}, {"gated": False, "kv_heads": 2, "tied": True, "head_dim": 16}):
        model = ModelSpec.from_data(step_request(Plan()).model.to_data() | changes)
        assert model_flops_per_token(model, 16) == cost_flops_per_token(model, 16)
