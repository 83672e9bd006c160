"""Tunings through the API: asked for, shared, repeated, listed page by page, withdrawn; their trials and best plan."""

from __future__ import annotations

from api_server import ON_BOTH, TINY, Api, StartApi, assert_problem
from commands import Command
from crew import wait_for
from fleet_records import fleet_tuning, live_tuning, node
from store_records import CLUSTER, FAILURE, FINGERPRINT, MODEL, step_reading, trial, tuning

from autotune.api.answers import BestAnswer, Submitted, TrialPage, TuningAnswer, TuningPage
from autotune.api.known_answers import KnownAnswer, KnownPage
from autotune.fleet.keys import create_key
from autotune.knowledge.recording import remember
from autotune.specs import FrameworkName, Plan, Role, Space, TuningState
from autotune.specs.command import CommandOffer
from storage import SqlStore


def submitted(api: Api, role: Role = Role.SUBMIT, **changes: object) -> Submitted:
    answer = api.request("POST", "/tunings", role, json=TINY | changes)
    assert answer.status_code in {200, 201}, answer.text
    found = Submitted.from_data(answer.json())
    assert (answer.status_code == 201) is found.created
    assert answer.headers["location"] == f"/tunings/{found.tuning}"
    return found


def measured(store: SqlStore, tuning_id: str = "tuning-1") -> None:
    """A tuning with two complete trials and a failed one."""
    live_tuning(store, tuning_id)
    store.save_tuning(store.tuning(tuning_id).model_copy(update={"state": TuningState.SEARCHING}))
    plans = (Plan(tp=2, dp=4), Plan(tp=2, pp=2, dp=2), Plan(tp=4, dp=2))
    for number, (plan, tokens) in enumerate(zip(plans, (900.0, 1200.0, None), strict=True)):
        store.start_trial(trial(number, tuning_id, plan))
        reading, failure = (None, FAILURE) if tokens is None else (step_reading(tokens), None)
        store.finish_trial(
            f"{tuning_id}-{number}", reading=reading, failure=failure, outcome_gpu_s=8.0, setup_s=1.0,
            fingerprint_key=FINGERPRINT.key,
        )  # fmt: skip


def test_a_request_is_stored_as_it_was_asked_for(api: Api) -> None:
    found = submitted(api, nodes=1, budget={"max_trials": 3}, space={"tp": [1, 2]}, seed=5)
    stored = api.store.tuning(found.tuning)
    assert stored == found.request
    assert (stored.pool, stored.principal, stored.cluster.nodes) == ("pair", "submit", 1)
    assert (stored.budget.max_trials, stored.space.tp, stored.seed) == (3, (1, 2), 5)


def test_a_whole_number_may_have_a_point(api: Api) -> None:
    assert submitted(api, nodes=1.0, seed=5.0, budget={"max_trials": 3.0, "gpu_s": 60}).request.seed == 5


@ON_BOTH
def test_equal_requests_share_one_tuning(api: Api) -> None:
    first, second = submitted(api), submitted(api, Role.ADMIN)
    assert (first.created, second.created) == (True, False)
    assert first.tuning == second.tuning
    assert submitted(api, seed=1).tuning != first.tuning


def test_a_queued_tuning_says_its_place_in_the_line_of_whoever_asked(api: Api, url: str, autotune: Command) -> None:
    told = [*(submitted(api, seed=seed) for seed in range(3)), submitted(api, Role.ADMIN, seed=9)]
    assert [each.place for each in told] == [1, 2, 3, 1]
    *mine, theirs = (each.tuning for each in told)
    assert submitted(api, seed=1).place == 2, "the same again"
    rows = {row.tuning: row.place for row in TuningPage.from_data(api.request("GET", "/tunings").json()).tunings}
    assert [rows[each] for each in (*mine, theirs)] == [1, 2, 3, 1]
    shown = TuningAnswer.from_data(api.request("GET", f"/tunings/{mine[2]}").json())
    assert shown.place == 3
    printed = autotune("show", mine[2], "--db", url).out
    assert "is queued: number 3 of what is queued for the same principal" in printed
    assert "queued, number 3" in autotune("history", "--db", url).out
    assert len(api.store.admit_tunings(1)) == 2
    for tuning_id, place in zip(mine, (None, 1, 2), strict=True):
        assert TuningAnswer.from_data(api.request("GET", f"/tunings/{tuning_id}").json()).place == place


