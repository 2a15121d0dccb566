"""The service refuses to start on a data directory with open orders of another engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.bootstrap import running
from rpcsvc.domain.events import DeadlinePassed, UpstreamReported
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import OrderStatus, Report
from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.settings import Settings, SettingsError, load_settings
from rpcsvc.store.withdrawals import WithdrawalStore
from tests.sandbox import HOUR_MS, ManualClock
from tests.unit.onchain_service import unreachable
from tests.unit.orders import terms

ORDER = "ord_" + "7" * 26


def sandbox(data_dir: Path) -> Settings:
    return load_settings(config_file=None, environ={}, flags={"data_dir": str(data_dir)}).settings


def upstream(data_dir: Path) -> Settings:
    environ = {"RPCSVC_ENGINE": "upstream", "RPCSVC_UPSTREAM__URL": "http://127.0.0.1:1"}
    flags = {"data_dir": str(data_dir)}
    return load_settings(config_file=None, environ=environ, flags=flags).settings


async def start(settings: Settings) -> None:
    async with running(settings, clock=ManualClock()):
        pass


@pytest.mark.parametrize("engine", [sandbox, upstream])
async def test_data_of_real_wallets_starts_with_no_other_engine(
    tmp_path: Path, engine: Callable[[Path], Settings]
) -> None:
    await start(unreachable(tmp_path))
    with pytest.raises(SettingsError, match=r"allowed: onchain, on the data directory"):
        await start(engine(tmp_path))


async def test_upstream_orders_end_before_another_engine_starts(
    tmp_path: Path,
) -> None:
    async with running(sandbox(tmp_path), clock=ManualClock()) as up:
        agreed = replace(terms(), order_id=ORDER, upstream_id="up-1")
        await up.service.processor.open(open_order(agreed), None, None)
    for engine in (sandbox, unreachable):
        with pytest.raises(SettingsError, match=f"allowed: upstream, .* 1 orders, such as {ORDER}"):
            await start(engine(tmp_path))

    async with running(upstream(tmp_path), clock=ManualClock()) as up:
        over = UpstreamReported(OrderStatus.EXPIRED, Report())
        await up.service.processor.apply(ORDER, over)
    await start(sandbox(tmp_path))


async def test_simulated_orders_are_over_before_an_upstream_is_used(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(sandbox(tmp_path), clock=clock) as up:
        await up.service.processor.open(open_order(replace(terms(), order_id=ORDER)), None, None)
    with pytest.raises(SettingsError, match=r"allowed: sandbox, .* not over in the sandbox"):
        await start(upstream(tmp_path))
    await expire(tmp_path, clock)
    await start(upstream(tmp_path))


async def test_real_wallets_have_no_simulated_order_in_their_books(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(sandbox(tmp_path), clock=clock) as up:
        await up.service.processor.open(open_order(replace(terms(), order_id=ORDER)), None, None)
    await expire(tmp_path, clock)
    with pytest.raises(SettingsError, match=r"allowed: sandbox, .* are the sandbox's"):
        await start(unreachable(tmp_path))


async def test_real_wallets_have_no_simulated_withdrawal(tmp_path: Path) -> None:
    item = Withdrawal("wd_0001", "arbitrum", USDC, "0x" + "0b" * 20, 5, 1, 1, 1)
    async with running(sandbox(tmp_path)) as up:
        await WithdrawalStore(up.database).add(item, None)
    with pytest.raises(SettingsError, match=r"allowed: sandbox, .* are the sandbox's"):
        await start(unreachable(tmp_path))
    with pytest.raises(SettingsError, match=r"such as wd_0001, are not over in the sandbox"):
        await start(upstream(tmp_path))


async def expire(data_dir: Path, clock: ManualClock) -> None:
    async with running(sandbox(data_dir), clock=clock) as up:
        clock.now += 24 * HOUR_MS
        await up.service.processor.apply(ORDER, DeadlinePassed())
