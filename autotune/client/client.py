"""Client: the HTTP API as methods. Errors of the server come back as the exceptions that the library would raise."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx

from autotune.errors import (
    AccessError,
    InputError,
    MissingMeasurementError,
    NothingFitsError,
    ServerError,
    StoreConflictError,
)
from autotune.settings import API_KEY_VARIABLE
from autotune.specs import (
    Budget,
    ClusterSpec,
    ModelSpec,
    SamplerName,
    Space,
    TuningEvent,
    TuningState,
)

TIMEOUT_S = 30.0
STREAM_SILENCE_S = 60.0
"""The server sends a comment every 15 s: silence this long is a lost connection."""

RETRY_S, MAX_RETRY_S = 0.5, 15.0
DEFAULT_GIVE_UP_S = 300.0

Data = dict[str, Any]


class Client:
    """A connection to one server. Close it, or use it as a context manager. Not for several threads at once.

    Args:
        url: of the server, as http://HOST:PORT.
        api_key: shown with every request; empty where the server asks for none.

    Raises (all methods):
        InputError: the server says what of the request cannot be used.
        NothingFitsError: no legal plan is estimated to fit.
        ServerError: it cannot be reached, refuses the key, or fails.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError("--server", url, "an address as http://HOST:PORT")
        if not api_key.isascii():
            raise InputError(API_KEY_VARIABLE, "letters beyond ASCII", "a key as `autotune keys create` prints it")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/")
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=TIMEOUT_S)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InputError("--server", url, f"an address as http://HOST:PORT ({error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._http.close()

    # -- tunings ------------------------------------------------------------------------------------------

    def submit(
        self,
        model: str | ModelSpec,
        cluster: str | ClusterSpec,
        *,
        nodes: int | None = None,
        workload: Data | None = None,
        space: Space = Space(),
        budget: Budget | None = None,
        seed: int = 0,
        cold: bool = False,
        sampler: SamplerName = SamplerName.PLAN,
        command: str | None = None,
        idempotency_key: str | None = None,
    ) -> Data:
        """Asks for a tuning: `tuning` (its id), `created` (false where it joined one that asks for the same), `state`.

        Sent again after a lost answer, with the same idempotency key, it makes no second tuning. One is made up if none
        is given, so that the retries of this call are safe.
        """
        body: Data = {
            "model": model if isinstance(model, str) else model.to_data(),
            "cluster": cluster if isinstance(cluster, str) else cluster.to_data(),
            "nodes": nodes,
            "workload": workload or {},
            "space": space.to_data(),
            "seed": seed,
            "cold": cold,
            "sampler": sampler.value,
        }
        if command is not None:
            body["command"] = command
        if budget is not None:
            body["budget"] = budget.to_data()
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._request("POST", "/tunings", body=body, headers=headers)

    def tuning(self, tuning_id: str) -> Data:
        """One tuning: its request, state, trials, best plan and explanation."""
        return self._request("GET", f"/tunings/{_segment(tuning_id)}")

    def tunings(
        self, *, limit: int = 50, state: TuningState | None = None, principal: str | None = None
    ) -> Iterator[Data]:
        """Tunings, newest first, `limit` at most."""
        query = {"state": state.value if state else None, "principal": principal}
        yield from self._pages("/tunings", "tunings", query, limit)

    def cancel(self, tuning_id: str, *, force: bool = False) -> Data:
        """Takes back a request; `state` says whether that ended the tuning, which others may want still."""
        return self._request("DELETE", f"/tunings/{_segment(tuning_id)}", query={"force": str(force).lower()})

    def events(self, tuning_id: str, *, after: int = 0, give_up_s: float = DEFAULT_GIVE_UP_S) -> Iterator[TuningEvent]:
        """The tuning's log as it is written, until it has ended; goes on after a lost connection, missing nothing.

        Args:
            tuning_id: which.
            after: the last event that was seen.
            give_up_s: seconds without any connection after which ServerError is raised.
        """
        wait_s, lost_at = RETRY_S, None
        while True:
            try:
                for event in self._stream(tuning_id, after):
                    after, wait_s, lost_at = event.id, RETRY_S, None
                    yield event
                if self.tuning_ended(tuning_id):
                    return
            except AccessError:
                raise
            except ServerError:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > give_up_s:
                    raise
                time.sleep(wait_s)
                wait_s = min(2.0 * wait_s, MAX_RETRY_S)

    def tuning_ended(self, tuning_id: str) -> bool:
        """Whether nothing more will happen."""
        return TuningState(self.tuning(tuning_id)["state"]).ended

    def _stream(self, tuning_id: str, after: int) -> Iterator[TuningEvent]:
        path = f"/tunings/{_segment(tuning_id)}/events"
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(TIMEOUT_S, read=STREAM_SILENCE_S)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    raise_problem(response)
                for data in server_sent(response.iter_lines()):
                    yield TuningEvent.from_json(data)
        except httpx.HTTPError as error:
            raise ServerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from None

    # -- plans --------------------------------------------------------------------------------------------

    def best(self, **query: str | int | None) -> Data:
        """GET /best: of a tuning, or what is known for a model, cluster and workload."""
        return self._request("GET", "/best", query=query)

    def known(self, *, limit: int = 50, before: int | None = None, **query: str | int | bool | None) -> Iterator[Data]:
        """Best-known entries, newest first, `limit` at most: those older than the entry `before`."""
        yield from self._pages("/known", "entries", {**query, "after": before}, limit)

    def plans(self, **query: object) -> Data:
        """GET /plans: the ranking by estimate."""
        return self._request("GET", "/plans", query=query)

    # -- inputs and fleet ---------------------------------------------------------------------------------

    def models(self) -> Iterator[Data]:
        """Presets and stored models."""
        yield from self._pages("/models", "models", {}, None)

    def put_model(self, model: ModelSpec) -> Data:
        """Stores a model."""
        return self._request("POST", "/models", body=model.to_data())

    def clusters(self) -> Iterator[Data]:
        """Stored clusters."""
        yield from self._pages("/clusters", "clusters", {}, None)

    def put_cluster(self, cluster: ClusterSpec) -> Data:
        """Stores a cluster."""
        return self._request("POST", "/clusters", body=cluster.to_data())

    def nodes(self, pool: str | None = None) -> Iterator[Data]:
        """Registered nodes: state and why, the job that holds each, when it was last heard of."""
        yield from self._pages("/nodes", "nodes", {"pool": pool}, None)

    def node(self, name: str) -> Data:
        """One node with its incidents."""
        return self._request("GET", f"/nodes/{_segment(name)}")

    def quarantine(self, name: str, reason: str) -> Data:
        """Gives a node no more jobs. Needs the role admin."""
        return self._request("POST", f"/nodes/{_segment(name)}/quarantine", body={"reason": reason})

    def release(self, name: str) -> Data:
        """Lets a node get jobs again. Needs the role admin."""
        return self._request("POST", f"/nodes/{_segment(name)}/release")

    def forget(self, name: str) -> Data:
        """Takes a dead node out of the list; what it measured stays. Needs the role admin."""
        return self._request("DELETE", f"/nodes/{_segment(name)}")

    def measurements(self, kind: str, *, limit: int = 100, **query: str | None) -> Iterator[Data]:
        """Measurements of a kind (collective, layer, step) with their provenance, oldest first."""
        yield from self._pages("/measurements", "measurements", {"kind": kind, **query}, limit)

    def health(self) -> Data:
        """Whether the server can do its work."""
        return self._request("GET", "/healthz")

    # -- requests -----------------------------------------------------------------------------------------

    def _pages(self, path: str, name: str, query: Data, limit: int | None) -> Iterator[Data]:
        """The items of all pages, `limit` at most."""
        left = limit
        page_size = {"limit": min(left, 100)} if left is not None else {}
        page = self._request("GET", path, query={**query, **page_size})
        while True:
            for item in page[name]:
                if left is not None and left <= 0:
                    return
                left = None if left is None else left - 1
                yield item
            if not page["next"] or left == 0:
                return
            page = self._request("GET", page["next"])

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Data | None = None,
        body: Data | None = None,
        headers: Data | None = None,
    ) -> Data:
        """One request; a safe one is tried again where the connection was lost or the server is busy."""
        parameters = {name: value for name, value in (query or {}).items() if value is not None} or None
        safe = method in {"GET", "DELETE"} or bool(headers and "Idempotency-Key" in headers)
        for attempt in range(3 if safe else 1):
            if attempt:
                time.sleep(RETRY_S * 2**attempt)
            try:
                response = self._http.request(method, path, params=parameters, json=body, headers=headers)
            except httpx.HTTPError as error:
                reason = f"{self._url} cannot be reached: {error or type(error).__name__}"
                continue
            if response.status_code < 400:
                return _parsed(response)
            if response.status_code not in {502, 503, 504} or attempt == 2 or not safe:
                raise_problem(response)
            reason = f"{self._url} is not available ({response.status_code})"
        raise ServerError(reason)


