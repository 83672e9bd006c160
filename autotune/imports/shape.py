"""The model behind a log: the one that the user names, if the log can be of it, else the shape that the log prints."""

from __future__ import annotations

from autotune.cost.parameters import total_parameters
from autotune.errors import InputError
from autotune.imports.logs import TrainingLog
from autotune.specs import ModelSpec, Norm, Position

COMPARED = ("layers", "hidden", "heads", "kv_heads", "ffn", "experts", "gated", "tied")
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab", "gated", "tied", "norm", "position")
PADDING = 0.05
"""Frameworks pad the vocabulary, and count buffers or not: parameter counts differ by less than this share."""


def model_of(log: TrainingLog, model: ModelSpec | None) -> ModelSpec:
    """The model of a log.

    Args:
        log: what the log states of it.
        model: what the user says that it is.

    Raises:
        InputError: the log is of another model (both are named), or nothing says what it is.
    """
    if model is None:
        return _printed(log)
    for name in COMPARED:
        fact = log.facts.get(name)
        if fact is not None and not fact.implied and fact.value != getattr(model, name):
            allowed = f"the log trains {_name(log)}; {model.name} has {name}={getattr(model, name)}"
            raise log.file.bad(fact.line, name, fact.value, allowed)
    fact, counted = log.facts.get("parameters"), total_parameters(model)
    if fact is not None and abs(float(fact.value) / counted - 1.0) > PADDING:
        allowed = f"the log trains {_name(log)}; {model.name} has {counted:,} parameters"
        raise log.file.bad(fact.line, "parameters", fact.value, allowed)
    return model


def _name(log: TrainingLog) -> str:
    """What to call the model of a log: as it does, else by its shape."""
    name = log.value("model_name")
    if name is not None:
        return str(name)
    shape = (f"{what}={log.facts[what].value}" for what in ("layers", "hidden", "heads") if what in log.facts)
    return "a model with " + ", ".join(shape)


def _printed(log: TrainingLog) -> ModelSpec:
    missing = [name for name in NEEDED if name not in log.facts]
    if missing or log.value("experts"):
        why = "it is a mixture of experts" if log.value("experts") else f"it does not print {', '.join(missing)}"
        raise InputError(log.file.name, "no model", f"the log does not tell its model ({why}): give --model")
    value = {name: fact.value for name, fact in log.facts.items() if name in ModelSpec.model_fields}
    learned = value["position"] == Position.LEARNED.value
    return ModelSpec.from_data(
        {
            **value,
            "name": f"{value['layers']}x{value['hidden']}",
            "max_positions": log.value("seq_len") or 0 if learned else 0,
            "norm": Norm(str(value["norm"])).value,
            "source": log.file.name,
        },
        log.file.name,
    )
