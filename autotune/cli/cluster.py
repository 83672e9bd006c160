"""`autotune cluster`: describe this machine, list and show clusters, store one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output, remote
from autotune.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.specs import ClusterSpec

MAX_MEMORY_GIB = 2**33  # bytes of more than 63 bits are no memory

app = typer.Typer(help="Clusters: describe this machine, list, show and store them.", invoke_without_command=True)


@app.callback()
def clusters(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Clusters: describe this machine, list, show and store them."""
    if context.invoked_subcommand is None:
        list_clusters(as_json=as_json)


@app.command("list")
def list_clusters(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List the clusters stored in the database."""
    found = _clusters_here(db) if remote.asked_server() is None else _clusters_there()
    if as_json:
        output.print_json({"clusters": [cluster.to_data() for cluster in found]})
    else:
        _print_clusters(found)


def _clusters_here(db: str | None) -> Sequence[ClusterSpec]:
    from autotune.cli.database import stored_clusters

    return stored_clusters(db)


def _clusters_there() -> Sequence[ClusterSpec]:
    from autotune.specs import ClusterSpec

    with remote.connect() as client:
        return [ClusterSpec.from_data(item) for item in client.clusters()]


def _print_clusters(found: Sequence[ClusterSpec]) -> None:
    table = output.table("", "<cluster", "nodes", "a node", "<device", "memory", "<in a node", "<between nodes")
    for cluster in found:
        table.add_row(
            cluster.name,
            str(cluster.nodes),
            str(cluster.gpus_per_node),
            cluster.device.name,
            output.bytes_text(cluster.device.memory_bytes),
            f"{cluster.intra.name} {output.rate_text(cluster.intra.bytes_per_s)}",
            f"{cluster.inter.name} {output.rate_text(cluster.inter.bytes_per_s)}" if cluster.inter else "-",
        )
    output.console().print(table if found else "No cluster is stored yet: autotune cluster add FILE")


@app.command()
def show(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A file, a stored name or GPU:NODESxGPUS_PER_NODE.")
    ],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show one cluster as a file of ours would say it."""
    from autotune.cli.inputs import read_cluster

    output.print_spec(read_cluster(cluster, db), as_json=as_json)


@app.command()
def add(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A file or GPU:NODESxGPUS_PER_NODE.")],
    name: Annotated[str | None, typer.Option("--name", help="Store it under this name.")] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Store a cluster in the database, so that --cluster finds it by name."""
    from autotune.catalog import load_cluster
    from autotune.cli.database import open_to_write
    from autotune.specs import ClusterSpec

    spec = load_cluster(cluster, lambda _: None)
    if name is not None:
        spec = ClusterSpec.from_data(spec.to_data() | {"name": name}, "--name")
    if remote.asked_server():
        with remote.connect() as client:
            client.put_cluster(spec)
    else:
        with open_to_write(db) as store:
            store.put_cluster(spec)
    output.print_spec(spec, as_json=as_json)


@app.command()
def discover(
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="CPU ranks to describe as devices, without a GPU.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", metavar="GIB", help="What one CPU rank may use.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the cluster file here.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Store it in the database.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Describe this machine as a cluster: its GPUs, or CPU ranks where there is none."""
    from autotune.catalog import recognised
    from autotune.cli.database import open_to_write
    from probes.discover import discover as discover_machine

    if memory_gib is not None and not 0 < memory_gib < MAX_MEMORY_GIB:
        raise InputError("--memory-gib", memory_gib, f"give a positive number below {MAX_MEMORY_GIB}")
    spec = recognised(discover_machine(ranks, None if memory_gib is None else int(memory_gib * 2**30)))
    if out is not None:
        output.write_text(out, spec.to_json() if out.suffix == ".json" else spec.to_yaml())
    if save:
        with open_to_write(db) as store:
            store.put_cluster(spec)
    output.print_spec(spec, as_json=as_json)
