"""How many tickets are taken in a day, and how long they stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.operations.ticket_budget import TicketBudget
from rpcsvc.orders.ports import Change, Ticket
from rpcsvc.orders.unfunded import ADDRESS, Client
from rpcsvc.store.orders import SqliteOrderStore
from rpcsvc.store.sqlite import Database
from tests.contract.serving import serving

DAY = 86_400_000
ONE, OTHER = Client(ADDRESS, "192.0.2.1"), Client(ADDRESS, "192.0.2.2")
TICKET = {"message": "where is it?"}


def test_client_has_so_many_tickets_a_day() -> None:
    budget = TicketBudget(2, 1_000)
    for _ in range(2):
        budget.charge(ONE, 10, 5)
    with pytest.raises(Unavailable) as refused:
        budget.charge(ONE, 10, DAY - 1_500)
    assert refused.value.retry_after == 2
    budget.charge(OTHER, 10, DAY - 1)
    budget.charge(ONE, 10, DAY)


def test_all_clients_share_the_size_of_a_day() -> None:
    budget = TicketBudget(100, 1_000)
    budget.charge(ONE, 600, 5)
    with pytest.raises(Unavailable):
        budget.charge(OTHER, 401, 6)
    budget.charge(OTHER, 400, 7)
    budget.charge(Client("socket"), 10_000, 8)  # the operator's


async def test_tickets_over_the_budget_are_not_stored(tmp_path: Path) -> None:
    async with serving(tmp_path, rate_limit__enabled=True, support__tickets_per_client=3) as served:
        answers = [await served.post("/agent/support/tickets", TICKET) for _ in range(5)]
        assert [answer.status for answer in answers] == [200, 200, 200, 503, 503]
        assert int(answers[-1].headers["retry-after"]) > 0
        assert served.count("tickets") == 3


async def test_old_tickets_are_forgotten(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    store = SqliteOrderStore(database, lambda: "")
    ticket = Ticket("tkt_1", 1_000, "other", "help", None, None, None)
    for number in range(3):
        made = replace(ticket, ticket_id=f"tkt_{number}", created_at=1_000 + number)
        await store.commit(Change(ticket=made))
    assert await store.forget_tickets(1_002) == 2
    assert await store.forget_tickets(1_002) == 0
    assert database.read("SELECT ticket_id FROM tickets") == [("tkt_2",)]
    await database.close()
