"""Which moves between networks would bring the inventory to its targets.

A plan is a proposal: the operator makes the moves. It never takes from a network what is reserved,
locked, or below that network's own target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rpcsvc.domain.money import XMR, Asset, mul_div_ceil
from rpcsvc.domain.pricing import ONE_XMR, Direction, convert_floor

_NEVER: Final = 2**63


@dataclass(frozen=True, slots=True)
class Position:
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
        """What no open order may take; below 0 where more is reserved than held."""
        return self.held - self.reserved

    @property
    def surplus(self) -> int:
        """What can be sent away now without going below the target."""
        if self.target is None:
            return 0
        return max(0, min(self.held, self.spendable) - self.reserved - self.target)

    def missing(self, band_percent: int) -> int:
        """What is missing to the target; 0 within the band below it."""
        if self.target is None or self.free * 100 >= self.target * (100 - band_percent):
            return 0
        return self.target - self.free

    @property
    def dry_in_ms(self) -> int | None:
        """For how long what is free lasts, if as much flows out as it did; None: for ever."""
        outflow = self.sent - self.received
        return max(0, self.free) * self.window_ms // outflow if outflow > 0 else None


@dataclass(frozen=True, slots=True)
class Move:
    """``units`` to take from ``source``, of which ``arrives`` reaches ``to``, in its own asset.

    With two assets it is an exchange, and ``arrives`` is what the units are worth, without fees.
    """

    source: Position
    to: Position
    units: int
    arrives: int


@dataclass(frozen=True, slots=True)
class Plan:
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
