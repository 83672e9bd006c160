"""The core as a library: the documented example runs, without a database, torch or a service."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import InputError
from autotune.search import Measurement, Search
from autotune.specs import Plan, Workload

DOCUMENT = Path(__file__).parents[2] / "docs" / "search.md"
HEAVY = "{'torch', 'sqlalchemy', 'optuna', 'celery', 'redis', 'fastapi', 'pandas', 'storage', 'probes', 'workers'}"


def test_the_documented_example_runs_and_loads_nothing_heavy() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = f"{example}\nimport sys\nprint(sorted({HEAVY} & {{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    best, reason, heavy = done.stdout.splitlines()
    assert best.startswith("tp1.pp1.dp8.mb8.")
    assert reason
    assert heavy == "[]"


def test_importing_the_package_loads_no_numerics() -> None:
    program = "import sys, autotune.search\nprint(sorted({'numpy', 'scipy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_measurement_of_ones_own_teaches() -> None:
    workload = Workload(seq_len=2048, global_batch=64)
    search = Search(model("gpt3-1.3b"), cluster_from_shorthand("a100-80gb-sxm:1x8"), workload)
    plan = Plan(dp=8)
    before = search.estimate_of(plan)
    assert before is not None
    search.tell(plan, Measurement(tokens_per_s_per_gpu=100.0, peak_bytes=0.8 * before.peak_memory_bytes))
    after = search.posterior()
    row = search.table.find(plan)
    assert after.log_mean[row] == pytest.approx(4.60517)
    assert after.peak_bytes[row] < 0.97 * before.peak_memory_bytes
    assert search.best is not None
    assert (search.best.plan, search.best.tokens_per_s_per_gpu, search.trials) == (plan, 100.0, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens_per_s_per_gpu", 0.0), ("tokens_per_s_per_gpu", float("nan")), ("peak_bytes", -1.0), ("setup_s", -1.0)],
)
def test_a_measurement_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        Measurement(**{"tokens_per_s_per_gpu": 1.0, field: value})
