"""swap.fund of a sidecar: passed on to the service that settles, which charges it once."""

from __future__ import annotations

import base64
import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from eth_account import Account
from msgspec.structs import replace
from structlog.testing import capture_logs

from rpcsvc.client import Swap, SwapClient
from rpcsvc.domain.addresses import MoneroNetwork, subaddress_on
from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.money import XMR, Asset
from rpcsvc.operations.table import MONERO
from rpcsvc.orders import authorizations
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.ports.wallets import NetworkNames
from rpcsvc.settings_onchain import chains_toml
from rpcsvc.settlement.sandbox import wiring
from rpcsvc.settlement.sandbox.engine import SandboxEngine
from rpcsvc.settlement.upstream.transport import (
    NoAnswer,
    RawReply,
    UpstreamAnswer,
    UpstreamCall,
    UpstreamTransport,
)
from tests.contract.bff import ORDER_BACK
from tests.contract.paying import (
    PAYER,
    debits,
    finished,
    fund,
    header,
    new_order,
    offered,
    signed,
)
from tests.contract.serving import Served, serving
from tests.contract.sidecar import SWAPS, beside, upstream_id
from tests.contract.swap_clients import client_of
from tests.e2e.processes import until
from tests.rows import all_rows

pytestmark = pytest.mark.usefixtures("short_retries")

SWAP = SWAPS["u2x"]
CHAINS = load_chains(chains_toml(None))
Json = dict[str, Any]


def states(served: Served) -> list[tuple[str, str | None]]:
    sql = "SELECT state, txid FROM funding_authorizations ORDER BY seq"
    return [(row[0], row[1]) for row in all_rows(served.up.database, sql)]


async def provoke(central: Served, sidecar: Served, order_id: str, fault: str) -> None:
    params = {"fault": fault, "orderId": await upstream_id(sidecar, order_id)}
    assert (await central.post("/sandbox/fault", params)).status == 200


async def credited(served: Served, txid: str) -> None:
    async def is_credited() -> bool:
        return states(served) == [("credited", txid)]

    await until(is_credited)


def lose_answers(monkeypatch: pytest.MonkeyPatch, *, arrives: bool) -> None:
    """Lose the answers to signed payments; ``arrives``: the payments reach the upstream.

    Callers wait for the outcome only briefly: it stays unknown.
    """
    send = UpstreamTransport.send

    async def lost(
        self: UpstreamTransport, call: UpstreamCall, key: str | None, *, creates: bool
    ) -> RawReply:
        if call.payment is None:
            return await send(self, call, key, creates=creates)
        if arrives:
            await send(self, call, key, creates=creates)
        raise NoAnswer("The connection was lost.", retryable=False)

    monkeypatch.setattr(UpstreamTransport, "send", lost)
    monkeypatch.setattr(authorizations, "OUTCOME_SECONDS", 0.5)


async def test_signed_payment_is_passed_on(central: Served, sidecar: Served) -> None:
    order_id = await new_order(sidecar, SWAP)
    offer = await offered(sidecar, order_id)
    theirs = await offered(central, await upstream_id(sidecar, order_id))
    (way,), (their_way,) = offer["accepts"], theirs["accepts"]
    assert way.keys() == their_way.keys()
    for name in ("scheme", "network", "amount", "asset", "payTo", "extra"):
        assert way[name] == their_way[name]
    assert f"/swap/fund/{order_id}" in offer["resource"]["url"]
    payment = await signed(offer)
    paid = await fund(sidecar, order_id, **header(payment))
    assert paid.status == 200
    txid = paid.body["data"]["paymentResponse"]["transaction"]
    again = await fund(sidecar, order_id, **header(payment))
    assert (again.status, again.headers["PAYMENT-RESPONSE"]) == (
        200,
        paid.headers["PAYMENT-RESPONSE"],
    )
    assert (await finished(sidecar, order_id))["state"] == "completed"
    await credited(sidecar, txid)
    assert debits(central) == [(PAYER.address, 150_000_000)]
    assert all_rows(central.up.database, "SELECT txid FROM funding_authorizations") == [(txid,)]


