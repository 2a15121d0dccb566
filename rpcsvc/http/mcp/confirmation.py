"""The user's yes before the terms of an order are locked, bound to the terms that were shown.

Nothing is kept between the two requests (MCP 2026-07-28, "Input required"): what the user was shown
comes back as ``requestState``, sealed, so that no other arguments and no worse price pass for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import Final

from rpcsvc.errors import InvalidInput, InvalidParams
from rpcsvc.operations.envelope import Json

QUESTION: Final = "terms"
_AGREED: Final = "agreed"


class Confirmations:
    """Asks, and reads the answers. ``secret`` seals what was asked."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.sha256(b"mcp confirmation" + secret).digest()

    def question(self, arguments: Json, quote: Json, digest: str) -> Json:
        """The result that has the client show its user a quote (``data.quote``), and its digest."""
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
            "requestState": f"{digest}.{self._seal(digest, arguments)}",
        }

    def agreed(self, params: Json, arguments: Json) -> str | None:
        """The digest of the quote that the user agreed to for these arguments.

        None where they have to be asked. Raises InvalidInput when they said no, and InvalidParams
        for a ``requestState`` that was not given out for these arguments.
        """
        state, responses = params.get("requestState"), params.get("inputResponses")
        answer = responses.get(QUESTION) if isinstance(responses, dict) else None
        if state is None or not isinstance(answer, dict):
            return None
        digest, _, seal = str(state).rpartition(".")
        # As JSON has it: a caller's text may hold what UTF-8 can't.
        if not hmac.compare_digest(json.dumps(seal), json.dumps(self._seal(digest, arguments))):
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

    def _seal(self, digest: str, arguments: Json) -> str:
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


_ADDRESS: Final = re.compile(r"[0-9A-Za-z]{1,128}")


def _shown(address: object) -> str:
    """An address, and nothing that only looks like a part of the question."""
    is_one = isinstance(address, str) and _ADDRESS.fullmatch(address)
    return str(address) if is_one else "(no address)"


def _sentence(arguments: Json, quote: Json) -> str:
    refund = arguments.get("refundAddress")
    back = f" Refunds go to {_shown(refund)}." if refund is not None else ""
    return (
        f"Swap {quote['depositAmount']} {quote['depositAsset']} for about"
        f" {quote['expectedOutput']} {quote['payoutAsset']} (at least {quote['minReceived']}),"
        f" USDC on {quote['chain']}, paid to {_shown(arguments.get('to'))}.{back} Create the order?"
    )
