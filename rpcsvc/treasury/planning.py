"""The inventory of the engine onchain beside its targets, as ``rpcsvc treasury plan`` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.inventory_plan import Move, Plan, Position, plan_moves
from rpcsvc.domain.money import USDC, XMR, as_units, format_units
from rpcsvc.settings import SettingsError
from rpcsvc.settings_onchain import InventorySettings
from rpcsvc.settlement.onchain.monero.ledger import NETWORK as MONERO
from rpcsvc.settlement.onchain.readiness import NetworkFound, XmrHeld
from rpcsvc.store.operator_books import Flow, Unswept

Json = dict[str, Any]
DAY_MS: Final = 24 * 3600 * 1000
_NOTHING: Final = Unswept(0, 0, 0)


def read_targets(settings: InventorySettings, served: ChainRegistry) -> dict[str, int]:
    """Units to keep free by network. Raises SettingsError for a network that is not served."""
    networks = (MONERO, *(chain.name for chain in served.all()))
    targets, problems = {}, []
    for given in settings.targets:
        name, _, amount = given.partition("=")
        network, asset = name.lower(), XMR if name.lower() == MONERO else USDC
        if network not in networks:
            problems.append(f"inventory.targets: received {name!r}; allowed: {', '.join(networks)}")
        elif len(amount.partition(".")[2]) > asset.decimals:
            problems.append(
                f"inventory.targets: received {given!r}; allowed: at most {asset.decimals}"
                f" decimals of {asset.symbol}"
            )
        else:
            targets[network] = int(as_units(amount, asset))
    if problems:
        raise SettingsError(problems)
    return targets


class Inventory:
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
        """What is locked comes back, but can't be sent yet."""
        return self._position(MONERO, held.unlocked + held.locked, held.unlocked)

    def usdc(self, found: NetworkFound, usdc: int, unswept: Mapping[str, Unswept]) -> Position:
        """What is on deposit addresses is swept, but can't be sent yet."""
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
