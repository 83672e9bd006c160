"""Findings: what is wrong or doubtful about a plan, with figures and a remedy each; and the best plan next to it.

All figures are estimates, and say so. A threshold is a definition, one of the estimate's own, or has its source here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from autotune.cost.estimate import estimate_table
from autotune.cost.framework import framework_for
from autotune.cost.table import PlanTable
from autotune.errors import IllegalPlanError
from autotune.explain.limits import COMMUNICATION, MIN_SHARE
from autotune.explain.losses import DIMENSIONS, PART_WORDS, change
from autotune.explain.scaling import CRITERION, MIN_MARGINAL, ScalingCurve
from autotune.explain.whatif import Setting
from autotune.specs import DType, Estimate, FrameworkName, Plan, Schedule


class Severity(StrEnum):
    """An `error` does not run or does not fit; a `warning` costs speed or is a risk; a `note` is worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


MANY_BUBBLES = 0.2
"""Share of the step. Four micro-batches a stage leave about as much, from where on GPipe calls the bubble negligible
(Huang et al. 2019, arXiv:1811.06965, section 2.3: m >= 4 * pp)."""

SURE = 0.95
"""P(fits) below this: the upper end of the peak's 90 % interval is more than can be used."""

RULES: Mapping[str, str] = {
    "illegal": "The plan cannot run: it breaks a rule of the model, the cluster, the batch or the framework.",
    "batch-rounding": "The global batch is no multiple of dp * micro_batch: some frameworks round it, others refuse.",
    "does-not-fit": "The plan needs more memory than can be used, more likely than not.",
    "little-headroom": f"The plan may run out of memory: P(fits) is below {SURE:.0%}.",
    "tp-across-domains": "A group of tensor parallelism spans more than the devices that NVLink or its like joins "
    "(Narayanan et al. 2021, arXiv:2104.04473, takeaway 1: at most the devices of a server).",
    "communication-bound": "mu = T_comm / T_calc is above 1: a device waits longer for others than it computes.",
    "bubble": f"The pipeline's bubble takes more than {MANY_BUBBLES:.0%} of the step.",
    "few-micro-batches": "There are fewer micro-batches than stages: some stage is idle at any time.",
    "uneven-stages": "The layers do not divide over the stages: the pipeline is as fast as the longest one.",
    "launch-bound": f"Devices wait for kernels to be launched for more than {MIN_SHARE:.0%} of the step.",
    "more-devices-than-pay": f"Fewer devices would be used better: {CRITERION}.",
    "overlap-off": "Communication that could run under computation does not.",
    "fp32": "Matrix products run in fp32 where the device has a faster format.",
    "zero-with-pipeline": "ZeRO-2 or ZeRO-3 with a pipeline exchanges gradients or parameters for every micro-batch "
    "(Megatron and DeepSpeed refuse it).",
    "idle-setting": "A setting of the plan changes nothing.",
    "unread-setting": "The launch has a setting that the plan does not say: it is not judged.",
}
"""What each rule finds, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: the rule's name, how grave it is, what was found with its figures, and what to do."""

    rule: str
    severity: Severity
    text: str
    remedy: str
    figures: Mapping[str, float] = field(default_factory=dict)
    where: str = ""

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "text": self.text,
            "remedy": self.remedy,
            "figures": dict(self.figures),
            "where": self.where,
            "source": "estimate",
        }


