"""One look at all nodes and wallets, for the operator's commands.

What does not live here: what is asked of them (settlement/onchain/readiness.py). It imports the
engine's packages, so that only commands which need them import this module.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rpcsvc.chains_file import read_chains
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroOptions, WalletRecord
from rpcsvc.settlement.onchain.readiness import (
    MoneroFound,
    MoneroInspector,
    NetworkFound,
    look_at_network,
)
from rpcsvc.store.backends.sqlite.snapshot import Snapshot, empty_snapshot
from rpcsvc.store.onchain_evm_deposits import SqliteEvmDepositLedger
from rpcsvc.store.onchain_monero import SqliteMoneroLedger


@dataclass(frozen=True, slots=True)
class Found:
    """What nodes and wallets answered. ``coins``: what gas is paid in on each of ``networks``."""

    options: MoneroOptions
    monero: MoneroFound
    networks: tuple[NetworkFound, ...]
    coins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The wallets of the first start; None before it."""

    monero: WalletRecord | None
    hot_wallet: str | None


async def recorded_wallets(taken: Snapshot) -> Recorded:
    """What the database knows of the wallets. Raises errors.Unavailable."""
    evm = await SqliteEvmDepositLedger(taken).wallet()
    return Recorded(await SqliteMoneroLedger(taken).wallet(), evm.hot_address if evm else None)


async def look_at_all(
    settings: Settings, recorded: WalletRecord | None, hot_wallet: str | None, *, alone: bool
) -> Found:
    """Ask everything once, all at the same time. Raises SettingsError."""
    options = wiring.monero_options(settings.onchain)
    node, wallet = wiring.monero_clients(settings.onchain)
    chains = read_chains(settings.chains_file)
    served = wiring.served_chains(settings.onchain, chains)
    nodes = wiring.evm_nodes(settings.onchain, served)
    looks = (look_at_network(item.network, item.client, hot_wallet) for item in nodes)
    # The connection is only asked about its node here, and records nothing.
    with empty_snapshot() as nowhere:
        connection = MoneroConnection(node, wallet, SqliteMoneroLedger(nowhere), options)
        inspector = MoneroInspector(connection, recorded, options, alone=alone)
        monero, networks = await asyncio.gather(inspector.look(), asyncio.gather(*looks))
    coins = {chain.name: chain.native_token for chain in served.all()}
    paid_in = tuple(coins[item.network.name] for item in networks)
    return Found(options, monero, tuple(networks), paid_in)