def test_a_model_that_somebody_else_stored_meanwhile_is_the_one_that_is_tuned(api: Api, store: SqlStore) -> None:
    first, second = (MODEL.model_copy(update={"name": "mine", "layers": layers}) for layers in (2, 4))
    assert api.request("POST", "/models", Role.SUBMIT, json=first.to_data()).status_code == 201
    assert submitted(api, model="mine").request.model == first
    store.put_model(second)  # by another server
    assert submitted(api, model="mine", seed=1).request.model == second


def test_a_request_changes_what_no_name_stands_for(api: Api, store: SqlStore) -> None:
    mine, other, new = (
        MODEL.model_copy(update={"name": name, "layers": layers})
        for name, layers in (("mine", 2), ("mine", 4), ("new", 2))
    )
    store.put_model(mine)
    for seed, model in enumerate((other, new)):
        assert submitted(api, model=model.to_data(), seed=seed).request.model == model
    assert submitted(api, cluster=CLUSTER.model_copy(update={"nodes": 1}).to_data()).request.cluster.nodes == 1
    assert list(store.models()) == [mine]
    assert list(store.clusters()) == [CLUSTER]


@ON_BOTH
def test_a_name_belongs_to_who_stored_it(api: Api, store: SqlStore) -> None:
    ada = {"Authorization": f"Bearer {create_key(store, 'ada', 'submit').secret}"}
    for path, spec, field in (("/models", MODEL, "layers"), ("/clusters", CLUSTER, "nodes")):
        first, second = (spec.model_copy(update={"name": "mine", field: count}).to_data() for count in (2, 4))
        for body in (second, first):
            assert api.request("POST", path, None, headers=ada, json=body).status_code == 201
        refused = api.request("POST", path, Role.SUBMIT, json=second)
        assert_problem(refused, 409, "conflict", "'mine' belongs to ada", "another name")
        assert api.request("GET", f"{path}/mine").json() == first
        assert api.request("POST", path, Role.ADMIN, json=second).status_code == 201
        assert_problem(api.request("POST", path, None, headers=ada, json=first), 409, "conflict", "belongs to admin")
        assert api.request("GET", f"{path}/mine").json() == second
    store.put_model(MODEL.model_copy(update={"name": "ours"}))
    refused = api.request("POST", "/models", Role.SUBMIT, json=MODEL.to_data() | {"name": "ours"})
    assert_problem(refused, 409, "conflict", "belongs to whoever operates this service")


def test_a_preset_is_no_other_model(api: Api) -> None:
    preset = api.request("GET", "/models/tiny").json()
    for name in ("tiny", "TINY"):
        other = preset | {"name": name, "layers": preset["layers"] * 2}
        assert_problem(api.request("POST", "/models", json=other), 422, "input", "name", "preset")
        refused = api.request("POST", "/tunings", json=TINY | {"model": other})
        assert_problem(refused, 422, "input", "model.name", "preset")
    assert submitted(api, model=preset).created


def test_a_pool_is_the_admins_and_gives_the_nodes_that_it_has(api: Api, store: SqlStore) -> None:
    larger = CLUSTER.model_copy(update={"nodes": 64}).to_data()
    assert_problem(api.request("POST", "/clusters", Role.SUBMIT, json=larger), 409, "conflict", "pair", "an admin")
    assert submitted(api).request.cluster.nodes == 2
    assert api.request("POST", "/clusters", Role.ADMIN, json=larger).status_code == 201
    wait_for("the names of a moment ago", lambda: api.request("POST", "/tunings", json=TINY).status_code == 422)
    for asked in (TINY, TINY | {"nodes": 3}, TINY | {"cluster": larger}):
        assert_problem(api.request("POST", "/tunings", json=asked), 422, "input", "nodes", "2 at most", "pair")
    assert submitted(api, nodes=2, seed=1).request.cluster.nodes == 2
    store.register_node(node("c"))
    assert submitted(api, nodes=3, workload={"seq_len": 64, "global_batch": 24}).request.cluster.nodes == 3


def test_a_request_too_large_to_be_kept_is_judged_like_others(api: Api) -> None:
    model = MODEL.model_copy(update={"name": "mine", "source": "x" * 100_000})
    assert submitted(api, model=model.to_data()).request.model == model
    wrong = TINY | {"model": model.to_data(), "space": {"tp": [3]}}
    assert_problem(api.request("POST", "/tunings", Role.SUBMIT, json=wrong), 422, "illegal-plan", "space.tp")


