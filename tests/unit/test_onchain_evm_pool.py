"""Pending payments only give a deposit its first-seen time."""

from __future__ import annotations

from typing import Any

import pytest

from rpcsvc.domain import usdc
from rpcsvc.domain.order import OrderStatus
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    HttpFailure,
    NodeError,
    RpcFailure,
    RpcOutcomeUnknown,
    TimedOut,
    TooLarge,
)
from rpcsvc.settlement.onchain.evm import scan as evm_pool
from rpcsvc.settlement.onchain.evm.records import PoolSighting
from rpcsvc.settlement.onchain.evm.scan import pending_payments, read_pending
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.logs import captured
from tests.unit.evm_chain import (
    OURS,
    REMOVED,
    SEEN,
    STRANGER,
    TOKEN,
    USER,
    Reader,
    key,
    pays,
    txid_of,
)
from tests.unit.evm_pending import (
    DAY,
    MINUTE,
    NODE,
    held,
    later,
    mined,
    paying,
    reading,
    sighting,
    waits,
)
from tests.waiting import wait_for_deposit

REFUSALS: list[RpcFailure] = [
    NodeError(*NODE, -32000, "pending block is not available"),
    NodeError(*NODE, -32601, "no such method"),
    HttpFailure(*NODE, 413),
    TooLarge(*NODE, "over 33554432 bytes"),
    TimedOut(*NODE, "no whole answer in 3 seconds"),
    RpcOutcomeUnknown(*NODE, "connection lost"),
]


@pytest.fixture
async def idle(database: SqliteDatabase) -> Reader:
    return await reading(database)


@pytest.fixture
async def reader(idle: Reader, database: SqliteDatabase) -> Reader:
    """An order waits at the first address, for a hundred seconds more."""
    await wait_for_deposit(database, OURS[0].address, expires_at=idle.clock.now + 100_000)
    return idle


# --- the time of a deposit -----------------------------------------------------------------------


async def test_deposit_counts_from_the_poll_that_saw_it_pending(reader: Reader) -> None:
    later(reader, 7)
    seen_at = reader.clock.now
    reader.chain.pool = [paying("a")]
    assert await reader.poll() == {}, "what is pending is no deposit"
    later(reader, 20)
    assert await reader.poll() == {}
    reader.chain.pool = []
    await mined(reader, "a", at=seen_at + 500_000)
    assert reader.book[key("a")].first_seen_at == seen_at


async def test_one_that_was_never_seen_pending_counts_from_its_block(reader: Reader) -> None:
    at = reader.clock.now + 500_000
    await mined(reader, "a", at=at)
    assert reader.book[key("a")].first_seen_at == at


async def test_block_mined_before_the_scan_counts_as_seen_pending(
    reader: Reader,
) -> None:
    reader.chain.pool = [paying("a")]
    await reader.poll()
    number = reader.chain.head + 1
    reader.chain.genesis = reader.clock.now // 1000 - 10 * number - 60
    reader.chain.mine(("a", pays(5)))
    assert await reader.poll() == {key("a"): SEEN}
    assert reader.book[key("a")].first_seen_at == reader.clock.now - MINUTE


async def test_a_transaction_that_replaced_another_starts_again(reader: Reader) -> None:
    reader.chain.pool = [paying("first")]
    await reader.poll()
    at = reader.clock.now + 500_000
    await mined(reader, "second", at=at)
    assert reader.book[key("second")].first_seen_at == at


async def test_what_was_seen_survives_a_restart(reader: Reader) -> None:
    seen_at = reader.clock.now
    reader.chain.pool = [paying("a")]
    await reader.poll(acknowledge=False)
    reader.restart()
    await mined(reader, "a", at=seen_at + 500_000)
    assert reader.book[key("a")].first_seen_at == seen_at


async def test_a_deposit_that_moves_to_another_block_keeps_its_time(reader: Reader) -> None:
    seen_at = reader.clock.now
    reader.chain.pool = [paying("a")]
    await reader.poll()
    number = reader.chain.head + 1
    await mined(reader, "a", at=seen_at + 500_000)
    (again,) = reader.chain.replace_from(number, salt=1)
    reader.chain.mine(count=3)
    await reader.poll()
    assert await reader.poll() == {key("a"): REMOVED}
    # In its new block another event comes first: with another log index it is another deposit.
    name, events = again
    reader.chain.mine((name, [(USER, STRANGER, 1), *events]))
    later(reader, 900)
    assert await reader.poll() == {key("a", 1): SEEN}
    assert reader.book[key("a", 1)].first_seen_at == seen_at


