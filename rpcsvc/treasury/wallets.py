"""Holdings of the engine onchain's wallets, and the amounts reserved, owed, swept and spent.

Balances come from the nodes, everything else from the database. A node that does not answer leaves
a gap that is named.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.audit.auditor import audit_loop
from rpcsvc.audit.books import reader_of
from rpcsvc.clock import Clock, iso8601
from rpcsvc.domain.money import USDC, XMR, Asset, format_units
from rpcsvc.engine_context import EngineContext
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.operator import Noted
from rpcsvc.orders.ports.venue import RateSource
from rpcsvc.orders.settlement import Settlement
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.engine import SignedPayments
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import NETWORK as MONERO
from rpcsvc.settlement.onchain.monero.records import MoneroOptions, WalletRecord
from rpcsvc.settlement.onchain.readiness import (
    MoneroFound,
    MoneroInspector,
    NetworkFound,
    coins,
    inspect_network,
)
from rpcsvc.settlement.onchain.unrecorded import UnattributedDeposit, UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import empty_snapshot
from rpcsvc.store.database import Tables
from rpcsvc.store.operator_books import OperatorBooks, Owed, UnsweptTotal, owed, reserved
from rpcsvc.store.withdrawals import WithdrawalStore
from rpcsvc.treasury.annotations import Annotations
from rpcsvc.treasury.planning import DAY_MS, PositionBuilder, plan_view

Json = dict[str, Any]


# --- inspecting all nodes and wallets ----------------------------------------------------------


class WalletFindings(Struct, frozen=True):
    """The answers of nodes and wallets. ``coins``: the gas coin of each of ``networks``."""

    options: MoneroOptions
    monero: MoneroFound
    networks: tuple[NetworkFound, ...]
    coins: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """The problems of nodes and wallets that could not be asked."""
        monero = (self.monero.node_problem or self.monero.wallet_problem,)
        return [text for text in (*monero, *(item.problem for item in self.networks)) if text]


class Recorded(Struct, frozen=True):
    """The wallets of the first start; None before it."""

    monero: WalletRecord | None
    hot_wallet: str | None


async def recorded_wallets(database: Tables) -> Recorded:
    """The recorded wallets. Raises errors.Unavailable."""
    evm = await EvmDepositLedger(database).wallet()
    monero = await MoneroLedger(database).wallet()
    return Recorded(monero, evm.hot_address if evm else None)


async def read_wallets(
    settings: Settings, recorded: WalletRecord | None, hot_wallet: str | None, *, alone: bool
) -> WalletFindings:
    """Ask everything once, all at the same time. Raises SettingsError."""
    options = wiring.monero_options(settings.onchain)
    node, wallet = wiring.monero_clients(settings.onchain)
    chains = read_chains(settings.chains_file)
    served = wiring.served_chains(settings.onchain, chains)
    nodes = wiring.evm_nodes(settings.onchain, served)
    looks = (inspect_network(item.network, item.client, hot_wallet) for item in nodes)
    # The connection is only asked about its node here, and records nothing.
    with empty_snapshot() as nowhere:
        connection = MoneroConnection(node, wallet, MoneroLedger(nowhere), options)
        inspector = MoneroInspector(connection, recorded, options, alone=alone)
        monero, networks = await asyncio.gather(inspector.poll(), asyncio.gather(*looks))
    native = {chain.name: chain.native_token for chain in served.all()}
    paid_in = tuple(native[item.network.name] for item in networks)
    return WalletFindings(options, monero, tuple(networks), paid_in)


# --- the treasury ------------------------------------------------------------------------------


class _Books(Struct, frozen=True):
    """Sums from the database, by network or asset; atomic units."""

    recorded: Recorded
    reserved: dict[str, int]
    withdrawing: dict[str, int]
    owed: dict[str, Owed]
    unswept: dict[str, UnsweptTotal]
    swept: dict[str, int]
    monero_fees: dict[str, int]
    gas_fees: dict[str, dict[str, int]]
    sent_today: dict[str, int]
    unattributed: list[UnattributedDeposit]


class OnchainTreasury:
    """The treasury of a running service. ``paused``: why payouts are paused, or None."""

    def __init__(
        self,
        settings: Settings,
        database: Tables,
        clock: Clock,
        paused: Callable[[], str | None],
        rates: RateSource,
    ) -> None:
        self._settings = settings
        self._rates = rates
        self._db = database
        self._clock = clock
        self._paused = paused
        self._annotations = Annotations(settings, database, clock)

    async def annotate(self, network: str, txid: str, note: str, wei: int) -> Noted:
        """Annotate a transaction that was made by hand. Raises InvalidInput, Unavailable."""
        return await self._annotations.add(network, txid, note, wei)

    async def remove_annotation(self, network: str, txid: str) -> Noted:
        """Forget a note. Raises InvalidInput."""
        return await self._annotations.remove(network, txid)

    async def view(self) -> Json:
        """The holdings as JSON. The records are read first, so that they wait for no node."""
        now = self._clock.now_ms()
        books = await self._read(now)
        recorded = books.recorded
        found = await read_wallets(
            self._settings, recorded.monero, recorded.hot_wallet, alone=False
        )
        limits = wiring.caps(self._settings.onchain)
        return {
            "asOf": iso8601(now),
            "paused": self._paused(),
            "xmr": _xmr_view(found.monero, books),
            "usdc": [
                _usdc_view(item, coin, books)
                for item, coin in zip(found.networks, found.coins, strict=True)
            ],
            "caps": {
                asset.symbol: {
                    "sentIn24Hours": format_units(books.sent_today[asset.symbol], asset),
                    "perDay": format_units(limits[asset].per_day, asset),
                    "perTransfer": format_units(limits[asset].per_transfer, asset),
                }
                for asset in (XMR, USDC)
            },
            "ofNoOrder": [_unattributed_view(item) for item in books.unattributed],
            "problems": found.problems,
        }

    async def plan(self) -> Json:
        """The moves between networks that would reach the targets. Nothing is moved."""
        now, settings = self._clock.now_ms(), self._settings.inventory
        books = OperatorBooks(self._db)
        orders = Counter(reserved(await books.open_orders(), now))
        orders.update(await self._withdrawing())
        flows = await books.flows(now - settings.days * DAY_MS)
        unswept, recorded = await books.unswept(), await recorded_wallets(self._db)
        found = await read_wallets(
            self._settings, recorded.monero, recorded.hot_wallet, alone=False
        )
        chains = read_chains(self._settings.chains_file)
        targets = wiring.read_targets(
            settings, wiring.served_chains(self._settings.onchain, chains)
        )
        inventory = PositionBuilder(settings, targets, orders, flows)
        positions = [] if found.monero.held is None else [inventory.xmr(found.monero.held)]
        positions += [
            inventory.usdc(item, item.hot.usdc, unswept) for item in found.networks if item.hot
        ]
        try:
            rate = self._rates.rate().usdc_per_xmr
        except Unavailable:
            rate = None  # then no exchange is proposed
        return {**plan_view(positions, rate, settings, now), "problems": found.problems}

    async def _withdrawing(self) -> dict[str, int]:
        """Units reserved by open withdrawals, by network; each has one at most."""
        found = await WithdrawalStore(self._db).open()
        return {item.network: item.units + item.fee for item in found}

    async def _read(self, now: int) -> _Books:
        books, sums = OperatorBooks(self._db), SignedPayments(self._db)
        orders = await books.open_orders()
        return _Books(
            recorded=await recorded_wallets(self._db),
            reserved=reserved(orders, now),
            withdrawing=await self._withdrawing(),
            owed=owed(orders),
            unswept=await books.unswept(),
            swept=await books.swept(),
            monero_fees=await books.monero_fees(),
            gas_fees=await books.gas_fees(),
            unattributed=await UnrecordedLedger(self._db).unattributed_deposits(),
            sent_today={
                asset.symbol: await sums.sent_since(asset, now - DAY_MS) for asset in (XMR, USDC)
            },
        )


# --- one chain each ----------------------------------------------------------------------------


def _xmr_view(found: MoneroFound, books: _Books) -> Json:
    held = found.held
    return {
        "address": found.primary_address,
        "unlocked": format_units(held.unlocked, XMR) if held else None,
        "locked": format_units(held.locked, XMR) if held else None,
        "outputs": held.outputs if held else None,
        **_obligations(MONERO, XMR, books),
        "feesPaid": {name: format_units(units, XMR) for name, units in books.monero_fees.items()},
    }


def _usdc_view(found: NetworkFound, coin: str, books: _Books) -> Json:
    name, hot = found.network.name, found.hot
    left = books.unswept.get(name, UnsweptTotal(0, 0, 0))
    return {
        "network": name,
        "address": books.recorded.hot_wallet,
        "hotWallet": format_units(hot.usdc, USDC) if hot else None,
        "unswept": format_units(left.units, USDC),
        "unsweptAddresses": left.addresses,
        "arriving": format_units(left.arriving, USDC),
        "swept": format_units(books.swept.get(name, 0), USDC),
        **_obligations(name, USDC, books),
        "gas": {"coin": coin, "left": coins(hot.ether) if hot else None},
        "gasPaid": {kind: coins(wei) for kind, wei in books.gas_fees.get(name, {}).items()},
    }


def _unattributed_view(item: UnattributedDeposit) -> Json:
    asset = XMR if item.network == MONERO else USDC
    return {
        "network": item.network,
        "txid": item.txid,
        "amount": f"{format_units(item.units, asset)} {asset.symbol}",
        "address": item.address,
        "addressOf": item.order_id,
    }


def _obligations(network: str, asset: Asset, books: _Books) -> Json:
    due = books.owed.get(network, Owed())
    return {
        "reserved": format_units(books.reserved.get(network, 0), asset),
        "withdrawing": format_units(books.withdrawing.get(network, 0), asset),
        "refundsUnderWay": due.refunds,
        "refundsOwed": format_units(due.units, asset),
        "waitingForAddress": format_units(due.waiting, asset),
        "ordersWaitingForAddress": due.waiting_orders,
    }


# --- beside the service ------------------------------------------------------------------------


@asynccontextmanager
async def overseen(context: EngineContext, settlement: Settlement) -> AsyncIterator[Settlement]:
    """Have the engine onchain audited on the replica that settles, with a treasury on each.

    An audit that finds a difference throws the engine's own switch. Raises SettingsError.
    """
    settings, tables, switch = context.settings, context.tables, settlement.engine.switch
    chains = settlement.orders.profile.chains
    rates = cast("RateSource", settlement.rates)  # where there are wallets, there is one
    treasury = OnchainTreasury(settings, tables, context.clock, switch.reason, rates)
    if not context.lease.is_held:
        yield replace(settlement, treasury=treasury)
        return
    books = reader_of(settings.data_dir, tables if settings.postgresql_url else None)
    async with audit_loop(settings.onchain, chains, books, switch) as audits:
        settlement.worker.beside(audits.run)
        readings = replace(settlement.readings, last_audit=lambda: audits.last)
        yield replace(settlement, treasury=treasury, readings=readings)
