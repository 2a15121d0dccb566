"""The order layer's part in signing, for tests of a wallet alone."""

from __future__ import annotations

from typing import Any

from rpcsvc.domain.order import Transfer
from rpcsvc.orders.ports.store import Commit
from rpcsvc.orders.ports.wallets import PreparedTransfer


class Recorder:
    """Puts what is signed on record, with no rows of any order. ``refusal``: raised instead."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.signed: list[PreparedTransfer] = []
        self._refusal = refusal

    async def __call__(self, signed: PreparedTransfer, commit: Commit | None = None) -> None:
        if self._refusal is not None:
            raise self._refusal
        if commit is not None:
            await commit(())
        self.signed.append(signed)


async def sign(wallet: Any, transfer: Transfer, *companions: Transfer) -> PreparedTransfer:
    """What is on record for the transfer, signed now if it was not before; as the engine does it.

    ``wallet`` has the ``recorded`` and ``prepare`` of a chain adapter.
    """
    known: PreparedTransfer | None = await wallet.recorded(transfer)
    if known is not None:
        return known
    record = Recorder()
    await wallet.prepare(transfer, companions, record)
    return record.signed[0]


def record_calls(rpc: Any, calls: list[str]) -> None:
    """Note the method of each call of a DaemonRpc."""
    send = rpc._send

    async def counted(path: str, method: str, *rest: Any) -> Any:
        calls.append(method)
        return await send(path, method, *rest)

    rpc._send = counted
