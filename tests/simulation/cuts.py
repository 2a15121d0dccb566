"""Systematic faults: a scenario is struck at each lasting effect, one run for each.

The settling replica is killed there. Or a copy of the database is taken, and put in place with the
journal once all is over; or deposits are taken back; or the daemons are gone for a while.

Between two effects nothing lasts: to be killed there is to be killed at the second one. Effects are
commits, lines of the payment journal, and requests by which a daemon signs, publishes or makes an
address. The answer to the last effect never comes.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple
from unittest.mock import patch

from typing_extensions import override

from rpcsvc.settlement.onchain.journal.files import PlaceWriter
from tests.simulation.daemons import NO_FAULTS
from tests.simulation.database import nothing
from tests.simulation.evm import Holding
from tests.simulation.onchain import POOR, RICH, OnchainUniverse
from tests.simulation.runs import Outcome, run_made
from tests.simulation.signers import key_of
from tests.simulation.tiers import USDC, XMR, Tiers
from tests.simulation.universe import Faults, Replica

SEED: Final = 1
_ACTING: Final = frozenset(
    {
        "eth_sendRawTransaction", "/send_raw_transaction", "relay_tx", "transfer", "sweep_single",
        "create_address",
    }
)  # fmt: skip
_ENDED: Final = ("completed", "terminal_failure")
_FINAL_ONLY: Final = Tiers()
# Of four orders that are paid at once, two count before their deposits are final.
_EARLY: Final = Tiers(
    ((0, 1), (500 * USDC, 12)),
    ((0, 1), (5 * XMR, 12)),
    {"arbitrum": 200 * USDC, "monero": 200 * USDC, "all": 300 * USDC},
)
# Wei for the fees of two payouts, and not of three.
_ETHER: Final = 5 * 10**14
_SHORT: Final = "is short of ether for gas"
# So long (s) the daemons are gone.
_GONE: Final = 40


class Scenario(NamedTuple):
    """Orders by direction and the units that are paid to each, and how many replicas run.

    Units of None: by signing. ``hot``: what the hot wallet begins with. ``withdrawn``: units that
    the operator takes out, by network. ``strike``: what happens at an effect.
    """

    orders: Sequence[tuple[str, int | None]] = ()
    replicas: int = 1
    hot: Holding = RICH
    withdrawn: Mapping[str, int] = MappingProxyType({})
    strike: Literal["kill", "copy", "rob", "leave"] = "kill"
    tiers: Tiers = _FINAL_ONLY


_USDC_IN, _XMR_IN = ("u2x", 150 * USDC), ("x2u", 8 * XMR // 10)
SCENARIOS: Final = {
    "payout-of-usdc": Scenario([_XMR_IN]),
    "payouts-of-usdc": Scenario([_XMR_IN] * 3),
    "payout-of-xmr": Scenario([_USDC_IN]),
    "refund-of-usdc": Scenario([("u2x", 60_000 * USDC)]),
    "refund-of-xmr": Scenario([("x2u", 400 * XMR)]),
    "batch": Scenario([_USDC_IN] * 3),
    "take-over": Scenario([_USDC_IN, _XMR_IN], replicas=2),
    "sweep": Scenario([("u2x", 60_000 * USDC)], hot=POOR),
    "x402": Scenario([("u2x", None)]),
    "withdrawal": Scenario(withdrawn={"arbitrum": 70 * USDC, "monero": 3 * XMR}),
    "restored-withdrawal": Scenario(
        withdrawn={"arbitrum": 70 * USDC, "monero": 3 * XMR}, strike="copy"
    ),
    "robbed-payout": Scenario([_USDC_IN, _XMR_IN], strike="rob"),
    "robbed-refund": Scenario([("u2x", 60_000 * USDC), ("x2u", 400 * XMR)], strike="rob"),
    "unanswered": Scenario([_USDC_IN, _XMR_IN], strike="leave"),
    "restored-batch": Scenario([_XMR_IN] * 3, strike="copy"),
    "little-usdc": Scenario([("x2u", 20 * XMR)] * 2, hot=POOR),
    "little-ether": Scenario([_XMR_IN] * 3, hot=Holding(_ETHER, RICH.units)),
    "early": Scenario([_USDC_IN, _XMR_IN] * 2, tiers=_EARLY),
    "restore": Scenario([_USDC_IN, _XMR_IN, ("u2x", 60_000 * USDC)], strike="copy"),
}


class CutUniverse(OnchainUniverse):
    """A universe without faults but those at the effects with the numbers in ``cuts``."""

    def __init__(self, folder: Path, scenario: Scenario, cuts: Sequence[int]) -> None:
        self._scenario = scenario
        super().__init__(SEED, folder, Faults())
        self.replicas = [Replica(self, number) for number in range(scenario.replicas)]
        self.counts["effects"] = 0
        self._cuts = cuts
        self._copy: sqlite3.Connection | None = None

    @override
    def _opening_holding(self, chance: random.Random) -> Holding:
        return self._scenario.hot

    @override
    def _tiers(self, chance: random.Random, *, is_early: bool) -> Tiers:
        return self._scenario.tiers

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
        if is_done and method == "eth_sendRawTransaction":
            self._compare_ether()
        if is_done and method in _ACTING:
            self._effect()

    def _effect(self) -> None:
        if self.server.effect is nothing:
            return
        self.counts["effects"] += 1
        if self.counts["effects"] not in self._cuts:
            return
        match self._scenario.strike:
            case "copy":
                self._copy = self.server.copy()
            case "rob":
                self.rob_planned()
            case "leave":
                self._leave()
            case "kill":
                self._kill_settler()

    def _compare_ether(self) -> None:
        """Compare with the hot wallet's ether: fees of all payments that wait to be mined."""
        hot = self.hot.lower()
        waiting = [each for each in self.nodes[0].pool.values() if each.sender == hot]
        if sum(each.gas * each.max_fee for each in waiting) > self.evm.state.get(("ether", hot)):
            self.violated(f"{len(waiting)} payments that wait count on the same ether")

    @override
    async def settled(self) -> None:
        for _ in range(5 if self._scenario.hot == POOR else 0):
            await asyncio.sleep(40)
            await self.operator.has_topped_up()
        await super().settled()

    @override
    async def check(self) -> None:
        """Note payments of the hot wallet that failed, too: here nothing else moves its money."""
        for block in self.evm.blocks:
            for each in block.mined:
                if each.made.sender == self.hot.lower() and not each.ok:
                    self.violated(f"{each.made.txid} of the hot wallet failed in its block")
        await super().check()

    @override
    async def _sickness(self, replica: Replica) -> str:
        problem = await super()._sickness(replica)
        is_short = self._scenario.hot.ether == _ETHER and problem.endswith(_SHORT)
        return "" if is_short else problem

    def _kill_settler(self) -> None:
        holder = self.server.connection.execute("SELECT holder FROM leases").fetchone()[0]
        for replica in self.replicas:
            if replica.up is not None and replica.up.lease.holder == holder:
                self.kill(replica)

    def _leave(self) -> None:
        """Have no daemon answer for a while, not even what it has done."""
        self.network.faults = NO_FAULTS._replace(unreached=1.0, lost=1.0)
        self.counts["daemons"] += 1
        self.later(_GONE, lambda: setattr(self.network, "faults", NO_FAULTS))


def cut(name: str, cuts: Sequence[int]) -> Outcome:
    """Run a scenario once, struck at these effects."""
    scenario = SCENARIOS[name]
    return run_made(lambda folder: CutUniverse(folder, scenario, cuts), len(scenario.orders))


def cut_everywhere(
    name: str, size: int = 1, jobs: int = 1
) -> Iterator[tuple[Sequence[int], Outcome]]:
    """Run a scenario once for each set of so many effects that it has, ``jobs`` runs at once.

    The run that nothing strikes comes first, with no effects.
    """
    whole = cut(name, ())
    yield (), whole
    sets = list(combinations(range(1, whole.counts["effects"] + 1), size))
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from zip(sets, pool.map(lambda cuts: cut(name, cuts), sets), strict=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
