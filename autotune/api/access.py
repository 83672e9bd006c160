"""The gate: who asks (bearer keys), what he may do (the role that each route needs), and how often (rate limit).

Keys are made by the command line, by whoever may write to the database, and then by an admin's key: the first one never
comes over the network. An API that was opened to its machine by name (`autotune serve --open-to-this-machine`) takes
requests without a key as the principal `local`, whose role is submit. It cannot tell who on this machine asks, nor that
a proxy passes on what comes from elsewhere where that leaves no trace of it in the request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from limits import RateLimitItem, RateLimitItemPerSecond, parse
from limits.aio.storage import MemoryStorage  # the other kind starts a thread every hundredth of a second
from limits.aio.strategies import FixedWindowRateLimiter
from starlette.exceptions import HTTPException

from autotune.api.connections import origin_of
from autotune.api.requests import JsonRequest
from autotune.api.sharing import Combiner, Shared
from autotune.errors import InputError
from autotune.fleet.keys import LOCAL, hash_of, refusal
from autotune.ports.fleet import FleetStore
from autotune.specs import ApiKey, Role

ROLES: Mapping[str, Role | None] = {
    # None: nobody is asked who he is, but each address has a rate. These tell nothing about anybody's work.
    "GET /healthz": None,
    "GET /livez": None,
    "GET /openapi.json": None,
    "GET /metrics": Role.READ,
    "GET /tunings": Role.READ,
    "POST /tunings": Role.SUBMIT,
    "GET /tunings/{tuning_id}": Role.READ,
    "DELETE /tunings/{tuning_id}": Role.SUBMIT,
    "GET /tunings/{tuning_id}/trials": Role.READ,
    "GET /tunings/{tuning_id}/events": Role.READ,
    "GET /best": Role.READ,
    "GET /known": Role.READ,
    "GET /plans": Role.READ,
    "GET /models": Role.READ,
    "POST /models": Role.SUBMIT,
    "GET /models/{name:path}": Role.READ,
    "GET /clusters": Role.READ,
    "POST /clusters": Role.SUBMIT,
    "GET /clusters/{name:path}": Role.READ,
    "GET /measurements": Role.READ,
    "GET /nodes": Role.READ,
    "GET /nodes/{name}": Role.READ,
    "DELETE /nodes/{name}": Role.ADMIN,
    "POST /nodes/{name}/quarantine": Role.ADMIN,
    "POST /nodes/{name}/release": Role.ADMIN,
    "GET /jobs": Role.ADMIN,
    "GET /keys": Role.ADMIN,
    "POST /keys": Role.ADMIN,
    "DELETE /keys/{key_id}": Role.ADMIN,
}
"""Each role may do what those before it may: read, submit, admin."""

STRANGERS = 20
"""Requests a second from one address that no route takes, or with a key that nobody knows; or a fifth of the rate where
that is more. Nobody means to send many of them, and the whole of a minute's rate at once would hold all others up."""

UNCOUNTED = "/livez"
"""Costs nothing, and whoever restarts an API that does not answer may have the address of others."""

TRUST_S = 2.0
"""How long a valid key is accepted without asking the database again. A revoked one may still work that long."""

TRUSTED_BYTES = 8 * 2**20
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="autotune"'}
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks: the name of a key, or `local`."""

    name: str
    role: Role

    @property
    def is_admin(self) -> bool:
        """Whether everything here is this one's to change."""
        return self.role.includes(Role.ADMIN)


