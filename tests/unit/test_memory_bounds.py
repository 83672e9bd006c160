"""What requests can make a process keep is bounded in real memory: each case fills a cache in a process of its own."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from cachetools import LRUCache
from processes import run_apart

from autotune.api.application import ANSWERS_BYTES
from autotune.api.sharing import Cache, size_bytes
from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.table import COLUMNS
from autotune.errors import InputError
from autotune.search.offline import rank
from autotune.search.space import PIECE_ROWS, legal_pieces, legal_plans
from autotune.specs import Space, Workload

SLACK_BYTES = 32 * 2**20
"""What the allocator keeps, and what a question needs while it is answered."""


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def grown_bytes(fill: Callable[[], object]) -> int:
    before = resident_bytes()
    kept = fill()
    grown = resident_bytes() - before
    assert kept is not None
    return grown


def fill_with_bodies() -> object:
    cache = Cache(LRUCache(ANSWERS_BYTES, size_bytes))
    for number in range(60):
        cache.get(number, lambda: b"x" * (5 * 2**19))
    return cache


def fill_with_objects() -> object:
    cache = Cache(LRUCache(ANSWERS_BYTES, size_bytes))
    for number in range(2_000):
        cache.get(number, lambda: {f"{number}-{i}": float(i) for i in range(500)})  # noqa: B023
    return cache


def fill_with_refusals() -> object:
    cache = Cache(LRUCache(ANSWERS_BYTES, size_bytes))

    def refuse() -> None:
        table = np.ones(2**17)  # what was at hand where it was raised
        raise InputError("plans", len(table), "nothing of this")

    for number in range(200):
        for _ in range(2):
            with pytest.raises(InputError):
                cache.get(number, refuse)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("fill", [fill_with_bodies, fill_with_objects, fill_with_refusals])
def test_what_is_kept_takes_no_more_memory_than_it_is_counted_for(fill: Callable[[], object]) -> None:
    assert run_apart(grown_bytes, fill) < ANSWERS_BYTES + SLACK_BYTES


def test_however_many_plans_there_are_ranking_them_takes_the_same_memory() -> None:
    spec, cluster = model("gpt3-175b"), cluster_from_shorthand("a100-80gb-sxm:128x8")
    workload = Workload(seq_len=2048, global_batch=1536)
    tracemalloc.start()
    found = rank(spec, cluster, workload, limit=10)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.legal > 2 * PIECE_ROWS
    assert peak_bytes < 600 * PIECE_ROWS  # of all of them at once it would be twice that


def test_the_pieces_are_all_legal_plans_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cluster = model("mixtral-8x7b"), cluster_from_shorthand("h100-80gb-sxm:8x8")
    question, space = (spec, cluster, Workload(seq_len=4096, global_batch=512)), Space(zero_stage=(1, 2), tp=(4, 8))
    whole = legal_plans(*question, space)
    monkeypatch.setattr("autotune.search.space.PIECE_ROWS", 1000)
    pieces = list(legal_pieces(*question, space))
    assert all(1 <= len(piece) <= 1000 for piece in pieces)
    assert len(pieces) > len(whole) / 1000
    again = legal_plans(*question, space)
    assert all(np.array_equal(getattr(again, name), getattr(whole, name)) for name in COLUMNS)
    small = rank(*question, space, limit=50)
    monkeypatch.undo()
    large = rank(*question, space, limit=50)
    assert (small.legal, small.fitting, small.plans) == (large.legal, large.fitting, large.plans)
