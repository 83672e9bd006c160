"""ProgramRun: one node's share of a trial that the user's own program runs, from its start to nothing left of it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import InputError
from autotune.specs import ClusterSpec, FailureKind, MemberReport, ProbeProgress, RankReport, StepRequest
from autotune.specs.command import Command, SpeedFrom
from probes.launch.failures import RankFailure, death_of
from probes.launch.orders import Orders
from probes.launch.placement import Placement, clean_environment, rank_environment
from probes.program.gpus import GpuWatch
from probes.program.launchers import STARTS
from probes.program.output import Output
from probes.program.reading import METRICS_VARIABLE, ReadLog, Source, no_logs, source_of
from probes.program.rendering import Place, Rendered, render
from probes.program.steps import LONG_ENOUGH_S, Steps, Verdict, judge

RUN_VARIABLE = "AUTOTUNE_RUN"
"""In the environment of everything that a trial starts, by which what escaped its supervisor is found."""

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_CALLBACK = Path(__file__).with_name("autotune_callback.py")
_SUPERVISED = (sys.executable, "-I", "-S", str(_SUPERVISOR))
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20
_CLEAR_S = 40.0
"""After the grace a supervisor kills what is left: this long at most."""


@dataclass(slots=True)
class _End:
    """Why a program was ended, or how it ended itself."""

    failure: RankFailure | None = None
    ordered: bool = False
    status: int | None = None
    measured: bool = False


@dataclass(slots=True, kw_only=True)
class ProgramRun:
    """Runs the program of a command for one trial.

    Args:
        command: what is run.
        index: this node's number in the gang.
        cluster: the gang.
        request: the trial.
        placement: prefix, environment and address of what is started on this node.
        log_dir: of this trial.
        read_log: reads the logs of frameworks.
    """

    command: Command
    index: int
    cluster: ClusterSpec
    request: StepRequest
    placement: Placement
    log_dir: Path
    read_log: ReadLog = no_logs
    _run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _endpoint: str = ""

    def run(self, deadline: float, orders: Orders) -> MemberReport:
        """Runs it until its speed is known, it ends or fails, an order says to stop, or `deadline` (time.monotonic).

        Whatever comes of it, nothing of it is left running, and its working directory is gone. Never raises for what
        the program does; an interrupt ends it and passes.
        """
        started_s = time.monotonic()
        output = Output(self.log_dir / "program.log")
        work_dir = self.log_dir / "work"
        try:
            work_dir.mkdir(parents=True)
            report = self._run(min(deadline, started_s + self.command.template.deadline_s), orders, output, work_dir)
        except InputError as error:
            report = self._failed(FailureKind.ILLEGAL, str(error), output)
        except OSError as error:
            report = self._failed(FailureKind.UNAVAILABLE, f"the program could not be started: {error}", output)
        finally:
            output.close()
            shutil.rmtree(work_dir, ignore_errors=True)
        wall_s = time.monotonic() - started_s
        return report.model_copy(update={"wall_s": wall_s, "setup_s": min(report.setup_s, wall_s)})

    def _run(self, deadline: float, orders: Orders, output: Output, work_dir: Path) -> MemberReport:
        template, cluster = self.command.template, self.cluster
        place = self._place(deadline, orders, work_dir)
        if isinstance(place, _End):
            return self._ended(place, None, output, orders)
        rendered = render(self.command, self.request, place)
        callback_dir = self._write(rendered, work_dir)
        argv = STARTS[template.launcher](rendered.argv, place)
        steps = Steps(time.monotonic())
        source = source_of(template.speed, steps, self.request, rendered.metrics, callback_dir, self.read_log)
        gpus = GpuWatch()
        environment = self._environment(cluster, rendered, callback_dir)
        prefix = [*self.placement.command_prefix, *_SUPERVISED]
        with _Program(prefix, argv, template.grace_s, environment, rendered.directory, self._run_id) as program:
            orders.tell(ProbeProgress(phase="start"))
            end = _Watch(program, steps, source, output, self.request, orders, gpus).until(deadline)
            # What it prints from here on tells why it ended, and of its speed only if it ended by itself.
            ended_itself = program.is_over
            for chunk in program.stop():
                lines = output.take(chunk)
                if ended_itself:
                    source.lines(lines, time.monotonic())
            end.status = program.status
            if program.error:
                end.failure = RankFailure(rank=None, kind=FailureKind.UNAVAILABLE, message=program.error)
        if ended_itself:
            source.lines(output.end(), time.monotonic())
            source.look()
        gpus.close()
        return self._ended(end, (steps, source, gpus), output, orders)

    # -- before -----------------------------------------------------------------------------------------------

    def _place(self, deadline: float, orders: Orders, work_dir: Path) -> Place | _End:
        """Where the nodes meet: the first one takes a free port and tells it, the others wait for that."""
        cluster, address, port = self.cluster, self.placement.address, 0
        if self.index == 0:
            port = _free_port(self.placement.address)
            if cluster.nodes > 1:
                orders.host(address, port)
        else:
            met: list[tuple[str, int]] = []
            orders.await_endpoint(lambda host, port: met.append((host, port)))
            while not met:
                if (stop := orders.poll()) is not None:
                    return _End(failure=stop, ordered=True)
                if time.monotonic() > deadline:
                    message = "the gang's first node did not say by the deadline where its ranks meet"
                    return _End(failure=RankFailure(rank=None, kind=FailureKind.HANG, message=message))
                time.sleep(_POLL_S)
            address, port = met[0]
        return Place(
            nnodes=cluster.nodes,
            nproc=cluster.gpus_per_node,
            node_rank=self.index,
            master_addr=address,
            master_port=port,
            work_dir=work_dir,
        )

    def _write(self, rendered: Rendered, work_dir: Path) -> Path:
        """Writes the files of the command where the program finds them, and beside the log for whoever reads that."""
        callback_dir = work_dir / ".autotune"
        callback_dir.mkdir()
        shutil.copy(_CALLBACK, callback_dir)
        for name, text in rendered.files.items():
            (work_dir / name).write_text(text, encoding="utf-8")
            (self.log_dir / name).write_text(text, encoding="utf-8")
        (self.log_dir / "argv.json").write_text(json.dumps(rendered.argv, indent=1), encoding="utf-8")
        return callback_dir

    def _environment(self, cluster: ClusterSpec, rendered: Rendered, callback_dir: Path) -> dict[str, str]:
        template = self.command.template
        found = rank_environment(cluster.device.kind, cluster.gpus_per_node, self.placement)
        found |= {name: os.environ[name] for name in template.pass_environment if name in os.environ}
        if cluster.nodes > 1 and not self.placement.environment:
            found.pop("GLOO_SOCKET_IFNAME", None)  # the loopback device reaches no other node
            found |= {k: v for k, v in clean_environment().items() if k == "GLOO_SOCKET_IFNAME"}
        found.setdefault("PYTHONUNBUFFERED", "1")
        if template.speed.source is SpeedFrom.CALLBACK:
            found[METRICS_VARIABLE] = str(callback_dir)
            path = rendered.environment.get("PYTHONPATH", found.get("PYTHONPATH", ""))
            rendered.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(callback_dir), path)))
        return found | rendered.environment | {RUN_VARIABLE: self._run_id}

    # -- after ------------------------------------------------------------------------------------------------

    def _ended(
        self, end: _End, seen: tuple[Steps, Source, GpuWatch] | None, output: Output, orders: Orders
    ) -> MemberReport:
        if end.ordered and orders.measured:
            return self._measured(judge([], self.request), Steps(time.monotonic()), GpuWatch())
        if end.ordered and end.failure is not None:
            report = self._failed(end.failure.kind, end.failure.message, output)
            return report.model_copy(update={"ordered": True})
        if end.failure is not None and end.failure.kind is FailureKind.UNAVAILABLE:
            return self._failed(end.failure.kind, end.failure.message, output)
        assert seen is not None or end.failure is not None
        if seen is None:
            assert end.failure is not None
            return self._failed(end.failure.kind, end.failure.message, output)
        steps, source, gpus = seen
        verdict = judge(steps.times_s, self.request)
        if wrong := steps.contradiction():
            message = f"{wrong}: is the unit right, and does the program train the batch that it is told?"
            return self._failed(FailureKind.ILLEGAL, message, output)
        well = end.measured or end.status == 0 or (end.failure is not None and end.failure.kind is FailureKind.HANG)
        if well and len(verdict.step_times_s) >= 2:
            return self._measured(verdict, steps, gpus)
        if end.failure is not None:
            return self._failed(end.failure.kind, end.failure.message, output)
        return self._failed(*_why(end, steps, source, output), output)

    def _measured(self, verdict: Verdict, steps: Steps, gpus: GpuWatch) -> MemberReport:
        memory_bytes, source = round(steps.memory_bytes), "as the program told"
        if not memory_bytes:
            memory_bytes, source = gpus.peak_bytes, "NVML, the whole device"
        if not memory_bytes:
            source = "not told"
        report: dict[str, Any] = {
            "hostname": socket.gethostname(),
            "setup_s": steps.first_s or 0.0,
            "warmup_times_s": verdict.warmup_times_s,
            "step_times_s": verdict.step_times_s,
            "pruned": verdict.pruned,
            "losses": steps.losses,
            "trace": None,
            "memory": {"allocated_bytes": memory_bytes, "reserved_bytes": memory_bytes, "source": source},
        }
        return MemberReport(ranks=self._ranks(report), log_dir=str(self.log_dir))

    def _ranks(self, report: dict[str, Any]) -> tuple[RankReport, ...]:
        each = self.cluster.gpus_per_node
        first, world = self.index * each, self.cluster.devices
        stage = max(world // self.request.plan.pp, 1)
        return tuple(
            RankReport(rank=rank, report={"rank": rank, "stage": rank // stage, **report})
            for rank in range(first, first + each)
        )

    def _failed(self, kind: FailureKind, message: str, output: Output) -> MemberReport:
        return MemberReport(
            failure=kind,
            message=f"{self.command.name}: {message}",
            log_tail=output.tail(),
            log_dir=str(self.log_dir) if self.log_dir.exists() else "",
        )


def _why(end: _End, steps: Steps, source: Source, output: Output) -> tuple[FailureKind, str]:
    """What to say of a program that ended by itself before its speed was known."""
    status = end.status if end.status is not None else -9
    if status:
        kind, line = output.failure()
        return kind, f"the program {death_of(status)}" + (f": {line}" if line else " and printed nothing")
    if len(steps):
        return FailureKind.ILLEGAL, f"the program ended well after {len(steps)} steps, too few to tell its speed"
    printed = f"in {output.count_lines} lines" if output.count_lines else "and printed nothing"
    return FailureKind.ILLEGAL, f"the program ended well without {source.wanted} {printed}: did it train?"


def _free_port(address: str) -> int:
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as server:
        return int(server.getsockname()[1])


class _Program:
    """A supervised program: its output to read, how it ended, and an end of it in any case."""

    def __init__(
        self,
        prefix: list[str],
        argv: list[str],
        grace_s: float,
        environment: dict[str, str],
        directory: str,
        run_id: str,
    ) -> None:
        self._run_id, self._grace_s = run_id, grace_s
        self.status: int | None = None
        self.error = ""
        self.left = 0
        reading, writing = os.pipe()
        told, telling = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*prefix, str(telling), str(grace_s), *argv],
                env=environment,
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=writing,
                stderr=writing,
                pass_fds=(telling,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            os.close(told)
            raise
        finally:
            os.close(writing)
            os.close(telling)
        os.set_blocking(reading, False)
        self.output, self._told = reading, told

    def fileno(self) -> int:
        """Readable when it printed something."""
        return self.output

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and everything that it started."""
        return self._process.poll() is not None

    def read(self) -> bytes | None:
        """What it printed; None where there is nothing for now, empty at the end."""
        try:
            return os.read(self.output, _CHUNK_BYTES)
        except BlockingIOError:
            return None

    def stop(self) -> Iterator[bytes]:
        """Has it end, gives what it still prints, and reads how it ended. Go through to the end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        until = time.monotonic() + self._grace_s + _CLEAR_S
        while self._process.poll() is None and time.monotonic() < until:
            if chunk := self.read():
                yield chunk
            else:
                time.sleep(0.02)
        self._end()
        while chunk := self.read():  # nobody is left to write more
            yield chunk

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_CLEAR_S)
        self._sweep()
        os.set_blocking(self._told, False)
        with contextlib.suppress(BlockingIOError, ValueError):
            found = json.loads(os.read(self._told, 1 << 16) or b"{}")
            self.status, self.error, self.left = found.get("status"), found.get("error", ""), found.get("left", 0)

    def _sweep(self) -> None:
        """Kills what the supervisor could not: all that has this trial's name in its environment."""
        mark = f"{RUN_VARIABLE}={self._run_id}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, 9)

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            for _ in self.stop():
                pass
        os.close(self.output)
        os.close(self._told)


