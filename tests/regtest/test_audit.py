"""The auditor on real daemons: no difference after swaps, and each planted one is found."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import until
from tests.regtest.exchange import USDC, XMR, Exchange, create, reaches, swept

pytestmark = pytest.mark.slow

OK, FAILED, UNREACHABLE = 0, 1, 3


class Audited:
    """Exit status and JSON of ``rpcsvc audit``."""

    def __init__(self, status: int, said: str, reported: str) -> None:
        self.status = status
        self.report: dict[str, Any] = orjson.loads(said) if said else {}
        self.reported = reported

    @property
    def kinds(self) -> set[str]:
        return {item["kind"] for item in self.report["differences"]}


async def audit(stack: Exchange, data_dir: Path | None = None) -> Audited:
    from asyncio import to_thread  # noqa: PLC0415

    command = [sys.executable, "-m", "rpcsvc", "audit", "--json",
               "--data-dir", str(data_dir or stack.data_dir)]  # fmt: skip
    done = await to_thread(
        subprocess.run, command, env={**os.environ, **stack.environ()}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    return Audited(done.returncode, done.stdout, done.stderr)


def planted(stack: Exchange, to: Path, *statements: str) -> Path:
    """A data directory with a copy of the database only, changed with its triggers dropped."""
    to.mkdir(mode=0o700)
    with (
        closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as source,
        closing(sqlite3.connect(to / DATABASE_NAME)) as copy,
    ):
        source.backup(copy)
        plant(copy, *statements)
    return to


def plant(database: sqlite3.Connection, *statements: str) -> None:
    triggers = database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for (name,) in triggers:
        database.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        assert database.execute(statement).rowcount == 1, statement
    database.commit()


async def swap_both_ways(stack: Exchange, wallet: WalletClient) -> None:
    """One completed swap in each direction, with their sweeps."""
    to = await wallet.primary_address()
    async with stack.serving() as at:
        made = await create(at, direction="x2u", amount="1", to=stack.user.address)
        await stack.pay_xmr(made["data"]["order"]["depositAddress"], XMR)
        await reaches(stack, at, made["data"]["order"]["orderId"], "completed")
        made = await create(at, direction="u2x", amount="165", to=to)
        await stack.pay_usdc(made["data"]["order"]["depositAddress"], 165 * USDC)
        await reaches(stack, at, made["data"]["order"]["orderId"], "completed")
        await swept(stack)


async def test_audit_is_clean_after_swaps_and_finds_a_planted_loss(
    stack: Exchange, wallet: WalletClient, tmp_path: Path
) -> None:
    stack.extra["RPCSVC_ONCHAIN__XMR_OUTPUTS"] = "16"  # the wallet pays itself, too
    await swap_both_ways(stack, wallet)

    clean = await audit(stack)
    assert (clean.status, clean.report.get("differences")) == (OK, []), clean.reported
    assert (clean.report["orders"], clean.report["payments"]) == (2, 4), "swaps, upkeep, sweep"
    assert clean.report["notes"] == []

    stranger = "0x" + "11" * 20
    plants = {
        "unit of a deposit": (
            "UPDATE deposits SET units = units + 1 WHERE network = 'monero'",
            {"deposit_units"},
        ),
        "units of a deposit": (
            "UPDATE deposits SET units = units - 1 WHERE network = 'arbitrum'",
            {"deposit_units", "payout"},
        ),
        "unit of a payout": (
            "UPDATE transfers SET units = units - 1 WHERE asset = 'XMR'",
            {"payout", "payment_units", "paid_on_chain"},
        ),
        "unit of a fee": (
            "UPDATE monero_payments SET fee = fee + 1 WHERE purpose = 'upkeep'",
            {"fee"},
        ),
        "unit of a sweep": ("UPDATE evm_sweeps SET taken = taken - 1", {"sweep"}),
        "unit of a payment": (
            "UPDATE evm_payments SET units = units + 1 WHERE purpose = 'transfer'",
            {"payment_units"},
        ),
        "destination": (
            f"UPDATE transfers SET address = '{stranger}' WHERE asset = 'USDC'",
            {"destination", "recipient"},
        ),
        "wei at first": (
            "UPDATE evm_openings SET wei = substr(wei, 1, length(wei) - 1) || '1'",
            {"ether"},
        ),
        "a payment less": (
            "DELETE FROM monero_payments WHERE purpose = 'transfer'",
            {"payment", "not_on_chain", "unrecorded_payment"},
        ),
    }
    for name, (statement, wanted) in plants.items():
        found = await audit(stack, planted(stack, tmp_path / name, statement))
        assert found.status == FAILED, (name, found.reported)
        assert found.kinds == wanted, name

    everywhere = [
        f"UPDATE transfers SET address = '{stranger}' WHERE asset = 'USDC'",
        f"UPDATE orders SET to_address = '{stranger}' WHERE direction = 'x2u'",
        f"UPDATE evm_payments SET recipient = '{stranger}' WHERE purpose = 'transfer'",
    ]
    found = await audit(stack, planted(stack, tmp_path / "everywhere", *everywhere))
    assert found.status == FAILED
    assert found.kinds == {"paid_on_chain", "unrecorded_payment"}


async def test_payments_behind_the_services_back_are_found(
    stack: Exchange, wallet: WalletClient, own_wallet: WalletClient
) -> None:
    await swap_both_ways(stack, wallet)
    stranger = await wallet.primary_address()
    await own_wallet.refresh()
    prepared = await own_wallet.prepare([Destination(stranger, XMR // 10)])
    await own_wallet.relay(prepared.metadata)
    await own_wallet.store()
    await stack.miner.mine(1)
    await stack.controls.impersonate(stack.treasury)
    stolen = await stack.controls.send_from(
        stack.treasury, stack.token.address, usdc.transfer(stack.user.address, 7)
    )

    found = await audit(stack)

    assert found.status == FAILED, found.reported
    subjects = {(item["kind"], item["subject"]) for item in found.report["differences"]}
    assert ("unrecorded_payment", prepared.txid) in subjects
    assert ("unrecorded_payment", stolen) in subjects
    assert found.kinds == {"unrecorded_payment", "unrecorded_transaction", "ether"}


async def test_running_service_pauses_payouts_on_a_difference(
    stack: Exchange,
) -> None:
    stack.extra["RPCSVC_ONCHAIN__AUDIT_SECONDS"] = "1"
    switch = PauseSwitch(stack.data_dir)
    async with stack.serving() as at:
        made = await create(at, direction="x2u", amount="1", to=stack.user.address)
        order = made["data"]["order"]
        await stack.pay_xmr(order["depositAddress"], XMR)
        await reaches(stack, at, order["orderId"], "completed")
        assert switch.reason() is None
        await stack.controls.impersonate(stack.treasury)
        await stack.controls.send_from(
            stack.treasury, stack.token.address, usdc.transfer(stack.user.address, 1)
        )

        async def paused() -> str | None:
            return switch.reason()

        reason = await until(paused)
        assert reason.startswith("audit: unrecorded_payment")


async def test_a_node_that_is_down_is_no_difference(stack: Exchange) -> None:
    async with stack.serving():
        pass
    stack.anvil.kill()

    found = await audit(stack)

    assert found.status == UNREACHABLE
    assert "No audit could be made" in found.reported
