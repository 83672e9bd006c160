"""What `make box` shows: a tuning over two nodes through the API, and what tensor parallelism across the link costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from autotune.specs import Plan
from deploy.box.box import POOL, Box
from deploy.box.processes import BoxError

MODEL = "tiny-gpt"
"""The preset whose 8 heads can be split over the 8 ranks of two nodes."""

_ENDED = {"done", "failed", "cancelled"}
# Kept small: 8 ranks share this machine's cores, and a step takes about a second.
_SPACE = {"micro_batch": [4], "zero_stage": [0], "recompute": ["none"], "sequence_parallel": [False]}
_TRIALS = 6


def demonstrate(*, nodes: int, ranks: int, rate_mbit: float, keep: bool) -> None:
    """Brings a box up, tunes in it and prints what its slow link costs. Raises BoxError if any of that fails."""
    print(f"A box of {nodes} nodes x {ranks} ranks, each node on a link of {rate_mbit:g} Mbit/s: starting")
    started = time.monotonic()
    with Box(nodes=nodes, ranks=ranks, rate_mbit=rate_mbit) as box:
        print(f"up after {time.monotonic() - started:.0f} s: API {box.url}, nodes {', '.join(box.nodes)}")
        inside = [tp for tp in (1, 2, 4, 8) if tp <= ranks]
        print(f"\nTuning {MODEL} over all {nodes * ranks} ranks")
        found = _tune(box, {**_SPACE, "tp": [*inside, nodes * ranks], "pp": [1, 2]}, _TRIALS)
        print(f"\nFor comparison: TP over all {nodes * ranks} ranks, across the link")
        across = _tune(box, {**_SPACE, "tp": [nodes * ranks]}, 1)
        _print_table(list(_measured(found, across)), ranks)
        if keep:
            box.keep()
            _print_use(box)


def _tune(box: Box, space: dict[str, Any], trials: int) -> dict[str, Any]:
    """Submits a tuning, prints its events, and returns it when it is done."""
    request = {"model": MODEL, "cluster": POOL, "space": space, "budget": {"max_trials": trials}}
    tuning = box.ask("/tunings", request)["tuning"]
    told: set[object] = set()
    while True:
        data = box.ask(f"/tunings/{tuning}")
        for line in _news(data):
            if line not in told:
                print(line, flush=True)
                told.add(line)
        if data["state"] in _ENDED:
            break
        time.sleep(0.5)
    if data["best"] is None:
        raise BoxError(f"the tuning is {data['state']} without a plan: {data['stop_reason']}")
    return dict(data)


def _news(data: dict[str, Any]) -> Iterator[str]:
    for trial in data["trials"]:
        if trial["state"] != "running":
            name = f"trial {trial['number']} {Plan.from_data(trial['plan']).key}"
            step_s, failure = trial["step_time_s"], trial["failure"]
            yield f"  {name}: " + (f"step {step_s * 1e3:.0f} ms" if step_s else f"{trial['state']} {failure or ''}")
    yield f"  {data['state']} {data['stop_reason']}".rstrip()


def _measured(*tunings: dict[str, Any]) -> Iterator[tuple[Plan, dict[str, Any]]]:
    """Each plan's fastest trial."""
    best: dict[Plan, dict[str, Any]] = {}
    for trial in (trial for tuning in tunings for trial in tuning["trials"] if trial["tokens_per_s_per_gpu"]):
        plan = Plan.from_data(trial["plan"])
        if plan not in best or trial["tokens_per_s_per_gpu"] > best[plan]["tokens_per_s_per_gpu"]:
            best[plan] = trial
    yield from sorted(best.items(), key=lambda item: -item[1]["tokens_per_s_per_gpu"])


def _print_table(rows: list[tuple[Plan, dict[str, Any]]], ranks: int) -> None:
    print(f"\nMeasured\n  {'plan':40} {'TP':>14} {'tokens/s/GPU':>13} {'step':>9} {'T_comm':>9}")
    for plan, trial in rows:
        where = "across nodes" if plan.tp > ranks else "inside a node"
        times = f"{_milliseconds(trial['step_time_s'])} {_milliseconds(trial['t_comm_s'])}"
        print(f"  {plan.key:40} {where:>14} {trial['tokens_per_s_per_gpu']:13,.0f} {times}")
    speeds = {
        crossing: max(trial["tokens_per_s_per_gpu"] for plan, trial in rows if (plan.tp > ranks) is crossing)
        for crossing in (False, True)
    }
    print(
        f"\nTP inside a node is {speeds[False] / speeds[True]:.1f} times as fast as TP across the link (best of each)."
    )


def _milliseconds(time_s: float | None) -> str:
    """A time; one that was stopped early has no T_comm."""
    return f"{'-':>9}" if time_s is None else f"{time_s * 1e3:6.0f} ms"


def _print_use(box: Box) -> None:
    print(f"""
The box stays up. From this machine:
  export AUTOTUNE_SERVER={box.url} AUTOTUNE_API_KEY={box.key}
  autotune nodes
Logs: {box.processes.log_dir}
Remove it: make box-down""")
