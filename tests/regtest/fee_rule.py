"""What Geth's pool asks of a replacement, for a node that asks next to nothing: Anvil.

Stands in for the daemon at its line (line.py). A transaction for a nonce that a waiting one of the
same sender has is refused unless both fees are higher, by ``percent`` at least, rounded down; the
same bytes are known already. What waits is asked of the node each time: it is mined, dropped and
replaced without notice.
Source: core/txpool/legacypool (list.Add) and core/txpool/errors.go of go-ethereum; EIP-1559.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson
from eth_account import Account
from eth_account.typed_transactions.typed_transaction import TypedTransaction
from hexbytes import HexBytes

from rpcsvc.domain.usdc import keccak256
from rpcsvc.settlement.onchain.evm.node import EvmClient

UNDERPRICED: Final = "replacement transaction underpriced"
KNOWN: Final = "already known"
USUAL_PERCENT: Final = 10
_SEND: Final = "eth_sendRawTransaction"
_EIP_1559: Final = 2
_CODE: Final = -32000
_FIELDS: Final = ("nonce", "maxFeePerGas", "maxPriorityFeePerGas")


@dataclass(frozen=True, slots=True)
class Offer:
    """A signed transaction (EIP-1559), and what it offers: wei per gas."""

    txid: str
    sender: str
    nonce: int
    max_fee: int
    tip: int

    @classmethod
    def of(cls, raw: bytes) -> Offer:
        """Read it from its bytes. Raises ValueError for another type of transaction."""
        if raw[:1] != bytes([_EIP_1559]):
            raise ValueError("not a transaction of type 2")
        fields = TypedTransaction.from_bytes(HexBytes(raw)).as_dict()
        nonce, max_fee, tip = (int(fields[name]) for name in _FIELDS)
        sender = str(Account.recover_transaction(raw))
        return cls("0x" + keccak256(raw).hex(), sender, nonce, max_fee, tip)

    def outbids(self, old: Offer, percent: int) -> bool:
        """Whether both fees are higher than the old ones, and by so many percent at least."""
        pairs = ((self.max_fee, old.max_fee), (self.tip, old.tip))
        return all(new > was and new >= was * (100 + percent) // 100 for new, was in pairs)


class FeeRule:
    """The rule of one pool. ``refused`` are the offers that were turned away, in order."""

    def __init__(self, node: EvmClient, percent: int = USUAL_PERCENT) -> None:
        self.percent = percent
        self.refused: list[Offer] = []
        self._node = node
        self._passed: dict[tuple[str, int], list[Offer]] = {}

    async def __call__(self, body: bytes) -> bytes | None:
        """The answer in the node's place; None: the node shall answer."""
        request = orjson.loads(body)
        if request.get("method") != _SEND:
            return None
        offer = Offer.of(bytes.fromhex(request["params"][0].removeprefix("0x")))
        refusal = await self._judged(offer)
        if refusal is None:
            self._passed.setdefault((offer.sender, offer.nonce), []).append(offer)
            return None
        error = {"code": _CODE, "message": refusal}
        return orjson.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error})

    async def _judged(self, offer: Offer) -> str | None:
        held = await self._held(offer)
        if held is None:
            return None
        if held.txid == offer.txid:
            return KNOWN
        if offer.outbids(held, self.percent):
            return None
        self.refused.append(offer)
        return UNDERPRICED

    async def _held(self, offer: Offer) -> Offer | None:
        """What the pool holds for that sender and nonce; None: nothing."""
        for passed in reversed(self._passed.get((offer.sender, offer.nonce), [])):
            known = await self._node.transaction(passed.txid)
            if known is not None and known.block_number is None:
                return passed
        return None
