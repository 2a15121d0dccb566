"""Payments in the pending block of a real node, and the first-seen time of their deposits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.evm.keys import SignedTransaction
from tests.regtest.daemons import mined
from tests.regtest.evm_reader import (
    ETHER,
    REMOVED,
    SECOND,
    SEEN,
    STRANGER,
    USDC,
    USER,
    EvmReader,
    crooked,
    network_of,
    reader_on,
    sent,
)
from tests.regtest.token import Token
from tests.sandbox import ManualClock
from tests.waiting import wait_for_deposit

pytestmark = pytest.mark.slow

METHOD = "eth_getBlockByNumber"


@dataclass
class Offer:
    """An order that waits at an address until ``until`` (ms). Blocks are mined explicitly.

    The test sets the time of service and chain: seconds after ``start``.
    """

    reader: EvmReader
    address: str
    start: int
    until: int

    def at(self, seconds: int) -> int:
        """Set the service's clock to so long after the start; the time in ms."""
        self.reader.clock.now = (self.start + seconds) * SECOND
        return self.reader.clock.now

    async def mined_at(self, seconds: int) -> int:
        """Mine the pending block so long after the start; its time in ms."""
        token = self.reader.token
        await token.client.rpc.act("evm_setNextBlockTimestamp", [self.start + seconds])
        await token.controls.mine()
        block = await token.client.block()
        assert block is not None
        assert block.timestamp == self.start + seconds
        return self.at(seconds)


@pytest.fixture
async def offer(token: Token, tmp_path: Path) -> AsyncIterator[Offer]:
    await token.controls.set_ether(USER.address, ETHER)
    await token.mint(USER.address, 10_000 * USDC)
    await token.controls.mine(40)
    await token.controls.automine(enabled=False)
    block = await token.client.block()
    assert block is not None
    start = block.timestamp + 1000
    network = network_of(token)
    clock = ManualClock(start * SECOND)
    async with reader_on(
        token, token.client.rpc.endpoint, network, tmp_path / "data", clock
    ) as reader:
        address = reader.pool.take()
        until = (start + 60) * SECOND
        await wait_for_deposit(reader.database, address, expires_at=until)
        assert await reader.reconcile() == {}
        yield Offer(reader, address, start, until)


async def pays(offer: Offer, units: int = USDC) -> SignedTransaction:
    return await sent(offer.reader.token, usdc.transfer(offer.address, units))


async def found(reader: EvmReader) -> dict[str, DepositSighting]:
    """One pass, committed; its deposits by transaction."""
    seen = await reader.poll()
    await reader.commit(list(seen.values()))
    return {key.txid: item for key, item in seen.items()}


async def test_payment_pending_at_expiry_and_mined_later_is_in_time(
    offer: Offer,
) -> None:
    reader = offer.reader
    first = await pays(offer)
    seen_at = offer.at(50)
    reader.calls.clear()
    assert await reader.poll() == {}
    assert reader.calls.count(METHOD) == 2, "the newest block, and the pending one"
    # Never seen pending: no pass before it is mined.
    second = await pays(offer, 2 * USDC)
    mined_at = await offer.mined_at(70)
    assert (await mined(reader.token.client, first.txid)).ok
    async with reader.again() as later:
        deposits = await found(later)
    times = {txid: item.first_seen_at for txid, item in deposits.items()}
    assert times == {first.txid: seen_at, second.txid: mined_at}
    assert seen_at <= offer.until < mined_at


async def test_each_call_that_pays_is_seen_pending_and_nothing_else_is(offer: Offer) -> None:
    reader, token = offer.reader, offer.reader.token
    await sent(token, usdc.transfer(STRANGER, USDC))
    await sent(token, usdc.transfer(offer.address, 0))
    allow = usdc.address_word(USER.address) + usdc.uint_word(USDC)
    await sent(token, usdc.selector("approve(address,uint256)") + allow)
    authorization = usdc.Authorization(
        USER.address, offer.address, USDC, 0, offer.start * 2, b"\7" * 32
    )
    signature = USER.sign_digest(usdc.transfer_digest(token.domain, authorization))
    paying = [
        await sent(token, usdc.transfer(offer.address, USDC)),
        await sent(token, usdc.transfer_from(USER.address, offer.address, USDC)),
        await sent(token, usdc.transfer_with_authorization(authorization, signature)),
    ]
    seen_at = offer.at(10)
    assert await reader.poll() == {}
    await offer.mined_at(70)
    deposits = await found(reader)
    assert {txid: item.first_seen_at for txid, item in deposits.items()} == {
        signed.txid: seen_at for signed in paying
    }


async def test_deposit_moved_by_a_reorg_keeps_its_first_seen_time(
    offer: Offer,
) -> None:
    reader, token = offer.reader, offer.reader.token
    signed = await pays(offer)
    seen_at = offer.at(10)
    assert await reader.poll() == {}
    await offer.mined_at(70)
    await token.controls.reorganise(1)
    await offer.mined_at(80)
    assert await reader.reconcile() == {}, "it was gone before it was found"
    await token.client.submit(signed.raw)
    await offer.mined_at(90)
    (deposit,) = (await found(reader)).values()
    assert (deposit.state, deposit.first_seen_at) == (SEEN, seen_at)
    await token.controls.reorganise(1)
    await token.controls.mine()
    assert await found(reader) == {}, "a node may only be late: it is asked twice"
    (gone,) = (await found(reader)).values()
    assert gone == replace(deposit, state=REMOVED)


async def test_pending_blocks_are_not_read_without_orders_to_pay(
    offer: Offer,
) -> None:
    reader = offer.reader
    reader.clock.now = offer.until + 1
    reader.calls.clear()
    await reader.poll()
    assert reader.calls.count(METHOD) == 1


async def test_oversized_pending_block_leaves_the_scan_as_it_is(
    offer: Offer,
) -> None:
    reader = offer.reader
    signed = await pays(offer)
    offer.at(50)
    async with crooked(reader) as (node, behind):
        filler = "00" * (behind.endpoint.max_response_bytes // 2)
        blocks: list[object] = []

        def twist(method: str, answer: object) -> object:
            if method == METHOD and isinstance(answer, dict):
                whole = [item for item in answer["transactions"] if isinstance(item, dict)]
                if whole:
                    blocks.append(answer)
                    return answer | {"extraData": filler}
            return answer

        node.twist = twist
        assert await behind.poll() == {}
        assert len(blocks) == 1
        assert behind.scanner.problem is None
        mined_at = await offer.mined_at(70)
        behind.clock.now = mined_at
        deposits = await found(behind)
    assert deposits[signed.txid].first_seen_at == mined_at
