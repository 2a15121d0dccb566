"""Restores without a payment journal: the operator follows docs/operate/restore.md to the letter.

Each case is one payment since the copy. No payment is made twice, counted on the chains. With the
journal: test_restore_drill.py. A USDC payout and a sweep have no case with a wallet restored from
its words: EVM keys are derived from words anyway, and the chain shows their recipients.
test_exchange_restored.py shows that payouts stay paused before these steps.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.exchange import USDC, XMR, Exchange, create, reaches, swept
from tests.regtest.ledger_of_chains import hot_transactions, xmr_wallet
from tests.regtest.restoring import (
    copy_before_payouts,
    copy_of,
    differences,
    explain_sweeps,
    has_looked,
    has_split,
    restore_wallet_from_words,
)

pytestmark = pytest.mark.slow

SWEEP_USDC = "RPCSVC_ONCHAIN__SWEEP_USDC"
XMR_OUTPUTS = "RPCSVC_ONCHAIN__XMR_OUTPUTS"


async def ordered(at: Server, direction: str, to: str) -> tuple[str, str]:
    """An order's id and deposit address."""
    amount = "1" if direction == "x2u" else "165"
    order = (await create(at, direction=direction, amount=amount, to=to))["data"]["order"]
    return order["orderId"], order["depositAddress"]


async def pay(stack: Exchange, direction: str, address: str) -> None:
    """Pay the amount of an order."""
    if direction == "x2u":
        await stack.pay_xmr(address, XMR)
    else:
        await stack.pay_usdc(address, 165 * USDC)


async def stop(at: Server) -> None:
    assert await asyncio.to_thread(at.stop) == 0


# --- payments after the copy: each returns the orders that are open in the copy ----------------

After = Callable[[Exchange, list[str], Path], Awaitable[list[str]]]


async def paid(stack: Exchange, direction: str, payees: list[str], copy: Path) -> list[str]:
    async with stack.serving() as at:
        orders = [await ordered(at, direction, to) for to in payees]
        await command(stack, "payouts", "pause", "--reason", "so that the copy knows no payment")
        for _, address in orders:
            await pay(stack, direction, address)
        await copy_before_payouts(stack, at, [order for order, _ in orders], copy)
        await swept(stack)
        await stop(at)
    return [order for order, _ in orders]


async def one_xmr_payout(stack: Exchange, payees: list[str], copy: Path) -> list[str]:
    return await paid(stack, "u2x", payees[:1], copy)


async def xmr_payouts_together(stack: Exchange, payees: list[str], copy: Path) -> list[str]:
    return await paid(stack, "u2x", payees, copy)


async def one_usdc_payout(stack: Exchange, _payees: list[str], copy: Path) -> list[str]:
    return await paid(stack, "x2u", [stack.user.address], copy)


async def a_sweep(stack: Exchange, payees: list[str], copy: Path) -> list[str]:
    stack.extra[SWEEP_USDC] = "1000"
    async with stack.serving() as at:
        order, address = await ordered(at, "u2x", payees[0])
        await pay(stack, "u2x", address)
        await reaches(stack, at, order, "completed")
        await copy_of(stack, copy)
        await stop(at)
    del stack.extra[SWEEP_USDC]
    async with stack.serving() as at:
        await swept(stack)
        await stop(at)
    return []


async def a_split(stack: Exchange, _payees: list[str], copy: Path) -> list[str]:
    async with stack.serving() as at:
        await until(lambda: has_looked(stack))
        await copy_of(stack, copy)
        await stop(at)
    stack.extra[XMR_OUTPUTS] = "20"
    async with stack.serving() as at:
        await until(lambda: has_split(stack))
        await stop(at)
    del stack.extra[XMR_OUTPUTS]  # no further split after the restore
    return []


# --- the operator's steps ---------------------------------------------------------------------


async def settle(stack: Exchange, wallet: WalletClient) -> None:
    """Follow docs/operate/restore.md for each payment that the audit names.

    ``wallet`` is the payees': where the service's has forgotten whom it paid, they are asked.
    """
    await wallet.refresh()
    for item in await differences(stack):
        if item["kind"] != "unrecorded_payment":
            continue
        hint = item.get("hint", "")
        explain = ("treasury", "explain", network_of(item["subject"]), item["subject"])
        if closings := re.findall(r"payouts close (\S+) (\S+) --note", hint):
            refused = await command(stack, *explain, "--note", "I do not know what it was")
            assert refused.status == 1, "whom it paid would be paid once more"
            paid = {item.address for item in await wallet.transfer(item["subject"])}
            for transfer, txid in closings:
                if recipient(stack, transfer) in paid:
                    close = ("payouts", "close", transfer, txid, "--note", "its owner has it")
                    done("close", await command(stack, *close))
            done("explain", await command(stack, *explain, "--note", "all of it is closed"))
        elif "rpcsvc payouts adopt" in hint:
            adopt = hint.split("rpcsvc ")[1].split()
            done("adopt", await command(stack, *adopt))
        else:
            done("explain", await command(stack, *explain, "--note", "upkeep since the copy"))
    await explain_sweeps(stack)


def recipient(stack: Exchange, transfer: str) -> str:
    """The address that a transfer pays."""
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as database:
        sql = "SELECT address FROM transfers WHERE transfer_id = ?"
        return str(database.execute(sql, (transfer,)).fetchone()[0])


def network_of(txid: str) -> str:
    return "arbitrum" if txid.startswith("0x") else "monero"


def done(what: str, said: object) -> None:
    assert getattr(said, "status", None) == 0, (what, said)


async def sent(stack: Exchange) -> tuple[set[str], set[str]]:
    """The outgoing transactions of the Monero wallet and of the hot wallet, by the chains."""
    evm = {item.txid for item in await hot_transactions(stack)}
    return set((await xmr_wallet(stack)).sent), evm


SAME, FROM_WORDS = "the same wallet", "wallet from its words"
CASES = [
    (one_xmr_payout, SAME),
    (one_xmr_payout, FROM_WORDS),
    (xmr_payouts_together, SAME),
    (xmr_payouts_together, FROM_WORDS),
    (one_usdc_payout, SAME),
    (a_sweep, SAME),
    (a_split, SAME),
    (a_split, FROM_WORDS),
]


@pytest.mark.parametrize(
    ("after", "wallet_is"), CASES, ids=[f"{after.__name__}-{which}" for after, which in CASES]
)
async def test_restore_without_journal_sends_nothing_twice(
    stack: Exchange, wallet: WalletClient, tmp_path: Path, after: After, wallet_is: str
) -> None:
    payees = [(await wallet.create_addresses(1))[0].address for _ in range(2)]
    copy = tmp_path / "copy.db"
    orders = await after(stack, payees, copy)
    before = await sent(stack)
    if wallet_is == FROM_WORDS:
        await restore_wallet_from_words(stack)
    done("restore", await command(stack, "db", "restore", str(copy), "--without-journal"))
    await settle(stack, wallet)
    done("resume", await command(stack, "payouts", "resume"))
    async with stack.serving() as at:
        for order in orders:
            await reaches(stack, at, order, "completed")
        await swept(stack)
        await stop(at)
    await stack.mine(3)
    assert await sent(stack) == before
    assert await differences(stack) == []

    async with stack.serving() as at:
        fresh, address = await ordered(at, "u2x", payees[0])
        await pay(stack, "u2x", address)
        await reaches(stack, at, fresh, "completed")
        await stop(at)
    assert len((await sent(stack))[0] - before[0]) == 1
