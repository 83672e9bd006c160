"""The data files of the catalog, and the error for a name that they do not hold."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

import yaml

from autotune.errors import UnknownNameError


def rows(file: str, key: str) -> list[dict[str, Any]]:
    """The list under `key` of a data file of this package."""
    text = files("autotune.catalog").joinpath(file).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times faster, where PyYAML has it
    found: list[dict[str, Any]] = yaml.load(text, Loader=loader)[key]
    return found


def unknown(what: str, name: str, known: Sequence[str]) -> UnknownNameError:
    """Lists the names that are close to `name`, or all where none is."""
    close = get_close_matches(name.lower(), known, n=8, cutoff=0.6)
    return UnknownNameError(what, name, close or known)
