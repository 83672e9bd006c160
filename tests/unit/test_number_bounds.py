"""Every number that is read from outside has bounds: what is beyond them gets one clear error, however it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from commands import Command
from store_records import CLUSTER, MODEL, WORKLOAD

from autotune.api.requests import TuningRequest
from autotune.errors import InputError
from autotune.specs import (
    Budget,
    ClusterSpec,
    CollectiveReading,
    CollectiveRequest,
    LayerRequest,
    ModelSpec,
    Plan,
    Space,
    Spec,
    StepRequest,
    Workload,
)
from autotune.specs.imported import ImportedReading, ImportedRun
from autotune.specs.tuning import MAX_TRIALS

FROM_OUTSIDE = (
    Budget, ClusterSpec, CollectiveReading, CollectiveRequest, ImportedReading, ImportedRun, LayerRequest, ModelSpec,
    Plan, Space, StepRequest, TuningRequest, Workload,
)  # fmt: skip
FIRST = "probe collective --cluster a100-80gb-sxm:1x8"
HERE = "--cluster a100-80gb-sxm:1x8 --model tiny"


def numbers(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts of a JSON Schema that stand for a number, with their place."""
    if isinstance(schema, dict):
        if schema.get("type") in {"integer", "number"}:
            yield place, schema
        for key, value in schema.items():
            yield from numbers(value, f"{place}.{key}")
    elif isinstance(schema, list):
        for part in schema:
            yield from numbers(part, place)


@pytest.mark.parametrize("spec", FROM_OUTSIDE, ids=lambda spec: spec.__name__)
def test_no_number_from_outside_is_without_an_upper_limit(spec: type[Spec]) -> None:
    found = dict(numbers(spec.model_json_schema()))
    endless = [
        place for place, schema in found.items()
        if not {"maximum", "exclusiveMaximum", "const", "enum"} & schema.keys() and "Failure" not in place
    ]  # fmt: skip
    assert found
    assert endless == []


