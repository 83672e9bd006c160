"""The three inputs and the space, from the text of options: names become specs, what is not given gets a default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.specs import ClusterSpec, ModelSpec, Space, Workload

TINY_SEQ_LEN, TINY_GLOBAL_BATCH = 128, 16
SEQ_LEN, SEQUENCES_PER_DEVICE, MOST_GLOBAL_BATCH = 4096, 16, 1024


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
    db: str | None,
) -> Inputs:
    """The inputs that the options name. Raises InputError for what cannot be used."""
    model_spec, cluster_spec = read_model(model, db), read_cluster(cluster, db)
    return Inputs(
        model=model_spec,
        cluster=cluster_spec,
        workload=read_workload(model_spec, cluster_spec, seq_len=seq_len, global_batch=global_batch, dtype=dtype),
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
    model: ModelSpec, cluster: ClusterSpec, *, seq_len: int | None, global_batch: int | None, dtype: str | None
) -> Workload:
    """The workload with its defaults.

    Tiny presets, and any model on CPUs, get sequences of 128 tokens and 16 of them a step, so that a step takes
    well under a second there. Others get 4096 tokens (at most the model's longest) and 16 sequences a device, at
    most 1,024 or what of that the devices divide, so that plain data parallelism is legal on any number of devices.
    There is at least one sequence a device.
    """
    from autotune.specs import DeviceKind, Workload

    small = model.name.startswith("tiny") or cluster.device.kind is DeviceKind.CPU
    longest = model.max_positions or SEQ_LEN
    batch = TINY_GLOBAL_BATCH if small else min(SEQUENCES_PER_DEVICE * cluster.devices, MOST_GLOBAL_BATCH)
    data = {
        "seq_len": min(TINY_SEQ_LEN if small else SEQ_LEN, longest) if seq_len is None else seq_len,
        "global_batch": max(batch // cluster.devices, 1) * cluster.devices if global_batch is None else global_batch,
        "dtype": _default_dtype(cluster) if dtype is None else dtype,
    }
    return Workload.from_data(data, "workload")


def _default_dtype(cluster: ClusterSpec) -> str:
    from autotune.specs import DeviceKind, DType

    if cluster.device.kind is DeviceKind.CPU:
        return DType.FP32.value
    peaks = cluster.device.peak_flops_per_s
    return (DType.FP16 if DType.FP16 in peaks and DType.BF16 not in peaks else DType.BF16).value


def read_space(
    *,
    tp: str | None = None,
    pp: str | None = None,
    micro_batch: str | None = None,
    zero_stage: str | None = None,
    recompute: str | None = None,
    sequence_parallel: str | None = None,
    schedule: str | None = None,
) -> Space:
    """The space that the options leave; a field without an option keeps every legal value."""
    from autotune.specs import Space

    numbers = {"tp": tp, "pp": pp, "micro_batch": micro_batch, "zero_stage": zero_stage}
    words = {"recompute": recompute, "schedule": schedule}
    for key, text in {**words, "sequence_parallel": sequence_parallel}.items():
        if text is not None and not _items(text):
            raise InputError("--" + key.replace("_", "-"), text, "give at least one value")
    data: dict[str, object] = {key: _numbers(key, text) for key, text in numbers.items() if text is not None}
    data |= {key: _items(text) for key, text in words.items() if text is not None}
    if sequence_parallel is not None:
        data["sequence_parallel"] = [_truth(item) for item in _items(sequence_parallel)]
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
