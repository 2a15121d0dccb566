"""``rpcsvc integrators`` and ``rpcsvc relays``: their output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.cli.main import build_parser
from rpcsvc.domain.clients import Credential, KnownClient
from rpcsvc.domain.integrators import Integrator
from rpcsvc.operations.dispatch import flat_dispatcher
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import BFF_OPERATIONS
from rpcsvc.store.changes import Change, RelayRecord, RelayState
from tests.operator_cli import Cli, served
from tests.rows import all_rows
from tests.sandbox import EVM, Placed, Sandbox

ACME = Integrator("acme", 75, b"\x01" * 32)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


async def keyed_order(box: Sandbox) -> Placed:
    row = next(row for row in BFF_OPERATIONS if row.name == "bff.orders.create")
    usdc = box.up.service.chains.resolve("arbitrum").usdc_contract
    params = {"fromChainId": 0, "toChainId": 42161, "fromToken": "XMR", "toToken": usdc,
              "fromAmount": "800000000000", "toAddress": EVM}  # fmt: skip
    reply = await flat_dispatcher(box.up.service).run(row, params, Call("test", integrator=ACME))
    order = await box.up.service.store.order(json.loads(reply.body)["orderId"])
    assert order is not None
    return Placed(box, order.order_id, order.terms.session_id)


async def test_a_new_key_comes_with_its_hash(cli: Cli) -> None:
    made = await cli.json("integrators", "new-key")
    assert len(made["key"]) == 48
    assert hashlib.sha256(made["key"].encode()).hexdigest() == made["hash"]
    assert await cli.json("integrators", "new-key") != made


async def test_new_token_comes_with_the_hash_to_configure(cli: Cli) -> None:
    made = await cli.json("clients", "new-token")
    assert len(made["token"]) == 48
    assert hashlib.sha256(made["token"].encode()).hexdigest() == made["sha256"]


async def test_clients_list_has_use_and_rest_of_the_day(tmp_path: Path, cli: Cli) -> None:
    known = KnownClient("desk", max_day=300 * 10**6, approve_above=140 * 10**6)
    async with served(tmp_path) as box:
        service = box.up.service
        service.clients.replace([Credential(b"1" * 32, known)])
        row = next(row for row in service.operations if row.name == "swap.create")
        call = Call("test", client=known.client, known=known, idempotency_key="k" * 20)
        swap = {"direction": "x2u", "chain": "arbitrum", "to": EVM}
        await box.up.dispatcher.run(row, {**swap, "amount": "0.8"}, call)
        (desk,) = (await cli.json("clients", "list"))["clients"]
        used = {name: desk[name] for name in ("client", "usedTodayUsd", "leftTodayUsd")}
        assert used == {"client": "desk", "usedTodayUsd": "132", "leftTodayUsd": "168"}
        asking = replace(call, idempotency_key="l" * 20)
        await box.up.dispatcher.run(row, {**swap, "amount": "0.9"}, asking)
        (waiting,) = (await cli.json("approvals", "list"))["approvals"]
        granted = await cli.json("approvals", "grant", waiting["id"], "--by", "Ada")
        assert granted["decided"]["decidedBy"] == "Ada"
        withdrawn = await cli.json("approvals", "deny", waiting["id"], "--by", "Ada")
        assert withdrawn["decided"]["state"] == "denied"
        assert await cli.ask("approvals", "grant", waiting["id"], "--by", "Ada") == 2
        assert "waits for a decision" in cli.err


async def test_the_report_counts_settled_payouts_only(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        settled, _open = await keyed_order(box), await keyed_order(box)
        assert await cli.json("integrators", "report") == {"fees": []}
        await settled.fund()
        await box.settle(8)
        assert await cli.json("integrators", "report") == {
            "fees": [{"integrator": "acme", "asset": "USDC", "amount": "0.99", "payouts": 1}]
        }


async def test_relays_lists_orders_in_doubt(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        for n, state in enumerate(RelayState):
            why = state.value
            record = RelayRecord(f"ord_{n}", state, 0, "", upstream_id=f"up-{n}", reason=why)
            await box.up.service.store.commit(Change(relay=record))
        found = (await cli.json("relays"))["inDoubt"]
    assert [(each["orderId"], each["reason"]) for each in found] == [
        ("ord_0", "claimed"), ("ord_3", "reconciling"),
    ]  # fmt: skip


async def test_only_a_claim_in_doubt_can_be_closed_and_the_note_stays(
    tmp_path: Path, cli: Cli
) -> None:
    async with served(tmp_path) as box:
        store = box.up.service.store
        for n, state in enumerate(RelayState):
            await store.commit(
                Change(
                    relay=RelayRecord(f"ord_{n}", state, 0, "", upstream_id=f"up-{n}", raw=b"{}")
                )
            )
            close = ("relays", "close", f"ord_{n}", "--note", " it is\nnot there ")
            if state is RelayState.RECONCILING:
                assert (await cli.json(*close))["closed"]["orderId"] == f"ord_{n}"
            assert await refused(cli, *close) == (2, True)
        assert (await refused(cli, "relays", "close", "ord_0", "--note", " "))[0] == 2
        assert "rpcsvc: --note must say what was found" in cli.err
        # A call that was under way when the claim was closed puts it in doubt again.
        again = RelayRecord("ord_3", RelayState.RECONCILING, 0, "", upstream_id="up-3", raw=b"{}")
        await store.commit(Change(relay=again))
        notes = {e["orderId"]: e["note"] for e in (await cli.json("relays"))["inDoubt"]}
        assert notes["ord_0"] is None
        assert notes["ord_3"].endswith("Z: it is not there")
        assert await cli.json("relays", "close", "ord_3", "--note", "nor now")
    async with served(tmp_path) as box:
        rows = all_rows(box.up.database, "SELECT state, reason, raw FROM relays ORDER BY seq")
    assert [state for state, _, _ in rows] == ["claimed", "created", "refused", "refused"]
    assert rows[3][1].startswith("closed by the operator at 20")
    assert rows[3][1].endswith("Z: nor now")
    assert rows[3][2] == b"{}"


@pytest.mark.parametrize(
    "words",
    [
        ("relays", "--data-dir", "/there", "close", "ord_0", "--note", "x"),
        ("relays", "close", "ord_0", "--note", "x", "--data-dir", "/there"),
    ],
)
def test_data_dir_option_may_precede_or_follow_the_action(words: Sequence[str]) -> None:
    assert build_parser().parse_args(words).data_dir == "/there"


async def refused(cli: Cli, *arguments: str) -> tuple[int, bool]:
    return await cli.ask(*arguments), "in doubt" in cli.err


async def test_tickets_are_listed_shown_and_closed(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        for message in ("first", "second"):
            assert (await box.call("support.create", message=message))["ok"]
        rows = (await cli.json("tickets", "list"))["tickets"]
        assert len(rows) == 2
        first, second = [row["ticketId"] for row in rows]
        assert "first" not in str(rows)
        shown = (await cli.json("tickets", "show", first))["ticket"]
        (said,) = shown["conversation"]
        assert shown == {**rows[0], "isFromOwner": False, "conversation": [said]}
        assert (said["text"], said["answeredBy"]) == ("first", None)
        assert (await cli.json("tickets", "close", first))["closed"]["ticketId"] == first
        for action in ("show", "close"):
            assert (await refused(cli, "tickets", action, first))[0] == 2
        assert (await cli.json("tickets", "list"))["tickets"][0]["ticketId"] == second
