"""Webhooks of a running service: a real receiver over HTTPS, and delivery states for callers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from standardwebhooks import Webhook, WebhookVerificationError

from rpcsvc.client import Swap, SwapClient
from rpcsvc.domain import webhooks
from rpcsvc.operations.params import SwapParams
from tests.contract.following import events, followed, ordered, status
from tests.contract.serving import BACK, EVM, MONERO, SWAP, Served, serving
from tests.e2e.processes import until
from tests.operator_cli import Cli, on_socket
from tests.receiver import Received, Receiver, receiving

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
KEY = "0f6c2b9a-5d1e-4c37-9a40-webhooks"
PUBLIC = "https://agent.example/hook"
Json = dict[str, Any]


@asynccontextmanager
async def beside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> AsyncIterator[tuple[Served, Receiver]]:
    """A service that may call loopback, and a receiver there that it trusts."""
    async with receiving(folder) as receiver:
        monkeypatch.setenv("SSL_CERT_FILE", str(receiver.ca_file))
        allowed = {"webhooks__allowed_networks": "127.0.0.0/8", **flags}
        async with serving(folder / "data", **allowed) as served:
            yield served, receiver


@pytest.fixture
async def pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Served, Receiver]]:
    async with beside(tmp_path, monkeypatch) as both:
        yield both


async def made(served: Served, webhook: Any, **swap: Any) -> Json:
    answer = (await served.post("/agent/swap/execute", {**SWAP, **swap, "webhook": webhook})).body
    assert answer["ok"], answer
    data = answer["data"]
    return {"orderId": data["order"]["orderId"], "sessionId": data["sessionId"]}


async def deliveries(served: Served, owned: Json) -> Json:
    path = f"/agent/swap/webhook-deliveries/{owned['orderId']}"
    query = {"sessionId": owned["sessionId"]}
    return dict((await served.http("GET", path, params=query)).body)


async def until_sent(served: Served, owned: Json, *states: str) -> list[Json]:
    """Wait until the messages of an order have these states."""

    async def there() -> list[Json] | None:
        found = (await deliveries(served, owned))["data"]["deliveries"]
        return list(found) if [each["state"] for each in found] == list(states) else None

    return await until(there)


async def until_tried(served: Served, owned: Json) -> Json:
    """Wait until the first message of an order was sent; its state as the owner sees it."""

    async def tried() -> Json | None:
        data = (await deliveries(served, owned))["data"]
        return dict(data) if data["deliveries"][0]["attempts"] else None

    return await until(tried)


async def refused(served: Served, webhook: Any) -> Json:
    answer = await served.post("/agent/swap/create", {**SWAP, "webhook": webhook})
    assert answer.status == 400
    if answer.body["missingInputs"]:
        (field,) = answer.body["missingInputs"]
        return {"field": field, "message": answer.body["error"]["message"]}
    (problem,) = answer.body["validationErrors"]
    return dict(problem)


async def jwks(served: Served) -> list[Json]:
    async with served.client.get("/.well-known/jwks.json") as response:
        return list((await response.json(content_type=None))["keys"])


def check_v1a(received: Received, public: str) -> None:
    """Verify by the specification: Ed25519 over id, time and body. Raises BadSignatureError."""
    headers = received.headers
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + received.body
    (signature,) = re.findall(r"v1a,(\S+)", headers["webhook-signature"])
    raw = base64.b64decode(public.removeprefix("whpk_"))
    VerifyKey(raw).verify(signed, base64.b64decode(signature))


async def test_webhooks_send_every_event_of_a_swap_in_order(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    owned = await made(served, {"url": receiver.url, "secret": SECRET})
    await served.post("/sandbox/fund", {"orderId": owned["orderId"]})
    log = await followed(served, owned["orderId"], "transfer.settled")
    got = await receiver.until(len(log))
    assert [each.json["data"]["event"] for each in got] == log
    assert receiver.sequences() == [event["cursor"] for event in log]
    (public,) = [key["whpk"] for key in await jwks(served)]
    for each, event in zip(got, log, strict=True):
        body = Webhook(SECRET).verify(each.body, each.headers)
        check_v1a(each, public)
        assert (body["type"], body["timestamp"]) == (event["type"], event["at"])
        assert body["data"]["orderId"] == owned["orderId"]
        assert body["data"]["status"]["cursor"] >= event["cursor"]
        assert each.headers["content-type"] == "application/json"
        assert each.headers["webhook-id"] == f"msg_{owned['orderId'][4:]}_{event['cursor']}"
    now = (await status(served, owned["orderId"]))["data"]
    assert got[-1].json["data"]["status"] == now
    assert owned["sessionId"] not in b"".join(each.body for each in got).decode()
    sent = await until_sent(served, owned, *["delivered"] * len(log))
    assert [each["attempts"] for each in sent] == [1] * len(log)
    assert [each["type"] for each in sent] == [event["type"] for event in log]


async def test_a_changed_message_does_not_verify(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    await made(served, {"url": receiver.url, "secret": SECRET})
    (got,) = await receiver.until(1)
    changed = got._replace(body=got.body.replace(b'"0.8"', b'"9.8"'))
    assert changed != got
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(changed.body, changed.headers)
    (key,) = await jwks(served)
    with pytest.raises(BadSignatureError):
        check_v1a(changed, key["whpk"])


async def test_the_code_of_the_page_verifies_a_message(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    await made(served, {"url": receiver.url, "secret": SECRET})
    (got,) = await receiver.until(1)
    page = (Path(__file__).parents[2] / "docs" / "use" / "webhooks.md").read_text()
    by_secret, by_key = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    shown = {"body": got.body, "headers": got.headers}
    exec(re.sub(r'"whsec_[^"]+"', repr(SECRET), by_secret), shown)
    assert shown["message"] == got.json
    exec(by_key, shown)
    (key,) = await jwks(served)
    verified: Any = shown["verified"]
    assert verified(got.body, got.headers, key["whpk"]) == got.json
    with pytest.raises(BadSignatureError):
        verified(got.body + b" ", got.headers, key["whpk"])
    with pytest.raises(ValueError, match="old"):
        verified(got.body, {**got.headers, "webhook-timestamp": "1"}, key["whpk"])


async def test_a_url_alone_gets_the_service_signature(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    owned = await made(served, receiver.url)
    (got,) = await receiver.until(1)
    assert re.fullmatch(r"v1a,\S+", got.headers["webhook-signature"])
    reported = (await served.http("GET", "/agent/capabilities")).body["data"]["webhooks"]
    check_v1a(got, reported["publicKey"])
    webhook = (await deliveries(served, owned))["data"]["webhook"]
    assert webhook == {
        "url": receiver.url, "signatures": ["v1a"], "state": "active", "failingSince": None,
    }  # fmt: skip


async def test_a_failed_attempt_is_shown_and_made_again(
    pair: tuple[Served, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_MS", 200)  # shorter than the receiver asks for
    served, receiver = pair
    receiver.answer = lambda _got: web.Response(status=503, headers={"retry-after": "1"})
    owned = await made(served, {"url": receiver.url, "secret": SECRET})
    found = await until_tried(served, owned)
    assert found["webhook"]["state"] == "failing"
    assert found["webhook"]["signatures"] == ["v1a", "v1"]
    (waiting,) = found["deliveries"]
    assert (waiting["state"], waiting["lastStatus"]) == ("pending", 503)
    assert waiting["nextAttemptAt"] > waiting["lastAttemptAt"]
    assert SECRET not in json.dumps(found)
    receiver.answer = lambda _got: web.Response()
    first, second = await receiver.until(2)
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.headers["webhook-timestamp"] < second.headers["webhook-timestamp"]
    await until_sent(served, owned, "delivered")


async def test_redirects_are_not_followed(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    away = {"location": receiver.url.replace("/hook", "/elsewhere")}
    receiver.answer = lambda _got: web.Response(status=307, headers=away)
    owned = await made(served, receiver.url)
    (found,) = (await until_tried(served, owned))["deliveries"]
    assert (found["state"], found["lastStatus"]) == ("pending", 307)
    assert found["lastError"] == "Status 307: redirects are not followed."
    assert [each.path for each in receiver.received] == ["/hook"]


async def test_410_ends_a_webhook(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    receiver.answer = lambda _got: web.Response(status=410)
    owned = await made(served, receiver.url)
    await until_sent(served, owned, "dead")
    await served.post("/sandbox/fund", {"orderId": owned["orderId"]})
    await followed(served, owned["orderId"], "transfer.settled")
    found = (await deliveries(served, owned))["data"]
    assert found["webhook"]["state"] == "ended"
    assert len(found["deliveries"]) == len(receiver.received) == 1


@pytest.mark.parametrize("swap", [SWAP, {**BACK, "funding": "x402"}], ids=["x2u", "u2x"])
async def test_request_of_an_unpaid_order_is_6_kb_at_most(
    pair: tuple[Served, Receiver], swap: Json
) -> None:
    """18 of them are the figure of docs/use/webhooks.md (contract/store/test_webhooks.py)."""
    served, receiver = pair
    back = MONERO if swap is SWAP else EVM
    url = receiver.url.ljust(1_000, "x")
    owned = await made(served, {"url": url, "secret": SECRET}, **swap, refundAddress=back)
    await receiver.until(1)
    session = {"sessionId": owned["sessionId"]}
    assert (await served.post(f"/agent/swap/cancel/{owned['orderId']}", session)).body["ok"]
    created, cancelled = await receiver.until(2)
    assert cancelled.json["type"] == "order.cancelled"
    for each in (created, cancelled):
        head = sum(len(f"{name}: {value}\r\n") for name, value in each.headers.items())
        assert len(f"POST {each.path} HTTP/1.1\r\n\r\n") + head + len(each.body) <= 6_000


async def test_deliveries_are_for_the_owner_alone(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    owned = await made(served, receiver.url)
    other = {**owned, "sessionId": "9a1f0b52-3c4d-4e6f-8a7b-1c2d3e4f5a6b"}
    assert (await deliveries(served, other))["error"]["code"] == "verification_failed"
    plain = (await served.post("/agent/swap/execute", SWAP)).body["data"]
    none = {"orderId": plain["order"]["orderId"], "sessionId": plain["sessionId"]}
    found = (await deliveries(served, none))["data"]
    assert (found["webhook"], found["deliveries"]) == (None, [])


async def test_webhook_is_stored_with_the_client_that_named_it(tmp_path: Path) -> None:
    """The networks of one IPv6 customer are one client, and no address is stored."""
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        for address in ("2001:db8:0:1::1", "2001:db8:0:2::1", "2001:db8:1:1::1"):
            by = {"x-forwarded-for": address, "x-forwarded-proto": "https"}
            swap = {**SWAP, "webhook": PUBLIC}
            answer = await served.http("POST", "/agent/swap/create", json=swap, headers=by)
            assert answer.body["ok"], answer.body
        rows = await served.up.database.fetch("SELECT client FROM webhooks ORDER BY order_seq")
        first, second, third = (row["client"] for row in rows)
    assert first == second != third
    assert re.fullmatch(r"address:[0-9a-f]{24}", first)


async def test_a_key_stands_for_its_webhook_too(served: Served) -> None:
    webhook = {"url": PUBLIC, "secret": SECRET}
    order = {**SWAP, "webhook": webhook}
    first = await served.post("/agent/swap/create", order, idempotency_key=KEY)
    again = await served.post("/agent/swap/create", order, idempotency_key=KEY)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.body["data"] == first.body["data"]
    for other in ({"url": PUBLIC}, {**webhook, "url": f"{PUBLIC}2"}, None):
        changed = {**SWAP, "webhook": other}
        conflict = await served.post("/agent/swap/create", changed, idempotency_key=KEY)
        assert conflict.status == 409
        assert conflict.body["error"]["details"]["fields"] == ["webhook"]
    assert served.count("webhooks") == 1
    rows = await served.up.database.fetch("SELECT params FROM idempotency_keys")
    assert SECRET not in rows[0]["params"]
    assert SECRET not in json.dumps(first.body)


async def test_idempotency_key_ignores_a_webhook_that_is_null(served: Served) -> None:
    await served.post("/agent/swap/create", SWAP, idempotency_key=KEY)
    again = await served.post("/agent/swap/create", {**SWAP, "webhook": None}, idempotency_key=KEY)
    assert again.headers["idempotent-replayed"] == "true"
    (row,) = await served.up.database.fetch("SELECT params FROM idempotency_keys")
    assert "webhook" not in json.loads(row["params"])


@pytest.mark.parametrize(
    ("webhook", "field", "words"),
    [
        ("http://agent.example/", "webhook.url", "must begin with https://"),
        ("https://127.0.0.1/", "webhook.url", "no public address"),
        ({"url": "https://[::ffff:10.0.0.1]/"}, "webhook.url", "no public address"),
        ({"url": "https://localhost/"}, "webhook.url", "no public host"),
        ({"url": "https://user@agent.example/"}, "webhook.url", "no user name"),
        ({"url": PUBLIC, "secret": "hunter2"}, "webhook.secret", "whsec_ and the base64"),
        ({"url": f"http://{'a' * 56}.onion/"}, "webhook.url", "no proxy to Tor"),
        ({"url": PUBLIC, "sercet": "x"}, "webhook.sercet", "Did you mean secret?"),
        ({}, "webhook.url", "https URL of a public host"),
        (5, "webhook", "must be an object. Send an https URL"),
    ],
)
async def test_a_wrong_webhook_is_refused_and_explained(
    served: Served, webhook: Any, field: str, words: str
) -> None:
    problem = await refused(served, webhook)
    assert problem["field"] == field
    assert words in problem["message"]
    assert "hunter2" not in json.dumps(problem)
    assert served.count("orders") == 0


async def test_without_signing_a_webhook_needs_a_secret(tmp_path: Path) -> None:
    async with serving(tmp_path, signing__enabled=False) as served:
        problem = await refused(served, PUBLIC)
        assert problem["field"] == "webhook.secret"
        assert "no signing key" in problem["message"]
        reported = (await served.http("GET", "/agent/capabilities")).body["data"]["webhooks"]
        assert reported == {"publicKey": None, "onion": False}
        await made(served, {"url": PUBLIC, "secret": SECRET})


async def test_rotated_key_signs_later_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with beside(tmp_path, monkeypatch) as (served, receiver):
        await made(served, receiver.url)
        await receiver.until(1)
        await Cli(tmp_path / "data", capsys).ask("keys", "rotate", "--now")

        async def rotated() -> list[Json] | None:  # the keys are reread once a second
            keys = await jwks(served)
            return keys if len(keys) == 2 else None

        keys = await until(rotated)
        await made(served, receiver.url)
        first, second = await receiver.until(2)
        check_v1a(second, keys[0]["whpk"])
        check_v1a(first, keys[1]["whpk"])


async def test_the_operator_lists_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(tmp_path / "data", capsys)
    async with beside(tmp_path, monkeypatch) as (served, receiver), on_socket(served.up):
        receiver.answer = lambda _got: web.Response(status=410)
        owned = await made(served, {"url": receiver.url, "secret": SECRET})
        order_id = owned["orderId"]
        await until_sent(served, owned, "dead")
        assert (await cli.json("webhooks", "list"))["messages"] == []
        listed = await cli.json("webhooks", "list", "--state", "dead")
        (message,) = listed["messages"]
        assert (message["orderId"], message["lastStatus"]) == (order_id, 410)
        assert SECRET not in cli.out
        receiver.answer = lambda _got: web.Response()
        assert await cli.json("webhooks", "replay", order_id) == {"replayed": 1}
        await until_sent(served, owned, "delivered")
        replay = ("webhooks", "replay", order_id, "--sequence", "1")
        assert await cli.json(*replay) == {"replayed": 1}
        await receiver.until(3)
        assert await cli.ask("webhooks", "replay", order_id, "--sequence", "7") == 2
        assert "has no message 7" in cli.err
        plain = await ordered(served)
        assert await cli.ask("webhooks", "replay", plain) == 2
        assert "has no webhook" in cli.err


async def test_metrics_show_the_backlog(pair: tuple[Served, Receiver]) -> None:
    served, receiver = pair
    receiver.answer = lambda _got: web.Response(status=500)
    await made(served, receiver.url)
    await receiver.until(1)
    async with served.client.get("/metrics") as response:
        text = await response.text()
    assert "rpcsvc_webhook_messages_pending 1.0" in text
    assert re.search(r"^rpcsvc_webhook_oldest_seconds \d", text, re.MULTILINE)


async def test_events_are_the_same_with_and_without_a_webhook(served: Served) -> None:
    with_hook = (await made(served, PUBLIC))["orderId"]
    without = await ordered(served)
    first, second = await events(served, with_hook), await events(served, without)
    assert [each["type"] for each in first["data"]["events"]] == [
        each["type"] for each in second["data"]["events"]
    ]


def test_a_webhook_of_the_model_takes_a_url_or_an_object() -> None:
    inputs = {**SWAP, "to": EVM}
    for webhook in (PUBLIC, {"url": PUBLIC}):
        read = SwapParams.model_validate({**inputs, "webhook": webhook}).webhook
        assert read is not None
        assert (read.url, read.secret) == (PUBLIC, None)


async def test_client_names_a_webhook_and_sees_what_was_sent(
    pair: tuple[Served, Receiver],
) -> None:
    served, receiver = pair
    swap = Swap(
        direction="x2u",
        chain="arbitrum",
        amount="0.8",
        to=EVM,
        webhook={"url": receiver.url, "secret": SECRET},
    )
    async with SwapClient(served.url, issuer="http://127.0.0.1:8080") as client:
        placed = await client.create(swap)
        owned = {"orderId": placed.order_id, "sessionId": swap.session_id}
        await until_sent(served, owned, "delivered")
        reported = await client.webhook_deliveries(placed.order_id, swap.session_id)
    assert reported.webhook is not None
    assert reported.webhook.url == receiver.url
    assert [(each.sequence, each.type, each.last_status) for each in reported.deliveries] == [
        (1, "order.created", 204)
    ]
