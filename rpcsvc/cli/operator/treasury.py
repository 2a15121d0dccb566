"""``rpcsvc treasury``: what the wallets hold, what of it is promised, what went where.

Balances come from the nodes, all else from the database, read-only, beside a running service or
without one. A node that does not answer leaves a gap that is named. What does not live here: the
sums (store/operator_books.py), the questions to nodes (settlement/onchain/readiness.py), what
``rpcsvc treasury explain`` does (explain.py).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError
from rpcsvc.cli.operator.output import is_running, onchain_settings, print_json, print_table
from rpcsvc.cli.options import Text
from rpcsvc.domain.money import USDC, XMR, Asset, format_units

if TYPE_CHECKING:
    from rpcsvc.cli.operator.nodes import Found
    from rpcsvc.settings import Settings
    from rpcsvc.settlement.onchain.readiness import MoneroFound, NetworkFound
    from rpcsvc.settlement.onchain.unrecorded import UnattributedDeposit
    from rpcsvc.store.backends.sqlite.snapshot import Snapshot
    from rpcsvc.store.operator_books import Owed, Unswept

Common = Callable[[argparse.ArgumentParser], None]
_DAY_MS: Final = 24 * 3600 * 1000
_MONERO: Final = "monero"


def add_treasury(commands: Any, common: Common) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    text = "what the wallets hold, what is reserved, owed, swept and spent on fees"
    parser = commands.add_parser(
        "treasury",
        help=text,
        description=f"{text}. Exit status: 0, or 1 when a node or wallet could not be asked.",
    )
    common(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.set_defaults(command=_treasury)
    _add_explain(parser.add_subparsers(metavar="ACTION"), common)


def _add_explain(actions: Any, common: Common) -> None:
    text = "say what a transaction was that you made by hand, so that the audit takes it as right"
    # What was given before the action holds, too.
    parser = actions.add_parser(
        "explain",
        help=text,
        description=f"{text}. Its units are read from the chain.",
        argument_default=argparse.SUPPRESS,
    )
    common(parser)
    parser.add_argument(
        "network", action=Text, metavar="NETWORK", help="monero, or a chain such as arbitrum"
    )
    parser.add_argument(
        "txid", action=Text, metavar="TXID", help="the transaction, as rpcsvc audit names it"
    )
    said = parser.add_mutually_exclusive_group(required=True)
    said.add_argument("--note", action=Text, default=None, metavar="TEXT", help="what it was for")
    said.add_argument("--take-back", action="store_true", default=False, help="forget the note")
    parser.add_argument(
        "--internal-wei",
        type=int,
        default=0,
        metavar="WEI",
        help="ether that a contract sent to the hot wallet in it: no node shows that amount",
    )
    parser.set_defaults(command=_explain)


def _explain(context: Context) -> int:
    from rpcsvc.cli.operator.explain import explain  # noqa: PLC0415 - help needs none of it

    return explain(context)


@dataclass(frozen=True, slots=True)
class _Books:
    """What the database says, by network or asset; atomic units."""

    hot_wallet: str | None
    reserved: dict[str, int]
    owed: dict[str, Owed]
    unswept: dict[str, Unswept]
    swept: dict[str, int]
    monero_fees: dict[str, int]
    gas_fees: dict[str, dict[str, int]]
    sent_today: dict[str, int]
    unattributed: list[UnattributedDeposit]


def _treasury(context: Context) -> int:
    from rpcsvc.clock import SystemClock, iso8601  # noqa: PLC0415 - help needs none of it
    from rpcsvc.logs import configure_logging  # noqa: PLC0415
    from rpcsvc.settlement.onchain.guard import PauseSwitch  # noqa: PLC0415
    from rpcsvc.settlement.onchain.wiring import caps  # noqa: PLC0415

    settings = onchain_settings(context)
    configure_logging(settings.log.format, "error")
    now = SystemClock().now_ms()
    books, found = _gather(settings, now)
    limits = caps(settings.onchain)
    problems = _problems(found)
    view = {
        "asOf": iso8601(now),
        "paused": PauseSwitch(settings.data_dir).reason(),
        "xmr": _xmr_view(found.monero, books),
        "usdc": [
            _usdc_view(item, coin, books)
            for item, coin in zip(found.networks, found.coins, strict=True)
        ],
        "caps": {
            asset.symbol: {
                "sentIn24Hours": format_units(books.sent_today[asset.symbol], asset),
                "perDay": format_units(limits[asset].per_day, asset),
                "perTransfer": format_units(limits[asset].per_transfer, asset),
            }
            for asset in (XMR, USDC)
        },
        "ofNoOrder": [_unattributed_view(item) for item in books.unattributed],
        "problems": problems,
    }
    if context.options.json:
        print_json(view)
    else:
        _print_tables(view)
    return FAILED if problems else OK


def _gather(settings: Settings, now: int) -> tuple[_Books, Found]:
    """Books first, nodes after: the database is let go before anyone is waited for."""
    from rpcsvc.cli.operator.nodes import look_at_all, recorded_wallets  # noqa: PLC0415
    from rpcsvc.store.backends.sqlite.snapshot import snapshot  # noqa: PLC0415
    from rpcsvc.store.books import BooksUnreadable  # noqa: PLC0415

    try:
        with snapshot(settings.data_dir) as taken:
            books = asyncio.run(_read(taken, now))
            recorded = asyncio.run(recorded_wallets(taken))
    except BooksUnreadable as error:
        raise UsageError(f"{error} Before the first start: rpcsvc onchain init") from error
    alone = not is_running(settings)
    found = asyncio.run(look_at_all(settings, recorded.monero, recorded.hot_wallet, alone=alone))
    return books, found


async def _read(taken: Snapshot, now: int) -> _Books:
    from rpcsvc.store.onchain_books import OnchainBooks  # noqa: PLC0415
    from rpcsvc.store.onchain_evm_deposits import SqliteEvmDepositLedger  # noqa: PLC0415
    from rpcsvc.store.onchain_unrecorded import unattributed_deposits  # noqa: PLC0415
    from rpcsvc.store.operator_books import OperatorBooks, owed, reserved  # noqa: PLC0415

    books, sums = OperatorBooks(taken), OnchainBooks(taken)
    wallet = await SqliteEvmDepositLedger(taken).wallet()
    orders = books.open_orders()
    since = now - _DAY_MS
    return _Books(
        hot_wallet=wallet.hot_address if wallet else None,
        reserved=reserved(orders, now),
        owed=owed(orders),
        unswept=books.unswept(),
        swept=books.swept(),
        monero_fees=books.monero_fees(),
        gas_fees=books.gas_fees(),
        unattributed=unattributed_deposits(taken),
        sent_today={asset.symbol: await sums.sent_since(asset, since) for asset in (XMR, USDC)},
    )


def _problems(found: Found) -> list[str]:
    monero = (found.monero.node_problem or found.monero.wallet_problem,)
    return [text for text in (*monero, *(item.problem for item in found.networks)) if text]


# --- one side each ---------------------------------------------------------------------------


def _xmr_view(found: MoneroFound, books: _Books) -> Json:
    held = found.held
    return {
        "address": found.primary_address,
        "unlocked": format_units(held.unlocked, XMR) if held else None,
        "locked": format_units(held.locked, XMR) if held else None,
        "outputs": held.outputs if held else None,
        **_promised(_MONERO, XMR, books),
        "feesPaid": {name: format_units(units, XMR) for name, units in books.monero_fees.items()},
    }


def _usdc_view(found: NetworkFound, coin: str, books: _Books) -> Json:
    from rpcsvc.settlement.onchain.readiness import coins  # noqa: PLC0415
    from rpcsvc.store.operator_books import Unswept  # noqa: PLC0415

    name, hot = found.network.name, found.hot
    left = books.unswept.get(name, Unswept(0, 0, 0))
    return {
        "network": name,
        "address": books.hot_wallet,
        "hotWallet": format_units(hot.usdc, USDC) if hot else None,
        "unswept": format_units(left.units, USDC),
        "unsweptAddresses": left.addresses,
        "arriving": format_units(left.arriving, USDC),
        "swept": format_units(books.swept.get(name, 0), USDC),
        **_promised(name, USDC, books),
        "gas": {"coin": coin, "left": coins(hot.ether) if hot else None},
        "gasPaid": {kind: coins(wei) for kind, wei in books.gas_fees.get(name, {}).items()},
    }


def _unattributed_view(item: UnattributedDeposit) -> Json:
    asset = XMR if item.network == _MONERO else USDC
    return {
        "network": item.network,
        "txid": item.txid,
        "amount": f"{format_units(item.units, asset)} {asset.symbol}",
        "address": item.address,
        "addressOf": item.order_id,
    }


def _promised(network: str, asset: Asset, books: _Books) -> Json:
    from rpcsvc.store.operator_books import Owed  # noqa: PLC0415

    owed = books.owed.get(network, Owed())
    return {
        "reserved": format_units(books.reserved.get(network, 0), asset),
        "refundsUnderWay": owed.refunds,
        "refundsOwed": format_units(owed.units, asset),
        "waitingForAddress": format_units(owed.waiting, asset),
        "ordersWaitingForAddress": owed.waiting_orders,
    }


# --- tables ----------------------------------------------------------------------------------


def _print_tables(view: Json) -> None:
    paused = view["paused"]
    sys.stdout.write(f"payouts: {'open' if paused is None else f'PAUSED: {paused}'}\n")
    _print_side("XMR", view["xmr"])
    for network in view["usdc"]:
        _print_side(f"USDC on {network['network']}", network)
    sys.stdout.write("\nsent in the last 24 hours\n")
    print_table(
        [
            (f"  {name}", f"{caps['sentIn24Hours']} of {caps['perDay']}",
             f"at most {caps['perTransfer']} in one transfer")
            for name, caps in view["caps"].items()
        ]
    )  # fmt: skip
    _print_unattributed(view["ofNoOrder"])
    for problem in view["problems"]:
        sys.stdout.write(f"\nnot asked: {problem}\n")


def _print_unattributed(unattributed: list[Json]) -> None:
    if not unattributed:
        return
    sys.stdout.write("\ndeposits that are of no order, to be paid back by hand\n")
    head = ("  AMOUNT", "NETWORK", "TRANSACTION", "THE ADDRESS IS OF")
    cells = ("amount", "network", "txid", "addressOf")
    rows = [tuple(str(item[name] or "no order") for name in cells) for item in unattributed]
    print_table([head, *((f"  {amount}", *rest) for amount, *rest in rows)])
    sys.stdout.write("once it is done: rpcsvc treasury explain NETWORK TRANSACTION --note TEXT\n")


def _print_side(title: str, side: Json) -> None:
    sys.stdout.write(f"\n{title}\n")
    print_table([(f"  {_LABELS[key]}", text) for key, text in _cells(side)])


def _cells(side: Json) -> Iterable[tuple[str, str]]:
    for key in _LABELS:
        if key in side:
            value = side[key]
            yield key, _coins(value) if key == "gas" else _cell(value)


def _coins(gas: Json) -> str:
    return f"{_cell(gas['left'])} {gas['coin']}" if gas["left"] else _cell(None)


def _cell(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, dict):
        return ", ".join(f"{_cell(each)} {name}" for name, each in value.items()) or "none"
    return str(value)


_LABELS: Final = {
    "address": "wallet",
    "unlocked": "to spend",
    "locked": "locked",
    "outputs": "outputs",
    "hotWallet": "hot wallet",
    "unswept": "on deposit addresses",
    "unsweptAddresses": "deposit addresses with money",
    "arriving": "arriving, not confirmed",
    "swept": "swept so far",
    "reserved": "reserved by open orders",
    "refundsUnderWay": "refunds under way",
    "refundsOwed": "refunds owed",
    "waitingForAddress": "waits for a refund address",
    "ordersWaitingForAddress": "orders that wait for one",
    "feesPaid": "network fees paid",
    "gas": "for gas",
    "gasPaid": "gas paid",
}
