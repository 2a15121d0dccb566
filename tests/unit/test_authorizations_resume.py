"""Resuming signed authorizations beside the worker loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.orders.authorizations import Authorizations, Carried
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.store.authorizations import AuthorizationKey, AuthorizationRecord, AuthorizationState
from rpcsvc.store.leases import MARGIN_MS, SETTLER, Lease
from tests.e2e.processes import until
from tests.sandbox import ManualClock

SLOW, QUICK = "eip155:1", "eip155:42161"


def recorded(network: str, number: int) -> AuthorizationRecord:
    key = AuthorizationKey(network, "token", "payer", f"{number:064x}")
    return AuthorizationRecord(key, f"ord_{number}", cast("Any", None), created_at=0)


class Store:
    """Keeps unresolved authorizations; the first ``failures`` reads fail."""

    def __init__(self, *records: AuthorizationRecord, failures: int = 0) -> None:
        self.records = {record.key: record for record in records}
        self.failures = failures

    async def unresolved(self) -> list[AuthorizationRecord]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the database is away")
        return [each for each in self.records.values() if each.state is AuthorizationState.RECORDED]

    async def resolve(self, record: AuthorizationRecord) -> None:
        self.records[record.key] = replace(record)

    async def has_sent(self, *order_ids: str) -> bool:
        return self.sent() >= set(order_ids)

    def sent(self) -> set[str]:
        return {each.order_id for each in self.records.values() if each.txid is not None}


class Wallets:
    """Settles authorizations at once; on the network SLOW it waits for ``answers``."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked: list[str] = []

    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        self.asked.append(record.order_id)
        if record.key.network == SLOW:
            await self.answers.wait()
        return Carried(Outcome.SETTLED, "0x" + record.key.nonce)


def funding(store: Store, wallets: Wallets, lease: Lease | None = None) -> Authorizations:
    nothing = cast("Any", None)
    lease = lease or Lease(SETTLER, 1)
    return Authorizations(
        nothing, cast("Any", store), cast("Any", wallets), ManualClock(), 1, lease, lambda: 1, b""
    )


async def test_authorization_waits_while_the_lease_has_no_time() -> None:
    store, wallets = Store(recorded(QUICK, 1)), Wallets()
    lease = Lease(SETTLER, 1, MARGIN_MS, lambda: 0)
    authorizations = funding(store, wallets, lease)
    for _ in range(2):
        for look in (await authorizations.due()).values():
            await look()
        lease.extend(MARGIN_MS + 1)
    assert wallets.asked == ["ord_1"]
    assert store.sent() == {"ord_1"}


async def while_running(
    authorizations: Authorizations, check: Callable[[], Awaitable[None]]
) -> None:
    task = asyncio.create_task(authorizations.run())
    try:
        await check()
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_slow_node_holds_up_its_own_network_only() -> None:
    store, wallets = Store(recorded(SLOW, 1), recorded(SLOW, 2), recorded(QUICK, 3)), Wallets()

    async def check() -> None:
        await until(lambda: store.has_sent("ord_3"))
        assert sorted(wallets.asked) == ["ord_1", "ord_3"]
        assert store.sent() == {"ord_3"}
        later = recorded(QUICK, 4)
        store.records[later.key] = later
        await until(lambda: store.has_sent("ord_4"))
        wallets.answers.set()
        await until(lambda: store.has_sent("ord_1", "ord_2"))

    await while_running(funding(store, wallets), check)
    assert sorted(wallets.asked) == ["ord_1", "ord_2", "ord_3", "ord_4"]


async def test_a_database_that_comes_back_is_asked_again() -> None:
    store, wallets = Store(recorded(QUICK, 1), failures=2), Wallets()

    async def check() -> None:
        await until(lambda: store.has_sent("ord_1"))

    await while_running(funding(store, wallets), check)
    assert store.failures == 0
