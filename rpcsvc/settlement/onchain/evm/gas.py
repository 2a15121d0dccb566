"""Gas of one EVM network: EIP-1559 prices, the L1 data fee of OP-stack chains, the hot wallet's
ether.

Prices are wei per gas, costs wei. No field of a transaction bounds the L1 data fee, so it is
estimated with a margin and never taken to be 0. Sources: EIP-1559; OP Stack specification, "L1 data
fee".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import structlog
from msgspec import Struct

from rpcsvc.clock import Clock
from rpcsvc.domain import usdc
from rpcsvc.domain.money import LARGEST_INTEGER
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan, unsigned
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, FeeData
from rpcsvc.settlement.onchain.evm.records import (
    EvmPayment,
    EvmPaymentOrder,
    EvmPurpose,
)
from rpcsvc.store.database import Statement, Tables, upsert

log = structlog.get_logger(__name__)

USUAL_GAS: Final = 65_000
"""Gas of a transfer of USDC to a new holder, about; used until a node has estimated it."""
_AUTHORIZATION_GAS: Final = 30_000
"""Gas of ``transferWithAuthorization`` beyond a transfer, about: for the nonce that it stores, the
signature that it checks, and their bytes."""
# The bytes that go to L1 with it, as a multiple of a transfer's, at most.
_AUTHORIZATION_LENGTH: Final = 3
# The percentage by which Geth, Reth and Nethermind want both fees of a replacement raised, unless
# configured otherwise.
_USUAL_RULE: Final = 10
GET_L1_FEE: Final = usdc.selector("getL1Fee(bytes)")
_WORD_BYTES: Final = 32
# Fields not known before signing are taken at their widest: each byte is paid for.
_NONCE: Final = 2**24 - 1
_FEE: Final = 2**40 - 1
# An account that holds nothing: a transfer to it writes a new balance, which costs the most.
_NOBODY: Final = usdc.read_address(bytes(12) + usdc.keccak256(b"nobody")[12:])
# An amount of many digits: where bytes are paid for, it costs the most.
_MUCH: Final = 2**40 - 1
# How long fees serve for quotes, and a balance that no payment has changed. Signatures ask again.
_KEPT_MS: Final = 10_000
_OPENING: Final = ("network", "sender", "block_number", "block_hash", "nonce", "wei")
_PUT_OPENING: Final = upsert("evm_openings", _OPENING, ("network", "sender"))


class GasPrice(Struct, frozen=True):
    """Wei per gas: ``max_fee`` bounds base fee and ``tip`` together."""

    max_fee: int
    tip: int


class PricedCall(NamedTuple):
    """A call that is to be signed, and the price offered for it."""

    order: EvmPaymentOrder
    price: GasPrice


class CallCost(NamedTuple):
    """Wei that a call may cost: its gas at the price offered, and its data on L1."""

    gas: int
    l1_fee: int


def with_margin(gas: int) -> int:
    """The gas limit for an estimate. Gas that is not used is not paid."""
    return gas + gas // 4


def with_l1_margin(fee: int) -> int:
    """The L1 fee of an OP-stack chain with a margin, from its estimate, which may double."""
    return with_margin(2 * fee)


def price_of(moment: FeeData) -> GasPrice:
    """The price offered without a bound: the base fee may double before it is mined."""
    return GasPrice(2 * moment.base_fee + moment.tip, moment.tip)


def first_price(moment: FeeData, gas: int, highest_cost: int) -> GasPrice | None:
    """The price of a new transaction; None when the present price costs more than the bound."""
    return _bounded(moment, GasPrice(1, 0), gas, highest_cost)


def raised_price(
    old: GasPrice, moment: FeeData, percent: int, gas: int, highest_cost: int
) -> GasPrice | None:
    """The price of a replacement: both fees raised by ``percent`` and at least the present ones.

    When that costs more than the bound, the bound itself, if nodes would still take that for a
    rise; else None. Nodes refuse a replacement unless both rise, by 10 percent usually.
    """
    raised = _bounded(moment, _both_raised(old, percent), gas, highest_cost)
    if raised is not None:
        return raised
    last = _bounded(moment, _both_raised(old, _USUAL_RULE), gas, highest_cost)
    return None if last is None else GasPrice(_highest(gas, highest_cost), last.tip)


def is_too_low(price: GasPrice, moment: FeeData) -> bool:
    """Whether the next block would not take it."""
    return price.max_fee < moment.base_fee + min(price.tip, moment.tip)


def _both_raised(old: GasPrice, percent: int) -> GasPrice:
    return GasPrice(_raised(old.max_fee, percent), _raised(old.tip, percent))


def _raised(fee: int, percent: int) -> int:
    """Return a fee raised by ``percent``, rounded up, and higher than before by any percentage."""
    return max(-(-fee * (100 + percent) // 100), fee + 1)


def _highest(gas: int, highest_cost: int) -> int:
    return min(highest_cost // gas, LARGEST_INTEGER)


def _bounded(moment: FeeData, least: GasPrice, gas: int, highest_cost: int) -> GasPrice | None:
    highest = _highest(gas, highest_cost)
    tip = max(least.tip, moment.tip)
    needed = max(least.max_fee, moment.base_fee + tip, 1)
    if needed > highest:
        return None
    usual = 2 * moment.base_fee + tip
    return GasPrice(max(needed, min(usual, highest)), tip)


class L1Fee:
    """The L1 part of a transaction's cost on one network; 0 on a network without an oracle."""

    def __init__(self, connection: EvmConnection) -> None:
        self._connection = connection
        self._network = connection.network

    async def of(self, order: EvmPaymentOrder) -> int:
        """Wei that a call may cost for its bytes, with margin. Raises RpcFailure.

        Raises Unavailable when the oracle gives no fee: it is never taken to be 0.
        """
        oracle = self._network.l1_fee_oracle
        if oracle is None:
            return 0
        plan = TransactionPlan(
            chain_id=self._network.chain_id, nonce=_NONCE, to=order.contract, gas=order.gas,
            max_fee=_FEE, tip=_FEE, data=order.data,
        )  # fmt: skip
        try:
            answer = await self._connection.client.call(
                EvmCall(oracle, l1_fee_call(unsigned(plan)))
            )
            return with_l1_margin(usdc.read_uint(answer))
        except (NodeError, ValueError) as error:
            log.warning("evm_l1_fee_unknown", network=self._network.name, reason=str(error))
            raise Unavailable(
                f"What {self._network.name} takes for data on L1 is not known right now: its"
                f" oracle {oracle} gives no fee."
            ) from error


