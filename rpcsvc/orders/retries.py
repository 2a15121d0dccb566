"""The operator's retry: a transfer moves to the front of its schedule, and nothing is signed by it.

A refund that its agreed address refused is planned anew, to the same address: nothing redirects it.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from rpcsvc.domain.events import ImpossibleTransition, RefundRetried, order_of
from rpcsvc.errors import ServiceError
from rpcsvc.orders.processor import OrderProcessor

log = structlog.get_logger(__name__)


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
