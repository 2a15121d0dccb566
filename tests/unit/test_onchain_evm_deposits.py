"""Deposits of USDC without a node: the scanner over a made-up chain."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rpcsvc.domain.order import DepositKey
from rpcsvc.errors import Unavailable
from rpcsvc.store.onchain_evm_deposits import SqliteEvmDepositLedger
from rpcsvc.store.sqlite import Database
from tests.unit.evm_chain import (
    CONFIRMED,
    GENESIS_SECONDS,
    HOT,
    NOBODY,
    OURS,
    REMOVED,
    SEEN,
    STRANGER,
    USER,
    Event,
    Reader,
    digest,
    key,
    pays,
)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
async def ledger(database: Database) -> SqliteEvmDepositLedger:
    made = SqliteEvmDepositLedger(database)
    await made.adopt_wallet(HOT)
    await made.add_addresses(OURS)
    return made


@pytest.fixture
async def reader(ledger: SqliteEvmDepositLedger) -> Reader:
    made = Reader(ledger)
    made.chain.mine(count=50)
    assert await made.look() == {}
    return made


# --- what is a deposit -------------------------------------------------------------------------


async def test_a_transfer_is_seen_and_then_confirmed(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    assert await reader.look() == {key("a"): SEEN}
    assert reader.scanner.confirmations(key("a")) == 1
    reader.chain.mine()
    assert await reader.look() == {}
    reader.chain.mine()
    assert await reader.look() == {key("a"): CONFIRMED}
    assert reader.scanner.confirmations(key("a")) == 3
    sighting = reader.book[key("a")]
    assert (sighting.address, sighting.units, sighting.sender) == (OURS[0].address, 5, USER)
    assert sighting.first_seen_at == (GENESIS_SECONDS + 10 * number) * 1000
    assert await reader.look() == {}


async def test_a_clock_that_is_behind_the_block_counts_for_the_first_sight(reader: Reader) -> None:
    reader.clock.now = 777
    reader.chain.mine(("a", pays(5)))
    await reader.look()
    assert reader.book[key("a")].first_seen_at == 777


async def test_each_event_of_a_transaction_is_a_deposit_by_its_place(reader: Reader) -> None:
    events = [
        (USER, STRANGER, 9), *pays(1, 2), ("other", OURS[0].address, 8), *pays(3, to=4),
    ]  # fmt: skip
    reader.chain.mine(("before", [(USER, STRANGER, 1)]), ("a", events))
    await reader.look()
    assert {(item.key.output_index, item.address, item.units) for item in reader.book.values()} == {
        (1, OURS[0].address, 1), (2, OURS[0].address, 2), (4, OURS[4].address, 3),
    }  # fmt: skip
    assert reader.chain.asked.count("receipt") == 1


@pytest.mark.parametrize(
    "event",
    [
        (USER, OURS[0].address, 0), (HOT, OURS[0].address, 5),
        (OURS[1].address, OURS[0].address, 5),
        (USER, STRANGER, 5), (USER, HOT, 5), (USER, OURS[0].address, 2**63),
        ("other", OURS[0].address, 5),
    ],
)  # fmt: skip
async def test_what_is_not_a_users_payment_is_ignored(reader: Reader, event: Event) -> None:
    reader.chain.mine(("a", [event]))
    assert await reader.look() == {}
    reader.chain.mine(("b", [event, *pays(7)]))
    assert await reader.look() == {key("b", 1): SEEN}


async def test_the_largest_amount_that_fits_is_a_deposit(reader: Reader) -> None:
    reader.chain.mine(("a", pays(2**63 - 1)))
    assert await reader.look() == {key("a"): SEEN}
    assert reader.ledger.deposit(key("a")).units == 2**63 - 1  # type: ignore[union-attr]


async def test_minted_tokens_have_no_sender_to_send_them_back_to(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5, sender=NOBODY)))
    await reader.look()
    assert reader.book[key("a")].sender is None


async def test_without_a_number_of_confirmations_the_finalized_block_decides(
    ledger: SqliteEvmDepositLedger,
) -> None:
    reader = Reader(ledger, confirmations=None)
    reader.chain.mine(count=5)
    await reader.look()
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=30)
    reader.chain.finalized = number - 1
    assert await reader.look() == {key("a"): SEEN}
    reader.chain.finalized = number
    assert await reader.look() == {key("a"): CONFIRMED}


# --- blocks that are replaced --------------------------------------------------------------------


async def test_a_deposit_that_moves_to_another_block_counts_from_there(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    assert await reader.look() == {key("a"): CONFIRMED}
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=4)
    moved = reader.chain.mine(("first", [(USER, STRANGER, 1)]), again)
    assert await reader.look() == {key("a"): SEEN}
    stored = reader.ledger.deposit(key("a"))
    assert stored is not None
    assert (stored.block_number, stored.block_hash) == (moved, reader.chain.hash_of(moved))
    reader.chain.mine(count=2)
    assert await reader.look() == {key("a"): CONFIRMED}


async def test_a_deposit_that_is_gone_is_shown_once_and_again_when_it_comes_back(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    await reader.look()
    reader.clock.now += 10**7
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=4)
    assert await reader.look() == {key("a"): REMOVED}
    assert reader.scanner.confirmations(key("a")) == 0
    assert await reader.look() == {}
    reader.chain.mine(count=100)
    assert await reader.look() == {}
    reader.chain.mine(again)
    assert await reader.look() == {key("a"): SEEN}
    reader.chain.mine(count=2)
    assert await reader.look() == {key("a"): CONFIRMED}


async def test_a_removal_that_was_not_acknowledged_is_shown_again_after_a_restart(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    await reader.look(acknowledge=False)
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine()
    for _ in range(3):
        reader.restart()
        assert await reader.look(acknowledge=False) == {key("a"): REMOVED}
    assert await reader.look() == {key("a"): REMOVED}
    assert await reader.look() == {}


async def test_a_removal_that_one_order_refuses_is_shown_while_the_cursor_moves_on(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    await reader.look()
    reader.chain.replace_from(number, salt=1)
    for _ in range(5):
        reader.chain.mine(count=3)
        assert [item.state for item in await reader.scanner.observe()] == [REMOVED]
        await reader.scanner.acknowledge([])


async def test_a_transaction_that_pays_otherwise_in_another_block_is_not_credited(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(500, 6)))
    await reader.look()
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine(("a", pays(5, 6)))
    assert await reader.look() == {key("a"): REMOVED}
    reader.chain.mine(count=5)
    assert await reader.look() == {key("a", 1): CONFIRMED}


async def test_a_place_that_changes_makes_another_deposit(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    await reader.look()
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine(("a", [(USER, STRANGER, 1), *pays(5)]))
    assert await reader.look() == {key("a"): REMOVED, key("a", 1): SEEN}


async def test_a_confirmed_deposit_is_let_go_of_when_it_is_deep_and_found_in_a_deeper_fork(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    await reader.look()
    for _ in range(45):
        reader.chain.mine()
        await reader.look()
    stored = reader.ledger.deposit(key("a"))
    assert stored is not None
    assert not stored.watched
    assert reader.ledger.deposits_to_watch("arbitrum", number) == []
    # The oldest block that is kept is 40 deep or more.
    reader.chain.replace_from(number + 8, salt=1)
    reader.chain.mine(count=60)
    assert await reader.look() == {}
    assert reader.scanner.confirmations(key("a")) > 60


async def test_a_chain_that_has_none_of_the_recorded_blocks_is_refused(reader: Reader) -> None:
    reader.chain.replace_from(0, salt=1)
    reader.chain.mine(count=300)
    with pytest.raises(Unavailable):
        await reader.look()
    assert reader.link.problem is not None
    assert "another chain" in reader.link.problem


# --- nodes that are late ---------------------------------------------------------------------


async def test_a_node_that_is_a_little_late_removes_nothing(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5)), count=3)
    assert await reader.look() == {key("a"): SEEN}
    reader.chain.lag = 2
    assert await reader.look() == {}
    reader.chain.lag = 0
    reader.chain.mine(count=2)
    assert await reader.look() == {key("a"): CONFIRMED}


async def test_a_node_that_is_far_behind_is_reported(reader: Reader) -> None:
    reader.chain.mine(count=20)
    await reader.look()
    reader.chain.lag = 15
    with pytest.raises(Unavailable):
        await reader.look()
    assert "lacks the newest 15 blocks" in str(reader.link.problem)
    reader.chain.lag = 0
    assert await reader.look() == {}
    assert reader.link.problem is None


async def test_events_that_a_late_node_did_not_give_are_found_by_the_next_pass(
    reader: Reader,
) -> None:
    reader.chain.mine(("a", pays(5)))
    reader.chain.blind = 2
    assert await reader.look() == {}
    reader.chain.blind = 0
    reader.chain.mine()
    assert await reader.look() == {key("a"): SEEN}


# --- what it costs ---------------------------------------------------------------------------


async def test_a_long_absence_is_made_up_for_in_several_passes(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader.scanner, "_span", 5)
    names = [f"tx{n}" for n in range(60)]
    for name in names:
        reader.chain.mine((name, pays(1)), count=3)
    passes = 0
    while reader.ledger.cursors("arbitrum")[0].number < reader.chain.head:
        await reader.look()
        passes += 1
    assert passes > 2
    assert reader.book.keys() == {key(name) for name in names}


async def test_a_block_without_deposits_costs_the_same_however_much_is_watched(
    reader: Reader,
) -> None:
    async def cost() -> list[str]:
        reader.chain.mine(("other", [(USER, STRANGER, 1)]))
        await reader.look()
        reader.chain.asked.clear()
        reader.chain.mine(("more", [(USER, STRANGER, 1)]))
        await reader.look()
        return list(reader.chain.asked)

    before = await cost()
    reader.chain.mine(*[(f"tx{n}", pays(1, to=n % 20)) for n in range(100)])
    await reader.look()
    for _ in range(4):
        await cost()
    assert await cost() == before == ["block", "logs"]


async def test_a_pass_without_a_new_block_costs_one_call(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5)))
    await reader.look()
    reader.chain.asked.clear()
    await reader.look()
    assert reader.chain.asked == ["block"]


# --- at random -------------------------------------------------------------------------------


class Storm:
    """Blocks, payments, forks, late nodes, restarts and lost acknowledgements, in any order."""

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

    def blow(self) -> None:
        chain, dice = self.reader.chain, self.dice
        if dice.random() < 0.25:
            depth = dice.randint(1, 12)
            number = max(45, len(chain.blocks) - depth)
            height = len(chain.blocks)
            self.lost += chain.replace_from(number, salt=dice.randint(1, 10**9))
            # A fork is longer than what it replaces, sooner or later.
            for _ in range(dice.randint(0, height - len(chain.blocks) + 1)):
                chain.mine(*self.payments())
        for _ in range(dice.randint(0, 4)):
            chain.mine(*self.payments())
        chain.lag, chain.blind = dice.choice([0, 0, 0, 1, 2]), dice.choice([0, 0, 0, 1, 2])

    async def pass_(self) -> None:
        if self.dice.random() < 0.2:
            self.reader.restart()
        with suppress(Unavailable):  # the fork is too short as yet
            await self.reader.look(acknowledge=self.dice.random() < 0.8)

    async def calm(self) -> None:
        self.reader.chain.lag = self.reader.chain.blind = 0
        self.reader.chain.mine(count=40)
        for _ in range(3):
            await self.reader.look()


@pytest.mark.parametrize("seed", range(12))
async def test_after_any_weather_the_books_are_what_the_chain_is(reader: Reader, seed: int) -> None:
    storm = Storm(reader, seed)
    for _ in range(60):
        storm.blow()
        await storm.pass_()
    await storm.calm()
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