async def test_the_time_is_of_the_recipient_that_was_seen(reader: Reader) -> None:
    """Real USDC pays the recipient of the call; a token that does not gives no earlier time."""
    reader.chain.pool = [paying("a")]
    await reader.poll()
    at = reader.clock.now + 500_000
    reader.chain.genesis = at // 1000 - 10 * (reader.chain.head + 1)
    reader.chain.mine(("a", pays(5, to=1)))
    reader.clock.now = at
    assert await reader.poll() == {key("a"): SEEN}
    assert reader.book[key("a")].first_seen_at == at


async def test_poll_that_fails_later_has_noted_what_is_pending(reader: Reader) -> None:
    reader.chain.pool = [paying("a")]
    reader.chain.hashes.clear()
    reader.chain.salts = [-n - 1 for n in range(len(reader.chain.salts))]
    with pytest.raises(Exception, match="can't be settled"):
        await reader.poll()
    assert await sighting(reader, "a") is not None


# --- which transactions count --------------------------------------------------------------------


@pytest.mark.parametrize(
    "transaction",
    [
        waits("a", usdc.transfer(OURS[0].address, 5), to=STRANGER),
        waits("a", usdc.transfer(OURS[0].address, 5), to=None),
        waits("a", usdc.transfer(STRANGER, 5)),
        waits("a", usdc.transfer(OURS[0].address, 0)),
        waits("a", usdc.transfer(OURS[0].address, 2**63)),
        waits("a", usdc.transfer(OURS[0].address, 5) + b"\0"),
        waits("a", usdc.balance_of(OURS[0].address)),
        waits("a", b""),
        paying("a", to=1),
    ],
)
async def test_what_does_not_pay_a_waiting_order_is_no_hint(
    reader: Reader, transaction: dict[str, Any]
) -> None:
    reader.chain.pool = [transaction, paying("b")]
    await reader.poll()
    assert await sighting(reader, "a") is None
    assert await sighting(reader, "b") == PoolSighting(
        "arbitrum", txid_of("b"), 1, reader.clock.now
    )


async def test_order_ended_late_or_on_another_network_gets_no_hint(
    reader: Reader, database: SqliteDatabase
) -> None:
    soon = reader.clock.now + MINUTE
    await wait_for_deposit(database, OURS[1].address, expires_at=soon, status=OrderStatus.COMPLETED)
    await wait_for_deposit(database, OURS[2].address, expires_at=soon, deposit_network="base")
    await wait_for_deposit(database, OURS[3].address, expires_at=reader.clock.now - 1)
    await wait_for_deposit(database, OURS[4].address, expires_at=reader.clock.now)
    reader.chain.pool = [paying(f"tx{n}", to=n) for n in range(5)]
    await reader.poll()
    assert await held(reader) == {1: 1, 5: 1}


async def test_token_and_hash_are_the_same_in_any_case(reader: Reader) -> None:
    made = paying("a")
    made |= {"hash": "0x" + made["hash"][2:].upper(), "to": "0x" + TOKEN[2:].upper()}
    reader.chain.pool = [made]
    await reader.poll()
    assert await sighting(reader, "a") is not None


async def test_first_sighting_stays_the_first(reader: Reader) -> None:
    reader.chain.pool = [paying("a")]
    await reader.poll()
    first = await sighting(reader, "a")
    later(reader, 60)
    await reader.poll()
    await reader.ledger.put_pool_sightings([PoolSighting("arbitrum", txid_of("a"), 2, 7)])
    assert await sighting(reader, "a") == first


# --- calls to the node ---------------------------------------------------------------------------


async def test_poll_asks_once_and_only_while_an_order_waits_in_time(
    idle: Reader, database: SqliteDatabase
) -> None:
    async def asked() -> int:
        idle.chain.asked.clear()
        await idle.poll()
        return idle.chain.asked.count("pending")

    assert await asked() == 0
    await wait_for_deposit(
        database, OURS[0].address, expires_at=idle.clock.now + MINUTE, deposit_network="base"
    )
    over = [status for status in OrderStatus if status.is_terminal]
    for number, status in enumerate([*over, OrderStatus.DEPOSIT_CONFIRMED], 1):
        await wait_for_deposit(
            database, OURS[number].address, expires_at=idle.clock.now + MINUTE, status=status
        )
    assert await asked() == 0
    for number in range(10, 20):
        await wait_for_deposit(
            database, OURS[number].address, expires_at=idle.clock.now + MINUTE,
            status=(OrderStatus.AWAITING_DEPOSIT, OrderStatus.DEPOSIT_DETECTED)[number % 2],
        )  # fmt: skip
    assert await asked() == 1
    later(idle, 60)
    assert await asked() == 1, "the last moment is in time"
    idle.clock.now += 1
    assert await asked() == 0


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: type(each).__name__)
async def test_node_without_an_answer_is_no_failure_and_logged_once(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, refusal: RpcFailure
) -> None:
    logged = captured(monkeypatch, evm_pool.__name__)
    reader.chain.refusal = refusal
    at = reader.clock.now
    await mined(reader, "a", at=at + 10_000)
    assert reader.scanner.problem is None
    assert reader.book[key("a")].first_seen_at == at + 10_000
    for _ in range(3):
        later(reader, 20)
        await reader.poll()
    assert reader.chain.asked.count("pending") == 2, "again after a minute"
    events = [entry["event"] for entry in logged.entries]
    assert events == ["evm_pool_lookup_failed"]
    assert str(refusal) == logged.entries[0]["reason"]
    reader.chain.refusal = None
    await wait_for_deposit(reader.ledger._db, OURS[5].address, expires_at=reader.clock.now + DAY)
    reader.chain.pool = [paying("b", to=5)]
    later(reader, 60)
    await reader.poll()
    assert await sighting(reader, "b") is not None
    assert logged.entries[-1]["event"] == "evm_pool_observed"


