"""Calls that USDC on one network makes of its node: idle, with an open order, and for a payout.

    python -m tests.bench.node_calls

Anvil mines by a clock that is set, so that the counts are the same each time. Its pending block is
a pool, as Ethereum's is; of a network without one it is the newest block.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import structlog
from msgspec.structs import replace

from rpcsvc.orders.scheduler.worker import TICK_MS
from rpcsvc.settlement.onchain.daemon_rpc import DaemonRpc
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, EvmNetworkAdapter
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node import EvmClient
from tests.bench.report import Reading
from tests.regtest.daemons import Anvil
from tests.regtest.evm_payer import ETHER, HOT, USDC, USER, EvmPayer, adapter_on, evm_payer
from tests.regtest.token import compiled, deploy

NODE_CALLS: Final = "node-calls"
_TICKS: Final = 60_000 // TICK_MS
SUBMIT: Final = "eth_sendRawTransaction"


class Kind(NamedTuple):
    """A kind of chain: the seconds between blocks, and whether its nodes show a pool."""

    block_seconds: float
    has_pool: bool

    def __str__(self) -> str:
        pool = "a pool" if self.has_pool else "no pool"
        return f"a block each {self.block_seconds:g} s, {pool}"


# The six chains: Arbitrum; Base and OP; Polygon and Avalanche; Ethereum.
CHAINS: Final = {Kind(0.25, False): 1, Kind(2, False): 2, Kind(2, True): 2, Kind(12, True): 1}


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


async def _minute(
    own: EvmPayer, network: EvmNetworkAdapter, kind: Kind, *, is_awaiting: bool
) -> Counter[str]:
    """The calls of a minute in which blocks come regularly: the network is scanned as often as the
    worker does, and its payments are looked after each second.
    """

    async def awaiting(*_: object) -> bool:
        return is_awaiting

    async def pending(client: EvmClient, *, seconds: float) -> Any:
        which = "pending" if kind.has_pool else "latest"
        return await client.rpc.act("eth_getBlockByNumber", [which, True], seconds=seconds)

    made, mined = Exchanges(), 0
    with (
        patch.object(EvmDepositLedger, "is_awaiting", awaiting),
        patch.object(EvmClient, "pending_block", pending),
    ):
        for tick in range(2 * _TICKS):
            own.clock.now += TICK_MS
            due = int((tick + 1) * TICK_MS / (1000 * kind.block_seconds)) - mined
            if due:
                await own.controls.mine(due)
                mined += due
            with made.counted() if tick >= _TICKS else Exchanges().counted():
                await network.acknowledge((await network.observe()).sightings)
                if not tick * TICK_MS % 1000:
                    await network.maintain()
    return made.calls()


async def _replica(own: EvmPayer, adapter: EvmAdapter) -> Counter[str]:
    """The calls of a replica that does not settle, in the minute after its first look."""
    made, until = Exchanges(), None

    async def pause(seconds: float) -> None:
        nonlocal until
        if until is None:
            made.sent.clear()
            until = own.clock.now + 60_000
        if own.clock.now >= until:
            raise asyncio.CancelledError
        own.clock.now += round(seconds * 1000)

    with made.counted(), suppress(asyncio.CancelledError):
        await adapter.look(pause)
    return made.calls()


async def _payout(own: EvmPayer) -> list[list[str]]:
    """Return the exchanges of a payout, as the order layer asks for it, until it is handed over."""
    made, transfer = Exchanges(), own.transfer(USER)
    with made.counted():
        await own.pay(await own.prepared(transfer))
    end = next(at for at, methods in enumerate(made.sent) if SUBMIT in methods)
    return made.sent[: end + 1]


class Counted(NamedTuple):
    """The calls of a minute, idle, of a replica, and with an order by kind; and the exchanges of a
    payout.
    """

    idle: Counter[str]
    replica: Counter[str]
    open: dict[Kind, Counter[str]]
    payout: list[list[str]]


async def counted(directory: Path) -> Counted:
    """Count the calls while nothing is under way, and while an order awaits a deposit."""
    async with AsyncExitStack() as opened:
        code = await asyncio.to_thread(compiled)
        anvil = opened.enter_context(Anvil(directory / "anvil"))
        token = await deploy(await opened.enter_async_context(EvmClient(anvil.endpoint)), code)
        await token.mint(HOT, 1000 * USDC)
        await token.controls.set_ether(HOT, ETHER)
        own = await opened.enter_async_context(evm_payer(anvil, token, directory))

        async def minute(kind: Kind, *, is_awaiting: bool) -> Counter[str]:
            network = replace(own.network, block_seconds=kind.block_seconds)
            async with adapter_on(own, network) as adapter:
                at = adapter.networks[network.name]
                return await _minute(own, at, kind, is_awaiting=is_awaiting)

        idle = await minute(next(iter(CHAINS)), is_awaiting=False)
        async with adapter_on(own, own.network) as adapter:
            replica = await _replica(own, adapter)
        busy = {kind: await minute(kind, is_awaiting=True) for kind in CHAINS}
        await own.connection.check()
        return Counted(idle, replica, busy, await _payout(own))


def readings(directory: Path) -> list[Reading]:
    """The rows of the report, with the most that they may be."""
    found = asyncio.run(counted(directory))
    title, payout = "calls of an EVM node", found.payout
    return [
        Reading(NODE_CALLS, f"{title}, idle", "/min", (float(found.idle.total()),), under=23),
        Reading(
            f"{NODE_CALLS}-replica",
            f"{title}, a replica that does not settle",
            "/min",
            (float(found.replica.total()),),
            under=23,
        ),
        *(
            Reading(
                f"{NODE_CALLS}-open-{number}",
                f"{title}, orders open, {kind}",
                "/min",
                (float(calls.total()),),
                under=280,
            )
            for number, (kind, calls) in enumerate(found.open.items())
        ),
        Reading(
            f"{NODE_CALLS}-six", "six networks, orders open", "million/day", (six(found),), 1.5
        ),
        Reading(f"{NODE_CALLS}-payout", f"{title}, a payout", "", (_total(payout),), under=15),
        Reading(
            f"{NODE_CALLS}-in-turn", "exchanges in turn, a payout", "", (float(len(payout)),), 5
        ),
    ]


def six(found: Counted) -> float:
    """Million calls a day of six networks with open orders."""
    return sum(CHAINS[kind] * calls.total() for kind, calls in found.open.items()) * 1440 / 1e6


def _total(exchanges: list[list[str]]) -> float:
    return float(sum(map(len, exchanges)))


def main() -> None:
    """Print the counts."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    with TemporaryDirectory() as folder:
        found = asyncio.run(counted(Path(folder)))
    busy = [(f"orders open, {kind}", calls) for kind, calls in found.open.items()]
    idle = ("idle, a minute", found.idle), ("a replica that does not settle", found.replica)
    for title, calls in (*idle, *busy):
        print(f"{title}: {calls.total()} calls")
        for method, number in calls.most_common():
            print(f"    {method}: {number}")
    print(f"six networks with open orders: {six(found):.2f} million calls a day")
    count = f"{_total(found.payout):g} calls in {len(found.payout)} exchanges"
    print(f"a payout until it is handed over: {count}")
    for methods in found.payout:
        print(f"    {', '.join(methods)}")


if __name__ == "__main__":
    os.umask(0o077)
    main()
