"""The number of tickets accepted in a day, and how long they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.clients import ADDRESS as ADDRESS_KIND
from rpcsvc.domain.clients import Client
from rpcsvc.errors import RateLimited, Unavailable
from rpcsvc.operations.service import TicketBudget
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.changes import Change, Ticket, TicketCharge, TicketsTaken
from rpcsvc.store.orders import OrderStore
from tests.contract.serving import MONERO, Served, serving
from tests.rows import all_rows
from tests.sandbox import HOUR_MS, Placed, Sandbox, sandbox

DAY = 86_400_000
TICKET = {"message": "where is it?"}
LARGEST = {"message": "\U0001f4b6" * 8_000}
LIMITED = {"support.tickets_per_client": 2}
ADDRESS = Client(ADDRESS_KIND, "192.0.2.1")


def test_daily_ticket_limit_of_a_client_is_enforced() -> None:
    budget = TicketBudget(2, 10_000)
    charge = budget.charge("one", DAY, 300, TicketsTaken(1, 300), has_money=False)
    assert charge == TicketCharge(1, "one", 300, 2, 7_500)
    with pytest.raises(RateLimited) as refused:
        budget.charge("one", DAY - 1_500, 300, TicketsTaken(2, 600), has_money=False)
    assert refused.value.retry_after == 2
    assert refused.value.details == {"reason": "tickets", "limit": 2}


@pytest.mark.parametrize(("has_money", "most"), [(False, 750), (True, 1_000)])
def test_all_clients_share_the_size_of_a_day(has_money: bool, most: int) -> None:
    budget = TicketBudget(100, 1_000)
    taken = TicketsTaken(0, most - 400)
    with pytest.raises(Unavailable):
        budget.charge("other", 6, 401, taken, has_money=has_money)
    charge = budget.charge("other", 7, 400, taken, has_money=has_money)
    assert (charge.size, charge.most_bytes) == (400, most)


@pytest.mark.parametrize("limited", [True, False])
async def test_tickets_over_the_budget_are_not_stored(tmp_path: Path, limited: bool) -> None:
    """With and without rate limits, and over a restart."""
    flags: dict[str, Any] = {"rate_limit__enabled": limited, "support__tickets_per_client": 3}
    async with serving(tmp_path, **flags) as served:
        assert [await status(served) for _ in range(2)] == [200, 200]
    async with serving(tmp_path, **flags) as served:
        assert [await status(served) for _ in range(3)] == [200, 429, 429]
        assert served.count("tickets") == 3
        (name,) = [
            name
            for (name,) in all_rows(
                served.up.database, "SELECT client FROM ticket_counts WHERE client <> ''"
            )
        ]
        assert "127.0.0.1" not in name


async def status(served: Served) -> int:
    answer = await served.post("/agent/support/tickets", TICKET)
    assert answer.status == 200 or int(answer.headers["retry-after"]) > 0
    return answer.status


async def test_counts_of_days_before_yesterday_are_deleted(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        for _ in range(4):
            assert (await box.call("support.create", client=ADDRESS, **TICKET))["ok"]
            await box.jump(DAY)
        days = all_rows(
            box.up.database, "SELECT client <> '', tickets FROM ticket_counts ORDER BY client"
        )
        assert days == [(0, 1), (0, 1), (1, 1), (1, 1)]


async def test_ticket_with_the_awaited_refund_address_is_accepted(tmp_path: Path) -> None:
    async with sandbox(tmp_path, flags=LIMITED) as box:
        order = await box.order("x2u")
        await box.jump(2 * HOUR_MS)
        await order.fund("0.5")
        await box.settle()
        answers = [await box.call("support.create", client=ADDRESS, **TICKET) for _ in range(3)]
        assert [answer["ok"] for answer in answers] == [True, True, False]
        stranger = await named(order, "00000000-0000-4000-8000-000000000000")
        assert stranger["error"]["code"] == "rate_limited", "it is not the owner's"
        answer = await named(order, order.session_id)
        assert answer["data"]["refundAddress"] == {"accepted": True, "address": MONERO}


async def test_ticket_about_money_is_taken_when_the_day_is_full(tmp_path: Path) -> None:
    """13 addresses with 20 of the largest tickets each are all bytes of a day."""
    async with sandbox(tmp_path) as box:
        order, unpaid = await box.order("x2u"), await box.order("x2u")
        await order.fund()
        await unpaid.fund("0.00005")  # less than sending it back costs
        await box.settle()
        answers = [
            await box.call("support.create", client=Client(ADDRESS_KIND, f"192.0.2.{n}"), **LARGEST)
            for n in range(13)
            for _ in range(20)
        ]
        assert [each["ok"] for each in answers].count(False) > 20
        assert answers[-1]["error"]["code"] == "unavailable"
        (refused,) = await about(box, unpaid, 1, at="192.0.2.99")
        assert refused["error"]["code"] == "unavailable"
        told = await about(box, order, 21, at="192.0.2.1")
        assert [each["ok"] for each in told] == [True] * 20 + [False]
        assert told[-1]["error"]["code"] == "rate_limited"


async def about(box: Sandbox, order: Placed, count: int, *, at: str) -> list[dict[str, Any]]:
    """The answers to tickets of the order's owner."""
    owned = {"orderId": order.order_id, "sessionId": order.session_id, **LARGEST}
    client = Client(ADDRESS_KIND, at)
    return [await box.call("support.create", client=client, **owned) for _ in range(count)]


async def named(order: Placed, session_id: str) -> dict[str, Any]:
    """The answer to a ticket that names a refund address."""
    return await order.ask_for_refund(MONERO, session_id, client=ADDRESS)


async def test_old_tickets_are_forgotten(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path)
    store = OrderStore(database, lambda: "")
    for number in range(3):
        made = Ticket(f"tkt_{number}", 1_000 + number, "other", "m", None, None, None)
        await store.commit(Change(ticket=made))
    assert await store.forget_tickets(1_002) == 2
    assert await store.forget_tickets(1_002) == 0
    assert all_rows(database, "SELECT ticket_id FROM tickets") == [("tkt_2",)]
    await database.close()