async def test_a_node_that_refused_is_asked_again_when_it_was_lost(reader: Reader) -> None:
    reader.chain.refusal = REFUSALS[0]
    await reader.poll()
    later(reader, 1)
    await reader.poll()
    assert reader.chain.asked.count("pending") == 1
    with pytest.raises(Exception, match="can't be settled"), reader.connection.watched():
        raise RpcOutcomeUnknown("node", "eth_call", "connection lost")
    await reader.poll()
    assert reader.chain.asked.count("pending") == 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"number": "0x1", "transactions": [paying("a")]},
        {"transactions": []},
        {"number": "garbage"},
    ],
)
async def test_node_without_pending_block_has_no_hint_and_is_retried(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    logged = captured(monkeypatch, evm_pool.__name__)
    asked: list[float] = []

    async def newest(*, seconds: float) -> Any:
        asked.append(seconds)
        return answer

    monkeypatch.setattr(reader.chain, "pending_block", newest)
    await reader.poll()
    await reader.poll()
    assert len(asked) == 1, "a second later"
    later(reader, 1)
    await reader.poll()
    assert len(asked) == 2
    assert logged.entries == []
    assert await sighting(reader, "a") is None


async def test_network_without_a_pool_is_asked_for_it_rarely(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    async def pending(*, seconds: float) -> Any:
        asked.append(seconds)
        return answer

    async def looks() -> int:
        asked.clear()
        for _ in range(60):
            later(reader, 1)
            await reader.poll()
        return len(asked)

    monkeypatch.setattr(reader.chain, "pending_block", pending)
    await wait_for_deposit(reader.ledger._db, OURS[5].address, expires_at=reader.clock.now + DAY)
    answer = {"number": hex(reader.chain.head), "transactions": []}
    assert await looks() == 10, "a node that lags answers so for a while"
    answer = {"number": hex(reader.chain.head + 1), "transactions": []}
    assert await looks() in range(48, 52)


async def test_a_block_mined_meanwhile_is_read_whatever_its_number(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (hex(reader.chain.head + 1), None):

        async def next_block(*, seconds: float, number: str | None = number) -> Any:
            assert seconds
            return {"number": number, "transactions": [paying(f"a{number}")]}

        monkeypatch.setattr(reader.chain, "pending_block", next_block)
        later(reader, 1)
        await reader.poll()
        assert await sighting(reader, f"a{number}") is not None


@pytest.mark.parametrize(
    "answer",
    [
        "0x1",
        [],
        {"transactions": {}},
        {"transactions": [txid_of("a")]},
        {"transactions": [{"to": TOKEN}]},
        {"transactions": [waits("a", b"") | {"hash": None}]},
        {"transactions": [waits("a", b"") | {"hash": "0x12"}]},
        {"transactions": [waits("a", b"") | {"input": "0x123"}]},
        {"transactions": [waits("a", b"") | {"input": 7}]},
    ],
)
async def test_an_answer_that_is_no_block_is_no_failure_of_the_look(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    logged = captured(monkeypatch, evm_pool.__name__)

    async def strange(*, seconds: float) -> Any:
        assert seconds
        return answer

    monkeypatch.setattr(reader.chain, "pending_block", strange)
    reader.chain.mine(("a", pays(5)))
    assert await reader.poll() == {key("a"): SEEN}
    assert [entry["event"] for entry in logged.entries] == ["evm_pool_lookup_failed"]


def test_transactions_that_do_not_call_the_token_are_ignored() -> None:
    strange = [{}, {"to": 7}, {"to": STRANGER, "hash": None}, {"to": None, "input": None}]
    block = read_pending(NODE[0], {"transactions": [*strange, paying("a")]})
    assert [item.txid for item in pending_payments(block, TOKEN)] == [txid_of("a")]
    with pytest.raises(BadAnswer, match="valid dictionary"):
        read_pending(NODE[0], {"transactions": [7]})
