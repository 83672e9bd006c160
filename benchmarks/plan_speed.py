"""How fast a plan is found without hardware: GPT-3 175B on 1,024 A100-80GB over the full space. Prints JSON.

`estimates_per_s` is the median rate over several passes over the whole legal space, on one core, by wall time;
`estimates_per_cpu_s` by the process's own CPU time, which other work on the machine does not change. `seconds` is the
median of whole answers: enumeration, estimates and ranking.
"""

from __future__ import annotations

import json
import statistics
import time

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate_table
from autotune.cost.table import PlanTable
from autotune.search.offline import rank
from autotune.search.space import legal_plans
from autotune.specs import ClusterSpec, ModelSpec, Workload

PASSES = 5


def cpu_seconds(spec: ModelSpec, cluster: ClusterSpec, workload: Workload, table: PlanTable) -> float:
    """CPU seconds of one pass of estimates."""
    before = time.process_time()
    estimate_table(spec, cluster, workload, table)
    return time.process_time() - before


def main() -> None:
    """Ranks the space several times and prints what it took."""
    started = time.perf_counter()
    spec, cluster = model("gpt3-175b"), cluster_from_shorthand("a100-80gb-sxm:128x8")
    workload = Workload(seq_len=2048, global_batch=1536)
    rankings = [rank(spec, cluster, workload, limit=10) for _ in range(PASSES)]
    best = rankings[0].plans[0]
    table = legal_plans(spec, cluster, workload)
    cpu_s = statistics.median(cpu_seconds(spec, cluster, workload, table) for _ in range(PASSES))
    print(
        json.dumps(
            {
                "model": spec.name,
                "cluster": cluster.name,
                "legal": rankings[0].legal,
                "fitting": rankings[0].fitting,
                "passes": PASSES,
                "estimates_per_s": round(statistics.median(ranking.estimates_per_s for ranking in rankings)),
                "estimates_per_cpu_s": round(len(table) / cpu_s),
                "seconds": round(statistics.median(ranking.seconds for ranking in rankings), 3),
                "seconds_of_all_passes": round(time.perf_counter() - started, 3),
                "best": best.plan.key,
                "best_estimated_tokens_per_s_per_gpu": round(best.estimate.tokens_per_s_per_gpu, 1),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
