"""How the USDC adapter works: one EvmNetwork for each chain that it serves.

What does not live here: where the values come from (settings.py), what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOT_WALLET_INDEX: Final = 0
_GWEI: Final = 10**9


@dataclass(frozen=True, slots=True)
class EvmNetwork:
    """One chain. Units are USDC units, fees wei. Raises ValueError for what can't be meant.

    ``name`` is the network's name in orders; ``token`` the USDC contract (EIP-55).
    ``confirmations`` make a deposit final; None: those blocks that the node calls finalized.
    ``settled_after`` and ``failed_after`` are confirmations: of a payout, and of what took its
    nonce. ``tracked_blocks``: how long a confirmed deposit or settled payout is still compared
    with the chain. ``start_block`` is where the first start begins to look; None: the newest
    block then. A payment not mined for ``bump_after_ms`` is replaced by one with a fee higher by
    ``bump_percent``, as long as it costs no more than ``highest_fee`` in all. ``gas_reserve`` is
    what the hot wallet should always hold. Deposits of ``sweep_units`` and more are swept, at
    most ``sweep_batch`` at a time. ``l1_fee_oracle`` tells what the chain takes for data on L1
    (EIP-55, OP stack); None on a chain that takes nothing for that.
    """

    name: str
    chain_id: int
    token: str
    confirmations: int | None = 20
    settled_after: int = 20
    failed_after: int = 60
    tracked_blocks: int = 2000
    block_seconds: float = 12.0
    start_block: int | None = None
    bump_after_ms: int = 60_000
    bump_percent: int = 25
    highest_fee: int = 5_000_000 * _GWEI
    gas_reserve: int = 2_000_000 * _GWEI
    sweep_units: int = 1_000_000
    sweep_batch: int = 20
    l1_fee_oracle: str | None = None

    def __post_init__(self) -> None:
        least = {"chain_id": 1, "settled_after": 1, "failed_after": 1, "tracked_blocks": 1,
                 "bump_after_ms": 1, "bump_percent": 10, "highest_fee": 1, "sweep_units": 1,
                 "sweep_batch": 1}  # fmt: skip
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ValueError(f"{self.name}: {field} must be at least {bound}")
        if self.confirmations is not None and self.confirmations < 1:
            raise ValueError(f"{self.name}: confirmations must be at least 1")
        if self.block_seconds <= 0:
            raise ValueError(f"{self.name}: block_seconds must be above 0")


@dataclass(frozen=True, slots=True)
class EvmOptions:
    """What holds for all chains. Addresses are the same on each.

    ``pool_target`` addresses are made ahead, again when fewer than ``pool_low`` are left.
    """

    pool_target: int = 256
    pool_low: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.pool_low <= self.pool_target:
            raise ValueError("pool_low must be above 0 and not above pool_target")
