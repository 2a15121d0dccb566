"""``rpcsvc treasury withdraw`` on real daemons: one transfer on the chain, also after kills."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import Crash, until
from tests.regtest.commands import CommandResult, admin, command
from tests.regtest.exchange import ETHER, STEP_SECONDS, USDC, XMR, Exchange, create
from tests.regtest.ledger_of_chains import usdc_received, xmr_received
from tests.regtest.restoring import copy_of
from tests.regtest.trading import DEATH_SECONDS

pytestmark = pytest.mark.slow

COLD = "0x52908400098527886E0F7030069857D2E4169EE7"


@dataclass
class Cold:
    """An address of the operator outside of the service, on one network."""

    stack: Exchange
    network: str
    address: str
    amount: str
    units: int
    received: Callable[[], Awaitable[list[int]]]

    async def withdraw(self, name: str) -> CommandResult:
        return await command(
            self.stack, "treasury", "withdraw", self.network, self.amount, "--to", self.address,
            "--id", name, "--detach", typed=f"{self.amount} {self.address[-6:]}\n",
        )  # fmt: skip

    async def reaches(self, name: str, state: str) -> Any:
        """Wait, with a block from time to time, until a withdrawal has a state."""

        async def poll() -> Any:
            await self.stack.mine_in_time()
            found = (await admin(self.stack, "withdrawals.list"))["withdrawals"]
            return next(
                (i for i in found if (i["withdrawalId"], i["state"]) == (name, state)), None
            )

        return await until(poll, seconds=STEP_SECONDS)


def cold_on_arbitrum(stack: Exchange) -> Cold:
    return Cold(stack, "arbitrum", COLD, "5", 5 * USDC, lambda: usdc_received(stack, COLD))


async def cold_with_little_ether(stack: Exchange) -> Cold:
    """The address on Arbitrum; the treasury has only the ether that payouts need."""
    stack.extra["RPCSVC_INVENTORY__WITHDRAW_TO"] = f"arbitrum={COLD}"
    # The reserve: a tenth of the dearest payment, 20 USD at 5,000 USD for an ether.
    await stack.controls.set_ether(stack.treasury, ETHER // 2_500)
    return cold_on_arbitrum(stack)


@pytest.fixture(params=["arbitrum", "monero"])
async def cold(request: pytest.FixtureRequest, stack: Exchange, wallet: WalletClient) -> Cold:
    primary = await wallet.primary_address()
    stack.extra["RPCSVC_INVENTORY__WITHDRAW_TO"] = f"arbitrum={COLD},monero={primary}"
    if request.param == "arbitrum":
        return cold_on_arbitrum(stack)
    return Cold(
        stack, "monero", primary, "0.5", XMR // 2, lambda: xmr_received(wallet, primary)
    )  # fmt: skip


async def agrees(stack: Exchange) -> None:
    """Require that ``audit`` and ``db check`` find no difference."""
    audit = await command(stack, "audit")
    assert audit.status == 0, audit
    check = await command(stack, "db", "check")
    assert check.status == 0, check


async def test_withdrawal_arrives_once_and_the_audit_knows_it(cold: Cold) -> None:
    stack = cold.stack
    async with stack.serving() as at:
        for _ in range(3):
            assert (await cold.withdraw("wd_once")).status == 0
        view = await command(stack, "treasury", "--json")
        shown = view.json["xmr"] if cold.network == "monero" else view.json["usdc"][0]
        assert float(shown["withdrawing"]) >= float(cold.amount)
        plan = await command(stack, "treasury", "plan", "--json")
        reserved = {item["network"]: item["reserved"] for item in plan.json["networks"]}
        assert reserved[cold.network] == shown["withdrawing"]
        second = await cold.withdraw("wd_twice")
        assert (second.status, "wd_once is under way" in second.err) == (1, True), second
        settled = await cold.reaches("wd_once", "settled")
        assert settled["receipt"] is not None
        assert (await cold.withdraw("wd_once")).status == 0
        after = await command(stack, "treasury", "--json")
        shown = after.json["xmr"] if cold.network == "monero" else after.json["usdc"][0]
        assert shown["withdrawing"] == "0"
        at.stop()
    assert await cold.received() == [cold.units]
    await agrees(stack)


async def waits_for(stack: Exchange) -> str | None:
    """Why the newest withdrawal is not signed yet."""
    await stack.mine_in_time()
    listed = await admin(stack, "withdrawals.list")
    found: str | None = listed["withdrawals"][0]["waitsFor"]
    return found


async def test_withdrawal_leaves_the_ether_that_payouts_need(
    stack: Exchange, wallet: WalletClient
) -> None:
    arbitrum = await cold_with_little_ether(stack)
    async with stack.serving() as at:
        assert (await arbitrum.withdraw("wd_ether")).status == 0
        assert "lacks ether" in await until(partial(waits_for, stack), seconds=STEP_SECONDS)
        assert await arbitrum.received() == []
        await stack.controls.set_ether(stack.treasury, ETHER)
        await arbitrum.reaches("wd_ether", "settled")
        at.stop()
    assert await arbitrum.received() == [5 * USDC]


async def test_withdrawal_keeps_to_reservations_and_the_cap_per_day(
    stack: Exchange, wallet: WalletClient
) -> None:
    stack.extra["RPCSVC_INVENTORY__WITHDRAW_TO"] = f"arbitrum={COLD}"
    stack.extra["RPCSVC_ONCHAIN__USDC_PER_DAY"] = "8"
    async with stack.serving() as at:
        await create(at, direction="x2u", amount="1", to=stack.user.address)
        all_of_it = await command(
            stack, "treasury", "withdraw", "arbitrum", "19990", "--to", COLD, "--detach",
            typed=f"19990 {COLD[-6:]}\n",
        )  # fmt: skip
        assert (all_of_it.status, "open orders reserve" in all_of_it.err) == (1, True), all_of_it
        arbitrum = cold_on_arbitrum(stack)
        assert (await arbitrum.withdraw("wd_first")).status == 0
        await arbitrum.reaches("wd_first", "settled")
        assert (await arbitrum.withdraw("wd_second")).status == 0
        assert "cap per day" in await until(partial(waits_for, stack), seconds=STEP_SECONDS)
        at.stop()
    assert await arbitrum.received() == [5 * USDC]


CRASHES: dict[str, list[Crash]] = {
    "arbitrum": [
        ("evm record", "before", 1),
        ("evm journal", "after", 1),
        ("evm record", "after", 1),
        ("evm publish", "before", 1),
        ("evm publish", "after", 1),
        ("withdrawal", "before", 2),
        ("withdrawal", "after", 3),
    ],
    "monero": [
        ("monero record", "before", 1),
        ("monero journal", "after", 1),
        ("monero record", "after", 1),
        ("monero mark", "after", 1),
        ("monero relay", "after", 1),
        ("monero relayed", "after", 1),
        ("withdrawal", "before", 2),
        ("withdrawal", "after", 3),
    ],
}


async def test_kill_at_each_step_of_a_withdrawal_leaves_one_debit(cold: Cold) -> None:
    stack = cold.stack
    for number, crash in enumerate(CRASHES[cold.network]):
        name = f"wd_kill{number}"
        async with stack.serving(crash) as at:
            assert (await cold.withdraw(name)).status in (0, 3)

            async def dead(at: Any = at) -> bool:
                if not at.is_dead:
                    await stack.mine_in_time()
                return bool(at.is_dead)

            await until(dead, seconds=DEATH_SECONDS)
            assert await at.death() == -9
        async with stack.serving() as at:
            assert (await cold.withdraw(name)).status == 0
            await cold.reaches(name, "settled")
            at.stop()
        assert await cold.received() == [cold.units] * (number + 1), crash
    await agrees(stack)


async def restored(stack: Exchange, copy: Path) -> CommandResult:
    """Restore a copy of the database with the payment journal."""
    done = await command(stack, "db", "restore", str(copy))
    assert done.status == 0, done
    return done


async def test_withdrawal_that_a_copy_lacks_is_not_paid_again(cold: Cold, tmp_path: Path) -> None:
    stack = cold.stack
    async with stack.serving() as at:
        copy = await copy_of(stack, tmp_path / "copy.db")
        assert (await cold.withdraw("wd_lacking")).status == 0
        await cold.reaches("wd_lacking", "settled")
        at.stop()
    assert "--id wd_lacking" in (await restored(stack, copy)).out
    async with stack.serving() as at:
        audit = await command(stack, "audit", "--json")
        assert "a withdrawal that the copy lacks" in audit.out
        assert (await cold.withdraw("wd_lacking")).status == 0
        await cold.reaches("wd_lacking", "settled")
        at.stop()
    assert await cold.received() == [cold.units]
    await agrees(stack)


async def test_withdrawal_that_a_copy_has_as_planned_is_not_paid_again(
    stack: Exchange, tmp_path: Path
) -> None:
    arbitrum = await cold_with_little_ether(stack)
    async with stack.serving() as at:
        assert (await arbitrum.withdraw("wd_planned")).status == 0
        await arbitrum.reaches("wd_planned", "planned")
        copy = await copy_of(stack, tmp_path / "copy.db")
        await stack.controls.set_ether(stack.treasury, ETHER)
        await arbitrum.reaches("wd_planned", "settled")
        at.stop()
    await restored(stack, copy)
    async with stack.serving() as at:
        await arbitrum.reaches("wd_planned", "settled")
        at.stop()
    assert await arbitrum.received() == [5 * USDC]
    check = await command(stack, "db", "check")
    assert check.status == 0, check