def _parsed(response: httpx.Response) -> Data:
    try:
        data = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        data = None
    if not isinstance(data, dict):
        raise ServerError(f"{response.url} did not answer with JSON: is it an autotune server?")
    return data


def _segment(text: str) -> str:
    """A name as one segment of a path."""
    from urllib.parse import quote

    if text in {"", ".", ".."}:
        raise InputError("name", text, "at least one character that is not a point")
    return quote(text, safe="")


# Problem documents (RFC 9457) as the exceptions that the library itself would raise.


def raise_problem(response: httpx.Response) -> NoReturn:
    """Raises what an answer of 400 or more says. The response must have been read."""
    data = _document(response)
    detail = str(data.get("detail") or f"{response.url} answered {response.status_code}")
    status = response.status_code
    if status in {401, 403}:
        raise AccessError(f"{detail} (the key comes from $AUTOTUNE_API_KEY)")
    if status == 429 or status >= 500:
        raise ServerError(detail)
    if "misses" in data:
        raise NothingFitsError(detail, data["misses"])
    kind = str(data.get("type", "")).rpartition(":")[2]
    if kind == "missing-measurement":
        raise MissingMeasurementError(detail)
    if "what" in data:
        raise _told(detail, str(data["what"]), data.get("value"), str(data.get("allowed", "")))
    if status == 409:
        raise StoreConflictError(detail)
    raise _told(detail, "request", None, "")


def _told(detail: str, what: str, value: object, allowed: str) -> InputError:
    """An InputError in the server's words."""
    error = InputError(what, value, allowed)
    error.args = (detail,)
    return error


def _document(response: httpx.Response) -> dict[str, Any]:
    if not response.headers.get("content-type", "").startswith("application/problem+json"):
        return {}
    try:
        data = response.json()
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


# Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation).


def server_sent(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event of a stream of lines. Comments, and an event that the stream broke off in, are dropped."""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
