"""LocalProber: the devices of one machine as a Prober. Loads no torch."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from autotune.errors import InputError, ProberError
from autotune.ports.store import OnProgress
from autotune.specs import (
    ClusterSpec,
    Failure,
    FailureKind,
    Fingerprint,
    ProbeOutcome,
    ProbeRequest,
    StepReading,
    StepRequest,
)
from probes.launch.failures import RankFailure, tail_of
from probes.launch.gathering import Gathered, Progress
from probes.launch.merging import MODULES, Readings, merged_readings, stage_of
from probes.launch.placement import Placement
from probes.launch.pool import RankPool, StartError, rank_log
from probes.launch.torchrun import TORCHRUN_LOG, ColdTrial

_FINGERPRINT_S = 180.0


class LocalProber:
    """Runs probes on warm ranks of this machine, one at a time; implements autotune.ports.store.Prober.

    Args:
        cluster: whose devices the ranks are.
        log_dir: each probe writes into a directory of its own below this one.
        ranks: how many ranks, if not one for each device of the cluster.
        placements: one a rank, for ranks that are not plainly on this machine.

    Raises:
        ProberError: the ranks would not be on one machine, and there are no placements.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        log_dir: Path,
        ranks: int | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> None:
        self._cluster = cluster
        self._ranks = cluster.devices if ranks is None else ranks
        if placements is None and self._ranks > cluster.gpus_per_node:
            has = f"{self._ranks} ranks on a cluster of {cluster.gpus_per_node} devices a node"
            raise ProberError(f"{has} cannot be started on this machine alone")
        self._placed = placements is not None
        self._pool = RankPool(cluster, self._ranks, placements=placements)
        self._log_root = log_dir
        self._log_dir: Path | None = None
        self._numbers = itertools.count(1)
        self._fingerprint: Fingerprint | None = None

    def fingerprint(self) -> Fingerprint:
        """The environment of rank 0, read once. Raises ProberError if ranks cannot be started."""
        if self._fingerprint is None:
            log_dir = self._next_log_dir("fingerprint")
            deadline = time.monotonic() + _FINGERPRINT_S
            try:
                self._pool.start(deadline=deadline, log_dir=log_dir)
            except StartError as error:
                raise ProberError(f"ranks could not be started: {error} (log: {error.log_dir})") from error
            request = {"kind": "fingerprint"}
            gathered = self._pool.run("probes.fingerprint", request, deadline=deadline, log_dir=log_dir)
            if gathered.failure is not None:
                raise ProberError(f"the fingerprint could not be read: {gathered.failure.message} (log: {log_dir})")
            self._fingerprint = Fingerprint.from_data(gathered.reports[0])
        return self._fingerprint

    def run(self, request: ProbeRequest, *, deadline_s: float, on_progress: OnProgress | None = None) -> ProbeOutcome:
        """Runs one probe; see autotune.ports.store.Prober.run. Ranks that are not warm are started first.

        Raises:
            ProberError: there is nothing to measure with.
        """
        watch = Progress(on_progress)
        log_dir = self._next_log_dir(request.kind)
        readings: Readings = ()
        run = self._run_cold if isinstance(request, StepRequest) and request.cold else self._run_warm
        try:
            gathered = run(request, watch, watch.start_s + deadline_s, log_dir)
            failure = gathered.failure
            if failure is not None and failure.kind is FailureKind.UNAVAILABLE:
                raise ProberError(failure.message)
            if failure is None:
                readings, failure = merged_readings(request, gathered.reports, self._cluster)
        except StartError as error:
            failure = RankFailure(rank=error.failure.rank, kind=FailureKind.UNAVAILABLE, message=str(error))
        wall_s = time.monotonic() - watch.start_s
        build_s = sum(reading.setup_s for reading in readings if isinstance(reading, StepReading))
        return ProbeOutcome(
            readings=readings,
            failure=_failure(request, failure, self._ranks, log_dir) if failure is not None else None,
            wall_s=wall_s,
            gpu_s=wall_s * self._ranks,
            setup_s=wall_s if watch.ready_s is None else watch.ready_s + build_s,
            log_path=str(log_dir),
        )

    def _run_warm(self, request: ProbeRequest, watch: Progress, deadline: float, log_dir: Path) -> Gathered:
        self._pool.start(deadline=deadline, log_dir=log_dir)
        module, data = MODULES[request.kind], request.to_data()
        return self._pool.run(module, data, deadline=deadline, log_dir=log_dir, on_note=watch.note)

    def _run_cold(self, request: ProbeRequest, watch: Progress, deadline: float, log_dir: Path) -> Gathered:
        if self._placed:
            raise InputError("step.cold", True, "torchrun cannot start ranks that have placements")
        self._pool.kill()  # warm ranks hold memory and a device context
        module, data = MODULES[request.kind], request.to_data()
        with ColdTrial(self._cluster, self._ranks, log_dir) as trial:
            return trial.run(module, data, deadline=deadline, on_note=watch.note)

    @property
    def pids(self) -> list[int]:
        """The processes of the warm ranks, by rank; empty while there are none."""
        return self._pool.pids

    def close(self) -> None:
        """Ends all ranks. May be called twice."""
        self._pool.close()

    def __enter__(self) -> LocalProber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next_log_dir(self, kind: str) -> Path:
        """A new directory for one probe's logs, below one of this prober's own."""
        try:
            if self._log_dir is None:
                self._log_root.mkdir(parents=True, exist_ok=True)
                prefix = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ-")
                self._log_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=self._log_root))
            log_dir = self._log_dir / f"{next(self._numbers):04d}-{kind}"
            log_dir.mkdir()
        except OSError as error:
            raise ProberError(f"no logs can be written below {self._log_root}: {error}") from error
        return log_dir


def _failure(request: ProbeRequest, failure: RankFailure, ranks: int, log_dir: Path) -> Failure:
    """The record of a failure."""
    log_path = rank_log(log_dir, failure.rank) if failure.rank is not None else log_dir / TORCHRUN_LOG
    return Failure(
        kind=failure.kind,
        message=failure.message,
        rank=failure.rank,
        stage=stage_of(request, failure.rank, ranks),
        log_path=str(log_path if log_path.exists() else log_dir),
        log_tail=tail_of(log_path),
    )
