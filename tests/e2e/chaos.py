"""Random callers of a service that is killed and restarted under them.

A seed determines what the callers do; when exactly the service is killed depends on timing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import orjson
import pytest

from rpcsvc.domain.addresses import stagenet_subaddress
from tests.e2e.processes import Gone, Server, message, until

SEED: Final = "CHAOS_SEED"
# Destinations of payouts and of refunds. An address whose refund failed is not accepted again.
EVM: Final = ["0x52908400098527886E0F7030069857D2E4169EE7", *("0x" + n * 40 for n in "123")]
MONERO: Final = [stagenet_subaddress(bytes([n]) * 64) for n in range(1, 5)]
TO: Final = {"x2u": EVM, "u2x": MONERO}
BACK: Final = {"x2u": MONERO[1:], "u2x": EVM[1:]}
USDC: Final = {
    42161: "0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
    8453: "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
}
# Worth less than two chunks, and more.
AMOUNTS: Final = {"x2u": [8 * 10**11, 7 * 10**12], "u2x": [150 * 10**6, 1_100 * 10**6]}
_ALARMS: Final = frozenset({"error", "critical"})


@contextmanager
def seeded() -> Iterator[int]:
    """A new seed for each run unless the environment sets one; a failure's note has it."""
    seed = int(os.environ.get(SEED) or time.time_ns() % 1_000_000)
    try:
        yield seed
    except BaseException as error:
        error.add_note(f"{SEED}={seed} draws the same actions again")
        raise


# --- calls -------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A POST; ``headers`` beside those that every call has."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = {}


class Refused(Exception):
    """The service answered with an error; ``code`` is the error's."""

    def __init__(self, code: str, answer: bytes) -> None:
        super().__init__(f"{code}: {answer.decode()}")
        self.code = code


