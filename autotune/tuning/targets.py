"""Targets: which training framework can run a plan, and the best measured plan that one can."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from autotune.errors import IllegalPlanError, InputError
from autotune.frameworks import launch_arguments, record_of, target_of, targets
from autotune.search.ranking import RankedPlan
from autotune.search.space import illegal_reason
from autotune.specs import ClusterSpec, FrameworkName, ModelSpec, Plan, Workload


def with_target(given: Mapping[str, object]) -> dict[str, object]:
    """The fields of a workload whose `target` may be NAME or NAME@VERSION: the version is written out, and the
    framework is the target's.

    Raises:
        UnknownNameError, InputError: see `target_of`; or a framework is named beside the target that is another one.
    """
    text = given.get("target")
    if text is None:
        return dict(given)
    target = target_of(str(text))
    framework, named = record_of(target.name).value, given.get("framework")
    if named is not None and named not in {framework, FrameworkName.TORCH.value}:
        raise InputError("framework", named, f"leave it out: {target} has {framework}'s habits")
    return {**given, "target": str(target), "framework": framework}


def refusal(target: str, model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan) -> str | None:
    """Why a framework cannot run a plan, or None if it can: by the rules of its kind, and by its export.

    Args:
        target: as `target_of` reads it.
        model, cluster, workload, plan: what is to run.
    """
    habits = workload.model_copy(update={"framework": record_of(target_of(target).name)})
    reason = illegal_reason(model, cluster, habits, plan)
    if reason is not None:
        return reason
    try:
        launch_arguments(target, model, cluster, workload, plan)
    except IllegalPlanError as error:
        return f"{target_of(target).name}: {error.allowed}"
    return None


def export_refusal(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Callable[[Plan], str | None] | None:
    """Why the workload's target has no words for a plan that its rules allow; None where there is no target."""
    if workload.target is None:
        return None
    return partial(refusal, workload.target, model, cluster, workload)


def frameworks_of(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, plans: Sequence[Plan], speeds: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Whether each framework runs the first plan, and else why not and which of the others, fastest first, it runs.

    Args:
        model, cluster, workload: of the plans; where the workload has a target, only that one is asked.
        plans: the best one first.
        speeds: tokens/s/GPU that were measured of them.

    Returns:
        For each framework `target` (with its version), `reason` (None where it runs the first plan), and the `plan`
        that it runs with its `tokens_per_s_per_gpu`; None where it runs none of them.
    """
    asked = (workload.target,) if workload.target else tuple(str(target_of(name)) for name in targets())
    found = []
    for target in asked:
        reasons = ((at, refusal(target, model, cluster, workload, plan)) for at, plan in enumerate(plans))
        first, at = None, None
        for index, reason in reasons:
            if index == 0:
                first = reason
            if reason is None:
                at = index
                break
        found.append({
            "target": target,
            "reason": first,
            "plan": None if at is None else plans[at].to_data(),
            "tokens_per_s_per_gpu": speeds[at] if at is not None and speeds else None,
        })  # fmt: skip
    return found


def runnable(
    target: str, model: ModelSpec, cluster: ClusterSpec, workload: Workload, ranking: Sequence[RankedPlan]
) -> Plan:
    """The fastest measured plan that a framework runs.

    Raises:
        IllegalPlanError: it runs none of them; says why not the first.
    """
    first = None
    for ranked in ranking:
        reason = refusal(target, model, cluster, workload, ranked.plan)
        if reason is None:
            return ranked.plan
        first = first or reason
    allowed = f"{target} runs none of the {len(ranking)} measured plans: {first}. Tune for it: --for {target}"
    raise IllegalPlanError("plan", ranking[0].plan.key, allowed)
