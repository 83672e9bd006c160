"""Run on ranks by the tests of the step probe: checks that need to look inside a rank."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_plans import step_request

from autotune.specs import Plan
from probes import step
from probes.context import RankContext
from probes.launch import memory
from probes.ledger import TensorAccount
from probes.mesh import PlanGroups, trial_groups
from probes.timing import align
from probes.training import Training

SETTLING_ROUNDS = 50


def run(request: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """Calls the check named in the request."""
    checks = {"repeat": repeat, "live": live_bytes, "account": account}
    return checks[request["check"]](request, context)


def repeat(request: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """Runs each plan in turn, `times` in all; what the process holds after the first round and at the end."""
    plans = [Plan.from_data(plan) for plan in request["plans"]]
    before = len(dist.distributed_c10d._world.pg_map)
    held = []
    for number in range(request["times"]):
        step.run(step_request(plans[number % len(plans)], optimizer="adamw"), context)
        held.append((len(os.listdir("/proc/self/fd")), memory.held_bytes(context.device)))
    settled = held[len(plans) * 2 - 1]
    return {
        "groups": [before, len(dist.distributed_c10d._world.pg_map)],
        "descriptors": [settled[0], held[-1][0]],
        "resident_bytes": [settled[1], held[-1][1]],
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def live_bytes(request: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """What lives after the gradients are complete and before the optimizer runs, and after whole steps."""
    plan = Plan.from_data(request["plan"])
    asked = step_request(plan, optimizer="adamw", **request["changes"])
    counted = TensorAccount()
    counted.open()
    try:
        with trial_groups(context.device) as groups:
            axes = PlanGroups.make(plan, asked.model, groups, single_dp=False)
            training = Training(asked, context.rank, context.device, axes)
            built = settled_bytes(counted, context)
            total = training._in_turn(*training.batch(0))
            with_gradients = settled_bytes(counted, context) - total.nbytes
            for parameter in training.parameters:
                parameter.grad = None
            for number in range(2):
                training.step(*training.batch(number))
            trained = settled_bytes(counted, context) - total.nbytes
    finally:
        counted.close()
    return {"built": built, "with_gradients": with_gradients, "trained": trained}


def settled_bytes(counted: TensorAccount, context: RankContext) -> int:
    """The least that lives over some rounds: gloo's threads let go of a collective's tensors a little after its end."""
    least = counted.live_bytes
    for _ in range(SETTLING_ROUNDS):
        align(context.device)
        gc.collect()
        least = min(least, counted.live_bytes)
    return least


def account(request: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """A known course of allocations: live and peak bytes after each move."""
    older = torch.ones(1000)
    counted = TensorAccount()
    counted.open()
    course = []
    try:
        first = torch.ones(1000)
        course.append((counted.live_bytes, counted.peak_bytes))
        view = first.view(10, 100)
        older.add_(1.0)
        course.append((counted.live_bytes, counted.peak_bytes))
        second = view * 2.0
        del first, view
        course.append((counted.live_bytes, counted.peak_bytes))
        second.untyped_storage().resize_(0)
        course.append((counted.live_bytes, counted.peak_bytes))
        second.untyped_storage().resize_(400)
        course.append((counted.live_bytes, counted.peak_bytes))
        del second, older
        course.append((counted.live_bytes, counted.peak_bytes))
    finally:
        counted.close()
    torch.ones(10)
    return {"course": [*course, (counted.live_bytes, counted.peak_bytes)]}
