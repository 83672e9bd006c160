"""The rooms of the code, read from its imports: the picture in CONTRIBUTING.md, and how much each room holds.

python -m benchmarks.rooms                   # a table: files, lines and definitions of each room
python -m benchmarks.rooms --root DIR        # the same of another checkout, such as an earlier one
python -m benchmarks.rooms --write           # draw the picture in CONTRIBUTING.md again

The picture has an arrow from each room to those that it imports, except where the way is there over other rooms.
`tests/unit/test_imports.py` guards the arrows, and fails where the picture is not today's.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("autotune", "probes", "storage", "workers")
PICTURE = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def room_of(module: str) -> str | None:
    """The room of a dotted module name; None for libraries and for the bare package `autotune`."""
    package, *rest = module.split(".")
    if package != "autotune":
        return package if package in PACKAGES else None
    return rest[0] if rest else None


def sources(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of the packages."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, wherever in the file; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    """For each room the other rooms that its modules import."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in sources(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        room = room_of(module)
        for _, name in imports(tree, module, is_package=path.name == "__init__.py"):
            target = room_of(name)
            if room and target and target != room:
                found[room].add(target)
    return dict(found)


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows without those whose end is also reached over another room. They must not go round in a circle."""

    def behind(room: str) -> set[str]:
        return set().union(*({target} | behind(target) for target in arrows.get(room, ())))

    return {
        room: targets - set().union(*(behind(target) for target in targets)) for room, targets in sorted(arrows.items())
    }


def picture(root: Path = ROOT) -> str:
    """A Mermaid flow chart of the rooms; those that are packages of their own are drawn round."""
    drawn = reduced(arrows(root))
    rooms = sorted({*drawn, *set().union(*drawn.values())})
    shapes = [f"    {room}([{room}])" for room in rooms if room in PACKAGES]
    lines = [f"    {room} --> {target}" for room, targets in drawn.items() for target in sorted(targets)]
    return "\n".join(["flowchart TD", *shapes, *lines]) + "\n"


def code_lines(text: str) -> int:
    """Lines that hold code: neither blank, nor a comment, nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def table(root: Path = ROOT) -> str:
    """Files, lines, lines of code and top-level definitions of each room, as a Markdown table."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for module, path in sources(root):
        text = path.read_text(encoding="utf-8")
        definitions = sum(isinstance(node, DEFINITIONS) for node in ast.parse(text).body)
        held = [1, len(text.splitlines()), code_lines(text), definitions]
        for name in (room_of(module) or "autotune", "all"):
            sums[name] = [before + now for before, now in zip(sums[name], held, strict=True)]
    rows = ["| room | files | lines | lines of code | definitions | lines a definition |", "|---|---|---|---|---|---|"]
    for name, (files, lines, code, definitions) in sorted(sums.items(), key=lambda item: item[1][1]):
        size = lines / max(definitions, 1)
        rows.append(f"| {name} | {files} | {lines:,} | {code:,} | {definitions:,} | {size:.0f} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the table, or draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if not given.write:
        print(table(given.root))
        return
    document = given.root / "CONTRIBUTING.md"
    text = document.read_text(encoding="utf-8")
    document.write_text(PICTURE.sub(lambda _: picture(given.root), text), encoding="utf-8")


if __name__ == "__main__":
    main()
