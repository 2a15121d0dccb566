"""``rpcsvc top``: shows a running service, redrawn on a terminal or printed once.

It reads /health, /metrics and the transfers under way over the socket of the data directory, and
changes nothing.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError, add_command, say
from rpcsvc.cli.operator.service import aligned, ask_service, service_socket
from rpcsvc.client.blocking import BlockingTransport, finished
from rpcsvc.client.errors import Unreachable
from rpcsvc.client.transport import Endpoint, ServiceRequest
from rpcsvc.settings import Settings
from rpcsvc.terminal import printable

MOST_TRANSFERS: Final = 10
_SECONDS: Final = 30
# A family, the labels of one of its samples, and the format of the value.
_Shown = tuple[str, Mapping[str, str], str]
_NETWORK_COLUMNS: Final[tuple[tuple[str, _Shown], ...]] = (
    ("FREE", ("rpcsvc_wallet_amount", {"part": "free"}, "amount")),
    ("LOCKED", ("rpcsvc_wallet_amount", {"part": "locked"}, "amount")),
    ("RESERVED", ("rpcsvc_wallet_amount", {"part": "reserved"}, "amount")),
    ("PAYOUTS DUE", ("rpcsvc_transfers_due_amount", {"kind": "payout"}, "amount")),
    ("REFUNDS DUE", ("rpcsvc_transfers_due_amount", {"kind": "refund"}, "amount")),
    ("UNMINED", ("rpcsvc_payments_unmined", {}, "count")),
    ("OUTPUTS", ("rpcsvc_wallet_outputs", {}, "count")),
    ("LAST BLOCK", ("rpcsvc_block_age_seconds", {}, "age")),
    ("SCAN LAG", ("rpcsvc_scan_lag_seconds", {}, "age")),
)
_FIGURES: Final[tuple[tuple[str, _Shown], ...]] = (
    ("USDC per XMR", ("rpcsvc_rate_usdc_per_xmr", {}, "amount")),
    ("rate age", ("rpcsvc_rate_age_seconds", {}, "age")),
    ("audit differences", ("rpcsvc_audit_differences", {}, "count")),
    ("audit age", ("rpcsvc_audit_age_seconds", {}, "age")),
    ("webhook messages", ("rpcsvc_webhook_messages_pending", {}, "count")),
    ("waiting calls", ("rpcsvc_waits", {"kind": "call"}, "count")),
    ("event streams", ("rpcsvc_waits", {"kind": "stream"}, "count")),
    ("authorizations unresolved", ("rpcsvc_authorizations_unresolved", {}, "count")),
    ("upstream orders in doubt", ("rpcsvc_upstream_orders_in_doubt", {}, "count")),
)

# The alerts of config/prometheus/alerts.yaml that one reading can judge, with their conditions.
ALERTS: Final[Mapping[str, str]] = {
    "RpcsvcCheckFails": "rpcsvc_check_ok == 0",
    "RpcsvcPayoutsPaused": "rpcsvc_payouts_paused == 1",
    "RpcsvcAuditDifference": "rpcsvc_audit_differences > 0",
    "RpcsvcAuditSilent": "rpcsvc_audit_age_seconds > 7200",
    "RpcsvcNonceUnexplained": "rpcsvc_nonces_unexplained > 0",
    "RpcsvcNonceGap": "rpcsvc_nonce_gap < 0",
    "RpcsvcAuthorizationGas": "rpcsvc_authorization_gas_ratio > 0.8",
    "RpcsvcDepositLost": 'rpcsvc_unfinal_usd{part="lost"} > 0',
    "RpcsvcUpstreamOrderInDoubt": "rpcsvc_upstream_orders_in_doubt > 0",
    "RpcsvcApprovalPending": "rpcsvc_approvals_pending > 0",
    "RpcsvcWebhooksStuck": "rpcsvc_webhook_oldest_seconds > 172800",
}
_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

# Samples by family: labels and value.
Series = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

_OLDEST: Final = "rpcsvc_orders_open_oldest_seconds"
_TRANSFER_HEAD: Final = ("TRANSFER UNDER WAY", "STATE", "AMOUNT", "NETWORK", "SINCE")


class ServiceSample(NamedTuple):
    """Answers of the service: /health, /metrics, and the transfers under way."""

    health: Json
    series: Series
    transfers: Json


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    text = "orders, wallets, networks, checks and alerts of the running service, as they change"
    more = (
        ". Ends with Ctrl-C. Exit status with --once: 0 healthy, 1 unhealthy, 3 no service answers."
    )
    parser = add_command(commands, "top", text, _top, more)
    parser.add_argument(
        "--once", action="store_true", help="print it once; the default where stdout is no terminal"
    )
    parser.add_argument(
        "--every", type=_seconds, default=2, metavar="SECONDS", help="seconds between refreshes (2)"
    )


def _seconds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 3600):
        raise argparse.ArgumentTypeError(f"must be 1 to 3600, not {text!r}")
    return int(text)


def _top(context: Context) -> int:
    """Run the command. Raises Unreachable if no service answers at first; later failures are shown.

    Raises UsageError on a terminal without the extra ``top``.
    """
    settings = context.settings()
    view = read(settings)
    if context.options.once or not sys.stdout.isatty():
        say("".join(f"{line}\n" for line in lines(view)))
        return OK if view.health["status"] == "ok" else FAILED
    with suppress(KeyboardInterrupt):
        _redraw(settings, lines(view), context.options.every)
    return OK


def _redraw(settings: Settings, shown: Sequence[str], every: int) -> None:
    """Show the lines and refresh them until interrupted. Raises UsageError."""
    try:
        from rich.live import Live  # noqa: PLC0415 - of the extra "top"
        from rich.text import Text  # noqa: PLC0415 - as above
    except ImportError:
        raise UsageError(
            "A view that is redrawn needs the extra top: pip install 'rpcsvc[top]'. Without it,"
            " rpcsvc top --once prints it once."
        ) from None
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text("\n".join(shown), no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(every)
            try:
                shown = lines(read(settings))
            except Unreachable as error:
                shown = [printable(str(error))]


# --- reading -----------------------------------------------------------------------------------


def read(settings: Settings) -> ServiceSample:
    """Read a snapshot of the service on a data directory. Raises Unreachable and
    UntrustedSocket.
    """
    endpoint = service_socket(settings)
    try:
        health, series = json.loads(_get(endpoint, "/health")), _series(_get(endpoint, "/metrics"))
    except ValueError as error:
        raise Unreachable(f"What answers at {endpoint.name} is not this service.") from error
    pending = {"state": "pending", "limit": MOST_TRANSFERS + 1, "full": False}
    return ServiceSample(health, series, ask_service(settings, "payouts.list", pending))


def _get(endpoint: Endpoint, path: str) -> str:
    sent = ServiceRequest("GET", path, seconds=_SECONDS)
    return finished(BlockingTransport(endpoint).exchange(sent)).body.decode()


def _series(text: str) -> Series:
    from prometheus_client.parser import (  # noqa: PLC0415 - only this command needs it
        text_string_to_metric_families,
    )

    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


# --- showing -----------------------------------------------------------------------------------


def lines(view: ServiceSample) -> list[str]:
    """A snapshot as lines of text."""
    health, series = view.health, view.series
    checks = health["checks"].items()
    networks = dict.fromkeys(
        labels["network"]
        for _, (name, *_) in _NETWORK_COLUMNS
        for labels, _ in series.get(name, ())
    )
    orders = [
        (labels["status"], f"{count:.0f}", _value(series, _OLDEST, labels, "age"))
        for labels, count in series.get("rpcsvc_orders_open", ())
    ]
    heads = [head for head, _ in _NETWORK_COLUMNS]
    blocks = (
        _table(("ALERT", "OF", "VALUE"), list(_alerts(series))),
        _table(("CHECK", "", ""), [(name, c["status"], c.get("detail", "")) for name, c in checks]),
        _table(("OPEN ORDERS", "COUNT", "OLDEST"), orders),
        _table(("NETWORK", *heads), [_network_row(series, name) for name in networks]),
        _table(_TRANSFER_HEAD, [_transfer_row(item) for item in view.transfers["transfers"]]),
        _table(("FIGURE", ""), [(head, _value(series, *column)) for head, column in _FIGURES]),
    )
    shown = [_title(view), *(line for block in blocks for line in ("", *block))]
    return [printable(line) for line in shown]


def _title(view: ServiceSample) -> str:
    health, paused = view.health, view.transfers["paused"]
    state = "" if paused is None else f"  PAYOUTS PAUSED: {paused}"
    return (
        f"rpcsvc {health['version']}  {health['engine']}  {health['time']}  {health['status']}"
        f"{state}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned([head, *(rows or [("none", *[""] * (len(head) - 1))])])


def _alerts(series: Series) -> Iterator[tuple[str, ...]]:
    """The alerts whose condition holds now, before the time that Prometheus waits."""
    for alert, condition in ALERTS.items():
        what, comparison, bound = condition.split()
        name, _, label = what.rstrip("}").partition("{")
        for labels, value in series.get(name, ()):
            if label and label not in {f'{key}="{each}"' for key, each in labels.items()}:
                continue
            if _COMPARISONS[comparison](value, float(bound)):
                yield alert, ", ".join(labels.values()) or "-", f"{value:g}"


def _network_row(series: Series, network: str) -> tuple[str, ...]:
    cells = (
        _value(series, name, {"network": network, **labels}, form)
        for _, (name, labels, form) in _NETWORK_COLUMNS
    )
    return (network, *cells)


def _transfer_row(item: Json) -> tuple[str, ...]:
    return tuple(str(item[name]) for name in ("transferId", "state", "amount", "network", "since"))


def _value(series: Series, name: str, labels: Mapping[str, str], form: str) -> str:
    """A sample as text; - if there is none."""
    found = next((value for given, value in series.get(name, ()) if given == labels), None)
    return "-" if found is None else _FORMS[form](found)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _amount(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


_FORMS: Final = {"age": _age, "amount": _amount, "count": "{:.0f}".format}
