"""The metric families of /metrics, and the counters since the start.

``Metrics`` only counts, on the event loop's thread; families are built on each read
(http/scrape.py). ``FAMILIES`` names all of them. No label has an address, a key or an id: their
values come from tables, enums and the configured networks, so the number of series is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rpcsvc.domain import events as ev
from rpcsvc.domain.deposit_rules import spread_earned
from rpcsvc.domain.money import Asset
from rpcsvc.domain.order import Order, TransferKind
from rpcsvc.operations.dispatch import code_of
from rpcsvc.operations.service import Call, Reply

_CALL_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
_COMMIT_WRITES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_PAYOUT_SECONDS: Final = (60.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)


# The values of a series' labels, in the order of its family's.
Labels = tuple[str, ...]


class Family(NamedTuple):
    """A family of series: counter, gauge or histogram, its meaning, its labels."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


FAMILIES: Final[Mapping[str, Family]] = {
    "rpcsvc_info": Family("gauge", "1, with the version and the engine.", ("version", "engine")),
    "rpcsvc_calls": Family(
        "counter",
        "Calls of operations; the outcome is ok or the code of the error.",
        ("operation", "transport", "outcome"),
    ),
    "rpcsvc_client_calls": Family(
        "counter",
        "Calls with a client's token; default is the one of AGENT_RPC_TOKEN.",
        ("client", "outcome"),
    ),
    "rpcsvc_call_seconds": Family(
        "histogram", "Time from a call to its answer, signing not included.", ("operation",)
    ),
    "rpcsvc_responses": Family("counter", "HTTP responses by status.", ("status",)),
    "rpcsvc_orders_reached": Family(
        "counter", "Orders that reached a status since the start.", ("status",)
    ),
    "rpcsvc_orders_open": Family("gauge", "Orders that are not over.", ("status",)),
    "rpcsvc_orders_open_oldest_seconds": Family(
        "gauge", "Time since the oldest open order of a status reached it.", ("status",)
    ),
    "rpcsvc_deposits": Family(
        "counter", "Deposits that were seen, confirmed or removed.", ("network", "outcome")
    ),
    "rpcsvc_transfers": Family(
        "counter",
        "Payouts and refunds that were prepared, published, settled, failed or became unknown.",
        ("kind", "network", "outcome"),
    ),
    "rpcsvc_deposit_to_payout_seconds": Family(
        "histogram",
        "Time from an order's first deposit to its settled payout, by the payout's network.",
        ("network",),
    ),
    "rpcsvc_spread_earned": Family(
        "counter", "Whole coins that the spread of settled payouts kept.", ("asset",)
    ),
    "rpcsvc_funding_fees_earned": Family(
        "counter",
        "Whole coins that orders with funding x402 bore for gas, by payout or refund.",
        ("asset",),
    ),
    "rpcsvc_network_fees_day": Family(
        "gauge",
        "Whole coins (XMR, ether and so on) that a network took for the payments of the last"
        " 24 hours, fees for L1 data included.",
        ("network",),
    ),
    "rpcsvc_network_fees": Family(
        "counter",
        "Whole coins that a network took for the payments signed since the start.",
        ("network",),
    ),
    "rpcsvc_sweeps": Family(
        "counter",
        "Sweeps of deposit addresses that were sent, took their deposits (done) or nothing (void).",
        ("network", "outcome"),
    ),
    "rpcsvc_withdrawals": Family(
        "counter",
        "The operator's withdrawals that were settled, failed or cancelled.",
        ("network", "outcome"),
    ),
    "rpcsvc_commit_seconds": Family("histogram", "Time of a commit of the database."),
    "rpcsvc_commit_writes": Family("histogram", "Writes that shared a commit."),
    "rpcsvc_check_ok": Family("gauge", "1 while a check of /health is well, else 0.", ("check",)),
    "rpcsvc_payouts_paused": Family("gauge", "1 while payouts are paused, else 0."),
    "rpcsvc_scan_lag_seconds": Family(
        "gauge", "How far the deposit scan lags, at most the time since the start.", ("network",)
    ),
    "rpcsvc_node_height": Family(
        "gauge", "The newest block that a node showed; missing before the first.", ("network",)
    ),
    "rpcsvc_scanned_height": Family(
        "gauge",
        "The newest block up to which all deposits are committed; missing before the first scan.",
        ("network",),
    ),
    "rpcsvc_rate_age_seconds": Family("gauge", "Age of the rate; missing while there is none."),
    "rpcsvc_rate_usdc_per_xmr": Family("gauge", "The rate; missing while there is none."),
    "rpcsvc_rate_spread_ratio": Family(
        "gauge", "How far apart the fresh sources of the rate are, as a share of their median."
    ),
    "rpcsvc_wallet_amount": Family(
        "gauge",
        "Whole coins of a wallet: free, locked, or reserved for open orders.",
        ("network", "part"),
    ),
    "rpcsvc_unfinal_usd": Family(
        "gauge",
        "Worth in USD of deposits that count before they are final, and of those that were lost.",
        ("network", "part"),
    ),
    "rpcsvc_wallet_outputs": Family(
        "gauge", "Outputs that a wallet can spend now.", ("network",)
    ),
    "rpcsvc_transfers_due_amount": Family(
        "gauge",
        "Whole coins of payouts and refunds that are owed: planned, and not settled or failed.",
        ("network", "kind"),
    ),
    "rpcsvc_payments_unmined": Family(
        "gauge",
        "Signed payments that are in no block; on an EVM network as many nonces are open.",
        ("network",),
    ),
    "rpcsvc_nonce_gap": Family(
        "gauge",
        "The node's next nonce of the hot wallet minus the service's own, measured once a minute;"
        " above 0: another has sent from it, below 0: the node lacks signed payments.",
        ("network",),
    ),
    "rpcsvc_nonces_unexplained": Family(
        "gauge",
        "Nonces of the hot wallet that the network has used and nobody has on record (unrecorded),"
        " or that it lacks and no payment waits with (missing).",
        ("network", "kind"),
    ),
    "rpcsvc_block_age_seconds": Family(
        "gauge", "Time since a node showed a new block; missing before the first.", ("network",)
    ),
    "rpcsvc_authorizations_unresolved": Family(
        "gauge", "Signed USDC authorizations that have neither paid their order nor failed."
    ),
    "rpcsvc_authorization_gas_ratio": Family(
        "gauge",
        "Gas for signed USDC authorizations in 24 hours, as a share of its budget.",
    ),
    "rpcsvc_upstream_orders_in_doubt": Family(
        "gauge", "Upstream orders whose creation has an unknown outcome."
    ),
    "rpcsvc_approvals_pending": Family(
        "gauge", "Orders of clients that wait for a person's approval."
    ),
    "rpcsvc_webhook_messages_pending": Family(
        "gauge", "Messages to webhooks that are neither delivered nor dead."
    ),
    "rpcsvc_webhook_oldest_seconds": Family(
        "gauge", "Time since the oldest event whose message is pending; 0: there is none."
    ),
    "rpcsvc_audit_differences": Family(
        "gauge", "Differences that the last audit found; missing before the first."
    ),
    "rpcsvc_audit_age_seconds": Family(
        "gauge", "Time since the last audit, or since the start; missing where none are made."
    ),
    "rpcsvc_waits": Family(
        "gauge", "Calls that wait for an order's event, and streams of events.", ("kind",)
    ),
    "rpcsvc_lease_held": Family(
        "gauge", "1 while this process may sign and publish by its lease, else 0."
    ),
    "rpcsvc_lease_token": Family(
        "gauge", "Fencing token of the lease that this process took; 0 while it takes orders only."
    ),
    "rpcsvc_lease_left_seconds": Family(
        "gauge", "Time until the lease ends unless it is renewed; missing where it has no end."
    ),
}  # fmt: skip

