"""What handlers return: a fresh Answer or Flat, or a Stored one whose bytes are written already."""

from __future__ import annotations

from typing import NamedTuple

from rpcsvc.operations.envelope import Json
from rpcsvc.operations.service import Call, ViewContext

NO_SESSION = (None, "none")


class Flat(NamedTuple):
    """An answer without an envelope, as the BFF has them (spec 2.4)."""

    body: Json


class Stored(NamedTuple):
    """The head of an envelope, or a flat answer, as committed; ``replayed`` answers a retry."""

    head: bytes
    replayed: bool = False


def session_source(call: Call) -> str:
    """Where the session of a call that has one came from."""
    return "local" if call.local_session else "request"


def with_session(views: ViewContext, data: Json, session: tuple[str | None, str]) -> Json:
    """``data`` with the fields that every result has: network, sessionId, sessionSource."""
    session_id, source = session
    return {
        "network": views.network,
        "sessionId": session_id,
        "sessionSource": source,
        **data,
    }
