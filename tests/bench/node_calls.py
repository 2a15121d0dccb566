"""Calls that USDC on one network makes of its node: idle, with an open order, and for a payout.

    python -m tests.bench.node_calls

Anvil mines a block each second of a clock that is set, so that the counts are the same each time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import structlog

from rpcsvc.settlement.onchain.daemon_rpc import DaemonRpc
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node import EvmClient
from tests.bench.report import Reading
from tests.regtest.daemons import Anvil
from tests.regtest.evm_payer import ETHER, HOT, USDC, USER, EvmPayer, adapter_on, evm_payer
from tests.regtest.token import compiled, deploy

NODE_CALLS: Final = "node-calls"
_SECONDS: Final = 60
SUBMIT: Final = "eth_sendRawTransaction"


class Exchanges:
    """Records the methods of each exchange with a node."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what all clients send within the block."""
        send, sent = DaemonRpc._send, self.sent

        async def counted(rpc: DaemonRpc, path: str, method: str, body: Any, *rest: Any) -> Any:
            sent.append([each["method"] for each in (body if isinstance(body, list) else [body])])
            return await send(rpc, path, method, body, *rest)

        with patch.object(DaemonRpc, "_send", counted):
            yield

    def calls(self) -> Counter[str]:
        """The calls by method."""
        return Counter(method for methods in self.sent for method in methods)


async def _minute(own: EvmPayer, adapter: EvmAdapter, *, is_awaiting: bool) -> Counter[str]:
    """The calls of a minute of scans and upkeep, each second, with a block each second."""

    async def awaiting(*_: object) -> bool:
        return is_awaiting

    made = Exchanges()
    with patch.object(EvmDepositLedger, "is_awaiting", awaiting):
        for second in range(2 * _SECONDS):
            own.clock.now += 1000
            await own.controls.mine()
            with made.counted() if second >= _SECONDS else Exchanges().counted():
                await adapter.acknowledge((await adapter.observe()).sightings)
                await adapter.maintain()
    return made.calls()


async def _payout(own: EvmPayer) -> list[list[str]]:
    """Return the exchanges of a payout, as the order layer asks for it, until it is handed over."""
    made, transfer = Exchanges(), own.transfer(USER)
    with made.counted():
        await own.pay(await own.prepared(transfer))
    end = next(at for at, methods in enumerate(made.sent) if SUBMIT in methods)
    return made.sent[: end + 1]


async def counted(directory: Path) -> tuple[Counter[str], Counter[str], list[list[str]]]:
    """The calls of an idle minute, of one with an open order, and the exchanges of a payout."""
    async with AsyncExitStack() as opened:
        code = await asyncio.to_thread(compiled)
        anvil = opened.enter_context(Anvil(directory / "anvil"))
        token = await deploy(await opened.enter_async_context(EvmClient(anvil.endpoint)), code)
        await token.mint(HOT, 1000 * USDC)
        await token.controls.set_ether(HOT, ETHER)
        own = await opened.enter_async_context(evm_payer(anvil, token, directory))
        adapter = await opened.enter_async_context(adapter_on(own, own.network))
        idle = await _minute(own, adapter, is_awaiting=False)
        busy = await _minute(own, adapter, is_awaiting=True)
        await own.connection.check()
        return idle, busy, await _payout(own)


def readings(directory: Path) -> list[Reading]:
    """The rows of the report, with the most that they may be."""
    idle, busy, payout = asyncio.run(counted(directory))
    title = "calls of an EVM node"
    return [
        Reading(NODE_CALLS, f"{title}, idle", "/min", (float(idle.total()),), under=160),
        Reading(f"{NODE_CALLS}-open", f"{title}, orders open", "/min", (float(busy.total()),), 840),
        Reading(f"{NODE_CALLS}-payout", f"{title}, a payout", "", (_total(payout),), under=20),
        Reading(
            f"{NODE_CALLS}-in-turn", "exchanges in turn, a payout", "", (float(len(payout)),), 15
        ),
    ]


def _total(exchanges: list[list[str]]) -> float:
    return float(sum(map(len, exchanges)))


def main() -> None:
    """Print the counts."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    with TemporaryDirectory() as folder:
        idle, busy, payout = asyncio.run(counted(Path(folder)))
    for title, calls in (("idle, a minute", idle), ("orders open, a minute", busy)):
        print(f"{title}: {calls.total()} calls")
        for method, number in calls.most_common():
            print(f"    {method}: {number}")
    print(f"a payout until it is handed over: {_total(payout):g} calls in {len(payout)} exchanges")
    for methods in payout:
        print(f"    {', '.join(methods)}")


if __name__ == "__main__":
    os.umask(0o077)
    main()
