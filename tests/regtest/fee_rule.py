"""Geth's rule for replacement transactions, put before Anvil, whose own rule is weaker.

Runs in the proxy of the daemon (line.py). A transaction with the nonce of a pending one of the same
sender is refused unless both fees are higher by at least ``percent``, rounded down; the same bytes
are refused as known. The node is asked each time which one is pending.
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
    """A signed transaction (EIP-1559) and its fees in wei per gas."""

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
        """Whether both fees are higher than the old ones by at least ``percent``."""
        pairs = ((self.max_fee, old.max_fee), (self.tip, old.tip))
        return all(new > was and new >= was * (100 + percent) // 100 for new, was in pairs)


class FeeRule:
    """The rule of one pool. ``refused``: the refused transactions, in order."""

    def __init__(self, node: EvmClient, percent: int = USUAL_PERCENT) -> None:
        self.percent = percent
        self.refused: list[Offer] = []
        self._node = node
        self._passed: dict[tuple[str, int], list[Offer]] = {}

    async def __call__(self, body: bytes) -> bytes | None:
        """The refusal in place of the node's answer; None: pass the call on."""
        request = orjson.loads(body)
        if isinstance(request, list) or request.get("method") != _SEND:
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
        """The pending transaction of the same sender and nonce; None: there is none."""
        for passed in reversed(self._passed.get((offer.sender, offer.nonce), [])):
            known = await self._node.transaction(passed.txid)
            if known is not None and known.block_number is None:
                return passed
        return None
