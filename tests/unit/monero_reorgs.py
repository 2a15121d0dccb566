"""A Monero node and wallet whose chain is reorganised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rpcsvc.health import Severity, texts_of
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    MoneroSubmission,
    MoneroSubmissionResult,
    NodeInfo,
    NodeTransaction,
    PoolTransaction,
)
from rpcsvc.settlement.onchain.monero.presence import MoneroReorgRecovery
from rpcsvc.settlement.onchain.monero.records import (
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Output, SubaddressIndex
from tests.chain_options import monero_options

XMR = 10**12
OPTIONS = monero_options(nettype="fakechain", tracked_blocks=8, failed_after=5)


@dataclass
class ReorgNode:
    """``known``: the height of each transaction, None in the pool.

    ``misses``: transactions that are mined while it looks for them, which it misses once.
    """

    top: int = 100
    known: dict[str, int | None] = field(default_factory=dict)
    says: MoneroSubmission = MoneroSubmission.ACCEPTED
    dropped: set[str] = field(default_factory=set)
    submitted: list[str] = field(default_factory=list)
    flushed: list[str] = field(default_factory=list)
    unrelayed: set[str] = field(default_factory=set)
    relayed: list[str] = field(default_factory=list)
    is_restricted: bool = False
    pools: int = 0
    misses: set[str] = field(default_factory=set)

    async def info(self) -> NodeInfo:
        height, top = self.top + 1, f"h{self.top}"
        return NodeInfo(height, top, "fakechain", True, False, True, height, 0, "0.18", 600_000)

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        missed = self.misses.intersection(txids)
        self.misses -= missed
        return {txid: item for txid, item in self._known(txids).items() if txid not in missed}

    def _known(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        return {
            txid: NodeTransaction(txid, self.known[txid], False)
            for txid in txids
            if txid in self.known
        }

    async def submit(self, raw: str) -> MoneroSubmissionResult:
        txid = bytes.fromhex(raw).decode()
        self.submitted.append(txid)
        if self.says is MoneroSubmission.ACCEPTED:
            self.known[txid] = None
        return MoneroSubmissionResult(self.says, (), "")

    async def pool(self) -> list[PoolTransaction]:
        self.pools += 1
        return [
            PoolTransaction(txid, 1, 1, txid not in self.unrelayed, False, txid in self.dropped)
            for txid, height in self.known.items()
            if height is None
        ]

    async def relay(self, txids: Sequence[str]) -> None:
        if self.is_restricted:
            raise NodeError("monerod", "relay_tx", -32601, "Method not found")
        self.relayed += txids
        self.unrelayed.difference_update(txids)

    async def flush_pool(self, txids: Sequence[str]) -> None:
        if self.is_restricted:
            raise NodeError("monerod", "flush_txpool", -32601, "Method not found")
        for txid in txids:
            self.flushed.append(txid)
            self.dropped.discard(txid)


@dataclass
class ReorgWallet:
    """``images``: key images of its outputs; ``frozen``: those that are frozen."""

    images: tuple[str, ...] = ()
    frozen: set[str] = field(default_factory=set)

    async def outputs(self) -> list[Output]:
        index = SubaddressIndex(0, 0)
        return [
            Output("tx", 1, index, XMR, item, 9, False, True, item in self.frozen)
            for item in self.images
        ]

    async def thaw(self, image: str) -> None:
        self.frozen.remove(image)


@dataclass
class ReorgRig:
    node: ReorgNode
    wallet: ReorgWallet
    ledger: MoneroLedger
    recovery: MoneroReorgRecovery

    @property
    def faults(self) -> str:
        return "; ".join(texts_of(self.recovery.conditions(), Severity.FAULT))

    @property
    def notes(self) -> str:
        return "; ".join(texts_of(self.recovery.conditions(), Severity.NOTE))

    async def poll(self, blocks: int = 0) -> None:
        self.node.top += blocks
        await self.recovery.poll(await self.node.info())

    async def put(
        self,
        name: str,
        state: MoneroPaymentState,
        height: int | None,
        purpose: MoneroPurpose = MoneroPurpose.TRANSFER,
    ) -> MoneroPayment:
        """Record a payment in this state."""
        made = MoneroPayment(
            name, purpose, f"4 {name}", XMR, 5, f"tx {name}", f"tx {name}".encode().hex(), "meta",
            "key", (f"image of {name}",), 1000,
        )  # fmt: skip
        await self.ledger.add_payment(made)
        relayed_at = 1000 if state is MoneroPaymentState.RELAYING else None
        done = replace(made, state=state, height=height, relayed_at=relayed_at)
        await self.ledger.put_payment(done)
        if height is not None or state is MoneroPaymentState.PUBLISHED:
            self.node.known[made.txid] = height
        return done

    async def height(self, name: str) -> int | None:
        return (await self.known(name)).height

    async def known(self, name: str) -> MoneroPayment:
        found = await self.ledger.payment(name)
        assert found is not None
        return found
