"""``rpcsvc drill restore`` on real daemons: its audit reads the chains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.regtest.commands import command
from tests.regtest.exchange import USDC, XMR, Exchange, create, swept
from tests.regtest.restoring import copy_before_payouts

pytestmark = pytest.mark.slow

OK, FAILED = 0, 1


async def drilled(stack: Exchange, backup: Path) -> tuple[int, dict[str, Any]]:
    """The exit status of a drill beside the service, and its report."""
    scratch = backup.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    said = await command(
        stack, "drill", "restore", str(backup), "--scratch", str(scratch), "--json"
    )
    assert list(scratch.iterdir()) == []
    assert said.status in (OK, FAILED), said
    return said.status, said.json


async def test_drill_audits_a_backup_against_the_chains(
    stack: Exchange, wallet: WalletClient, tmp_path: Path
) -> None:
    """Both payouts are signed after the backup: the drill adopts them from the journal."""
    to = await wallet.primary_address()
    async with stack.serving() as at:
        to_usdc = (await create(at, direction="x2u", amount="1", to=stack.user.address))["data"]
        to_xmr = (await create(at, direction="u2x", amount="165", to=to))["data"]
        orders = [each["order"]["orderId"] for each in (to_usdc, to_xmr)]
        await command(stack, "payouts", "pause", "--reason", "so that the copy knows no payment")
        await stack.pay_xmr(to_usdc["order"]["depositAddress"], XMR)
        await stack.pay_usdc(to_xmr["order"]["depositAddress"], 165 * USDC)
        backup = await copy_before_payouts(stack, at, orders, tmp_path / "copy.db")
        await swept(stack)

        status, report = await drilled(stack, backup)
        assert (status, report["refused"], report["notAudited"]) == (OK, None, None), report
        assert len(report["journal"]["payments"]) >= 2
        assert (report["audit"]["orders"], report["audit"]["differences"]) == (2, [])

        await stack.controls.impersonate(stack.treasury)
        stolen = await stack.controls.send_from(
            stack.treasury, stack.token.address, usdc.transfer(stack.user.address, 7)
        )
        status, report = await drilled(stack, backup)
        found = {(item["kind"], item["subject"]) for item in report["audit"]["differences"]}
        assert status == FAILED
        assert ("unrecorded_payment", stolen) in found

    stack.anvil.kill()
    status, report = await drilled(stack, backup)
    assert (status, report["refused"], report["audit"]) == (FAILED, None, None)
    assert "arbitrum" in report["notAudited"]
