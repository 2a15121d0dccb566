"""The objects of x402 version 2, scheme exact, by EIP-3009, read strictly.

Source: the x402 specification, version 2, "PaymentRequired", "PaymentPayload",
"SettlementResponse", the scheme "exact" on EVM, and the extension "payment-identifier".
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from rpcsvc import strict_json
from rpcsvc.domain.addresses import EVM_PATTERN
from rpcsvc.domain.authorizations import Due, SignedAuthorization
from rpcsvc.domain.usdc import LARGEST_WORD, Authorization
from rpcsvc.errors import InvalidInput, InvalidJson
from rpcsvc.operations.narrowing import WHOLE
from rpcsvc.strict_json import Json

FIELD: Final = "payment"
VERSION: Final = 2
EXACT: Final = "exact"
EIP3009: Final = "eip3009"
_MOST_DEPTH: Final = 8
_LONGEST_SIGNATURE: Final = 8_192
PAYMENT_IDENTIFIER: Final = "payment-identifier"
_PAYMENT_ID: Final = "^[a-zA-Z0-9_-]+$"
_SHORTEST_ID: Final = 16
_LONGEST_ID: Final = 128
_IDENTIFIER_OFFER: Final[Json] = {
    "info": {"required": False},
    "schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "required": {"type": "boolean"},
            "id": {
                "type": "string",
                "minLength": _SHORTEST_ID,
                "maxLength": _LONGEST_ID,
                "pattern": _PAYMENT_ID,
            },
        },
        "required": ["required"],
    },
}
# The length of the longest uint256; values above 2^256 - 1 are refused when they are read.
_UINT: Final = r"^(0|[1-9][0-9]{0,77})$"

Address = Annotated[str, Field(pattern=EVM_PATTERN)]
Uint = Annotated[str, Field(pattern=_UINT)]


class X402(BaseModel):
    """A part of an x402 object: no coercion, no unknown properties."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, defer_build=True
    )


class Extra(X402):
    """The domain of the token's signatures, which the signer needs (EIP-712)."""

    name: Annotated[str, Field(max_length=256)]
    version: Annotated[str, Field(max_length=64)]
    asset_transfer_method: Literal["eip3009"] = EIP3009


class PaymentRequirements(X402):
    """A way to pay. ``amount`` is in atomic units of ``asset``."""

    scheme: Annotated[str, Field(max_length=64)]
    network: Annotated[str, Field(max_length=64)]
    amount: Uint
    asset: Address
    pay_to: Address
    max_timeout_seconds: Annotated[int, Field(ge=0, lt=2**53), WHOLE]
    extra: Extra


class PaymentAuthorization(X402):
    """The terms that the owner of the money signs (EIP-3009)."""

    source: Annotated[Address, Field(alias="from")]
    to: Address
    value: Uint
    valid_after: Uint
    valid_before: Uint
    nonce: Annotated[str, Field(pattern="^0x[0-9a-fA-F]{64}$")]


class ExactPayload(X402):
    """An authorization and its signature."""

    signature: Annotated[
        str, Field(pattern="^0x([0-9a-fA-F]{2})+$", max_length=2 * _LONGEST_SIGNATURE)
    ]
    authorization: PaymentAuthorization


class Extensible(X402):
    """A part to which others may add properties."""

    model_config = ConfigDict(extra="allow")


class PaymentIdentifierInfo(Extensible):
    """The payer's name for a payment, under which the payer pays once."""

    required: bool
    id: Annotated[
        str | None, Field(pattern=_PAYMENT_ID, min_length=_SHORTEST_ID, max_length=_LONGEST_ID)
    ] = None


class PaymentIdentifier(Extensible):
    """The extension "payment-identifier" of a payment."""

    info: PaymentIdentifierInfo


class Extensions(Extensible):
    """The extensions of a payment, of which others are left unread."""

    payment_identifier: Annotated[PaymentIdentifier | None, Field(alias=PAYMENT_IDENTIFIER)] = None


