"""Payouts since a restored copy: once adopted, they are not paid again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.exchange import USDC, XMR, Exchange, create, details, reaches
from tests.regtest.ledger_of_chains import usdc_received, xmr_received
from tests.regtest.restoring import (
    copy_before_payouts,
    copy_of,
    differences,
    explain_sweeps,
    has_looked,
    restore,
    restore_wallet_from_words,
    started,
)

pytestmark = pytest.mark.slow


async def stop(at: Server) -> None:
    assert await asyncio.to_thread(at.stop) == 0


async def funded(stack: Exchange, at: Server, to_xmr: str) -> list[str]:
    """An order each way, paid for: XMR to USDC, and USDC to XMR."""
    made = await create(at, direction="x2u", amount="1", to=stack.user.address)
    first = made["data"]["order"]
    made = await create(at, direction="u2x", amount="165", to=to_xmr)
    second = made["data"]["order"]
    await stack.pay_xmr(first["depositAddress"], XMR)
    await stack.pay_usdc(second["depositAddress"], 165 * USDC)
    return [first["orderId"], second["orderId"]]


async def test_payments_after_the_copy_are_adopted_and_not_repeated(
    stack: Exchange, wallet: WalletClient, tmp_path: Path
) -> None:
    to = await wallet.primary_address()
    async with stack.serving() as at:
        orders = await funded(stack, at, to)
        await command(stack, "payouts", "pause", "--reason", "so that the copy knows no payment")
        copy = await copy_before_payouts(stack, at, orders, tmp_path / "copy.db")
        await stop(at)
    usdc_paid = await usdc_received(stack, stack.user.address)
    xmr_paid = await xmr_received(wallet, to)
    assert (len(usdc_paid), len(xmr_paid)) == (2, 1)  # what the user paid with came there, too

    await restore(stack, copy)
    assert (await command(stack, "payouts", "pause", "--reason", "restored")).status == 0
    found = await differences(stack)
    payments = [item["hint"] for item in found if item["kind"] == "unrecorded_payment"]
    adopting = [hint.split("rpcsvc ")[1].split() for hint in payments]
    assert sorted(arguments[:2] for arguments in adopting) == [["payouts", "adopt"]] * 2

    async with started(stack):
        await stack.mine(2)
        refused = await command(stack, *adopting[0])
        assert (refused.status, "Stop it first" in refused.err) == (2, True), refused
    (_, _, one, its_tx), (_, _, other, other_tx) = adopting
    assert (await command(stack, "payouts", "adopt", one, other_tx)).status == 1
    for transfer, txid in ((one, its_tx), (other, other_tx)):
        adopted = await command(stack, "payouts", "adopt", transfer, txid)
        assert adopted.status == 0, adopted
        assert transfer in adopted.out
        again = await command(stack, "payouts", "adopt", transfer, txid)
        assert (again.status, "already" in again.err) == (1, True), again

    await explain_sweeps(stack)
    assert (await command(stack, "payouts", "resume")).status == 0
    async with stack.serving() as at:
        for order in orders:
            await reaches(stack, at, order, "completed")
        shown = await command(stack, "payouts", "show", one)
        await stop(at)
    await stack.mine(3)
    assert await usdc_received(stack, stack.user.address) == usdc_paid
    assert await xmr_received(wallet, to) == xmr_paid
    assert (shown.json["state"], shown.json["txid"]) == ("settled", its_tx)
    assert await differences(stack) == []


async def test_external_tx_key_proves_what_a_restored_wallet_forgot(
    stack: Exchange, wallet: WalletClient, tmp_path: Path
) -> None:
    to = await wallet.primary_address()
    async with stack.node as node:
        start = (await node.info()).height - 100
    async with stack.serving() as at:
        made = await create(at, direction="u2x", amount="165", to=to)
        order = made["data"]["order"]
        await command(stack, "payouts", "pause", "--reason", "so that the copy knows no payment")
        await stack.pay_usdc(order["depositAddress"], 165 * USDC)
        await until(lambda: has_looked(stack))
        copy = await copy_before_payouts(stack, at, [order["orderId"]], tmp_path / "copy.db")
        receipt = (await details(at, order["orderId"]))["receipt"]
        await stop(at)
    paid = await xmr_received(wallet, to)
    await restore(stack, copy)
    await restore_wallet_from_words(stack, start)
    await command(stack, "payouts", "pause", "--reason", "restored")

    (found,) = [item for item in await differences(stack) if item["kind"] == "unrecorded_payment"]
    assert "--tx-key KEY" in found["hint"]
    transfer = f"{order['orderId']}/payout/1"
    assert transfer in found["hint"]
    wrong_keys: list[tuple[tuple[str, ...], str]] = [
        ((), "--tx-key"),
        (("--tx-key", "11" * 32), "not that of"),
        (("--tx-key", "01" * 32), "not adopted"),
    ]
    for key, why in wrong_keys:
        refused = await command(stack, "payouts", "adopt", transfer, found["subject"], *key)
        assert (refused.status, why in refused.err) == (1, True), refused
    right = ("--tx-key", receipt["transactionKey"])
    adopted = await command(stack, "payouts", "adopt", transfer, found["subject"], *right)
    assert adopted.status == 0, adopted
    await command(stack, "payouts", "resume")
    async with started(stack) as at:
        await reaches(stack, at, order["orderId"], "completed")
        assert (await details(at, order["orderId"]))["receipt"]["txid"] == found["subject"]
    assert await xmr_received(wallet, to) == paid
    await explain_sweeps(stack)
    assert await differences(stack) == []


async def test_addresses_of_lost_orders_are_not_handed_out_again(
    stack: Exchange, wallet: WalletClient, tmp_path: Path
) -> None:
    to = await wallet.primary_address()

    async def addresses(at: Server) -> list[str]:
        ways = (("x2u", "1", stack.user.address), ("u2x", "165", to))
        made = [await create(at, direction=d, amount=a, to=t) for d, a, t in ways * 2]
        return [each["data"]["order"]["depositAddress"] for each in made]

    async with stack.serving() as at:
        await addresses(at)
        await until(lambda: has_looked(stack))
        await stop(at)
    # A stopped service gives unused addresses back to its pool.
    copy = await copy_of(stack, tmp_path / "copy.db")
    async with stack.serving() as at:
        lost = await addresses(at)
        beside = await command(stack, "onchain", "skip-addresses", "3")
        assert beside.status == 2, beside
        await stop(at)
    await stack.pay_xmr(lost[0], XMR)
    await stack.pay_usdc(lost[1], 165 * USDC)
    await restore(stack, copy)

    skipped = await command(stack, "onchain", "skip-addresses", "300")
    assert skipped.status == 0, skipped
    async with stack.serving() as at:
        fresh = await addresses(at)
        await stack.mine(4)
        await stop(at)
    assert len({*lost, *fresh}) == 8
    report = (await command(stack, "audit", "--json")).json
    assert report["differences"] == []
    for address in lost[:2]:
        assert any(address in note for note in report["notes"]), report["notes"]


async def test_withdrawal_is_a_difference_until_it_is_annotated(
    stack: Exchange, wallet: WalletClient, own_wallet: WalletClient
) -> None:
    async with stack.serving() as at:
        orders = await funded(stack, at, await wallet.primary_address())
        for order in orders:
            await reaches(stack, at, order, "completed")
        await stop(at)
    away = await wallet.primary_address()
    txids = [await withdrawn(own_wallet, away, XMR // units) for units in (10, 20)]
    await stack.mine(1)
    await stack.controls.impersonate(stack.treasury)
    usdc_away = usdc.transfer(stack.user.address, 7 * USDC)
    txids.append(await stack.controls.send_from(stack.treasury, stack.token.address, usdc_away))
    assert {item["subject"] for item in await differences(stack)} >= set(txids)

    async with started(stack):
        for network, txid in (("monero", txids[0]), ("arbitrum", txids[2])):
            reported = await command(
                stack, "treasury", "explain", network, txid, "--note", "to the cold wallet"
            )
            assert reported.status == 0, reported
        none = await command(stack, "treasury", "explain", "monero", "ab" * 32, "--note", "no")
        assert none.status == 1, none
        said = await command(stack, "audit", "--json")
    left = said.json["differences"]
    assert [(item["kind"], item["subject"]) for item in left] == [("unrecorded_payment", txids[1])]
    moved = {(item["txid"], item["unit"]): item["sent"] for item in said.json["explained"]}
    assert moved[txids[2], "USDC"] == 7 * USDC
    assert moved[txids[2], "wei"] > 0, "its gas"
    assert XMR // 10 < moved[txids[0], "XMR"] < XMR // 10 + XMR // 100

    back = await command(stack, "treasury", "explain", "arbitrum", txids[2], "--take-back")
    assert back.status == 0, back
    assert sorted(item["kind"] for item in await differences(stack)) == [
        "ether", "unrecorded_payment", "unrecorded_payment", "unrecorded_transaction",
    ]  # fmt: skip


async def withdrawn(own: WalletClient, to: str, units: int) -> str:
    """Send XMR out of the wallet by hand, as the operator may."""
    await own.refresh()
    prepared = await own.prepare([Destination(to, units)])
    await own.relay(prepared.metadata)
    await own.store()
    return prepared.txid
