"""`autotune check`: what is wrong or doubtful about a plan or an existing launch, with figures and remedies.

(`autotune probe check` is another thing: the self-check of a machine.)
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.inputs import Inputs, read_cluster, read_inputs
from autotune.cli.options import option
from autotune.errors import AutotuneError, InputError

if TYPE_CHECKING:
    from autotune.explain.findings import Finding
    from autotune.explain.whatif import Setting
    from autotune.frameworks import ImportedPlan
    from autotune.specs import Plan

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LINE = re.compile(r"\bline (\d+)")


def check(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="A launch script, command line or config of --for; - is standard input."),
    ] = None,
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
    variables: Annotated[
        list[str] | None, option("--set", "NAME=VALUE", "A variable that a script expects from its environment.")
    ] = None,
    fix: Annotated[bool, option("--fix", help="Propose the best legal plan next to it, and what it gains.")] = False,
    sarif: Annotated[bool, option("--sarif", help="Print SARIF 2.1.0 (code scanning) instead of lines.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Judge a plan or a launch of a framework: errors, warnings and notes, each with figures and a remedy.

    All figures are estimates. Exit status: 0 without errors and warnings, 1 with warnings, 2 with errors. Nothing of a
    file is run.
    """
    from autotune.cli.database import stored_profile
    from autotune.explain.findings import best_neighbour, without_idle_settings
    from autotune.explain.whatif import Setting

    if (file is None) == (plan is None):
        raise InputError("FILE", file, "give a launch of a framework, or a plan with --plan")
    if sarif and as_json:
        raise InputError("--sarif", True, "it is JSON already: leave out --json")
    named: dict[str, Any] = {
        "model": model, "seq_len": seq_len, "global_batch": global_batch, "dtype": dtype, "precision": precision,
        "framework": framework, "kernels": kernels, "target": target,
    }  # fmt: skip
    launch = None
    if file is not None:
        inputs, launch = _of_launch(file, cluster, named, variables or [], db)
        chosen = launch.plan
    else:
        from autotune.specs import Plan

        if variables:
            raise InputError("--set", variables[0], "it goes with a FILE")
        inputs = read_inputs(cluster=cluster, db=db, **named)
        chosen = Plan.parse(plan or "", inputs.cluster.devices)
    setting = Setting(
        model=inputs.model, cluster=inputs.cluster, workload=inputs.workload,
        profile=stored_profile(inputs.cluster, db),
    )  # fmt: skip
    chosen, found = without_idle_settings(chosen)
    found += _judged(setting, chosen) + ([] if launch is None else of_the_file(setting, launch))
    order = ["error", "warning", "note"]
    found.sort(key=lambda each: order.index(each.severity.value))
    proposed = best_neighbour(setting, chosen) if fix else None
    status = 2 - min(order.index(found[0].severity.value), 2) if found else 0
    data = {
        "file": file, "plan": chosen.to_data(), "model": setting.model.name, "cluster": setting.cluster.name,
        "workload": setting.workload.to_data(), "findings": [each.to_data() for each in found],
        "fix": None if proposed is None else proposed.to_data(),
    }  # fmt: skip
    if sarif:
        output.print_json(_sarif(file, found))
    elif as_json:
        output.print_json(data)
    else:
        _print(data, found, fix=fix)
    return status


def _of_launch(
    file: str, cluster: str | None, named: dict[str, Any], variables: list[str], db: str | None
) -> tuple[Inputs, ImportedPlan]:
    """What a launch trains on the cluster. Raises InputError for one that cannot be read."""
    from autotune.cli.inputs import read_model
    from autotune.cli.plans import beside, read_file, read_variable
    from autotune.frameworks import Given, import_plan
    from autotune.tuning.targets import with_target

    target = named["target"]
    if target is None:
        raise InputError("--for", None, "name the framework of the file: megatron, torchtitan, ...")
    for name in ("framework", "kernels", "precision"):
        if named[name] is not None:
            raise InputError(f"--{name}", named[name], "the file says it: leave it out")
    where, text = read_cluster(cluster, db), read_file(file)
    given = Given(
        model=None if named["model"] is None else read_model(named["model"], db),
        devices=where.devices,
        facts={name: named[name] for name in ("seq_len", "global_batch", "dtype") if named[name] is not None},
        variables=dict(map(read_variable, variables)),
    )
    launch = import_plan(target, file, text, given, beside(file))
    workload = launch.workload.from_data(with_target(launch.workload.to_data() | {"framework": None, "target": target}))
    return Inputs(model=launch.model, cluster=where, workload=workload), launch


