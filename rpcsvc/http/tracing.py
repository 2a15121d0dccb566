"""OpenTelemetry traces: one trace for each order, from the call that made it to its settlement.

Trace and root span take their ids from the order's, so every process that works on the order, and
one that was restarted, adds to the same trace. Imported only where ``telemetry.otlp_endpoint`` is
set: the SDK is of the extra ``otel``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from rpcsvc import __version__
from rpcsvc.clock import Clock
from rpcsvc.domain import events as ev
from rpcsvc.domain.order import Order, OrderStatus
from rpcsvc.ids import RandomBytes
from rpcsvc.operations.dispatch import code_of
from rpcsvc.operations.service import Call, Effect, Reply
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS

# A collector that does not answer delays the stop of the service by twice this.
EXPORT_SECONDS: Final = 2.0
# While the collector is away, the oldest spans beyond these are dropped.
MOST_WAITING: Final = 4_096
_ORDER_ID: Final = re.compile(rb'"orderId": ?"(ord_[0-9A-Z]{26})"')
_CHANGES: Final = frozenset(
    each.name for each in (*OPERATIONS, *BFF_OPERATIONS) if each.effect is not Effect.READ
)
_TRANSFER_STEPS: Final[Mapping[type, str]] = {
    ev.TransferPrepared: "sign",
    ev.TransferPublished: "broadcast",
    ev.TransferUnknown: "broadcast",
    ev.TransferSettled: "settle",
    ev.TransferFailed: "settle",
}
_WENT_WELL: Final = frozenset({OrderStatus.COMPLETED, OrderStatus.EXPIRED})


class OrderSpan(NamedTuple):
    """A step of an order. Times in ms since the epoch; ``error`` is why it failed."""

    name: str
    started_at: int
    ended_at: int
    error: str | None = None


def span_of(order: Order, event: ev.Event | None, since: int, now: int) -> OrderSpan:
    """The step that ended when ``order`` was committed with ``event`` (None: a new order).

    ``since`` is when the transfer's last step ended, or the order entered its status.
    """
    if event is None:
        return OrderSpan("commit order", order.terms.created_at, now)
    if isinstance(event, ev.DepositSeen):
        return OrderSpan("wait for deposit", order.terms.created_at, now)
    if isinstance(event, ev.DepositConfirmed):
        seen_at = next((d.first_seen_at for d in order.deposits if d.key == event.key), now)
        return OrderSpan("confirm deposit", seen_at, now)
    step = _TRANSFER_STEPS.get(type(event))
    if step is None:
        return OrderSpan(type(event).__name__, now, now)
    transfer = order.transfer(getattr(event, "transfer_id", ""))
    kind = transfer.kind.value if transfer else "transfer"
    return OrderSpan(f"{step} {kind}", since, now, getattr(event, "reason", None))


def trace_of(order_id: str) -> SpanContext:
    """The trace of an order, and its root span."""
    digest = sha256(order_id.encode()).digest()
    return SpanContext(
        int.from_bytes(digest[:16]),
        int.from_bytes(digest[16:24]),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


class _Ids(IdGenerator):
    """Random span ids; those of ``root`` for a span without a parent."""

    def __init__(self, random: RandomBytes) -> None:
        self._random = random
        self.root: SpanContext | None = None

    def generate_trace_id(self) -> int:
        return self.root.trace_id if self.root else int.from_bytes(self._random(16))

    def generate_span_id(self) -> int:
        return self.root.span_id if self.root else int.from_bytes(self._random(8))


class OrderTraces:
    """Makes spans of calls and of committed events. Only the event loop's thread may use it."""

    def __init__(self, provider: TracerProvider, ids: _Ids, clock: Clock) -> None:
        self._tracer = provider.get_tracer("rpcsvc", __version__)
        self._ids = ids
        self._clock = clock
        # When the last step of an order's transfer ended, until the transfer is final.
        self._last_step: dict[str, int] = {}

    def call(self, operation: str, call: Call, reply: Reply, seconds: float | None) -> None:
        """Trace a call that made or changed an order; calls that only read are left out."""
        if seconds is None or operation not in _CHANGES:
            return
        found = _ORDER_ID.search(reply.body)
        if found is None:
            return
        now = self._clock.now_ms()
        code = code_of(reply.error) if reply.error else None
        self._span(
            found[1].decode(),
            OrderSpan(operation, now - round(seconds * 1000), now, code),
            SpanKind.SERVER,
            {"rpcsvc.transport": call.transport, "rpcsvc.request_id": call.request_id},
        )

    def order(self, before: Order | None, after: Order, event: ev.Event | None) -> None:
        """Trace a committed event of an order; the root span is sent with its end."""
        now, order_id = self._clock.now_ms(), after.order_id
        since = self._last_step.get(order_id, (before or after).status_at)
        self._span(order_id, span_of(after, event, since, now), SpanKind.INTERNAL, {})
        if isinstance(event, ev.TransferPrepared | ev.TransferPublished):
            self._last_step[order_id] = now
        elif type(event) in _TRANSFER_STEPS:
            self._last_step.pop(order_id, None)
        if after.status.is_terminal and before and not before.status.is_terminal:
            self._root(after, now)

    def _root(self, order: Order, now: int) -> None:
        error = None if order.status in _WENT_WELL else order.error_message or order.status.value
        self._ids.root = trace_of(order.order_id)
        try:
            self._span(
                order.order_id,
                OrderSpan("order", order.terms.created_at, now, error),
                SpanKind.INTERNAL,
                {
                    "rpcsvc.status": order.status.value,
                    "rpcsvc.direction": order.terms.direction.value,
                    "rpcsvc.chain": order.terms.chain,
                },
            )
        finally:
            self._ids.root = None

    def _span(
        self, order_id: str, step: OrderSpan, kind: SpanKind, more: Mapping[str, str]
    ) -> None:
        parent = Context()
        if self._ids.root is None:
            parent = set_span_in_context(NonRecordingSpan(trace_of(order_id)), parent)
        span = self._tracer.start_span(
            step.name,
            parent,
            kind,
            {"rpcsvc.order_id": order_id, **more},
            start_time=step.started_at * 1_000_000,
        )
        if step.error is not None:
            span.set_status(StatusCode.ERROR, step.error)
        span.end(step.ended_at * 1_000_000)


@asynccontextmanager
async def exporting(
    endpoint: str, engine: str, clock: Clock, random: RandomBytes
) -> AsyncIterator[OrderTraces]:
    """Send traces to an OTLP/HTTP ``endpoint`` until the block ends, from a thread of its own.

    The SDK's own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*) hold.
    """
    ids = _Ids(random)
    resource = Resource.create(
        {"service.name": "rpcsvc", "service.version": __version__, "rpcsvc.engine": engine}
    )
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS),
            max_queue_size=MOST_WAITING,
            max_export_batch_size=MOST_WAITING,
        )
    )
    try:
        yield OrderTraces(provider, ids, clock)
    finally:
        await asyncio.to_thread(provider.shutdown)
