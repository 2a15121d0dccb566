"""swap.fund over the wire, paid by the client of the package x402."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from eth_account import Account
from x402.extensions.payment_identifier import (
    PAYMENT_IDENTIFIER,
    append_payment_identifier_to_extensions,
    declare_payment_identifier_extension,
    is_payment_identifier_required,
)
from x402.mcp.types import MCPToolResult
from x402.mcp.utils import (
    extract_payment_required_from_result,
    extract_payment_response_from_meta,
)
from x402.schemas import PaymentRequired
from x402.schemas.errors import NoMatchingRequirementsError

from rpcsvc.domain.chains import load_chains
from rpcsvc.errors import RateLimited, Unavailable
from rpcsvc.operations.webhooks import event_body
from rpcsvc.orders import authorizations
from rpcsvc.orders.authorizations import Carried
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.orders.waits import Waits
from rpcsvc.settlement.sandbox.engine import SimulatedAuthorizations
from rpcsvc.store.authorizations import AuthorizationRecord, AuthorizationStore
from tests.contract.following import count_waiting, until_status
from tests.contract.paying import (
    PAYER,
    X402_CLIENT,
    debits,
    finished,
    fund,
    header,
    new_order,
    offered,
    read_required,
    signed,
    x402_client,
)
from tests.contract.serving import BACK, SWAP, Served, serving
from tests.e2e.processes import until
from tests.mcp import call, meta
from tests.rows import all_rows
from tests.signature_forms import forms

Json = dict[str, Any]
VALID_ID = "pay_7d5d747be160e280504c099d984bcfe0"

DOCS = Path(__file__).parent.parent.parent / "docs"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "use" / "x402.md").read_text(), re.DOTALL | re.M
)


CHAINS = load_chains((DOCS.parent / "config" / "chains.toml").read_text(encoding="utf-8"))


def documented(lines: str, parameters: str, returned: str) -> Any:
    """The lines of docs/use/x402.md, unchanged, as a function."""
    names: dict[str, Any] = {}
    body = textwrap.indent(f"{lines}\nreturn {returned}", "    ")
    exec(f"async def run({parameters}):\n{body}", names)
    return names["run"]


@pytest.mark.parametrize("chain", [chain.name for chain in CHAINS.all()])
async def test_x402_http_client_pays_as_documented(served: Served, chain: str) -> None:
    """With the package's own HTTP client."""
    (block,) = BLOCKS
    order_id = await new_order(served, {**BACK, "chain": chain})
    paid = await documented(block, "key, site, order_id", "paid")(PAYER.key, served.url, order_id)
    assert paid.status_code == 200
    settled = X402_CLIENT.get_payment_settle_response(paid.headers.get)
    assert paid.json()["data"]["paymentResponse"]["transaction"] == settled.transaction
    assert (await finished(served, order_id))["state"] == "completed"
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_documented_x402_client_signs_usdc_of_each_chain_alone(served: Served) -> None:
    """On the networks where the money is real, and no more than it says."""
    lines = BLOCKS[0].partition("async with")[0]
    client = await documented(lines, "key", "client")(PAYER.key)
    offer = await offered(served, await new_order(served))
    for chain in CHAINS.all():
        for asset, amount, is_signed in (
            (chain.usdc_contract, "500000000", True),
            (chain.usdc_contract, "500000001", False),
            (PAYER.address, "1", False),
        ):
            asked = {"network": f"eip155:{chain.chain_id}", "asset": asset, "amount": amount}
            required = read_required({**offer, "accepts": [{**offer["accepts"][0], **asked}]})
            if is_signed:
                assert (await client.create_payment_payload(required)).accepted.asset == asset
            else:
                with pytest.raises(NoMatchingRequirementsError):
                    await client.create_payment_payload(required)


