"""A Hugging Face config.json as a ModelSpec."""

from __future__ import annotations

from typing import Any

from autotune.catalog.hf_families import FAMILIES, Family
from autotune.catalog.hf_fields import Fields
from autotune.catalog.hf_shapes import constants
from autotune.errors import InputError, UnsupportedModelError
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
    text, parts = _text(data, what)
    model_type, family = _family(text, what)
    config = Fields(text, what)
    quantized = config.value("quantization_config")
    shape = family.read(config) | {"constants": constants(config)}
    notes = [f"Hugging Face config, {model_type}"]
    if parts:
        notes.append("the language model alone, without " + ", ".join(parts))
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        notes.append(f"published in {method or 'quantized weights'}, trained in the workload's dtype")
    unknown = config.finish()
    if unknown:
        notes.append("not known and taken as harmless: " + ", ".join(unknown))
    return ModelSpec.from_data({"name": name, **shape, "source": "; ".join(notes)}, what)


# Where a config of several models keeps the one of text.
_TEXT = ("text_config", "llm_config", "language_config")

_TOWERS = ("vision_config", "audio_config")


def _text(data: dict[str, Any], what: str) -> tuple[dict[str, Any], list[str]]:
    """The language model's own config, and the names of what stands beside it (vision_config and the like)."""
    key = next((key for key in _TEXT if isinstance(data.get(key), dict)), None)
    if key is None:  # Qwen2-VL and the like keep the text's keys beside the vision tower
        towers = sorted(name for name in _TOWERS if isinstance(data.get(name), dict))
        return {name: value for name, value in data.items() if name not in towers}, towers
    inner: dict[str, Any] = {name: value for name, value in data[key].items() if name != "architectures"}
    if "model_type" not in inner:
        raise InputError(f"{what}: {key}.model_type", None, "this key is missing")
    for name in ("tie_word_embeddings", "quantization_config"):  # these are of the whole
        if inner.get(name) is None and name in data:
            inner[name] = data[name]
    parts = [name for name, value in data.items() if name.endswith("_config") and isinstance(value, dict) and value]
    return inner, sorted(set(parts) - {key, "quantization_config"})


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
        known = ", ".join(FAMILIES)
        others = "; another model can be described in a file of ours (autotune schema model)"
        raise UnsupportedModelError(f"{what}: model_type", model_type, f"understood: {known}{others}")
    family = FAMILIES[model_type]
    if named is not None and named != family.architecture:
        raise UnsupportedModelError(f"{what}: architectures", named, f"{model_type} is {family.architecture} here")
    return model_type, family
