"""``rpcsvc refund ORDER --to ADDR``: says where the deposit of an order goes back to.

It is the event that the order's owner causes by a support request with the order's session; the
operator has the session from the database. Only an order that waits for an address takes one. What
does not live here: the rules (domain/refunds.py, domain/refunds.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rpcsvc.cli.client import call_rpc, socket_endpoint
from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError, in_process
from rpcsvc.cli.operator.output import operator_books
from rpcsvc.cli.options import Text
from rpcsvc.domain.addresses import MoneroNetwork, parse_evm_address, parse_monero_address
from rpcsvc.domain.money import Asset, format_units
from rpcsvc.domain.order import REFUND_ADDRESS, Order
from rpcsvc.errors import InputError
from rpcsvc.ids import request_id, system_random

if TYPE_CHECKING:
    from rpcsvc.settings import Settings

Common = Callable[[argparse.ArgumentParser], None]
_SUPPORT: Final = "support.create"


def add_refund(commands: Any, common: Common) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    text = "set the address that an order's deposit goes back to, if it waits for one"
    parser = commands.add_parser("refund", help=text, description=text)
    common(parser)
    parser.add_argument("order", action=Text, metavar="ORDER", help="the order's id")
    parser.add_argument(
        "--to", action=Text, required=True, metavar="ADDR", help="on the deposit's network"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(command=_refund)


def _refund(context: Context) -> int:
    settings, options = context.settings(), context.options
    order, units = _waiting_order(settings, options.order)
    address = _address(settings, order, options.to)
    asset = order.terms.deposit_asset
    if not options.yes:
        _confirm(order, units, asset, address)
    envelope = _send(context, settings, order, address)
    given = envelope["data"].get("refundAddress")
    if not envelope["ok"] or not given or not given["accepted"]:
        reason = envelope.get("error", {}).get("message", "the order does not wait any more")
        sys.stderr.write(f"rpcsvc: not set: {reason}\n")
        return FAILED
    sys.stdout.write(
        f"{order.order_id} is refunded to {address}. See how it goes: rpcsvc payouts list\n"
    )
    return OK


def _waiting_order(settings: Settings, order_id: str) -> tuple[Order, int]:
    """The order, and the deposit units that go back. Raises UsageError when none waits."""
    from rpcsvc.store.operator_books import waiting_units  # noqa: PLC0415 - help needs no database

    with operator_books(settings) as books:
        order = books.order(order_id)
    if order is None:
        raise UsageError(f"There is no order {order_id}.")
    if order.action_required != REFUND_ADDRESS:
        refunds = ", ".join(f"{item.transfer_id} ({item.state.value})" for item in order.refunds)
        if order.terms.refund_address is not None:
            raise UsageError(
                f"{order_id} was made with the refund address {order.terms.refund_address}: its"
                " refunds go there and nowhere else. To try one that failed again: rpcsvc payouts"
                f" retry TRANSFER. Its refunds: {refunds or 'none'}."
            )
        raise UsageError(
            f"{order_id} is {order.status.value} and does not wait for a refund address."
            f" Its refunds: {refunds or 'none'}. An address that was given is not changed."
        )
    return order, waiting_units(order)


# --- the address -----------------------------------------------------------------------------


def _address(settings: Settings, order: Order, text: str) -> str:
    """The address, normalised, of the deposit's network. Raises UsageError."""
    try:
        address = _parsed(settings, order, text)
    except InputError as error:
        raise UsageError(f"--to: {error.message}") from error
    with operator_books(settings) as books:
        if books.is_own_address(address):
            raise UsageError("--to: that is an address of the service itself.")
    return address


def _parsed(settings: Settings, order: Order, text: str) -> str:
    from rpcsvc.chains_file import read_chains  # noqa: PLC0415 - help needs none of it

    if order.terms.senders_can_be_refunded:
        contracts = read_chains(settings.chains_file).token_contracts
        return parse_evm_address(text, field="--to", forbidden=contracts)
    return parse_monero_address(text, field="--to", networks=_monero_networks(settings)).text


def _monero_networks(settings: Settings) -> frozenset[MoneroNetwork]:
    if settings.engine == "sandbox":
        return frozenset(MoneroNetwork)
    if settings.engine == "upstream":
        return frozenset({MoneroNetwork(settings.upstream.monero_network)})
    name = settings.onchain.monero_network
    # Addresses of a regtest chain are those of mainnet.
    return frozenset({MoneroNetwork.MAINNET if name == "regtest" else MoneroNetwork(name)})


def _confirm(order: Order, units: int, asset: Asset, address: str) -> None:
    """Ask on the terminal. Raises UsageError for anything but yes."""
    amount = f"{format_units(units, asset)} {asset.symbol}"
    if not sys.stdin.isatty():
        raise UsageError(f"{amount} would go to {address}. Not on a terminal: add --yes.")
    sys.stderr.write(
        f"{order.order_id}: {amount}, less the network's fee, go to\n  {address}\n"
        "This can't be taken back. Type yes: "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip() != "yes":
        raise UsageError("Nothing was changed.")


# --- the call --------------------------------------------------------------------------------


def _send(context: Context, settings: Settings, order: Order, address: str) -> Json:
    """Over the socket of the service that runs, else in this process."""
    params = {
        "message": "The operator set the refund address.",
        "category": "operator",
        "orderId": order.order_id,
        "sessionId": order.terms.session_id,
        "walletAddress": address,
    }
    endpoint = socket_endpoint(settings.data_dir)
    if endpoint is not None:
        method = f"{settings.brand.slug}.{_SUPPORT}"
        return call_rpc(endpoint, method, params, request_id=None, token=None)
    return _call_in_process(context, settings, params)


def _call_in_process(context: Context, settings: Settings, params: Json) -> Json:
    from rpcsvc.logs import configure_logging  # noqa: PLC0415 - a server does its own logging
    from rpcsvc.operations.table import OPERATIONS  # noqa: PLC0415 - and has its own table

    configure_logging(settings.log.format, "warning")
    support = next(item for item in OPERATIONS if item.name == _SUPPORT)

    async def call() -> bytes:
        async with context.local(settings) as service:
            return await service.call(support, params, request_id(system_random), None)

    with in_process(settings):
        return dict(json.loads(asyncio.run(call())))