class PaymentPayload(X402):
    """A payment. ``accepted`` is the entry of ``accepts`` that it is for."""

    x402_version: Annotated[Literal[2], WHOLE]
    accepted: PaymentRequirements
    payload: ExactPayload
    resource: dict[str, Any] | None = None
    extensions: Extensions | None = None

    @property
    def payment_id(self) -> str | None:
        """The payer's name for the payment, if it has one."""
        named = self.extensions and self.extensions.payment_identifier
        return named.info.id if named else None

    @property
    def signed(self) -> SignedAuthorization:
        """The authorization. Raises InvalidInput for a number beyond 256 bits."""
        given = self.payload.authorization
        authorization = Authorization(
            given.source,
            given.to,
            _uint(given.value, "value"),
            _uint(given.valid_after, "validAfter"),
            _uint(given.valid_before, "validBefore"),
            bytes.fromhex(given.nonce[2:]),
        )
        return SignedAuthorization(authorization, bytes.fromhex(self.payload.signature[2:]))


def _uint(text: str, name: str) -> int:
    number = int(text)
    if number > LARGEST_WORD:
        field = f"{FIELD}.payload.authorization.{name}"
        raise InvalidInput(f"{field} is beyond 256 bits.", field=field, received=text)
    return number


def describe_payment(described: Json) -> None:
    """Add the JSON Schema of a payment, its parts in their places."""
    schema = PaymentPayload.model_json_schema(by_alias=True)
    parts = schema.pop("$defs")

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return whole(parts[value["$ref"].rpartition("/")[2]])
        return {key: whole(each) for key, each in value.items() if key != "title"}

    described.update(whole(schema))


def read_payment(given: Json | str) -> PaymentPayload:
    """Read a payment from an object, or from the header PAYMENT-SIGNATURE. Raises InvalidInput."""
    payment = _decoded(given) if isinstance(given, str) else given
    try:
        return PaymentPayload.model_validate(payment)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join([FIELD, *map(str, problem["loc"])])
        raise InvalidInput(
            f"{field} is not as x402 version 2 has it: {_lower(problem['msg'])}. Send the object"
            " that signing an entry of accepts gives.",
            field=field[:128],
            received=None if problem["type"] == "missing" else problem["input"],
        ) from None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _decoded(text: str) -> Json:
    try:
        found = strict_json.loads(base64.b64decode(text, validate=True), max_depth=_MOST_DEPTH)
    except (InvalidJson, binascii.Error, ValueError):
        found = None
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{FIELD} is not Base64 of a JSON object: over HTTP it is the header"
            " PAYMENT-SIGNATURE, of x402 version 2.",
            field=FIELD,
        )
    return found


def requirements(due: Due, seconds: int) -> PaymentRequirements:
    """The requirements to sign for a payment that is due, valid for ``seconds``."""
    domain = due.domain
    extra = {"name": domain.name, "version": domain.version, "assetTransferMethod": EIP3009}
    return PaymentRequirements.model_validate(
        {
            "scheme": EXACT,
            "network": network_id(domain.chain_id),
            "amount": str(due.units),
            "asset": domain.contract,
            "payTo": due.to,
            "maxTimeoutSeconds": seconds,
            "extra": extra,
        }
    )


def required(url: str, description: str, offer: PaymentRequirements, error: str | None) -> Json:
    """PaymentRequired of x402. ``error`` says why the last payment was refused."""
    return {
        "x402Version": VERSION,
        "error": error or "PAYMENT-SIGNATURE header is required",
        "resource": {"url": url, "description": description, "mimeType": "application/json"},
        "accepts": [offer.model_dump(by_alias=True)],
        "extensions": {PAYMENT_IDENTIFIER: _IDENTIFIER_OFFER},
    }


def encoded(value: Json | Struct) -> str:
    """An object for a header: Base64 of its JSON."""
    return base64.b64encode(strict_json.dumps(value)).decode()


def network_id(chain_id: int) -> str:
    """The x402 name of a chain (CAIP-2)."""
    return f"eip155:{chain_id}"
