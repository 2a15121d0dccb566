"""Having the deposits of one network read again from a block on, by the service's next start.

A node that told of blocks without their events, for longer than is read again anyway (fork.py),
leaves a deposit out for good. To read again is safe however often: a deposit is on record once, by
network, transaction and place within it, and what is known of it stays. What does not live here:
the reading (deposits.py), the command (cli/recovery/reread.py).
"""

from __future__ import annotations

from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.deposit_events import EventReader
from rpcsvc.settlement.onchain.evm.deposit_ledger import CursorMove, EvmDepositLedger
from rpcsvc.settlement.onchain.evm.fork import ForkFinder


class NotReread(Exception):
    """Why nothing is read again, for the operator."""


async def reread(connection: EvmConnection, ledger: EvmDepositLedger, first: int) -> int:
    """Move the cursor before block ``first``; the newest block that was read before.

    Raises NotReread, RpcFailure, ChainUnusable and errors.Unavailable: then nothing was changed.
    """
    name = connection.network.name
    if not await ledger.cursors(name):
        raise NotReread(f"No deposits were read on {name} yet: the service begins at its start.")
    head = await connection.check()
    forks = ForkFinder(connection, ledger)
    newest = await forks.find(head)
    if newest is None:
        raise NotReread(f"The node of {name} is late: it lacks blocks that were read. Try again.")
    if not 1 <= first <= newest.number:
        raise NotReread(
            f"received block {first}; allowed: 1 to {newest.number}, up to which deposits on"
            f" {name} were read. What comes after is read by the service itself."
        )
    # A node that has thrown old events away would keep the service from going on.
    await connection.client.logs(EventReader(connection, ledger).wanted, first, first)
    cursors = await forks.cursors_at(first - 1, head)
    await ledger.begin(name, cursors)
    to, oldest = cursors[0], cursors[-1].number
    await ledger.acknowledge([], CursorMove(name, to, to.number, oldest))
    return newest.number
