"""Carries transfers out exactly once: prepare, commit, publish, confirm.

One commit has the signed bytes, for the order and for the wallet, before anything is published. A
restart looks their transaction id up and publishes the same bytes again; nothing new is signed
while the first may still be mined. An exception means that the outcome is unknown: only the
network's word that a transfer failed frees its money. A wallet has one writer from prepare to
publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.events import (
    AdvanceTransfer,
    Event,
    ImpossibleTransition,
    TransferFailed,
    TransferPublished,
    TransferSettled,
    TransferUnknown,
    order_of,
)
from rpcsvc.domain.order import (
    DepositState,
    OnDeadline,
    Order,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.errors import Unavailable
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import Inventory
from rpcsvc.orders.ports.wallets import (
    Outcome,
    PreparedTransfer,
    TransferRejected,
    Verdict,
    Wallets,
)
from rpcsvc.orders.processor import KeyedLocks, OrderProcessor, Quarantine
from rpcsvc.store.database import Commit
from rpcsvc.store.leases import Lease
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

ENGINE_TIMEOUT_SECONDS = 30
_PASSED_OVER_MS = 60_000


class AwaitsBlock(NamedTuple):
    """A transfer that has not ended, and may have once its network has a block of this height."""

    network: str
    height: int


class Payouts:
    """Carries out ``AdvanceTransfer``: for payouts and for refunds, which are both transfers.

    Nothing is signed for orders in ``quarantine``, nor before the deposits that pay for it were
    seen on their chain since the start and, by the ``progress`` of the scans, since the last pause
    of payouts; nor signed or published without time left of the ``lease``.
    """

    def __init__(
        self,
        store: OrderStore,
        engine: Wallets,
        inventory: Inventory,
        processor: OrderProcessor,
        clock: Clock,
        quarantine: Quarantine,
        progress: ScanProgress,
        lease: Lease,
    ) -> None:
        self._store = store
        self._engine = engine
        self._inventory = inventory
        self._processor = processor
        self._clock = clock
        self._quarantine = quarantine
        self._progress = progress
        self._lease = lease
        # Held by network: a wallet has one writer.
        self.writers = KeyedLocks()
        # Transfers that could not be recorded together with others, one of which may be to blame.
        self._alone: set[str] = set()
        # Transfers that could not be signed as companions, and until when (ms) they are none.
        self._passed_over: dict[str, int] = {}

    async def advance(self, order_id: str, effect: AdvanceTransfer) -> bool | AwaitsBlock:
        """Carry the transfer as far as possible now.

        Return True when it has ended, or the block with which it may; otherwise False.

        Raises errors.Unavailable when the store can't record a step: then nothing further was
        done, and the effect is still pending.
        """
        transfer = (await self._find(order_id, effect.transfer_id))[1]
        if transfer.state is TransferState.PLANNED:
            async with self.writers.hold(transfer.network):
                order, transfer = await self._find(order_id, effect.transfer_id)
                if transfer.state is TransferState.PLANNED:
                    await self._prepare(order, transfer, effect)
                    transfer = (await self._find(order_id, effect.transfer_id))[1]
                    return await self._carry_on(order_id, transfer, effect)
        # Signed by now, perhaps as a companion: it needs no writer to be looked up.
        return await self._carry_on(order_id, transfer, effect)

    async def _carry_on(
        self, order_id: str, transfer: Transfer, effect: AdvanceTransfer
    ) -> bool | AwaitsBlock:
        """Publish and look up a signed transfer; returns as ``advance`` does."""
        if transfer.state.is_final:  # also when it was cancelled while it was being signed
            await self._processor.discard(order_id, effect)
            return True
        if transfer.state is TransferState.PLANNED:
            return False
        return await self._publish_and_record(order_id, transfer, effect)

    def carried_at_once(self, network: str) -> int:
        """Return how many transfers of a network may be advanced side by side."""
        return self._engine.carried_at_once(network)

    def heights(self) -> dict[str, int]:
        """Return the newest block of each network, where the wallets have seen one."""
        states = self._engine.states().items()
        return {name: each.node_height for name, each in states if each.node_height is not None}

    async def _find(self, order_id: str, transfer_id: str) -> tuple[Order, Transfer]:
        order = await self._store.order(order_id)
        transfer = order.transfer(transfer_id) if order else None
        if order is None or transfer is None:
            raise LookupError(f"transfer {transfer_id} is not in the store")
        return order, transfer

    async def _prepare(self, order: Order, transfer: Transfer, effect: AdvanceTransfer) -> None:
        """Have the engine sign and record it, if that is allowed now."""
        if not _is_agreed(order, transfer):
            log.critical("transfer_recipient_refused", transfer_id=transfer.transfer_id)
            return
        if not await self._may_be_signed(order, transfer):
            return
        companions: list[Transfer] = []
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_SECONDS) as limit:
                due = [(order, transfer), *await self._companions(transfer)]
                companions = [item for _, item in due[1:]]
                leaves = await self._inventory.leaves(due)
                record = partial(self._record, limit)
                left = await self._engine.prepare(transfer, companions, record, leaves)
                self._pass_over(left)
        except TransferRejected as refused:
            event = TransferFailed(transfer.transfer_id, str(refused))
            await self._processor.apply(order.order_id, event, done=(effect,))
        except ImpossibleTransition as refused:
            # Cancelled while it was being signed. Nobody has seen the bytes: they are dropped.
            log.info("transfer_withdrawn", transfer_id=transfer.transfer_id, reason=str(refused))
        except Unavailable as reason:
            log.warning(
                "transfer_not_prepared", transfer_id=transfer.transfer_id, reason=reason.message
            )
        except Exception:
            self._alone.add(transfer.transfer_id)
            self._pass_over(companions)
            log.warning("transfer_not_prepared", transfer_id=transfer.transfer_id, exc_info=True)
        else:
            self._alone.discard(transfer.transfer_id)

    async def _record(
        self,
        limit: asyncio.Timeout,
        signed: Sequence[PreparedTransfer],
        commit: Commit | None = None,
    ) -> None:
        """Look again at all transfers that the bytes pay, since signing takes time, and commit."""
        names = {name for made in signed for name in made.transfer_ids}

        async def require_payable(orders: Sequence[Order]) -> None:
            for order in orders:
                for transfer in order.transfers:
                    if transfer.transfer_id in names and not (
                        _is_agreed(order, transfer) and await self._may_be_signed(order, transfer)
                    ):
                        name = transfer.transfer_id
                        raise Unavailable(f"{name} must wait: what it pays for has changed.")

        limit.reschedule(None)  # a running commit is waited for, however long it takes
        await self._processor.record(signed, commit, require_payable)

    def _pass_over(self, transfers: Sequence[Transfer]) -> None:
        """Have the transfers be nobody's companions for a while: each goes on in its own turn."""
        until = self._clock.now_ms() + _PASSED_OVER_MS
        self._passed_over |= {each.transfer_id: until for each in transfers}

    async def _may_be_signed(self, order: Order, transfer: Transfer) -> bool:
        if not self._lease.has_time():
            return False
        if order.order_id in self._quarantine or self._is_too_late(order, transfer):
            return False
        return await self._has_its_deposits(order)

    async def _has_its_deposits(self, order: Order) -> bool:
        """Return whether the engine's last scan found the deposits that the order has as confirmed.

        While the service was down a reorganisation may have taken it away. Before the first look
        there are no confirmations: an order waits for its own network, and for no other.
        """
        keys = [item.key for item in order.deposits if item.state is DepositState.CONFIRMED]
        if not all(self._progress.is_current(key.network) for key in keys):
            log.info("payout_postponed", order_id=order.order_id, reason="no scan since the pause")
            return False
        try:
            missing = [key for key in keys if await self._engine.confirmations(key) == 0]
        except Unavailable as reason:
            log.info("payout_postponed", order_id=order.order_id, reason=reason.message)
            return False
        if missing:
            log.info("payout_postponed", order_id=order.order_id, deposits=len(missing))
        return not missing

    def _is_too_late(self, order: Order, transfer: Transfer) -> bool:
        """Return whether the next pass of the worker refunds the order instead.

        Its price is old. While payouts are paused its deadline waits, so this may last long.
        """
        is_due = order.on_deadline is OnDeadline.REFUND and order.deadline_at is not None
        late = is_due and (order.deadline_at or 0) <= self._clock.now_ms()
        return late and transfer.kind is TransferKind.PAYOUT

    async def _companions(self, transfer: Transfer) -> list[tuple[Order, Transfer]]:
        """Others that are due on the network and may be signed together with this one, with their
        orders.

        One transfer of an order at a time: its next one may depend on what became of this one.
        Those that waited for something else lately take no place from others: they go on alone.
        """
        most, now = self._engine.signed_together(transfer.network), self._clock.now_ms()
        if most == 1 or transfer.transfer_id in self._alone or self._engine.is_paused():
            return []
        self._passed_over = {
            name: until
            for name, until in self._passed_over.items()
            if 0 < until - now <= _PASSED_OVER_MS
        }
        left_out = self._alone | self._passed_over.keys()
        own = order_of(transfer.transfer_id)
        found = dict[str, tuple[Order, Transfer]]()
        limit = 2 * most + len(left_out)
        for order_id, transfer_id in await self._store.planned_transfers(transfer.network, limit):
            if transfer_id in left_out or order_id == own or order_id in found:
                continue
            order = await self._store.order(order_id)
            item = order.transfer(transfer_id) if order else None
            if order is None or item is None or not _is_agreed(order, item):
                continue
            if await self._may_be_signed(order, item):
                found[order_id] = order, item
            if len(found) == most - 1:
                break
        return list(found.values())

    async def _publish_and_record(
        self, order_id: str, transfer: Transfer, effect: AdvanceTransfer
    ) -> bool | AwaitsBlock:
        verdict = await published_verdict(self._engine, self._lease, transfer)
        event = _event_of(transfer, verdict)
        ended = verdict.outcome in (Outcome.SETTLED, Outcome.FAILED)
        if event is not None:
            await self._processor.apply(order_id, event, done=(effect,) if ended else ())
        if verdict.settles_at is not None:
            return AwaitsBlock(transfer.network, verdict.settles_at)
        return ended


