"""Withdrawals and their reservations, on each backend."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import TransferState
from rpcsvc.domain.reservations import Claims
from rpcsvc.domain.withdrawals import Withdrawal, signed, stepped
from rpcsvc.store.checks import BOOKS
from rpcsvc.store.database import Rows, StaleWrite, StoreConflict, Tables
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.withdrawals import WithdrawalStore
from tests.rows import statement
from tests.unit.orders import NOW

TO = "0x" + "0B" * 20
FIRST = Withdrawal("wd_0001", "arbitrum", USDC, TO, 50, 2, NOW, NOW)
SECOND = replace(FIRST, withdrawal_id="wd_0002")
ELSEWHERE = Withdrawal("wd_0003", "monero", XMR, "4address", 7, 1, NOW, NOW)


@pytest.fixture
def store(database: Tables) -> WithdrawalStore:
    return WithdrawalStore(database)


async def reserved(database: Tables, network: str = "arbitrum") -> int:
    return (await OrderStore(database, lambda: "").reserved(network)).total


async def problems(database: Tables) -> list[str]:
    return [text for text, sql in BOOKS if await database.fetch(sql)]


async def test_withdrawal_is_found_as_added_and_reserves_it(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, 52)
    await store.add(ELSEWHERE, None)
    assert await store.find("wd_0001") == FIRST
    assert await store.find("wd_0002") is None
    assert await store.open() == [FIRST, ELSEWHERE]
    assert await store.latest(1) == [ELSEWHERE]
    assert (await reserved(database), await reserved(database, "monero")) == (52, 8)
    assert await problems(database) == []


async def test_claims_leave_out_a_signed_withdrawal(
    store: WithdrawalStore, database: Tables
) -> None:
    """The wallet is without its money already, hours before it is settled."""
    orders = OrderStore(database, lambda: "")
    await store.add(FIRST, None)
    assert await orders.claims("arbitrum") == Claims(52, 0, 0)
    await store.change(FIRST, signed(FIRST, "tx", "00", NOW))
    assert await orders.claims("arbitrum") == Claims(0, 0, 0)


@pytest.mark.parametrize(
    ("other", "most"),
    [
        pytest.param(replace(FIRST, units=1), None, id="an id that is taken"),
        pytest.param(SECOND, None, id="a second open one of the network"),
        pytest.param(ELSEWHERE, 7, id="more than is free"),
    ],
)
async def test_withdrawal_that_may_not_be_added_leaves_nothing(
    store: WithdrawalStore, database: Tables, other: Withdrawal, most: int | None
) -> None:
    await store.add(FIRST, None)
    with pytest.raises(StaleWrite):
        await store.add(other, most)
    assert await store.latest(10) == [FIRST]
    assert await reserved(database) == 52
    assert await reserved(database, "monero") == 0
    assert await problems(database) == []


async def test_concurrent_withdrawals_never_exceed_the_free_amount(
    store: WithdrawalStore, database: Tables
) -> None:
    made = [replace(FIRST, withdrawal_id=f"wd_same{n}") for n in range(8)]
    done = await asyncio.gather(*(store.add(each, 52) for each in made), return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["NoneType"] + ["StaleWrite"] * 7
    assert await reserved(database) == 52


@pytest.mark.parametrize("end", [TransferState.SETTLED, TransferState.FAILED])
async def test_withdrawal_reserves_until_it_is_over(
    store: WithdrawalStore, database: Tables, end: TransferState
) -> None:
    await store.add(FIRST, None)
    item = FIRST
    for after in (
        signed(item, "tx", "00", NOW + 1),
        stepped(signed(item, "tx", "00", NOW + 1), TransferState.PUBLISHED, NOW + 2),
    ):
        await store.change(item, after)
        item = after
        assert await store.find("wd_0001") == item
        assert await reserved(database) == 52
        assert await problems(database) == []
    await store.change(item, stepped(item, end, NOW + 3, reason="as the network says"))
    assert await reserved(database) == 0
    assert await problems(database) == []
    assert await store.open() == []
    await store.add(SECOND, None)


async def test_withdrawal_changes_from_its_current_state_only(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, None)
    once = signed(FIRST, "tx", "00", NOW + 1)
    await store.change(FIRST, once)
    with pytest.raises(StaleWrite):
        await store.change(FIRST, signed(FIRST, "other", "01", NOW + 2))
    assert not await store.cancel(FIRST, stepped(FIRST, TransferState.CANCELLED, NOW + 2))
    assert await store.find("wd_0001") == once
    assert await reserved(database) == 52


async def test_signed_bytes_are_committed_with_the_wallet_or_not(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, None)

    async def commit(rows: Rows) -> None:
        bad = statement("UPDATE withdrawals SET units = 1")
        await database.write([*rows, bad])

    with pytest.raises(StoreConflict):
        await store.change(FIRST, signed(FIRST, "tx", "00", NOW + 1), commit)
    assert await store.find("wd_0001") == FIRST


EVM_PAYMENT = """
    INSERT INTO evm_payments (payment_id, network, sender, nonce, purpose, contract, recipient,
        units, data, gas, prepared_at, state)
    VALUES ('wd_0001', 'arbitrum', '0xhot', 0, 'transfer', '0xtoken', ?, ?, x'', 1, 1,
        'prepared')
