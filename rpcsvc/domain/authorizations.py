"""Payments of a USDC deposit by a signed authorization (EIP-3009): the signer, and the checks.

An authorization moves its owner's USDC for any sender, once, within its window. Nothing here knows
what is on chain: the engine looks up balance, used nonces and signatures of contract wallets.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.addresses import evm_checksum, same_address
from rpcsvc.domain.usdc import (
    Authorization,
    Domain,
    Signature,
    keccak256,
    read_bytes,
    transfer_digest,
)

SIGNATURE_BYTES: Final = 65
COMPACT_BYTES: Final = 64
# There has to be time to get it into a block; and while it can still be used, nothing else may pay
# the order, so it must not be usable for long.
LEAST_SECONDS: Final = 30
MOST_SECONDS: Final = 3_600
# How long an offer may be accepted.
OFFER_SECONDS: Final = 600
# What ends the signature of a contract wallet that may not be deployed yet (ERC-6492).
_WRAPPED: Final = bytes.fromhex("6492" * 16)
_WRAPPED_SIGNATURE: Final = 2
_CURVE_ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


class Reason(StrEnum):
    """Why a payment is refused, in the words of x402 (its reference facilitator)."""

    SCHEME = "unsupported_scheme"
    NETWORK = "network_mismatch"
    REQUIREMENTS = "invalid_payment_requirements"
    SIGNATURE = "invalid_exact_evm_payload_signature"
    UNDEPLOYED = "invalid_exact_evm_payload_undeployed_smart_wallet"
    RECIPIENT = "invalid_exact_evm_payload_recipient_mismatch"
    VALUE = "invalid_exact_evm_payload_authorization_value_mismatch"
    VALID_AFTER = "invalid_exact_evm_payload_authorization_valid_after"
    VALID_BEFORE = "invalid_exact_evm_payload_authorization_valid_before"
    NONCE_USED = "invalid_exact_evm_nonce_already_used"
    BALANCE = "invalid_exact_evm_insufficient_balance"
    SIMULATION = "invalid_exact_evm_transaction_simulation_failed"
    FAILED = "transaction_failed"


class Refusal(NamedTuple):
    """Why a payment will not do: for programs, and for people."""

    reason: Reason
    message: str


class SignedAuthorization(Struct, frozen=True):
    """An authorization and its owner's signature.

    The signature of a key is r, s, v, or compact (EIP-2098). The signature of a contract wallet has
    the wallet's own form (ERC-1271), and may be wrapped with how to deploy it (ERC-6492).
    """

    authorization: Authorization
    signature: bytes

    @property
    def is_wrapped(self) -> bool:
        """Whether the signature is in the form of ERC-6492."""
        return self.signature.endswith(_WRAPPED)

    @property
    def bare(self) -> bytes:
        """The signature as the owner's contract takes it; nothing, if its wrapper is broken."""
        if not self.is_wrapped:
            return self.signature
        try:
            return read_bytes(self.signature[: -len(_WRAPPED)], _WRAPPED_SIGNATURE)
        except ValueError:
            return b""

    @property
    def vrs(self) -> Signature | None:
        """Return the signature in the form that contracts take from a key, or None if it has none.

        Wallets write v as 27 and 28, as 0 and 1, or into the top bit of s (EIP-2098).
        """
        signature = self.bare
        r, s = (int.from_bytes(signature[at : at + 32], "big") for at in (0, 32))
        if len(signature) == COMPACT_BYTES:
            return Signature(27 + (s >> 255), r, s & (2**255 - 1))
        v = {0: 27, 1: 28, 27: 27, 28: 28}.get(signature[-1] if signature else -1)
        return None if v is None or len(signature) != SIGNATURE_BYTES else Signature(v, r, s)

    def is_same_payment(self, other: SignedAuthorization) -> bool:
        """Return whether both move the same money by the same signature, in any of its forms."""
        return self.authorization.words() == other.authorization.words() and (
            (self.vrs or self.bare) == (other.vrs or other.bare)
        )


class AuthorizationRefused(Exception):
    """An authorization that can't be used; nothing was sent."""

    def __init__(self, refused: Refusal) -> None:
        super().__init__(refused.message)
        self.refusal = refused


class Due(NamedTuple):
    """The payment that is due: USDC units, to an address, with a token."""

    to: str
    units: int
    domain: Domain


def refusal(signed: SignedAuthorization, due: Due, now: int) -> Refusal | None:
    """Return why an authorization does not pay what is due at ``now`` (Unix seconds), or None.

    The signer is not checked here: for a contract wallet only the chain knows it.
    """
    given = signed.authorization
    if not same_address(given.to, due.to):
        return Refusal(Reason.RECIPIENT, f"to is {given.to}: it has to be {due.to}.")
    if given.units != due.units:
        return Refusal(Reason.VALUE, f"value is {given.units}: it has to be {due.units}.")
    if given.valid_after >= now:
        return Refusal(Reason.VALID_AFTER, "validAfter is not over yet: send 0.")
    left = given.valid_before - now
    if not LEAST_SECONDS <= left <= MOST_SECONDS:
        return Refusal(
            Reason.VALID_BEFORE,
            f"validBefore is {left} s from now: it has to be {LEAST_SECONDS} to {MOST_SECONDS} s.",
        )
    return None


NOT_SIGNED: Final = Refusal(
    Reason.SIGNATURE,
    "The signature is not that of from over this authorization and the token's domain (name,"
    " version, chain, contract): 65 bytes of a key, or what a contract wallet takes (ERC-1271).",
)


def is_signed_by_key(domain: Domain, signed: SignedAuthorization) -> bool:
    """Return whether the authorization's owner is a key, and has signed it."""
    return signer_of(domain, signed) == evm_checksum(signed.authorization.source)


def signer_of(domain: Domain, signed: SignedAuthorization) -> str | None:
    """Whose signature it is, as an EIP-55 address; None for what the token would refuse.

    The token takes only the smaller of the two values of s (FiatToken, ECRecover).
    """
    vrs = signed.vrs
    if vrs is None or vrs.s > _CURVE_ORDER // 2:
        return None
    from coincurve import PublicKey  # noqa: PLC0415 - takes 80 ms, which most commands need not pay

    digest = transfer_digest(domain, signed.authorization)
    try:
        key = PublicKey.from_signature_and_message(
            vrs.r.to_bytes(32, "big") + vrs.s.to_bytes(32, "big") + bytes([vrs.v - 27]),
            digest,
            hasher=None,
        )
    except ValueError:
        return None
    return evm_checksum("0x" + keccak256(key.format(compressed=False)[1:])[-20:].hex())
