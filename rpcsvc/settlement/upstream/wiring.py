"""Connects the engine upstream: client, budgets, breaker, and one of two dialects.

The BFF of another rpcsvc has error codes and idempotency keys, and reports its network in the agent
API's capabilities. The public API (``/v1/...``) has neither: a creation of unknown outcome is never
sent again, and of its errors, which are free text, only what certainly names something that the
caller can mend is passed on, in our own words. Sources: spec 4.4 (paths), spec 7 (errors).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from yarl import URL

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.order import PERPS
from rpcsvc.domain.reservations import counted
from rpcsvc.engine_context import EngineContext
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import ClientLimits
from rpcsvc.orders.policy import MakeOrders, Orders
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.processor import Quarantine
from rpcsvc.orders.scheduler.worker import Deadlines, ExpiredReservations, Worker
from rpcsvc.orders.settlement import Settlement, authorization_funding
from rpcsvc.settings import Settings, SettingsError, UpstreamSettings
from rpcsvc.settlement.upstream.answers import PayableNetworks
from rpcsvc.settlement.upstream.calls import CALLER_CODES, Dialect, Upstream
from rpcsvc.settlement.upstream.client import UpstreamClient, system_timing
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.follower import Follower
from rpcsvc.settlement.upstream.limits import (
    Breaker,
    Budget,
    shared,
)
from rpcsvc.settlement.upstream.offered import ChainWatch, NetworkCheck, OfferedChains
from rpcsvc.settlement.upstream.relay import POLL_MS, Relay, RelayedAuthorizations
from rpcsvc.settlement.upstream.transport import (
    ClientOptions,
    RemoteError,
    UpstreamRefused,
    base_url,
)
from rpcsvc.settlement.upstream.venue import UpstreamVenue

_MOST_DETAILS: Final = 16
_MOST_ALLOWED: Final = 50
_LONGEST_DETAIL: Final = 128

# Words that follow one another in a text, others between them or not.
_Phrase: TypeAlias = tuple[re.Pattern[str], ...]
_NOT_SUPPORTED: Final = r"\b(?:unsupported|not supported|unknown)\b"
_CHAIN: Final = r"\b(?:chain|network)"
_COIN: Final = r"\b(?:token|asset|coin)\b"


def _bff_error(value: Any) -> RemoteError | None:
    """``{"error": {code, message, details?}}``, or None for anything else."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return None
    code, message, details = error.get("code"), error.get("message"), error.get("details")
    if not isinstance(code, str) or not code or not isinstance(message, str):
        return None
    return RemoteError(code, message, _plain_details(details))


def _plain_details(details: Any) -> dict[str, Any]:
    """The details that are short texts, whole numbers, or lists of such: limits, allowed values."""
    if not isinstance(details, dict):
        return {}
    kept = {k: v for k, v in details.items() if len(k) <= 64 and (_is_plain(v) or _is_list(v))}
    return dict(list(kept.items())[:_MOST_DETAILS])


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_DETAIL and value.isprintable()
    return isinstance(value, bool | int)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ALLOWED and all(map(_is_plain, value))


def _bff_code(refusal: UpstreamRefused) -> str | None:
    """The refusal's code, if it is one that a caller can mend."""
    return refusal.code if refusal.code in CALLER_CODES else None


def _bff_base_url(url: str) -> str:
    """The site's root, of that or of its BFF."""
    return url.rstrip("/").removesuffix("/bff/v1")


BFF: Final = Dialect(
    name="bff",
    base_url=_bff_base_url,
    paths={
        "capabilities": "/api/v1/agent/capabilities",
        "chains": "/bff/v1/chains",
        "quote": "/bff/v1/quote",
        "create_order": "/bff/v1/orders",
        "order": "/bff/v1/orders/{id}",
        "cancel_order": "/bff/v1/orders/{id}/cancel",
        "fund_order": "/api/v1/agent/swap/fund/{id}",
        "create_ticket": "/bff/v1/support/tickets",
        "bridge_rates": "/bff/v1/bridge/rates",
        "bridge_deposit": "/bff/v1/bridge/deposit",
        "bridge_withdraw": "/bff/v1/bridge/withdraw",
        "bridge_order": "/bff/v1/bridge/order/{id}",
    },
    keys=True,
    cuts_usdc=True,
    exact=True,
    refund_addresses=True,
    read_error=_bff_error,
    code_of=_bff_code,
    messages_for_users=True,
    times_ends=True,
    # The default limits of another rpcsvc, less a fifth for others behind the same address.
    creations_per_minute=24,
    calls_per_minute=240,
)


