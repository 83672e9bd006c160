"""Imports point down only, the picture of them is today's, and the control plane stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from benchmarks.rooms import PICTURE, ROOT, imports, picture, reduced, room_of, sources

# What each room may import from the other rooms, and nothing else: each arrow of today's code, all of them down.
BASE = {"errors", "specs"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "shown": {"errors"},
    "specs": {"errors", "shown"},
    "settings": {"errors"},
    "catalog": BASE,
    "cost": BASE,
    "frameworks": BASE | {"catalog"},
    "ports": BASE,
    "search": BASE | {"cost"},
    "explain": BASE | {"cost", "search"},
    "backtest": BASE | {"shown", "cost", "search"},
    "knowledge": BASE | {"cost", "search", "ports"},
    "imports": BASE | {"catalog", "cost", "search", "ports", "backtest"},
    "tuning": BASE | {"cost", "frameworks", "search", "ports", "explain", "imports", "knowledge"},
    "fleet": BASE | {"settings", "search", "ports", "tuning"},
    "regression": BASE | {"shown", "cost", "settings", "search", "ports", "knowledge", "tuning", "fleet"},
    "queue": BASE | {"settings"},
    "client": BASE | {"settings"},
    "probes": BASE | {"ports"},
    "storage": BASE | {"files", "shown", "ports"},
}
BELOW_THE_DOORS = set(ALLOWED)
ALLOWED |= {
    "wiring": BELOW_THE_DOORS - {"client"},
    "workers": BASE | {"shown", "settings", "ports", "fleet", "regression", "queue", "wiring"},
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
    "optuna": {"search"},
    "pandas": {"storage"},
    "pyarrow": {"storage"},
    "fastapi": {"api"},
    "starlette": {"api"},
    "uvicorn": {"api"},
    "sse_starlette": {"api"},
    "prometheus_client": {"api"},
    "limits": {"api"},
    "cachetools": {"api"},
    "httpx": {"client"},
    "matplotlib": {"regression"},
    "typer": {"cli"},
    "rich": {"cli"},
}


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


def test_the_picture_in_contributing_is_of_today() -> None:
    drawn = PICTURE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert drawn == [picture()], "draw it again: python -m benchmarks.rooms --write"


def test_an_arrow_over_other_rooms_is_not_drawn() -> None:
    arrows = {"cli": {"wiring", "cost", "specs"}, "wiring": {"cost"}, "cost": {"specs"}}
    assert reduced(arrows) == {"cli": {"wiring"}, "wiring": {"cost"}, "cost": {"specs"}}


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
        ("autotune.tuning.request", "import torch.distributed"),
        ("autotune.tuning.request", "from storage import open_store"),
        ("storage.store", "from autotune.tuning import request"),
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
        "autotune.tuning.request",
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
