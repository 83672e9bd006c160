"""Numbers for people: the unit and three digits that count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.cli.nodes import state_text
from autotune.cli.output import bytes_text, count_text, print_launch, rate_text, seconds_text, write_text
from autotune.frameworks import LaunchArguments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1023), "1023 B"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(2**20), "1 MiB"),
        (bytes_text(151.4 * 2**30), "151 GiB"),
        (bytes_text(3 * 2**40), "3 TiB"),
        (rate_text(25e9), "25 GB/s"),
        (rate_text(3.35e12), "3.35 TB/s"),
        (rate_text(12), "12 B/s"),
        (rate_text(None), "-"),
        (bytes_text(None), "-"),
        (seconds_text(0), "0"),
        (seconds_text(2.5e-9), "2 ns"),
        (seconds_text(4.2e-5), "42 us"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(61.7), "61.7 s"),
        (seconds_text(4000), "4000 s"),
        (seconds_text(None), "-"),
        (count_text(1234567.8), "1,234,568"),
        (count_text(0.5346), "0.535"),
        (count_text(None), "-"),
    ],
)
def test_text(text: str, expected: str) -> None:
    assert text == expected


def test_a_launch_command_keeps_its_variables_and_quotes_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("torchrun", "--rdzv-endpoint", "$MASTER_ADDR:$MASTER_PORT", "a file.py")
    launch = LaunchArguments(
        target="megatron", version="0.19", argv=argv, config_name="x.yaml", config="a: 1", notes=("fill in y",)
    )
    print_launch(launch.to_data())
    out = capsys.readouterr().out
    assert """torchrun --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" 'a file.py'""" in out
    assert "x.yaml" in out
    assert "note: fill in y" in out


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file, link = tmp_path / "a.yaml", tmp_path / "link.yaml"
    link.symlink_to(file)
    write_text(link, "a: 1")
    assert file.read_text() == "a: 1\n"
    assert link.is_symlink()
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "b: \ud800")
    assert file.read_text() == "a: 1\n"
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "a: 1")
    assert os.read(reader, 100) == b"a: 1\n"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_node_that_something_keeps_from_all_jobs_is_not_called_ready() -> None:
    assert state_text({"state": "ready", "obstacle": None}) == "ready"
    assert state_text({"state": "ready", "obstacle": "its worker has ended"}) == "unusable"
    assert state_text({"state": "quarantined", "obstacle": "its worker has ended"}) == "quarantined"
