"""Whatever a document from outside says, it is understood or refused by one of our errors: never anything else.

What is accepted can be written down again, and estimated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import import_logs
import pytest
from hostile import damaged, flipped, spoiled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs_file import four, write
from store_records import CLUSTER, MODEL, WORKLOAD, trial, tuning

from autotune.backtest.runs import read_runs
from autotune.catalog import cluster_from_shorthand, model
from autotune.catalog.hf import from_hf_config
from autotune.catalog.published import published_cluster
from autotune.cost.estimate import estimate
from autotune.errors import AutotuneError, InputError
from autotune.imports import Format, Stated, read_log, read_table
from autotune.queue.app import TaskName, read_payload
from autotune.specs import Budget, ClusterSpec, ModelSpec, Plan, Space, Workload
from autotune.specs.documents import parse_document, to_yaml
from storage import open_store
from storage.care.backup import backup, restore
from storage.care.maintenance import check

pytestmark = pytest.mark.slow

CONFIGS = sorted((Path(__file__).parents[1] / "golden" / "hf").glob("*.json"))
RECORDS: dict[str, tuple[Any, Any]] = {
    "model": (ModelSpec, MODEL.to_data()),
    "mixture": (ModelSpec, model("deepseek-v3").to_data()),
    "cluster": (ClusterSpec, CLUSTER.to_data()),
    "workload": (Workload, WORKLOAD.to_data()),
    "plan": (Plan, Plan(tp=2, pp=2, dp=2, micro_batch=2).to_data()),
    "space": (Space, Space().to_data()),
    "budget": (Budget, Budget().to_data()),
}
EIGHT = cluster_from_shorthand("h100-80gb-sxm:1x8")
SIXTEEN = cluster_from_shorthand("h100-80gb-sxm:2x8")
LLAMA = model("llama3-8b")
LOGS: dict[Format, tuple[str, Stated]] = {
    Format.MEGATRON: (import_logs.megatron(), Stated(cluster=SIXTEEN)),
    Format.TORCHTITAN: (import_logs.torchtitan(), Stated(cluster=EIGHT, model=LLAMA)),
    Format.DEEPSPEED: (import_logs.deepspeed(), Stated(cluster=SIXTEEN, model=LLAMA, workload={"seq_len": 4096})),
    Format.NANOTRON: (import_logs.nanotron(), Stated(cluster=EIGHT)),
    Format.NCCL_TESTS: (import_logs.nccl_tests(), Stated(cluster=SIXTEEN)),
}

thorough = settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)


def understood(read: Callable[[], Any]) -> Any:
    """What was read, or None where it was refused, in one line that a terminal can show."""
    try:
        return read()
    except AutotuneError as error:
        said = str(error)
        assert said
        assert len(said) < 2000
        assert said.isprintable(), said
        return None


@pytest.mark.parametrize("kind", RECORDS)
@given(draw=st.data())
@thorough
def test_a_record_is_read_or_refused_and_written_again(kind: str, draw: st.DataObject) -> None:
    record, good = RECORDS[kind]
    data = draw.draw(damaged(good))
    found = understood(lambda: record.from_data(data, kind))
    if found is not None:
        again = record.from_data(json.loads(json.dumps(found.to_data())), kind)
        assert again == found
        assert record.from_data(parse_document(to_yaml(found.to_data()), kind), kind) == found


@given(draw=st.data())
@thorough
def test_what_is_accepted_can_be_estimated(draw: st.DataObject) -> None:
    specs = []
    for kind in ("model", "cluster", "workload", "plan"):
        record, good = RECORDS[kind]
        data = draw.draw(st.just(good) | damaged(good))
        specs.append(understood(lambda record=record, data=data, kind=kind: record.from_data(data, kind)))
    if None not in specs:
        trained, cluster, workload, plan = specs
        found = understood(lambda: estimate(trained, cluster, workload, plan))
        if found is not None:
            assert found.step_time_s > 0
            assert found.peak_memory_bytes > 0


@pytest.mark.parametrize("as_json", [False, True])
@given(draw=st.data())
@thorough
def test_a_document_is_read_or_refused(as_json: bool, draw: st.DataObject) -> None:
    good = {name: data for name, (_, data) in RECORDS.items()}
    text = draw.draw(spoiled(json.dumps(good, indent=1) if as_json else to_yaml(good)))
    understood(lambda: parse_document(text, "document", as_json=as_json))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@given(draw=st.data())
@settings(thorough, max_examples=60)
def test_a_config_is_read_or_refused(path: Path, draw: st.DataObject) -> None:
    data = draw.draw(damaged(json.loads(path.read_text())))
    found = understood(lambda: from_hf_config(data, "name") if isinstance(data, dict) else None)
    if found is not None:
        assert ModelSpec.from_data(found.to_data(), "again") == found


@pytest.mark.parametrize("format", LOGS)
@given(draw=st.data())
@thorough
def test_a_log_is_read_or_refused(format: Format, draw: st.DataObject) -> None:
    good, stated = LOGS[format]
    text = draw.draw(spoiled(good))
    found = understood(lambda: read_log(format, "a.log", text, stated))
    if found is not None:
        assert all(0 < run.tokens_per_s_per_gpu < float("inf") for run in found.runs if run.tokens_per_s_per_gpu)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@given(draw=st.data())
@thorough
def test_a_runs_file_is_read_or_refused(folder: Path, draw: st.DataObject) -> None:
    path = write(folder / "good.csv", four())
    text = draw.draw(spoiled(path.read_text()))
    (folder / "bad.csv").write_text(text, encoding="utf-8", errors="surrogatepass")
    for skip in (False, True):
        understood(lambda skip=skip: read_runs(folder / "bad.csv", published_cluster, skip_bad=skip))
        understood(lambda skip=skip: read_table(folder / "bad.csv", published_cluster, skip_bad=skip))


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize("task", list(TaskName))
@given(arguments=st.lists(ARGUMENTS, max_size=4), named=st.dictionaries(st.text(), ARGUMENTS, max_size=2))
@thorough
def test_a_message_is_read_or_refused(task: TaskName, arguments: list[Any], named: dict[str, Any]) -> None:
    understood(lambda: read_payload(task, arguments, named))


@given(text=st.text() | spoiled("tp=8,pp=4,dp=2,micro_batch=1,zero_stage=1,recompute=full,schedule=1f1b"))
@thorough
def test_a_plan_in_one_line_is_read_or_refused(text: str) -> None:
    found = understood(lambda: Plan.parse(text))
    if found is not None:
        assert Plan.from_data(found.to_data(), "again") == found


@pytest.fixture(scope="module")
def a_backup(folder: Path) -> Path:
    with open_store(f"sqlite:///{folder / 'whole.db'}") as store:
        store.put_model(MODEL)
        store.put_cluster(CLUSTER)
        store.create_tuning(tuning())
        store.start_trial(trial(0))
    backup(f"sqlite:///{folder / 'whole.db'}", folder / "whole.backup")
    return folder / "whole.backup"


@given(draw=st.data())
@settings(thorough, max_examples=80)
def test_a_backup_is_restored_whole_or_refused(folder: Path, a_backup: Path, draw: st.DataObject) -> None:
    damaged_file, target = folder / "damaged.backup", folder / "target.db"
    damaged_file.write_bytes(draw.draw(flipped(a_backup.read_bytes())))
    for leftover in folder.glob("target.db*"):
        leftover.unlink()
    copy = understood(lambda: restore(f"sqlite:///{target}", damaged_file))
    if copy is None:
        assert not target.exists()
    else:
        assert check(f"sqlite:///{target}").sound


def test_the_errors_say_what_and_which_value() -> None:
    with pytest.raises(InputError, match="seq_len"):
        Workload.from_data({**WORKLOAD.to_data(), "seq_len": 10**400}, "workload")
