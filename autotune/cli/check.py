"""`autotune probe check`: the self-check of a machine, estimated beside measured."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from autotune.cli import options, output

if TYPE_CHECKING:
    from autotune.ports.store import OnProgress
    from autotune.specs import ClusterSpec, Estimate, ProbeProgress, ProbeRequest
    from autotune.tuning.selfcheck import SelfCheck, StepCheck

# On a GPU the smallest preset would measure launches only; this one fits every card of the catalog.
GPU_MODEL = "llama3.2-1b"
GPU_SEQ_LEN, GPU_GLOBAL_BATCH = 2048, 8


def check(
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Run every kind of probe here and compare estimates with what was measured.

    Takes a few minutes. On GPUs the default model is llama3.2-1b at 2,048 tokens and 8 sequences a step.
    """
    from autotune.cli.inputs import read_cluster, read_model, read_workload
    from autotune.cli.tune_view import probe_text
    from autotune.specs import DeviceKind
    from autotune.tuning.selfcheck import self_check
    from autotune.wiring import open_prober

    spec = read_cluster(cluster, db)
    gpus = spec.device.kind is not DeviceKind.CPU
    if gpus:
        model = model or GPU_MODEL
        seq_len, global_batch = seq_len or GPU_SEQ_LEN, global_batch or max(GPU_GLOBAL_BATCH, spec.devices)
    trained = read_model(model, db)
    workload = read_workload(trained, spec, seq_len=seq_len, global_batch=global_batch, dtype=dtype)
    console = output.error_console()
    with closing(open_prober(spec)) as prober, console.status("starting ranks") as status:

        def on_probe(request: ProbeRequest) -> OnProgress:
            console.print(probe_text(request.to_data()), markup=False)

            def show(progress: ProbeProgress) -> None:
                status.update(f"{probe_text(request.to_data())}: {progress.phase} {progress.done}")

            return show

        found = self_check(trained, spec, workload, prober, on_probe)
    if as_json:
        output.print_json(check_data(found))
    else:
        _print(found, spec)
    return 0 if found.ok else 1


def check_data(found: SelfCheck) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "ok": found.ok,
        "fingerprint": found.fingerprint.to_data(),
        "profile": found.profile.to_data(),
        "probes": [{"request": each.request.to_data(), **each.outcome.to_data()} for each in found.probes],
        "steps": [_step_data(step) for step in found.steps],
    }


def _step_data(step: StepCheck) -> dict[str, Any]:
    reading = step.reading
    return {
        "plan": step.plan.to_data(),
        "failure": step.outcome.failure.to_data() if step.outcome.failure else None,
        "measured": reading.to_data() if reading else None,
        "catalog_estimate": step.catalog.to_data() if step.catalog else None,
        "calibrated_estimate": step.calibrated.to_data() if step.calibrated else None,
    }


def _print(found: SelfCheck, cluster: ClusterSpec) -> None:
    from autotune.cli.probe import print_outcomes

    print_outcomes(cluster, [each.request for each in found.probes], [each.outcome for each in found.probes])
    console = output.console()
    table = output.table(
        f"Steps on {cluster.name}: measured | estimated from the catalog | from the profile just measured",
        "<plan", "step", "catalog", "profile", "error", "memory", "estimated", "error",
    )  # fmt: skip
    for step in found.steps:
        table.add_row(*_step_cells(step))
    console.print(table)
    device = f"{found.fingerprint.device_count} x {found.fingerprint.device_name}"
    console.print(
        f"{device}, torch {found.fingerprint.torch}: {'every probe ran' if found.ok else 'some probes failed'}"
    )


def _step_cells(step: StepCheck) -> tuple[str, ...]:
    reading = step.reading
    if reading is None:
        failure = step.outcome.failure
        return (step.plan.key, failure.kind.value if failure else "-", *("-",) * 6)
    calibrated = step.calibrated
    peak = max(reading.peak_allocated_bytes, 1)
    return (
        step.plan.key,
        output.seconds_text(reading.step_time_s),
        output.seconds_text(step.catalog.step_time_s if step.catalog else None),
        output.seconds_text(calibrated.step_time_s if calibrated else None),
        output.percent_text(calibrated.step_time_s / reading.step_time_s - 1 if calibrated else None),
        output.bytes_text(reading.peak_allocated_bytes),
        output.bytes_text(_memory(calibrated)),
        output.percent_text(calibrated.peak_memory_bytes / peak - 1 if calibrated else None),
    )


def _memory(estimate: Estimate | None) -> float | None:
    return estimate.peak_memory_bytes if estimate else None
