"""Holdings of the engine onchain's wallets, the amounts reserved, owed, swept and spent, and the
moves between networks that bring the inventory to its targets.

Balances come from the nodes, everything else from the database. A node that does not answer leaves
a gap that is named. A plan is a proposal, and the operator makes the moves: it never takes from a
network what is reserved, locked, or below that network's own target.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.audit.auditor import audit_loop
from rpcsvc.audit.books import reader_of
from rpcsvc.audit.memory import AuditMemory
from rpcsvc.clock import DAY_MS, Clock, iso8601
from rpcsvc.domain.money import USDC, XMR, Asset, format_units, mul_div_ceil
from rpcsvc.domain.pricing import ONE_XMR, Direction, convert_floor
from rpcsvc.engine_context import EngineContext
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.venue import RateSource
from rpcsvc.orders.settlement import Settlement
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import InventorySettings, read_chains
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
    XmrHeld,
    coins,
    inspect_network,
)
from rpcsvc.settlement.onchain.unrecorded import UnattributedDeposit, UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import empty_snapshot
from rpcsvc.store.database import Tables
from rpcsvc.store.operator_books import Flow, OperatorBooks, Owed, UnsweptTotal, owed, reserved
from rpcsvc.store.withdrawals import WithdrawalStore
from rpcsvc.treasury.annotations import Annotations, Noted

_NOTHING: Final = UnsweptTotal(0, 0, 0)
_NEVER: Final = 2**63

Json = dict[str, Any]


# --- the plan of moves ---------------------------------------------------------------------------


class Position(Struct, frozen=True):
    """The inventory of one network, in atomic units.

    ``held`` includes what can't be sent yet, ``spendable`` does not. ``received`` and ``sent`` are
    of orders, within ``window_ms``. ``target``: what is to be free; None: the network is left as it
    is.
    """

    network: str
    asset: Asset
    held: int
    spendable: int
    reserved: int
    received: int
    sent: int
    window_ms: int
    target: int | None

    @property
    def free(self) -> int:
        """Units that are not reserved; below 0 where more is reserved than held."""
        return self.held - self.reserved

    @property
    def surplus(self) -> int:
        """Units that can be moved away now without going below the target."""
        if self.target is None:
            return 0
        return max(0, min(self.held, self.spendable) - self.reserved - self.target)

    def missing(self, band_percent: int) -> int:
        """Units that are missing to the target; 0 within the band below it."""
        if self.target is None or self.free * 100 >= self.target * (100 - band_percent):
            return 0
        return self.target - self.free

    @property
    def dry_in_ms(self) -> int | None:
        """Time (ms) until ``free`` runs out at the flow of the window; None: never."""
        outflow = self.sent - self.received
        return max(0, self.free) * self.window_ms // outflow if outflow > 0 else None


class Move(Struct, frozen=True):
    """``units`` to take from ``source``, of which ``arrives`` reaches ``to``, in its own asset.

    With two assets it is an exchange, and ``arrives`` is what the units are worth, without fees.
    """

    source: Position
    to: Position
    units: int
    arrives: int


class Plan(Struct, frozen=True):
    """Moves, the most urgent first, and the units by network that no surplus covers."""

    moves: tuple[Move, ...]
    uncovered: Mapping[str, int]


def plan_moves(positions: Sequence[Position], rate: int | None, band_percent: int) -> Plan:
    """The moves that fill networks up to their targets, the one that runs dry first before others.

    ``rate`` is in USDC units per XMR; without one nothing is exchanged. A move within an asset
    comes before an exchange.
    """
    left = {each.network: each.surplus for each in positions}
    missing = {each.network: each.missing(band_percent) for each in positions}
    urgent = sorted((each for each in positions if missing[each.network]), key=_urgency)
    moves = []
    for is_exchange in (False, True):
        for to in urgent:
            for source in sorted(positions, key=lambda each: -left[each.network]):
                if (source.asset != to.asset) is not is_exchange:
                    continue
                move = _move(source, to, left[source.network], missing[to.network], rate)
                if move is not None:
                    moves.append(move)
                    left[source.network] -= move.units
                    missing[to.network] -= move.arrives
    return Plan(tuple(moves), {network: units for network, units in missing.items() if units})


def _urgency(position: Position) -> tuple[int, str]:
    dry_in = position.dry_in_ms
    return _NEVER if dry_in is None else dry_in, position.network


def _move(
    source: Position, to: Position, surplus: int, missing: int, rate: int | None
) -> Move | None:
    if source.asset == to.asset:
        units = arrives = min(surplus, missing)
    elif rate is None:
        return None
    elif source.asset == XMR:
        units = min(surplus, mul_div_ceil(missing, ONE_XMR, rate))
        arrives = min(missing, convert_floor(Direction.XMR_TO_USDC, units, rate))
    else:
        units = min(surplus, mul_div_ceil(missing, rate, ONE_XMR))
        arrives = min(missing, convert_floor(Direction.USDC_TO_XMR, units, rate))
    return Move(source, to, units, arrives) if arrives else None


# --- positions from settings, records and nodes --------------------------------------------------


class PositionBuilder:
    """Makes the positions of networks, all with the same window and targets."""

    def __init__(
        self,
        settings: InventorySettings,
        targets: Mapping[str, int],
        reserved: Mapping[str, int],
        flows: Mapping[str, Flow],
    ) -> None:
        self._window_ms = settings.days * DAY_MS
        self._targets = targets
        self._reserved = reserved
        self._flows = flows

    def xmr(self, held: XmrHeld) -> Position:
        """The position in XMR. Locked units are held, but can't be sent yet."""
        return self._position(MONERO, held.unlocked + held.locked, held.unlocked)

    def usdc(self, found: NetworkFound, usdc: int, unswept: Mapping[str, UnsweptTotal]) -> Position:
        """The position in USDC. Units on deposit addresses are held, but can't be sent yet."""
        network = found.network.name
        return self._position(network, usdc + unswept.get(network, _NOTHING).units, usdc)

    def _position(self, network: str, held: int, spendable: int) -> Position:
        flow = self._flows.get(network, Flow(0, 0))
        return Position(
            network=network,
            asset=XMR if network == MONERO else USDC,
            held=held,
            spendable=spendable,
            reserved=self._reserved.get(network, 0),
            received=flow.received,
            sent=flow.sent,
            window_ms=self._window_ms,
            target=self._targets.get(network),
        )


