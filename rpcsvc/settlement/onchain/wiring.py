"""Composes the on-chain engine from its settings: clients, keys, options, both adapters."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct
from pydantic import SecretStr

from rpcsvc.clock import Clock
from rpcsvc.domain.chains import Chain, ChainRegistry
from rpcsvc.domain.money import USDC, XMR, Asset, parse_amount
from rpcsvc.domain.order import Order
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import ServiceError
from rpcsvc.orders.ports.gasless import Carried
from rpcsvc.orders.ports.wallets import NetworkNames
from rpcsvc.settings import SettingsError
from rpcsvc.settings_onchain import OnchainSettings
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.engine import OnchainEngine
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, EvmNode, Ledgers
from rpcsvc.settlement.onchain.evm.connection import EvmNetwork, EvmOptions
from rpcsvc.settlement.onchain.evm.keys import HdKeys, KeyFileRefused, read_mnemonic
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.guard import (
    Caps,
    PauseSwitch,
    PayoutGuard,
    SharedPause,
    SignedPayments,
)
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal
from rpcsvc.settlement.onchain.monero.adapter import MoneroAdapter
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.records import MoneroOptions, Threshold
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroOutgoing, StartupReconciliation
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.store.gasless import FundingRecord
from rpcsvc.store.leases import Lease

KEY_FILE: Final = "evm-mnemonic"
_WEI: Final = 10**18
# More orders than half of this, in the time that a commit takes, find no XMR address ready.
_LEAST_RESERVE: Final = 256
# int() takes more than people mean by a number: 1_0, digits of any script.
_COUNT: Final = re.compile(r"[0-9]{1,6}", re.ASCII)


class Parts(Struct, frozen=True):
    """The engine's dependencies besides its settings.

    ``switch``: the one that the auditor throws. ``chains``: the table, with nodes or not.
    ``unserved`` says what is wrong with orders of chains that have no node; None: nothing. Upkeep
    runs while ``lease`` has time. ``shared``: the pause of all replicas, if there may be several.
    """

    data_dir: Path
    switch: PauseSwitch
    chains: ChainRegistry
    clock: Clock
    monero_ledger: MoneroLedger
    evm_ledgers: Ledgers
    signed: SignedPayments
    unserved: Callable[[], Awaitable[str | None]]
    lease: Lease
    journal: PaymentJournal | None = None
    shared: SharedPause | None = None


class OnchainAuthorizations:
    """The GaslessWallets port over the USDC adapter.

    Takes new authorizations only while orders are taken (``require_ready``); carries out what is
    recorded.
    """

    def __init__(self, require_ready: Callable[[], None], usdc: EvmAdapter) -> None:
        self._require_ready = require_ready
        self._usdc = usdc

    def contract(self, network: str) -> str:
        """A network's token. Raises errors.Unavailable."""
        return self._usdc.domain(network).contract

    async def token(self, order: Order) -> Domain:
        """The domain of its network's token. Raises errors.Unavailable."""
        return self._usdc.domain(order.terms.deposit_network)

    def fee(self, network: str) -> int:
        """The gas of an authorization, in USDC units. Raises errors.Unavailable while not known."""
        return self._usdc.authorization_fee(network)

    async def require_usable(self, record: FundingRecord) -> None:
        """Raise AuthorizationRefused for one that would fail, and errors.Unavailable."""
        self._require_ready()
        await self._usdc.require_usable(record)

    async def carry_out(self, record: FundingRecord) -> Carried:
        """Send an authorization unless it is used, and return its outcome."""
        return await self._usdc.carry_out(record)

    def gas_share(self) -> float | None:
        """The share of the gas budget that 24 hours took; None before it is read."""
        return self._usdc.gas_budget.share()


class Onchain(NamedTuple):
    """The engine, and its adapter for USDC."""

    engine: OnchainEngine
    usdc: EvmAdapter


@asynccontextmanager
async def onchain_engine(settings: OnchainSettings, parts: Parts) -> AsyncIterator[Onchain]:
    """The engine, its clients open as long as the block lasts. Raises SettingsError.

    Without the lease only the clients of EVM nodes are open.
    """
    guard = PayoutGuard(parts.switch, caps(settings), parts.signed, parts.clock, parts.shared)
    clients = monero_clients(settings)
    usdc = _evm_adapter(settings, parts)
    engine = OnchainEngine(
        (_monero_adapter(settings, parts, clients), usdc),
        guard,
        floors=floors(settings),
        poll_ms=settings.poll_ms,
        reconciliations=_reconciliations(settings, parts, clients),
        unserved=parts.unserved,
        journal=parts.journal,
        has_time=parts.lease.has_time,
    )
    if not parts.lease.is_held:
        usdc.open()
    try:
        yield Onchain(engine, usdc)
    finally:
        await engine.close()


