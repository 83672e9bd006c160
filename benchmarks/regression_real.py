"""The nightly regression on real ranks of this machine, with real trouble.

    python benchmarks/regression_real.py unchanged|neighbour|code|link ...

unchanged: nothing. neighbour: a busy process on the core of rank 1. code: the step's code takes 10 % longer (patched
in the ranks alone, by a sitecustomize on their path). link: two nodes in network namespaces, whose link is halved
(needs root and iproute2). Each takes a first check, the trouble and a second check, and prints what was found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from autotune.catalog import smallest
from autotune.fleet.local import LocalFleet
from autotune.regression.local import LocalRegression
from autotune.specs import BestEntry, ClusterSpec, DType, Plan, Workload
from autotune.specs.regression import Check
from autotune.wiring import merge_reports, share_of
from probes.launch import NodeRanks, Placement
from storage import open_store

FAST, HALVED = "200mbit", "100mbit"
NAMES, DEVICES, ADDRESS = ("autotune-rr-a", "autotune-rr-b"), ("ve-rr-a", "ve-rr-b"), "10.231.78."

SLOWER_STEP = textwrap.dedent(
    """
    import importlib.util, sys, time

    class Patch:
        def find_spec(self, name, path=None, target=None):
            if name != "probes.training":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                step = module.Training.step
                def slower(self, *arguments):
                    import torch
                    start = time.perf_counter()
                    loss = step(self, *arguments)
                    end = time.perf_counter() + 0.10 * (time.perf_counter() - start)
                    work = torch.ones(64, 64)
                    while time.perf_counter() < end:
                        work = torch.mm(work, work).clamp(-1.0, 1.0)
                    return loss
                module.Training.step = slower
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Patch())
    """
)


def entry() -> BestEntry:
    """A small model, data parallel on two CPU ranks."""
    device = {"name": "cpu-rank", "kind": "cpu", "memory_bytes": 1 << 30}
    data = {"name": "box", "nodes": 1, "gpus_per_node": 2, "device": device, "intra": {"name": "loopback"}}
    return BestEntry(
        model=smallest(), parameters=1.0, cluster=ClusterSpec.from_data(data), plan=Plan(dp=2),
        workload=Workload(seq_len=128, global_batch=8, dtype=DType.FP32), tokens_per_s_per_gpu=2000.0,
        interval=(1900.0, 2100.0), repeats=1, peak_bytes=None, measured_at=datetime.now(UTC),
    )  # fmt: skip


def pinned(environment: dict[str, str] | None = None) -> list[Placement]:
    """A core a rank."""
    return [Placement(command_prefix=("taskset", "-c", str(rank)), environment=environment or {}) for rank in range(2)]


@contextmanager
def neighbour() -> Iterator[None]:
    """A busy process on the core of rank 1."""
    command = ["taskset", "-c", "1", sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def wire(rate: str) -> Iterator[list[Placement]]:
    """Two namespaces and a link of that rate; a rank in each."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        pair = ["ip", "link", "add", DEVICES[0], "netns", NAMES[0], "type", "veth", "peer", "name", DEVICES[1]]
        subprocess.run([*pair, "netns", NAMES[1]], check=True)
        for number, (name, device) in enumerate(zip(NAMES, DEVICES, strict=True), 1):
            inside = ["ip", "netns", "exec", name]
            subprocess.run([*inside, "ip", "address", "add", f"{ADDRESS}{number}/24", "dev", device], check=True)
            for each in ("lo", device):
                subprocess.run([*inside, "ip", "link", "set", each, "up"], check=True)
        limit(rate, "add")
        yield [
            Placement(
                command_prefix=("ip", "netns", "exec", name), environment={"GLOO_SOCKET_IFNAME": device},
                address=f"{ADDRESS}{number}",
            )
            for number, (name, device) in enumerate(zip(NAMES, DEVICES, strict=True), 1)
        ]  # fmt: skip
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def limit(rate: str, verb: str) -> None:
    """Gives the link that rate, each way."""
    for name, device in zip(NAMES, DEVICES, strict=True):
        words = ["tc", "qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms"]
        subprocess.run(["ip", "netns", "exec", name, *words], check=True)


class Trial:
    """Checks of one entry, one night after the other."""

    def __init__(self, folder: Path, of: BestEntry) -> None:
        self.folder = folder
        self.store = open_store(f"sqlite:///{folder / 'a.db'}")
        self.entry = self.store.put_best(of)

    def night(self, placements: Sequence[Placement], label: str) -> Check:
        """One check; prints what it found."""

        def ranks() -> NodeRanks:
            return NodeRanks(log_root=self.folder / "logs", placements=placements)

        def fleet(cluster: ClusterSpec) -> LocalFleet:
            return LocalFleet(self.store, cluster, ranks, merge=merge_reports, share_of=share_of)

        regression = LocalRegression(self.store, fleet)
        check = regression.run([self.entry], retune=False).checks[0]
        result = check.result
        assert result is not None
        windows = f"{len(result.windows)} windows, load {os.getloadavg()[0]:.1f}"
        print(f"{label}: {result.verdict}; {result.message} ({windows})", flush=True)
        noise = f"within {result.within:.3f}, windows {result.between:.3f}, visits {result.visits:.3f}"
        if result.cause is not None:
            print(
                f"  blamed: {result.cause.kind}: {result.cause.subject}: {result.cause.text}; noise {noise}", flush=True
            )
            for control in result.cause.controls:
                print(f"  {control.role}: {control.effect:+.1%}, {control.interval}, {control.step_effect}", flush=True)
        return check


def run(name: str, folder: Path) -> None:
    """One kind of trouble."""
    trial = Trial(folder, entry())
    if name == "link":
        with wire(FAST) as placements:
            trial.night(placements, f"link at {FAST}")
            trial.night(placements, f"link at {FAST}")
            limit(HALVED, "change")
            trial.night(placements, f"link at {HALVED}")
            limit(FAST, "change")
            trial.night(placements, f"link at {FAST}")
        return
    trial.night(pinned(), "as it is")
    if name == "neighbour":
        with neighbour():
            trial.night(pinned(), "a busy neighbour of rank 1")
    elif name == "code":
        (folder / "sitecustomize.py").write_text(SLOWER_STEP)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        trial.night(pinned({"PYTHONPATH": path}), "step code 10 % slower")
    trial.night(pinned(), "as it was")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for trouble in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            run(trouble, Path(directory))