class Gate:
    """Lets requests in.

    Args:
        store: has the keys.
        open_locally: the API is bound to loopback, and was opened to all who use this machine.
        rate: requests of one principal, or of one address without a key, as `limits` writes it: "3000/minute".
    """

    def __init__(self, store: FleetStore, *, open_locally: bool, rate: str) -> None:
        self._store, self._open_locally = store, open_locally
        self._rate, self._limiter = read_rate(rate), FixedWindowRateLimiter(MemoryStorage())
        fifth = self._rate.amount // (5 * self._rate.get_expiry())
        self._burst = RateLimitItemPerSecond(max(STRANGERS, fifth))
        self._keys = Shared(TRUSTED_BYTES, TRUST_S / 2)  # up to twice as old while it is asked for again
        self._lookups = Combiner(self._look_up)

    async def admit(self, request: Request, role: Role) -> Principal:
        """The principal of a request. Raises HTTPException 401, 403 or 429."""
        try:
            principal = await self._principal(request)
        except HTTPException:
            await self._count(f"unknown at {_address(request)}", self._burst, self._rate)
            raise
        await self._count(f"principal {principal.name}", self._rate)
        if not principal.role.includes(role):
            raise HTTPException(
                403, f"this needs the role {role.value}, and {principal.name} has {principal.role.value}"
            )
        return principal

    async def admit_anybody(self, request: Request) -> None:
        """Counts a request that needs no key by its address, apart from those whose key was refused. Raises 429."""
        await self._count(f"anybody at {_address(request)}", self._rate)

    async def admit_stray(self, request: Request) -> None:
        """Counts a request that no route takes, by its address. Raises HTTPException 429."""
        await self._count(f"nothing at {_address(request)}", self._burst, self._rate)

    def forget(self) -> None:
        """Asks the database again for every key: one was made or revoked here."""
        self._keys.forget()

    async def _principal(self, request: Request) -> Principal:
        header = request.headers.get("authorization")
        if header is None:
            if self._open_locally and _is_direct(request):
                return Principal(name=LOCAL, role=Role.SUBMIT)
            raise HTTPException(401, "an API key is needed: Authorization: Bearer KEY", CHALLENGE)
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise HTTPException(401, "give the API key as Authorization: Bearer KEY", CHALLENGE)
        secret_hash = hash_of(secret.strip())
        key: ApiKey | None = await self._keys.get(secret_hash, lambda: self._lookups.ask(secret_hash))
        reason = refusal(key, datetime.now(UTC))
        if key is None or reason:
            raise HTTPException(
                401, reason, {"WWW-Authenticate": CHALLENGE["WWW-Authenticate"] + ', error="invalid_token"'}
            )
        return Principal(name=key.name, role=key.role)

    def _look_up(self, secret_hashes: Sequence[str]) -> Sequence[ApiKey | None]:
        found = self._store.keys_of(set(secret_hashes))
        return [found.get(each) for each in secret_hashes]

    async def _count(self, who: str, *rates: RateLimitItem) -> None:
        for rate in rates:
            if not await self._limiter.hit(rate, who):
                stats = await self._limiter.get_window_stats(rate, who)
                wait_s = max(1, math.ceil(stats.reset_time - time.time()))
                raise HTTPException(429, f"more than {rate}: wait {wait_s} s", {"Retry-After": str(wait_s)})


class GuardedRoute(APIRoute):
    """A route that asks for its role before it reads the body. One that is not in ROLES cannot be made."""

    def get_route_handler(self) -> Handler:
        """FastAPI's handler behind the gate."""
        handle, role = super().get_route_handler(), ROLES[f"{' '.join(self.methods or ())} {self.path}"]

        async def guarded(request: Request) -> Response:
            gate: Gate = request.app.state.parts.gate
            if role is None and self.path != UNCOUNTED:
                await gate.admit_anybody(request)
            if role is not None:
                request.state.principal = await gate.admit(request, role)
            return await handle(JsonRequest(request.scope, request.receive))

        return guarded


def read_rate(text: str) -> RateLimitItem:
    """A rate like 3000/minute. Raises InputError."""
    try:
        return parse(text)
    except ValueError:
        raise InputError("--rate-limit", text, "write it as 3000/minute or 50/second") from None


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _address(request: Request) -> str:
    return origin_of(request.client.host) if request.client else "none"


def _is_direct(request: Request) -> bool:
    """Whether the request comes from a program on this machine.

    A proxy would forward requests from anywhere; a page whose name was rebound to 127.0.0.1 is recognised by Host, any
    other page by Origin or Sec-Fetch-Site, which browsers send and pages cannot change.
    """
    client, host = request.client, request.url.hostname
    direct = client is not None and is_loopback(client.host) and host is not None and is_loopback(host)
    by_a_page = "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none"
    return direct and not by_a_page and not any(name in request.headers for name in FORWARDING)