def settle_on(network: MoneroNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sandboxes report a network, and name chains as an on-chain service there does."""
    is_test = network is not MoneroNetwork.MAINNET
    simulated = SandboxEngine.names

    def names(self: SandboxEngine, asset: Asset, chain: str) -> NetworkNames:
        if asset is XMR:
            return simulated(self, asset, chain)
        return NetworkNames.of_usdc(CHAINS.resolve(chain), is_test=is_test)

    def profile(**given: Any) -> VenueProfile:
        return VenueProfile(**{**given, "network": network.value})

    monkeypatch.setattr(SandboxEngine, "names", names)
    monkeypatch.setattr(wiring, "VenueProfile", profile)


@pytest.mark.parametrize("network", MoneroNetwork)
async def test_client_pays_through_a_sidecar_on_each_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: MoneroNetwork
) -> None:
    """Upstream, sidecar and client agree on the chain of the network, and on its USDC."""
    settle_on(network, monkeypatch)
    signed_for = list[Json]()

    def sign(data: Json) -> str:
        signed_for.append(data["domain"])
        return str(Account.sign_typed_data(PAYER.key, full_message=data).signature.hex())

    settings = {"upstream__monero_network": network.value}
    to = subaddress_on(MONERO, network)
    swap = Swap(direction="u2x", chain="arbitrum", amount="150", to=to)
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar", **settings) as sidecar,
        client_of(sidecar.url) as client,
    ):
        placed = await client.create(swap)
        assert (await client.fund(swap, placed, PAYER.address, sign)).payment is not None
        assert (await finished(sidecar, placed.order_id))["state"] == "completed"
        assert debits(central) == [(PAYER.address, 150_000_000)]
    chain = CHAINS.resolve("arbitrum")
    here = (chain.chain_id, chain.usdc_contract)
    there = (chain.test_chain_id, chain.test_usdc_contract)
    is_main = network is MoneroNetwork.MAINNET
    assert [(each["chainId"], each["verifyingContract"]) for each in signed_for] == [
        here if is_main else there
    ]


async def test_lost_answer_is_no_second_debit(
    central: Served, sidecar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_id = await new_order(sidecar, SWAP)
    payment = await signed(await offered(sidecar, order_id))
    with monkeypatch.context() as lossy:
        lose_answers(lossy, arrives=True)
        unknown = await fund(sidecar, order_id, **header(payment))
        assert (unknown.status, unknown.body["data"]["paymentResponse"]) == (202, None)
        assert (await fund(sidecar, order_id)).status == 202
        other = {**payment, "payload": json.loads(json.dumps(payment["payload"]))}
        other["payload"]["authorization"]["nonce"] = "0x" + "2" * 64
        assert (await fund(sidecar, order_id, **header(other))).status == 409
        owner = await sidecar.up.service.store.order(order_id)
        assert owner is not None
        params = {"sessionId": owner.terms.session_id}
        cancelled = await sidecar.post(f"/agent/swap/cancel/{order_id}", params)
        assert cancelled.body["error"]["code"] == "order_not_cancellable"
    assert (await finished(sidecar, order_id))["state"] == "completed"
    assert debits(central) == [(PAYER.address, 150_000_000)]


@pytest.mark.parametrize("arrives", [False, True])
async def test_payment_goes_on_after_a_restart(
    central: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """The sidecar stops before it sends the payment, or before it gets the answer."""
    async with beside(central, tmp_path / "sidecar") as sidecar:
        order_id = await new_order(sidecar, SWAP)
        payment = await signed(await offered(sidecar, order_id))
        with monkeypatch.context() as lossy:
            lose_answers(lossy, arrives=arrives)
            assert (await fund(sidecar, order_id, **header(payment))).status == 202
            assert states(sidecar) == [("recorded", None)]
            assert len(debits(central)) == arrives
    async with beside(central, tmp_path / "sidecar") as sidecar:
        assert (await finished(sidecar, order_id))["state"] == "completed"
    assert debits(central) == [(PAYER.address, 150_000_000)]


async def test_payment_that_is_refused_there_frees_the_order(
    central: Served, sidecar: Served
) -> None:
    order_id = await new_order(sidecar, SWAP)
    await provoke(central, sidecar, order_id, "funding_fails")
    refused = await fund(
        sidecar, order_id, **header(await signed(await offered(sidecar, order_id)))
    )
    assert (refused.status, refused.body["error"]["code"]) == (402, "payment_refused")
    assert "reverted" in refused.body["error"]["message"]
    assert states(sidecar) == [("failed", None)]
    paid = await fund(sidecar, order_id, **header(await signed(await offered(sidecar, order_id))))
    assert paid.status == 200
    assert (await finished(sidecar, order_id))["state"] == "completed"


async def test_unknown_outcome_there_is_asked_for_again(central: Served, sidecar: Served) -> None:
    order_id = await new_order(sidecar, SWAP)
    await provoke(central, sidecar, order_id, "funding_unknown")
    payment = await signed(await offered(sidecar, order_id))
    assert (await fund(sidecar, order_id, **header(payment))).status == 200
    assert (await finished(sidecar, order_id))["state"] == "completed"
    assert debits(central) == [(PAYER.address, 150_000_000)]


async def test_signature_of_another_is_refused_unsent(central: Served, sidecar: Served) -> None:
    order_id = await new_order(sidecar, SWAP)
    payment = await signed(await offered(sidecar, order_id))
    payment["payload"]["authorization"]["nonce"] = "0x" + "1" * 64
    refused = await fund(sidecar, order_id, **header(payment))
    reported = refused.body["error"]["details"]["paymentRequired"]["error"]
    assert (refused.status, reported) == (402, "invalid_exact_evm_payload_signature")
    assert states(sidecar) == states(central) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("payTo", "0x" + "0b" * 20),
        ("amount", "150000001"),
        ("asset", "0x" + "0c" * 20),
        ("network", "eip155:1"),
        ("scheme", "upto"),
        ("extra", {"name": 5, "version": "2"}),
        ("extra", None),
    ],
)
async def test_offer_of_something_else_is_not_passed_on(
    sidecar: Served, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """An upstream that asks for a payment to another address, or for too much."""
    order_id = await new_order(sidecar, SWAP)
    judge = UpstreamTransport.judge

    def changed(self: UpstreamTransport, reply: RawReply) -> UpstreamAnswer:
        if reply.payment_required is not None:
            required = json.loads(base64.b64decode(reply.payment_required))
            required["accepts"][0][name] = value
            text = base64.b64encode(json.dumps(required).encode()).decode()
            reply = replace(reply, payment_required=text)
        return judge(self, reply)

    monkeypatch.setattr(UpstreamTransport, "judge", changed)
    refused = await fund(sidecar, order_id)
    assert (refused.status, refused.body["error"]["code"]) == (409, "order_not_fundable")
    assert "Sign nothing" in refused.body["error"]["message"]
    assert "PAYMENT-REQUIRED" not in refused.headers


async def operations(served: Served) -> set[str]:
    listed = (await served.http("GET", "/agent/capabilities")).body["data"]["operations"]
    return {each["operation"] for each in listed}


async def test_funding_is_offered_where_the_upstream_offers_it(
    central: Served, tmp_path: Path
) -> None:
    async with beside(central, tmp_path / "sidecar") as sidecar:
        assert "swap.fund" in await operations(sidecar)
        order_id = await new_order(sidecar, SWAP)
        async with beside(sidecar, tmp_path / "third") as third:
            assert "swap.fund" in await operations(third)
    profile = replace(central.up.service.venue.profile, takes_signatures=lambda: False)
    central.up.service.venue.profile = profile
    async with beside(central, tmp_path / "sidecar") as sidecar:
        assert "swap.fund" not in await operations(sidecar)
        refused = await fund(sidecar, order_id)
        assert (refused.status, refused.body["error"]["code"]) == (409, "order_not_fundable")
        assert "takes no signed payments" in refused.body["error"]["message"]
        priced = {"direction": "u2x", "chain": "arbitrum", "amount": "150", "funding": "x402"}
        answer = await sidecar.post("/agent/swap/quote", priced)
        (problem,) = answer.body["validationErrors"]
        assert (answer.status, problem["field"]) == (400, "funding")


async def test_junk_signatures_do_not_stop_the_payer(central: Served, sidecar: Served) -> None:
    """A signature that may be a contract wallet's is recorded, and blocks only its own nonce."""
    swap = Swap(direction="u2x", chain=SWAP["chain"], amount=SWAP["amount"], to=SWAP["to"])
    async with SwapClient(sidecar.url, verify_answers=False) as client:
        placed = await client.create(swap)
        public = hashlib.sha256(f"rpcsvc funding {placed.order_id} 1".encode()).digest()
        for nonce in (public, hashlib.sha256(placed.order_id.encode()).digest()):
            junk = await signed(await offered(sidecar, placed.order_id))
            junk["payload"]["authorization"]["nonce"] = f"0x{nonce.hex()}"
            junk["payload"]["signature"] = "0x" + "ab" * 66
            assert (await fund(sidecar, placed.order_id, **header(junk))).status == 402
        assert [state for state, _ in states(sidecar)] == ["failed", "failed"]

        def sign(data: Json) -> str:
            return str(Account.sign_typed_data(PAYER.key, full_message=data).signature.hex())

        funded = await client.fund(swap, placed, PAYER.address, sign)
        assert funded.payment is not None
    assert (await finished(sidecar, placed.order_id))["state"] == "completed"
    assert debits(central) == [(PAYER.address, 150_000_000)]


PAYING = {**SWAP, "funding": "x402"}
KEY = "0b54e4b0-7c5e-4a43-9f53-3e1b1de3a901"
GAS = 50_000  # sandbox.usdc_payout_fee: the cost of a USDC transfer there


async def quoted(served: Served, swap: Json) -> Json:
    priced = {name: swap[name] for name in swap if name != "to"}
    return dict((await served.post("/agent/swap/quote", priced)).body["data"])


async def test_gas_is_quoted_and_borne_through_a_sidecar(central: Served, sidecar: Served) -> None:
    theirs, ours = await quoted(central, PAYING), await quoted(sidecar, PAYING)
    assert ours["quote"]["expectedOutput"] == theirs["quote"]["expectedOutput"]
    fees = ours["quote"]["fees"]
    assert (fees["fundingGas"], fees["refundNetwork"]) == ("0.05", "0.05")
    gas_in_xmr = Decimal(fees["fundingGas"]) / Decimal(ours["quote"]["rate"])
    assert abs(Decimal(fees["funding"]) - gas_in_xmr) < Decimal("0.000000001")
    placed = {**PAYING, "quoteDigest": ours["quoteDigest"]}
    made = (await sidecar.post("/agent/swap/create", placed)).body["data"]
    assert made["quote"]["fees"]["fundingGas"] == "0.05"
    order_id = made["order"]["orderId"]
    payment = await signed(await offered(sidecar, order_id))
    assert (await fund(sidecar, order_id, **header(payment))).status == 200
    done = await finished(sidecar, order_id)
    assert done["data"]["order"]["actualOutput"] == made["order"]["expectedOutput"]
    assert debits(central) == [(PAYER.address, 150_000_000)]
    borne = "SELECT o.funding_gas, f.is_gas_paid FROM orders o JOIN funding_authorizations f"
    for served in (central, sidecar):
        rows = all_rows(served.up.database, f"{borne} ON f.order_id = o.order_id")
        assert rows == [(GAS, 1)]


async def test_gas_comes_through_two_sidecars(
    central: Served, sidecar: Served, tmp_path: Path
) -> None:
    async with beside(sidecar, tmp_path / "third") as third:
        fees = (await quoted(third, PAYING))["quote"]["fees"]
    assert fees["fundingGas"] == "0.05"


async def test_digest_without_gas_is_of_another_quote(sidecar: Served) -> None:
    plain = (await quoted(sidecar, SWAP))["quoteDigest"]
    refused = await sidecar.post("/agent/swap/create", {**PAYING, "quoteDigest": plain})
    assert [each["field"] for each in refused.body["validationErrors"]] == ["quoteDigest"]


def change_answers(monkeypatch: pytest.MonkeyPatch, path: str, **changes: Any) -> None:
    """Change fields of the upstream's answers to calls on a path; None: leave the field out."""
    judge, send = UpstreamTransport.judge, UpstreamTransport.send
    replies = set[int]()

    async def noted(
        self: UpstreamTransport, call: UpstreamCall, key: str | None, *, creates: bool
    ) -> RawReply:
        reply = await send(self, call, key, creates=creates)
        if call.path == path:
            replies.add(id(reply))
        return reply

    def changed(self: UpstreamTransport, reply: RawReply) -> UpstreamAnswer:
        answer = judge(self, reply)
        if id(reply) not in replies:
            return answer
        value = {name: each for name, each in (answer.value | changes).items() if each is not None}
        return replace(answer, value=value)

    monkeypatch.setattr(UpstreamTransport, "send", noted)
    monkeypatch.setattr(UpstreamTransport, "judge", changed)


@pytest.mark.parametrize("gas", [None, "0", "150000000"])
async def test_quote_without_the_gas_is_not_passed_on(
    sidecar: Served, monkeypatch: pytest.MonkeyPatch, gas: str | None
) -> None:
    change_answers(monkeypatch, "/bff/v1/quote", fundingGas=gas)
    refused = await sidecar.post("/agent/swap/execute", PAYING)
    assert refused.body["error"]["code"] == "unavailable"
    assert all_rows(sidecar.up.database, "SELECT state FROM relays") == []


async def test_order_with_more_gas_than_quoted_is_not_taken(
    sidecar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_answers(monkeypatch, "/bff/v1/orders", fundingGas=str(GAS + 1))
    refused = await sidecar.post("/agent/swap/execute", PAYING)
    assert (refused.status, refused.body["error"]["code"]) == (503, "unavailable")
    assert "worse than its quote" in refused.body["error"]["message"]
    assert all_rows(sidecar.up.database, "SELECT state FROM relays") == [("refused",)]
    assert (await sidecar.http("GET", "/health")).status == 200


async def pay_part(central: Served, sidecar: Served, order_id: str, amount: str, due: str) -> Json:
    """Pay a part of an order; the sidecar's status once that is known there."""
    paid = {"orderId": await upstream_id(sidecar, order_id), "amount": amount}
    assert (await central.post("/sandbox/fund", paid)).status == 200
    found: Json = {}

    async def is_known() -> bool:
        answer = await sidecar.http("GET", f"/agent/swap/status/{order_id}")
        found.update(answer.body)
        return bool(found["data"]["amountDue"] == due)

    await until(is_known)
    return found


async def test_rest_of_a_part_payment_is_paid_by_signing(central: Served, sidecar: Served) -> None:
    order_id = await new_order(sidecar, SWAP)
    status = await pay_part(central, sidecar, order_id, "100", "50")
    data = status["data"]
    assert (data["order"]["status"], data["fundingInstructions"]["amount"]) == (
        "deposit_detected",
        "50",
    )
    assert "50 USDC" in status["nextActions"][0]["description"]
    async with sidecar.client.get(f"/orders/{order_id}") as page:
        assert "100 USDC arrived. Send the 50 USDC that is missing" in await page.text()
    offer = await offered(sidecar, order_id)
    assert [way["amount"] for way in offer["accepts"]] == ["50000000"]
    paid = await fund(sidecar, order_id, **header(await signed(offer)))
    assert paid.status == 200
    done = await finished(sidecar, order_id)
    assert (done["state"], done["data"]["amountDue"]) == ("completed", None)
    assert sorted(units for _, units in debits(central)) == [50_000_000, 100_000_000]
    await credited(sidecar, paid.body["data"]["paymentResponse"]["transaction"])


async def test_sidecar_shows_what_is_due_in_xmr(central: Served, sidecar: Served) -> None:
    order_id = await new_order(sidecar, SWAPS["x2u"])
    status = await pay_part(central, sidecar, order_id, "0.3", "0.5")
    assert status["data"]["fundingInstructions"]["paymentUri"].endswith("?tx_amount=0.5")
    await pay_part(central, sidecar, order_id, "0.2", "0.3")
    await provoke(central, sidecar, order_id, "drop_deposit")
    await pay_part(central, sidecar, order_id, "0.1", "0.4")


async def test_amount_due_above_the_deposit_is_refused(
    central: Served, sidecar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_id = await new_order(sidecar, SWAP)
    path = f"/bff/v1/orders/{await upstream_id(sidecar, order_id)}"
    change_answers(monkeypatch, path, amountDue="150000001")
    with capture_logs() as logs:
        await sidecar.up.service.venue.refresh(order_id)
    assert logs[-1]["event"] == "upstream_poll_failed"
    status = (await sidecar.http("GET", f"/agent/swap/status/{order_id}")).body
    assert status["data"]["amountDue"] == "150"


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/api/v1/agent/swap/execute", PAYING),
        ("/bff/v1/orders", {**ORDER_BACK, "toAddress": SWAP["to"], "funding": "x402"}),
    ],
)
async def test_key_answers_while_no_signatures_are_taken(
    central: Served, tmp_path: Path, path: str, params: Json
) -> None:
    """A sidecar that starts while its upstream is down does not know yet what it offers."""
    key = {"idempotency-key": KEY}
    for changed, replayed in ({}, None), ({"upstream__url": "http://127.0.0.1:9"}, "true"):
        async with (
            beside(central, tmp_path / "sidecar", **changed) as sidecar,
            sidecar.client.post(path, json=params, headers=key) as answer,
        ):
            replay = answer.headers.get("idempotent-replayed")
            assert (answer.status, replay) == (200, replayed)


async def test_call_in_doubt_is_repeated_while_no_signatures_are_taken(
    central: Served, sidecar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"idempotency-key": KEY}
    with monkeypatch.context() as lossy:
        change_answers(lossy, "/bff/v1/orders", expectedOutput="0")
        assert (await sidecar.post("/agent/swap/execute", PAYING, **key)).status == 503
    assert all_rows(sidecar.up.database, "SELECT state FROM relays") == [("reconciling",)]
    profile = replace(sidecar.up.service.venue.profile, takes_signatures=lambda: False)
    sidecar.up.service.venue.profile = profile
    assert (await sidecar.post("/agent/swap/execute", PAYING, **key)).status == 200
    assert all_rows(central.up.database, "SELECT count(*) FROM orders") == [(1,)]
