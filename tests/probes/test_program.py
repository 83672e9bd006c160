"""Programs of the user's own under a plan: their speed, what they do wrong, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from local_ranks import HERE, assert_gone
from programs import TRAIN, Bench

from autotune.errors import InputError
from autotune.specs import FailureKind, ProbeOutcome, StepReading
from autotune.specs.command import CommandBook, read_command
from probes.program.output import HEAD_BYTES, TAIL_BYTES

IMPORTS = "import os, signal, sys, time\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def reading_of(outcome: ProbeOutcome) -> StepReading:
    assert outcome.failure is None, outcome.failure
    (reading,) = outcome.readings
    assert isinstance(reading, StepReading)
    return reading


def failed(outcome: ProbeOutcome, kind: FailureKind) -> str:
    assert outcome.failure is not None
    assert outcome.failure.kind is kind, outcome.failure
    return outcome.failure.message


def is_named(*names: str) -> list[psutil.Process]:
    """The processes with one of these names in their arguments."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [process for process in found if any(name in process.info["cmdline"] for name in names)]


# -- speed ----------------------------------------------------------------------------------------------------


def test_the_speed_of_a_program_is_read_and_it_is_ended_once_that_is_known(bench: Bench) -> None:
    reading = reading_of(bench.run(TRAIN))
    assert 0.0200 <= reading.step_time_s <= 0.0210
    assert reading.tokens_per_s_per_gpu == pytest.approx(16 * 32 / reading.step_time_s / 2)
    assert len(reading.warmup_times_s) >= 1
    assert len(reading.warmup_times_s) + len(reading.step_times_s) < 99
    assert reading.memory_source == "not told"
    assert is_named(f"{bench.folder}/program.py") == []


def test_slow_first_steps_are_warm_up(bench: Bench) -> None:
    code = (
        "import time\nfor i in range(30):\n t = 0.3 if i < 3 else 0.03\n time.sleep(t)\n"
        " print('step', i, 1e3 * t, 'ms')"
    )
    reading = reading_of(bench.run(code))
    assert reading.warmup_times_s == (0.3, 0.3, 0.3)
    assert reading.step_time_s == pytest.approx(0.03)


def test_placeholders_reach_arguments_environment_and_files(bench: Bench) -> None:
    (bench.folder / "config.toml.template").write_text('[a]\nmb = {micro_batch}\nzero = "{sharding}"\n')
    code = "import os, sys\nprint(sys.argv[1:], os.environ['RANKS'], open(sys.argv[2]).read(), flush=True)\n" + TRAIN
    outcome = bench.run(
        code,
        argv=[sys.executable, "{template_dir}/program.py", "--dp={dp}", "{work_dir}/config.toml",
              {"when": {"zero_stage": [0]}, "argv": ["--plain"]}, {"when": {"dp": [1]}, "argv": ["--never"]}],
        environment={"RANKS": "{world_size}"},
        files={"config.toml": "config.toml.template"},
        values={"sharding": [{"when": {"zero_stage": [2, 3]}, "value": "{dp}"}, {"value": "none"}]},
    )  # fmt: skip
    reading_of(outcome)
    log = Path(str(outcome.log_path))
    printed = (log / "program.log").read_text()
    assert "--dp=2" in printed
    assert "'--plain'" in printed
    assert "--never" not in printed
    assert '2 [a]\nmb = 1\nzero = "none"' in printed
    assert (log / "config.toml").read_text().startswith("[a]")
    assert not (log / "work").exists()


def test_the_callback_tells_steps_and_losses(bench: Bench) -> None:
    code = (
        "import time\nfrom autotune_callback import StepTimer\ntimer = StepTimer()\n"
        "for i in range(40):\n time.sleep(0.02)\n timer.step(2.5)\n"
    )
    reading = reading_of(bench.run(code, speed={"source": "callback"}))
    assert reading.step_time_s >= 0.02
    assert set(reading.losses) == {2.5}


def test_steps_of_a_file_of_json_lines(bench: Bench) -> None:
    code = (
        "import json, sys, time\nfor i in range(1, 40):\n time.sleep(0.02)\n"
        " open(sys.argv[1], 'a').write(json.dumps({'n': i, 'sps': 800, 'gib': 1.5}) + '\\n')\n"
    )
    speed = {"source": "json-lines", "file": "{work_dir}/metrics", "unit": "samples/s", "memory_unit": "GiB",
             "keys": {"step": "n", "speed": "sps", "memory": "gib"}}  # fmt: skip
    reading = reading_of(
        bench.run(code, speed=speed, argv=[sys.executable, "{template_dir}/program.py", "{work_dir}/metrics"])
    )
    assert reading.step_time_s == pytest.approx(16 / 800)
    assert reading.peak_reserved_bytes == 1.5 * 2**30


