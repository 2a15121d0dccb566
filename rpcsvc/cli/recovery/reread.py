"""``rpcsvc onchain reread NETWORK --from BLOCK``: when a node has left deposits of USDC out.

The service must not be running.
"""

from __future__ import annotations

import sys

from rpcsvc.cli.context import OK, Context, UsageError
from rpcsvc.cli.operator.service import onchain_settings
from rpcsvc.cli.recovery.owner import with_database
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.scan import NotReread, reread
from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.evm_deposits import SqlEvmDepositLedger


def reread_deposits(context: Context) -> int:
    """The command. Raises UsageError and Unreachable."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Database) -> int:
        return await _reread(settings, database, options.network, options.first)

    upto = with_database(settings, work)
    sys.stdout.write(
        f"Deposits on {options.network} are read again from block {options.first} on, to"
        f" {upto} and further, once the service runs: rpcsvc serve\n"
    )
    return OK


async def _reread(settings: Settings, database: Database, network: str, first: int) -> int:
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
