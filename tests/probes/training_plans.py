"""Tiny models and step requests for the tests of real training, and every legal plan on eight ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

from autotune.specs import Plan, StepRequest

RANKS = 8
TINY: dict[str, Any] = {
    "name": "tiny",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 64,
    "gated": True,
    "vocab": 64,
    "tied": False,
    "norm": "rmsnorm",
    "position": "rope",
}
WORKLOAD: dict[str, Any] = {"seq_len": 16, "global_batch": 8, "dtype": "fp32", "optimizer": "sgd"}


def step_request(plan: Plan, *, model: dict[str, Any] | None = None, **changes: Any) -> StepRequest:
    """Three steps of the tiny model, untraced; `changes` go into the workload where they belong, else the request."""
    workload = WORKLOAD | {key: changes.pop(key) for key in list(changes) if key in (*WORKLOAD, "grad_dtype")}
    request = {
        "model": TINY | (model or {}),
        "workload": workload,
        "plan": plan.to_data(),
        "warmup_steps": 2,
        "min_steps": 1,
        "max_steps": 1,
        "trace": False,
        "learning_rate": 1.0,
    }
    return StepRequest.from_data(request | changes)


def legal_plans() -> list[Plan]:
    """Every plan with tp, pp and dp in {1, 2, 4} on eight ranks, GPipe and 1F1B; where pp is 2 some interleaved.

    Replicas of one sequence a micro-batch where more would leave a pipeline or a replica without accumulation.
    """
    plans = []
    for tp, pp, dp in product((1, 2, 4), repeat=3):
        if tp * pp * dp != RANKS:
            continue
        degrees = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": 1 if dp == 4 or pp * dp == RANKS else 2}
        zero_stages = [stage for stage in range(4) if (dp > 1 or stage == 0) and (pp == 1 or stage != 2)]
        splits = [False, True] if tp > 1 else [False]
        for stage, recompute, split in product(zero_stages, ("none", "selective", "full"), splits):
            choices = {**degrees, "zero_stage": stage, "recompute": recompute, "sequence_parallel": split}
            schedules = [{"schedule": "1f1b"}] if pp == 1 else [{"schedule": "gpipe"}, {"schedule": "1f1b"}]
            if pp == 2 and recompute == "none":
                schedules.append({"schedule": "interleaved", "vpp": 2})
            plans += [Plan.from_data({**choices, **schedule}) for schedule in schedules]
    return plans