def l1_fee_call(transaction: bytes) -> bytes:
    """The oracle's call for an unsigned transaction (ABI: one dynamic ``bytes``)."""
    padding = bytes(-len(transaction) % _WORD_BYTES)
    head = usdc.uint_word(_WORD_BYTES) + usdc.uint_word(len(transaction))
    return GET_L1_FEE + head + transaction + padding


class HotBalances(Struct, frozen=True):
    """The hot wallet's balances at a block: wei and USDC units."""

    ether: int
    usdc: int
    block_number: int


class EvmGas:
    """Prices and balances of one network's hot wallet. May raise RpcFailure and ChainUnusable.

    ``hot``: the hot wallet's balances at the last look; None before one. ``problem``: why the cost
    of a payout is not known, for the operator; None: it is known, or nobody has looked.
    ``is_blacklisted``: the token moved nothing for the hot wallet at the last refresh.
    """

    def __init__(self, connection: EvmConnection, hot_wallet: str, clock: Clock) -> None:
        self._connection = connection
        self._network = connection.network
        self._hot_wallet = hot_wallet
        self._clock = clock
        self._l1 = L1Fee(connection)
        self._gas = with_margin(USUAL_GAS)
        self._moment: FeeData | None = None
        # When all of this was noted.
        self._noted_at: int | None = None
        self._l1_fee: int | None = None
        self.hot: HotBalances | None = None
        self.problem: str | None = None
        self.is_blacklisted = False

    async def estimate(self, data: bytes, most: int | None = None) -> int:
        """Return the gas limit for the hot wallet's call of the token, that may take ``most``.

        Raises Reverted.
        """
        call = EvmCall(self._network.token, data, self._hot_wallet, gas=most)
        return with_margin(await self._connection.client.estimate_gas(call))

    async def first_price(self, order: EvmPaymentOrder, moment: FeeData) -> GasPrice:
        """The price of a new transaction. Raises Unavailable when it would cost too much."""
        left = self._network.highest_fee - await self._l1.of(order)
        price = first_price(moment, order.gas, left)
        if price is None:
            log.warning(
                "evm_gas_price_exceeded", network=self._network.name, base_fee=moment.base_fee
            )
            raise Unavailable(f"Gas on {self._network.name} is too dear for a payment right now.")
        return price

    async def l1_fee(self, order: EvmPaymentOrder) -> int:
        """Wei that a call may cost for its data on L1. Raises Unavailable while it is not known."""
        return await self._l1.of(order)

    async def raised_price(self, payment: EvmPayment) -> GasPrice | None:
        """The price of a payment's replacement; None when it would cost too much."""
        left = self._network.highest_fee - await self._l1.of(payment.order)
        return raised_price(
            _price(payment), await self._connection.client.fees(), self._network.bump_percent,
            payment.order.gas, left,
        )  # fmt: skip

    async def needed(self, calls: Sequence[PricedCall], waiting: Sequence[EvmPayment]) -> list[int]:
        """Return the wei that the hot wallet may need for the first of the new calls, for the first
        two, and so on, each time with those that wait to be mined.

        Raises Unavailable while the L1 part is not known, for which each call counts as the
        longest.
        """
        orders = [order for order, _ in calls] + [item.order for item in waiting]
        l1_fee = await self._l1.of(max(orders, key=lambda item: len(item.data)))
        before = sum(item.most_fee + l1_fee for item in waiting)
        costs = (order.gas * price.max_fee + l1_fee for order, price in calls)
        return [before + cost for cost in accumulate(costs)]

    async def is_too_low(self, payment: EvmPayment) -> bool:
        """Whether the next block would not take the payment for its price."""
        return is_too_low(_price(payment), await self._connection.client.fees())

    def forget(self) -> None:
        """Have the next poll ask for everything."""
        self._noted_at = None

    def is_fresh(self) -> bool:
        """Whether all was noted a short time ago. Tips follow the pool, so it is not of a block."""
        if self._noted_at is None or self.problem is not None:
            return False
        return 0 <= self._clock.now_ms() - self._noted_at < _KEPT_MS

    def lacks(self, mined_to: int) -> bool:
        """Whether the balances are from before block ``mined_to``, in which a payment was mined:
        nothing is reserved for it any longer.
        """
        return self.hot is not None and self.hot.block_number < mined_to

    async def poll(self, top: Block, mined_to: int = 0) -> None:
        """Note fees and the hot wallet's balances at ``top``, the newest block, unless it is fresh.

        ``mined_to``: the newest block with a payment. Balances from before it are noted again, also
        if a node that lagged has shown them since.
        """
        if self.is_fresh():
            if self.lacks(mined_to):
                self.hot = await self._balances(top)
            return
        self.forget()
        client, hot = self._connection.client, self._hot_wallet
        with client.rpc.together():
            moment, held, is_blacklisted, _, _ = await asyncio.gather(
                client.fees(top),
                self._balances(top),
                self._connection.is_blacklisted(hot),
                self._look_at_l1(),
                self._look_at_gas(),
            )
        self.hot, self.is_blacklisted = held, is_blacklisted
        self._moment, self._noted_at = moment, self._clock.now_ms()

    async def _balances(self, top: Block) -> HotBalances:
        client, hot = self._connection.client, self._hot_wallet
        with client.rpc.together():
            ether, units = await asyncio.gather(
                client.ether(hot), self._connection.balance(hot, top.number)
            )
        return HotBalances(ether, units, top.number)

    async def _look_at_gas(self) -> None:
        """Note the gas of a payout: on some networks it includes the price of data elsewhere."""
        try:
            self._gas = await self.estimate(usdc.transfer(_NOBODY, 1))
        except NodeError as error:
            # An empty hot wallet, or a paused token: the last estimate is near enough.
            log.debug("evm_gas_not_estimated", network=self._network.name, reason=str(error))

    async def _look_at_l1(self) -> None:
        """Note the L1 fee of a payout. An earlier answer is not kept: it may be out of date."""
        data = usdc.transfer(_NOBODY, _MUCH)
        token = self._network.token
        usual = EvmPaymentOrder("look", EvmPurpose.TRANSFER, _NOBODY, _MUCH, token, data, self._gas)
        try:
            self._l1_fee = await self._l1.of(usual)
            self.problem = None
        except Unavailable as error:
            self._l1_fee, self.problem = None, error.message
        except RpcFailure as failure:
            self._l1_fee, self.problem = None, str(failure)
            raise

    def payout_cost(self) -> int:
        """Wei that a payout costs, with margin. Raises Unavailable before a refresh."""
        return self._cost(self._gas, 1)

    def authorization_cost(self) -> int:
        """Wei that a signed authorization costs, with margin. Raises as ``payout_cost`` does."""
        return self._cost(self._gas + with_margin(_AUTHORIZATION_GAS), _AUTHORIZATION_LENGTH)

    def is_too_dear(self) -> bool:
        """Whether even a transfer would cost more than the bound, as of the last refresh."""
        if self._moment is None or self._l1_fee is None:
            return False
        left = self._network.highest_fee - self._l1_fee
        return first_price(self._moment, self._gas, left) is None

    def _cost(self, gas: int, length: int) -> int:
        if self._moment is None or self._l1_fee is None:
            raise Unavailable(f"The fees on {self._network.name} are not known yet.")
        return gas * price_of(self._moment).max_fee + length * self._l1_fee


