"""The operator's possible loss from a locked rate: figures and plot of docs/operate/economics.md.

``python -m tools.economics`` writes both again.

``figures`` plays orders on random price paths through the order machine. The payer knows the whole
path beforehand and pays at the time that is best for him: no payer can do better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rpcsvc.domain import events as ev
from rpcsvc.domain.deposit_rules import breaking_rate
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, Order, OrderStatus, Terms, Timeouts
from rpcsvc.domain.pricing import BPS, Direction, Price, convert_floor

RATE: Final = 165_000_000
XMR: Final = 10**12
ROOT: Final = Path(__file__).parent.parent
_BEGIN: Final = "<!-- figures: begin -->\n"
_END: Final = "<!-- figures: end -->"
STEP_MS: Final = 5_000
POLL_MS: Final = 10_000  # rates.every_seconds
WINDOW_MS: Final = 3_600_000
LOCK_MS: Final = 900_000
BREAK_BPS: Final = 100
SPREAD_BPS: Final = 50
PATHS: Final = 60
# XMR moves by about 80 % a year; on one path in four it falls by up to 8 % within ten minutes.
YEARLY: Final = 0.8
FALL: Final = 0.08
FALL_MS: Final = 600_000
YEAR_MS: Final = 365 * 86_400_000


@dataclass(frozen=True, slots=True)
class Played:
    """One order: the market's largest move against the service within the window, how far the
    market was from the rate that the service had at any moment, and the operator's loss, each in
    1/10,000 of the order. A loss below 0 is a gain.
    """

    move: float
    lag: float
    with_lock_of_window: float
    with_lock: float


def bound(break_bps: float, lag_bps: float, spread_bps: float) -> float:
    """The most that an order loses, in 1/10,000 of its amount at the locked rate (economics.md)."""
    least_worth = (1 - break_bps / BPS) * (1 - lag_bps / BPS)
    return BPS * (1 - spread_bps / BPS - least_worth)


def figures() -> list[Played]:
    """The orders of PATHS random paths, the same at each call."""
    chance = random.Random(17)  # noqa: S311 - a simulation
    return [_play(_path(chance)) for _ in range(PATHS)]


def _path(chance: random.Random) -> list[int]:
    """The market's rate in each step of a deposit window, in USDC units per XMR."""
    deviation = YEARLY * math.sqrt(STEP_MS / YEAR_MS)
    steps = WINDOW_MS // STEP_MS
    begins, lasts = chance.randrange(4 * steps), FALL_MS // STEP_MS
    slope = math.log(1 - FALL * chance.random()) / lasts
    rate, path = float(RATE), []
    for step in range(steps):
        path.append(round(rate))
        falls = begins <= step < begins + lasts
        rate *= math.exp(chance.gauss(0, deviation) + (slope if falls else 0))
    return path


