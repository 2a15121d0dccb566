"""Plans moves between networks that bring the on-chain inventory to its targets.

A plan is a proposal that ``rpcsvc treasury plan`` shows: the operator makes the moves. It never
takes from a network what is reserved, locked, or below that network's own target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import USDC, XMR, Asset, format_units, mul_div_ceil
from rpcsvc.domain.pricing import ONE_XMR, Direction, convert_floor
from rpcsvc.settings_onchain import InventorySettings
from rpcsvc.settlement.onchain.monero.records import NETWORK as MONERO
from rpcsvc.settlement.onchain.readiness import NetworkFound, XmrHeld
from rpcsvc.store.operator_books import Flow, UnsweptTotal

Json = dict[str, Any]
DAY_MS: Final = 24 * 3600 * 1000
_NOTHING: Final = UnsweptTotal(0, 0, 0)
_NEVER: Final = 2**63


# --- the plan ------------------------------------------------------------------------------------


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
    """Makes the positions of networks, all of the same window and targets."""

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


# --- as JSON -------------------------------------------------------------------------------------


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
    """None also where what is free lasts for more than a year."""
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
