"""Configs of training frameworks as flat settings: TOML, JSON, YAML, and Python that is read and never run."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from autotune.errors import InputError
from autotune.frameworks.table import Said

LONGEST = 200_000
"""Characters of a config; a launch's have a few thousand."""

DEEPEST = 50


def toml(file: str, text: str) -> dict[str, Said]:
    """A TOML file's settings by their dotted names. Raises InputError for what is not TOML."""
    _check_length(file, text)
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(file, None, f"it is not TOML: {error}") from None
    return flat(file, found)


def json_object(file: str, text: str) -> dict[str, Any]:
    """A JSON object. Raises InputError for anything else."""
    _check_length(file, text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(file, twice, "this key stands twice")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(file, None, f"it is not JSON: {error}") from None
    return _object(file, found)


def yaml_object(file: str, text: str) -> dict[str, Any]:
    """A YAML mapping. Raises InputError for anything else."""
    _check_length(file, text)
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = getattr(error, "problem", None) or error
        mark = getattr(error, "problem_mark", None)
        raise InputError(
            file, None, f"it is not YAML: {problem}{f' in line {mark.line + 1}' if mark else ''}"
        ) from None
    return _object(file, found)


def flat(file: str, nested: Mapping[str, Any]) -> dict[str, Said]:
    """Nested settings by their dotted names."""
    return {name: Said(value) for name, value in _flat(file, nested, "", 0)}


def nest(settings: Mapping[str, object]) -> dict[str, Any]:
    """Dotted settings as nested ones, those without a value left out."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None:
            continue
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def dumped(nested: Mapping[str, Any]) -> str:
    """A JSON file's text."""
    return json.dumps(nested, indent=2) + "\n"


def _flat(file: str, value: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    if depth > DEEPEST:
        raise InputError(file, prefix, f"settings within settings, at most {DEEPEST} deep, are understood")
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from _flat(file, item, f"{name}.", depth + 1)
        else:
            yield name, item


def _object(file: str, found: object) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(
            file,
            found if isinstance(found, str | int | None) else type(found).__name__,
            "an object of named settings is needed",
        )
    return found


def _check_length(file: str, text: str) -> None:
    if len(text) > LONGEST:
        raise InputError(file, f"{len(text)} characters", f"a config of at most {LONGEST} is understood")


class PythonConfig:
    """A Python module whose functions build configs of calls with keywords: read, and never run.

    A call's keywords are settings below it, and its name is a setting itself: `a=F(b=1)` is a = "F" and a.b = 1.
    Names of literals, of other functions of the module and of what was assigned before are looked up.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        _check_length(file, text)
        try:
            self._module = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise InputError(file, None, f"it is not Python{f': line {line}' if line else ''}") from None
        self._globals = {
            target.id: node.value
            for node in self._module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.functions = {node.name: node for node in self._module.body if isinstance(node, ast.FunctionDef)}

    def settings(self, name: str) -> dict[str, Said]:
        """What the function of this name returns."""
        found: dict[str, Said] = {}
        try:
            self._function(name, found, 0)
        except RecursionError:
            raise InputError(self.file, name, "expressions that are less deep are understood") from None
        return found

    def _function(self, name: str, found: dict[str, Said], depth: int) -> None:
        if depth > DEEPEST:
            raise InputError(self.file, name, "a function that calls itself is not understood")
        local = dict(self._globals)
        for node in self.functions[name].body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    local[target.id] = node.value
                    if self._is_base(node.value):
                        self._put("", node.value, local, found, depth)
                elif isinstance(target, ast.Attribute):
                    path = ast.unparse(target).partition(".")[2]
                    for key in [key for key in found if key == path or key.startswith(f"{path}.")]:
                        del found[key]
                    self._put(path, node.value, local, found, depth)
            elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Name):
                self._put("", node.value, local, found, depth)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and not found:
                self._put("", local.get(node.value.id, node.value), local, found, depth)

    def _is_base(self, node: ast.expr) -> bool:
        """Whether this is a whole config that the function starts from: a call without arguments."""
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args and not node.keywords

    def _put(
        self, path: str, node: ast.expr, local: Mapping[str, ast.expr], found: dict[str, Said], depth: int
    ) -> None:
        if depth > DEEPEST:
            raise InputError(self.file, path, f"settings within settings, at most {DEEPEST} deep, are understood")
        where = f"line {node.lineno}"
        if isinstance(node, ast.Name) and node.id in local and local[node.id] is not node:
            self._put(path, local[node.id], local, found, depth + 1)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if isinstance(node.func, ast.Name) and name in self.functions and not node.args and not node.keywords:
                inner: dict[str, Said] = {}
                self._function(name, inner, depth + 1)
                inner.setdefault("base", Said(name, where))
                found.update({f"{path}.{key}".strip("."): said for key, said in inner.items()})
                return
            if path or isinstance(node.func, ast.Name):
                found[path or "base"] = Said(name, where)
            for at, argument in enumerate(node.args):
                self._put(f"{path}.{at}".strip("."), argument, local, found, depth + 1)
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._put(f"{path}.{keyword.arg}".strip("."), keyword.value, local, found, depth + 1)
        else:
            try:
                found[path] = Said(ast.literal_eval(node), where)
            except (ValueError, TypeError, MemoryError, RecursionError):
                found[path] = Said(ast.unparse(node), where)
