"""Reads the body of a /rpc response: an envelope, a result, or a refusal as either.

A gateway between may answer for the service, in JSON and with an error of its own, while the call
is carried out behind it. So only what this service writes is accepted: JSON-RPC 2.0 with an
envelope, or with an error that bears its codes.
"""

from __future__ import annotations

import json
from typing import Any, Final

Json = dict[str, Any]

# States of the envelope for what a server refuses as a message; other codes are the caller's input.
_STATES: Final = {
    "unknown_method": "not_found",
    "rate_limited": "rate_limited",
    "unavailable": "unavailable",
    "internal_error": "internal_error",
}
# As operations/envelope.py has it; a probe, which imports this, must not import that.
_RETRY: Final = {
    "action": "retry",
    "description": "Send the same call again later, with the same idempotency key if it had one.",
}


class ForeignAnswer(Exception):
    """What came is not this service's answer to a call."""


def read_answer(body: bytes, operation: str, request_id: str | None, network: str | None) -> Json:
    """The envelope in the body of a response, also when the call was refused as a message.

    ``network`` is the service's, None where it is not known: a refused message does not tell it.
    Raises ForeignAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return _carried_out(answer["result"])
        return _refused(answer["error"], operation, request_id, network)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ForeignAnswer from error


def read_result(body: bytes) -> Json:
    """The result in the body of a response; of a refused message ``{"error": {code, message}}``.

    Raises ForeignAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return dict(answer["result"])
        data = answer["error"]["data"]
        return {"error": {"code": str(data["code"]), "message": str(data["message"])}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ForeignAnswer from error


def _refuse(constant: str) -> None:
    """NaN and the infinities, which Python reads and writes, and JSON does not have."""
    raise ValueError(constant)


def _require_json_rpc(answer: Json) -> None:
    if answer["jsonrpc"] != "2.0":
        raise ValueError("not JSON-RPC 2.0")


def _carried_out(envelope: Json) -> Json:
    if not isinstance(envelope["ok"], bool) or not isinstance(envelope["data"], dict):
        raise TypeError("not an envelope")
    return dict(envelope)


def _refused(error: Json, operation: str, request_id: str | None, network: str | None) -> Json:
    """A JSON-RPC error as an envelope: whoever reads stdout finds one shape only."""
    data = error["data"]
    code = data["code"]
    if type(error["code"]) is not int or not isinstance(code, str):
        raise TypeError("not an error of this service")
    retryable = data.get("retryable") is True
    described = {"code": code, "message": str(error["message"]), "retryable": retryable}
    if "details" in data:
        described["details"] = data["details"]
    return {
        "ok": False,
        "operation": operation,
        "state": _STATES.get(code, "invalid_input"),
        "missingInputs": [],
        "validationErrors": [],
        "nextActions": [_RETRY] if retryable else [],
        "data": {"network": network, "sessionId": None, "sessionSource": "none"},
        "requestId": data.get("requestId", request_id or ""),
        "error": described,
    }
