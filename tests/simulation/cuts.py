"""Systematic crashes: a scenario is killed at each lasting effect, one run for each.

Or a copy of the database is taken there, and put in place with the journal once all is over.

Between two effects nothing lasts: to be killed there is to be killed at the second one. Effects are
commits, lines of the payment journal, and requests by which a daemon signs, publishes or makes an
address. The answer to the last effect never comes.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple
from unittest.mock import patch

from typing_extensions import override

from rpcsvc.settlement.onchain.journal.files import PlaceWriter
from tests.simulation.database import nothing
from tests.simulation.onchain import OnchainUniverse
from tests.simulation.runs import Outcome, run_made
from tests.simulation.signers import key_of
from tests.simulation.tiers import USDC, XMR
from tests.simulation.universe import Faults, Replica

SEED: Final = 1
_ACTING: Final = frozenset(
    {
        "eth_sendRawTransaction", "/send_raw_transaction", "relay_tx", "transfer", "sweep_single",
        "create_address",
    }
)  # fmt: skip
_ENDED: Final = ("completed", "terminal_failure")


class Scenario(NamedTuple):
    """Orders by direction and the units that are paid to each, and how many replicas run.

    Units of None: by signing. ``is_poor``: payments wait for sweeps. ``withdrawn``: units that the
    operator takes out, by network. ``is_restored``: an older copy of the database is put in place.
    """

    orders: Sequence[tuple[str, int | None]] = ()
    replicas: int = 1
    is_poor: bool = False
    withdrawn: Mapping[str, int] = MappingProxyType({})
    is_restored: bool = False


_USDC_IN, _XMR_IN = ("u2x", 150 * USDC), ("x2u", 8 * XMR // 10)
SCENARIOS: Final = {
    "payout-of-usdc": Scenario([_XMR_IN]),
    "payouts-of-usdc": Scenario([_XMR_IN] * 3),
    "payout-of-xmr": Scenario([_USDC_IN]),
    "refund-of-usdc": Scenario([("u2x", 60_000 * USDC)]),
    "refund-of-xmr": Scenario([("x2u", 400 * XMR)]),
    "batch": Scenario([_USDC_IN] * 3),
    "take-over": Scenario([_USDC_IN, _XMR_IN], replicas=2),
    "sweep": Scenario([("u2x", 60_000 * USDC)], is_poor=True),
    "x402": Scenario([("u2x", None)]),
    "withdrawal": Scenario(withdrawn={"arbitrum": 70 * USDC, "monero": 3 * XMR}),
    "restored-withdrawal": Scenario(
        withdrawn={"arbitrum": 70 * USDC, "monero": 3 * XMR}, is_restored=True
    ),
    "restore": Scenario([_USDC_IN, _XMR_IN, ("u2x", 60_000 * USDC)], is_restored=True),
}


class CutUniverse(OnchainUniverse):
    """A universe without faults but the kills at the effects with the numbers in ``cuts``."""

    def __init__(self, folder: Path, scenario: Scenario, cuts: Sequence[int]) -> None:
        self._scenario = scenario
        super().__init__(SEED, folder, Faults())
        self.replicas = [Replica(self, number) for number in range(scenario.replicas)]
        self.counts["effects"] = 0
        self._cuts = cuts
        self._copy: sqlite3.Connection | None = None

    @override
    def _is_poor(self, chance: random.Random) -> bool:
        return self._scenario.is_poor

    @override
    def _signs(self, number: int) -> bool:
        return self._scenario.orders[number][1] is None

    @override
    def run(self, orders: int) -> None:
        append = PlaceWriter.append

        def appended(writer: PlaceWriter, data: bytes) -> None:
            append(writer, data)
            self._effect()

        with patch.object(PlaceWriter, "append", appended):
            super().run(orders)

    @override
    async def story(self, orders: int) -> None:
        await self.begin()
        for replica in self.replicas:
            replica.start()
        placed = [
            await self.place(number, direction, random.Random(f"{number}"))
            for number, (direction, _) in enumerate(self._scenario.orders)
        ]
        self.server.effect = self._effect
        self.network.watch = self._acted
        for order, (_, units) in zip(placed, self._scenario.orders, strict=True):
            if units is None:
                key = key_of(SEED, order.number)
                await self.signers.pay(order.order_id, key, random.Random(SEED))
            else:
                await self.send(order, units)
        for network, units in self._scenario.withdrawn.items():
            await self.operator.take(network, units)
        await self.settled()
        if self._copy is not None:
            self.operator.has_restored = True
            self.restore(self._copy)
            await self.settled()
        if not set((await self.states()).values()) <= set(_ENDED):
            await self.recover()
        self.server.effect = nothing
        self.calm()
        await self.check()

    def _acted(self, method: str, is_done: bool) -> None:
        if is_done and method in _ACTING:
            self._effect()

    def _effect(self) -> None:
        if self.server.effect is nothing:
            return
        self.counts["effects"] += 1
        if self.counts["effects"] not in self._cuts:
            return
        if self._scenario.is_restored:
            self._copy = self.server.copy()
        else:
            holder = self.server.connection.execute("SELECT holder FROM leases").fetchone()[0]
            for replica in self.replicas:
                if replica.up is not None and replica.up.lease.holder == holder:
                    self.kill(replica)


def cut(name: str, cuts: Sequence[int]) -> Outcome:
    """Run a scenario once, killed at these effects."""
    scenario = SCENARIOS[name]
    return run_made(lambda folder: CutUniverse(folder, scenario, cuts), len(scenario.orders))


def cut_everywhere(name: str, size: int = 1) -> Iterator[tuple[Sequence[int], Outcome]]:
    """Run a scenario once for each set of so many effects that it has, two runs at once.

    The run that nothing strikes comes first, with no effects.
    """
    whole = cut(name, ())
    yield (), whole
    sets = list(combinations(range(1, whole.counts["effects"] + 1), size))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from zip(sets, pool.map(lambda cuts: cut(name, cuts), sets), strict=True)
