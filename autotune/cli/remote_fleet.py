"""`autotune cancel` and `autotune nodes`, which ask a server; and the ranking of plans by one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from autotune.cli import options, output, remote
from autotune.errors import InputError

app = typer.Typer(
    help="A fleet's nodes: list them, look at one, keep one out of use, forget a dead one.", no_args_is_help=True
)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]


def cancel(
    tuning: options.TuningId,
    force: Annotated[bool, typer.Option("--force", help="Whoever else wants it; needs the role admin.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Take back a request for a tuning. A server's nodes are free within seconds, unless somebody else wants it too."""
    data = _cancel_here(tuning, db) if remote.asked_server() is None else _cancel_there(tuning, force)
    if as_json:
        output.print_json(data)
        return
    ended = data["state"] == "cancelled"
    words = (
        "is cancelled" if ended else f"is {data['state']}: somebody else wants it still (--force of an admin ends it)"
    )
    output.console().print(f"Tuning {data['tuning']} {words}", soft_wrap=True)


def _cancel_there(tuning: str, force: bool) -> dict[str, Any]:
    with remote.connect() as client:
        return client.cancel(tuning, force=force)


def _cancel_here(tuning: str, db: str | None) -> dict[str, Any]:
    from autotune.cli.database import open_to_write
    from autotune.wiring import open_service

    with open_to_write(db) as store:
        found = store.tuning(tuning)
        if found.pool:
            raise InputError("tuning", found.id, "it is a fleet's: name its server with --server")
        ended = open_service(store).cancel(found.id)
    return {"tuning": ended.id, "state": ended.state.value}


@app.command("list")
def list_nodes(
    pool: Annotated[str | None, typer.Option("--pool", metavar="CLUSTER", help="Of this cluster only.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Nodes: whether each may get jobs, and if not why; what holds it; when it was last heard of."""
    with remote.connect() as client:
        rows = list(client.nodes(pool))
    if as_json:
        output.print_json({"nodes": rows})
        return
    table = output.table("", "<node", "<cluster", "<device", "slots", "<state", "<why not", "<job", "heard of")
    for row in rows:
        table.add_row(
            row["name"], row["pool"], row["device"]["name"], str(row["slots"]), state_text(row), row["obstacle"] or "-",
            row["job"] or "-", f"{row['heartbeat_age_s']:.0f} s ago",
        )  # fmt: skip
    output.console().print(table if rows else "No node has registered yet: autotune worker")


def state_text(row: dict[str, Any]) -> str:
    """Whether it gets jobs: a node that can get none should not be shown as `ready`."""
    return "unusable" if row["obstacle"] and row["state"] == "ready" else str(row["state"])


@app.command("show")
def show_node(node: NodeName, as_json: options.AsJson = False) -> None:
    """One node, and the newest of what it did: failures by its fault, slow health probes, ranks that straggle."""
    with remote.connect() as client:
        data = client.node(node)
    if as_json:
        output.print_json(data)
        return
    table = output.table(f"Node {node}", "<what", "<value")
    shown = ("pool", "address", "topology", "slots", "state", "reason", "failures", "obstacle", "job", "world_id")
    for name in shown:
        value = state_text(data["node"]) if name == "state" else data["node"][name]
        table.add_row(name.replace("_", " "), "-" if value in (None, "") else str(value))
    output.console().print(table)
    incidents = output.table("Incidents, newest first", "<at (UTC)", "<kind", "<what")
    for item in data["incidents"]:
        incidents.add_row(item["at"][:19].replace("T", " "), item["kind"], item["message"])
    output.console().print(incidents if data["incidents"] else "No incidents.")


@app.command("quarantine")
def quarantine(
    node: NodeName,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown to everybody who asks why.")],
    as_json: options.AsJson = False,
) -> None:
    """Give a node no more jobs until it is released. What runs on it goes on."""
    with remote.connect() as client:
        _print_change(client.quarantine(node, reason), as_json=as_json)


@app.command("release")
def release(node: NodeName, as_json: options.AsJson = False) -> None:
    """Let a node get jobs again."""
    with remote.connect() as client:
        _print_change(client.release(node), as_json=as_json)


@app.command("forget")
def forget(node: NodeName, as_json: options.AsJson = False) -> None:
    """Take a dead node out of the list. What it measured stays, and a worker of its name brings it back.

    Refused while it lives (its worker was heard of in the last minute) or a job holds it.
    """
    with remote.connect() as client:
        data = client.forget(node)
    if as_json:
        output.print_json(data)
    else:
        output.console().print(f"Node {data['node']} is forgotten", soft_wrap=True)


def _print_change(data: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.print_json(data)
    else:
        reason = f": {data['reason']}" if data["reason"] else ""
        output.console().print(f"Node {data['node']} is {data['state']}{reason}", soft_wrap=True)


def print_plans(model: str | None, cluster: str | None, asked: dict[str, Any], *, as_json: bool) -> None:
    """The server's ranking of plans: with the profiles that it has."""
    from autotune.catalog import smallest

    if cluster is None:
        raise InputError("--cluster", None, "name one of the server's clusters: autotune --server URL cluster list")
    query = {name: _several(value) for name, value in asked.items()}
    with remote.connect() as client:
        data = client.plans(model=model or smallest().name, cluster=cluster, **query)
    if as_json:
        output.print_json(data)
        return
    table = output.table("", "<plan", "tokens/s/GPU", "step", "MFU", "peak memory", "<fits")
    for each in data["plans"]:
        found = each["estimate"]
        table.add_row(
            output.plan_text(each["plan"]), output.count_text(found["tokens_per_s_per_gpu"]),
            output.seconds_text(found["step_time_s"]), output.percent_text(found["mfu"]),
            output.bytes_text(found["peak_memory_bytes"]), "yes" if found["fits"] else "no",
        )  # fmt: skip
    console = output.console()
    console.print(f"Estimates from the {data['basis']} for {data['model']} on {data['cluster']}", soft_wrap=True)
    console.print(table)
    console.print(f"{data['legal']:,} legal plans, {data['fitting']:,} estimated to fit")


def _several(value: Any) -> Any:
    """A comma-separated option as the repeated parameter that the server takes."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
