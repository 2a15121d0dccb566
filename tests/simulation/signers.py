"""Payers who sign in place of sending: USDC by x402, scheme exact (EIP-3009)."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from eth_keys.datatypes import PrivateKey

from rpcsvc.domain import usdc
from tests.simulation.evm import EvmChain

_TRIES: Final = 5
_PAYMENT: Final = "payment_required"

# Calls swap.fund with these params until one answers; empty: a call that may have acted had none.
Fund = Callable[..., Awaitable[dict[str, Any]]]


class Signed(NamedTuple):
    """A payment that was sent to the service. ``used``: the token's key for its nonce."""

    order_id: str
    payment: dict[str, Any]
    chain: EvmChain
    used: tuple[str, str]

    @property
    def is_used(self) -> bool:
        """Whether the token has carried it out."""
        return bool(self.chain.state.get(self.used))


def key_of(*parts: object) -> PrivateKey:
    """A key that follows from the parts."""
    return PrivateKey(hashlib.sha256(repr(parts).encode()).digest())


class Signers:
    """Sign what the service asks for, send it perhaps twice, and keep what they sent.

    ``lasting``: seconds that a signature is valid, at least; otherwise as long as is offered.
    """

    def __init__(self, fund: Fund, now: Callable[[], int], lasting: int) -> None:
        self.sent: list[Signed] = []
        self._fund = fund
        self._now = now
        self._lasting = lasting

    async def pay(
        self, order_id: str, chain: EvmChain, key: PrivateKey, chance: random.Random
    ) -> None:
        """Pay an order on its chain, if anything is due on it."""
        answer = await self._fund(chance, orderId=order_id)
        error = answer.get("error", {})
        if error.get("code") != _PAYMENT:
            return
        (offer,) = error["details"]["paymentRequired"]["accepts"]
        await asyncio.sleep(chance.choice([0, 2, 20]))
        signed = self._sign(order_id, chain, offer, key, chance)
        self.sent.append(signed)
        copies = chance.choice([1, 1, 2])
        await asyncio.gather(*(self._send(signed, chance) for _ in range(copies)))

    def _sign(
        self,
        order_id: str,
        chain: EvmChain,
        offer: dict[str, Any],
        key: PrivateKey,
        chance: random.Random,
    ) -> Signed:
        payer, nonce = key.public_key.to_checksum_address(), chance.randbytes(32)
        seconds = max(int(offer["maxTimeoutSeconds"]), self._lasting)
        given = usdc.Authorization(
            payer, offer["payTo"], int(offer["amount"]), 0, self._now() + seconds, nonce
        )
        signature = key.sign_msg_hash(usdc.transfer_digest(chain.domain, given))
        content = signature.r.to_bytes(32, "big") + signature.s.to_bytes(32, "big")
        message = {
            "from": payer, "to": given.to, "value": str(given.units), "validAfter": "0",
            "validBefore": str(given.valid_before), "nonce": f"0x{nonce.hex()}",
        }  # fmt: skip
        payload = {
            "signature": f"0x{content.hex()}{27 + signature.v:02x}",
            "authorization": message,
        }
        payment = {"x402Version": 2, "accepted": offer, "payload": payload}
        return Signed(order_id, payment, chain, ("used", payer.lower() + nonce.hex()))

    async def _send(self, signed: Signed, chance: random.Random) -> None:
        """Send it until there is an answer, or give up."""
        for _ in range(_TRIES):
            if await self._fund(chance, orderId=signed.order_id, payment=signed.payment):
                return

    async def differences(self, *, has_restored: bool) -> list[str]:
        """Payments whose last answer is not what the token has.

        ``has_restored``: the service may have lost what it knew of one, and says nothing is due.
        """
        found, chance = list[str](), random.Random(0)
        for signed in self.sent:
            answer: dict[str, Any] = {}
            while not answer:
                answer = await self._fund(chance, orderId=signed.order_id, payment=signed.payment)
            response = answer.get("data", {}).get("paymentResponse") if answer["ok"] else None
            is_paid = bool(response and response["success"])
            if has_restored and answer.get("error", {}).get("code") == "order_not_fundable":
                continue
            if is_paid != signed.is_used:
                found.append(
                    f"a signed payment of {signed.order_id} is {'' if signed.is_used else 'not '}"
                    f"used, and its answer is {answer.get('error') or response}"
                )
        return found
