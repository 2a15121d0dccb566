"""Sends calls of operations to a service, repeats what may be repeated, and checks the signatures.

A call goes to the agent API, with a token to /rpc. It is written once: a repetition has the same
bytes and the same idempotency key, so it finds what the first one may have done.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from aiohttp import ClientSession
from yarl import URL

from rpcsvc import verify
from rpcsvc.client.endpoint import LARGEST_ANSWER
from rpcsvc.client.errors import ClientError, RateLimited, Refused, Unreachable, Unverified, refusal
from rpcsvc.client.messages import (
    ForeignAnswer,
    Json,
    call_of,
    headers_of,
    read_answer,
    read_envelope,
    written,
)
from rpcsvc.http_client import HttpReply, HttpRequest, NoReply, NotReached, exchange

T = TypeVar("T")

API_ROOT: Final = "/api/v1"
KEY: Final = "idempotency-key"
CALL_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 10.0


class Route(NamedTuple):
    """An operation over HTTP. ``repeatable``: a second call does no more than the first."""

    method: str
    path: str
    repeatable: bool = True


ROUTES: Final[Mapping[str, Route]] = {
    "capabilities": Route("GET", "/agent/capabilities"),
    "swap.plan": Route("POST", "/agent/swap/plan"),
    "swap.quote": Route("POST", "/agent/swap/quote"),
    "swap.create": Route("POST", "/agent/swap/create"),  # by its key
    "swap.execute": Route("POST", "/agent/swap/execute"),  # by its key
    "swap.status": Route("GET", "/agent/swap/status/{orderId}"),
    "swap.cancel": Route("POST", "/agent/swap/cancel/{orderId}"),
    "swap.events": Route("GET", "/agent/swap/events/{orderId}"),
    "swap.list": Route("GET", "/agent/swap/list"),
    "swap.webhookDeliveries": Route("GET", "/agent/swap/webhook-deliveries/{orderId}"),
    "swap.check": Route("POST", "/agent/swap/check/{orderId}"),
    "swap.fund": Route("POST", "/agent/swap/fund/{orderId}"),  # by its authorization
    "swap.refundAddress": Route("POST", "/agent/swap/refund-address/{orderId}"),
    "support.create": Route("POST", "/agent/support/tickets", repeatable=False),
    "sandbox.fund": Route("POST", "/sandbox/fund", repeatable=False),
    "sandbox.fault": Route("POST", "/sandbox/fault", repeatable=False),
}


@dataclass(frozen=True, slots=True)
class Retries:
    """How a call is repeated: so many times in all, with pauses that double, in seconds.

    A ``Retry-After`` that is longer than ``longest`` is left to the caller.
    """

    attempts: int = 5
    first: float = 0.5
    longest: float = 30.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    draw: Callable[[], float] = random.random

    def pause(self, attempt: int, error: ClientError) -> float | None:
        """How long to wait after the attempt (from 1) that failed; None: give up."""
        if attempt >= self.attempts:
            return None
        asked = error.retry_after if isinstance(error, Refused) else None
        if asked is None:
            doubled: float = min(self.first * 2 ** (attempt - 1), self.longest)
            return doubled * (0.5 + self.draw() / 2)
        return asked if asked <= self.longest else None


@dataclass(slots=True)
class Trust:
    """Whose signatures count. ``kid``: of this key only; else of the keys in ``jwks``.

    Keys that are not given are fetched from the service, and fetched again for a new one.
    """

    slug: str = "service"
    kid: str | None = None
    jwks: Json | None = None
    is_on: bool = True
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


class Sent(NamedTuple):
    """One call as it is sent. ``target``: path and query."""

    operation: str
    method: str
    target: str
    body: bytes | None
    headers: Mapping[str, str]
    seconds: float
    repeatable: bool


class Transport:
    """Calls to the service at a root URL. With a ``token`` they go to /rpc."""

    def __init__(
        self, session: ClientSession, root: str, token: str | None, trust: Trust, retries: Retries
    ) -> None:
        self.session = session
        self.root = root
        self._token = token
        self._trust = trust
        self.retries = retries

    async def call(
        self, operation: str, params: Json, *, key: str | None = None, seconds: float = CALL_SECONDS
    ) -> Json:
        """The envelope of a call that was done. Raises Refused, Unreachable and Unverified."""
        sent = self._written(operation, params, key, seconds)
        attempt, may_be_done = 0, False
        while True:
            attempt += 1
            try:
                await self._know_keys()
                return await self._once(sent)
            except (Refused, Unreachable) as error:
                pause = self.retries.pause(attempt, error) if _may_repeat(sent, error) else None
                if isinstance(error, Unreachable):
                    error.may_be_done = may_be_done = may_be_done or error.may_be_done
                if pause is None:
                    raise
            await self.retries.sleep(pause)

    def _written(self, operation: str, params: Json, key: str | None, seconds: float) -> Sent:
        route = ROUTES.get(operation)
        if route is None:
            raise ValueError(f"There is no operation {operation!r} here, but {', '.join(ROUTES)}.")
        headers = headers_of(None, self._token, None)
        if self._token is not None:
            given = params if key is None else {**params, KEY: key}
            body = call_of(f"{self._trust.slug}.{operation}", given)
            return Sent(operation, "POST", "/rpc", body, headers, seconds, route.repeatable)
        path, rest = in_path(route.path, params)
        if key is not None:
            headers[KEY] = key
        if route.method == "GET":
            query = f"?{urlencode(rest)}" if rest else ""
            return Sent(
                operation, "GET", f"{API_ROOT}{path}{query}", None, {}, seconds, route.repeatable
            )
        return Sent(
            operation,
            route.method,
            API_ROOT + path,
            written(rest),
            headers,
            seconds,
            route.repeatable,
        )

    async def _once(self, sent: Sent) -> Json:
        request_id = uuid.uuid4().hex
        headers = {**sent.headers, "x-request-id": request_id}
        reply, target = await self._exchanged(sent._replace(headers=headers))
        try:
            if target.endswith("/rpc"):
                envelope = read_answer(reply.body, sent.operation, request_id, None)
            else:
                envelope = read_envelope(reply.body)
        except ForeignAnswer as error:
            raise Unreachable(
                f"What answers at {self.root} (HTTP {reply.status}) is not this service.",
                may_be_done=True,
            ) from error
        await self._verify(sent, target, reply)
        if self._trust.is_on and envelope.get("requestId") != request_id:
            raise Unverified(verify.TooOld("The answer is to another request."))
        if envelope["ok"]:
            return envelope
        raise refusal(envelope, _seconds(reply.headers.get("retry-after")))

    async def _exchanged(self, sent: Sent) -> tuple[HttpReply, str]:
        """The reply, and the target as it was sent."""
        url = self.root + sent.target
        request = HttpRequest(
            sent.method,
            url,
            sent.seconds,
            LARGEST_ANSWER,
            sent.body,
            sent.headers,
            _CONNECT_SECONDS,
        )
        try:
            return await exchange(self.session, request), URL(url).raw_path_qs
        except NoReply as error:
            raise Unreachable(
                f"No answer from {self.root}: {error}.",
                may_be_done=not isinstance(error, NotReached),
            ) from error

    async def _verify(self, sent: Sent, target: str, reply: HttpReply) -> None:
        """Raise Unverified unless the issuer signed this answer to this request, just now."""
        trust = self._trust
        if not trust.is_on:
            return
        asked = sent.body or b""
        try:
            made = verify.Exchange(
                method=sent.method,
                target=target,
                request_body=asked,
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
        """Have keys before anything is sent: a call that can't be verified is not made."""
        if not self._trust.is_on or self._trust.jwks is not None:
            return
        try:
            self._trust.jwks = await self._fetched_keys()
        except Unreachable as error:
            raise Unreachable(str(error), may_be_done=False) from error
        except verify.VerificationError as error:
            raise Unverified(error) from error

    async def with_keys(self, check: Callable[[Json], T]) -> T:
        """The result of a check with the issuer's keys, made once more if a new one was fetched.

        Raises what the check raises, BadJwks, and Unreachable: the call may have been carried out.
        """
        try:
            return check(self._trust.jwks or {"keys": []})
        except verify.UnknownKey:  # the issuer may have a new one
            try:
                fresh = await self._fetched_keys()
            except Unreachable as error:
                raise Unreachable(str(error), may_be_done=True) from error
            found = check(fresh)
            self._trust.jwks = fresh
            return found

    async def _fetched_keys(self) -> Json:
        sent = Sent("", "GET", verify.JWKS_PATH, None, {}, CALL_SECONDS, repeatable=True)
        reply, _ = await self._exchanged(sent)
        try:
            keys = json.loads(reply.body)
        except (ValueError, RecursionError):
            keys = None
        if reply.status != 200 or not isinstance(keys, dict):
            raise verify.BadJwks(f"There is no key set at {self.root}{verify.JWKS_PATH}.")
        return keys


def in_path(path: str, params: Json) -> tuple[str, Json]:
    """The path with its params in it, and the other params."""
    rest = dict(params)
    for name in [name for name in params if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", quote(str(rest.pop(name)), safe=""))
    return path, rest


def _may_repeat(sent: Sent, error: Refused | Unreachable) -> bool:
    if isinstance(error, Unreachable):
        return sent.repeatable or not error.may_be_done
    return error.retryable and (sent.repeatable or isinstance(error, RateLimited))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
