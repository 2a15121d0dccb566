"""Which callers get an event stream."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from rpcsvc.http.event_stream import wants_events


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        ("text/event-stream", True),
        ("Text/Event-Stream;q=0.5, */*", True),
        ("text/event-stream, application/json;q=0", True),
        ("text/event-stream, application/json", False),
        ("text/event-stream;q=0", False),
        ("text/event-stream; Q=0.000, */*", False),
        ("*/*", False),
    ],
)
def test_a_stream_is_for_those_who_accept_no_json(accept: str, wants: bool) -> None:
    assert wants_events(make_mocked_request("GET", "/", headers={"accept": accept})) is wants
