"""Which transaction of the wallet has spent an input of a payment: read off its body.

That a node shows a key image as spent and does not show the payment proves nothing: the two answers
may come from two nodes behind one address. Another transaction in a block with that key image does
prove that the payment can't be mined in this chain. Whoever made it has the wallet's keys, so that
the wallet lists it as its own. What does not live here: what follows from it (presence.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rpcsvc.clock import Clock
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import Cursor, Payment
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.wallet_types import TransferKind

# Nothing is signed with what the wallet has seen spent: it was spent later, give or take a
# reorganisation and what clocks are off. Blocks come every two minutes.
_LEAST_BLOCK_MS: Final = 60_000
_MARGIN: Final = 720


@dataclass(frozen=True, slots=True)
class Spender:
    """A mined transaction that has spent an input of a payment, and its block."""

    txid: str
    block: Cursor


class SpentInputs:
    """Finds what has spent an input of a payment, and remembers it, by the payment's id.

    What was not found is looked for again with the next block. May raise RpcFailure and
    ChainUnusable.
    """

    def __init__(self, connection: MoneroConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._found: dict[str, Spender] = {}
        self._in_vain: dict[str, str] = {}

    async def find(self, payment: Payment, since: Cursor, top: NodeInfo) -> Spender | None:
        """What has spent it in the block ``since``, or before it; None when nothing shows it."""
        name = payment.payment_id
        known = self._found.pop(name, None)
        if known is None and self._in_vain.get(name) == top.top_hash:
            return None
        found = await self._search(payment, since, [known.txid] if known else None)
        if found is None:
            self._in_vain[name] = top.top_hash
        else:
            self._found[name] = found
        return found

    def forget(self, payment_id: str) -> None:
        """Nobody will ask for it again, or it has to be looked for anew."""
        self._found.pop(payment_id, None)
        self._in_vain.pop(payment_id, None)

    async def _search(
        self, payment: Payment, since: Cursor, known: list[str] | None
    ) -> Spender | None:
        txids = known or await self._sent(payment, since)
        for txid, made in (await self._connection.node.bodies(txids)).items():
            if made.height is None or txid == payment.txid:
                continue
            if not set(payment.key_images).isdisjoint(made.key_images):
                header = await self._connection.node.header_at(made.height)
                return Spender(txid, Cursor(made.height, header.hash)) if header else None
        return None

    async def _sent(self, payment: Payment, since: Cursor) -> list[str]:
        """The wallet's own transactions in blocks since the payment was signed."""
        await self._connection.require_wallet()
        await self._connection.wallet.refresh()
        blocks = max(0, self._clock.now_ms() - payment.prepared_at) // _LEAST_BLOCK_MS
        first = max(0, since.height - blocks - _MARGIN)
        listed = await self._connection.wallet.transfers(first, (TransferKind.OUTGOING,))
        return sorted({item.txid for item in listed})
