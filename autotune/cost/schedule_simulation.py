"""Event simulation of pipeline schedules: the step time of unequal stages, which the closed forms only approximate.

A stage runs its work in a fixed order; a forward waits for the stage before, a backward for the stage after
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2; the orders are those of Megatron-LM's schedules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.specs import Schedule


@dataclass(frozen=True, slots=True)
class Task:
    """One forward or backward of one micro-batch through one chunk of a stage."""

    forward: bool
    micro_batch: int
    chunk: int


def order(schedule: Schedule, stage: int, pp: int, vpp: int, micro_batches: int) -> list[Task]:
    """What a stage does, in order. Interleaved needs micro-batches in whole groups of pp."""
    work = micro_batches * vpp
    ahead = [_task(True, i, pp, vpp) for i in range(work)]
    back = [_task(False, i, pp, vpp) for i in range(work)]
    if schedule is Schedule.GPIPE:
        return ahead + back
    warm_up = pp - stage - 1 if schedule is Schedule.ONE_F_ONE_B else 2 * (pp - stage - 1) + (vpp - 1) * pp
    warm_up = min(warm_up, work)
    steady = [task for pair in zip(ahead[warm_up:], back, strict=False) for task in pair]
    return ahead[:warm_up] + steady + back[work - warm_up :]


def _task(forward: bool, i: int, pp: int, vpp: int) -> Task:
    """The i-th forward (backward) of a rank: groups of pp micro-batches go through its chunks in turn."""
    group, within = divmod(i, pp * vpp)
    chunk, micro_batch = divmod(within, pp)
    return Task(forward, group * pp + micro_batch if vpp > 1 else i, (chunk if forward else vpp - 1 - chunk))


def simulated_s(
    schedule: Schedule,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    micro_batches: int,
    message_s: float = 0.0,
) -> float:
    """Seconds until the last backward is done.

    Args:
        schedule: of the pipeline.
        forward_s: of one micro-batch by stage and chunk; chunk c of stage s is part c * stages + s of the model.
        backward_s: the same of the backward pass.
        micro_batches: m.
        message_s: of sending a micro-batch to a neighbour; the sender goes on at once.
    """
    pp, vpp = len(forward_s), len(forward_s[0])
    orders = [order(schedule, stage, pp, vpp, micro_batches) for stage in range(pp)]
    done: dict[tuple[bool, int, int], float] = {}  # (forward, micro-batch, part of the model) -> when
    at, clock = [0] * pp, [0.0] * pp
    left = sum(len(tasks) for tasks in orders)
    while left:
        before = left
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                task = orders[stage][at[stage]]
                ready = _ready(task, task.chunk * pp + stage, pp * vpp, done, message_s)
                if ready is None:
                    break
                took = (forward_s if task.forward else backward_s)[stage][task.chunk]
                clock[stage] = max(clock[stage], ready) + took
                done[task.forward, task.micro_batch, task.chunk * pp + stage] = clock[stage]
                at[stage] += 1
                left -= 1
        assert left < before, "the orders of the stages wait for each other"
    return max(clock)


def _ready(
    task: Task, part: int, parts: int, done: dict[tuple[bool, int, int], float], message_s: float
) -> float | None:
    """When what a task waits for has arrived; None while it is not done."""
    if task.forward:
        if part == 0:
            return 0.0
        found = done.get((True, task.micro_batch, part - 1))
    elif part == parts - 1:
        return done.get((True, task.micro_batch, part))
    else:
        found = done.get((False, task.micro_batch, part + 1))
    return None if found is None else found + message_s
