"""Deposits of USDC without a node: the scanner on a simulated chain."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import BadAnswer, ChainUnusable
from rpcsvc.settlement.onchain.evm import deposits as evm_deposits
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node_types import Block, LogFilter, LogRange, Receipt, Tag
from rpcsvc.settlement.onchain.evm.records import BlockPoint
from rpcsvc.settlement.onchain.evm.scan import NotReread, reread
from rpcsvc.settlement.onchain.thresholds import DepthTag, Threshold
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
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
    key,
    pays,
    txid_of,
)


@pytest.fixture
async def ledger(database: SqliteDatabase) -> EvmDepositLedger:
    made = EvmDepositLedger(database)
    await made.adopt_wallet(HOT)
    await made.add_addresses(OURS)
    return made


@pytest.fixture
async def reader(ledger: EvmDepositLedger) -> Reader:
    made = Reader(ledger)
    made.chain.mine(count=50)
    assert await made.poll() == {}
    return made


# --- which events are deposits -----------------------------------------------------------------


async def test_a_transfer_is_seen_and_then_confirmed(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    assert await reader.poll() == {key("a"): SEEN}
    assert await reader.scanner.confirmations(key("a")) == 1
    reader.chain.mine()
    assert await reader.poll() == {}
    reader.chain.mine()
    assert await reader.poll() == {key("a"): CONFIRMED}
    assert await reader.scanner.confirmations(key("a")) == 3
    sighting = reader.book[key("a")]
    assert (sighting.address, sighting.units, sighting.sender) == (OURS[0].address, 5, USER)
    assert sighting.first_seen_at == (GENESIS_SECONDS + 10 * number) * 1000
    assert await reader.poll() == {}


async def test_clock_behind_the_block_gives_the_first_seen_time(reader: Reader) -> None:
    reader.clock.now = 777
    reader.chain.mine(("a", pays(5)))
    await reader.poll()
    assert reader.book[key("a")].first_seen_at == 777


async def test_each_event_of_a_transaction_is_a_deposit_by_its_place(reader: Reader) -> None:
    events = [
        (USER, STRANGER, 9), *pays(1, 2), ("other", OURS[0].address, 8), *pays(3, to=4),
    ]  # fmt: skip
    reader.chain.mine(("before", [(USER, STRANGER, 1)]), ("a", events))
    await reader.poll()
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
    assert await reader.poll() == {}
    reader.chain.mine(("b", [event, *pays(7)]))
    assert await reader.poll() == {key("b", 1): SEEN}


async def test_the_largest_amount_that_fits_is_a_deposit(reader: Reader) -> None:
    reader.chain.mine(("a", pays(2**63 - 1)))
    assert await reader.poll() == {key("a"): SEEN}
    assert (await reader.ledger.deposit(key("a"))).units == 2**63 - 1  # type: ignore[union-attr]


async def test_minted_tokens_have_no_sender_to_send_them_back_to(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5, sender=NOBODY)))
    await reader.poll()
    assert reader.book[key("a")].sender is None


async def test_finalized_block_decides_without_a_confirmation_count(
    ledger: EvmDepositLedger,
) -> None:
    reader = Reader(ledger, thresholds=(Threshold(0, DepthTag.FINALIZED),))
    reader.chain.mine(count=5)
    await reader.poll()
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=30)
    reader.chain.finalized = number - 1
    assert await reader.poll() == {key("a"): SEEN}
    reader.chain.finalized = number
    assert await reader.poll() == {key("a"): CONFIRMED}


TIERS = (Threshold(0, 1), Threshold(500, 4), Threshold(5_000, 8))


@pytest.mark.parametrize(
    ("units", "blocks"), [(499, 1), (500, 4), (4_999, 4), (5_000, 8), (9_000, 8)]
)
async def test_larger_deposit_waits_for_more_blocks(
    ledger: EvmDepositLedger, units: int, blocks: int
) -> None:
    reader = Reader(ledger, thresholds=TIERS)
    await reader.poll()
    reader.chain.mine(("a", pays(units)))
    for depth in range(1, blocks):
        assert (await reader.poll()).get(key("a")) is (SEEN if depth == 1 else None)
        reader.chain.mine()
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_deposits_to_one_address_count_as_one(ledger: EvmDepositLedger) -> None:
    reader = Reader(ledger, thresholds=TIERS)
    await reader.poll()
    reader.chain.mine(("a", pays(300)), ("other", pays(300, to=1)))
    reader.chain.mine(("b", pays(300)))
    # The first one has two blocks; both together ask for four. The other address asks for one.
    found = {key("a"): SEEN, key("b"): SEEN, key("other"): CONFIRMED}
    assert await reader.poll() == found
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_confirmed_deposit_is_final_at_the_last_threshold(ledger: EvmDepositLedger) -> None:
    reader = Reader(ledger, thresholds=TIERS)
    await reader.poll()
    reader.chain.mine(("a", pays(5)))
    assert await reader.poll() == {key("a"): CONFIRMED}
    for _ in range(6):
        reader.chain.mine()
        assert await reader.poll() == {}
        assert not await reader.scanner.is_final(key("a"))
    reader.chain.mine()
    assert not await reader.scanner.is_final(key("a")), "not before a scan has seen the block"
    await reader.poll()
    assert await reader.scanner.is_final(key("a"))
    assert not await reader.scanner.is_final(key("nowhere"))


@pytest.mark.parametrize("final", [8, DepthTag.FINALIZED])
@pytest.mark.parametrize("is_listed", [True, False])
async def test_deposit_off_the_chain_is_never_final(
    ledger: EvmDepositLedger, final: int | DepthTag, *, is_listed: bool
) -> None:
    reader = Reader(ledger, thresholds=(Threshold(0, 1), Threshold(500, final)))
    reader.chain.mine(count=50)
    await reader.poll()
    number = reader.chain.mine(("a", pays(5)))
    assert await reader.poll() == {key("a"): CONFIRMED}
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=10)
    reader.chain.finalized = number + 1
    if is_listed:
        reader.chain.missing = {number}
    else:
        reader.chain.behind = 15  # of several nodes behind one address, the one that lists lags
    assert await reader.poll() == {}
    assert not await reader.scanner.is_final(key("a"))
    reader.chain.behind, reader.chain.missing = 0, set()
    found = [await reader.poll() for _ in range(3)]
    assert {key("a"): REMOVED} in found
    assert not await reader.scanner.is_final(key("a"))


async def test_deposit_above_a_fork_read_in_part_has_no_depth(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=3)
    assert await reader.poll() == {key("a"): CONFIRMED}
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=10)
    reader.chain.behind = 15  # of several nodes behind one address, the one that lists lags
    assert await reader.poll() == {}
    assert await reader.scanner.confirmations(key("a")) == 0


@pytest.mark.parametrize("is_restarted", [True, False])
async def test_late_answer_of_a_fork_leaves_no_depth(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, *, is_restarted: bool
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    newest = reader.chain.mine(count=3)
    assert await reader.poll() == {key("a"): CONFIRMED}
    before, block = await reader.chain.block(newest), reader.chain.block
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=20)
    if is_restarted:
        reader.restart()

    async def of_several(at: Any = Tag.LATEST) -> Block | None:
        return before if at == newest else await block(at)

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "block", of_several)
        for _ in range(3):
            assert await reader.poll() == {}
            assert await reader.scanner.confirmations(key("a")) == 0
            reader.chain.mine()
    assert {key("a"): REMOVED} in [await reader.poll() for _ in range(2)]


async def test_late_receipt_of_a_replaced_block_leaves_no_depth(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=3)
    assert await reader.poll() == {key("a"): CONFIRMED}
    before, block = await reader.chain.block(number), reader.chain.block
    receipt = await reader.chain.receipt(txid_of("a"))
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=20)

    async def of_several(at: Any = Tag.LATEST) -> Block | None:
        return before if at == number else await block(at)

    async def receipt_of_several(_: str) -> Receipt | None:
        return receipt

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "block", of_several)
        patch.setattr(reader.chain, "receipt", receipt_of_several)
        for _ in range(3):
            assert await reader.poll() == {}
            assert await reader.scanner.confirmations(key("a")) == 0
    assert {key("a"): REMOVED} in [await reader.poll() for _ in range(2)]


async def test_blocks_that_no_node_lists_give_no_depth(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=3)
    await reader.poll()
    reader.chain.mine(count=5)
    reader.chain.behind = 9
    await reader.poll()
    assert await reader.scanner.confirmations(key("a")) == 4
    reader.chain.behind = 0
    await reader.poll()
    assert await reader.scanner.confirmations(key("a")) == 9


async def test_node_without_the_newest_block_gives_no_depth(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may have kept the branch that was read last, and the others not."""
    reader.chain.mine(("a", pays(5)))
    newest = reader.chain.mine(count=3)
    await reader.poll()
    reader.chain.mine(count=5)
    reader.restart()

    async def of_late(_: LogFilter, first: int, last: int, *_after: Any) -> LogRange:
        return LogRange(first, last, (), BlockPoint(newest, reader.chain.hash_of(newest)))

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "logs", of_late)
        await reader.poll()
        assert await reader.scanner.confirmations(key("a")) == 0
    await reader.poll()
    assert await reader.scanner.confirmations(key("a")) == 9


