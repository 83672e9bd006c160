"""What every reader shares. Runs under a framework's interpreter: no import of ours."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEDULES = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved"}


def main(read: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads launches from standard input, each in a folder of its own files."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print is no answer
    for line in sys.stdin:
        launch = json.loads(line)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for name, text in launch["files"].items():
                Path(name).write_text(text)
            sys.path.insert(0, folder)
            try:
                answer = {"means": read(launch)}
            except (Exception, SystemExit) as error:  # noqa: BLE001
                answer = {"refused": f"{type(error).__name__}: {error}"[:500]}
            finally:
                sys.path.remove(folder)
        print(json.dumps(answer), file=answers, flush=True)


def import_fresh(name: str) -> Any:
    """A module of the current folder, not of the last one."""
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def dtype_name(dtype: Any) -> str:
    """fp32 for torch.float32, and so on."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return names.get(str(dtype).removeprefix("torch."), str(dtype))