async def published_verdict(wallets: Wallets, lease: Lease, transfer: Transfer) -> Verdict:
    """Look for our own transaction id first; publish the same bytes if it is not there."""
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_SECONDS):
            verdict = await wallets.look_up(transfer)
            if verdict.outcome is Outcome.ABSENT and lease.has_time():
                verdict = await wallets.publish(transfer)
    except Exception as error:
        log.warning("transfer_outcome_unknown", transfer_id=transfer.transfer_id, exc_info=True)
        return Verdict(Outcome.UNKNOWN, type(error).__name__)
    return verdict


def _is_agreed(order: Order, transfer: Transfer) -> bool:
    """Return whether the order's own record names the recipient: the last check before signing.

    Nothing in the service can bring another about; a database that was tampered with could.
    """
    terms = order.terms
    if transfer.kind is TransferKind.PAYOUT:
        agreed = (terms.payout_network, terms.payout_asset, terms.to_address)
        return (transfer.network, transfer.asset, transfer.address) == agreed
    recipients = {terms.refund_address}
    if terms.refund_address is None:
        recipients = {order.refund_address, *(deposit.sender for deposit in order.deposits)}
    where = (terms.deposit_network, terms.deposit_asset)
    return (transfer.network, transfer.asset) == where and transfer.address in recipients


def _event_of(transfer: Transfer, verdict: Verdict) -> Event | None:
    """The event that records a verdict; None when it is on record already."""
    transfer_id = transfer.transfer_id
    match verdict.outcome:
        case Outcome.SETTLED:
            return TransferSettled(transfer_id, verdict.receipt)
        case Outcome.FAILED:
            return TransferFailed(transfer_id, verdict.reason)
        case Outcome.PENDING if transfer.state is not TransferState.PUBLISHED:
            return TransferPublished(transfer_id)
        case Outcome.UNKNOWN | Outcome.ABSENT if transfer.state is not TransferState.UNKNOWN:
            return TransferUnknown(transfer_id, verdict.reason)
    return None
