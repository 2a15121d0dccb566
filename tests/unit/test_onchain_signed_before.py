"""Caps and what is signed already: a crash before its order knows must not hold back the wallet.

The ledgers are the real ones. A side signs and commits to its ledger, as the wallets do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from rpcsvc.domain.money import USDC, XMR, Asset
from rpcsvc.domain.order import Transfer
from rpcsvc.domain.states import TransferKind
from rpcsvc.errors import Unavailable
from rpcsvc.orders.aside import OrdersAside
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.ports import StatusView
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.onchain.guard import Caps, PauseSwitch, PayoutGuard
from rpcsvc.settlement.onchain.monero.ledger import Payee, PaymentState
from rpcsvc.store.onchain_books import OnchainBooks
from rpcsvc.store.onchain_evm_payments import SqliteEvmPaymentLedger
from rpcsvc.store.onchain_monero import SqliteMoneroLedger
from rpcsvc.store.orders import SqliteOrderStore
from rpcsvc.store.sqlite import Database
from tests.unit import test_onchain_evm_payments as evm
from tests.unit import test_onchain_monero as monero
from tests.unit.test_onchain_guard import passes
from tests.unit.test_payouts_together import At, Desk, Office

UNITS = 7
CAPS = {XMR: Caps(10, 10), USDC: Caps(10, 10)}


@dataclass
class Books:
    """Ledgers of both sides, orders, and the guard of one run of the service."""

    data_dir: Path
    database: Database
    office: Office

    def guard(self, caps: dict[Asset, Caps] | None = None) -> PayoutGuard:
        sums = OnchainBooks(self.database)
        switch = PauseSwitch(self.data_dir)
        return PayoutGuard(switch, caps or CAPS, sums, self.office.clock)

    async def sign_usdc(self, name: str) -> None:
        made = replace(evm.payment(name, 0), prepared_at=self.office.clock.now)
        await SqliteEvmPaymentLedger(self.database).add_payment(made)

    async def sign_xmr(self, name: str, *payees: str) -> None:
        """One payment of ``UNITS`` in all."""
        units = UNITS // max(1, len(payees))
        batch = tuple(Payee(payee, f"4x {payee}", units) for payee in payees)
        made = replace(monero.payment(name, f"image of {name}"), units=UNITS, batch=batch)
        ledger = SqliteMoneroLedger(self.database)
        await ledger.add_payment(replace(made, prepared_at=self.office.clock.now))


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[Books]:
    database = await Database.open(tmp_path)
    store, clock = SqliteOrderStore(database, lambda: "key"), At()
    desk, aside = Desk(), OrdersAside()
    processor = OrderProcessor(store, clock, lambda _order: StatusView(b"{}", None))
    payouts = Payouts(store, cast("Any", desk), processor, clock, aside)
    yield Books(tmp_path, database, Office(store, processor, desk, payouts, clock, aside))
    await database.close()


def transfer(name: str, asset: Asset, units: int = UNITS) -> Transfer:
    network = "monero" if asset is XMR else evm.NET
    return Transfer(name, TransferKind.PAYOUT, network, asset, "to", units, 1)


@pytest.mark.parametrize("asset", [XMR, USDC])
async def test_what_is_signed_is_not_counted_against_itself_and_others_are(
    books: Books, asset: Asset
) -> None:
    await (books.sign_xmr("a/payout/1") if asset is XMR else books.sign_usdc("a/payout/1"))

    passes(books.guard(), transfer("a/payout/1", asset))

    with pytest.raises(Unavailable, match="cap per day"):
        passes(books.guard(), transfer("b/payout/1", asset))


async def test_each_transfer_of_a_payment_to_several_is_signed(books: Books) -> None:
    await books.sign_xmr("batch_1", "a/payout/1", "b/payout/1")
    for name in ("a/payout/1", "b/payout/1"):
        passes(books.guard(), transfer(name, XMR))


async def test_caps_that_were_lowered_do_not_hold_back_what_is_signed(books: Books) -> None:
    await books.sign_usdc("a/payout/1")
    lowered = books.guard({XMR: Caps(1, 1), USDC: Caps(1, 1)})
    passes(lowered, transfer("a/payout/1", USDC))
    with pytest.raises(Unavailable, match="cap per transfer"):
        passes(lowered, transfer("b/payout/1", USDC))


@pytest.mark.parametrize("asset", [XMR, USDC])
async def test_what_its_order_took_back_before_it_was_published_counts_no_more(
    books: Books, asset: Asset
) -> None:
    """Its wallet withdraws it, and would never be asked to: the next transfer is over the cap."""
    name = await books.office.due("a")
    await (books.sign_xmr(name) if asset is XMR else books.sign_usdc(name))
    await books.office.take_back("a")
    passes(books.guard(), transfer("c/payout/1", asset))


async def test_a_payment_to_several_that_is_taken_back_for_one_is_signed_anew_within_caps(
    books: Books,
) -> None:
    first, second = [await books.office.due(name) for name in "ab"]
    await books.sign_xmr("batch_1", first, second)
    await books.office.take_back("b")
    passes(books.guard(), transfer(first, XMR))

    lowered = books.guard({XMR: Caps(1, 1), USDC: Caps(1, 1)})
    with pytest.raises(Unavailable, match="cap per transfer"):
        passes(lowered, transfer(first, XMR))


async def test_what_may_be_published_counts_though_its_order_took_it_back(books: Books) -> None:
    name = await books.office.due("a")
    await books.sign_xmr(name)
    ledger = SqliteMoneroLedger(books.database)
    (made,) = ledger.payments_in(PaymentState.PREPARED)
    await ledger.put_payment(replace(made, state=PaymentState.RELAYING, relayed_at=1))
    await books.office.take_back("a")
    with pytest.raises(Unavailable, match="cap per day"):
        passes(books.guard(), transfer("c/payout/1", XMR))
