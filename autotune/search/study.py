"""The Optuna study of a tuning, in the same database as everything else; ask and tell by trial number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.storages import RDBStorage
from optuna.trial import Trial as OptunaTrial
from optuna.trial import TrialState as OptunaState

from autotune.search.core import Search
from autotune.search.ranking import peak_memory_bytes
from autotune.search.sampler import Alternative, PlanSampler, plan_of, plan_params
from autotune.specs import Failure, Plan, StepReading, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A plan that the study wants to see run, under its trial number."""

    number: int
    plan: Plan


class PlanStudy:
    """One tuning's study. The plan comes from enqueued trials first, then from the alternative or the search.

    Args:
        search: chooses and learns.
        name: of the study; an existing one of that name is resumed.
        url: the database; None keeps the study in memory.
        alternative: chooses among the search's plans in its place; the search still learns.
    """

    def __init__(self, search: Search, *, name: str, url: str | None, alternative: Alternative | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search, self._alternative = search, alternative
        self._sampler = PlanSampler(search)
        self._database = RDBStorage(url) if url is not None else None
        self._study = optuna.create_study(
            study_name=name, storage=self._database, sampler=self._sampler, direction="maximize", load_if_exists=True
        )
        self._told: set[int] = set()
        self._expected: set[int] = set()
        self._ended: set[int] = set()  # in the study

    def close(self) -> None:
        """Lets go of the database's connections."""
        if self._database is not None:
            self._database.remove_session()
            self._database.engine.dispose()

    def enqueue(self, plans: Sequence[Plan]) -> None:
        """Puts plans before anything that the sampler would choose. A plan already in the study is skipped."""
        for plan in plans:
            self._study.enqueue_trial(plan_params(plan), skip_if_exists=True)

    def ask(self) -> Asked:
        """The next plan. The caller runs it and tells its number."""
        return self._next(self._alternative.ask() if self._alternative is not None else None)

    def _next(self, chosen: Plan | None) -> Asked:
        # Not by Optuna's queue: what is in there outlives a process that dies before it asks.
        self._sampler.chosen = chosen
        trial = self._study.ask(fixed_distributions=dict(self._sampler.space))
        self._sampler.chosen = None
        plan = plan_of(trial.params)
        self._expected.add(trial.number)
        self._search.expect(plan)
        trial.set_user_attr("plan", plan.key)
        return Asked(number=trial.number, plan=plan)

    def tell(
        self, number: int, plan: Plan, result: StepReading | Failure, *, gpu_s: float, final: bool = False
    ) -> None:
        """Ends a trial in the study and teaches the search; `final` as in `Search.tell`.

        Telling an ended trial again changes nothing.
        """
        if number in self._told:
            return
        self._told.add(number)
        trial = self._trial(number) if number not in self._ended else None
        if trial is not None:
            self._store(trial, result, gpu_s)
        self._search.tell(plan, result, gpu_s=gpu_s, final=final)
        if self._alternative is not None:
            self._alternative.tell(plan, result.tokens_per_s_per_gpu if isinstance(result, StepReading) else None)

    def resume(self, trials: Sequence[Trial], *, final: bool = False) -> None:
        """Brings study and search up to what the store holds, after a crash at any line; may be called at any time.

        Every ended trial of the store is told, and every running one expected. Trials that the study believes running
        and the store does not know are failed.

        Args:
            trials: the store's, all of this tuning.
            final: whether a plan whose trial was lost is not asked again.
        """
        frozen = self._study.get_trials(deepcopy=False)
        self._ended.update(item.number for item in frozen if item.state.is_finished())
        for trial in trials:
            result = trial.reading if trial.reading is not None else trial.failure
            if result is not None:
                self.tell(trial.number, trial.plan, result, gpu_s=trial.gpu_s, final=final)
            elif trial.number not in self._expected:
                self._expect(trial)
        known = {trial.number for trial in trials}
        for item in frozen:
            if item.state is OptunaState.RUNNING and item.number not in known:
                self._study.tell(item.number, state=OptunaState.FAIL, skip_if_finished=True)

    def _expect(self, trial: Trial) -> None:
        """Takes a trial as in flight that was asked before this process, or in another one."""
        self._expected.add(trial.number)
        self._search.expect(trial.plan)
        if self._alternative is not None:
            self._alternative.expect(trial.plan)

    def repeat(self, plan: Plan) -> Asked:
        """A further trial of a plan that was measured before."""
        return self._next(plan)

    def _trial(self, number: int) -> OptunaTrial | None:
        """The unfinished trial of that number."""
        found = [item for item in self._study.get_trials(deepcopy=False) if item.number == number]
        if not found or found[0].state.is_finished():
            return None
        return OptunaTrial(self._study, found[0]._trial_id)

    def _store(self, trial: OptunaTrial, result: StepReading | Failure, gpu_s: float) -> None:
        trial.set_user_attr("gpu_s", gpu_s)
        if isinstance(result, Failure):
            trial.set_user_attr("failure", result.kind.value)
            self._study.tell(trial.number, state=OptunaState.FAIL, skip_if_finished=True)
            return
        cluster = self._search.cluster
        if not self._study.get_trials(deepcopy=False)[trial.number].constraints:
            trial.set_constraint("memory", peak_memory_bytes(result, cluster) - cluster.device.memory_bytes)
        if result.pruned:
            trial.report(result.tokens_per_s_per_gpu, step=len(result.step_times_s))
            self._study.tell(trial.number, state=OptunaState.PRUNED, skip_if_finished=True)
            return
        self._study.tell(trial.number, result.tokens_per_s_per_gpu, skip_if_finished=True)
