"""Which programs nodes offer, which of them a request gets, and which requests a program can answer."""

from __future__ import annotations

import pytest
from fleet_records import node, trial_job
from store_records import CLUSTER, MODEL, MOMENT, WORKLOAD, trial

from autotune.errors import InputError, UnknownNameError
from autotune.fleet.eligibility import obstacle_for, offer_in
from autotune.search.space import legal_plans, runtime_of
from autotune.specs import DType, FrameworkName, Space, StepRequest, Workload
from autotune.specs.command import CommandOffer, Fixed

OFFER = CommandOffer(
    ref="own@00000000000000aa",
    space=Space(tp=(1, 2), pp=(1,), micro_batch=None, zero_stage=(0, 3)),
    framework=FrameworkName.FSDP,
    workload=Fixed(dtype=DType.FP32),
)
OTHER = OFFER.model_copy(update={"ref": "own@00000000000000bb"})


def test_the_content_that_most_nodes_offer_is_taken() -> None:
    nodes = [node("a", commands=(OTHER,)), node("b", commands=(OFFER,)), node("c", commands=(OFFER,))]
    assert offer_in(nodes, "own", 2) == OFFER
    with pytest.raises(InputError, match="3 nodes that offer the same of that name; 2 do"):
        offer_in(nodes, "own", 3)
    with pytest.raises(UnknownNameError, match="known: own"):
        offer_in(nodes, "rm", 1)


def test_a_job_runs_only_where_its_very_program_is() -> None:
    workload = WORKLOAD.model_copy(update={"command": OFFER.ref})
    of = trial(0)
    job = trial_job("j", of).model_copy(update={"request": StepRequest(model=MODEL, workload=workload, plan=of.plan)})
    assert obstacle_for(job, node("a", commands=(OFFER,)), MOMENT) == ""
    assert obstacle_for(job, node("a", commands=(OTHER,)), MOMENT) == f"has another command own than {OFFER.ref}"
    assert obstacle_for(job, node("a"), MOMENT) == "has no command own"
    assert obstacle_for(trial_job("j", of), node("a"), MOMENT) == ""


def test_a_request_is_narrowed_to_what_the_program_can_run() -> None:
    assert OFFER.narrowed(Space(zero_stage=(0, 1))).zero_stage == (0,)
    assert OFFER.narrowed(Space()) == OFFER.space
    with pytest.raises(InputError, match="command own can run 1, 2"):
        OFFER.narrowed(Space(tp=(4,)))


def test_what_is_built_in_cannot_be_asked_otherwise() -> None:
    asked = Workload(seq_len=128, global_batch=16, dtype=DType.BF16)
    with pytest.raises(InputError, match="command own always has fp32"):
        OFFER.workload_of(asked, given={"dtype"})
    found = OFFER.workload_of(asked)
    assert (found.dtype, found.framework, found.command) == (DType.FP32, FrameworkName.FSDP, OFFER.ref)


def test_a_program_has_keys_of_its_own_and_layers_of_everybody() -> None:
    own = WORKLOAD.model_copy(update={"command": OFFER.ref})
    assert own.key != WORKLOAD.key
    assert own.kind != WORKLOAD.kind
    assert own.probed.key == WORKLOAD.key


def test_a_program_is_not_held_to_the_limits_of_our_probe() -> None:
    own = WORKLOAD.model_copy(update={"command": OFFER.ref})
    space = Space(zero_stage=(2,), schedule=None)
    plans = [legal_plans(MODEL, CLUSTER, each, space=space, runtime=runtime_of(each)) for each in (own, WORKLOAD)]
    assert (plans[0].pp > 1).any()
    assert not (plans[1].pp > 1).any()
