"""Requests to a service, and checks of its answers."""

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
# Copied from operations/envelope.py, which a probe must not import.
_RETRY: Final = {
    "action": "retry",
    "description": "Send the same call again later, with the same idempotency key if it had one.",
}


class UnreadableAnswer(Exception):
    """The answer does not come from this service."""


def read_answer(body: bytes, operation: str, request_id: str | None, network: str | None) -> Json:
    """The envelope in the body of a response, also when the call was refused as a message.

    ``network`` is the service's, None where it is not known: a refused message does not tell it.
    Raises UnreadableAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return _carried_out(answer["result"])
        return _refused(answer["error"], operation, request_id, network)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer from error


def read_envelope(body: bytes) -> Json:
    """The envelope in the body of a response of the agent API. Raises UnreadableAnswer."""
    try:
        return _carried_out(json.loads(body, parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer from error


def read_result(body: bytes) -> Json:
    """The result in the body of a response; of a refused message ``{"error": {code, message}}``.

    Raises UnreadableAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return dict(answer["result"])
        data = answer["error"]["data"]
        return {"error": {"code": str(data["code"]), "message": str(data["message"])}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer from error


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which Python accepts although JSON has none."""
    raise ValueError(constant)


def _require_json_rpc(answer: Json) -> None:
    if answer["jsonrpc"] != "2.0":
        raise ValueError("not JSON-RPC 2.0")


def _carried_out(envelope: Json) -> Json:
    if not isinstance(envelope["ok"], bool) or not isinstance(envelope["data"], dict):
        raise TypeError("not an envelope")
    return dict(envelope)


def _refused(error: Json, operation: str, request_id: str | None, network: str | None) -> Json:
    """A JSON-RPC error as an envelope, so that stdout always has the same form."""
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


def written(message: Json) -> bytes:
    """A body as compact JSON, in UTF-8.

    Escapes could make a text of allowed length exceed the limit of the body.
    """
    text = json.dumps(message, ensure_ascii=False)
    # Half a surrogate pair becomes \udXXX, which is also its escape in JSON.
    return text.encode("utf-8", "backslashreplace")


def call_of(method: str, params: Json) -> bytes:
    """The body of one JSON-RPC call."""
    return written({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})


def headers_of(token: str | None, local_session: str | None = None) -> dict[str, str]:
    """The headers of a call, which hold printable ASCII."""
    headers = {"content-type": "application/json"}
    if token:
        headers["x-agent-rpc-token"] = token
    if local_session:
        headers["x-agent-local-session"] = local_session
    return headers


def request_id_of(text: str | None) -> dict[str, str]:
    """The header with a request id; none for one that the service would replace by its own."""
    return {"x-request-id": text} if text and text.isascii() and text.isprintable() else {}
