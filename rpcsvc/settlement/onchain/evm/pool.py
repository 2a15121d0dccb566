"""What an EVM node is about to mine: when a payment to an order was first seen.

A deposit counts by its first sight, which may be before its block. Each look asks the node once
for its pending block, and only while an order waits for a deposit there. What is remembered is a
time: no deposit is reported, no order held open and no money counted by it, since its sender may
still replace or cancel it. When the very same transaction is mined, the time is the deposit's.

A node that does not answer such a call is no failure of the look: then the block's time counts.
What does not live here: deposits (deposits.py), reading a call of the token (usdc_calls.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import structlog

from rpcsvc.clock import Clock
from rpcsvc.settlement.onchain.daemon_rpc import Fields, RpcFailure
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.deposit_ledger import (
    LARGEST_DEPOSIT,
    EvmDepositLedger,
    PoolSighting,
)
from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.evm.usdc_calls import read_paying_call

log = structlog.get_logger(__name__)

_METHOD: Final = "eth_getBlockByNumber"
_SECONDS: Final = 3.0
# A node that refused, or had too much to say, is asked again after that; or when it was lost.
_PAUSE_MS: Final = 60_000
_CLEANING_MS: Final = 3_600_000
_KEEP_MS: Final = 24 * 3_600_000
# A block of 60 million gas holds fewer that move a token. To read one takes some 16 microseconds,
# and nothing else is done meanwhile.
_MOST_CALLS: Final = 2_000
# Nobody's payments keep those of others waiting: what one order has is bounded for good.
MOST_PER_LOOK: Final = 256
MOST_PER_ADDRESS: Final = 8

_TXID: Final = re.compile(r"0x[0-9a-f]{64}", re.ASCII | re.IGNORECASE)
_DATA: Final = re.compile(r"0x([0-9a-f]{2})*", re.ASCII | re.IGNORECASE)
_QUANTITY: Final = re.compile(r"0x[0-9a-f]{1,16}", re.ASCII | re.IGNORECASE)


class PendingPayment(NamedTuple):
    """A call of the token that would pay ``to``, in lower case."""

    txid: str
    to: str


class PoolWatch:
    """Looks at one network's pending blocks. Looks must not overlap."""

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger, clock: Clock) -> None:
        self._connection = connection
        self._network = connection.network
        self._ledger = ledger
        self._clock = clock
        self._cleaned_at: int | None = None
        self._refused: tuple[int, int] | None = None
        self._is_told = False

    async def look(self, head: Block) -> None:
        """Note payments that are about to be mined after ``head``. Raises errors.Unavailable."""
        now = self._clock.now_ms()
        await self._clean(now)
        if self._is_put_off(now) or not await self._ledger.is_awaiting(self._network.name, now):
            return
        try:
            payments = await self._payments(head)
        except RpcFailure as failure:
            self._put_off(failure)
            return
        self._refused = None
        if self._is_told:
            self._is_told = False
            log.info("evm_pool_seen", network=self._network.name)
        await self._note(payments)

    async def first_seen(self, txid: str, address_index: int) -> tuple[int, ...]:
        """When a payment was seen before it was mined, in ms; empty when it was not."""
        found = await self._ledger.pool_sighting(self._network.name, txid)
        if found is None or found.address_index != address_index:
            return ()
        return (found.first_seen_at,)

    async def _payments(self, head: Block) -> Mapping[str, str]:
        """Who is paid by which transaction of the pending block. Raises RpcFailure."""
        client = self._connection.client
        answer = await client.pending_block(seconds=_SECONDS)
        if answer is None:
            return {}
        block = Fields(client.rpc.endpoint.name, _METHOD, answer)
        if _is_mined(block, head):
            return {}
        return dict(pending_payments(block, self._network.token))

    async def _note(self, payments: Mapping[str, str]) -> None:
        """Record what is new, up to a bound: of the look, and of each address."""
        if not payments:
            return
        name, now = self._network.name, self._clock.now_ms()
        awaiting = await self._ledger.awaiting(name, set(payments.values()), now)
        indices = {item.address.lower(): item.index for item in awaiting}
        ours = {txid: indices[to] for txid, to in payments.items() if to in indices}
        known = await self._ledger.pool_sightings(name, ours) if ours else set()
        new = {txid: index for txid, index in ours.items() if txid not in known}
        if not new:
            return
        found = await self._within_bounds(new, now)
        if found:
            await self._ledger.put_pool_sightings(found)

    async def _within_bounds(self, new: Mapping[str, int], now: int) -> list[PoolSighting]:
        counts = await self._ledger.pool_counts(self._network.name, set(new.values()))
        found = list[PoolSighting]()
        for txid, index in new.items():
            counts[index] = counts.get(index, 0) + 1
            if counts[index] <= MOST_PER_ADDRESS and len(found) < MOST_PER_LOOK:
                found.append(PoolSighting(self._network.name, txid, index, now))
        return found

    async def _clean(self, now: int) -> None:
        """Forget what is of no use any more, once an hour."""
        if self._cleaned_at is None or abs(now - self._cleaned_at) >= _CLEANING_MS:
            await self._ledger.forget_pool_sightings(self._network.name, now - _KEEP_MS)
            self._cleaned_at = now

    def _is_put_off(self, now: int) -> bool:
        """Whether the node refused a short time ago, and was not lost since."""
        if self._refused is None:
            return False
        at, failures = self._refused
        return failures == self._connection.failures and abs(now - at) < _PAUSE_MS

    def _put_off(self, failure: RpcFailure) -> None:
        self._refused = (self._clock.now_ms(), self._connection.failures)
        if not self._is_told:
            self._is_told = True
            log.warning("evm_pool_not_seen", network=self._network.name, reason=str(failure))


def pending_payments(block: Fields, token: str) -> Iterator[PendingPayment]:
    """The calls of a token in a block with whole transactions that would pay somebody.

    Raises BadAnswer for what is no such block.
    """
    wanted = token.lower()
    calls = [item for item in block.items("transactions") if _target(item, block) == wanted]
    for item in calls[:_MOST_CALLS]:
        call = Fields(block.node, block.method, item)
        txid, data = call.text("hash"), call.text("input")
        if not _TXID.fullmatch(txid) or not _DATA.fullmatch(data):
            raise block.bad("has a transaction without hash or input")
        paying = read_paying_call(bytes.fromhex(data[2:]))
        # Anyone may move nothing from anyone to anyone.
        if paying is not None and 0 < paying.units <= LARGEST_DEPOSIT:
            yield PendingPayment(txid.lower(), paying.to)


def _target(item: Any, block: Fields) -> str | None:
    """Whom a transaction calls, in lower case; None when it makes a contract."""
    if not isinstance(item, dict):
        raise block.bad("has no whole transactions")
    to = item.get("to")
    return to.lower() if isinstance(to, str) else None


def _is_mined(block: Fields, head: Block) -> bool:
    """Whether it is a block that the node has already, as of a network without a pool to see."""
    number = block.value.get("number")
    if not isinstance(number, str) or not _QUANTITY.fullmatch(number):
        return False  # some nodes give a pending block no number
    return int(number, 16) <= head.number
