"""What frameworks share: names and versions, tables that serve both directions, scripts that launch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from autotune.errors import InputError, UnknownNameError
from autotune.frameworks import LaunchArguments, target_of
from autotune.frameworks.arguments import Placeholder
from autotune.frameworks.table import Said, Settings, Table, Why, choice, count, switch

TABLE = Table(
    entries=(
        count("tensor", "tp", 1),
        count("chunks", "vpp", 1, quiet=True),
        switch("sp", "sequence_parallel"),
        choice("norm", "norm", {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}, "LayerNorm"),
        count("old_name", "cp", 1, until="0.3"),
        count("new_name", "cp", 1, since="0.3"),
    ),
    no_word={"offload_*": "something is in host memory"},
    elsewhere=("lr", "log_.*"),
)  # fmt: skip
FACTS = {"tp": 4, "vpp": 1, "sequence_parallel": True, "norm": "rmsnorm", "cp": 2}


def settings(**said: object) -> Settings:
    return Settings("run.sh", {name: Said(value, "line 3") for name, value in said.items()})


def test_a_target_is_a_name_with_or_without_its_version() -> None:
    newest = target_of("megatron")
    assert newest.name == "megatron"
    assert target_of("megatron-lm@0.16.1") == target_of("megatron@0.16") != newest
    assert target_of("megatron-bridge").name == "nemo"
    with pytest.raises(InputError, match=r"version of megatron: '0\.9' cannot be used; one of 0\.\d+"):
        target_of("megatron@0.9")
    with pytest.raises(InputError, match=r"version of megatron: '' "):
        target_of("megatron@")
    with pytest.raises(UnknownNameError, match="megatron, nanotron"):
        target_of("colossal@1")


def test_one_table_says_facts_and_reads_them_again() -> None:
    said = TABLE.say(FACTS, "0.3")
    assert said == {"tensor": 4, "sp": True, "norm": "RMSNorm", "new_name": 2}
    assert "old_name" in TABLE.say(FACTS, "0.2")
    facts, left = TABLE.read(settings(tensor="4", sp=True, norm="RMSNorm", new_name=2), {})
    assert (facts, left) == (FACTS, ())


def test_what_is_left_is_named_with_what_is_known_of_it() -> None:
    _, left = TABLE.read(settings(lr=1, log_every=2, offload_weights=True, offload_moments=False, strange="x"), {})
    assert [(each.name, each.why, each.where) for each in left] == [
        ("offload_weights", Why.NO_WORD, "line 3"), ("strange", Why.UNKNOWN, "line 3")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tensor": "four"}, "run.sh, line 3: tensor: 'four' cannot be used; a whole number, at least 1"),
        ({"tensor": 0}, "a whole number, at least 1"),
        ({"tensor": 1.5}, "a whole number, at least 1"),
        ({"sp": "perhaps"}, "true or false"),
        ({"norm": "BatchNorm"}, "one of RMSNorm, LayerNorm"),
        ({"norm": ["RMSNorm"]}, "one of RMSNorm, LayerNorm"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_one_error_with_its_place(said: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        TABLE.read(settings(**said), {})
    assert message in str(error.value)


def test_a_script_runs_the_command_with_its_environment_and_what_stands_in(tmp_path: Path) -> None:
    launch = LaunchArguments(
        target="megatron",
        version="0.19",
        argv=("printenv", "A", "B"),
        environment={"A": "one word", "B": "$x"},
        placeholders=(Placeholder("NAMES", ("A", "B"), "the names"),),
    )
    script = launch.files()["launch.sh"]
    assert "NAMES=(A B)" in script
    path = tmp_path / "launch.sh"
    path.write_text(script)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "one word\n$x\n"
