"""Whether the wallet can spend what a mined deposit says: no output is credited that can't be
spent.

Two outputs may have the same one-time key (the burning bug); only one of them can ever be spent.
The pool shows both in full. So a deposit is confirmed by what the wallet lists as mined, up to the
outputs with different key images that it has at the address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import structlog

from rpcsvc.domain.order import DepositState
from rpcsvc.settlement.onchain.daemon_rpc import TooLarge
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import DepositRecord, MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo, NodeTransaction
from rpcsvc.settlement.onchain.monero.wallet_types import OutputFilter, TransferKind, WalletTransfer

log = structlog.get_logger(__name__)

# Transaction id and subaddress index: what a deposit is on record under.
Key = tuple[str, int]
# The same with the height of its block.
_Mined = tuple[str, int, int | None]


class Proof(Enum):
    """What the wallet says of a mined deposit.

    VOID: it has not received all that the pool showed. LISTED: it has. COVERED: and it has outputs
    for it, besides those of what was confirmed before. MISSING: it does not list it, or has none.
    """

    VOID = "void"
    LISTED = "listed"
    COVERED = "covered"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class View:
    """What one pass knows. ``agreed``: wallet and node were at the same block throughout.

    ``fork`` is the newest block that was looked at before and is still there.
    """

    info: NodeInfo
    agreed: bool
    now_ms: int
    chain: Mapping[str, NodeTransaction]
    fork: int

    def height(self, item: DepositRecord) -> int | None:
        """The block of a deposit; None while it is in none."""
        found = self.chain.get(item.txid)
        return found.height if found else None


class DepositProofs:
    """Asks the wallet, no more often than it matters. May raise RpcFailure."""

    def __init__(self, connection: MoneroConnection, ledger: MoneroLedger) -> None:
        self._connection = connection
        self._ledger = ledger
        # Reported once; and missing ones are not asked about again before another top block.
        self._void: set[Key] = set()
        self._missing: dict[Key, str] = {}

    async def look(
        self,
        records: Sequence[DepositRecord],
        listed: Sequence[WalletTransfer],
        view: View,
        deep: Set[Key],
        resting: Set[Key],
    ) -> dict[Key, Proof]:
        """Of those that are about to be confirmed, or back, and of those that are listed anyway.

        Those that rest are not among ``records``, and what was reported of them stays reported.
        A deposit costs one question in its life, none when it is listed as it becomes deep enough.
        """
        mined = [item for item in records if view.height(item) is not None]
        self._forget_but({key_of(item) for item in mined} | resting)
        received = _received(listed)
        proofs: dict[Key, Proof] = {}
        for item in mined:
            asks = self._asks(item, view, deep)
            proof = await self._listing(item, received, view, asks=asks)
            if proof is not None:
                proofs[key_of(item)] = proof
        asking = [item for item in mined if proofs.get(key_of(item)) is Proof.LISTED]
        gone = {key_of(item) for item in records if view.height(item) is None}
        gone |= {key for key, proof in proofs.items() if proof is Proof.VOID}
        await self._cover([item for item in asking if key_of(item) in deep], gone, proofs)
        self._report(mined, proofs, view)
        return proofs

    def _asks(self, item: DepositRecord, view: View, deep: Set[Key]) -> bool:
        """Whether it matters now what the wallet has received."""
        if item.acknowledged is DepositState.REMOVED:
            return True
        return key_of(item) in deep and not (was_confirmed(item) and self._is_settled(item, view))

    def _is_settled(self, item: DepositRecord, view: View) -> bool:
        """Whether it was judged in the block that it is in: that block was looked at."""
        height = view.height(item)
        return height is not None and item.height == height <= view.fork

    def _was_void(self, item: DepositRecord, view: View) -> bool:
        """Whether it was removed in the block that it is in, which is so for good.

        A wallet that scans anew may list it then: it no longer knows that the other one was spent.
        """
        return item.acknowledged is DepositState.REMOVED and self._is_settled(item, view)

    async def _listing(
        self, item: DepositRecord, listed: Mapping[_Mined, int], view: View, *, asks: bool
    ) -> Proof | None:
        """VOID, LISTED, MISSING; None when nothing is known and need not be."""
        key = key_of(item)
        if self._was_void(item, view):
            return Proof.VOID
        at = (*key, view.height(item))
        received = listed.get(at)
        if received is None and asks and self._missing.get(key) != view.info.top_hash:
            received = _received(await self._connection.wallet.transfer(item.txid)).get(at)
        if received is None:
            return Proof.MISSING if asks else None
        return Proof.LISTED if received >= item.units else Proof.VOID

    async def _cover(
        self, asking: Sequence[DepositRecord], gone: Set[Key], proofs: dict[Key, Proof]
    ) -> None:
        """Turn LISTED into COVERED where the wallet's outputs suffice, else into MISSING.

        Independent of what the wallet lists: outputs that can't both be spent have one key image.
        """
        if not asking:
            return
        held = await self._held(sorted({item.minor for item in asking}))
        besides = gone | {key_of(item) for item in asking}
        for minor in {item.minor for item in asking}:
            held[minor] = held.get(minor, 0) - await self._credited(minor, besides)
        for item in sorted(asking, key=lambda each: not was_confirmed(each)):
            covered = held[item.minor] >= item.units
            if covered:
                held[item.minor] -= item.units
            proofs[key_of(item)] = Proof.COVERED if covered else Proof.MISSING

    async def _held(self, minors: Sequence[int]) -> dict[int, int]:
        """What the wallet ever had at these addresses, spent or not, each key image once.

        Nothing where that is more than can be listed: whoever sends so many outputs to one address
        keeps its own order waiting, and no other.
        """
        try:
            outputs = await self._connection.wallet.outputs(OutputFilter.ALL, minors)
        except TooLarge:
            if len(minors) == 1:
                return {}
            half = len(minors) // 2
            return await self._held(minors[:half]) | await self._held(minors[half:])
        held: dict[int, int] = {}
        for item in {each.key_image: each for each in outputs}.values():
            held[item.index.minor] = held.get(item.index.minor, 0) + item.amount
        return held

    async def _credited(self, minor: int, besides: Set[Key]) -> int:
        """What is confirmed at an address, besides these."""
        confirmed = filter(was_confirmed, await self._ledger.deposits_to(minor))
        return sum(item.units for item in confirmed if key_of(item) not in besides)

    def _report(
        self, mined: Sequence[DepositRecord], proofs: Mapping[Key, Proof], view: View
    ) -> None:
        """Log what is new, once, and remember what need not be asked again."""
        for item in mined:
            key, proof = key_of(item), proofs.get(key_of(item))
            about = {"txid": item.txid, "address": item.address, "units": item.units}
            if proof is Proof.VOID and key not in self._void and not self._was_void(item, view):
                log.error("monero_deposit_is_void", **about)
                self._void.add(key)
            if proof is Proof.MISSING and key not in self._missing:
                log.error("monero_deposit_not_in_wallet", **about)
            if proof is Proof.MISSING:
                self._missing[key] = view.info.top_hash
            elif proof is not None:
                self._missing.pop(key, None)

    def _forget_but(self, keys: Set[Key]) -> None:
        self._void &= keys
        self._missing = {key: top for key, top in self._missing.items() if key in keys}


def key_of(item: DepositRecord) -> Key:
    """What a deposit is on record under."""
    return item.txid, item.minor


def was_confirmed(item: DepositRecord) -> bool:
    """Whether the order layer has it as confirmed."""
    return item.acknowledged is DepositState.CONFIRMED


def _received(transfers: Sequence[WalletTransfer]) -> dict[_Mined, int]:
    """What the wallet lists as received by what is mined.

    The most, where it lists a deposit twice: a wallet that was told to scan a transaction again
    adds an entry of nothing.
    """
    received: dict[_Mined, int] = {}
    for item in transfers:
        if item.kind is TransferKind.INCOMING:
            key = (item.txid, item.index.minor, item.height)
            received[key] = max(item.amount, received.get(key, 0))
    return received