# --- the plan as JSON ----------------------------------------------------------------------------


def plan_view(
    positions: Sequence[Position], rate: int | None, settings: InventorySettings, now: int
) -> Json:
    """Positions and moves, ready for JSON. ``now`` is in ms."""
    plan = plan_moves(positions, rate, settings.band_percent)
    return {
        "asOf": iso8601(now),
        "days": settings.days,
        "usdcPerXmr": None if rate is None else format_units(rate, USDC),
        "networks": [_position_view(each, plan, now) for each in positions],
        "moves": [_move_view(each, now) for each in plan.moves],
    }


def _position_view(position: Position, plan: Plan, now: int) -> Json:
    asset, target = position.asset, position.target
    return {
        "network": position.network,
        "asset": asset.symbol,
        "held": format_units(position.held, asset),
        "spendable": format_units(position.spendable, asset),
        "reserved": format_units(position.reserved, asset),
        "free": format_units(position.free, asset),
        "target": None if target is None else format_units(target, asset),
        "received": format_units(position.received, asset),
        "sent": format_units(position.sent, asset),
        "runsDryAt": _dry_at(position, now),
        "uncovered": format_units(plan.uncovered.get(position.network, 0), asset),
    }


def _dry_at(position: Position, now: int) -> str | None:
    """Return when the free units run out; None also where they last for more than a year."""
    dry_in = position.dry_in_ms
    return None if dry_in is None or dry_in > 365 * DAY_MS else iso8601(now + dry_in)


def _move_view(move: Move, now: int) -> Json:
    to = move.to
    dry_at = _dry_at(to, now)
    runs_dry = "" if dry_at is None else f", and runs dry at {dry_at} at the present flow"
    return {
        "from": move.source.network,
        "amount": format_units(move.units, move.source.asset),
        "asset": move.source.asset.symbol,
        "to": to.network,
        "arrives": format_units(move.arrives, to.asset),
        "arrivesAsset": to.asset.symbol,
        "why": (
            f"{to.network} has {format_units(to.free, to.asset)} {to.asset.symbol} free of its"
            f" target {format_units(to.target or 0, to.asset)}{runs_dry}"
        ),
    }


# --- inspecting all nodes and wallets ------------------------------------------------------------


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
    """Ask all nodes and wallets once, at the same time. Raises SettingsError."""
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


# --- the treasury --------------------------------------------------------------------------------


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
        """Remove an annotation. Raises InvalidInput."""
        return await self._annotations.remove(network, txid)

    async def view(self) -> Json:
        """The wallets' holdings, and the amounts reserved, owed, swept and spent on fees."""
        # The records are read first, so that they wait for no node.
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
        """The inventory of each network beside its target, and the moves that would reach it."""
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


# --- one chain each ------------------------------------------------------------------------------


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


# --- with the service ----------------------------------------------------------------------------


@asynccontextmanager
async def overseen(
    context: EngineContext, settlement: Settlement
) -> AsyncIterator[tuple[Settlement, OnchainTreasury]]:
    """Have the engine onchain audited on the replica that settles, with a treasury on each.

    An audit that finds a difference throws the engine's own switch. Raises SettingsError.
    """
    settings, tables, switch = context.settings, context.tables, settlement.engine.switch
    chains = settlement.orders.profile.chains
    rates = cast("RateSource", settlement.rates)  # where there are wallets, there is one
    treasury = OnchainTreasury(settings, tables, context.clock, switch.reason, rates)
    if not context.lease.is_held:
        yield settlement, treasury
        return
    books = reader_of(settings.data_dir, tables if settings.postgresql_url else None)
    memory = AuditMemory(settings.data_dir)
    async with audit_loop(settings.onchain, chains, books, switch, memory) as audits:
        settlement.worker.beside(audits.run)
        readings = replace(settlement.readings, last_audit=lambda: audits.last)
        yield replace(settlement, readings=readings), treasury
