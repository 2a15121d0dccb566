"""Startup reconciliation: what left the Monero wallet is compared with the records before signing.

A restored database does not know what was paid since. The wallet is asked once for what it sent
since the newest block on record; a transaction that is not on record pauses payouts
(unrecorded.py). A wallet that was restored or killed does not list a transaction before it is
mined: a spend in the node's pool of an output that the wallet believes unspent shows that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.health import Health
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.monero.ledger import NETWORK, MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient, Spent
from rpcsvc.settlement.onchain.monero.wallet import WalletClient, list_unspent
from rpcsvc.settlement.onchain.monero.wallet_types import TransferKind
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger, pause_for, reason_of

log = structlog.get_logger(__name__)

# A reorganisation may have brought what was sent after the copy into a block before it.
_MARGIN: Final = 20
_SENT: Final = (TransferKind.OUTGOING, TransferKind.PENDING)
_WALLET: Final = "the Monero wallet"
LOOK_TIMEOUT_MS: Final = 10 * 60_000


class SpendWaits(Unavailable):
    """Something in the pool spends outputs of the wallet, which does not know of it."""

    def __init__(self, outputs: int) -> None:
        super().__init__("What left the XMR wallet is not known yet. Try again later.")
        self.problem = (
            f"the node's pool has what spends {outputs} outputs that {_WALLET} takes to be unspent:"
            " nothing is signed with it before that is in a block, or dropped"
        )


class Outgoing(Protocol):
    """A wallet that tells what it has sent and nobody knows of."""

    async def unknown(self) -> list[str]:
        """The ids of such transactions. Raises RpcFailure, SpendWaits and errors.Unavailable."""
        ...


class MoneroOutgoing:
    """What the operator's Monero wallet has sent since the newest block on record."""

    def __init__(
        self,
        node: MonerodClient,
        wallet: WalletClient,
        ledger: MoneroLedger,
        unrecorded: UnrecordedLedger,
    ) -> None:
        self._node = node
        self._wallet = wallet
        self._ledger = ledger
        self._unrecorded = unrecorded

    async def unknown(self) -> list[str]:
        """Empty before the service's first look at the chain: nothing can be owed by then.

        Raises RpcFailure and SpendWaits; errors.Unavailable while the wallet is not the service's,
        or has not scanned all that its node has.
        """
        since = await self._unrecorded.monero_cursor()
        if since is None:
            return []
        await self._require_ready()
        await self._require_no_spend()
        await self._require_ready()  # what left the pool for a block since is listed now
        sent = await self._wallet.transfers(max(since - _MARGIN, 0), _SENT)
        return await self._unrecorded.not_on_record({item.txid for item in sent})

    async def _require_no_spend(self) -> None:
        listed, _ = await list_unspent(self._wallet)
        seen = await self._node.key_images([item.key_image for item in listed if not item.spent])
        waiting = [image for image, where in seen.items() if where is Spent.IN_POOL]
        unknown = len(waiting) - len(await self._ledger.live_key_images(waiting))
        if unknown:
            raise SpendWaits(unknown)

    async def _require_ready(self) -> None:
        known = await self._ledger.wallet()
        if known is None or await self._wallet.primary_address() != known.primary_address:
            raise Unavailable("The wallet that is open is not the service's.")
        await self._wallet.refresh()
        scanned, top = await self._wallet.height(), (await self._node.info()).height
        if scanned < top:
            raise Unavailable(f"The wallet is at height {scanned}, the node at {top}.")


class StartupReconciliation:
    """Holds signatures until what left the wallet was compared with the records, once.

    A wallet that can't answer can't sign either, so holding costs nothing. If it signs and still
    fails to answer this, payouts go on after ``LOOK_TIMEOUT_MS`` and health says so; it is asked
    again before each signature. ``steady`` is a monotonic clock in ms: the wall clock is often set
    soon after a machine's start.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        unrecorded: UnrecordedLedger,
        switch: PauseSwitch,
        clock: Clock,
        *,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._outgoing = outgoing
        self._unrecorded = unrecorded
        self._switch = switch
        self._clock = clock
        self._steady = steady
        self._is_done = False
        self._problem: str | None = None
        self._failing_since: int | None = None
        self._one = asyncio.Lock()

    async def require_done(self) -> None:
        """Look, unless it is done. Raises errors.Unavailable when nothing may be signed yet."""
        if self._is_done:
            return
        async with self._one:
            if not self._is_done:
                await self._look()

    def health(self) -> Health:
        """Not ok while something is not on record, or nothing could be looked at for long."""
        return Health(self._problem is None, self._problem)

    async def _look(self) -> None:
        try:
            unrecorded = await self._outgoing.unknown()
        except RpcFailure as failure:
            self._failed(failure)
            return
        except SpendWaits as found:
            self._problem = found.problem
            raise
        self._failing_since = None
        if unrecorded:
            await self._stop(unrecorded)
        self._is_done, self._problem = True, None

    async def _stop(self, unrecorded: list[str]) -> None:
        """Pause payouts and record these as acknowledged: a resume lets payouts go on."""
        if pause_for(self._switch, _WALLET):
            await self._unrecorded.acknowledge_transactions(
                NETWORK, unrecorded, self._clock.now_ms()
            )
        self._problem = f"{reason_of(_WALLET)} ({unrecorded[0]}, {len(unrecorded)} in all)"
        raise Unavailable(
            "The Monero wallet has sent what is not on record. Nothing is signed with it before"
            " the operator has looked."
        )

    def _failed(self, failure: RpcFailure) -> None:
        """Raises errors.Unavailable, unless it has gone on for too long."""
        now = self._steady()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since < LOOK_TIMEOUT_MS:
            raise Unavailable("What left the XMR wallet is not known yet. Try again later.")
        if self._problem is None:
            log.error("reconciliation_failed", reason=str(failure))
        self._problem = (
            f"what left the Monero wallet before the start can't be looked at ({failure}), and"
            " payouts go on without it"
        )
