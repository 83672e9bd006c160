"""What a user names: a model and a cluster, by name, by file or by shorthand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.catalog.gpus import cluster_from_shorthand, is_shorthand
from autotune.catalog.hf import from_hf_config, is_hf_config
from autotune.catalog.models import model, preset
from autotune.errors import InputError
from autotune.specs import ClusterSpec, ModelSpec
from autotune.specs.documents import read_document

_SUFFIXES = {".yaml", ".yml", ".json"}


def load_model(ref: str) -> ModelSpec:
    """The model that `ref` names: a preset, a YAML or JSON file of ours, or a Hugging Face config.json.

    A config.json is told by its `model_type` or `architectures` and takes its name from its folder.

    Raises:
        UnknownNameError: neither a preset nor a file.
        UnsupportedModelError: a config with a part that is not understood.
        InputError: a file that cannot be read or used.
    """
    if preset(ref) is not None or not _is_path(ref):
        return model(ref)
    data = _document(Path(ref), infinite=True)  # configs of hybrid models say Infinity
    if is_hf_config(data):
        path = Path(ref)
        name = path.resolve().parent.name if path.stem == "config" else path.stem  # unless the file itself is named
        return from_hf_config(data, name, what=ref)
    return ModelSpec.from_data(data, ref)


def load_cluster(ref: str, stored: Callable[[str], ClusterSpec | None]) -> ClusterSpec:
    """The cluster that `ref` names: a file, a stored name, or GPU:NODESxGPUS_PER_NODE, looked for in that order.

    Args:
        ref: what the user wrote.
        stored: gives the stored cluster of a name, None where there is none.

    Raises:
        InputError: none of the three, or one that cannot be used.
    """
    if os.path.isfile(ref):
        return ClusterSpec.from_data(_document(Path(ref)), ref)
    found = stored(ref)
    if found is not None:
        return found
    if _is_path(ref) and not is_shorthand(ref):
        return ClusterSpec.from_data(_document(Path(ref)), ref)
    if is_shorthand(ref):
        return cluster_from_shorthand(ref)
    raise InputError(
        "cluster",
        ref,
        "give a cluster file (.yaml or .json), the name of a stored cluster, or GPU:NODESxGPUS_PER_NODE "
        "such as a100-80gb-sxm:128x8",
    )


def _is_path(ref: str) -> bool:
    """Whether the text is meant as a path: it exists, has a separator, or ends like our files."""
    path = Path(ref)
    return path.suffix.lower() in _SUFFIXES or len(path.parts) > 1 or os.path.exists(ref)


def _document(path: Path, *, infinite: bool = False) -> dict[str, Any]:
    """The object in a YAML or JSON file. Raises InputError on anything else."""
    data = read_document(path, infinite=infinite)
    if not isinstance(data, dict):
        raise InputError(str(path), type(data).__name__, "an object with named values is needed")
    return data
