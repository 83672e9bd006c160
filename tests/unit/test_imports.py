"""Imports point down only, and the control plane stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("autotune", "probes", "storage", "workers")

# What each room may import from the other rooms, and nothing else: each arrow of today's code, all of them down.
BASE = {"errors", "specs"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "specs": {"errors"},
    "settings": {"errors"},
    "catalog": BASE,
    "cost": BASE,
    "export": BASE,
    "ports": BASE,
    "search": BASE | {"cost"},
    "explain": BASE | {"cost", "search"},
    "backtest": BASE | {"cost", "search"},
    "knowledge": BASE | {"cost", "search", "ports"},
    "imports": BASE | {"catalog", "cost", "search", "backtest"},
    "tuning": BASE | {"cost", "search", "ports", "explain", "imports", "knowledge"},
    "fleet": BASE | {"search", "ports", "tuning"},
    "regression": BASE | {"cost", "settings", "search", "ports", "knowledge", "tuning", "fleet"},
    "queue": BASE | {"settings"},
    "client": BASE | {"settings"},
    "probes": BASE | {"ports"},
    "storage": BASE | {"ports"},
}
BELOW_THE_DOORS = set(ALLOWED)
ALLOWED |= {
    "wiring": BELOW_THE_DOORS - {"client"},
    "workers": BASE | {"settings", "ports", "queue", "wiring"},
    "api": BELOW_THE_DOORS - {"probes", "storage", "queue", "client"} | {"wiring"},
    "cli": BELOW_THE_DOORS | {"wiring", "workers", "api"},
}

# The rooms that may import a heavy library.
HEAVY: dict[str, set[str]] = {
    "torch": {"probes"},
    "celery": {"queue", "workers"},
    "redis": {"queue", "workers"},
    "sqlalchemy": {"storage"},
    "alembic": {"storage"},
    "optuna": {"search", "storage"},
    "pandas": {"storage"},
    "pyarrow": {"storage"},
    "fastapi": {"api"},
    "starlette": {"api"},
    "uvicorn": {"api"},
    "sse_starlette": {"api"},
    "prometheus_client": {"api"},
    "limits": {"api"},
    "httpx": {"client"},
    "matplotlib": {"cli"},
    "typer": {"cli"},
    "rich": {"cli"},
}


def room_of(module: str) -> str | None:
    """The room of a dotted module name; None for libraries and for the bare package `autotune`."""
    package, *rest = module.split(".")
    if package != "autotune":
        return package if package in PACKAGES else None
    return rest[0] if rest else None


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


def violations(module: str, text: str, *, is_package: bool = False) -> list[str]:
    """Each import of `text` that its room may not make."""
    room = room_of(module)
    found = []
    for line, name in imports(ast.parse(text), module, is_package=is_package):
        target, library = room_of(name), name.partition(".")[0]
        if target and target != room and room is not None and target not in ALLOWED[room]:
            found.append(f"{module}:{line} {room} imports {name}")
        if library in HEAVY and room not in HEAVY[library]:
            found.append(f"{module}:{line} {room} imports {library}")
    return found


def sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def test_every_room_is_known() -> None:
    assert {room for module, _ in sources() if (room := room_of(module))} <= set(ALLOWED)


def test_imports_point_down_only() -> None:
    found = [
        line
        for module, path in sources()
        for line in violations(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
    ]
    assert found == []


def test_the_arrows_go_round_in_no_circle() -> None:
    left = {room: set(targets) for room, targets in ALLOWED.items()}
    while free := {room for room, targets in left.items() if not targets}:
        left = {room: targets - free for room, targets in left.items() if room not in free}
    assert left == {}


def test_no_modules_import_each_other() -> None:
    known = dict(sources())
    needs = {
        module: {
            target
            for _, name in imports(
                ast.parse(path.read_text(encoding="utf-8")), module, is_package=path.name == "__init__.py"
            )
            if (target := name if name in known else name.rpartition(".")[0]) in known and target != module
        }
        for module, path in known.items()
    }
    while free := {module for module, targets in needs.items() if not targets & set(needs)}:
        needs = {module: targets for module, targets in needs.items() if module not in free}
    assert needs == {}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("autotune.specs.plan", "from autotune.cost import estimate"),
        ("autotune.cost.memory", "def f():\n    import autotune.search.space"),
        ("autotune.cost.memory", "from ..search import space"),
        ("autotune.search.offline", "from autotune import cost, tuning"),
        ("autotune.tuning.service", "import torch.distributed"),
        ("autotune.tuning.service", "from storage import open_store"),
        ("storage.store", "from autotune.tuning import service"),
        ("probes.launch.pool", "from autotune.wiring import store"),
        ("autotune.wiring", "from autotune.cli import main"),
    ],
)
def test_an_arrow_that_points_up_is_found(module: str, text: str) -> None:
    assert len(violations(module, text)) == 1


def modules_after(code: str) -> set[str]:
    """The top-level modules loaded once a fresh interpreter has run `code`."""
    program = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "autotune",
        "autotune.cli.main",
        "autotune.wiring",
        "autotune.tuning.service",
        "probes",
        "probes.launch",
        "storage",
    ],
)
def test_importing_the_control_plane_loads_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_help_loads_only_what_it_prints_with() -> None:
    code = "from autotune.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    heavy = {"torch", "optuna", "pandas", "numpy", "scipy", "sqlalchemy", "pydantic", "pyarrow", "psutil", "yaml"}
    assert modules_after(code) & heavy == set()
