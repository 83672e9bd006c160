"""`autotune probe`: one measuring job on this machine, its readings as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.options import option
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.ports.store import OnProgress
    from autotune.specs import ClusterSpec, Fingerprint, ProbeOutcome, ProbeProgress, ProbeRequest

app = typer.Typer(help="Run one probe on this machine.", no_args_is_help=True)

Deadline = Annotated[float, option("--deadline-s", "SECONDS", "End each probe after this long: at most a day.")]
Iterations = Annotated[int, option("--iterations", min=1, max=10**6, help="Timed repeats of each reading.")]
LONGEST_DEADLINE_S = 86_400.0
DEADLINE_S = 300.0
SIZES = "4KiB,64KiB,1MiB,16MiB"
UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@app.command()
def collective(
    op: Annotated[
        str | None,
        option("--op", "OP", "all_reduce, all_gather, reduce_scatter, all_to_all or send_recv. Default: all of them."),
    ] = None,
    group_size: Annotated[int | None, option("--group-size", "N", "Ranks a group. Default: all.")] = None,
    stride: Annotated[int, option("--stride", min=1, help="Distance of a group's ranks.")] = 1,
    sizes: Annotated[str, option("--sizes", "SIZES", "Sizes of the full buffer.")] = SIZES,
    iterations: Iterations = 7,
    cluster: options.Cluster = None,
    deadline_s: Deadline = DEADLINE_S,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Time collectives over groups of ranks: algbw and busbw as nccl-tests define them."""
    from autotune.cli.inputs import read_cluster
    from autotune.specs import CollectiveOp, CollectiveRequest

    _prepare(db)
    spec = read_cluster(cluster, db)
    sizes_bytes = read_sizes(sizes)
    requests = [
        CollectiveRequest.from_data(
            {
                "op": name,
                "group_size": _group_size(name, group_size, spec),
                "stride": stride,
                "sizes_bytes": sizes_bytes,
                "iterations": iterations,
            },
            "probe",
        )
        for name in ([op] if op else [each.value for each in CollectiveOp])
    ]
    return _measure(spec, requests, deadline_s=deadline_s, db=db, as_json=as_json)


@app.command()
def layer(
    model: options.Model = None,
    part: Annotated[str | None, option("--part", "PART", "layer, embedding or head. Default: all.")] = None,
    tp: Annotated[int, option("--tp", min=1, help="Tensor parallel.")] = 1,
    micro_batch: Annotated[int, option("--micro-batch", min=1, help="Sequences.")] = 1,
    recompute: Annotated[str, option("--recompute", metavar="none|selective|full")] = "none",
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel")] = False,
    iterations: Iterations = 7,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    dtype: options.DTypeName = None,
    deadline_s: Deadline = DEADLINE_S,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Time forward and backward of one layer, the embedding, and head with loss, and their memory."""
    from autotune.cli.inputs import read_inputs
    from autotune.specs import LayerPart, LayerRequest

    _prepare(db)
    inputs = read_inputs(model=model, cluster=cluster, seq_len=seq_len, global_batch=None, dtype=dtype, db=db)
    common: dict[str, Any] = {
        "model": inputs.model.to_data(),
        "workload": inputs.workload.to_data(),
        "tp": tp,
        "micro_batch": micro_batch,
        "recompute": recompute,
        "sequence_parallel": sequence_parallel,
        "iterations": iterations,
    }
    requests = [
        LayerRequest.from_data(common | {"part": name}, "probe")
        for name in ([part] if part else [each.value for each in LayerPart])
    ]
    return _measure(inputs.cluster, requests, deadline_s=deadline_s, db=db, as_json=as_json)


@app.command()
def step(
    plan: options.RequiredPlanText,
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    precision: options.Precision = None,
    max_steps: Annotated[int, option("--max-steps", min=1, max=10**6, help="Timed steps at most.")] = 10,
    seed: options.Seed = 0,
    command: options.CommandName = None,
    cold: Annotated[bool, option("--cold", help="Start fresh ranks for it.")] = False,
    deadline_s: Deadline = DEADLINE_S,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Run real training steps under a plan: tokens/s/GPU, T_calc, T_comm, memory, loss."""
    from autotune.cli.inputs import read_inputs, read_program, read_program_inputs
    from autotune.cli.plan import read_plan
    from autotune.search.space import runtime_of
    from autotune.specs import StepRequest

    _prepare(db)
    program = read_program(command) if command is not None else None
    if program is None:
        inputs = read_inputs(
            model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, precision=precision,
            db=db,
        )  # fmt: skip
    else:
        given: dict[str, object] = {"seq_len": seq_len, "global_batch": global_batch, "dtype": dtype}
        inputs = read_program_inputs(program.offer, model=model, cluster=cluster, given=given, db=db)
    request = StepRequest(
        model=inputs.model,
        workload=inputs.workload,
        plan=read_plan(inputs, plan, runtime_of(inputs.workload)),
        min_steps=min(3, max_steps),
        max_steps=max_steps,
        seed=seed,
        cold=cold,
    )
    file = program.file if program is not None else None
    return _measure(inputs.cluster, [request], deadline_s=deadline_s, db=db, as_json=as_json, file=file)


@app.command()
def fingerprint(cluster: options.Cluster = None, db: options.Database = None, as_json: options.AsJson = False) -> None:
    """Read the environment of the ranks: hardware, driver, library versions, clocks."""
    from autotune.cli.database import open_to_write
    from autotune.cli.inputs import read_cluster
    from autotune.wiring import open_prober

    _prepare(db)
    with closing(open_prober(read_cluster(cluster, db))) as prober, _progress("fingerprint"):
        found = prober.fingerprint()
    if db is not None:
        with open_to_write(db) as store:
            store.put_fingerprint(found)
    output.print_spec(found, as_json=as_json)


def read_sizes(text: str) -> list[int]:
    """Bytes from `4KiB,1MiB,1000`; plain numbers are bytes. Raises InputError."""
    sizes = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        digits = item.rstrip("BKMGibkmg")
        unit = item[len(digits) :].upper() or "B"
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and int(digits)) or unit not in UNITS:
            raise InputError("--sizes", item, "give sizes like 4KiB,1MiB,1000 (B, KiB, MiB, GiB, KB, MB, GB)")
        sizes.append(int(digits) * UNITS[unit])
    return sizes


