"""The USDC chain adapter: EVM nodes, one hot wallet, deposit addresses from one mnemonic.

Each network stands by itself: one whose node is down takes no orders, and the others go on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog
from msgspec import Struct

from rpcsvc.clock import Clock
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.money import USDC, Asset, format_units, mul_div_ceil
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.authorizations import Carried
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkNames,
    NetworkState,
    Observation,
    PreparedTransfer,
    Record,
    Verdict,
)
from rpcsvc.settlement.onchain.adapter import each_of, together
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.evm.authorizations import EvmAuthorizations, GasBudget
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.deposits import EvmDepositScanner
from rpcsvc.settlement.onchain.evm.gas import EvmOpening, HotBalances, OpeningLedger
from rpcsvc.settlement.onchain.evm.keys import HOT_WALLET_INDEX, HdKeys
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import Blacklist, EvmNonces, EvmPayments
from rpcsvc.settlement.onchain.evm.records import EvmNetwork, EvmOptions, EvmReceipt
from rpcsvc.settlement.onchain.evm.sweeps import EvmSweeps
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.authorizations import AuthorizationRecord

log = structlog.get_logger(__name__)


def evm_receipt(receipt: EvmReceipt) -> dict[str, Any]:
    """For eth_getTransactionReceipt of any node: the token's Transfer event at that index."""
    return {
        "network": receipt.network,
        "asset": USDC.symbol,
        "txid": receipt.txid,
        "address": receipt.recipient,
        "amount": format_units(receipt.units, USDC),
        "block": receipt.block_number,
        "chainId": receipt.chain_id,
        "token": receipt.token,
        "logIndex": receipt.log_index,
    }


_WEI: Final = 10**18
_LOOK_SECONDS: Final = 5.0
# How many blocks a node needs to call one finalized: two epochs of 32 slots, and some.
_BLOCKS_TO_FINAL: Final = 70


class Ledgers(Struct, frozen=True):
    """The database as this adapter uses it."""

    deposits: EvmDepositLedger
    payments: EvmPaymentLedger
    unrecorded: UnrecordedLedger
    openings: OpeningLedger


class EvmNode(Struct, frozen=True):
    """A network to serve. ``coin_price``: USDC units for a whole coin of what gas is paid in."""

    network: EvmNetwork
    client: EvmClient
    coin_price: int


