"""The cluster behind a published run, which names its GPU in its own way."""

from __future__ import annotations

from autotune.catalog.gpus import cluster_from_shorthand, gpus
from autotune.errors import InputError, UnknownNameError
from autotune.specs import ClusterSpec

# The spelling in published tables -> the catalog's name, by memory in GB where a spelling stands for several GPUs.
# A bare "A100" is taken to be the 80 GB SXM model: both SXM models have the same peak and links.
_ALIASES: dict[str, dict[int | None, str]] = {
    "V100-SXM2-16GB": {None: "v100-16gb-sxm"},
    "V100-SXM2-32GB": {None: "v100-32gb-sxm"},
    "A100": {None: "a100-80gb-sxm", 80: "a100-80gb-sxm", 40: "a100-40gb-sxm"},
    "A100-SXM4-40GB": {None: "a100-40gb-sxm"},
    "A100-SXM4-80GB": {None: "a100-80gb-sxm"},
    "H100": {None: "h100-80gb-sxm", 80: "h100-80gb-sxm"},
    "H100-SXM5-80GB": {None: "h100-80gb-sxm"},
    "H200": {None: "h200-141gb-sxm", 141: "h200-141gb-sxm"},
    "H200-SXM-141GB": {None: "h200-141gb-sxm"},
    "B200": {None: "b200-180gb-sxm", 180: "b200-180gb-sxm"},
    "B200-SXM": {None: "b200-180gb-sxm"},
    "GB200": {None: "gb200"},
    "A800": {None: "a800-80gb-sxm", 80: "a800-80gb-sxm"},
    "A800-SXM4-80GB": {None: "a800-80gb-sxm"},
    "H800": {None: "h800-80gb-sxm", 80: "h800-80gb-sxm"},
    "H800-SXM5-80GB": {None: "h800-80gb-sxm"},
    "H20": {None: "h20-96gb-sxm", 96: "h20-96gb-sxm"},
    "GH200": {None: "gh200-96gb", 96: "gh200-96gb"},
    "B300": {None: "b300-270gb-sxm"},
}


def published_cluster(gpu: str, memory_gb: float | None, num_gpus: int, gpus_per_node: int) -> ClusterSpec:
    """The cluster of `num_gpus` such GPUs with the links of the vendor's reference system.

    Args:
        gpu: a catalog name, or a spelling of published tables.
        memory_gb: the GPU's memory as published, where it is stated.
        num_gpus: all devices; fewer than a node's make a smaller node.
        gpus_per_node: devices of a full node.

    Raises:
        UnknownNameError: a GPU, or a memory size of it, that the catalog does not know.
        InputError: nodes that are not full, or several nodes without a reference link between them.
    """
    if num_gpus > gpus_per_node and num_gpus % gpus_per_node:
        raise InputError("num_gpus", num_gpus, f"must be a multiple of gpus_per_node ({gpus_per_node})")
    local = min(num_gpus, gpus_per_node)
    return cluster_from_shorthand(f"{_catalog_name(gpu, memory_gb)}:{num_gpus // local}x{local}")


def _catalog_name(gpu: str, memory_gb: float | None) -> str:
    names = [entry.name for entry in gpus()]
    if gpu.lower() in names:
        return gpu.lower()
    by_memory = _ALIASES.get(gpu)
    if by_memory is None:
        raise UnknownNameError("gpu", gpu, [*names, *_ALIASES])
    size = round(memory_gb) if memory_gb is not None and len(by_memory) > 1 else None
    if size not in by_memory:
        raise UnknownNameError("gpu_mem_gb", f"{gpu} of {size} GB", [f"{item} GB" for item in by_memory if item])
    return by_memory[size]