def _phrase(*patterns: str) -> _Phrase:
    return tuple(re.compile(pattern, re.ASCII | re.IGNORECASE) for pattern in patterns)


def _has(phrase: _Phrase, text: str) -> bool:
    """Whether a text has the words of a phrase, in linear time: ``.*`` would take quadratic."""
    at = 0
    for words in phrase:
        found = words.search(text, at)
        if found is None:
            return False
        at = found.end()
    return True


_PHRASES: Final[tuple[tuple[_Phrase, str], ...]] = (
    (
        _phrase(r"\b(?:below|under|less than|lower than|smaller than)\b", r"\bmin"),
        "amount_below_minimum",
    ),
    (
        _phrase(r"\btoo (?:small|low)\b|\bminimum (?:amount|swap|deposit|order)\b"),
        "amount_below_minimum",
    ),
    (
        _phrase(r"\b(?:above|over|more than|greater than|larger than|exceeds?)\b", r"\bmax"),
        "amount_above_maximum",
    ),
    (
        _phrase(r"\btoo (?:large|high|big)\b|\bmaximum (?:amount|swap|deposit|order)\b"),
        "amount_above_maximum",
    ),
    (_phrase(_NOT_SUPPORTED, _CHAIN), "unsupported_chain"),
    (_phrase(_CHAIN, _NOT_SUPPORTED), "unsupported_chain"),
    (_phrase(_NOT_SUPPORTED, _COIN), "unsupported_token"),
    (_phrase(_COIN, _NOT_SUPPORTED), "unsupported_token"),
    (_phrase(r"\binvalid\b", r"\b(?:to ?address|destination|recipient)"), "invalid_destination"),
)
_NO_ORDER: Final = (_phrase(r"\border\b", r"\bnot found\b"), _phrase(r"\bno such order\b"))


def _v1_error(value: Any) -> RemoteError | None:
    """``{"error": "text"}``, or None for anything else."""
    text = value.get("error") if isinstance(value, dict) else None
    return RemoteError(None, text) if isinstance(text, str) and text else None


def _v1_code(refusal: UpstreamRefused) -> str | None:
    """Our code for a refusal, when its text says one thing that a caller can mend, and no other."""
    if refusal.status == 404:
        is_lost = any(_has(phrase, refusal.message) for phrase in _NO_ORDER)
        return "order_not_found" if is_lost else None
    if refusal.status not in (400, 422):
        return None
    found = {code for phrase, code in _PHRASES if _has(phrase, refusal.message)}
    return found.pop() if len(found) == 1 else None


def _v1_base_url(url: str) -> str:
    """``url``, with /v1 where it has no path."""
    parsed = URL(url)
    # with_path would drop a query, which the check of the options refuses.
    is_bare = parsed.path in ("", "/") and not (parsed.query_string or parsed.fragment)
    return str(parsed.with_path("/v1")) if is_bare else url


V1: Final = Dialect(
    name="v1",
    base_url=_v1_base_url,
    paths={
        "chains": "/chains",
        "quote": "/quote",
        "create_order": "/order",
        "order": "/order/{id}",
        "bridge_rates": "/bridge/rates",
        "bridge_deposit": "/bridge/deposit",
        "bridge_withdraw": "/bridge/withdraw",
        "bridge_order": "/bridge/order/{id}",
    },
    keys=False,
    cuts_usdc=False,
    exact=False,
    refund_addresses=False,
    read_error=_v1_error,
    code_of=_v1_code,
    messages_for_users=False,
    times_ends=False,
    creations_per_minute=5,
    calls_per_minute=20,
)


@asynccontextmanager
async def connect(context: EngineContext, make_orders: MakeOrders) -> AsyncIterator[Settlement]:
    """Have the upstream settle orders, with settings that passed ``check``."""
    settings = context.settings.upstream
    monero = MoneroNetwork(settings.monero_network)
    async with upstream_engine(settings, context.chains) as engine:
        profile = VenueProfile(
            engine="upstream",
            network=monero.value,
            chains=engine.chains,
            monero_networks=frozenset({monero}),
            names=engine.names,
            bridges=frozenset({PERPS}),
            takes_signatures=lambda: engine.takes_authorizations,
        )
        await engine.start()
        yield await _settlement(make_orders(profile, context.clock, counted), engine)


