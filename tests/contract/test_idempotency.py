"""The same call twice makes one order, over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from rpcsvc.store.changes import Change
from tests.contract.serving import EVM, SWAP, TOKEN, Served, serving


def order_id(answer: dict[str, Any]) -> str:
    return str(answer["data"]["order"]["orderId"])


async def test_a_retry_gets_the_stored_data_byte_for_byte(served: Served) -> None:
    texts = []
    for _ in range(2):
        response = await served.client.post(
            "/api/v1/agent/swap/create", json=SWAP, headers={"idempotency-key": "k-0123456789abcd"}
        )
        texts.append((await response.read(), response.headers.get("idempotent-replayed")))
    (first, fresh), (second, replayed) = texts
    assert (fresh, replayed) == (None, "true")
    data = [text[text.index(b'"data":') : text.rindex(b',"requestId"')] for text in (first, second)]
    assert data[0] == data[1]
    assert orjson.loads(first)["requestId"] != orjson.loads(second)["requestId"]
    assert served.count("orders") == 1


@pytest.mark.parametrize(
    "spelling",
    [{"chain": 42161}, {"chain": "ARB"}, {"amount": "0.800"}, {"to": EVM.lower()}],
    ids=str,
)
async def test_another_spelling_of_the_same_payload_is_the_same_call(
    served: Served, spelling: dict[str, Any]
) -> None:
    first = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    second = await served.post(
        "/agent/swap/create", {**SWAP, **spelling}, idempotency_key="k-0123456789abcd"
    )
    assert order_id(first.body) == order_id(second.body)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount": "0.9"}, "amount"),
        ({"chain": "base"}, "chain"),
        ({"to": "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"}, "to"),
        ({"sessionId": "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"}, "sessionId"),
    ],
)
async def test_other_payload_under_a_key_conflicts_and_names_the_field(
    served: Served, change: dict[str, Any], field: str
) -> None:
    await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    answer = await served.post(
        "/agent/swap/create", {**SWAP, **change}, idempotency_key="k-0123456789abcd"
    )
    assert (answer.status, answer.body["state"]) == (409, "idempotency_conflict")
    assert answer.body["error"]["details"]["fields"] == [field]
    over_rpc = await served.rpc(
        "swap.create", {**SWAP, **change, "idempotency-key": "k-0123456789abcd"}
    )
    assert over_rpc.body["result"]["error"]["code"] == "idempotency_conflict"
    assert served.count("orders") == 1


async def test_create_and_execute_are_not_the_same_call(served: Served) -> None:
    await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    answer = await served.post("/agent/swap/execute", SWAP, idempotency_key="k-0123456789abcd")
    assert answer.body["error"]["details"]["fields"] == ["operation"]


async def test_fifty_copies_at_once_make_one_order(served: Served) -> None:
    calls = [
        served.post("/agent/swap/execute", SWAP, idempotency_key="k-0123456789abcd")
        for _ in range(25)
    ]
    calls += [
        served.rpc("swap.execute", {**SWAP, "idempotency-key": "k-0123456789abcd"})
        for _ in range(25)
    ]
    answers = await asyncio.gather(*calls)
    bodies = [answer.body.get("result", answer.body) for answer in answers]
    assert len({order_id(body) for body in bodies}) == 1
    assert served.count("orders") == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1


async def test_a_retry_over_the_other_transport_finds_the_same_order(served: Served) -> None:
    first = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    retry = await served.rpc("swap.create", {**SWAP, "idempotency-key": "k-0123456789abcd"})
    assert retry.body["result"]["data"] == first.body["data"]
    assert retry.headers["idempotent-replayed"] == "true"
    assert served.count("orders") == 1


@pytest.mark.parametrize("key", ["k-0123456789abcd ", " k-0123456789abcd", "  k-012345 789abcd  "])
async def test_blanks_around_a_key_are_ignored_on_both_transports(served: Served, key: str) -> None:
    first = await served.rpc("swap.create", {**SWAP, "idempotency-key": key})
    for same in (key, key.strip()):
        over_https = await served.post("/agent/swap/create", SWAP, idempotency_key=same)
        again = await served.rpc("swap.create", {**SWAP, "idempotency-key": same})
        assert over_https.body["data"] == again.body["result"]["data"]
        assert over_https.body["data"] == first.body["result"]["data"]
    assert served.count("orders") == 1


async def test_a_key_of_blanks_alone_is_none_over_either_transport(served: Served) -> None:
    over_https = await served.post("/agent/swap/create", SWAP, idempotency_key="  ")
    over_rpc = await served.rpc("swap.create", {**SWAP, "idempotency-key": "  "})
    problems = over_rpc.body["result"]["validationErrors"]
    assert over_https.body["validationErrors"] == problems
    assert [problem["field"] for problem in problems] == ["idempotency-key"]
    assert served.count("orders") == 0


async def test_concurrent_copies_with_another_payload_conflict(
    served: Served,
) -> None:
    payloads = [{**SWAP, "amount": f"0.{number}"} for number in range(1, 10)]
    answers = await asyncio.gather(
        *(
            served.post("/agent/swap/execute", one, idempotency_key="k-0123456789abcd")
            for one in payloads
        )
    )
    assert sorted(answer.status for answer in answers) == [200] + [409] * 8
    assert served.count("orders") == 1


async def test_a_caller_that_hangs_up_does_not_undo_its_order(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, committing = served.up.service.store, asyncio.Event()
    commit = store.commit

    async def announced(change: Change) -> None:
        committing.set()
        await commit(change)

    monkeypatch.setattr(store, "commit", announced)
    call = asyncio.create_task(
        served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    )
    await committing.wait()
    call.cancel()
    retry = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    assert (retry.status, retry.headers["idempotent-replayed"]) == (200, "true")
    assert served.count("orders") == 1


async def test_without_a_key_each_call_makes_its_own_order(served: Served) -> None:
    first = await served.post("/agent/swap/create", SWAP)
    second = await served.post("/agent/swap/create", SWAP)
    assert order_id(first.body) != order_id(second.body)


async def test_a_failed_validation_claims_no_key(served: Served) -> None:
    bad = await served.post(
        "/agent/swap/create", {**SWAP, "amount": "0"}, idempotency_key="k-0123456789abcd"
    )
    assert bad.status == 400
    assert (
        await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    ).status == 200


async def test_a_call_that_found_no_rate_claims_no_key(served: Served) -> None:
    await served.post("/sandbox/fault", {"fault": "rates_down"})
    down = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    assert (down.status, down.body["error"]["code"]) == (503, "unavailable")
    assert int(down.headers["retry-after"]) > 0
    await served.post("/sandbox/fault", {"fault": "rates_up"})
    assert (
        await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    ).status == 200


async def test_retry_is_answered_though_its_amount_is_outside_limits(
    served: Served,
) -> None:
    first = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    await served.post("/sandbox/fault", {"fault": "set_rate", "rate": "1"})
    second = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    assert order_id(first.body) == order_id(second.body)


@pytest.mark.parametrize("key", ["x" * 16, "x" * 255, "! \"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"])
async def test_a_key_is_any_16_to_255_printable_characters(served: Served, key: str) -> None:
    first = await served.post("/agent/swap/create", SWAP, idempotency_key=key)
    again = await served.rpc("swap.create", {**SWAP, "idempotency-key": key})
    assert order_id(first.body) == order_id(again.body["result"])


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9"])
async def test_a_key_of_another_form_is_refused(served: Served, key: str) -> None:
    answer = await served.rpc("swap.create", {**SWAP, "idempotency-key": key})
    result = answer.body["result"]
    assert result["validationErrors"][0]["field"] == "idempotency-key"
    assert served.count("orders") == 0


async def test_a_key_that_is_no_string_is_refused(served: Served) -> None:
    answer = await served.rpc("swap.create", {**SWAP, "idempotency-key": 7})
    assert answer.body["result"]["error"]["code"] == "invalid_input"


async def test_a_key_belongs_to_create_and_execute_only(served: Served) -> None:
    answer = await served.rpc("swap.quote", {"idempotency-key": "k-0123456789abcd"})
    fields = [e["field"] for e in answer.body["result"]["validationErrors"]]
    assert fields == ["idempotency-key"]


async def test_token_has_a_namespace_that_survives_its_rotation(tmp_path: Path) -> None:
    second_token = "another-long-enough-token"
    environ = {"AGENT_RPC_TOKEN": f"{TOKEN},{second_token}"}
    async with serving(tmp_path, environ) as served:
        keyed = {**SWAP, "idempotency-key": "k-0123456789abcd"}
        first = await served.rpc("swap.create", keyed, x_agent_rpc_token=TOKEN)
        rotated = await served.rpc("swap.create", keyed, x_agent_rpc_token=second_token)
        public = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
        assert order_id(first.body["result"]) == order_id(rotated.body["result"])
        assert order_id(first.body["result"]) != order_id(public.body)


@pytest.mark.parametrize("key", ["swap-1", "k" * 15])
async def test_public_key_must_be_hard_to_guess(tmp_path: Path, key: str) -> None:
    """A caller who guesses a key and the parameters gets the order's session."""
    environ = {"AGENT_RPC_TOKEN": TOKEN}
    async with serving(tmp_path, environ) as served:
        over_https = await served.post("/agent/swap/create", SWAP, idempotency_key=key)
        (problem,) = over_https.body["validationErrors"]
        assert (over_https.status, problem["field"]) == (400, "idempotency-key")
        assert "16 to 255" in problem["message"]
        assert "Send a UUID" in problem["message"]
        keyed = {**SWAP, "idempotency-key": key}
        with_token = await served.rpc("swap.create", keyed, x_agent_rpc_token=TOKEN)
        assert with_token.body["result"]["ok"]
        assert served.count("orders") == 1


async def test_shortest_public_key_has_16_characters(served: Served) -> None:
    answer = await served.post("/agent/swap/create", SWAP, idempotency_key="k" * 16)
    assert answer.status == 200
