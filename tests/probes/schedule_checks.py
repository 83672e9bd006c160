"""Run on ranks: what each stage of a real pipeline does, in which order and how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from training_plans import step_request

from autotune.specs import Plan
from probes.context import RankContext
from probes.mesh import PlanGroups, trial_groups
from probes.timing import align
from probes.training import Training

Entry = tuple[bool, int, int, float, float]
"""Forward?, micro-batch, chunk, start and end on the machine's monotonic clock, which all its processes share."""


def run(request: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """Trains `steps` steps under the plan, and lists what this rank's stages did in each."""
    plan = Plan.from_data(request["plan"])
    asked = step_request(plan, model=request.get("model"), **request.get("workload", {}))
    steps: list[list[Entry]] = []
    with trial_groups(context.device) as groups:
        axes = PlanGroups.make(plan, asked.model, groups, single_dp=False)
        training = Training(asked, context.rank, context.device, axes)
        entries: list[Entry] = []
        for chunk, stage in enumerate(_stages(training.schedule)):
            stage.forward_one_chunk = _watched(stage.forward_one_chunk, entries, True, chunk)
            stage.backward_one_chunk = _watched(stage.backward_one_chunk, entries, False, chunk)
        for number in range(request["steps"]):
            align(context.device)
            training.step(*training.batch(number))
            steps.append(list(entries))
            entries.clear()
        del training
    return {"rank": context.rank, "steps": steps}


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _watched(call: Callable[..., Any], entries: list[Entry], forward: bool, chunk: int) -> Callable[..., Any]:
    def watched(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        start_s = time.monotonic()
        try:
            return call(micro_batch, *args, **kwargs)
        finally:
            entries.append((forward, micro_batch, chunk, start_s, time.monotonic()))

    return watched
