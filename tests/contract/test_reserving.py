"""Bounds on unfunded orders: no number of clients can reserve the whole wallet."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.errors import ServiceError
from rpcsvc.store.changes import Ticket
from tests.contract.serving import EVM, MONERO, TOKEN, Answer, Served, serving
from tests.contract.sidecar import STAGENET, beside
from tests.rows import all_rows
from tests.sandbox import give_wallets

HELD = {"monero": 1_500 * 10**12}
USDC_HELD = 250_000 * 10**6
ATTACKER, HONEST = "203.0.113.7", "198.51.100.9"
X2U = {"direction": "x2u", "chain": "arbitrum", "to": EVM}
U2X = {"direction": "u2x", "chain": "arbitrum", "to": MONERO}
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def wallet(monkeypatch: pytest.MonkeyPatch) -> None:
    give_wallets(monkeypatch, HELD, USDC_HELD)


async def reserved(served: Served, network: str) -> int:
    return (await served.up.service.store.reserved(network)).total


def behind_proxy(data_dir: Path, **flags: Any) -> Any:
    environ = {"RPCSVC_TRUSTED_PROXIES": "127.0.0.0/8", "AGENT_RPC_TOKEN": TOKEN}
    return serving(data_dir, environ, **flags)


async def order(served: Served, swap: Json, amount: str, address: str) -> Answer:
    """Make an order from a network address."""
    headers = {"x-forwarded-for": address, "x-forwarded-proto": "https"}
    body = {**swap, "amount": amount}
    return await served.http("POST", "/agent/swap/execute", json=body, headers=headers)


async def attack(served: Served, address: str = ATTACKER, number: int = 18) -> list[Answer]:
    """Orders of about 26,000 USD each, of alternating direction, all at once."""
    amounts = [(X2U, "158"), (U2X, "26000")] * (number // 2)
    return await asyncio.gather(*(order(served, swap, amount, address) for swap, amount in amounts))


async def test_18_orders_of_one_address_leave_inventory_to_others(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path) as served:
        await attack(served)
        assert HELD["monero"] - await reserved(served, "monero") >= 1_350 * 10**12
        for swap, amount in ((X2U, "100"), (U2X, "20000")):
            honest = await order(served, swap, amount, HONEST)
            assert honest.status == 200, honest.body


async def test_many_small_orders_of_one_address_get_retry_after(
    tmp_path: Path,
) -> None:
    async with behind_proxy(tmp_path) as served:
        answers = [await order(served, X2U, "1", ATTACKER) for _ in range(11)]
        assert [answer.status for answer in answers] == [200] * 10 + [429]
        error = answers[-1].body["error"]
        assert (error["code"], error["retryable"]) == ("rate_limited", True)
        assert error["details"]["limit"] == error["details"]["held"] == "10 orders"
        wait = int(answers[-1].headers["retry-after"])
        assert error["details"]["retryAfterSeconds"] == wait
        assert 3_500 < wait <= 3_600
        assert (await order(served, X2U, "1", HONEST)).status == 200


async def test_one_ipv6_network_is_one_client(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path, orders__unfunded_address_orders=1) as served:
        assert (await order(served, X2U, "1", "2001:db8::1")).status == 200
        assert (await order(served, X2U, "1", "2001:db8::2")).status == 429
        assert (await order(served, X2U, "1", "2001:db8:0:1::2")).status == 200


async def test_an_amount_above_the_share_is_refused_with_the_most(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path) as served:
        for swap, amount in ((X2U, "200"), (U2X, "40000")):
            refused = await order(served, swap, amount, ATTACKER)
            assert refused.body["error"]["code"] == "amount_above_maximum"
            most = refused.body["error"]["details"]["maxNow"]
            assert (await order(served, swap, most, ATTACKER)).status == 200


async def test_capabilities_state_what_the_caller_can_order_now(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path) as served:
        headers = {"x-forwarded-for": ATTACKER, "x-forwarded-proto": "https"}
        reported = await served.http("GET", "/agent/capabilities", headers=headers)
        limits = {row["direction"]: row["maxNow"] for row in reported.body["data"]["limits"]}
        assert (await order(served, X2U, limits["x2u"], ATTACKER)).status == 200
        assert 140 < float(limits["x2u"]) < 160


async def test_addresses_together_leave_a_part_to_known_callers(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path) as served:
        for number in range(8):
            await order(served, X2U, "150", f"203.0.113.{number}")
        refused = await order(served, X2U, "150", HONEST)
        assert (refused.status, refused.body["error"]["details"]["scope"]) == (429, "addresses")
        params = {**X2U, "amount": "150"}
        headers = {"x_agent_rpc_token": TOKEN, "x_forwarded_proto": "https"}
        by_token = await served.rpc("swap.execute", params, **headers)
        assert by_token.body["result"]["ok"], by_token.body


async def test_rate_limited_order_over_json_rpc_is_a_result(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path, orders__unfunded_token_orders=1) as served:
        params = {**X2U, "amount": "1"}
        headers = {"x_agent_rpc_token": TOKEN, "x_forwarded_proto": "https"}
        assert (await served.rpc("swap.execute", params, **headers)).body["result"]["ok"]
        refused = await served.rpc("swap.execute", params, **headers)
        assert (refused.status, refused.body["result"]["state"]) == (200, "rate_limited")
        assert int(refused.headers["retry-after"]) > 3_500


async def test_a_cancelled_order_frees_its_place(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path, orders__unfunded_address_orders=1) as served:
        data = (await order(served, X2U, "1", ATTACKER)).body["data"]
        assert (await order(served, X2U, "1", ATTACKER)).status == 429
        path = f"/agent/swap/cancel/{data['order']['orderId']}"
        headers = {"x-forwarded-proto": "https"}
        body = {"sessionId": data["sessionId"]}
        assert (await served.http("POST", path, json=body, headers=headers)).status == 200
        assert (served.count("reservations"), await reserved(served, "arbitrum")) == (0, 0)
        assert (await order(served, X2U, "1", ATTACKER)).status == 200


async def sandbox(served: Served, operation: str, **params: Any) -> None:
    headers = {"x_agent_rpc_token": TOKEN, "x_forwarded_proto": "https"}
    answer = await served.rpc(f"sandbox.{operation}", params, **headers)
    assert answer.body["result"]["ok"], answer.body


async def until_status(served: Served, order_id: str, *statuses: str) -> None:
    async with asyncio.timeout(60):
        while True:
            found = await served.up.service.store.order(order_id)
            if found is not None and found.status in statuses:
                return
            await asyncio.sleep(0.02)


async def until_free(served: Served) -> None:
    async with asyncio.timeout(60):
        while True:
            if await reserved(served, "arbitrum") == 0:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("amount", "status"), [("0.001", 429), ("1", 200)])
async def test_only_a_funded_order_frees_its_place(
    tmp_path: Path, amount: str, status: int
) -> None:
    async with behind_proxy(tmp_path, orders__unfunded_address_orders=1) as served:
        data = (await order(served, X2U, "1", ATTACKER)).body["data"]
        await sandbox(served, "fault", fault="pause_blocks")
        await sandbox(served, "fund", orderId=data["order"]["orderId"], amount=amount)
        await until_status(served, data["order"]["orderId"], "deposit_detected")
        assert (await order(served, X2U, "1", ATTACKER)).status == status


async def test_the_end_of_the_window_frees_the_reservation_at_once(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path, orders__unfunded_address_orders=1) as served:
        data = (await order(served, X2U, "100", ATTACKER)).body["data"]
        assert await reserved(served, "arbitrum") > 0
        await sandbox(served, "fault", fault="advance_clock", seconds=3_601)
        await until_free(served)
        found = await served.up.service.store.order(data["order"]["orderId"])
        assert found is not None
        assert found.status == "awaiting_deposit"  # the late window is still open
        assert (await order(served, X2U, "100", ATTACKER)).status == 200


async def test_daily_order_limit_of_an_address_survives_a_restart(tmp_path: Path) -> None:
    """The limit protects the database: each order keeps a row for ever, also if cancelled."""
    limit = {"orders__address_orders_a_day": 2}
    async with behind_proxy(tmp_path, **limit) as served:
        for _ in range(2):
            data = (await order(served, X2U, "1", ATTACKER)).body["data"]
            path = f"/agent/swap/cancel/{data['order']['orderId']}"
            headers = {"x-forwarded-proto": "https"}
            body = {"sessionId": data["sessionId"]}
            assert (await served.http("POST", path, json=body, headers=headers)).status == 200
        refused = await order(served, X2U, "1", ATTACKER)
        assert refused.status == 429
        assert "2 orders today" in refused.body["error"]["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
    async with behind_proxy(tmp_path, **limit) as served:
        assert (await order(served, X2U, "1", ATTACKER)).status == 429
        assert (await order(served, X2U, "1", HONEST)).status == 200
        for _ in range(3):
            params = {**X2U, "amount": "1"}
            headers = {"x_agent_rpc_token": TOKEN, "x_forwarded_proto": "https"}
            answer = await served.rpc("swap.execute", params, **headers)
            assert answer.body["result"]["ok"], "a token is not bounded by the day"
        assert all_rows(served.up.database, "SELECT max(orders) FROM order_counts") == [(3,)]


async def test_reservations_keep_their_client_over_a_restart(tmp_path: Path) -> None:
    limit = {"orders__unfunded_address_orders": 1}
    async with behind_proxy(tmp_path, **limit) as served:
        assert (await order(served, X2U, "1", ATTACKER)).status == 200
        (row,) = all_rows(served.up.database, "SELECT client FROM reservations")
        assert row[0].startswith("address:")
        assert ATTACKER not in row[0]
    async with behind_proxy(tmp_path, **limit) as served:
        assert (await order(served, X2U, "1", ATTACKER)).status == 429
        assert (await order(served, X2U, "1", HONEST)).status == 200


async def test_late_deposit_is_refunded_when_the_wallet_cannot_pay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_proxy(tmp_path) as served:
        data = (await order(served, X2U, "100", ATTACKER)).body["data"]
        order_id = data["order"]["orderId"]
        await sandbox(served, "fault", fault="advance_clock", seconds=3_601)
        monkeypatch.setitem(HELD, "arbitrum", 10**6)
        await sandbox(served, "fund", orderId=order_id, amount="100")
        await until_status(served, order_id, "refunding")
        found = await served.up.service.store.order(order_id)
        assert found is not None
        assert found.error_message == (
            "The deposit came late, when the service could not pay for it."
        )


@pytest.fixture
def integrated(tmp_path: Path) -> Any:
    """A central service that has the sidecar as an integrator with a key."""
    key = "k" * 32
    digest = hashlib.sha256(key.encode()).hexdigest()
    central = serving(tmp_path / "central", {"RPCSVC_INTEGRATORS": f"sidecar:0:{digest}"})
    return central, key


async def test_twenty_four_orders_behind_a_sidecar_leave_it_to_others(
    tmp_path: Path, integrated: Any
) -> None:
    running_central, key = integrated
    flags = {
        "trusted_proxies": "127.0.0.0/8",
        "upstream__api_key": key,
        "upstream__creations_per_minute": 600,
        "upstream__calls_per_minute": 6_000,
    }
    async with running_central as central, beside(central, tmp_path / "side", **flags) as sidecar:
        back = {**U2X, "to": STAGENET}
        amounts = [(X2U, "60"), (back, "10000")] * 12
        taken = [await order(sidecar, swap, amount, ATTACKER) for swap, amount in amounts]
        refused = [answer for answer in taken if answer.status != 200]
        assert {answer.body["error"]["code"] for answer in refused} == {"rate_limited"}
        for swap, amount in ((X2U, "60"), (back, "10000")):
            honest = await order(sidecar, swap, amount, HONEST)
            assert honest.status == 200, honest.body


async def test_sidecar_at_its_reservation_limit_pauses_no_other_client(
    tmp_path: Path,
) -> None:
    """The upstream refuses only the reservation; other calls of the sidecar continue."""
    async with (
        serving(tmp_path / "central", orders__unfunded_address_orders=1) as central,
        beside(central, tmp_path / "side") as sidecar,
    ):
        params = {**X2U, "amount": "1"}
        assert (await sidecar.post("/agent/swap/execute", params)).status == 200
        refused = await sidecar.post("/agent/swap/execute", params)
        assert (refused.status, refused.body["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) > 300
        assert sidecar.count("relays") == 1
        assert (await sidecar.up.engine.health()).ok
        made = served_order(sidecar)
        body = {"sessionId": made["sessionId"]}
        path = f"/agent/swap/cancel/{made['orderId']}"
        assert (await sidecar.post(path, body)).status == 200
        assert (await sidecar.post("/agent/swap/execute", params)).status == 200


async def test_sidecar_out_of_tickets_goes_on(tmp_path: Path) -> None:
    """The upstream takes no more tickets of the sidecar today; it is not left alone for a day."""
    async with (
        serving(tmp_path / "central", support__tickets_per_client=1) as central,
        beside(central, tmp_path / "side") as sidecar,
    ):
        params = {**X2U, "amount": "1"}
        assert (await sidecar.post("/agent/swap/execute", params)).status == 200
        engine: Any = sidecar.up.engine
        ticket = Ticket("tkt_1", 0, "agent", "Where is it?", None, None, None)
        order_id = served_order(central)["orderId"]
        await engine.pass_on(order_id, ticket)
        with pytest.raises(ServiceError):
            await engine.pass_on(order_id, ticket)
        assert central.count("tickets") == 1
        assert (await sidecar.post("/agent/swap/execute", params)).status == 200


def served_order(served: Served) -> Json:
    (row,) = all_rows(served.up.database, "SELECT order_id, session_id FROM orders")
    return {"orderId": row[0], "sessionId": row[1]}
