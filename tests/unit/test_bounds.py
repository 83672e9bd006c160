"""How large a request may be: the same bound, in the same words, at both doors."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import InputError
from autotune.search.space import Runtime, require_bounded
from autotune.specs import ClusterSpec, ModelSpec, Workload

TOWER = model("llama3.1-8b").model_copy(update={"name": "tower", "layers": 9999})
CLUSTER = "h100-80gb-sxm:1x8"
# 448 and 1344 divisors: no other number up to ten million, and to 2**31, has more.
WIDE = cluster_from_shorthand("h100-80gb-sxm:2x8").model_copy(update={"nodes": 1_081_080})
MANY = Workload(seq_len=4096, global_batch=735_134_400)


def refusal(spec: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime = Runtime.ANY) -> InputError:
    with pytest.raises(InputError) as caught:
        require_bounded(spec, cluster, workload, runtime)
    return caught.value


def test_what_can_be_trained_is_within_the_bound() -> None:
    require_bounded(
        model("deepseek-v3"), cluster_from_shorthand("h100-80gb-sxm:256x8"), Workload(seq_len=4096, global_batch=15360)
    )


def test_too_many_layers_layouts_and_plans_are_named() -> None:
    work = Workload(seq_len=4096, global_batch=128)
    assert refusal(TOWER, cluster_from_shorthand(CLUSTER), work).what == "model.layers"
    assert "layouts are more than" in str(refusal(model("llama3.1-8b"), WIDE, MANY))
    experts = model("deepseek-v3").model_copy(update={"experts": 720720})
    cluster, work = cluster_from_shorthand("h100-80gb-sxm:720x8"), Workload(seq_len=4096, global_batch=20160)
    assert "plans are more than" in str(refusal(experts, cluster, work))


@pytest.mark.parametrize(
    "command", [("plan",), ("plan", "--scaling"), ("plan", "--plan", "tp=8", "--explain"), ("best",), ("tune",)]
)
def test_the_command_line_refuses_in_the_same_words(
    autotune: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "tower.yaml"
    file.write_text(TOWER.to_yaml())
    cluster = cluster_from_shorthand(CLUSTER)
    words = str(refusal(TOWER, cluster, Workload(seq_len=128, global_batch=8)))
    request = ("--model", file, "--seq-len", 128, "--global-batch", 8)
    request += () if command == ("tune",) else ("--cluster", CLUSTER)  # what is tuned runs on this machine
    done = autotune(*command, *request)
    assert done.status == 2
    assert words in " ".join(done.err.split())


def test_one_plan_is_shown_whatever_its_size(autotune: Command, tmp_path: Path) -> None:
    file = tmp_path / "tower.yaml"
    file.write_text(TOWER.to_yaml())
    done = autotune("plan", "--plan", "tp=8", "--model", file, "--cluster", CLUSTER, "--json")
    assert done.data["legal"] == 1
