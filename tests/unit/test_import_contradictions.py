"""What lines of a log say of each other: ranks, stages, clocks, units, peaks, and runs in one file."""

from __future__ import annotations

import re

import import_logs
import pytest

from autotune.catalog import load_model
from autotune.catalog.gpus import cluster_from_shorthand
from autotune.errors import InputError
from autotune.imports import Format, Imported, Stated, read_log
from autotune.specs import CollectiveOp, DType

SIXTEEN, EIGHT = cluster_from_shorthand("h100-80gb-sxm:2x8"), cluster_from_shorthand("h100-80gb-sxm:1x8")
LLAMA = load_model("llama3.1-8b")


def megatron(text: str, **stated: object) -> Imported:
    return read_log(Format.MEGATRON, "m.log", text, Stated(cluster=SIXTEEN, **stated))


def titan(text: str, **stated: object) -> Imported:
    return read_log(Format.TORCHTITAN, "t.log", text, Stated(cluster=EIGHT, model=LLAMA, **stated))


def test_a_log_in_which_every_rank_prints_is_that_of_the_first() -> None:
    one = import_logs.torchtitan()
    expected = titan(one).runs[0]
    labelled = "".join(line + line.replace("[rank0]", "[rank7]") for line in one.splitlines(keepends=True))
    found = titan(labelled)
    assert (found.runs[0].steps, found.runs[0].tokens_per_s_per_gpu) == (expected.steps, expected.tokens_per_s_per_gpu)
    assert found.notes == ["t.log: 2 ranks print each step: those of [rank0]: are taken"]
    plain = titan(labelled.replace("[rank0]:", "").replace("[rank7]:", ""))
    assert plain.runs[0].tokens_per_s_per_gpu == expected.tokens_per_s_per_gpu
    assert plain.notes == ["t.log: several ranks print each step: the first of each is taken"]


def test_ranks_whose_lines_are_mixed_are_the_cause_that_is_named() -> None:
    lines = import_logs.torchtitan().replace("[rank0]:", "").splitlines(keepends=True)
    steps = [line for line in lines if "step:" in line]
    mixed = [line for pair in zip(steps[1:], steps[:-1], strict=True) for line in pair]
    with pytest.raises(InputError, match=r"several ranks or runs.*go back 6 times.*labels"):
        titan("".join([*(line for line in lines if "step:" not in line), *mixed]))


def test_a_torn_line_is_left_out_and_said() -> None:
    text = import_logs.megatron([*import_logs.TIMES_MS, *[5000.0] * 9])
    whole = megatron(text).runs[0]
    for damaged in ("(ms): 49[Rank 3] |", "(ms): 49\n"):
        found = megatron(text.replace("(ms): 4990.0 |", damaged))
        assert found.runs[0].steps == whole.steps - 1
        assert found.notes == ["m.log: 1 damaged lines of steps are left out: 50"]
    with pytest.raises(InputError, match=r"line 41, step.*of 20 lines of steps 20 have no figure"):
        megatron(text.replace("(ms): ", "(ms): x"))


def test_a_torn_row_of_a_sweep_is_left_out_and_said() -> None:
    text = import_logs.nccl_tests().replace("   300.0 ", "  3[00.0 ")
    found = read_log(Format.NCCL_TESTS, "n.txt", text, Stated(cluster=SIXTEEN))
    assert [item.reading.size_bytes for item in found.readings] == [2**20, 2**30]
    assert found.notes == ["n.txt: line 26 is damaged and left out"]


def test_several_runs_in_one_file_are_refused_where_what_counts_differs() -> None:
    first, second = import_logs.megatron(), import_logs.megatron(recompute_granularity="full")
    with pytest.raises(InputError, match=r"recompute_granularity.*'full'.*has 'selective': a log of one run"):
        megatron(first + second)
    assert megatron(import_logs.megatron(load=None) + import_logs.megatron(load="/ckpt")).runs[0].steps == 12
    again = import_logs.nanotron() + import_logs.nanotron(tp_mode="ALL_REDUCE: 1")
    with pytest.raises(InputError, match=r"sequence_parallel.*a log of one run"):
        read_log(Format.NANOTRON, "n.log", again, Stated(cluster=EIGHT))


def test_sweeps_one_after_another_are_read_each_for_itself() -> None:
    text = import_logs.nccl_tests(hosts=1, local=4) + import_logs.nccl_tests("all_gather", hosts=1)
    found = read_log(Format.NCCL_TESTS, "n.txt", text, Stated(cluster=EIGHT))
    assert [(item.reading.op, item.reading.group_size) for item in found.readings] == [
        *[(CollectiveOp.ALL_REDUCE, 4)] * 3, *[(CollectiveOp.ALL_GATHER, 8)] * 3
    ]  # fmt: skip
    cut = import_logs.nccl_tests(hosts=1, end=False) + import_logs.nccl_tests("all_gather", hosts=1)
    (note,) = read_log(Format.NCCL_TESTS, "n.txt", cut, Stated(cluster=EIGHT)).notes
    assert note == "n.txt: 1 of 2 sweeps did not come to its end; its complete rows are taken"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (import_logs.nccl_tests().replace("#  Rank  3 Group", "#  Rank  2 Group"), r"line 8, rank.*line 7 has it too"),
        ("".join(line for line in import_logs.nccl_tests().splitlines(keepends=True) if "Rank  3" not in line),
         r"ranks.*15 lines.*there is no line of rank 3"),
        (import_logs.nccl_tests().replace("(us)", "(ms)"), r"line 24, units.*times must be in us"),
    ],
)  # fmt: skip
def test_ranks_and_units_of_a_sweep_are_the_cause_that_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_log(Format.NCCL_TESTS, "n.txt", text, Stated(cluster=SIXTEEN))


