"""The number of tickets accepted in a day, and how long they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain.unfunded import ADDRESS as ADDRESS_KIND
from rpcsvc.domain.unfunded import Client
from rpcsvc.errors import Unavailable
from rpcsvc.operations.service import TicketBudget
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.changes import Change, Ticket, TicketCharge, TicketsTaken
from rpcsvc.store.orders import OrderStore
from tests.contract.serving import MONERO, Served, serving
from tests.rows import all_rows
from tests.sandbox import HOUR_MS, Placed, sandbox

DAY = 86_400_000
TICKET = {"message": "where is it?"}
LIMITED = {"support.tickets_per_client": 2}
ADDRESS = Client(ADDRESS_KIND, "192.0.2.1")


def ticket(size: int, at: int) -> Ticket:
    """A ticket that is charged ``size`` bytes."""
    return Ticket("tkt_1", at, "other", "m" * (size - 205), None, None, None)


def test_client_has_so_many_tickets_a_day() -> None:
    budget = TicketBudget(2, 10_000)
    charge = budget.charge("one", ticket(300, DAY), TicketsTaken(1, 300))
    assert charge == TicketCharge(1, "one", 300, 2, 10_000)
    with pytest.raises(Unavailable) as refused:
        budget.charge("one", ticket(300, DAY - 1_500), TicketsTaken(2, 600))
    assert refused.value.retry_after == 2


def test_all_clients_share_the_size_of_a_day() -> None:
    budget = TicketBudget(100, 1_000)
    with pytest.raises(Unavailable):
        budget.charge("other", ticket(401, 6), TicketsTaken(0, 600))
    assert budget.charge("other", ticket(400, 7), TicketsTaken(0, 600)).size == 400


@pytest.mark.parametrize("limited", [True, False])
async def test_tickets_over_the_budget_are_not_stored(tmp_path: Path, limited: bool) -> None:
    """With and without rate limits, and over a restart."""
    flags: dict[str, Any] = {"rate_limit__enabled": limited, "support__tickets_per_client": 3}
    async with serving(tmp_path, **flags) as served:
        assert [await status(served) for _ in range(2)] == [200, 200]
    async with serving(tmp_path, **flags) as served:
        assert [await status(served) for _ in range(3)] == [200, 503, 503]
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
        assert stranger["error"]["code"] == "unavailable", "it is not the owner's"
        answer = await named(order, order.session_id)
        assert answer["data"]["refundAddress"] == {"accepted": True, "address": MONERO}


async def named(order: Placed, session_id: str) -> dict[str, Any]:
    """The answer to a ticket that names a refund address."""
    return await order.ask_for_refund(MONERO, session_id, client=ADDRESS)


async def test_old_tickets_are_forgotten(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path)
    store = OrderStore(database, lambda: "")
    for number in range(3):
        made = replace(ticket(300, 0), ticket_id=f"tkt_{number}", created_at=1_000 + number)
        await store.commit(Change(ticket=made))
    assert await store.forget_tickets(1_002) == 2
    assert await store.forget_tickets(1_002) == 0
    assert all_rows(database, "SELECT ticket_id FROM tickets") == [("tkt_2",)]
    await database.close()
