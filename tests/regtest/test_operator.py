"""The operator's commands on the real stack: their output agrees with the chains."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest

from rpcsvc.domain.money import USDC as USDC_ASSET
from rpcsvc.domain.money import XMR as XMR_ASSET
from rpcsvc.domain.money import parse_amount
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.daemons import WALLET_NAME, WALLET_PASSWORD, Miner
from tests.regtest.exchange import (
    ETHER,
    USDC,
    XMR,
    Exchange,
    create,
    reaches,
    status,
    swept,
)
from tests.regtest.restoring import started

pytestmark = pytest.mark.slow

PREPARE_SECONDS = 2
LOOKAHEAD = 200


async def paid_order(stack: Exchange, at: Server) -> dict[str, Any]:
    """An order for 1 XMR whose deposit is in the pool."""
    made = await create(at, direction="x2u", amount="1", to=stack.user.address)
    order = dict(made["data"]["order"])
    await stack.pay_xmr(order["depositAddress"], XMR)
    return order


def usdc_units(text: str) -> int:
    return 0 if text == "0" else parse_amount(text, USDC_ASSET).units


def xmr_units(text: str) -> int:
    return 0 if text == "0" else parse_amount(text, XMR_ASSET).units


# --- init --------------------------------------------------------------------------------------


async def test_init_names_what_is_missing_and_passes_when_it_is_there(
    stack: Exchange, miner: Miner
) -> None:
    key_file = stack.data_dir / "fresh-mnemonic"
    stack.extra["RPCSVC_ONCHAIN__KEY_FILE"] = str(key_file)
    async with stack.wallet as wallet:
        await wallet.create("empty", WALLET_PASSWORD)
        primary = await wallet.primary_address()

    empty = await command(stack, "onchain", "init", "--json")
    assert empty.status == 1, empty
    assert key_file.stat().st_mode & 0o777 == 0o600
    hot = empty.json["hotWallet"]
    missing = {check["name"]: check["do"] for check in empty.json["checks"] if not check["ok"]}
    assert set(missing) == {"XMR", "arbitrum gas", "arbitrum USDC"}
    assert primary in missing["XMR"]
    assert hot in missing["arbitrum gas"] and hot in missing["arbitrum USDC"]
    assert hot != stack.treasury

    await stack.controls.set_ether(hot, ETHER)
    await stack.token.mint(hot, USDC)
    await miner.fund(primary, XMR)
    words = key_file.read_text()
    funded = await command(stack, "onchain", "init")
    assert funded.status == 0, funded
    assert "MISSING" not in funded.out
    assert key_file.read_text() == words
    # A word alone may stand there by chance: "address" is one of the list.
    assert not [pair for pair in pairwise(words.split()) if " ".join(pair) in funded.out]


async def test_init_finds_nodes_that_are_down_or_of_another_network(stack: Exchange) -> None:
    stack.extra["RPCSVC_ONCHAIN__MONERO_NETWORK"] = "stagenet"
    stack.extra["RPCSVC_ONCHAIN__NODES"] = "arbitrum=http://127.0.0.1:9"
    found = {
        c["name"]: c for c in (await command(stack, "onchain", "init", "--json")).json["checks"]
    }
    assert "wrong network" in found["monero node"]["detail"]
    assert not found["arbitrum node"]["ok"]
    assert "42161" in found["arbitrum node"]["do"]


async def test_init_beside_a_running_service_opens_no_wallet(stack: Exchange) -> None:
    async with stack.serving():
        assert (await command(stack, "onchain", "init")).status == 0
        async with stack.wallet as wallet:
            await wallet.close()
        # The service may have opened the wallet first or not, and not have refreshed it yet.
        found = await command(stack, "onchain", "init", "--json")
        wallet_check = next(c for c in found.json["checks"] if c["name"] == "monero wallet")
        right = ("the service opens it", "the wallet is still scanning")
        assert wallet_check["ok"] or any(each in wallet_check["detail"] for each in right)


# --- treasury ----------------------------------------------------------------------------------


async def test_the_treasury_s_sums_are_those_of_the_chains(
    stack: Exchange, wallet: WalletClient
) -> None:
    async with stack.serving() as at:
        made = await create(at, direction="u2x", amount="165", to=await wallet.primary_address())
        swapped = made["data"]["order"]
        await stack.pay_usdc(swapped["depositAddress"], 165 * USDC)
        await reaches(stack, at, swapped["orderId"], "completed")
        await swept(stack)
        open_order = (await create(at, direction="x2u", amount="1", to=stack.user.address))["data"]
        view = await command(stack, "treasury", "--json")
        assert view.status == 0, view
        assert (await command(stack, "treasury")).out.startswith("payouts: open\n")
        at.stop()
    alone = await command(stack, "treasury", "--json")
    assert (alone.status, "No service runs" in alone.err) == (3, True), alone

    usdc, xmr = view.json["usdc"][0], view.json["xmr"]
    assert usdc["address"] == stack.treasury
    assert usdc_units(usdc["hotWallet"]) == await stack.token.balance(stack.treasury)
    left = await stack.token.balance(swapped["depositAddress"])
    assert usdc_units(usdc["unswept"]) == left
    assert usdc_units(usdc["unswept"]) + usdc_units(usdc["swept"]) == 165 * USDC
    async with stack.wallet as own:
        held = sum(item.amount for item in await own.outputs() if not item.spent)
    assert xmr_units(xmr["unlocked"]) + xmr_units(xmr["locked"]) == held
    paid = 30 * XMR - held
    assert paid == int(swapped["expectedOutput"]) + xmr_units(xmr["feesPaid"]["transfer"])
    expected = int(open_order["order"]["expectedOutput"])
    # With the fee of its payout, which follows the gas price of the last minute.
    assert expected < usdc_units(usdc["reserved"]) < expected + 2 * USDC
    assert xmr_units(view.json["caps"]["XMR"]["sentIn24Hours"]) == int(swapped["expectedOutput"])


# --- the switch --------------------------------------------------------------------------------


async def test_pause_holds_a_payout_and_resume_releases_it_once(
    stack: Exchange,
) -> None:
    async with stack.serving() as at:
        made = await create(at, direction="x2u", amount="1", to=stack.user.address)
        order = made["data"]["order"]
        assert (await command(stack, "payouts", "pause", "--reason", "a look first")).status == 0
        await stack.pay_xmr(order["depositAddress"], XMR)
        await reaches(stack, at, order["orderId"], "deposit_confirmed")

        assert "paused: a look first" in json.dumps(await at.health())
        listed = (await command(stack, "payouts", "list", "--json")).json
        assert listed["paused"] == "a look first"
        (waiting,) = listed["transfers"]
        assert (waiting["orderId"], waiting["state"]) == (order["orderId"], "planned")
        assert "paused" in waiting["next"]
        refused = await command(stack, "payouts", "retry", waiting["transferId"])
        assert (refused.status, "resume" in refused.err) == (1, True)
        at.kill()

    async with started(stack) as at:
        await stack.mine(5)
        assert (await status(at, order["orderId"]))["status"] == "deposit_confirmed"
        assert await stack.token.balance(stack.user.address) == 0
        assert (await command(stack, "payouts", "resume")).status == 0
        hurried = await command(stack, "payouts", "retry", waiting["transferId"])
        assert hurried.status == 0, hurried
        await reaches(stack, at, order["orderId"], "completed")
        await until(at.is_well)
        await stack.mine(5)
        final = await command(stack, "payouts", "retry", waiting["transferId"])
        assert (final.status, "settled" in final.err) == (1, True)
        shown = await command(stack, "payouts", "show", waiting["transferId"])

    assert await stack.token.balance(stack.user.address) == int(order["expectedOutput"])
    (attempt,) = shown.json["attempts"]
    assert attempt["wallet"] == "settled"


# --- refund ------------------------------------------------------------------------------------


async def too_late() -> None:
    """Wait until a payout that is planned now is past its price timeout."""
    end = time.monotonic() + PREPARE_SECONDS

    async def is_over() -> bool:
        return time.monotonic() > end

    await until(is_over)


async def test_xmr_deposit_returns_to_the_address_the_operator_gives(
    stack: Exchange, wallet: WalletClient
) -> None:
    stack.extra["RPCSVC_ORDERS__PREPARE_TIMEOUT_SECONDS"] = str(PREPARE_SECONDS)
    to = await wallet.primary_address()
    async with stack.serving() as at:
        order_id = (await paid_order(stack, at))["orderId"]
        await command(stack, "payouts", "pause", "--reason", "so that it is not paid out in time")
        await reaches(stack, at, order_id, "deposit_confirmed")
        await too_late()
        await command(stack, "payouts", "resume")
        await reaches(stack, at, order_id, "refunding")
        early = await command(stack, "refund", order_id, "--to", stack.user.address, "--yes")
        assert (early.status, "--to" in early.err) == (2, True), early
        own = (await status(at, order_id))["depositAddress"]
        assert (await command(stack, "refund", order_id, "--to", own, "--yes")).status == 2
        assert (await command(stack, "refund", order_id, "--to", to)).status == 2  # no terminal
        at.stop()
    alone = await command(stack, "refund", order_id, "--to", to, "--yes")
    assert (alone.status, "rpcsvc serve" in alone.err) == (3, True), alone
    async with stack.serving() as at:
        assert (await command(stack, "refund", order_id, "--to", to, "--yes")).status == 0
        await reaches(stack, at, order_id, "refunded")
        again = await command(stack, "refund", order_id, "--to", to, "--yes")
        assert again.status == 2
        listed = await command(stack, "payouts", "list", "--state", "all", "--json")

    sent, withdrawn = listed.json["transfers"]
    assert (withdrawn["kind"], withdrawn["state"]) == ("payout", "cancelled")
    await wallet.refresh()
    received = sum(output.amount for output in await wallet.outputs())
    assert received == int(sent["units"]) > 0
    assert sent["state"] == "settled"


# --- restore -----------------------------------------------------------------------------------


async def test_wallet_restored_from_seed_finds_a_far_subaddress(
    stack: Exchange,
) -> None:
    stack.extra["RPCSVC_ONCHAIN__XMR_ADDRESSES"] = "1024"
    async with stack.node as node:
        restore_height = (await node.info()).height - 100
    # A killed service skips the addresses that it may have handed out: 128 each time.
    for _ in range(2):
        async with stack.serving():
            pass
    async with stack.serving() as at:
        order = await paid_order(stack, at)
        at.kill()
    async with stack.wallet as wallet:
        index = await wallet.index_of(order["depositAddress"])
        assert index is not None
        assert index.minor > LOOKAHEAD
        words = await wallet.seed()
        await wallet.close()
        for file in stack.wallet_rpc.directory.glob(f"{WALLET_NAME}*"):
            file.unlink()
        await stack.mine(2)
        await wallet.restore(WALLET_NAME, WALLET_PASSWORD, words, restore_height)
        await wallet.refresh()
        found = await wallet.transfers(restore_height)
        assert order["depositAddress"] not in {item.address for item in found}

    async with started(stack) as at:
        done = await reaches(stack, at, order["orderId"], "completed")
    assert await stack.token.balance(stack.user.address) == int(done["actualOutput"])