def test_steps_of_a_log_of_megatron(bench: Bench) -> None:
    line = " iteration {i:8d}/     100 | elapsed time per iteration (ms): 20.0 | global batch size:    16 |"
    code = f"import time\nfor i in range(1, 60):\n time.sleep(0.02)\n print('{line}'.format(i=i), flush=True)\n"
    assert reading_of(bench.run(code, speed={"source": "megatron"})).step_time_s == pytest.approx(0.02)


def test_samples_of_deepspeed_are_of_the_batch_that_it_counts(bench: Bench) -> None:
    """Under AutoTP it takes the ranks of tp for replicas: 32 sequences a step where 16 are trained."""
    code = (
        "import time\nprint('[INFO] [config.py:678:print]   train_batch_size .......... 32')\n"
        "for i in range(3, 60):\n time.sleep(0.02)\n"
        " print(f'[INFO] [timer.py:264:stop] epoch=0/micro_step={4 * i}/global_step={i}, RunningAvgSamplesPerSec=1.0,'"
        " f' CurrSamplesPerSec=1600.0, MemAllocated=0.43GB, MaxMemAllocated=0.43GB', flush=True)\n"
    )
    assert reading_of(bench.run(code, speed={"source": "deepspeed"})).step_time_s == pytest.approx(0.02)


def test_steps_without_a_figure_take_until_their_line_comes(bench: Bench) -> None:
    code = "import time\nfor i in range(60):\n time.sleep(0.05)\n print('step', i, flush=True)"
    speed = {"source": "pattern", "pattern": r"step (?P<step>\d+)", "unit": "arrival"}
    assert reading_of(bench.run(code, speed=speed)).step_time_s >= 0.05


def test_what_cannot_win_is_given_up(bench: Bench) -> None:
    request = bench.request(bench.write(TRAIN), give_up_step_s=0.01, min_steps=30)
    reading = reading_of(bench.run_request(request))
    assert reading.pruned
    assert len(reading.step_times_s) < 30


# -- what programs do wrong -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_that_never_prints_a_speed(bench: Bench) -> None:
    code = "import time\nwhile True:\n time.sleep(0.01)\n print('loss 2.5', flush=True)"
    message = failed(bench.run(code, deadline_s=12), FailureKind.ILLEGAL)
    assert "no step was found by the deadline" in message
    assert "a line like" in message


def test_a_silent_program(bench: Bench) -> None:
    message = failed(bench.run("import time\ntime.sleep(600)", deadline_s=1), FailureKind.HANG)
    assert message == "own: it printed nothing until the deadline"


@pytest.mark.parametrize(("unit", "factor"), [("s/step", 1.0), ("ms/step", 1e-3), ("tokens/s", 1.0)])
def test_a_speed_in_another_unit_than_said(bench: Bench, unit: str, factor: float) -> None:
    code = f"import time\nfor i in range(200):\n time.sleep(0.1)\n print('step', i, {factor} * 100, 'ms', flush=True)"
    speed = {"source": "pattern", "pattern": r"step (?P<step>\d+) (?P<speed>\S+) ms", "unit": unit}
    assert "is the unit right" in failed(bench.run(code, speed=speed), FailureKind.ILLEGAL)


def test_a_program_that_ends_well_without_training(bench: Bench) -> None:
    message = failed(bench.run("print('nothing to do')"), FailureKind.ILLEGAL)
    assert "ended well without a line like" in message
    assert "did it train?" in message


def test_deepspeed_that_tells_no_speed_because_of_its_log_level(bench: Bench) -> None:
    code = "print('DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully')"
    message = failed(bench.run(code, speed={"source": "deepspeed"}), FailureKind.ILLEGAL)
    assert "it tells its speed at log level info" in message


def test_a_program_that_ignores_sigterm(bench: Bench) -> None:
    code = IMPORTS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAIN + "time.sleep(600)"
    reading_of(bench.run(code))
    assert is_named(f"{bench.folder}/program.py") == []


def test_daemons_that_fork_away_are_ended(bench: Bench) -> None:
    code = (
        IMPORTS + "if os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN)\n os.execvpe('sleep', ['sleep', '61234'], {})\n" + TRAIN
    )
    reading_of(bench.run(code))
    assert is_named("61234") == []


def test_a_daemon_of_a_program_that_has_ended(bench: Bench) -> None:
    code = IMPORTS + "if os.fork() == 0:\n os.setsid()\n os.execvp('sleep', ['sleep', '61235'])\nsys.exit(3)"
    assert "exited with status 3" in failed(bench.run(code), FailureKind.CRASH)
    assert is_named("61235") == []


