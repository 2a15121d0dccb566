"""Runs an audit: reads chains and books, compares them, and pauses payouts on a difference.

``audit_loop`` repeats it beside the running service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog
from msgspec.structs import replace

from rpcsvc.audit.check import check
from rpcsvc.audit.evm_chain import EvmReader
from rpcsvc.audit.memory import AuditMemory
from rpcsvc.audit.monero_chain import MoneroReader
from rpcsvc.audit.records import ETHER, AuditReport, Books, ChainMoved, Difference, Unfit
from rpcsvc.clock import steady_ms
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.orders.settlement import LastAudit
from rpcsvc.settings_onchain import OnchainSettings
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.pause import PauseSwitch, throw
from rpcsvc.store.checks import Progress, quiet
from rpcsvc.store.database import BooksUnreadable

log = structlog.get_logger(__name__)

Pause = Callable[[float], Awaitable[None]]

ReadBooks = Callable[[], Awaitable[Books]]

# A block may come while the chains are read.
_TRIES: Final = 5
# A database that is not this one's differs in everything.
_MOST_LOGGED: Final = 50
NOT_MADE: Final = (RpcFailure, ChainMoved, Unfit, BooksUnreadable)


class Auditor:
    """Audits books, which ``read`` reads. The readers' clients are open."""

    def __init__(
        self,
        read: ReadBooks,
        monero: MoneroReader,
        evm: Sequence[EvmReader],
        progress: Progress = quiet,
    ) -> None:
        self._read = read
        self._monero = monero
        self._evm = tuple(evm)
        self._progress = progress

    async def audit(self) -> AuditReport:
        """The differences found twice in a row. Raises the errors in NOT_MADE."""
        await self._catch_up()
        report = await self._poll()
        # Anyone can send ether: that must not make each audit dearer than the last.
        if all(item.is_income for item in report.differences):
            for reader in self._evm:
                reader.accept()
        if not report.differences:
            return report
        again = await self._poll()
        found = {(item.kind, item.subject) for item in report.differences}
        twice = (item for item in again.differences if (item.kind, item.subject) in found)
        return replace(again, differences=tuple(twice))

    async def _catch_up(self) -> None:
        if not any(reader.is_new for reader in self._evm):
            return
        books = await self._books()
        for reader in self._evm:
            await reader.catch_up(books)

    async def _poll(self) -> AuditReport:
        for left in reversed(range(_TRIES)):
            try:
                return await self._poll_once()
            except ChainMoved:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _poll_once(self) -> AuditReport:
        """Compare once. Heads come first: what they hold of ours is on record by then."""
        heads = [await reader.head() for reader in self._evm]
        self._progress("asking the Monero wallet to catch up with its node", 0, 1)
        top = await self._monero.head()
        books = await self._books()
        monero = await self._monero.facts(books, top)
        evm = []
        for reader, head in zip(self._evm, heads, strict=True):
            if (found := await reader.facts(books, head)) is not None:
                evm.append(found)
        total = len(books.orders)

        def compared(orders: int) -> None:
            self._progress(f"comparing {total} orders with the chains", orders, total)

        compared(0)
        # Many orders take seconds, in which others must be served.
        return await asyncio.to_thread(check, books, monero, evm, compared)

    async def _books(self) -> Books:
        self._progress("reading the books", 0, 1)
        return await self._read()


@asynccontextmanager
async def open_auditor(
    settings: OnchainSettings,
    chains: ChainRegistry,
    read: ReadBooks,
    progress: Progress = quiet,
    memory: AuditMemory | None = None,
) -> AsyncIterator[Auditor]:
    """An auditor with clients of its own for all configured nodes. Raises SettingsError.

    ``memory``: what audits before have read of deep transactions; None: all is asked for.
    """
    node, wallet = wiring.monero_clients(settings)
    monero = MoneroReader(node, wallet, wiring.monero_options(settings), memory, progress)
    networks = wiring.evm_nodes(settings, wiring.served_chains(settings, chains))
    async with AsyncExitStack() as clients:
        await clients.enter_async_context(node)
        await clients.enter_async_context(wallet)
        for item in networks:
            await clients.enter_async_context(item.client)
        evm = [EvmReader(item.network, item.client, memory, progress) for item in networks]
        yield Auditor(read, monero, evm, progress)


