"""The payout guard: the pause and the caps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from rpcsvc.domain.money import USDC, XMR, Asset
from rpcsvc.domain.order import Transfer, TransferKind
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.engine import PayoutGuard
from rpcsvc.settlement.onchain.pause import PAUSE_FILE, PauseSwitch
from tests.unit.payout_guard import CAPS, SignedBooks

HOUR = 3600 * 1000
DAY = 24 * HOUR


@dataclass
class Clock:
    now: int = 10 * DAY

    def now_ms(self) -> int:
        return self.now


def transfer(units: int, asset: Asset = XMR) -> Transfer:
    return Transfer("ord_1/payout/1", TransferKind.PAYOUT, "monero", asset, "to", units, 0)


def guard(data_dir: Path, sent: int = 0) -> PayoutGuard:
    return PayoutGuard(PauseSwitch(data_dir), CAPS, SignedBooks(sent), Clock())


async def passes(held: PayoutGuard, item: Transfer) -> None:
    """Pass a transfer through the guard, alone. Raises Unavailable."""
    async with held.passing(item):
        pass


def test_thrown_switch_survives_a_restart_until_it_is_reset(tmp_path: Path) -> None:
    PauseSwitch(tmp_path).pause("a key may be known")
    held = guard(tmp_path)
    assert held.health().detail == "paused: a key may be known"
    with pytest.raises(Unavailable, match="paused"):
        held.require_open()
    PauseSwitch(tmp_path).resume()
    held.require_open()
    assert held.health().ok


def test_a_switch_thrown_by_hand_needs_no_reason(tmp_path: Path) -> None:
    (tmp_path / PAUSE_FILE).touch()
    assert guard(tmp_path).paused() == "no reason given"


def test_a_switch_that_can_not_be_read_counts_as_thrown(tmp_path: Path) -> None:
    (tmp_path / PAUSE_FILE).mkdir()
    with pytest.raises(Unavailable):
        guard(tmp_path).require_open()


async def test_a_transfer_at_its_cap_passes_and_one_unit_more_waits(tmp_path: Path) -> None:
    held = guard(tmp_path)
    await passes(held, transfer(10))
    with pytest.raises(Unavailable, match="cap per transfer"):
        await passes(held, transfer(11))
    assert "ord_1/payout/1 waits" in (held.health().detail or "")


async def test_the_cap_per_day_counts_what_was_signed_within_24_hours(tmp_path: Path) -> None:
    await passes(guard(tmp_path, sent=90), transfer(10))
    with pytest.raises(Unavailable, match="cap per day"):
        await passes(guard(tmp_path, sent=91), transfer(10))
    await passes(guard(tmp_path, sent=91), transfer(10, USDC))
    signed = SignedBooks()
    await passes(PayoutGuard(PauseSwitch(tmp_path), CAPS, signed, Clock()), transfer(10))
    assert signed.since == [9 * DAY]


@pytest.mark.parametrize(
    ("sent", "units", "passed"),
    [
        pytest.param(0, (10, 11, 10), [10, 10], id="one over the cap per transfer"),
        pytest.param(70, (10, 10), [10, 10], id="all of what is left of the day"),
        pytest.param(71, (10, 10, 9), [10, 9], id="what is left of the day, one by one"),
        pytest.param(90, (1,), [], id="the first takes what is left"),
    ],
)
async def test_what_goes_out_together_stays_within_the_caps(
    tmp_path: Path, sent: int, units: tuple[int, ...], passed: list[int]
) -> None:
    companions = [transfer(each) for each in units]
    async with guard(tmp_path, sent).passing(transfer(10), companions) as together:
        assert [item.units for item in together] == passed


async def test_what_is_being_signed_counts_for_the_others_of_its_asset(tmp_path: Path) -> None:
    """Hot wallets of several networks sign in parallel: these payments are not in the books yet."""
    held = guard(tmp_path, sent=70)
    async with held.passing(transfer(10), [transfer(10)]):
        await passes(held, transfer(10))
        async with held.passing(transfer(1)):
            with pytest.raises(Unavailable, match="cap per day"):
                await passes(held, transfer(10))
        await passes(held, transfer(1_000, USDC))
    with pytest.raises(ZeroDivisionError):
        async with held.passing(transfer(10)):
            raise ZeroDivisionError
    async with held.passing(transfer(10), [transfer(10), transfer(10)]) as together:
        assert len(together) == 2


class SlowBooks(SignedBooks):
    """Books with delayed answers, as from a database over a network."""

    answering: asyncio.Event

    async def sent_since(self, _asset: Asset, at: int) -> int:
        sent = await super().sent_since(_asset, at)
        await self.answering.wait()
        return sent


async def test_guard_counts_two_wallets_of_an_asset_in_turn(tmp_path: Path) -> None:
    books = SlowBooks(sent=85)
    books.answering = asyncio.Event()
    held = PayoutGuard(PauseSwitch(tmp_path), CAPS, books, Clock())
    passed: list[str] = []

    async def sign(name: str) -> None:
        async with held.passing(transfer(10)):
            passed.append(name)
            await both_asked.wait()

    both_asked = asyncio.Event()
    signing = [asyncio.create_task(sign(name)) for name in ("arbitrum", "base")]
    await asyncio.sleep(0)
    books.answering.set()
    done, _ = await asyncio.wait(signing, return_when=asyncio.FIRST_COMPLETED)
    assert [isinstance(task.exception(), Unavailable) for task in done] == [True]
    both_asked.set()
    await asyncio.gather(*signing, return_exceptions=True)
    assert passed == ["arbitrum"]


async def test_guard_counts_a_payment_committed_while_it_reads(tmp_path: Path) -> None:
    """The payment may count twice, never not at all: the books were read before its commit."""
    books = SlowBooks(sent=85)
    books.answering = asyncio.Event()
    books.answering.set()
    held = PayoutGuard(PauseSwitch(tmp_path), CAPS, books, Clock())
    async with held.passing(transfer(10)):
        books.answering.clear()
        asked = asyncio.create_task(passes(held, transfer(10)))
        await asyncio.sleep(0)
    books.sent += 10
    books.answering.set()
    with pytest.raises(Unavailable, match="cap per day"):
        await asked


async def test_a_transfer_that_passes_later_is_not_held_against_health(tmp_path: Path) -> None:
    signed = SignedBooks(95)
    held = PayoutGuard(PauseSwitch(tmp_path), CAPS, signed, Clock())
    with pytest.raises(Unavailable):
        await passes(held, transfer(10))
    signed.sent = 0
    await passes(held, transfer(10))
    assert held.health().ok


@pytest.mark.parametrize("later", [10 * 60_000, -HOUR])
async def test_withdrawn_request_does_not_degrade_health(tmp_path: Path, later: int) -> None:
    """Its order was refunded or cancelled, so no transfer waits."""
    clock = Clock()
    held = PayoutGuard(PauseSwitch(tmp_path), CAPS, SignedBooks(), clock)
    with pytest.raises(Unavailable):
        await passes(held, transfer(11))
    clock.now += later
    assert held.health().ok


async def test_what_waits_and_asks_each_minute_stays_in_health(tmp_path: Path) -> None:
    clock = Clock()
    held = PayoutGuard(PauseSwitch(tmp_path), CAPS, SignedBooks(), clock)
    for _ in range(10):
        with pytest.raises(Unavailable):
            await passes(held, transfer(11))
        clock.now += 60_000
        health = held.health()
        assert (health.ok, "ord_1/payout/1 waits" in (health.detail or "")) == (False, True)
