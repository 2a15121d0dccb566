"""Health of the process, and of what it depends on."""

from __future__ import annotations

from tests.contract.serving import Served


async def test_health_names_every_check(served: Served) -> None:
    response = await served.client.get("/health")
    body = await response.json()
    assert response.status == 200
    assert list(body) == ["status", "version", "time", "engine", "checks"]
    assert (body["status"], body["engine"]) == ("ok", "sandbox")
    assert set(body["checks"]) == {"store", "engine", "rates", "worker", "signing"}


async def test_a_check_that_fails_degrades_health_and_readiness_but_not_life(
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


async def test_the_agent_api_s_health_is_an_envelope_with_three_fields_more(
    served: Served,
) -> None:
    body = (await served.http("GET", "/health")).body
    envelope = ["ok", "operation", "state", "missingInputs", "validationErrors", "nextActions"]
    assert list(body) == [*envelope, "data", "requestId", "status", "version", "time"]
