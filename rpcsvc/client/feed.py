"""Follows the events of an order by a stream, or by long polls where streams are blocked.

Source: the HTML standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from rpcsvc.client.calls import API_ROOT, Calls, in_path
from rpcsvc.client.errors import Unreachable, refusal
from rpcsvc.client.models import Event
from rpcsvc.client.transport import Json, ServiceRequest, Stream, UnreadableAnswer, read_envelope

_PATH: Final = f"{API_ROOT}/agent/swap/events/{{orderId}}"
EVENT_STREAM: Final = "text/event-stream"
WAIT_SECONDS: Final = 25
# The service sends a heartbeat at least every 25 s.
_SILENT_SECONDS: Final = 60.0
_LARGEST_REFUSAL: Final = 1 << 16
# Streams in a row without an event, after which a proxy is assumed to block streams.
_BARREN_STREAMS: Final = 2


class _NoStream(Exception):
    """Streams are blocked on the way to this client."""


class Feed:
    """The events of one order after a cursor, each once, until nothing more can happen to it."""

    def __init__(self, calls: Calls, order_id: str, after: int) -> None:
        self._calls = calls
        self._order_id = order_id
        self.cursor = after
        self._is_over = False

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the events. Raises Refused, Unreachable and Unverified."""
        barren, failed = 0, 0
        while barren < _BARREN_STREAMS:
            before = self.cursor
            try:
                async with aclosing(self._stream()) as events:
                    async for event in events:
                        yield event
            except _NoStream:
                break
            except (Unreachable, ValueError) as error:
                failed = 1 if self.cursor > before else failed + 1
                pause = self._calls.retries.pause(failed, error)
                barren = 0 if self.cursor > before else barren + 1
                if barren < _BARREN_STREAMS and pause is not None:
                    await self._calls.sleep(pause)
            else:
                if self._is_over:
                    return
                barren = 0 if self.cursor > before else barren + 1
        async with aclosing(self._polled()) as polled:
            async for event in polled:
                yield event

    async def _stream(self) -> AsyncGenerator[Event]:
        """The events of one stream; afterwards ``_is_over`` says whether they were the last."""
        path, _ = in_path(_PATH, {"orderId": self._order_id})
        headers = {"accept": EVENT_STREAM, "last-event-id": str(self.cursor)}
        sent = ServiceRequest("GET", path, headers=headers, seconds=_SILENT_SECONDS)
        async with self._calls.transport.stream(sent) as response:
            if response.status == 204:
                self._is_over = True
                return
            if response.status != 200 or response.media_type != EVENT_STREAM:
                await _refuse(response)
            async with aclosing(_read(response)) as events:
                async for event in events:
                    if event.cursor > self.cursor:
                        self.cursor = event.cursor
                        yield event

    async def _polled(self) -> AsyncGenerator[Event]:
        while True:
            params: Json = {
                "orderId": self._order_id,
                "after": self.cursor,
                "waitSec": WAIT_SECONDS,
            }
            envelope = await self._calls.call("swap.events", params)
            for each in envelope["data"]["events"]:
                event = Event.model_validate(each)
                self.cursor = event.cursor
                yield event
            if not envelope["nextActions"]:
                return


async def _refuse(response: Stream) -> None:
    """Raise Refused if the service refused, else _NoStream: long polls may get through."""
    try:
        envelope = read_envelope(await response.read(_LARGEST_REFUSAL))
    except UnreadableAnswer as error:
        raise _NoStream from error
    if envelope["ok"] or (envelope.get("error") or {}).get("retryable"):
        raise _NoStream
    raise refusal(envelope, None)


async def _read(response: Stream) -> AsyncGenerator[Event]:
    """The events of a response. Raises ValueError for a malformed event."""
    data: list[str] = []
    async for line in response.lines():
        text = line.decode().rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
        elif data:
            yield Event.model_validate(json.loads("\n".join(data)))
            data = []
