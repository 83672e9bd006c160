"""Interval arithmetic, event names and step statistics against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.timing import drift, half_width, is_steady
from probes.trace import Interval, Spans, collective_name, length, overlap, summarize, union

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


def points(intervals: list[Interval]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


def test_union_joins_what_overlaps_nests_or_touches() -> None:
    assert union([(5, 7), (0, 10), (2, 3), (10, 12), (20, 21)]) == [(0, 12), (20, 21)]
    assert union([]) == []


@given(INTERVALS, INTERVALS)
def test_lengths_agree_with_counting_points(left: list[Interval], right: list[Interval]) -> None:
    assert length(union(left)) == len(points(left))
    assert overlap(union(left), union(right)) == len(points(left) & points(right))


def test_communication_under_computation_is_not_exposed() -> None:
    spans = Spans(
        computing=[(0, 100), (10, 20), (150, 200)],
        communicating={"all_reduce": [(50, 120), (60, 70)], "send_recv": [(110, 160)]},
    )
    trace = summarize(spans)
    assert trace.calc_s == pytest.approx(150e-9)
    assert trace.comm_s == pytest.approx(110e-9)  # 50 to 160
    assert trace.exposed_s == pytest.approx(50e-9)  # 100 to 150
    assert trace.comm_s_by_op == pytest.approx({"all_reduce": 70e-9, "send_recv": 50e-9})


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("gloo:all_reduce", "all_reduce"),
        ("gloo:recv", "send_recv"),
        ("gloo:all_gather", "all_gather"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all_gather"),
        ("nccl:all_reduce", None),  # the host's annotation of a kernel
        ("aten::mm", None),
        ("c10d::allreduce_", None),
        ("void at::native::reduce_kernel<512, 1>", None),
    ],
)
def test_collectives_are_known_by_their_events(event: str, name: str | None) -> None:
    assert collective_name(event) == name


def test_half_width_is_students() -> None:
    # Tables of Student's t have 4.303 for 2 degrees of freedom, 12.706 for one, 1.965 for 500; 1, 2, 3 deviate by 1.
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert half_width([5.0]) == 0.0
    assert half_width([1.0, 3.0]) == pytest.approx(12.706, rel=1e-4)  # they deviate by sqrt(2), over sqrt(2)
    assert half_width([0.0, 1.0] * 250 + [0.5]) == pytest.approx(1.965 * 0.5 / 501**0.5, rel=1e-3)


def test_drift_and_steadiness() -> None:
    change, half = drift([1.0, 2.0, 3.0, 4.0])
    assert change == pytest.approx(3.0)
    assert half == pytest.approx(0.0, abs=1e-9)
    assert not is_steady([4.0, 3.0, 2.0, 1.0], 0.03)
    assert is_steady([1.0, 1.001, 1.002, 1.003], 0.03)  # a trend, but a small one
    assert is_steady([1.0, 1.3, 0.9, 1.2, 1.0], 0.03)  # scattered, no trend
    # A change of exactly a hundredth along the line, around a mean of 1, without scatter.
    assert is_steady([0.995, 1.0, 1.005], 0.0101)
    assert drift([1.0, 1.0, 1.0]) == (0.0, 0.0)
    assert is_steady([1.0, 1.0, 1.0], 0.0)
    assert not is_steady([0.995, 1.0, 1.005], 0.0099)
    # Along 0, 0.1, 0.4, 0.5 the slope is 0.18, the residuals' squares sum to 0.008 and the slope's own squared error is
    # 0.008 / 2 / 5, so that the change over the series is 0.54 and its half width 4.3027 * sqrt(0.0008) * 3 = 0.3651.
    change, half = drift([10.0, 10.1, 10.4, 10.5])
    assert (change, half) == (pytest.approx(0.54), pytest.approx(4.3027 * 0.0008**0.5 * 3.0, rel=1e-4))
    assert not is_steady([10.0, 10.1, 10.4, 10.5], 0.05)
    assert is_steady([10.0, 10.1, 10.4, 10.5], 0.06)
    assert is_steady([10.5, 10.1, 10.4, 10.0], 0.01)  # -0.36, within 4.3027 * sqrt(0.0098) * 3
    assert not is_steady([1.0, 1.0], 0.03)
