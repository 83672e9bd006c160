"""Every export is taken by the framework itself, and for what the plan says.

FRAMEWORKS names a folder with an environment for each framework; `make test-frameworks` makes it. nanotron is in no
package index: NANOTRON names a checkout of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from framework_plans import EVERYTHING, exports, mistaken, read

from autotune.specs import DType, Space, Workload

pytestmark = pytest.mark.frameworks

LLAMA = ("llama3-8b", "h100-80gb-sxm:2x8", Workload(seq_len=4096, global_batch=64))
LLAMA2 = ("llama2-7b", "h100-80gb-sxm:4x8", Workload(seq_len=4096, global_batch=256))
SMALL = ("llama3.2-1b", "h100-80gb-sxm:1x8", Workload(seq_len=2048, global_batch=32, dtype=DType.FP32))
QWEN = ("qwen3-1.7b", "h100-80gb-sxm:1x8", Workload(seq_len=2048, global_batch=32))
EXPERTS = ("qwen3-30b-a3b", "h100-80gb-sxm:2x8", Workload(seq_len=4096, global_batch=64))
LATENT = ("deepseek-v2-lite", "h100-80gb-sxm:2x8", Workload(seq_len=4096, global_batch=64))
HALF = ("llama2-7b", "v100-32gb-sxm:1x8", Workload(seq_len=2048, global_batch=32, dtype=DType.FP16))
WIDE = EVERYTHING.model_copy(update={"cp": (1,)})
REPLICAS = WIDE.model_copy(update={"tp": (1,), "pp": (1,), "ep": (1,)})

MANY = tuple(
    (name, where, Workload(seq_len=1024, global_batch=batch))
    for name, where, batch in (
        ("llama3-8b", "h100-80gb-sxm:2x8", 768), ("qwen2.5-7b", "h100-80gb-sxm:1x8", 240),
        ("qwen3-8b", "a100-80gb-sxm:3x4", 720), ("gpt2-xl", "a100-80gb-sxm:1x4", 240),
        ("mixtral-8x7b", "h100-80gb-sxm:8x8", 1536),
    )
)  # fmt: skip

CASES = [
    ("torchtitan@0.2", "torchtitan-0.2", "read_torchtitan_0_2.py", (LLAMA, LLAMA2, SMALL, EXPERTS, LATENT), EVERYTHING),
    ("torchtitan@0.3", "torchtitan-0.3", "read_torchtitan_0_3.py", (LLAMA, LLAMA2, SMALL, QWEN, EXPERTS), EVERYTHING),
    ("deepspeed", "parsers", "read_deepspeed.py", (LLAMA, SMALL, QWEN, EXPERTS, HALF), WIDE),
    ("nanotron", "parsers", "read_nanotron.py", (LLAMA, LLAMA2, SMALL, HALF), WIDE),
    ("transformers", "parsers", "read_transformers.py", (*MANY, SMALL, HALF), REPLICAS),
]
FEWEST = 200


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("target", "environment", "reader", "cases", "space"), CASES, ids=[case[0] for case in CASES])
def test_a_framework_takes_every_export_for_what_the_plan_says(
    target: str, environment: str, reader: str, cases: tuple[tuple[str, str, Workload], ...], space: Space
) -> None:
    if target == "nanotron" and "NANOTRON" not in os.environ:
        pytest.skip("NANOTRON must name a checkout of nanotron")
    python = Path(os.environ["FRAMEWORKS"]) / environment / "bin" / "python"
    found, refused = exports(target, cases, -(-FEWEST // len(cases)) + 10, space)
    answers = read(str(python), reader, found)
    wrong = mistaken(found, answers)
    print(f"{target}: {len(found)} exports, {len(wrong)} refused or mistaken; {sum(refused.values())} plans refused")
    assert len(found) >= FEWEST
    assert not wrong, "\n".join(wrong[:20])
