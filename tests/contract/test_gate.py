"""Access control: tokens, loopback, the socket, proxies, rate limits, request ids."""

from __future__ import annotations

import asyncio
import re
import ssl
import stat
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from rpcsvc.http.gate import WrongTokens
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import SettingsError
from tests.contract import bff
from tests.contract.processes import free_port, process
from tests.contract.serving import SWAP, TOKEN, Served, serving
from tests.logs import logs_of
from tests.receiver import make_certificates

PROXIED = {"x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "https"}


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x"])
async def test_missing_or_wrong_token_is_refused_before_reading_body(
    tmp_path: Path, token: str | None
) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        headers = {} if token is None else {"x_agent_rpc_token": token}
        answer = await served.raw(b"this is not JSON", **headers)
        assert (answer.status, answer.body["error"]["code"]) == (401, -32001)
        assert TOKEN not in str(answer.body)


async def test_rpc_with_an_expectation_is_answered_alike(served: Served) -> None:
    """With ``Expect`` it goes through aiohttp's routes, without it directly to its handler."""
    call = orjson.dumps({"jsonrpc": "2.0", "id": "1", "method": "service.swap.plan", "params": {}})
    seen = []
    for expects in (False, True):
        answer = await served.client.post(
            "/rpc", data=call, headers={"content-type": "application/json"}, expect100=expects
        )
        seen.append((answer.status, sorted(answer.headers), await answer.read()))
    assert seen[0] == seen[1]


async def test_refusal_names_the_header_to_send(tmp_path: Path) -> None:
    """A 401 must have a challenge (RFC 9110, section 15.5.2)."""
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        over_rpc = await served.raw(b"{}")
        over_bff = await served.client.get("/bff/v1/chains", headers={"x-api-key": "wrong"})
        assert (over_rpc.status, over_bff.status) == (401, 401)
        assert over_rpc.headers["www-authenticate"] == 'ApiKey header="x-agent-rpc-token"'
        assert over_bff.headers["www-authenticate"] == 'ApiKey header="x-api-key"'
        answers = await served.raw(b"{}", x_agent_rpc_token=TOKEN)
        assert "www-authenticate" not in answers.headers


async def test_each_of_two_tokens_lets_in(tmp_path: Path) -> None:
    other = "another-long-enough-token"
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": f"{TOKEN}, {other}"}) as served:
        for token in (TOKEN, other):
            answer = await served.rpc("swap.plan", {}, x_agent_rpc_token=token)
            assert answer.body["result"]["ok"]


async def test_the_agent_api_needs_no_token(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        assert (await served.post("/agent/swap/plan", {})).status == 200


async def test_without_a_token_rpc_answers_local_clients_only(tmp_path: Path) -> None:
    async with serving(tmp_path / "local") as served:
        local = await served.rpc("swap.plan", {})
        assert local.status == 200
    async with serving(tmp_path / "public", trusted_proxies="127.0.0.0/8") as served:
        other_one = await served.client.post("/rpc", json={}, headers=PROXIED)
        assert other_one.status == 401
        public = await served.client.post("/api/v1/agent/swap/plan", json={}, headers=PROXIED)
        assert public.status == 200


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-real-ip", "forwarded"]
)
async def test_forwarded_request_from_loopback_is_not_local(served: Served, header: str) -> None:
    for value in ("203.0.113.7", "unknown", "", "127.0.0.1"):
        response = await served.client.post("/rpc", json={}, headers={header: value})
        assert response.status == 401
        assert (await response.json())["error"]["code"] == -32001


async def test_a_proxy_that_does_not_say_for_whom_gets_no_local_trust(tmp_path: Path) -> None:
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        for forwarded in ("unknown", "_hidden", ""):
            headers = {"x-forwarded-for": forwarded, "x-forwarded-proto": "https"}
            response = await served.client.post("/rpc", json={}, headers=headers)
            assert response.status == 401


async def test_proxied_json_rpc_without_tls_is_refused_as_json_rpc(tmp_path: Path) -> None:
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        headers = {"x_forwarded_for": "203.0.113.7", "x_request_id": "mine"}
        answer = await served.raw(b"this is not JSON", **headers)
        assert (answer.status, answer.body["error"]["code"]) == (403, -32001)
        assert answer.body["error"]["data"]["code"] == "tls_required"
        assert answer.headers["x-request-id"] == "mine"


async def test_a_token_is_asked_for_on_loopback_too(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        assert (await served.rpc("swap.plan", {})).status == 401


async def test_the_budgets_are_those_of_the_design_unless_set(tmp_path: Path) -> None:
    async with serving(tmp_path, rate_limit__enabled=True) as served:
        create = await served.post("/agent/swap/create", {})
        plan = await served.post("/agent/swap/plan", {})
        rpc = await served.rpc("swap.plan", {})
        policies = [answer.headers["ratelimit-policy"] for answer in (create, plan, rpc)]
        assert policies == ['"orders";q=30;w=60', '"requests";q=300;w=60', '"rpc";q=6000;w=60']


@pytest.mark.parametrize(
    "headers",
    [
        {**PROXIED, "x-forwarded-proto": "http"},
        {**PROXIED, "x-forwarded-proto": "https, http"},
        [*PROXIED.items(), ("x-forwarded-proto", "http")],
        {"x-forwarded-for": "203.0.113.7"},
        {"x-forwarded-proto": "http"},
        {"x-real-ip": "203.0.113.7"},
        {"forwarded": "for=203.0.113.7;proto=http"},
    ],
)
async def test_a_proxied_request_must_have_come_over_tls(tmp_path: Path, headers: Any) -> None:
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        response = await served.client.post("/api/v1/agent/swap/plan", json={}, headers=headers)
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "tls_required"


async def test_a_refusal_for_want_of_tls_names_the_operation(tmp_path: Path) -> None:
    paths = [(op.method, op.path, op.name) for op in OPERATIONS if op.path]
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        for method, path, name in [*paths, ("GET", "/health", "health")]:
            plain = {**PROXIED, "x-forwarded-proto": "http", "x-request-id": "mine"}
            answer = await served.http(method, re.sub(r"\{\w+\}", "1", path), headers=plain)
            assert answer.body["error"]["code"] == "tls_required"
            assert (answer.body["operation"], answer.body["requestId"]) == (name, "mine")


HOSTS = {
    "localhost": True, "LOCALHOST.:81": True, "127.8.8.8": True, "[::1]:8080": True,
    "swap.example.com": True, "swap.example.com:8443": True, "swap.internal": True,
    "evil.com": False, "localhost.evil.com": False, "192.0.2.1": False, "[::2]": False, "": False,
    "a b": False, "127.0.0.1:80:80": False, "127.0.0.1.evil.com": False,
}  # fmt: skip
SURFACES = ("/rpc", "/livez", "/llms.txt", "/api/v1/health", "/bff/v1/chains", "/nowhere")


@pytest.mark.parametrize("host", HOSTS)
async def test_only_known_hosts_are_answered(tmp_path: Path, host: str) -> None:
    """Without a token /rpc trusts loopback: a page must not get there by DNS rebinding."""
    names: dict[str, Any] = {
        "site_url": "https://swap.example.com",
        "allowed_hosts": "swap.internal",
    }
    async with serving(tmp_path, **names) as served:
        for path in SURFACES:
            response = await served.client.get(path, headers={"host": host})
            assert (response.status == 421) != HOSTS[host], path
            if response.status == 421:
                assert "misdirected_request" in await response.text()
        if not HOSTS[host]:
            refused = await served.rpc("swap.plan", {}, host=host)
            assert (refused.status, refused.body["error"]["code"]) == (421, -32600)


@pytest.mark.parametrize(("version", "status"), [("1.0", b"200"), ("1.1", b"400")])
async def test_host_may_be_left_out_in_http_1_0_alone(
    served: Served, version: str, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    writer.write(f"GET /livez HTTP/{version}\r\n\r\n".encode())
    assert (await reader.readline()).split()[1] == status
    writer.close()
    await writer.wait_closed()


async def test_wrong_tokens_are_limited_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongTokens, "PERIOD_SECONDS", 0.0)
    limits: dict[str, Any] = {
        "rate_limit__enabled": True,
        "rate_limit__wrong_tokens_per_minute": 3,
    }
    with logs_of("rpcsvc.http.gate") as logs:
        async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}, **limits) as served:
            wrong = [await served.raw(b"{}", x_agent_rpc_token="no" * 9) for _ in range(5)]
            right = await served.rpc("swap.plan", {}, x_agent_rpc_token=TOKEN)
    assert [answer.status for answer in wrong] == [401, 401, 401, 429, 429]
    assert wrong[-1].body["error"]["code"] == -32029
    assert int(wrong[-1].headers["retry-after"]) > 0
    assert right.status == 200
    counts = [
        (line["network"], line["count"]) for line in logs if line["event"] == "wrong_tokens_refused"
    ]
    assert {address for address, _ in counts} == {"127.0.0.0/24"}
    assert sum(count for _, count in counts) == 5


