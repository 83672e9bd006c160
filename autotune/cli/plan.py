"""`autotune plan` and `autotune estimate`: what the cost model says, without any hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from autotune.cli import options, output
from autotune.cli.asking import ask, asked_server
from autotune.cli.inputs import read_inputs, read_space
from autotune.cli.options import option
from autotune.cli.tunings import print_explanation, print_frameworks
from autotune.errors import IllegalPlanError, InputError, NothingFitsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.table import Table

    from autotune.cli.inputs import Inputs
    from autotune.explain.whatif import Setting
    from autotune.imports.expected import ExpectedRanking
    from autotune.search.space import Runtime
    from autotune.specs import Estimate, Plan

BAR, MAX_BAR = 20, 1.5


def plan(
    plan: options.PlanText = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    precision: options.Precision = None,
    framework: options.FrameworkName = None,
    kernels: options.Kernels = None,
    target: options.Target = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    micro_batch: options.MicroBatch = None,
    zero_stage: options.ZeroStage = None,
    recompute: options.RecomputeModes = None,
    recompute_modules: options.RecomputeModules = None,
    sequence_parallel: options.SequenceParallel = None,
    schedule: options.Schedules = None,
    top: Annotated[int, option("--top", "N", min=1, max=10_000, help="Plans to list.")] = 10,
    every: Annotated[bool, option("--all", help="List plans that the estimate cannot tell apart, too.")] = False,
    explain: Annotated[
        bool, option("--explain", help="Say what limits the plan, what others lose against it, and what would help.")
    ] = False,
    scaling: Annotated[
        bool, option("--scaling", help="Instead: the best plan on fewer and more GPUs, and how many still pay.")
    ] = False,
    history: options.History = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Rank all legal plans by estimate, without any hardware. With --plan: that one, or why it is not legal.

    Each tp, pp, ep and etp is listed once, by the simplest of its plans that the estimate cannot tell from its best.

    Speeds come from the cluster's profile if the database has one, else from the catalog. Exit status 3 if none fits.
    """
    dimensions = {
        "tp": tp, "pp": pp, "micro_batch": micro_batch, "zero_stage": zero_stage, "recompute": recompute,
        "recompute_modules": recompute_modules, "sequence_parallel": sequence_parallel, "schedule": schedule,
    }  # fmt: skip
    question: dict[str, Any] = {
        "model": model, "cluster": cluster, "seq_len": seq_len, "global_batch": global_batch, "dtype": dtype,
        "precision": precision, "framework": framework, "kernels": kernels, "target": target,
    }  # fmt: skip
    only_here = plan is not None or explain or scaling or history is not None
    if (server := asked_server(db)) is not None:
        if only_here:
            allowed = "--plan, --explain, --scaling and --history work on this machine only: leave it out"
            raise InputError("--server", server, allowed)
        question = _named_there(question)
    space = read_space(**dimensions)
    if not only_here:
        with ask(db) as answers:
            named = {"for" if name == "target" else name: value for name, value in question.items()}
            data = answers.plans(**named, **space.to_data(), top=top, all=every)
        output.print_json(data) if as_json else _print_ranking(data)
        return 0
    _require_one_question(plan, dimensions, history, explain=explain, scaling=scaling)
    from autotune.cli.database import stored_profile
    from autotune.explain.whatif import Setting
    from autotune.search.space import require_bounded

    inputs = read_inputs(**question, db=db)
    if plan is None or explain or scaling:
        require_bounded(inputs.model, inputs.cluster, inputs.workload)
    chosen = None if plan is None else read_plan(inputs, plan)
    setting = Setting(
        model=inputs.model, cluster=inputs.cluster, workload=inputs.workload, space=space,
        profile=stored_profile(inputs.cluster, db),
    )  # fmt: skip
    if history is not None:
        return _print_expected(setting, chosen, history, db, top, as_json=as_json)
    if scaling:
        _print_scaling(setting, as_json=as_json)
        return 0
    return _print_explained(setting, chosen, top, distinct=not every, explain=explain, as_json=as_json)


def _named_there(question: dict[str, Any]) -> dict[str, Any]:
    """What a server is asked for: its own clusters, and the smallest preset where no model is named."""
    from autotune.catalog import smallest

    if question["cluster"] is None:
        raise InputError("--cluster", None, "name one of the server's clusters: autotune --server URL cluster list")
    return question | {"model": question["model"] or smallest().name}


