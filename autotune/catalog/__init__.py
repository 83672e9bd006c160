"""Known GPUs and models, the clusters made of them, and Hugging Face configurations."""

from autotune.catalog.gpus import GpuEntry, cluster_from_shorthand, gpu, gpus, recognise, recognised
from autotune.catalog.hf import from_hf_config
from autotune.catalog.lookup import load_cluster, load_model
from autotune.catalog.models import model, model_entries, models, preset, smallest

__all__ = [
    "GpuEntry", "cluster_from_shorthand", "from_hf_config", "gpu", "gpus", "load_cluster", "load_model", "model",
    "model_entries", "models", "preset", "recognise", "recognised", "smallest",
]  # fmt: skip