async def ask(at: Server, request: Request) -> bytes:
    """The part of the answer that a replay repeats. Raises Gone and Refused."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{at.url}{request.path}", json=request.body, headers=request.headers
            ) as response,
        ):
            answer = await response.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise Gone from error
    said = json.loads(answer)
    refusal = said.get("error") or said.get("result", {}).get("error")
    if refusal is not None:
        assert refusal["code"] not in ("internal_error", -32603), answer
        raise Refused(refusal["code"], answer)
    return _stable_part(answer)


def _stable_part(answer: bytes) -> bytes:
    """The data of an envelope, byte for byte; the whole of an answer that is none."""
    _, found, rest = answer.partition(b'"data":')
    return rest.rpartition(b',"requestId"')[0] if found else answer


# --- a service that is killed ------------------------------------------------------------------


class KillableService:
    """A service on a data directory, killed and started again, each time at another port."""

    def __init__(self, data_dir: Path, environ: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.crashes = 0
        self.up = asyncio.Event()
        self._environ = environ
        self.server = self._launch()

    def _launch(self) -> Server:
        return Server(self.data_dir, environ=self._environ)

    async def start(self) -> None:
        """Wait until it is live; while a fault is on, it is not ready."""

        async def answers() -> bool:
            assert not self.server.is_dead, self.server.log.read_text()[-2000:]
            return (await self.server.health("/livez")).get("http") == 200

        await until(answers)
        self.up.set()

    def crash(self) -> None:
        """Kill it with SIGKILL, and launch it again."""
        self.up.clear()
        self.server.kill()
        self.crashes += 1
        self.server = self._launch()

    async def rpc(self, method: str, **params: Any) -> dict[str, Any]:
        """The data of a call over JSON-RPC. Raises Gone and Refused."""
        answer = await ask(self.server, Request("/rpc", message(method, params)))
        return dict(orjson.loads(answer))

    def alarms(self) -> list[str]:
        """Its log lines of level error and above."""
        logs = sorted(self.data_dir.parent.glob("*.log"))
        return [line for log in logs for line in log.read_text().splitlines() if _is_alarm(line)]


def _is_alarm(line: str) -> bool:
    """Whether a line tells of more than what the faults do: they take deposits after payouts."""
    try:
        said = json.loads(line)
        return said.get("level") in _ALARMS and said.get("event") != "deposit_lost"
    except json.JSONDecodeError:
        return True  # a traceback, or a last message


@asynccontextmanager
async def killable_service(
    data_dir: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[KillableService]:
    """A service that is live; it is killed on exit if it still runs."""
    data_dir.parent.mkdir(mode=0o700, exist_ok=True)
    service = KillableService(data_dir, environ)
    try:
        await service.start()
        yield service
    finally:
        if not service.server.is_dead:
            service.server.kill()


# --- orders ------------------------------------------------------------------------------------


class OrderRequest(NamedTuple):
    """An order to place. ``requests``: equivalent calls; just one if it has no idempotency key.

    The session of a bridge order is known to the service alone.
    """

    direction: str
    session_id: str | None
    requests: tuple[Request, ...]

    @property
    def has_key(self) -> bool:
        """Whether the call may be sent again."""
        return len(self.requests) > 1


class PlacedOrder(NamedTuple):
    """An acknowledged order, with the answer to its call."""

    request: OrderRequest
    order_id: str
    answer: bytes


class Caller:
    """Places orders over every surface and keeps the answers.

    ``api_key`` is that of an integrator, if the service has one.
    """

    def __init__(self, service: KillableService, name: str, api_key: str | None = None) -> None:
        self.service = service
        self.random = random.Random(name)
        self.placed: list[PlacedOrder] = []
        self.unanswered: list[OrderRequest] = []
        self.in_doubt = 0  # unanswered calls without a key: each may have placed an order
        self._api_key = api_key
        self._name = name.replace(" ", "-")
        self._keys = 0

    async def order(self) -> None:
        """A new order. Raises Gone."""
        draw = self.random.choice(
            [self._agent_request, self._front_end_request, self._bridge_request]
        )
        await self._send(draw())

    async def retry(self) -> None:
        """Send one unanswered call again. Raises Gone."""
        if self.unanswered:
            await self._send(self.unanswered.pop(self.random.randrange(len(self.unanswered))))

    async def retry_all(self) -> None:
        """Send every unanswered call until it is answered. Raises Gone."""
        while self.unanswered:
            await self.retry()

    async def _send(self, request: OrderRequest) -> None:
        call = self.random.choice(request.requests)
        try:
            answer = await ask(self.service.server, call)
        except Gone:
            self._keep(request)
            raise
        except Refused as refused:
            assert refused.code == "unavailable", refused
            self._keep(request)
            return
        reported = orjson.loads(answer)
        order_id = reported["orderId"] if "orderId" in reported else reported["order"]["orderId"]
        self.placed.append(PlacedOrder(request, order_id, answer))

    def _keep(self, request: OrderRequest) -> None:
        if request.has_key:
            self.unanswered.append(request)
        else:
            self.in_doubt += 1

    async def replay(self) -> None:
        """Repeat an answered call, up to three times at once. Raises Gone."""
        keyed = [placed for placed in self.placed if placed.request.has_key]
        if keyed:
            await self.repeat(self.random.choice(keyed), self.random.randint(1, 3))

    async def repeat(self, placed: PlacedOrder, times: int) -> None:
        """Every equivalent call gives the first answer, byte for byte. Raises Gone."""
        requests = (placed.request.requests[n % 2] for n in range(times))
        again = await asyncio.gather(*(ask(self.service.server, each) for each in requests))
        assert set(again) == {placed.answer}

    async def repeat_all(self) -> None:
        """Repeat every call that has a key, twice. Raises Gone."""
        for placed in self.placed:
            if placed.request.has_key:
                await self.repeat(placed, 2)

    async def reuse_a_key(self) -> None:
        """Send another call under a used key: it is refused. Raises Gone."""
        keyed = [placed for placed in self.placed if placed.request.has_key]
        if not keyed:
            return
        request = self.random.choice(keyed).request
        call = request.requests[-1]
        name = "toAddress" if "toAddress" in call.body else "to"
        other = {**call.body, name: TO[request.direction][-1]}
        with pytest.raises(Refused, match="idempotency_conflict"):
            await ask(self.service.server, call._replace(body=other))

    async def ask_for_refund(self) -> None:
        """Name a refund address for some order, whether a refund is due or not. Raises Gone."""
        if self.placed:
            await self.name_refund_address(
                self.random.choice(self.placed), self.random.randrange(3)
            )

    async def name_refund_address(self, placed: PlacedOrder, number: int) -> None:
        """Have the order refunded to the ``number``-th address, if its session is known."""
        if placed.request.session_id is None:
            return
        with suppress(Refused):  # a refund to it has failed before
            await self.service.rpc(
                "support.create",
                message="refund, please",
                orderId=placed.order_id,
                sessionId=placed.request.session_id,
                walletAddress=BACK[placed.request.direction][number],
            )

    async def poll(self) -> None:
        """Require that the status of a placed order can be read. Raises Gone."""
        known = [placed for placed in self.placed if placed.request.session_id is not None]
        if known:
            order_id = self.random.choice(known).order_id
            seen = await self.service.rpc("swap.status", orderId=order_id)
            assert seen["order"]["orderId"] == order_id

    # --- drawing ---

    def _agent_request(self) -> OrderRequest:
        direction, session = self._direction(), self._session()
        params = {
            "direction": direction,
            "chain": self.random.choice(["arbitrum", "base"]),
            "amount": "0.8" if direction == "x2u" else "150",
            "to": TO[direction][0],
            "sessionId": session,
        }
        operation = self.random.choice(["create", "execute"])
        if self.random.random() < 0.1:
            alone = Request("/rpc", message(f"swap.{operation}", params))
            return OrderRequest(direction, session, (alone,))
        key = {"idempotency-key": self._key()}
        rpc = Request("/rpc", message(f"swap.{operation}", {**params, **key}))
        http = Request(f"/api/v1/agent/swap/{operation}", params, key)
        return OrderRequest(direction, session, (rpc, http))

    def _front_end_request(self) -> OrderRequest:
        """An order over the BFF, with or without chunks and an integrator's fee."""
        direction, session = self._direction(), self._session()
        chain = self.random.choice(list(USDC))
        assets = [(0, "XMR"), (chain, USDC[chain])]
        (sent, token), (received, other) = assets if direction == "x2u" else assets[::-1]
        body = {
            "fromChainId": sent,
            "toChainId": received,
            "fromToken": token,
            "toToken": other,
            "fromAmount": str(self.random.choice(AMOUNTS[direction])),
            "toAddress": TO[direction][0],
            "sessionId": session,
            "twapConfig": {"intervalMs": 1_000, "disabled": self.random.random() < 0.2},
        }
        headers = {"idempotency-key": self._key()}
        if self._api_key is not None and self.random.random() < 0.5:
            headers["x-api-key"] = self._api_key
        return OrderRequest(direction, session, (Request("/bff/v1/orders", body, headers),) * 2)

    def _bridge_request(self) -> OrderRequest:
        direction = self._direction()
        way = "deposit" if direction == "x2u" else "withdraw"
        key = {"idempotency-key": self._key()}
        request = Request(f"/bff/v1/bridge/{way}", {"toAddress": TO[direction][0]}, key)
        return OrderRequest(direction, None, (request,) * 2)

    def _direction(self) -> str:
        return self.random.choice(["x2u", "u2x"])

    def _key(self) -> str:
        self._keys += 1
        return f"{self._name}-{self._keys:016}"

    def _session(self) -> str:
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))


async def fault_schedule(
    service: KillableService, faults: Sequence[Mapping[str, Any]], seed: int, over: asyncio.Event
) -> None:
    """Inject faults into the sandbox until ``over`` is set."""
    drawn = random.Random(f"{seed} faults")
    while not over.is_set():
        await service.up.wait()
        with suppress(Gone):
            await service.rpc("sandbox.fault", **drawn.choice(faults))
        await asyncio.sleep(drawn.uniform(0.05, 0.6))