async def test_daily_payment_limit_of_an_address_is_enforced(tmp_path: Path) -> None:
    environ = {"RPCSVC_TRUSTED_PROXIES": "127.0.0.0/8", "AGENT_RPC_TOKEN": "t" * 32}
    limit = {"orders__address_authorizations_a_day": 1}
    by = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9"}
    async with serving(tmp_path, environ, **limit) as served:
        for status in (200, 429):
            made = await served.http("POST", "/agent/swap/execute", json=BACK, headers=by)
            order_id = made.body["data"]["order"]["orderId"]
            asked = await fund(served, order_id, **by)
            payment = await signed(asked.body["error"]["details"]["paymentRequired"])
            paid = await fund(served, order_id, **header(payment), **by)
            assert paid.status == status
            # A repetition is the same payment; a refused one is not recorded.
            assert (await fund(served, order_id, **header(payment), **by)).status == status
        assert "signed payments today" in paid.body["error"]["message"]
        elsewhere = {**by, "x-forwarded-for": "203.0.113.10"}
        again = await fund(served, order_id, **header(payment), **elsewhere)
        assert again.status == 200


# --- HTTP ------------------------------------------------------------------------------------


async def test_x402_client_pays_an_order_over_http(served: Served) -> None:
    order_id = await new_order(served)
    asked = await fund(served, order_id)
    assert (asked.status, asked.body["error"]["code"]) == (402, "payment_required")
    required = X402_CLIENT.get_payment_required_response(asked.headers.get, asked.body)
    assert (
        required.model_dump(by_alias=True, exclude_none=True)
        == (asked.body["error"]["details"]["paymentRequired"])
    )
    assert isinstance(required, PaymentRequired)
    assert required.resource is not None
    assert required.resource.url.endswith(f"/api/v1/agent/swap/fund/{order_id}")
    payment = await X402_CLIENT._client.create_payment_payload(required)
    sent = X402_CLIENT.encode_payment_signature_header(payment)
    paid = await fund(served, order_id, **sent)
    assert paid.status == 200
    settled = X402_CLIENT.get_payment_settle_response(paid.headers.get)
    assert (settled.success, settled.payer) == (True, PAYER.address)
    assert paid.body["data"]["paymentResponse"]["transaction"] == settled.transaction
    order = await finished(served, order_id)
    assert order["state"] == "completed"
    assert [each["txid"] for each in order["data"]["deposits"]] == [settled.transaction]
    again = await fund(served, order_id, **sent)
    assert (again.status, again.headers["PAYMENT-RESPONSE"]) == (
        200,
        paid.headers["PAYMENT-RESPONSE"],
    )
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_payment_of_something_else_is_refused(served: Served) -> None:
    order_id = await new_order(served)
    offer = await offered(served, order_id)
    other = await offered(served, await new_order(served))
    for other_one in (
        other,
        {**offer, "accepts": [{**offer["accepts"][0], "amount": "149999999"}]},
    ):
        answer = await fund(served, order_id, **header(await signed(other_one)))
        assert (answer.status, answer.body["error"]["code"]) == (402, "payment_refused")
        reported = read_required(answer.body["error"]["details"]["paymentRequired"])
        assert reported.error == "invalid_payment_requirements"
    payment = await signed(offer)
    payment["payload"]["authorization"]["nonce"] = "0x" + "1" * 64
    answer = await fund(served, order_id, **header(payment))
    assert answer.body["error"]["details"]["paymentRequired"]["error"] == (
        "invalid_exact_evm_payload_signature"
    )
    assert debits(served) == []
    assert served.count("funding_authorizations") == 0


async def test_payment_of_more_than_is_due_is_refused(served: Served) -> None:
    order_id = await new_order(served)
    early = header(await signed(await offered(served, order_id)))
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": "50"})
    await until_status(served, order_id, amountDue="100")
    too_much = await fund(served, order_id, **early)
    assert (too_much.status, too_much.body["error"]["code"]) == (402, "payment_refused")
    rest = too_much.body["error"]["details"]["paymentRequired"]
    assert [each["amount"] for each in rest["accepts"]] == ["100000000"]
    assert (await fund(served, order_id, **header(await signed(rest)))).status == 200
    order = await finished(served, order_id)
    assert (order["state"], len(order["data"]["deposits"])) == ("completed", 2)
    assert sorted(units for _, units in debits(served)) == [50_000_000, 100_000_000]