def _require_one_question(
    plan: str | None,
    dimensions: Mapping[str, object],
    history: str | None,
    *,
    explain: bool,
    scaling: bool,
) -> None:
    """Raises InputError for options of which one would be ignored."""
    if history is not None and (scaling or explain):
        raise InputError("--history", history, "it goes with neither --scaling nor --explain")
    if scaling and explain:
        raise InputError("--explain", explain, "it does not go with --scaling: ask one after the other")
    if plan is not None and scaling:
        raise InputError("--plan", plan, "--scaling finds the best plan for each number of GPUs: leave one of them out")
    given = [f"--{name.replace('_', '-')}" for name, value in dimensions.items() if value is not None]
    if plan is not None and given and not explain:  # what it is explained by is of that space
        raise InputError("--plan", plan, f"it is one plan, so leave out {', '.join(given)}, or write them into it")


def read_plan(inputs: Inputs, text: str, runtime: Runtime | None = None) -> Plan:
    """The plan that the text of --plan gives. Raises IllegalPlanError with the reason if it cannot be run."""
    from autotune.search import space
    from autotune.specs import Plan

    plan = Plan.parse(text, inputs.cluster.devices)
    runtime = runtime or space.Runtime.ANY
    reason = space.illegal_reason(inputs.model, inputs.cluster, inputs.workload, plan, runtime)
    if reason is None and inputs.workload.target:
        from autotune.tuning.targets import refusal

        reason = refusal(inputs.workload.target, inputs.model, inputs.cluster, inputs.workload, plan)
    if reason is not None:
        raise IllegalPlanError("--plan", plan.key, reason)
    return plan


# The ranking, or one plan of it, with what explains it.


def _print_explained(
    setting: Setting, chosen: Plan | None, top: int, *, distinct: bool, explain: bool, as_json: bool
) -> int:
    """Prints the ranking, or one plan as a ranking, whether it fits or not: that is the exit status."""
    import time

    from autotune.explain.explanation import explained
    from autotune.search.offline import EstimatedPlan, Ranking, estimated, rank
    from autotune.tuning.report import ranking_data
    from autotune.tuning.targets import export_refusal

    question = setting.model, setting.cluster, setting.workload
    if chosen is None:
        ranking = rank(
            *question, setting.space, profile=setting.profile, limit=top, distinct=distinct,
            refusal=export_refusal(*question),
        )  # fmt: skip
    else:
        started = time.perf_counter()
        found = estimated(*question, [chosen], setting.profile)[0]
        seconds = time.perf_counter() - started
        one = (EstimatedPlan(plan=chosen, estimate=found),)
        ranking = Ranking(legal=1, fitting=int(found.fits), seconds=seconds, estimates_per_s=1 / seconds, plans=one)
    first = ranking.plans[0].plan
    data = ranking_data(*question, ranking, setting.profile) | (
        explained(setting, first, asked=chosen is not None) if explain else {}
    )
    if as_json:
        output.print_json(data)
        return 0 if ranking.fitting else NothingFitsError.exit_code
    _print_ranking(data)
    if explain:
        console = output.console()
        console.print(f"\nPlan {first.key}", style="bold")
        if data["rejection"]:
            best = output.plan_text(data["rejection"]["best"])
            console.print(f"Against the best plan, {best}: {data['rejection']['text']}", soft_wrap=True)
        print_explanation(console, data["explanation"])
    return 0 if ranking.fitting else NothingFitsError.exit_code


