"""Logged events can be written, and do not fill the disk."""

from __future__ import annotations

import json

from rpcsvc.logs import Occasional, _renderers, mask


def test_text_that_is_not_utf_8_keeps_its_line() -> None:
    event = mask(None, "info", {"event": "x", "path": "/\udcff", "long": "\udcff" * 50})

    line = _renderers(as_json=True)[-1](None, "info", event)

    assert json.loads(line)["path"] == "/\\udcff"


def test_event_of_a_kind_is_logged_once_a_minute() -> None:
    now = 1_000.0
    refused = Occasional(lambda: now)
    assert [refused.note("a") for _ in range(3)] == [1, 0, 0]
    assert [refused.note("b") for _ in range(2)] == [1, 0]

    now += 60

    assert [refused.note("a"), refused.note("a")] == [3, 0]