"""


async def test_withdrawal_with_a_payment_on_record_is_never_cancelled(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, None)
    cancelled = stepped(FIRST, TransferState.CANCELLED, NOW + 1)
    assert await store.signed_terms("wd_0001") is None
    await database.write([statement(EVM_PAYMENT, (TO, 50))])
    assert await store.signed_terms("wd_0001") == FIRST.terms
    assert not await store.cancel(FIRST, cancelled)
    assert await store.open() == [FIRST]
    assert await reserved(database) == 52


async def test_withdrawal_without_a_payment_is_cancelled(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, None)
    cancelled = stepped(FIRST, TransferState.CANCELLED, NOW + 1, reason="not signed in time")
    assert await store.cancel(FIRST, cancelled)
    assert await store.find("wd_0001") == cancelled
    assert await reserved(database) == 0
    assert await problems(database) == []


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE withdrawals SET address = 'other'",
        "UPDATE withdrawals SET units = units + 1",
        "UPDATE withdrawals SET txid = 'other'",
        "UPDATE withdrawals SET state = 'planned', txid = NULL, raw = NULL",
        "UPDATE withdrawals SET state = 'cancelled'",
        "DELETE FROM withdrawals",
    ],
)
async def test_database_refuses_to_change_a_withdrawals_terms(
    store: WithdrawalStore, database: Tables, change: str
) -> None:
    await store.add(FIRST, None)
    await store.change(FIRST, signed(FIRST, "tx", "00", NOW + 1))
    with pytest.raises(StoreConflict):
        await database.write([statement(change)])


async def test_database_refuses_to_reopen_a_withdrawal(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, None)
    await store.cancel(FIRST, stepped(FIRST, TransferState.CANCELLED, NOW + 1))
    with pytest.raises(StoreConflict):
        await database.write([statement("UPDATE withdrawals SET state = 'planned'")])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "UPDATE reservations SET units = units - 1",
            "a withdrawal reserves another amount than it takes, or is over and reserves some",
        ),
        (
            "UPDATE withdrawals SET state = 'cancelled'",
            "a withdrawal reserves another amount than it takes, or is over and reserves some",
        ),
        (
            "INSERT INTO reservations (order_id, kind, network, units)"
            " VALUES ('wd_gone', 'funded', 'arbitrum', 1)",
            "something is reserved for a withdrawal that does not exist",
        ),
    ],
)
async def test_check_finds_a_wrong_reservation(
    store: WithdrawalStore, database: Tables, change: str, problem: str
) -> None:
    await store.add(FIRST, None)
    await database.write([statement(change)])
    assert await problems(database) == [problem]


async def test_check_finds_a_payment_of_other_terms(
    store: WithdrawalStore, database: Tables
) -> None:
    await store.add(FIRST, None)
    await database.write([statement(EVM_PAYMENT, (TO, 51))])
    attempt = "INSERT INTO evm_attempts (payment_id, number, txid, raw, max_fee, tip, made_at)"
    await database.write([statement(f"{attempt} VALUES ('wd_0001', 1, 'tx', x'00', 1, 1, 1)")])
    assert await problems(database) == [
        "the payment of a withdrawal is another one, or pays something else"
    ]


async def test_withdrawals_over_are_counted_by_network_and_outcome(
    store: WithdrawalStore, database: Tables
) -> None:
    books = OperatorBooks(database)
    assert await books.withdrawals_over() == {}
    for number in range(2):
        item = replace(FIRST, withdrawal_id=f"wd_over{number}")
        await store.add(item, None)
        await store.cancel(item, stepped(item, TransferState.CANCELLED, NOW))
    await store.add(ELSEWHERE, None)
    await store.change(ELSEWHERE, stepped(ELSEWHERE, TransferState.FAILED, NOW))
    await store.add(FIRST, None)
    over = {("arbitrum", "cancelled"): 2, ("monero", "failed"): 1}
    assert await books.withdrawals_over() == over
