"""x402 at an upstream: its offer, held against our order, and the payment that is passed on.

Source: the x402 specification, version 2, "PaymentRequired", "PaymentPayload" and the scheme
"exact" on EVM.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final

import orjson
from pydantic import Field, ValidationError

from rpcsvc.domain.addresses import same_address
from rpcsvc.domain.gasless import OFFER_SECONDS, SignedAuthorization
from rpcsvc.domain.order import Terms
from rpcsvc.domain.usdc import Domain
from rpcsvc.orders.ports.gasless import Carried
from rpcsvc.orders.ports.wallets import NetworkNames, Outcome
from rpcsvc.settlement.upstream.answers import ParsedAnswer, Part, Text, Units
from rpcsvc.settlement.upstream.failures import UpstreamBroken
from rpcsvc.settlement.upstream.transport import UpstreamAnswer

_EXACT: Final = "exact"
_EIP3009: Final = "eip3009"
_VERSION: Final = 2
_MOST_WAYS: Final = 32
_USUAL: Final = ("USD Coin", "2")


class _Extra(Part):
    name: Text
    version: Text
    asset_transfer_method: str = _EIP3009


class _Way(Part):
    """An entry of ``accepts``."""

    scheme: Text
    network: Text
    amount: Units
    asset: Text
    pay_to: Text
    extra: _Extra


class _Required(Part):
    x402_version: int
    accepts: Annotated[list[Any], Field(max_length=_MOST_WAYS)]


class _Settlement(Part):
    transaction: Text


class _Paid(Part):
    payment_response: _Settlement | None


class FundingAnswer(ParsedAnswer):
    """A payment that was taken; without ``payment_response`` its outcome is not known yet."""

    data: _Paid

    @property
    def carried(self) -> Carried:
        """The outcome of the payment."""
        response = self.data.payment_response
        if response is None:
            return Carried(Outcome.PENDING)
        return Carried(Outcome.SETTLED, response.transaction)


def read_funding(answer: UpstreamAnswer) -> FundingAnswer:
    """An answer to a payment. Raises UpstreamBroken."""
    return FundingAnswer.read(answer)


def offered_domain(header: str, terms: Terms, names: NetworkNames, due: int) -> Domain:
    """The EIP-712 domain to sign for, by the header PAYMENT-REQUIRED. Raises UpstreamBroken.

    Only an entry is taken that pays what is due to this order's own address, in its asset and on
    its network: whatever else the upstream asks for is passed on to nobody.
    """
    network = f"eip155:{names.chain_id}"
    for way in _ways(header):
        if (
            (way.scheme, way.extra.asset_transfer_method) == (_EXACT, _EIP3009)
            and (way.network, way.amount) == (network, due)
            and same_address(way.asset, names.token or "")
            and same_address(way.pay_to, terms.deposit_address)
        ):
            extra = way.extra
            return Domain(extra.name, extra.version, names.chain_id, names.token or "")
    raise UpstreamBroken(
        "The upstream's answer is not as agreed: accepts has nothing that pays what is due to the"
        " order's own address.",
        field="accepts",
    )


def _ways(header: str) -> list[_Way]:
    try:
        required = _Required.model_validate(orjson.loads(base64.b64decode(header, validate=True)))
    except (ValidationError, binascii.Error, orjson.JSONDecodeError) as error:
        raise UpstreamBroken(
            "The upstream's answer is not as agreed: PAYMENT-REQUIRED is not that of x402.",
            field="PAYMENT-REQUIRED",
        ) from error
    if required.x402_version != _VERSION:
        return []
    found = []
    for each in required.accepts:
        try:
            found.append(_Way.model_validate(each))
        except ValidationError:
            continue  # another scheme, with fields of its own
    return found


def payment_header(
    terms: Terms, signed: SignedAuthorization, names: NetworkNames, domain: Domain | None
) -> str:
    """The header PAYMENT-SIGNATURE of an authorization for the order of these terms.

    Without ``domain``, after a restart, the usual name is sent: what was passed on before is found
    by its nonce, and name and version are for the signer alone.
    """
    given = signed.authorization
    name, version = (domain.name, domain.version) if domain else _USUAL
    accepted = {
        "scheme": _EXACT,
        "network": f"eip155:{names.chain_id}",
        "amount": str(given.units),
        "asset": names.token,
        "payTo": terms.deposit_address,
        "maxTimeoutSeconds": OFFER_SECONDS,
        "extra": {
            "name": name,
            "version": version,
            "assetTransferMethod": _EIP3009,
        },
    }
    authorization = {
        "from": given.source,
        "to": given.to,
        "value": str(given.units),
        "validAfter": str(given.valid_after),
        "validBefore": str(given.valid_before),
        "nonce": f"0x{given.nonce.hex()}",
    }
    payload = {"signature": f"0x{signed.signature.hex()}", "authorization": authorization}
    payment = {"x402Version": _VERSION, "accepted": accepted, "payload": payload}
    return base64.b64encode(orjson.dumps(payment)).decode()
