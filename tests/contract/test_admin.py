"""The admin methods: on the UNIX socket only, and the only way to write a service's database."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.local_secret import operator_headers
from rpcsvc.operations.admin import PREFIX
from tests.contract.operator_socket import over_socket
from tests.contract.serving import Served, serving

ROOT = Path(__file__).parents[2]
METHODS = [
    "payouts.list", "payouts.show", "payouts.retry", "refunds.preview", "refunds.set",
    "integrators.report", "relays.list", "relays.close", "clients.list", "approvals.list",
    "approvals.grant", "approvals.deny", "tickets.list", "tickets.show", "tickets.reply",
    "tickets.close", "webhooks.list", "webhooks.replay", "withdrawals.preview",
    "withdrawals.make", "withdrawals.list",
]  # fmt: skip


def test_admin_table_has_the_tested_methods(served: Served) -> None:
    assert [operation.name for operation in served.up.admin] == [PREFIX + m for m in METHODS]


@pytest.mark.parametrize("method", METHODS)
async def test_admin_over_tcp_is_an_unknown_method(served: Served, method: str) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": f"admin.{method}"}).encode()
    error = (await served.raw(body)).body["error"]
    assert error["code"] == -32601
    assert "admin." not in json.dumps(error["data"].get("details", {}))


async def test_admin_over_tcp_is_unknown_with_a_token_too(tmp_path: Path) -> None:
    token = "correct-horse-battery-staple"
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": token}) as served:
        body = b'{"jsonrpc": "2.0", "id": 1, "method": "admin.payouts.list"}'
        answer = await served.raw(body, x_agent_rpc_token=token)
        assert answer.body["error"]["code"] == -32601


async def test_no_document_names_an_admin_method(served: Served) -> None:
    for path in ("/openapi.json", "/openrpc.json", "/llms-full.txt"):
        async with served.client.get(path) as response:
            assert response.status == 200, path
            assert "admin." not in await response.text(), path
    described = (await served.rpc("schemas", {})).body["result"]["data"]["operations"]
    assert not [name for name in described if name.startswith("admin")]


async def test_admin_over_the_socket_answers_a_plain_object(served: Served) -> None:
    async with over_socket(served) as at:
        assert (await at.call("admin.payouts.list", {}))["result"] == {
            "paused": None, "transfers": [],
        }  # fmt: skip
        assert (await at.call("service.swap.plan", {}))["result"]["ok"]


@pytest.mark.parametrize(
    "header",
    ["x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-port", "cf-connecting-ip"],
)
async def test_socket_refuses_what_a_proxy_passes_on(served: Served, header: str) -> None:
    async with over_socket(served) as at:
        forwarded = {**at.proof, header: "203.0.113.7"}
        for method in ("admin.payouts.list", "service.swap.plan"):
            refused = await at.send(method, {}, forwarded)
            assert refused.status == 421
            assert "TCP port" in (await refused.json())["error"]["message"]


async def test_admin_is_unknown_without_the_operators_header(served: Served) -> None:
    """A proxy that was put on the socket and adds no header passes on what strangers send."""
    async with over_socket(served) as at:
        [name] = at.proof
        for headers in ({}, {name: ""}, {name: "1"}, {name: at.proof[name][:-1]}, {name: "\udcff"}):
            answer = await (await at.send("admin.payouts.list", {}, headers)).json()
            assert answer["error"]["code"] == -32601
            assert "admin." not in json.dumps(answer["error"]["data"].get("details", {}))


async def test_operators_header_opens_nothing_over_tcp(served: Served) -> None:
    proof = operator_headers(served.up.settings.data_dir)
    body = b'{"jsonrpc": "2.0", "id": 1, "method": "admin.payouts.list"}'
    answer = await served.raw(body, **proof)
    assert answer.body["error"]["code"] == -32601


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("payouts.list", {"state": "lost"}),
        ("payouts.list", {"limit": 0}),
        ("payouts.list", {"limits": 5}),
        ("payouts.show", {}),
        ("payouts.show", {"transferId": 5}),
        ("refunds.set", {"orderId": "ord_1", "address": ""}),
        ("relays.close", {"orderId": "ord_1", "note": " "}),
        ("tickets.show", {"ticketId": None}),
    ],
)
async def test_wrong_params_of_admin_are_named(served: Served, method: str, params: Any) -> None:
    async with over_socket(served) as at:
        error = (await at.call(f"admin.{method}", params))["result"]["error"]
    assert error["code"] in ("invalid_input", "missing_input")
    assert error["message"]


# --- one writer --------------------------------------------------------------------------------

# The modules that may open the database file, and when or what for.
OPENING = {
    "SqliteDatabase.open(": {
        "rpcsvc/store/backends/__init__.py",  # the service
        "rpcsvc/cli/recovery/db.py",  # while it is stopped, under its lock
        "rpcsvc/cli/recovery/drill.py",  # a copy in a scratch directory
        "rpcsvc/cli/recovery/restore.py",  # while it is stopped, under its lock
    },
    "aiosqlite.connect(": {
        "rpcsvc/store/backends/sqlite/database.py",  # the writer, and who moves the write-ahead log
    },
    "sqlite3.connect(": {
        "rpcsvc/audit/memory.py",  # a file of its own
        "rpcsvc/audit/spilled.py",  # temporary files
        "rpcsvc/store/backends/copying.py",  # db copy, while it is stopped
        "rpcsvc/store/backends/sqlite/database.py",  # migrations, readers, and in memory
        "rpcsvc/store/backends/sqlite/maintenance.py",  # db check and db backup
        "rpcsvc/store/backends/sqlite/migrations.py",  # in memory, to compare with
    },
}


@pytest.mark.parametrize("call", OPENING)
def test_only_the_owner_of_the_database_opens_it_for_writing(call: str) -> None:
    found = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "rpcsvc").rglob("*.py")
        if re.search(rf"\b{re.escape(call)}", file.read_text(encoding="utf-8"))
    }
    assert found == OPENING[call]
