"""`autotune tune`: the main job, on this machine or on the nodes of a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from autotune.cli import options, output
from autotune.cli.asking import asked_server, connect
from autotune.cli.inputs import Inputs, Program, read_inputs, read_program, read_program_inputs, read_space
from autotune.cli.options import option
from autotune.cli.tunings import print_tuning
from autotune.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autotune.client import Client
    from autotune.specs import ClusterSpec, ModelSpec, SamplerName, Tuning
    from autotune.specs.command import CommandOffer
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
    precision: options.Precision = None,
    framework: options.FrameworkName = None,
    kernels: options.Kernels = None,
    target: options.Target = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    micro_batch: options.MicroBatch = None,
    zero_stage: options.ZeroStage = None,
    recompute: options.RecomputeModes = None,
    sequence_parallel: options.SequenceParallel = None,
    schedule: options.Schedules = None,
    budget_gpu_s: Annotated[float | None, option("--budget-gpu-s", "SECONDS", "GPU-seconds to spend at most.")] = None,
    max_trials: Annotated[
        int | None, option("--max-trials", "N", "Trials at most. Default: 24 without a budget.")
    ] = None,
    min_gain: Annotated[
        float, option("--min-gain", "SHARE", "Stop when less than this is expected to be gained.")
    ] = 0.01,
    seed: options.Seed = 0,
    sampler: Annotated[
        str | None,
        option(
            "--sampler",
            "plan|tpe|gp|random|grid|rule",
            "What chooses the trials. Default: plan, ours; the others are for comparison and spend their budget.",
        ),
    ] = None,
    history: options.History = None,
    command: options.CommandName = None,
    cold: Annotated[bool, option("--cold", help="Start fresh ranks for each trial.")] = False,
    resume: Annotated[str | None, option("--resume", "ID", "Go on with an interrupted tuning.")] = None,
    nodes: Annotated[
        int | None, option("--nodes", "N", min=1, help="With --server: so many of the nodes. Default: all.")
    ] = None,
    follow: Annotated[
        bool, option("--follow/--no-follow", help="With --server: show what happens until the tuning has ended.")
    ] = True,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Measure collectives, layers and training steps on this machine and find the fastest plan.

    With no arguments: the smallest preset on this machine. Everything is stored; Ctrl-C or a crash loses at most the
    running trial, and `--resume ID` goes on. With `autotune --server URL tune` a fleet's nodes measure.
    """
    from autotune.specs import Budget
    from autotune.tuning.request import submit, tuning_of
    from autotune.wiring import open_store, require_local

    space = read_space(
        tp=tp, pp=pp, micro_batch=micro_batch, zero_stage=zero_stage, recompute=recompute,
        sequence_parallel=sequence_parallel, schedule=schedule,
    )  # fmt: skip
    if max_trials is None and budget_gpu_s is None and resume is None:
        max_trials = DEFAULT_MAX_TRIALS
    limits = Budget.from_data({"gpu_s": budget_gpu_s, "max_trials": max_trials, "min_gain": min_gain}, "budget")
    how: dict[str, Any] = {
        "space": space, "budget": limits, "seed": seed, "cold": cold, "sampler": _sampler(sampler),
    }  # fmt: skip
    question: dict[str, Any] = {
        "model": model, "cluster": cluster, "seq_len": seq_len, "global_batch": global_batch, "dtype": dtype,
        "precision": precision, "framework": framework, "kernels": kernels, "target": target,
    }  # fmt: skip
    if asked_server(db) is not None:
        for name, value in (("--resume", resume), ("--history", history)):
            if value is not None:
                raise InputError(name, value, "it goes with this machine only, not with --server")
        if command is not None:
            how["command"] = command
        return tune_there(question, how, nodes=nodes, follow=follow, as_json=as_json)
    if nodes is not None:
        raise InputError("--nodes", nodes, "it goes with --server only")
    program = read_program(command) if command is not None else None
    store = open_store(db)
    if resume is not None:
        given = (*question.values(), *space.to_data().values(), history, budget_gpu_s, max_trials, sampler)
        if any(value is not None for value in given):
            raise InputError("--resume", resume, "a tuning goes on with the inputs and the budget it was started with")
        tuning = store.tuning(resume)
    else:
        if program is None:
            inputs = read_inputs(**question, db=db)
        else:
            how["space"] = program.offer.narrowed(space)
            inputs = _program_inputs(program.offer, question, db)
        require_local(inputs.cluster)
        asked = tuning_of(inputs.model, inputs.cluster, inputs.workload, **how, history=history or "")
        tuning = submit(store, asked)
    return run_tuning(store, tuning, as_json=as_json, db=db, program=program)


def _program_inputs(offer: CommandOffer, question: dict[str, Any], db: str | None) -> Inputs:
    for name, flag in (
        ("framework", "framework"),
        ("kernels", "kernels"),
        ("precision", "precision"),
        ("target", "for"),
    ):
        if question[name] is not None:
            raise InputError(f"--{flag}", question[name], "with --command its file says that")
    given = {name: question[name] for name in ("seq_len", "global_batch", "dtype")}
    return read_program_inputs(offer, model=question["model"], cluster=question["cluster"], given=given, db=db)


def _sampler(name: str | None) -> SamplerName:
    from autotune.specs import SamplerName

    names = [item.value for item in SamplerName]
    if name is not None and name not in names:
        raise InputError("--sampler", name, "one of " + ", ".join(names))
    return SamplerName(name or SamplerName.PLAN)


