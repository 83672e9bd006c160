"""Calibration recovers what made the readings: exactly without noise, within the noise with it."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.calibrate import fit_compute, fit_links, fit_profile, probe_core, relative_fit
from autotune.cost.estimate import estimate
from autotune.cost.network import ring_steps, ring_traffic
from autotune.cost.speeds import PLAIN, Gemm, gemm_of
from autotune.cost.work import reading_work
from autotune.errors import InputError
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    ComputeFit,
    LayerPart,
    LayerReading,
    LinkFit,
    ModelSpec,
    Plan,
    Profile,
    Recompute,
    Schedule,
    StepReading,
    Trial,
    TrialState,
    Workload,
)

CLUSTER = cluster_from_shorthand("a100-80gb-sxm:2x4")
WORK = Workload(seq_len=256, global_batch=16)
RECOMPUTES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
GPT = model("tiny-gpt")
SIZES = (4096, 65536, 2**20, 2**24)


def collective(op: CollectiveOp, size: int, stride: int, size_bytes: int, time_s: float) -> CollectiveReading:
    return CollectiveReading(
        op=op, group_size=size, stride=stride, size_bytes=size_bytes, iterations=7, time_s=time_s,
        time_p10_s=time_s, time_p90_s=time_s, algbw_bytes_per_s=0.0, busbw_bytes_per_s=0.0,
    )  # fmt: skip


def sweep(op: CollectiveOp, size: int, stride: int, latency_s: float, rate: float) -> list[CollectiveReading]:
    steps, traffic = ring_steps(op, size), ring_traffic(op, size)
    return [collective(op, size, stride, n, steps * latency_s + traffic * n / rate) for n in SIZES]


def layer(
    spec: ModelSpec,
    fit: ComputeFit,
    part: LayerPart,
    tp: int,
    micro_batch: int,
    recompute: Recompute,
    noise: float = 1.0,
    gemm: Gemm = PLAIN,
    core: float = 1.0,
) -> LayerReading:
    """A reading as the formulas make it under `fit`, times `noise`."""
    blank = {
        "part": part, "tp": tp, "micro_batch": micro_batch, "recompute": recompute, "sequence_parallel": tp > 1,
        "iterations": 7, "forward_s": 0.0, "backward_s": 0.0, "forward_p10_s": 0.0, "forward_p90_s": 0.0,
        "backward_p10_s": 0.0, "backward_p90_s": 0.0, "forward_calc_s": 0.0, "backward_calc_s": 0.0,
        "saved_bytes": 0, "peak_bytes": 0, "parameter_bytes": 0, "memory_source": "made",
    }  # fmt: skip
    reading = LayerReading(**blank)
    seconds = [
        noise * (work.kernels * fit.launch_s + work.flops / fit.flops_per_s + work.bytes / (fit.bytes_per_s or np.inf))
        for work, _ in reading_work(spec, WORK, reading, gemm, core)
    ]
    names = ("forward_calc_s", "backward_calc_s")
    return reading.model_copy(update=dict(zip(names, seconds, strict=False)))


def layers(fit: ComputeFit, noise: np.random.Generator | None = None) -> list[tuple[ModelSpec, Workload, LayerReading]]:
    shapes = [(part, tp, b, rc) for part in LayerPart for tp in (1, 2, 4) for b in (1, 4, 16) for rc in RECOMPUTES]
    factor = 1.0
    found = []
    for part, tp, micro_batch, recompute in shapes:
        if noise is not None:
            factor = float(np.exp(noise.normal(0.0, 0.03)))
        found.append((GPT, WORK, layer(GPT, fit, part, tp, micro_batch, recompute, factor)))
    return found


def trial(cluster: ClusterSpec, plan: Plan, profile: Profile, state: TrialState = TrialState.COMPLETE) -> Trial:
    """A trial that took what `profile` estimates."""
    found = estimate(GPT, cluster, WORK, plan, profile)
    context = 2e9
    peak = round(found.peak_memory_bytes - context)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    reading = StepReading(
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu, interval_tokens_per_s_per_gpu=(0.0, 0.0),
        step_time_s=found.step_time_s, step_times_s=(), warmup_times_s=(), steady=True, traced_step_s=None,
        t_calc_s=None, t_comm_s=None, t_comm_exposed_s=None, mu=None, mfu=None, peak_allocated_bytes=peak // 2,
        peak_reserved_bytes=peak, memory_source="made", losses=(), pruned=False, setup_s=0.0, ranks=(),
    )  # fmt: skip
    return Trial(id="t", tuning_id="u", number=0, plan=plan, state=state, reading=reading, started_at=now)


def test_links_are_recovered_by_layout() -> None:
    made = {
        (CollectiveOp.ALL_REDUCE, 4, 1): (5e-6, 200e9),
        (CollectiveOp.ALL_REDUCE, 2, 4): (2e-5, 10e9),
        (CollectiveOp.SEND_RECV, 2, 1): (1e-6, 90e9),
    }
    readings = [reading for layout, speed in made.items() for reading in sweep(*layout, *speed)]
    found = {(fit.op, fit.group_size, fit.stride): fit for fit in fit_links(CLUSTER, readings)}
    assert found.keys() == made.keys()
    for layout, (latency_s, rate) in made.items():
        assert found[layout].latency_s == pytest.approx(latency_s)
        assert found[layout].bytes_per_s == pytest.approx(rate)
        assert found[layout].relative_error < 1e-9
        assert found[layout].readings == len(SIZES)
    assert [fit.crosses_nodes for fit in found.values()] == [False, True, False]


@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(list(CollectiveOp)),
    size=st.integers(2, 8),
    latency_s=st.floats(1e-7, 1e-3),
    rate=st.floats(1e8, 1e12),
)
def test_any_link_predicts_its_own_readings(op: CollectiveOp, size: int, latency_s: float, rate: float) -> None:
    """A latency that no size shows cannot be recovered, but the times can."""
    readings = sweep(op, size, 1, latency_s, rate)
    (fit,) = fit_links(CLUSTER, readings)
    assert fit.latency_s >= 0
    assert fit.bytes_per_s > 0
    for reading in readings:
        predicted = ring_steps(op, size) * fit.latency_s + ring_traffic(op, size) * reading.size_bytes / fit.bytes_per_s
        assert predicted == pytest.approx(reading.time_s, rel=1e-6)


def test_times_that_fall_with_size_still_give_a_physical_link() -> None:
    readings = [collective(CollectiveOp.ALL_REDUCE, 2, 1, n, t) for n, t in ((1000, 3e-4), (2000, 2e-4), (4000, 1e-4))]
    (fit,) = fit_links(CLUSTER, readings)
    assert fit.latency_s >= 0
    assert fit.bytes_per_s > 0
    assert fit.relative_error > 0.1


@settings(max_examples=40, deadline=None)
@given(flops=st.floats(1e10, 1e15), launch_s=st.floats(1e-6, 1e-4), ratio=st.floats(0.01, 0.2))
def test_compute_is_recovered(flops: float, launch_s: float, ratio: float) -> None:
    """At byte rates that leave the memory-bound share visible."""
    made = ComputeFit(flops_per_s=flops, launch_s=launch_s, bytes_per_s=flops * ratio, relative_error=0.0, readings=0)
    found = fit_compute(layers(made))
    assert found.relative_error < 1e-6
    assert found.flops_per_s == pytest.approx(flops, rel=1e-3)
    assert found.launch_s == pytest.approx(launch_s, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(flops * ratio, rel=1e-3)


def test_compute_without_a_memory_bound_share_says_so() -> None:
    made = ComputeFit(flops_per_s=1e11, launch_s=1e-5, bytes_per_s=None, relative_error=0.0, readings=0)
    assert fit_compute(layers(made)).bytes_per_s is None


def test_noise_of_three_percent_moves_the_rates_by_little() -> None:
    made = ComputeFit(flops_per_s=1e11, launch_s=1e-5, bytes_per_s=1e10, relative_error=0.0, readings=0)
    found = fit_compute(layers(made, np.random.default_rng(0)))
    assert found.flops_per_s == pytest.approx(made.flops_per_s, rel=0.05)
    assert found.bytes_per_s == pytest.approx(made.bytes_per_s, rel=0.05)
    assert 0.005 < found.relative_error < 0.05


def test_compute_needs_a_reading() -> None:
    with pytest.raises(InputError, match="layer readings"):
        fit_compute([])


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("tp", [1, 4])
def test_an_estimate_is_the_sum_of_the_readings_that_its_profile_would_give(recompute: Recompute, tp: int) -> None:
    """Calibration and estimation count the same work: L layers, embedding and head for each micro-batch."""
    made = ComputeFit(flops_per_s=1e11, launch_s=1e-5, bytes_per_s=1e10, relative_error=0.0, readings=0)
    profile = Profile(cluster_key="c", fingerprint_key="f", compute=made)
    plan = Plan(tp=tp, dp=8 // tp, micro_batch=2, recompute=recompute, sequence_parallel=tp > 1)

    core = probe_core(CLUSTER.device, GPT, WORK)

    def seconds(part: LayerPart) -> float:
        reading = layer(GPT, made, part, tp, 2, recompute, gemm=gemm_of(CLUSTER.device), core=core)
        return reading.forward_calc_s + reading.backward_calc_s

    # An embedding is read as one figure, which `layer` leaves in the forward pass.
    one = GPT.layers * seconds(LayerPart.LAYER) + seconds(LayerPart.EMBEDDING) + seconds(LayerPart.HEAD)
    micro_batches = WORK.global_batch // (plan.dp * 2)
    assert estimate(GPT, CLUSTER, WORK, plan, profile).seconds.compute == pytest.approx(micro_batches * one)


PLANS = [
    Plan(dp=8),
    Plan(tp=2, dp=4, sequence_parallel=True, zero_stage=1),
    Plan(tp=2, pp=2, dp=2),
    Plan(pp=2, dp=4, micro_batch=2, schedule=Schedule.GPIPE, recompute=Recompute.FULL),
]


def test_a_profile_is_recovered_from_everything_together() -> None:
    compute = ComputeFit(flops_per_s=1e12, launch_s=2e-6, bytes_per_s=1e11, relative_error=0.0, readings=0)
    links = [(op, size, stride) for op in CollectiveOp for size, stride in ((2, 1), (4, 1), (2, 4))]
    readings = [reading for layout in links for reading in sweep(*layout, 1e-5, 50e9 / layout[2])]
    exact = fit_profile(CLUSTER, "f", readings, layers(compute), [])
    assert (exact.cluster_key, exact.fingerprint_key, exact.step_scale) == (CLUSTER.key, "f", 1.0)
    truth = exact.model_copy(update={"step_scale": 1.3, "memory_scale": 1.2, "memory_overhead_bytes": 5e7})
    trials = [(GPT, WORK, trial(CLUSTER, plan, truth)) for plan in PLANS]
    found = fit_profile(CLUSTER, "f", readings, layers(compute), trials)
    assert found.step_scale == pytest.approx(1.3)
    assert found.step_scale_trials == len(PLANS)
    assert found.memory_scale == pytest.approx(1.2, rel=1e-3)
    assert found.memory_overhead_bytes == pytest.approx(5e7, rel=1e-3)
    assert found.compute == exact.compute


def test_one_trial_scales_memory_without_an_overhead() -> None:
    truth = Profile(cluster_key=CLUSTER.key, fingerprint_key="f", memory_scale=1.5)
    found = fit_profile(CLUSTER, "f", [], [], [(GPT, WORK, trial(CLUSTER, PLANS[0], truth))])
    assert found.memory_scale == pytest.approx(1.5)
    assert found.memory_overhead_bytes == 0.0


def test_failed_and_pruned_trials_teach_nothing_here() -> None:
    truth = Profile(cluster_key=CLUSTER.key, fingerprint_key="f", step_scale=9.0)
    trials = [(GPT, WORK, trial(CLUSTER, PLANS[0], truth, state)) for state in (TrialState.PRUNED, TrialState.FAILED)]
    assert fit_profile(CLUSTER, "f", [], [], trials).step_scale_trials == 0


def test_without_speeds_a_trial_still_calibrates_memory() -> None:
    unknown = CLUSTER.model_copy(
        update={"device": CLUSTER.device.model_copy(update={"peak_flops_per_s": {}, "memory_bytes_per_s": None})}
    )
    truth = Profile(cluster_key=CLUSTER.key, fingerprint_key="f", memory_scale=1.5)
    found = fit_profile(unknown, "f", [], [], [(GPT, WORK, trial(CLUSTER, PLANS[0], truth))])
    assert found.step_scale_trials == 0
    assert found.memory_scale == pytest.approx(1.5)


def test_links_keep_what_they_are_called() -> None:
    (fit,) = fit_links(CLUSTER, sweep(CollectiveOp.ALL_GATHER, 8, 1, 1e-5, 1e9))
    assert isinstance(fit, LinkFit)
    assert (fit.op, fit.group_size, fit.stride, fit.crosses_nodes) == (CollectiveOp.ALL_GATHER, 8, 1, True)


def test_readings_of_one_size_move_the_catalogs_figures_as_little_as_they_may() -> None:
    """16 MiB over four A100: 28 + 6 * 1.7 = 38.2 us of latency, and 1.5 * 2**24 bytes at 300e9 * 0.77 * 0.89. Read at
    twice the sum of both, latency is the less certain one: with r the ln of the rate's change, r / 0.25 squared and
    ln(latency / 38.2 us) / 1.5 squared are least together at r = 0.03, where latency is 195 us."""
    moved_s = 1.5 * 2**24 / 205.59e9
    as_said = collective(CollectiveOp.ALL_REDUCE, 4, 1, 2**24, 38.2e-6 + moved_s)
    (found,) = fit_links(CLUSTER, [as_said])
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(38.2e-6 / 6), pytest.approx(205.59e9))
    slow = as_said.model_copy(update={"time_s": 2 * as_said.time_s})
    (found,) = fit_links(CLUSTER, [slow, slow.model_copy(update={"time_s": 1.1 * slow.time_s}), slow])
    assert found.latency_s == pytest.approx(195e-6 / 6, rel=0.005)
    assert found.bytes_per_s == pytest.approx(205.59e9 / np.exp(0.03), rel=0.003)
    assert found.relative_error == pytest.approx(0.0, abs=1e-12)  # the median's


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_no_step_that_keeps_rates_positive_makes_a_relative_fit_better(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no slope along what is used, none downhill into what is not."""
    random = np.random.default_rng(seed)
    terms = random.uniform(0.0, 1.0, (6, 3)) * [1.0, 10.0, 100.0]
    values = terms @ random.uniform(0.0, 1.0, 3) * random.lognormal(0.0, 0.5, 6) + 1e-3
    scaled = terms / values[:, None]
    assume(nnls(scaled, np.ones(6))[0][1] > 0.0)  # else the term that must be used is what keeps it from better
    found, error = relative_fit(terms, values, positive=1)
    slope = scaled.T @ (scaled @ found - 1.0)
    assert found[1] > 0.0
    used = np.array(found) > 0.0
    assert slope[used] == pytest.approx(0.0, abs=1e-6 * float(np.abs(scaled).sum()))
    assert (slope[~used] > -1e-9).all()
    assert error == pytest.approx(np.median(np.abs(scaled @ found - 1.0)))
