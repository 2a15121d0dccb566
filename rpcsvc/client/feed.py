"""The events of an order as they come: as a stream, and by long polls where no stream gets through.

Source: the HTML standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import ClientError as HttpError
from aiohttp import ClientResponse, ClientTimeout

from rpcsvc.client.errors import Unreachable, refusal
from rpcsvc.client.messages import ForeignAnswer, Json, read_envelope
from rpcsvc.client.models import Event
from rpcsvc.client.transport import API_ROOT, CALL_SECONDS, ROUTES, Transport, in_path

EVENT_STREAM: Final = "text/event-stream"
WAIT_SECONDS: Final = 25
# The service says at least every 25 s that it is there.
_SILENT_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 10.0
_LARGEST_REFUSAL: Final = 1 << 16
# After so many streams in a row without an event, something on the way does not let them through.
_BARREN_STREAMS: Final = 2


class _NoStream(Exception):
    """No stream comes through to here."""


class Feed:
    """The events of one order after a cursor, each once, until the order is over for good."""

    def __init__(self, transport: Transport, order_id: str, after: int) -> None:
        self._transport = transport
        self._order_id = order_id
        self.cursor = after
        self._is_over = False

    async def events(self) -> AsyncIterator[Event]:
        """Raises Refused, Unreachable and Unverified."""
        barren, failed = 0, 0
        while barren < _BARREN_STREAMS:
            before = self.cursor
            try:
                async for event in self._stream():
                    yield event
            except _NoStream:
                break
            except (HttpError, OSError, ValueError, TimeoutError) as error:
                failed = 1 if self.cursor > before else failed + 1
                lost = Unreachable(f"The stream of events broke: {error!r}.", may_be_done=False)
                pause = self._transport.retries.pause(failed, lost)
                barren = 0 if self.cursor > before else barren + 1
                if barren < _BARREN_STREAMS and pause is not None:
                    await self._transport.retries.sleep(pause)
            else:
                if self._is_over:
                    return
                barren = 0 if self.cursor > before else barren + 1
        async for event in self._polled():
            yield event

    async def _stream(self) -> AsyncIterator[Event]:
        """The events of one stream; afterwards ``_is_over`` says whether there are any more."""
        transport = self._transport
        path, _ = in_path(ROUTES["swap.events"].path, {"orderId": self._order_id})
        async with transport.session.get(
            f"{transport.root}{API_ROOT}{path}",
            headers={"accept": EVENT_STREAM, "last-event-id": str(self.cursor)},
            timeout=ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
            ),
            allow_redirects=False,
        ) as response:
            if response.status == 204:
                self._is_over = True
                return
            if response.status != 200 or response.content_type != EVENT_STREAM:
                await _refuse(response)
            async for event in _read(response):
                if event.cursor > self.cursor:
                    self.cursor = event.cursor
                    yield event

    async def _polled(self) -> AsyncIterator[Event]:
        while True:
            params: Json = {
                "orderId": self._order_id,
                "after": self.cursor,
                "waitSec": WAIT_SECONDS,
            }
            envelope = await self._transport.call(
                "swap.events", params, seconds=WAIT_SECONDS + CALL_SECONDS
            )
            for each in envelope["data"]["events"]:
                event = Event.model_validate(each)
                self.cursor = event.cursor
                yield event
            if not envelope["nextActions"]:
                return


async def _refuse(response: ClientResponse) -> None:
    """Raise Refused for what the service refuses, else _NoStream: long polls may get through."""
    try:
        envelope = read_envelope(await response.content.read(_LARGEST_REFUSAL))
    except ForeignAnswer as error:
        raise _NoStream from error
    if envelope["ok"] or (envelope.get("error") or {}).get("retryable"):
        raise _NoStream
    raise refusal(envelope, None)


async def _read(response: ClientResponse) -> AsyncIterator[Event]:
    """The events of a response. Raises ValueError for what is none."""
    data: list[str] = []
    while line := await response.content.readline():
        text = line.decode().rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
        elif data:
            yield Event.model_validate(json.loads("\n".join(data)))
            data = []
