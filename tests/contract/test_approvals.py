"""Orders of clients that wait for a person: asked for, decided, and made once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rpcsvc.domain.clients import ApprovalState
from tests.contract import upstream_server as does
from tests.contract.by_clients import (
    DESK,
    ENVIRON,
    OTHER_EVM,
    SHOP,
    SURFACES,
    OrderRefused,
    client,
    order,
    refusal,
)
from tests.contract.checkout import fault
from tests.contract.operator_socket import over_socket
from tests.contract.relaying import Cutting, environ_of
from tests.contract.serving import BACK, EVM, SWAP, Served, serving
from tests.contract.sidecar import beside
from tests.rows import all_rows, one_row

Json = dict[str, Any]
KEY = "the-same-key-all-along"
# The order of these tests is worth 132 USD.
ABOVE = 100


def with_approval(data_dir: Path, **limits: Any) -> Any:
    """A service whose clients ``desk`` and ``shop`` need an approval above 100 USD."""
    wanted = {"approve_above_usd": ABOVE, **limits}
    clients = {"desk": client(DESK, **wanted), "shop": client(SHOP, **wanted)}
    return serving(data_dir, ENVIRON, clients=clients)


async def waiting(served: Served, surface: str = "http", **given: Any) -> str:
    """The id of the approval that an order waits for."""
    refused = await refusal(served, surface, **{"key": KEY, **given})
    assert refused.code == "approval_required"
    return str(refused.details["approval"]["id"])


async def decide(served: Served, approval: str, word: str = "grant") -> Json:
    async with over_socket(served) as socket:
        found = await socket.call(
            f"admin.approvals.{word}", {"approvalId": approval, "by": "Ada L."}
        )
        return dict(found["result"])


def states(served: Served) -> list[str]:
    return [row[0] for row in all_rows(served.up.database, "SELECT state FROM approvals")]


@pytest.mark.parametrize("surface", SURFACES)
async def test_approved_order_is_made_once_by_the_same_call(tmp_path: Path, surface: str) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served, surface)
        assert await waiting(served, surface) == approval
        assert served.count("orders") == served.count("idempotency_keys") == 0
        decided = (await decide(served, approval))["decided"]
        assert (decided["state"], decided["decidedBy"]) == ("granted", "Ada L.")
        made = await order(served, surface, key=KEY)
        assert await order(served, surface, key=KEY) == made
        row = one_row(served.up.database, "SELECT state, order_id, decided_by FROM approvals")
        assert row == ("used", made, "Ada L.")
        assert await waiting(served, surface, key="another-key-altogether") != approval


async def test_answer_has_the_state_and_the_approval(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        answer = await served.post("/agent/swap/create", SWAP, x_agent_rpc_token=DESK)
        assert (answer.status, answer.body["ok"]) == (403, False)
        assert answer.body["state"] == answer.body["error"]["code"] == "approval_required"
        approval = answer.body["data"]["approval"]
        assert sorted(approval) == ["expiresAt", "id", "reason"]
        assert "132 USD" in approval["reason"]
        assert "1 % worse than 0.8 XMR for 131.29 USDC." in approval["reason"]
        assert [each["action"] for each in answer.body["nextActions"]] == ["wait_for_approval"]


async def test_small_order_waits_for_nobody(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        await order(served, "http", amount="0.6")
        assert states(served) == []


async def test_copies_of_an_approved_call_make_one_order(tmp_path: Path) -> None:
    """With its key they are one call; without a key the grant is used up by the first."""
    async with with_approval(tmp_path) as served:
        for key in (KEY, None):
            await decide(served, await waiting(served, key=key))
            made = await asyncio.gather(
                *(order(served, each, key=key) for each in ("http", "rpc", "bearer") * 3),
                return_exceptions=True,
            )
            found = [each for each in made if isinstance(each, str)]
            assert len({*found}) == 1
            refused = [each.code for each in made if isinstance(each, OrderRefused)]
            assert set(refused) <= {"approval_required", "unavailable"}
        assert served.count("orders") == 2


@pytest.mark.parametrize(
    "change", [{"amount": "0.9"}, {"to": OTHER_EVM}, {"key": "another-key-altogether"}]
)
async def test_grant_is_for_these_very_terms(tmp_path: Path, change: Json) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        await decide(served, approval)
        assert await waiting(served, **change) != approval
        await order(served, "http", key=KEY)


async def test_grant_of_another_client_is_of_no_use(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        await decide(served, approval)
        assert await waiting(served, token=SHOP) != approval


@pytest.mark.parametrize(("rate", "is_made"), [("164", True), ("170", True), ("163", False)])
async def test_grant_covers_a_rate_worse_by_one_percent(
    tmp_path: Path, rate: str, is_made: bool
) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        await decide(served, approval)
        await fault(served, "set_rate", rate=rate)
        if is_made:
            await order(served, "http", key=KEY)
            assert states(served) == ["used"]
        else:
            assert await waiting(served) != approval
            assert states(served) == ["ended", "pending"]


async def test_denied_order_is_forbidden_and_not_asked_again(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        await decide(served, await waiting(served), "deny")
        refused = await refusal(served, "http", key=KEY)
        assert (refused.code, refused.details["approval"]["state"]) == ("forbidden", "denied")
        assert sorted(refused.details["approval"]) == ["expiresAt", "id", "state"]
        assert states(served) == ["denied"]


@pytest.mark.parametrize("is_granted", [True, False])
async def test_approval_ends_after_a_day(tmp_path: Path, is_granted: bool) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        if is_granted:
            await decide(served, approval)
        await fault(served, "advance_clock", seconds=86_401)
        if not is_granted:
            async with over_socket(served) as socket:
                late = await socket.call(
                    "admin.approvals.grant", {"approvalId": approval, "by": "Ada"}
                )
            assert "waits for a decision" in late["result"]["error"]["message"]
        assert await waiting(served) != approval


async def test_decision_is_made_once(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        await decide(served, approval, "deny")
        again = await decide(served, approval)
        assert again["error"]["code"] == "invalid_input"
        assert states(served) == ["denied"]


async def test_client_may_have_few_orders_wait(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        for number in range(20):
            await waiting(served, key=f"a-key-with-number-{number}")
        assert (await refusal(served, "http", key=KEY)).code == "rate_limited"
        assert await waiting(served, key="a-key-with-number-7")
        assert await waiting(served, token=SHOP)


async def test_calls_at_once_ask_for_no_more(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        refused = await asyncio.gather(
            *(refusal(served, "http", key=f"a-key-with-number-{number}") for number in range(40))
        )
        allowed = {"approval_required", "rate_limited", "unavailable"}
        assert {each.code for each in refused} <= allowed
        assert len(states(served)) == 20


async def test_limits_hold_for_an_approved_order(tmp_path: Path) -> None:
    async with with_approval(tmp_path, max_day_usd=200, destinations=[EVM]) as served:
        await decide(served, await waiting(served))
        await order(served, "http", key=KEY)
        assert (await refusal(served, "http", to=OTHER_EVM)).code == "destination_not_allowed"
        assert (await refusal(served, "http")).code == "spend_limit"


async def test_small_order_takes_no_large_deposit(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        made = await order(served, "http", amount="0.6")
        sql = f"SELECT max_deposit FROM orders WHERE order_id = '{made}'"
        assert one_row(served.up.database, sql)[0] * 165 <= ABOVE * 10**12


async def test_approvals_are_listed_newest_first(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        first, second = await waiting(served), await waiting(served, amount="0.9", key="k" * 20)
        async with over_socket(served) as socket:
            found = (await socket.call("admin.approvals.list", {}))["result"]["approvals"]
        assert [each["id"] for each in found] == [second, first]
        shown = {name: found[1][name] for name in ("client", "state", "worthUsd", "to")}
        assert shown == {"client": "desk", "state": "pending", "worthUsd": "132", "to": EVM}


async def test_scraper_sees_how_many_wait(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        await waiting(served)
        bearer = {"authorization": f"Bearer {ENVIRON['AGENT_RPC_TOKEN']}"}
        text = await (await served.client.get("/metrics", headers=bearer)).text()
        assert "rpcsvc_approvals_pending 1.0" in text


async def test_sidecar_makes_an_approved_order_once(tmp_path: Path) -> None:
    clients = {"desk": client(DESK, approve_above_usd=ABOVE)}
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar", clients=clients) as sidecar,
    ):
        approval = await waiting(sidecar)
        assert central.count("orders") == 0
        assert await sidecar.up.service.approvals.decide(
            approval, ApprovalState.GRANTED, "Ada", sidecar.up.service.clock.now_ms()
        )
        made = await order(sidecar, "http", key=KEY)
        assert await order(sidecar, "rpc", key=KEY) == made
        assert central.count("orders") == 1
        assert states(sidecar) == ["used"]


async def test_sidecar_takes_no_worse_rate_than_approved(tmp_path: Path) -> None:
    """The upstream's rate falls between its quote and its order."""
    clients = {"desk": client(DESK, approve_above_usd=ABOVE)}
    async with (
        serving(tmp_path / "central", orders__min_received_bps=9_000) as central,
        does.running() as server,
    ):
        cutting = Cutting(server, central.url)

        async def fall(_server: does.UpstreamServer, request: web.Request) -> web.StreamResponse:
            if request.path.endswith("/orders"):
                await fault(central, "set_rate", rate="152")
            return await cutting.handle(server, request)

        server.otherwise = fall
        environ = environ_of(server.url, "bff")
        async with serving(tmp_path / "sidecar", environ, clients=clients) as sidecar:
            approval = await waiting(sidecar)
            assert await sidecar.up.service.approvals.decide(
                approval, ApprovalState.GRANTED, "Ada", sidecar.up.service.clock.now_ms()
            )
            assert (await refusal(sidecar, "http", key=KEY)).code == "unavailable"
            assert sidecar.count("orders") == 0
            assert await waiting(sidecar) != approval