class EvmNetworkAdapter:
    """Everything about one network."""

    def __init__(
        self,
        node: EvmNode,
        keys: HdKeys,
        ledgers: Ledgers,
        budget: GasBudget,
        clock: Clock,
        switch: PauseSwitch,
    ) -> None:
        self.network = node.network
        self.client = node.client
        self._coin_price = node.coin_price
        self.connection = EvmConnection(node.client, node.network)
        self.blacklist = Blacklist(self.connection)
        self.deposits = EvmDepositScanner(self.connection, ledgers.deposits, clock)
        signer = keys.signer(HOT_WALLET_INDEX)
        nonces = EvmNonces(
            self.connection, signer.address, ledgers.payments, ledgers.unrecorded, switch
        )

        async def is_ours(address: str) -> bool:
            return bool(await ledgers.deposits.ours([address]))

        self.payments = EvmPayments(
            self.connection,
            signer,
            ledgers.payments,
            clock,
            is_ours,
            nonces,
        )
        self.opening = EvmOpening(self.connection, signer.address, ledgers.openings)
        self.sweeps = EvmSweeps(self.connection, self.payments, ledgers.payments, keys, clock)
        self.authorizations = EvmAuthorizations(
            self.connection,
            self.payments,
            ledgers.payments,
            budget,
            clock,
            lambda: switch.reason() is not None,
        )
        self._fault: str | None = None

    @property
    def problem(self) -> str | None:
        """The problem with the node or its answers; None if there is none."""
        return self.connection.problem or self.deposits.problem

    def is_up(self) -> bool:
        """Whether the chain goes on, the node can be relied on, and USDC moves and can be sent."""
        problems = (self.problem, self.connection.stall(), self._why_nothing_is_sent())
        return not self.connection.paused and all(problem is None for problem in problems)

    def require_up(self) -> None:
        """Raise errors.Unavailable when the node can't be relied on, or moves no token."""
        if self.problem is not None or self.connection.paused:
            raise Unavailable(
                f"USDC on {self.network.name} can't be settled right now. Try again later."
            )

    def fee(self) -> int:
        """The gas of a transfer in USDC units, rounded up. Raises Unavailable if none is sent."""
        self._require_sending()
        return self._in_usdc(self.payments.gas_fee())

    def authorization_fee(self) -> int:
        """The gas of a signed authorization in USDC units, rounded up. Raises Unavailable."""
        self._require_sending()
        return self._in_usdc(self.payments.authorization_gas_fee())

    def _in_usdc(self, wei: int) -> int:
        return max(1, mul_div_ceil(wei, self._coin_price, _WEI))

    def _require_sending(self) -> None:
        if (why := self._why_nothing_is_sent()) is not None:
            log.debug("evm_fee_refused", network=self.network.name, reason=why)
            raise Unavailable(
                f"USDC on {self.network.name} can't be sent right now. Try again later."
            )

    def _why_nothing_is_sent(self) -> str | None:
        """The blacklist, gas at no known price or one that nobody would pay, or too little ether.

        None: none of them. An order taken now would wait for its payout, or for its refund.
        """
        if self.payments.is_blacklisted():
            return f"the hot wallet is on the blacklist of USDC on {self.network.name}"
        if (unknown := self.payments.gas_problem()) is not None:
            return unknown
        hot = self.payments.hot()
        if hot is None:
            return None
        cost, name = self.payments.gas_fee(), self.network.name
        if cost > self.network.highest_fee:
            return (
                f"gas on {name} is too dear: a transfer may cost {cost} wei, and highest_gas_usd"
                f" allows {self.network.highest_fee}"
            )
        if hot.ether < cost:
            return f"the hot wallet on {name} has {hot.ether} wei, and a transfer may cost {cost}"
        return None

    async def keep_up(self, work: Callable[[EvmNetworkAdapter], Awaitable[None]]) -> None:
        """Do it; a fault of the service itself is one of this network alone, and in health."""
        try:
            await work(self)
            self._fault = None
        except Exception as error:
            log.exception("upkeep_failed", network=self.network.name)
            self._fault = type(error).__name__

    async def poll(self) -> None:
        """Check the node, then note fees and balances."""
        try:
            with self.connection.watched():
                head = await self.connection.check()
                await self.payments.refresh_gas()
                await self.payments.reconcile()
                await self.payments.measure_nonces()
                await self.opening.poll(head)
        except Unavailable as reason:
            log.info("evm_check_postponed", network=self.network.name, reason=reason.message)

    async def look(self) -> None:
        """Check the node, and note fees and balances; another replica scans and settles."""
        self.deposits.problem = None
        try:
            with self.connection.watched():
                await self.payments.refresh_gas()
        except Unavailable as reason:
            log.info("evm_check_postponed", network=self.network.name, reason=reason.message)

    async def maintain(self) -> None:
        """Refresh, follow payments, sweep; what fails is in health and tried again."""
        await self.poll()
        try:
            with self.connection.watched():
                await self.payments.maintain()
                await self.sweeps.maintain()
        except Unavailable as reason:
            log.info("evm_maintenance_postponed", network=self.network.name, reason=reason.message)

    async def problems(self) -> list[str]:
        """Problems for the operator, in words."""
        name = self.network.name
        failed = self._fault and f"the upkeep of {name} has failed ({self._fault})"
        found = [text for text in (self.problem, self.connection.stall(), failed) if text]
        if self.connection.paused:
            found.append(f"USDC on {name} is paused by its issuer")
        hot = self.payments.hot()
        if hot is None and self.connection.problem is None:
            found.append(f"what the hot wallet on {name} holds is not known yet")
        if hot is not None and hot.ether < self.network.gas_reserve:
            found.append(f"the hot wallet on {name} is short of ether for gas")
        if (why := self._why_nothing_is_sent()) is not None:
            found.append(why)
        if stuck := await self.payments.stuck():
            found.append(stuck)
        return found + self.payments.conditions() + self.authorizations.conditions()

    def notes(self) -> list[str]:
        """Notes for the operator that delay no order."""
        return self.sweeps.conditions()


