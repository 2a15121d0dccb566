"""The sandbox engine, its rate source and its signed authorizations: no network, real rules.

It behaves as real chains do where that matters to money: signing reserves nothing, two signatures
of one payment are two transactions, publishing may fail or leave its outcome unknown, and blocks
can be reorganised away.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import Clock, OffsetClock
from rpcsvc.domain.addresses import evm_address_from_seed, stagenet_subaddress
from rpcsvc.domain.authorizations import (
    NOT_SIGNED,
    AuthorizationRefused,
    Reason,
    Refusal,
    is_signed_by_key,
)
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.events import order_of
from rpcsvc.domain.money import MAX_UNITS, USDC, XMR, Asset, Money
from rpcsvc.domain.order import PERPS, DepositKey, DepositState, Order, Transfer, TransferKind
from rpcsvc.domain.reservations import Holdings
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.health import Health
from rpcsvc.ids import RandomBytes
from rpcsvc.orders.authorizations import AuthorizationWallets, Carried
from rpcsvc.orders.ports.venue import Rate, RateSource
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkNames,
    NetworkState,
    Observation,
    Outcome,
    PreparedTransfer,
    Record,
    TransferRejected,
    Verdict,
    Wallets,
)
from rpcsvc.settings import SandboxSettings
from rpcsvc.settlement.sandbox.ledger import (
    MONERO,
    Fault,
    Mined,
    SandboxLedger,
    Setting,
    SimulatedChain,
    Tx,
    TxKind,
    TxState,
    block_hash,
    on_current,
)
from rpcsvc.store.authorizations import AuthorizationRecord

BPS = 10_000

# The simulated USDC pays every address but this one.
BLACKLISTED = "0x000000000000000000000000000000000000b1ac"
STAGENET = "monero-stagenet"

_FAILS = {
    TransferKind.PAYOUT: Fault.PAYOUT_FAILS,
    TransferKind.REFUND: Fault.REFUND_FAILS,
}

# As Circle's test tokens call themselves.
_NAME = "USDC"
_VERSION = "2"


def price_at(base: int, path: Sequence[int], step_ms: int, now: int) -> int:
    """Return USDC units per XMR at ``now`` (ms): ``base`` moved by one of ``path``, in 1/10,000.

    The path begins again whenever it ends; each of its elements holds for ``step_ms``. An empty
    path is a price that stands still.
    """
    if not path:
        return base
    return base * (BPS + path[now // step_ms % len(path)]) // BPS


class SandboxReplyLost(Exception):
    """The simulated node gave no answer: the transfer may have been taken, or not."""


class SandboxEngine(Wallets, RateSource):
    """Implements Wallets and RateSource."""

    poll_ms = 200
    # A simulated wallet that runs dry is one of the faults to try out: nothing is reserved.
    holdings: Callable[[str], Holdings] | None = None

    def __init__(
        self,
        ledger: SandboxLedger,
        chains: ChainRegistry,
        clock: OffsetClock,
        random: RandomBytes,
        options: SandboxSettings,
    ) -> None:
        self._ledger = ledger
        self._registry = chains
        self.networks = frozenset({MONERO, *(chain.name for chain in chains.all()), PERPS})
        self._clock = clock
        self._random = random
        self._options = options
        self._fees, self._price = options.fees, options.price
        self._confirmations = options.confirmations
        # Blocks of the deposit and of the payout.
        self._blocks_ms = sum(
            self._confirmations[asset.symbol] * options.block_ms[asset.symbol]
            for asset in (XMR, USDC)
        )
        self.settings: dict[Setting, int] = {}
        # Else a pass that read the settings before a change would undo it after.
        self._changing = asyncio.Lock()
        # Held while the chains are read to be changed: mining here, faults in controls.py.
        self.moving = asyncio.Lock()

    @override
    async def start(self) -> None:
        await self.refresh()
        known = {chain.network for chain in await self._ledger.chains()}
        missing = [c for c in self._initial_chains() if c.network not in known]
        if missing:
            await self._ledger.add_chains(missing)

    async def refresh(self) -> int:
        """Read the settings again, which other replicas may have changed; returns 0: no work."""
        async with self._changing:
            self._apply(await self._ledger.settings())
        return 0

    async def change(self, setting: Setting, value: int, was: int | None = None) -> None:
        """Change a setting permanently. Raises errors of ``put_setting`` when it is not ``was``."""
        async with self._changing:
            await self._ledger.put_setting(setting, value, was)
            self._apply({**self.settings, setting: value})

    def _apply(self, settings: dict[Setting, int]) -> None:
        self.settings = settings
        self._clock.offset_ms = settings.get(Setting.CLOCK_OFFSET_MS, 0)

    @override
    def require_ready(self) -> None:
        if self.settings.get(Setting.ENGINE_DOWN):
            raise Unavailable("The sandbox engine is down (fault engine_down). Try again later.")

    @override
    def states(self) -> dict[str, NetworkState]:
        state = NetworkState(is_up=not self.settings.get(Setting.ENGINE_DOWN))
        return dict.fromkeys(self.networks, state)

    @override
    async def health(self) -> Health:
        down = bool(self.settings.get(Setting.ENGINE_DOWN))
        return Health(not down, "fault engine_down is on" if down else None)

    @override
    def deposit_address(self, asset: Asset) -> str:
        if asset is XMR:
            return stagenet_subaddress(self._random(64))
        return evm_address_from_seed(self._random(32))

    @override
    def pooled(self, _address: str, _network: str) -> None:
        # An address is made where its order is.
        pass

    @override
    def fee(self, network: str) -> int:
        return self._fees[asset_of(network).symbol]

    @override
    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        # One address to try this out with.
        if address.lower() == BLACKLISTED:
            raise InvalidDestination(
                f"The token on {network} refuses to pay this address: it is on its issuer's"
                " blacklist. Send another address of the user.",
                field=field,
                received=address,
            )

    def names(self, asset: Asset, chain: str) -> NetworkNames:
        """Test networks: a wallet that follows a payment URI can't send real funds."""
        if asset is XMR:
            return NetworkNames(STAGENET, 0, None)
        return NetworkNames.of_usdc(self._registry.resolve(chain), is_test=True)

    @override
    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        return -(-(self._blocks_ms + 2 * self.poll_ms) // 1000)

    # --- rates ---

    @override
    def rate(self) -> Rate:
        if self.settings.get(Setting.RATES_DOWN):
            raise Unavailable("There is no fresh rate (fault rates_down). Try again later.")
        options, now = self._options, self._clock.now_ms()
        base = self.settings.get(Setting.USDC_PER_XMR, self._price)
        price = price_at(base, options.rate_path_bps, options.rate_step_seconds * 1000, now)
        return Rate(price, now, "sandbox")

    # --- deposits ---

    @override
    async def observe(self) -> Observation:
        if not await self._ledger.watched():
            return self._observation((), self._clock.now_ms())
        async with self.moving:
            now = self._clock.now_ms()
            chains = {chain.network: chain for chain in await self._ledger.chains()}
            await on_current(lambda: self._mine_due(chains, now))
            shown = [
                self._sighting(chains[tx.network], tx, now)
                for tx in await self._ledger.watched()
                if tx.kind is TxKind.DEPOSIT
            ]
            return self._observation(shown, now)

    def _observation(self, shown: Sequence[DepositSighting], now: int) -> Observation:
        """Return an observation of these deposits: these chains hide nothing."""
        return Observation(shown, dict.fromkeys(self.networks, now))

    @override
    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        # A reorganisation starts the watch of a deposit again.
        final = [
            tx
            for s in sightings
            if s.state is not DepositState.SEEN and (tx := await self._final(s)) is not None
        ]
        if final:
            await self._ledger.unwatch(final)

    async def _final(self, sighting: DepositSighting) -> Tx | None:
        """Return the deposit's transaction, if the chain still shows it as committed."""
        chain, now = await self._chain(sighting.key.network), self._clock.now_ms()
        tx = await self._ledger.transaction(sighting.key.network, sighting.key.txid)
        if tx is None:
            return None
        return tx if self._sighting(chain, tx, now).state is sighting.state else None

    async def _mine_due(self, chains: Mapping[str, SimulatedChain], now: int) -> None:
        watched = await self._ledger.watched()
        due = [m for tx in watched if (m := await self._mine(chains[tx.network], tx, now))]
        if due:
            await self._ledger.mine(due)

    async def _mine(self, chain: SimulatedChain, tx: Tx, now: int) -> Mined | None:
        if tx.state is not TxState.MEMPOOL:
            return None
        height = chain.including_height(tx.broadcast_at, now)
        if height is None:
            return None
        fork = await self._ledger.orphaned_count(chain.network)
        digest = block_hash(chain.network, height, fork)
        return Mined(tx, height, digest, chain.mined_at(height))

    def _sighting(self, chain: SimulatedChain, tx: Tx, now: int) -> DepositSighting:
        state = DepositState.SEEN
        if tx.state is TxState.DROPPED:
            state = DepositState.REMOVED
        elif self._confirmed(chain, tx, now):
            state = DepositState.CONFIRMED
        key = DepositKey(tx.network, tx.txid, 0)
        return DepositSighting(key, tx.recipient, tx.units, tx.sender, tx.broadcast_at, state)

    def _confirmed(self, chain: SimulatedChain, tx: Tx, now: int) -> bool:
        return _depth(chain, tx, now) >= self.required_confirmations(tx.network, tx.units)

    @override
    async def confirmations(self, key: DepositKey) -> int:
        chain, now = await self._chain(key.network), self._clock.now_ms()
        tx = await self._ledger.transaction(key.network, key.txid)
        return _depth(chain, tx, now) if tx else 0

    @override
    def required_confirmations(self, network: str, units: int) -> int:
        return self._confirmations[asset_of(network).symbol]

    @override
    async def is_final(self, key: DepositKey) -> bool:
        return True

    # --- transfers ---

    @override
    def is_paused(self) -> bool:
        # Nothing real leaves from here.
        return False

    @override
    def signed_together(self, network: str) -> int:
        # Each transfer is a transaction of its own.
        return 1

    @override
    def carried_at_once(self, network: str) -> int:
        return 1

    @override
    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],
        record: Record,
        leaves: Mapping[str, int],
    ) -> Sequence[Transfer]:
        # A nonce makes each signature another transaction, as on a chain.
        self.require_ready()
        if await self._available(transfer.network) < transfer.units + transfer.fee:
            raise Unavailable(f"The {transfer.network} wallet does not hold enough.")
        if transfer.units <= 0:
            raise TransferRejected("A transfer must carry a positive amount.")
        nonce = self._random(16).hex()
        body = [transfer.network, transfer.address, transfer.units, transfer.fee, nonce]
        raw = json.dumps(body, separators=(",", ":")).encode()
        txid = hashlib.sha256(raw).hexdigest()
        await record([PreparedTransfer(txid, (transfer.transfer_id,), raw.hex())], None)
        return []

    @override
    async def publish(self, transfer: Transfer) -> Verdict:
        # The same bytes again change nothing.
        self.require_ready()
        order_id = order_of(transfer.transfer_id)
        tx = _decode(transfer, self._clock.now_ms())
        if await self._strikes(order_id, _FAILS[transfer.kind]):
            await self._ledger.broadcast(replace(tx, state=TxState.REVERTED, watched=False))
            return Verdict(Outcome.FAILED, "The network reverted the transaction.")
        if transfer.kind is TransferKind.PAYOUT:
            if await self._strikes(order_id, Fault.PAYOUT_UNKNOWN_LOST):
                raise SandboxReplyLost("fault payout_unknown_lost")
            if await self._strikes(order_id, Fault.PAYOUT_UNKNOWN_SENT):
                await self._ledger.broadcast(tx)
                raise SandboxReplyLost("fault payout_unknown_sent")
        await self._ledger.broadcast(tx)
        return Verdict(Outcome.PENDING)

    @override
    async def look_up(self, transfer: Transfer) -> Verdict:
        self.require_ready()
        # Read before the transaction: of one that a reorganisation takes meanwhile, no later depth.
        chain, now = await self._chain(transfer.network), self._clock.now_ms()
        tx = await self._ledger.transaction(transfer.network, transfer.txid or "")
        if tx is None or tx.state is TxState.DROPPED:
            return Verdict(Outcome.ABSENT)
        if tx.state is TxState.REVERTED:
            return Verdict(Outcome.FAILED, "The network reverted the transaction.")
        if self._confirmed(chain, tx, now):
            return Verdict(Outcome.SETTLED)
        return Verdict(Outcome.PENDING)

    async def _available(self, network: str) -> int:
        """The wallet's balance less what it has in the pool, in atomic units."""
        async with self.moving:  # a block between the two reads would take a transfer from both
            leaving = sum(
                tx.balance_effect
                for tx in await self._ledger.watched()
                if tx.network == network and tx.kind is TxKind.TRANSFER
            )
            return (await self._chain(network)).balance + leaving

    async def room(self, network: str) -> int:
        """Return how many more units the wallet may be sent, so that its balance can always be
        stored.

        Only for a holder of ``moving``.
        """
        coming = sum(
            tx.units
            for tx in await self._ledger.watched()
            if (tx.network, tx.kind, tx.state) == (network, TxKind.DEPOSIT, TxState.MEMPOOL)
        )
        return MAX_UNITS - (await self._chain(network)).balance - coming

    async def _strikes(self, order_id: str, fault: Fault) -> bool:
        if not await self._ledger.has_fault(order_id, fault):
            return False
        await self._ledger.clear_fault(order_id, fault)
        return True

    async def _chain(self, network: str) -> SimulatedChain:
        return next(c for c in await self._ledger.chains() if c.network == network)

    def _initial_chains(self) -> list[SimulatedChain]:
        now = self._clock.now_ms()
        return [_initial_chain(network, now, self._options) for network in sorted(self.networks)]


