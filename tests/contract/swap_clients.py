"""Clients of the package under test, which repeat lost requests without a pause."""

from __future__ import annotations

from typing import Any

from rpcsvc.client import Retries, SwapClient

ISSUER = "http://127.0.0.1:8080"


async def at_once(_seconds: float) -> None:
    """No pause."""


QUICK = Retries(sleep=at_once, draw=lambda: 0.0)


def client_of(url: str, **options: Any) -> SwapClient:
    return SwapClient(url, **{"issuer": ISSUER, "retries": QUICK, **options})
