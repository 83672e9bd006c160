"""A Hugging Face config.json as a ModelSpec."""

from __future__ import annotations

from typing import Any

from autotune.errors import UnsupportedModelError
from autotune.specs import ModelSpec


def is_hf_config(data: dict[str, Any]) -> bool:
    """Whether the object is a Hugging Face configuration."""
    return "model_type" in data or "architectures" in data


def from_hf_config(data: dict[str, Any], name: str, what: str = "config.json") -> ModelSpec:
    """The model that a Hugging Face configuration describes."""
    raise UnsupportedModelError(f"{what}: model_type", data.get("model_type"), "not yet")
