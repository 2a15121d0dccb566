"""The XMR chain adapter: monerod, monero-wallet-rpc, and the operator's own XMR.

A node or wallet that fails never raises out of it: health says so, orders are refused meanwhile,
and each pass tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.money import XMR, Asset, format_units
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkNames,
    NetworkState,
    Observation,
    PreparedTransfer,
    Record,
    Verdict,
)
from rpcsvc.settlement.onchain.monero.addresses import AddressPool
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.deposits import DepositScanner
from rpcsvc.settlement.onchain.monero.inventory import Available, MoneroInventory
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient, NodeInfo
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.presence import MoneroReorgRecovery
from rpcsvc.settlement.onchain.monero.records import NETWORK, MoneroOptions, MoneroReceipt
from rpcsvc.settlement.onchain.monero.wallet import MOST_DESTINATIONS, WalletClient

log = structlog.get_logger(__name__)


def monero_receipt(receipt: MoneroReceipt, network: str) -> dict[str, Any]:
    """For check_tx_key, and check_tx_proof with the message, of any monero-wallet-rpc."""
    return {
        "network": network,
        "asset": XMR.symbol,
        "txid": receipt.txid,
        "address": receipt.address,
        "amount": format_units(receipt.units, XMR),
        "block": receipt.height,
        "transactionKey": receipt.tx_key,
        "transactionProof": receipt.proof,
        "proofMessage": receipt.transfer_id,
    }


_BLOCK_SECONDS = 120
# What the daemons call a regtest chain is fakechain.
_NAMES: Final = {
    "mainnet": NETWORK,
    "stagenet": "monero-stagenet",
    "testnet": "monero-testnet",
    "fakechain": "monero-regtest",
}


class MoneroAdapter:
    """Implements ChainAdapter for XMR. It owns both clients from ``start`` to ``close``."""

    asset: Asset = XMR
    networks = frozenset({NETWORK})

    def __init__(
        self,
        node: MonerodClient,
        wallet: WalletClient,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
    ) -> None:
        self._node = node
        self._wallet = wallet
        self._options = options
        self._connection = MoneroConnection(node, wallet, ledger, options)
        self._addresses = AddressPool(wallet, ledger, options)
        self._deposits = DepositScanner(self._connection, ledger, clock, options)
        self._payments = MoneroPayments(self._connection, ledger, clock, options)
        self._recovery = MoneroReorgRecovery(self._connection, ledger, options)
        self._inventory = MoneroInventory(self._connection, self._payments, clock, options)
        self._connecting = asyncio.Lock()

    async def start(self) -> None:
        """Connect and check. A node or wallet that is not right is a matter of ``health``."""
        self._node.rpc.open()
        self._wallet.rpc.open()
        await self.maintain()

    async def close(self) -> None:
        """Give unused addresses back and let go of the connections."""
        try:
            await self._addresses.close()
        finally:
            await self._wallet.rpc.close()
            await self._node.rpc.close()

    # --- taking orders -------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise errors.Unavailable when no order can be taken now."""
        if self._connection.problem is not None:
            raise Unavailable("XMR can't be settled right now. Try again later.")
        if self._addresses.ready == 0:
            raise Unavailable("No XMR deposit address is ready. Try again in a moment.")

    def deposit_address(self) -> str:
        """A subaddress that no order has or will have. Raises errors.Unavailable."""
        self.require_ready()
        return self._addresses.take()

    def fee(self, chain: str) -> int:  # noqa: ARG002 - XMR is on one network
        """The fee of a payment, in piconero.

        Raises errors.Unavailable before it is known, and while no payment would be made for it.
        """
        self._inventory.require_affordable()
        return self._inventory.fee()

    def holdings(self, network: str) -> Holdings:  # noqa: ARG002 - XMR is on one network
        """The spendable balance. Raises errors.Unavailable before it is known."""
        held = self._inventory.available
        spendable = held.max_now + self._inventory.fee() if held.max_now else 0
        return Holdings(spendable, held.locked, held.seconds_to_unlock)

    async def accepts(self, network: str, address: str) -> bool:  # noqa: ARG002 - nobody is refused
        """Always: Monero knows no blacklist."""
        return True

    def total(self) -> int:
        """The whole balance, locked or not. Raises errors.Unavailable before the first refresh."""
        held = self._inventory.available
        return held.unlocked + held.locked

    def available(self) -> Available:
        """The spendable balance at the last refresh; reservations are not deducted."""
        return self._inventory.available

    def states(self) -> Mapping[str, NetworkState]:
        """The state of the network at the last refresh."""
        found = self._connection
        is_up = all(problem is None for problem in (found.problem, found.stall(), found.lag))
        return {
            NETWORK: NetworkState(
                found.block_age(),
                self._inventory.outputs(),
                node_height=found.height(),
                scanned_height=self._deposits.scanned_height,
                is_up=is_up,
            )
        }

    def names(self, chain: str) -> NetworkNames:  # noqa: ARG002 - XMR is on one network
        """Monero, and which of its networks when it is not the main one."""
        nettype = self._options.nettype
        return NetworkNames(_NAMES[nettype], 0, None)

    def seconds(self, chain: str, units: int) -> int:  # noqa: ARG002 - XMR is on one network
        """The typical time, in seconds, until a deposit of ``units`` is confirmed."""
        return self._options.required_confirmations(units) * _BLOCK_SECONDS

    def block_seconds(self, chain: str) -> int:  # noqa: ARG002 - XMR is on one network
        """Monero's target."""
        return _BLOCK_SECONDS

    # --- deposits ------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        """Deposits that changed since they were acknowledged; none while node or wallet is out."""
        try:
            with self._connection.watched():
                await self._ready()
                found = await self._deposits.observe()
        except Unavailable:
            return Observation()  # why is in health; a later pass sees what was not seen now
        at = self._deposits.complete_until
        return Observation(found, {} if at is None else {NETWORK: at})

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """These are committed: the cursor may move."""
        await self._deposits.acknowledge(sightings)

    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        """The confirmations of a deposit at the last scan, or at a height; 0: pooled or gone."""
        return await self._deposits.confirmations(key, height)

    def required_confirmations(self, network: str, units: int) -> int:  # noqa: ARG002 - one network
        """The confirmations that deposits of ``units`` piconero to one address need."""
        return self._options.required_confirmations(units)

    # --- payouts -------------------------------------------------------------------------------

    def transfers_per_payment(self, network: str) -> int:  # noqa: ARG002 - XMR is on one network
        """One transaction pays so many recipients, and the change."""
        return MOST_DESTINATIONS

    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        """The transfer's payment if it is on record. Raises TransferRejected when it failed."""
        return await self._payments.recorded(transfer)

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record
    ) -> None:
        """Sign and record without publishing. Raises TransferRejected and errors.Unavailable."""
        with self._connection.watched():
            await self._ready()
            self._inventory.require_affordable(1 + len(companions))
            await self._payments.prepare(transfer, companions, record)

    async def publish(self, transfer: Transfer) -> Verdict:
        """Publish the signed bytes; repeating it is safe. Raises errors.Unavailable."""
        with self._connection.watched():
            self._addresses.require_scanned()
            return await self._payments.publish(transfer)

    async def look_up(self, transfer: Transfer) -> Verdict:
        """The transfer's outcome on the network. Raises errors.Unavailable."""
        with self._connection.watched():
            return await self._payments.look_up(transfer)

    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        """Proof of a settled transfer. Raises errors.Unavailable."""
        with self._connection.watched():
            await self._ready()
            proof = await self._payments.receipt(transfer)
        return monero_receipt(proof, self.names("").network)

    # --- between passes ------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Fees, addresses, outputs. What fails is in health and tried again by the next call."""
        try:
            with self._connection.watched():
                info = await self._ready()
                await self._inventory.refresh_fee()
                await self._addresses.refill()
                await self._recovery.poll(info)
                await self._maintain_outputs()
        except Unavailable as reason:
            log.info("monero_maintenance_postponed", reason=reason.message)

    async def _maintain_outputs(self) -> None:
        info = await self._connection.in_step()
        await self._inventory.poll(info)
        if await self._inventory.keep_up():
            await self._inventory.poll(info)

    async def _ready(self) -> NodeInfo:
        """Check the node, which wallet is open, and all of the wallet anew after each failure."""
        self._addresses.require_scanned()
        info = await self._connection.check_node()
        async with self._connecting:
            if self._connection.wallet_checked:
                await self._connection.require_wallet()
            else:
                await self._connection.prepare_wallet()
                await self._addresses.reconcile()
            self._connection.connected()
        return info

    async def health(self) -> Health:
        """Whether XMR can be settled. Of several problems it names the one that causes others."""
        lag, pool, held = self._connection.lag, self._addresses, self._inventory
        checks = (
            self._connection.problem,
            self._connection.stall(),
            None if lag is None else f"out of sync: {lag}",
            "no deposit address is left" if pool.left == 0 else None,
            None if held.is_known else "what the wallet holds is not known yet",
            held.too_dear(),
            await self._payments.stuck(),
            self._recovery.gone,
            self._recovery.overdue,
        )
        problem = next((text for text in checks if text is not None), None)
        return Health(problem is None, problem)

    async def notes(self) -> list[str]:
        """Notes for the operator that delay no order."""
        held, recovery = self._inventory, self._recovery
        found = (recovery.problem, recovery.waiting, held.problem, held.postponed)
        return [text for text in found if text]
