"""x402 over HTTP and MCP: reads the payment of a request, and writes its outcome to the answer.

Over HTTP the same payment may come in the headers of MPP.

Source: the x402 specification, version 2, transports "HTTP" and "MCP".
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from aiohttp import web

from rpcsvc.errors import InvalidInput, PaymentRequired
from rpcsvc.http import mpp
from rpcsvc.operations.service import Reply
from rpcsvc.operations.x402 import FIELD, encoded
from rpcsvc.strict_json import Json

SIGNATURE: Final = "PAYMENT-SIGNATURE"
REQUIRED: Final = "PAYMENT-REQUIRED"
RESPONSE: Final = "PAYMENT-RESPONSE"
_VERSION_1: Final = "X-PAYMENT"
_META: Final = "x402/payment"
_META_RESPONSE: Final = "x402/payment-response"


def with_payment(request: web.Request, params: dict[str, Any]) -> dict[str, Any]:
    """The params with the payment of the header. Raises InvalidInput for two, and for version 1."""
    if _VERSION_1 in request.headers:
        raise InvalidInput(
            f"{_VERSION_1} is of x402 version 1, which is not read. Send {SIGNATURE} of version 2.",
            field=_VERSION_1,
            allowed=[SIGNATURE],
        )
    given: list[str | Json] = [*request.headers.getall(SIGNATURE, ())]
    usual = filter(mpp.is_credential, request.headers.getall(mpp.USUAL, ()))
    credentials = [*request.headers.getall(mpp.CREDENTIAL, ()), *usual]
    given += map(mpp.read_credential, credentials)
    if not given:
        return params
    if len(given) > 1 or FIELD in params:
        raise InvalidInput(
            f"Send one payment: as the header {SIGNATURE} or {mpp.CREDENTIAL}.", field=FIELD
        )
    return {**params, FIELD: given[0]}


def payment_headers(reply: Reply) -> dict[str, str]:
    """The headers of an answer that report a payment."""
    if isinstance(reply.error, PaymentRequired):
        required = dict(reply.error.required)
        return {REQUIRED: encoded(required), "www-authenticate": mpp.challenge(required)}
    if reply.settlement is not None and reply.settlement.response is not None:
        return {
            RESPONSE: encoded(reply.settlement.response),
            mpp.RECEIPT: mpp.receipt(reply.settlement.response, reply.settlement.at),
        }
    return {}


def with_meta_payment(params: Json, arguments: Json) -> Json:
    """The arguments of a tool with the payment of ``_meta``, where they have none."""
    meta = params.get("_meta")
    payment = meta.get(_META) if isinstance(meta, dict) else None
    return arguments if payment is None else {FIELD: payment, **arguments}


def tool_result(reply: Reply, result: Json) -> Json:
    """A tool's result with the outcome of a payment.

    Clients of x402 look for PaymentRequired in the first text.
    """
    if isinstance(reply.error, PaymentRequired):
        first = {"type": "text", "text": orjson.dumps(reply.error.required).decode()}
        return {**result, "content": [first, *result["content"]]}
    if reply.settlement is not None and reply.settlement.response is not None:
        meta = {**result.get("_meta", {}), _META_RESPONSE: reply.settlement.response}
        return {**result, "_meta": meta}
    return result
