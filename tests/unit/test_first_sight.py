"""The time at which a USDC payment is first seen decides only whether the order's quote holds.

Orders of a full service; the deposits come from the EVM scanner on a simulated chain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.orders.ports.wallets import DepositSighting, Observation
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.deposits import EvmDepositScanner
from rpcsvc.settlement.onchain.evm.records import EvmAddress
from tests.sandbox import HOUR_MS, Placed, Sandbox, sandbox
from tests.unit.evm_chain import HOT, TOKEN, USER, Reader, txid_of

PAYS = 150_000_000
QUOTED = ("payout", "0.904445454544", "settled")
LATE_WINDOW_MS = HOUR_MS // 4


class Eyes:
    """Adds the scanner's deposits to the sandbox's, whose chains advance with each pass."""

    def __init__(self, sandbox: Any, scanner: EvmDepositScanner) -> None:
        self._observe, self._acknowledge = sandbox.observe, sandbox.acknowledge
        self._scanner = scanner
        sandbox.observe, sandbox.acknowledge = self.observe, self.acknowledge

    async def observe(self) -> Observation:
        both: Observation = await self._observe()
        return replace(both, sightings=[*both.sightings, *await self._scanner.observe()])

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        await self._acknowledge(sightings)
        await self._scanner.acknowledge(sightings)


@dataclass
class Scene:
    """An order paid in USDC, and the chain of its deposit."""

    box: Sandbox
    reader: Reader
    placed: Placed
    address: str

    def sends(self, name: str) -> None:
        """Make a payment pending, in place of an earlier one."""
        call = usdc.transfer(self.address, PAYS)
        transaction = {"hash": txid_of(name), "to": TOKEN, "input": "0x" + call.hex()}
        self.reader.chain.pool = [transaction]

    async def is_mined(self, name: str) -> None:
        """Mine the payment in a block of the present time, and two more blocks."""
        chain = self.reader.chain
        chain.pool = []
        chain.genesis = self.box.clock.now // 1000 - 10 * (chain.head + 1)
        chain.mine((name, [(USER, self.address, PAYS)]))
        chain.mine(count=2)
        await self.box.settle()

    async def expires(self) -> None:
        """Pass the deposit window, and move the rate too far for a late deposit."""
        await self.box.jump(HOUR_MS + 1)
        await self.box.fault("set_rate", rate="220")

    async def transfers(self) -> list[tuple[str, str, str]]:
        data = (await self.placed.status())["data"]
        return [(each["kind"], each["amount"], each["status"]) for each in data["transfers"]]

    async def order(self) -> dict[str, Any]:
        data: dict[str, Any] = (await self.placed.status())["data"]
        return dict(data["order"])


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with sandbox(tmp_path) as box:
        placed = await box.order("u2x")
        order = await box.up.service.store.order(placed.order_id)
        assert order is not None
        ledger = EvmDepositLedger(box.up.database)
        await ledger.adopt_wallet(HOT)
        await ledger.add_addresses([EvmAddress(1, order.terms.deposit_address)])
        reader = Reader(ledger, name=order.terms.deposit_network)
        reader.scanner._clock = reader.scanner._pool._clock = box.clock
        reader.chain.mine(count=5)
        engine = box.up.engine
        Eyes(engine, reader.scanner)
        engine.confirmations = reader.scanner.confirmations
        await box.catch_up()
        yield Scene(box, reader, placed, order.terms.deposit_address)


async def test_payment_pending_in_time_and_mined_late_gets_the_quote(
    scene: Scene,
) -> None:
    scene.sends("a")
    await scene.box.settle()
    waiting = await scene.order()
    assert waiting["status"] == "awaiting_deposit", "a hint is no deposit"
    await scene.expires()
    await scene.is_mined("a")
    done = await scene.order()
    assert (done["status"], await scene.transfers()) == ("completed", [QUOTED])
    assert done["actualOutput"] == done["expectedOutput"]


async def test_a_payment_that_nobody_saw_in_time_is_late(scene: Scene) -> None:
    await scene.expires()
    scene.sends("a")
    await scene.box.settle()
    await scene.is_mined("a")
    assert [kind for kind, _, _ in await scene.transfers()] == ["refund"]


async def test_a_payment_that_was_replaced_by_its_sender_is_late(scene: Scene) -> None:
    """Otherwise replacing a payment would be a free option on the rate."""
    scene.sends("a")
    await scene.box.settle()
    await scene.expires()
    scene.sends("b")
    await scene.box.settle()
    await scene.is_mined("b")
    assert [kind for kind, _, _ in await scene.transfers()] == ["refund"]


async def test_a_payment_that_is_never_mined_holds_no_order_open(scene: Scene) -> None:
    scene.sends("a")
    await scene.box.settle()
    await scene.expires()
    await scene.box.jump(LATE_WINDOW_MS)
    assert (await scene.order())["status"] == "expired"
    assert await scene.transfers() == []
    await scene.is_mined("a")
    assert (await scene.order())["status"] == "expired"
    assert [kind for kind, _, _ in await scene.transfers()] == ["refund"]
