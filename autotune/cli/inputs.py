"""The three inputs and the space, from the text of options: names become specs, what is not given gets a default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.specs import ClusterSpec, ModelSpec, Space, Workload
    from autotune.specs.command import CommandOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is trained, on what, and how."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload


def read_inputs(
    *,
    model: str | None,
    cluster: str | None,
    seq_len: int | None,
    global_batch: int | None,
    dtype: str | None,
    framework: str | None = None,
    kernels: str | None = None,
    db: str | None,
    precision: str | None = None,
    target: str | None = None,
) -> Inputs:
    """The inputs that the options name. Raises InputError for what cannot be used."""
    model_spec, cluster_spec = read_model(model, db), read_cluster(cluster, db)
    return Inputs(
        model=model_spec,
        cluster=cluster_spec,
        workload=read_workload(
            model_spec,
            cluster_spec,
            seq_len=seq_len,
            global_batch=global_batch,
            dtype=dtype,
            precision=precision,
            framework=framework,
            kernels=kernels,
            target=target,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of the user's own: what it can do, and its file where it is not one of the operator's."""

    offer: CommandOffer
    file: Path | None


def read_program(ref: str) -> Program:
    """A command's file, or the name of one in AUTOTUNE_COMMANDS. Raises InputError."""
    from autotune.settings import read_settings
    from autotune.specs.command import SUFFIXES, read_command
    from autotune.wiring import offer_of, open_book

    path = Path(ref)
    if path.suffix in SUFFIXES or os.sep in ref:
        return Program(offer=offer_of(read_command(path)), file=path.resolve())
    return Program(offer=offer_of(open_book(read_settings()).named(ref)), file=None)


def read_program_inputs(
    program: CommandOffer, *, model: str | None, cluster: str | None, given: dict[str, object], db: str | None
) -> Inputs:
    """The inputs for a program: what it has built in is a default, and refused where the options say otherwise."""
    from autotune.catalog.workloads import workload

    model_spec = program.model if model is None and program.model is not None else read_model(model, db)
    cluster_spec = read_cluster(cluster, db)
    built_in = {name: value for name, value in program.workload.to_data().items() if value is not None}
    asked = {name: value for name, value in given.items() if value is not None}
    found = workload(model_spec, cluster_spec, built_in | asked)
    program.check_model(model_spec)
    return Inputs(
        model=model_spec, cluster=cluster_spec, workload=program.workload_of(found, given=built_in.keys() & asked)
    )


def read_model(ref: str | None, db: str | None) -> ModelSpec:
    """A preset, a file or a config.json, else a model stored in the database; the smallest preset if None."""
    from autotune.catalog import load_model, smallest
    from autotune.cli.database import stored_models

    if ref is None:
        return smallest()
    try:
        return load_model(ref)
    except InputError:
        if os.path.exists(ref):
            raise
        for stored in stored_models(db):
            if stored.name == ref:
                return stored
        raise


def read_cluster(ref: str | None, db: str | None) -> ClusterSpec:
    """A file, a stored cluster or the shorthand; this machine if None."""
    from autotune.catalog import load_cluster, recognised
    from autotune.cli.database import stored_clusters
    from probes.discover import discover

    def stored(name: str) -> ClusterSpec | None:
        return next((cluster for cluster in stored_clusters(db) if cluster.name == name), None)

    return recognised(discover()) if ref is None else load_cluster(ref, stored)


def read_workload(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    seq_len: int | None,
    global_batch: int | None,
    dtype: str | None,
    framework: str | None = None,
    kernels: str | None = None,
    precision: str | None = None,
    target: str | None = None,
) -> Workload:
    """The workload that the options give, with the catalog's defaults."""
    from autotune.catalog.workloads import workload
    from autotune.specs.workload import read_kernels, read_precision
    from autotune.tuning.targets import with_target

    given = with_target({
        "seq_len": seq_len, "global_batch": global_batch, "dtype": dtype, "framework": framework, "target": target,
    })  # fmt: skip
    return workload(model, cluster, given | read_kernels(kernels or "") | read_precision(precision or ""))


def read_space(
    *,
    tp: str | None = None,
    pp: str | None = None,
    micro_batch: str | None = None,
    zero_stage: str | None = None,
    recompute: str | None = None,
    sequence_parallel: str | None = None,
    schedule: str | None = None,
    recompute_modules: str | None = None,
) -> Space:
    """The space that the options leave; a field without an option keeps every legal value."""
    from autotune.specs import Space

    numbers = {"tp": tp, "pp": pp, "micro_batch": micro_batch, "zero_stage": zero_stage}
    words = {"recompute": recompute, "schedule": schedule}
    lists = {"sequence_parallel": sequence_parallel, "recompute_modules": recompute_modules}
    for key, text in {**words, **lists}.items():
        if text is not None and not _items(text):
            raise InputError("--" + key.replace("_", "-"), text, "give at least one value")
    data: dict[str, object] = {key: _numbers(key, text) for key, text in numbers.items() if text is not None}
    data |= {key: _items(text) for key, text in words.items() if text is not None}
    if sequence_parallel is not None:
        data["sequence_parallel"] = [_truth(item) for item in _items(sequence_parallel)]
    if recompute_modules is not None:
        data["recompute_modules"] = [item.split("+") for item in _items(recompute_modules)]
    return Space.from_data(data, "space")


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _numbers(key: str, text: str) -> list[int]:
    option = "--" + key.replace("_", "-")
    try:
        numbers = [int(item) for item in _items(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (0 if key == "zero_stage" else 1):
        raise InputError(option, text, "give whole numbers, separated by commas")
    return numbers


def _truth(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise InputError("--sequence-parallel", text, "give true, false or true,false")
    return text.lower() == "true"
