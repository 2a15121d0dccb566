"""The user's confirmation before an order is made, with clients that can ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.serving import Served
from tests.mcp import META, call, meta, stateless, swap

YES = {"action": "accept", "content": {"agreed": True}}


async def create(served: Served, arguments: Any, **more: Any) -> dict[str, Any]:
    return await call(served, "create_swap", arguments, _meta=meta(elicitation={}), **more)


def answered(asked: dict[str, Any], answer: Any = YES) -> dict[str, Any]:
    return {"inputResponses": {"terms": answer}, "requestState": asked["requestState"]}


async def test_confirmation_shows_the_terms_before_the_order(served: Served) -> None:
    arguments = swap()
    asked = await create(served, arguments)
    assert (asked["resultType"], served.count("orders")) == ("input_required", 0)
    shown = asked["inputRequests"]["terms"]["params"]["message"]
    assert arguments["to"] in shown
    assert "0.8 XMR" in shown
    made = await create(served, arguments, **answered(asked))
    assert (made["resultType"], made["isError"], served.count("orders")) == ("complete", False, 1)
    again = await create(served, arguments, **answered(asked))
    assert again["structuredContent"]["data"] == made["structuredContent"]["data"]
    assert served.count("orders") == 1


async def test_confirmation_shows_an_exact_amount(served: Served) -> None:
    arguments = {**swap(), "receiveAmount": "100"}
    del arguments["amount"]
    asked = await create(served, arguments)
    assert "for exactly 100 USDC," in asked["inputRequests"]["terms"]["params"]["message"]
    made = await create(served, arguments, **answered(asked))
    assert made["structuredContent"]["data"]["order"]["receiveAmount"] == "100000000"


@pytest.mark.parametrize(
    "answer",
    [
        {"action": "decline"},
        {"action": "cancel"},
        {"action": "accept", "content": {"agreed": False}},
        {"action": "accept"},
    ],
)
async def test_confirmation_that_is_no_yes_makes_no_order(served: Served, answer: Any) -> None:
    arguments = swap()
    asked = await create(served, arguments)
    refused = await create(served, arguments, **answered(asked, answer))
    assert refused["isError"]
    assert "did not agree" in refused["structuredContent"]["error"]["message"]
    assert served.count("orders") == 0


async def test_confirmation_of_other_terms_is_refused(served: Served) -> None:
    asked = await create(served, swap())
    params = {
        "name": "create_swap",
        "arguments": {**swap(), "amount": "1.2"},
        "_meta": meta(elicitation={}),
        **answered(asked),
    }
    answer = await stateless(served, "tools/call", params)
    assert (answer.status, answer.body["error"]["code"]) == (400, -32602)
    assert served.count("orders") == 0


async def test_confirmation_at_a_worse_price_is_asked_again(served: Served) -> None:
    arguments = swap()
    asked = await create(served, arguments)
    rate = {"fault": "set_rate", "rate": "120"}
    assert not (await call(served, "sandbox_fault", rate))["isError"]
    worse = await create(served, arguments, **answered(asked))
    assert (worse["resultType"], served.count("orders")) == ("input_required", 0)
    made = await create(served, arguments, **answered(worse))
    assert made["structuredContent"]["state"] == "waiting_for_funding"


@pytest.mark.parametrize("state", ["", "00", "zz", 5, "ff" * 80])
async def test_confirmation_with_a_forged_state_is_refused(served: Served, state: Any) -> None:
    params = {
        "name": "create_swap",
        "arguments": swap(),
        "_meta": meta(elicitation={}),
        **answered({"requestState": state}),
    }
    answer = await stateless(served, "tools/call", params)
    assert (answer.status, answer.body["error"]["code"]) == (400, -32602)
    assert served.count("orders") == 0


async def test_confirmation_with_a_changed_state_is_refused(served: Served) -> None:
    arguments = swap()
    state = (await create(served, arguments))["requestState"]
    changed = state[:-2] + ("00" if state[-2:] != "00" else "01")
    params = {
        "name": "create_swap",
        "arguments": arguments,
        "_meta": meta(elicitation={}),
        **answered({"requestState": changed}),
    }
    assert (await stateless(served, "tools/call", params)).status == 400


async def test_confirmation_is_skipped_where_a_client_has_no_forms(served: Served) -> None:
    only_urls = {**meta(), f"{META}clientCapabilities": {"elicitation": {"url": {}}}}
    made = await call(served, "create_swap", swap(), _meta=only_urls)
    assert made["resultType"] == "complete"


async def test_confirmation_is_not_asked_for_wrong_inputs(served: Served) -> None:
    refused = await create(served, {**swap(), "chain": "tron"})
    assert refused["structuredContent"]["error"]["code"] == "unsupported_chain"


async def test_confirmation_again_finds_the_order(served: Served) -> None:
    arguments = swap()
    orders = set()
    for _ in range(2):
        asked = await create(served, arguments)
        made = await create(served, arguments, **answered(asked))
        orders.add(made["structuredContent"]["data"]["order"]["orderId"])
        assert not (await call(served, "sandbox_fault", {"fault": "set_rate", "rate": "165"}))[
            "isError"
        ]
    assert (len(orders), served.count("orders")) == (1, 1)


async def test_confirmation_keeps_to_the_digest_of_the_call(served: Served) -> None:
    arguments = swap()
    terms = {name: arguments[name] for name in ("direction", "chain", "amount")}
    quoted = (await call(served, "get_quote", terms))["structuredContent"]["data"]
    await call(served, "sandbox_fault", {"fault": "set_rate", "rate": "120"})
    held = {**arguments, "quoteDigest": quoted["quoteDigest"]}
    asked = await create(served, held)
    refused = await create(served, held, **answered(asked))
    assert refused["structuredContent"]["error"]["code"] == "quote_changed"
    assert served.count("orders") == 0
