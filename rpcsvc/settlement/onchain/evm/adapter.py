"""The USDC chain adapter: EVM nodes, one hot wallet, deposit addresses from one mnemonic.

Each network stands by itself: one whose node is down takes no orders, and the others go on.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import structlog
from msgspec import Struct
from typing_extensions import override

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.money import USDC, Asset, format_units, mul_div_ceil
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.reservations import Holdings
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, faults, notes
from rpcsvc.orders.authorizations import AuthorizationWallets, Carried
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkNames,
    NetworkState,
    Observation,
    OrderingWallets,
)
from rpcsvc.settings_onchain import OnchainSettings
from rpcsvc.settlement.onchain.adapter import ChainAdapter, ServedNetwork
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, RpcFailure
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.evm.authorizations import EvmAuthorizations, GasBudget
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.deposits import EvmDepositScanner
from rpcsvc.settlement.onchain.evm.gas import EvmOpening, OpeningLedger
from rpcsvc.settlement.onchain.evm.keys import HOT_WALLET_INDEX, HdKeys
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmNonces, EvmPayments
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.settlement.onchain.evm.sweeps import EvmSweeps
from rpcsvc.settlement.onchain.evm.upkeep import EvmUpkeep
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.thresholds import DepthTag, threshold_of
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.authorizations import AuthorizationRecord

log = structlog.get_logger(__name__)


_WEI: Final = 10**18
# Between two looks of a replica that does not settle, while a node fails; otherwise IDLE_MS.
_LOOK_MS: Final = 5_000
# How long an order waits for the answer; a slow node keeps nobody from ordering.
WAIT_SECONDS: Final = 0.5
KEPT_MS: Final = 60_000
# Between two scans of a network where no order awaits a deposit and none is under way, and between
# two rounds of upkeep while no payment is out. A new order ends the longer pause within a second;
# fees are quoted with room for the base fee to double, and asked for again before a signature.
IDLE_MS: Final = 20_000
RESTING_MS: Final = 60_000
# The longest pause while an order awaits a deposit: a pending payment is seen, and has its time.
_LONGEST_MS: Final = 2_000
# How long before its usual time a block is looked for that something waits for, at most half the
# time between two. With less than a few passes, looks would stay as late as the first one was.
_EARLY_MS: Final = 1_000
_MOST_KEPT: Final = 4_096
# The most payouts that are signed and recorded together, where the node takes batches and where it
# doesn't: they share the time limit of one.
MOST_TOGETHER: Final = 50
FEW_TOGETHER: Final = 4
# Look-ups of one network at the same time.
MOST_AT_ONCE: Final = 8


class Ledgers(Struct, frozen=True):
    """The database as this adapter uses it."""

    deposits: EvmDepositLedger
    payments: EvmPaymentLedger
    unrecorded: UnrecordedLedger
    openings: OpeningLedger


class EvmNode(Struct, frozen=True):
    """A network to serve. ``coin_price``: USDC units for a whole coin of the one that pays gas."""

    network: EvmNetwork
    client: EvmClient
    coin_price: int


class Blacklist:
    """The blacklist of one token, as its node reports it."""

    def __init__(self, connection: EvmConnection, now_ms: Callable[[], int] = steady_ms) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._kept: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self._has_none = False  # the token has no such function

    async def has(self, address: str) -> bool:
        """Whether the address is on the blacklist.

        False, with a line in the log, when the node does not answer in time.
        """
        if self._has_none:
            return False
        now, key = self._now_ms(), address.lower()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < KEPT_MS:
            return kept[1]
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                found = await self._connection.is_blacklisted(address)
        except ChainUnusable:
            self._has_none = True
            log.info("blacklist_not_found", network=self._connection.network.name)
            return False
        except (TimeoutError, RpcFailure) as failure:
            reason = str(failure) or f"no answer within {WAIT_SECONDS} s"
            log.warning(
                "blacklist_check_failed", network=self._connection.network.name, reason=reason
            )
            return False
        self._keep(key, now, found=found)
        return found

    def _keep(self, key: str, now: int, *, found: bool) -> None:
        self._kept[key] = (now, found)
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)


class LookPace:
    """Tells when to look at a network: as its next block is expected, not at each tick of a clock.

    ``poll_ms``: between two looks at a chain with faster blocks, and at one whose block is late.
    """

    def __init__(self, clock: Clock, block_seconds: float, poll_ms: int) -> None:
        self._clock = clock
        self._block_ms = block_seconds * 1000
        self._poll_ms = poll_ms
        self._highest = -1
        self._since = 0
        self._done_at: int | None = None

    def saw(self, height: int | None) -> None:
        """Note the newest block. Of several nodes behind one address some lag."""
        if height is not None and height > self._highest:
            self._highest, self._since = height, self._clock.now_ms()

    def is_due(self, pause_ms: int) -> bool:
        """Whether to look now, ``pause_ms`` after the last look; then it counts as done."""
        now, done_at = self._clock.now_ms(), self._done_at
        if done_at is not None and 0 <= now - done_at < pause_ms:
            return False
        self._done_at = now
        return True

    def of_blocks(self, *, is_waiting: bool) -> int:
        """Return the pause (ms) of a network where something is under way.

        ``is_waiting``: something waits for the very next block.
        """
        if self._block_ms < self._poll_ms:
            return 0 if is_waiting else self._poll_ms
        early = min(self._block_ms // 2, _EARLY_MS) if is_waiting else self._block_ms // 10
        age = self._clock.now_ms() - self._since
        if 0 <= age < self._block_ms - early:
            return _LONGEST_MS
        return 0 if age < self._block_ms + self._poll_ms else self._poll_ms


class EvmNetworkAdapter(ServedNetwork):
    """A network: its node, deposits, payments, sweeps and signed authorizations."""

    asset: Asset = USDC
    carried_at_once = MOST_AT_ONCE

    def __init__(
        self,
        node: EvmNode,
        keys: HdKeys,
        ledgers: Ledgers,
        budget: GasBudget,
        clock: Clock,
        switch: PauseSwitch,
        poll_ms: int,
    ) -> None:
        self.network = node.network
        self.client = node.client
        self.block_seconds = max(1, round(node.network.block_seconds))
        self._coin_price = node.coin_price
        self.connection = EvmConnection(node.client, node.network)
        self._blacklist = Blacklist(self.connection)
        self.deposits = EvmDepositScanner(self.connection, ledgers.deposits, clock)
        self._deposit_ledger, self._clock = ledgers.deposits, clock
        self._poll_ms = poll_ms
        self._upkeep_pace = LookPace(clock, node.network.block_seconds, poll_ms)
        self._scan_pace = LookPace(clock, node.network.block_seconds, poll_ms)
        signer = keys.signer(HOT_WALLET_INDEX)
        nonces = EvmNonces(
            self.connection, signer.address, ledgers.payments, ledgers.unrecorded, switch
        )
        self.payments = EvmPayments(
            self.connection, signer, ledgers.payments, clock, ledgers.deposits.is_ours, nonces
        )
        self.upkeep = EvmUpkeep(self.connection, self.payments, ledgers.payments, clock)
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
    def signed_together(self) -> int:
        """The most payouts at consecutive nonces: few where each of their calls goes alone."""
        return MOST_TOGETHER if self.client.rpc.takes_batches else FEW_TOGETHER

    @property
    def problem(self) -> str | None:
        """The problem with the node or its answers; None if there is none."""
        return self.connection.problem or self.deposits.problem

    @property
    def is_troubled(self) -> bool:
        """Whether the node, or the price of gas, has to be asked about again soon."""
        return self.connection.problem is not None or self.payments.gas.problem is not None

    def _is_up(self) -> bool:
        """Whether the chain goes on, the node can be relied on, and USDC moves and can be sent."""
        problems = (self.problem, self.connection.stall(), self._why_nothing_is_sent())
        return not self.connection.paused and all(problem is None for problem in problems)

    def require_up(self) -> None:
        """Raise errors.Unavailable when the node can't be relied on, or moves no token."""
        if self.problem is not None or self.connection.paused:
            raise Unavailable(
                f"USDC on {self.network.name} can't be settled right now. Try again later."
            )

    @override
    def fee(self) -> int:
        self._require_sending()
        return self._in_usdc(self.payments.gas.payout_cost())

    def authorization_fee(self) -> int:
        """Return the gas of a signed authorization, as ``fee`` does. Raises Unavailable."""
        self._require_sending()
        return self._in_usdc(self.payments.gas.authorization_cost())

    @override
    def holdings(self) -> Holdings:
        self.require_up()
        hot = self.payments.gas.hot
        if hot is None:
            raise Unavailable(f"What can be paid on {self.network.name} is not known yet.")
        return Holdings(hot.usdc, 0, 0)

    @override
    async def accepts(self, address: str) -> bool:
        return not await self._blacklist.has(address)

    @override
    def state(self) -> NetworkState:
        return NetworkState(
            self.connection.block_age(),
            sweeps=self.sweeps.counts,
            node_height=self.connection.height(),
            scanned_height=self.deposits.scanned_height,
            nonces=self.payments.nonces.gap,
            is_up=self._is_up(),
        )

    @override
    def seconds(self, units: int) -> int:
        return math.ceil(self.required_confirmations(units) * self.network.block_seconds)

    @override
    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        return await self.deposits.confirmations(key, height)

    @override
    def required_confirmations(self, units: int) -> int:
        depth = threshold_of(self.network.thresholds, units).depth
        if isinstance(depth, DepthTag):
            seconds = self.network.tag_seconds[depth]
            return math.ceil(seconds / self.network.block_seconds)
        return depth

    @override
    async def is_final(self, key: DepositKey) -> bool:
        return await self.deposits.is_final(key)

    @override
    async def observe(self) -> Observation:
        # The chain is looked at rarely while no order awaits a deposit and none is under way.
        if not self._scan_pace.is_due(await self._scan_pause()):
            return Observation()
        try:
            found = await self.deposits.observe()
        except Unavailable:
            return Observation()  # health says why; a later pass sees the deposits
        finally:
            self._scan_pace.saw(self.connection.height())
        at = self.deposits.complete_until
        return Observation(found, {} if at is None else {self.network.name: at})

    @override
    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        await self.deposits.acknowledge(sightings)

    async def _scan_pause(self) -> int:
        """Return how long (ms) to leave the chain alone after a scan."""
        known_until = self.deposits.complete_until
        if known_until is None:
            return self._poll_ms  # it failed, or has not read all blocks
        # An order whose time is over waits for the scan that shows all deposits until then.
        at = min(known_until, self._clock.now_ms())
        if self.deposits.is_quiet and not await self._is_awaiting(at):
            return IDLE_MS
        return self._scan_pace.of_blocks(is_waiting=not self.deposits.is_quiet)

    async def _is_awaiting(self, at: int) -> bool:
        """Whether an order awaits a deposit here at a time (ms); also while the database can't
        tell.
        """
        try:
            return await self._deposit_ledger.is_awaiting(self.network.name, at)
        except Unavailable:
            return True

    async def _upkeep_pause(self) -> int:
        """Return how long (ms) to leave payments and fees alone after a round."""
        if self.is_troubled or self.upkeep.awaits_again:
            return self._poll_ms
        try:
            if self.payments.gas.lacks(await self.payments.mined_to()):
                return self._poll_ms
            if await self.payments.under_way() or await self.sweeps.are_due():
                return self._upkeep_pace.of_blocks(is_waiting=False)
        except Unavailable:
            return self._poll_ms
        is_refusing = self.connection.paused or self._why_nothing_is_sent() is not None
        is_awaiting = await self._is_awaiting(self._clock.now_ms())
        return IDLE_MS if is_refusing or is_awaiting else RESTING_MS

    def _in_usdc(self, wei: int) -> int:
        return max(1, mul_div_ceil(wei, self._coin_price, _WEI))

    def _require_sending(self) -> None:
        self.require_up()
        if (why := self._why_nothing_is_sent()) is not None:
            log.debug("evm_fee_refused", network=self.network.name, reason=why)
            raise Unavailable(
                f"USDC on {self.network.name} can't be sent right now. Try again later."
            )

    def _why_nothing_is_sent(self) -> str | None:
        """Return the reason why an order taken now would wait for its payout or refund; None: none.

        The token's blacklist, gas at an unknown price or too dear, or too little ether.
        """
        if self.payments.gas.is_blacklisted:
            return f"the hot wallet is on the blacklist of USDC on {self.network.name}"
        if (unknown := self.payments.gas.problem) is not None:
            return unknown
        hot = self.payments.gas.hot
        if hot is None:
            return None
        cost, name = self.payments.gas.payout_cost(), self.network.name
        if cost > self.network.highest_fee:
            return (
                f"gas on {name} is too dear: a transfer may cost {cost} wei, and highest_gas_usd"
                f" allows {self.network.highest_fee}"
            )
        if hot.ether < cost:
            return f"the hot wallet on {name} has {hot.ether} wei, and a transfer may cost {cost}"
        return None

    async def keep_up(self, work: Callable[[EvmNetworkAdapter], Awaitable[object]]) -> None:
        """Run ``work``; a fault of the service concerns this network alone, and is in health."""
        try:
            await work(self)
            self._fault = None
        except Exception as error:
            log.exception("upkeep_failed", network=self.network.name)
            self._fault = type(error).__name__

    async def poll(self) -> Block | None:
        """Check the node, then note fees and balances; the newest block, None after a failure."""
        gas = self.payments.gas
        try:
            with self.connection.watched():
                mined_to = await self.payments.mined_to()
                ask = self.connection.head if gas.is_fresh() else self.connection.check
                head = await ask()
                await gas.poll(head, mined_to)
                await self.payments.reconcile()
                await self.payments.nonces.measure()
                await self.opening.poll(head)
                return head
        except Unavailable as reason:
            log.info("evm_check_postponed", network=self.network.name, reason=reason.message)
            return None

    async def look(self) -> None:
        """Check the node, and note fees and balances; another replica scans and settles."""
        self.deposits.problem = None
        try:
            with self.connection.watched():
                await self.payments.gas.poll(await self.connection.check())
        except Unavailable as reason:
            log.info("evm_check_postponed", network=self.network.name, reason=reason.message)

    async def maintain(self) -> None:
        """Refresh, follow payments, sweep; a failure is in health and tried again.

        Rarely while no payment is under way: nobody waits for it then.
        """
        if not self._upkeep_pace.is_due(await self._upkeep_pause()):
            return
        head = await self.poll()
        self._upkeep_pace.saw(self.connection.height())
        try:
            with self.connection.watched():
                if head is None:
                    head = await self.connection.check()
                await self.upkeep.maintain(head)
                await self.sweeps.maintain(head)
        except Unavailable as reason:
            log.info("evm_maintenance_postponed", network=self.network.name, reason=reason.message)

    async def conditions(self) -> list[Condition]:
        """Return conditions for the operator; those of sweeps delay no order."""
        name, hot = self.network.name, self.payments.gas.hot
        is_unknown = hot is None and self.connection.problem is None
        is_short = hot is not None and hot.ether < self.network.gas_reserve
        return [
            *faults(
                self.problem,
                self.connection.stall(),
                self._fault and f"the upkeep of {name} has failed ({self._fault})",
                f"USDC on {name} is paused by its issuer" if self.connection.paused else None,
                f"what the hot wallet on {name} holds is not known yet" if is_unknown else None,
                f"the hot wallet on {name} is short of ether for gas" if is_short else None,
                self._why_nothing_is_sent(),
            ),
            *await self.payments.conditions(),
            *self.authorizations.conditions(),
            *self.sweeps.conditions(),
        ]


