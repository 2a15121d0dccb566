"""``rpcsvc treasury withdraw`` beside a real process: one debit for one id, over kills."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rpcsvc.cli.operator import treasury
from tests.command_line import Done, clean_environ, run_here
from tests.e2e.audit import audit, count, debits
from tests.e2e.processes import SETTINGS, Crash, Server, crash_name, server
from tests.sandbox import EVM, MONERO

NAME = "wd_2026-11-24"
ALLOWED = {"RPCSVC_INVENTORY__WITHDRAW_TO": f"arbitrum={EVM},monero={MONERO}"}
OTHER = "0x" + "0b" * 20
TYPED = {EVM: f"5 {EVM[-6:]}\n", MONERO: f"0.5 {MONERO[-6:]}\n"}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command look often whether a withdrawal is over."""
    monkeypatch.setattr(treasury, "_LOOK_SECONDS", 0.05)


async def command(at: Server, *arguments: str, typed: str = "") -> Done:
    environ = {**clean_environ(), **SETTINGS, **ALLOWED, "RPCSVC_DATA_DIR": str(at.data_dir)}
    return await asyncio.to_thread(run_here, ["treasury", *arguments], environ, typed)


async def withdraw(at: Server, *more: str, to: str = EVM, typed: str | None = None) -> Done:
    network, amount = ("monero", "0.5") if to == MONERO else ("arbitrum", "5")
    given = TYPED[to] if typed is None else typed
    return await command(at, "withdraw", network, amount, "--to", to, *more, typed=given)


@pytest.mark.parametrize(("to", "units"), [(EVM, 5_000_000), (MONERO, 500_000_000_000)])
async def test_three_calls_with_one_id_are_one_debit(tmp_path: Path, to: str, units: int) -> None:
    async with server(tmp_path / "data", environ=ALLOWED) as at:
        for _ in range(3):
            done = await withdraw(at, "--id", NAME, to=to)
            assert done.returncode == 0, done
            assert done.stdout.splitlines()[-1].startswith(f"{NAME} is settled, transaction ")
        listed = json.loads((await command(at, "withdrawals", "--json")).stdout)
        assert [item["withdrawalId"] for item in listed["withdrawals"]] == [NAME]
        assert listed["allowed"] == {"arbitrum": [EVM], "monero": [MONERO]}
        assert (await command(at, "withdrawals")).stdout.count(NAME) == 1
        assert at.stop() == 0
    assert debits(at.data_dir, to) == [units]
    assert count(at.data_dir, "reservations") == 0
    assert audit(at.data_dir) == []


async def test_withdrawal_without_an_id_is_a_new_one_each_time(tmp_path: Path) -> None:
    async with server(tmp_path / "data", environ=ALLOWED) as at:
        first, second = await withdraw(at), await withdraw(at)
        assert (first.returncode, second.returncode) == (0, 0), second
        assert first.stdout.split()[0] != second.stdout.split()[0]
        assert at.stop() == 0
    assert debits(at.data_dir, EVM) == [5_000_000] * 2
    assert audit(at.data_dir) == []


async def test_withdrawal_is_not_made_unless_it_is_typed(tmp_path: Path) -> None:
    last = EVM[-6:]
    async with server(tmp_path / "data", environ=ALLOWED) as at:
        for typed in ("", "yes\n", f"5.0 {last}\n", f"5 {last[1:]}\n", f"6 {last}\n"):
            done = await withdraw(at, typed=typed)
            assert (done.returncode, "Nothing was sent" in done.stderr) == (2, True), done
            assert EVM in done.stderr
        assert at.stop() == 0
    assert count(at.data_dir, "withdrawals") == 0


async def test_withdrawal_outside_its_terms_is_refused(tmp_path: Path) -> None:
    async with server(tmp_path / "data", environ=ALLOWED) as at:
        stray = await command(at, "withdraw", "arbitrum", "5", "--to", OTHER)
        assert (stray.returncode, "inventory.withdraw_to" in stray.stderr) == (2, True), stray
        assert EVM in stray.stderr
        assert (await withdraw(at, "--id", NAME)).returncode == 0
        more = await command(at, "withdraw", "arbitrum", "6", "--to", EVM, "--id", NAME)
        assert (more.returncode, "another withdrawal" in more.stderr) == (2, True), more
        assert at.stop() == 0
    assert debits(at.data_dir, EVM) == [5_000_000]
    assert debits(at.data_dir, OTHER) == []


STEPS = [
    ("withdraw", "after", 1),
    ("withdrawal", "after", 1),
    ("pool", "after", 1),
    *(
        pytest.param(step, marks=pytest.mark.slow)
        for step in (
            ("withdraw", "before", 1),
            ("prepare", "before", 1),
            ("withdrawal", "before", 1),
            ("publish", "before", 1),
            ("publish", "after", 1),
            ("withdrawal", "before", 2),
            ("withdrawal", "after", 2),
            ("withdrawal", "before", 3),
            ("withdrawal", "after", 3),
        )
    ),
]


@pytest.mark.parametrize("crash", STEPS, ids=crash_name)
async def test_kill_around_a_withdrawal_leaves_one_debit(tmp_path: Path, crash: Crash) -> None:
    data_dir = tmp_path / "data"
    async with server(data_dir, crash=crash, environ=ALLOWED) as first:
        done = await withdraw(first, "--id", NAME)
        assert await first.death() == -9
        assert done.returncode == 3, done
        assert NAME in done.stdout + done.stderr
    async with server(data_dir, environ=ALLOWED) as second:
        again = await withdraw(second, "--id", NAME)
        assert again.returncode == 0, again
        assert second.stop() == 0
    assert debits(data_dir, EVM) == [5_000_000]
    assert count(data_dir, "withdrawals") == 1
    assert count(data_dir, "reservations") == 0
    assert audit(data_dir) == []
