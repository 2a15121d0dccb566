"""GET /metrics in the Prometheus text format: counters and current values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rpcsvc import __version__
from rpcsvc.clock import DAY_MS, Clock, steady_ms
from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.errors import ServiceError, Unavailable
from rpcsvc.health import Health
from rpcsvc.http.gate import Gate
from rpcsvc.http.messages import error_headers, respond
from rpcsvc.http.metrics import Labels, Metrics, counter, gauge
from rpcsvc.operations.dispatch import flat_failure
from rpcsvc.orders.settlement import Readings
from rpcsvc.orders.waits import Waits
from rpcsvc.store.leases import Lease
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.webhooks import Backlog, WebhookStore

METRICS_PATH: Final = "/metrics"
_WEI: Final = 10**18


class PaidFees:
    """Adds up network fees since the start, by network: piconero or wei.

    Each reading queries the last day only. A sum never falls, not even for a payment dropped by a
    reorg: Prometheus takes a falling counter for a restart.
    """

    def __init__(self, books: OperatorBooks, since: int) -> None:
        self._books = books
        self._since = since
        self._before: Counter[str] = Counter()
        self._reported: dict[str, int] = {}

    async def total(self, now: int) -> Mapping[str, int]:
        """The sums. Raises errors.Unavailable."""
        until = now - DAY_MS
        if until > self._since:
            self._before.update(await self._books.network_fees(self._since, until))
            self._since = until
        recent = await self._books.network_fees(self._since)
        for name in self._before.keys() | recent.keys():
            total = self._before[name] + recent.get(name, 0)
            self._reported[name] = max(total, self._reported.get(name, 0))
        return self._reported


class Readout:
    """Reads current values: open orders, checks, wallets, rate, networks, waits, the last audit."""

    def __init__(
        self,
        engine: str,
        readings: Readings,
        books: OperatorBooks,
        webhooks: WebhookStore,
        checks: Callable[[], Awaitable[Mapping[str, Health]]],
        waits: Waits,
        lease: Lease,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._readings = readings
        self._books = books
        self._webhooks = webhooks
        self._checks = checks
        self._waits = waits
        self._lease = lease
        self._clock = clock
        self._fees = PaidFees(books, clock.now_ms())

    async def families(self) -> list[Metric]:
        """The families. Raises errors.Unavailable when the database can't be read."""
        checks, doubts = await self._checks(), await self._books.doubts()
        orders = await self._books.open_orders_by_status()
        authorizations = await self._books.unresolved_authorizations()
        backlog = await self._webhooks.backlog()
        now = self._clock.now_ms()
        ages = [((name,), max(0, now - since) / 1000) for name, (_, since) in orders.items()]
        lags = self._readings.scan_lags().items()
        return [
            gauge("rpcsvc_info", [((__version__, self._engine), 1)]),
            gauge("rpcsvc_orders_open", [((name,), n) for name, (n, _) in orders.items()]),
            gauge("rpcsvc_orders_open_oldest_seconds", ages),
            gauge("rpcsvc_check_ok", [((name,), check.ok) for name, check in checks.items()]),
            gauge("rpcsvc_payouts_paused", [((), self._readings.paused() is not None)]),
            gauge("rpcsvc_scan_lag_seconds", [((name,), lag / 1000) for name, lag in lags]),
            gauge("rpcsvc_wallet_amount", await self._amounts()),
            gauge("rpcsvc_unfinal_usd", await self._at_risk()),
            gauge("rpcsvc_upstream_orders_in_doubt", [((), len(doubts))]),
            gauge("rpcsvc_approvals_pending", [((), await self._books.approvals_pending(now))]),
            gauge("rpcsvc_webhook_messages_pending", [((), backlog.pending)]),
            gauge("rpcsvc_webhook_oldest_seconds", [((), _age(backlog, now))]),
            gauge("rpcsvc_transfers_due_amount", await self._due()),
            gauge("rpcsvc_payments_unmined", await self._unmined()),
            gauge("rpcsvc_authorizations_unresolved", [((), authorizations)]),
            gauge("rpcsvc_network_fees_day", _coins(await self._books.network_fees(now - DAY_MS))),
            counter("rpcsvc_network_fees", _coins(await self._fees.total(now))),
            counter("rpcsvc_withdrawals", list((await self._books.withdrawals_over()).items())),
            *self._authorization_gas(),
            *self._rate(now),
            *self._states(),
            *self._process(),
            *self._audit(),
        ]

    async def _at_risk(self) -> list[tuple[Labels, float]]:
        if self._readings.at_risk is None:
            return []
        sums = await self._readings.at_risk()
        return [(key, units / 10**USDC.decimals) for key, units in sums.items()]

    async def _due(self) -> list[tuple[Labels, float]]:
        return [(key, units / _one(key[0])) for key, units in (await self._books.due()).items()]

    async def _unmined(self) -> list[tuple[Labels, float]]:
        found = await self._books.unmined_payments(sorted(self._readings.networks))
        return [((network,), count) for network, count in found.items()]

    def _states(self) -> Iterator[Metric]:
        states = self._readings.states()
        ages = {name: state.block_age for name, state in states.items()}
        yield gauge(
            "rpcsvc_block_age_seconds",
            [((name,), age / 1000) for name, age in ages.items() if age is not None],
        )
        known = {
            "rpcsvc_node_height": {name: state.node_height for name, state in states.items()},
            "rpcsvc_scanned_height": {name: state.scanned_height for name, state in states.items()},
            "rpcsvc_wallet_outputs": {name: state.outputs for name, state in states.items()},
        }
        for family, values in known.items():
            yield gauge(family, [((name,), n) for name, n in values.items() if n is not None])
        nonces = {name: state.nonces for name, state in states.items() if state.nonces is not None}
        yield gauge("rpcsvc_nonce_gap", [((name,), gap.ahead) for name, gap in nonces.items()])
        yield gauge(
            "rpcsvc_nonces_unexplained",
            [
                ((name, kind), count)
                for name, gap in nonces.items()
                for kind, count in (("unrecorded", gap.unrecorded), ("missing", gap.missing))
            ],
        )
        yield counter(
            "rpcsvc_sweeps",
            [((name, how), n) for name, found in states.items() for how, n in found.sweeps.items()],
        )

    def _process(self) -> Iterator[Metric]:
        left = self._lease.left_ms()
        yield gauge(
            "rpcsvc_waits", [((kind,), count) for kind, count in self._waits.counts.items()]
        )
        yield gauge("rpcsvc_lease_held", [((), self._lease.has_time())])
        yield gauge("rpcsvc_lease_token", [((), self._lease.token)])
        yield gauge("rpcsvc_lease_left_seconds", [] if left is None else [((), left / 1000)])

    def _authorization_gas(self) -> Iterator[Metric]:
        share = self._readings.authorization_gas()
        if share is not None:
            yield gauge("rpcsvc_authorization_gas_ratio", [((), share)])

    def _rate(self, now: int) -> Iterator[Metric]:
        spread = self._readings.rate_spread_bps()
        if spread is not None:
            yield gauge("rpcsvc_rate_spread_ratio", [((), spread / 10_000)])
        if self._readings.rate is None:
            return
        try:
            rate = self._readings.rate()
        except Unavailable:
            return
        yield gauge("rpcsvc_rate_age_seconds", [((), max(0, now - rate.as_of) / 1000)])
        yield gauge("rpcsvc_rate_usdc_per_xmr", [((), rate.usdc_per_xmr / 10**USDC.decimals)])

    def _audit(self) -> Iterator[Metric]:
        audit = self._readings.last_audit()
        if audit is None:
            return
        if audit.differences is not None:
            yield gauge("rpcsvc_audit_differences", [((), audit.differences)])
        yield gauge("rpcsvc_audit_age_seconds", [((), (steady_ms() - audit.at) / 1000)])

    async def _amounts(self) -> list[tuple[Labels, float]]:
        """Amounts in whole coins. Floats, since they are only displayed."""
        readings = self._readings
        found: list[tuple[Labels, float]] = []
        for network in sorted(readings.networks):
            one = _one(network)
            if readings.reserved is not None:
                reserved = await readings.reserved(network)
                found.append(((network, "reserved"), reserved.total / one))
            if readings.holdings is None:
                continue
            try:
                holdings = readings.holdings(network)
            except Unavailable:
                continue
            found.append(((network, "free"), holdings.free / one))
            found.append(((network, "locked"), holdings.locked / one))
        return found


