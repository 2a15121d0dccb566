"""``rpcsvc payouts``: money on its way out, and the brake.

``list`` and ``show`` only read. ``pause`` and ``resume`` throw the switch (settlement/onchain/
guard.py), with or without a running service. ``retry`` asks the running service to try a transfer
now instead of after its pause; it signs nothing. ``adopt`` is for a restored database, while no
service runs. What does not live here: the reading (store/operator_books.py), the request's way
into the service (orders/retries.py), adopting (adopt.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from rpcsvc.cli.client import Unreachable
from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError
from rpcsvc.cli.operator.output import (
    is_running,
    onchain_settings,
    operator_books,
    print_json,
    print_table,
)
from rpcsvc.cli.options import Text
from rpcsvc.clock import iso8601
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import REFUND_BLOCKED, OnDeadline, TransferKind, TransferState

if TYPE_CHECKING:
    from rpcsvc.settings import Settings
    from rpcsvc.store.operator_books import BookedTransfer, OperatorBooks, Signed

Common = Callable[[argparse.ArgumentParser], None]
_ASSETS: Final = {asset.symbol: asset for asset in (XMR, USDC)}
_PENDING, _ALL = "pending", "all"
_LONGEST_LIST: Final = 10_000
TAKEN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05


def add_payouts(commands: Any, common: Common) -> None:
    """Hang the commands into the tree; ``common`` adds the shared options."""
    parser = commands.add_parser("payouts", help="look at outgoing money, pause and resume it")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, text: str, command: Callable[[Context], int]) -> Any:
        made = actions.add_parser(name, help=text, description=text)
        common(made)
        made.set_defaults(command=command)
        return made

    _add_list(action("list", "payouts and refunds, the newest first", _list))
    show = action("show", "everything about one payout or refund", _show)
    retry = action("retry", "have a pending one tried now instead of after its pause", _retry)
    adopt = action(
        "adopt", "say which transaction paid one, after an older database was restored", _adopt
    )
    text = (
        "say that one was paid, where nothing proves it, after an older database was restored; or"
        " end one that a reorganisation took for good"
    )
    close = action("close", text, _close)
    for one in (show, retry, adopt, close):
        one.add_argument(
            "transfer", action=Text, metavar="TRANSFER", help="its id, as payouts list shows it"
        )
    show.add_argument("--full", action="store_true", help="do not shorten the address")
    named = "the transaction, as rpcsvc audit names it"
    adopt.add_argument("txid", action=Text, metavar="TXID", help=named)
    close.add_argument(
        "txid",
        action=Text,
        nargs="?",
        metavar="TXID",
        help=f"{named}; none for a signed one that a reorganisation took for good",
    )
    close.add_argument(
        "--note", action=Text, required=True, help="how you know; kept, signed by the service's key"
    )
    adopt.add_argument(
        "--tx-key",
        action=Text,
        metavar="KEY",
        help="of an XMR transaction whose key the wallet has lost",
    )
    pause = action("pause", "stop all outgoing money, at once and over restarts", _pause)
    pause.add_argument(
        "--reason", action=Text, required=True, type=_reason, help="shown in health and logs"
    )
    action("resume", "let money out again", _resume)


def _add_list(parser: argparse.ArgumentParser) -> None:
    states = (_PENDING, _ALL, *(state.value for state in TransferState))
    parser.add_argument(
        "--state", choices=states, default=_PENDING, help="pending: all that are not over (default)"
    )
    parser.add_argument(
        "--limit", type=_count, default=100, metavar="N", help="at most so many (100)"
    )
    parser.add_argument("--full", action="store_true", help="do not shorten addresses")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _reason(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must say why: whoever finds payouts paused reads it")
    return " ".join(text.split())


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LONGEST_LIST):
        raise argparse.ArgumentTypeError(f"must be 1 to {_LONGEST_LIST}, not {text!r}")
    return int(text)


# --- looking ---------------------------------------------------------------------------------


def _list(context: Context) -> int:
    from rpcsvc.store.operator_books import PENDING  # noqa: PLC0415 - help needs no database

    settings, options = context.settings(), context.options
    named = {_PENDING: PENDING, _ALL: tuple(TransferState)}
    states = named.get(options.state) or (TransferState(options.state),)
    paused = _paused(settings)
    with operator_books(settings) as books:
        found = books.transfers(states, options.limit)
        views = [_view(books, item, paused, full=options.full) for item in found]
    if options.json:
        print_json({"paused": paused, "transfers": views})
        return OK
    if paused is not None:
        sys.stdout.write(f"PAUSED: {paused}\n")
    _print_list(views)
    return OK


def _print_list(views: list[Json]) -> None:
    if not views:
        sys.stdout.write("none\n")
        return
    columns = ("transferId", "state", "amount", "network", "address", "txid", "since")
    head = ("TRANSFER", "STATE", "AMOUNT", "NETWORK", "TO", "TRANSACTION", "SINCE")
    rows = [tuple(str(view[name] or "-") for name in columns) for view in views]
    print_table([head, *rows])
    sys.stdout.write("\nWhat comes next: rpcsvc payouts show TRANSFER\n")


def _show(context: Context) -> int:
    settings, wanted = context.settings(), context.options.transfer
    paused = _paused(settings)
    with operator_books(settings) as books:
        item = _find(books, wanted)
        view = _view(books, item, paused, full=context.options.full)
    receipt = json.loads(item.receipt) if item.receipt else None
    print_json({**view, "receipt": receipt, "paused": paused})
    return OK


def _find(books: OperatorBooks, wanted: str) -> BookedTransfer:
    found = books.transfer(wanted)
    if found is not None:
        return found
    order = books.order(wanted)
    if order is None:
        raise UsageError(f"There is no transfer {wanted}. They are listed by: rpcsvc payouts list")
    names = ", ".join(item.transfer_id for item in order.transfers) or "none"
    raise UsageError(f"{wanted} is an order; its transfers: {names}")


def _view(books: OperatorBooks, item: BookedTransfer, paused: str | None, *, full: bool) -> Json:
    from rpcsvc.logs import shorten_addresses  # noqa: PLC0415 - help needs none of it

    signed = books.signed(item.transfer_id)
    asset = _ASSETS[item.asset]
    return {
        "transferId": item.transfer_id,
        "orderId": item.order_id,
        "orderStatus": item.order_status.value,
        "kind": item.kind,
        "state": item.state.value,
        "amount": f"{format_units(item.units, asset)} {asset.symbol}",
        "units": str(item.units),
        "network": item.network,
        "address": item.address if full else shorten_addresses(item.address),
        "txid": next((each.txid for each in signed if each.block is not None), item.txid),
        "attempts": [
            {"txid": each.txid, "at": iso8601(each.made_at), "wallet": each.wallet_state,
             "block": each.block}
            for each in signed
        ],
        "since": iso8601(item.since),
        "reason": item.reason,
        "next": _off_chain(item, signed) or _next(item, paused),
    }  # fmt: skip


# --- what the service does next --------------------------------------------------------------


def _next(item: BookedTransfer, paused: str | None) -> str:
    """What happens to a transfer by itself, in words for the operator."""
    if item.state.is_final:
        return _ended(item)
    if paused is not None and item.state is not TransferState.PUBLISHED:
        return f"nothing while payouts are paused{_withdrawal(item)}"
    return f"{_NEXT[item.state]}{_withdrawal(item)}"


def _off_chain(item: BookedTransfer, signed: Sequence[Signed]) -> str | None:
    """What to do for a settled transfer that a reorganisation took off its chain."""
    is_settled = item.state is TransferState.SETTLED and bool(signed)
    if not is_settled or any(each.block is not None for each in signed):
        return None
    return (
        "a reorganisation took it off its chain, and the same bytes are published again; if health"
        f" names it for hours: rpcsvc payouts close {item.transfer_id} --note TEXT"
    )


def _withdrawal(item: BookedTransfer) -> str:
    """When a payout that is not signed is taken back."""
    is_payout = item.kind == TransferKind.PAYOUT.value
    waits = item.state is TransferState.PLANNED and item.on_deadline is OnDeadline.REFUND
    if not (is_payout and waits and item.deadline_at is not None):
        return ""
    return f"; if it is not signed by {iso8601(item.deadline_at)}, the order is refunded"


def _is_blocked(item: BookedTransfer) -> bool:
    """Whether it is a refund that the agreed refund address has refused."""
    failed = item.state is TransferState.FAILED and item.kind == TransferKind.REFUND.value
    return failed and item.action_required == REFUND_BLOCKED


def _ended(item: BookedTransfer) -> str:
    if item.state is TransferState.SETTLED:
        return "nothing: it is paid, and its network calls it final"
    if item.state is TransferState.CANCELLED:
        return "nothing: it was taken back before it was signed, and the deposit is refunded"
    if _is_blocked(item):
        again = f"rpcsvc payouts retry {item.transfer_id}"
        return f"the agreed refund address refused it; to try once more: {again}"
    if item.action_required is not None:
        return f"waits for an address: rpcsvc refund {item.order_id} --to ADDRESS"
    return "nothing for this one: what it was to pay goes back by a refund of the order"


_NEXT: Final = {
    TransferState.PLANNED: "it is signed as soon as its wallet can; tried again within a minute",
    TransferState.PREPARED: "the signed bytes are published",
    TransferState.PUBLISHED: "its network is asked until the transaction is deep enough",
    TransferState.UNKNOWN: (
        "its network is asked for the transaction; if it is not there, the same bytes are"
        " published again"
    ),
}


# --- retry -----------------------------------------------------------------------------------


def _retry(context: Context) -> int:
    settings, wanted = context.settings(), context.options.transfer
    with operator_books(settings) as books:
        item = _find(books, wanted)
    if item.state.is_final and not _is_blocked(item):
        return _refuse(f"{wanted} is {item.state.value}, which is final: {_ended(item)}.")
    paused = _paused(settings)
    if paused is not None:
        return _refuse(f"Payouts are paused ({paused}): first rpcsvc payouts resume")
    if not is_running(settings):
        raise Unreachable(
            f"No service runs on {settings.data_dir}. Start it: the first thing that it does is"
            f" to try {wanted}."
        )
    _ask(settings, wanted)
    sys.stdout.write(f"{wanted} is tried now. See how it goes: rpcsvc payouts show {wanted}\n")
    return OK


def _adopt(context: Context) -> int:
    from rpcsvc.cli.recovery.adopt import adopt  # noqa: PLC0415 - help needs none of it

    return adopt(context)


def _close(context: Context) -> int:
    from rpcsvc.cli.recovery.close import close  # noqa: PLC0415 - help needs none of it

    return close(context)


def _ask(settings: Settings, transfer_id: str) -> None:
    """Leave the request and wait until the service has it. Raises Unreachable."""
    from rpcsvc.orders.retries import RetryRequests  # noqa: PLC0415 - help needs none of it

    requests = RetryRequests(settings.data_dir)
    try:
        requests.add(transfer_id)
    except OSError as error:
        raise UsageError(f"{settings.data_dir} can't be written: {error.strerror}") from error
    give_up = time.monotonic() + TAKEN_SECONDS
    while requests.is_waiting(transfer_id):
        if time.monotonic() > give_up:
            requests.withdraw(transfer_id)
            raise Unreachable("The service did not take the request up. Look at: rpcsvc health")
        time.sleep(_LOOK_SECONDS)


def _refuse(text: str) -> int:
    sys.stderr.write(f"rpcsvc: {text}\n")
    return FAILED


# --- the switch ------------------------------------------------------------------------------


def _pause(context: Context) -> int:
    from rpcsvc.settlement.onchain.guard import PauseSwitch  # noqa: PLC0415

    settings = onchain_settings(context)
    try:
        PauseSwitch(settings.data_dir).pause(context.options.reason)
    except OSError as error:
        raise UsageError(
            f"The switch in {settings.data_dir} can't be thrown: {error.strerror}. PAYOUTS GO ON."
            " To stop them now, stop the service."
        ) from error
    where = settings.data_dir.absolute()
    if not _has_service(settings):
        return _refuse(
            f"No service has ever run on {where}. One that begins there is paused from its start;"
            " THE PAYOUTS OF ANY OTHER GO ON. Give that one's --data-dir and --config."
        )
    sys.stdout.write(
        f"Payouts of the service on {where} are paused: nothing more is signed or published. What a"
        " network has already can't be called back.\nOrders whose payout is not signed in time are"
        " refunded, once money may go out again.\nGo on with: rpcsvc payouts resume\n"
    )
    return OK


def _resume(context: Context) -> int:
    from rpcsvc.settlement.onchain.guard import PauseSwitch  # noqa: PLC0415

    settings = onchain_settings(context)
    switch = PauseSwitch(settings.data_dir)
    before = switch.reason()
    try:
        switch.resume()
    except OSError as error:
        raise UsageError(
            f"The switch in {settings.data_dir} can't be turned: {error.strerror}."
        ) from error
    where = settings.data_dir.absolute()
    if before is None:
        sys.stdout.write(
            f"Payouts of the service on {where} were not paused. If health says that the pause is"
            " in memory only, the service writes it as soon as it can: resume then.\n"
        )
    else:
        sys.stdout.write(f"Payouts of the service on {where} go on. They were paused: {before}\n")
    return OK


def _has_service(settings: Settings) -> bool:
    """Whether one runs on the data directory, or ever did: its database may be lost while it runs.

    A directory that is there by chance, such as /var where ./var is meant, has neither.
    """
    from rpcsvc.store.backends.sqlite.database import DATABASE_NAME  # noqa: PLC0415 - help needs no database

    return is_running(settings) or (settings.data_dir / DATABASE_NAME).exists()


def _paused(settings: Settings) -> str | None:
    from rpcsvc.settlement.onchain.guard import PauseSwitch  # noqa: PLC0415

    return PauseSwitch(settings.data_dir).reason() if settings.engine == "onchain" else None