@ON_BOTH
def test_an_idempotency_key_makes_one_tuning(api: Api) -> None:
    headers = {"Idempotency-Key": "once"}
    first = api.request("POST", "/tunings", json=TINY, headers=headers)
    api.request("DELETE", first.headers["location"])  # a request of its own would now make a new one
    again = api.request("POST", "/tunings", json=TINY, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["tuning"] == first.json()["tuning"]
    other = api.request("POST", "/tunings", json=TINY | {"seed": 1}, headers=headers)
    assert_problem(other, 409, "conflict", "once")
    theirs = api.request("POST", "/tunings", Role.SUBMIT, json=TINY | {"seed": 1}, headers=headers)
    assert theirs.status_code == 201


REFUSED: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({"model": "gpt5"}, ("model", "gpt5", "tiny")),
    ({"model": "/etc/passwd"}, ("model", "/etc/passwd")),
    ({"model": "../../config.json"}, ("model", "config.json")),
    ({"cluster": "nowhere"}, ("cluster", "nowhere", "pair")),
    ({"cluster": "/etc/hostname"}, ("cluster", "/etc/hostname")),
    ({"nodes": 3}, ("nodes", "3", "2")),
    ({"workload": {"seq_len": 0}}, ("workload.seq_len", "0")),
    ({"space": {"tp": ["two"]}}, ("space.tp.0", "two")),
    ({"space": {"tp": [3]}}, ("no plan is legal",)),
    ({"space": {"tp": [1] * 1001}}, ("space.tp", "1000")),
    ({"sampler": "oracle"}, ("sampler", "oracle", "plan")),
    ({"seed": -1}, ("seed", "-1")),
    ({"seed": 2**53}, ("seed", "9007199254740992")),
    ({"nodes": 2.5}, ("nodes", "2.5", "whole number")),
    ({"unknown": 1}, ("unknown", "not known")),
    ({"budget": {"max_trials": 0}}, ("budget.max_trials", "0")),
]


def test_what_cannot_be_used_is_named(api: Api) -> None:
    for changes, words in REFUSED:
        answer = api.request("POST", "/tunings", json=TINY | changes)
        data = assert_problem(answer, 422, "illegal-plan" if "no plan is legal" in words else "input", *words)
        assert data["what"]
        assert data["allowed"]
    assert api.request("GET", "/tunings").json()["tunings"] == []


def test_what_is_wrong_in_a_whole_model_or_cluster_is_named(api: Api) -> None:
    model, cluster = api.request("GET", "/models/tiny").json(), api.request("GET", "/clusters/pair").json()
    for changes, words in (
        ({"model": model | {"top_k": 2}}, ("body: model: top_k", "experts > 0")),
        ({"model": model | {"layers": "two"}}, ("body: model: layers", "two")),
        ({"cluster": cluster | {"inter": None}}, ("body: cluster: inter", "link between")),
        ({"model": 7}, ("body: model", "7")),
    ):
        assert_problem(api.request("POST", "/tunings", json=TINY | changes), 422, "input", *words)


def test_a_model_that_does_not_fit_says_what_would(api: Api) -> None:
    answer = api.request("POST", "/tunings", json=TINY | {"model": "gpt3-175b", "workload": {}})
    data = assert_problem(answer, 422, "nothing-fits", "GiB")
    assert data["misses"][0]["needs_bytes"] > data["misses"][0]["has_bytes"]


def test_a_request_that_takes_minutes_to_judge_is_refused(api: Api) -> None:
    model = api.request("GET", "/models/tiny").json() | {"name": "tower", "layers": 9999}
    assert_problem(api.request("POST", "/tunings", json=TINY | {"model": model}), 422, "input", "layers", "9999", "500")


@ON_BOTH
def test_lists_come_in_pages(api: Api) -> None:
    made = [submitted(api, seed=seed).tuning for seed in range(5)]
    path, seen = "/tunings?limit=2&state=queued", []
    while path:
        answer = api.request("GET", path, Role.READ)
        found = TuningPage.from_data(answer.json())
        assert len(found.tunings) <= 2
        assert answer.headers.get("link") == (f'<{found.next}>; rel="next"' if found.next else None)
        seen += [row.tuning for row in found.tunings]
        path = found.next or ""
    assert seen == made[::-1]
    assert api.request("GET", "/tunings?principal=nobody").json()["tunings"] == []
    assert api.request("GET", "/tunings?state=done").json()["tunings"] == []


