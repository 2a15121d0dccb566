"""Health of the process and of its dependencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rpcsvc.health import Health
from rpcsvc.http.documents import links
from tests.contract.described import check_response, openapi_of
from tests.contract.serving import Served, serving

TOKEN = "correct-horse-battery"


async def test_health_names_every_check(served: Served) -> None:
    response = await served.client.get("/health")
    body = await response.json()
    assert response.status == 200
    assert list(body) == ["status", "version", "time", "engine", "checks"]
    assert (body["status"], body["engine"]) == ("ok", "sandbox")
    assert set(body["checks"]) == {"store", "engine", "rates", "worker", "deposits", "signing"}


async def test_failing_check_degrades_health_and_readiness_not_livez(
    served: Served,
) -> None:
    await served.post("/sandbox/fault", {"fault": "engine_down"})
    health = await served.client.get("/health")
    assert health.status == 503
    assert (await health.json())["checks"]["engine"] == {
        "status": "degraded",
        "detail": "fault engine_down is on",
    }
    assert (await served.client.get("/readyz")).status == 503
    assert (await served.client.get("/livez")).status == 200
    agent = await served.http("GET", "/health")
    assert (agent.status, agent.body["ok"], agent.body["status"]) == (503, False, "degraded")
    await served.post("/sandbox/fault", {"fault": "engine_up"})
    assert (await served.client.get("/readyz")).status == 200


async def test_degraded_agent_health_answers_an_error_envelope(served: Served) -> None:
    for fault, check in (("engine", "engine"), ("rates", "rates")):
        await served.post("/sandbox/fault", {"fault": f"{fault}_down"})
        answer = await served.http("GET", "/health", headers={"x-request-id": "mine"})
        error = answer.body["error"]
        assert (error["code"], error["retryable"]) == ("unavailable", True)
        assert error["details"] == {"checks": [check]}
        assert check in error["message"]
        assert (answer.body["state"], answer.body["requestId"]) == ("unavailable", "mine")
        assert int(answer.headers["retry-after"]) > 0
        document = openapi_of(served)
        check_response(document, links.HEALTH, "get", 503, answer.headers, answer.body)
        await served.post("/sandbox/fault", {"fault": f"{fault}_up"})
    well = await served.http("GET", "/health")
    check_response(document, links.HEALTH, "get", 200, well.headers, well.body)
    assert "error" not in well.body


async def test_agent_health_is_an_envelope_with_three_more_fields(
    served: Served,
) -> None:
    body = (await served.http("GET", "/health")).body
    envelope = ["ok", "operation", "state", "missingInputs", "validationErrors", "nextActions"]
    assert list(body) == [*envelope, "data", "requestId", "status", "version", "time"]


async def test_check_that_stops_no_order_degrades_health_not_readiness(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Health(False, "USDC: ord_1/payout/1 waits")
    monkeypatch.setattr(type(served.up.engine), "health", AsyncMock(return_value=stuck))
    assert (await served.client.get("/health")).status == 503
    for path in ("/readyz", "/api/v1/health", "/bff/v1/health"):
        response = await served.client.get(path)
        assert (response.status, (await response.json())["status"]) == (200, "ok"), path
    quoted = {"direction": "x2u", "chain": "arbitrum", "amount": "1"}
    assert (await served.post("/agent/swap/quote", quoted)).status == 200


@pytest.mark.parametrize(
    ("environ", "headers", "is_reported"),
    [
        ({}, {}, True),
        ({}, {"x-forwarded-for": "203.0.113.9"}, False),
        ({"AGENT_RPC_TOKEN": TOKEN}, {}, False),
        ({"AGENT_RPC_TOKEN": TOKEN}, {"x-agent-rpc-token": "x" * 21}, False),
        ({"AGENT_RPC_TOKEN": TOKEN}, {"x-agent-rpc-token": TOKEN}, True),
    ],
)
async def test_the_reasons_are_for_whoever_may_call_rpc(
    tmp_path: Path, environ: dict[str, str], headers: dict[str, str], is_reported: bool
) -> None:
    async with serving(tmp_path, environ) as served:
        await served.post("/sandbox/fault", {"fault": "engine_down"})
        response = await served.client.get("/health", headers=headers)
        engine: dict[str, Any] = (await response.json())["checks"]["engine"]
        assert engine["status"] == "degraded"
        assert ("detail" in engine) is is_reported
