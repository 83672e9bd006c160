"""Who may do what: the role that each route needs, in one table, and the route class that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from autotune.api.parts import parts_of
from autotune.specs import Role

ROLES: Mapping[str, Role | None] = {
    # None: nobody is asked who he is, but each address has a rate. These tell nothing about anybody's work.
    "GET /healthz": None,
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

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class GuardedRoute(APIRoute):
    """A route that asks for its role before it reads the body. One that is not in ROLES cannot be made."""

    @property
    def role(self) -> Role | None:
        """What a principal needs to use it."""
        return role_of(self)

    def get_route_handler(self) -> Handler:
        """FastAPI's handler behind the gate."""
        handle, role = super().get_route_handler(), role_of(self)

        async def guarded(request: Request) -> Response:
            gate = parts_of(request).gate
            if role is None:
                await gate.admit_anybody(request)
            else:
                request.state.principal = await gate.admit(request, role)
            return await handle(request)

        return guarded


def role_of(route: APIRoute) -> Role | None:
    """The role in the table. Raises KeyError for a route that nobody has thought about."""
    method = " ".join(route.methods or ())
    return ROLES[f"{method} {route.path}"]
