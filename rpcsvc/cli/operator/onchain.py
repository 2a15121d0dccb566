"""``rpcsvc onchain init``: makes missing keys, and lists what a start still needs.

It pays nothing and takes no order. It reads the database itself, since no service may run yet;
next to a running service it reads a snapshot and makes no keys.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import ClientSession

from rpcsvc.cli.context import FAILED, OK, Context, Once, TextOption, UsageError, add_command, say
from rpcsvc.cli.operator.service import (
    is_running,
    onchain_settings,
    print_json,
    server_database,
)
from rpcsvc.cli.recovery.deposits import reread_deposits, skip_addresses
from rpcsvc.clock import SystemClock
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.errors import Unavailable
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.rates.sources import (
    MedianRate,
    rate_source,
)
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain import readiness, wiring
from rpcsvc.settlement.onchain.evm.keys import (
    HOT_WALLET_INDEX,
    HdKeys,
    KeyFileRefused,
    OnchainExtraMissing,
    create_mnemonic,
    read_mnemonic,
)
from rpcsvc.settlement.onchain.readiness import ReadinessCheck
from rpcsvc.settlement.onchain.wiring import key_path
from rpcsvc.store.backends.sqlite.database import (
    DATABASE_NAME,
    DataDirInUse,
    OwnerLock,
    empty_snapshot,
    snapshot,
)
from rpcsvc.store.database import BooksUnreadable
from rpcsvc.treasury.wallets import Recorded, read_wallets, recorded_wallets

_MOST_SKIPPED: Final = 100_000
_MOST_DIGITS: Final = 15


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("onchain", help="set up the engine onchain")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "make missing keys, and check what the engine needs"
    more = ". Exit status: 0 ready, 1 something is missing."
    init = add_command(actions, "init", text, _init, more)
    init.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    _add_skip(actions)
    _add_reread(actions)


def _add_skip(actions: Any) -> None:
    text = "hand out none of the next N deposit addresses of each asset, after a restored backup"
    more = ": orders that the database has lost may have them. The service must not be running."
    skip = add_command(actions, "skip-addresses", text, skip_addresses, more)
    skip.add_argument(
        "count",
        type=_count,
        metavar="N",
        help="at least as many as orders can have been made since the backup",
    )
    skip.add_argument(
        "--rescan",
        action="store_true",
        help="have the Monero wallet scan the chain again, if it was restored from its words:"
        " that may take hours",
    )


def _add_reread(actions: Any) -> None:
    text = "have the USDC deposits of a network read again from a block on"
    more = (
        ", after its node left one out. What is known stays as it is. The service must not be"
        " running: its next start reads them."
    )
    again = add_command(actions, "reread", text, reread_deposits, more)
    again.add_argument("network", action=TextOption, metavar="NETWORK", help="such as arbitrum")
    again.add_argument(
        "--from",
        action=Once,
        dest="first",
        type=_block,
        required=True,
        metavar="BLOCK",
        help="the block of the deposit, or an earlier one",
    )


def _block(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise argparse.ArgumentTypeError(f"must be the number of a block, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_SKIPPED):
        raise argparse.ArgumentTypeError(f"must be 1 to {_MOST_SKIPPED}, not {text!r}")
    return int(text)


def _init(context: Context) -> int:
    settings = onchain_settings(context)
    configure_logging(settings.log.format, "error")
    with _owning(settings) as alone:
        checks, hot_wallet = _checks(settings, _recorded(settings), alone=alone)
    _print(checks, hot_wallet, as_json=context.options.json)
    return OK if all(check.ok for check in checks) else FAILED


def _recorded(settings: Settings) -> Recorded:
    """The wallets recorded by an earlier start of the service. Raises UsageError."""
    if settings.postgresql_url is not None:
        return asyncio.run(_recorded_by_server(settings))
    is_new = not (settings.data_dir / DATABASE_NAME).exists()
    try:
        with empty_snapshot() if is_new else snapshot(settings.data_dir) as taken:
            return asyncio.run(recorded_wallets(taken))
    except BooksUnreadable as error:
        raise UsageError(str(error)) from error


async def _recorded_by_server(settings: Settings) -> Recorded:
    async with server_database(settings) as database:
        return await recorded_wallets(database)


@contextmanager
def _owning(settings: Settings) -> Iterator[bool]:
    """Lock the data directory; False if a service runs on it. Raises UsageError."""
    lock = OwnerLock(settings.data_dir)
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except DataDirInUse:
        yield False
        return
    except OSError as error:
        raise UsageError(f"{settings.data_dir} can't be used: {error.strerror}.") from error
    try:
        yield not is_running(settings)
    finally:
        lock.release()


def _checks(
    settings: Settings, recorded: Recorded, *, alone: bool
) -> tuple[list[ReadinessCheck], str | None]:
    """The result of every inspection, and the hot wallet's address if there is one."""
    key, hot_wallet = _key_check(settings, recorded.hot_wallet, alone=alone)
    found = asyncio.run(_poll(settings, recorded, hot_wallet, alone=alone))
    return [key, *found], hot_wallet


