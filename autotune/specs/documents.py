"""YAML and JSON documents as plain data, read so that what a file says is what we take.

YAML is read by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): PyYAML's own rules are
those of 1.1, where `50.0e9` is a text and `1:20` the number 80. A key that is given twice is an error, and so is an
alias: a few lines of aliases can describe a document of gigabytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import InputError

LONGEST_BYTES = 4 * 2**20
"""Far more than any file of ours or config.json; /dev/zero has more."""


def read_document(path: Path, *, infinite: bool = False) -> Any:
    """The plain data in a YAML or JSON file. Raises InputError for a file that cannot be read or understood."""
    return parse_document(read_text(path), str(path), as_json=path.suffix.lower() == ".json", infinite=infinite)


def parse_document(text: str, what: str, *, as_json: bool = False, infinite: bool = False) -> Any:
    """The plain data in a YAML or JSON text.

    Args:
        text: the document.
        what: its name as the user knows it, for errors.
        as_json: accept nothing but JSON.
        infinite: take the words Infinity and NaN of JSON, which Python writes, as null: there is no such bound.

    Raises:
        InputError: text that is no such document, repeats a key, or uses aliases.
    """
    try:
        if as_json:
            constant = _unbounded if infinite else _finite
            return json.loads(text, object_pairs_hook=_object, parse_float=_finite, parse_constant=constant)
        return yaml.load(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise InputError(what, "text", f"a YAML or JSON document is needed ({line})") from None


def to_yaml(data: object) -> str:
    """A YAML document of plain data in its own order, that readers of YAML 1.1 and of 1.2 understand alike."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    return text


def read_text(path: str | Path) -> str:
    """The text of a file. Raises InputError for one that cannot be read or is too long."""
    path = Path(path)
    if os.path.isdir(path):  # unlike Path.is_dir, this raises nothing for a name that no file can have
        raise InputError(str(path), "a directory", "name the file in it")
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_BYTES + 1)
        if len(content) > LONGEST_BYTES:
            raise InputError(str(path), "a long file", f"a file of at most {LONGEST_BYTES} bytes is needed")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InputError(str(path), reason, "a readable text file is needed") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    """The number; JSON's readers know NaN and Infinity too, and read 1e999 as the latter."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _unbounded(text: str) -> None:
    """What stands for Infinity and NaN."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2, without aliases and repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not understood: repeat the value", mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return _finite(self.construct_scalar(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen: set[str] = set()
        for key in keys:
            if key.value in seen:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; it quotes texts that are numbers by either version's rules."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
