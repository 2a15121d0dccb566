"""swap.fund paid in the headers of MPP, by the client of the package pympp."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from eth_account import Account
from mpp import Challenge, Credential, Receipt
from mpp.client.transport import Mpp
from mpp.methods.evm import client as evm
from mpp.methods.evm.assets import EvmAsset
from mpp.runtime import CredentialParams

from tests.contract.paying import PAYER, debits, finished, fund, new_order, offered
from tests.contract.serving import TOKEN, Served, serving

Json = dict[str, Any]
HEADER = "Payment-Authorization"


def token_of(offer: Json) -> EvmAsset:
    """The token of an offer, as an agent has to know it beforehand."""
    (accepted,) = offer["accepts"]
    extra = accepted["extra"]
    chain_id = int(accepted["network"].removeprefix("eip155:"))
    return EvmAsset(accepted["asset"], 6, chain_id, extra["name"], extra["version"])


def url_of(served: Served, order_id: str) -> str:
    return f"{served.url}/api/v1/agent/swap/fund/{order_id}"


async def challenged(served: Served, order_id: str) -> Challenge:
    answer = await fund(served, order_id)
    return Challenge.from_www_authenticate(answer.headers["www-authenticate"])


async def credential(served: Served, order_id: str, account: Any = PAYER) -> Credential:
    """The payment that the client signs for the order's challenge."""
    token = token_of(await offered(served, order_id))
    method = evm.charge(currency=token, account=account)
    given = CredentialParams(challenge=await challenged(served, order_id))
    return Credential.from_authorization(await method.create_credential(given))


async def test_mpp_client_pays_an_order(served: Served) -> None:
    order_id = await new_order(served)
    token = token_of(await offered(served, order_id))
    method = evm.charge(currency=token, account=PAYER, max_amount="150")
    async with Mpp(methods=[method]) as client:
        paid = await client.fetch(url_of(served, order_id), method="POST")
    receipt = Receipt.from_payment_receipt(paid.headers["payment-receipt"])
    assert (paid.status_code, receipt.method) == (200, "evm")
    assert receipt.reference == paid.json()["data"]["paymentResponse"]["transaction"]
    assert (await finished(served, order_id))["state"] == "completed"
    assert debits(served) == [(PAYER.address, 150_000_000)]


async def test_challenge_asks_for_what_x402_asks_for(served: Served) -> None:
    order_id = await new_order(served)
    (accepted,) = (await offered(served, order_id))["accepts"]
    given = await challenged(served, order_id)
    assert (given.method, given.intent, given.credential_header) == ("evm", "charge", HEADER)
    assert given.request == {
        "amount": accepted["amount"],
        "currency": accepted["asset"],
        "recipient": accepted["payTo"],
        "methodDetails": {
            "chainId": int(accepted["network"].removeprefix("eip155:")),
            "credentialTypes": ["authorization"],
            "decimals": 6,
        },
    }
    assert given.id != (await challenged(served, order_id)).id


async def test_each_challenge_has_its_own_nonce(served: Served) -> None:
    """Also where a client or proxy names all its requests alike."""
    order_id = await new_order(served)
    answers = [await fund(served, order_id, **{"x-request-id": "same"}) for _ in range(2)]
    ids = [Challenge.from_www_authenticate(each.headers["www-authenticate"]).id for each in answers]
    assert ids[0] != ids[1]


async def test_credential_that_is_repeated_is_one_debit(served: Served) -> None:
    """In the usual header, too, which clients use that do not read which one is named."""
    order_id = await new_order(served)
    text = (await credential(served, order_id)).to_authorization()
    for header in ({HEADER: text}, {"authorization": text}, {HEADER: text}):
        answer = await fund(served, order_id, **header)
        assert answer.status == 200
        assert answer.headers["payment-receipt"]
    assert len(debits(served)) == 1


async def test_payment_goes_beside_a_token(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        order_id = await new_order(served)
        text = (await credential(served, order_id)).to_authorization()
        headers = {HEADER: text, "authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient() as client:
            paid = await client.post(url_of(served, order_id), headers=headers)
    assert paid.status_code == 200


async def test_credential_of_another_order_is_refused(served: Served) -> None:
    first, second = await new_order(served), await new_order(served)
    text = (await credential(served, first)).to_authorization()
    refused = await fund(served, second, **{HEADER: text})
    assert refused.status == 402
    assert Challenge.from_www_authenticate(refused.headers["www-authenticate"])
    assert debits(served) == []


async def test_credential_of_a_reused_challenge_pays_its_signer_alone(served: Served) -> None:
    """A stranger who signs under the nonce of another's challenge takes nothing from anybody."""
    order_id = await new_order(served)
    own = await credential(served, order_id)
    stranger = await credential(served, order_id, Account.from_key(b"\x09" * 32))
    forged = Credential(own.challenge, {**own.payload, "from": stranger.payload["from"]})
    refused = await fund(served, order_id, **{HEADER: forged.to_authorization()})
    assert (refused.status, debits(served)) == (402, [])


def _written(value: Any) -> str:
    text = base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
    return f"Payment {text}"


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: "Payment %%%",
        lambda sent: "Basic Zm9vOmJhcg==",
        lambda sent: _written([]),
        lambda sent: _written({**sent, "payload": None}),
        lambda sent: _written({**sent, "challenge": {**sent["challenge"], "method": "tempo"}}),
        lambda sent: _written({**sent, "challenge": {**sent["challenge"], "request": "e30"}}),
        lambda sent: _written({**sent, "payload": {**sent["payload"], "type": "transaction"}}),
        lambda sent: _written({**sent, "payload": {**sent["payload"], "value": 150_000_000}}),
        lambda sent: _written({**sent, "payload": {**sent["payload"], "nonce": "0x" + "0" * 62}}),
    ],
)
async def test_malformed_credential_is_a_bad_request(served: Served, change: Any) -> None:
    order_id = await new_order(served)
    text = (await credential(served, order_id)).to_authorization().removeprefix("Payment ")
    sent = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    answer = await fund(served, order_id, **{HEADER: change(sent)})
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_input")
    assert debits(served) == []


async def test_two_forms_of_payment_at_once_are_refused(served: Served) -> None:
    order_id = await new_order(served)
    text = (await credential(served, order_id)).to_authorization()
    answer = await fund(served, order_id, **{HEADER: text, "PAYMENT-SIGNATURE": "e30="})
    assert (answer.status, debits(served)) == (400, [])
