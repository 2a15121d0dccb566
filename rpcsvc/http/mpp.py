"""Payments of x402 in the form of MPP: HTTP authentication by the scheme "Payment".

One payment, ``evm/charge`` by an EIP-3009 authorization, written in other headers: a challenge says
what an entry of x402's ``accepts`` says, and a credential has what its PaymentPayload has.

Source: "The Payment HTTP Authentication Scheme" (draft-ietf-httpauth-payment) and its method "evm",
intent "charge".
"""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rpcsvc import strict_json
from rpcsvc.clock import iso8601
from rpcsvc.domain.money import USDC
from rpcsvc.errors import InvalidInput, InvalidJson
from rpcsvc.operations.models import PaymentResponse
from rpcsvc.operations.x402 import EIP3009, EXACT, VERSION, PaymentRequirements, network_id
from rpcsvc.strict_json import Json
from rpcsvc.verify import b64url

CREDENTIAL: Final = "Payment-Authorization"
# The header of clients that do not read which one the challenge names.
USUAL: Final = "Authorization"
RECEIPT: Final = "Payment-Receipt"
SCHEME: Final = "Payment"
_METHOD: Final = "evm"
_INTENT: Final = "charge"
_BY_AUTHORIZATION: Final = "authorization"
_MOST_DEPTH: Final = 8


class _Part(BaseModel):
    """A part of a credential. Others of its properties are for other methods."""

    model_config = ConfigDict(strict=True, frozen=True)


class _Details(_Part):
    chain_id: Annotated[int, Field(alias="chainId", gt=0, lt=2**53)]


class _Request(_Part):
    """The request of the challenge, as the client got it."""

    amount: str
    currency: str
    recipient: str
    details: Annotated[_Details, Field(alias="methodDetails")]


class _Challenge(_Part):
    method: Literal["evm"]
    intent: Literal["charge"]
    request: str


class _Credential(_Part):
    challenge: _Challenge
    payload: dict[str, Any]


def challenge(required: Json) -> str:
    """The value of WWW-Authenticate that asks for what PaymentRequired of x402 asks for.

    The client draws the authorization's nonce from ``id`` and ``realm``: each challenge has another
    ``id``, so that a payment which failed is not signed again under its nonce.
    """
    offer = PaymentRequirements.model_validate(required["accepts"][0])
    request = _encoded(
        {
            "amount": offer.amount,
            "currency": offer.asset,
            "methodDetails": {
                "chainId": int(offer.network.rpartition(":")[2]),
                "credentialTypes": [_BY_AUTHORIZATION],
                "decimals": USDC.decimals,
            },
            "recipient": offer.pay_to,
        }
    )
    parts = {
        "id": secrets.token_urlsafe(),
        "realm": urlsplit(required["resource"]["url"]).netloc,
        "method": _METHOD,
        "intent": _INTENT,
        "request": request,
        "header": CREDENTIAL,
    }
    return f"{SCHEME} " + ", ".join(f'{name}="{value}"' for name, value in parts.items())


def receipt(paid: PaymentResponse, at: int) -> str:
    """The value of Payment-Receipt for a payment that the network has at ``at``, in ms since the
    epoch.
    """
    return _encoded(
        {
            "method": _METHOD,
            "reference": paid.transaction,
            "status": "success",
            "timestamp": iso8601(at),
        }
    )


def is_credential(header: str) -> bool:
    """Return whether Authorization carries a payment, and not a token."""
    return header.lower().startswith(f"{SCHEME.lower()} ")


def read_credential(header: str) -> Json:
    """Read the payment of a credential, as PaymentPayload of x402. Raises InvalidInput.

    Which challenge it answers is not judged: clients hash ``id`` and ``realm`` in several ways, and
    the payment has to be what is due now, to the order's own address.
    """
    if not is_credential(header):
        raise _malformed("its scheme is not Payment")
    token = header.partition(" ")[2]
    try:
        credential = _Credential.model_validate(_decoded(token.strip()))
        request = _Request.model_validate(_decoded(credential.challenge.request))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise _malformed(f"{where}: {problem['msg']}") from None
    payload = dict(credential.payload)
    signature, kind = payload.pop("signature", None), payload.pop("type", None)
    if kind != _BY_AUTHORIZATION:
        raise _malformed("payload.type is not authorization")
    return {
        "x402Version": VERSION,
        "accepted": {
            "scheme": EXACT,
            "network": network_id(request.details.chain_id),
            "amount": request.amount,
            "asset": request.currency,
            "payTo": request.recipient,
            "maxTimeoutSeconds": 0,
            # What the client signed for is judged by its signature.
            "extra": {"name": "", "version": "", "assetTransferMethod": EIP3009},
        },
        "payload": {"signature": signature, "authorization": payload},
    }


def _malformed(why: str) -> InvalidInput:
    return InvalidInput(
        f"{CREDENTIAL} is no credential of the method evm, intent charge: {why}. Send what signing"
        " the challenge of WWW-Authenticate gives.",
        field=CREDENTIAL,
    )


def _encoded(value: Json) -> str:
    return b64url(strict_json.dumps(value))


def _decoded(text: str) -> Json:
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        found = strict_json.loads(data, max_depth=_MOST_DEPTH)
    except (InvalidJson, binascii.Error, ValueError):
        found = None
    if not isinstance(found, dict):
        raise _malformed("it is not Base64url of a JSON object")
    return found
