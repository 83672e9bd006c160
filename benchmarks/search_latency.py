"""How long the search takes to choose a trial and to learn from one, over many candidates. Prints JSON.

GPT-3 175B on 1,024 A100-80GB, every plan that some runtime could run, cut to the candidates that a search keeps. Ten
trials are told, 0.70 to 0.78 times as fast as believed. `ask_s` chooses one trial after a repeat was told: posterior
and acquisition over all candidates; `refit_s` is what of it fits the step time's parameters and residual to the
trials. Medians over passes, by wall time; run it with OMP_NUM_THREADS=1 for one core.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from autotune.catalog import cluster_from_shorthand, model
from autotune.search.core import Measurement, Search
from autotune.search.physics import Assumed
from autotune.search.posterior import calibrated
from autotune.search.residual import features
from autotune.search.space import Runtime
from autotune.specs import Workload

PASSES, TOLD = 9, 10


def median_s(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(PASSES):
        before = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - before)
    return round(statistics.median(seconds), 4)


def main() -> None:
    """Tells ten trials and times what follows."""
    spec, cluster = model("gpt3-175b"), cluster_from_shorthand("a100-80gb-sxm:128x8")
    before = time.perf_counter()
    search = Search(spec, cluster, Workload(seq_len=2048, global_batch=1536), runtime=Runtime.ANY)
    built_s = time.perf_counter() - before
    for i in range(TOLD):
        plan = search.ask()
        assert plan is not None
        found = search.estimate_of(plan)
        assert found is not None
        speed = found.tokens_per_s_per_gpu * (0.7 + 0.02 * (i % 5))
        search.tell(plan, Measurement(tokens_per_s_per_gpu=speed, peak_bytes=0.95 * found.peak_memory_bytes))
    points = features(search.table)
    timed = [(row, item) for item in search.observations if (row := search.table.find(item.plan)) is not None]
    choice = search.next()
    assert choice is not None
    again = search.observations[0]
    told = Measurement(tokens_per_s_per_gpu=again.tokens_per_s_per_gpu or 1.0, peak_bytes=again.peak_bytes)

    def ask() -> None:
        search.tell(again.plan, told)
        search.next()

    data = {
        "model": spec.name,
        "cluster": cluster.name,
        "legal": search.legal,
        "candidates": len(search.table),
        "told": search.trials,
        "build_s": round(built_s, 3),
        "ask_s": median_s(ask),
        "refit_s": median_s(lambda: calibrated(points, Assumed(search.estimates), timed, ())),
        "next": search.table.plan(choice.row).key,
    }
    print(json.dumps(data, indent=2))


if __name__ == "__main__":
    main()