class EvmAdapter:
    """Implements ChainAdapter for USDC. It owns the clients from ``start`` to ``close``.

    ``nodes`` are what it settles on; ``chains`` are all that there may be orders of.
    """

    asset: Asset = USDC

    def __init__(
        self,
        nodes: Sequence[EvmNode],
        chains: ChainRegistry,
        keys: HdKeys,
        ledgers: Ledgers,
        clock: Clock,
        options: EvmOptions,
        switch: PauseSwitch,
    ) -> None:
        self._chains = chains
        self._unrecorded = ledgers.unrecorded
        self._test_networks = options.test_networks
        self._addresses = EvmAddressPool(keys, ledgers.deposits, options)
        prices = {node.network.name: node.coin_price for node in nodes}
        self.gas_budget = GasBudget(options.authorization_gas, prices, ledgers.payments, clock)
        self._by_network: Mapping[str, EvmNetworkAdapter] = {
            node.network.name: EvmNetworkAdapter(
                node, keys, ledgers, self.gas_budget, clock, switch
            )
            for node in nodes
        }
        self.networks = frozenset(self._by_network)

    @property
    def hot_wallet(self) -> str:
        """The address that pays, on every network (EIP-55)."""
        return next(iter(self._by_network.values())).payments.hot_wallet

    async def start(self) -> None:
        """Adopt the addresses, connect, refresh. A node that is not right is reported by health.

        Raises ChainUnusable for the mnemonic of another service.
        """
        await self._make_addresses()
        self.open()
        await self._each(EvmNetworkAdapter.poll)

    def open(self) -> None:
        """Open the clients of the nodes. Call it with the event loop running."""
        for adapter in self._by_network.values():
            adapter.client.rpc.open()

    async def look(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Keep the tokens and the gas of all networks known, until cancelled: for signed payments,
        while another replica settles. Nothing is recorded or sent.
        """
        while True:
            await self._each(EvmNetworkAdapter.look)
            await pause(_LOOK_SECONDS)

    async def close(self) -> None:
        """Give unused addresses back and let go of the connections."""
        try:
            await self._addresses.close()
        finally:
            for adapter in self._by_network.values():
                await adapter.client.rpc.close()

    # --- taking orders -------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise errors.Unavailable when no order can be taken on any network."""
        if all(adapter.problem is not None for adapter in self._by_network.values()):
            raise Unavailable("USDC can't be settled right now. Try again later.")
        if self._addresses.ready == 0:
            raise Unavailable("No USDC deposit address is ready. Try again in a moment.")

    def deposit_address(self) -> str:
        """An address that no order has or will have. Raises errors.Unavailable."""
        self.require_ready()
        return self._addresses.take()

    def fee(self, chain: str) -> int:
        """The gas of a transfer, in USDC units. Raises errors.Unavailable while not known."""
        adapter = self._by_network[chain]
        adapter.require_up()
        return adapter.fee()

    def authorization_fee(self, network: str) -> int:
        """The gas of a signed authorization, in USDC units. Raises errors.Unavailable."""
        return self._of(network).authorization_fee()

    def holdings(self, network: str) -> Holdings:
        """The hot wallet's USDC on a network. Raises errors.Unavailable while it is not known."""
        adapter = self._by_network[network]
        adapter.require_up()
        hot = adapter.payments.hot()
        if hot is None:
            raise Unavailable(f"What can be paid on {network} is not known yet.")
        return Holdings(hot.usdc, 0, 0)

    async def accepts(self, network: str, address: str) -> bool:
        """False while the address is on the token's blacklist."""
        return not await self._by_network[network].blacklist.has(address)

    def total(self) -> int:
        """The hot wallet's USDC on all networks. Raises errors.Unavailable before a refresh."""
        found = [adapter.payments.hot() for adapter in self._by_network.values()]
        if all(hot is None for hot in found):
            raise Unavailable("What the hot wallet holds is not known yet.")
        return sum(hot.usdc for hot in found if hot is not None)

    def hot(self, network: str) -> HotBalances | None:
        """The hot wallet's balances at the last refresh; None before one."""
        return self._by_network[network].payments.hot()

    def states(self) -> Mapping[str, NetworkState]:
        """The state of each network at the last refresh."""
        return {
            name: NetworkState(
                adapter.connection.block_age(),
                sweeps=adapter.sweeps.counts,
                node_height=adapter.connection.height(),
                scanned_height=adapter.deposits.scanned_height,
                nonces=adapter.payments.nonce_gap(),
                is_up=adapter.is_up(),
            )
            for name, adapter in self._by_network.items()
        }

    def names(self, chain: str) -> NetworkNames:
        """The chain by its name and number, and its token; of any chain in the table.

        Orders are shown for longer than their chain may have a node.
        """
        known = self._chains.resolve(chain)
        return NetworkNames.of_usdc(known, is_test=self._test_networks)

    def seconds(self, chain: str, units: int) -> int:  # noqa: ARG002 - any amount
        """The typical time, in seconds, until a deposit is confirmed."""
        network = self._by_network[chain].network
        return math.ceil(_depth(network) * network.block_seconds)

    def block_seconds(self, chain: str) -> int:
        """The typical time between blocks, in seconds, rounded up."""
        return max(1, round(self._by_network[chain].network.block_seconds))

    # --- deposits ------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        """Deposits that changed; none of a network whose node is out."""
        return together(await asyncio.gather(*(_observed(b) for b in self._by_network.values())))

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """These are committed: the cursors may move."""
        await each_of(b.deposits.acknowledge(sightings) for b in self._by_network.values())

    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        """The confirmations of a deposit at the last scan, or at a height; 0 when it is gone."""
        return await self._by_network[key.network].deposits.confirmations(key, height)

    def required_confirmations(self, network: str, units: int) -> int:  # noqa: ARG002 - any amount
        """The confirmations that a deposit needs."""
        return _depth(self._by_network[network].network)

    # --- payouts -------------------------------------------------------------------------------

    def transfers_per_payment(self, network: str) -> int:  # noqa: ARG002 - the same on each
        """Each transfer is a transaction of its own."""
        return 1

    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        """The transfer's payment if it is on record. Raises TransferRejected when it failed."""
        return await self._by_network[transfer.network].payments.recorded(transfer)

    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],  # noqa: ARG002 - never any
        record: Record,
    ) -> None:
        """Sign and record without publishing. Raises TransferRejected and errors.Unavailable."""
        adapter = self._by_network[transfer.network]
        with adapter.connection.watched():
            await adapter.payments.prepare(transfer, record)

    async def publish(self, transfer: Transfer) -> Verdict:
        """Publish the signed bytes; repeating it is safe. Raises errors.Unavailable."""
        adapter = self._by_network[transfer.network]
        with adapter.connection.watched():
            return await adapter.payments.publish(transfer)

    async def look_up(self, transfer: Transfer) -> Verdict:
        """The transfer's outcome on the network. Raises errors.Unavailable."""
        adapter = self._by_network[transfer.network]
        with adapter.connection.watched():
            return await adapter.payments.look_up(transfer)

    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        """Proof of a settled transfer. Raises errors.Unavailable."""
        return evm_receipt(await self._by_network[transfer.network].payments.receipt(transfer))

    # --- signed authorizations -------------------------------------------------------------------

    def domain(self, network: str) -> Domain:
        """The EIP-712 domain of a network's token. Raises errors.Unavailable."""
        return self._of(network).authorizations.domain

    async def require_usable(self, record: AuthorizationRecord) -> None:
        """Raise AuthorizationRefused for one that would fail, and errors.Unavailable."""
        adapter = self._of(record.key.network)
        with adapter.connection.watched():
            await adapter.authorizations.require_usable(record)

    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        """Send an authorization unless it is used. Raises errors.Unavailable."""
        adapter = self._of(record.key.network)
        with adapter.connection.watched():
            return await adapter.authorizations.carry_out(record)

    def _of(self, network: str) -> EvmNetworkAdapter:
        """The adapter of a network that can be relied on. Raises errors.Unavailable."""
        adapter = self._by_network.get(network)
        if adapter is None:
            raise Unavailable(f"No node serves {network}: onchain.nodes has to name one.")
        adapter.require_up()
        return adapter

    # --- between passes ------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Addresses, fees, balances, payments that wait too long, sweeps; network by network."""
        try:
            await self._make_addresses()
        finally:
            await self._each(EvmNetworkAdapter.maintain)
            await self._look_at_budget()

    async def _look_at_budget(self) -> None:
        try:
            await self.gas_budget.refresh()
        except Unavailable as reason:
            log.info("gas_budget_not_read", reason=reason.message)

    async def _make_addresses(self) -> None:
        """Deposits are seen and payments followed while none can be recorded."""
        try:
            await self._addresses.load()
            await self._addresses.refill()
        except Unavailable as reason:
            log.warning("evm_addresses_not_made", left=self._addresses.left, reason=reason.message)

    async def _each(self, work: Callable[[EvmNetworkAdapter], Awaitable[None]]) -> None:
        await asyncio.gather(*(adapter.keep_up(work) for adapter in self._by_network.values()))

    async def health(self) -> Health:
        """Whether USDC can be settled on every network, and if not, what is wrong."""
        problems = [
            text for adapter in self._by_network.values() for text in await adapter.problems()
        ]
        return Health(not problems, "; ".join(problems) or None)

    async def notes(self) -> list[str]:
        """Notes for the operator: deposits that can't be swept, or that belong to no order."""
        unswept = [text for adapter in self._by_network.values() for text in adapter.notes()]
        budget = self.gas_budget.problem()
        return unswept + ([budget] if budget else []) + await self._of_no_order()

    async def _of_no_order(self) -> list[str]:
        try:
            found = [
                item
                for item in await self._unrecorded.unattributed_deposits()
                if item.network in self.networks
            ]
        except Unavailable:
            return []  # the database's own health tells
        if not found:
            return []
        units, first = sum(item.units for item in found), found[0]
        whose = f"order {first.order_id}" if first.order_id else "no order"
        return [
            f"{len(found)} deposits of {format_units(units, USDC)} USDC in all are of no order:"
            f" {first.txid} on {first.network} came to the address of {whose}; rpcsvc treasury"
            " lists them"
        ]


async def _observed(adapter: EvmNetworkAdapter) -> Observation:
    try:
        found = await adapter.deposits.observe()
    except Unavailable:
        return Observation()  # why is in health; a later pass sees what was not seen now
    at = adapter.deposits.complete_until
    return Observation(found, {} if at is None else {adapter.network.name: at})


def _depth(network: EvmNetwork) -> int:
    return _BLOCKS_TO_FINAL if network.confirmations is None else network.confirmations