@dataclass(slots=True)
class _Watch:
    """Reads a program's steps until they suffice or there is another reason to end it."""

    program: _Program
    steps: Steps
    source: Source
    output: Output
    request: StepRequest
    orders: Orders
    gpus: GpuWatch
    _told: int = 0

    def until(self, deadline: float) -> _End:
        last_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.program, selectors.EVENT_READ)
            is_open = True
            while True:
                if is_open and selector.select(_POLL_S):
                    chunk = self.program.read()
                    now_s = time.monotonic()
                    if chunk:
                        last_s = now_s
                        self.source.lines(self.output.take(chunk), now_s)
                    elif chunk is not None:
                        is_open = False
                        selector.unregister(self.program)
                elif not is_open:
                    time.sleep(_POLL_S)
                self.source.look()
                self.gpus.look(time.monotonic())
                end = self._end(deadline, last_s)
                if end is not None:
                    return end

    def _end(self, deadline: float, last_s: float) -> _End | None:
        if (stop := self.orders.poll()) is not None:
            return _End(failure=stop, ordered=True)
        if len(self.steps) > self._told:
            self._told = len(self.steps)
            verdict = judge(self.steps.times_s, self.request)
            timed = len(verdict.step_times_s)
            phase, total = ("step", self.request.max_steps) if timed else ("warm-up", 1)
            seconds = self.steps.times_s[-1]
            self.orders.tell(ProbeProgress(phase=phase, done=timed, total=total, seconds=seconds))
            if self.steps.contradiction() or (verdict.enough and self.steps.span_s >= LONG_ENOUGH_S):
                return _End(measured=True)
        if self.program.is_over:
            return _End()
        if time.monotonic() > deadline:
            return _End(failure=self._late(last_s))
        return None

    def _late(self, last_s: float) -> RankFailure:
        silent_s = time.monotonic() - last_s
        printed = self.output.count_lines
        if not len(self.steps) and printed and silent_s < 0.5 * (time.monotonic() - self.steps.started_s):
            message = (
                f"no step was found by the deadline: it printed {printed} lines, and {self.source.wanted} is not one"
            )
            return RankFailure(rank=None, kind=FailureKind.ILLEGAL, message=message)
        if len(self.steps):
            message = f"{len(self.steps)} steps by the deadline, too few to tell its speed"
        elif printed:
            message = f"it printed {printed} lines without {self.source.wanted}, and then nothing until the deadline"
        else:
            message = "it printed nothing until the deadline"
        return RankFailure(rank=None, kind=FailureKind.HANG, message=message)