def test_steps_that_take_longer_than_the_clock_says_are_in_another_unit() -> None:
    slow = [time * 1000 for time in import_logs.TIMES_MS]
    with pytest.raises(InputError, match=r"line \d+, time.*time stamps of these lines are 5 s apart.*unit"):
        megatron(re.sub(r"10:(\d\d):00\]", r"10:00:\1]", import_logs.megatron(slow)))


def test_peaks_must_be_of_the_run_and_of_one_unit() -> None:
    text = import_logs.megatron()
    with pytest.raises(InputError, match=r"peak memory.*at most the 60 GiB that were reserved"):
        megatron(text.replace("max allocated: 51200.0", "max allocated: 71200.0"))
    with pytest.raises(InputError, match=r"peak memory.*rank 24.*the run has 16 ranks"):
        megatron(text.replace("[Rank 8]", "[Rank 24]"))
    first = "".join(line for line in text.splitlines(keepends=True) if "[Rank 8]" not in line)
    assert megatron(first).notes == ["m.log: the peak is that of stage 0 of 2: others may have a higher one"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rampup_batch_size": "[32, 32, 1000]"}, "rampup_batch_size.*the batch grows"),
        ({"fp4": "e2m1"}, "fp4.*4 bits"),
        ({"multi_latent_attention": True}, "does not tell its model .multi_latent_attention True.: give --model"),
        ({"mtp_num_layers": 1}, "does not tell its model .mtp_num_layers 1.: give --model"),
    ],
)
def test_more_arguments_that_a_plain_plan_does_not_say(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        megatron(import_logs.megatron(**changes))


def test_fsdp2_in_megatron_is_zero_3_and_fp8_parameters_are_the_workloads() -> None:
    plain = {"pipeline_model_parallel_size": 1, "data_parallel_size": 4, "use_distributed_optimizer": False}
    whole = import_logs.megatron(**plain).replace("[Rank 8]", "[Rank 4]")
    assert megatron(whole).runs[0].plan.zero_stage == 0
    fsdp = import_logs.megatron(**plain, use_torch_fsdp2=True)
    assert megatron(fsdp).runs[0].plan.zero_stage == 3
    kept = import_logs.megatron(**plain, use_torch_fsdp2=True, torch_fsdp2_reshard_after_forward=False)
    assert megatron(kept).runs[0].plan.zero_stage == 2
    run = megatron(import_logs.megatron(fp8="hybrid", fp8_param_gather=True)).runs[0]
    assert (run.workload.dtype, run.workload.param_dtype) == (DType.FP8, DType.FP8)


def test_overlap_that_is_off_is_told() -> None:
    (note,) = megatron(import_logs.megatron(overlap_grad_reduce=False, overlap_param_gather=True)).notes
    assert "overlap_grad_reduce is off: gradients are reduced after the computation" in note
    assert megatron(import_logs.megatron(overlap_grad_reduce=True)).notes == []


def test_experts_of_their_own_degree_are_the_plans() -> None:
    model = load_model("qwen3-30b-a3b")
    common = {
        "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_query_groups": 4, "num_experts": 128,
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "data_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
    }  # fmt: skip
    for ep, etp in ((8, 1), (16, 0)):  # 16 does not divide dp, so that an expert is on one rank in any case
        run = megatron(import_logs.megatron(**common, expert_model_parallel_size=ep), model=model).runs[0]
        assert (run.plan.ep, run.plan.etp, run.plan.expert_tp) == (ep, etp, 1)


def test_float8_of_torchtitan_is_no_bf16() -> None:
    line = "[rank0]:[titan] 2026-03-01 10:00:00,000 - root - INFO - "
    text = import_logs.torchtitan()
    for said, recipe in (("Float8 tensorwise scaled training active", None), ("Swapped to MXLinear layers", "mxfp8")):
        run = titan(f"{line}{said}\n{text}").runs[0]
        assert (run.workload.dtype, run.workload.fp8_recipe) == (DType.FP8, recipe)


def test_deepspeeds_entries_that_a_plan_does_not_say_are_refused() -> None:
    entry = '{"partition_activations": true, "cpu_checkpointing": false}'
    text, stated = import_logs.deepspeed(activation_checkpointing_config=entry), Stated(cluster=SIXTEEN, model=LLAMA)
    with pytest.raises(InputError, match=r"partition_activations.*divided over tp"):
        read_log(Format.DEEPSPEED, "d.log", text, stated)


def test_a_log_of_another_format_is_named() -> None:
    stated = Stated(
        cluster=EIGHT, model=LLAMA, workload={"seq_len": 8192, "global_batch": 16, "dtype": "bf16"},
        plan={"tp": 1, "pp": 1, "micro_batch": 2, "zero_stage": 3, "recompute": "none"},
    )  # fmt: skip
    with pytest.raises(InputError, match=r"no timed step.*'tps:'.*give --format torchtitan"):
        read_log(Format.MEGATRON, "t.log", import_logs.torchtitan(), stated)
