"""Random sequences of orders, deposits, faults, restarts and time: money is conserved."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.audit import audit
from tests.sandbox import EVM, MONERO, ORDER_FAULTS, ManualClock, Placed, Sandbox, sandbox

AMOUNTS = {
    "x2u": [None, "0.00005", "0.01", "0.3", "0.8", "1", "400"],
    "u2x": [None, "0.01", "2", "60", "150", "200", "60000"],
}
GLOBAL_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("engine_down", {}),
    ("engine_up", {}),
    ("rates_down", {}),
    ("rates_up", {}),
    ("pause_blocks", {}),
    ("resume_blocks", {}),
    ("set_rate", {"rate": "120"}),
    ("set_rate", {"rate": "165"}),
    ("advance_clock", {"seconds": 900}),
]
JUMPS = [100, 300, 600, 600, 1_000, 1_000, 2_000, 5_000, 60_000, 1_000_000]
USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"


class Scenario:
    """Random orders, deposits, faults, restarts and time at one service."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.orders: list[tuple[str, str, str]] = []  # direction, order id, session id

    async def run(self, data_dir: Path, steps: int) -> None:
        left = steps
        while left > 0:
            part = min(left, self.random.randint(5, 20))
            async with sandbox(data_dir, self.clock) as box:
                for _ in range(part):
                    await self.step(box)
            left -= part  # the service is stopped here, in the middle of any work
        async with sandbox(data_dir, self.clock) as box:
            await self.recover(box)
            await self.check(box)

    async def step(self, box: Sandbox) -> None:
        roll = self.random.random()
        if roll < 0.2 or not self.orders:
            await self.make_order(box)
        elif roll < 0.45:
            direction, order_id, _ = self.random.choice(self.orders)
            amount = self.random.choice(AMOUNTS[direction])
            params = {"amount": amount} if amount else {}
            await box.call("sandbox.fund", orderId=order_id, **params)
        elif roll < 0.6:
            order_id = self.random.choice(self.orders)[1]
            fault = self.random.choice(ORDER_FAULTS)
            await box.call("sandbox.fault", fault=fault, orderId=order_id)
        elif roll < 0.7:
            fault, params = self.random.choice(GLOBAL_FAULTS)
            await box.call("sandbox.fault", fault=fault, **params)
        else:
            self.clock.now += self.random.choice(JUMPS)
            await box.up.worker.tick()
            if self.random.random() < 0.7:
                await box.up.worker.drain()

    async def make_order(self, box: Sandbox) -> None:
        direction = self.random.choice(["x2u", "u2x"])
        if self.random.random() < 0.4:
            await self.make_twap_order(box, direction)
            return
        bears_gas = direction == "u2x" and self.random.random() < 0.5
        funding = {"funding": "x402"} if bears_gas else {}
        answer = await box.call(
            "swap.execute",
            direction=direction,
            chain=self.random.choice(["arbitrum", "base"]),
            amount="0.8" if direction == "x2u" else "150",
            to=EVM if direction == "x2u" else MONERO,
            **funding,
        )
        if answer["ok"]:
            order_id = answer["data"]["order"]["orderId"]
            self.orders.append((direction, order_id, answer["data"]["sessionId"]))

    async def make_twap_order(self, box: Sandbox, direction: str) -> None:
        assets = [(0, "XMR", 7 * 10**12), (42161, USDC, 1_100 * 10**6)]
        (sent, token, amount), (received, other, _) = assets if direction == "x2u" else assets[::-1]
        if not all(check.ok for check in (await box.up.service.venue.health()).values()):
            return
        answer = await box.bff(
            "orders.create",
            fromChainId=sent, toChainId=received, fromToken=token, toToken=other,
            fromAmount=str(amount), toAddress=EVM if direction == "x2u" else MONERO,
            twapConfig={"intervalMs": 1_000},
        )  # fmt: skip
        order = await box.up.service.store.order(answer["orderId"])
        assert order is not None
        self.orders.append((direction, order.order_id, order.terms.session_id))

    async def recover(self, box: Sandbox) -> None:
        """End all faults, let every deadline pass, and name the refund addresses that are due."""
        for fault in ("engine_up", "rates_up", "resume_blocks"):
            await box.fault(fault)
        await box.settle(70)
        for wait in (3_600_000, 3_600_000, 25 * 3_600_000, 60_000):
            await box.jump(wait)
            await box.settle(70)
        for attempt in range(3):
            for direction, order_id, session_id in self.orders:
                order = Placed(box, order_id, session_id)
                if (await order.status())["data"]["actionRequired"]:
                    await order.give_refund_address(self.refund_address(direction, attempt))
            await box.settle(70)

    def refund_address(self, direction: str, attempt: int) -> str:
        if direction == "x2u":
            return [MONERO, XMR_2, XMR_3][attempt]
        return [EVM, "0x" + "1" * 40, "0x" + "2" * 40][attempt]

    async def check(self, box: Sandbox) -> None:
        assert audit(box.up.settings.data_dir) == []
        for direction, order_id, session_id in self.orders:
            answer = await Placed(box, order_id, session_id).status()
            ended = answer["state"] in ("completed", "terminal_failure")
            assert ended or answer["data"]["actionRequired"], (direction, answer)
            for deposit in answer["data"]["deposits"]:
                spent = deposit["use"] != "undecided" or deposit["status"] == "removed"
                assert spent or answer["data"]["actionRequired"], (direction, answer)


XMR_2 = (
    "44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3XjrpDtQGv7SqSsaBYBb98"
    "uNbr2VBBEt7f2wfn3RVGQBEP3A"
)
XMR_3 = (
    "7AF6kKjnmKJexA6FKTCHKy1jRNR5pPSJfbc9gYMQ3d89MGt9JqEvf2uiZ9hUj7ECeoET4"
    "hgzz1nY1RdaeF2xGMLB3Q35SoY"
)


def run_scenario(seed: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(Scenario(seed).run(Path(folder) / "data", steps))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_money_is_conserved_whatever_happens(seed: int) -> None:
    run_scenario(seed, steps=60)


@pytest.mark.slow(seconds=35)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_money_is_conserved_in_many_long_scenarios(seed: int) -> None:
    run_scenario(seed, steps=120)
