"""What can be named: `autotune models`, `cluster`, `gpus`, and `schema`, the shape of our files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.asking import ask
from autotune.cli.database import open_to_write
from autotune.cli.inputs import read_cluster, read_model
from autotune.cli.options import option
from autotune.errors import InputError, StoreError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    output.tell_list(
        "models", found, ("<model", "name"), ("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"),
        ("kv heads", "kv_heads"), ("ffn", lambda each: str(each["expert_ffn"] or each["ffn"])),
        ("experts", lambda each: f"{each['top_k']} of {each['experts']}" if each["experts"] else "-"),
        ("vocab", "vocab"), ("<origin", "origin"), empty="", as_json=as_json,
    )  # fmt: skip


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
    name: Annotated[str | None, option("--name", help="Store it under this name.")] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Store a model in the database, so that --model finds it by name; says so where it replaces one."""
    from autotune.catalog import load_model, preset
    from autotune.specs import ModelSpec

    spec = load_model(str(file))
    if name is not None:
        spec = ModelSpec.from_data(spec.to_data() | {"name": name}, "--name")
    if preset(spec.name) is not None:
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
    output.tell_list(
        "clusters", found, ("<cluster", "name"), ("nodes", "nodes"), ("a node", "gpus_per_node"),
        ("<device", "device.name"), ("memory", "device.memory_bytes"),
        ("<in a node", lambda each: _link(each["intra"])), ("<between nodes", lambda each: _link(each["inter"])),
        empty="No cluster is stored yet: autotune cluster add FILE", as_json=as_json,
    )  # fmt: skip


def _link(link: dict[str, Any] | None) -> str:
    return "-" if link is None else f"{link['name']} {output.rate_text(link['bytes_per_s'])}"


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
    name: Annotated[str | None, option("--name", help="Store it under this name.")] = None,
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
    ranks: Annotated[int | None, option("--ranks", "N", "CPU ranks to describe as devices, without a GPU.")] = None,
    memory_gib: Annotated[float | None, option("--memory-gib", "GIB", "What one CPU rank may use.")] = None,
    out: Annotated[Path | None, option("--out", "FILE", "Write the cluster file here.")] = None,
    save: Annotated[bool, option("--save", help="Store it in the database.")] = False,
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
    from autotune.specs import DType

    if gpu is not None:
        output.print_spec(one_gpu(gpu), as_json=as_json)
        return
    peaks = [(dtype.value, partial(_peak, dtype=dtype.value)) for dtype in DType]
    output.tell_list(
        "gpus", [entry.to_data() for entry in all_gpus()], ("<GPU", "name"), *peaks, ("memory", "memory_bytes"),
        ("bandwidth", "memory_bytes_per_s"), ("<in a node", "intra.name"), ("", "intra.bytes_per_s"),
        ("<between nodes", "inter.name"), ("", "inter.bytes_per_s"), empty="", as_json=as_json,
        title="Dense peaks in TFLOP/s; links: one direction, one device or NIC",
    )  # fmt: skip


def _peak(entry: dict[str, Any], dtype: str) -> str:
    peak = entry["peak_flops_per_s"].get(dtype)
    return "-" if peak is None else f"{peak / 1e12:.4g}"


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
        output.tell({"schemas": sorted(known)}, "\n".join(sorted(known)), as_json=as_json)
        return
    if name not in known:
        raise UnknownNameError("schema", name, known)
    output.print_json(known[name].model_json_schema())