def _play(path: list[int]) -> Played:
    known = [path[step - step % (POLL_MS // STEP_MS)] for step in range(len(path))]
    lags = [1 - now / seen for now, seen in zip(path, known, strict=True)]
    return Played(
        move=BPS * (1 - min(path) / RATE),
        lag=BPS * max(0.0, *lags),
        with_lock_of_window=max(_losses(path, known, lock_ms=WINDOW_MS, break_bps=None)),
        with_lock=max(_losses(path, known, lock_ms=LOCK_MS, break_bps=BREAK_BPS)),
    )


def _losses(
    path: list[int], known: list[int], *, lock_ms: int, break_bps: int | None
) -> Iterator[float]:
    """The operator's loss if the payer pays, by the step in which he does."""
    order = open_order(_terms(lock_ms))
    locked = _paid(order, RATE, 0)
    for step, market in enumerate(path):
        now = step * STEP_MS
        if break_bps is not None and now < order.price_locked_until:
            limit = breaking_rate(Direction.XMR_TO_USDC, known[step], break_bps)
            if order.terms.price.rate > limit:
                order = transition(order, ev.LockBroken(known[step]), now).order
        in_lock = now < order.price_locked_until
        yield _loss(locked if in_lock else _paid(order, known[step], now + 1), market)


def _paid(order: Order, rate: int, now: int) -> Order:
    key = DepositKey("monero", "tx", 0)
    seen = ev.DepositSeen(key, order.terms.deposit_amount, None, now, rate)
    order = transition(order, seen, now).order
    order = transition(order, ev.DepositConfirmed(key), now).order
    if order.status is OrderStatus.DEPOSIT_CONFIRMED and order.payout is None:
        order = transition(order, ev.Repriced(rate), now).order
    return order


def _loss(order: Order, market: int) -> float:
    """The payout above the deposit's value at that time, in 1/10,000 of the order."""
    if order.payout is None:
        return 0.0  # refunded
    deposit = order.terms.deposit_amount
    worth = convert_floor(Direction.XMR_TO_USDC, deposit, market)
    return BPS * (order.payout.units - worth) / convert_floor(Direction.XMR_TO_USDC, deposit, RATE)


def _terms(lock_ms: int) -> Terms:
    price = Price(rate=RATE, spread_bps=SPREAD_BPS, payout_fee=0, min_received_bps=9_900)
    amount = 300 * XMR
    return Terms(
        order_id="ord_1",
        session_id="",
        direction=Direction.XMR_TO_USDC,
        chain="arbitrum",
        chain_id=42161,
        deposit_network="monero",
        payout_network="arbitrum",
        deposit_address="deposit",
        to_address="payout",
        deposit_amount=amount,
        expected_output=price.output(Direction.XMR_TO_USDC, amount),
        min_received=price.min_received(Direction.XMR_TO_USDC, amount),
        min_deposit=1,
        max_deposit=amount,
        price=price,
        refund_fee=1,
        created_at=0,
        expires_at=WINDOW_MS,
        timeouts=Timeouts(WINDOW_MS // 4, WINDOW_MS, WINDOW_MS, WINDOW_MS, WINDOW_MS),
        price_locked_until=lock_ms,
    )


def main() -> None:
    """Write the table into docs/operate/economics.md, and the plot beside it."""
    played = figures()
    page = ROOT / "docs" / "operate" / "economics.md"
    page.write_text(with_figures(page.read_text(), played))
    (ROOT / "docs" / "operate" / "economics.svg").write_text(plot(played))


def with_figures(text: str, played: list[Played]) -> str:
    """The page with the table between its markers."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{summary(played)}\n{_END}{after}"


# --- the table and the plot of docs/operate/economics.md ------------------------------------------


def summary(played: list[Played]) -> str:
    """The figures as a Markdown table."""
    rows = [
        ("lock for the whole window of 3,600 s", [each.with_lock_of_window for each in played]),
        (f"lock of 900 s, broken at {BREAK_BPS / 100:g} %", [each.with_lock for each in played]),
    ]
    lines = [
        "| terms | mean loss | loss in one order of 20 | largest loss |",
        "|---|---|---|---|",
    ]
    for name, losses in rows:
        ordered = sorted(max(0.0, loss) for loss in losses)
        shown = (sum(ordered) / len(ordered), ordered[len(ordered) * 19 // 20], ordered[-1])
        lines.append(f"| {name} | {' | '.join(f'{loss / 100:.2f} %' for loss in shown)} |")
    lag = max(each.lag for each in played)
    lines += [
        "",
        f"The rate was at most {lag / 100:.2f} % behind the market, so the bound for these paths is"
        f" {bound(BREAK_BPS, lag, SPREAD_BPS) / 100:.2f} %.",
    ]
    return "\n".join(lines)


_LEFT, _TOP, _WIDE, _HIGH = 70, 30, 620, 330
_MOST: Final = 700.0  # 1/10,000 at the end of both axes
_STYLE: Final = (
    "text{font:13px sans-serif;fill:#333}.axis{stroke:#333}.grid{stroke:#ddd}"
    ".old{fill:#c2410c;fill-opacity:.55}.new{fill:#1d4ed8;fill-opacity:.7}"
    ".bound{stroke:#15803d;stroke-width:2;stroke-dasharray:6 4}"
)


def plot(played: list[Played]) -> str:
    """Loss by the market's largest move, as SVG: a dot for each order under either terms."""
    lag = max(each.lag for each in played)
    limit = _y(bound(BREAK_BPS, lag, SPREAD_BPS))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 430" role="img">',
        "<title>Loss of the operator by how far the rate moved against it</title>",
        f"<style>{_STYLE}</style>",
        '<rect width="720" height="430" fill="#fff"/>',
        *_axes(),
    ]
    for name in ("old", "new"):
        for each in played:
            loss = each.with_lock if name == "new" else each.with_lock_of_window
            parts.append(
                f'<circle class="{name}" cx="{_x(each.move):.1f}" cy="{_y(loss):.1f}" r="3"/>'
            )
    parts += [
        f'<path class="bound" d="M{_LEFT} {limit:.1f}h{_WIDE}"/>',
        '<circle class="old" cx="95" cy="50" r="5"/>',
        '<text x="107" y="54">locked for the whole window of an hour</text>',
        '<circle class="new" cx="95" cy="72" r="5"/>',
        '<text x="107" y="76">locked for 15 minutes, broken at 1 %</text>',
        '<line class="bound" x1="85" x2="103" y1="94" y2="94"/>',
        '<text x="107" y="98">bound</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes() -> Iterator[str]:
    right, bottom = _LEFT + _WIDE, _TOP + _HIGH
    for percent in range(8):
        x, y = _x(percent * 100), _y(percent * 100)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{percent} %</text>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" y2="{bottom}"/>'
    middle = _LEFT + _WIDE // 2
    yield (
        f'<text x="{middle}" y="{bottom + 45}" text-anchor="middle">largest move of the market'
        " against the service within the hour</text>"
    )
    yield f'<text x="{_LEFT - 8}" y="18">loss of the order, at the payer\'s best moment</text>'


def _x(bps: float) -> float:
    return _LEFT + _WIDE * min(max(bps, 0.0), _MOST) / _MOST


def _y(bps: float) -> float:
    return _TOP + _HIGH * (1 - min(max(bps, 0.0), _MOST) / _MOST)


if __name__ == "__main__":
    main()