async def test_malformed_payment_is_a_bad_request(served: Served) -> None:
    order_id = await new_order(served)
    payment = await signed(await offered(served, order_id))
    for wrong in (
        {"PAYMENT-SIGNATURE": "%%%"},
        {"PAYMENT-SIGNATURE": base64.b64encode(b"[]").decode()},
        header({**payment, "x402Version": 1}),
        {"X-PAYMENT": header(payment)["PAYMENT-SIGNATURE"]},
    ):
        answer = await fund(served, order_id, **wrong)
        assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_input"), wrong
    twice = await served.post(
        f"/agent/swap/fund/{order_id}", {"payment": payment}, **header(payment)
    )
    assert twice.status == 400


async def test_order_that_takes_no_signature_is_not_fundable(served: Served) -> None:
    for order_id in (await new_order(served, SWAP), await _cancelled(served)):
        answer = await fund(served, order_id)
        assert (answer.status, answer.body["error"]["code"]) == (409, "order_not_fundable")


async def _cancelled(served: Served) -> str:
    made = (await served.post("/agent/swap/execute", BACK)).body["data"]
    order_id = str(made["order"]["orderId"])
    await served.post(f"/agent/swap/cancel/{order_id}", {"sessionId": made["sessionId"]})
    return order_id


async def test_copies_of_a_payment_at_once_debit_the_payer_once(served: Served) -> None:
    order_id = await new_order(served)
    payment = header(await signed(await offered(served, order_id)))
    answers = await asyncio.gather(*(fund(served, order_id, **payment) for _ in range(8)))
    assert {answer.status for answer in answers} <= {200, 202, 503}
    assert (await finished(served, order_id))["state"] == "completed"
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_payments_of_two_payers_at_once_are_one_debit(served: Served) -> None:
    order_id = await new_order(served)
    offer = await offered(served, order_id)
    other = x402_client(Account.from_key(b"\x09" * 32))
    second = await other._client.create_payment_payload(read_required(offer))
    payments = [
        header(await signed(offer)),
        header(second.model_dump(by_alias=True, exclude_none=True)),
    ]
    answers = await asyncio.gather(*(fund(served, order_id, **each) for each in payments * 3))
    assert {answer.status for answer in answers} <= {200, 202, 409, 503}
    assert (await finished(served, order_id))["state"] == "completed"
    assert len(debits(served)) == 1


async def test_nonce_of_another_order_is_refused(served: Served) -> None:
    first, second = await new_order(served), await new_order(served)
    payment = await signed(await offered(served, first))
    assert (await fund(served, first, **header(payment))).status == 200
    answer = await fund(served, second, **header(payment))
    assert answer.status == 402
    reported = answer.body["error"]["details"]["paymentRequired"]["error"]
    assert reported == "invalid_exact_evm_nonce_already_used"


# --- the payer's name for a payment ----------------------------------------------------------


def named(payment: Json, payment_id: Any) -> Json:
    """The payment under a name, as a client of the extension payment-identifier writes it."""
    extensions = {PAYMENT_IDENTIFIER: declare_payment_identifier_extension()}
    if payment_id is VALID_ID:
        append_payment_identifier_to_extensions(extensions, payment_id)
    else:
        extensions[PAYMENT_IDENTIFIER]["info"]["id"] = payment_id
    return {**payment, "extensions": extensions}


async def test_offer_declares_payment_identifiers(served: Served) -> None:
    """As the reference server declares them."""
    offer = await offered(served, await new_order(served))
    declared = offer["extensions"][PAYMENT_IDENTIFIER]
    assert declared == declare_payment_identifier_extension()
    assert is_payment_identifier_required(declared) is False


