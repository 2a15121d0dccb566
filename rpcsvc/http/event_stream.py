"""Server-sent events: streams the events of an order until its caller disconnects.

A caller that reconnects with its last event id misses none; 204 means that no more will come.
Source: the HTML standard, section 9.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

import structlog
from aiohttp import web

from rpcsvc.errors import InvalidInput, ServiceError
from rpcsvc.http.messages import JSON
from rpcsvc.operations.models import EventView
from rpcsvc.operations.service import Parts
from rpcsvc.strict_json import dumps

log = structlog.get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream"
LAST_EVENT_ID: Final = "last-event-id"
# After how long a browser reconnects.
RETRY_MS: Final = 3_000
# A comment without the blank line that ends an event: clients would deliver an empty one.
_HEARTBEAT: Final = b":\n"
# RFC 9110, section 12.4.2: a weight of zero means "not acceptable".
_REFUSED: Final = re.compile(r";\s*q=0(\.0{0,3})?\s*(;|$)", re.ASCII)
_CURSOR: Final = re.compile(r"[0-9]{1,18}", re.ASCII)


def wants_events(request: web.Request) -> bool:
    """Return whether a caller accepts an event stream and not JSON."""
    accepted = ",".join(request.headers.getall("accept", ())).lower().split(",")
    types = {each.partition(";")[0].strip() for each in accepted if not _REFUSED.search(each)}
    return EVENT_STREAM in types and JSON not in types


def from_last_event(request: web.Request, params: dict[str, Any]) -> dict[str, Any]:
    """The params of a stream that continues after ``Last-Event-ID``. Raises InvalidInput."""
    if "waitSec" in params:
        raise InvalidInput(
            "waitSec is for an answer in JSON: a stream waits by itself. Leave it out.",
            field="waitSec",
            received=params["waitSec"],
        )
    given = request.headers.get(LAST_EVENT_ID)
    if not given:
        return params
    if not _CURSOR.fullmatch(given):
        raise InvalidInput(
            f"The header {LAST_EVENT_ID} must be the id of an event of this stream, or left out.",
            field=LAST_EVENT_ID,
            received=given,
        )
    return {**params, "after": int(given)}


class EventStream(web.StreamResponse):
    """Sends parts of a log as they come, each once the reader has taken the one before."""

    def __init__(self, parts: Parts, request_id: str, headers: Mapping[str, str]) -> None:
        fixed = {
            "content-type": EVENT_STREAM,
            "cache-control": "no-store, no-transform",
            "x-accel-buffering": "no",  # nginx would buffer events
            "x-request-id": request_id,
        }
        super().__init__(headers={**fixed, **headers})
        self._parts = parts

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the stream. It starts only here, since the edge sets headers after the handler."""
        # A line of the first event's block, for the same reason.
        await self.write(b"retry: %d\n" % RETRY_MS)
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    await self.write(b"".join(map(_written, part)) or _HEARTBEAT)
        except ServiceError as error:  # its caller reconnects with the last id
            log.info("event_stream_ended", code=error.code)
        await super().write_eof(data)


def _written(event: EventView) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (event.cursor, dumps(event))
