"""Explanations for people: what limits a plan, what the others lose, what would help, and how it scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cli.inputs import Inputs
    from autotune.explain.scaling import ScalingCurve
    from autotune.explain.whatif import Setting
    from autotune.specs import Plan, Profile, Space

MAX_WHAT_IFS = 3
MIN_GAIN = 0.01
BAR, MAX_BAR = 20, 1.5


def print_best_reasons(console: Console, data: dict[str, Any]) -> None:
    """Of a tuning's answer: how sure the choice is, and its explanation."""
    best = data["best"]
    for plan in best["too_close_to_call"]:
        console.print(f"  too close to call against {output.plan_text(plan)}: the repeats cannot tell them apart")
    if best["preferred_because"]:
        console.print(f"  {best['preferred_because']}", soft_wrap=True)
    print_explanation(console, data["explanation"])


def print_explanation(console: Console, data: dict[str, Any]) -> None:
    """Limits, losses and the changes that would help most, a line each."""
    _print_lines(console, "What limits it:", [item["text"] for item in data["limits"]])
    _print_lines(console, "Against other plans:", [item["text"] for item in data["losses"]])
    helpful = [item["text"] for item in data["what_ifs"] if item["gain"] >= MIN_GAIN][:MAX_WHAT_IFS]
    _print_lines(console, "What would help the best plan most, one change at a time:", helpful)


def _print_lines(console: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    console.print(title)
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)


def explanation_of(inputs: Inputs, space: Space, profile: Profile | None, plan: Plan) -> dict[str, Any]:
    """The explanation of a plan by estimate, and why it is not the best one where it is not."""
    from autotune.cost.table import PlanTable
    from autotune.explain.explanation import explain_setting, rejection

    setting = _setting(inputs, space, profile)
    table = setting.plans()
    if table.find(plan) is None:  # outside the space that the options leave
        table = PlanTable.concat([table, PlanTable.of([plan])])
    estimates = setting.estimates(table)
    refused = rejection(plan, table, estimates)
    return {
        "explanation": explain_setting(setting, table, estimates, plan).to_data(),
        "rejection": refused.to_data() if refused else None,
    }


def print_explained(plan: Plan, data: dict[str, Any]) -> None:
    """The answer of `explanation_of`."""
    console = output.console()
    console.print(f"\nPlan {plan.key}", style="bold")
    if data["rejection"]:
        best = output.plan_text(data["rejection"]["best"])
        console.print(f"Against the best plan, {best}: {data['rejection']['text']}", soft_wrap=True)
    print_explanation(console, data["explanation"])


def scaling_of(inputs: Inputs, space: Space, profile: Profile | None) -> ScalingCurve:
    """The curve of the best plan over numbers of devices."""
    from autotune.explain.scaling import scaling_curve

    return scaling_curve(_setting(inputs, space, profile))


def print_scaling(inputs: Inputs, curve: ScalingCurve) -> None:
    """The curve as a table with bars, and what follows from it."""
    from autotune.explain.scaling import INTERVAL

    console, workload = output.console(), inputs.workload
    console.print(
        f"Scaling of {inputs.model.name} on clusters like {inputs.cluster.name}: {workload.global_batch} sequences of "
        f"{workload.seq_len} a step on any number of GPUs. E(N) = tokens/s/GPU over that of the smallest number that "
        f"fits; interval: {INTERVAL}. All figures are estimates.",
        soft_wrap=True,
    )
    table = output.table(
        "", "GPUs", "<best plan", "tokens/s/GPU", "E(N)", "90 %", "added GPUs", "<E(N)", "<largest loss"
    )
    for point in curve.points:
        low, high = point.interval
        table.add_row(
            str(point.devices), point.plan.key, output.count_text(point.tokens_per_s_per_gpu),
            f"{point.efficiency:.2f}", f"{low:.2f}-{high:.2f}", output.percent_text(point.marginal),
            "#" * round(BAR * min(point.efficiency, MAX_BAR)), point.limit,
        )  # fmt: skip
    console.print(table)
    if curve.left_out:
        console.print("No legal plan fits on " + ", ".join(str(devices) for devices in curve.left_out) + " GPUs.")
    console.print(curve.text[0].upper() + curve.text[1:] + ".", soft_wrap=True)


def _setting(inputs: Inputs, space: Space, profile: Profile | None) -> Setting:
    from autotune.explain.whatif import Setting

    return Setting(model=inputs.model, cluster=inputs.cluster, workload=inputs.workload, profile=profile, space=space)