def test_a_wrong_page_is_refused(api: Api) -> None:
    for query in ("limit=0", "limit=201", "limit=x", "after=%00", "state=asleep"):
        assert_problem(api.request("GET", f"/tunings?{query}"), 422, "input", query.partition("=")[0])
    assert_problem(api.request("GET", "/tunings?after=beef"), 422, "input", "tuning", "beef")


def test_a_tuning_is_cancelled_when_the_last_one_withdraws(api: Api) -> None:
    path = f"/tunings/{submitted(api).tuning}"
    submitted(api, Role.ADMIN)
    assert api.request("DELETE", path, Role.SUBMIT).json()["state"] == "queued"
    assert api.request("DELETE", path, Role.ADMIN).json()["state"] == "cancelled"
    assert api.request("DELETE", path, Role.ADMIN).json()["state"] == "cancelled"


def test_who_did_not_ask_is_told_who_did(api: Api) -> None:
    path = f"/tunings/{submitted(api).tuning}"
    refused = api.request("DELETE", path)
    assert_problem(refused, 409, "conflict", "wanted by submit, not by admin", "by force")
    assert not api.store.tuning(path.rpartition("/")[2]).state.ended
    assert api.request("DELETE", path, Role.SUBMIT).json()["state"] == "cancelled"


def test_an_admin_takes_back_what_was_asked_for_without_a_key(start_api: StartApi) -> None:
    api = start_api(open_locally=True)
    anonymous = api.request("POST", "/tunings", None, json=TINY).headers["location"]
    refused = api.request("DELETE", anonymous, Role.SUBMIT)
    assert_problem(refused, 409, "conflict", "wanted by local, not by submit", "an admin")
    assert api.request("DELETE", anonymous, Role.ADMIN).json()["state"] == "cancelled"


def test_only_an_admin_cancels_what_others_want(api: Api) -> None:
    path = f"/tunings/{submitted(api, Role.ADMIN).tuning}"
    assert_problem(api.request("DELETE", f"{path}?force=true", Role.SUBMIT), 403, "forbidden", "admin")
    submitted(api)
    assert api.request("DELETE", f"{path}?force=true").json()["state"] == "cancelled"


def test_a_tuning_of_one_machine_is_not_the_fleets_to_cancel(api: Api) -> None:
    api.store.create_tuning(tuning("mine"))
    for query in ("", "?force=true"):
        assert_problem(api.request("DELETE", f"/tunings/mine{query}"), 422, "input", "one machine")
    assert not api.store.tuning("mine").state.ended


def test_what_has_ended_cannot_be_cancelled(api: Api) -> None:
    live_tuning(api.store)
    api.store.save_tuning(api.store.tuning("tuning-1").model_copy(update={"state": TuningState.DONE}))
    assert_problem(api.request("DELETE", "/tunings/tuning-1"), 409, "conflict", "done")
    assert_problem(api.request("DELETE", "/tunings/beef"), 404, "not-found", "beef")


@ON_BOTH
def test_trials_come_in_pages(api: Api, store: SqlStore) -> None:
    measured(store)
    first = TrialPage.from_data(api.request("GET", "/tunings/tuning-1/trials?limit=2").json())
    assert [row.number for row in first.trials] == [0, 1]
    assert first.next is not None
    rest = TrialPage.from_data(api.request("GET", first.next).json())
    assert [(row.number, row.state) for row in rest.trials] == [(2, "failed")]
    assert rest.next is None
    assert_problem(api.request("GET", "/tunings/beef/trials"), 404, "not-found", "beef")


def test_the_api_answers_what_the_command_line_prints(api: Api, store: SqlStore, url: str, autotune: Command) -> None:
    measured(store)
    shown = api.request("GET", "/tunings/tuning-1")
    assert shown.json() == autotune("show", "tuning-1", "--db", url, "--json").data
    assert TuningAnswer.from_data(shown.json()).best is not None
    best = api.request("GET", "/best?tuning=tuning-1&for=megatron")
    printed = autotune("best", "--tuning", "tuning-1", "--for", "megatron", "--db", url, "--json").data
    assert best.json() == {name: printed[name] for name in BestAnswer.model_fields}
    (row,) = api.request("GET", "/tunings").json()["tunings"]
    (printed,) = autotune("history", "--db", url, "--json").data["tunings"]
    assert {name: row[name] for name in printed} == printed