def _coins(fees: Mapping[str, int]) -> list[tuple[Labels, float]]:
    """Network fees in whole coins."""
    return [
        ((name,), units / (_one(name) if name == MONERO_NETWORK else _WEI))
        for name, units in fees.items()
    ]


def _one(network: str) -> int:
    """The atomic units of a whole coin of a network's asset."""
    return int(10 ** (XMR if network == MONERO_NETWORK else USDC).decimals)


def _age(backlog: Backlog, now: int) -> float:
    """Seconds since the oldest pending event; 0 where nothing is pending."""
    return 0.0 if backlog.oldest_at is None else max(0, now - backlog.oldest_at) / 1000


class _Rendered(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


class MetricsHttp:
    """GET /metrics, for callers that may call /rpc, and for holders of a token for metrics."""

    def __init__(self, gate: Gate, metrics: Metrics, readout: Readout) -> None:
        self._gate = gate
        self._metrics = metrics
        self._readout = readout

    def routes(self) -> list[web.RouteDef]:
        """The route of /metrics."""
        return [web.get(METRICS_PATH, self.get)]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """All families."""
        caller = self._gate.admit(request)
        try:
            self._gate.require_scraper(request, caller)
            found = await self._readout.families()
        except ServiceError as error:
            headers = {**caller.headers, **error_headers(error)}
            status = error.http_status
            return respond(flat_failure(error), caller.request_id, status=status, headers=headers)
        registry = CollectorRegistry()
        registry.register(_Rendered([*self._metrics.families(), *found]))
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(registry), headers=headers)
