"""`autotune tune`: the main job on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.specs import SamplerName, Tuning
    from storage import SqlStore

# Enough to try each kind of plan on a small machine in a few minutes; a bigger cluster's user sets a budget.
DEFAULT_MAX_TRIALS = 24
FINAL_ROWS = 12


def tune(
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    micro_batch: options.MicroBatch = None,
    zero_stage: options.ZeroStage = None,
    recompute: options.RecomputeModes = None,
    sequence_parallel: options.SequenceParallel = None,
    schedule: options.Schedules = None,
    budget_gpu_s: Annotated[
        float | None, typer.Option("--budget-gpu-s", metavar="SECONDS", help="GPU-seconds to spend at most.")
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option("--max-trials", metavar="N", help="Trials at most. Default: 24 without a budget."),
    ] = None,
    min_gain: Annotated[
        float, typer.Option("--min-gain", metavar="SHARE", help="Stop when less than this is expected to be gained.")
    ] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and data.")] = 0,
    sampler: Annotated[
        str | None,
        typer.Option(
            "--sampler",
            metavar="plan|tpe|gp|random|grid|rule",
            help="What chooses the trials. Default: plan, ours; the others are for comparison and spend their budget.",
        ),
    ] = None,
    history: options.History = None,
    cold: Annotated[bool, typer.Option("--cold", help="Start fresh ranks for each trial.")] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="ID", help="Go on with an interrupted tuning.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, metavar="N", help="With --server: so many of the nodes. Default: all."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="With --server: show what happens until the tuning has ended.")
    ] = True,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Measure collectives, layers and training steps on this machine and find the fastest plan.

    With no arguments: the smallest preset on this machine. Everything is stored; Ctrl-C or a crash loses at most the
    running trial, and `--resume ID` goes on. With `autotune --server URL tune` a fleet's nodes measure.
    """
    from autotune.cli import remote
    from autotune.cli.asking import asked_server
    from autotune.cli.inputs import read_inputs, read_space
    from autotune.specs import Budget
    from autotune.tuning.request import submit, tuning_of
    from autotune.wiring import open_store, require_local

    chosen = _sampler(sampler)
    space = read_space(
        tp=tp, pp=pp, micro_batch=micro_batch, zero_stage=zero_stage, recompute=recompute,
        sequence_parallel=sequence_parallel, schedule=schedule,
    )  # fmt: skip
    if max_trials is None and budget_gpu_s is None and resume is None:
        max_trials = DEFAULT_MAX_TRIALS
    limits = Budget.from_data({"gpu_s": budget_gpu_s, "max_trials": max_trials, "min_gain": min_gain}, "budget")
    if asked_server():
        for name, value in (("--resume", resume), ("--history", history), ("--db", db)):
            if value is not None:
                raise InputError(name, value, "it goes with this machine only, not with --server")
        return remote.tune(
            model=model, cluster=cluster, nodes=nodes,
            workload={"seq_len": seq_len, "global_batch": global_batch, "dtype": dtype},
            space=space, budget=limits, seed=seed, cold=cold, sampler=chosen, follow=follow, as_json=as_json,
        )  # fmt: skip
    if nodes is not None:
        raise InputError("--nodes", nodes, "it goes with --server only")
    store = open_store(db)
    if resume is not None:
        given = (model, cluster, seq_len, global_batch, dtype, tp, pp, micro_batch, zero_stage, recompute, history)
        if any(value is not None for value in (*given, sequence_parallel, schedule, budget_gpu_s, max_trials, sampler)):
            raise InputError("--resume", resume, "a tuning goes on with the inputs and the budget it was started with")
        tuning = store.tuning(resume)
    else:
        inputs = read_inputs(
            model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, db=db
        )
        require_local(inputs.cluster)
        asked = tuning_of(
            inputs.model,
            inputs.cluster,
            inputs.workload,
            space=space,
            budget=limits,
            seed=seed,
            cold=cold,
            sampler=chosen,
            history=history or "",
        )
        tuning = submit(store, asked)
    return run_tuning(store, tuning, as_json=as_json, db=db)


def _sampler(name: str | None) -> SamplerName:
    from autotune.specs import SamplerName

    names = [item.value for item in SamplerName]
    if name is not None and name not in names:
        raise InputError("--sampler", name, "one of " + ", ".join(names))
    return SamplerName(name or SamplerName.PLAN)


def run_tuning(store: SqlStore, tuning: Tuning, *, as_json: bool, db: str | None) -> int:
    """Runs the tuning under a view and prints its answer."""
    from contextlib import closing

    from autotune.cli.tune_view import TuneView
    from autotune.cli.tunings import print_tuning
    from autotune.specs import TuningState
    from autotune.tuning.report import tuning_answer
    from autotune.wiring import open_local

    console = output.error_console()
    workload = tuning.workload
    console.print(
        f"Tuning {tuning.id}: {tuning.model.name} on {tuning.cluster.name} ({tuning.cluster.devices} devices), "
        f"sequence {workload.seq_len}, {workload.global_batch} sequences a step, {workload.dtype.value}",
        soft_wrap=True,
    )
    try:
        with (
            TuneView(console, tuning, live=console.is_terminal and not as_json) as view,
            closing(open_local(store, tuning.cluster, view.on_progress)) as fleet,
        ):
            ended = fleet.run(tuning.id, view.on_event)
    except KeyboardInterrupt:
        again = f"autotune tune --resume {tuning.id}" + (f" --db {db}" if db else "")
        console.print(f"Interrupted; what was measured is kept. Go on with: {again}", soft_wrap=True)
        raise
    data = tuning_answer(store, ended)
    if as_json:
        output.print_json(data)
    else:
        print_tuning(data, rows=FINAL_ROWS, again=_own_command(data, tuning))
    sys.stdout.flush()
    return 0 if ended.state is TuningState.DONE else 1


def _own_command(data: dict[str, object], tuning: Tuning) -> str:
    """How to run the winner's step probe once more."""
    best = data["best"]
    if not isinstance(best, dict):
        return ""
    from autotune.export import own_command
    from autotune.specs import Plan

    return own_command(tuning.model, tuning.cluster, tuning.workload, Plan.from_data(best["plan"]))