def _print_ranking(data: dict[str, Any]) -> None:
    table = output.listing(
        "", data["plans"], ("<plan", "plan"), ("alike", lambda each: f"+{each['alike']:,}" if each["alike"] else ""),
        ("tokens/s/GPU", "estimate.tokens_per_s_per_gpu"), ("step", "estimate.step_time_s"), ("MFU", "estimate.mfu"),
        ("memory needed", "estimate.needed_bytes"), ("P(fits)", "estimate.p_fits"), ("<fits", "estimate.fits"),
        ("<largest losses", lambda each: _losses(each["estimate"])),
    )  # fmt: skip
    console = output.console()
    console.print(_heading(data), soft_wrap=True)
    console.print(table)
    if data["plans"]:
        usable = output.bytes_text(data["plans"][0]["estimate"]["usable_bytes"])
        console.print(
            f"In the order of tokens/s/GPU times P(fits). A plan that needs {usable}, which is what can be used, fits "
            "as often as not."
        )
    if any(each["alike"] for each in data["plans"]):
        console.print(
            "Of plans of one tp, pp and ep that the estimate cannot tell apart (5 %) the simplest stands here; alike "
            "counts the others, and --all lists them."
        )
    print_frameworks(data)
    if data.get("findings", []):
        console.print("Of the first plan (autotune check judges any):")
    output.print_findings(data.get("findings", []))
    console.print(
        f"{data['legal']:,} legal plans, {data['fitting']:,} estimated to fit; {data['seconds']:.2f} s, "
        f"{data['estimates_per_s']:,.0f} estimates/s"
    )


def _heading(data: dict[str, Any]) -> str:
    return (
        f"Estimates from the {data['basis']} for {data['model']} on {data['cluster']} ({data['devices']} devices): "
        f"{output.workload_text(data['workload'])}"
    )


def _losses(found: dict[str, Any]) -> str:
    """The two largest parts of the step that are not compute."""
    parts = {name: seconds for name, seconds in found["seconds"].items() if name != "compute" and seconds > 0}
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    return ", ".join(f"{name} {parts[name] / found['step_time_s']:.1%}" for name in largest)


# --scaling: the best plan over numbers of devices.


def _print_scaling(setting: Setting, *, as_json: bool) -> None:
    from autotune.explain.scaling import INTERVAL, scaling_curve
    from autotune.tuning.report import request_data

    curve, workload = scaling_curve(setting), setting.workload
    if as_json:
        head = request_data(setting.model, setting.cluster, workload)
        output.print_json({**head, "scaling": curve.to_data()})
        return
    console = output.console()
    console.print(
        f"Scaling of {setting.model.name} on clusters like {setting.cluster.name}: {workload.global_batch} sequences "
        f"of {workload.seq_len} a step on any number of GPUs. E(N) = tokens/s/GPU over that of the smallest number "
        f"that fits; interval: {INTERVAL}. All figures are estimates.",
        soft_wrap=True,
    )
    table = output.listing(
        "", curve.to_data()["points"], ("GPUs", "devices"), ("<best plan", "plan"),
        ("tokens/s/GPU", "tokens_per_s_per_gpu"), ("E(N)", lambda each: f"{each['efficiency']:.2f}"),
        ("90 %", lambda each: "-".join(f"{value:.2f}" for value in each["interval"])),
        ("added GPUs", lambda each: output.percent_text(each["marginal"])),
        ("<E(N)", lambda each: "#" * round(BAR * min(each["efficiency"], MAX_BAR))), ("<largest loss", "limit"),
    )  # fmt: skip
    console.print(table)
    if curve.left_out:
        console.print("No legal plan fits on " + ", ".join(str(devices) for devices in curve.left_out) + " GPUs.")
    console.print(curve.text[0].upper() + curve.text[1:] + ".", soft_wrap=True)


# --history SOURCE: the ranking once imports were learned from.


def _print_expected(
    setting: Setting, plan: Plan | None, source: str, db: str | None, limit: int, *, as_json: bool
) -> int:
    """Prints the ranking of the legal space, or of one plan, with what a source's imports teach.

    Raises:
        UnknownNameError: nothing was imported under that name.
    """
    from autotune.tuning.report import request_data

    ranking = _expected_ranking(setting, plan, source, db, limit)
    head = request_data(setting.model, setting.cluster, setting.workload)
    data = head | ranking.to_data(source)

    def people() -> None:
        interval, imported = "expected_interval_tokens_per_s_per_gpu", "imported.tokens_per_s_per_gpu"
        table = output.listing(
            "", data["plans"], ("<plan", "plan"), ("expected tokens/s/GPU", "expected_tokens_per_s_per_gpu"),
            ("90 % interval", interval), (f"imported ({source})", imported), ("runs", "imported.runs"),
            ("estimate", "estimate.tokens_per_s_per_gpu"), ("peak memory", "estimate.peak_memory_bytes"),
            ("P(fits)", "p_fits"),
        )  # fmt: skip
        console = output.console()
        console.print(
            f"Expected for {data['model']} on {data['cluster']} after {source}: {ranking.same} runs of this request, "
            f"transfers on {ranking.transfers} plans of others, {ranking.readings} collective readings "
            f"({ranking.framework})",
            soft_wrap=True,
        )
        console.print(table)
        console.print(f"{ranking.legal:,} legal plans; only the imported column was measured, by others")

    output.tell(data, people, as_json=as_json)
    return 0 if ranking.plans else NothingFitsError.exit_code


