"""Unrecorded outgoing transactions that the wallet has lost, on real daemons: nothing is signed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rpcsvc.clock import SystemClock
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.records import Cursor, WalletRecord
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroOutgoing, OutgoingUnknown
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.e2e.processes import until
from tests.regtest.daemons import Miner
from tests.regtest.treasury import OPTIONS, XMR

pytestmark = pytest.mark.slow


@dataclass
class Loss:
    """An older copy of the database without ``txid``, which is in the node's pool."""

    outgoing: MoneroOutgoing
    wallet: WalletClient
    seed: str
    txid: str


@pytest.fixture
async def loss(
    own_wallet: WalletClient, node: MonerodClient, miner: Miner, tmp_path: Path
) -> AsyncIterator[Loss]:
    database = await SqliteDatabase.open(tmp_path)
    ledger = MoneroLedger(database)
    own, top = await own_wallet.primary_address(), await node.info()
    await ledger.adopt_wallet(WalletRecord("fakechain", own, 0))
    await ledger.acknowledge([], Cursor(top.height - 1, top.top_hash), -1)
    await miner.fund(own, XMR, XMR)
    await own_wallet.refresh()
    seed = await own_wallet.seed()
    async with WalletClient(miner.bank.endpoint) as bank:
        payee = await bank.primary_address()
    paid = await own_wallet.prepare([Destination(payee, XMR // 10)])
    await own_wallet.relay(paid.metadata)
    connection = MoneroConnection(node, own_wallet, ledger, OPTIONS)
    unrecorded = UnrecordedLedger(database)
    outgoing = MoneroOutgoing(connection, ledger, unrecorded, SystemClock(), mines_on_demand=True)
    yield Loss(outgoing, own_wallet, seed, paid.txid)
    await database.close()


async def test_wallet_that_knows_its_payment_names_it_from_the_pool(
    loss: Loss,
) -> None:
    assert await loss.outgoing.unknown() == [loss.txid]


async def test_restored_wallet_signs_nothing_while_its_payment_pends(
    loss: Loss, miner: Miner
) -> None:
    await loss.wallet.close()
    await loss.wallet.restore("again", "", loss.seed, 0)
    await loss.wallet.auto_refresh(enabled=False)
    with pytest.raises(OutgoingUnknown):
        await loss.outgoing.unknown()
    await miner.mine()
    assert await loss.outgoing.unknown() == [loss.txid]


async def test_restored_wallet_is_given_its_addresses_before_it_lists(
    own_wallet: WalletClient, node: MonerodClient, miner: Miner, tmp_path: Path
) -> None:
    """The payment spends what came to an address that a restored wallet does not look at."""
    database = await SqliteDatabase.open(tmp_path)
    ledger = MoneroLedger(database)
    own, top = await own_wallet.primary_address(), await node.info()
    await ledger.adopt_wallet(WalletRecord("fakechain", own, 0))
    await ledger.acknowledge([], Cursor(top.height - 1, top.top_hash), -1)
    made = [each for _ in range(5) for each in await own_wallet.create_addresses(64)]
    await ledger.add_addresses(made)
    await own_wallet.store()
    await miner.fund(made[-1].address, XMR)
    await own_wallet.refresh()
    async with WalletClient(miner.bank.endpoint) as bank:
        payee = await bank.primary_address()
    paid = await own_wallet.prepare([Destination(payee, XMR // 10)])
    await own_wallet.relay(paid.metadata)
    await miner.mine()
    seed = await own_wallet.seed()
    await own_wallet.close()
    await own_wallet.restore("again", "", seed, 0)
    await own_wallet.auto_refresh(enabled=False)
    connection = MoneroConnection(node, own_wallet, ledger, OPTIONS)
    unrecorded = UnrecordedLedger(database)
    outgoing = MoneroOutgoing(connection, ledger, unrecorded, SystemClock(), mines_on_demand=True)

    found: list[list[str]] = []

    async def is_listed() -> bool:
        try:
            found.append(await outgoing.unknown())
        except Unavailable:
            return False
        return True

    await until(is_listed)
    await connection.addresses.close()
    await database.close()
    assert found == [[paid.txid]]