@pytest.mark.parametrize(("rate", "is_made"), [("164", True), ("152", False)])
async def test_lost_call_is_made_again_at_no_worse_rate_than_approved(
    tmp_path: Path, rate: str, is_made: bool
) -> None:
    clients = {"desk": client(DESK, approve_above_usd=ABOVE)}
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting, environ = Cutting(server, central.url), environ_of(server.url, "bff")
        async with serving(tmp_path / "sidecar", environ, clients=clients) as sidecar:
            approval = await waiting(sidecar)
            assert await sidecar.up.service.approvals.decide(
                approval, ApprovalState.GRANTED, "Ada", sidecar.up.service.clock.now_ms()
            )
            cutting.lose_calls = True
            assert (await refusal(sidecar, "http", key=KEY)).code == "unavailable"
            cutting.lose_calls = False
            await fault(central, "set_rate", rate=rate)
            if is_made:
                await order(sidecar, "http", key=KEY)
            else:
                assert (await refusal(sidecar, "http", key=KEY)).code == "unavailable"
                assert await waiting(sidecar) != approval
            assert sidecar.count("orders") == is_made


async def test_claim_closed_meanwhile_lets_no_order_past_approval(
    tmp_path: Path,
) -> None:
    """The operator closes the claim in doubt while the same call is made again."""
    clients = {"desk": client(DESK, approve_above_usd=ABOVE)}
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting, doubtful = Cutting(server, central.url), ""
        environ = environ_of(server.url, "bff")
        async with serving(tmp_path / "sidecar", environ, clients=clients) as sidecar:

            async def close(_: does.UpstreamServer, request: web.Request) -> web.StreamResponse:
                if doubtful and request.path.endswith("/quote"):
                    async with over_socket(sidecar) as socket:
                        found = {"orderId": doubtful, "note": "not made"}
                        await socket.call("admin.relays.close", found)
                return await cutting.handle(server, request)

            server.otherwise = close
            approval = await waiting(sidecar)
            assert await sidecar.up.service.approvals.decide(
                approval, ApprovalState.GRANTED, "Ada", sidecar.up.service.clock.now_ms()
            )
            cutting.lose_calls = True
            assert (await refusal(sidecar, "http", key=KEY)).code == "unavailable"
            cutting.lose_calls = False
            doubtful = one_row(sidecar.up.database, "SELECT order_id FROM relays")[0]
            assert await waiting(sidecar) != approval
            assert central.count("orders") == sidecar.count("orders") == 0