def _depth(chain: SimulatedChain, tx: Tx, now: int) -> int:
    if tx.state is not TxState.MINED or tx.block_height is None:
        return 0
    return chain.height(now) - tx.block_height + 1


def asset_of(network: str) -> Asset:
    """Return the asset of a simulated network."""
    return XMR if network == MONERO else USDC


def _initial_chain(network: str, now: int, options: SandboxSettings) -> SimulatedChain:
    symbol = asset_of(network).symbol
    inventory = options.inventory[symbol]
    return SimulatedChain(
        network, 1_000, now, options.block_ms[symbol], False, inventory, inventory
    )


def _decode(transfer: Transfer, now: int) -> Tx:
    """Return the transaction in the signed bytes, whatever the transfer itself says."""
    network, recipient, units, fee, _ = json.loads(bytes.fromhex(transfer.raw or ""))
    return Tx(
        network=network,
        txid=transfer.txid or "",
        kind=TxKind.TRANSFER,
        recipient=recipient,
        sender=None,
        units=units,
        fee=fee,
        broadcast_at=now,
    )


# --- signed authorizations -----------------------------------------------------------------------


class SimulatedAuthorizations(AuthorizationWallets):
    """Carries out signed authorizations: real signatures, simulated money.

    A simulated payer holds any amount. What the pool has taken counts as carried out.
    """

    def __init__(self, ledger: SandboxLedger, engine: SandboxEngine, clock: Clock) -> None:
        self._ledger = ledger
        self._engine = engine
        self._clock = clock

    @override
    def contract(self, network: str) -> str:
        return self._domain(network).contract

    @override
    async def token(self, order: Order) -> Domain:
        return self._domain(order.terms.deposit_network)

    def _domain(self, network: str) -> Domain:
        names = self._engine.names(USDC, network)
        return Domain(_NAME, _VERSION, names.chain_id, names.token or "")

    @override
    def fee(self, network: str) -> int:
        return self._engine.fee(network)

    @override
    async def require_usable(self, record: AuthorizationRecord) -> None:
        # There are no contracts on the simulated chains: a key has signed.
        self._engine.require_ready()
        if not is_signed_by_key(self._domain(record.key.network), record.signed):
            raise AuthorizationRefused(NOT_SIGNED)
        async with self._engine.moving:
            room = await self._engine.room(record.key.network)
        if record.signed.authorization.units > room:
            raise AuthorizationRefused(
                Refusal(Reason.SIMULATION, "The sandbox's wallet can't hold so much.")
            )

    @override
    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        self._engine.require_ready()
        async with self._engine.moving:
            txid = _txid(record)
            tx = await self._ledger.transaction(record.key.network, txid)
            if tx is None:
                return await self._send(record, txid)
        if tx.state is TxState.REVERTED:
            return _reverted()
        if tx.state is TxState.DROPPED:
            return self._unused(record) or Carried(Outcome.PENDING)
        return Carried(Outcome.SETTLED, txid)

    async def _send(self, record: AuthorizationRecord, txid: str) -> Carried:
        unused = self._unused(record)
        if unused is not None:
            return unused
        given, now = record.signed.authorization, self._clock.now_ms()
        tx = Tx(
            network=record.key.network,
            txid=txid,
            kind=TxKind.DEPOSIT,
            recipient=given.to,
            sender=record.key.payer,
            units=given.units,
            fee=0,
            broadcast_at=now,
        )
        if await self._strikes(record, Fault.FUNDING_FAILS):
            await self._ledger.broadcast(_never_mined(tx))
            return _reverted()
        await self._ledger.broadcast(tx)
        if await self._strikes(record, Fault.FUNDING_UNKNOWN):
            raise SandboxReplyLost("fault funding_unknown")
        return Carried(Outcome.SETTLED, txid)

    def _unused(self, record: AuthorizationRecord) -> Carried | None:
        """Return the failure of an authorization whose window closed unused, or None."""
        if self._clock.now_ms() < record.signed.authorization.valid_before * 1_000:
            return None
        return Carried(Outcome.FAILED, reason="The authorization ran out before it was used.")

    async def _strikes(self, record: AuthorizationRecord, fault: Fault) -> bool:
        if not await self._ledger.has_fault(record.order_id, fault):
            return False
        await self._ledger.clear_fault(record.order_id, fault)
        return True


def _txid(record: AuthorizationRecord) -> str:
    """Return an id that is the same for the same authorization: the pool takes it once."""
    return hashlib.sha256("/".join(record.key).encode()).hexdigest()


def _never_mined(tx: Tx) -> Tx:
    return Tx(
        tx.network, tx.txid, tx.kind, tx.recipient, tx.sender, tx.units, tx.fee, tx.broadcast_at,
        state=TxState.REVERTED, watched=False,
    )  # fmt: skip


def _reverted() -> Carried:
    return Carried(Outcome.FAILED, reason="The network reverted the transaction.")