def _group_size(op: str, asked: int | None, cluster: ClusterSpec) -> int:
    """The ranks of a group; a send and its receive are two."""
    size = asked or (2 if op == "send_recv" else cluster.devices)
    if size < 2 or cluster.devices % size:
        raise InputError("--group-size", size, f"groups of at least 2 that divide the {cluster.devices} devices")
    return size


def _measure(
    cluster: ClusterSpec,
    requests: Sequence[ProbeRequest],
    *,
    deadline_s: float,
    db: str | None,
    as_json: bool,
    file: Path | None = None,
) -> int:
    """Runs the probes one after the other, prints what they found, stores it with --db. Exit status 1 on a failure."""
    from autotune.cli.tune_view import probe_text
    from autotune.wiring import open_prober, require_runnable

    if not 0 < deadline_s <= LONGEST_DEADLINE_S:
        raise InputError("--deadline-s", deadline_s, f"more than 0 and at most {LONGEST_DEADLINE_S:.0f} seconds")
    for request in requests:
        require_runnable(cluster, request)
    with closing(open_prober(cluster, file)) as prober:
        with _progress("starting ranks"):
            environment = prober.fingerprint()
        outcomes = []
        for request in requests:
            with _progress(probe_text(request.to_data())) as on_progress:
                outcomes.append(prober.run(request, deadline_s=deadline_s, on_progress=on_progress))
    if db is not None:
        _store(cluster, environment, requests, outcomes, db)
    if as_json:
        pairs = zip(requests, outcomes, strict=True)
        probes = [{"request": request.to_data(), **outcome.to_data()} for request, outcome in pairs]
        output.print_json({"cluster": cluster.to_data(), "fingerprint": environment.to_data(), "probes": probes})
    else:
        print_outcomes(cluster, requests, outcomes)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _prepare(db: str | None) -> None:
    """With --db: makes the database now, so that one that cannot be written is told before anything is measured."""
    from autotune.cli.database import open_to_write

    if db is not None:
        with open_to_write(db):
            pass


