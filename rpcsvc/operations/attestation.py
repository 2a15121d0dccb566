"""Which terms of an order are attested (docs/signing.md)."""

from __future__ import annotations

from collections.abc import Callable

from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.order import Terms
from rpcsvc.operations.service import Attest
from rpcsvc.verify import BY_ADDRESS, BY_SESSION, OrderTerms, session_sha256


def attester(
    sign: Callable[[OrderTerms], str], chains: ChainRegistry, *, network: str, issuer: str
) -> Attest:
    """What vouches for orders: ``sign`` over their terms, in the name of ``issuer``."""

    def attest(terms: Terms) -> str:
        return sign(attested_terms(terms, chains, network=network, issuer=issuer))

    return attest


def attested_terms(terms: Terms, chains: ChainRegistry, *, network: str, issuer: str) -> OrderTerms:
    """The terms as the user can check them against what was ordered."""
    lock_end = terms.price_locked_until
    return OrderTerms(
        order_id=terms.order_id,
        direction=terms.direction.value,
        chain_id=terms.chain_id,
        token=chains.resolve(terms.chain).usdc_contract,
        deposit_address=terms.deposit_address,
        deposit_amount=terms.deposit_amount,
        to_address=terms.to_address,
        expected_output=terms.expected_output,
        min_received=terms.min_received,
        expires_at=iso8601(terms.expires_at),
        issued_at=iso8601(terms.created_at),
        network=network,
        issuer=issuer,
        refund_control=BY_SESSION if terms.refund_address is None else BY_ADDRESS,
        refund_address=terms.refund_address,
        session_sha256=session_sha256(terms.session_id),
        price_locked_until=None if lock_end is None else iso8601(lock_end),
    )