async def _settlement(orders: Orders, engine: UpstreamEngine) -> Settlement:
    """The venue over the upstream; its orders are followed by the replica with the lease."""
    store, clock, policy, lease = orders.store, orders.clock, orders.policy, orders.lease
    authorizations = RelayedAuthorizations(store, engine)
    funding = authorization_funding(orders, authorizations, POLL_MS)
    follower = Follower(store, orders.processor, engine, clock)
    relay = Relay(store, engine, clock, follower.follow if lease.is_held else _followed_elsewhere)
    await relay.recover(is_alone=lease.is_alone)
    if lease.is_held:
        await follower.recover()
        worker = _settler(orders, relay, follower, funding)
    else:
        worker = Worker((), Quarantine(), loops=(relay.run,))
    limits = ClientLimits(
        store, policy, lambda _network, _reserved: policy.reservable, clock, orders.secret
    )
    venue = UpstreamVenue(orders, engine, relay, follower, limits, funding)
    return Settlement(orders, engine, venue, worker)


def _settler(orders: Orders, relay: Relay, follower: Follower, funding: Authorizations) -> Worker:
    store, clock, quarantine = orders.store, orders.clock, Quarantine()
    unwatched = ScanProgress((), clock)
    return Worker(
        (
            *(() if orders.lease.is_alone else (follower.find,)),
            relay.find,
            ExpiredReservations(store, unwatched, clock).end,
            orders.retention.clean,
            Deadlines(store, orders.processor, unwatched, quarantine, clock).keep,
        ),
        quarantine,
        loops=(relay.run, follower.run, funding.run),
    )


def _followed_elsewhere(_order_id: str) -> None:
    """The replica that settles finds new orders by itself."""


def check(settings: Settings, _chains: ChainRegistry) -> None:
    """Raise SettingsError for an address that can't be called, and for integrators: the upstream
    sets the price, so no fee of theirs can be taken here.
    """
    if settings.integrators:
        raise SettingsError(
            [
                "integrators: with engine upstream the price is the upstream's, and no fee of an"
                " integrator can be taken here; configure them there"
            ]
        )
    client_options(settings.upstream)


@asynccontextmanager
async def upstream_engine(
    settings: UpstreamSettings, chains: ChainRegistry
) -> AsyncIterator[UpstreamEngine]:
    """The engine, connected as long as the block lasts. Raises SettingsError."""
    dialect, options = dialect_of(settings), client_options(settings)
    timing = system_timing()
    most = settings.creations_per_minute or dialect.creations_per_minute
    creations = Budget(most, now=timing.now_ms, sleep=timing.sleep_ms, reserved=min(3, most - 1))
    calls, prices = shared(
        settings.calls_per_minute or dialect.calls_per_minute,
        now=timing.now_ms,
        sleep=timing.sleep_ms,
    )
    client = UpstreamClient(
        options,
        read_error=dialect.read_error,
        creations=creations,
        calls=calls,
        prices=prices,
        breaker=Breaker(),
        timing=timing,
    )
    monero = MoneroNetwork(settings.monero_network)
    networks = PayableNetworks((monero,), chains.token_contracts)
    async with client:
        upstream = Upstream(client, dialect, networks)
        offered = OfferedChains(chains)
        check = NetworkCheck(upstream, monero) if "capabilities" in dialect.paths else None
        watch = ChainWatch(upstream, offered, timing, network=check)
        try:
            yield UpstreamEngine(client, upstream, offered, watch, creations, monero)
        finally:
            await watch.close()


def dialect_of(settings: UpstreamSettings) -> Dialect:
    """The dialect that the upstream is called in."""
    return BFF if settings.dialect == "bff" else V1


def client_options(settings: UpstreamSettings) -> ClientOptions:
    """The client's options, checked. Raises SettingsError."""
    if not settings.url:
        raise SettingsError(["upstream.url: received nothing; engine upstream needs an address"])
    key = settings.api_key
    try:
        options = ClientOptions(
            dialect_of(settings).base_url(settings.url),
            api_key=key.get_secret_value() if key else None,
            plain_http=settings.plain_http,
        )
        base_url(options)  # refuses what can't be called
    except ValueError as error:
        raise SettingsError([f"upstream: {error}"]) from error
    return options
