"""Are best-known plans found as quickly among 100,000 entries and a million measurements as among few?

Fills an empty database with entries of made-up models, sizes and speeds (only where rows lie matters here) and
measurements beside them, and times exact and nearest questions: each reads its documents back and looks for the
cluster's newest environment. Prints median and 99th percentile in milliseconds.

    python benchmarks/knowledge_scale.py sqlite:///scale.db 10000 100000
    python benchmarks/knowledge_scale.py postgresql://USER:PASSWORD@HOST/EMPTY_DATABASE 100000 1000000
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import insert, select, text

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.parameters import total_parameters
from autotune.knowledge.nearness import nearest
from autotune.specs import BestEntry, ClusterSpec, DType, Fingerprint, ModelSpec, Plan, Workload
from storage import SqlStore, open_store
from storage.knowledge import BestRow, DocumentRow, best_values
from storage.tunings.tables import CollectiveRow, ProbeRow

GPUS = ("a100-80gb-sxm", "h100-80gb-sxm", "h200-141gb-sxm", "b200-180gb-sxm")
QUESTIONS = 2_000
READINGS = 100
BATCH = 5_000
RUN = {"kind": "collective", "request_json": "{}", "wall_s": 1.0, "gpu_s": 8.0, "setup_s": 0.1}
READING = {
    "op": "all_reduce", "group_size": 8, "stride": 1, "iterations": 7, "time_s": 1e-3, "time_p10_s": 9e-4,
    "time_p90_s": 2e-3, "algbw_bytes_per_s": 1e10, "busbw_bytes_per_s": 2e10,
}  # fmt: skip
NOW = datetime(2026, 11, 1, tzinfo=UTC)


class Filling:
    """Rows of a store, made from a seed."""

    def __init__(self, store: SqlStore, seed: int) -> None:
        self.store, self.random = store, np.random.default_rng(seed)
        base = preset("llama3.1-8b")
        self.models = [
            base.model_copy(update={"name": f"model-{i}", "layers": 8 + i % 120, "ffn": 8192 + 256 * (i // 120)})
            for i in range(2_000)
        ]
        self.parameters = [float(total_parameters(model)) for model in self.models]
        self.clusters = [cluster_from_shorthand(f"{gpu}:{2**i}x8") for gpu in GPUS for i in range(8)]
        self.workloads = [
            Workload(seq_len=2**i, global_batch=2**j, dtype=DType.BF16) for i in range(10, 16) for j in range(6, 12)
        ]
        self.fingerprint = store.put_fingerprint(
            Fingerprint(hostname="node", device_name="h100", device_count=8, device_memory_bytes=80 * 2**30)
        )

    def question(self) -> tuple[ModelSpec, float, ClusterSpec, Workload]:
        """A model, its parameters, a cluster and a workload at random."""
        i, j, k = (int(self.random.integers(len(items))) for items in (self.models, self.clusters, self.workloads))
        return self.models[i], self.parameters[i], self.clusters[j], self.workloads[k]

    def entries(self, count: int) -> None:
        """Stores `count` entries for different questions."""
        asked: dict[tuple[str, str, str], tuple[ModelSpec, float, ClusterSpec, Workload]] = {}
        while len(asked) < count:
            model, parameters, cluster, workload = self.question()
            asked[(model.name, cluster.name, workload.key)] = (model, parameters, cluster, workload)
        self.insert(DocumentRow, [{"digest": spec.digest(), "spec_json": spec.to_json()} for spec in self.specs()])
        self.insert(BestRow, [self.row(*question) for question in asked.values()])

    def specs(self) -> list[ModelSpec | ClusterSpec | Workload]:
        """Everything that entries name."""
        return [*self.models, *self.clusters, *self.workloads]

    def row(self, model: ModelSpec, parameters: float, cluster: ClusterSpec, workload: Workload) -> dict[str, Any]:
        """One entry as a row."""
        speed = float(self.random.uniform(1e3, 2e4))
        entry = BestEntry(
            model=model, parameters=parameters, cluster=cluster, workload=workload, plan=Plan(dp=cluster.devices),
            tokens_per_s_per_gpu=speed, interval=(0.99 * speed, 1.01 * speed), repeats=3, peak_bytes=60 * 2**30,
            memory_source="made up", tuning_id=None, fingerprint_key=self.fingerprint, environment_key="e",
            measured_at=NOW - timedelta(minutes=int(self.random.integers(500_000))),
        )  # fmt: skip
        digests = {f"{name}_digest": getattr(entry, name).digest() for name in ("model", "cluster", "workload")}
        return best_values(entry) | digests

    def measurements(self, count: int) -> None:
        """Stores `count` collective measurements in probe runs of READINGS each, spread over the clusters."""
        runs, readings = [], []
        for number in range(count // READINGS):
            cluster = self.clusters[number % len(self.clusters)]
            run = f"run-{number}"
            keys = {"cluster_key": cluster.key, "fingerprint_key": self.fingerprint}
            moment = NOW - timedelta(seconds=int(self.random.integers(30_000_000)))
            runs.append(keys | RUN | {"id": run, "cluster_json": "{}", "finished_at": moment})
            readings += [keys | READING | {"probe_run_id": run, "size_bytes": 4096 * (i + 1)} for i in range(READINGS)]
        self.insert(ProbeRow, runs)
        self.insert(CollectiveRow, readings)

    def insert(self, table: type[Any], rows: Sequence[dict[str, Any]]) -> None:
        """Inserts rows in batches."""
        for start in range(0, len(rows), BATCH):
            with self.store.writing() as session:
                session.execute(insert(table), rows[start : start + BATCH])


def times_ms(name: str, calls: Sequence[Callable[[], object]]) -> None:
    """Times each call once and prints the distribution."""
    taken = []
    for call in calls:
        before = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - before))
    print(f"{name:<28} median {np.median(taken):7.2f} ms   p99 {np.percentile(taken, 99):7.2f} ms", flush=True)


def main(url: str, entries: int, measurements: int) -> None:
    """Fills an empty database and times; one that is filled already is only timed."""
    with open_store(url) as store:
        filling = Filling(store, seed=1)
        if not store.best_page(limit=1):
            filling.entries(entries)
            filling.measurements(measurements)
            with store.writing() as session:
                session.execute(text("ANALYZE"))
        with store.reading() as session:
            ids = session.scalars(select(BestRow.id)).all()
        # Only what is asked for is kept: a heap of 100,000 entries would make Python's collector a part of the times.
        picked = [store.best_entry(ids[int(i)]) for i in filling.random.integers(len(ids), size=QUESTIONS)]
        chosen = [(entry.model, entry.parameters, entry.cluster, entry.workload) for entry in picked]
        unknown = [
            (model, parameters, cluster, workload.model_copy(update={"seq_len": workload.seq_len + 128}))
            for model, parameters, cluster, workload in chosen
        ]

        def exact(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> None:
            assert store.best_exact(model, cluster, workload)
            store.newest_fingerprint(cluster.key)

        def near(model: ModelSpec, parameters: float, cluster: ClusterSpec, workload: Workload) -> None:
            found = nearest(store.best_near(model, parameters, cluster, workload), model, parameters, cluster, workload)
            assert found
            store.best_entry(found[0].entry.id)

        print(f"{entries} entries, {measurements} measurements, {QUESTIONS} questions each")
        times_ms("exact", [partial(exact, model, cluster, workload) for model, _, cluster, workload in chosen])
        times_ms("nearest", [partial(near, *question) for question in unknown])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
