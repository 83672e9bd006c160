"""The command line as a client: what the commands do where --server (or $AUTOTUNE_SERVER) names one.

`asked_server` is asked first by every command in ASKABLE; `use_server` refuses the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli import output
from autotune.errors import InputError, MissingMeasurementError
from autotune.settings import read_settings

if TYPE_CHECKING:
    from autotune.client import Client
    from autotune.specs import Budget, ClusterSpec, ModelSpec, SamplerName, Space, TuningEvent

_server: ContextVar[str] = ContextVar("server", default="")


ASKABLE = frozenset({"tune", "show", "history", "best", "plan", "cancel", "nodes", "models", "cluster"})

LOCAL_RECORDS = frozenset({"known", "export", "regress", "import", "imports", "db", "estimate"})
"""Commands that answer from records, so that somebody who works with a server may take this machine's for its."""


def use_server(url: str | None, command: str) -> None:
    """Notes the server of this command line; None takes the settings', where the command can be asked of one.

    Raises:
        InputError: a server is named, and the command works on this machine only.
    """
    if url is not None and command not in ASKABLE:
        raise InputError("--server", url, f"`autotune {command}` works on this machine only: leave it out")
    default = read_settings().server
    if url is None and default and command in LOCAL_RECORDS:
        output.error_console().print(
            f"`autotune {command}` asks this machine's database, not $AUTOTUNE_SERVER", soft_wrap=True
        )
    _server.set((default if command in ASKABLE else "") if url is None else url)


def asked_server() -> str | None:
    """The server to ask; None for this machine."""
    return _server.get() or None


def connect() -> closing[Client]:
    """The client of the named server. Raises ServerError and InputError."""
    from autotune.client import Client

    url = asked_server()
    if url is None:
        raise InputError("--server", None, "this command asks a server: name it, or set $AUTOTUNE_SERVER")
    return closing(Client(url, read_settings().api_key))


def model_of(ref: str | None) -> str | ModelSpec:
    """A model for a request: a file is read here, since servers open none; a name is the server's."""
    from autotune.catalog import load_model, smallest

    if ref is None:
        return smallest().name
    return load_model(ref) if Path(ref).exists() else ref


def cluster_of(ref: str | None) -> str | ClusterSpec:
    """A cluster for a request: a file is read here, a name is a pool of the server. Raises InputError without one."""
    from autotune.catalog import load_cluster

    if ref is None:
        raise InputError("--cluster", None, "name one of the server's clusters: autotune --server URL cluster list")
    return load_cluster(ref, lambda _: None) if Path(ref).exists() else ref


def tune(
    *,
    model: str | None,
    cluster: str | None,
    nodes: int | None,
    workload: dict[str, Any],
    space: Space,
    budget: Budget,
    seed: int,
    cold: bool,
    sampler: SamplerName,
    follow: bool,
    as_json: bool,
) -> int:
    """Submits a tuning and, unless told not to, follows it to its end."""
    asked = cluster_of(cluster)
    with connect() as client:
        told = client.submit(
            model_of(model), asked, nodes=nodes, workload=_given(workload), space=space, budget=budget,
            seed=seed, cold=cold, sampler=sampler,
        )  # fmt: skip
        console = output.error_console()
        joined = "" if told["created"] else " (somebody has asked for the same: you share it)"
        console.print(f"Tuning {told['tuning']} is {told['state']}{joined}", soft_wrap=True)
        for line in _cautions(client, asked if isinstance(asked, str) else asked.name, cold=cold):
            console.print(line, soft_wrap=True)
        if follow:
            return follow_tuning(client, told["tuning"], as_json=as_json)
    if as_json:
        output.print_json(told)
    return 0


def _cautions(client: Client, pool: str, *, cold: bool) -> Iterator[str]:
    """What whoever has asked for a tuning should know before it begins."""
    from autotune.fleet.eligibility import LOST_AFTER_S

    if cold:
        yield "Cold: every trial starts its ranks anew, which costs many times the GPU-seconds of warm ranks"
    if not any(node["session"] and node["heartbeat_age_s"] <= LOST_AFTER_S for node in client.nodes(pool)):
        yield f"No node of pool {pool} lives: it waits until one does (autotune nodes list)"


def follow_tuning(client: Client, tuning_id: str, *, as_json: bool) -> int:
    """Prints a tuning's events as they come, then its result. Ctrl-C leaves the tuning running."""
    console = output.error_console()
    try:
        for event in client.events(tuning_id):
            console.print(event_text(event), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"It goes on without you: autotune show {tuning_id}, autotune cancel {tuning_id}", soft_wrap=True)
        raise
    data = client.tuning(tuning_id)
    print_tuning(data, as_json=as_json)
    return 0 if data["state"] == "done" else 1


