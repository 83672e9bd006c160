"""What can be named: `autotune models`, `cluster`, `gpus`, and `schema`, the shape of our files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.asking import ask
from autotune.cli.database import open_to_write
from autotune.cli.inputs import read_cluster, read_model
from autotune.errors import InputError, StoreError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from autotune.catalog import GpuEntry

MAX_MEMORY_GIB = 2**33  # bytes of more than 63 bits are no memory

models = typer.Typer(
    help="Models: list the presets and stored ones, show one, import a file.", invoke_without_command=True
)
clusters = typer.Typer(help="Clusters: describe this machine, list, show and store them.", invoke_without_command=True)


@models.callback()
def models_without_a_verb(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Models: list the presets and stored ones, show one, import a file."""
    if context.invoked_subcommand is None:
        list_models(as_json=as_json)


@models.command("list")
def list_models(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List the presets, and the models stored in the database."""
    with ask(db) as answers:
        found = list(answers.models())
    if as_json:
        output.print_json({"models": found})
        return
    table = output.table("", "<model", "layers", "hidden", "heads", "kv heads", "ffn", "experts", "vocab", "<origin")
    for each in found:
        counts = (each["layers"], each["hidden"], each["heads"], each["kv_heads"], each["expert_ffn"] or each["ffn"])
        experts = f"{each['top_k']} of {each['experts']}" if each["experts"] else "-"
        table.add_row(each["name"], *map(str, counts), experts, str(each["vocab"]), each["origin"])
    output.console().print(table)


@models.command("show")
def show_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a file of ours, or a config.json.")],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show one model as a file of ours would say it."""
    output.print_spec(read_model(model, db), as_json=as_json)


@models.command("import")
def import_model(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of ours, or a Hugging Face config.json.")],
    name: Annotated[str | None, typer.Option("--name", help="Store it under this name.")] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Store a model in the database, so that --model finds it by name; says so where it replaces one."""
    from autotune.catalog import load_model
    from autotune.catalog import models as presets
    from autotune.specs import ModelSpec

    spec = load_model(str(file))
    if name is not None:
        spec = ModelSpec.from_data(spec.to_data() | {"name": name}, "--name")
    if any(preset.name == spec.name.lower() for preset in presets()):
        raise InputError(
            "model", spec.name, "a preset has this name and would be found first: give another with --name"
        )
    with ask(db) as answers:
        before = _stored_before(answers.models)
        answers.put_model(spec)
    _say_replaced("model", before, spec.to_data())
    output.print_spec(spec, as_json=as_json)


def _stored_before(listed: Callable[[], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return list(listed())
    except StoreError:  # there is no database yet; anything worse is told when it is written
        return []


def _say_replaced(what: str, before: Iterable[dict[str, Any]], stored: dict[str, Any]) -> None:
    """Says on standard error that something else was stored under this name, which later requests will not find."""
    old = next((item for item in before if item["name"] == stored["name"]), stored)
    changed = [name for name in stored if old.get(name) != stored[name]]
    if changed:
        message = f"{what} {stored['name']} was stored before and is replaced ({', '.join(changed)} changed)"
        output.error_console().print(message, soft_wrap=True)


@clusters.callback()
def clusters_without_a_verb(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Clusters: describe this machine, list, show and store them."""
    if context.invoked_subcommand is None:
        list_clusters(as_json=as_json)


@clusters.command("list")
def list_clusters(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List the clusters stored in the database."""
    with ask(db) as answers:
        found = list(answers.clusters())
    if as_json:
        output.print_json({"clusters": found})
        return
    table = output.table("", "<cluster", "nodes", "a node", "<device", "memory", "<in a node", "<between nodes")
    for each in found:
        device, links = each["device"], (each["intra"], each["inter"])
        table.add_row(
            each["name"], str(each["nodes"]), str(each["gpus_per_node"]), device["name"],
            output.bytes_text(device["memory_bytes"]),
            *(f"{link['name']} {output.rate_text(link['bytes_per_s'])}" if link else "-" for link in links),
        )  # fmt: skip
    output.console().print(table if found else "No cluster is stored yet: autotune cluster add FILE")


@clusters.command("show")
def show_cluster(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A file, a stored name or GPU:NODESxGPUS_PER_NODE.")
    ],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show one cluster as a file of ours would say it."""
    output.print_spec(read_cluster(cluster, db), as_json=as_json)


@clusters.command("add")
def add_cluster(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A file or GPU:NODESxGPUS_PER_NODE.")],
    name: Annotated[str | None, typer.Option("--name", help="Store it under this name.")] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Store a cluster in the database, so that --cluster finds it by name; says so where it replaces one."""
    from autotune.catalog import load_cluster
    from autotune.specs import ClusterSpec

    spec = load_cluster(cluster, lambda _: None)
    if name is not None:
        spec = ClusterSpec.from_data(spec.to_data() | {"name": name}, "--name")
    with ask(db) as answers:
        before = _stored_before(answers.clusters)
        answers.put_cluster(spec)
    _say_replaced("cluster", before, spec.to_data())
    output.print_spec(spec, as_json=as_json)


@clusters.command()
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


def gpus(
    gpu: Annotated[str | None, typer.Argument(metavar="GPU", help="Show only this one, with its sources.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the known GPUs: dense peaks by dtype, memory, bandwidths."""
    from autotune.catalog import gpu as one_gpu
    from autotune.catalog import gpus as all_gpus

    if gpu is not None:
        output.print_spec(one_gpu(gpu), as_json=as_json)
    elif as_json:
        output.print_json({"gpus": [entry.to_data() for entry in all_gpus()]})
    else:
        _print_gpus(all_gpus())


def _print_gpus(entries: tuple[GpuEntry, ...]) -> None:
    from autotune.specs import DType

    table = output.table(
        "Dense peaks in TFLOP/s; links: one direction, one device or NIC",
        "<GPU", *(dtype.value for dtype in DType), "memory", "bandwidth", "<in a node", "", "<between nodes", "",
    )  # fmt: skip
    for entry in entries:
        peaks = [entry.peak_flops_per_s.get(dtype) for dtype in DType]
        table.add_row(
            entry.name,
            *("-" if peak is None else f"{peak / 1e12:.4g}" for peak in peaks),
            output.bytes_text(entry.memory_bytes),
            output.rate_text(entry.memory_bytes_per_s),
            entry.intra.name,
            output.rate_text(entry.intra.bytes_per_s),
            entry.inter.name if entry.inter else "-",
            output.rate_text(entry.inter.bytes_per_s) if entry.inter else "-",
        )
    output.console().print(table)


def schema(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="model, cluster, workload, plan, ...")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the JSON Schema of a file or record; without a name, list them."""
    from autotune import specs

    known: dict[str, type[specs.Spec]] = {
        "model": specs.ModelSpec,
        "cluster": specs.ClusterSpec,
        "workload": specs.Workload,
        "plan": specs.Plan,
        "space": specs.Space,
        "budget": specs.Budget,
        "estimate": specs.Estimate,
        "measurement": specs.ProbeOutcome,
        "step-reading": specs.StepReading,
        "collective-reading": specs.CollectiveReading,
        "layer-reading": specs.LayerReading,
        "fingerprint": specs.Fingerprint,
        "profile": specs.Profile,
        "tuning": specs.Tuning,
        "trial": specs.Trial,
    }
    if name is None:
        output.print_json({"schemas": sorted(known)}) if as_json else output.console().print("\n".join(sorted(known)))
        return
    if name not in known:
        raise UnknownNameError("schema", name, known)
    output.print_json(known[name].model_json_schema())