# --- keys ------------------------------------------------------------------------------------


def _key_check(
    settings: Settings, recorded: str | None, *, alone: bool
) -> tuple[ReadinessCheck, str | None]:
    """Check that the mnemonic exists and is the right one; make one only if none was ever
    recorded.
    """
    path = key_path(settings.onchain, settings.data_dir)
    try:
        is_made = _is_missing(path) and recorded is None and alone
        if is_made:
            create_mnemonic(path, system_random)
        address = _hot_address(path)
    except KeyFileRefused as refused:
        remedy = "See docs/operate/onchain.md, Keys."
        if recorded is not None:
            remedy = f"Put the mnemonic back whose hot wallet is {recorded}."
        return ReadinessCheck("keys", False, str(refused), remedy), recorded
    except OnchainExtraMissing as missing:
        return ReadinessCheck(
            "keys", False, str(missing), "pip install 'rpcsvc[onchain]'"
        ), recorded
    if recorded not in (None, address):
        detail = f"{path} is another mnemonic: its hot wallet is {address}"
        return ReadinessCheck("keys", False, detail, f"Put the one back of {recorded}."), recorded
    detail = f"{path}, hot wallet {address}"
    if not is_made:
        return ReadinessCheck("keys", True, detail), address
    advice = "Write its 24 words down and keep them safe: they control the money."
    return ReadinessCheck("keys", True, f"made {detail}", advice), address


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # reading it reports the reason
    return False


def _hot_address(path: Path) -> str:
    return HdKeys(read_mnemonic(path)).address(HOT_WALLET_INDEX)


# --- nodes -----------------------------------------------------------------------------------


async def _poll(
    settings: Settings, recorded: Recorded, hot_wallet: str | None, *, alone: bool
) -> list[ReadinessCheck]:
    """Ask every node and rate source once. Raises SettingsError."""
    found = await read_wallets(settings, recorded.monero, hot_wallet, alone=alone)
    floors = wiring.floors(settings.onchain)
    checks = list(readiness.monero_checks(found.monero, found.options, floors[XMR]))
    for network, coin in zip(found.networks, found.coins, strict=True):
        checks += readiness.network_checks(network, hot_wallet, coin)
    if hot_wallet is not None:
        floor = readiness.usdc_floor_check(found.networks, hot_wallet, floors[USDC])
        checks += [floor] if floor else []
    return [*checks, await _rate_check(settings)]


async def _rate_check(settings: Settings) -> ReadinessCheck:
    source = rate_source(settings.rates, SystemClock()).source
    try:
        if isinstance(source, MedianRate):
            async with ClientSession() as session:
                await source.refresh(session)
        rate = source.rate()
    except Unavailable as error:
        remedy = (
            "Let this machine reach the tickers of rates.sources, name others, or set"
            " rates.fixed_usdc_per_xmr."
        )
        return ReadinessCheck("rates", False, error.message, remedy)
    shown = format_units(rate.usdc_per_xmr, USDC)
    return ReadinessCheck("rates", True, f"{shown} USDC for one XMR ({rate.source})")


# --- the answer ------------------------------------------------------------------------------


def _print(checks: list[ReadinessCheck], hot_wallet: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ok": all(check.ok for check in checks),
                "hotWallet": hot_wallet,
                "checks": [
                    {"name": c.name, "ok": c.ok, "detail": c.detail, "do": c.remedy} for c in checks
                ],
            }
        )
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = "ok     " if check.ok else "MISSING"
        say(f"{mark}  {check.name.ljust(width)}  {check.detail}\n")
        if check.remedy is not None:
            say(f"         {' ' * width}  -> {check.remedy}\n")
    missing = sum(not check.ok for check in checks)
    ready = f"Missing: {missing}" if missing else "Ready. Start with: rpcsvc serve"
    say(f"{ready}\n")
