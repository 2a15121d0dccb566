"""The contents of the site root, with the chart of the last day's rates, and of the status page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rpcsvc import __version__
from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.clients import Client
from rpcsvc.domain.money import USDC, XMR, Asset, format_units
from rpcsvc.domain.pricing import deposit_asset, payout_asset
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.http.documents import links
from rpcsvc.http.pages.checkout import moment, network_title
from rpcsvc.http.pages.rendering import Texts
from rpcsvc.http.site import Site
from rpcsvc.operations.service import Service
from rpcsvc.orders.ports.venue import DirectionLimits, Market
from rpcsvc.store.replicas import RateRow

SPAN_MS: Final = 24 * 3_600_000
STEP_MS: Final = 10 * 60_000
WIDTH: Final = 960
HEIGHT: Final = 160
_MARGIN: Final = 8


class Limit(NamedTuple):
    """The least and the most that can be sent now in one direction."""

    sent: str
    received: str
    least: str
    most: str


class Network(NamedTuple):
    """A network, and in a word whether orders can be settled on it."""

    name: str
    word: str
    is_down: bool


class CheckLine(NamedTuple):
    """A line of the status page."""

    name: str
    word: str
    detail: str | None


async def home_values(
    site: Site, service: Service, texts: Texts, client: Client, readiness: Mapping[str, Health]
) -> dict[str, Any]:
    """Values of the page at the root; limits are this client's."""
    market = await service.venue.market(client)
    return {
        "takes_orders": all(health.ok for health in readiness.values()),
        "networks": await _networks(service, texts),
        "rate": "" if market is None else _rate(market, service.clock.now_ms(), texts),
        "chart": await _chart(service),
        "limits": [] if market is None else [_limit(each) for each in market.limits],
        "documents": links.DESCRIPTIONS.items(),
        "support": links.endpoints(site)["support"],
    }


async def status_values(
    service: Service, texts: Texts, checks: Mapping[str, Health], *, is_insider: bool
) -> dict[str, Any]:
    """Values of the status page. Details name orders and balances, so only insiders get them."""
    now = service.clock.now_ms()
    is_well = all(health.ok for health in checks.values())
    return {
        "is_well": is_well,
        "heading": texts.say("status.well" if is_well else "status.unwell"),
        "now": moment(now, now),
        "version": __version__,
        "engine": service.venue.profile.engine,
        "networks": await _networks(service, texts),
        "checks": [
            CheckLine(
                texts.entries.get(f"status.check_{name}", name),
                texts.say("status.ok" if health.ok else "status.degraded"),
                health.detail if is_insider else None,
            )
            for name, health in checks.items()
        ],
    }


async def _networks(service: Service, texts: Texts) -> list[Network]:
    """The networks on offer; none while that is unknown."""
    try:
        listed = service.venue.listed_chains()
    except Unavailable:
        return []
    known = await service.venue.networks()
    profile = service.venue.profile
    found = [(MONERO_NETWORK, XMR, chain.name) for chain in listed[:1]]
    found += [(chain.name, USDC, chain.name) for chain in listed]
    return [
        _network(network_title(profile, asset, chain), known.get(name), texts)
        for name, asset, chain in found
    ]


def _network(name: str, health: Health | None, texts: Texts) -> Network:
    if health is None:
        return Network(name, texts.say("home.network_unknown"), is_down=False)
    word = texts.say("home.network_up" if health.ok else "home.network_down")
    return Network(name, word, is_down=not health.ok)


def _rate(market: Market, now: int, texts: Texts) -> str:
    found = market.rate
    shown = format_units(found.usdc_per_xmr, USDC)
    return texts.say("home.rate_is", rate=shown, time=moment(found.as_of, now).text)


async def _chart(service: Service) -> RateChart | None:
    try:
        return rate_chart(await service.rates.recent(SPAN_MS, STEP_MS))
    except Unavailable:
        return None  # the database is down: the line above says that no orders are taken


def _limit(found: DirectionLimits) -> Limit:
    sent, received = deposit_asset(found.direction), payout_asset(found.direction)
    most = found.maximum if found.max_now is None else min(found.maximum, found.max_now)
    return Limit(sent.symbol, received.symbol, _rounded(found.minimum, sent, up=True),
                 _rounded(most, sent, up=False))  # fmt: skip


def _rounded(units: int, asset: Asset, *, up: bool) -> str:
    """Round to four decimals of XMR or to cents, towards the inside of the limits."""
    step = 10 ** (asset.decimals - (4 if asset is XMR else 2))
    whole = -(-units // step) if up else units // step
    return f"{format_units(whole * step, asset)} {asset.symbol}"


# --- the chart --------------------------------------------------------------------------------


class RateChart(NamedTuple):
    """The ``path`` of an SVG that is WIDTH wide and HEIGHT high, and its extremes in USDC."""

    path: str
    least: str
    most: str
    width: int = WIDTH
    height: int = HEIGHT


def rate_chart(rows: Sequence[RateRow]) -> RateChart | None:
    """A line chart of rates that are one step apart, oldest first; None for fewer than two.

    Its right edge is now. The line is broken where a step has no rate.
    """
    if len(rows) < 2:
        return None
    rates = [row.usdc_per_xmr for row in rows]
    least, most = min(rates), max(rates)
    path, before = [], None
    for row in rows:
        x = WIDTH - min(max(row.age_ms, 0), SPAN_MS) * WIDTH // SPAN_MS
        is_next = before is not None and row.at - before < 2 * STEP_MS
        # A line of no length is drawn as a dot, so a step between two breaks is seen as well.
        path.append(f"L{x} {_y(row, least, most)}" if is_next else f"M{x} {_y(row, least, most)}h0")
        before = row.at
    return RateChart("".join(path), format_units(least, USDC), format_units(most, USDC))


def _y(row: RateRow, least: int, most: int) -> int:
    if least == most:
        return HEIGHT // 2
    above = (row.usdc_per_xmr - least) * (HEIGHT - 2 * _MARGIN) // (most - least)
    return HEIGHT - _MARGIN - above
