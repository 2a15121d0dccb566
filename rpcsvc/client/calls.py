"""Sends calls over any transport, retries those that are safe to repeat, and verifies the answers.

A call goes to the agent API, or to /rpc. A retry has the same bytes and the same idempotency key,
so it can't repeat an effect of the first attempt.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from rpcsvc import verify
from rpcsvc.client.errors import RateLimited, Refused, Unreachable, Unverified, refusal
from rpcsvc.client.transport import (
    CALL_SECONDS,
    Json,
    ServiceReply,
    ServiceRequest,
    Transport,
    UnreadableAnswer,
    call_of,
    headers_of,
    not_this_service,
    read_answer,
    read_envelope,
    read_result,
    request_id_of,
    written,
)

T = TypeVar("T")

API_ROOT: Final = "/api/v1"
RPC_PATH: Final = "/rpc"
KEY: Final = "idempotency-key"


class Route(NamedTuple):
    """An operation over HTTP; without a path only /rpc offers it.

    ``repeatable``: a second call has no further effect; ``by_key``: only if both have a key.
    """

    method: str
    path: str
    repeatable: bool = True
    by_key: bool = False


ROUTES: Final[Mapping[str, Route]] = {
    "capabilities": Route("GET", "/agent/capabilities"),
    "schemas": Route("GET", ""),
    "swap.plan": Route("POST", "/agent/swap/plan"),
    "swap.quote": Route("POST", "/agent/swap/quote"),
    "swap.create": Route("POST", "/agent/swap/create", by_key=True),
    "swap.execute": Route("POST", "/agent/swap/execute", by_key=True),
    "swap.status": Route("GET", "/agent/swap/status/{orderId}"),
    "swap.cancel": Route("POST", "/agent/swap/cancel/{orderId}"),
    "swap.events": Route("GET", "/agent/swap/events/{orderId}"),
    "swap.list": Route("GET", "/agent/swap/list"),
    "swap.webhookDeliveries": Route("GET", "/agent/swap/webhook-deliveries/{orderId}"),
    "swap.check": Route("POST", "/agent/swap/check/{orderId}"),
    "swap.fund": Route("POST", "/agent/swap/fund/{orderId}"),  # identified by its authorization
    "swap.refundAddress": Route("POST", "/agent/swap/refund-address/{orderId}"),
    "support.create": Route("POST", "/agent/support/tickets", repeatable=False),
    "support.get": Route("POST", "/agent/support/tickets/{ticketId}"),
    "sandbox.fund": Route("POST", "/sandbox/fund", repeatable=False),
    "sandbox.fault": Route("POST", "/sandbox/fault", repeatable=False),
}


@dataclass(frozen=True, slots=True)
class Retries:
    """The retries of a call: attempts in all, and pauses in seconds that double."""

    attempts: int = 5
    first: float = 0.5
    longest: float = 30.0
    sleep: Callable[[float], Awaitable[None]] | None = None
    draw: Callable[[], float] = random.random

    def pause(self, attempt: int, error: Exception) -> float | None:
        """The pause after a failed attempt (from 1); None: no more attempts."""
        if attempt >= self.attempts:
            return None
        asked = error.retry_after if isinstance(error, Refused) else None
        if asked is None:
            doubled: float = min(self.first * 2 ** (attempt - 1), self.longest)
            return doubled * (0.5 + self.draw() / 2)
        return asked if asked <= self.longest else None


@dataclass(slots=True)
class Trust:
    """The trusted signing keys. ``kid``: this key only; else the keys in ``jwks``.

    Keys that are not given are fetched from the service once. The current one of them is pinned:
    a new key counts only if the service lists the pinned one beside it, as after a rotation.
    """

    slug: str = "service"
    kid: str | None = None
    jwks: Json | None = None
    is_on: bool = True
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


class _Call(NamedTuple):
    """A call as it is sent, and whether a second one has no further effect."""

    operation: str
    sent: ServiceRequest
    repeatable: bool


class Calls:
    """Calls to a service, over a transport that may suspend or block.

    ``over_rpc``: to /rpc, with the ``token``, else to the agent API. ``network`` is the service's,
    if known; ``local_session`` is used for calls without a session.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        over_rpc: bool,
        trust: Trust,
        retries: Retries,
        token: str | None = None,
        network: str | None = None,
        local_session: str | None = None,
    ) -> None:
        self.transport = transport
        self.retries = retries
        self._over_rpc = over_rpc
        self._trust = trust
        self._token = token
        self._network = network
        self._local_session = local_session

    async def call(
        self,
        operation: str,
        params: Json,
        *,
        key: Any = None,
        request_id: str | None = None,
    ) -> Json:
        """The envelope of a successful call. Raises Refused, Unreachable and Unverified.

        Each attempt has a new request id unless one is given; its answer must have the same id.
        ``waitSec`` extends the timeout by its seconds.
        """
        call = self._written(operation, params, key)
        attempt, may_be_done = 0, False
        while True:
            attempt += 1
            try:
                await self._know_keys()
                return await self._once(call, request_id or self._fresh_id())
            except (Refused, Unreachable) as error:
                pause = self.retries.pause(attempt, error) if _may_repeat(call, error) else None
                if isinstance(error, Unreachable):
                    error.may_be_done = may_be_done = may_be_done or error.may_be_done
                if pause is None:
                    raise
            await self.sleep(pause)

    async def call_method(
        self, method: str, params: Json, *, headers: Mapping[str, str], seconds: float
    ) -> Json:
        """The result of a method without an envelope, called once; or ``{"error": ...}``.

        Raises Unreachable.
        """
        body, all_headers = call_of(method, params), {**headers_of(self._token), **headers}
        reply = await self.transport.exchange(
            ServiceRequest("POST", RPC_PATH, body, all_headers, seconds)
        )
        try:
            return read_result(reply.body)
        except UnreadableAnswer as error:
            raise not_this_service(self.transport.name, RPC_PATH, reply.status) from error

    async def sleep(self, seconds: float) -> None:
        """Sleep between attempts."""
        await (self.retries.sleep or self.transport.sleep)(seconds)

    def _written(self, operation: str, params: Json, key: Any) -> _Call:
        route = ROUTES.get(operation)
        if route is None:
            raise ValueError(f"There is no operation {operation!r} here, but {', '.join(ROUTES)}.")
        repeatable = route.repeatable and (key is not None or not route.by_key)
        headers = headers_of(self._token, self._local_session)
        seconds = CALL_SECONDS + _wait_of(params)
        if self._over_rpc:
            given = params if key is None else {**params, KEY: key}
            body = call_of(f"{self._trust.slug}.{operation}", given)
            return _Call(
                operation, ServiceRequest("POST", RPC_PATH, body, headers, seconds), repeatable
            )
        if not route.path:
            raise ValueError(f"The operation {operation!r} is on /rpc only: give a token.")
        path, rest = in_path(route.path, params)
        if key is not None:
            headers[KEY] = key
        if route.method == "GET":
            target = f"{API_ROOT}{path}?{urlencode(rest)}" if rest else API_ROOT + path
            return _Call(operation, ServiceRequest("GET", target, seconds=seconds), repeatable)
        sent = ServiceRequest(route.method, API_ROOT + path, written(rest), headers, seconds)
        return _Call(operation, sent, repeatable)

    def _fresh_id(self) -> str | None:
        return uuid.uuid4().hex if self._trust.is_on else None

    async def _once(self, call: _Call, request_id: str | None) -> Json:
        headers = {**call.sent.headers, **request_id_of(request_id)}
        sent = replace(call.sent, headers=headers)
        reply = await self.transport.exchange(sent)
        try:
            if self._over_rpc:
                envelope = read_answer(reply.body, call.operation, request_id, self._network)
            else:
                envelope = read_envelope(reply.body)
        except UnreadableAnswer as error:
            what = RPC_PATH if self._over_rpc else "agent API"
            raise not_this_service(self.transport.name, what, reply.status) from error
        await self._verify(sent, reply)
        if self._trust.is_on and envelope.get("requestId") != request_id:
            raise Unverified(verify.TooOld("The answer is to another request."))
        if envelope["ok"]:
            return envelope
        raise refusal(envelope, _seconds(reply.header("retry-after")))

    async def _verify(self, sent: ServiceRequest, reply: ServiceReply) -> None:
        """Raise Unverified unless the issuer signed this answer to this request, just now."""
        trust = self._trust
        if not trust.is_on:
            return
        try:
            made = verify.Exchange(
                method=sent.method,
                target=reply.target,
                request_body=sent.body or b"",
                status=reply.status,
                headers=reply.headers,
                body=reply.body,
            )
            await self.with_keys(
                lambda jwks: verify.verify_response(
                    made, jwks, slug=trust.slug, now=trust.now(), pinned_kid=trust.kid
                )
            )
        except verify.VerificationError as error:
            raise Unverified(error) from error

    async def _know_keys(self) -> None:
        """Fetch the keys before the call: without them its answer could not be verified."""
        if not self._trust.is_on or self._trust.jwks is not None:
            return
        try:
            self._trust.jwks = await self._fetched_keys()
        except Unreachable as error:
            raise Unreachable(str(error), may_be_done=False) from error
        except verify.VerificationError as error:
            raise Unverified(error) from error

    async def with_keys(self, check: Callable[[Json], T]) -> T:
        """The result of a check with the issuer's keys, repeated once if a new key was fetched.

        Raises what the check raises, BadJwks, UnpinnedKey for keys without the pinned one, and
        Unreachable: the call may have been carried out.
        """
        known = self._trust.jwks or {"keys": []}
        try:
            return check(known)
        except verify.UnknownKey:  # the issuer may have a new key
            try:
                fresh = await self._fetched_keys()
            except Unreachable as error:
                raise Unreachable(str(error), may_be_done=True) from error
            pinned = _current_kid(known) if self._trust.kid is None else None
            if pinned is not None and pinned not in _kids(fresh):
                raise verify.UnpinnedKey(
                    f"The service signs with another key and no longer lists {pinned}, which was"
                    " seen first. Ask the operator for the new kid, and make a client with it."
                ) from None
            found = check(fresh)
            self._trust.jwks = fresh
            return found

    async def _fetched_keys(self) -> Json:
        reply = await self.transport.exchange(ServiceRequest("GET", verify.JWKS_PATH))
        try:
            keys = json.loads(reply.body)
        except (ValueError, RecursionError):
            keys = None
        if reply.status != 200 or not isinstance(keys, dict):
            raise verify.BadJwks(f"{self.transport.name} has no key set at {verify.JWKS_PATH}.")
        return keys


def _kids(jwks: Json) -> dict[str, Json]:
    """The keys of a set by kid, in its order; rpcsvc.verify validates them."""
    keys = jwks.get("keys")
    found = [key for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []
    return {key["kid"]: key for key in found if isinstance(key.get("kid"), str)}


def _current_kid(jwks: Json) -> str | None:
    """The kid of the current key: the first of the set that is not retired."""
    return next((kid for kid, key in _kids(jwks).items() if "retiredAt" not in key), None)


def in_path(path: str, params: Json) -> tuple[str, Json]:
    """The path with its params in it, and the other params."""
    rest = dict(params)
    for name in [name for name in params if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", quote(str(rest.pop(name)), safe=""))
    return path, rest


def _wait_of(params: Json) -> int:
    """The seconds that the service may wait; it refuses a ``waitSec`` that is not a number."""
    seconds = params.get("waitSec")
    return max(seconds, 0) if type(seconds) is int else 0


def _may_repeat(call: _Call, error: Refused | Unreachable) -> bool:
    if isinstance(error, Unreachable):
        return call.repeatable or not error.may_be_done
    return error.retryable and (call.repeatable or isinstance(error, RateLimited))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
