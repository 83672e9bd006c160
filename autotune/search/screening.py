"""Screening: a search that may try a plan cheaply first, where that is expected to save GPU-seconds.

screening = Screening(search, profile=profile)
trial = screening.ask()                      # a plan, and how much of its step to run
screening.tell(trial, measure(trial.model, trial.workload, trial.plan))

What is best is decided by whole trials alone: a plan that looks good after a cheap one is asked for again, whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from autotune.search.acquisition import Choice
from autotune.search.belief import Belief
from autotune.search.core import TRIAL_STEPS, Search
from autotune.search.fidelity import OWN_SD, Fidelity, Ratio, Setting, fewer_micro_batches
from autotune.search.measurement import Measurement
from autotune.specs import Failure, ModelSpec, Plan, Profile, StepReading, Workload

LEAST_SAVED = 0.2
"""Share of a whole trial's GPU-seconds that screening must be expected to save."""

MOST_DOUBT = 0.5
"""A cheap trial must leave at most this share of what is uncertain of the plan's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenedTrial:
    """What to run next. `fidelity` is None for a whole trial; model and workload are those to run."""

    plan: Plan
    model: ModelSpec
    workload: Workload
    fidelity: Fidelity | None


class Screening:
    """Cheap trials before whole ones.

    Args:
        search: chooses and learns.
        profile: the one that the search was given.
        own_sd: what a carried-over time is off by on this cluster beyond the calibrated parameters (ln).
    """

    def __init__(self, search: Search, *, profile: Profile | None = None, own_sd: float = OWN_SD) -> None:
        self._search = search
        self._setting = Setting(
            model=search.model, cluster=search.cluster, workload=search.workload, profile=profile,
            framework=search.framework, own_sd=own_sd,
        )  # fmt: skip
        self._screened: set[Plan] = set()

    def ask(self) -> ScreenedTrial | None:
        """The next trial; None when every plan was run."""
        search = self._search
        choice = search.next()
        if choice is None:
            return None
        plan = search.table.plan(choice.row)
        fidelity = self._worth(choice, plan, search.belief())
        search.expect(plan)
        if fidelity is None:
            return ScreenedTrial(plan=plan, model=search.model, workload=search.workload, fidelity=None)
        self._screened.add(plan)
        return ScreenedTrial(
            plan=plan,
            model=fidelity.model(search.model),
            workload=fidelity.workload(search.workload),
            fidelity=fidelity,
        )

    def tell(
        self, trial: ScreenedTrial, result: StepReading | Measurement | Failure, *, gpu_s: float | None = None
    ) -> None:
        """Learns a result. A failure counts as the whole trial's: a cheap one needs no more memory than that.

        Args:
            trial: what was run.
            result: its speed in tokens of its own workload.
            gpu_s: what it cost.
        """
        search = self._search
        if trial.fidelity is None or isinstance(result, Failure):
            search.tell(trial.plan, result, gpu_s=gpu_s)
            return
        ratio = self._setting.ratio(trial.plan, trial.fidelity, search.belief().calibration)
        share = trial.workload.tokens_per_step / search.workload.tokens_per_step
        carried = result.tokens_per_s_per_gpu / share * float(np.exp(-ratio.log_mean))
        search.tell(
            trial.plan,
            Measurement(tokens_per_s_per_gpu=carried, carried_sd=ratio.log_sd, setup_s=result.setup_s),
            gpu_s=gpu_s,
        )

    def _worth(self, choice: Choice, plan: Plan, belief: Belief) -> Fidelity | None:
        """The cheap trial that saves: its own cost and, where it does not rule the plan out, that of the whole one are
        less than a whole trial at once."""
        if belief.best is None or plan in self._screened:
            return None
        fidelity = fewer_micro_batches(self._search.model, self._search.workload, plan)
        if fidelity is None:
            return None
        ratio, sd = self._setting.ratio(plan, fidelity, belief.calibration), float(belief.log_sd[choice.row])
        if ratio.log_sd > MOST_DOUBT * sd:
            return None
        better = float(ndtr((belief.log_mean[choice.row] - np.log(belief.best)) / sd))
        expected = self._cost(choice, belief, ratio) + better * choice.gpu_s
        return fidelity if expected < (1.0 - LEAST_SAVED) * choice.gpu_s else None

    def _cost(self, choice: Choice, belief: Belief, ratio: Ratio) -> float:
        """GPU-seconds of the cheap trial: those of the whole one less the steps' share that is not run."""
        tokens = self._search.workload.tokens_per_step
        steps_gpu_s = TRIAL_STEPS * tokens / float(np.exp(belief.log_mean[choice.row]))
        saved: float = steps_gpu_s * (1.0 - float(np.exp(-ratio.log_mean)))
        return choice.gpu_s - saved