def event_text(event: TuningEvent) -> str:
    """One event in one line."""
    from autotune.specs import EventKind

    data = event.data
    match event.kind:
        case EventKind.STATE:
            return ": ".join(filter(None, (data["state"], data["stop_reason"] or data["message"])))
        case EventKind.TRIAL_STARTED:
            return f"trial {data['number']} {data['plan_key']} is queued"
        case EventKind.TRIAL_ENDED:
            return f"trial {data['number']} {data['plan_key']}: {_ended(data)}"
        case EventKind.PROBE_ENDED:
            return f"probe {data['request']['kind']}: {_failed(data) or 'ok'} ({data['wall_s']:.1f} s)"
        case EventKind.JOB_GRANTED:
            warm = ", warm" if data["warm"] else ""
            return f"{data['probe']} probe on {', '.join(data['nodes'])} (attempt {data['attempt']}{warm})"
        case EventKind.JOB_RETRIED:
            return f"tried again elsewhere: {_failed(data)}"


def _ended(data: dict[str, Any]) -> str:
    reading = data.get("reading")
    if reading is None:
        return _failed(data)
    pruned = ", stopped early: slower than the best" if reading["pruned"] else ""
    speed, step = output.count_text(reading["tokens_per_s_per_gpu"]), output.seconds_text(reading["step_time_s"])
    return f"{speed} tokens/s/GPU, step {step}{pruned}"


def _failed(data: dict[str, Any]) -> str:
    failure = data.get("failure")
    if failure is None:
        return ""
    where = f" on rank {failure['rank']}" if failure["rank"] is not None else ""
    return f"failed, {failure['kind']}{where}: {failure['message']}"


def print_tuning(data: dict[str, Any], *, as_json: bool) -> None:
    """A tuning as the server tells it."""
    if as_json:
        output.print_json(data)
        return
    from autotune.cli.explain_view import print_best_reasons

    console, asked = output.console(), data["request"]
    if data["trials"]:
        console.print(trial_table(data["trials"]))
    console.print(
        f"Tuning {data['tuning']} of {asked['model']['name']} on {asked['cluster']['name']} is {data['state']}: "
        f"{data['stop_reason'] or asked['message'] or 'under way'}. {data['gpu_s_spent']:.0f} GPU-seconds spent.",
        soft_wrap=True,
    )
    best = data["best"]
    if best is None:
        return
    low, high = (output.count_text(value) for value in best["interval"])
    console.print(f"\nBest plan: {output.plan_text(best['plan'])}", style="bold")
    console.print(
        f"  {output.count_text(best['tokens_per_s_per_gpu'])} tokens/s/GPU (95 % interval {low} to {high}, "
        f"{output.runs_text(best['repeats'])}), step {output.seconds_text(best['step_time_s'])}",
        soft_wrap=True,
    )
    print_best_reasons(console, data)
    console.print(f"\nLaunch arguments:  autotune best --tuning {data['tuning']} --for megatron", soft_wrap=True)


def trial_table(rows: list[dict[str, Any]]) -> Any:
    """Trials, measured beside estimated; the fastest first."""
    table = output.table(
        "Trials (measured | estimated)",
        "#", "<plan", "<state", "tokens/s/GPU", "est.", "step", "T_calc", "T_comm", "exposed", "mu", "peak mem", "est.",
    )  # fmt: skip
    for row in sorted(rows, key=lambda row: -(row["tokens_per_s_per_gpu"] or 0.0)):
        told, failure = row["estimate"] or {}, row["failure"]
        table.add_row(
            str(row["number"]), output.plan_text(row["plan"]), failure["kind"] if failure else row["state"],
            output.count_text(row["tokens_per_s_per_gpu"]), output.count_text(told.get("tokens_per_s_per_gpu")),
            *(output.seconds_text(row[name]) for name in ("step_time_s", "t_calc_s", "t_comm_s", "t_comm_exposed_s")),
            output.count_text(row["mu"]), output.bytes_text(row["peak_allocated_bytes"]),
            output.bytes_text(told.get("peak_memory_bytes")),
        )  # fmt: skip
    return table


