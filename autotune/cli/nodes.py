"""`autotune nodes` and `autotune keys`: what an administrator looks after, the nodes of a server and the API's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.asking import connect

if TYPE_CHECKING:
    from autotune.specs import ApiKey

nodes = typer.Typer(
    help="A fleet's nodes: list them, look at one, keep one out of use, forget a dead one.", no_args_is_help=True
)
keys = typer.Typer(help="API keys: make, list and revoke them.", no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]


@nodes.command("list")
def list_nodes(
    pool: Annotated[str | None, typer.Option("--pool", metavar="CLUSTER", help="Of this cluster only.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Nodes: whether each may get jobs, and if not why; what holds it; when it was last heard of."""
    with connect() as client:
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


@nodes.command("show")
def show_node(node: NodeName, as_json: options.AsJson = False) -> None:
    """One node, and the newest of what it did: failures by its fault, slow health probes, ranks that straggle."""
    with connect() as client:
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


@nodes.command("quarantine")
def quarantine(
    node: NodeName,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown to everybody who asks why.")],
    as_json: options.AsJson = False,
) -> None:
    """Give a node no more jobs until it is released. What runs on it goes on."""
    with connect() as client:
        _print_change(client.quarantine(node, reason), as_json=as_json)


@nodes.command("release")
def release(node: NodeName, as_json: options.AsJson = False) -> None:
    """Let a node get jobs again."""
    with connect() as client:
        _print_change(client.release(node), as_json=as_json)


@nodes.command("forget")
def forget(node: NodeName, as_json: options.AsJson = False) -> None:
    """Take a dead node out of the list. What it measured stays, and a worker of its name brings it back.

    Refused while it lives (its worker was heard of in the last minute) or a job holds it.
    """
    with connect() as client:
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


# ----------------------------------------------------------------------------------------------------
# The API's keys, in this machine's database.


@keys.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is: the principal of his requests.")],
    role: Annotated[
        str, typer.Option("--role", metavar="read|submit|admin", help="What he may do; each includes those before it.")
    ] = "submit",
    expires_days: Annotated[
        int | None, typer.Option("--expires-days", metavar="DAYS", help="Valid so long. Default: until it is revoked.")
    ] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a key. Its secret is printed once: the database keeps only a hash."""
    from autotune.cli.database import open_to_change
    from autotune.fleet.keys import create_key

    with open_to_change(db) as store:
        made = create_key(store, name, role, expires_days)
    if as_json:
        output.print_json({"key": made.key.to_data(), "secret": made.secret})
        return
    console = output.console()
    console.print(f"Key {made.key.id} of {made.key.name}, {made.key.role.value}, {_until(made.key)}. Shown only now:")
    console.print(made.secret, soft_wrap=True)


@keys.command("list")
def list_keys(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List all keys, without their secrets, which nobody has."""
    from autotune.cli.database import open_to_read

    with open_to_read(db) as store:
        found = store.keys()
    if as_json:
        output.print_json({"keys": [key.to_data() for key in found]})
        return
    table = output.table("", "<key", "<name", "<role", "<created (UTC)", "<valid")
    for key in found:
        table.add_row(key.id, key.name, key.role.value, f"{key.created_at:%Y-%m-%d %H:%M}", _until(key))
    output.console().print(table if found else "There is no API key yet: autotune keys create NAME")


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key's id, as `autotune keys list` shows it.")],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Revoke a key for good. Running servers take it for two more seconds at most."""
    from autotune.cli.database import open_to_change

    with open_to_change(db) as store:
        revoked = store.revoke_key(key)
    if as_json:
        output.print_json(revoked.to_data())
    else:
        output.console().print(f"Key {revoked.id} of {revoked.name} is revoked")


def _until(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d %H:%M} UTC"
    return "until it is revoked" if key.expires_at is None else f"until {key.expires_at:%Y-%m-%d %H:%M} UTC"