async def test_named_payment_that_is_repeated_gets_its_outcome(served: Served) -> None:
    order_id = await new_order(served)
    payment = named(await signed(await offered(served, order_id)), VALID_ID)
    first, again = [await fund(served, order_id, **header(payment)) for _ in range(2)]
    assert (first.status, again.status) == (200, 200)
    response = "PAYMENT-RESPONSE"
    assert first.headers[response] == again.headers[response]
    assert len(debits(served)) == 1


async def test_payer_pays_once_under_a_name(served: Served) -> None:
    """For any order."""
    first, second = await new_order(served), await new_order(served)
    paid = named(await signed(await offered(served, first)), VALID_ID)
    assert (await fund(served, first, **header(paid))).status == 200
    other = await signed(await offered(served, second))
    refused = await fund(served, second, **header(named(other, VALID_ID)))
    assert (refused.status, refused.body["error"]["code"]) == (409, "idempotency_conflict")
    assert "with a new id" in refused.body["error"]["message"]
    assert len(debits(served)) == 1
    assert (await fund(served, second, **header(named(other, "b" * 16)))).status == 200


async def test_payers_do_not_take_each_others_names(served: Served) -> None:
    first, second = await new_order(served), await new_order(served)
    paid = named(await signed(await offered(served, first)), VALID_ID)
    assert (await fund(served, first, **header(paid))).status == 200
    stranger = x402_client(Account.from_key(b"\x09" * 32))
    offer = read_required(await offered(served, second))
    payload = await stranger._client.create_payment_payload(offer)
    other = dict(payload.model_dump(by_alias=True, exclude_none=True))
    assert (await fund(served, second, **header(named(other, VALID_ID)))).status == 200


@pytest.mark.parametrize("payment_id", ["short", "a" * 129, "sixteen letters!", 1234567890123456])
async def test_malformed_name_of_a_payment_is_named(served: Served, payment_id: Any) -> None:
    order_id = await new_order(served)
    payment = named(await signed(await offered(served, order_id)), payment_id)
    answer = await fund(served, order_id, **header(payment))
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_input")
    assert (
        answer.body["validationErrors"][0]["field"]
        == "payment.extensions.payment-identifier.info.id"
    )
    assert debits(served) == []


# --- unknown and failed ----------------------------------------------------------------------


