"""USDC deposits on a simulated chain with random forks, lagging nodes and restarts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm import deposits as evm_deposits
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.unit.evm_chain import (
    CONFIRMED,
    HOT,
    OURS,
    SEEN,
    STRANGER,
    USER,
    Event,
    Reader,
    digest,
    pays,
)


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Reader]:
    database = await SqliteDatabase.open(tmp_path)
    ledger = EvmDepositLedger(database)
    await ledger.adopt_wallet(HOT)
    await ledger.add_addresses(OURS)
    made = Reader(ledger)
    made.chain.mine(count=50)
    assert await made.poll() == {}
    yield made
    await database.close()


class RandomChain:
    """Blocks, payments, forks, lagging nodes, restarts and lost acknowledgements, at random."""

    def __init__(self, reader: Reader, seed: int) -> None:
        self.reader = reader
        self.dice = random.Random(seed)
        self.lost: list[tuple[str, list[Event]]] = []
        self.made = 0

    def payments(self) -> Iterator[tuple[str, list[Event]]]:
        for _ in range(self.dice.choice([0, 0, 1, 1, 2])):
            self.made += 1
            units = [self.dice.randint(1, 9) for _ in range(self.dice.randint(1, 3))]
            yield f"tx{self.made}", pays(*units, to=self.dice.randrange(20))
        if self.lost and self.dice.random() < 0.5:
            yield self.lost.pop(self.dice.randrange(len(self.lost)))

    def advance(self) -> None:
        chain, dice = self.reader.chain, self.dice
        if dice.random() < 0.25:
            depth = dice.randint(1, 12)
            number = max(45, len(chain.blocks) - depth)
            height = len(chain.blocks)
            self.lost += chain.replace_from(number, salt=dice.randint(1, 10**9))
            # A fork becomes longer than the replaced branch, sooner or later.
            for _ in range(dice.randint(0, height - len(chain.blocks) + 1)):
                chain.mine(*self.payments())
        for _ in range(dice.randint(0, 4)):
            chain.mine(*self.payments())
        chain.lag, chain.blind = dice.choice([0, 0, 0, 1, 2]), dice.choice([0, 0, 0, 1, 2])

    async def poll(self) -> None:
        if self.dice.random() < 0.2:
            self.reader.restart()
        with suppress(Unavailable):  # the fork is still too short
            await self.reader.poll(acknowledge=self.dice.random() < 0.8)

    async def settle(self) -> None:
        self.reader.chain.lag = self.reader.chain.blind = 0
        self.reader.chain.mine(count=40)
        for _ in range(30):
            await self.reader.poll()


async def test_ranges_below_the_reread_depth_still_make_progress(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evm_deposits, "WIDEST_LOG_RANGE", 1)
    monkeypatch.setattr(evm_deposits, "_RANGES_PER_PASS", 1)
    reader.restart()
    reader.chain.mine(("a", pays(5)), count=5)
    shown: list[DepositState] = []
    for _ in range(5):
        shown += (await reader.poll()).values()
    assert shown == [SEEN]


async def test_full_ranges_shrink_and_then_grow_again(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evm_deposits, "_MANY_EVENTS", 10)
    reader.chain.mine(*[(f"tx{n}", [(USER, STRANGER, 1)]) for n in range(11)], count=40)
    await reader.poll()
    crowded = reader.scanner._span
    reader.chain.mine(count=200)
    await reader.poll()
    assert (crowded, reader.scanner._span) == (21, 160)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 40))]
)
async def test_known_deposits_match_the_chain_after_random_forks(
    reader: Reader, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr(evm_deposits, "WIDEST_LOG_RANGE", 2)
        monkeypatch.setattr(evm_deposits, "_RANGES_PER_PASS", 3)
        reader.restart()
    chain = RandomChain(reader, seed)
    for _ in range(60):
        chain.advance()
        await chain.poll()
    await chain.settle()
    held = {item.key: item.units for item in reader.book.values() if item.state is CONFIRMED}
    events = [
        (DepositKey("arbitrum", digest(name), position), units)
        for block in reader.chain.blocks
        for name, paid in block
        for position, (_, _, units) in enumerate(paid)
    ]
    assert held == dict(events)
    assert len(events) == len(held) > 30
    assert all(item.state is not SEEN for item in reader.book.values())
