"""The operator's records, and the sums over the wallets, on each backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import DepositKey, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.onchain.engine import SignedPayments
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.checks import UnservedOrders, engine_conflict
from rpcsvc.store.database import Query, Row, Tables
from rpcsvc.store.operator_books import Flow, OperatorBooks, Signed, UnsweptTotal
from rpcsvc.store.orders import OrderStore
from tests.rows import statement
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, key, terms

PRICE = 2**62
ROWS = (
    "INSERT INTO evm_wallet VALUES (1, '0xHot', 0)",
    "INSERT INTO monero_wallet VALUES (1, 'fakechain', '4Primary', 0)",
    "INSERT INTO monero_addresses VALUES (1, '8Sub')",
    "INSERT INTO evm_addresses VALUES (1, '0x1')",
    "INSERT INTO evm_addresses VALUES (2, '0x2')",
    "INSERT INTO evm_deposits"
    " VALUES ('arbitrum', 'a', 0, 1, 5, '0xUser', 1000, 7, 'h', 'confirmed', 0)",
    "INSERT INTO evm_deposits"
    " VALUES ('arbitrum', 'b', 0, 2, 7, '0xUser', 1000, 7, 'h', 'confirmed', 1)",
    "INSERT INTO evm_deposits VALUES ('arbitrum', 'c', 0, 2, 11, '0xUser', 1000, 7, 'h', NULL, 1)",
    "INSERT INTO evm_sweeps VALUES ('arbitrum', 1, 1, '0x1', 'receive', 5, 'aa', NULL, 'done', 5)",
)
PAYMENT = (
    "INSERT INTO evm_payments (payment_id, network, sender, nonce, purpose, recipient, units,"
    " contract, data, gas, prepared_at, state, published_at, mined_txid, block_number, block_hash,"
    " gas_used, gas_price) VALUES (?, 'arbitrum', '0xHot', ?, ?, '0xUser', 7, '0xToken', x'00', 1,"
    " 1000, 'settled', 2000, ?, 9, 'h', ?, ?)"
)
UNMINED = (
    "INSERT INTO evm_payments (payment_id, network, sender, nonce, purpose, recipient, units,"
    " contract, data, gas, prepared_at, state) VALUES (?, 'arbitrum', '0xHot', ?, 'transfer',"
    " '0xUser', 7, '0xToken', x'00', 1, 1000, ?)"
)
STATES = ("prepared", "published", "failed")
ATTEMPT = "INSERT INTO evm_attempts VALUES (?, 1, ?, x'00', 9, 1, 10)"
MONERO = (
    "INSERT INTO monero_payments (payment_id, purpose, address, units, fee, txid, raw, metadata,"
    " tx_key, prepared_at, state, relayed_at, height)"
    " VALUES (?, ?, '4User', 5, 3, ?, x'00', '', 'key', 1000, ?, 1, 9)"
)


@pytest.fixture
async def filled(database: Tables) -> Tables:
    await database.write([statement(sql) for sql in ROWS])
    await database.write(
        [
            statement(PAYMENT, ("t1", 0, "transfer", "x1", 3, PRICE)),
            statement(PAYMENT, ("t2", 1, "transfer", "x2", 5, PRICE)),
            statement(ATTEMPT, ("t1", "x1")),
            statement(ATTEMPT, ("t2", "x2")),
            statement(MONERO, ("m1", "transfer", "mm", "settled")),
            statement(MONERO, ("m2", "upkeep", "mu", "published")),
        ]
    )
    return database


async def test_sums_over_the_wallets_are_whole_numbers(filled: Tables) -> None:
    books = OperatorBooks(filled)
    assert await books.unswept() == {"arbitrum": UnsweptTotal(7, 1, 11)}
    assert await books.swept() == {"arbitrum": 5}
    assert await books.gas_fees() == {"arbitrum": {"transfer": 8 * PRICE}}
    assert await books.monero_fees() == {"transfer": 3, "upkeep": 3}
    assert await books.network_fees(1000) == {"arbitrum": 8 * PRICE, "monero": 6}
    assert await books.network_fees(1001) == {}
    assert await books.network_fees(0, 1000) == {}
    assert await books.network_fees(0, 1001) == await books.network_fees(1000)
    sent = SignedPayments(filled)
    assert (await sent.sent_since(XMR, 1000), await sent.sent_since(XMR, 1001)) == (5, 0)
    assert await sent.sent_since(USDC, 0) == 14
    assert all(type(value) is int for value in (await books.swept()).values())


async def test_fees_for_data_on_l1_are_paid_too(filled: Tables) -> None:
    await filled.write([statement("UPDATE evm_payments SET l1_fee = 2 WHERE payment_id = 't1'")])
    books = OperatorBooks(filled)
    assert await books.network_fees(1000) == {"arbitrum": 8 * PRICE + 2, "monero": 6}
    assert await books.gas_fees() == {"arbitrum": {"transfer": 8 * PRICE + 2}}


async def test_a_transfer_lists_its_transactions(filled: Tables) -> None:
    books = OperatorBooks(filled)
    assert await books.signed("t1") == [Signed("x1", 10, "settled", 9)]
    assert await books.signed("m1") == [Signed("mm", 1000, "settled", 9)]
    assert await books.payment_with("x2") == "t2"
    assert await books.transfers((TransferState.PLANNED, TransferState.UNKNOWN), 10) == []
    assert await books.transfer("t1") is None
    assert await books.integrator_fees() == []
    assert (await books.open_orders(), await books.doubts()) == ([], [])


async def test_payments_in_no_block_are_counted_by_network(filled: Tables) -> None:
    books, networks = OperatorBooks(filled), ("arbitrum", "base", "monero")
    assert await books.unmined_payments(networks) == dict.fromkeys(networks, 0)
    await filled.write(
        [statement(UNMINED, (f"n{nonce}", nonce, state)) for nonce, state in enumerate(STATES, 2)]
    )
    await filled.write([statement("UPDATE monero_payments SET height = NULL WHERE txid = 'mu'")])
    found = await books.unmined_payments(networks)
    assert found == {"arbitrum": 2, "base": 0, "monero": 1}


async def test_orders_events_and_transfers_are_counted(database: Tables) -> None:
    books = OperatorBooks(database)
    assert (await books.extent(), await books.transfers_by_state()) == ((0, None), {})
    store = OrderStore(database, lambda: "")
    processor = OrderProcessor(store, ManualClock(NOW), lambda _order: None)
    order = open_order(terms(Direction.USDC_TO_XMR))
    await processor.open(order, None, None)
    assert await books.extent() == (1, NOW)
    amount = order.terms.deposit_amount
    await processor.apply(order.order_id, ev.DepositSeen(key(1), amount, "sender", NOW))
    await processor.apply(order.order_id, ev.DepositConfirmed(key(1)))
    assert await books.transfers_by_state() == {"planned": 1}


async def test_flows_are_of_orders_made_since(database: Tables) -> None:
    books, clock = OperatorBooks(database), ManualClock(NOW)
    assert await books.flows(0) == {}
    store = OrderStore(database, lambda: "")
    processor = OrderProcessor(store, clock, lambda _order: None)
    deposits, payouts = [], []
    for made in range(5):
        new = terms(Direction.USDC_TO_XMR)
        new = replace(
            new, order_id=f"ord_{made}", created_at=NOW + made, deposit_address=f"0x{made:040x}"
        )
        order = open_order(new)
        await processor.open(order, None, None)
        amount = new.deposit_amount
        paid = DepositKey(new.deposit_network, f"tx{made}", 0)
        await processor.apply(order.order_id, ev.DepositSeen(paid, amount, "sender", NOW))
        order = await processor.apply(order.order_id, ev.DepositConfirmed(paid))
        (payout,) = order.transfers
        deposits.append(amount)
        payouts.append(payout.units)
        signed = PreparedTransfer(f"out{made}", (payout.transfer_id,))
        if made != 4:  # that payout is only planned
            await processor.record([signed])
    network, paid_on = new.deposit_network, new.payout_network
    for since in range(6):
        found = await books.flows(NOW + since)
        expected = {
            network: Flow(sum(deposits[since:]), 0),
            paid_on: Flow(0, sum(payouts[since:4])),
        }
        assert found == {name: flow for name, flow in expected.items() if any(flow)}


async def test_own_addresses_are_known_in_any_case(filled: Tables) -> None:
    books = OperatorBooks(filled)
    for ours in ("0x2", "0X2", "0xhot", "4Primary", "8Sub"):
        assert await books.is_own_address(ours), ours
    assert not await books.is_own_address("0x4")
    assert not await books.is_own_address("8sub")


async def test_unrecorded_transactions_are_acknowledged_and_annotated(filled: Tables) -> None:
    ledger, books = UnrecordedLedger(filled), OperatorBooks(filled)
    payments = EvmPaymentLedger(filled)
    assert await payments.acknowledged_nonce("arbitrum", "0xHot") is None
    for nonce, kept in ((4, 4), (3, 4), (5, 5)):
        await payments.acknowledge_nonce("arbitrum", "0xHot", nonce)
        assert await payments.acknowledged_nonce("arbitrum", "0xHot") == kept
    assert await ledger.not_on_record(["q", "mm", "p"]) == ["p", "q"]
    await ledger.acknowledge_transactions("monero", ["q"], 1)
    await books.annotate("monero", "p", "by hand", 1, 10**30)
    await books.annotate("monero", "p", "otherwise", 2)
    assert await books.annotation("monero", "p") == "by hand"
    assert await ledger.annotated("monero") == ["p"]
    assert await ledger.not_on_record(["q", "mm", "p"]) == []
    found = [(each.txid, each.units) for each in await ledger.unattributed_deposits()]
    assert found == [("a", 5), ("b", 7)]
    await books.remove_annotation("monero", "p")
    assert await ledger.not_on_record(["p"]) == ["p"]


async def test_a_database_of_real_wallets_is_onchains(filled: Tables) -> None:
    claim = await engine_conflict(filled, "sandbox")
    assert claim is not None
    assert claim[0] == "onchain"
    assert await engine_conflict(filled, "onchain") is None
    assert await (await UnservedOrders.find(filled, ["arbitrum"])).problem() is None


class BusyTables:
    """Tables in which another replica makes the wallets and an order after the first read."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._has_begun = False

    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        found = await self._tables.fetch_together(queries)
        if not self._has_begun:
            self._has_begun = True
            await self._tables.write([statement(ROWS[0])])
            store = OrderStore(self._tables, lambda: "")
            processor = OrderProcessor(store, ManualClock(NOW), lambda _order: None)
            await processor.open(open_order(terms(Direction.USDC_TO_XMR)), None, None)
        return found

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        (rows,) = await self.fetch_together([Query(sql, values)])
        return rows[0] if rows else None


async def test_first_orders_of_another_replica_are_no_conflict(database: Tables) -> None:
    assert await engine_conflict(cast("Tables", BusyTables(database)), "onchain") is None
    assert await engine_conflict(database, "onchain") is None
    assert await engine_conflict(database, "sandbox") is not None