@pytest.mark.slow
def test_a_flood_of_output_fills_neither_disk_nor_memory(bench: Bench) -> None:
    code = IMPORTS + "line = b'x' * 1023 + b'\\n'\nwhile True: os.write(1, line * 1024)"
    before_bytes = psutil.Process().memory_info().rss
    outcome = bench.run(code, deadline_s=12)
    failed(outcome, FailureKind.ILLEGAL)
    log = Path(str(outcome.log_path)) / "program.log"
    assert HEAD_BYTES < log.stat().st_size < HEAD_BYTES + TAIL_BYTES + 100
    assert b"bytes are left out here" in log.read_bytes()
    assert psutil.Process().memory_info().rss - before_bytes < 100 << 20


@pytest.mark.slow
def test_a_line_without_end(bench: Bench) -> None:
    code = IMPORTS + "while True: os.write(1, b'step ' * 100000)"
    failed(bench.run(code, deadline_s=12), FailureKind.ILLEGAL)


def test_a_program_that_asks_on_a_terminal(bench: Bench) -> None:
    message = failed(bench.run("input('password: ')"), FailureKind.CRASH)
    assert message.endswith("EOFError: EOF when reading a line")
    message = failed(bench.run("open('/dev/tty')"), FailureKind.CRASH)
    assert "OSError: [Errno 6] No such device or address: '/dev/tty'" in message


def test_the_program_s_own_error_is_told_and_its_kind(bench: Bench) -> None:
    rank = "[rank1]: "
    code = (
        IMPORTS + f"print('{rank}Traceback (most recent call last):', file=sys.stderr)\n"
        f"print('{rank}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB', file=sys.stderr)\n"
        "print('[rank0]: RuntimeError: Connection closed by peer', file=sys.stderr)\n"
        "print('torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ', file=sys.stderr)\nsys.exit(1)"
    )
    message = failed(bench.run(code), FailureKind.OOM)
    assert message == (
        "own: the program exited with status 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )


def test_a_program_that_is_not_there(bench: Bench) -> None:
    ref = bench.write("", argv=["/no/such/program"])
    with pytest.raises(Exception, match="No such file or directory: /no/such/program"):
        bench.run_request(bench.request(ref))


# -- nobody is left -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_survives_who_runs_it(bench: Bench) -> None:
    ref = bench.write(
        IMPORTS + "print('pid', os.getpid(), flush=True)\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)"
    )
    launcher = subprocess.Popen(
        [sys.executable, str(HERE / "program_launcher.py"), str(bench.folder), ref], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = [int(pid) for pid in json.loads(launcher.stdout.readline())]
    seen = [psutil.Process(pid) for pid in pids]
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    assert len(seen) == 2
    assert_gone(seen)


# -- files of commands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"argv": ["train", "--tp={tensor}"]}, "{tensor}"),
        ({"plans": {"tp": [1, 2]}}, "the program is not told of it: {tp} stands nowhere"),
        ({"plans": {"dp": [1, 2]}}, "one of tp, pp"),
        ({"workload": {"seq_len": 32, "dtype": "fp32"}}, "workload.global_batch"),
        ({"speed": {"source": "pattern", "pattern": "(", "unit": "s/step"}}, "a regular expression"),
        ({"speed": {"source": "pattern", "pattern": "step (?P<step>.)", "unit": "s/step"}}, "`speed` is needed"),
        ({"speed": {"source": "callback", "unit": "s/step"}}, "tells its unit itself"),
        ({"files": {"a": "../../etc/passwd"}}, "a template beside the command's file"),
        ({"values": {"tp": [{"value": "1"}]}}, "a new name"),
        ({"launcher": "sh"}, "launcher"),
        ({"shell": "rm -rf"}, "this key is not known"),
    ],
)  # fmt: skip
def test_a_file_with_something_that_cannot_be(bench: Bench, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        bench.write("", **change)
    assert complaint in str(caught.value)


def test_a_file_that_everybody_may_write_is_no_operator_s(bench: Bench) -> None:
    bench.write("")
    path = bench.folder / "own.json"
    path.chmod(0o666)
    with pytest.raises(InputError, match="chmod o-w"):
        read_command(path)


def test_a_changed_file_is_another_command(bench: Bench) -> None:
    ref = bench.write(TRAIN)
    bench.write(TRAIN, grace_s=0.5)
    message = failed(bench.run_request(bench.request(ref)), FailureKind.ILLEGAL)
    assert "it was changed meanwhile" in message


def test_what_no_operator_allowed_is_not_run(bench: Bench) -> None:
    message = failed(bench.run_request(bench.request("rm@0000000000000000")), FailureKind.ILLEGAL)
    assert "known: none yet" in message
    with pytest.raises(InputError):
        CommandBook(bench.folder).named("../own")
