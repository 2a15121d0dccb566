"""The orders that each Python client makes: a swap each way and an order of the BFF."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol
from uuid import UUID, uuid4

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
USDC_ON_ARBITRUM = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
LONGEST_SECONDS = 60


class Swap(NamedTuple):
    """The terms of a swap on Arbitrum."""

    direction: str
    amount: str
    to: str


class BffOrder(NamedTuple):
    """The terms of an order of the BFF."""

    from_chain_id: int
    to_chain_id: int
    from_token: str
    to_token: str
    from_amount: str
    to_address: str


class Client(Protocol):
    """The calls of a generated client. Orders are named by their id."""

    def quote(self, swap: Swap) -> str:
        """Price a swap, and return the quote's digest."""

    def execute(self, swap: Swap, digest: str, session: UUID, key: str) -> str:
        """Make the order of a quote."""

    def fund(self, order_id: str) -> None:
        """Send the simulated deposit."""

    def state(self, order_id: str) -> str:
        """Return an order's state."""

    def order_bff(self, order: BffOrder, session: UUID) -> str:
        """Make an order through the BFF."""

    def bff_status(self, order_id: str) -> str:
        """Return an order's status through the BFF."""


def make_orders(name: str, client: Client) -> None:
    """Make the orders side by side, each until it is completed."""
    orders: list[Callable[[], None]] = [
        lambda: _swap(client, Swap("x2u", "0.8", EVM)),
        lambda: _swap(client, Swap("u2x", "150", MONERO)),
        lambda: _order(client),
    ]
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(order) for order in orders]:
            made.result()
    print(f"ok {name}")


def _swap(client: Client, swap: Swap) -> None:
    digest = client.quote(swap)
    order_id = client.execute(swap, digest, uuid4(), str(uuid4()))
    client.fund(order_id)
    _until_completed(lambda: client.state(order_id))


def _order(client: Client) -> None:
    order = BffOrder(0, 42161, "XMR", USDC_ON_ARBITRUM, "800000000000", EVM)
    order_id = client.order_bff(order, uuid4())
    client.fund(order_id)
    _until_completed(lambda: client.bff_status(order_id))


def _until_completed(look: Callable[[], str]) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    while (state := look()) != "completed":
        if time.monotonic() > end:
            raise TimeoutError(f"still {state} after {LONGEST_SECONDS} s")
        time.sleep(0.2)
