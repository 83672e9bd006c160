"""Known GPUs and models against published numbers."""

from __future__ import annotations

import re

import pytest

from autotune.catalog import cluster_from_shorthand, gpu, gpus, model, models, smallest
from autotune.cost.parameters import active_parameters, total_parameters
from autotune.errors import InputError, UnknownNameError
from autotune.specs import DeviceKind, DType, Plan

# Total and active parameters in units of 10^9, as printed in the models' reports and on their pages.
PUBLISHED_BILLIONS = {
    "llama1-7b": 6.7, "llama1-13b": 13.0, "llama1-33b": 32.5, "llama1-65b": 65.2,
    "llama2-7b": 6.74, "llama2-13b": 13.0, "llama2-70b": 69.0,
    "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3.1-405b": 406, "llama3.2-1b": 1.23, "llama3.2-3b": 3.21,
    "gpt3-125m": 0.125, "gpt3-350m": 0.350, "gpt3-760m": 0.760, "gpt3-1.3b": 1.3, "gpt3-2.7b": 2.7,
    "gpt3-6.7b": 6.7, "gpt3-13b": 13.0, "gpt3-175b": 175.0,
    "mistral-7b": 7.24, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141,
    "qwen2-0.5b": 0.49, "qwen2-1.5b": 1.54, "qwen2-7b": 7.62, "qwen2-72b": 72.7, "qwen2-57b-a14b": 57.4,
    "qwen2.5-3b": 3.09, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235,
    "deepseek-v2-lite": 15.7, "deepseek-v2": 236, "deepseek-v3": 671,
}  # fmt: skip
ACTIVE_BILLIONS = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.0, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0}
EXACT = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616, "llama3-8b": 8_030_261_248, "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704, "qwen2.5-0.5b": 494_032_768,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_a_model_has_its_published_size(name: str, billions: float) -> None:
    assert total_parameters(model(name)) / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(("name", "billions"), ACTIVE_BILLIONS.items())
def test_a_mixture_has_its_published_active_size(name: str, billions: float) -> None:
    assert active_parameters(model(name)) / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_released_weights_have_exactly_these_parameters(name: str, count: int) -> None:
    assert total_parameters(model(name)) == count


def test_names_are_unique_and_every_model_has_a_source() -> None:
    assert len({preset.name for preset in models()}) == len(models())
    assert all(re.search(r"\d{4}|config\.json|autotune", preset.source) for preset in models())


def test_the_smallest_has_the_fewest_parameters_and_suits_four_ranks_of_any_axis() -> None:
    tiny = smallest()
    assert total_parameters(tiny) == min(total_parameters(preset) for preset in models())
    sizes = (tiny.layers, tiny.heads, tiny.kv_heads, tiny.ffn, tiny.vocab)
    assert [size % 4 for size in sizes] == [0] * 5


def test_a_name_is_found_in_any_case_and_an_unknown_one_brings_the_close_ones() -> None:
    assert model("GPT3-175B").layers == 96
    with pytest.raises(UnknownNameError, match=r"'lama3-8b'.*known: .*llama3-8b"):
        model("lama3-8b")
    with pytest.raises(UnknownNameError, match=r"'zzz'.*deepseek-v3.*tiny"):
        model("zzz")


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops", "memory_gb"),
    [
        ("v100-32gb-sxm", DType.FP16, 125, 32),
        ("a100-80gb-sxm", DType.BF16, 312, 80),
        ("h100-80gb-sxm", DType.BF16, 989, 80),
        ("h100-80gb-sxm", DType.FP8, 1979, 80),
        ("h100-80gb-pcie", DType.BF16, 756, 80),
        ("h200-141gb-sxm", DType.BF16, 989, 141),
        ("b200-180gb-sxm", DType.BF16, 2250, 180),
        ("gb200", DType.FP8, 5000, 186),
        ("gb300", DType.BF16, 2500, 278),
        ("b300-270gb-sxm", DType.BF16, 2250, 270),
        ("a800-80gb-sxm", DType.BF16, 312, 80),
        ("h800-80gb-sxm", DType.FP8, 1979, 80),
        ("h20-96gb-sxm", DType.BF16, 148, 96),
        ("gh200-96gb", DType.FP8, 1979, 96),
        ("l20", DType.BF16, 119.5, 48),
        ("mi325x", DType.BF16, 1307, 256),
        ("mi355x", DType.FP8, 5033, 288),
        ("ascend-910b3", DType.FP16, 313, 64),
        ("l40s", DType.BF16, 362, 48),
        ("rtx-4090", DType.BF16, 165.2, 24),
        ("mi250x", DType.BF16, 191.5, 64),
        ("mi300x", DType.FP8, 2615, 192),
    ],
)
def test_a_gpu_has_its_dense_peak_and_memory(name: str, dtype: DType, teraflops: float, memory_gb: float) -> None:
    entry = gpu(name)
    assert entry.peak_flops_per_s[dtype] / 1e12 == pytest.approx(teraflops, rel=0.001)
    # Drivers report between the printed GB read as 10^9 and as 2^30 bytes.
    assert memory_gb * 1e9 <= entry.memory_bytes <= memory_gb * 2**30


