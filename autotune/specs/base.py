"""The base of all specs: frozen, strict, unknown keys refused; YAML and JSON in and out; a content digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from autotune.errors import InputError


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
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(what, type(data).__name__, f"only plain JSON values ({error})") from None
        return cls.from_json(text, what)

    @classmethod
    def from_json(cls, text: str | bytes, what: str | None = None) -> Self:
        """Validates a JSON document. Raises InputError naming the bad key."""
        what = what or cls.__name__
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _input_error(error, what) from None

    @classmethod
    def from_yaml(cls, text: str, what: str | None = None) -> Self:
        """Validates a YAML (or JSON) document. Raises InputError naming the bad key."""
        what = what or cls.__name__
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            line = str(error).replace("\n", " ")
            raise InputError(what, "text", f"a YAML or JSON document ({line})") from None
        return cls.from_data(data, what)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a .yaml, .yml or .json file. Raises InputError on an unreadable or invalid file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(str(path), type(error).__name__, "a readable text file is needed") from None
        return cls.from_yaml(text, str(path))

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-able data, enums as their values."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """One line of canonical JSON (sorted keys)."""
        return json.dumps(self.to_data(), sort_keys=True, separators=(",", ":"))

    def to_yaml(self) -> str:
        """A YAML document in field order."""
        return yaml.safe_dump(self.to_data(), sort_keys=False)

    def digest(self, *, without: frozenset[str] = frozenset()) -> str:
        """The first 16 hex digits of the SHA-256 of the canonical JSON, less the fields in `without`."""
        data = {key: value for key, value in self.to_data().items() if key not in without}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _input_error(error: ValidationError, what: str) -> InputError:
    """The first complaint of pydantic as one InputError; the number of further ones is told."""
    errors = error.errors(include_url=False)
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"])
    name = f"{what}: {place}" if place else what
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        return InputError(name, first.get("input"), f"this key is not known{more}")
    value = first.get("input")
    if first["type"] == "missing":
        value = None
    return InputError(name, value, f"{first['msg']}{more}")