def served_chains(settings: OnchainSettings, chains: ChainRegistry) -> ChainRegistry:
    """The chains that have a node. Raises SettingsError."""
    nodes = _pairs(settings.nodes)
    known = {chain.name: chain for chain in chains.all()}
    unknown = sorted(set(nodes) - set(known))
    if unknown or not nodes:
        received = ", ".join(unknown) or "nothing"
        raise SettingsError(
            [
                f"onchain.nodes: received {received}; allowed: chain=URL, of the chains"
                f" {', '.join(known)}, such as arbitrum=http://127.0.0.1:8545"
            ]
        )
    # One that is not the name of a chain would leave that chain's deposits without finality.
    if unknown := sorted(set(settings.finalized) - set(known)):
        raise SettingsError(
            [
                f"onchain.finalized: received {', '.join(unknown)}; allowed: names of the chains"
                f" {', '.join(known)}"
            ]
        )
    return ChainRegistry(known[name] for name in nodes)


def journal_options(settings: OnchainSettings, data_dir: Path) -> JournalOptions:
    """The locations of the payment journal. Raises SettingsError."""
    folder = data_dir / FOLDER
    if folder in settings.journal_places:
        raise SettingsError(
            [
                f"onchain.journal_places: received {folder}, where the journal is anyway; allowed:"
                " folders on other disks"
            ]
        )
    try:
        command = tuple(shlex.split(settings.journal_command))
    except ValueError as error:
        raise SettingsError(
            [f"onchain.journal_command: {error}; allowed: a program and its arguments, quoted"]
        ) from error
    return JournalOptions(folder, settings.journal_places, command)


def key_path(settings: OnchainSettings, data_dir: Path) -> Path:
    """The path of the mnemonic."""
    return settings.key_file or data_dir / KEY_FILE


# --- XMR -------------------------------------------------------------------------------------


def monero_clients(settings: OnchainSettings) -> tuple[MonerodClient, WalletClient]:
    """Clients of monerod and monero-wallet-rpc, not opened. Raises SettingsError."""
    node = _endpoint(
        "monerod", settings.monerod_url, settings.monerod_username, settings.monerod_password
    )
    wallet = _endpoint(
        "monero-wallet-rpc",
        settings.wallet_url,
        settings.wallet_username,
        settings.wallet_password,
        serial=True,
    )
    return MonerodClient(node), WalletClient(wallet)


def _monero_adapter(
    settings: OnchainSettings, parts: Parts, clients: tuple[MonerodClient, WalletClient]
) -> MoneroAdapter:
    options = monero_options(settings)
    return MoneroAdapter(*clients, parts.monero_ledger, parts.clock, options)


def _reconciliations(
    settings: OnchainSettings, parts: Parts, clients: tuple[MonerodClient, WalletClient]
) -> dict[Asset, StartupReconciliation]:
    """By asset; empty where the operator wants no audits, or no pause for what they find."""
    if not (settings.audit_seconds and settings.pause_on_difference):
        return {}
    unrecorded = parts.evm_ledgers.unrecorded
    outgoing = MoneroOutgoing(*clients, parts.monero_ledger, unrecorded)
    return {XMR: StartupReconciliation(outgoing, unrecorded, parts.switch, parts.clock)}


