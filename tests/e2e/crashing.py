"""``python -m tests.e2e.crashing SEAM WHEN N serve ...``: the service, killed by SIGKILL.

It is killed ``before`` or ``after`` the N-th call of a seam: no handler runs, nothing is flushed.
``stopped before`` and ``stopped after``: it is paused there by SIGSTOP. The seams are wrapped here;
the product has no code for it.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from rpcsvc.__main__ import main
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.sandbox.engine import SandboxEngine, SimulatedAuthorizations
from rpcsvc.settlement.sandbox.ledger import SandboxLedger
from rpcsvc.store.authorizations import AuthorizationStore
from rpcsvc.store.backends.sqlite.database import GroupConnection, SqliteDatabase
from rpcsvc.store.webhooks import WebhookStore
from rpcsvc.store.withdrawals import WithdrawalStore
from rpcsvc.webhook_sender import WebhookSender


class Seam(NamedTuple):
    """A method at which the process is killed. Calls for which ``counts`` is false pass."""

    owner: type
    name: str
    counts: Callable[[tuple[Any, ...]], bool] = lambda _args: True


def sql(start: str) -> Callable[[tuple[Any, ...]], bool]:
    return lambda args: str(args[1]).startswith(start)


SEAMS = {
    "once": Seam(Idempotency, "once"),
    "open": Seam(OrderProcessor, "open"),
    "write": Seam(SqliteDatabase, "write"),
    # In the writer's thread: within one transaction.
    "BEGIN": Seam(GroupConnection, "execute", sql("BEGIN")),
    "rows": Seam(GroupConnection, "_run"),
    "COMMIT": Seam(GroupConnection, "execute", sql("COMMIT")),
    "fill row": Seam(GroupConnection, "_run", lambda args: "INTO fills" in str(args[1])),
    "observe": Seam(SandboxEngine, "observe"),
    "acknowledge": Seam(SandboxEngine, "acknowledge", lambda args: bool(args[1])),
    "prepare": Seam(SandboxEngine, "prepare"),
    "publish": Seam(SandboxEngine, "publish"),
    "look_up": Seam(SandboxEngine, "look_up"),
    "send webhook": Seam(WebhookSender, "send"),
    "record webhook": Seam(WebhookStore, "record"),
    "authorize": Seam(AuthorizationStore, "add"),
    "carry_out": Seam(SimulatedAuthorizations, "carry_out"),
    "pool": Seam(SandboxLedger, "broadcast"),
    "resolve": Seam(AuthorizationStore, "resolve"),
    "withdraw": Seam(WithdrawalStore, "add"),
    "withdrawal": Seam(WithdrawalStore, "change"),
}


def seam(name: str) -> Seam:
    """A seam of the list, or the commit of an event by the name of its class."""
    if name in SEAMS:
        return SEAMS[name]
    if " " in name:
        # The seams of the engine onchain need an extra's packages.
        from tests.regtest import seams  # noqa: PLC0415

        if name.startswith("raise"):
            seams.hasten()
        return Seam(*seams.SEAMS[name])
    return Seam(
        OrderProcessor,
        "_commit",
        lambda args: any(type(event).__name__ == name for event in args[1].values()),
    )


def arm(at: Seam, when: str, number: int) -> None:
    """Wrap the seam so that its ``number``-th call kills or stops the process."""
    original: Callable[..., Any] = getattr(at.owner, at.name)
    calls = itertools.count(1)
    is_stopped, is_before = when.startswith("stopped"), when.endswith("before")

    def die(*, here: bool) -> None:
        if here:
            os.kill(os.getpid(), signal.SIGSTOP if is_stopped else signal.SIGKILL)

    def is_fatal(args: tuple[Any, ...]) -> bool:
        return at.counts(args) and next(calls) == number

    async def deadly_async(*args: Any, **kwargs: Any) -> Any:
        fatal = is_fatal(args)
        die(here=fatal and is_before)
        result = await original(*args, **kwargs)
        die(here=fatal and not (is_stopped and is_before))
        return result

    def deadly(*args: Any, **kwargs: Any) -> Any:
        fatal = is_fatal(args)
        die(here=fatal and is_before)
        result = original(*args, **kwargs)
        die(here=fatal and not (is_stopped and is_before))
        return result

    is_async = inspect.iscoroutinefunction(original)
    setattr(at.owner, at.name, deadly_async if is_async else deadly)


if __name__ == "__main__":
    arm(seam(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    sys.argv[1:4] = []
    main()