def _expected_ranking(setting: Setting, plan: Plan | None, source: str, db: str | None, limit: int) -> ExpectedRanking:
    from autotune.cli.database import open_to_read
    from autotune.cost.table import PlanTable
    from autotune.imports.expected import rank_with_history
    from autotune.search.offline import nothing_legal

    question = setting.model, setting.cluster, setting.workload
    table = setting.plans() if plan is None else PlanTable.of([plan])
    if not len(table):
        raise nothing_legal(*question, setting.runtime, setting.space)
    with open_to_read(db) as store:
        return rank_with_history(
            *question, table,
            runs=store.imported_runs(source), readings=lambda other: store.imported_readings(source, other.key),
            profile=setting.profile, limit=limit,
        )  # fmt: skip


# One plan by named part.


def estimate(
    plan: options.RequiredPlanText,
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    precision: options.Precision = None,
    framework: options.FrameworkName = None,
    kernels: options.Kernels = None,
    target: options.Target = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Estimate one plan: seconds of a step and bytes of the worst stage, by named part.

    Exit status 3 if the plan does not fit into a device's memory: it is estimated all the same.
    """
    from autotune.cli.database import stored_profile
    from autotune.explain.losses import largest_parts
    from autotune.search.offline import estimated
    from autotune.tuning.report import request_data

    inputs = read_inputs(
        model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, precision=precision,
        framework=framework, kernels=kernels, target=target, db=db,
    )  # fmt: skip
    question = inputs.model, inputs.cluster, inputs.workload
    chosen = read_plan(inputs, plan)
    found = estimated(*question, [chosen], stored_profile(inputs.cluster, db))[0]
    shares = dict(largest_parts(found))
    status = 0 if found.fits else NothingFitsError.exit_code
    head = request_data(*question)
    if as_json:
        output.print_json({
            **head, "plan": chosen.to_data(), "estimate": found.to_data(), "largest_parts": shares,
        })  # fmt: skip
        return status
    console = output.console()
    console.print(_heading({**head, "basis": found.basis.value}), f"plan {chosen.key}", sep="\n", soft_wrap=True)
    console.print(_parts("seconds of a step", found.seconds.to_data(), found.step_time_s, output.seconds_text))
    title = f"bytes of the worst stage ({found.worst_stage})"
    console.print(_parts(title, found.bytes.to_data(), found.peak_memory_bytes, output.bytes_text))
    first, *rest = shares.items()
    then = f"; then {rest[0][0]}, {rest[0][1]:.1%}" if rest else ""
    console.print(f"The step is mostly {first[0]}, {first[1]:.1%}{then} (estimates)")
    console.print(
        f"{output.count_text(found.tokens_per_s_per_gpu)} tokens/s/GPU, MFU {output.percent_text(found.mfu)}; "
        f"{_room(found, inputs.cluster.device.memory_bytes)} (estimates)",
        soft_wrap=True,
    )
    return status


def _room(found: Estimate, memory_bytes: int) -> str:
    """Whether a plan fits: what it needs, what can be used, and how sure that is."""
    needs, usable, has = (output.bytes_text(size) for size in (found.needed_bytes, found.usable_bytes, memory_bytes))
    fits = "fits" if found.fits else "does not fit"
    return f"{fits}: it needs {needs}, and {usable} of {has} can be used; P(fits) {output.percent_text(found.p_fits)}"


def _parts(title: str, parts: Mapping[str, float], total: float, text: Callable[[float], str]) -> Table:
    table = output.table("", f"<{title}", "estimate", "share")
    for name, value in parts.items():
        table.add_row(name, text(value), output.percent_text(value / total))
    table.add_section()
    table.add_row("total", text(total), "")
    return table
