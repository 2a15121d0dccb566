"""``SyncSwapClient``: SwapClient for programs without an event loop; not thread-safe."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from rpcsvc.client.blocking import BlockingTransport, finished
from rpcsvc.client.messages import Json
from rpcsvc.client.models import Deliveries, Event, Funded, Placed, Quote, Status, Swap
from rpcsvc.client.swap_client import SwapClient
from rpcsvc.client.x402 import Signer


class _Blocking(SwapClient):
    """Its calls never suspend."""

    _transport_to = staticmethod(BlockingTransport)


class SyncSwapClient:
    """SwapClient with blocking calls; ``with`` opens and closes it."""

    def __init__(self, url: str, **options: Any) -> None:
        self._client = _Blocking(url, **options)

    def __enter__(self) -> Self:
        finished(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finished(self._client.__aexit__(kind, error, trace))

    def call(self, operation: str, **params: Any) -> Json:
        """As SwapClient.call."""
        return finished(self._client.call(operation, **params))

    def quote(self, swap: Swap) -> Quote:
        """As SwapClient.quote."""
        return finished(self._client.quote(swap))

    def create(self, swap: Swap, *, quote: Quote | None = None) -> Placed:
        """As SwapClient.create."""
        return finished(self._client.create(swap, quote=quote))

    def status(self, order_id: str, *, verify_to: str | None = None) -> Status:
        """As SwapClient.status."""
        return finished(self._client.status(order_id, verify_to=verify_to))

    def events(self, order_id: str, *, after: int = 0) -> Iterator[Event]:
        """As SwapClient.events."""
        feed = self._client.events(order_id, after=after)

        async def following() -> Event | None:
            return await anext(feed, None)

        try:
            while (event := finished(following())) is not None:
                yield event
        finally:
            finished(feed.aclose())

    def wait(self, order_id: str) -> Status:
        """As SwapClient.wait."""
        return finished(self._client.wait(order_id))

    def cancel(self, order_id: str, session_id: str) -> Status:
        """As SwapClient.cancel."""
        return finished(self._client.cancel(order_id, session_id))

    def set_refund_address(self, order_id: str, session_id: str, address: str) -> bool:
        """As SwapClient.set_refund_address."""
        return finished(self._client.set_refund_address(order_id, session_id, address))

    def fund(
        self, swap: Swap, placed: Placed, payer: str, sign: Signer, *, attempt: int = 1
    ) -> Funded:
        """As SwapClient.fund."""
        return finished(self._client.fund(swap, placed, payer, sign, attempt=attempt))

    def send_payment(self, order_id: str, payment: Json) -> Funded:
        """As SwapClient.send_payment."""
        return finished(self._client.send_payment(order_id, payment))

    def webhook_deliveries(self, order_id: str, session_id: str) -> Deliveries:
        """As SwapClient.webhook_deliveries."""
        return finished(self._client.webhook_deliveries(order_id, session_id))

    def sandbox_fund(self, order_id: str, amount: str | None = None) -> Json:
        """As SwapClient.sandbox_fund."""
        return finished(self._client.sandbox_fund(order_id, amount))
