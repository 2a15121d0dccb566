"""Health endpoints: /health, /livez, /readyz, and those of the agent API and the BFF.

/health reports every check to the operator. The others report to clients whether an order can be
taken now: a payment stuck on one chain, or an upstream order in doubt, does not change them.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from aiohttp import web
from msgspec.structs import asdict

from rpcsvc import __version__
from rpcsvc.clock import iso8601
from rpcsvc.domain.order import AgentState
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.http.gate import CALLER, Gate
from rpcsvc.http.messages import OPERATION, error_headers, respond
from rpcsvc.http.site import API_ROOT, BFF_ROOT
from rpcsvc.operations.bff_models import BffHealth
from rpcsvc.operations.dispatch import failure, finish, head
from rpcsvc.operations.models import Result
from rpcsvc.operations.service import Answer, Service
from rpcsvc.orders.scheduler.worker import Worker
from rpcsvc.signing import ResponseSigner
from rpcsvc.store.database import Database
from rpcsvc.strict_json import dumps

_AGENT_HEALTH = "health"

# The reason names paths, so only the log has it.
_KEYS_UNREADABLE = "The signing keys can't be read again; see signing_keys_unreadable in the log."


class HealthRoutes:
    """The health endpoints. Each check reads memory or one row."""

    def __init__(
        self,
        gate: Gate,
        service: Service,
        worker: Worker,
        database: Database,
        signer: ResponseSigner | None,
    ) -> None:
        self._gate = gate
        self._service = service
        self._worker = worker
        self._database = database
        self._signer = signer

    def routes(self) -> list[web.RouteDef]:
        """All health routes."""
        return [
            web.get("/health", self.health),
            web.get("/livez", self.livez),
            web.get("/readyz", self.readyz),
            web.get("/readyz/reads", self.ready_for_reads),
            web.get(f"{API_ROOT}/health", self.agent_health),
            web.get(f"{BFF_ROOT}/health", self.bff_health),
        ]

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Answer with every check by name; 503 if one fails.

        The reasons name orders and balances: only callers that may use /rpc get them.
        """
        venue = self._service.venue
        request[CALLER] = caller = self._gate.admit(request)
        is_insider = self._gate.is_insider(request, caller)
        checks = await self.checks()
        body = {**asdict(self._summary(checks)), "engine": venue.profile.engine, "checks": {
            name: {"status": _word(h), **({"detail": h.detail} if h.detail and is_insider else {})}
            for name, h in checks.items()
        }}  # fmt: skip
        return self._respond(request, orjson.dumps(body), checks)

    async def livez(self, request: web.Request) -> web.StreamResponse:
        """Answer while the process is up and its event loop runs."""
        return self._respond(request, b'{"status":"ok"}', {})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        """Answer whether orders can be taken."""
        checks = await self.readiness()
        return self._respond(request, orjson.dumps({"status": _overall(checks)}), checks)

    async def ready_for_reads(self, request: web.Request) -> web.StreamResponse:
        """Answer whether orders can be read, which a standby can as well."""
        checks = {"store": self._database.health()}
        return self._respond(request, orjson.dumps({"status": _overall(checks)}), checks)

    async def agent_health(self, request: web.Request) -> web.StreamResponse:
        """The envelope with status, version and time beside it."""
        request[OPERATION] = _AGENT_HEALTH
        checks = await self.readiness()
        request_id = self._gate.admit(request).request_id
        data = Result(*self._service.views.common())
        error = _unhealthy(checks)
        if error is None:
            envelope = finish(head(_AGENT_HEALTH, Answer(AgentState.READY, data)), request_id)
        else:
            envelope = failure(_AGENT_HEALTH, error, request_id, data)
        body = envelope[:-1] + b"," + dumps(self._summary(checks))[1:]
        status = 200 if error is None else error.http_status
        return respond(body, request_id, status=status, headers=error_headers(error))

    async def bff_health(self, request: web.Request) -> web.StreamResponse:
        """Status, version and time, nothing else (spec 2.4)."""
        checks = await self.readiness()
        return self._respond(request, dumps(self._summary(checks)), checks)

    async def checks(self) -> dict[str, Health]:
        """Return each check by name, for the operator."""
        venue = self._service.venue
        return {**self._own(await venue.health()), **await venue.progress(), **self._signing()}

    def _signing(self) -> dict[str, Health]:
        """Return the health of signing. Orders are taken without it, with the last keys read."""
        if self._signer is None:
            return {}
        problem = self._signer.problem
        return {"signing": Health(problem is None, problem and _KEYS_UNREADABLE)}

    def _own(self, venue: Mapping[str, Health]) -> dict[str, Health]:
        """The checks of the store, the venue and the worker."""
        return {"store": self._database.health(), **venue, "worker": self._worker.health()}

    async def readiness(self) -> dict[str, Health]:
        """The checks that new orders depend on."""
        return self._own(await self._service.venue.readiness())

    def _summary(self, checks: dict[str, Health]) -> BffHealth:
        return BffHealth(_overall(checks), __version__, iso8601(self._service.clock.now_ms()))

    def _respond(
        self, request: web.Request, body: bytes, checks: dict[str, Health]
    ) -> web.StreamResponse:
        context = self._gate.admit(request)
        status = 200 if all(h.ok for h in checks.values()) else 503
        request_id = context.request_id or self._gate.new_request_id()
        return respond(body, request_id, status=status)


def _unhealthy(checks: dict[str, Health]) -> Unavailable | None:
    """The reason why no orders are taken, for clients; None if they are."""
    names = [name for name, health in checks.items() if not health.ok]
    if not names:
        return None
    return Unavailable(
        f"Orders can't be taken now. Not well: {', '.join(names)}. Ask again later.",
        details={"checks": names},
    )


def _word(health: Health) -> str:
    return "ok" if health.ok else "degraded"


def _overall(checks: dict[str, Health]) -> str:
    return "ok" if all(h.ok for h in checks.values()) else "degraded"