async def test_node_with_another_block_than_the_cursor_has_no_say(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    newest = reader.chain.mine(count=3)
    await reader.poll()
    before, block = await reader.chain.block(newest), reader.chain.block
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=3)

    async def of_several(at: Any = Tag.LATEST) -> Block | None:
        return before if at == newest else await block(at)

    monkeypatch.setattr(reader.chain, "block", of_several)
    await reader.poll()
    assert await reader.scanner.confirmations(key("a")) == 0


async def test_scan_that_fails_above_a_fork_leaves_no_depth(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> LogRange:
        raise BadAnswer("node", "eth_getLogs", "the answer is not a list")

    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=3)
    assert await reader.poll() == {key("a"): CONFIRMED}
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=10)
    monkeypatch.setattr(reader.chain, "logs", fails)
    with pytest.raises(Unavailable):
        await reader.poll()
    assert await reader.scanner.confirmations(key("a")) == 0


async def test_replica_that_scans_nothing_tells_the_depth_on_record(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=3)
    await reader.poll()
    replica = Reader(reader.ledger)
    assert await replica.scanner.confirmations(key("a"), number + 3) == 4
    assert await replica.scanner.confirmations(key("a")) == 0, "nothing is signed there"


async def test_tagged_deposit_is_watched_until_it_is_final(ledger: EvmDepositLedger) -> None:
    tiers = (Threshold(0, 1), Threshold(500, DepthTag.SAFE), Threshold(900, DepthTag.FINALIZED))
    reader = Reader(ledger, thresholds=tiers)
    await reader.poll()
    number = reader.chain.mine(("a", pays(5)), ("b", pays(600, to=1)))
    assert await reader.poll() == {key("a"): CONFIRMED, key("b"): SEEN}
    # Longer than the scan looks back.
    reader.chain.mine(count=100)
    reader.chain.safe = number
    assert await reader.poll() == {key("b"): CONFIRMED}
    assert await reader.poll() == {}
    assert not await reader.scanner.is_final(key("a"))
    reader.chain.finalized = number
    await reader.poll()
    assert await reader.scanner.is_final(key("a"))
    assert await reader.scanner.is_final(key("b"))


