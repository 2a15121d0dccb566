"""The admin methods of withdrawals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import orjson
from pydantic import Field

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import format_units
from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.operations.admin import MOST_LISTED, admin_row
from rpcsvc.operations.params import Params
from rpcsvc.operations.service import Call, Cli, Effect, Flat, Service
from rpcsvc.orders.withdrawals import (
    WithdrawalRefused,
    WithdrawalRequest,
    Withdrawals,
    read_request,
)
from rpcsvc.strict_json import Json


class WithdrawalParams(Params):
    """A withdrawal: ``amount`` in whole coins; ``to``: one of ``inventory.withdraw_to``."""

    withdrawal_id: str
    network: str
    amount: str
    to: str


class WithdrawalsParams(Params):
    """How many withdrawals to list."""

    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 100


def _view(withdrawals: Withdrawals, item: Withdrawal) -> Json:
    return {
        "withdrawalId": item.withdrawal_id,
        "network": item.network,
        "asset": item.asset.symbol,
        "amount": format_units(item.units, item.asset),
        "fee": format_units(item.fee, item.asset),
        "address": item.address,
        "state": item.state.value,
        "txid": item.txid,
        "createdAt": iso8601(item.created_at),
        "since": iso8601(item.changed_at),
        "reason": item.reason,
        "waitsFor": withdrawals.waits_for(item.withdrawal_id),
        "receipt": None if item.receipt is None else orjson.loads(item.receipt),
    }


async def _answer(
    withdrawals: Withdrawals,
    act: Callable[[WithdrawalRequest], Awaitable[Withdrawal]],
    params: WithdrawalParams,
) -> Flat:
    given = (params.withdrawal_id, params.network, params.amount, params.to)
    try:
        item = await act(read_request(*given))
    except WithdrawalRefused as refused:
        return Flat({"isMade": False, "withdrawal": None, "refused": str(refused)})
    is_made = await withdrawals.find(item.withdrawal_id) is not None
    view = _view(withdrawals, item)
    return Flat({"isMade": is_made, "withdrawal": view, "refused": None})


async def preview(
    withdrawals: Withdrawals, _service: Service, params: WithdrawalParams, _call: Call
) -> Flat:
    """The withdrawal that would be made, or is on record by its id. Raises InvalidInput."""
    return await _answer(withdrawals, withdrawals.preview, params)


async def make(
    withdrawals: Withdrawals, _service: Service, params: WithdrawalParams, _call: Call
) -> Flat:
    """Withdraw to an address of the settings; once for each id. Raises InvalidInput."""
    return await _answer(withdrawals, withdrawals.make, params)


async def listed(
    withdrawals: Withdrawals, _service: Service, params: WithdrawalsParams, _call: Call
) -> Flat:
    """Withdrawals, the newest first, and the addresses that may be paid."""
    found = [_view(withdrawals, each) for each in await withdrawals.latest(params.limit)]
    allowed = {name: list(each) for name, each in withdrawals.allowed.items()}
    return Flat({"withdrawals": found, "allowed": allowed})


WITHDRAWALS: Final = (
    admin_row("withdrawals.preview", WithdrawalParams, preview),
    admin_row("withdrawals.make", WithdrawalParams, make, Effect.MOVES_MONEY),
    admin_row(
        "withdrawals.list",
        WithdrawalsParams,
        listed,
        cli=Cli(
            "treasury withdrawals",
            "withdrawals, the newest first, and the addresses that may be paid",
            more=".",
            prints="a table",
            rows="withdrawals",
            columns={
                "WITHDRAWAL": "{withdrawalId}",
                "STATE": "{state}",
                "AMOUNT": "{amount} {asset}",
                "NETWORK": "{network}",
                "TO": "{address}",
                "TRANSACTION": "{txid}",
                "SINCE": "{since}",
            },
        ),
    ),
)
