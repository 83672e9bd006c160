"""Who gets in: each route asks for its role; keys that are missing, wrong, expired, revoked; the rate limit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from api_server import ON_BOTH, TINY, Api, StartApi, assert_problem
from fastapi.routing import APIRoute

from autotune.api.access import ROLES
from autotune.api.application import create_app
from autotune.fleet.keys import create_key, hash_of
from autotune.specs import ApiKey, Role

ROUTES = sorted(ROLES)


def path_of(route: str) -> str:
    """A path of the route, of things that do not exist."""
    return route.split()[1].replace("{name:path}", "x").replace("{", "x").replace("}", "x")


def test_the_table_of_roles_names_every_route_and_no_other() -> None:
    app = create_app(None, None, broker_answers=bool)  # type: ignore[arg-type]
    assert all(isinstance(route, APIRoute) for route in app.routes)
    routes = [f"{method} {route.path}" for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    assert sorted(routes) == ROUTES


def refused_keys(api: Api) -> list[str]:
    """Secrets of admins that are wrong, expired and revoked."""
    now = datetime.now(UTC)
    then = now - timedelta(seconds=1)
    for name, dates in (("expired", {"expires_at": then}), ("revoked", {"revoked_at": then})):
        key = ApiKey(id=name, name=name, role=Role.ADMIN, created_at=then, **dates)
        api.store.create_key(key, hash_of(name))
    return ["wrong", "expired", "revoked"]


@ON_BOTH
def test_every_route_asks_for_its_role(start_api: StartApi) -> None:
    api = start_api(rate="60000/minute")
    secrets = refused_keys(api)
    for route in ROUTES:
        needed, method, path = ROLES[route], route.split()[0], path_of(route)
        if needed is None:
            assert api.request(method, path, None).status_code == 200
            continue
        assert_problem(api.request(method, path, None), 401, "unauthorized", "is needed")
        for secret, word in zip(secrets, ("not known", "expired", "revoked"), strict=True):
            shown = {"Authorization": f"Bearer {secret}"}
            assert_problem(api.request(method, path, None, headers=shown), 401, "unauthorized", word)
        for role in Role:
            answer = api.request(method, path, role)
            if role.includes(needed):
                assert answer.status_code not in {401, 403}, route
            else:
                assert_problem(answer, 403, "forbidden", f"needs the role {needed.value}")


def test_who_is_not_let_in_is_not_read(api: Api) -> None:
    refused = api.request("POST", "/tunings", None, content=b"{", headers={"content-type": "application/json"})
    assert_problem(refused, 401, "unauthorized")


def test_a_wrong_key_is_refused(api: Api) -> None:
    for header in (b"Basic YTpi", b"Bearer", b"Bearer nobody", b"nobody", b"Bearer \xe9"):
        refused = api.request("GET", "/tunings", None, headers={"Authorization": header})
        assert_problem(refused, 401, "unauthorized")
        assert refused.headers["www-authenticate"].startswith("Bearer")


def test_an_expired_key_is_refused(api: Api) -> None:
    then = datetime.now(UTC) - timedelta(seconds=1)
    expired = ApiKey(id="expired", name="late", role=Role.ADMIN, created_at=then, expires_at=then)
    api.store.create_key(expired, hash_of("secret"))
    refused = api.request("GET", "/tunings", None, headers={"Authorization": "Bearer secret"})
    assert_problem(refused, 401, "unauthorized", "expired")


def test_a_revoked_key_is_refused_at_once(api: Api) -> None:
    made = api.request("POST", "/keys", json={"name": "guest", "role": "read", "expires_days": 1})
    assert made.status_code == 201
    shown = {"Authorization": f"Bearer {made.json()['secret']}"}
    assert api.request("GET", "/tunings", None, headers=shown).status_code == 200
    revoked = api.request("DELETE", f"/keys/{made.json()['key']['id']}")
    assert ApiKey.from_data(revoked.json()).revoked_at is not None
    assert_problem(api.request("GET", "/tunings", None, headers=shown), 401, "unauthorized", "revoked")
    assert_problem(api.request("DELETE", "/keys/nobody"), 404, "not-found", "nobody")


def test_a_secret_is_shown_once_and_stored_nowhere(api: Api) -> None:
    made = api.request("POST", "/keys", json={"name": "guest", "role": "read"}).json()
    assert made["secret"] not in api.request("GET", "/keys").text
    assert api.store.keys_of([hash_of(made["secret"])]) == {hash_of(made["secret"]): ApiKey.from_data(made["key"])}
    again = api.request("POST", "/keys", json={"name": "guest", "role": "admin"})
    assert_problem(again, 409, "conflict", "guest")


@pytest.mark.parametrize("open_locally", [False, True])
def test_the_first_key_never_comes_over_the_network(start_api: StartApi, open_locally: bool) -> None:
    """Nor does anything else that is an admin's; what a proxy passes on may look as if this machine asked."""
    api = start_api(open_locally=open_locally)
    for route in (each for each in ROUTES if ROLES[each] is Role.ADMIN):
        body = {"json": {"name": "me", "role": "admin"}} if route.startswith("POST") else {}
        refused = api.request(route.split()[0], path_of(route), None, **body)
        assert_problem(refused, 403 if open_locally else 401, "forbidden" if open_locally else "unauthorized")
    assert api.store.keys() == []
    assert api.request("GET", "/tunings", None).status_code == (200 if open_locally else 401)


