"""``rpcsvc onchain skip-addresses`` and ``onchain reread``: repair addresses and deposits.

``skip-addresses`` is for a restored copy of the database, ``reread`` for USDC deposits that a node
omitted. The service must be stopped.
"""

from __future__ import annotations

import sys

from rpcsvc.cli.context import OK, Context, UsageError
from rpcsvc.cli.operator.service import end_progress, onchain_settings, show_progress
from rpcsvc.cli.recovery.db import with_database
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.address_skip import skip_evm, skip_monero
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.keys import (
    HdKeys,
    KeyFileRefused,
    OnchainExtraMissing,
    read_mnemonic,
)
from rpcsvc.settlement.onchain.evm.scan import NotReread, reread
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.store.database import Tables
from rpcsvc.store.evm_deposits import SqlEvmDepositLedger
from rpcsvc.store.monero import SqlMoneroLedger


def skip_addresses(context: Context) -> int:
    """Run the command. Raises UsageError and Unreachable."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Tables) -> tuple[int, int]:
        return await _skip(settings, database, options.count, rescan=options.rescan)

    try:
        xmr, usdc = with_database(settings, work)
    finally:
        end_progress()
    sys.stdout.write(
        f"XMR subaddresses up to {xmr} and USDC addresses up to {usdc} are not handed out any"
        " more. Deposits to them without an order are listed by: rpcsvc audit\n"
    )
    return OK


async def _skip(
    settings: Settings, database: Tables, count: int, *, rescan: bool
) -> tuple[int, int]:
    """Skip EVM addresses first: it needs no daemon. Repeating it skips more, which is harmless."""
    try:
        keys = HdKeys(read_mnemonic(wiring.key_path(settings.onchain, settings.data_dir)))
    except (KeyFileRefused, OnchainExtraMissing) as error:
        raise UsageError(str(error)) from error
    usdc = await skip_evm(keys, SqlEvmDepositLedger(database), count, show_progress)
    node, wallet = wiring.monero_clients(settings.onchain)
    ledger, options = SqlMoneroLedger(database), wiring.monero_options(settings.onchain)
    async with node, wallet:
        connection = MoneroConnection(node, wallet, ledger, options)
        xmr = await skip_monero(
            connection, ledger, options, count, rescan=rescan, progress=show_progress
        )
        return xmr, usdc


def reread_deposits(context: Context) -> int:
    """Run the command. Raises UsageError and Unreachable."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Tables) -> int:
        return await _reread(settings, database, options.network, options.first)

    upto = with_database(settings, work)
    sys.stdout.write(
        f"Deposits on {options.network} are read again from block {options.first} on, to"
        f" {upto} and further, once the service runs: rpcsvc serve\n"
    )
    return OK


async def _reread(settings: Settings, database: Tables, network: str, first: int) -> int:
    chains = read_chains(settings.chains_file)
    served = wiring.served_chains(settings.onchain, chains)
    nodes = {item.network.name: item for item in wiring.evm_nodes(settings.onchain, served)}
    node = nodes.get(network)
    if node is None:
        raise UsageError(
            f"network: received {network!r}; allowed, by onchain.nodes: {', '.join(nodes)}."
        )
    async with node.client:
        try:
            connection = EvmConnection(node.client, node.network)
            return await reread(connection, SqlEvmDepositLedger(database), first)
        except NotReread as reason:
            raise UsageError(f"{reason} Nothing was changed.") from reason
