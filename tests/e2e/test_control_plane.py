"""Every command that measures nothing runs in an interpreter without torch ever being loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

COMMANDS = [
    "--version", "gpus", "gpus l40s", "models", "models show tiny", "schema plan", "cluster show a100-80gb-sxm:2x8",
    "cluster discover --ranks 2 --save", "cluster list", "plan --model llama2-7b --cluster a100-80gb-sxm:1x8",
    "estimate --model llama2-7b --cluster a100-80gb-sxm:1x8 --plan tp=8", "db migrate", "db check", "db stats",
    "history", "export --table trials", "best", "show 0000", "tune --help", "tune --resume 0000", "probe step --help",
]  # fmt: skip
PROGRAM = """
import json, sys
from autotune.cli.main import main
found = {}
for command in json.loads(sys.argv[1]):
    try:
        main(command.split())
    except SystemExit as end:
        found[command] = [end.code, "torch" in sys.modules]
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
"""


def test_control_plane_commands_load_no_torch(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    environment = os.environ | {"AUTOTUNE_DB": f"sqlite:///{tmp_path / 'a.db'}"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS), str(result)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    found = json.loads(result.read_text())
    assert list(found) == COMMANDS
    assert [command for command, (_, loaded) in found.items() if loaded] == []
    assert {command: status for command, (status, _) in found.items() if status} == {
        "best": 2, "show 0000": 2, "tune --resume 0000": 2,
    }  # fmt: skip


def test_output_to_a_reader_that_went_away_is_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", "from autotune.cli.main import main; main()", "models", "--json"],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 1
