"""The order layer's part in signing, for tests of a wallet without orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcsvc.domain.order import Transfer
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.settlement.onchain.adapter import Payments
from rpcsvc.store.database import Commit


class Recorder:
    """Records signed payments without any rows of orders. ``refusal``: raised instead."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.signed: list[PreparedTransfer] = []
        self._refusal = refusal

    async def __call__(
        self, signed: Sequence[PreparedTransfer], commit: Commit | None = None
    ) -> None:
        if self._refusal is not None:
            raise self._refusal
        if commit is not None:
            await commit(())
        self.signed += signed


async def sign(payments: Payments, transfer: Transfer, *companions: Transfer) -> PreparedTransfer:
    """The recorded payment of the transfer; signs it if there is none, as the engine does."""
    known = await payments.recorded(transfer)
    if known is not None:
        return known
    record = Recorder()
    await payments.prepare(transfer, companions, record, {})
    return record.signed[0]


def record_calls(rpc: Any, calls: list[str]) -> None:
    """Record the method of each call of a DaemonRpc."""
    send = rpc._send

    async def counted(path: str, method: str, body: Any, *rest: Any) -> Any:
        calls.extend([each["method"] for each in body] if isinstance(body, list) else [method])
        return await send(path, method, body, *rest)

    rpc._send = counted
