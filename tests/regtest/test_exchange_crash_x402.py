"""A USDC order paid by x402, with kill -9 of the service at every step: one debit, one credit.

The payer is the client of the package x402, holds no ether, and survives each crash of the service.
Transfers are counted on the chains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from eth_account import Account
from x402.client import x402Client
from x402.http.clients.httpx import x402HttpxClient
from x402.http.x402_http_client import x402HTTPClient
from x402.mechanisms.evm.exact.register import register_exact_evm_client

from rpcsvc.ids import system_random
from tests.e2e.processes import Crash, Gone
from tests.regtest.crash_steps import STEPS
from tests.regtest.exchange import reaches
from tests.regtest.ledger_of_chains import usdc_received
from tests.regtest.trading import DEATH_SECONDS, Trader
from tests.regtest.x402_payer import VALUE, Payer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHAINS: dict[str, list[Crash]] = {
    "around the record of the authorization": [
        ("authorize", "before", 1),
        ("authorize", "after", 1),
    ],
    "from its record to the pool": [
        ("authorization look", "before", 1),
        ("authorization record", "before", 1),
        ("authorization record", "after", 1),
        ("authorization publish", "before", 1),
        ("authorization publish", "after", 1),
        ("authorization look", "after", 1),
    ],
    "between its journal line and its commit": [("authorization journal", "after", 1)],
    "around each note of what became of it": [
        ("resolve", "before", 1),
        ("resolve", "after", 1),
        ("resolve", "before", 1),
        ("resolve", "after", 1),
    ],
    "around the order's steps": [
        (step, when, 1) for step in STEPS[:2] for when in ("before", "after")
    ],
}


@pytest.mark.parametrize("keeps", [True, False], ids=["same payment", "payment lost"])
@pytest.mark.parametrize("crashes", CHAINS.values(), ids=CHAINS)
async def test_a_killed_service_takes_a_signed_payment_once(
    trader: Trader, crashes: Sequence[Crash], keeps: bool
) -> None:
    token = trader.stack.token
    payer = Payer(trader, Account.from_key(system_random(32)), keeps)
    await token.mint(payer.account.address, 2 * VALUE)
    for crash in crashes:
        async with trader.stack.serving(crash) as at:
            with suppress(Gone):
                await payer.run(at)
            await at.death(DEATH_SECONDS)  # a point that is never reached would time out here
    async with trader.stack.serving() as at:
        await payer.run(at)
        assert await asyncio.to_thread(at.stop) == 0
    assert await token.balance(payer.account.address) == VALUE
    assert await usdc_received(trader.stack, payer.deposit_address) == [VALUE]
    await trader.check()
    await trader.audit()


async def test_x402_http_client_pays_an_order_in_one_call(trader: Trader) -> None:
    """The package's own HTTP client: its one call ends with the transaction that paid."""
    token, books = trader.stack.token, trader.books
    payer = Account.from_key(system_random(32))
    await token.mint(payer.address, 2 * VALUE)
    client = x402Client()
    client.set_spend_controls(False)
    register_exact_evm_client(client, payer)
    async with trader.stack.serving() as at:
        swap, deposit_address = await trader.order(at, "u2x")
        async with x402HttpxClient(client, timeout=30) as http:
            paid = await http.post(f"{at.url}/api/v1/agent/swap/fund/{swap.order_id}")
        assert paid.status_code == 200, paid.text
        settled = x402HTTPClient(client).get_payment_settle_response(paid.headers.get)
        receipt = await token.client.receipt(settled.transaction)
        assert receipt is not None
        assert receipt.ok
        await reaches(trader.stack, at, swap.order_id, "completed")
        assert await asyncio.to_thread(at.stop) == 0
    assert await token.balance(payer.address) == VALUE
    assert await usdc_received(trader.stack, deposit_address) == [VALUE]
    books.deposit_addresses.add(deposit_address)
    books.usdc_in += VALUE
    await trader.check()
    await trader.audit()