def monero_options(settings: OnchainSettings) -> MoneroOptions:
    """The options of the XMR adapter. Raises SettingsError."""
    regtest = settings.monero_network == "regtest"
    ahead = settings.xmr_addresses
    try:
        return MoneroOptions(
            nettype="fakechain" if regtest else settings.monero_network,
            wallet_file=settings.wallet_file or None,
            wallet_password=_revealed(settings.wallet_file_password) or "",
            thresholds=tuple(_threshold(text) for text in settings.xmr_confirmations),
            settled_after=settings.xmr_settled_after,
            # What is not final yet for a payout is not for what took its input either.
            failed_after=max(MoneroOptions().failed_after, settings.xmr_settled_after),
            pool_target=ahead,
            pool_low=ahead * 3 // 4,
            reserve=min(ahead, max(_LEAST_RESERVE, ahead // 4)),
            outputs_target=settings.xmr_outputs,
            output_units=parse_amount(settings.xmr_output, XMR).units,
        )
    except ValueError as error:
        raise SettingsError([f"onchain: {error}"]) from error


def _threshold(text: str) -> Threshold:
    amount, _, confirmations = text.partition("=")
    try:
        units = 0 if amount == "0" else parse_amount(amount, XMR).units
        return Threshold(units, _count(confirmations))
    except (ServiceError, ValueError) as error:
        raise SettingsError(
            [
                f"onchain.xmr_confirmations: received {text[:80]!r}; allowed: XMR=confirmations,"
                ' rising from 0, such as "0=10, 50=20"'
            ]
        ) from error


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ValueError(text)
    return int(text)


# --- USDC ------------------------------------------------------------------------------------


def evm_nodes(settings: OnchainSettings, chains: ChainRegistry) -> list[EvmNode]:
    """One for each chain with a node, clients not opened. Raises SettingsError."""
    urls, prices = _pairs(settings.nodes), _pairs(settings.gas_prices)
    nodes = []
    for chain in chains.all():
        price = prices.get(chain.native_token)
        if price is None:
            raise SettingsError(
                [
                    f"onchain.gas_prices: received none for {chain.native_token}, which gas on"
                    f" {chain.name} is paid in; allowed: {chain.native_token}=price in USD"
                ]
            )
        coin_price = parse_amount(price, USDC).units
        client = EvmClient(_endpoint(f"node of {chain.name}", urls[chain.name], "", None))
        nodes.append(EvmNode(_network(settings, chain, coin_price), client, coin_price))
    return nodes


def _has_test_networks(settings: OnchainSettings) -> bool:
    """Whether the EVM side is of test networks: test XMR must not be swapped for real USDC."""
    return settings.monero_network in ("stagenet", "testnet")


def _network(settings: OnchainSettings, chain: Chain, coin_price: int) -> EvmNetwork:
    names = NetworkNames.of_usdc(chain, is_test=_has_test_networks(settings))
    highest_fee = settings.highest_gas_usd * 10**USDC.decimals * _WEI // coin_price
    depth = chain.confirmations
    return EvmNetwork(
        name=chain.name,
        chain_id=names.chain_id,
        token=names.token or "",
        confirmations=None if chain.name in settings.finalized else depth,
        settled_after=depth,
        failed_after=depth * 3,
        block_seconds=chain.block_time_ms / 1000,
        highest_fee=highest_fee,
        gas_reserve=highest_fee // 10,
        sweep_units=parse_amount(settings.sweep_usdc, USDC).units,
        l1_fee_oracle=chain.l1_fee_oracle,
    )


def _evm_adapter(settings: OnchainSettings, parts: Parts) -> EvmAdapter:
    try:
        keys = HdKeys(read_mnemonic(key_path(settings, parts.data_dir)))
    except KeyFileRefused as error:
        raise SettingsError([f"onchain.key_file: {error} Make one: rpcsvc onchain init"]) from error
    nodes = evm_nodes(settings, served_chains(settings, parts.chains))
    options, ledgers = evm_options(settings), parts.evm_ledgers
    return EvmAdapter(nodes, parts.chains, keys, ledgers, parts.clock, options, parts.switch)


def evm_options(settings: OnchainSettings) -> EvmOptions:
    """The options of the USDC adapter that hold for all chains."""
    ahead = settings.usdc_addresses
    gas = parse_amount(settings.authorization_gas_usd, USDC).units
    return EvmOptions(ahead, ahead // 2, gas, test_networks=_has_test_networks(settings))


# --- both ------------------------------------------------------------------------------------


def caps(settings: OnchainSettings) -> Mapping[Asset, Caps]:
    """The most that goes out, by asset. Raises errors.InputError."""

    def units(text: str, asset: Asset) -> int:
        return parse_amount(text, asset).units

    return {
        XMR: Caps(units(settings.xmr_per_transfer, XMR), units(settings.xmr_per_day, XMR)),
        USDC: Caps(units(settings.usdc_per_transfer, USDC), units(settings.usdc_per_day, USDC)),
    }


def pool_size(settings: OnchainSettings) -> int:
    """The number of addresses of each asset that are kept for replicas that do not settle."""
    return max(1, min(settings.xmr_addresses, settings.usdc_addresses) // 4)


def floors(settings: OnchainSettings) -> Mapping[Asset, int]:
    """The least that the wallets should hold, by asset. Raises errors.InputError."""
    given = {XMR: settings.xmr_floor, USDC: settings.usdc_floor}
    return {
        asset: parse_amount(text, asset).units if text.strip("0.") else 0
        for asset, text in given.items()
    }


def _endpoint(
    name: str, url: str, username: str, password: SecretStr | None, *, serial: bool = False
) -> DaemonEndpoint:
    try:
        return DaemonEndpoint(
            name, url, username or None, _revealed(password) if username else None, serial=serial
        )
    except ValueError as error:
        raise SettingsError([f"onchain: {error}"]) from error


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)
