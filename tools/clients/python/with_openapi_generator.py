"""openapi-generator's python: pydantic and urllib3; the document says where the service is."""

from __future__ import annotations

from uuid import UUID

import openapi_generator_made as made
from scenario import BffOrder, Client, Swap, make_orders
from typing_extensions import override

CHAIN = "arbitrum"


class GeneratedClient(Client):
    """The scenario's calls."""

    def __init__(self) -> None:
        client = made.ApiClient()
        self._swaps, self._bff = made.SwapApi(client), made.BffApi(client)
        self._sandbox = made.SandboxApi(client)

    @override
    def quote(self, swap: Swap) -> str:
        direction = made.Direction(swap.direction)
        price = made.SwapRequestBase(direction=direction, chain=CHAIN, amount=swap.amount)
        return self._swaps.swap_quote(price).data.quote_digest

    @override
    def execute(self, swap: Swap, digest: str, session: UUID, key: str) -> str:
        terms = made.SwapRequest(
            direction=made.Direction(swap.direction),
            chain=CHAIN,
            amount=swap.amount,
            to=swap.to,
            sessionId=session,
            quoteDigest=digest,
        )
        return self._swaps.swap_execute(terms, idempotency_key=key).data.order.order_id

    @override
    def fund(self, order_id: str) -> None:
        self._sandbox.sandbox_fund(made.FundRequest(orderId=order_id))

    @override
    def state(self, order_id: str) -> str:
        return self._swaps.swap_status(order_id).state.value

    @override
    def order_bff(self, order: BffOrder, session: UUID) -> str:
        terms = made.BffOrderRequest(
            fromChainId=order.from_chain_id,
            toChainId=order.to_chain_id,
            fromToken=order.from_token,
            toToken=order.to_token,
            fromAmount=order.from_amount,
            toAddress=order.to_address,
            sessionId=session,
        )
        return self._bff.bff_orders_create(terms).order_id

    @override
    def bff_status(self, order_id: str) -> str:
        return self._bff.bff_orders_get(order_id).status.value


make_orders("openapi-generator python", GeneratedClient())
