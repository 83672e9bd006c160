"""`autotune nodes` and `autotune keys`: what an administrator looks after, the nodes of a server and the API's keys."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.asking import connect
from autotune.cli.options import option

nodes = typer.Typer(
    help="A fleet's nodes: list them, look at one, keep one out of use, forget a dead one.", no_args_is_help=True
)
keys = typer.Typer(help="API keys: make, list and revoke them.", no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]


@nodes.command("list")
def list_nodes(
    pool: Annotated[str | None, option("--pool", "CLUSTER", "Of this cluster only.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Nodes: whether each may get jobs, and if not why; what holds it; when it was last heard of."""
    with connect() as client:
        rows = list(client.nodes(pool))
    output.tell_list(
        "nodes", rows, ("<node", "name"), ("<cluster", "pool"), ("<device", "device.name"), ("slots", "slots"),
        ("<state", state_text), ("<why not", "obstacle"), ("<job", "job"),
        ("heard of", lambda row: f"{row['heartbeat_age_s']:.0f} s ago"),
        empty="No node has registered yet: autotune worker", as_json=as_json,
    )  # fmt: skip


def state_text(row: dict[str, Any]) -> str:
    """Whether it gets jobs: a node that can get none should not be shown as `ready`."""
    return "unusable" if row["obstacle"] and row["state"] == "ready" else str(row["state"])


@nodes.command("show")
def show_node(node: NodeName, as_json: options.AsJson = False) -> None:
    """One node, and the newest of what it did: failures by its fault, slow health probes, ranks that straggle."""
    with connect() as client:
        data = client.node(node)
    output.tell(data, lambda: _print_node(data), as_json=as_json)


def _print_node(data: dict[str, Any]) -> None:
    node, incidents = data["node"] | {"state": state_text(data["node"])}, data["incidents"]
    shown = ("pool", "address", "topology", "slots", "state", "reason", "failures", "obstacle", "job", "world_id")
    rows = {name.replace("_", " "): output.value_text(name, node[name]) for name in shown}
    columns = ("<at (UTC)", lambda item: output.moment_text(item["at"], seconds=True)), ("<kind", "kind")
    table = output.listing("Incidents, newest first", incidents, *columns, ("<what", "message"))
    output.console().print(output.facts(f"Node {node['name']}", "value", rows))
    output.console().print(table if incidents else "No incidents.")


@nodes.command("quarantine")
def quarantine(
    node: NodeName,
    reason: Annotated[str, option("--reason", "TEXT", "Shown to everybody who asks why.")],
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
    output.tell(data, f"Node {data['node']} is forgotten", as_json=as_json)


def _print_change(data: dict[str, Any], *, as_json: bool) -> None:
    reason = f": {data['reason']}" if data["reason"] else ""
    output.tell(data, f"Node {data['node']} is {data['state']}{reason}", as_json=as_json)


# The API's keys, in this machine's database.


@keys.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is: the principal of his requests.")],
    role: Annotated[
        str, option("--role", "read|submit|admin", "What he may do; each includes those before it.")
    ] = "submit",
    expires_days: Annotated[
        int | None, option("--expires-days", "DAYS", "Valid so long. Default: until it is revoked.")
    ] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a key. Its secret is printed once: the database keeps only a hash."""
    from autotune.cli.database import open_to_change
    from autotune.fleet.keys import create_key

    with open_to_change(db) as store:
        made = create_key(store, name, role, expires_days)
    key = made.key.to_data()
    told = f"Key {key['id']} of {name}, {role}, {_until(key)}. Shown only now:\n{made.secret}"
    output.tell({"key": key, "secret": made.secret}, told, as_json=as_json)


@keys.command("list")
def list_keys(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List all keys, without their secrets, which nobody has."""
    from autotune.cli.database import open_to_read

    with open_to_read(db) as store:
        found = [key.to_data() for key in store.keys()]  # noqa: SIM118 (no dictionary)
    output.tell_list(
        "keys", found, ("<key", "id"), ("<name", "name"), ("<role", "role"), ("<created (UTC)", "created_at"),
        ("<valid", _until), empty="There is no API key yet: autotune keys create NAME", as_json=as_json,
    )  # fmt: skip


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
    output.tell(revoked.to_data(), f"Key {revoked.id} of {revoked.name} is revoked", as_json=as_json)


def _until(key: dict[str, Any]) -> str:
    if key["revoked_at"]:
        return f"revoked {output.moment_text(key['revoked_at'])} UTC"
    return f"until {output.moment_text(key['expires_at'])} UTC" if key["expires_at"] else "until it is revoked"
