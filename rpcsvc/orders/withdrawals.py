"""Makes withdrawals and carries each out exactly once, by the same steps as payouts.

The row and its reservation are one commit, and so are the signed bytes and the wallet's record of
them. Only addresses that the settings name are ever paid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog
from msgspec import Struct, field

from rpcsvc.domain.addresses import (
    MoneroNetwork,
    parse_evm_address,
    parse_monero_address,
    same_address,
)
from rpcsvc.domain.chains import MONERO_NETWORK, ChainRegistry
from rpcsvc.domain.money import (
    USDC,
    XMR,
    Asset,
    Money,
    format_units,
    parse_amount,
    require_storable,
)
from rpcsvc.domain.order import TransferState
from rpcsvc.domain.withdrawals import (
    ID_FORM,
    SIGN_WITHIN_MS,
    Withdrawal,
    is_withdrawal_id,
    signed,
    stepped,
)
from rpcsvc.errors import (
    IdempotencyConflict,
    InvalidDestination,
    InvalidInput,
    SettingsError,
    Unavailable,
)
from rpcsvc.orders.payouts import ENGINE_TIMEOUT_SECONDS, published_verdict
from rpcsvc.orders.policy import Orders
from rpcsvc.orders.ports.wallets import (
    OrderingWallets,
    Outcome,
    PreparedTransfer,
    TransferRejected,
    Verdict,
    Wallets,
)
from rpcsvc.orders.processor import KeyedLocks
from rpcsvc.orders.rounds import Works, repeat
from rpcsvc.store.database import Commit, StaleWrite
from rpcsvc.store.withdrawals import WithdrawalStore

log = structlog.get_logger(__name__)

# The addresses that may be paid, as they are normalised, by network.
AllowList = Mapping[str, tuple[str, ...]]

# How long one that could not be signed waits for its next try.
RETRY_MS: Final = 5_000


class WithdrawalRefused(Exception):
    """The state of the service does not allow the withdrawal now; nothing was changed."""


class WithdrawalRequest(NamedTuple):
    """The operator's request, as given but for the amount."""

    withdrawal_id: str
    network: str
    units: int
    address: str


def read_allow_list(
    given: Sequence[str], chains: ChainRegistry, monero: Collection[MoneroNetwork]
) -> dict[str, tuple[str, ...]]:
    """Return the addresses that withdrawals may pay, from ``inventory.withdraw_to``.

    Raises SettingsError for a network that is not in ``chains``, and for an address that is not one
    of its network.
    """
    networks = (MONERO_NETWORK, *(chain.name for chain in chains.all()))
    found, problems = dict[str, list[str]](), list[str]()
    for pair in given:
        name, _, text = pair.partition("=")
        network = name.lower()
        if network not in networks:
            allowed = ", ".join(networks)
            problems.append(f"inventory.withdraw_to: received {name!r}; allowed: {allowed}")
            continue
        try:
            address = (
                parse_monero_address(text, networks=monero).text
                if network == MONERO_NETWORK
                else parse_evm_address(text, forbidden=chains.token_contracts)
            )
        except InvalidDestination as refused:
            problems.append(f"inventory.withdraw_to: {network}: {refused.message}")
            continue
        found.setdefault(network, []).append(address)
    if problems:
        raise SettingsError(problems)
    return {network: tuple(dict.fromkeys(each)) for network, each in found.items()}


def read_request(withdrawal_id: str, network: str, amount: str, to: str) -> WithdrawalRequest:
    """The request that these texts are. Raises InvalidInput."""
    if not is_withdrawal_id(withdrawal_id):
        raise InvalidInput(
            f'withdrawalId "{withdrawal_id[:80]}" is none: send {ID_FORM}.',
            field="withdrawalId",
            received=withdrawal_id,
            allowed=ID_FORM,
        )
    name = network.lower()
    return WithdrawalRequest(withdrawal_id, name, parse_amount(amount, _asset(name)).units, to)


class _Wait(NamedTuple):
    """Why a planned withdrawal was not signed, and when it is tried again (ms)."""

    reason: str
    until: int


