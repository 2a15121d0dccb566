"""The limits of clients as calls meet them, and the admin method that lists the clients.

The store counts a day's worth in the transaction of the order; what is read here beforehand only
makes the refusal a good one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from rpcsvc.clock import day_of, iso8601, ms_to_next_day
from rpcsvc.domain.clients import (
    DEFAULT,
    Clients,
    Credential,
    ExceededLimit,
    KnownClient,
    Scope,
    worth,
)
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.domain.order import PERPS, Order
from rpcsvc.errors import DestinationNotAllowed, Forbidden, SettingsError, SpendLimit
from rpcsvc.operations.admin import admin_row
from rpcsvc.operations.approvals import Unapproved
from rpcsvc.operations.params import NoParams
from rpcsvc.operations.service import Call, Cli, Flat, Operation, Service
from rpcsvc.orders.ports.venue import OrderRequest, VenueQuote
from rpcsvc.store.database import StaleWrite
from rpcsvc.strict_json import Json


def require_scopes(credentials: Iterable[Credential], operations: Sequence[Operation]) -> None:
    """Raise SettingsError for scopes that are no group and no operation."""
    known = [*map(str, Scope), *(each.name for each in operations)]
    problems = []
    for client in dict.fromkeys(each.client for each in credentials):
        for scope in sorted(client.scopes.difference(known)):
            nearest = difflib.get_close_matches(scope, known, n=1, cutoff=0.0)[0]
            problems.append(
                f"clients.{client.name}.scopes: received {scope!r}; allowed: read, order, fund and"
                f" names of operations; the nearest is {nearest}"
            )
    if problems:
        raise SettingsError(problems)


async def require_worth(service: Service, known: KnownClient | None, quote: VenueQuote) -> None:
    """Raise SpendLimit for an order at the quote that is above a limit of its client."""
    if known is not None and known.has_limits:
        _within(known, await _used(service, known), service.clock.now_ms(), quote)


async def within_limits(service: Service, request: OrderRequest, *, is_first: bool) -> OrderRequest:
    """The request of a new order, which accepts no quote above the limits of its client.

    A retry of a key that has its answer does not come here. The first attempt (``is_first``) does
    not read the day, since its transaction counts it; one that is refused is made again. Raises
    DestinationNotAllowed, and Forbidden for an order of the bridge, which takes any deposit.
    """
    known = request.known
    if known is None:
        return request
    known.require_destination(request.to, field=request.to_field, caller=known)
    known.require_refund_address(request.refund_address, request.direction)
    if not known.has_limits:
        return request
    if request.chain.name == PERPS:
        raise Forbidden(
            f"The client {known.name} has limits in USD, and an order of the bridge takes any"
            " amount. Swap without the bridge, or ask the operator for a client without"
            " max_order_usd and max_day_usd."
        )
    used, now = None if is_first else await _used(service, known), service.clock.now_ms()
    return replace(request, accept=partial(_accept, request, known, used, now))


def _accept(
    request: OrderRequest, known: KnownClient, used: int | None, now: int, quote: VenueQuote
) -> None:
    """Raise SpendLimit, Unapproved, and what the request itself does not accept.

    ``used``: None where the day was not read; raises StaleWrite then in place of SpendLimit.
    """
    if request.accept is not None:
        request.accept(quote)
    try:
        units = _within(known, used or 0, now, quote)
    except SpendLimit:
        if used is None:
            raise StaleWrite from None
        raise
    if known.needs_approval(units):
        approval = request.approval
        if approval is None or not approval.covers(quote.deposit.units, quote.expected_output):
            raise Unapproved(quote, units)


async def _used(service: Service, known: KnownClient) -> int:
    today = day_of(service.clock.now_ms())
    return (await service.store.spent(today, [known.name])).get(known.name, 0)


def _within(known: KnownClient, used: int, now: int, quote: VenueQuote) -> int:
    """Return the worth of an order at the quote. Raises SpendLimit."""
    units = worth(quote.direction, quote.deposit.units, quote.rate.usdc_per_xmr)
    exceeded = known.exceeded(units, used)
    if exceeded is not None:
        raise _spend_limit(known, exceeded, units, now)
    return units


def _spend_limit(known: KnownClient, exceeded: ExceededLimit, units: int, now: int) -> SpendLimit:
    left = format_units(max(0, exceeded.limit - exceeded.used), USDC)
    most = format_units(exceeded.limit, USDC)
    seconds, free_at = None, None
    if exceeded.used:
        wait = ms_to_next_day(now)
        seconds, free_at = -(-wait // 1000), iso8601(now + wait)
    again = "" if free_at is None else f", or come back after {free_at}"
    return SpendLimit(
        f"The order is worth {format_units(units, USDC)} USD, and {exceeded.setting} of the client"
        f" {known.name} leaves {left} of {most}. Order at most that{again}.",
        details={
            "limit": exceeded.setting,
            "limitUsd": most,
            "usedUsd": format_units(exceeded.used, USDC),
            "leftUsd": left,
            "orderUsd": format_units(units, USDC),
            "freeAt": free_at,
        },
        retry_after=seconds,
    )


def require_refundable(
    service: Service, order: Order, address: str, field: str, caller: KnownClient | None
) -> None:
    """Raise DestinationNotAllowed for a refund address that the order's client may not name.

    Any caller is refused, since the order's session may be in other hands.
    """
    name = order.terms.client
    if name is None or name == DEFAULT:
        return
    owner = service.clients.named(name)
    if owner is None:
        raise DestinationNotAllowed(
            f"The order is of the client {name}, whose table the settings do not have any more, so"
            " its destinations are not known. Have the operator add the table again, and then name"
            " the address.",
            field=field,
            received=address,
        )
    owner.require_destination(address, field=field, caller=caller)


# --- the operator's list -------------------------------------------------------------------------


async def list_clients(clients: Clients, service: Service, _params: NoParams, _call: Call) -> Flat:
    """Clients of the settings, what each has used today (UTC), and what it may use."""
    now = service.clock.now_ms()
    used = await service.store.spent(day_of(now), [each.name for each in clients.listed])
    rows = [_row(each, used.get(each.name, 0)) for each in clients.listed]
    return Flat({"clients": rows, "freeAt": iso8601(now + ms_to_next_day(now))})


def _row(client: KnownClient, used: int) -> Json:
    def usd(units: int | None) -> str | None:
        return None if units is None else format_units(units, USDC)

    return {
        "client": client.name,
        "scopes": sorted(client.scopes),
        "usedTodayUsd": usd(used),
        "leftTodayUsd": usd(None if client.max_day is None else max(0, client.max_day - used)),
        "approveAboveUsd": usd(client.approve_above),
        "maxOrderUsd": usd(client.max_order),
        "maxDayUsd": usd(client.max_day),
        "ordersPerMinute": client.orders_per_minute,
        "spreadBps": client.spread_bps,
        "destinations": None if client.destinations is None else list(client.destinations),
    }


CLIENTS: Final = (
    admin_row(
        "clients.list",
        NoParams,
        list_clients,
        cli=Cli("clients list", "what each client has used today, and what it may use"),
    ),
)
