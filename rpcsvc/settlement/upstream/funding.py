"""x402 at an upstream: its offer, held against our order, and the payment that is passed on.

The client library judges the offer and writes the payment, as it does for payers.
"""

from __future__ import annotations

import base64
from typing import Final

import orjson

from rpcsvc.client import x402
from rpcsvc.client.errors import Unverified
from rpcsvc.domain.authorizations import OFFER_SECONDS, SignedAuthorization
from rpcsvc.domain.order import Terms
from rpcsvc.domain.usdc import Domain
from rpcsvc.orders.ports.authorizations import Carried
from rpcsvc.orders.ports.wallets import NetworkNames, Outcome
from rpcsvc.settlement.upstream.answers import ParsedAnswer, Part, Text
from rpcsvc.settlement.upstream.failures import UpstreamBroken
from rpcsvc.settlement.upstream.transport import UpstreamAnswer

_USUAL: Final = ("USD Coin", "2")


class _Extra(Part):
    name: Text
    version: Text


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

    An offer is taken only if it pays what is due to this order's own address, in its asset and on
    its network: an offer of anything else is passed on to nobody.
    """
    token = names.token or ""
    bill = x402.Bill(names.chain_id, token, terms.deposit_address, due)
    try:
        offer = x402.offer_of(orjson.loads(base64.b64decode(header, validate=True)), bill)
        extra = _Extra.model_validate(offer["extra"])
    except (ValueError, Unverified) as error:
        raise UpstreamBroken(
            "The upstream's answer is not as agreed: PAYMENT-REQUIRED has no offer that pays what"
            " is due to the order's own address.",
            field="PAYMENT-REQUIRED",
        ) from error
    return Domain(extra.name, extra.version, names.chain_id, token)


def payment_header(
    terms: Terms, signed: SignedAuthorization, names: NetworkNames, domain: Domain | None
) -> str:
    """The header PAYMENT-SIGNATURE of an authorization for the order of these terms.

    Without ``domain``, after a restart, the usual name is sent: what was passed on before is found
    by its nonce, and name and version are for the signer alone.
    """
    given = signed.authorization
    name, version = (domain.name, domain.version) if domain else _USUAL
    offer = {
        "scheme": "exact",
        "network": f"eip155:{names.chain_id}",
        "amount": str(given.units),
        "asset": names.token,
        "payTo": terms.deposit_address,
        "maxTimeoutSeconds": OFFER_SECONDS,
        "extra": {"name": name, "version": version, "assetTransferMethod": "eip3009"},
    }
    message = {
        "from": given.source,
        "to": given.to,
        "value": given.units,
        "validAfter": given.valid_after,
        "validBefore": given.valid_before,
        "nonce": f"0x{given.nonce.hex()}",
    }
    payment = x402.payment(offer, {"message": message}, signed.signature)
    return base64.b64encode(orjson.dumps(payment)).decode()
