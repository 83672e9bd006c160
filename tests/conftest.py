"""What may be skipped, and when; the command line in a home of its own; and servers, which a whole run shares.

Markers: `gpu` needs a CUDA device, `shared` the published measurements in ../shared, `netns` root and network
namespaces. Where the need is not met the test is skipped. With CI=true a skip for any other reason than a GPU or
../shared is turned into a failure, so that CI never goes green on tests it did not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import Command, Done
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from databases import Databases
    from services import PostgresServer

SHARED = Path(__file__).resolve().parents[2] / "shared"
MAY_SKIP_IN_CI = ("gpu", "shared")

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@cache
def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@cache
def _has_shared() -> bool:
    return (SHARED / "data").is_dir()


@cache
def _has_netns() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0 or shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        return False
    return subprocess.run([unshare, "--net", "true"], capture_output=True, check=False).returncode == 0


NEEDS = {
    "gpu": (_has_gpu, "needs a CUDA device"),
    "shared": (_has_shared, "needs ../shared/data"),
    "netns": (_has_netns, "needs root, iproute2 and network namespaces"),
}


TOGETHER = ("service", "probes")
"""Folders whose tests share servers or ranks: all of one go to one process, where several share the tests."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what goes to one process, and begins with the longest: then waiting tests run beside tests of ranks."""
    places: dict[str, int] = {}
    for item in items:
        folder = next((name for name in TOGETHER if name in item.path.parts), "")
        group = folder or item.path.name
        places[item.nodeid] = TOGETHER.index(folder) if folder else len(TOGETHER)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: places[item.nodeid])


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (is_met, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not is_met():
            pytest.skip(reason)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    allowed = any(item.get_closest_marker(marker) for marker in MAY_SKIP_IN_CI)
    if report.skipped and not hasattr(report, "wasxfail") and _in_ci() and not allowed:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and _in_ci():
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which CI does not allow: {report.longrepr}"
    return report


@pytest.fixture
def autotune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `autotune ARGUMENTS...` in this process, in an empty folder with no database of the user's."""
    for variable, folder in (("XDG_DATA_HOME", "data"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.delenv("AUTOTUNE_LOG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        from autotune.cli.main import main

        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Done(status=exit_.value.code, out=out, err=err)

    return run


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    from services import postgres_binaries, postgres_server

    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed")
    with postgres_server(binaries) as server:
        yield server


@pytest.fixture(scope="session")
def databases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Databases:
    from databases import Databases

    return Databases(tmp_path_factory.mktemp("databases"), lambda: request.getfixturevalue("postgres"))
