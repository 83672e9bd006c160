"""What a tuning learns from imports: transfers, links and first plans; never results of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from store_records import FINGERPRINT, step_reading

from autotune.catalog import load_model
from autotune.catalog.gpus import cluster_from_shorthand
from autotune.cost.calibrate import fit_profile
from autotune.errors import UnknownNameError
from autotune.imports.learning import fastest_plans, framework_of, transfers_from, trials_of, with_links
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    ComputeFit,
    Failure,
    FailureKind,
    FrameworkName,
    Plan,
    Profile,
    Trial,
    TrialState,
    Tuning,
    TuningState,
    Workload,
)
from autotune.specs.imported import ImportBatch, ImportedReading, ImportedRun
from autotune.tuning.planner import Planner
from autotune.tuning.request import submit, tuning_of
from storage import SqlStore, open_store

MODEL, CLUSTER = load_model("llama3.2-1b"), cluster_from_shorthand("h100-80gb-sxm:1x8")
WORKLOAD = Workload(seq_len=4096, global_batch=64)
FAST, SLOW = Plan(tp=2, dp=4, micro_batch=2, zero_stage=1), Plan(dp=8, micro_batch=1, zero_stage=2)


def run(plan: Plan, speed: float | None, *, cluster: ClusterSpec = CLUSTER, **changes: object) -> ImportedRun:
    failure = None if speed else Failure(kind=FailureKind.OOM, message="out of memory")
    interval = None if speed is None else (0.99 * speed, 1.01 * speed)
    values = {"where": "a.log, line 1", "framework": "torch", "model": MODEL, "workload": WORKLOAD, **changes}
    return ImportedRun(
        **values, cluster=cluster, plan=plan, tokens_per_s_per_gpu=speed, interval_tokens_per_s_per_gpu=interval,
        failure=failure,
    )  # fmt: skip


def reading(size: int, bytes_per_s: float, size_bytes: int = 2**28) -> CollectiveReading:
    time_s = 2 * (size - 1) / size * size_bytes / bytes_per_s
    return CollectiveReading(
        op=CollectiveOp.ALL_REDUCE, group_size=size, stride=1, size_bytes=size_bytes, iterations=20, time_s=time_s,
        time_p10_s=time_s, time_p90_s=time_s, algbw_bytes_per_s=size_bytes / time_s, busbw_bytes_per_s=bytes_per_s,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    """A store with two runs and a sweep of the source `mlops`."""
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as opened:
        batch = ImportBatch(
            source="mlops", file_name="a", format="csv", sha256="0" * 64, size_bytes=1, imported_at=datetime.now(UTC)
        )
        item = ImportedReading(where="b.txt, line 1", cluster=CLUSTER, reading=reading(8, 1e11))
        opened.save_import(
            batch, [run(SLOW, 9_000.0), run(FAST, 11_000.0), run(Plan(dp=8, micro_batch=8), None)], [item]
        )
        yield opened


def searching(store: SqlStore, history: str) -> Tuning:
    """A tuning in its search, without ranks and without a reading of its own."""
    now = datetime.now(UTC)
    tuning = Tuning(
        id=f"tuning-{history or 'alone'}", model=MODEL, cluster=CLUSTER, workload=WORKLOAD, history=history,
        state=TuningState.SEARCHING, created_at=now, updated_at=now,
    )  # fmt: skip
    store.create_tuning(tuning)
    return tuning


def planner(store: SqlStore, tuning: Tuning) -> Planner:
    made = Planner(store, tuning, "")
    made.facts(tuning)
    return made


def measure(store: SqlStore, tuning: Tuning, speed: float) -> tuple[int, Plan]:
    """The trial that a new planner asks for, run and stored."""
    asked = planner(store, tuning).ask(None)
    trial = Trial(
        id=f"{tuning.id}-{asked.number}", tuning_id=tuning.id, number=asked.number, plan=asked.plan,
        state=TrialState.RUNNING, started_at=datetime.now(UTC),
    )  # fmt: skip
    store.start_trial(trial)
    key = store.put_fingerprint(FINGERPRINT)
    store.finish_trial(
        trial.id, reading=step_reading(speed), failure=None, outcome_gpu_s=1.0, setup_s=0.5, fingerprint_key=key
    )
    return asked.number, asked.plan


def test_imports_teach_a_tuning_and_are_measured_first(store: SqlStore) -> None:
    alone, taught = (planner(store, searching(store, history)) for history in ("", "mlops"))
    assert taught.best is None  # nothing was measured here yet
    other = Plan(dp=8, micro_batch=2, zero_stage=1)
    expected = [made.estimate_of(other) for made in (alone, taught)]
    assert all(item is not None and item.step_time_interval_s is not None for item in expected)
    # Speeds of 9,000 and 11,000 are far below the estimates: their likes are expected to be slower, too.
    assert expected[1].step_time_interval_s[0] > 1.2 * expected[0].step_time_interval_s[0]
    assert [taught.ask(None).plan for _ in range(2)] == [FAST, SLOW]
    assert store.trials("tuning-mlops") == []


def test_what_is_measured_first_is_decided_alike_by_every_process(store: SqlStore) -> None:
    """Plans known when the first trial began, then imported ones; what is found meanwhile comes too late."""
    earlier = searching(store, "")
    known = [measure(store, earlier, speed)[1] for speed in (9_000.0, 8_000.0, 7_000.0)]
    tuning, other = searching(store, "mlops"), earlier.model_copy(update={"id": "other"})
    store.create_tuning(other)
    asked = [measure(store, tuning, 9_500.0)]
    measure(store, other, 30_000.0)
    asked += [measure(store, tuning, 9_400.0) for _ in range(4)]
    assert asked == list(enumerate([*known, FAST, SLOW]))
    assert measure(store, tuning, 9_300.0)[1] not in {*known, FAST, SLOW}


def test_an_unknown_source_is_refused_before_anything_is_stored(store: SqlStore) -> None:
    with pytest.raises(UnknownNameError, match=r"source.*'nobody'.*mlops"):
        submit(store, tuning_of(MODEL, CLUSTER, WORKLOAD, history="nobody"))
    assert store.tunings() == []
    assert submit(store, tuning_of(MODEL, CLUSTER, WORKLOAD, history="mlops")).history == "mlops"


def test_links_fill_gaps_and_never_take_the_place_of_own_ones() -> None:
    own = fit_profile(CLUSTER, "", [reading(8, 3e11)], [], [])
    both = with_links(own, CLUSTER, [reading(8, 1e11), reading(4, 1e11)])
    assert both is not None
    assert [(link.group_size, link.readings) for link in both.links] == [(8, 1), (4, 1)]
    assert both.links[0] == own.links[0]
    assert with_links(None, CLUSTER, []) is None
    alone = with_links(None, CLUSTER, [reading(8, 1e11), reading(8, 1e11, 2**24)])
    assert alone is not None
    assert alone.links[0].bytes_per_s == pytest.approx(1e11)


def test_transfers_are_of_the_same_hardware_and_one_a_plan() -> None:
    a100 = cluster_from_shorthand("a100-80gb-sxm:1x8")
    larger = run(FAST.model_copy(update={"dp": 8}), 10_000.0, cluster=cluster_from_shorthand("h100-80gb-sxm:2x8"))
    runs = [run(FAST, 10_000.0), run(FAST, 12_000.0), run(FAST, 5_000.0, cluster=a100), larger]
    transfers = transfers_from(runs, CLUSTER, lambda _cluster: ())
    assert {transfer.plan for transfer in transfers} == {FAST, larger.plan}
    assert all(transfer.log_speed is not None and transfer.log_speed < 0 for transfer in transfers)


def test_runs_on_an_unknown_device_teach_once_it_was_measured() -> None:
    device = CLUSTER.device.model_copy(update={"name": "card", "peak_flops_per_s": {}})
    unknown = CLUSTER.model_copy(update={"device": device})
    runs = [run(FAST, 10_000.0, cluster=unknown)]
    assert transfers_from(runs, unknown, lambda _cluster: ()) == []
    compute = ComputeFit(flops_per_s=4e14, launch_s=4e-6, bytes_per_s=2e12, relative_error=0.0, readings=9)
    profile = Profile(cluster_key=unknown.key, fingerprint_key="", compute=compute)
    (transfer,) = transfers_from(runs, unknown, lambda _cluster: (), profile)
    assert transfer.plan == FAST
    larger = unknown.model_copy(update={"nodes": 2, "inter": cluster_from_shorthand("h100-80gb-sxm:2x8").inter})
    of_larger = profile.model_copy(update={"cluster_key": larger.key})
    assert len(transfers_from(runs, larger, lambda _cluster: (), of_larger)) == 1


def test_runs_as_trials_and_plans() -> None:
    crashed = run(SLOW, None).model_copy(update={"failure": Failure(kind=FailureKind.CRASH, message="x")})
    runs = [run(SLOW, 9_000.0), run(FAST, 11_000.0), run(FAST, 11_500.0), run(Plan(dp=8), None), crashed]
    assert fastest_plans(runs, limit=3) == [FAST, SLOW]
    trials = trials_of(runs)
    assert [trial.plan for trial in trials] == [SLOW, FAST, FAST, Plan(dp=8)]
    assert trials[0].reading is not None
    assert trials[0].reading.step_time_s == pytest.approx(4096 * 64 / 8 / 9_000.0)
    assert trials[3].failure is not None
    assert framework_of(runs, WORKLOAD).name == "torch"
    assert framework_of([*runs, run(FAST, 1.0, framework="megatron")], WORKLOAD).name == "torch"
    assert framework_of([run(FAST, 1.0, framework="megatron")], WORKLOAD).name == "megatron"
    told = WORKLOAD.model_copy(update={"framework": FrameworkName.FSDP})
    assert framework_of([run(FAST, 1.0, framework="megatron")], told).name == "fsdp"
