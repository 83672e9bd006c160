"""`autotune models`, `autotune gpus` and `autotune schema`: what can be named, and the shape of our files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output, remote
from autotune.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from autotune.catalog import GpuEntry
    from autotune.specs import ModelSpec

app = typer.Typer(
    help="Models: list the presets and stored ones, show one, import a file.", invoke_without_command=True
)


@app.callback()
def models(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Models: list the presets and stored ones, show one, import a file."""
    if context.invoked_subcommand is None:
        list_models(as_json=as_json)


@app.command("list")
def list_models(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List the presets, and the models stored in the database."""
    rows = _models_here(db) if remote.asked_server() is None else _models_there()
    if as_json:
        output.print_json({"models": [{"origin": origin, **model.to_data()} for origin, model in rows]})
        return
    table = output.table("", "<model", "layers", "hidden", "heads", "kv heads", "ffn", "experts", "vocab", "<origin")
    for origin, model in rows:
        table.add_row(*_cells(model), origin)
    output.console().print(table)


def _models_here(db: str | None) -> list[tuple[str, ModelSpec]]:
    from autotune.catalog import models as presets
    from autotune.cli.database import stored_models

    rows = [("preset", model) for model in presets()]
    known = {model.name for _, model in rows}
    return rows + [("stored", model) for model in stored_models(db) if model.name not in known]


def _models_there() -> list[tuple[str, ModelSpec]]:
    from autotune.specs import ModelSpec

    with remote.connect() as client:
        return [(item.pop("origin"), ModelSpec.from_data(item)) for item in client.models()]


def _cells(model: ModelSpec) -> tuple[str, ...]:
    counts = (model.layers, model.hidden, model.heads, model.kv_heads, model.expert_ffn or model.ffn)
    experts = f"{model.top_k} of {model.experts}" if model.experts else "-"
    return (model.name, *map(str, counts), experts, str(model.vocab))


@app.command()
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a file of ours, or a config.json.")],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show one model as a file of ours would say it."""
    from autotune.cli.inputs import read_model

    spec = read_model(model, db)
    output.print_spec(spec, as_json=as_json)


@app.command("import")
def import_model(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of ours, or a Hugging Face config.json.")],
    name: Annotated[str | None, typer.Option("--name", help="Store it under this name.")] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Store a model in the database, so that --model finds it by name."""
    from autotune.catalog import load_model
    from autotune.catalog import models as presets
    from autotune.cli.database import open_to_write
    from autotune.specs import ModelSpec

    spec = load_model(str(file))
    if name is not None:
        spec = ModelSpec.from_data(spec.to_data() | {"name": name}, "--name")
    if any(preset.name == spec.name.lower() for preset in presets()):
        raise InputError(
            "model", spec.name, "a preset has this name and would be found first: give another with --name"
        )
    if remote.asked_server():
        with remote.connect() as client:
            client.put_model(spec)
    else:
        with open_to_write(db) as store:
            store.put_model(spec)
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