async def test_wrong_tokens_at_health_are_limited_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The details that a right token gets would tell whoever guesses that it is one."""
    monkeypatch.setattr(WrongTokens, "PERIOD_SECONDS", 0.0)
    limits: dict[str, Any] = {
        "rate_limit__enabled": True,
        "rate_limit__wrong_tokens_per_minute": 2,
    }

    async def statuses(path: str, headers: dict[str, str]) -> list[int]:
        return [(await served.client.get(path, headers=headers)).status for _ in range(4)]

    for path in ("/health", "/status"):
        with logs_of("rpcsvc.http.gate") as logs:
            async with serving(tmp_path / path[1:], {"AGENT_RPC_TOKEN": TOKEN}, **limits) as served:
                wrong = await statuses(path, {"x-agent-rpc-token": "wrong"})
                right = await statuses(path, {"x-agent-rpc-token": TOKEN})
                none = await statuses(path, {})
        assert (wrong, right, none) == ([200, 200, 429, 429], [200] * 4, [200] * 4)
        counts = [line["count"] for line in logs if line["event"] == "wrong_tokens_refused"]
        assert sum(counts) == 4


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
async def test_data_directory_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    data_dir = tmp_path / "a data"
    data_dir.mkdir()
    data_dir.chmod(mode)
    with pytest.raises(SettingsError, match=f"mode 0{mode:o}") as refused:
        async with serving(data_dir):
            pass
    assert f"chmod 700 '{data_dir}'" in str(refused.value)


async def test_no_cache_may_keep_what_an_operation_answers(served: Served) -> None:
    made = await served.post("/agent/swap/create", SWAP)
    order_id = made.body["data"]["order"]["orderId"]
    answers = [
        made,
        await served.rpc("swap.create", SWAP),
        await served.http("GET", f"/agent/swap/status/{order_id}"),
        await served.post("/agent/swap/quote", {}),
        await served.http("GET", "/nothing"),
    ]
    assert [answer.headers["cache-control"] for answer in answers] == ["no-store"] * 5


async def test_no_cache_may_keep_orders_and_sessions_of_the_bff(served: Served) -> None:
    made = await bff.post(served, "/orders", bff.ORDER)
    answers = [
        made,
        await bff.call(served, "GET", f"/orders/{made.body['orderId']}"),
        await bff.call(served, "GET", f"/orders?session={bff.SESSION}"),
        await bff.call(served, "GET", "/orders/unknown"),
    ]
    assert [answer.status for answer in answers] == [200, 200, 200, 400]
    assert [answer.headers["cache-control"] for answer in answers] == ["no-store"] * 4


async def test_proxy_on_this_machine_must_say_that_tls_was_used(tmp_path: Path) -> None:
    """A proxy that adds no header is treated as one that passes plain HTTP on."""
    async with serving(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        answer = await served.post("/agent/swap/plan", {})
        assert (answer.status, answer.body["error"]["code"]) == (403, "tls_required")
        assert (await served.rpc("swap.plan", {})).status == 403
        plan = await served.post("/agent/swap/plan", {}, x_forwarded_proto="https")
        assert plan.status == 200


async def test_orders_and_other_requests_have_budgets_of_their_own(tmp_path: Path) -> None:
    async with serving(
        tmp_path,
        rate_limit__enabled=True,
        rate_limit__orders_per_minute=2,
        rate_limit__requests_per_minute=3,
    ) as served:
        for _ in range(2):
            assert (await served.post("/agent/swap/create", SWAP)).status == 200
        refused = await served.post("/agent/swap/execute", SWAP)
        assert (refused.status, refused.body["state"]) == (429, "rate_limited")
        assert refused.body["error"]["retryable"] is True
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert refused.headers["ratelimit-policy"] == '"orders";q=2;w=60'
        assert refused.headers["ratelimit"].startswith('"orders";r=0;t=')
        plan = await served.post("/agent/swap/plan", {})
        assert plan.status == 200
        assert plan.headers["ratelimit"].startswith('"requests";r=2')


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/rpc", b'{"jsonrpc":"2.0","id":1,"method":"service.swap.plan"}'),
        ("POST", "/api/v1/agent/swap/plan", b"{}"),
        ("POST", "/bff/v1/quote", b"{}"),
        ("GET", "/llms.txt", None),
    ],
)
async def test_refused_caller_gets_one_retry_after(
    tmp_path: Path, method: str, path: str, body: bytes | None
) -> None:
    """Most clients join two Retry-After headers to "60, 60", which is no number."""
    async with serving(
        tmp_path,
        rate_limit__enabled=True,
        rate_limit__requests_per_minute=1,
        rate_limit__rpc_requests_per_minute=1,
    ) as served:
        headers = {"content-type": "application/json"} if body else {}
        await served.client.request(method, path, data=body, headers=headers)
        refused = await served.client.request(method, path, data=body, headers=headers)
        assert refused.status == 429
        [seconds] = refused.headers.getall("retry-after")
        assert 0 < int(seconds) <= 60


async def test_clients_behind_a_proxy_have_a_budget_each(tmp_path: Path) -> None:
    async with serving(
        tmp_path,
        rate_limit__enabled=True,
        rate_limit__requests_per_minute=1,
        trusted_proxies="127.0.0.0/8",
    ) as served:
        statuses = []
        for client in ("203.0.113.7", "203.0.113.7", "203.0.113.8"):
            headers = {**PROXIED, "x-forwarded-for": client}
            response = await served.client.get("/api/v1/agent/capabilities", headers=headers)
            statuses.append(response.status)
        assert statuses == [200, 429, 200]


async def test_rpc_budget_is_per_token_and_charges_each_batch_element(
    tmp_path: Path,
) -> None:
    async with serving(
        tmp_path,
        {"AGENT_RPC_TOKEN": TOKEN},
        rate_limit__enabled=True,
        rate_limit__rpc_requests_per_minute=3,
    ) as served:
        call = b'{"jsonrpc":"2.0","id":1,"method":"service.swap.plan"}'
        batch = await served.raw(b"[%b]" % b",".join([call] * 4), x_agent_rpc_token=TOKEN)
        elements: list[Any] = list(batch.body)
        codes = [item.get("error", {}).get("code") for item in elements]
        assert codes == [None, None, None, -32029]
        assert 0 < int(batch.headers["retry-after"]) <= 60
        refused = await served.raw(call, x_agent_rpc_token=TOKEN)
        assert (refused.status, refused.body["error"]["code"]) == (429, -32029)
        assert "retry-after" in refused.headers


async def test_a_good_request_id_is_echoed_and_a_bad_one_replaced(served: Served) -> None:
    for good in ("my.id:1", "Az09._:-", "x" * 128):
        answer = await served.post("/agent/swap/plan", {}, x_request_id=good)
        assert (answer.body["requestId"], answer.headers["x-request-id"]) == (good, good)
    for bad in ("no spaces", "x" * 129):
        answer = await served.post("/agent/swap/plan", {}, x_request_id=bad)
        assert answer.body["requestId"].startswith("req_")
        assert answer.headers["x-request-id"] == answer.body["requestId"]


async def test_the_json_rpc_id_serves_as_request_id_if_it_is_fit(served: Served) -> None:
    for call_id, expected in (("abc", "abc"), ("no spaces", None), (7, None)):
        body = aiohttp.payload.JsonPayload(
            {"jsonrpc": "2.0", "id": call_id, "method": "service.swap.plan"}
        )
        response = await served.client.post("/rpc", data=body)
        answer = await response.json()
        request_id = answer["result"]["requestId"]
        assert response.headers["x-request-id"] == request_id
        assert answer["id"] == call_id
        assert request_id == expected if expected else request_id.startswith("req_")


async def test_the_socket_asks_for_no_token_and_is_for_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RPC_TOKEN", TOKEN)
    arguments = ["serve", "--port", free_port(), "--data-dir", str(tmp_path)]
    async with process(*arguments) as child:
        await child.logged("serving")
        path = tmp_path / "rpcsvc.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            call = {"jsonrpc": "2.0", "id": 1, "method": "service.swap.plan"}
            answer = await (await session.post("http://localhost/rpc", json=call)).json()
            assert answer["result"]["ok"]
            assert (await session.get("http://localhost/metrics")).status == 200
        child.terminate()
        assert (await child.ended())[0] == 0


async def test_https_is_served_with_a_certificate_and_a_key(tmp_path: Path) -> None:
    authority, chain = make_certificates(tmp_path)
    port = free_port()
    arguments = [
        "serve",
        "--port",
        port,
        "--data-dir",
        str(tmp_path / "d"),
        "--tls-cert",
        str(chain),
    ]
    async with process(*arguments, "--tls-key", str(chain)) as child:
        await child.logged("serving")
        trust = ssl.create_default_context(cafile=str(authority))
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://127.0.0.1:{port}/readyz", ssl=trust) as response,
        ):
            assert response.status == 200


async def test_plain_http_is_not_served_to_the_world(tmp_path: Path) -> None:
    arguments = ["serve", "--host", "0.0.0.0", "--port", free_port(), "--data-dir", str(tmp_path)]
    async with process(*arguments) as child:
        status, stderr = await child.ended()
        assert status == 2
        assert "tls" in stderr.lower()


async def test_a_second_server_on_the_same_data_is_refused(tmp_path: Path) -> None:
    arguments = ["serve", "--data-dir", str(tmp_path)]
    async with process(*arguments, "--port", free_port()) as first:
        await first.logged("serving")
        async with process(*arguments, "--port", free_port()) as second:
            status, stderr = await second.ended()
            assert status == 2
            assert "already serves the data directory" in stderr