# --- blocks that are replaced --------------------------------------------------------------------


async def test_a_deposit_that_moves_to_another_block_counts_from_there(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=4)
    moved = reader.chain.mine(("first", [(USER, STRANGER, 1)]), again)
    assert await reader.poll() == {key("a"): SEEN}
    stored = await reader.ledger.deposit(key("a"))
    assert stored is not None
    assert (stored.block_number, stored.block_hash) == (moved, reader.chain.hash_of(moved))
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_lost_deposit_is_shown_once_and_again_when_it_returns(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    await reader.poll()
    reader.clock.now += 10**7
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=4)
    assert await reader.poll() == {}
    assert await reader.scanner.confirmations(key("a")) == 0, "nothing is paid out for it"
    assert await reader.poll() == {key("a"): REMOVED}
    assert await reader.scanner.confirmations(key("a")) == 0
    assert await reader.poll() == {}
    reader.chain.mine(count=100)
    assert await reader.poll() == {}
    assert not reader.scanner.is_quiet, "it may come back"
    reader.clock.now += 60_000
    assert await reader.poll() == {}
    assert reader.scanner.is_quiet
    assert await reader.poll() == {}
    reader.chain.mine(again)
    assert await reader.poll() == {key("a"): SEEN}
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_one_missing_receipt_removes_no_deposit(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deposit's block was replaced; the node that answers next lacks the new one."""
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(again, count=2)
    reader.chain.mine(count=2)
    before = await reader.ledger.cursors("arbitrum")

    async def late(_: str) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "receipt", late)
        patch.setattr(reader.chain, "blind", 9)
        assert await reader.poll() == {}
    assert await reader.ledger.cursors("arbitrum") == before
    assert await reader.scanner.confirmations(key("a")) == 0, "nothing is paid out for it"
    assert reader.scanner.complete_until is None
    assert await reader.poll() == {}
    stored = await reader.ledger.deposit(key("a"))
    assert stored is not None
    assert stored.block_hash == reader.chain.hash_of(number + 2)
    assert await reader.scanner.confirmations(key("a")) == 3


