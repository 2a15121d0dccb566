"""The health and the refusals of a service whose daemons fail."""

from __future__ import annotations

from typing import Any

from tests.e2e.processes import Server, until
from tests.regtest.exchange import call

NOTICED_SECONDS = 180
WELL_SECONDS = 300


async def degraded(at: Server, reason: str) -> str:
    """Wait until health is degraded with this reason; the details of all checks."""
    seen = ""

    async def says() -> str | None:
        nonlocal seen
        health = await at.health()
        details = [check.get("detail", "") for check in health.get("checks", {}).values()]
        seen = "; ".join(filter(None, details))
        return seen if health.get("http") == 503 and reason in seen else None

    try:
        return await until(says, seconds=NOTICED_SECONDS)
    except TimeoutError:
        raise AssertionError(f"health does not say {reason!r} but {seen!r}") from None


async def well(at: Server) -> None:
    """Wait until every health check is ok."""
    try:
        await until(at.is_well, seconds=WELL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"not well: {await at.health()}") from None


async def refusal(at: Server, direction: str, amount: str | None = None) -> dict[str, Any]:
    """The error of a refused quote; it must be ``unavailable``."""
    asked = {"direction": direction, "chain": "arbitrum"}
    asked["amount"] = amount or ("1" if direction == "x2u" else "165")
    envelope = await call(at, "service.swap.quote", asked)
    assert not envelope["ok"], f"quoted: {envelope}"
    assert envelope["error"]["code"] == "unavailable", envelope
    return dict(envelope["error"])


async def both_refused(at: Server) -> None:
    """Require that quotes are refused in both directions."""
    for direction in ("x2u", "u2x"):
        await refusal(at, direction)