def _judged(setting: Setting, plan: Plan) -> list[Finding]:
    """What the rules find of a plan; where it cannot run, why, and the rest if its figures can be estimated."""
    from autotune.explain.findings import batch_rounding, findings, illegal
    from autotune.explain.scaling import scaling_curve
    from autotune.search.offline import estimated
    from autotune.search.space import illegal_reason, require_bounded
    from autotune.tuning.targets import refusal

    question = setting.model, setting.cluster, setting.workload
    reason = illegal_reason(*question, plan)
    if reason is None and setting.workload.target:
        reason = refusal(setting.workload.target, *question, plan)
    found: list[Finding] = []
    if reason is not None:
        found.append(batch_rounding(setting, plan) or illegal(reason))
        any_framework = setting.workload.of_any_software()
        if illegal_reason(setting.model, setting.cluster, any_framework, plan) is not None:
            return found
    estimate = estimated(*question, [plan], setting.profile)[0]
    try:
        require_bounded(*question)
        curve = scaling_curve(setting)
    except AutotuneError:  # too many plans to weigh, or no link between nodes: nothing is said of it
        curve = None
    return found + findings(setting, plan, estimate, curve)


OVERLAP = "overlap_grad_reduce"
"""The setting of Megatron-LM without which gradients are reduced after the computation, not under it."""


def of_the_file(setting: Setting, launch: ImportedPlan) -> list[Finding]:
    """What the launch says beside its plan: overlap that it does not ask for, and settings that are not judged."""
    from autotune.explain.findings import Finding, Severity, without_overlap

    found = []
    for each in launch.remainder:
        where = ", ".join(filter(None, [launch.file, each.where]))
        lost = without_overlap(setting, launch.plan, each.name, where) if each.name == OVERLAP else None
        found.append(
            lost
            or Finding(
                rule="unread-setting", severity=Severity.NOTE, where=where,
                text=f"{each.name} {each.value}: {each.what or 'not known here'}", remedy="judge it yourself",
            )
        )  # fmt: skip
    return found


def _print(data: dict[str, Any], found: list[Finding], *, fix: bool) -> None:
    console = output.console()
    console.print(
        f"Plan {output.plan_text(data['plan'])} of {data['model']} on {data['cluster']}: "
        f"{output.workload_text(data['workload'])}",
        soft_wrap=True,
    )
    output.print_findings(data["findings"])
    if not found:
        console.print("Nothing is wrong with it by these rules (estimates)")
    if fix:
        console.print("Fix: " + (data["fix"]["text"] if data["fix"] else "no legal plan next to it is better"))


def _sarif(file: str | None, found: list[Finding]) -> dict[str, Any]:
    """The findings in the Static Analysis Results Interchange Format (OASIS, version 2.1.0)."""
    from autotune.explain.findings import RULES

    def place(each: Finding) -> list[dict[str, Any]]:
        if file is None:
            return []
        line = _LINE.search(each.where)
        region = {"startLine": int(line[1]) if line else 1}
        return [{"physicalLocation": {"artifactLocation": {"uri": file}, "region": region}}]

    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()]
    results = [
        {
            "ruleId": each.rule, "ruleIndex": list(RULES).index(each.rule), "level": each.severity.value,
            "message": {"text": f"{each.text}. Remedy: {each.remedy}. (Estimate)"}, "locations": place(each),
            "properties": dict(each.figures),
        }
        for each in found
    ]  # fmt: skip
    driver = {"name": "autotune", "version": version("autotune"), "rules": rules}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