async def test_unacknowledged_confirmation_survives_a_late_receipt(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    assert await reader.poll(acknowledge=False) == {key("a"): CONFIRMED}
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=4)
    assert await reader.poll(acknowledge=False) == {}, "shown as seen, it would be undone"
    reader.chain.mine(again, count=1)
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_blocks_replaced_while_they_are_read_are_read_again(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pass catches up, in more blocks than each pass reads again."""
    monkeypatch.setattr(evm_deposits, "WIDEST_LOG_RANGE", 5)
    reader.restart()
    reader.chain.mine(count=60)
    real, asked = reader.chain.logs, 0

    async def replacing(wanted: LogFilter, first: int, last: int, *after: Any) -> LogRange:
        nonlocal asked
        asked += 1
        found = await real(wanted, first, last, *after)
        if asked == 8:
            height = len(reader.chain.blocks)
            reader.chain.replace_from(last - 12, salt=1)
            reader.chain.mine(("a", pays(5)))
            reader.chain.mine(count=height - len(reader.chain.blocks))
        return found

    monkeypatch.setattr(reader.chain, "logs", replacing)
    for _ in range(4):
        await reader.poll()
    assert reader.book.keys() == {key("a")}


async def test_restart_settles_no_deposit_before_removals_are_recorded(
    reader: Reader, ledger: EvmDepositLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=5)
    assert await reader.poll() == {key("a"): CONFIRMED}
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=10)
    reader.restart()
    depths = []
    put = ledger.put_deposits

    async def looked_at(changed: Any) -> None:
        depths.append(await reader.scanner.confirmations(key("a")))
        await put(changed)
        depths.append(await reader.scanner.confirmations(key("a")))

    monkeypatch.setattr(ledger, "put_deposits", looked_at)
    assert await reader.poll() == {}
    depths.append(await reader.scanner.confirmations(key("a")))
    assert await reader.poll() == {key("a"): REMOVED}
    assert depths == [0, 0, 0]


async def test_unacknowledged_removal_reappears_after_a_restart(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    await reader.poll(acknowledge=False)
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine()
    for _ in range(2):
        await reader.poll(acknowledge=False)
    for _ in range(3):
        reader.restart()
        assert await reader.poll(acknowledge=False) == {key("a"): REMOVED}
    assert await reader.poll() == {key("a"): REMOVED}
    assert await reader.poll() == {}


async def test_refused_removal_is_repeated_while_the_cursor_moves(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    await reader.poll()
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine()
    await reader.poll()
    for _ in range(5):
        reader.chain.mine(count=3)
        assert [item.state for item in await reader.scanner.observe()] == [REMOVED]
        await reader.scanner.acknowledge([])


async def test_transaction_that_pays_otherwise_when_remined_is_void(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(500, 6)))
    await reader.poll()
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine(("a", pays(5, 6)))
    assert await reader.poll() == {key("a"): REMOVED}
    reader.chain.mine(count=5)
    assert await reader.poll() == {key("a", 1): CONFIRMED}


async def test_written_off_deposit_stays_so_when_its_sibling_is_read(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(500, 6)))
    await reader.poll()
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine(("a", pays(5, 6)))
    assert await reader.poll() == {key("a"): REMOVED}
    assert await reader.poll() == {}
    reader.chain.replace_from(number, salt=2)
    reader.chain.mine(("a", pays(5, 6)), count=3)
    assert await reader.poll() == {}
    written_off, neighbour = (
        await reader.ledger.deposit(key("a")),
        await reader.ledger.deposit(key("a", 1)),
    )
    assert written_off is not None
    assert neighbour is not None
    assert (written_off.block_number, neighbour.block_number) == (None, number + 3)


async def test_a_place_that_changes_makes_another_deposit(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    await reader.poll()
    reader.chain.replace_from(number, salt=1)
    reader.chain.mine(("a", [(USER, STRANGER, 1), *pays(5)]))
    assert await reader.poll() == {key("a"): REMOVED, key("a", 1): SEEN}


async def test_deep_deposit_is_released_and_found_in_a_deeper_fork(
    reader: Reader,
) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    await reader.poll()
    for _ in range(45):
        reader.chain.mine()
        await reader.poll()
    stored = await reader.ledger.deposit(key("a"))
    assert stored is not None
    assert not stored.watched
    assert await reader.ledger.deposits_to_watch("arbitrum", number) == []
    # The oldest block that is kept is 40 deep or more.
    reader.chain.replace_from(number + 8, salt=1)
    reader.chain.mine(count=60)
    assert await reader.poll() == {}
    assert await reader.scanner.confirmations(key("a")) > 60


async def test_a_chain_that_has_none_of_the_recorded_blocks_is_refused(reader: Reader) -> None:
    reader.chain.replace_from(0, salt=1)
    reader.chain.mine(count=300)
    with pytest.raises(Unavailable):
        await reader.poll()
    assert "another chain" in str(reader.scanner.problem)
    await reader.connection.check()
    assert reader.connection.problem is None
    assert "another chain" in str(reader.scanner.problem)


# --- lagging nodes ---------------------------------------------------------------------------


async def test_a_node_that_is_a_little_late_removes_nothing(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5)), count=3)
    assert await reader.poll() == {key("a"): SEEN}
    reader.chain.lag = 2
    assert await reader.poll() == {}
    reader.chain.lag = 0
    reader.chain.mine(count=2)
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_a_node_that_is_far_behind_is_reported(reader: Reader) -> None:
    reader.chain.mine(count=20)
    await reader.poll()
    reader.chain.lag = 15
    with pytest.raises(Unavailable):
        await reader.poll()
    assert "lacks the newest 15 blocks" in str(reader.connection.problem)
    reader.chain.lag = 0
    assert await reader.poll() == {}
    assert (reader.connection.problem, reader.scanner.problem) == (None, None)


async def test_events_missed_by_a_late_node_are_found_next_pass(
    reader: Reader,
) -> None:
    reader.chain.mine(("a", pays(5)))
    reader.chain.blind = 2
    assert await reader.poll() == {}
    reader.chain.blind = 0
    reader.chain.mine()
    assert await reader.poll() == {key("a"): SEEN}


async def test_no_deposit_is_passed_over_while_the_listing_node_lags(reader: Reader) -> None:
    """More blocks than each pass reads again: another node behind the same name has them all."""
    await reader.poll()
    reader.chain.behind = 20
    reader.chain.mine(("a", pays(5)))
    for _ in range(10):
        reader.chain.mine()
        assert await reader.poll() == {}
        assert reader.scanner.complete_until is None
    reader.chain.behind = 0
    assert await reader.poll() == {key("a"): CONFIRMED}
    assert reader.scanner.complete_until is not None


async def test_blocks_that_the_listing_node_has_count_as_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evm_deposits, "WIDEST_LOG_RANGE", 5)
    reader.restart()
    await reader.poll()
    reader.chain.mine(count=30)
    reader.chain.behind = 20
    await reader.poll()
    assert reader.scanner.scanned_height == 57, "the last block of a range that the node has"


async def test_node_on_another_branch_proves_no_range(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reader.poll()
    reader.chain.mine(("a", pays(5)), count=9)
    real = reader.chain.logs

    async def of_a_branch(wanted: LogFilter, first: int, last: int, *_: Any) -> LogRange:
        return LogRange(first, last, (), BlockPoint(last, "0xbranch"))

    monkeypatch.setattr(reader.chain, "logs", of_a_branch)
    assert await reader.poll() == {}
    monkeypatch.setattr(reader.chain, "logs", real)
    assert await reader.poll() == {key("a"): SEEN}


async def test_node_without_batches_is_asked_for_the_block_first(reader: Reader) -> None:
    """Also where nothing moves for longer than one range: the scan never waits for an event."""
    reader.chain.takes_batches = False
    await reader.poll()
    reader.chain.mine(count=2_100)
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine()
    assert await reader.poll() == {key("a"): SEEN}
    assert reader.scanner.scanned_height == number + 1


async def test_chain_with_no_recorded_block_is_refused_at_once(
    reader: Reader,
) -> None:
    reader.chain.replace_from(0, salt=1)
    reader.chain.mine(count=48)
    with pytest.raises(Unavailable):
        await reader.poll()
    assert "another chain" in str(reader.scanner.problem)


async def test_a_late_node_after_a_restart_takes_no_confirmation_back(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=2)
    assert await reader.poll(acknowledge=False) == {key("a"): CONFIRMED}
    # The deposit is acknowledged, and the cursor not moved: stopped before the end of the pass.
    await reader.ledger.acknowledge([(key("a"), CONFIRMED)], None)
    reader.restart()
    reader.chain.lag = 2
    assert await reader.poll() == {}


async def test_a_node_that_names_no_finalized_block_is_reported(
    ledger: EvmDepositLedger,
) -> None:
    reader = Reader(ledger, thresholds=(Threshold(0, DepthTag.FINALIZED),))
    await reader.poll()
    reader.chain.finalized = 10**6
    reader.chain.mine(("a", pays(5)))
    with pytest.raises(Unavailable):
        await reader.poll()
    assert "no block of the tag finalized" in str(reader.scanner.problem)


async def test_contradicting_nodes_confirm_and_move_nothing(
    reader: Reader,
) -> None:
    before = await reader.ledger.cursors("arbitrum")
    reader.chain.elsewhere = {reader.chain.mine(("a", pays(5)))}
    reader.chain.mine(count=9)
    for _ in range(3):
        assert await reader.poll() == {}
        assert await reader.ledger.deposit(key("a")) is None
        assert await reader.ledger.cursors("arbitrum") == before
    reader.chain.elsewhere = set()
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_a_block_that_a_node_does_not_know_is_not_taken_for_gone(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine()
    assert await reader.poll() == {key("a"): SEEN}
    before = await reader.ledger.cursors("arbitrum")
    reader.chain.mine(count=5)
    reader.chain.missing = {number}
    assert await reader.poll() == {}
    assert await reader.ledger.cursors("arbitrum") == before
    reader.chain.missing = set()
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_an_event_without_a_receipt_holds_the_cursor_back(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.chain.mine(("a", pays(5)))
    reader.chain.mine(count=20)

    async def unknown(_: str) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "receipt", unknown)
        assert await reader.poll() == {}
    assert await reader.poll() == {key("a"): CONFIRMED}


async def test_deposit_recorded_in_a_wrong_block_is_corrected_when_due(
    ledger: EvmDepositLedger,
) -> None:
    reader = Reader(ledger, thresholds=(Threshold(0, 12),))
    await reader.poll()
    reader.chain.mine(("a", pays(5)))
    for _ in range(6):
        await reader.poll()
        reader.chain.mine()
    stored = await reader.ledger.deposit(key("a"))
    assert stored is not None
    await reader.ledger.put_deposits([replace(stored, block_hash=key("fork").txid)])
    reader.chain.mine(count=9)
    assert await reader.poll() == {key("a"): CONFIRMED}
    assert await reader.ledger.deposit(key("a")) == replace(stored, acknowledged=CONFIRMED)


async def test_a_shorter_fork_counts_confirmations_from_its_own_end(reader: Reader) -> None:
    number = reader.chain.mine(("a", pays(5)))
    for _ in range(4):
        await reader.poll()
        reader.chain.mine()
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(again)
    reader.chain.mine()
    assert await reader.poll() == {key("a"): SEEN}
    assert await reader.scanner.confirmations(key("a")) == 2


# --- scan progress -------------------------------------------------------------------------------


async def test_scan_is_complete_as_of_its_beginning(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, read = reader.clock.now, reader.chain.block

    async def slow(at: Any = Tag.LATEST) -> Block | None:
        reader.clock.now += 1000
        return await read(at)

    reader.chain.mine(("a", pays(5)))
    monkeypatch.setattr(reader.chain, "block", slow)
    await reader.poll()
    assert reader.scanner.complete_until == began
    assert reader.clock.now > began


async def test_scan_at_a_lagging_or_down_node_is_not_complete(reader: Reader) -> None:
    reader.chain.lag = 2
    await reader.poll()
    assert reader.scanner.complete_until is None
    reader.chain.lag = 0
    await reader.poll()
    assert reader.scanner.complete_until == reader.clock.now
    reader.chain.lag = 15
    with pytest.raises(Unavailable):
        await reader.poll()
    assert reader.scanner.complete_until is None


async def test_scan_of_a_stalled_chain_is_not_complete(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader.connection, "stall", lambda: "has shown no new block for 10 minutes")
    await reader.poll()
    assert reader.scanner.complete_until is None


async def test_scan_with_an_unplaced_event_is_not_complete(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.chain.mine(("a", pays(5)))

    async def unknown(_: str) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "receipt", unknown)
        await reader.poll()
        assert reader.scanner.complete_until is None
    await reader.poll()
    assert reader.scanner.complete_until == reader.clock.now


# --- number of calls -------------------------------------------------------------------------


async def test_a_long_absence_is_made_up_for_in_several_passes(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evm_deposits, "WIDEST_LOG_RANGE", 5)
    reader.restart()
    names = [f"tx{n}" for n in range(60)]
    for name in names:
        reader.chain.mine((name, pays(1)), count=3)
    passes = 0
    while (await reader.ledger.cursors("arbitrum"))[0].number < reader.chain.head:
        assert reader.scanner.complete_until is None or passes == 0
        await reader.poll()
        passes += 1
    assert passes > 2
    assert reader.scanner.complete_until == reader.clock.now, "the last one has seen all"
    assert reader.book.keys() == {key(name) for name in names}


async def test_empty_block_costs_the_same_for_any_number_watched(
    reader: Reader,
) -> None:
    async def cost() -> list[str]:
        reader.chain.mine(("other", [(USER, STRANGER, 1)]))
        await reader.poll()
        reader.chain.asked.clear()
        reader.chain.mine(("more", [(USER, STRANGER, 1)]))
        await reader.poll()
        return list(reader.chain.asked)

    before = await cost()
    reader.chain.mine(*[(f"tx{n}", pays(1, to=n % 20)) for n in range(100)])
    await reader.poll()
    for _ in range(4):
        await cost()
    assert await cost() == before == ["block", "logs"]


async def test_a_pass_without_a_new_block_costs_one_call(reader: Reader) -> None:
    reader.chain.mine(("a", pays(5)))
    await reader.poll()
    reader.chain.asked.clear()
    await reader.poll()
    assert reader.chain.asked == ["block"]


# --- faults of the service itself ---------------------------------------------------------------


async def test_scan_fault_stays_in_its_network_and_loses_nothing(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.chain.mine(("a", pays(5)))
    with monkeypatch.context() as patched:
        patched.setattr(evm_deposits, "_sighting", None)
        for _ in range(2):
            with pytest.raises(Unavailable, match="can't be seen"):
                await reader.scanner.observe()
            await reader.scanner.acknowledge([])
            problem = "the deposit scan of arbitrum has failed (TypeError)"
            assert reader.scanner.problem == problem
    assert await reader.poll() == {key("a"): SEEN}
    assert reader.scanner.problem is None


async def test_scanned_height_is_that_of_the_committed_block(reader: Reader) -> None:
    committed = reader.chain.head
    assert reader.scanner.scanned_height == committed
    reader.chain.mine(("a", pays(5)))
    found = await reader.scanner.observe()
    assert reader.scanner.scanned_height == committed, "shown, and not committed yet"
    await reader.scanner.acknowledge(found)
    assert reader.scanner.scanned_height == committed + 1
    reader.restart()
    assert reader.scanner.scanned_height is None
    await reader.scanner.observe()
    assert reader.scanner.scanned_height == committed + 1


# --- rereads -------------------------------------------------------------------------------------


async def left_out(reader: Reader) -> int:
    """A scanned deposit, and one that the node's index lacked for long; the block of the latter."""
    reader.chain.mine(("known", pays(5)), count=10)
    await reader.poll()
    number = reader.chain.mine(("left out", pays(7)))
    for _ in range(20):
        reader.chain.blind = 10**6
        reader.chain.mine()
        await reader.poll()
    reader.chain.blind = 0
    reader.chain.mine(count=30)
    await reader.poll()
    assert reader.book.keys() == {key("known")}
    return number


async def test_a_deposit_that_was_left_out_is_found_by_reading_again(reader: Reader) -> None:
    number = await left_out(reader)
    upto = await reread(reader.connection, reader.ledger, number)
    assert upto == reader.chain.head
    reader.restart()
    assert await reader.poll() == {key("left out"): CONFIRMED}
    assert reader.book[key("left out")].first_seen_at == (GENESIS_SECONDS + 10 * number) * 1000
    assert await reader.poll() == {}


async def test_what_is_known_stays_as_it_is_when_it_is_read_again(reader: Reader) -> None:
    await left_out(reader)
    before = await reader.ledger.deposit(key("known"))
    await reread(reader.connection, reader.ledger, 1)
    reader.restart()
    assert (await reader.poll()).keys() == {key("left out")}
    assert await reader.ledger.deposit(key("known")) == before
    # Only once, also if the first pass after it was not acknowledged.
    await reread(reader.connection, reader.ledger, 1)
    reader.restart()
    assert await reader.poll(acknowledge=False) == {}
    assert await reader.poll() == {}


async def test_replaced_block_after_a_reread_leaves_an_older_one(
    reader: Reader,
) -> None:
    number = await left_out(reader)
    await reread(reader.connection, reader.ledger, number)
    reader.chain.replace_from(number - 2, salt=9)
    reader.chain.mine(("again", pays(3)))
    reader.chain.mine(count=60)
    reader.restart()
    assert (await reader.poll())[key("again")] is CONFIRMED


@pytest.mark.parametrize("first", [0, 10**6])
async def test_what_was_not_read_is_not_read_again(reader: Reader, first: int) -> None:
    before = await reader.ledger.cursors("arbitrum")
    with pytest.raises(NotReread, match=f"received block {first}; allowed: 1 to 50"):
        await reread(reader.connection, reader.ledger, first)
    assert await reader.ledger.cursors("arbitrum") == before


async def test_lagging_node_is_not_used_to_reread_a_range(reader: Reader) -> None:
    before = await reader.ledger.cursors("arbitrum")
    reader.chain.lag = 1
    with pytest.raises(NotReread, match="lags"):
        await reread(reader.connection, reader.ledger, 5)
    reader.chain.lag, reader.chain.missing = 0, {4}
    with pytest.raises(ChainUnusable, match="no block 4"):
        await reread(reader.connection, reader.ledger, 5)
    assert await reader.ledger.cursors("arbitrum") == before


async def test_nothing_is_read_again_before_anything_was_read(
    ledger: EvmDepositLedger,
) -> None:
    with pytest.raises(NotReread, match="No deposits were read"):
        await reread(Reader(ledger).connection, ledger, 5)


async def test_events_of_a_node_without_the_newest_block_wait(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest block follows the one read last; the node that lists kept a replaced branch."""
    reader.chain.mine(count=10)
    await reader.poll()
    number = reader.chain.mine(("a", pays(5)))
    reader.chain.mine()
    late, kept = await reader.chain.block(number), await reader.chain.receipt(txid_of("a"))
    listed = await reader.chain.logs(reader.scanner._events.wanted, number, number + 1)
    reader.chain.replace_from(number, 7)
    reader.chain.mine(count=2)
    assert await reader.poll() == {}
    reader.chain.mine()
    block = reader.chain.block

    async def of_several(at: Any = Tag.LATEST) -> Block | None:
        return late if at == number else await block(at)

    async def receipt_of_late(_: str) -> Receipt | None:
        return kept

    async def of_late(_: LogFilter, first: int, last: int, *after: Any) -> LogRange:
        found = LogRange.shown(first, last, listed.logs, None)
        return found.joined(after[0], None) if after and after[0] else found

    with monkeypatch.context() as patch:
        patch.setattr(reader.chain, "block", of_several)
        patch.setattr(reader.chain, "receipt", receipt_of_late)
        patch.setattr(reader.chain, "logs", of_late)
        assert await reader.poll() == {}
        assert await reader.scanner.confirmations(key("a")) == 0
    for _ in range(3):
        reader.chain.mine()
        assert await reader.poll() == {}
        assert await reader.scanner.confirmations(key("a")) == 0