async def test_grant_is_withdrawn_until_it_is_used(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        await decide(served, approval)
        assert (await decide(served, approval, "deny"))["decided"]["state"] == "denied"
        refused = await refusal(served, "http", key=KEY)
        assert (refused.code, refused.details["approval"]["state"]) == ("forbidden", "denied")
        assert served.count("orders") == 0
        assert "error" in await decide(served, approval)  # a denial stays


async def test_used_grant_is_not_withdrawn(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        approval = await waiting(served)
        await decide(served, approval)
        await order(served, "http", key=KEY)
        assert "error" in await decide(served, approval, "deny")
        assert states(served) == ["used"]


async def test_person_sees_that_the_service_pays_the_gas(tmp_path: Path) -> None:
    async with with_approval(tmp_path) as served:
        params = {**BACK, "funding": "x402"}
        answer = await served.post("/agent/swap/create", params, x_agent_rpc_token=DESK)
        decided = (await decide(served, answer.body["data"]["approval"]["id"]))["decided"]
        assert decided["funding"].startswith("x402")
        assert (decided["twap"], decided["integrator"]) == (None, None)


async def grant(served: Served, approval: str) -> None:
    now = served.up.service.clock.now_ms()
    assert await served.up.service.approvals.decide(approval, ApprovalState.GRANTED, "Ada", now)


def used_today(served: Served) -> tuple[int, int]:
    """The use of the day: USDC units, and orders."""
    units, orders = one_row(served.up.database, "SELECT units, orders FROM client_days")
    return units, orders


async def test_refusal_by_the_upstream_gives_back_day_and_grant(tmp_path: Path) -> None:
    clients = {"desk": client(DESK, approve_above_usd=ABOVE, max_day_usd=200)}
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting, environ = Cutting(server, central.url), environ_of(server.url, "bff")
        async with serving(tmp_path / "sidecar", environ, clients=clients) as sidecar:
            await grant(sidecar, await waiting(sidecar))
            cutting.no_order = True
            for _ in range(3):
                assert (await refusal(sidecar, "http", key=KEY)).code == "amount_below_minimum"
                assert (states(sidecar), used_today(sidecar)) == (["granted"], (0, 0))
            cutting.no_order = False
            await order(sidecar, "http", key=KEY)
            assert (states(sidecar), used_today(sidecar)[1]) == (["used"], 1)


async def test_unknown_outcome_gives_back_nothing_though_refused_later(tmp_path: Path) -> None:
    """A refusal of the repeated call does not say what became of the lost one."""
    clients = {"desk": client(DESK, approve_above_usd=ABOVE)}
    async with serving(tmp_path / "central") as central, does.running() as server:
        cutting, environ = Cutting(server, central.url), environ_of(server.url, "bff")
        async with serving(tmp_path / "sidecar", environ, clients=clients) as sidecar:
            await grant(sidecar, await waiting(sidecar))
            cutting.lose_calls = True
            assert (await refusal(sidecar, "http", key=KEY)).code == "unavailable"
            used = used_today(sidecar)
            assert (used[1], states(sidecar)) == (1, ["used"])
            cutting.lose_calls, cutting.no_order = False, True
            assert (await refusal(sidecar, "http", key=KEY)).code == "unavailable"
            assert (used_today(sidecar), states(sidecar)) == (used, ["used"])
