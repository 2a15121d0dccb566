"""What the wallet holds, output by output, as far as one answer can list that.

Anybody may pay dust to a deposit address. Some 66,000 outputs are more than an answer may hold;
then only the wallet's own address is listed, to which change goes and which no customer is told,
and sums come from the balance. What does not live here: what is made of it (inventory.py,
../inspection.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rpcsvc.settlement.onchain.daemon_rpc import TooLarge
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Output

TOO_MANY_OUTPUTS: Final = (
    "the XMR wallet has more outputs than one answer can list: orders get only what is at its own"
    " address; stop the service and sweep the rest there"
)
UNLOCK_BLOCKS: Final = 10
_OWN: Final = (0,)


@dataclass(frozen=True, slots=True)
class Held:
    """What can be spent, now or later. ``outputs``: not spent and not held back.

    ``is_whole`` is False when those are of the wallet's own address alone, and the sums are not;
    ``locked`` then counts what is still in the pool, too.
    ``blocks_to_unlock`` until all of it is unlocked, locks of the sender's making left out.
    """

    outputs: tuple[Output, ...]
    is_whole: bool
    unlocked: int
    locked: int
    blocks_to_unlock: int


async def look_at_held(wallet: WalletClient, height: int) -> Held:
    """At the height of the chain. Raises RpcFailure."""
    listed, is_whole = await list_unspent(wallet)
    outputs = tuple(item for item in listed if not item.spent and not item.frozen)
    if is_whole:
        total = sum(item.amount for item in outputs)
        unlocked = sum(item.amount for item in outputs if item.unlocked)
        blocks = max((_blocks_left(item, height) for item in outputs), default=0)
    else:
        balance = await wallet.balance(_OWN)
        total, unlocked = balance.total, balance.unlocked
        blocks = min(UNLOCK_BLOCKS, balance.blocks_to_unlock)
    return Held(outputs, is_whole, unlocked, max(0, total - unlocked), blocks)


async def list_unspent(wallet: WalletClient) -> tuple[list[Output], bool]:
    """What is not spent, and whether that is all of it. Raises RpcFailure."""
    try:
        return await wallet.outputs(), True
    except TooLarge:
        return await wallet.outputs(indices=_OWN), False


def _blocks_left(output: Output, height: int) -> int:
    if output.unlocked:
        return 0
    return max(1, UNLOCK_BLOCKS - (height - output.height)) if output.height else UNLOCK_BLOCKS