def _store(
    cluster: ClusterSpec,
    environment: Fingerprint,
    requests: Sequence[ProbeRequest],
    outcomes: Sequence[ProbeOutcome],
    db: str,
) -> None:
    from autotune.cli.database import open_to_write

    with open_to_write(db) as store:
        store.put_cluster(cluster)
        key = store.put_fingerprint(environment)
        for request, outcome in zip(requests, outcomes, strict=True):
            store.save_probe(tuning_id=None, cluster=cluster, fingerprint_key=key, request=request, outcome=outcome)


@contextmanager
def _progress(what: str) -> Iterator[OnProgress]:
    """A line on standard error that tells what is being measured, while it is; nothing where that is no terminal."""
    console = output.error_console()
    with console.status(what) as status:

        def show(progress: ProbeProgress) -> None:
            count = f" {progress.done}/{progress.total}" if progress.total else ""
            seconds = f", {output.seconds_text(progress.seconds)}" if progress.seconds is not None else ""
            status.update(f"{what}: {progress.phase}{count}{seconds}")

        yield show


def print_outcomes(cluster: ClusterSpec, requests: Sequence[ProbeRequest], outcomes: Sequence[ProbeOutcome]) -> None:
    """Tables of what was measured; failures with their cause and log."""
    from autotune.cli.tune_view import probe_text
    from autotune.specs import CollectiveReading, LayerReading, StepReading

    console = output.console()
    readings = [reading for outcome in outcomes for reading in outcome.readings]
    collectives, layers, steps = (
        [reading.to_data() for reading in readings if isinstance(reading, kind)]
        for kind in (CollectiveReading, LayerReading, StepReading)
    )
    if collectives:
        title = f"Collectives on {cluster.name} (median of the slowest rank; 10th and 90th percentile)"
        console.print(output.listing(title, collectives, *_COLLECTIVE))
    if layers:
        title = f"Layers on {cluster.name} (medians; memory: {layers[0]['memory_source']})"
        console.print(output.listing(title, layers, *_LAYER))
    for step in steps:
        console.print(output.facts(f"Training steps on {cluster.name}", "measured", _step_figures(step)))
    for request, outcome in zip(requests, outcomes, strict=True):
        failure = outcome.failure
        if failure is not None:
            where = "" if failure.rank is None else f" on rank {failure.rank}"
            console.print(
                f"{probe_text(request.to_data())}: failed, {failure.kind.value}{where}: {failure.message} "
                f"(log: {failure.log_path})"
            )
    console.print(f"{sum(outcome.gpu_s for outcome in outcomes):.1f} GPU-seconds spent")


_COLLECTIVE = (
    ("<op", "op"), ("group", "group_size"), ("stride", "stride"), ("size", "size_bytes"), ("time", "time_s"),
    ("p10", "time_p10_s"), ("p90", "time_p90_s"), ("algbw", "algbw_bytes_per_s"), ("busbw", "busbw_bytes_per_s"),
)  # fmt: skip
_LAYER = (
    ("<part", "part"), ("tp", "tp"), ("micro-batch", "micro_batch"), ("<recompute", "recompute"),
    ("forward", "forward_s"), ("computing", "forward_calc_s"), ("backward", "backward_s"),
    ("computing", "backward_calc_s"), ("saved", "saved_bytes"), ("peak", "peak_bytes"),
    ("parameters", "parameter_bytes"),
)  # fmt: skip


def _step_figures(row: dict[str, Any]) -> dict[str, str]:
    low, high = (output.count_text(value) for value in row["interval_tokens_per_s_per_gpu"])
    steady, losses, seconds = "steady" if row["steady"] else "not steady yet", row["losses"], output.seconds_text
    return {
        "tokens/s/GPU": f"{output.count_text(row['tokens_per_s_per_gpu'])} (95 % interval {low} to {high})",
        "step time": f"{seconds(row['step_time_s'])} over {len(row['step_times_s'])} steps, {steady}",
        "T_calc": seconds(row["t_calc_s"]),
        "T_comm": f"{seconds(row['t_comm_s'])}, {seconds(row['t_comm_exposed_s'])} exposed",
        "mu = T_comm / T_calc": output.count_text(row["mu"]),
        "MFU": output.percent_text(row["mfu"]),
        "peak memory of a rank": f"{output.bytes_text(row['peak_allocated_bytes'] or None)} ({row['memory_source']})",
        "reserved": output.bytes_text(row["peak_reserved_bytes"] or None),
        "loss": f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "-",
        "set-up": seconds(row["setup_s"]),
    }
