"""A Hugging Face config.json as a ModelSpec."""

from __future__ import annotations

from typing import Any

from autotune.catalog.hf_families import FAMILIES, Family
from autotune.catalog.hf_fields import Fields
from autotune.errors import UnsupportedModelError
from autotune.specs import ModelSpec


def is_hf_config(data: dict[str, Any]) -> bool:
    """Whether the object is a Hugging Face configuration: it names its `model_type` or `architectures`."""
    return "model_type" in data or "architectures" in data


def from_hf_config(data: dict[str, Any], name: str, what: str = "config.json") -> ModelSpec:
    """The model that a Hugging Face configuration describes.

    Args:
        data: the parsed config.json.
        name: the model's name in our records.
        what: the file as the user knows it, for errors.

    Raises:
        UnsupportedModelError: a family, activation, quantization or any other key that is not understood, by name.
        InputError: a key that is missing, of the wrong type, out of range, or inconsistent with another one.
    """
    model_type, family = _family(data, what)
    config = Fields(data, what)
    quantized = config.value("quantization_config")
    shape = family.read(config)
    notes = [f"Hugging Face config, {model_type}"]
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        notes.append(f"published in {method or 'quantized weights'}, trained in the workload's dtype")
    unknown = config.finish()
    if unknown:
        notes.append("not known and taken as harmless: " + ", ".join(unknown))
    return ModelSpec.from_data({"name": name, **shape, "source": "; ".join(notes)}, what)


def _family(data: dict[str, Any], what: str) -> tuple[str, Family]:
    """The family by `model_type`, or by `architectures` where that is absent."""
    model_type, architectures = data.get("model_type"), data.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if architectures is not None and not isinstance(named, str):
        raise UnsupportedModelError(f"{what}: architectures", architectures, "a list of one class name is understood")
    if model_type is None:
        model_type = next((key for key, family in FAMILIES.items() if family.architecture == named), None)
        if model_type is None:
            known = ", ".join(family.architecture for family in FAMILIES.values())
            raise UnsupportedModelError(f"{what}: architectures", architectures, f"understood: {known}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(f"{what}: model_type", model_type, "understood: " + ", ".join(FAMILIES))
    family = FAMILIES[model_type]
    if named is not None and named != family.architecture:
        raise UnsupportedModelError(f"{what}: architectures", named, f"{model_type} is {family.architecture} here")
    return model_type, family
