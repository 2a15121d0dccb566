"""Support tickets as conversations: support.get, more messages, and the operator's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import transition
from rpcsvc.domain.order import OrderStatus
from rpcsvc.store.tickets import MOST_MESSAGES
from tests.contract import bff
from tests.contract.operator_socket import over_socket
from tests.contract.serving import SWAP, Served, a_ticket, serving
from tests.rows import all_rows
from tests.unit.orders import NOW, fresh

Json = dict[str, Any]
UNKNOWN = "tkt_" + "0" * 26


async def ordered(served: Served) -> str:
    made = await served.post("/agent/swap/execute", SWAP)
    return str(made.body["data"]["order"]["orderId"])


async def asked(served: Served, **params: Any) -> Json:
    return dict((await served.rpc("support.create", {"message": "m", **params})).body["result"])


async def read(served: Served, ticket: Json) -> Json:
    return dict((await served.rpc("support.get", ticket)).body["result"])


async def operator(served: Served, method: str, **params: Any) -> Json:
    async with over_socket(served) as at:
        return dict((await at.call(f"admin.tickets.{method}", params))["result"])


async def answered(served: Served, ticket: Json, text: str = "It is on its way.") -> Json:
    known = {"ticketId": ticket["ticketId"], "message": text, "by": "Ada L."}
    return dict((await operator(served, "reply", **known))["answered"])


async def test_ticket_becomes_a_conversation(served: Served) -> None:
    ticket = await a_ticket(served, message="Where is it?", orderId=await ordered(served))
    assert await answered(served, ticket) == {"ticketId": ticket["ticketId"], "by": "Ada L."}
    more = await asked(served, message="Thank you.", **ticket)
    assert (more["ok"], more["data"]["ticketSecret"]) == (True, None)
    data = (await read(served, ticket))["data"]
    assert [(each["author"], each["text"]) for each in data["messages"]] == [
        ("user", "Where is it?"), ("operator", "It is on its way."), ("user", "Thank you."),
    ]  # fmt: skip
    assert "Ada" not in json.dumps(data)
    shown = (await operator(served, "show", ticketId=ticket["ticketId"]))["ticket"]
    assert [each["answeredBy"] for each in shown["conversation"]] == [None, "Ada L.", None]


async def test_list_says_which_tickets_wait_for_an_answer(served: Served) -> None:
    first, second = await a_ticket(served), await a_ticket(served)
    await answered(served, first)

    async def waiting() -> list[str]:
        rows = (await operator(served, "list"))["tickets"]
        return [row["ticketId"] for row in rows if row["awaitsAnswer"]]

    assert await waiting() == [second["ticketId"]]
    await asked(served, **first)
    assert await waiting() == [first["ticketId"], second["ticketId"]]


async def test_answer_is_an_event_and_changes_nothing_else(served: Served) -> None:
    order_id = await ordered(served)
    ticket = await a_ticket(served, orderId=order_id)
    before = (await served.rpc("swap.status", {"orderId": order_id})).body["result"]["data"]
    await answered(served, ticket)
    log = (await served.rpc("swap.events", {"orderId": order_id, "after": 1})).body["result"]
    (event,) = log["data"]["events"]
    assert (event["type"], event["ticketId"]) == ("support.replied", ticket["ticketId"])
    now = (await served.rpc("swap.status", {"orderId": order_id})).body["result"]["data"]
    assert now["cursor"] == before["cursor"] + 1
    assert {**now, "cursor": 0} == {**before, "cursor": 0}


@pytest.mark.parametrize("status", OrderStatus)
def test_answer_moves_no_deadline_of_any_order(status: OrderStatus) -> None:
    order = replace(fresh(), status=status)
    found = transition(order, ev.SupportReplied(UNKNOWN), NOW + 10_000_000)
    assert found.effects == ()
    assert found.order == replace(order, version=order.version + 1)


async def test_answer_to_a_ticket_of_no_order_is_kept(served: Served) -> None:
    for named in ({}, {"orderId": "ord_" + "0" * 26}):
        ticket = await a_ticket(served, **named)
        await answered(served, ticket)
        assert len((await read(served, ticket))["data"]["messages"]) == 2


async def test_unknown_ticket_and_wrong_secret_answer_alike(served: Served) -> None:
    ticket, other = await a_ticket(served), await a_ticket(served)
    wrong = [
        {**ticket, "ticketSecret": other["ticketSecret"]},
        {**ticket, "ticketId": UNKNOWN},
        {"ticketId": UNKNOWN, "ticketSecret": ""},
        {**ticket, "ticketId": "tkt_1"},
    ]
    for method, more in (("support.get", {}), ("support.create", {"message": "m"})):
        answers = []
        for given in wrong:
            answer = (await served.rpc(method, {**given, **more})).body["result"]
            answers.append({**answer, "requestId": ""})
        assert answers[0]["error"]["code"] == "ticket_not_found"
        assert answers == [answers[0]] * len(wrong)
    assert len((await read(served, ticket))["data"]["messages"]) == 1


async def test_secret_of_a_ticket_is_stored_as_hash_only(served: Served) -> None:
    ticket = await a_ticket(served)
    rows = [*all_rows(served.up.database, "SELECT * FROM tickets")]
    assert ticket["ticketId"] in str(rows)
    assert ticket["ticketSecret"] not in str(rows)


async def test_message_belongs_to_the_ticket_alone(served: Served) -> None:
    ticket = await a_ticket(served)
    for name in ("ticketId", "ticketSecret"):
        half = {key: value for key, value in ticket.items() if key != name}
        assert (await asked(served, **half))["missingInputs"] == [name]
    refused = await asked(served, orderId="ord_" + "0" * 26, **ticket)
    assert [each["field"] for each in refused["validationErrors"]] == ["orderId"]


async def test_ticket_takes_a_bounded_number_of_messages(tmp_path: Path) -> None:
    async with serving(tmp_path, support__tickets_per_client=100) as served:
        ticket = await a_ticket(served)
        for _ in range(MOST_MESSAGES - 1):
            assert (await asked(served, **ticket))["ok"]
        refused = await asked(served, **ticket)
        assert refused["error"]["code"] == "invalid_input"
        await answered(served, ticket)  # the operator can always answer
        assert len((await read(served, ticket))["data"]["messages"]) == MOST_MESSAGES + 1


async def test_messages_use_the_budget_of_tickets(tmp_path: Path) -> None:
    async with serving(tmp_path, support__tickets_per_client=2) as served:
        ticket = await a_ticket(served)
        answers = [
            await served.post("/agent/support/tickets", {"message": "m", **ticket}) for _ in "ab"
        ]
        assert [each.status for each in answers] == [200, 429]
        assert answers[1].body["error"]["details"]["reason"] == "tickets"


async def test_closed_ticket_takes_its_messages_along(served: Served) -> None:
    ticket = await a_ticket(served)
    await answered(served, ticket)
    await operator(served, "close", ticketId=ticket["ticketId"])
    assert (await read(served, ticket))["error"]["code"] == "ticket_not_found"
    assert (served.count("tickets"), served.count("ticket_messages")) == (0, 0)
    refused = await operator(served, "reply", ticketId=ticket["ticketId"], message="m", by="Ada L.")
    assert "there is no ticket" in json.dumps(refused["error"])


@pytest.mark.parametrize("wrong", [{"by": " "}, {"message": " "}, {"message": ""}, {"by": ""}])
async def test_answer_says_who_and_something(served: Served, wrong: Json) -> None:
    ticket = await a_ticket(served)
    given = {"ticketId": ticket["ticketId"], "message": "m", "by": "Ada L.", **wrong}
    assert "error" in await operator(served, "reply", **given)
    assert served.count("ticket_messages") == 0


async def test_text_that_a_database_does_not_store_is_replaced(served: Served) -> None:
    ticket = await a_ticket(served, message="a\0b", category="c\0", walletAddress="w\0")
    await operator(served, "reply", ticketId=ticket["ticketId"], message="m\0", by="Ada\0")
    shown = (await operator(served, "show", ticketId=ticket["ticketId"]))["ticket"]
    assert shown["conversation"][0]["text"] == "a\ufffdb"
    assert shown["conversation"][1]["text"] == "m\ufffd"


async def test_answer_that_nobody_could_read_is_refused(served: Served) -> None:
    order_id = await ordered(served)
    assert (await bff.post(served, "/support/tickets", {
        "orderId": order_id, "sessionId": None, "walletAddress": None, "category": "payout",
        "message": "Where is it?",
    })).status == 200  # fmt: skip
    (row,) = (await operator(served, "list"))["tickets"]
    assert not row["canBeAnswered"]
    given = {"ticketId": row["ticketId"], "message": "m", "by": "Ada L."}
    assert "Nobody can read" in json.dumps((await operator(served, "reply", **given))["error"])
    assert served.count("ticket_messages") == 0


async def test_operator_sees_whether_the_orders_owner_has_written(served: Served) -> None:
    made = (await served.post("/agent/swap/execute", SWAP)).body["data"]
    order = {"orderId": made["order"]["orderId"]}
    for session, is_from_owner in ({"sessionId": made["sessionId"]}, True), ({}, False):
        ticket = await a_ticket(served, **order, **session)
        shown = (await operator(served, "show", ticketId=ticket["ticketId"]))["ticket"]
        assert shown["isFromOwner"] is is_from_owner
