"""The Grafana dashboard of the metrics: config/grafana/rpcsvc.json, from one table of panels.

Written by ``make generate``. A panel shows expressions of PromQL over the families of
http/metrics.py, each with a legend; ``unit`` is Grafana's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

_COLUMNS: Final = 24  # of Grafana's grid
_HEIGHT: Final = 7
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW: Final = "$__rate_interval"


class Panel(NamedTuple):
    """A graph. ``targets``: expression and legend of each of its lines."""

    title: str
    unit: str
    targets: tuple[tuple[str, str], ...]


def _quantiles(family: str, label: str) -> tuple[tuple[str, str], ...]:
    """Median and 95th percentile of a histogram, by a label or overall."""
    by, legend = (f"le, {label}", f"{{{{{label}}}}} ") if label else ("le", "")
    rate = f"sum by ({by}) (rate({family}_bucket[{_WINDOW}]))"
    return tuple(
        (f"histogram_quantile({share}, {rate})", f"{legend}p{share * 100:.0f}")
        for share in (0.5, 0.95)
    )


def _increase(family: str, *labels: str) -> tuple[tuple[str, str], ...]:
    """The increase of a counter in an hour, by its labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return ((f"sum by ({', '.join(labels)}) (increase({family}_total[1h]))", legend),)


ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "State": (
        Panel("Version and engine", "none", (("rpcsvc_info", "{{version}} {{engine}}"),)),
        Panel("Checks (1: well)", "none", (("rpcsvc_check_ok", "{{check}}"),)),
        Panel(
            "Payouts paused, lease held",
            "none",
            (("rpcsvc_payouts_paused", "paused"), ("rpcsvc_lease_held", "lease held")),
        ),
        Panel("Lease: time left", "s", (("rpcsvc_lease_left_seconds", "left"),)),
        Panel("Lease: token", "short", (("rpcsvc_lease_token", "token"),)),
        Panel("Audit: differences", "none", (("rpcsvc_audit_differences", "differences"),)),
        Panel("Audit: age", "s", (("rpcsvc_audit_age_seconds", "age"),)),
    ),
    "Orders": (
        Panel("Open orders", "none", (("rpcsvc_orders_open", "{{status}}"),)),
        Panel("Age of the oldest", "s", (("rpcsvc_orders_open_oldest_seconds", "{{status}}"),)),
        Panel("Reached a status, per hour", "none", _increase("rpcsvc_orders_reached", "status")),
        Panel(
            "From deposit to settled payout",
            "s",
            _quantiles("rpcsvc_deposit_to_payout_seconds", "network"),
        ),
        Panel("Spread earned per hour", "none", _increase("rpcsvc_spread_earned", "asset")),
        Panel("Gas borne per hour", "none", _increase("rpcsvc_funding_fees_earned", "asset")),
    ),
    "Deposits and payouts": (
        Panel("Deposits per hour", "none", _increase("rpcsvc_deposits", "network", "outcome")),
        Panel(
            "Payouts and refunds per hour",
            "none",
            _increase("rpcsvc_transfers", "kind", "network", "outcome"),
        ),
        Panel("Sweeps per hour", "none", _increase("rpcsvc_sweeps", "network", "outcome")),
        Panel(
            "Withdrawals per hour", "none", _increase("rpcsvc_withdrawals", "network", "outcome")
        ),
        Panel(
            "Network fees of 24 hours (whole coins)",
            "none",
            (("rpcsvc_network_fees_day", "{{network}}"),),
        ),
        Panel(
            "Network fees per hour (whole coins)",
            "none",
            _increase("rpcsvc_network_fees", "network"),
        ),
        Panel("Signed and in no block", "none", (("rpcsvc_payments_unmined", "{{network}}"),)),
        Panel(
            "Nonces: ahead of the service, unexplained",
            "none",
            (
                ("rpcsvc_nonce_gap", "{{network}} ahead"),
                ("rpcsvc_nonces_unexplained", "{{network}} {{kind}}"),
            ),
        ),
        Panel(
            "Authorizations unresolved",
            "none",
            (("rpcsvc_authorizations_unresolved", "unresolved"),),
        ),
        Panel(
            "Gas for authorizations, share of its daily budget",
            "percentunit",
            (("rpcsvc_authorization_gas_ratio", "share"),),
        ),
    ),
    "Inventory (whole coins)": (
        Panel(
            "XMR",
            "none",
            (
                ('rpcsvc_wallet_amount{network="monero"}', "{{part}}"),
                ('rpcsvc_transfers_due_amount{network="monero"}', "{{kind}} due"),
            ),
        ),
        Panel(
            "USDC",
            "none",
            (('rpcsvc_wallet_amount{network!="monero"}', "{{network}} {{part}}"),),
        ),
        Panel(
            "USDC due",
            "none",
            (('rpcsvc_transfers_due_amount{network!="monero"}', "{{network}} {{kind}}"),),
        ),
        Panel("Outputs to spend", "none", (("rpcsvc_wallet_outputs", "{{network}}"),)),
        Panel("Paid before final, USD", "none", (("rpcsvc_unfinal_usd", "{{network}} {{part}}"),)),
    ),
    "Networks and rate": (
        Panel("Scan lag", "s", (("rpcsvc_scan_lag_seconds", "{{network}}"),)),
        Panel(
            "Height of the node and of the scan",
            "none",
            (
                ("rpcsvc_node_height", "{{network}} node"),
                ("rpcsvc_scanned_height", "{{network}} scanned"),
            ),
        ),
        Panel("Age of the last block", "s", (("rpcsvc_block_age_seconds", "{{network}}"),)),
        Panel("USDC per XMR", "none", (("rpcsvc_rate_usdc_per_xmr", "rate"),)),
        Panel("Age of the rate", "s", (("rpcsvc_rate_age_seconds", "age"),)),
        Panel("Spread of its sources", "percentunit", (("rpcsvc_rate_spread_ratio", "spread"),)),
        Panel(
            "Upstream orders in doubt", "none", (("rpcsvc_upstream_orders_in_doubt", "in doubt"),)
        ),
    ),
    "Calls": (
        Panel(
            "Calls per second",
            "reqps",
            (
                (
                    f"sum by (operation, transport) (rate(rpcsvc_calls_total[{_WINDOW}]))",
                    "{{operation}} {{transport}}",
                ),
            ),
        ),
        Panel(
            "Refused calls per hour",
            "none",
            (
                (
                    "sum by (operation, outcome)"
                    ' (increase(rpcsvc_calls_total{outcome!="ok"}[1h])) > 0',
                    "{{operation}} {{outcome}}",
                ),
            ),
        ),
        Panel("Calls of clients per hour", "none", _increase("rpcsvc_client_calls", "client")),
        Panel("Latency", "s", _quantiles("rpcsvc_call_seconds", "operation")),
        Panel("Responses per hour", "none", _increase("rpcsvc_responses", "status")),
    ),
    "Commits, webhooks and waits": (
        Panel("Commit latency", "s", _quantiles("rpcsvc_commit_seconds", "")),
        Panel("Writes that share a commit", "none", _quantiles("rpcsvc_commit_writes", "")),
        Panel("Approvals that wait", "none", (("rpcsvc_approvals_pending", "pending"),)),
        Panel("Webhook messages", "none", (("rpcsvc_webhook_messages_pending", "pending"),)),
        Panel("Oldest webhook message", "s", (("rpcsvc_webhook_oldest_seconds", "age"),)),
        Panel("Waits and streams", "none", (("rpcsvc_waits", "{{kind}}"),)),
    ),
}


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    value = {
        "uid": "rpcsvc",
        "title": "rpcsvc",
        "tags": ["rpcsvc"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [{**source, "query": "prometheus"}]},
        "panels": list(_panels()),
    }
    return json.dumps(value, indent=1) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        width = _COLUMNS // len(panels)
        for index, panel in enumerate(panels):
            place = {"x": index * width, "y": top, "w": width, "h": _HEIGHT}
            yield {"id": number, **_drawn(panel), "gridPos": place}
            number += 1
        top += _HEIGHT


def _drawn(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(panel.targets)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }
