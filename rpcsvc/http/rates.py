"""``/rates.xml`` and ``/rates.json``: the amounts and rates on offer now, in the form that rate
listings read (the export format of exchange monitors, such as https://docs.bestchange.biz).

Every listed amount can be ordered by a caller without a token until the rate or the wallets'
holdings change, and brings at least ``out`` for each ``in``: these are the quote of the least
amount, in which fees weigh most. The most is rounded, so that it does not tell what each order of
others takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Final

import msgspec.json
from aiohttp import web
from msgspec import Struct
from msgspec.structs import asdict, replace

from rpcsvc.clock import Clock
from rpcsvc.domain.chains import Chain, network_of
from rpcsvc.domain.clients import ADDRESS, Client
from rpcsvc.domain.money import USDC, XMR, Asset, Money, format_units
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.errors import ServiceError
from rpcsvc.http.discovery import is_current
from rpcsvc.http.documents.links import RATES_JSON, RATES_XML
from rpcsvc.http.gate import CALLER, Gate
from rpcsvc.orders.ports.venue import QuoteRequest, Venue

XML: Final = "application/xml"
JSON: Final = "application/json"
PATHS: Final = frozenset({RATES_XML, RATES_JSON})
# Codes of monitors by chain id; other chains get one of the same form.
_CODES: Final = {
    1: "USDCERC20",
    10: "USDCOPTM",
    137: "USDCPOLYGON",
    8453: "USDCBASE",
    42161: "USDCARBTM",
    43114: "USDCAVAXC",
}
# An address with no orders: the document is the same for all readers.
_NOBODY: Final = Client(ADDRESS)
_SHOWN_DIGITS: Final = 2


class RateOffer(Struct, frozen=True, rename={"from_": "from", "in_": "in", "chain_id": "chainId"}):
    """The offer of one direction on one chain; amounts are decimal strings.

    ``amount`` is the most that is paid out, in ``to``; the limits are in ``from``.
    """

    from_: str
    to: str
    in_: str
    out: str
    amount: str
    minamount: str
    maxamount: str
    direction: str
    chain: str
    chain_id: int


class _Listing(Struct, frozen=True):
    """A rendered listing, by media type."""

    made_at: int
    bodies: dict[str, bytes]


async def offers(venue: Venue) -> list[RateOffer]:
    """Return the offers of all pairs that can be ordered now. Left out are pairs that are paused,
    on a network that is down, that a wallet can't pay for, or whose least amount fees would eat.

    Raises Unavailable where no rate is known for all amounts.
    """
    amounts = await venue.amounts(_NOBODY)
    found, known = [], await venue.networks()
    down = {name for name, health in known.items() if not health.ok}
    for (direction, chain), (least, most) in amounts.items():
        if most < least or down & {network_of(asset, chain) for asset in (XMR, USDC)}:
            continue
        try:
            shown = max(least, _rounded(most))
            found.append(await _offer(venue, direction, chain, least, shown))
        except ServiceError:  # none can be ordered: the quote gives callers the reason
            continue
    return found


def _rounded(units: int) -> int:
    """The units down to two significant digits: their last ones tell what others have ordered."""
    digits = str(units)
    return int(digits[:_SHOWN_DIGITS].ljust(len(digits), "0"))


async def _offer(
    venue: Venue, direction: Direction, chain: Chain, least: int, most: int
) -> RateOffer:
    """The offer of a direction on a chain. Raises as ``Venue.quote``."""
    sent, paid = deposit_asset(direction), payout_asset(direction)
    asked = QuoteRequest(direction, chain, Money(least, sent), client=_NOBODY)
    low = await venue.quote(asked)
    high = await venue.quote(replace(asked, amount=Money(most, sent)))
    return RateOffer(
        from_=_code(sent, chain),
        to=_code(paid, chain),
        in_=format_units(least, sent),
        out=format_units(low.expected_output, paid),
        amount=format_units(high.expected_output, paid),
        minamount=format_units(least, sent),
        maxamount=format_units(most, sent),
        direction=direction.value,
        chain=chain.name,
        chain_id=chain.chain_id,
    )


def _code(asset: Asset, chain: Chain) -> str:
    if asset is XMR:
        return XMR.symbol
    own = re.sub(r"[^A-Z0-9]", "", chain.name.upper())
    return _CODES.get(chain.chain_id, f"{USDC.symbol}{own}")


def _xml(found: list[RateOffer], network: str) -> bytes:
    """The listing as monitors read it. No value holds a character that XML would escape."""
    names = ("from_", "to", "in_", "out", "amount", "minamount", "maxamount")
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<!-- network: {network} -->", "<rates>"]
    for offer in found:
        values = asdict(offer)
        fields = [(name.rstrip("_"), values[name]) for name in names]
        lines.append(f"<item>{''.join(f'<{tag}>{text}</{tag}>' for tag, text in fields)}</item>")
    return "\n".join([*lines, "</rates>", ""]).encode()


class RatesHttp:
    """The routes of the listing, which is made again after ``kept_seconds``."""

    def __init__(self, gate: Gate, venue: Venue, clock: Clock, kept_seconds: int) -> None:
        self._gate = gate
        self._venue = venue
        self._clock = clock
        self._kept_ms = kept_seconds * 1000
        self._making = asyncio.Lock()
        self._listing: _Listing | None = None

    def routes(self) -> list[web.RouteDef]:
        """GET and HEAD of both forms."""
        return [
            web.get(RATES_XML, self._xml, allow_head=True),
            web.get(RATES_JSON, self._json, allow_head=True),
        ]

    async def _xml(self, request: web.Request) -> web.Response:
        return await self._answer(request, XML)

    async def _json(self, request: web.Request) -> web.Response:
        return await self._answer(request, JSON)

    async def _answer(self, request: web.Request, media_type: str) -> web.Response:
        request[CALLER] = caller = self._gate.admit(request)
        self._gate.charge(caller, "requests")
        listing = await self._current()
        body = listing.bodies[media_type]
        left_ms = max(0, listing.made_at + self._kept_ms - self._clock.now_ms())
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {
            "etag": etag,
            # no-transform: the signature covers exactly these bytes.
            "cache-control": f"public, max-age={left_ms // 1000}, no-transform",
            **caller.headers,
            "x-request-id": caller.request_id,
        }
        if is_current(request.headers.getall("if-none-match", ()), etag):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, "content-type": media_type})

    async def _current(self) -> _Listing:
        """The listing, made once for all who ask at the same time. Raises Unavailable."""
        async with self._making:
            now, listing = self._clock.now_ms(), self._listing
            if listing is None or not 0 <= now - listing.made_at < self._kept_ms:
                found, network = await offers(self._venue), self._venue.profile.network
                document = {"network": network, "rates": found}
                bodies = {XML: _xml(found, network), JSON: msgspec.json.encode(document)}
                listing = self._listing = _Listing(now, bodies)
            return listing