class AuditLoop:
    """Audits every ``seconds`` (0: never). With ``pause_on_difference`` it pauses payouts.

    A difference pauses payouts once: the operator who resumes them has seen it. After a later
    restart it pauses them again. Ether of unknown origin pauses nothing: anyone can send it. Nor
    does a deposit that counted early and was lost: the loss is within the operator's bounds.
    """

    def __init__(
        self,
        auditor: Auditor,
        switch: PauseSwitch,
        *,
        seconds: int,
        pause_on_difference: bool,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._auditor = auditor
        self._switch = switch
        self._seconds = seconds
        self._pauses = pause_on_difference
        self._pause = pause
        self._known: set[Difference] = set()
        self._gaps: dict[str, int] = {}
        self.last: LastAudit | None = None

    async def run(self) -> None:
        """Audit until cancelled."""
        if self._seconds:
            self.last = LastAudit(steady_ms(), None)
        while self._seconds:
            await self._pause(self._seconds)
            await self.once()

    async def once(self) -> None:
        """Make one audit. Log an audit that could not be made; it is no difference."""
        try:
            report = await self._auditor.audit()
        except NOT_MADE as error:
            log.warning("audit_failed", reason=str(error))
            return
        self.last = LastAudit(steady_ms(), len(report.differences))
        for item in report.differences[:_MOST_LOGGED]:
            _log(item)
        log.info(
            "audit_completed",
            orders=report.orders,
            payments=report.payments,
            differences=len(report.differences),
            pending=len(report.pending),
        )
        self._throw(report)

    def _throw(self, report: AuditReport) -> None:
        gaps = {item.subject: item.gap for item in report.differences if item.kind == ETHER}
        self._gaps = {
            subject: max(gap, self._gaps[subject])
            for subject, gap in gaps.items()
            if subject in self._gaps
        }
        fresh = [item for item in report.differences if self._stops(item)]
        if not fresh or not self._pauses:
            return
        paused = self._switch.reason()
        # The operator who resumes payouts sees the differences that paused them before a restart.
        if paused not in (None, _reason(fresh)):
            return
        throw(self._switch, _reason(fresh))
        # Also where the pause was not written: a pause in memory ends at a restart, as this does.
        self._known.update(fresh)
        self._gaps |= gaps
        if paused is None:
            log.error("payouts_paused_by_audit", differences=len(fresh))

    def _stops(self, item: Difference) -> bool:
        """Return whether payouts have to stop for a difference.

        Both sums of ether change with each payment, and ether from unknown senders makes the gap
        smaller: it stops payouts again when it has grown since the last audit.
        """
        if item.kind == ETHER:
            return item.gap < self._gaps.get(item.subject, 0)
        is_harmless = item.is_income or item.is_bounded
        return not is_harmless and item not in self._known


def _reason(fresh: Sequence[Difference]) -> str:
    first = fresh[0]
    reported = f"{first.kind} of {first.subject}: {first.found} instead of {first.expected}"
    return f"audit: {f'{reported} {first.unit}'.rstrip()} ({len(fresh)} in all)"


def _log(item: Difference) -> None:
    said = {"kind": item.kind, "subject": item.subject, "expected": item.expected,
            "found": item.found, "unit": item.unit}  # fmt: skip
    if item.is_income:
        log.warning("audit_income_found", **said)
    else:
        log.error("audit_difference_found", **said)


@asynccontextmanager
async def audit_loop(
    settings: OnchainSettings,
    chains: ChainRegistry,
    read: ReadBooks,
    switch: PauseSwitch,
    memory: AuditMemory,
) -> AsyncIterator[AuditLoop]:
    """The loop of the running service, as its settings say. Raises SettingsError.

    ``switch``: the one that the engine checks.
    """
    async with open_auditor(settings, chains, read, memory=memory) as auditor:
        yield AuditLoop(
            auditor,
            switch,
            seconds=settings.audit_seconds,
            pause_on_difference=settings.pause_on_difference,
        )
