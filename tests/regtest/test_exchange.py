"""A swap each way with the service as a process, on real daemons, counted from the chains."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import Server
from tests.regtest.daemons import WalletRpc
from tests.regtest.exchange import USDC, XMR, Exchange, call, create, details, reaches


def verify(stack: Exchange, data: dict[str, Any], *options: str) -> tuple[int, dict[str, Any]]:
    """``rpcsvc receipt verify`` as a user runs it: exit status and JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "rpcsvc", "receipt", "verify", "-", *options],
        input=json.dumps({"data": data}), capture_output=True, text=True, check=False,
        env={**os.environ, "RPCSVC_CHAINS_FILE": str(stack.data_dir / "chains.toml")},
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}")


async def test_xmr_becomes_usdc_and_the_receipt_proves_it(stack: Exchange) -> None:
    to = stack.user.address
    async with stack.serving(is_new=True) as at:
        made = await create(at, direction="x2u", amount="1", to=to)
        order = made["data"]["order"]
        await stack.pay_xmr(order["depositAddress"], XMR)
        done = await reaches(stack, at, order["orderId"], "completed")
        data = await details(at, order["orderId"])

    assert await stack.token.balance(to) == int(done["actualOutput"])
    assert done["actualOutput"] == order["expectedOutput"]
    node = ("--node", stack.anvil.url)
    status, said = await asyncio.to_thread(verify, stack, data, *node, "--to", to)
    assert (status, said["proven"], said["txid"]) == (0, True, data["receipt"]["txid"])
    more = {**data["receipt"], "amount": "163.166506"}
    status, said = await asyncio.to_thread(verify, stack, {**data, "receipt": more}, *node)
    assert (status, said["proven"]) == (1, False)
    other = ("--to", stack.token.owner)
    assert (await asyncio.to_thread(verify, stack, data, *node, *other))[0] == 1


@pytest.mark.slow
async def test_usdc_becomes_xmr_and_the_receipt_proves_it(
    stack: Exchange, wallet: WalletClient, shared_wallet_rpc: WalletRpc, tmp_path: Path
) -> None:
    to = await wallet.primary_address()
    secret = tmp_path / "secret"
    secret.write_text(shared_wallet_rpc.SECRET)
    async with stack.serving() as at:
        made = await create(at, direction="u2x", amount="165", to=to)
        order = made["data"]["order"]
        await stack.pay_usdc(order["depositAddress"], 165 * USDC)
        done = await reaches(stack, at, order["orderId"], "completed")
        data = await details(at, order["orderId"])

    await wallet.refresh()
    assert sum(output.amount for output in await wallet.outputs()) == int(done["actualOutput"])
    assert done["actualOutput"] == order["expectedOutput"]
    rpc = ("--wallet-rpc", shared_wallet_rpc.url, "--username", shared_wallet_rpc.USERNAME)
    login = (*rpc, "--password-file", str(secret))
    status, said = await asyncio.to_thread(verify, stack, data, *login, "--amount", "0.97")
    assert (status, said["proven"], said["address"]) == (0, True, to)
    receipt = {**data["receipt"], "transactionProof": None, "amount": "0.97"}
    status, said = await asyncio.to_thread(verify, stack, {"receipt": receipt}, *login)
    assert (status, said["proven"]) == (1, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "wanted"), [("x2u", "100.000001"), ("u2x", "0.777777777777")]
)
async def test_exactly_the_named_amount_arrives(
    stack: Exchange, wallet: WalletClient, direction: str, wanted: str
) -> None:
    to = stack.user.address if direction == "x2u" else await wallet.primary_address()
    units = int(wanted.replace(".", ""))

    async def held() -> int:
        if direction == "x2u":
            return await stack.token.balance(to)
        await wallet.refresh()
        return sum(output.amount for output in await wallet.outputs())

    before = await held()
    async with stack.serving() as at:
        made = await create(at, direction=direction, receiveAmount=wanted, to=to)
        order = made["data"]["order"]
        pay = stack.pay_xmr if direction == "x2u" else stack.pay_usdc
        await pay(order["depositAddress"], int(order["depositAmount"]))
        done = await reaches(stack, at, order["orderId"], "completed")

    assert int(done["actualOutput"]) == units
    assert await held() - before == units


@pytest.mark.slow
async def test_open_order_keeps_its_reservation(stack: Exchange) -> None:
    """The hot wallet holds 20,000 USDC: most is reserved for one order, and for no second one."""
    swap = {"direction": "x2u", "chain": "arbitrum", "amount": "90", "to": stack.user.address}
    async with stack.serving() as at:
        quote = await call(
            at, "service.swap.quote", {k: swap[k] for k in ("direction", "chain", "amount")}
        )
        assert quote["ok"], quote
        assert float(quote["data"]["quote"]["fees"]["network"]) > 0
        before = await most_now(at, "x2u")
        await create(at, **swap)
        assert await most_now(at, "x2u") < before - 80
        refused = await call(at, "service.swap.create", swap)
        assert refused["error"]["code"] == "amount_above_maximum"
        least = {**swap, "amount": refused["error"]["details"]["maxNow"]}
        assert (await call(at, "service.swap.create", least))["ok"]


async def most_now(at: Server, direction: str) -> float:
    """The largest order that capabilities say can be paid now, in deposit units."""
    rows = (await call(at, "service.capabilities", {}))["data"]["limits"]
    return next(float(row["maxNow"]) for row in rows if row["direction"] == direction)


async def test_an_address_on_the_tokens_blacklist_gets_no_order(stack: Exchange) -> None:
    to = stack.user.address
    await stack.token.blacklist(to)
    async with stack.serving() as at:
        await create(at, direction="x2u", amount="1", to=stack.token.owner)
        params = {"chain": "arbitrum", "direction": "x2u", "amount": "1", "to": to}
        refused = await call(at, "service.swap.create", params)
    assert refused["error"]["code"] == "invalid_destination"
    assert refused["validationErrors"][0]["field"] == "to"
