"""Pays orders by signature, with the client of the package x402."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from eth_account import Account
from x402.client import x402Client
from x402.http.x402_http_client import x402HTTPClient
from x402.mechanisms.evm.exact.register import register_exact_evm_client

from tests.contract.serving import BACK, Answer, Served
from tests.rows import all_rows

PAYER = Account.from_key(b"\7" * 32)
Json = dict[str, Any]
CHANGED = "The order changed while the payment was being checked."


def x402_client(account: Any = PAYER) -> x402HTTPClient:
    """A client that signs any amount with an account."""
    client = x402Client()
    client.set_spend_controls(False)
    register_exact_evm_client(client, account)
    return x402HTTPClient(client)


X402_CLIENT = x402_client()


async def new_order(served: Served, swap: Json = BACK) -> str:
    return str((await served.post("/agent/swap/execute", swap)).body["data"]["order"]["orderId"])


async def fund(served: Served, order_id: str, **headers: str) -> Answer:
    """Pay an order. If it changed while the payment was checked, pay again, as the answer says."""
    while True:
        answer = await served.http("POST", f"/agent/swap/fund/{order_id}", headers=headers)
        if answer.status != 503 or CHANGED not in answer.body["error"]["message"]:
            return answer


async def signed(offer: Json) -> Json:
    """The payment that the client signs for PaymentRequired."""
    payment = await X402_CLIENT._client.create_payment_payload(read_required(offer))
    return dict(payment.model_dump(by_alias=True, exclude_none=True))


def read_required(offer: Json) -> Any:
    """PaymentRequired as the x402 client reads it from its header."""
    encoded = base64.b64encode(json.dumps(offer).encode()).decode()
    return X402_CLIENT.get_payment_required_response({"PAYMENT-REQUIRED": encoded}.get, None)


async def offered(served: Served, order_id: str) -> Json:
    """PaymentRequired of an order."""
    return dict((await fund(served, order_id)).body["error"]["details"]["paymentRequired"])


def header(payment: Json) -> dict[str, str]:
    return {"PAYMENT-SIGNATURE": base64.b64encode(json.dumps(payment).encode()).decode()}


async def finished(served: Served, order_id: str) -> Json:
    async with asyncio.timeout(20):
        while True:
            answer = await served.http("GET", f"/agent/swap/status/{order_id}?waitSec=1")
            if answer.body["state"] in ("completed", "terminal_failure"):
                return dict(answer.body)


def debits(served: Served) -> list[tuple[str, int]]:
    """Sender and units of every deposit on the sandbox's chains."""
    sql = "SELECT sender, units FROM sandbox_transactions WHERE kind = 'deposit'"
    return [(row[0], row[1]) for row in all_rows(served.up.database, sql)]
