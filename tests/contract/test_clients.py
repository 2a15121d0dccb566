"""Clients of the settings: identity, scopes, destinations and limits, on every surface."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.errors import SettingsError
from rpcsvc.serving import reload_settings
from rpcsvc.settings import load_settings
from tests import mcp
from tests.contract import bff, paying
from tests.contract.by_clients import (
    DESK,
    ENVIRON,
    OTHER_EVM,
    SHOP,
    SURFACES,
    OrderRefused,
    client,
    client_of,
    made_id,
    order,
    refusal,
    set_clients,
    with_clients,
)
from tests.contract.checkout import Ordered, fault
from tests.contract.serving import BACK, EVM, MONERO, SWAP, TOKEN, Served, serving
from tests.contract.sidecar import beside
from tests.logs import logs_of
from tests.rows import all_rows, one_row

Json = dict[str, Any]
# Of 0.8 XMR: one is 165 USD on the sandbox.
WORTH = 132 * 10**6


# --- identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", SURFACES)
async def test_token_names_its_client_on_every_surface(tmp_path: Path, surface: str) -> None:
    async with with_clients(tmp_path) as served:
        for token, name in ((DESK, "desk"), (SHOP, "shop"), (TOKEN, "default")):
            made = await order(served, surface, token)
            assert client_of(served, made) == name


async def test_calls_without_a_token_have_no_client(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        made = made_id(await served.post("/agent/swap/create", SWAP))
        assert client_of(served, made) is None


@pytest.mark.parametrize("surface", ["http", "bearer", "mcp", "bff"])
async def test_wrong_token_is_refused_where_none_is_needed(tmp_path: Path, surface: str) -> None:
    """In the shared namespace, the retry of a replaced token would make a second order."""
    async with with_clients(tmp_path) as served:
        refused = await refusal(served, surface, "no-token-of-any-client-here")
        assert (refused.status, refused.code) == (401, "unauthorized")
        assert served.count("orders") == 0


async def test_clients_alone_close_rpc_to_callers_without_token(tmp_path: Path) -> None:
    async with serving(tmp_path, clients={"desk": client(DESK)}) as served:
        assert (await served.rpc("swap.plan", {})).status == 401
        assert (await served.rpc("swap.plan", {}, x_agent_rpc_token=DESK)).status == 200


async def test_both_tokens_of_a_rotation_are_one_client(tmp_path: Path) -> None:
    both = client(DESK)
    both["token_sha256"] += client(SHOP)["token_sha256"]
    async with serving(tmp_path, clients={"desk": both}) as served:
        first = await order(served, "http", DESK, "k" * 20)
        assert await order(served, "rpc", SHOP, "k" * 20) == first


async def test_clients_token_sees_no_metrics_and_no_details(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        for token, status in ((DESK, 401), (TOKEN, 200)):
            bearer = {"authorization": f"Bearer {token}"}
            assert (await served.client.get("/metrics", headers=bearer)).status == status


async def test_calls_are_counted_by_client_and_outcome(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_order_usd=1) as served:
        await order(served, "http", SHOP)
        await refusal(served, "rpc")
        bearer = {"authorization": f"Bearer {TOKEN}"}
        text = await (await served.client.get("/metrics", headers=bearer)).text()
        assert 'rpcsvc_client_calls_total{client="shop",outcome="ok"} 1.0' in text
        assert 'rpcsvc_client_calls_total{client="desk",outcome="spend_limit"} 1.0' in text


# --- keys and orders -----------------------------------------------------------------------------


async def test_key_of_another_client_makes_an_order_of_its_own(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        key = "a-key-that-was-guessed"
        made = [await order(served, "http", token, key) for token in (DESK, SHOP, TOKEN)]
        public = made_id(await served.post("/agent/swap/create", SWAP, idempotency_key=key))
        assert len({*made, public}) == 4
        assert await order(served, "rpc", DESK, key) == made[0]
        namespaces = all_rows(served.up.database, "SELECT namespace FROM idempotency_keys")
        assert {row[0] for row in namespaces} == {"client:desk", "client:shop", "rpc", "public"}


@pytest.mark.parametrize("surface", ["http", "rpc", "mcp"])
async def test_list_without_session_has_the_clients_orders_only(
    tmp_path: Path, surface: str
) -> None:
    async with with_clients(tmp_path) as served:
        mine = [await order(served, each) for each in ("http", "rpc", "bff")]
        other_one = await order(served, "http", SHOP)
        page = await listed(served, surface, limit=2)
        rest = await listed(served, surface, after=page["data"]["nextAfter"])
        found = [each["orderId"] for each in page["data"]["orders"] + rest["data"]["orders"]]
        assert found == mine[::-1]
        stranger = await listed(served, surface, after=other_one)
        assert stranger["error"]["code"] == "order_not_found"


async def listed(served: Served, surface: str, **given: Any) -> Json:
    name = {"x_agent_rpc_token": DESK}
    if surface == "http":
        headers = {"x-agent-rpc-token": DESK}
        found = await served.http("GET", "/agent/swap/list", params=given, headers=headers)
        return dict(found.body)
    if surface == "rpc":
        return dict((await served.rpc("swap.list", given, **name)).body["result"])
    call = {"name": "list_swaps", "arguments": given}
    answer = await mcp.stateless(served, "tools/call", call, **name)
    return dict(answer.body["result"]["structuredContent"])


async def test_list_without_session_and_token_asks_for_the_session(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        answer = await served.http("GET", "/agent/swap/list")
        assert answer.body["missingInputs"] == ["sessionId"]


async def test_clients_token_is_no_session_of_another_order(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        made = await order(served, "http", SHOP)
        params = {"sessionId": str(uuid.uuid4())}
        path = f"/agent/swap/cancel/{made}"
        answer = await served.post(path, params, x_agent_rpc_token=DESK)
        assert answer.body["error"]["code"] == "verification_failed"


# --- scopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", SURFACES)
async def test_forbidden_names_the_scope_and_claims_no_key(tmp_path: Path, surface: str) -> None:
    key = "the-same-key-all-along"
    async with serving(tmp_path, ENVIRON, clients={"desk": client(DESK, "read")}) as served:
        refused = await refusal(served, surface, key=key)
        assert (refused.code, refused.details["scope"]) == ("forbidden", "order")
        assert refused.status == (200 if surface in ("rpc", "mcp") else 403)
        set_clients(served, desk=client(DESK, "order"))
        assert client_of(served, await order(served, surface, key=key)) == "desk"


async def test_scope_may_be_one_operation(tmp_path: Path) -> None:
    clients = {"desk": client(DESK, "swap.create")}
    async with serving(tmp_path, ENVIRON, clients=clients) as served:
        await order(served, "http")
        answer = await served.rpc("swap.quote", {}, x_agent_rpc_token=DESK)
        assert answer.body["result"]["error"]["code"] == "forbidden"
        stream = {"accept": "text/event-stream", "x-agent-rpc-token": DESK}
        path = f"/agent/swap/events/ord_{'0' * 26}"
        assert (await served.http("GET", path, headers=stream)).status == 403


async def test_unknown_scope_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"swap\.qoute.*nearest is swap\.quote"):
        async with serving(tmp_path, clients={"desk": client(DESK, "swap.qoute")}):
            pass


# --- destinations --------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", SURFACES)
async def test_order_pays_only_the_clients_destinations(tmp_path: Path, surface: str) -> None:
    key = "the-same-key-all-along"
    async with with_clients(tmp_path, destinations=[EVM.lower(), MONERO]) as served:
        refused = await refusal(served, surface, key=key, to=OTHER_EVM)
        assert refused.code == "destination_not_allowed"
        assert refused.status == (200 if surface in ("rpc", "mcp") else 400)
        assert served.count("orders") == served.count("idempotency_keys") == 0
        await order(served, surface, key=key)


@pytest.mark.parametrize("path", ["/agent/swap/create", "/agent/swap/execute"])
async def test_usdc_order_needs_a_refund_address_of_the_list(tmp_path: Path, path: str) -> None:
    async with with_clients(tmp_path, destinations=[EVM, MONERO]) as served:
        for refund in ({}, {"refundAddress": OTHER_EVM}):
            answer = await served.post(path, {**BACK, **refund}, x_agent_rpc_token=DESK)
            assert answer.body["error"]["code"] == "destination_not_allowed"
            assert [each["field"] for each in answer.body["validationErrors"]] == ["refundAddress"]
        made = {**BACK, "refundAddress": EVM}
        assert (await served.post(path, made, x_agent_rpc_token=DESK)).status == 200


async def test_plan_refuses_a_destination_that_create_would(tmp_path: Path) -> None:
    async with with_clients(tmp_path, destinations=[EVM]) as served:
        given = {**SWAP, "to": OTHER_EVM}
        answer = await served.post("/agent/swap/plan", given, x_agent_rpc_token=DESK)
        assert answer.body["error"]["code"] == "destination_not_allowed"


async def test_bridge_pays_only_the_clients_destinations(tmp_path: Path) -> None:
    async with with_clients(tmp_path, destinations=[EVM, MONERO]) as served:
        for to, status in ((OTHER_EVM, 400), (EVM, 200)):
            answer = await bff.post(
                served, "/bridge/deposit", {"toAddress": to}, x_agent_rpc_token=DESK
            )
            assert answer.status == status, answer.body


async def needing_an_address(served: Served) -> Ordered:
    """An order of the client that has a refund without an address."""
    made = await served.post("/agent/swap/execute", SWAP, x_agent_rpc_token=DESK)
    found = Ordered(made.body["data"]["order"]["orderId"], made.body["data"]["sessionId"])
    await served.post("/sandbox/fund", {"orderId": found.order_id, "amount": "500"})
    async with asyncio.timeout(60):
        while True:
            seen = (await served.http("GET", f"/agent/swap/status/{found.order_id}")).body
            if seen["data"]["actionRequired"] == "refund_address":
                return found
            await asyncio.sleep(0.02)


ELSEWHERE = stagenet_subaddress(bytes([7]) * 64)


@pytest.mark.parametrize("token", [DESK, SHOP, None])
async def test_later_refund_address_is_one_of_the_list_whoever_calls(
    tmp_path: Path, token: str | None
) -> None:
    """The session of a limited client may be in other hands."""
    async with with_clients(tmp_path, destinations=[EVM, MONERO]) as served:
        made = await needing_an_address(served)
        name = {} if token is None else {"x_agent_rpc_token": token}
        path = f"/agent/swap/refund-address/{made.order_id}"
        given = {"sessionId": made.session_id, "address": ELSEWHERE}
        answer = await served.post(path, given, **name)
        assert answer.body["error"]["code"] == "destination_not_allowed", answer.body
        # Only the client itself learns where its money may go.
        assert (MONERO in json.dumps(answer.body)) is (token == DESK)
        ticket = {
            "orderId": made.order_id, "sessionId": made.session_id, "message": "refund me",
            "walletAddress": ELSEWHERE,
        }  # fmt: skip
        answer = await served.post("/agent/support/tickets", ticket, **name)
        assert answer.body["error"]["code"] == "destination_not_allowed"
        assert served.count("tickets") == 0
        form = {"address": ELSEWHERE, "secret": made.session_id, "confirmed": "yes"}
        page = await served.client.post(f"{made.path}/refund", data=form)
        assert page.status == 400
        sql = f"SELECT refund_address FROM orders WHERE order_id = '{made.order_id}'"
        assert one_row(served.up.database, sql)[0] is None
        good = await served.post(path, {**given, "address": MONERO}, **name)
        assert good.body["data"]["refundAddress"]["accepted"] is True


async def test_refund_waits_while_the_clients_table_is_gone(tmp_path: Path) -> None:
    async with with_clients(tmp_path, destinations=[EVM, MONERO]) as served:
        made = await needing_an_address(served)
        set_clients(served, shop=client(SHOP))
        path = f"/agent/swap/refund-address/{made.order_id}"
        given = {"sessionId": made.session_id, "address": MONERO}
        refused = await served.post(path, given)
        assert "do not have any more" in refused.body["error"]["message"]
        set_clients(served, desk=client(DESK, destinations=[MONERO]))
        assert (await served.post(path, given)).body["data"]["refundAddress"]["accepted"] is True


async def test_client_signs_only_for_orders_that_pay_its_list(tmp_path: Path) -> None:
    async with with_clients(tmp_path, destinations=[MONERO, EVM]) as served:
        public = await paying.new_order(served)
        payment = await paying.signed(await paying.offered(served, public))
        headers = {**paying.header(payment), "x-agent-rpc-token": DESK}
        answer = await served.http("POST", f"/agent/swap/fund/{public}", headers=headers)
        # It pays MONERO, and a refund would go back to the payer, who is not in the list.
        assert answer.body["error"]["code"] == "destination_not_allowed"
        assert paying.debits(served) == []
        del headers["x-agent-rpc-token"]
        await paying.fund(served, public, **headers)
        assert len(paying.debits(served)) == 1


# --- the worth of orders -------------------------------------------------------------------------


@pytest.mark.parametrize("surface", SURFACES)
async def test_order_above_max_order_usd_is_refused(tmp_path: Path, surface: str) -> None:
    key = "the-same-key-all-along"
    async with with_clients(tmp_path, max_order_usd=131) as served:
        refused = await refusal(served, surface, key=key)
        assert (refused.code, refused.details["limit"]) == ("spend_limit", "max_order_usd")
        assert refused.status == (200 if surface in ("rpc", "mcp") else 403)
        assert refused.details["orderUsd"] == "132"
        assert refused.details["freeAt"] is None
        assert served.count("orders") == served.count("idempotency_keys") == 0
        set_clients(served, desk=client(DESK, max_order_usd=132))
        await order(served, surface, key=key)


async def test_quote_above_a_limit_is_refused_alike(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_order_usd=131) as served:
        name = {"x_agent_rpc_token": DESK}
        quoted = {each: SWAP[each] for each in ("direction", "chain", "amount")}
        over_http = await served.post("/agent/swap/quote", quoted, **name)
        over_bff = await bff.post(served, "/quote", bff.TO_USDC, **name)
        for answer in (over_http, over_bff):
            assert (answer.status, answer.body["error"]["code"]) == (403, "spend_limit")
        exact = {**quoted, "receiveAmount": "140"}
        del exact["amount"]
        over = await served.post("/agent/swap/quote", exact, **name)
        assert over.body["error"]["code"] == "spend_limit"


@pytest.mark.parametrize("limit", [{"max_order_usd": 200}, {"max_day_usd": 200}])
async def test_larger_deposit_does_not_get_around_a_limit(tmp_path: Path, limit: Json) -> None:
    async with with_clients(tmp_path, **limit) as served:
        made = await served.post(
            "/agent/swap/create", {**SWAP, "refundAddress": MONERO}, x_agent_rpc_token=DESK
        )
        order_id = made.body["data"]["order"]["orderId"]
        await served.post("/sandbox/fund", {"orderId": order_id, "amount": "3"})
        ended = await paying.finished(served, order_id)
        assert ended["data"]["outcome"] == "refunded"


@pytest.mark.parametrize("surface", SURFACES)
async def test_day_limit_says_what_is_left_and_when_it_is_free(
    tmp_path: Path, surface: str
) -> None:
    async with with_clients(tmp_path, max_day_usd=300) as served:
        for _ in range(2):
            await order(served, surface)
        refused = await refusal(served, surface, key="the-key-of-tomorrow")
        assert refused.code == "spend_limit"
        shown = {name: refused.details[name] for name in ("limit", "usedUsd", "leftUsd")}
        assert shown == {"limit": "max_day_usd", "usedUsd": "264", "leftUsd": "36"}
        assert refused.details["freeAt"].endswith("T00:00:00.000Z")
        await order(served, surface, amount="0.2")
        await order(served, surface, SHOP)


async def test_day_limit_is_free_again_at_midnight(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_day_usd=132) as served:
        await order(served, "http")
        refused = await refusal(served, "http", key="the-key-of-tomorrow")
        now = served.up.service.clock.now_ms()
        to_midnight = 86_400_000 - now % 86_400_000
        await fault(served, "advance_clock", seconds=max(1, to_midnight // 1000 - 60))
        before = await refusal(served, "http", key="the-key-of-tomorrow")
        assert before.details == refused.details
        await fault(served, "advance_clock", seconds=61)
        await order(served, "http", key="the-key-of-tomorrow")
        assert (await refusal(served, "http")).details["freeAt"] > refused.details["freeAt"]


async def test_day_limit_outlasts_a_restart_and_a_rotation(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_day_usd=132) as served:
        await order(served, "http")
    rotated = client("a-new-token-of-the-desk-9876", max_day_usd=132)
    async with serving(tmp_path, ENVIRON, clients={"desk": rotated}) as served:
        refused = await refusal(served, "http", "a-new-token-of-the-desk-9876")
        assert refused.code == "spend_limit"


async def test_retry_gets_its_answer_though_the_day_is_used_up(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_day_usd=132) as served:
        first = await order(served, "http", key="the-key-of-the-first")
        set_clients(served, desk=client(DESK, max_day_usd=1, destinations=[OTHER_EVM]))
        assert await order(served, "rpc", key="the-key-of-the-first") == first


@pytest.mark.parametrize("limit", [{"max_day_usd": 400}, {"orders_per_minute": 3}])
async def test_batch_does_not_get_around_a_limit(tmp_path: Path, limit: Json) -> None:
    async with with_clients(tmp_path, **limit) as served:
        calls = [
            {"jsonrpc": "2.0", "id": n, "method": "service.swap.create", "params": SWAP}
            for n in range(50)
        ]
        body = json.dumps(calls).encode()
        answers = (await served.raw(body, x_agent_rpc_token=DESK)).body
        made = [each for each in answers if each.get("result", {}).get("ok")]
        assert len(made) == served.count("orders") == 3


async def test_50_calls_at_once_stay_within_the_day(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_day_usd=1_000) as served:
        surfaces = [SURFACES[number % 5] for number in range(50)]
        made = await asyncio.gather(
            *(order(served, surface) for surface in surfaces), return_exceptions=True
        )
        refused = [each for each in made if isinstance(each, OrderRefused)]
        assert {each.code for each in refused} <= {"spend_limit", "unavailable"}
        used = one_row(served.up.database, "SELECT units, orders FROM client_days")
        assert served.count("orders") == used[1] == 50 - len(refused)
        assert used[0] == used[1] * WORTH <= 1_000 * 10**6
        while used[0] + WORTH <= 1_000 * 10**6:  # those that gave way to others may come again
            await order(served, "http")
            used = one_row(served.up.database, "SELECT units, orders FROM client_days")
        assert (await refusal(served, "http")).code == "spend_limit"


async def test_bridge_takes_no_client_with_limits_in_usd(tmp_path: Path) -> None:
    async with with_clients(tmp_path, max_day_usd=1_000) as served:
        answer = await bff.post(
            served, "/bridge/deposit", {"toAddress": EVM}, x_agent_rpc_token=DESK
        )
        assert (answer.status, answer.body["error"]["code"]) == (403, "forbidden")


# --- budgets and spread --------------------------------------------------------------------------


async def test_orders_per_minute_are_the_clients_over_all_surfaces(tmp_path: Path) -> None:
    async with with_clients(tmp_path, orders_per_minute=4) as served:
        for surface in ("http", "rpc", "mcp", "bff"):
            await order(served, surface)
        over = await served.post("/agent/swap/create", SWAP, x_agent_rpc_token=DESK)
        assert (over.status, over.body["error"]["code"]) == (429, "rate_limited")
        assert int(over.headers["retry-after"]) > 0
        await order(served, "http", SHOP)


async def test_quote_and_order_have_the_clients_spread(tmp_path: Path) -> None:
    async with with_clients(tmp_path, spread_bps=0) as served:
        quoted = {each: SWAP[each] for each in ("direction", "chain", "amount")}
        for token, spread in ((DESK, "0"), (SHOP, "0.66")):
            name = {"x_agent_rpc_token": token}
            answer = await served.post("/agent/swap/quote", quoted, **name)
            assert answer.body["data"]["quote"]["fees"]["spread"] == spread
            made = await order(served, "rpc", token)
            sql = f"SELECT spread_bps FROM orders WHERE order_id = '{made}'"
            assert one_row(served.up.database, sql)[0] == (0 if token == DESK else 50)


async def test_integrators_key_leaves_the_clients_limits(tmp_path: Path) -> None:
    integrators = f"acme:0.5:{hashlib.sha256(b'key-of-acme').hexdigest()}"
    clients = {"desk": client(DESK, max_order_usd=100)}
    async with serving(tmp_path, ENVIRON, clients=clients, integrators=integrators) as served:
        both = {"x_agent_rpc_token": DESK, "x_api_key": "key-of-acme"}
        answer = await bff.post(served, "/orders", bff.ORDER, **both)
        assert answer.body["error"]["code"] == "spend_limit"


# --- reloading -----------------------------------------------------------------------------------


async def test_reload_takes_tokens_and_limits_for_the_next_call(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        await order(served, "http")
        set_clients(served, shop=client(SHOP, max_order_usd=1))
        assert (await refusal(served, "http")).code == "unauthorized"
        assert (await refusal(served, "http", SHOP)).code == "spend_limit"


async def test_reload_of_wrong_settings_changes_nothing(tmp_path: Path) -> None:
    def unreadable() -> Any:
        raise SettingsError(["clients.desk: is wrong"])

    async with with_clients(tmp_path) as served:
        with logs_of("rpcsvc.serving") as logs:
            set_clients(served, desk=client(DESK, "swap.qoute"))
            reload_settings(served.up.held, served.up.settings, unreadable)
        assert [each["event"] for each in logs] == ["settings_reload_refused"] * 2
        assert "swap.quote" in logs[0]["problems"][0]
        await order(served, "http")


async def test_reload_names_what_needs_a_restart(tmp_path: Path) -> None:
    async with with_clients(tmp_path) as served:
        changed = load_settings(
            config_file=None, environ=ENVIRON, flags={"port": 1, "clients": {}}
        ).settings
        with logs_of("rpcsvc.serving") as logs:
            reload_settings(served.up.held, changed, lambda: served.up.settings)
        keys = [each["key"] for each in logs if each["event"] == "setting_needs_restart"]
        assert "port" in keys
        assert "clients" not in keys


async def test_documents_say_that_rpc_needs_a_token_of_a_client(tmp_path: Path) -> None:
    async with serving(tmp_path, {}, clients={"desk": client(DESK)}) as served:
        assert (await served.rpc("capabilities", {})).status == 401
        response = await served.client.get("/.well-known/agent.json")
        assert (await response.json())["auth"]["jsonrpc"]["required"]


# --- a sidecar -----------------------------------------------------------------------------------


async def test_sidecar_keeps_to_its_clients_limits(tmp_path: Path) -> None:
    clients = {"desk": client(DESK, max_day_usd=300, destinations=[EVM])}
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar", clients=clients) as sidecar,
    ):
        made = await asyncio.gather(
            *(order(sidecar, surface) for surface in SURFACES), return_exceptions=True
        )
        codes = [each.code for each in made if isinstance(each, OrderRefused)]
        assert set(codes) <= {"spend_limit", "unavailable"}
        assert len(codes) >= 3
        assert central.count("orders") == sidecar.count("orders") == 5 - len(codes) > 0
        assert (await refusal(sidecar, "http", to=OTHER_EVM)).code == "destination_not_allowed"
        used = one_row(sidecar.up.database, "SELECT units, orders FROM client_days")
        assert used[1] == sidecar.count("orders")
        assert used[0] <= 300 * 10**6
        assert client_of(sidecar, next(each for each in made if isinstance(each, str))) == "desk"


async def test_sidecar_takes_no_spread_of_its_own() -> None:
    with pytest.raises(SettingsError, match="no spread_bps with the engine upstream"):
        load_settings(
            config_file=None,
            environ={"RPCSVC_ENGINE": "upstream"},
            flags={"clients": {"desk": client(DESK, spread_bps=1)}},
        )


async def test_task_without_the_scope_to_read_says_which(tmp_path: Path) -> None:
    async with serving(tmp_path, ENVIRON, clients={"desk": client(DESK, "order")}) as served:
        made = await order(served, "mcp")
        tasks = {"_meta": mcp.meta(extensions={"io.modelcontextprotocol/tasks": {}})}
        answer = await mcp.stateless(
            served, "tasks/get", {"taskId": made, **tasks}, x_agent_rpc_token=DESK, mcp_name=made
        )
        assert answer.body["error"]["code"] == -32602
        assert "scope read" in answer.body["error"]["message"]
