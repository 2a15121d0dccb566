"""The XMR chain adapter: monerod, monero-wallet-rpc, and the operator's own XMR.

A node or wallet that fails never raises out of it: health says so, orders are refused meanwhile,
and each pass tries again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog
from typing_extensions import override

from rpcsvc.clock import Clock
from rpcsvc.domain.money import XMR, Asset
from rpcsvc.domain.order import DepositKey
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, Severity, faults, notes, texts_of
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkNames,
    NetworkState,
    Observation,
)
from rpcsvc.settlement.onchain.adapter import ChainAdapter, ServedNetwork
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.deposits import DepositScanner
from rpcsvc.settlement.onchain.monero.inventory import Available, MoneroInventory
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.presence import MoneroReorgRecovery
from rpcsvc.settlement.onchain.monero.records import NETWORK, MoneroOptions
from rpcsvc.settlement.onchain.monero.wallet import MOST_DESTINATIONS, WalletClient

log = structlog.get_logger(__name__)


class MoneroAdapter(ChainAdapter, ServedNetwork):
    """XMR, on the one network that carries it.

    It owns the clients of node and wallet from ``start`` to ``close``.
    """

    asset: Asset = XMR
    signed_together = MOST_DESTINATIONS
    carried_at_once = 1
    block_seconds = 120

    def __init__(
        self,
        node: MonerodClient,
        wallet: WalletClient,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
    ) -> None:
        self._options = options
        self.connection = MoneroConnection(node, wallet, ledger, options)
        self._addresses = self.connection.addresses
        self._deposits = DepositScanner(self.connection, ledger, clock, options)
        self.payments = MoneroPayments(self.connection, ledger, clock, options)
        self._fees = self.payments.fees
        self._recovery = MoneroReorgRecovery(self.connection, ledger, options)
        self._inventory = MoneroInventory(
            self.connection, self.payments, self._fees, clock, options
        )
        self.networks = {NETWORK: self}
        self.upkeep = {self.asset.symbol: self.maintain}

    @override
    async def start(self) -> None:
        self.connection.node.rpc.open()
        self.connection.wallet.rpc.open()
        await self.maintain()

    @override
    async def close(self) -> None:
        try:
            await self._addresses.close()
        finally:
            await self.connection.wallet.rpc.close()
            await self.connection.node.rpc.close()

    # --- taking orders -------------------------------------------------------------------------

    @override
    def require_ready(self) -> None:
        if self.connection.problem is not None:
            raise Unavailable("XMR can't be settled right now. Try again later.")
        if self._addresses.ready == 0:
            raise Unavailable("No XMR deposit address is ready. Try again in a moment.")

    @override
    def deposit_address(self) -> str:
        self.require_ready()
        return self._addresses.take()

    @override
    def fee(self) -> int:
        self._fees.require_affordable()
        return self._fees.typical()

    @override
    def holdings(self) -> Holdings:
        held = self._inventory.available
        spendable = held.max_now + self._fees.typical() if held.max_now else 0
        return Holdings(spendable, held.locked, held.seconds_to_unlock)

    @override
    async def accepts(self, address: str) -> bool:
        return True

    @override
    def total(self) -> int:
        held = self._inventory.available
        return held.unlocked + held.locked

    def available(self) -> Available:
        """The spendable balance at the last refresh; reservations are not deducted."""
        return self._inventory.available

    @override
    def state(self) -> NetworkState:
        found = self.connection
        return NetworkState(
            found.block_age(),
            self._inventory.outputs(),
            node_height=found.height(),
            scanned_height=self._deposits.scanned_height,
            is_up=not found.conditions(),
        )

    @override
    def names(self, chain: str) -> NetworkNames:
        return NetworkNames(self._options.network_name, 0, None)

    @override
    def seconds(self, units: int) -> int:
        return self.required_confirmations(units) * self.block_seconds

    # --- deposits ------------------------------------------------------------------------------

    @override
    async def observe(self) -> Observation:
        try:
            with self.connection.watched():
                info = await self.connection.check_node()
                if self._deposits.may_rest(info, is_paying=self.payments.is_paying):
                    return Observation()
                found = await self._deposits.observe(await self.connection.ready(info))
        except Unavailable:
            return Observation()  # health says why; a later pass sees the deposits
        at = self._deposits.complete_until
        return Observation(found, {} if at is None else {NETWORK: at})

    @override
    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        await self._deposits.acknowledge(sightings)

    @override
    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        return await self._deposits.confirmations(key, height)

    @override
    def required_confirmations(self, units: int) -> int:
        return self._options.required_confirmations(units)

    @override
    async def is_final(self, key: DepositKey) -> bool:
        return await self._deposits.confirmations(key) >= self._options.final_confirmations

    # --- between passes ------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Make addresses ahead, bring payments to their end, split and consolidate outputs."""
        try:
            with self.connection.watched():
                info = await self.connection.ready()
                await self._fees.poll()
                await self._addresses.refill()
                await self._recovery.poll(info)
                await self._maintain_outputs()
        except Unavailable as reason:
            log.info("monero_maintenance_postponed", reason=reason.message)

    def hold_upkeep(self, until: Callable[[], Awaitable[None]]) -> None:
        """Sign no payment of the wallet to itself while ``until`` raises errors.Unavailable."""
        self._inventory.hold(until)

    async def _maintain_outputs(self) -> None:
        info = await self.connection.in_step()
        await self._inventory.poll(info)
        if await self._inventory.keep_up():
            await self._inventory.poll(info)

    @override
    async def conditions(self) -> list[Condition]:
        has_address, is_known = self._addresses.left > 0, self._inventory.is_known
        found = [
            *self.connection.conditions(),
            *faults(
                None if has_address else "no deposit address is left",
                None if is_known else "what the wallet holds is not known yet",
                self._fees.too_dear(),
            ),
            *await self.payments.conditions(),
            *self._recovery.conditions(),
            *self._inventory.conditions(),
        ]
        # The first fault explains most of the others.
        first = texts_of(found, Severity.FAULT)[:1]
        return faults(*first) + notes(*texts_of(found, Severity.NOTE))
