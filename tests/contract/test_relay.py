"""Orders at an upstream: made at most once over lost answers, and followed to their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from monero.address import Address

from rpcsvc.bootstrap import local_service
from rpcsvc.cli.main import run
from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import SettingsError, load_settings
from rpcsvc.settlement.upstream.wiring import V1
from rpcsvc.store.changes import Change, RelayRecord, RelayState
from tests.contract import upstream_server as does
from tests.contract.bff import ORDER, TO_XMR, post
from tests.contract.relaying import (
    LOST,
    SWAP,
    Cutting,
    changed,
    create,
    environ_of,
    service,
    states,
)
from tests.contract.serving import EVM, Served, serving
from tests.contract.upstream_server import Behaviour
from tests.contract.v1_api import V1Api, v1_api
from tests.e2e.processes import until
from tests.logs import logs_of
from tests.operator_cli import on_socket
from tests.rows import one_row

pytestmark = pytest.mark.usefixtures("short_pauses")

OTHER = "0x8617E340B3D01FA5F11F306F4090FD50E238070D"
TWAP = {
    "enabled": True, "status": "active", "chunksCompleted": 1, "chunksTotal": 4, "filledQty": 1,
    "totalQty": 4, "chunkSizeUsd": 250, "intervalMs": 5000,
}  # fmt: skip
# A wallet's main address on stagenet.
STAGENET = Address(
    "59McWTPGc745SRWrSMoh8oTjoXoQq6sPUgKZ66dQWXuKFQ2q19h9gvhJNZcFTizcnT12r63NFgHiGd6gBCjabzmzHAMoyD6"
)
SESSION = "6f1c3f0e-8c1d-4c6e-9a53-0f2f9b8a7c11"
STRANGERS = "7f1c3f0e-8c1d-4c6e-9a53-0f2f9b8a7c22"


@pytest.fixture
async def api() -> AsyncIterator[V1Api]:
    async with v1_api() as ready:
        yield ready


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST.keys())
async def test_an_order_of_unknown_outcome_is_never_made_again(
    api: V1Api, tmp_path: Path, lost: Behaviour
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.lose.append(lost)
        for _ in range(3):
            answer = await create(served, "mine-0123456789a")
            assert answer["error"]["code"] == "unavailable"
            assert "depositAddress" not in str(answer)
        assert api.sent("POST", "/v1/order") == 1
        assert (served.count("orders"), states(served)) == (0, ["reconciling"])
        health = await (await served.client.get("/health")).json()
        assert health["checks"]["relay"]["status"] == "degraded"
        assert "1 upstream orders are in doubt" in health["checks"]["relay"]["detail"]
        other = await create(served, "another-0123456789abcdef")
        assert other["ok"]
    async with service(api.server.url, tmp_path) as served:
        assert (await create(served, "mine-0123456789a"))["error"]["code"] == "unavailable"
        assert states(served) == ["reconciling", "created"]
    assert api.sent("POST", "/v1/order") == 2


async def test_doubt_is_shown_to_the_operator_and_orders_go_on(api: V1Api, tmp_path: Path) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.lose.append(does.reset())
        assert not (await create(served, "mine-0123456789a"))["ok"]

        assert (await served.client.get("/health")).status == 503
        for path in ("/readyz", "/api/v1/health", "/bff/v1/health"):
            assert (await served.client.get(path)).status == 200
        assert (await create(served, "another-0123456789abcdef"))["ok"]


async def test_a_key_in_doubt_is_no_key_for_another_order(api: V1Api, tmp_path: Path) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.lose.append(does.reset())
        assert (await create(served, "mine-0123456789a"))["error"]["code"] == "unavailable"
        other = {**SWAP, "to": OTHER, "amount": "0.9", "idempotency-key": "mine-0123456789a"}
        asked = len(api.server.seen)

        answer = (await served.rpc("swap.create", other)).body["result"]

        assert answer["error"]["code"] == "idempotency_conflict"
        assert answer["error"]["details"] == {"fields": ["amount", "to"]}
        assert len(api.server.seen) == asked  # no call, not even for a price
        assert (await create(served, "mine-0123456789a"))["error"]["code"] == "unavailable"


WRONG: list[dict[str, Any]] = [
    {"depositAddress": "0x" + "1" * 40},
    {"depositAddress": "44" + "1" * 93},
    {"toAddress": "0x" + "2" * 40},
    {"depositAmount": "800000000001"},
    {"depositChainId": 1},
    {"expectedOutput": "-1"},
    {"expectedOutput": "0"},
    {"depositToken": "0x" + "3" * 40},
    {"depositTokenSymbol": "USDC"},
    {"expectedOutput": str(10**30)},
]


@pytest.mark.parametrize("change", WRONG)
async def test_an_answer_that_can_not_be_trusted_is_shown_to_nobody(
    api: V1Api, tmp_path: Path, change: dict[str, Any]
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.change = change
        answer = await create(served)
        assert answer["error"]["code"] == "unavailable"
        assert (served.count("orders"), states(served)) == (0, ["reconciling"])
        row = one_row(served.up.database, "SELECT upstream_id, raw, reason FROM relays")
        assert row[0] == "up-1"
        assert b"up-1" in row[1]
        assert row[2]


@pytest.mark.parametrize("named", ["orderId", "depositAddress"])
async def test_an_answer_with_another_orders_data_is_in_doubt(
    api: V1Api, tmp_path: Path, named: str
) -> None:
    async with service(api.server.url, tmp_path) as served:
        assert (await create(served))["ok"]
        api.change = {named: api.orders["up-1"][named]}
        answer = await create(served, "mine-0123456789a")
        assert answer["error"]["code"] == "unavailable"
        assert (served.count("orders"), states(served)) == (1, ["created", "reconciling"])
        health = await (await served.client.get("/health")).json()
        assert health["checks"]["relay"]["status"] == "degraded"


async def test_orders_of_an_upstream_with_payment_ids_are_all_taken(
    api: V1Api, tmp_path: Path
) -> None:
    """Its integrated addresses differ at their end only."""
    async with service(api.server.url, tmp_path) as served:
        for payment_id in ("1f0e2d3c4b5a6978", "1f0e2d3c4b5a6979"):
            api.change = {"depositAddress": str(STAGENET.with_payment_id(payment_id))}
            assert (await create(served))["ok"]
        api.change = {"depositAddress": str(STAGENET.with_payment_id("1f0e2d3c4b5a6978"))}
        answer = await create(served)
        assert answer["error"]["code"] == "unavailable", "one of them was given a second time"
        assert states(served) == ["created", "created", "reconciling"]


async def test_order_shows_what_the_upstream_agreed_to_not_its_quote(
    api: V1Api, tmp_path: Path
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.change = {"expectedOutput": "131000000"}
        data = (await create(served))["data"]
        assert data["order"]["expectedOutput"] == "131000000"
        assert (data["quote"]["expectedOutput"], data["quote"]["minReceived"]) == ("131", "130.68")


IN_VAIN: list[dict[str, Any]] = [
    {"expiresAt": "2020-01-01T00:00:00Z"},
    {"status": "failed"},
    {"expectedOutput": "130679999"},  # 130.68 USDC were quoted at the least
]


@pytest.mark.parametrize("change", IN_VAIN)
async def test_order_that_must_not_be_paid_is_hidden_and_frees_its_key(
    api: V1Api, tmp_path: Path, change: dict[str, Any]
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.change = change
        with logs_of("rpcsvc.settlement.upstream.relay") as lines:
            answer = await create(served, "mine-0123456789a")
        assert (answer["error"]["code"], answer["error"]["retryable"]) == ("unavailable", True)
        assert "depositAddress" not in str(answer)
        assert (served.count("orders"), states(served)) == (0, ["refused"])
        assert (await served.up.service.venue.progress())["relay"].ok
        upstream_id, raw, reason = one_row(
            served.up.database, "SELECT upstream_id, raw, reason FROM relays"
        )
        assert (upstream_id, b"up-1" in raw) == ("up-1", True)
        assert reason.startswith("not taken: ")
        assert [(line["event"], line["upstream_id"]) for line in lines] == [
            ("upstream_order_not_taken", "up-1")
        ]
        api.change = {}
        assert (await create(served, "mine-0123456789a"))["ok"]
        assert states(served) == ["refused", "created"]


@pytest.mark.parametrize("path", ["/orders", "/bridge/deposit"])
async def test_front_ends_get_no_order_that_has_expired(
    api: V1Api, tmp_path: Path, path: str
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.change = {"expiresAt": "2020-01-01T00:00:00Z"}
        body = ORDER if path == "/orders" else {"toAddress": EVM}
        answer = await post(served, path, body)
        assert (answer.status, answer.body["error"]["code"]) == (503, "unavailable")
        assert (served.count("orders"), states(served)) == (0, ["refused"])


@pytest.mark.parametrize("surface", ["agent", "bff"])
async def test_usdc_order_has_no_twap_config_where_only_xmr_is_cut(
    api: V1Api, tmp_path: Path, surface: str
) -> None:
    to = stagenet_subaddress(bytes(range(64)))
    async with service(api.server.url, tmp_path) as served:
        if surface == "agent":
            params = {"direction": "u2x", "chain": "arbitrum", "amount": "600", "to": to}
            assert (await served.rpc("swap.create", params)).body["result"]["ok"]
        else:
            body = {**TO_XMR, "fromAmount": "600000000", "toAddress": to}
            assert (await post(served, "/orders", body)).status == 200
    assert len(api.orders) == 1


async def test_a_key_that_was_forgotten_by_age_makes_an_order_again(
    api: V1Api, tmp_path: Path
) -> None:
    async with service(api.server.url, tmp_path) as served:
        first = await create(served, "mine-0123456789a")
        assert await served.up.service.store.forget_responses(2**62) == 1
        second = await create(served, "mine-0123456789a")
        assert second["ok"]
        assert second["data"]["order"]["orderId"] != first["data"]["order"]["orderId"]
        assert states(served) == ["created", "created"]


async def test_a_refusal_makes_nothing_and_frees_the_key(api: V1Api, tmp_path: Path) -> None:
    async with service(api.server.url, tmp_path) as served:
        small = {**SWAP, "amount": "0.000000009", "idempotency-key": "mine-0123456789a"}
        answer = (await served.rpc("swap.create", small)).body["result"]
        assert answer["error"]["code"] == "amount_below_minimum"
        assert states(served) == ["refused"]
        assert (await create(served, "mine-0123456789a"))["ok"]
        assert states(served) == ["refused", "created"]


async def test_a_call_that_the_service_did_not_survive_is_in_doubt(
    api: V1Api, tmp_path: Path
) -> None:
    async with service(api.server.url, tmp_path) as served:
        # The record after kill -9 between the claim and the answer.
        claim = RelayRecord(
            "ord_" + "0" * 26, RelayState.CLAIMED, 1, "", "public", "mine-0123456789a"
        )
        await served.up.service.store.commit(Change(relay=claim))
    async with service(api.server.url, tmp_path) as served:
        assert states(served) == ["reconciling"]
        assert (await create(served, "mine-0123456789a"))["error"]["code"] == "unavailable"
        assert api.sent("POST", "/v1/order") == 0


async def test_closing_a_claim_frees_its_key_under_a_running_service(
    api: V1Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.lose.append(does.reset())
        assert (await create(served, "mine-0123456789a"))["error"]["code"] == "unavailable"
        (claimed,) = await served.up.service.store.relays_in(RelayState.RECONCILING)
        async with on_socket(served.up):
            closed = await asyncio.to_thread(
                run,
                ("relays", "close", claimed.order_id, "--note", "not made there"),
                {"RPCSVC_DATA_DIR": str(tmp_path)},
                serve=no_service,
                local=no_service,
                private=no_service,
            )
        assert (closed, "not made there" in capsys.readouterr().out) == (0, True)
        answer = await create(served, "mine-0123456789a")
        assert answer["data"]["order"]["orderId"] != claimed.order_id
        assert states(served) == ["refused", "created"]
        health = await (await served.client.get("/health")).json()
        assert health["checks"]["relay"]["status"] == "ok"
    assert api.sent("POST", "/v1/order") == 2


def no_service(*_: Any) -> Any:
    raise AssertionError("the command works on the database")


async def status_of(served: Served, order_id: str) -> dict[str, Any]:
    answer = await served.rpc("swap.status", {"orderId": order_id})
    return dict(answer.body["result"])


async def test_a_command_that_runs_without_a_server_asks_for_its_order(
    api: V1Api, tmp_path: Path
) -> None:
    made = await in_process(api, tmp_path, "swap.create", SWAP)
    order_id = made["data"]["order"]["orderId"]
    seen = []
    for said in ("awaiting_deposit", "confirming", "completed"):
        api.statuses = type(api.statuses)([said])
        answer = await in_process(api, tmp_path, "swap.status", {"orderId": order_id})
        seen.append((answer["state"], answer["data"]["amountDue"]))
    assert seen == [
        ("waiting_for_funding", "0.8"), ("deposit_detected", None), ("completed", None)
    ]  # fmt: skip
    asked = api.sent("GET", "/v1/order/")
    await in_process(api, tmp_path, "swap.status", {"orderId": order_id})
    assert api.sent("GET", "/v1/order/") == asked


async def in_process(api: V1Api, data_dir: Path, name: str, params: dict[str, Any]) -> Any:
    """The envelope of one call in a process that ends after it, like the command line."""
    flags = {"data_dir": str(data_dir)}
    environ = environ_of(api.server.url, "v1")
    settings = load_settings(config_file=None, environ=environ, flags=flags).settings
    operation = next(each for each in OPERATIONS if each.name == name)
    async with local_service(settings) as service:
        return json.loads(await service.call(operation, params, "r", None))


async def test_unknown_status_changes_nothing_and_aliases_count(api: V1Api, tmp_path: Path) -> None:
    async with service(api.server.url, tmp_path) as served:
        order_id = (await create(served))["data"]["order"]["orderId"]
        met: list[str] = []
        for said in ("confirming", "almost_done_i_think", "swapping", "SUCCESS!!", "success"):
            api.statuses.append(said)
            api.statuses.popleft() if len(api.statuses) > 1 else None
            api.asked.clear()
            await served.rpc("swap.status", {"orderId": order_id})
            async with asyncio.timeout(180):
                await api.asked.wait()
                api.asked.clear()
                if said in ("confirming", "swapping", "success"):
                    await changed(served, order_id, _STATUS[said])
            met.append((await status_of(served, order_id))["state"])
        assert met == [
            "deposit_detected", "deposit_detected", "swap_processing", "swap_processing",
            "completed",
        ]  # fmt: skip
        data = (await status_of(served, order_id))["data"]
        assert data["order"]["actualOutput"] == str(132_000_000)
        assert data["order"]["depositTxHash"] == "ab" * 32
        assert data["amountDue"] is None


_STATUS = {"confirming": "deposit_detected", "swapping": "executing_swap", "success": "completed"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("toAddress", OTHER), ("depositAddress", stagenet_subaddress(bytes(range(64))))],
)
async def test_report_of_another_order_under_this_id_is_rejected(
    api: V1Api, tmp_path: Path, field: str, value: str
) -> None:
    async with service(api.server.url, tmp_path) as served:
        order_id = (await create(served))["data"]["order"]["orderId"]
        api.change_status = {field: value}
        api.statuses = type(api.statuses)(["completed"])
        with logs_of("rpcsvc.settlement.upstream.calls") as lines:

            async def was_reported() -> bool:
                return bool(lines)

            assert await until(was_reported)
        assert lines[0]["event"] == "upstream_call_failed"
        assert lines[0]["reason"].endswith(f"{field} is not that of the order.")
        assert (await status_of(served, order_id))["state"] == "waiting_for_funding"
        api.change_status = {}
        async with asyncio.timeout(180):
            await changed(served, order_id, "completed")


async def test_time_between_two_chunks_adds_no_history_line(api: V1Api, tmp_path: Path) -> None:
    async with service(api.server.url, tmp_path) as served:
        order_id = (await create(served))["data"]["order"]["orderId"]
        api.statuses = type(api.statuses)(["executing_swap"])
        for left in (14_000, 11_000, 10_001, 10_000):
            api.change_status = {"twap": {**TWAP, "estimatedTimeRemainingMs": left}}
            api.asked.clear()
            async with asyncio.timeout(180):
                await api.asked.wait()
                api.asked.clear()
                await api.asked.wait()  # so that the first status is recorded
        reports = "SELECT count(*) FROM event_log WHERE event = 'UpstreamReported'"
        assert one_row(served.up.database, reports) == (2,)
        seen = await (await served.client.get(f"/bff/v1/orders/{order_id}")).text()
        assert '"estimatedTimeRemainingMs":10000}' in seen


async def test_undocumented_progress_word_is_not_passed_on(api: V1Api, tmp_path: Path) -> None:
    async with service(api.server.url, tmp_path) as served:
        order_id = (await create(served))["data"]["order"]["orderId"]
        odd = {**TWAP, "status": "paused", "estimatedTimeRemainingMs": 0}
        api.change_status = {"twap": odd}
        api.statuses = type(api.statuses)(["executing_swap"])
        async with asyncio.timeout(180):
            await changed(served, order_id, "executing_swap")
        seen = await (await served.client.get(f"/bff/v1/orders/{order_id}")).json()
        assert "twap" not in seen


@pytest.mark.parametrize(
    ("said", "field"), [("refunded", "refundTxHash"), ("failed", "errorMessage"), ("expired", None)]
)
async def test_every_terminal_status_is_reported(
    api: V1Api, tmp_path: Path, said: str, field: str | None
) -> None:
    async with service(api.server.url, tmp_path) as served:
        order_id = (await create(served))["data"]["order"]["orderId"]
        api.statuses = type(api.statuses)([said])
        async with asyncio.timeout(180):
            await changed(served, order_id, said)
        answer = await status_of(served, order_id)
        assert answer["state"] == "terminal_failure"
        assert answer["data"]["outcome"] == said
        if field is not None:
            assert answer["data"]["order"][field]
        polls = api.sent("GET", "/v1/order/")
        await status_of(served, order_id)
        assert api.sent("GET", "/v1/order/") == polls


async def test_status_is_served_from_the_store_and_the_limit_is_kept(
    api: V1Api, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"CREATIONS_PER_MINUTE": 40, "CALLS_PER_MINUTE": 50}
    async with service(api.server.url, tmp_path, **limits) as served:
        # Quotes for this many orders fit in the budget beside the calls that follow orders.
        made = [(await create(served))["data"]["order"]["orderId"] for _ in range(10)]
        for order_id in made * 30:
            assert (await status_of(served, order_id))["state"] == "waiting_for_funding"
        calls = api.sent("GET", "/v1/order/") + api.sent("POST", "/v1/quote")
        assert calls <= 50


async def test_the_published_limits_are_never_overstepped(api: V1Api, tmp_path: Path) -> None:
    api.most_creations, api.most_calls = V1.creations_per_minute, V1.calls_per_minute
    async with service(api.server.url, tmp_path) as served:
        answers = await asyncio.gather(
            *(create(served, f"key {n}-0123456789abcdef") for n in range(8))
        )
        made = [answer for answer in answers if answer["ok"]]
        assert len(made) == V1.creations_per_minute
        for refused in (answer for answer in answers if not answer["ok"]):
            assert refused["error"]["code"] == "unavailable"
        assert sorted(states(served)) == ["created"] * 5 + ["refused"] * 3
        assert api.sent("POST", "/v1/order") == V1.creations_per_minute
        assert len(api.server.seen) <= V1.creations_per_minute + V1.calls_per_minute
        again = await create(served, "key 0-0123456789abcdef")
        assert again["ok"] is answers[0]["ok"]


async def test_orders_are_made_and_followed_under_a_flood_of_quotes(
    api: V1Api, tmp_path: Path
) -> None:
    async with service(api.server.url, tmp_path) as served:
        assert (await create(served))["ok"]
        params = {name: SWAP[name] for name in ("direction", "chain", "amount")}

        quotes = await asyncio.gather(
            *(served.rpc("swap.quote", params) for _ in range(3 * V1.calls_per_minute))
        )

        refused = [quote for quote in quotes if not quote.body["result"]["ok"]]
        assert refused
        assert {quote.body["result"]["error"]["code"] for quote in refused} == {"unavailable"}
        before = api.sent("GET", "/v1/order/")
        async with asyncio.timeout(30):
            while api.sent("GET", "/v1/order/") < before + 2:
                api.asked.clear()
                await api.asked.wait()
        assert (await create(served))["ok"]


async def test_integrators_have_no_place_in_front_of_an_upstream(
    api: V1Api, tmp_path: Path
) -> None:
    environ = {"RPCSVC_INTEGRATORS": "acme:1:" + "0" * 64, "RPCSVC_ENGINE": "upstream"}
    with pytest.raises(SettingsError, match="integrators"):
        async with serving(tmp_path, {**environ, "RPCSVC_UPSTREAM__URL": api.server.url}):
            pass


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST.keys())
async def test_lost_answer_is_retried_with_its_key_and_makes_one_order(
    tmp_path: Path, lost: Behaviour
) -> None:
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting = Cutting(server, central.url)
        cutting.lose = [lost, lost]
        async with service(server.url, tmp_path / "sidecar", "bff") as sidecar:
            answer = await create(sidecar, "mine-0123456789a")
            async with asyncio.timeout(180):
                while not answer["ok"]:
                    assert answer["error"]["code"] == "unavailable"
                    answer = await create(sidecar, "mine-0123456789a")
            assert (sidecar.count("orders"), central.count("orders")) == (1, 1)
            assert states(sidecar) == ["created"]
            again = await create(sidecar, "mine-0123456789a")
            assert again["data"] == answer["data"]
            assert (await sidecar.up.service.venue.progress())["relay"].ok


@pytest.mark.parametrize("is_made", [True, False])
async def test_a_key_in_doubt_is_answered_though_no_price_can_be_had(
    tmp_path: Path, is_made: bool
) -> None:
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting = Cutting(server, central.url)
        async with service(server.url, tmp_path / "sidecar", "bff") as sidecar:
            cutting.lose, cutting.lose_calls = [does.reset()] * 4, not is_made
            assert (await create(sidecar, "mine-0123456789a"))["error"]["code"] == "unavailable"
            assert states(sidecar) == ["reconciling"]
            cutting.lose, cutting.lose_calls, cutting.no_price = [], False, True

            answer = await create(sidecar, "mine-0123456789a")

            assert answer["ok"], answer
            assert (sidecar.count("orders"), central.count("orders")) == (1, 1)
            agreed = answer["data"]["order"]["expectedOutput"]
            reported = answer["data"]["quote"]
            assert agreed == str(round(float(reported["expectedOutput"]) * 10**6))
            assert float(reported["rate"]) == pytest.approx(float(reported["expectedOutput"]) / 0.8)
            assert float(reported["minReceived"]) == 0  # unknown: no quote was answered
            refused = await create(sidecar, "another-0123456789abcdef")
            assert refused["error"]["code"] == "amount_below_minimum"


async def test_key_in_doubt_is_reported_where_it_cannot_be_resent(
    api: V1Api, tmp_path: Path
) -> None:
    async with service(api.server.url, tmp_path) as served:
        api.lose.append(does.reset())
        first = await create(served, "mine-0123456789a")
        api.no_price = True

        again = await create(served, "mine-0123456789a")

        assert again["error"] == first["error"]
        assert "Repeat the call with its idempotency key" in again["error"]["message"]


async def test_key_of_a_lost_call_makes_no_order_for_a_stranger(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting = Cutting(server, central.url)
        async with service(server.url, tmp_path / "sidecar", "bff") as sidecar:
            mine = {**SWAP, "sessionId": SESSION, "idempotency-key": "mine-0123456789a"}
            cutting.lose_calls = True
            lost = (await sidecar.rpc("swap.create", mine)).body["result"]
            assert lost["error"]["code"] == "unavailable"
            cutting.lose_calls = False
            theirs = {**mine, "to": OTHER, "sessionId": STRANGERS}

            answer = (await sidecar.rpc("swap.create", theirs)).body["result"]

            assert answer["error"]["code"] == "idempotency_conflict"
            assert answer["error"]["details"] == {"fields": ["sessionId", "to"]}
            assert central.count("orders") == 0
            made = (await sidecar.rpc("swap.create", mine)).body["result"]
            assert made["data"]["order"]["toAddress"] == EVM
            assert made["data"]["sessionId"] == SESSION


async def test_refund_address_is_refused_where_the_upstream_takes_none(
    api: V1Api, tmp_path: Path
) -> None:
    async with service(api.server.url, tmp_path) as served:
        params = {**SWAP, "refundAddress": str(STAGENET)}
        answer = (await served.rpc("swap.create", params)).body["result"]
        assert answer["error"]["code"] == "invalid_input"
        assert answer["validationErrors"][0]["field"] == "refundAddress"
        assert api.sent("POST", "/v1/order") == 0
        assert (served.count("orders"), states(served)) == (0, [])
