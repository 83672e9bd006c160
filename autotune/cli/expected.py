"""`autotune plan --history SOURCE`: the ranking once imports were learned from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.cli.inputs import Inputs
    from autotune.imports.expected import ExpectedPlan, ExpectedRanking
    from autotune.specs import Plan, Profile, Space


def expected_ranking(
    inputs: Inputs, space: Space, plan: Plan | None, profile: Profile | None, source: str, db: str | None, limit: int
) -> ExpectedRanking:
    """The ranking of the legal space, or of one plan, with what a source's imports teach.

    Raises:
        UnknownNameError: nothing was imported under that name.
    """
    from autotune.cli.database import open_to_read
    from autotune.cost.table import PlanTable
    from autotune.imports.expected import rank_with_history
    from autotune.search.offline import nothing_legal
    from autotune.search.space import Runtime, legal_plans

    model, cluster, workload = inputs.model, inputs.cluster, inputs.workload
    table = legal_plans(model, cluster, workload, space) if plan is None else PlanTable.of([plan])
    if not len(table):
        raise nothing_legal(model, cluster, workload, Runtime.ANY, space)
    with open_to_read(db) as store:
        return rank_with_history(
            model,
            cluster,
            workload,
            table,
            runs=store.imported_runs(source),
            readings=lambda other: store.imported_readings(source, other.key),
            profile=profile,
            limit=limit,
        )


def print_expected(inputs: Inputs, ranking: ExpectedRanking, source: str, *, as_json: bool) -> None:
    """The ranking as a table, or as one object."""
    if as_json:
        output.print_json(_data(inputs, ranking, source))
        return
    table = output.table("", "<plan", "expected tokens/s/GPU", "90 % interval", f"imported ({source})", "estimate",
                         "peak memory", "P(fits)")  # fmt: skip
    for item in ranking.plans:
        known = item.imported
        table.add_row(
            item.plan.key,
            output.count_text(item.tokens_per_s_per_gpu),
            " - ".join(output.count_text(value) for value in item.interval),
            "-" if known is None else f"{output.count_text(known.tokens_per_s_per_gpu)} ({known.repeats})",
            output.count_text(item.estimate.tokens_per_s_per_gpu),
            output.bytes_text(item.estimate.peak_memory_bytes),
            output.percent_text(item.p_fits),
        )
    console = output.console()
    console.print(
        f"Expected for {inputs.model.name} on {inputs.cluster.name} after {source}: {ranking.same} runs of this "
        f"request, transfers on {ranking.transfers} plans of others, {ranking.readings} collective readings "
        f"({ranking.framework})",
        soft_wrap=True,
    )
    console.print(table)
    console.print(f"{ranking.legal:,} legal plans; only the imported column was measured, by others")


def _data(inputs: Inputs, ranking: ExpectedRanking, source: str) -> dict[str, Any]:
    from autotune.tuning.report import request_data

    return {
        **request_data(inputs.model, inputs.cluster, inputs.workload),
        "history": {"source": source, "runs": ranking.same, "lessons": ranking.transfers, "readings": ranking.readings},
        "framework": ranking.framework,
        "legal": ranking.legal,
        "plans": [_plan_data(item) for item in ranking.plans],
    }


def _plan_data(item: ExpectedPlan) -> dict[str, Any]:
    known = item.imported
    return {
        "plan": item.plan.to_data(),
        "estimate": item.estimate.to_data(),
        "expected_tokens_per_s_per_gpu": item.tokens_per_s_per_gpu,
        "expected_interval_tokens_per_s_per_gpu": item.interval,
        "p_fits": item.p_fits,
        "imported": None
        if known is None
        else {
            "tokens_per_s_per_gpu": known.tokens_per_s_per_gpu,
            "interval_tokens_per_s_per_gpu": known.interval,
            "runs": known.repeats,
        },
    }
