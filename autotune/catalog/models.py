"""The models in models.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from autotune.catalog.data import rows, unknown
from autotune.specs import ModelSpec


@cache
def models() -> tuple[ModelSpec, ...]:
    """All known models, in the file's order (the tiny ones first)."""
    return tuple(ModelSpec.from_data(row, f"models.yaml: {row['name']}") for row in rows("models.yaml", "models"))


def model_entries(stored: Iterable[ModelSpec]) -> list[dict[str, Any]]:
    """Presets and stored models by name, each with its `origin`; of one name the preset, which is found first."""
    entries = {spec.name: {"origin": "stored", **spec.to_data()} for spec in stored}
    entries |= {each.name: {"origin": "preset", **each.to_data()} for each in models()}
    return [entries[name] for name in sorted(entries)]


def preset(name: str) -> ModelSpec | None:
    """The preset of that name, None where there is none. A preset is found before anything stored."""
    return next((each for each in models() if each.name == name.lower()), None)


def model(name: str) -> ModelSpec:
    """The preset of that name. Raises UnknownNameError with the close or all known names."""
    found = preset(name)
    if found is None:
        raise unknown("model", name, [each.name for each in models()])
    return found


def smallest() -> ModelSpec:
    """The preset with the fewest parameters: what is tuned when no model is named."""
    return model("tiny")
