"""An attacker with many addresses on a moving price: bounds on his profit and on denial of service.

He orders, cancels, pays in time or late, sends dust, and waits, on the whole service with its real
order machine, limits and store. docs/operate/economics.md states the bound. An honest client with
a token always gets the quoted amount; so does one without while at most HARMLESS addresses hold
orders.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rpcsvc.domain.clients import ADDRESS, Client
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.pricing import BPS, Direction
from tests.sandbox import EVM, MONERO, Sandbox, give_wallets, sandbox

XMR = 10**12
START = 165_000_000
WINDOW_SECONDS = 3_600
BREAK_BPS, SPREAD_BPS = 100, 50
# How far the market may be ahead of the service's rate.
LAG_BPS = 30
# The most that is deposited, so that trades alone do not empty the wallets.
MOST_PAID = {"x2u": "20", "u2x": "3300"}
UNPAID = {"x2u": "100", "u2x": "20000"}
HONEST = {"x2u": "12", "u2x": "2000"}
DIRECTIONS = st.sampled_from(["x2u", "u2x"])
ADDRESSES = st.integers(1, 200)
HONEST_CLIENT = Client("token", "honest")
HONEST_STRANGER = Client(ADDRESS, "198.51.100.9")
# As many addresses may hold unfunded orders and leave a part of the share of all: see
# docs/operate/economics.md, "How many addresses does an attack take?".
HARMLESS = 3
HELD, USDC_HELD = {"monero": 1_500 * XMR}, 250_000 * 10**6


@dataclass
class Attack:
    """An order of the attacker. ``worth``: the payout units that each deposit was worth at most."""

    order_id: str
    session_id: str
    direction: str
    worth: dict[DepositKey, Fraction] = field(default_factory=dict)


class Market(RuleBasedStateMachine):
    """``market``: the market's rate in USDC units per XMR; ``known``: the service's."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.opened = AsyncExitStack()
        self.folder = tempfile.TemporaryDirectory()
        self.attacks: list[Attack] = []
        self.market = self.known = START

    def run_(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def start(self) -> None:
        give_wallets(self.opened.enter_context(pytest.MonkeyPatch.context()), HELD, USDC_HELD)
        flags = {"sandbox.xmr_float": "1500", "sandbox.usdc_float": "250000"}
        service = sandbox(Path(self.folder.name), flags=flags)
        self.box: Sandbox = self.run_(self.opened.enter_async_context(service))

    def teardown(self) -> None:
        if hasattr(self, "box"):
            self.run_(self.box.settle(8))
            self.require_bounded()
            self.run_(self.opened.aclose())
        self.loop.close()
        self.folder.cleanup()

    # --- actions -----------------------------------------------------------------------------

    @rule(bps=st.integers(-150, 150))
    def price_moves(self, bps: int) -> None:
        """The market moves in steps, and the service polls before it is too far ahead."""
        target = self.market * (BPS + bps) // BPS
        self.poll()
        while self.market != target:
            step = max(1, self.known * LAG_BPS // BPS)
            self.market += max(-step, min(step, target - self.market))
            if self.market != target:
                self.poll()
        self.note_worth()

    @rule()
    def poll(self) -> None:
        self.known = self.market
        self.run_(self.box.fault("set_rate", rate=format_units(self.known, USDC)))
        self.box.clock.now += 1
        self.run_(self.box.catch_up())
        self.note_worth()

    @rule(address=ADDRESSES, direction=DIRECTIONS)
    def attacker_orders(self, address: int, direction: str) -> None:
        """An order that may be paid later, if the price has moved in his favour."""
        self.attack(address, direction, MOST_PAID[direction])

    @rule(first=ADDRESSES, count=st.integers(2, 12), direction=DIRECTIONS)
    def attacker_holds_the_wallet(self, first: int, count: int, direction: str) -> None:
        """He makes the largest order possible from each of his addresses."""
        for address in range(first, first + count):
            self.attack(address, direction, UNPAID[direction])

    @rule(address=ADDRESSES, direction=DIRECTIONS, bps=st.integers(50, 400), dust=st.booleans())
    def attacker_waits_for_the_price(
        self, address: int, direction: str, bps: int, dust: bool
    ) -> None:
        """He pays once the market has moved against the service; dust is to keep the lock."""
        before = len(self.attacks)
        self.attack(address, direction, MOST_PAID[direction])
        ordered = [attack.order_id for attack in self.attacks[before:]]
        for order_id in ordered if dust else ():
            self.pay(order_id, "0.01")
        self.price_moves(-bps if direction == "x2u" else bps)
        for order_id in ordered:
            self.pay(order_id, None)
        self.run_(self.box.catch_up())
        self.note_worth()

    def attack(self, address: int, direction: str, amount: str) -> None:
        answer = self.order(Client(ADDRESS, f"192.0.2.{address}"), direction, amount)
        if answer["ok"]:
            data = answer["data"]
            self.attacks.append(Attack(data["order"]["orderId"], data["sessionId"], direction))
        else:
            assert answer["error"]["code"] in ("rate_limited", "unavailable"), answer

    @precondition(lambda self: self.attacks)
    @rule(data=st.data(), share=st.sampled_from([1, 50, 100, 150]))
    def attacker_pays(self, data: st.DataObject, share: int) -> None:
        """He sends dust, a half, the exact amount, or more; at most one and a half of MOST_PAID."""
        attack = data.draw(st.sampled_from(self.attacks))
        units = float(MOST_PAID[attack.direction]) * share / 100
        self.pay(attack.order_id, f"{units:.6f}")
        self.run_(self.box.catch_up())
        self.note_worth()

    @precondition(lambda self: self.attacks)
    @rule(data=st.data())
    def attacker_cancels(self, data: st.DataObject) -> None:
        attack = data.draw(st.sampled_from(self.attacks))
        call = self.box.call("swap.cancel", orderId=attack.order_id, sessionId=attack.session_id)
        self.run_(call)

    @rule(seconds=st.sampled_from([1, 60, 899, 1_200, 2_800]))
    def time_passes(self, seconds: int) -> None:
        self.box.clock.now += seconds * 1000
        self.run_(self.box.catch_up())
        self.run_(self.box.settle(2))
        self.note_worth()
        self.require_bounded()

    @rule(direction=DIRECTIONS)
    def honest_client_swaps(self, direction: str) -> None:
        """He has a token, pays at once, and gets what he was quoted."""
        answer = self.order(HONEST_CLIENT, direction, HONEST[direction])
        assert answer["ok"], answer
        self.pay_and_be_paid(answer)

    @rule(direction=DIRECTIONS)
    def honest_stranger_swaps(self, direction: str) -> None:
        """Without a token: he is served unless too many addresses hold orders. Then the refusal
        says when to retry, within the deposit window.
        """
        answer = self.order(HONEST_STRANGER, direction, HONEST[direction])
        if answer["ok"]:
            self.pay_and_be_paid(answer)
            return
        assert self.addresses_holding() > HARMLESS
        details = answer["error"]["details"]
        assert (answer["error"]["code"], details["scope"]) == ("rate_limited", "addresses")
        assert 0 < details["retryAfterSeconds"] <= WINDOW_SECONDS

    def addresses_holding(self) -> int:
        """How many addresses have unfunded orders."""
        service = self.box.up.service
        clients = (Client(ADDRESS, f"192.0.2.{number}") for number in range(1, 220))
        return sum(
            self.run_(service.store.reserved("", client.stored(service.client_secret))).orders > 0
            for client in clients
        )

    def pay_and_be_paid(self, answer: dict[str, Any]) -> None:
        order_id = answer["data"]["order"]["orderId"]
        self.pay(order_id, None)
        self.run_(self.box.settle(6))
        found = self.found(order_id)
        assert found.payout is not None
        assert (found.status, found.payout.units) == ("completed", found.terms.expected_output)
        self.note_worth()

    # --- helpers -----------------------------------------------------------------------------

    def order(self, client: Client, direction: str, amount: str) -> dict[str, Any]:
        to = EVM if direction == "x2u" else MONERO
        call = self.box.call(
            "swap.execute",
            client=client,
            direction=direction,
            chain="arbitrum",
            amount=amount,
            to=to,
        )
        return dict(self.run_(call))

    def pay(self, order_id: str, amount: str | None) -> None:
        self.box.clock.now += 1  # a deposit first seen in the millisecond of a break is in time
        params = {"amount": amount} if amount else {}
        self.run_(self.box.call("sandbox.fund", orderId=order_id, **params))

    def found(self, order_id: str) -> Order:
        order: Order | None = self.run_(self.box.up.service.store.order(order_id))
        assert order is not None
        return order

    # --- invariants --------------------------------------------------------------------------

    def note_worth(self) -> None:
        """A deposit is valued at the market's rate when it was first seen; if it has no rate of its
        own, at the highest until the decision.
        """
        for attack in self.attacks:
            order = self.found(attack.order_id)
            for deposit in order.deposits:
                if deposit.key in attack.worth and (deposit.rate or order.payout is not None):
                    continue
                worth = Fraction(deposit.units * self.market, XMR)
                if order.terms.direction is Direction.USDC_TO_XMR:
                    worth = Fraction(deposit.units * XMR, self.market)
                attack.worth[deposit.key] = max(worth, attack.worth.get(deposit.key, worth))

    def require_bounded(self) -> None:
        """No payout is above the bound of docs/operate/economics.md for its deposits."""
        for attack in self.attacks:
            order = self.found(attack.order_id)
            if order.payout is None:
                continue
            taken = [d.key for d in order.deposits if d.transfer_id == order.payout.transfer_id]
            worth = sum((attack.worth[key] for key in taken), start=Fraction(0))
            lost, lag = Fraction(BREAK_BPS, BPS), Fraction(LAG_BPS, BPS)
            if order.terms.direction is Direction.XMR_TO_USDC:
                dearest = worth / ((1 - lost) * (1 - lag))
            else:
                dearest = worth * (1 + lost) * (1 + lag)
            assert order.payout.units <= dearest * (1 - Fraction(SPREAD_BPS, BPS)), order


Market.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)
TestMarket = Market.TestCase
