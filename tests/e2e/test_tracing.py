"""Traces as a collector receives them: a real OTLP/HTTP receiver and real server processes."""

from __future__ import annotations

import socket
import sys
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.patched import EXPORTING, environ_of
from tests.e2e.processes import call, free_port, server, until, until_over
from tests.e2e.swaps import SWAPS

WAY = {
    "swap.create", "commit order", "wait for deposit", "confirm deposit", "sign payout",
    "broadcast payout", "settle payout", "order",
}  # fmt: skip


class Collector:
    """Keeps the spans that were sent to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.url = f"http://127.0.0.1:{free_port()}/v1/traces"

    async def take(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        self.spans += _spans(sent)
        return web.Response(content_type="application/x-protobuf")

    async def order_is_traced(self, order_id: str) -> bool:
        return any(span.name == "order" for span in self.of(order_id))

    def of(self, order_id: str) -> list[Span]:
        return [span for span in self.spans if attributes(span)["rpcsvc.order_id"] == order_id]


def _spans(sent: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in sent.resource_spans:
        named = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert named["service.name"] == "rpcsvc"
        for scope in resource.scope_spans:
            yield from scope.spans


def attributes(span: Span) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        port = int(collector.url.rpartition(":")[2].partition("/")[0])
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield collector
    finally:
        await runner.cleanup()


def to(collector_url: str) -> dict[str, str]:
    return {"RPCSVC_TELEMETRY__OTLP_ENDPOINT": collector_url, "OTEL_BSP_SCHEDULE_DELAY": "50"}


async def test_a_swap_is_one_trace_also_after_a_restart(tmp_path: Path) -> None:
    async with collecting() as collector:
        async with server(tmp_path / "data", environ=to(collector.url)) as first:
            made = (await call(first, "swap.create", SWAPS["x2u"]))["data"]
            order_id = made["order"]["orderId"]
            # In a thread: the collector has to answer meanwhile.
            assert await to_thread(first.stop) == 0
        async with server(tmp_path / "data", environ=to(collector.url)) as second:
            await call(second, "sandbox.fund", {"orderId": order_id})
            assert (await until_over(second, order_id))["state"] == "completed"
            await until(lambda: collector.order_is_traced(order_id))
            assert await to_thread(second.stop) == 0

    spans = collector.of(order_id)
    assert {span.name for span in spans} >= WAY
    assert len({span.trace_id for span in spans}) == 1
    (root,) = [span for span in spans if span.name == "order"]
    assert attributes(root)["rpcsvc.status"] == "completed"
    assert not root.parent_span_id
    parts = [span for span in spans if span is not root]
    assert {span.parent_span_id for span in parts} == {root.span_id}
    assert len({span.span_id for span in spans}) == len(spans)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    named = {span.name: span for span in spans}
    signed, sent = named["sign payout"], named["broadcast payout"]
    assert signed.end_time_unix_nano == sent.start_time_unix_nano


@pytest.mark.parametrize("answers", ["refuses", "is silent"])
async def test_a_collector_that_is_away_stops_nothing(tmp_path: Path, answers: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers == "is silent":
            silent.listen()
        nowhere = to(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        environ = nowhere | environ_of(EXPORTING)
        async with server(tmp_path / "data", environ=environ) as running:
            made: dict[str, Any] = (await call(running, "swap.create", SWAPS["u2x"]))["data"]
            order_id = made["order"]["orderId"]
            await call(running, "sandbox.fund", {"orderId": order_id})
            assert (await until_over(running, order_id))["state"] == "completed"
            started = time.monotonic()
            assert running.stop() == 0
            # Two exports of EXPORT_SECONDS each, on a busy machine.
            assert time.monotonic() - started < 20


def test_without_a_collector_the_sdk_is_not_imported() -> None:
    code = "import sys, rpcsvc.serving; print(*sys.modules)"
    loaded = run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = set(loaded.stdout.split())
    assert "rpcsvc.serving" in modules
    assert not modules & {"opentelemetry", "google.protobuf"}
