"""Every value is stored in the column of its name, and read back from there."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from rpcsvc.domain.events import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    DepositState,
    Fill,
    OnDeadline,
    Order,
    OrderStatus,
    Report,
    Terms,
    Timeouts,
    Transfer,
    TransferKind,
    TransferState,
    TwapPlan,
)
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from rpcsvc.store.changes import (
    Change,
    HistoryEntry,
    PendingEffect,
    RelayRecord,
    RelayState,
    StatusView,
    StoredResponse,
)
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.packing import pack_receipt

# All numbers and texts differ, so that a swapped column is found.
TERMS = Terms(
    order_id="ord_1",
    session_id="session",
    direction=Direction.XMR_TO_USDC,
    chain="chain",
    chain_id=101,
    deposit_network="deposit network",
    payout_network="payout network",
    deposit_address="deposit address",
    to_address="to address",
    deposit_amount=102,
    expected_output=103,
    min_received=104,
    min_deposit=105,
    max_deposit=106,
    price=Price(
        rate=107,
        spread_bps=108,
        payout_fee=109,
        min_received_bps=110,
        integrator_bps=111,
        funding_fee=122,
    ),
    refund_fee=112,
    created_at=113,
    expires_at=114,
    timeouts=Timeouts(
        late_window=115, confirm=116, prepare=117, payout_check=118, refund_reminder=119
    ),
    integrator="integrator",
    twap=TwapPlan(chunk_units=120_000_119, interval_ms=121),
    upstream_id="upstream",
    funding_gas=123,
    receive_amount=124,
)
DEPOSIT = Deposit(
    key=DepositKey("its network", "its txid", 201),
    units=202,
    sender="sender",
    first_seen_at=203,
    state=DepositState.CONFIRMED,
    transfer_id="transfer",
    is_dust=True,
)
TRANSFER = Transfer(
    transfer_id="transfer",
    kind=TransferKind.PAYOUT,
    network="its network",
    asset=USDC,
    address="address",
    units=301,
    fee=302,
    state=TransferState.SETTLED,
    txid="txid",
    raw="00",
    reason="reason",
    integrator_fee=303,
    receipt="receipt",
)
FILL = Fill(units=401, output=402, integrator_fee=403, rate=404, at=405)
REPORT = Report("deposit", 501, "refund", "error", 502, "extra", "to", 503)
OPEN = Order(
    terms=TERMS,
    status=OrderStatus.AWAITING_DEPOSIT,
    status_at=601,
    version=1,
    deadline_at=602,
    on_deadline=OnDeadline.EXPIRE,
)
PAID = replace(
    OPEN,
    status=OrderStatus.EXECUTING_SWAP,
    version=2,
    deposits=(DEPOSIT,),
    transfers=(TRANSFER,),
    fills=(FILL,),
    report=REPORT,
    refund_address="refund address",
    action_required="action",
    error_message="message",
    completed_at=603,
    leftover=604,
)
RELAY = RelayRecord(
    order_id="ord_1",
    state=RelayState.CREATED,
    created_at=701,
    session_id="relay session",
    namespace="namespace",
    key="key",
    upstream_id="upstream",
    reason="why",
    raw=b"answer",
    operation="swap.create",
    params={"to": "0x1", "sessionId": None},
)


def by_name(value: Any) -> dict[str, Any]:
    """The fields of a Struct or a named tuple."""
    return value._asdict() if isinstance(value, DepositKey) else asdict(value)


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[OrderStore]:
    """A store without orders."""
    database = await SqliteDatabase.open(tmp_path)
    yield OrderStore(database, lambda: "view key")
    await database.close()


@pytest.fixture
async def store(empty: OrderStore) -> OrderStore:
    """A store with the order, as made and after its events."""
    made = HistoryEntry(1, 1, "made", "status", {})
    paid = HistoryEntry(2, 2, "paid", "status", {})
    await empty.commit(Change(order=OPEN, is_new=True, history=made, relay=RELAY))
    view = StatusView(b"view", 605)
    await empty.commit(Change(order=PAID, view=view, history=paid, evidence=b"evidence"))
    return empty


def stored(data_dir: Path, table: str) -> dict[str, Any]:
    """The only row of a table, by column, without generated columns."""
    with closing(sqlite3.connect(data_dir / DATABASE_NAME)) as database:
        names = [
            name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))
        ]
        (row,) = database.execute(f"SELECT {', '.join(names)} FROM {table}")
        return {name: value for name, value in zip(names, row, strict=True) if name != "seq"}


def test_stored_numbers_stay_distinct() -> None:
    for values in (
        (TERMS, TERMS.price, TERMS.timeouts),
        (DEPOSIT, DEPOSIT.key),
        (TRANSFER,),
        (FILL,),
    ):
        numbers = [n for value in values for n in by_name(value).values() if type(n) is int]
        assert len(set(numbers)) == len(numbers)


async def test_an_order_comes_back_with_every_value(store: OrderStore) -> None:
    assert await store.order("ord_1") == PAID


async def test_an_order_that_was_only_made_comes_back_with_every_term(
    empty: OrderStore,
) -> None:
    made = HistoryEntry(1, 1, "made", "status", {})
    agreed = replace(OPEN, terms=replace(TERMS, refund_address="agreed"))
    await empty.commit(Change(order=agreed, is_new=True, history=made))
    assert await empty.order("ord_1") == agreed


@pytest.mark.parametrize("column", ["agreed_refund_address", "refund_address"])
async def test_an_agreed_refund_address_is_never_changed(
    empty: OrderStore, tmp_path: Path, column: str
) -> None:
    made = HistoryEntry(1, 1, "made", "status", {})
    agreed = replace(OPEN, terms=replace(TERMS, refund_address="agreed"))
    await empty.commit(Change(order=agreed, is_new=True, history=made))
    with (
        closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as other,
        pytest.raises(sqlite3.IntegrityError),
    ):
        other.execute(f"UPDATE orders SET {column} = 'thief'")


async def test_terms_and_status_are_in_columns_of_their_names(
    store: OrderStore, tmp_path: Path
) -> None:
    assert await store.order("ord_1") is not None
    expected = {
        **by_name(TERMS),
        **by_name(TERMS.price),
        **by_name(TERMS.timeouts),
        **by_name(PAID),
        "confirm_timeout": 116,
        "prepare_timeout": 117,
        "twap_chunk_units": 120_000_119,
        "twap_interval_ms": 121,
        "unpaid_since": None,
        "history_from": 1,
        "agreed_refund_address": None,
    }
    row = stored(tmp_path, "orders")
    assert row == {column: expected[column] for column in row}


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("deposits", by_name(DEPOSIT) | by_name(DEPOSIT.key) | {"order_id": "ord_1"}),
        (
            "transfers",
            by_name(TRANSFER)
            | {"asset": "USDC", "order_id": "ord_1", "raw": b"\0"}
            | {"receipt": pack_receipt("receipt", b"address txid transfer")},
        ),
        ("fills", by_name(FILL) | {"order_id": "ord_1", "chunk": 0}),
        (
            "relays",
            by_name(RELAY)
            | by_name(REPORT)
            | {"idempotency_key": "key", "evidence": b"evidence"}
            | {"order_id": "ord_1", "params": '{"to":"0x1","sessionId":null}', "note": None},
        ),
    ],
)
async def test_what_belongs_to_an_order_is_in_the_columns_of_its_name(
    store: OrderStore, tmp_path: Path, table: str, values: dict[str, Any]
) -> None:
    assert await store.order("ord_1") is not None
    row = stored(tmp_path, table)
    row.pop("written_at", None)
    assert row == {column: values[column] for column in row}


async def test_a_claim_comes_back_with_every_value(store: OrderStore) -> None:
    assert await store.relay_of_key("namespace", "key") == RELAY
    assert await store.relays_in(RelayState.CREATED) == [RELAY]
    assert await store.open_relayed() == ["ord_1"]


async def test_an_answer_comes_back_with_every_value(store: OrderStore) -> None:
    answer = StoredResponse("space", "its key", "operation", {"n": [1, "2"]}, b"body", 801)
    await store.commit(Change(response=answer))
    assert await store.response("space", "its key") == answer


@pytest.mark.parametrize(
    "effect", [AdvanceTransfer("transfer"), FillChunk(12), PriceLateDeposit()], ids=repr
)
async def test_effect_survives_a_round_trip_whatever_its_subject(
    store: OrderStore, effect: Effect
) -> None:
    later = replace(PAID, version=3, fills=(FILL, FILL))
    await store.commit(
        Change(order=later, history=HistoryEntry(3, 3, "e", "s", {}), effects=(effect,))
    )
    assert await store.pending_effects() == [PendingEffect("ord_1", effect)]
    await store.commit(Change(done=(PendingEffect("ord_1", effect),)))
    assert await store.pending_effects() == []


async def test_order_is_found_by_whole_address_and_network(
    empty: OrderStore,
) -> None:
    start = "0x52908400098527886E"[:18]
    terms = replace(TERMS, deposit_address=f"{start}0F", twap=None, upstream_id=None)
    made = HistoryEntry(1, 1, "made", "status", {})
    await empty.commit(Change(order=replace(OPEN, terms=terms), is_new=True, history=made))
    assert await empty.order_id_of_deposit_address("deposit network", f"{start}0F") == "ord_1"
    assert await empty.order_id_of_deposit_address("payout network", f"{start}0F") is None
    assert await empty.is_deposit_address(f"{start}0F")
    for other in (start, f"{start}0E", f"{start}0f", f"{start}0F0", "", start[:17]):
        assert not await empty.is_deposit_address(other)
        assert await empty.order_id_of_deposit_address("deposit network", other) is None
