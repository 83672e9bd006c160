"""The step probe, on a rank: real training steps under a plan, timed, accounted for and traced."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.specs import DType, ProbeProgress, StepRequest
from probes.context import RankContext
from probes.ledger import Ledger, make_ledger
from probes.mesh import Coordinates, PlanGroups, trial_groups
from probes.runnable import check_step
from probes.timing import align, half_width, synchronize
from probes.trace import Tracer
from probes.training import Training

_FAR_BEHIND = 2.0
_ACCOUNTED_STEPS = 2  # the memory account needs a step after the one that makes the optimizer's state


def run(request: StepRequest, context: RankContext) -> dict[str, Any]:
    """Trains under the plan and returns this rank's report for `merge_step`.

    At least two steps run untimed, whatever `warmup_steps` says: the memory account needs them.

    Raises:
        IllegalPlanError, InputError: the plan, model or number format cannot be run (on all ranks alike).
    """
    check_step(request, context.world_size)
    ledger = make_ledger(context.device)
    started_s = time.perf_counter()
    context.emit(ProbeProgress(phase="build"))
    ledger.open()
    try:
        with trial_groups(context.device) as groups:
            mixed = request.workload.dtype is not DType.FP32
            axes = PlanGroups.make(request.plan, request.model, groups, single_dp=mixed)
            training = Training(request, context.rank, context.device, axes)
            align(context.device)
            setup_s = time.perf_counter() - started_s
            report = _Measuring(training, request, context, ledger).report()
            del training
    finally:
        ledger.close()
    place = Coordinates.of_rank(context.rank, request.plan.tp, request.plan.dp)
    return {"rank": context.rank, "stage": place.pp, "hostname": context.hostname, "setup_s": setup_s, **report}


@dataclass(slots=True)
class _Measuring:
    """The steps of one trial on this rank. Step times are the slowest rank's, so that all ranks decide alike."""

    training: Training
    request: StepRequest
    context: RankContext
    ledger: Ledger
    losses: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Runs all steps."""
        warmup = max(_ACCOUNTED_STEPS, self.request.warmup_steps)
        warmup_times_s = []
        for index in range(warmup):
            warmup_times_s.append(self._step("warm-up", index, warmup))
            if index == _ACCOUNTED_STEPS - 1:
                self.ledger.close()
        step_times_s, pruned = self._timed_steps()
        trace = self._trace() if self.request.trace and (not pruned or self._is_far_behind(step_times_s)) else None
        return {
            "warmup_times_s": warmup_times_s,
            "step_times_s": step_times_s,
            "pruned": pruned,
            "losses": self.losses,
            "trace": trace,
            "memory": asdict(self.ledger.reading()),
        }

    def _timed_steps(self) -> tuple[list[float], bool]:
        request, times_s = self.request, list[float]()
        limit_s = request.give_up_step_s
        for index in range(request.max_steps):
            times_s.append(self._step("step", index, request.max_steps))
            if limit_s is not None and sum(time_s > limit_s for time_s in times_s[:2]) == 2:
                return times_s, True
            narrow = half_width(times_s) <= request.target_relative_interval * fmean(times_s)
            if len(times_s) >= max(2, request.min_steps) and narrow:
                break
        return times_s, False

    def _is_far_behind(self, times_s: list[float]) -> bool:
        """Whether a pruned trial is so slow that a node may be why, which only a trace tells from the plan."""
        limit_s = self.request.give_up_step_s
        return limit_s is not None and min(times_s) > _FAR_BEHIND * limit_s

    def _step(self, phase: str, index: int, total: int) -> float:
        """One step. All ranks start together; the seconds are the slowest rank's, from start to a drained device."""
        tokens, targets = self.training.batch(len(self.losses))
        align(self.context.device)
        start_s = time.perf_counter()
        loss = self.training.step(tokens, targets)
        synchronize(self.context.device)
        elapsed_s = self._keep(loss, time.perf_counter() - start_s)
        self.context.emit(ProbeProgress(phase=phase, done=index + 1, total=total, seconds=elapsed_s))
        return elapsed_s

    def _keep(self, loss: Tensor, elapsed_s: float) -> float:
        """Exchanges loss and time outside the clock: the global mean loss is kept, the longest time returned."""
        plan, device = self.request.plan, self.context.device
        dist.all_reduce(loss)
        longest = torch.tensor(elapsed_s, dtype=torch.float64, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        self.losses.append(loss.item() / (plan.tp * plan.dp))
        return longest.item()

    def _trace(self) -> dict[str, Any]:
        """One more step, profiled."""
        self.context.emit(ProbeProgress(phase="trace", total=1))
        tokens, targets = self.training.batch(len(self.losses))
        align(self.context.device)
        with Tracer(cuda=self.context.device.type == "cuda") as tracer:
            start_s = time.perf_counter()
            loss = self.training.step(tokens, targets)
            synchronize(self.context.device)
            elapsed_s = time.perf_counter() - start_s
        step_s = self._keep(loss, elapsed_s)
        self.context.emit(ProbeProgress(phase="trace", done=1, total=1, seconds=step_s))
        return {"step_s": step_s, **asdict(tracer.read())}
