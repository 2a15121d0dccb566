"""What handlers return: a fresh Answer, or a Stored one whose bytes are already written."""

from __future__ import annotations

from typing import NamedTuple

from rpcsvc.operations.envelope import Json
from rpcsvc.operations.service import Venue

NO_SESSION = (None, "none")


class Stored(NamedTuple):
    """The head of an envelope as it was committed; ``replayed`` when it answers a retry."""

    head: bytes
    replayed: bool = False


def with_session(venue: Venue, data: Json, session: tuple[str | None, str]) -> Json:
    """``data`` with the fields that every result has: network, sessionId, sessionSource."""
    session_id, source = session
    return {
        "network": venue.network,
        "sessionId": session_id,
        "sessionSource": source,
        **data,
    }