_DEPOSIT_EVENTS: Final[Mapping[type, str]] = {
    ev.DepositSeen: "seen",
    ev.DepositConfirmed: "confirmed",
    ev.DepositRemoved: "removed",
}
_TRANSFER_EVENTS: Final[Mapping[type, str]] = {
    ev.TransferPrepared: "prepared",
    ev.TransferPublished: "published",
    ev.TransferUnknown: "unknown",
    ev.TransferSettled: "settled",
    ev.TransferFailed: "failed",
}


class Histogram:
    """Counts of values by bucket. ``bounds`` are the upper bounds, ascending; the last is open."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count of each bucket."""
        bounds, below, found = [*map(str, self.bounds), "+Inf"], 0, []
        for bound, count in zip(bounds, self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class Metrics:
    """Counts calls, responses, events of orders, and commits, since the start."""

    def __init__(self) -> None:
        self._calls: Counter[Labels] = Counter()
        self._call_seconds = defaultdict[str, Histogram](partial(Histogram, _CALL_SECONDS))
        self._responses: Counter[int] = Counter()
        self._reached: Counter[Labels] = Counter()
        self._deposits: Counter[Labels] = Counter()
        self._transfers: Counter[Labels] = Counter()
        self._payout_seconds = defaultdict[str, Histogram](partial(Histogram, _PAYOUT_SECONDS))
        self._spread: Counter[Asset] = Counter()
        self._funding_fees: Counter[Asset] = Counter()
        self._commit_seconds = Histogram(_COMMIT_SECONDS)
        self._commit_writes = Histogram(_COMMIT_WRITES)

    def call(self, operation: str, call: Call, reply: Reply, seconds: float | None) -> None:
        """Count a call of an operation; ``seconds`` is None where it was refused before it ran."""
        outcome = "ok" if reply.error is None else code_of(reply.error)
        client = "" if call.known is None else call.known.name
        self._calls[operation, call.transport, outcome, client] += 1
        if seconds is not None:
            self._call_seconds[operation].observe(seconds)

    def response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses[status] += 1

    def committed(self, writes: int, seconds: float) -> None:
        """Count a commit of the database."""
        self._commit_seconds.observe(seconds)
        self._commit_writes.observe(writes)

    def order(self, before: Order | None, after: Order, event: ev.Event | None) -> None:
        """Count a committed event of an order; a new order has no ``before`` and no event."""
        if before is None or before.status is not after.status:
            self._reached[after.status.value,] += 1
        if isinstance(event, ev.DepositSeen | ev.DepositConfirmed | ev.DepositRemoved):
            self._deposits[event.key.network, _DEPOSIT_EVENTS[type(event)]] += 1
        elif outcome := _TRANSFER_EVENTS.get(type(event)):
            self._transfer(after, getattr(event, "transfer_id", ""), outcome)

    def _transfer(self, order: Order, transfer_id: str, outcome: str) -> None:
        for transfer in order.transfers:
            if transfer.transfer_id == transfer_id:
                self._transfers[transfer.kind.value, transfer.network, outcome] += 1
                if outcome == "settled" and order.terms.funding_gas:
                    is_payout, terms = transfer.kind is TransferKind.PAYOUT, order.terms
                    borne = terms.price.funding_fee if is_payout else terms.funding_gas
                    self._funding_fees[transfer.asset] += borne
                if outcome == "settled" and transfer.kind is TransferKind.PAYOUT:
                    self._spread[transfer.asset] += spread_earned(order, transfer)
                    seen_at = min(
                        (d.first_seen_at for d in order.deposits), default=order.status_at
                    )
                    took = (order.status_at - seen_at) / 1000
                    self._payout_seconds[transfer.network].observe(took)

    def families(self) -> Iterator[Metric]:
        """The families of the counters."""
        calls, by_client = Counter[Labels](), Counter[Labels]()
        for (operation, transport, outcome, client), n in self._calls.items():
            calls[operation, transport, outcome] += n
            if client:
                by_client[client, outcome] += n
        yield counter("rpcsvc_calls", calls.items())
        yield counter("rpcsvc_client_calls", by_client.items())
        yield _histograms("rpcsvc_call_seconds", _labelled(self._call_seconds))
        statuses = self._responses.items()
        yield counter("rpcsvc_responses", [((str(status),), n) for status, n in statuses])
        yield counter("rpcsvc_orders_reached", self._reached.items())
        yield counter("rpcsvc_deposits", self._deposits.items())
        yield counter("rpcsvc_transfers", self._transfers.items())
        yield _histograms("rpcsvc_deposit_to_payout_seconds", _labelled(self._payout_seconds))
        yield counter("rpcsvc_spread_earned", _coins(self._spread))
        yield counter("rpcsvc_funding_fees_earned", _coins(self._funding_fees))
        yield _histograms("rpcsvc_commit_seconds", {(): self._commit_seconds})
        yield _histograms("rpcsvc_commit_writes", {(): self._commit_writes})


def _coins(units: Mapping[Asset, int]) -> list[tuple[Labels, float]]:
    return [((asset.symbol,), count / 10**asset.decimals) for asset, count in units.items()]


def _labelled(histograms: Mapping[str, Histogram]) -> dict[Labels, Histogram]:
    return {(label,): histogram for label, histogram in histograms.items()}


def counter(name: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """The counters of a family by their labels."""
    family = CounterMetricFamily(name, FAMILIES[name].help, labels=FAMILIES[name].labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _histograms(name: str, values: Mapping[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, FAMILIES[name].help, labels=FAMILIES[name].labels)
    for labels, value in values.items():
        family.add_metric(labels, value.buckets(), value.total)
    return family


def gauge(name: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """The gauges of a family by their labels."""
    family = GaugeMetricFamily(name, FAMILIES[name].help, labels=FAMILIES[name].labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family
