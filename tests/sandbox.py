"""A sandbox service inside the test, with a clock that only the test moves."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from rpcsvc.bootstrap import Running, running
from rpcsvc.domain.clients import SOCKET, Client
from rpcsvc.domain.reservations import Holdings
from rpcsvc.operations.dispatch import flat_dispatcher
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from rpcsvc.settings import load_settings
from rpcsvc.settlement.sandbox.engine import SandboxEngine

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
HOUR_MS = 3_600_000
# Faults of one order's deposit, payout or refund: those that take an orderId.
ORDER_FAULTS = [
    "payout_fails",
    "payout_unknown_sent",
    "payout_unknown_lost",
    "refund_fails",
    "reorganise_deposit",
    "drop_deposit",
    "restore_deposit",
]
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


class ManualClock:
    """A clock that the test moves. Milliseconds since the epoch."""

    def __init__(self, now: int = 1_763_678_000_000) -> None:
        self.now = now

    def now_ms(self) -> int:
        return self.now


class Sandbox:
    """A sandbox service: calls operations by name, and moves the clock."""

    def __init__(self, up: Running, clock: ManualClock) -> None:
        self.up = up
        self.clock = clock

    async def call(self, name: str, **params: Any) -> dict[str, Any]:
        key = params.pop("key", None)
        call = Call("test", idempotency_key=key, client=params.pop("client", SOCKET))
        reply = await self.up.dispatcher.run(_BY_NAME[name], params, call)
        answer: dict[str, Any] = orjson.loads(reply.body)
        assert reply.http_status != 500, answer
        return answer

    async def bff(self, name: str, **params: Any) -> dict[str, Any]:
        """A call of the BFF by the name of its row."""
        row = next(row for row in BFF_OPERATIONS if row.name == f"bff.{name}")
        reply = await flat_dispatcher(self.up.service).run(row, params, Call("test"))
        answer: dict[str, Any] = orjson.loads(reply.body)
        assert reply.error is None, answer
        return answer

    async def order(self, direction: str, amount: str | None = None) -> Placed:
        to = EVM if direction == "x2u" else MONERO
        amount = amount or ("0.8" if direction == "x2u" else "150")
        answer = await self.call(
            "swap.execute", direction=direction, chain="arbitrum", amount=amount, to=to
        )
        assert answer["ok"], answer
        return Placed(self, answer["data"]["order"]["orderId"], answer["data"]["sessionId"])

    async def fault(self, fault: str, **params: Any) -> None:
        answer = await self.call("sandbox.fault", fault=fault, **params)
        assert answer["ok"], answer

    async def settle(self, seconds: float = 4) -> None:
        """Let time pass in steps, with a pass of the worker at each."""
        for _ in range(int(seconds * 2)):
            self.clock.now += 500
            await self.catch_up()

    async def jump(self, ms: int) -> None:
        """Let time pass in one step."""
        self.clock.now += ms
        await self.catch_up()

    async def catch_up(self) -> None:
        for _ in range(3):
            await self.up.worker.tick()
            await self.up.worker.drain()


def give_wallets(patch: pytest.MonkeyPatch, held: Mapping[str, int], usdc: int) -> None:
    """Have sandboxes reserve from wallets with these holdings, as the engine onchain does.

    ``held``: units by network; ``usdc`` on any other.
    """

    def holdings(network: str) -> Holdings:
        return Holdings(held.get(network, usdc), locked=0, seconds_to_unlock=0)

    patch.setattr(SandboxEngine, "holdings", staticmethod(holdings))


class Placed:
    """An order that was made."""

    def __init__(self, sandbox: Sandbox, order_id: str, session_id: str) -> None:
        self._sandbox = sandbox
        self.order_id = order_id
        self.session_id = session_id

    async def fund(self, amount: str | None = None) -> None:
        params = {"amount": amount} if amount else {}
        answer = await self._sandbox.call("sandbox.fund", orderId=self.order_id, **params)
        assert answer["ok"], answer

    async def fault(self, fault: str) -> None:
        await self._sandbox.fault(fault, orderId=self.order_id)

    async def status(self) -> dict[str, Any]:
        return await self._sandbox.call("swap.status", orderId=self.order_id)

    async def ask_for_refund(
        self, address: str, session_id: str | None = None, client: Client = SOCKET
    ) -> dict[str, Any]:
        return await self._sandbox.call(
            "support.create",
            message="refund, please",
            orderId=self.order_id,
            sessionId=session_id or self.session_id,
            walletAddress=address,
            client=client,
        )

    async def give_refund_address(self, address: str, session_id: str | None = None) -> Any:
        answer = await self.ask_for_refund(address, session_id)
        return answer["data"].get("refundAddress")

    async def settle_payout(self) -> dict[str, Any]:
        """The status after all payouts; raise AssertionError unless the order is completed."""
        await self._sandbox.settle()
        answer = await self.status()
        assert answer["state"] == "completed"
        return answer

    async def settle_refund(self, direction: str) -> dict[str, Any]:
        """The status after a refund; one of XMR is given an address first."""
        await self._sandbox.settle()
        if direction == "x2u":
            await self.give_refund_address(MONERO)
            await self._sandbox.settle()
        return await self.status()


@asynccontextmanager
async def sandbox(
    data_dir: Path, clock: ManualClock | None = None, flags: dict[str, Any] | None = None
) -> AsyncIterator[Sandbox]:
    """A running sandbox service on ``data_dir``."""
    clock = clock or ManualClock()
    settings = load_settings(
        config_file=None, environ={}, flags={"data_dir": str(data_dir), **(flags or {})}
    ).settings
    async with running(settings, clock=clock) as up:
        await up.worker.recover()
        yield Sandbox(up, clock)


def attested(order: dict[str, Any]) -> dict[str, Any]:
    """The terms in an order's attestation."""
    payload = order["attestation"].split(".")[1]
    return dict(orjson.loads(base64.urlsafe_b64decode(payload + "==")))