def _price(payment: EvmPayment) -> GasPrice:
    return GasPrice(payment.latest.max_fee, payment.latest.tip)


class Opening(Struct, frozen=True):
    """The hot wallet as of a block: transactions that it had sent, and its wei."""

    block_number: int
    block_hash: str
    nonce: int
    wei: int


class OpeningLedger:
    """Keeps opening balances. Everything may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def opening(self, network: str, sender: str) -> Opening | None:
        """The recorded opening balance; None before the first scan."""
        row = await self._db.fetch_one(
            "SELECT block_number, block_hash, nonce, wei FROM evm_openings"
            " WHERE network = :network AND sender = :sender",
            network=network,
            sender=sender,
        )
        if row is None:
            return None
        return Opening(row["block_number"], row["block_hash"], row["nonce"], int(row["wei"]))

    async def record(self, network: str, sender: str, opening: Opening) -> None:
        """Record an opening balance; it replaces one whose block was replaced."""
        values = {
            "network": network, "sender": sender, "block_number": opening.block_number,
            "block_hash": opening.block_hash, "nonce": opening.nonce, "wei": str(opening.wei),
        }  # fmt: skip
        await self._db.write([Statement(_PUT_OPENING, values)])


class EvmOpening:
    """Records the opening balance of one hot wallet on one network, once.

    It is the balance at the newest block, whose state every node has. The nonce shows which
    transactions came after that block, so pending ones do not matter. A block that is replaced
    takes its balance with it: that is looked for until the block is deep, and once after a start.
    """

    def __init__(self, connection: EvmConnection, sender: str, ledger: OpeningLedger) -> None:
        self._connection = connection
        self._network = connection.network
        self._sender = sender
        self._ledger = ledger
        self._is_deep = False

    async def poll(self, head: Block) -> None:
        """Record it if it is not, or was replaced; ``head`` is the newest block.

        Raises RpcFailure and errors.Unavailable.
        """
        if self._is_deep:
            return
        known = await self._ledger.opening(self._network.name, self._sender)
        if known is None:
            await self._record(head)
            return
        block = await self._connection.client.block(known.block_number)
        if block is None:
            return  # the node is behind
        if block.hash != known.block_hash:
            log.warning(
                "evm_opening_replaced", network=self._network.name, block=known.block_number
            )
            await self._record(head)
        else:
            self._is_deep = head.number - known.block_number >= self._network.failed_after

    async def _record(self, head: Block) -> None:
        client, number = self._connection.client, head.number
        nonce = await client.nonce(self._sender, number)
        wei = await client.ether(self._sender, number)
        block = await client.block(number)
        if block is None or block.hash != head.hash:
            return  # replaced meanwhile: the next look does it
        opening = Opening(number, head.hash, nonce, wei)
        await self._ledger.record(self._network.name, self._sender, opening)
        log.info("evm_opening_recorded", network=self._network.name, block=number, wei=str(wei))