def print_best(query: dict[str, Any], *, settle: bool, as_json: bool) -> int:
    """What the server knows of a question, or the best plan of a tuning; settles what is not known where asked to."""
    from autotune.specs import TuningState

    if query["tuning"] is not None and query["model"] is not None:
        raise InputError("--tuning", query["tuning"], "give a tuning or a question (--model, --cluster, ...), not both")
    with connect() as client:
        data = client.best(**query)
        if "state" in data and query["tuning"] is None:
            for newest in client.tunings(limit=1):
                output.print_newer(newest["tuning"], TuningState(newest["state"]), data["tuning"])
    if settle and data.get("known") is None:
        if query["model"] is None or query["cluster"] is None:
            raise InputError("--settle", True, "only a question (--model, --cluster, ...) can be settled")
        return settle_there(query, as_json=as_json)
    if as_json:
        output.print_json(data)
    elif "known" in data:
        _print_known(data)
    else:
        best = data["best"]
        output.console().print(
            f"Best plan of tuning {data['tuning']}, {data['model']} on {data['cluster']}: "
            f"{output.plan_text(best['plan'])}, {output.count_text(best['tokens_per_s_per_gpu'])} tokens/s/GPU "
            f"({output.runs_text(best['repeats'])})",
            soft_wrap=True,
        )
        output.print_under_way(data)
    if data["launch"] is not None and not as_json:
        from autotune.export import LaunchArguments

        output.print_launch(LaunchArguments(**data["launch"]))
    answered = data.get("best") or data.get("known") or data.get("carried") or data.get("tuning")
    return 0 if answered else MissingMeasurementError.exit_code


def settle_there(query: dict[str, Any], *, as_json: bool) -> int:
    """A tuning that stops when little is expected to be gained, on the server's nodes."""
    from autotune.knowledge.settling import SETTLE_GAIN, TRIALS
    from autotune.specs import Budget, SamplerName, Space

    workload = {name: query[name] for name in ("seq_len", "global_batch", "dtype")}
    return tune(
        model=query["model"], cluster=query["cluster"], nodes=None, workload=workload, space=Space(),
        budget=Budget(max_trials=2 * TRIALS, min_gain=SETTLE_GAIN), seed=0, cold=False, sampler=SamplerName.PLAN,
        follow=True, as_json=as_json,
    )  # fmt: skip


def _print_known(data: dict[str, Any]) -> None:
    console = output.console()
    known, carried, settle = data["known"], data["carried"], data["settle"]
    if known is not None:
        low, high = (output.count_text(value) for value in known["interval"])
        console.print(
            f"Best known plan for {data['model']} on {data['cluster']}: {output.plan_text(known['plan'])}, "
            f"{output.count_text(known['tokens_per_s_per_gpu'])} tokens/s/GPU (95 % interval {low} to {high}, "
            f"{output.runs_text(known['repeats'])}), "
            f"measured {known['measured_at'][:16].replace('T', ' ')} UTC, source {known['source']}",
            soft_wrap=True,
        )
        second = known["runner_up"]
        if second is not None:
            close = "; too close to call" if second["too_close"] else ""
            speed = output.count_text(second["tokens_per_s_per_gpu"])
            console.print(f"runner-up: {output.plan_text(second['plan'])}, {speed} tokens/s/GPU{close}", soft_wrap=True)
        for change in data["stale"]:
            console.print(f"stale: {change['name']}: {change['then'] or 'none'} then, {change['now'] or 'none'} now")
        return
    console.print(f"Nothing is known of exactly {data['model']} on {data['cluster']}", soft_wrap=True)
    for item in data["nearest"]:
        speed = output.count_text(item["tokens_per_s_per_gpu"])
        console.print(f"near: entry {item['id']}, {speed} tokens/s/GPU: {'; '.join(item['differs'])}", soft_wrap=True)
    if carried is None:
        console.print(f"No estimate: {data['carried_why_not']}", soft_wrap=True)
        return
    low, high = (output.count_text(value) for value in carried["interval"])
    console.print(
        f"Estimate (not measured): {output.plan_text(carried['plan'])}, "
        f"{output.count_text(carried['tokens_per_s_per_gpu'])} tokens/s/GPU (90 % interval {low} to {high})",
        soft_wrap=True,
    )
    if settle is not None:
        console.print(
            f"To settle it: {len(settle['probes'])} probes and {settle['trials']} trials, about "
            f"{settle['gpu_s']:.0f} GPU-seconds (estimate): add --settle",
            soft_wrap=True,
        )


def print_history(limit: int, *, as_json: bool) -> None:
    """The newest tunings of the server."""
    with connect() as client:
        rows = list(client.tunings(limit=limit))
    if as_json:
        output.print_json({"tunings": rows})
        return
    output.print_history(rows)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