class WithdrawalLimits(Struct, frozen=True):
    """The addresses that withdrawals may pay, and the most units of one, where there is a cap."""

    allowed: AllowList
    caps: Mapping[Asset, int] = field(default_factory=dict)


class Withdrawals:
    """The withdrawals of one service. Everything may raise errors.Unavailable.

    ``wallets`` sign, on the replica that settles; new withdrawals are checked by ``ordering``.
    ``writers`` are shared with payouts.
    """

    def __init__(
        self,
        store: WithdrawalStore,
        orders: Orders,
        wallets: Wallets,
        ordering: OrderingWallets,
        limits: WithdrawalLimits,
        writers: KeyedLocks,
    ) -> None:
        self._store = store
        self._orders = orders.store
        self._engine = wallets
        self._ordering = ordering
        self._limits = limits
        self._writers = writers
        self._clock = orders.clock
        self._lease = orders.lease
        self._waits: dict[str, _Wait] = {}

    @property
    def allowed(self) -> AllowList:
        """The addresses that may be paid, by network."""
        return self._limits.allowed

    # --- making --------------------------------------------------------------------------------

    async def preview(self, request: WithdrawalRequest) -> Withdrawal:
        """Return what ``make`` would commit or answer. Raises as ``make`` does."""
        return (await self._known(request)) or (await self._checked(request))[0]

    async def make(self, request: WithdrawalRequest) -> Withdrawal:
        """Commit the withdrawal, to be signed and published soon. One with its id is answered.

        Raises IdempotencyConflict for an id of other terms, InvalidInput, InvalidDestination and
        WithdrawalRefused: nothing was changed.
        """
        if (known := await self._known(request)) is not None:
            return known
        item, most = await self._checked(request)
        try:
            await self._store.add(item, most)
        except StaleWrite:
            # Another call was quicker: with this id, on this network, or for this money.
            if (known := await self._known(request)) is not None:
                return known
            await self._checked(request)
            raise Unavailable(
                "The books changed meanwhile and nothing was sent: call again."
            ) from None
        log.info("withdrawal_planned", withdrawal_id=item.withdrawal_id, network=item.network)
        return item

    async def latest(self, limit: int) -> list[Withdrawal]:
        """The newest first."""
        return await self._store.latest(limit)

    async def find(self, withdrawal_id: str) -> Withdrawal | None:
        """Return a withdrawal by its id."""
        return await self._store.find(withdrawal_id)

    def waits_for(self, withdrawal_id: str) -> str | None:
        """Return why a planned withdrawal was not signed at the last try."""
        wait = self._waits.get(withdrawal_id)
        return None if wait is None else wait.reason

    async def _known(self, request: WithdrawalRequest) -> Withdrawal | None:
        item = await self._store.find(request.withdrawal_id)
        terms = None if item is None else item.terms
        if item is None:
            terms = await self._store.signed_terms(request.withdrawal_id)
        if terms is not None and not _same(terms, request):
            network, address, units = terms
            amount = _shown(units, _asset(network))
            raise IdempotencyConflict(
                f"{request.withdrawal_id} is another withdrawal: {amount} on {network} to"
                f" {address}. Send those terms again, or another id.",
                details={"fields": ["network", "amount", "address"]},
            )
        return item

    async def _checked(self, request: WithdrawalRequest) -> tuple[Withdrawal, int | None]:
        """The withdrawal as it would be added, and within what. Raises as ``make`` does."""
        address, network = self._allowed_address(request), request.network
        cap = self._limits.caps.get(asset := _asset(network))
        if cap is not None and request.units > cap:
            raise InvalidInput(
                f"amount {_shown(request.units, asset)} is over the cap per transfer of"
                f" {_shown(cap, asset)} (onchain.{asset.symbol.lower()}_per_transfer). Send at most"
                " that, in several withdrawals if need be.",
                field="amount",
                received=format_units(request.units, asset),
                allowed=format_units(cap, asset),
            )
        if self._ordering.is_paused():
            raise WithdrawalRefused("payouts are paused: first rpcsvc payouts resume")
        if (other := await self._open_on(network)) is not None:
            raise WithdrawalRefused(
                f"{other.withdrawal_id} is under way on {network}, one at a time: rpcsvc treasury"
                " withdrawals shows when it is over"
            )
        await self._ordering.require_payable(network, address, field="to")
        fee, now = self._ordering.fee(network), self._clock.now_ms()
        require_storable(Money(request.units + fee, asset))
        item = Withdrawal(
            request.withdrawal_id, network, asset, address, request.units, fee, now, now
        )
        return item, await self._require_free(item)

    def _allowed_address(self, request: WithdrawalRequest) -> str:
        """The address as the settings have it. Raises InvalidInput."""
        allowed = self.allowed.get(request.network, ())
        if not allowed:
            names = ", ".join(sorted(self.allowed)) or "no network"
            raise InvalidInput(
                f"network {request.network[:40]}: inventory.withdraw_to has no address for it, only"
                f" for {names}. Add {request.network[:40]}=ADDRESS to the settings and restart.",
                field="network",
                received=request.network,
                allowed=sorted(self.allowed),
            )
        for address in allowed:
            if same_address(address, request.address):
                return address
        raise InvalidInput(
            f"to {request.address[:110]} is not in inventory.withdraw_to for {request.network}."
            f" Allowed: {', '.join(allowed)}.",
            field="to",
            received=request.address,
            allowed=list(allowed),
        )

    async def _open_on(self, network: str) -> Withdrawal | None:
        return next((each for each in await self._store.open() if each.network == network), None)

    async def _require_free(self, item: Withdrawal) -> int | None:
        """Return the most that may be reserved on the network; None: no limit. Raises
        WithdrawalRefused.
        """
        holdings = self._ordering.holdings
        if holdings is None:
            return None
        held = holdings(item.network).free
        reserved = (await self._orders.reserved(item.network)).total
        if item.units + item.fee > held - reserved:
            most = max(0, held - reserved - item.fee)
            raise WithdrawalRefused(
                f"{_shown(held, item.asset)} can be spent on {item.network}, and open orders"
                f" reserve {_shown(reserved, item.asset)} of it: at most"
                f" {_shown(most, item.asset)} can be withdrawn now, the network's fee left out"
            )
        return held

    # --- carrying out --------------------------------------------------------------------------

    async def run(self) -> None:
        """Advance open withdrawals until cancelled; the next start resumes them."""
        await repeat(
            self.due,
            self._engine.poll_ms,
            lambda reason: log.warning("withdrawals_not_advanced", reason=reason),
        )

    async def due(self) -> Works:
        """Return the next step of each open withdrawal, by its id."""
        if not self._lease.has_time():
            return {}
        return {
            each.withdrawal_id: partial(self._advance, each.withdrawal_id, each.network)
            for each in await self._store.open()
        }

    async def _advance(self, withdrawal_id: str, network: str) -> None:
        async with self._writers.hold(network):
            item = await self._require(withdrawal_id)
            if item.state is TransferState.PLANNED:
                await self._sign_or_cancel(item)
                item = await self._require(withdrawal_id)
            if item.state.is_final or item.state is TransferState.PLANNED:
                return
            verdict = await published_verdict(self._engine, self._lease, item.transfer)
            after = _judged(item, verdict, self._clock.now_ms())
            if after is not None:
                await self._put(item, after)

    async def _require(self, withdrawal_id: str) -> Withdrawal:
        item = await self._store.find(withdrawal_id)
        if item is None:
            raise LookupError(f"withdrawal {withdrawal_id} is not in the store")
        return item

    async def _sign_or_cancel(self, item: Withdrawal) -> None:
        """Cancel an expired withdrawal, unless its payment is on record; else have it signed."""
        now = self._clock.now_ms()
        if item.is_expired(now):
            waited = self.waits_for(item.withdrawal_id) or "the service was not up"
            reason = f"not signed within {SIGN_WITHIN_MS // 60_000} minutes: {waited}"
            cancelled = stepped(item, TransferState.CANCELLED, now, reason=reason)
            if await self._store.cancel(item, cancelled):
                self._notify(cancelled)
                return
        wait = self._waits.get(item.withdrawal_id)
        if wait is None or not 0 < wait.until - now <= RETRY_MS:
            await self._prepare(item)

    async def _prepare(self, item: Withdrawal) -> None:
        """Have the engine sign and record it."""
        name = item.withdrawal_id
        if item.address not in self.allowed.get(item.network, ()):
            log.critical("withdrawal_recipient_refused", withdrawal_id=name)
            return self._wait(item, "inventory.withdraw_to does not name its address any more")
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_SECONDS) as limit:
                record = partial(self._record, item, limit)
                leaves = {name: await self._claimed_by_others(item)}
                await self._engine.prepare(item.transfer, (), record, leaves)
        except TransferRejected as refused:
            now = self._clock.now_ms()
            await self._put(item, stepped(item, TransferState.FAILED, now, reason=str(refused)))
        except Unavailable as reason:
            self._wait(item, reason.message)
            log.warning("withdrawal_not_prepared", withdrawal_id=name, reason=reason.message)
        except Exception as error:
            self._wait(item, f"{type(error).__name__}, see withdrawal_not_prepared in the log")
            log.warning("withdrawal_not_prepared", withdrawal_id=name, exc_info=True)
        else:
            self._waits.pop(name, None)

    async def _claimed_by_others(self, item: Withdrawal) -> int:
        """Return the units that orders may still take from the wallet; 0 where nothing is
        reserved.
        """
        if self._engine.holdings is None:
            return 0
        return (await self._orders.claims(item.network)).total - item.units - item.fee

    def _wait(self, item: Withdrawal, reason: str) -> None:
        self._waits[item.withdrawal_id] = _Wait(reason, self._clock.now_ms() + RETRY_MS)

    async def _record(
        self,
        item: Withdrawal,
        limit: asyncio.Timeout,
        made: Sequence[PreparedTransfer],
        commit: Commit | None = None,
    ) -> None:
        """Commit the signed bytes with the wallet's rows, if there is time left of the lease."""
        (prepared,) = made
        if prepared.transfer_ids != (item.withdrawal_id,):
            raise LookupError(f"{prepared.txid} pays other transfers than {item.withdrawal_id}")
        if not self._lease.has_time():
            raise Unavailable("The lease ends: nothing is signed.")
        limit.reschedule(None)  # a running commit is waited for, however long it takes
        after = signed(item, prepared.txid, prepared.raw, self._clock.now_ms())
        await self._store.change(item, after, commit)
        self._notify(after)

    async def _put(self, before: Withdrawal, after: Withdrawal) -> None:
        await self._store.change(before, after)
        self._notify(after)

    def _notify(self, item: Withdrawal) -> None:
        if item.state.is_final:
            self._waits.pop(item.withdrawal_id, None)
        log.info(f"withdrawal_{item.state.value}", withdrawal_id=item.withdrawal_id,
                 network=item.network, reason=item.reason)  # fmt: skip


def _judged(item: Withdrawal, verdict: Verdict, now: int) -> Withdrawal | None:
    """The withdrawal after a verdict; None when that is on record already."""
    match verdict.outcome:
        case Outcome.SETTLED:
            return stepped(item, TransferState.SETTLED, now, receipt=verdict.receipt)
        case Outcome.FAILED:
            return stepped(item, TransferState.FAILED, now, reason=verdict.reason)
        case Outcome.PENDING if item.state is not TransferState.PUBLISHED:
            return stepped(item, TransferState.PUBLISHED, now)
        case Outcome.UNKNOWN | Outcome.ABSENT if item.state is not TransferState.UNKNOWN:
            return stepped(item, TransferState.UNKNOWN, now, reason=verdict.reason)
    return None


def _same(terms: tuple[str, str, int], request: WithdrawalRequest) -> bool:
    network, address, units = terms
    wanted = (request.network, request.units)
    return (network, units) == wanted and same_address(address, request.address)


def _asset(network: str) -> Asset:
    return XMR if network == MONERO_NETWORK else USDC


def _shown(units: int, asset: Asset) -> str:
    return f"{format_units(units, asset)} {asset.symbol}"
