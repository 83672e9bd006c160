"""The Optuna study of a tuning: which plan comes next, under which trial number.

It lives in memory and is rebuilt from the stored trials, which are the only truth: what it would ask follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import TrialState as OptunaState

from autotune.search.core import Search
from autotune.search.sampler import Alternative, PlanSampler, parameters_of, plan_of
from autotune.specs import Plan, StepReading, Trial, TrialState

_STATES = {
    TrialState.RUNNING: OptunaState.RUNNING,
    TrialState.COMPLETE: OptunaState.COMPLETE,
    TrialState.PRUNED: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A plan that the study wants to see run, under its trial number."""

    number: int
    plan: Plan


class PlanStudy:
    """One tuning's study. What it asked becomes a trial by being stored; a number that never was is given again.

    Args:
        search: chooses and learns.
        first: plans to run before anything that the search would choose, in this order, each once. Over as soon as a
            trial of any other plan is known, so that a list that grew since then changes nothing.
        alternative: chooses among the search's plans in its place, from the first trial on; the search still learns.
    """

    def __init__(self, search: Search, *, first: Sequence[Plan] = (), alternative: Alternative | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search, self._alternative = search, alternative
        self._first = () if alternative is not None else tuple(first)
        self._sampler = PlanSampler(search)
        self._study = optuna.create_study(sampler=self._sampler, direction="maximize")
        self._known: dict[int, Plan] = {}
        self._ended: set[int] = set()

    def resume(self, trials: Sequence[Trial], *, final: bool = False) -> None:
        """Brings study and search up to the stored trials; may be called at any time, and again.

        Args:
            trials: all of this tuning, by number.
            final: whether a plan whose trial was lost is not asked again, as in `Search.tell`.
        """
        for trial in trials:
            result = trial.reading if trial.reading is not None else trial.failure
            if trial.number not in self._known:
                self._adopt(trial)
                if result is None and self._alternative is not None:
                    self._alternative.expect(trial.plan)
            if result is None or trial.number in self._ended:
                continue
            self._ended.add(trial.number)
            speed = result.tokens_per_s_per_gpu if isinstance(result, StepReading) else None
            whole = trial.state is TrialState.COMPLETE
            self._study.tell(trial.number, speed if whole else None, state=_STATES[trial.state])
            final_failure = final and trial.failure is not None
            self._search.tell(trial.plan, result, gpu_s=trial.gpu_s, final=final_failure)
            if self._alternative is not None:
                self._alternative.tell(trial.plan, speed)

    def ask(self) -> Asked:
        """The next plan. The caller stores it as a trial of that number before running it."""
        if self._alternative is not None:
            return self._next(self._alternative.ask())
        tried = set(self._known.values())
        rest = [plan for plan in self._first if plan not in tried]
        return self._next(rest[0] if rest and tried <= set(self._first) else None)

    def repeat(self, plan: Plan) -> Asked:
        """A further trial of a plan that was measured before."""
        return self._next(plan)

    def _next(self, chosen: Plan | None) -> Asked:
        self._sampler.chosen = chosen
        trial = self._study.ask(fixed_distributions=dict(self._sampler.space))
        plan = plan_of(trial.params)
        self._known[trial.number] = plan
        self._search.expect(plan)
        return Asked(number=trial.number, plan=plan)

    def _adopt(self, trial: Trial) -> None:
        """Takes a trial as in flight that was asked before this study was made."""
        while len(self._study.get_trials(deepcopy=False)) < trial.number:  # numbers that no trial has
            self._study.add_trial(optuna.trial.create_trial(state=OptunaState.FAIL))
        space = self._sampler.space if self._search.table.find(trial.plan) is not None else {}
        params = parameters_of(trial.plan) if space else {}
        adopted = optuna.trial.create_trial(state=OptunaState.RUNNING, params=params, distributions=dict(space))
        self._study.add_trial(adopted)
        self._known[trial.number] = trial.plan
        self._search.expect(trial.plan)
