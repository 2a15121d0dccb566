"""``rpcsvc top``: its output once, and on a terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.operator import top
from rpcsvc.cli.operator.top import ALERTS, Series, ServiceSample, lines
from rpcsvc.client.errors import Unreachable
from tests.operator_cli import Cli, served
from tests.sandbox import Sandbox

RULES = Path(__file__).parents[2] / "config" / "prometheus" / "alerts.yaml"
HEALTH = {"version": "1", "engine": "onchain", "time": "now", "status": "ok", "checks": {}}
IDLE: dict[str, Any] = {"paused": None, "transfers": []}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


async def paying(box: Sandbox) -> str:
    """The id of an order whose payout is under way."""
    placed = await box.order("x2u")
    await placed.fund()
    while True:
        await box.settle(0.5)
        order = await box.up.service.store.order(placed.order_id)
        if order is not None and order.payout is not None:
            assert not order.payout.state.is_final
            return placed.order_id


def row(text: str, first: str) -> list[str]:
    """The cells of a row by its first one."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


async def test_top_prints_orders_transfers_and_networks(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        order_id = await paying(box)
        await box.order("u2x")
        assert await cli.ask("top", "--once") == 0
        order = await box.up.service.store.order(order_id)
    assert order is not None
    assert order.payout is not None
    assert "\x1b" not in cli.out
    assert row(cli.out, "awaiting_deposit")[1] == "1"
    amount = f"{order.payout.units / 10**6:.6f}".rstrip("0")
    transfer = row(cli.out, f"{order_id}/payout/1")
    assert transfer[1:5] == [order.payout.state.value, amount, "USDC", "arbitrum"]
    assert amount in row(cli.out, "arbitrum")
    assert amount not in row(cli.out, "monero")


async def test_top_fails_and_says_why_while_a_check_does(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        await box.fault("rates_down")
        assert await cli.ask("top") == 1, "stdout is no terminal"
    assert cli.out.splitlines()[0].endswith("degraded")
    assert row(cli.out, "rates")[:2] == ["rates", "degraded"]
    assert len(row(cli.out, "rates")) > 4


def test_top_without_a_service_is_unreachable(cli: Cli) -> None:
    assert cli("top", "--once") == 3
    assert "No service runs" in cli.err


@pytest.mark.parametrize("seconds", ["0", "3601", "1.5", "-1"])
def test_top_refuses_an_interval_out_of_range(cli: Cli, seconds: str) -> None:
    assert cli("top", "--every", seconds) == 2
    assert "must be 1 to 3600" in cli.err


def test_top_shows_the_pause_and_a_dash_for_unknown_values() -> None:
    series = {"rpcsvc_block_age_seconds": [({"network": "monero"}, 130.0)]}
    shown = lines(ServiceSample(HEALTH, series, {"paused": "by\x1b[2J me", "transfers": []}))
    assert shown[0].endswith(r"PAYOUTS PAUSED: by\u001b[2J me")
    assert row("\n".join(shown), "monero")[1:] == ["-"] * 7 + ["2", "min", "-"]


def test_top_shows_the_alerts_that_fire() -> None:
    series: Series = {
        "rpcsvc_check_ok": [({"check": "rates"}, 0.0), ({"check": "store"}, 1.0)],
        "rpcsvc_nonces_unexplained": [({"network": "base", "kind": "missing"}, 2.0)],
        "rpcsvc_nonce_gap": [({"network": "base"}, 0.0)],
        "rpcsvc_audit_age_seconds": [({}, 7_200.0)],
        "rpcsvc_unfinal_usd": [
            ({"network": "base", "part": "lost"}, 9.0),
            ({"network": "base", "part": "counted"}, 5.0),
        ],
        "rpcsvc_webhook_oldest_seconds": [({}, 200_000.0)],
    }
    shown = lines(ServiceSample(HEALTH, series, IDLE))
    alerts = shown[shown.index("") + 2 :]
    assert [line.split() for line in alerts[: alerts.index("")]] == [
        ["RpcsvcCheckFails", "rates", "0"],
        ["RpcsvcNonceUnexplained", "base,", "missing", "2"],
        ["RpcsvcDepositLost", "base,", "lost", "9"],
        ["RpcsvcWebhooksStuck", "-", "200000"],
    ]
    quiet = lines(ServiceSample(HEALTH, {}, IDLE))
    assert quiet[2:4] == ["ALERT  OF  VALUE", "none"]


def test_alerts_have_the_conditions_of_their_rules() -> None:
    """Also that only rules on more than one reading are left out."""
    rules = dict(re.findall(r"- alert: (\w+)\n +expr: (.*)", RULES.read_text()))
    judged = {alert: rules[alert].partition(" unless ")[0] for alert in ALERTS}
    assert judged == ALERTS
    assert rules.keys() - ALERTS.keys() == {
        "RpcsvcDown", "RpcsvcTransferFailed", "RpcsvcInternalErrors"
    }  # fmt: skip


def test_top_redraws_until_interrupted_and_shows_a_loss(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command waits for a service that stops, and restores the terminal at the end."""
    answers: Iterator[ServiceSample | Unreachable]
    answers = iter(
        [
            ServiceSample(HEALTH, {}, IDLE),
            Unreachable("it is away"),
            ServiceSample(HEALTH, {}, IDLE),
        ]
    )
    pauses = iter([None, None, KeyboardInterrupt()])

    def read(_settings: object) -> ServiceSample:
        answer = next(answers)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        assert seconds == 7
        if (pause := next(pauses)) is not None:
            raise pause

    monkeypatch.setattr(top, "read", read)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    assert cli("top", "--every", "7") == 0
    opened, closed = "\x1b[?1049h", "\x1b[?1049l"
    assert cli.out.startswith(opened)
    assert closed in cli.out.partition(opened)[2]
    drawn = [line.strip() for text in cli.out.split("\x1b[H")[1:] for line in text.splitlines()[:1]]
    assert [each for each in drawn if each.isprintable()] == [
        "rpcsvc 1  onchain  n", "it is away", "rpcsvc 1  onchain  n"
    ]  # fmt: skip


def test_top_on_a_terminal_names_the_extra_that_it_needs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "read", lambda _settings: ServiceSample(HEALTH, {}, IDLE))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert cli("top") == 2
    assert "rpcsvc[top]" in cli.err
