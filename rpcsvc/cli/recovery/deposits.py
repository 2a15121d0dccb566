"""``rpcsvc onchain skip-addresses`` and ``onchain reread``: repair addresses and deposits.

``skip-addresses`` is for a restored copy of the database, ``reread`` for USDC deposits that a node
omitted. The service must be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from rpcsvc.cli.context import OK, Context, UsageError, say
from rpcsvc.cli.operator.service import end_progress, onchain_settings, show_progress
from rpcsvc.cli.recovery.db import with_database
from rpcsvc.clock import steady_ms
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.keys import (
    HOT_WALLET_INDEX,
    HdKeys,
    KeyFileRefused,
    OnchainExtraMissing,
    read_mnemonic,
)
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.records import EvmAddress
from rpcsvc.settlement.onchain.evm.scan import NotReread, reread
from rpcsvc.settlement.onchain.monero.addresses import AddressPool
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import MoneroOptions
from rpcsvc.store.database import Tables

_EVM_AT_ONCE = 500
_TICK_SECONDS = 1.0


def skip_addresses(context: Context) -> int:
    """Run ``deposits skip``. Raises UsageError and Unreachable."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Tables) -> tuple[int, int]:
        return await _skip(settings, database, options.count, rescan=options.rescan)

    try:
        xmr, usdc = with_database(settings, work)
    finally:
        end_progress()
    say(
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
    usdc = await skip_evm(keys, EvmDepositLedger(database), count, show_progress)
    node, wallet = wiring.monero_clients(settings.onchain)
    ledger, options = MoneroLedger(database), wiring.monero_options(settings.onchain)
    async with node, wallet:
        connection = MoneroConnection(node, wallet, ledger, options)
        xmr = await skip_monero(
            connection, ledger, options, count, rescan=rescan, progress=show_progress
        )
        return xmr, usdc


def reread_deposits(context: Context) -> int:
    """Run ``deposits reread``. Raises UsageError and Unreachable."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Tables) -> int:
        return await _reread(settings, database, options.network, options.first)

    upto = with_database(settings, work)
    say(
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
            return await reread(connection, EvmDepositLedger(database), first)
        except NotReread as reason:
            raise UsageError(f"{reason} Nothing was changed.") from reason


# Takes the present step, for a person to read.
Progress = Callable[[str], None]


async def skip_monero(
    connection: MoneroConnection,
    ledger: MoneroLedger,
    options: MoneroOptions,
    count: int,
    *,
    rescan: bool = False,
    progress: Progress = lambda _text: None,
) -> int:
    """Leave out all subaddresses that wallet or database know, and ``count`` after them. Return the
    index of the last one.

    The wallet stores addresses before they are on record. ``rescan`` has it look for money that
    came to them while it did not know them. Raises RpcFailure and ChainUnusable.
    """
    node = await connection.check_node()
    await connection.check_wallet()
    # First the wallet gets the addresses back that only the database knows.
    await AddressPool(connection.wallet, ledger, options).reconcile()
    if rescan:
        # On record first: should it end half-way, the service makes up for it at its start.
        await ledger.note_rescan_due()
    recorded = await ledger.highest_address()
    after = recorded.index.minor if recorded else 0
    for done, size in _batches(count, options.addresses_per_call):
        progress(f"XMR subaddresses: {done} of {count}")
        made = await connection.wallet.create_addresses(size)
        await connection.wallet.store()
        first, last = made[0].index.minor, made[-1].index.minor
        if first > after + 1:
            await _record_known(
                connection, ledger, range(after + 1, first), options.addresses_per_call
            )
        await ledger.add_addresses(made)
        await ledger.reserve_addresses(last)
        after = last
    if rescan:
        ticking = asyncio.create_task(_tick(progress, node.height))
        try:
            await connection.wallet.rescan_blockchain()
        finally:
            ticking.cancel()
        await connection.wallet.store()
        await ledger.note_rescanned()
    return after


async def _tick(progress: Progress, height: int) -> None:
    """Show how long the scan has lasted: the wallet does not tell how far it is."""
    began = steady_ms()
    while True:
        minutes, seconds = divmod((steady_ms() - began) // 1000, 60)
        progress(
            f"the wallet scans {height} blocks again, for {minutes}:{seconds:02} min so far;"
            " it answers nothing until that is done"
        )
        await asyncio.sleep(_TICK_SECONDS)


async def _record_known(
    connection: MoneroConnection, ledger: MoneroLedger, indices: range, at_once: int
) -> None:
    """Record addresses that the wallet knew and the database did not."""
    for start in range(0, len(indices), at_once):
        some = indices[start : start + at_once]
        await ledger.add_addresses(await connection.wallet.addresses(list(some)))


async def skip_evm(
    keys: HdKeys, ledger: EvmDepositLedger, count: int, progress: Progress = lambda _text: None
) -> int:
    """Leave out all addresses on record, and ``count`` after them; the last one's index.

    Raises ChainUnusable for another mnemonic than that of the first start.
    """
    wallet, newest = await ledger.wallet(), await ledger.highest_address()
    hot = await asyncio.to_thread(keys.address, HOT_WALLET_INDEX)
    if wallet is None or wallet.hot_address != hot:
        recorded = "none" if wallet is None else wallet.hot_address
        raise ChainUnusable(
            f"another mnemonic: its hot wallet is {hot}, and {recorded} is on record"
        )
    after = max(wallet.reserved_to, newest.index if newest else HOT_WALLET_INDEX)
    for done, size in _batches(count, _EVM_AT_ONCE):
        progress(f"USDC addresses: {done} of {count}")
        indices = range(after + 1, after + 1 + size)
        await ledger.add_addresses(await asyncio.to_thread(_derived, keys, indices))
        after = indices[-1]
    return after


def _derived(keys: HdKeys, indices: range) -> list[EvmAddress]:
    return [EvmAddress(index, keys.address(index)) for index in indices]


def _batches(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield, for each batch, the number of items before it and its own size."""
    for done in range(0, count, size):
        yield done, min(size, count - done)
