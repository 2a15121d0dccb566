"""``SwapClient.fund``: one payment over lost answers; only the order's own terms are signed."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from eth_account import Account

from rpcsvc.client import (
    PaymentRefused,
    PaymentUnknown,
    Placed,
    Refused,
    Status,
    Swap,
    SwapClient,
    SyncSwapClient,
    Unverified,
)
from rpcsvc.client.x402 import nonce_of
from rpcsvc.operations import funding, x402
from tests.contract.faulty_line import FaultyLine, lost_after, lost_before
from tests.contract.paying import PAYER, debits
from tests.contract.serving import MONERO, TOKEN, Served, serving
from tests.contract.swap_clients import ISSUER, QUICK, client_of

PAID = [(PAYER.address, 150_000_000)]
Json = dict[str, Any]


def wanted() -> Swap:
    return Swap(direction="u2x", chain="arbitrum", amount="150", to=MONERO)


class Wallet:
    """Signs every payment; after that the proxy has the faults."""

    address = PAYER.address

    def __init__(self, *faults: Any, line: FaultyLine | None = None) -> None:
        self.signed: list[Json] = []
        self._faults = list(faults)
        self._line = line

    def sign(self, data: Json) -> str:
        self.signed.append(data)
        if self._line is not None:
            self._line.faults = list(self._faults)
        return str(Account.sign_typed_data(PAYER.key, full_message=data).signature.hex())

    async def sign_later(self, data: Json) -> bytes:
        await asyncio.sleep(0)
        return bytes.fromhex(self.sign(data))


def payments(line: FaultyLine) -> list[bytes]:
    """The signed payments that were sent."""
    sent = [each for each in line.passed if "/swap/fund/" in each.target]
    return [each.body for each in sent if "payment" in json.loads(each.body)]


async def completed(client: SwapClient, placed: Placed) -> Status:
    async with asyncio.timeout(60):
        done = await client.wait(placed.order_id)
    assert done.outcome == "completed"
    return done


# --- payments without faults ---


async def test_client_signs_no_more_than_the_swaps_most(served: Served) -> None:
    """Also where it does not verify answers."""
    wallet = Wallet()
    swap = Swap(
        direction="u2x", chain="arbitrum", receive_amount="0.5", to=MONERO, max_deposit="10"
    )
    async with client_of(served.url, verify_answers=False) as client:
        placed = await client.create(swap)
        with pytest.raises(Unverified, match="More is due"):
            await client.fund(swap, placed, wallet.address, wallet.sign)
    assert wallet.signed == []


async def test_client_pays_by_one_signature(served: Served) -> None:
    wallet, swap = Wallet(), wanted()
    async with client_of(served.url) as client:
        placed = await client.create(swap)
        funded = await client.fund(swap, placed, wallet.address, wallet.sign_later)
        assert funded.payment is not None
        done = await completed(client, placed)
        assert [each.txid for each in done.deposits] == [funded.payment.transaction]
        with pytest.raises(Refused) as over:
            await client.fund(swap, placed, wallet.address, wallet.sign)
    assert over.value.code == "order_not_fundable"
    assert (len(wallet.signed), debits(served)) == (1, PAID)


async def test_client_pays_over_rpc_with_a_token(tmp_path: Path) -> None:
    wallet, swap = Wallet(), wanted()
    async with (
        serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served,
        client_of(served.url, token=TOKEN) as client,
    ):
        placed = await client.create(swap)
        assert (await client.fund(swap, placed, wallet.address, wallet.sign)).payment is not None
        assert debits(served) == PAID


async def test_sync_client_pays_by_one_signature(served: Served) -> None:
    def run() -> str | None:
        wallet, swap = Wallet(), wanted()
        with SyncSwapClient(served.url, issuer=ISSUER) as client:
            placed = client.create(swap)
            funded = client.fund(swap, placed, wallet.address, wallet.sign)
            assert funded.payment is not None
            return client.wait(placed.order_id).outcome

    assert await asyncio.to_thread(run) == "completed"


# --- lost connections ---


@pytest.mark.parametrize("fault", [lost_before, lost_after], ids=lambda f: f.__name__)
async def test_lost_payment_is_repeated_and_moves_once(
    served: Served, line: FaultyLine, fault: Any
) -> None:
    wallet, swap = Wallet(fault, fault, line=line), wanted()
    async with client_of(line.url) as client:
        placed = await client.create(swap)
        funded = await client.fund(swap, placed, wallet.address, wallet.sign)
        assert funded.payment is not None
        await completed(client, placed)
    assert (len(payments(line)), len(set(payments(line)))) == (3, 1)
    assert (len(wallet.signed), debits(served)) == (1, PAID)


async def test_payment_without_an_answer_can_be_sent_again(
    served: Served, line: FaultyLine
) -> None:
    wallet, swap = Wallet(*[lost_after] * QUICK.attempts, line=line), wanted()
    async with client_of(line.url) as client:
        placed = await client.create(swap)
        with pytest.raises(PaymentUnknown) as unknown:
            await client.fund(swap, placed, wallet.address, wallet.sign)
    async with client_of(served.url) as client:
        kept = json.loads(json.dumps(unknown.value.payment))
        assert (await client.send_payment(unknown.value.order_id, kept)).payment is not None
        await completed(client, placed)
    assert (len(wallet.signed), debits(served)) == (1, PAID)


async def test_payment_with_an_unsigned_answer_can_be_sent_again(
    served: Served, line: FaultyLine
) -> None:
    swap = wanted()
    async with client_of(line.url) as client:
        placed = await client.create(swap)

        def sign(data: Json) -> str:
            line.change = lambda body: body.replace(b'"success":true', b'"success": true')
            return Wallet().sign(data)

        with pytest.raises(PaymentUnknown) as unknown:
            await client.fund(swap, placed, PAYER.address, sign)
        assert isinstance(unknown.value.__cause__, Unverified)
    async with client_of(served.url) as client:
        await client.send_payment(unknown.value.order_id, unknown.value.payment)
        await completed(client, placed)
    assert debits(served) == PAID


async def test_payment_signed_again_has_the_same_nonce(served: Served, line: FaultyLine) -> None:
    wallet, swap = Wallet(*[lost_before] * QUICK.attempts, line=line), wanted()
    async with client_of(line.url) as client:
        placed = await client.create(swap)
        with pytest.raises(PaymentUnknown) as unknown:
            await client.fund(swap, placed, wallet.address, wallet.sign)
    other = Wallet()
    async with client_of(served.url) as client:
        await client.fund(swap, placed, other.address, other.sign)
        # The first payment is delayed, and arrives last.
        # Taken only if both were signed in one second, and the deposit is not seen yet.
        with suppress(Refused):
            await client.send_payment(placed.order_id, unknown.value.payment)
        await completed(client, placed)
    nonces = {each["message"]["nonce"] for each in [*wallet.signed, *other.signed]}
    assert (len(nonces), debits(served)) == (1, PAID)


def test_nonce_needs_the_session() -> None:
    nonce = nonce_of("ord_1", "a", 1)
    assert nonce == nonce_of("ord_1", "A", 1)
    others = [nonce_of("ord_1", "b", 1), nonce_of("ord_1", "a", 2), nonce_of("ord_2", "a", 1)]
    assert len({nonce, *others}) == 4


async def test_payment_under_way_is_not_signed_again(served: Served) -> None:
    wallet, swap = Wallet(), wanted()
    async with client_of(served.url) as client:
        placed = await client.create(swap)
        await client.call("sandbox.fault", fault="funding_unknown", orderId=placed.order_id)
        assert (await client.fund(swap, placed, wallet.address, wallet.sign)).payment is None
        await client.fund(swap, placed, wallet.address, wallet.sign)
        await completed(client, placed)
    assert (len(wallet.signed), debits(served)) == (1, PAID)


async def test_failed_payment_is_followed_by_a_next_attempt(served: Served) -> None:
    wallet, swap = Wallet(), wanted()
    async with client_of(served.url) as client:
        placed = await client.create(swap)
        await client.call("sandbox.fault", fault="funding_fails", orderId=placed.order_id)
        with pytest.raises(PaymentRefused) as failed:
            await client.fund(swap, placed, wallet.address, wallet.sign)
        assert failed.value.reason == "transaction_failed"
        await client.fund(swap, placed, wallet.address, wallet.sign, attempt=2)
        await completed(client, placed)


# --- refused before signing ---


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pay_to", "0x52908400098527886E0F7030069857D2E4169EE7"),
        ("amount", "150000001"),
        ("amount", "149999999"),
        ("asset", "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"),
        ("network", "eip155:42161"),
        ("scheme", "upto"),
    ],
)
async def test_client_signs_no_offer_that_differs_from_its_order(
    served: Served, monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    honest = x402.requirements

    def forged(*args: Any) -> Any:
        return honest(*args).model_copy(update={field: value})

    monkeypatch.setattr(funding, "requirements", forged)
    wallet, swap = Wallet(), wanted()
    async with client_of(served.url) as client:
        placed = await client.create(swap)
        with pytest.raises(Unverified) as wrong:
            await client.fund(swap, placed, wallet.address, wallet.sign)
    assert wrong.value.cause.code == "terms_mismatch"
    assert wallet.signed == []


async def test_order_of_another_swap_is_not_signed(served: Served) -> None:
    wallet, swap = Wallet(), wanted()
    async with client_of(served.url) as client:
        placed = await client.create(swap)
        others = placed.model_copy(
            update={"funding": placed.funding.model_copy(update={"deposit_address": "0x1"})}
        )
        for asked, order in ((wanted(), placed), (swap, others)):
            with pytest.raises(Unverified):
                await client.fund(asked, order, wallet.address, wallet.sign)
    assert wallet.signed == []