def batch_rounding(setting: Setting, plan: Plan) -> Finding | None:
    """A global batch that the plan cannot divide, with the nearest ones that it can; None where it divides it."""
    batch, each = setting.workload.global_batch, plan.dp * plan.micro_batch
    if batch % each == 0:
        return None
    near = [str(count) for count in (batch // each * each, (batch // each + 1) * each) if count]
    return Finding(
        rule="batch-rounding", severity=Severity.ERROR,
        text=f"the global batch of {batch} is no multiple of dp * micro_batch = {plan.dp} * {plan.micro_batch}",
        remedy=f"a global batch of {' or '.join(near)}, or another micro-batch",
        figures={"global_batch": batch, "divisor": each},
    )  # fmt: skip


def without_idle_settings(plan: Plan) -> tuple[Plan, list[Finding]]:
    """The plan without settings that change nothing in it, which frameworks take and no plan of ours has."""
    idle = {
        "zero_stage": (0, plan.zero_stage > 0 and plan.dp * plan.cp == 1, "there is one replica: nothing is sharded"),
        "sequence_parallel": (False, plan.sequence_parallel and plan.tp == 1, "tp is 1: nothing is divided"),
    }
    found = [
        Finding(rule="idle-setting", severity=Severity.NOTE, text=f"{name} does nothing: {why}", remedy="leave it out")
        for name, (_, is_idle, why) in idle.items()
        if is_idle
    ]
    return plan.model_copy(update={name: off for name, (off, is_idle, _) in idle.items() if is_idle}), found


def illegal(reason: str) -> Finding:
    """What there is to say of a plan that cannot run."""
    return Finding(rule="illegal", severity=Severity.ERROR, text=reason, remedy="change what the reason names")


def findings(setting: Setting, plan: Plan, found: Estimate, curve: ScalingCurve | None = None) -> list[Finding]:
    """What is wrong or doubtful about a legal plan, the gravest first.

    Args:
        setting: what the estimate depends on beside the plan.
        plan: is judged.
        found: its estimate.
        curve: tokens/s/GPU over numbers of devices, where that is to be judged too.
    """
    rules = (
        _memory(found), _tensor(setting, plan, found), _communication(found), _pipeline(setting, plan, found),
        _launches(plan, found), _formats(setting, plan, found), _overlap(setting, plan, found),
        _devices(setting, curve),
    )  # fmt: skip
    order = list(Severity)
    return sorted((each for rule in rules for each in rule), key=lambda each: order.index(each.severity))


def _memory(found: Estimate) -> Iterator[Finding]:
    if found.p_fits is None or found.needed_bytes is None or found.usable_bytes is None:
        return
    needs, usable = found.needed_bytes / 2**30, found.usable_bytes / 2**30
    text = f"it needs {needs:.1f} of the {usable:.1f} GiB that can be used: P(fits) is {found.p_fits:.0%}"
    largest = max(found.bytes.to_data().items(), key=lambda item: item[1])[0]
    remedy = {
        "activations": "recompute more, or a smaller micro-batch", "logits": "a smaller micro-batch, or a fused loss",
        "optimizer": "shard it: a higher ZeRO stage", "gradients": "16-bit gradients, or a higher ZeRO stage",
        "parameters": "more tp or pp, or ZeRO-3",
    }.get(largest, "more devices, or more tp")  # fmt: skip
    figures = {"p_fits": found.p_fits, "needed_bytes": found.needed_bytes, "usable_bytes": found.usable_bytes}
    if not found.fits:
        yield Finding(rule="does-not-fit", severity=Severity.ERROR, text=text, figures=figures,
                      remedy=f"{remedy} (most of it are {largest})")  # fmt: skip
    elif found.p_fits < SURE:
        yield Finding(rule="little-headroom", severity=Severity.WARNING, text=text, figures=figures,
                      remedy=f"{remedy} (most of it are {largest}), or measure it before a long run")  # fmt: skip


def _tensor(setting: Setting, plan: Plan, found: Estimate) -> Iterator[Finding]:
    domain, share = setting.cluster.domain, found.seconds.tp / found.step_time_s
    if plan.tp > domain or (plan.tp > 1 and domain % plan.tp and setting.cluster.devices > domain):
        yield Finding(
            rule="tp-across-domains", severity=Severity.WARNING,
            text=f"tp {plan.tp} spans groups of {domain} devices: its communication takes {share:.0%} of the step",
            remedy=f"tp of at most {domain} that divides it, and more pp or ZeRO instead",
            figures={"tp": plan.tp, "domain": domain, "share": share},
        )  # fmt: skip


def _communication(found: Estimate) -> Iterator[Finding]:
    parts = {name: getattr(found.seconds, name) for name in COMMUNICATION}
    mu = sum(parts.values()) / found.seconds.compute
    if mu <= 1:
        return
    largest = max(parts, key=lambda name: parts[name])
    remedy = {
        "tp": "less tp, within NVLink, and sequence parallelism", "ep": "less ep, or experts within NVLink",
        "cp": "less cp", "pp_p2p": "fewer chunks of stages (vpp)",
        "dp_exposed": "more micro-batches a step (a larger global batch), less dp, or gradients in 16 bits",
    }[largest]  # fmt: skip
    yield Finding(
        rule="communication-bound", severity=Severity.WARNING,
        text=f"mu = T_comm / T_calc is at least {mu:.2f} (communication that nothing hides, over computing); "
        f"{parts[largest] / found.step_time_s:.0%} of the step are {PART_WORDS[largest]}",
        remedy=remedy, figures={"mu": mu, "share": parts[largest] / found.step_time_s},
    )  # fmt: skip


def _pipeline(setting: Setting, plan: Plan, found: Estimate) -> Iterator[Finding]:
    if plan.pp == 1:
        return
    layers, chunks = setting.model.layers, plan.pp * plan.vpp
    count = setting.workload.global_batch // (plan.dp * plan.micro_batch)
    bubble = found.seconds.bubble / found.step_time_s
    if count < plan.pp:
        yield Finding(
            rule="few-micro-batches", severity=Severity.WARNING,
            text=f"{count} micro-batches a step for {plan.pp} stages: the bubble takes {bubble:.0%} of the step",
            remedy="a smaller micro-batch, less dp or a larger global batch: at least pp micro-batches, better 4 * pp",
            figures={"micro_batches": count, "pp": plan.pp, "share": bubble},
        )  # fmt: skip
    elif bubble > MANY_BUBBLES:
        interleaved = "" if plan.schedule is Schedule.INTERLEAVED else ", or the interleaved schedule"
        yield Finding(
            rule="bubble", severity=Severity.WARNING,
            text=f"the bubble takes {bubble:.0%} of the step, with {count} micro-batches for {plan.pp} stages",
            remedy=f"less pp, a smaller micro-batch or a larger global batch{interleaved}",
            figures={"share": bubble, "micro_batches": count, "pp": plan.pp},
        )  # fmt: skip
    if layers % chunks:
        most = -(-layers // chunks)
        slower = most * chunks / layers - 1
        yield Finding(
            rule="uneven-stages", severity=Severity.WARNING,
            text=f"{layers} layers over {chunks} stages or chunks: the longest has {most}, {slower:.0%} more than "
            "the mean",
            remedy="pp * vpp that divides the layers, or fewer layers where embedding and head are",
            figures={"layers": layers, "chunks": chunks, "longest": most, "slower": slower},
        )  # fmt: skip
    if plan.zero_stage > 1:
        share = found.seconds.dp_exposed / found.step_time_s
        yield Finding(
            rule="zero-with-pipeline", severity=Severity.WARNING,
            text=f"ZeRO-{plan.zero_stage} with {plan.pp} stages: exposed communication of data parallelism takes "
            f"{share:.0%} of the step",
            remedy="ZeRO-1, which shards the optimizer alone",
            figures={"zero_stage": plan.zero_stage, "pp": plan.pp, "share": share},
        )  # fmt: skip


def _launches(plan: Plan, found: Estimate) -> Iterator[Finding]:
    share = found.seconds.launch / found.step_time_s
    if share > MIN_SHARE:
        yield Finding(
            rule="launch-bound", severity=Severity.WARNING,
            text=f"with micro-batch {plan.micro_batch} devices wait for kernels for {share:.0%} of the step",
            remedy="a larger micro-batch, less tp, or compiled or captured kernels (CUDA graphs)",
            figures={"share": share, "micro_batch": plan.micro_batch},
        )  # fmt: skip


def _formats(setting: Setting, plan: Plan, found: Estimate) -> Iterator[Finding]:
    workload, peaks = setting.workload, setting.cluster.device.peak_flops_per_s
    half = max((peaks[dtype] for dtype in (DType.BF16, DType.FP16) if dtype in peaks), default=0.0)
    single = peaks.get(DType.FP32, 0.0)
    if workload.dtype is DType.FP32 and half > single > 0:
        share = found.seconds.compute / found.step_time_s
        yield Finding(
            rule="fp32", severity=Severity.WARNING,
            text=f"matrix products in fp32: {setting.cluster.device.name} has {half / single:.0f} times the FLOP/s in "
            f"16 bits, and computing takes {share:.0%} of the step",
            remedy="--dtype bf16 (or fp16), if it is not meant", figures={"ratio": half / single, "share": share},
        )  # fmt: skip
    if workload.framework is FrameworkName.FSDP and plan.dp * plan.cp == 1 and workload.dtype is not DType.FP32:
        yield Finding(
            rule="fp32", severity=Severity.WARNING,
            text="with dp = cp = 1 torchtitan applies no mixed precision: it trains in fp32, not in "
            f"{workload.dtype.value} as estimated",
            remedy="training.dtype in the config, or dp or cp above 1", figures={"dp": plan.dp, "cp": plan.cp},
        )  # fmt: skip


def _overlap(setting: Setting, plan: Plan, found: Estimate) -> Iterator[Finding]:
    """Where the workload says that communication does not overlap: what it would gain."""
    for name, words in (("tp_overlap", "tp"), ("ep_overlap", "ep")):
        if getattr(setting.workload, name) is False and getattr(found.seconds, words) > 0:
            on = replace(setting, workload=setting.workload.model_copy(update={name: True}))
            gain = found.step_time_s / float(on.estimates(PlanTable.of([plan])).step_time_s[0]) - 1
            if gain > MIN_SHARE:
                yield Finding(
                    rule="overlap-off", severity=Severity.WARNING,
                    text=f"{name} is off: with it the plan would be {gain:.0%} faster",
                    remedy=f"{name}=true in --kernels, and in the framework", figures={"gain": gain},
                )  # fmt: skip


def without_overlap(setting: Setting, plan: Plan, name: str, where: str) -> Finding | None:
    """What a launch loses that does not overlap the communication of data parallelism, which the estimate assumes.

    None where that is next to nothing.
    """
    habits = framework_for(setting.workload, setting.framework)
    off = replace(habits, overlap=0.0, overlap_sharded=0.0)
    question = setting.model, setting.cluster, setting.workload, PlanTable.of([plan]), setting.profile
    with_it, without = (float(estimate_table(*question, each).step_time_s[0]) for each in (habits, off))
    if without / with_it - 1 <= MIN_SHARE:
        return None
    return Finding(
        rule="overlap-off", severity=Severity.WARNING, where=where,
        text=f"{name} is off: the step takes {without / with_it - 1:.0%} longer than with it",
        remedy=f"turn on {name}", figures={"slower": without / with_it - 1},
    )  # fmt: skip


def _devices(setting: Setting, curve: ScalingCurve | None) -> Iterator[Finding]:
    devices = setting.cluster.devices
    if curve is None or curve.pays_up_to is None or curve.pays_up_to >= devices:
        return
    here = next((point for point in curve.points if point.devices == devices), None)
    if here is None or here.marginal is None or here.marginal >= MIN_MARGINAL:
        return
    yield Finding(
        rule="more-devices-than-pay", severity=Severity.WARNING,
        text=f"of {devices} devices the last ones contribute {here.marginal:.0%} of what a device of the smallest "
        f"cluster does; more pay up to {curve.pays_up_to}",
        remedy=f"{curve.pays_up_to} devices, or a larger global batch",
        figures={"marginal": here.marginal, "pays_up_to": curve.pays_up_to},
    )  # fmt: skip


# The best legal plan next to a plan: what `--fix` proposes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A plan that differs in as little as possible, and what it gains.

    `gain` is of tokens/s/GPU against the plan as it is, which fits with `p_fits`; None where that cannot run.
    """

    plan: Plan
    change: str
    gain: float | None
    p_fits: float | None
    estimate: Estimate

    @property
    def text(self) -> str:
        """One line."""
        if self.gain is None or self.p_fits is None:
            return f"{self.change}, which can run: {self.estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU (estimate)"
        fits = f"P(fits) {self.estimate.p_fits:.0%} instead of {self.p_fits:.0%}"
        return f"{self.change}: {self.gain:+.0%} tokens/s/GPU, {fits} (estimate)"

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "plan": self.plan.to_data(), "change": self.change, "gain": self.gain, "p_fits": self.p_fits,
            "text": self.text,
            "estimate": self.estimate.to_data(), "source": "estimate",
        }  # fmt: skip


def best_neighbour(setting: Setting, plan: Plan) -> Fix | None:
    """The best legal plan that fits and differs in the fewest dimensions; None where nothing is better.

    The best by tokens/s/GPU times P(fits).

    One change counts its consequences in dp alone. Where no legal plan that fits is one change away, it is two, and so
    on.

    Raises:
        IllegalPlanError: there is no legal plan at all.
    """
    table = setting.plans()
    if not len(table):
        raise IllegalPlanError("plan", plan.key, "no plan is legal for this model, cluster and batch")
    wanted = PlanTable.of([plan])
    differs: Sequence[np.ndarray[Any, Any]] = [
        np.any([getattr(table, name) != getattr(wanted, name)[0] for name in names], axis=0) for names in DIMENSIONS
    ]
    distance = np.sum(differs, axis=0)
    own = table.find(plan)
    near = np.flatnonzero(distance <= (1 if own is not None else distance.min()))
    near = near if own is None else np.union1d(near, [own])
    estimates = setting.estimates(table.take(near))
    if not estimates.fits.any():
        estimates, near = setting.estimates(table), np.arange(len(table))
        if not estimates.fits.any():
            return None
        near = np.flatnonzero(estimates.fits)
        near = near[distance[near] == distance[near].min()]
        near = near if own is None else np.union1d(near, [own])
        estimates = setting.estimates(table.take(near))
    best = int(np.argmax(np.where(estimates.fits, estimates.expected, -1.0)))
    gain = fitted = None
    if own is not None:
        mine = int(np.searchsorted(near, own))
        if best == mine:
            return None
        gain = float(estimates.tokens_per_s_per_gpu[best] / estimates.tokens_per_s_per_gpu[mine] - 1)
        fitted = float(estimates.p_fits[mine])
    found = table.plan(int(near[best]))
    words = change(plan, found) if distance[near[best]] else f"etp {found.etp} instead of {plan.etp}"
    return Fix(plan=found, change=words, gain=gain, p_fits=fitted, estimate=estimates.row(best))
