"""When deposits count in a universe of the engine onchain, and what may be lost by it.

Some universes count deposits before they are final, within bounds, and have payers who take these
back. The checks read the chains: how deep a deposit is, and the worth of all that count early.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

XMR: Final = 10**12
USDC: Final = 10**6
CONFIRMATIONS: Final = 3
# Deeper than replaced by payers; others' reorganisations may be deeper.
_FINAL: Final = 12
_EVERYWHERE: Final = "all"

Tier = tuple[int, int]


class Tiers(NamedTuple):
    """Depths by the units from which they hold, rising, and bounds in USDC units, by network.

    Without ``bounds`` only final deposits count.
    """

    usdc: Sequence[Tier] = ((0, CONFIRMATIONS),)
    xmr: Sequence[Tier] = ((0, CONFIRMATIONS),)
    bounds: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def drawn(cls, chance: random.Random, chains: Sequence[str]) -> Tiers:
        """Tiers that count at once what most people pay, and bounds of a few such orders."""
        each, monero = (chance.choice([200, 450, 1_000]) * USDC for _ in range(2))
        total = chance.choice([300, 700, 2_000]) * USDC
        usdc = ((0, 1), (170 * USDC, 4), (500 * USDC, _FINAL))
        xmr = ((0, 1), (XMR, 4), (5 * XMR, _FINAL))
        bounds = {**dict.fromkeys(chains, each), "monero": monero, _EVERYWHERE: total}
        return cls(usdc, xmr, bounds)

    def depth(self, network: str, units: int) -> int:
        """The blocks that deposits of ``units`` to one address wait for."""
        return next(depth for least, depth in reversed(self._of(network)) if least <= units)

    def final(self, network: str) -> int:
        """The blocks after which a deposit is final."""
        return self._of(network)[-1][1]

    def exceeded(self, sums: Mapping[str, int]) -> list[str]:
        """The bounds that sums of USDC units by network do not keep, in words."""
        found = {**sums, _EVERYWHERE: sum(sums.values())}
        return [
            f"{units} units on {network} of at most {self.bounds.get(network, 0)}"
            for network, units in found.items()
            if units > self.bounds.get(network, 0)
        ]

    def settings(self, chains: Sequence[str]) -> dict[str, object]:
        """The service's settings that say the same of these EVM chains."""
        usdc = [f"{name}={units // USDC}={depth}" for name in chains for units, depth in self.usdc]
        bounds = [f"{name}={units // USDC}" for name, units in self.bounds.items()]
        return {
            "onchain.usdc_confirmations": usdc if self.bounds else [],
            "onchain.xmr_confirmations": [f"{units // XMR}={depth}" for units, depth in self.xmr],
            "onchain.unfinal_usd": bounds,
            "onchain.finality_hours": 1,
        }  # fmt: skip

    def _of(self, network: str) -> Sequence[Tier]:
        return self.xmr if network == "monero" else self.usdc