def test_the_best_plan_of_a_question(api: Api, store: SqlStore) -> None:
    measured(store)
    asked = fleet_tuning().model.model_copy(update={"name": "mine"})
    store.put_model(asked)
    question = "/best?model=mine&cluster=pair&seq_len=128&global_batch=16"
    found = KnownAnswer.from_data(api.request("GET", question, Role.READ).json())
    assert found.known is None  # the tuning has not ended
    assert found.tuning is not None
    assert (found.tuning.tuning, found.tuning.best.plan) == ("tuning-1", Plan(tp=2, pp=2, dp=2))
    assert api.request("GET", "/best", Role.READ).json()["tuning"] == "tuning-1"
    assert_problem(api.request("GET", "/best?model=mine"), 422, "input", "cluster")
    assert_problem(api.request("GET", "/best?tuning=tuning-1&for=jax"), 422, "input", "jax", "megatron")


@ON_BOTH
def test_what_a_tuning_found_is_known_and_near_to_other_questions(api: Api, store: SqlStore) -> None:
    measured(store)
    store.put_model(fleet_tuning().model.model_copy(update={"name": "mine"}))
    remember(store, store.tuning("tuning-1"))
    question = "/best?model=mine&cluster=pair&seq_len=128&global_batch="
    found = KnownAnswer.from_data(api.request("GET", question + "16&for=megatron", Role.READ).json())
    assert found.known is not None
    assert found.known.plan == Plan(tp=2, pp=2, dp=2)
    assert found.launch is not None
    assert "--tensor-model-parallel-size" in found.launch.argv
    near = KnownAnswer.from_data(api.request("GET", question + "32", Role.READ).json())
    assert near.known is None
    assert [item.differs for item in near.nearest] == [["16 sequences a step instead of 32"]]
    listed = KnownPage.from_data(api.request("GET", "/known?model=tiny&history=true", Role.READ).json())
    assert [item.id for item in listed.entries] == [found.known.id]


def test_a_new_trial_changes_the_best_plan(api: Api, store: SqlStore) -> None:
    measured(store)
    before = api.request("GET", "/best?tuning=tuning-1").json()["best"]
    store.start_trial(trial(3, "tuning-1", Plan(tp=8)))
    store.finish_trial(
        "tuning-1-3", reading=step_reading(5000.0), failure=None, outcome_gpu_s=8.0, setup_s=1.0,
        fingerprint_key=FINGERPRINT.key,
    )  # fmt: skip
    after = api.request("GET", "/best?tuning=tuning-1").json()["best"]
    assert (before["plan"]["tp"], after["plan"]["tp"]) == (2, 8)


def test_the_hardware_of_a_pool_is_not_replaced(api: Api) -> None:
    pool = api.store.cluster("pair").to_data()
    for changes in ({"gpus_per_node": 1}, {"device": pool["device"] | {"name": "other"}}):
        assert_problem(api.request("POST", "/clusters", json=pool | changes), 409, "conflict", "pair")
    assert api.request("POST", "/clusters", json=pool | {"nodes": 4}).status_code == 201
    assert api.store.cluster("pair").to_data() == pool | {"nodes": 4}
    assert api.request("POST", "/clusters", json=pool | {"name": "mine", "gpus_per_node": 1}).status_code == 201


def test_a_request_names_a_program_of_the_nodes(api: Api) -> None:
    space = Space(tp=(1, 2), pp=(1,), zero_stage=(0,))
    offer = CommandOffer(ref="own@00000000000000aa", space=space, framework=FrameworkName.TORCH)
    for name in ("a", "b"):
        api.store.register_node(node(name, commands=(offer,)))
    found = submitted(api, nodes=1, command="own", space={"tp": [2, 4]})
    assert found.request.workload.command == "own@00000000000000aa"
    assert (found.request.space.tp, found.request.space.pp) == ((2,), (1,))
    shown = api.request("GET", "/nodes/a").json()["node"]["commands"]
    assert [each["ref"] for each in shown] == ["own@00000000000000aa"]


def test_a_program_that_no_node_offers_is_refused_and_none_is_brought(api: Api) -> None:
    assert_problem(api.request("POST", "/tunings", json=TINY | {"command": "own"}), 422, "input", "command")
    assert_problem(api.request("POST", "/tunings", json=TINY | {"command": "../bin/sh"}), 422, "input", "command")
    brought = TINY | {"workload": {"command": "own@00000000000000aa"}}
    assert_problem(api.request("POST", "/tunings", json=brought), 422, "input", "command")
