"""The project's documents name files and modules that there are, and their lines fit on a screen."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.rooms import ROOT, sources

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
# `search.ranking`, `storage.fleet.leases`, `regression.windows.Window`: with or without the package's name before it.
MODULE = re.compile(r"`((?:autotune\.)?[a-z_]+(?:\.[A-Za-z_]+)+)(?:\(\))?`")
FILE = re.compile(r"`((?:autotune|probes|storage|workers|tests|benchmarks|deploy|docs)/[\w./-]+\.\w+)`")


@cache
def modules() -> dict[str, set[str]]:
    """The names at the top level of each module, and those below its classes, by its dotted name."""
    return {
        name: {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "name")}
        | set(re.findall(r"^([A-Z_]+)\b", path.read_text(encoding="utf-8"), re.MULTILINE))
        for name, path in sources()
    }


def is_there(dotted: str) -> bool:
    """Whether the name is a module, or something in one."""
    known, parts = modules(), dotted.split(".")
    return any(
        ".".join(parts[:cut]) in known and set(parts[cut:]) <= known[".".join(parts[:cut])]
        for cut in range(1, len(parts) + 1)
    )


def anchors(document: Path) -> set[str]:
    """What links to places in a document may name: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
        found = document.parent / target if target else document
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_are_there(document: Path) -> None:
    rooms = {name.removeprefix("autotune.").partition(".")[0] for name in modules()}
    named = {
        name
        for name in MODULE.findall(document.read_text(encoding="utf-8"))
        if name.removeprefix("autotune.").partition(".")[0] in rooms
    }
    own = {"search." + verb for verb in ("legal", "table", "best")}  # of a `search` in docs/search.md, not of the room
    files = {name for name in named if name.endswith((".md", ".py", ".yaml"))}
    assert {name for name in named - own - files if not (is_there(name) or is_there(f"autotune.{name}"))} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_have_120_characters_at_most(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    assert {number: len(line) for number, line in enumerate(lines, 1) if len(line) > 120} == {}
