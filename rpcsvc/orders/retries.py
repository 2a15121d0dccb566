"""The operator's request to try a transfer now, as a file.

Whoever may write to the data directory may ask; nothing is signed or published by asking. The
running service looks into the directory twice a second, takes each request away, and moves the
transfer to the front of its schedule. A refund that its agreed address refused is planned anew, to
the same address: nothing redirects it. The schedule is in effects.py, the command in
cli/operator/payouts.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import structlog

from rpcsvc.domain.events import ImpossibleTransition, RefundRetried, order_of
from rpcsvc.errors import ServiceError
from rpcsvc.orders.processor import OrderProcessor

log = structlog.get_logger(__name__)

DIRECTORY: Final = "payouts.retry"
LOOK_SECONDS: Final = 0.5

# Whether the transfer waited and is now due.
Retry = Callable[[str], Awaitable[bool]]


class RetryRequests:
    """The requests of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / DIRECTORY

    def add(self, transfer_id: str) -> None:
        """Ask for a transfer to be tried now. Raises OSError."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._path(transfer_id).touch(mode=0o600)

    def is_waiting(self, transfer_id: str) -> bool:
        """Whether nobody has taken the request yet."""
        return self._path(transfer_id).exists()

    def withdraw(self, transfer_id: str) -> None:
        """Take a request back."""
        self._path(transfer_id).unlink(missing_ok=True)

    def take(self) -> list[str]:
        """The transfers that were asked for; each request is taken once."""
        try:
            found = sorted(path for path in self._directory.iterdir() if path.is_file())
        except FileNotFoundError:
            return []
        for path in found:
            path.unlink(missing_ok=True)
        return [unquote(path.name) for path in found]

    def _path(self, transfer_id: str) -> Path:
        return self._directory / quote(transfer_id, safe="")


async def retry_transfer(
    transfer_id: str, hurry: Callable[[str], bool], processor: OrderProcessor
) -> bool:
    """Whether the transfer, or its order's refund to the agreed address, goes on now."""
    if hurry(transfer_id):
        return True
    try:
        await processor.apply(order_of(transfer_id), RefundRetried())
    except (ImpossibleTransition, ServiceError) as reason:
        log.info("refund_not_retried", transfer_id=transfer_id[:80], reason=str(reason))
        return False
    return True


async def follow_requests(
    requests: RetryRequests,
    retry: Retry,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Carry out requests until cancelled."""
    while True:
        for transfer_id in requests.take():
            waited = await retry(transfer_id)
            log.info("transfer_retried", transfer_id=transfer_id[:80], waited=waited)
        await pause(LOOK_SECONDS)
