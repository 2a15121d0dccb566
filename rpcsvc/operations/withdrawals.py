"""The admin methods of withdrawals, over the UNIX socket only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import format_units
from rpcsvc.domain.withdrawals import Withdrawal
from rpcsvc.operations.admin import admin_row
from rpcsvc.operations.admin_models import (
    WithdrawalList,
    WithdrawalParams,
    WithdrawalResult,
    WithdrawalsParams,
    WithdrawalView,
)
from rpcsvc.operations.service import Call, Effect, Flat, Operation, Service
from rpcsvc.orders.withdrawals import (
    WithdrawalRefused,
    WithdrawalRequest,
    Withdrawals,
    read_request,
)


def withdrawal_operations(withdrawals: Withdrawals) -> tuple[Operation, ...]:
    """The methods of a service with wallets."""

    def view(item: Withdrawal) -> WithdrawalView:
        return WithdrawalView(
            withdrawal_id=item.withdrawal_id,
            network=item.network,
            asset=item.asset.symbol,
            amount=format_units(item.units, item.asset),
            fee=format_units(item.fee, item.asset),
            address=item.address,
            state=item.state.value,
            txid=item.txid,
            created_at=iso8601(item.created_at),
            since=iso8601(item.changed_at),
            reason=item.reason,
            waits_for=withdrawals.waits_for(item.withdrawal_id),
            receipt=None if item.receipt is None else orjson.loads(item.receipt),
        )

    async def answer(
        act: Callable[[WithdrawalRequest], Awaitable[Withdrawal]], params: WithdrawalParams
    ) -> Flat:
        given = (params.withdrawal_id, params.network, params.amount, params.to)
        try:
            item = await act(read_request(*given))
        except WithdrawalRefused as refused:
            return WithdrawalResult(is_made=False, refused=str(refused)).flat()
        is_made = await withdrawals.find(item.withdrawal_id) is not None
        return WithdrawalResult(is_made=is_made, withdrawal=view(item)).flat()

    async def preview(_service: Service, params: WithdrawalParams, _call: Call) -> Flat:
        """The withdrawal that would be made, or is on record by its id. Raises InvalidInput."""
        return await answer(withdrawals.preview, params)

    async def make(_service: Service, params: WithdrawalParams, _call: Call) -> Flat:
        """Withdraw to an address of the settings; once for each id. Raises InvalidInput."""
        return await answer(withdrawals.make, params)

    async def listed(_service: Service, params: WithdrawalsParams, _call: Call) -> Flat:
        """Withdrawals, the newest first, and the addresses that may be paid."""
        found = [view(each) for each in await withdrawals.latest(params.limit)]
        allowed = {name: list(each) for name, each in withdrawals.allowed.items()}
        return WithdrawalList(withdrawals=found, allowed=allowed).flat()

    return (
        admin_row("withdrawals.preview", WithdrawalParams, WithdrawalResult, preview),
        admin_row("withdrawals.make", WithdrawalParams, WithdrawalResult, make, Effect.MOVES_MONEY),
        admin_row("withdrawals.list", WithdrawalsParams, WithdrawalList, listed),
    )