class EvmAdapter(ChainAdapter):
    """USDC on all networks, whose clients it owns from ``start`` to ``close``.

    ``nodes``: the networks that it settles on; ``chains``: all that there may be orders of.
    """

    asset: Asset = USDC

    def __init__(
        self,
        nodes: Sequence[EvmNode],
        chains: ChainRegistry,
        keys: HdKeys,
        ledgers: Ledgers,
        clock: Clock,
        settings: OnchainSettings,
        switch: PauseSwitch,
    ) -> None:
        self._chains = chains
        self._unrecorded = ledgers.unrecorded
        self._is_test = settings.has_test_networks
        self._addresses = EvmAddressPool(keys, ledgers.deposits, settings.usdc_addresses)
        prices = {node.network.name: node.coin_price for node in nodes}
        self.gas_budget = GasBudget(settings.authorization_gas, prices, ledgers.payments, clock)
        self.networks: Mapping[str, EvmNetworkAdapter] = {
            node.network.name: EvmNetworkAdapter(
                node, keys, ledgers, self.gas_budget, clock, switch, settings.poll_ms
            )
            for node in nodes
        }
        self.upkeep: Mapping[str, Callable[[], Awaitable[None]]] = {
            self.asset.symbol: self.maintain,
            **{
                name: partial(each.keep_up, EvmNetworkAdapter.maintain)
                for name, each in self.networks.items()
            },
        }

    @property
    def hot_wallet(self) -> str:
        """The address that pays, on every network (EIP-55)."""
        return next(iter(self.networks.values())).payments.hot_wallet

    @override
    async def start(self) -> None:
        await self._make_addresses()
        self.open()
        # A network's scan begins at its first look. No address is given out before, if it succeeds.
        polls = [each.keep_up(EvmNetworkAdapter.poll) for each in self.networks.values()]
        await asyncio.gather(*polls)

    def open(self) -> None:
        """Open the clients of the nodes. Call it with the event loop running."""
        for adapter in self.networks.values():
            adapter.client.rpc.open()

    async def look(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Keep the tokens and the gas of all networks known, until cancelled: for signed payments,
        while another replica settles. Nothing is recorded or sent.
        """

        async def look_at(adapter: EvmNetworkAdapter) -> None:
            while True:
                await adapter.keep_up(EvmNetworkAdapter.look)
                await pause((_LOOK_MS if adapter.is_troubled else IDLE_MS) / 1000)

        await asyncio.gather(*map(look_at, self.networks.values()))

    @override
    async def close(self) -> None:
        try:
            await self._addresses.close()
        finally:
            for adapter in self.networks.values():
                await adapter.client.rpc.close()

    # --- taking orders -------------------------------------------------------------------------

    @override
    def require_ready(self) -> None:
        if all(adapter.problem is not None for adapter in self.networks.values()):
            raise Unavailable("USDC can't be settled right now. Try again later.")
        if self._addresses.ready == 0:
            raise Unavailable("No USDC deposit address is ready. Try again in a moment.")

    @override
    def deposit_address(self) -> str:
        self.require_ready()
        return self._addresses.take()

    @override
    def total(self) -> int:
        found = [adapter.payments.gas.hot for adapter in self.networks.values()]
        if all(hot is None for hot in found):
            raise Unavailable("What the hot wallet holds is not known yet.")
        return sum(hot.usdc for hot in found if hot is not None)

    @override
    def names(self, chain: str) -> NetworkNames:
        known = self._chains.resolve(chain)
        return NetworkNames.of_usdc(known, is_test=self._is_test)

    # --- signed authorizations -------------------------------------------------------------------

    def usable(self, network: str) -> EvmNetworkAdapter:
        """Return a network that can be relied on. Raises errors.Unavailable."""
        adapter = self.networks.get(network)
        if adapter is None:
            raise Unavailable(f"No node serves {network}: onchain.nodes has to name one.")
        adapter.require_up()
        return adapter

    # --- between passes ------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Make addresses ahead, and measure the gas of signed authorizations."""
        try:
            await self._make_addresses()
        finally:
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

    @override
    async def conditions(self) -> list[Condition]:
        found = [item for each in self.networks.values() for item in await each.conditions()]
        return found + notes(self.gas_budget.problem(), await self._of_no_order())

    async def _of_no_order(self) -> str | None:
        """Return the deposits that belong to no order, in words; None: none is known."""
        try:
            found = [
                item
                for item in await self._unrecorded.unattributed_deposits()
                if item.network in self.networks
            ]
        except Unavailable:
            return None  # the database's own health tells
        if not found:
            return None
        units, first = sum(item.units for item in found), found[0]
        whose = f"order {first.order_id}" if first.order_id else "no order"
        return (
            f"{len(found)} deposits of {format_units(units, USDC)} USDC in all are of no order:"
            f" {first.txid} on {first.network} came to the address of {whose}; rpcsvc treasury"
            " lists them"
        )


class OnchainAuthorizations(AuthorizationWallets):
    """Carries out signed authorizations by the USDC adapter.

    Takes new authorizations only while ``wallets`` take orders of the network; carries out recorded
    ones at any time.
    """

    def __init__(self, wallets: OrderingWallets, usdc: EvmAdapter) -> None:
        self._wallets = wallets
        self._usdc = usdc

    @override
    def contract(self, network: str) -> str:
        return self._usdc.usable(network).connection.domain.contract

    @override
    async def token(self, order: Order) -> Domain:
        return self._usdc.usable(order.terms.deposit_network).connection.domain

    @override
    def fee(self, network: str) -> int:
        return self._usdc.usable(network).authorization_fee()

    @override
    async def require_usable(self, record: AuthorizationRecord) -> None:
        self._wallets.require_ready()
        # Also not while its deposits are not seen: the payer's money would wait with the order.
        self._wallets.fee(record.key.network)
        network = self._usdc.usable(record.key.network)
        with network.connection.watched():
            await network.authorizations.require_usable(record)

    @override
    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        network = self._usdc.usable(record.key.network)
        with network.connection.watched():
            return await network.authorizations.carry_out(record)

    def gas_share(self) -> float | None:
        """Return the share of the gas budget that 24 hours took; None before it is read."""
        return self._usdc.gas_budget.share()
