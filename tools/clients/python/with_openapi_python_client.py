"""openapi-python-client: attrs and httpx."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast
from uuid import UUID

import openapi_python_client_made as made
from openapi_python_client_made import models
from openapi_python_client_made.api.bff import bff_orders_create, bff_orders_get
from openapi_python_client_made.api.sandbox import sandbox_fund
from openapi_python_client_made.api.swap import swap_execute, swap_quote, swap_status
from scenario import BffOrder, Client, Swap, make_orders
from typing_extensions import override

T = TypeVar("T")
CHAIN = "arbitrum"


def good(answer: object, kind: type[T]) -> T:
    """Return an answer of the kind that a call has when it succeeds."""
    if not isinstance(answer, kind):
        raise TypeError(f"not a {kind.__name__}: {answer}")
    return answer


class GeneratedClient(Client):
    """The scenario's calls."""

    def __init__(self) -> None:
        self._client = made.Client(base_url=os.environ["SITE"])

    @override
    def quote(self, swap: Swap) -> str:
        body = models.SwapRequestBase(
            direction=models.Direction(swap.direction),
            chain=models.SwapRequestBaseChain(CHAIN),
            amount=swap.amount,
        )
        answer = swap_quote.sync(client=self._client, body=body)
        return good(answer, models.SwapQuoteEnvelope).data.quote_digest

    @override
    def execute(self, swap: Swap, digest: str, session: UUID, key: str) -> str:
        body = models.SwapRequest(
            direction=models.Direction(swap.direction),
            chain=models.SwapRequestChain(CHAIN),
            amount=swap.amount,
            to=swap.to,
            session_id=session,
            quote_digest=digest,
        )
        answer = swap_execute.sync(client=self._client, body=body, idempotency_key=key)
        return good(answer, models.SwapExecuteEnvelope).data.order.order_id

    @override
    def fund(self, order_id: str) -> None:
        answer = sandbox_fund.sync(client=self._client, body=models.FundRequest(order_id=order_id))
        good(answer, models.SandboxFundEnvelope)

    @override
    def state(self, order_id: str) -> str:
        answer = swap_status.sync(order_id, client=self._client)
        return good(answer, models.SwapStatusEnvelope).state.value

    @override
    def order_bff(self, order: BffOrder, session: UUID) -> str:
        body = models.BffOrderRequest(**order._asdict(), session_id=session)
        # The generator asks for credentials wherever a call may have some; none are needed.
        answer = bff_orders_create.sync(client=cast("Any", self._client), body=body)
        return good(answer, models.BffNewOrder).order_id

    @override
    def bff_status(self, order_id: str) -> str:
        answer = bff_orders_get.sync(order_id, client=self._client)
        return good(answer, models.BffOrder).status.value


make_orders("openapi-python-client", GeneratedClient())
