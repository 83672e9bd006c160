"""Numbers for people: the unit and three digits that count."""

from __future__ import annotations

import pytest

from autotune.cli.output import bytes_text, count_text, print_launch, rate_text, seconds_text
from autotune.export import LaunchArguments


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
    print_launch(
        LaunchArguments(target="megatron", argv=argv, config_name="x.yaml", config="a: 1", notes=("fill in y",))
    )
    out = capsys.readouterr().out
    assert """torchrun --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" 'a file.py'""" in out
    assert "x.yaml" in out
    assert "note: fill in y" in out