def run_tuning(
    store: SqlStore, tuning: Tuning, *, as_json: bool, db: str | None, program: Program | None = None
) -> int:
    """Runs the tuning under a view and prints its answer."""
    from contextlib import closing

    from autotune.cli.tune_view import TuneView
    from autotune.specs import TuningState
    from autotune.tuning.report import tuning_answer
    from autotune.wiring import open_local

    console = output.error_console()
    workload = tuning.workload
    file = program.file if program is not None else None
    if workload.command:
        _require_same(tuning, file)
    console.print(
        f"Tuning {tuning.id}: {tuning.model.name} on {tuning.cluster.name} ({tuning.cluster.devices} devices), "
        f"sequence {workload.seq_len}, {workload.global_batch} sequences a step, {workload.dtype.value}"
        + (f"; {workload.command} trains" if workload.command else ""),
        soft_wrap=True,
    )
    try:
        with (
            TuneView(console, tuning, live=console.is_terminal and not as_json) as view,
            closing(open_local(store, tuning.cluster, view.on_progress, file)) as fleet,
        ):
            ended = fleet.run(tuning.id, view.on_event)
    except KeyboardInterrupt:
        again = f"autotune tune --resume {tuning.id}" + (f" --db {db}" if db else "")
        again += f" --command {file}" if file is not None else ""
        console.print(f"Interrupted; what was measured is kept. Go on with: {again}", soft_wrap=True)
        raise
    data = tuning_answer(store, ended)
    again = _own_command(data, tuning, file)
    output.tell(data, lambda: print_tuning(data, rows=FINAL_ROWS, again=again), as_json=as_json)
    sys.stdout.flush()
    return 0 if ended.state is TuningState.DONE else 1


def _require_same(tuning: Tuning, file: Path | None) -> None:
    """Refuses to go on with a program that is not the one that the tuning began with. Raises InputError."""
    from autotune.settings import read_settings
    from autotune.wiring import open_book

    try:
        open_book(read_settings(), file)(tuning.workload.command)
    except UnknownNameError as error:
        raise InputError("--command", file and str(file), f"the file of {tuning.workload.command}") from error


def _own_command(data: dict[str, object], tuning: Tuning, file: Path | None) -> str:
    """How to run the winner's step probe once more."""
    best = data["best"]
    if not isinstance(best, dict):
        return ""
    from autotune.frameworks import own_command
    from autotune.specs import Plan

    program = str(file) if file is not None else None
    return own_command(tuning.model, tuning.cluster, tuning.workload, Plan.from_data(best["plan"]), program)


# With a server its nodes measure; what happens is shown until it has ended.


def tune_there(
    question: dict[str, Any], how: dict[str, Any], *, nodes: int | None = None, follow: bool = True, as_json: bool
) -> int:
    """Submits a tuning to the server and, unless told not to, follows it to its end.

    Args:
        question: the model, cluster and workload as the options name them.
        how: space, budget and so on (Client.submit).
        nodes: so many of the cluster's.
        follow: show what happens.
        as_json: print the answer as JSON.
    """
    from autotune.specs.workload import read_kernels, read_precision
    from autotune.tuning.report import queue_text

    cluster = _cluster_there(question["cluster"])
    named = ("seq_len", "global_batch", "dtype", "framework", "target")
    workload = {name: question[name] for name in named if question[name] is not None}
    workload |= read_kernels(question["kernels"] or "") | read_precision(question["precision"] or "")
    with connect() as client:
        told = client.submit(_model_there(question["model"]), cluster, nodes=nodes, workload=workload, **how)
        console = output.error_console()
        joined = "" if told["created"] else " (somebody has asked for the same: you share it)"
        where = f", {queue_text(told['place'])}" if told["place"] else ""
        console.print(f"Tuning {told['tuning']} is {told['state']}{where}{joined}", soft_wrap=True)
        cold = bool(how.get("cold"))
        for line in _cautions(client, cluster if isinstance(cluster, str) else cluster.name, cold=cold):
            console.print(line, soft_wrap=True)
        if follow:
            return _follow(client, told["tuning"], as_json=as_json)
    if as_json:
        output.print_json(told)
    return 0


def _model_there(ref: str | None) -> str | ModelSpec:
    """A model for a request: a file is read here, since servers open none; a name is the server's."""
    from autotune.catalog import load_model, smallest

    if ref is None:
        return smallest().name
    return load_model(ref) if Path(ref).exists() else ref


def _cluster_there(ref: str | None) -> str | ClusterSpec:
    """A cluster for a request: a file is read here, a name is a pool of the server. Raises InputError without one."""
    from autotune.catalog import load_cluster

    if ref is None:
        raise InputError("--cluster", None, "name one of the server's clusters: autotune --server URL cluster list")
    return load_cluster(ref, lambda _: None) if Path(ref).exists() else ref


def _cautions(client: Client, pool: str, *, cold: bool) -> Iterator[str]:
    """What a user should know before a tuning begins."""
    if cold:
        yield "Cold: every trial starts its ranks anew, which costs many times the GPU-seconds of warm ranks"
    if not any(node["session"] and node["heartbeat_age_s"] <= node["lost_after_s"] for node in client.nodes(pool)):
        yield f"No node of pool {pool} lives: it waits until one does (autotune nodes list)"


def _follow(client: Client, tuning_id: str, *, as_json: bool) -> int:
    """Prints a tuning's events as they come, then its result. Ctrl-C leaves the tuning running."""
    from autotune.cli.tune_view import event_text

    console = output.error_console()
    try:
        for event in client.events(tuning_id):
            console.print(event_text(event), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"It goes on without you: autotune show {tuning_id}, autotune cancel {tuning_id}", soft_wrap=True)
        raise
    data = client.tuning(tuning_id)
    output.tell(data, lambda: print_tuning(data), as_json=as_json)
    return 0 if data["state"] == "done" else 1