def test_a_dtype_without_a_matrix_unit_has_no_peak() -> None:
    assert DType.BF16 not in gpu("v100-16gb-sxm").peak_flops_per_s
    assert DType.FP8 not in gpu("a100-80gb-sxm").peak_flops_per_s


def test_every_figure_of_every_gpu_has_a_dated_source() -> None:
    for entry in gpus():
        assert set(entry.sources) == {"memory_bytes", "memory_bytes_per_s", "peak_flops_per_s"}, entry.name
        links = [entry.intra, *([entry.inter] if entry.inter else [])]
        texts = [*entry.sources.values(), *(link.source for link in links)]
        assert all(re.search(r"\((19|20)\d\d\)", text) for text in texts), entry.name
    assert len({entry.name for entry in gpus()}) == len(gpus())


def test_gpus_of_amd_are_rocm_and_an_unknown_gpu_lists_the_known() -> None:
    assert {entry.name for entry in gpus() if entry.kind is DeviceKind.ROCM} == {
        "mi250x", "mi300x", "mi325x", "mi355x",
    }  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"known: .*h100-80gb-sxm"):
        gpu("h100-80gb")


def test_export_versions_have_the_peaks_of_their_model_and_less_of_its_link() -> None:
    for less, full in (("a800-80gb-sxm", "a100-80gb-sxm"), ("h800-80gb-sxm", "h100-80gb-sxm")):
        assert gpu(less).peak_flops_per_s == gpu(full).peak_flops_per_s
        assert gpu(less).intra.bytes_per_s == 200e9 < (gpu(full).intra.bytes_per_s or 0.0)


def test_what_a_vendor_prints_no_figure_of_is_absent_and_refused_where_it_is_needed() -> None:
    assert DType.FP32 not in gpu("ascend-910b3").peak_flops_per_s
    assert gpu("a800-80gb-sxm").inter is None
    with pytest.raises(InputError, match="no reference system of several nodes"):
        cluster_from_shorthand("a800-80gb-sxm:2x8")


@pytest.mark.parametrize(
    ("text", "domain", "nics"),
    [
        ("gb200:18x4", 72, 4),  # the rack
        ("gb200:2x4", 8, 4),  # a part of it
        ("gb200:64x4", 64, 4),  # 256 are no whole racks: 64 of each
        ("gb300:36x4", 72, 4),
        ("gb200:4x64", 64, 64),  # a rack as one node
        ("gb200:1x4", 4, 1),
        ("h100-80gb-sxm:4x8", 8, 8),
    ],
)
def test_the_link_of_a_rack_joins_the_devices_of_many_hosts(text: str, domain: int, nics: int) -> None:
    cluster = cluster_from_shorthand(text)
    assert (cluster.domain, cluster.nics_per_node) == (domain, nics)
    assert (cluster.gpus_per_domain is None) == (cluster.domain == cluster.gpus_per_node)


def test_shorthand_is_the_vendors_reference_system() -> None:
    cluster = cluster_from_shorthand("A100-80GB-SXM:128x8")
    assert (cluster.devices, cluster.nodes, cluster.gpus_per_node, cluster.nics_per_node) == (1024, 128, 8, 8)
    assert cluster.intra.bytes_per_s == 300e9
    assert cluster.inter is not None
    assert cluster.inter.bytes_per_s == 25e9
    assert cluster.name == "a100-80gb-sxm:128x8"
    assert Plan.parse("tp=8,pp=4", cluster.devices).dp == 32


def test_shorthand_scales_the_nics_with_the_devices_of_a_node() -> None:
    assert cluster_from_shorthand("v100-32gb-sxm:2x8").nics_per_node == 4
    assert cluster_from_shorthand("v100-32gb-sxm:2x4").nics_per_node == 2
    assert cluster_from_shorthand("a100-40gb-sxm:2x1").nics_per_node == 1


def test_one_node_needs_no_link_between_nodes() -> None:
    cluster = cluster_from_shorthand("rtx-4090:1x4")
    assert cluster.inter is None
    assert cluster.device.peak_flops_per_s[DType.BF16] == 165.2e12


def test_several_nodes_without_a_reference_system_are_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="no reference system of several nodes: give a cluster file"):
        cluster_from_shorthand("rtx-4090:2x4")


@pytest.mark.parametrize(
    "text",
    ["a100-80gb-sxm", "a100-80gb-sxm:8", "a100-80gb-sxm:0x8", "a100-80gb-sxm:8x0", "a100-80gb-sxm:x8", ":1x8", "",
     "a100-80gb-sxm:-1x8", "a100-80gb-sxm:1.5x8", "a100-80gb-sxm:1x8x2", "a100-80gb-sxm:9999999x8", "a b:1x8"],
)  # fmt: skip
def test_malformed_shorthand_is_one_clear_error(text: str) -> None:
    with pytest.raises(InputError, match="write GPU:NODESxGPUS_PER_NODE"):
        cluster_from_shorthand(text)


def test_shorthand_of_an_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="a100-80gb-sxm"):
        cluster_from_shorthand("a100-80gb:1x8")
