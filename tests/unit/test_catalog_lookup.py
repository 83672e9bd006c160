"""What a user may name: models and clusters by name, file or shorthand; and recognising a discovered GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autotune.catalog import (
    cluster_from_shorthand,
    gpu,
    gpus,
    load_cluster,
    load_model,
    model,
    recognise,
    recognised,
)
from autotune.errors import InputError, UnknownNameError
from autotune.specs import ClusterSpec, Device, DeviceKind, Link

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CLUSTER = ClusterSpec(
    name="lab",
    nodes=1,
    gpus_per_node=2,
    device=Device(name="cpu", kind=DeviceKind.CPU, memory_bytes=1 << 30),
    intra=Link(name="loopback"),
)


def nothing_stored(_: str) -> None:
    return None


def test_a_model_by_preset_name_and_by_files_of_ours(tmp_path: Path) -> None:
    preset = load_model("Llama3-8B")
    assert preset == model("llama3-8b")
    for name, text in (
        ("mine.yaml", preset.to_yaml()),
        ("mine.json", preset.to_json()),
        ("mine.yml", preset.to_yaml()),
    ):
        (tmp_path / name).write_text(text)
        assert load_model(str(tmp_path / name)) == preset


def test_a_config_json_is_told_by_its_content_and_named_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    shutil.copy(GOLDEN / "llama-3.1-8b.json", folder / "config.json")
    found = load_model(str(folder / "config.json"))
    assert (found.name, found.key) == ("Llama-3.1-8B", model("llama3.1-8b").key)


def test_a_config_without_model_type_is_told_by_its_architecture(tmp_path: Path) -> None:
    data = json.loads((GOLDEN / "gpt2.json").read_text())
    del data["model_type"]
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert load_model(str(tmp_path / "a.json")).key == model("gpt2").key


def test_an_unknown_model_lists_the_close_presets() -> None:
    with pytest.raises(UnknownNameError, match=r"known: .*tiny-gpt"):
        load_model("tiny-gp")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"model_type": "llama", ', "a YAML or JSON document is needed"),
        (b"[1, 2]", "an object with named values is needed"),
        (b"", "a YAML or JSON document is needed"),
        (b"null", "an object with named values is needed"),
        (b"\xff\xfe\x00\x01\x80", "a readable text file is needed"),
        (b"[" * 100_000, "a YAML or JSON document is needed"),
        (b'{"name": "x"}', "Field required"),
        (b'{"model_type": "llama"}', "this key is missing"),
    ],
)
def test_a_bad_model_file_is_one_clear_error(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint) as error:
        load_model(str(path))
    assert "model.json" in error.value.what


@pytest.mark.parametrize("text", ["a: [1", "a: &a [*a]", "\x07"])
def test_bad_yaml_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(InputError):
        load_model(str(tmp_path / "model.yaml"))


def test_an_unknown_key_in_a_file_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(model("tiny").to_data() | {"colour": 1}))
    with pytest.raises(InputError, match=r"colour.*not known"):
        load_model(str(tmp_path / "model.json"))


def test_a_directory_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a directory"):
        load_model(str(tmp_path))
    with pytest.raises(InputError, match="No such file"):
        load_model(str(tmp_path / "none.json"))


def test_a_cluster_is_a_file_then_a_stored_name_then_the_shorthand(tmp_path: Path) -> None:
    path = tmp_path / "lab"
    path.write_text(CLUSTER.to_yaml())
    other = CLUSTER.model_copy(update={"name": "other"})
    assert load_cluster(str(path), lambda _: other) == CLUSTER
    assert load_cluster("lab", lambda name: CLUSTER if name == "lab" else None) == CLUSTER
    stored_as_shorthand = load_cluster("a100-80gb-sxm:1x8", lambda _: other)
    assert stored_as_shorthand == other
    assert load_cluster("a100-80gb-sxm:1x8", nothing_stored) == cluster_from_shorthand("a100-80gb-sxm:1x8")


def test_what_is_no_cluster_brings_the_three_forms() -> None:
    with pytest.raises(InputError, match=r"cluster file .* stored cluster, or GPU:NODESxGPUS_PER_NODE"):
        load_cluster("my-lab", nothing_stored)


def test_a_bad_cluster_file_is_one_clear_error(tmp_path: Path) -> None:
    data = CLUSTER.to_data() | {"nodes": 2}
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="needs inter"):
        load_cluster(str(tmp_path / "c.json"), nothing_stored)
    with pytest.raises(InputError, match="No such file"):
        load_cluster(str(tmp_path / "none.yaml"), nothing_stored)
    with pytest.raises(InputError, match="a directory"):
        load_cluster(str(tmp_path), nothing_stored)


@pytest.mark.parametrize(
    ("driver_name", "memory_mib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb-sxm"),
        ("NVIDIA H100 PCIe", 81559, "h100-80gb-pcie"),
        ("NVIDIA H200", 143771, "h200-141gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", 81251, "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", 40536, "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb-pcie"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32gb-sxm"),
        ("NVIDIA B200", 183359, "b200-180gb-sxm"),
        ("NVIDIA GB200", 189471, "gb200"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA GB300", 284208, "gb300"),
        ("NVIDIA B300 SXM6 AC", 275040, "b300-270gb-sxm"),
        ("NVIDIA A800-SXM4-80GB", 81920, "a800-80gb-sxm"),
        ("NVIDIA H800", 81559, "h800-80gb-sxm"),
        ("NVIDIA H20", 97871, "h20-96gb-sxm"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96gb"),
        ("NVIDIA L20", 46068, "l20"),
        ("AMD Instinct MI355X", 294896, "mi355x"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("AMD Instinct MI300X", 196592, "mi300x"),
        ("NVIDIA H200", 40000, "h200-141gb-sxm"),
    ],
)
def test_a_driver_name_is_recognised(driver_name: str, memory_mib: int, name: str) -> None:
    entry = recognise(driver_name, memory_mib << 20)
    assert entry is not None
    assert entry.name == name


@pytest.mark.parametrize(
    ("driver_name", "memory_mib"),
    [("NVIDIA GeForce RTX 4090 D", 24564), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864), ("NVIDIA H200 NVL", 143771),
     ("NVIDIA L40S", 92000), ("AMD EPYC", 4096)],
)  # fmt: skip
def test_what_is_not_known_is_not_guessed(driver_name: str, memory_mib: int) -> None:
    assert recognise(driver_name, memory_mib << 20) is None


def test_no_two_gpus_share_a_driver_name() -> None:
    names = [name.lower() for entry in gpus() for name in entry.drivers]
    assert len(names) == len(set(names))


def discovered(name: str, link: str) -> ClusterSpec:
    device = Device(name=name, kind=DeviceKind.CUDA, memory_bytes=150_000_000_000, source="torch on this machine; x")
    return ClusterSpec(name="here", nodes=1, gpus_per_node=8, device=device, intra=Link(name=link, source="seen"))


def test_a_recognised_cluster_has_the_catalogs_figures_and_its_own_memory() -> None:
    found = recognised(discovered("NVIDIA H200", "NVLink"))
    assert found.device.name == "h200-141gb-sxm"
    assert found.device.peak_flops_per_s == gpu("h200-141gb-sxm").peak_flops_per_s
    assert found.device.memory_bytes == 150_000_000_000
    assert found.device.source.startswith("NVIDIA H200 (torch on this machine)")
    assert found.intra.bytes_per_s == 450e9


def test_a_link_of_another_kind_gets_no_speed_and_an_unknown_device_no_peak() -> None:
    assert recognised(discovered("NVIDIA H200", "PCIe")).intra == Link(name="PCIe", source="seen")
    unknown = discovered("NVIDIA Z900", "NVLink")
    assert recognised(unknown) == unknown


def test_a_config_of_quantized_weights_is_the_model_that_is_trained() -> None:
    assert load_model(str(GOLDEN / "deepseek-v3.json")).key == load_model("deepseek-v3").key
