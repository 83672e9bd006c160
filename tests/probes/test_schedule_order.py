"""The simulated schedules against real pipelines on gloo ranks: each stage works in the order that is simulated."""

from __future__ import annotations

from typing import Any

import pytest
from local_ranks import InsideProber

from autotune.cost.pipeline import Task, order
from autotune.specs import Plan, Schedule


def entries(four: InsideProber, plan: Plan, micro_batches: int) -> dict[int, list[list[Any]]]:
    """What each rank did in one step."""
    workload = {"global_batch": plan.dp * plan.micro_batch * micro_batches}
    reports = four.check("schedule_checks", plan=plan.to_data(), workload=workload, steps=1)
    return {rank: report["steps"][0] for rank, report in reports.items()}


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "micro_batches"),
    [
        (Schedule.GPIPE, 4, 1, 6),
        (Schedule.ONE_F_ONE_B, 4, 1, 4),
        (Schedule.ONE_F_ONE_B, 4, 1, 7),
        (Schedule.ONE_F_ONE_B, 2, 1, 5),
        (Schedule.INTERLEAVED, 2, 2, 4),
        (Schedule.INTERLEAVED, 2, 2, 8),
    ],
)
def test_stages_work_in_the_simulated_order(
    four: InsideProber, schedule: Schedule, pp: int, vpp: int, micro_batches: int
) -> None:
    plan = Plan(pp=pp, dp=4 // pp, vpp=vpp, schedule=schedule)
    found = entries(four, plan, micro_batches)
    for rank, done in found.items():
        stage = rank // plan.dp
        expected = order(schedule, stage, pp, vpp, micro_batches)
        assert [Task(forward, number, chunk) for forward, number, chunk, _, _ in done] == expected


def test_no_work_starts_before_what_it_needs_is_done(four: InsideProber) -> None:
    """On one clock: a forward after that of the stage before, a backward after that of the stage behind."""
    found = entries(four, Plan(pp=4, dp=1), 6)
    started = {(f, m, stage): start for stage, done in found.items() for f, m, _, start, _ in done}
    ended = {(f, m, stage): end for stage, done in found.items() for f, m, _, _, end in done}
    for (forward, number, stage), start in started.items():
        before = stage - 1 if forward else stage + 1
        if 0 <= before < 4:
            assert start >= ended[forward, number, before]