@pytest.mark.parametrize("value", ["10" * 200, "1e999", "-1", ".nan", "-.inf", "1" + "0" * 5000])
@pytest.mark.parametrize(
    ("spec", "key"),
    [(Budget, "max_trials"), (Budget, "gpu_s"), (Workload, "seq_len"), (ModelSpec, "hidden"), (ClusterSpec, "nodes")],
)
def test_a_number_beyond_its_bounds_is_one_error_in_a_file(spec: type[Spec], key: str, value: str) -> None:
    whole = {ModelSpec: MODEL, ClusterSpec: CLUSTER, Workload: WORKLOAD, Budget: Budget()}[spec]
    lines = [line for line in whole.to_yaml().splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(InputError) as caught:
        spec.from_yaml("\n".join([*lines, f"{key}: {value}"]), "file.yaml")
    assert len(str(caught.value)) < 600
    assert "file.yaml" in str(caught.value)


def test_the_most_trials_are_as_many_as_plans_are_weighed() -> None:
    assert Budget.from_data({"max_trials": MAX_TRIALS}).max_trials == MAX_TRIALS
    with pytest.raises(InputError, match=r"budget: max_trials: 100001 cannot be used; .*100000"):
        Budget.from_data({"max_trials": MAX_TRIALS + 1}, "budget")


def test_what_is_no_finite_number_is_named_by_its_place() -> None:
    with pytest.raises(InputError, match=r"^file: device\.memory_bytes_per_s: nan cannot be used; a finite number$"):
        ClusterSpec.from_data({"device": {"memory_bytes_per_s": float("nan")}}, "file")
    with pytest.raises(InputError, match=r"^space: tp\.1: inf cannot be used; a finite number$"):
        Space.from_data({"tp": [1, float("inf")]}, "space")


@pytest.mark.parametrize("digits", [20, 400])
def test_a_request_with_an_endless_number_is_refused(digits: int) -> None:
    asked = {"model": "tiny", "cluster": "box", "budget": {"max_trials": 10**digits}}
    with pytest.raises(InputError, match=r"budget\.max_trials"):
        TuningRequest.from_data(json.loads(json.dumps(asked)), "body")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"tune {HERE} --seed {2**64}", ("--seed",)),
        (f"tune {HERE} --seed -1", ("--seed",)),
        (f"tune {HERE} --max-trials {10**400}", ("budget: max_trials",)),
        (f"tune {HERE} --budget-gpu-s nan", ("budget: gpu_s", "nan", "finite")),
        (f"tune {HERE} --budget-gpu-s 1e300", ("budget: gpu_s", "1e+300")),
        (f"tune {HERE} --min-gain inf", ("budget: min_gain", "inf", "finite")),
        (f"probe step --plan tp=1 {HERE} --seed {2**64}", ("--seed",)),
        (f"probe step --plan tp=1 {HERE} --max-steps {10**12}", ("--max-steps",)),
        (f"{FIRST} --deadline-s 0", ("--deadline-s", "0.0", "86400")),
        (f"{FIRST} --deadline-s=-1", ("--deadline-s", "-1.0")),
        (f"{FIRST} --deadline-s nan", ("--deadline-s", "nan")),
        (f"{FIRST} --deadline-s 1e9", ("--deadline-s", "1000000000.0")),
        (f"{FIRST} --iterations {10**12}", ("--iterations",)),
        (f"{FIRST} --sizes {'9' * 5000}", ("--sizes",)),
        (f"{FIRST} --sizes ²", ("--sizes",)),
        (f"{FIRST} --stride {10**30}", ("stride",)),
        ("beat --nightly 02:00 --nightly-gpu-s nan", ("--nightly-gpu-s", "nan")),
        ("beat --nightly 02:00 --nightly-gpu-s 1e300", ("--nightly-gpu-s", "1e+300")),
        ("regress run --budget-gpu-s nan", ("--budget-gpu-s", "nan")),
        ("regress run --budget-gpu-s 1e300", ("--budget-gpu-s", "1e+300")),
        ("worker --role tuner --patience nan", ("--patience", "nan")),
        (f"plan {HERE} --tp {10**400}", ("tp",)),
        (f"plan {HERE} --tp 0", ("tp", "0")),
    ],
)
def test_an_option_beyond_its_bounds_is_one_error(autotune: Command, line: str, words: tuple[str, ...]) -> None:
    done = autotune(*line.split())
    assert done.status == 2, done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert all(word in done.err for word in words), done.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{FIRST} --stride 3", ("stride", "divide the 8 ranks")),
        (f"{FIRST} --op send_recv --group-size 4", ("send_recv",)),
        (f"probe layer {HERE} --tp 3", ("tp", "3", "divide the 8 ranks")),
        (f"probe layer {HERE} --tp 8", ("tp", "8", "heads")),
        (f"probe layer {HERE} --sequence-parallel", ("sequence", "tp > 1")),
    ],
)
def test_a_probe_that_every_rank_would_refuse_starts_none(autotune: Command, line: str, words: tuple[str, ...]) -> None:
    """It is refused before it is even asked whether this machine has these GPUs."""
    done = autotune(*line.split())
    assert done.status == 2
    assert all(word in done.err for word in words), done.err


def test_the_exit_status_of_an_estimate_says_whether_the_plan_fits(autotune: Command) -> None:
    request = ["estimate", "--model", "llama2-7b", "--cluster", "a100-80gb-sxm:1x8", "--plan"]
    fits, not_at_all = autotune(*request, "tp=8,recompute=full"), autotune(*request, "dp=8,micro_batch=16")
    assert (fits.status, not_at_all.status) == (0, 3)
    assert "does not fit" in not_at_all.out
    told = autotune(*request, "dp=8,micro_batch=16", "--json")
    assert (told.status, told.data["estimate"]["fits"]) == (3, False)


def test_settling_is_refused_on_another_machine_before_anything_is_said_of_its_cost(autotune: Command) -> None:
    done = autotune(*f"best {HERE} --settle".split())
    assert done.status == 2
    assert done.err.startswith("error: --cluster")
    assert "Settling" not in done.err