async def test_unknown_outcome_is_202_and_never_a_402(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_id = await new_order(served)
    offer = await offered(served, order_id)
    paying = await signed(offer)
    payment = header(paying)

    async def lost(*_: Any) -> Any:
        raise ConnectionError("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedAuthorizations, "carry_out", lost)
        answer = await fund(served, order_id, **payment)
        assert (answer.status, answer.body["data"]["paymentResponse"]) == (202, None)
        assert "PAYMENT-RESPONSE" not in answer.headers
        for same in (await fund(served, order_id, **payment), await fund(served, order_id)):
            assert (same.status, same.body["ok"]) == (202, True)
        other = await fund(served, order_id, **header(await signed(offer)))
        assert (other.status, other.body["error"]["code"]) == (409, "order_not_fundable")
        signature = bytearray.fromhex(paying["payload"]["signature"][2:])
        signature[0] ^= 1
        altered = with_signature(paying, "0x" + signature.hex())
        other = await fund(served, order_id, **header(altered))
        assert (other.status, other.body["error"]["code"]) == (409, "order_not_fundable")
    assert (await finished(served, order_id))["state"] == "completed"
    assert (await fund(served, order_id, **payment)).status == 200
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_unknown_outcome_is_said_in_lean_answers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over MCP there is no 202, and a null is left out."""
    order_id = await new_order(served)
    payment = await signed(await offered(served, order_id))

    async def lost(*_: Any) -> Any:
        raise ConnectionError("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedAuthorizations, "carry_out", lost)
        result = await call(served, "fund_swap", {"orderId": order_id, "payment": payment})
        steps = result["structuredContent"]["nextActions"]
        assert [step["action"] for step in steps] == ["await_signed_payment", "poll_status"]
        assert "Send or sign no other one" in steps[0]["description"]


async def test_payment_written_in_another_form_is_the_same_payment(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wallets and libraries write the same signature in different ways."""
    order_id = await new_order(served)
    payment = await signed(await offered(served, order_id))
    given = payment["payload"]["authorization"]
    written = [
        with_signature(payment, "0x" + each)
        for form in forms(bytes.fromhex(payment["payload"]["signature"][2:]))
        for each in (form.hex(), form.hex().upper())
    ]
    recased = {name: given[name].lower() for name in ("from", "to")}
    recased["nonce"] = "0x" + given["nonce"][2:].upper()
    written.append(
        {**payment, "payload": {**payment["payload"], "authorization": {**given, **recased}}}
    )

    async def lost(*_: Any) -> Any:
        raise ConnectionError("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedAuthorizations, "carry_out", lost)
        answers = [await fund(served, order_id, **header(each)) for each in [payment, *written]]
        assert [answer.status for answer in answers] == [202] * len(answers)
    assert (await finished(served, order_id))["state"] == "completed"
    answers = [await fund(served, order_id, **header(each)) for each in written]
    assert [answer.status for answer in answers] == [200] * len(answers)
    assert debits(served) == [(PAYER.address, 150_000_000)]


def with_signature(payment: Json, signature: str) -> Json:
    return {**payment, "payload": {**payment["payload"], "signature": signature}}


async def test_compact_signature_pays(served: Served) -> None:
    order_id = await new_order(served)
    payment = await signed(await offered(served, order_id))
    compact = forms(bytes.fromhex(payment["payload"]["signature"][2:]))[2]
    paid = await fund(served, order_id, **header(with_signature(payment, "0x" + compact.hex())))
    assert paid.status == 200
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_reverted_payment_frees_the_order(served: Served) -> None:
    order_id = await new_order(served)
    await served.rpc("sandbox.fault", {"fault": "funding_fails", "orderId": order_id})
    offer = await offered(served, order_id)
    failed = header(await signed(offer))
    for _ in range(2):
        answer = await fund(served, order_id, **failed)
        assert (answer.status, answer.body["error"]["code"]) == (402, "payment_refused")
        reported = answer.body["error"]["details"]["paymentRequired"]["error"]
        assert reported == "transaction_failed"
    assert (await fund(served, order_id, **header(await signed(offer)))).status == 200
    assert (await finished(served, order_id))["state"] == "completed"


async def told(served: Served, order_id: str, kind: str) -> None:
    """Wait for an event of an order."""
    async with asyncio.timeout(20):
        while True:
            answer = await served.http("GET", f"/agent/swap/events/{order_id}?waitSec=1")
            if kind in [each["type"] for each in answer.body["data"]["events"]]:
                return


async def test_payment_off_its_chain_is_not_called_made(served: Served) -> None:
    order_id = await new_order(served)
    payment = header(await signed(await offered(served, order_id)))
    assert (await fund(served, order_id, **payment)).status == 200
    await served.rpc("sandbox.fault", {"fault": "drop_deposit", "orderId": order_id})
    await told(served, order_id, "deposit.removed")
    assert (await fund(served, order_id, **payment)).status == 202


async def test_payment_mined_again_is_answered_with_its_transaction(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch took the deposit after it was credited, and another attempt is mined."""
    another = "0x" + "b5" * 32

    async def mined(*_: Any) -> Carried:
        return Carried(Outcome.SETTLED, another)

    async def is_credited() -> bool:
        found = all_rows(served.up.database, "SELECT state FROM funding_authorizations")
        return found == [("credited",)]

    async def transaction() -> str | None:
        answer = await fund(served, order_id, **payment)
        response = answer.body["data"]["paymentResponse"]
        return str(response["transaction"]) if response else None

    order_id = await new_order(served)
    payment = header(await signed(await offered(served, order_id)))
    assert (await fund(served, order_id, **payment)).status == 200
    await until(is_credited)
    await served.rpc("sandbox.fault", {"fault": "drop_deposit", "orderId": order_id})
    await told(served, order_id, "deposit.removed")
    assert await transaction() is None
    monkeypatch.setattr(SimulatedAuthorizations, "carry_out", mined)
    assert await until(transaction) == another


async def test_lost_reply_is_looked_up_and_credited_once(served: Served) -> None:
    order_id = await new_order(served)
    await served.rpc("sandbox.fault", {"fault": "funding_unknown", "orderId": order_id})
    payment = header(await signed(await offered(served, order_id)))
    assert (await fund(served, order_id, **payment)).status == 202
    assert (await finished(served, order_id))["state"] == "completed"
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_engine_down_takes_no_payment(served: Served) -> None:
    order_id = await new_order(served)
    payment = header(await signed(await offered(served, order_id)))
    await served.rpc("sandbox.fault", {"fault": "engine_down"})
    assert (await fund(served, order_id, **payment)).status == 503
    assert served.count("funding_authorizations") == 0


class SlowNetwork:
    """A network that has the payment in its pool, and mines it on request."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mined = asyncio.Event()
        self.pooled = asyncio.Event()
        really = SimulatedAuthorizations.carry_out

        async def carry_out(own: SimulatedAuthorizations, record: AuthorizationRecord) -> Carried:
            self.pooled.set()
            return await really(own, record) if self.mined.is_set() else Carried(Outcome.PENDING)

        patch.setattr(SimulatedAuthorizations, "carry_out", carry_out)


@pytest.mark.parametrize(("fault", "status"), [(None, 200), ("funding_fails", 402)])
async def test_payment_in_the_pool_is_answered_when_it_is_mined(
    served: Served, monkeypatch: pytest.MonkeyPatch, fault: str | None, status: int
) -> None:
    network, order_id = SlowNetwork(monkeypatch), await new_order(served)
    if fault:
        await served.rpc("sandbox.fault", {"fault": fault, "orderId": order_id})
    payment = header(await signed(await offered(served, order_id)))
    paying = asyncio.create_task(fund(served, order_id, **payment))
    await network.pooled.wait()
    same = await fund(served, order_id, **payment)
    assert (same.status, paying.done()) == (202, False), "told how it stands, beside the wait"
    network.mined.set()
    assert (await paying).status == status
    assert (await paying).headers.get("PAYMENT-RESPONSE") == (
        (await fund(served, order_id, **payment)).headers.get("PAYMENT-RESPONSE")
    )
    assert served.count("funding_authorizations") == 1


async def test_payment_on_record_is_202_when_its_wait_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, order_id = SlowNetwork(monkeypatch), await new_order(served)
    payment = header(await signed(await offered(served, order_id)))

    async def away(*_: Any) -> Any:
        raise Unavailable("The database is away.")

    with monkeypatch.context() as patch:
        paying = asyncio.create_task(fund(served, order_id, **payment))
        await network.pooled.wait()
        patch.setattr(AuthorizationStore, "find", away)
        network.mined.set()
        answer = await paying
        assert (answer.status, answer.body["data"]["paymentResponse"]) == (202, None)
    assert (await finished(served, order_id))["state"] == "completed"
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_payment_that_is_mined_late_is_202_then_200(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorizations, "OUTCOME_SECONDS", 0.5)
    network, order_id = SlowNetwork(monkeypatch), await new_order(served)
    payment = header(await signed(await offered(served, order_id)))
    answer = await fund(served, order_id, **payment)
    assert (answer.status, answer.body["data"]["paymentResponse"]) == (202, None)
    network.mined.set()
    assert (await finished(served, order_id))["state"] == "completed"
    assert (await fund(served, order_id, **payment)).status == 200
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_payer_that_hangs_up_changes_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, order_id = SlowNetwork(monkeypatch), await new_order(served)
    payment = header(await signed(await offered(served, order_id)))
    paying = asyncio.create_task(fund(served, order_id, **payment))
    await network.pooled.wait()
    paying.cancel()
    await asyncio.gather(paying, return_exceptions=True)
    network.mined.set()
    assert (await finished(served, order_id))["state"] == "completed"
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_wait_for_a_payment_ends_with_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as served:
        network, order_id = SlowNetwork(monkeypatch), await new_order(served)
        payment = header(await signed(await offered(served, order_id)))
        paying = asyncio.create_task(fund(served, order_id, **payment))
        await network.pooled.wait()
        await until(waits_of(served))
        served.up.service.waits.end()
        async with asyncio.timeout(authorizations.OUTCOME_SECONDS / 2):
            assert (await paying).status == 202


async def test_payment_is_not_refused_where_no_more_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Waits, "require", _no_room)
    async with serving(tmp_path) as served:
        SlowNetwork(monkeypatch)
        order_id = await new_order(served)
        payment = header(await signed(await offered(served, order_id)))
        assert (await fund(served, order_id, **payment)).status == 202


def _no_room(*_: Any) -> None:
    raise RateLimited("full", retry_after=5)


def waits_of(served: Served) -> Callable[[], Awaitable[int]]:
    async def count() -> int:
        return count_waiting(served.up.service.waits)

    return count


async def test_order_with_a_payment_under_way_is_not_cancelled(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (await served.post("/agent/swap/execute", BACK)).body["data"]
    order_id = made["order"]["orderId"]
    payment = header(await signed(await offered(served, order_id)))

    async def lost(*_: Any) -> Any:
        raise ConnectionError("no reply")

    monkeypatch.setattr(SimulatedAuthorizations, "carry_out", lost)
    assert (await fund(served, order_id, **payment)).status == 202
    session = {"sessionId": made["sessionId"]}
    answer = await served.post(f"/agent/swap/cancel/{order_id}", session)
    assert (answer.status, answer.body["error"]["code"]) == (409, "order_not_cancellable")


async def test_status_asks_for_no_deposit_beside_a_signed_payment(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_id = await new_order(served)
    offer = await offered(served, order_id)
    before = await asked_to_pay(served, order_id)
    assert before["actions"][:2] == ["ask_user_to_fund", "fund_by_signature"]
    assert before["address"] in before["page"]

    async def lost(*_: Any) -> Any:
        raise ConnectionError("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedAuthorizations, "carry_out", lost)
        await fund(served, order_id, **header(await signed(offer)))
        during = await asked_to_pay(served, order_id)
        assert during["actions"] == ["await_signed_payment", "poll_status"]
        assert (during["funding"], during["due"]) == (None, None)
        assert not during["is_attested"]
        assert before["address"] not in during["page"]
        assert "A signed payment is under way" in during["page"]
        check = {"paymentUri": before["funding"]["paymentUri"]}
        checked = (await served.post(f"/agent/swap/check/{order_id}", check)).body["data"]
        assert [each["code"] for each in checked["paymentCheck"]["problems"]] == ["not_payable"]
        service = served.up.service
        reported = await event_body(
            service.store, service.views, service.venue.authorizations, order_id, 1
        )
        assert json.loads(reported)["data"]["status"]["fundingInstructions"] is None
        # A plain deposit renews the stored answer, which is not served either.
        some = {"orderId": order_id, "amount": "50"}
        await served.post("/sandbox/fund", some)
        path = f"/agent/swap/status/{order_id}?waitSec=20&sinceCursor=1"
        assert (await served.http("GET", path)).body["data"]["deposits"]
        partly = await asked_to_pay(served, order_id)
        assert (partly["funding"], partly["actions"][0]) == (None, "await_signed_payment")


async def test_failed_payment_has_the_order_ask_again(served: Served) -> None:
    order_id = await new_order(served)
    before = await asked_to_pay(served, order_id)
    await served.rpc("sandbox.fault", {"fault": "funding_fails", "orderId": order_id})
    await fund(served, order_id, **header(await signed(await offered(served, order_id))))
    after = await asked_to_pay(served, order_id)
    assert {**after, "page": ""} == {**before, "page": ""}
    assert before["address"] in after["page"]


async def test_bff_asks_for_nothing_while_signed_payment_is_under_way(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, order_id = SlowNetwork(monkeypatch), await new_order(served)
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": "50"})
    await until_status(served, order_id, amountDue="100")
    await served.rpc("sandbox.fault", {"fault": "funding_fails", "orderId": order_id})
    before = await in_bff(served, order_id)
    payment = header(await signed(await offered(served, order_id)))
    paying = asyncio.create_task(fund(served, order_id, **payment))
    await network.pooled.wait()
    meanwhile = await in_bff(served, order_id)
    network.mined.set()
    assert (await paying).status == 402
    after = await in_bff(served, order_id)
    due = [each.get("amountDue") for each in (before, meanwhile, after)]
    assert due == ["100000000", None, "100000000"]


async def in_bff(served: Served, order_id: str) -> Json:
    found: Json = await (await served.client.get(f"/bff/v1/orders/{order_id}")).json()
    return found


async def asked_to_pay(served: Served, order_id: str) -> Json:
    """The part of the status answer about paying, and the page."""
    status = (await served.http("GET", f"/agent/swap/status/{order_id}")).body
    page = await (await served.client.get(f"/orders/{order_id}?refresh=off")).text()
    data = status["data"]
    return {
        "actions": [each["action"] for each in status["nextActions"]],
        "funding": data["fundingInstructions"],
        "due": data["amountDue"],
        "deposits": data["deposits"],
        "address": data["order"]["depositAddress"],
        "is_attested": "attestation" in data["order"],
        "page": page,
    }


async def test_payment_on_record_is_sent_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any) -> Any:
        raise ConnectionError("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedAuthorizations, "carry_out", lost)
        async with serving(tmp_path) as served:
            order_id = await new_order(served)
            payment = header(await signed(await offered(served, order_id)))
            assert (await fund(served, order_id, **payment)).status == 202
            assert debits(served) == []
    async with serving(tmp_path) as served:
        assert (await finished(served, order_id))["state"] == "completed"
        assert debits(served) == [(PAYER.address, 150_000_000)]


# --- JSON-RPC and MCP ------------------------------------------------------------------------


async def test_json_rpc_takes_and_gives_the_same_objects(served: Served) -> None:
    order_id = await new_order(served)
    asked = (await served.rpc("swap.fund", {"orderId": order_id})).body["result"]
    assert (asked["ok"], asked["state"]) == (False, "waiting_for_funding")
    payment = await signed(asked["error"]["details"]["paymentRequired"])
    paid = (await served.rpc("swap.fund", {"orderId": order_id, "payment": payment})).body
    assert paid["result"]["data"]["paymentResponse"]["payer"] == PAYER.address


async def test_mcp_takes_the_payment_in_meta(served: Served) -> None:
    order_id = await new_order(served)
    asked = await _fund_tool(served, order_id, {})
    required = extract_payment_required_from_result(asked)
    assert required is not None
    payment = await X402_CLIENT._client.create_payment_payload(required)
    given = {"x402/payment": payment.model_dump(by_alias=True, exclude_none=True)}
    settled = extract_payment_response_from_meta(await _fund_tool(served, order_id, given))
    assert settled is not None
    assert (settled.success, settled.payer) == (True, PAYER.address)
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def _fund_tool(served: Served, order_id: str, given: Json) -> MCPToolResult:
    whole = {**meta(), **given}
    result = await call(served, "fund_swap", {"orderId": order_id}, _meta=whole)
    return MCPToolResult(
        content=result["content"],
        is_error=result["isError"],
        meta=result["_meta"],
        structured_content=result["structuredContent"],
    )
