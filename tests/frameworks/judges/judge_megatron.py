"""Megatron-LM's own word on command lines: run by a Python that has torch, with a checkout of Megatron-LM.

    python judge_megatron.py CHECKOUT < commands > verdicts

A line of the input is {"words": [...], "environment": {...}, "world": N}; of the output {"error": ...} or {"args":
{...}, "config": {...}}, as parse_args, validate_args and core_transformer_config_from_args leave them.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import logging
import os
import sys
import typing
import warnings
from typing import Any

sys.path.insert(0, sys.argv[1])
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
if not hasattr(typing, "override"):  # before Python 3.12
    typing.override = lambda method: method  # type: ignore[attr-defined]

import torch  # noqa: E402
from megatron.core.extensions import transformer_engine  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.training import arguments  # noqa: E402

# There is no GPU to ask and no Transformer Engine: Hopper, and a recent one.
arguments.get_device_arch_version = lambda: 9
torch.cuda.get_device_capability = lambda *_: (9, 0)
for name in ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute"):
    for module in (transformer_engine, moe_utils):  # where releases look for them
        setattr(module, f"fused_{name}", len)
for module in (arguments, transformer_config):
    module.is_te_min_version = lambda *_, **__: True


def plain(value: Any) -> Any:
    """What JSON can carry of a setting."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def judge(words: list[str], environment: dict[str, str], world: int) -> dict[str, Any]:
    """What Megatron-LM makes of a command."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment, WORLD_SIZE=str(world), RANK="0")
    # Transformer Engine, whose fused rotary positions these are, needs a GPU.
    sys.argv = ["pretrain_gpt.py", *words, "--no-rope-fusion"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parsed = arguments.parse_args()
            parsed = arguments.validate_args(parsed) or parsed
            config = arguments.core_transformer_config_from_args(parsed)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it raises is its word)
        return {"error": f"{type(error).__name__}: {error} {said.getvalue()[-300:]}"}
    return {
        "args": {name: plain(value) for name, value in vars(parsed).items()},
        "config": {name: plain(value) for name, value in vars(config).items()},
    }


for line in sys.stdin:
    print(json.dumps(judge(**json.loads(line))), flush=True)
