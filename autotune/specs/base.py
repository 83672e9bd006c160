"""The base of all specs: frozen, strict, unknown keys refused; YAML and JSON in and out; a content digest."""

from __future__ import annotations

import hashlib
import json
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from autotune.errors import InputError
from autotune.shown import NAME_RULE, PLAIN, is_plain
from autotune.specs.documents import parse_document, read_document, to_yaml

_FROM_OUTSIDE = "from outside"


def _plain(name: str, info: ValidationInfo) -> str:
    if info.context == _FROM_OUTSIDE and not is_plain(name):
        raise PydanticCustomError("plain", NAME_RULE)
    return name


Name = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"pattern": PLAIN}),
    AfterValidator(_plain),
]
"""What a user calls a thing. It is printed, so a new one holds nothing that a terminal obeys or that hides.

Earlier releases refused less of that: what they stored is still read, and neutralised when it is printed.
"""

_MAX_TOLD = 3
"""Further wrong places that an error names."""


class Spec(BaseModel):
    """A frozen record. Parse it with `from_data`, `from_json`, `from_yaml` or `from_file`.

    Parsing goes through JSON, because pydantic's strict mode takes enum members and tuples from JSON but
    refuses their plain spellings in Python objects.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def from_data(cls, data: object, what: str | None = None) -> Self:
        """Validates plain data (dicts, lists, numbers, strings). Raises InputError naming the bad key."""
        what = what or cls.__name__
        _require_finite(data, what)
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(what, type(data).__name__, f"only plain JSON values ({error})") from None
        return cls._read(text, what, _FROM_OUTSIDE)

    @classmethod
    def from_json(cls, text: str | bytes, what: str | None = None) -> Self:
        """Validates a JSON document that `to_json` wrote. Raises InputError naming the bad key."""
        return cls._read(text, what or cls.__name__, None)

    @classmethod
    def _read(cls, text: str | bytes, what: str, context: str | None) -> Self:
        try:
            return cls.model_validate_json(text, context=context)
        except ValidationError as error:
            raise _input_error(error, what, text) from None

    @classmethod
    def from_yaml(cls, text: str, what: str | None = None) -> Self:
        """Validates a YAML (or JSON) document. Raises InputError naming the bad key."""
        what = what or cls.__name__
        return cls.from_data(parse_document(text, what), what)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a .yaml, .yml or .json file. Raises InputError on an unreadable or invalid file."""
        return cls.from_data(read_document(Path(path)), str(path))

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-able data, enums as their values."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """One line of canonical JSON (sorted keys)."""
        return json.dumps(self.to_data(), sort_keys=True, separators=(",", ":"))

    def to_yaml(self) -> str:
        """A YAML document in field order."""
        return to_yaml(self.to_data())

    def digest(self, *, without: frozenset[str] = frozenset()) -> str:
        """The first 16 hex digits of the SHA-256 of the canonical JSON, less the fields in `without`."""
        return digest_of({key: value for key, value in self.to_data().items() if key not in without})


def digest_of(data: dict[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of plain data as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Of weights and data: what generators of random numbers, and databases, take."""

LONGEST_S = 1e9
"""Thirty years: no time of ours is longer."""

MOST_PER_S = 1e24
"""Of bytes, tokens or FLOPs: no hardware comes near, and products of such numbers stay finite."""

MOST_GPU_S = 1e12
"""A million GPUs for eleven days."""


def _require_finite(data: object, place: str) -> None:
    """Refuses NaN and infinity, which JSON does not have, by their place."""
    if isinstance(data, float) and not isfinite(data):
        raise InputError(place, data, "a finite number")
    parts = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in parts:
        _require_finite(value, f"{place}.{key}" if ": " in place else f"{place}: {key}")


def mismatch(field: str, value: object, allowed: str) -> PydanticCustomError:
    """What a validator of a whole record raises: the field that does not go with the others, and what would."""
    return PydanticCustomError("mismatch", "{allowed}", {"field": field, "value": value, "allowed": allowed})


def _input_error(error: ValidationError, what: str, text: str | bytes) -> InputError:
    """One complaint of pydantic as an InputError, with the places of the others.

    Of several, an unknown key comes first: who misspelled a required key must see that, not that it is missing.
    """
    errors = error.errors(include_url=False)
    document = None if errors[0]["type"] == "json_invalid" else from_json(text)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    context, place = first.get("ctx", {}), _place(first, document)
    value, message = first.get("input"), first["msg"]
    others = [each for each in dict.fromkeys(_place(each, document) for each in errors) if each != place]
    if first["type"] == "mismatch":
        place, value = ".".join(filter(None, (place, context["field"]))), context["value"]
    elif first["type"] == "missing":
        value = None
    elif first["type"] == "extra_forbidden":
        message = "this key is not known"
    elif first["type"] == "int_type" and isinstance(value, float):
        message = "write a whole number without point and exponent"
    if others:
        told = ", ".join(each or "the whole" for each in others[:_MAX_TOLD])
        message += f" (wrong, too: {told}{', ...' if len(others) > _MAX_TOLD else ''})"
    return InputError(f"{what}: {place}" if place else what, value, message)


def _place(error: ErrorDetails, document: Any) -> str:
    """The way to a wrong value as its author wrote it: of pydantic's, without the names of a union's members."""
    found, last = [], len(error["loc"]) - 1
    for number, part in enumerate(error["loc"]):
        if isinstance(document, dict):
            is_written = part in document or (error["type"] == "missing" and number == last)
        else:
            is_written = isinstance(document, list) and isinstance(part, int)
        if is_written:
            found.append(str(part))
            document = document.get(part) if isinstance(document, dict) else document[int(part)]
    return ".".join(found)
