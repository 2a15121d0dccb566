"""Interim answers of tools/call (MCP 2026-07-28): a question to the user, and a task.

Both are stateless, so any replica can continue them. The terms shown to the user come back
authenticated in ``requestState``: other arguments or a worse price are refused ("Input required").
A task is an order, with the order's id (the extension io.modelcontextprotocol/tasks).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import Final, NamedTuple

import orjson

from rpcsvc.errors import (
    Forbidden,
    InputError,
    InputErrors,
    InternalError,
    InvalidInput,
    InvalidParams,
    OrderNotFound,
)
from rpcsvc.http.gate import Caller
from rpcsvc.http.operation_routes import carry_out
from rpcsvc.http.site import Site
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.params import DETAIL, FULL, LEAN
from rpcsvc.operations.service import Operation, Reply
from rpcsvc.orders.waits import LONGEST_WAIT_SECONDS
from rpcsvc.strict_json import Json

# The surface of MCP as metrics name it.
TRANSPORT: Final = "mcp"
QUESTION: Final = "terms"
_AGREED: Final = "agreed"
_OVER: Final = frozenset({"completed", "terminal_failure"})
_POLL_MS: Final = 5_000

_ADDRESS: Final = re.compile(r"[0-9A-Za-z]{1,128}")


class UserApproval:
    """Has the client ask its user whether to accept the terms of an order, and reads the answer.

    ``secret`` authenticates ``requestState``.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.sha256(b"mcp confirmation" + secret).digest()

    def question(self, arguments: Json, quote: Json, digest: str) -> Json:
        """The result that has the client show its user the quote (``data.quote``) of a digest."""
        return {
            "resultType": "input_required",
            "inputRequests": {
                QUESTION: {
                    "method": "elicitation/create",
                    "params": {
                        "mode": "form",
                        "message": _sentence(arguments, quote),
                        "requestedSchema": _FORM,
                    },
                }
            },
            "requestState": f"{digest}.{self._mac(digest, arguments)}",
        }

    def agreed(self, params: Json, arguments: Json) -> str | None:
        """The digest of the quote that the user agreed to for these arguments.

        None if the user has not been asked yet. Raises InvalidInput if the user declined, and
        InvalidParams for a ``requestState`` that was not issued for these arguments.
        """
        state, responses = params.get("requestState"), params.get("inputResponses")
        answer = responses.get(QUESTION) if isinstance(responses, dict) else None
        if state is None or not isinstance(answer, dict):
            return None
        digest, _, mac = str(state).rpartition(".")
        # Escaped as in JSON: a caller's text may hold lone surrogates, which UTF-8 can't encode.
        if not hmac.compare_digest(json.dumps(mac), json.dumps(self._mac(digest, arguments))):
            raise InvalidParams(
                "requestState is not the one that was given for these arguments. Send both as they"
                " were, or call again without it."
            )
        content = answer.get("content")
        said_yes = isinstance(content, dict) and content.get(_AGREED) is True
        if answer.get("action") != "accept" or not said_yes:
            raise InvalidInput(
                "The user did not agree to the terms: no order was made. Ask what they want"
                " instead.",
                field=_AGREED,
            )
        return digest

    def _mac(self, digest: str, arguments: Json) -> str:
        written = json.dumps([digest, arguments], sort_keys=True).encode()
        return hmac.new(self._key, written, "sha256").hexdigest()


_FORM: Final = {
    "type": "object",
    "properties": {
        _AGREED: {
            "type": "boolean",
            "title": "Create this order",
            "description": "Locks these terms. Nothing is paid until you send the deposit.",
        }
    },
    "required": [_AGREED],
}


def _shown(address: object) -> str:
    """The address; a placeholder for text that could pass for a part of the question."""
    is_one = isinstance(address, str) and _ADDRESS.fullmatch(address)
    return str(address) if is_one else "(no address)"


def _sentence(arguments: Json, quote: Json) -> str:
    refund = arguments.get("refundAddress")
    back = f" Refunds go to {_shown(refund)}." if refund is not None else ""
    received = f"{quote['expectedOutput']} {quote['payoutAsset']}"
    least = f"about {received} (at least {quote['minReceived']})"
    return (
        f"Swap {quote['depositAmount']} {quote['depositAsset']} for"
        f" {least if quote.get('receiveAmount') is None else f'exactly {received}'},"
        f" USDC on {quote['chain']}, paid to {_shown(arguments.get('to'))}.{back} Create the order?"
    )


# --- tasks -------------------------------------------------------------------------------------


class OrderTask(NamedTuple):
    """The state of a task, and the answer of swap.status that it was read from."""

    view: Json
    reply: Reply

    @property
    def is_over(self) -> bool:
        """Whether the order has ended, or waits for an address from its user."""
        return bool(self.view["status"] == "completed")


class OrderTasks:
    """Tasks that wait for the end of an order, read from the order. Cancelling one ends no swap."""

    def __init__(self, site: Site, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.operation = site.operation("swap.status")
        self._events = site.operation("swap.events")

    def is_wait(self, operation: Operation, arguments: Json) -> bool:
        """Return whether the call asks for the status of an order with a valid ``waitSec``."""
        seconds = arguments.get("waitSec")
        is_valid = type(seconds) is int and 0 < seconds <= LONGEST_WAIT_SECONDS
        return operation is self.operation and is_valid and arguments[DETAIL] in (FULL, LEAN)

    async def begin(self, caller: Caller, hint: str | None, arguments: Json) -> OrderTask | Reply:
        """The task for a call that waits; the reply if the order can't be read."""
        return await self._task(caller, hint, {**arguments, "waitSec": 0})

    async def get(self, caller: Caller, hint: str | None, params: Json) -> OrderTask:
        """The task that ``params`` name. Raises InvalidParams and InternalError."""
        found = await self._task(caller, hint, {"orderId": params.get("taskId"), DETAIL: LEAN})
        if isinstance(found, OrderTask):
            return found
        if isinstance(found.error, (InputError, InputErrors, OrderNotFound)):
            raise InvalidParams("There is no such task. A taskId is the orderId of its order.")
        if isinstance(found.error, Forbidden):
            raise InvalidParams(found.error.message)
        raise InternalError(caller.request_id)

    async def _task(self, caller: Caller, hint: str | None, params: Json) -> OrderTask | Reply:
        reply = await self._status(caller, hint, {**params, DETAIL: FULL})
        if reply.error is not None:
            return reply
        status = orjson.loads(reply.body)
        data, actions = status["data"], status["nextActions"]
        order = data["order"]
        last = {"orderId": order["orderId"], "after": data["cursor"] - 1}
        log = await carry_out(
            self._dispatcher, self._events, caller, hint, last, transport=TRANSPORT
        )
        if log.error is not None:
            return log
        is_over = status["state"] in _OVER or data["actionRequired"] is not None
        view = {
            "taskId": order["orderId"],
            "status": "completed" if is_over else "working",
            "statusMessage": actions[0]["description"] if actions else status["state"],
            "createdAt": order["createdAt"],
            "lastUpdatedAt": orjson.loads(log.body)["data"]["events"][-1]["at"],
            "ttlMs": None,
            "pollIntervalMs": _POLL_MS,
        }
        if is_over and params[DETAIL] == LEAN:
            reply = await self._status(caller, hint, params)
        return OrderTask(view, reply)

    async def _status(self, caller: Caller, hint: str | None, params: Json) -> Reply:
        return await carry_out(
            self._dispatcher, self.operation, caller, hint, params, transport=TRANSPORT
        )