def test_a_machine_that_is_open_stays_so_when_there_are_keys(start_api: StartApi) -> None:
    api = start_api(open_locally=True)
    assert api.request("GET", "/keys").status_code == 200  # with one
    path = api.request("POST", "/tunings", None, json=TINY).headers["location"]
    assert api.request("DELETE", path, None).json()["state"] == "cancelled"
    assert api.store.tuning(path.rpartition("/")[2]).principal == "local"


def test_nobody_gets_a_key_of_the_name_of_those_without_one(api: Api) -> None:
    refused = api.request("POST", "/keys", json={"name": "local", "role": "submit"})
    assert_problem(refused, 422, "input", "name", "local")


def test_what_comes_through_a_proxy_or_another_name_needs_a_key(start_api: StartApi) -> None:
    api = start_api(open_locally=True)
    for name, value in (("Host", "evil.example"), ("X-Forwarded-For", "127.0.0.1"), ("Forwarded", "for=1.2.3.4")):
        assert_problem(api.request("GET", "/tunings", None, headers={name: value}), 401, "unauthorized")


def test_a_key_that_nobody_knows_is_refused_where_none_is_needed(start_api: StartApi) -> None:
    refused = start_api(open_locally=True).request("GET", "/tunings", None, headers={"Authorization": "Bearer x"})
    assert_problem(refused, 401, "unauthorized")


def test_a_page_in_a_browser_on_this_machine_is_nobody(start_api: StartApi) -> None:
    api = start_api(open_locally=True)
    assert api.request("POST", "/tunings", None, json=TINY).status_code == 201
    for headers in ({"Origin": "http://elsewhere.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = api.request("POST", "/tunings", None, headers=headers, json=TINY)
        assert_problem(refused, 401, "unauthorized")


def test_each_principal_has_a_rate_of_his_own(start_api: StartApi) -> None:
    api = start_api(rate="3/hour")
    assert [api.request("GET", "/tunings", Role.READ).status_code for _ in range(3)] == [200, 200, 200]
    refused = api.request("GET", "/tunings", Role.READ)
    assert_problem(refused, 429, "too-many-requests", "3 per 1 hour")
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    assert api.request("GET", "/tunings", Role.SUBMIT).status_code == 200


def test_guessing_keys_is_limited_too(start_api: StartApi) -> None:
    api = start_api(rate="2/hour")
    statuses = [
        api.request("GET", "/tunings", None, headers={"Authorization": f"Bearer {i}"}).status_code for i in "abc"
    ]
    assert statuses == [401, 401, 429]
    assert api.request("GET", "/tunings", Role.READ).status_code == 200


def test_what_needs_no_key_has_a_rate_by_address(start_api: StartApi) -> None:
    api = start_api(rate="2/hour")
    for path in ("/healthz", "/openapi.json"):
        assert api.request("GET", path, None).status_code == 200
    refused = api.request("GET", "/healthz", None)
    assert_problem(refused, 429, "too-many-requests", "2 per 1 hour")
    assert int(refused.headers["retry-after"]) > 0
    assert api.request("GET", "/tunings", Role.READ).status_code == 200


def test_a_name_that_nobody_can_see_gets_no_key(api: Api) -> None:
    for name in (" ", "\u2003 \u00a0", ""):
        refused = api.request("POST", "/keys", json={"name": name, "role": "read"})
        assert_problem(refused, 422, "input", "name")
    assert api.request("POST", "/keys", json={"name": " a ", "role": "read"}).status_code == 201


def test_every_answer_carries_the_headers_that_browsers_obey(api: Api) -> None:
    for answer in (
        api.request("GET", "/tunings"),
        api.request("GET", "/nothing"),
        api.request("GET", "/healthz", None),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_key_made_elsewhere_is_known(api: Api) -> None:
    made = create_key(api.store, "elsewhere", "read", expires_days=1)
    answer = api.request("GET", "/tunings", None, headers={"Authorization": f"bearer {made.secret}"})
    assert answer.status_code == 200
