"""Files and values from outside: what a document says is what is taken, and what is wrong is named in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from store_records import MODEL

from autotune.api.requests import TuningRequest
from autotune.catalog import cluster_from_shorthand, model
from autotune.cli.inputs import read_space, read_workload
from autotune.errors import InputError
from autotune.search.offline import rank
from autotune.specs import ClusterSpec, ModelSpec, Space, Workload
from autotune.specs.documents import LONGEST_BYTES, parse_document, read_document, to_yaml

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_numbers_are_those_of_yaml_1_2() -> None:
    found = parse_document("{a: 50.0e9, b: 3e11, c: 10, d: -1.5, e: 1:20, f: 010, g: 2001-01-01, h: yes}", "f")
    expected = {"a": 50e9, "b": 3e11, "c": 10, "d": -1.5, "e": "1:20", "f": 10, "g": "2001-01-01", "h": "yes"}
    assert found == expected


def test_texts_that_look_like_numbers_survive_writing() -> None:
    data = {"a": "1e5", "b": "50.0e9", "c": "010", "d": "true", "e": "null", "f": "", "g": 1e16, "h": None, "i": 5e-324}
    assert parse_document(to_yaml(data), "f") == data


def test_a_rate_with_an_exponent_is_a_number_in_a_cluster_file(tmp_path: Path) -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x8")
    file = tmp_path / "c.yaml"
    file.write_text(cluster.to_yaml().replace("bytes_per_s: 300000000000.0", "bytes_per_s: 50.0e9"))
    assert ClusterSpec.from_file(file).intra.bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("text", "as_json", "complaint"),
    [
        ("a: 1\na: 2\n", False, "'a' is given twice"),
        ('{"a": {"b": 1, "b": 2}}', True, "'b' is given twice"),
        (BOMB, False, "aliases are not understood"),
        ("a: &a [*a]", False, "aliases are not understood"),
        ("a: 1e999", False, "1e999 is not a finite number"),
        ('{"a": 1e999}', True, "1e999 is not a finite number"),
        ('{"a": NaN}', True, "NaN is not a finite number"),
        ("? [a]\n: 1", False, "unhashable key"),
        ("!!python/object/apply:os.getcwd []", False, "could not determine a constructor"),
    ],
)
def test_a_document_that_is_not_understood(text: str, as_json: bool, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_document(text, "f", as_json=as_json)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_bytes(b"#" * (LONGEST_BYTES + 1))
    for path, complaint in (
        (tmp_path / "long.yaml", "at most"),
        (Path("/dev/zero"), "at most"),
        (tmp_path, "a directory"),
        (Path("x/" * 3000), "File name too long"),
    ):
        with pytest.raises(InputError, match=complaint):
            read_document(path)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"kv_heads": 3}, "kv_heads", 3),
        ({"top_k": 2}, "top_k", 2),
        ({"experts": 4, "top_k": 5, "expert_ffn": 8}, "top_k", 5),
        ({"experts": 4, "top_k": 2}, "expert_ffn", 0),
        ({"experts": 4, "top_k": 2, "expert_ffn": 8, "dense_layers": 99}, "dense_layers", 99),
        ({"position": "learned", "max_positions": 0}, "max_positions", 0),
        ({"layers": 10_001}, "layers", 10_001),
        ({"hidden": 2**31}, "hidden", 2**31),
        ({"name": "a\x1b[31m"}, "name", "a\x1b[31m"),
        ({"layers": 4.0}, "layers", 4.0),
    ],
)
def test_a_model_that_cannot_be_names_its_field(change: dict[str, object], field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        ModelSpec.from_data(MODEL.to_data() | change, "m.yaml")
    assert (caught.value.what, caught.value.value) == (f"m.yaml: {field}", value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"inter": None}, "inter", None),
        ({"nodes": 5_000_000}, "nodes", 5_000_000),
        ({"intra": {"name": "x", "bytes_per_s": 1e-300}}, "intra.bytes_per_s", 1e-300),
        ({"intra": {"name": "x", "latency_s": 1e300}}, "intra.latency_s", 1e300),
    ],
)
def test_a_cluster_that_cannot_be_names_its_field(change: dict[str, object], field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        ClusterSpec.from_data(cluster_from_shorthand("a100-80gb-sxm:2x8").to_data() | change, "c.yaml")
    assert (caught.value.what, caught.value.value) == (f"c.yaml: {field}", value)


def test_a_shorthand_of_too_many_devices_is_refused() -> None:
    with pytest.raises(InputError, match="at most 10000000 devices"):
        cluster_from_shorthand("a100-80gb-sxm:999999x999999")


def test_counts_beyond_any_machine_are_refused_before_anything_is_computed() -> None:
    for name in ("seq_len", "global_batch"):
        with pytest.raises(InputError, match=f"{name}.*2147483647"):
            Workload.from_data({"seq_len": 1, "global_batch": 1} | {name: 2**31})
    with pytest.raises(InputError, match="zero_stage"):
        Space.from_data({"zero_stage": [4]})


def test_an_empty_list_of_choices_is_no_space() -> None:
    for option in ("recompute", "schedule", "sequence_parallel", "tp"):
        with pytest.raises(InputError, match="--" + option.replace("_", "-")):
            read_space(**{option: ","})


def test_a_long_value_is_shortened_in_the_message() -> None:
    error = InputError("--model", "é" * 3000, "give another")
    assert len(str(error)) < 300
    assert len(str(error.value)) == 3000


@pytest.mark.parametrize("nodes", [7, 12, 91, 127])
def test_the_default_batch_has_legal_plans_on_any_number_of_devices(nodes: int) -> None:
    spec, cluster = model("llama2-7b"), cluster_from_shorthand(f"a100-80gb-sxm:{nodes}x1")
    workload = read_workload(spec, cluster, seq_len=None, global_batch=None, dtype=None)
    assert workload.global_batch % nodes == 0
    assert rank(spec, cluster, workload).fitting > 0


def test_what_an_error_repeats_is_shown_and_not_obeyed() -> None:
    with pytest.raises(InputError) as error:
        Workload.from_data({"seq_len": 1, "global_batch": 1, "a\x9b31m\u202eb": 1}, "work\nload")
    assert "a\\x9b31m\\u202eb" in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"model": "a\u202eb"}, "body: model"),
        ({"model": ""}, "body: model"),
        ({"cluster": 5}, "body: cluster"),
        ({"model": 1, "nodes": 0}, "body: model"),
        ({"workload": {"seq_len": 0}, "cluster": ""}, "body: cluster"),
    ],
)
def test_a_value_that_may_be_of_several_kinds_is_named_as_its_author_wrote_it(
    changes: dict[str, object], place: str
) -> None:
    with pytest.raises(InputError) as raised:
        TuningRequest.from_data({"model": "tiny", "cluster": "pool", **changes}, "body")
    assert raised.value.what == place
    assert not re.search(r"function|constrained|\(\)|ModelSpec|model, model", str(raised.value))
