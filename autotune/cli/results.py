"""`autotune best`, `autotune show` and `autotune history`: what the database knows."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.export import LaunchArguments
    from autotune.search.ranking import Best
    from autotune.specs import Plan, Trial, Tuning
    from storage import SqlStore


def best(
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    tuning: Annotated[
        str | None,
        typer.Option(
            "--tuning",
            metavar="TUNING",
            help="A tuning's id. Default, without a model or cluster: the newest that measured something.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--for", metavar="TARGET", help="Give the plan as launch arguments: megatron, deepspeed, ..."),
    ] = None,
    settle: Annotated[
        bool,
        typer.Option("--settle", help="Where nothing is known exactly: run the probes and trials that settle it."),
    ] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int | None:
    """The best-known plan for a model on a cluster, or of a tuning: its evidence, the runner-up, how to launch it.

    Where nothing was measured for exactly that question: the nearest that was, how far it is, what it implies as an
    estimate, and which probes would settle it at what cost.
    """
    from autotune.cli import remote

    asked = (model, cluster, seq_len, global_batch, dtype)
    if remote.asked_server():
        query = dict(zip(("model", "cluster", "seq_len", "global_batch", "dtype"), asked, strict=True))
        return remote.print_best({**query, "tuning": tuning, "for": target}, settle=settle, as_json=as_json)
    if any(value is not None for value in asked):
        if tuning is not None:
            raise InputError("--tuning", tuning, "give a tuning or a question (--model, --cluster, ...), not both")
        from autotune.cli.inputs import read_inputs
        from autotune.cli.known import answer_question

        inputs = read_inputs(
            model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, db=db
        )
        return answer_question(inputs, target=target, settle=settle, db=db, as_json=as_json)
    if settle:
        raise InputError("--settle", True, "only a question (--model, --cluster, ...) can be settled")
    _best_of_tuning(tuning, target, db=db, as_json=as_json)
    return None


def _best_of_tuning(tuning: str | None, target: str | None, *, db: str | None, as_json: bool) -> None:
    from autotune.cli.database import open_to_read
    from autotune.tuning.report import best_answer

    with open_to_read(db) as store:
        asked, found = _find_best(store, tuning)
        answer = best_answer(store, asked, found)
        newest = store.tunings(1)[0]
    if tuning is None:
        output.print_newer(newest.id, newest.state, asked.id)
    launch = _launch(asked, found.ranked.plan, target)
    answer["launch"] = asdict(launch) if launch else None
    if as_json:
        output.print_json(answer)
    else:
        _print_best(answer, found.ranked.plan, launch)


def _find_best(store: SqlStore, tuning_id: str | None) -> tuple[Tuning, Best]:
    """The tuning that was named, or the newest with a complete trial, and its best plan."""
    from autotune.search.ranking import best_of

    for tuning in [store.tuning(tuning_id)] if tuning_id is not None else store.tunings():
        found = best_of(store.trials(tuning.id), tuning.cluster)
        if found is not None:
            return tuning, found
    if tuning_id is None:
        live = next((f"{tuning.id} is {tuning.state}" for tuning in store.tunings(1) if not tuning.state.ended), "")
        then = f"{live}, see autotune show" if live else "run autotune tune"
        raise InputError("--tuning", None, f"no tuning in the database has a complete trial yet: {then}")
    raise InputError("tuning", tuning_id, "it has no complete trial yet: see autotune show")


def _launch(tuning: Tuning, plan: Plan, target: str | None) -> LaunchArguments | None:
    if target is None:
        return None
    from autotune.export import launch_arguments

    return launch_arguments(target, tuning.model, tuning.cluster, tuning.workload, plan)


def _print_best(answer: dict[str, Any], plan: Plan, launch: LaunchArguments | None) -> None:
    table = output.table(
        f"Best plan of tuning {answer['tuning']}: {answer['model']} on {answer['cluster']}", "<what", "<measured"
    )
    found, second, fingerprint = answer["best"], answer["runner_up"], answer["fingerprint"]
    rows = [
        ("plan", plan.key),
        ("tokens/s/GPU", _speed(found)),
        ("step", output.seconds_text(found["step_time_s"])),
        ("T_calc", output.seconds_text(found["t_calc_s"])),
        (
            "T_comm",
            f"{output.seconds_text(found['t_comm_s'])}, {output.seconds_text(found['t_comm_exposed_s'])} exposed",
        ),
        ("mu = T_comm / T_calc", output.count_text(found["mu"])),
        ("peak memory of a rank", f"{output.bytes_text(found['peak_memory_bytes'])} ({found['memory_source']})"),
        ("repeats", str(found["repeats"])),
        ("measured at", f"{answer['measured_at'][:19].replace('T', ' ')} UTC"),
    ]
    if fingerprint:
        where = f"{fingerprint['hostname']}, {fingerprint['device_count']} x {fingerprint['device_name']}"
        rows.append(("on", f"{where}, torch {fingerprint['torch']} (fingerprint {answer['fingerprint_key']})"))
    rows.append(("runner-up", f"{output.plan_text(second['plan'])}: {_speed(second)}" if second else "none"))
    for name, value in rows:
        table.add_row(name, value)
    console = output.console()
    console.print(table)
    output.print_under_way(answer)
    for line in [*filter(None, [found["preferred_because"]]), *found["why"]]:
        console.print(line, soft_wrap=True)
    if launch is not None:
        output.print_launch(launch)
        return
    from autotune.export import targets

    console.print("Launch arguments: add --for " + "|".join(targets()))


def _speed(figures: dict[str, Any]) -> str:
    low, high = figures["interval"]
    return (
        f"{output.count_text(figures['tokens_per_s_per_gpu'])} "
        f"(95 % interval {output.count_text(low)} to {output.count_text(high)}, {output.runs_text(figures['repeats'])})"
    )


def show(tuning: options.TuningId, db: options.Database = None, as_json: options.AsJson = False) -> None:
    """One tuning: its request, where it stands, and every trial, measured beside estimated."""
    from autotune.cli import remote

    if remote.asked_server():
        with remote.connect() as client:
            remote.print_tuning(client.tuning(tuning), as_json=as_json)
        return
    from autotune.cli.database import open_to_read
    from autotune.tuning.report import tuning_data

    with open_to_read(db) as store:
        found = store.tuning(tuning)
        trials = store.trials(found.id)
        profile = store.profile(found.cluster.key)
    data = tuning_data(found, trials, profile)
    if as_json:
        output.print_json(data | {"request": found.to_data()})
    else:
        _print_tuning(found, trials, data)


def _print_tuning(tuning: Tuning, trials: Sequence[Trial], data: dict[str, Any]) -> None:
    from autotune.cli.explain_view import print_best_reasons
    from autotune.cli.tune_view import final_table

    workload, console = tuning.workload, output.console()
    table = output.table(f"Tuning {tuning.id}", "<what", "<value")
    for name, value in (
        ("model", tuning.model.name),
        ("cluster", f"{tuning.cluster.name} ({tuning.cluster.devices} devices)"),
        ("workload", f"sequence {workload.seq_len}, {workload.global_batch} sequences a step, {workload.dtype.value}"),
        ("state", " ".join(filter(None, (tuning.state.value, tuning.stop_reason, tuning.message)))),
        ("GPU-seconds spent", f"{tuning.gpu_s_spent:.1f}"),
        ("sampler", tuning.sampler.value),
        ("created", f"{tuning.created_at:%Y-%m-%d %H:%M:%S} UTC"),
    ):
        table.add_row(name, value)
    console.print(table)
    if trials:
        console.print(final_table(trials, rows=None))
    if data["best"]:
        print_best_reasons(console, data)


def history(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="Tunings at most, newest first.")] = 20,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """The newest tunings and the best plan of each."""
    from autotune.cli import remote

    if remote.asked_server():
        remote.print_history(limit, as_json=as_json)
        return
    from autotune.cli.database import open_to_read
    from autotune.tuning.report import history_data

    with open_to_read(db) as store:
        rows = [history_data(tuning, store.trials(tuning.id)) for tuning in store.tunings(limit)]
    if as_json:
        output.print_json({"tunings": rows})
    else:
        output.print_history(rows)
