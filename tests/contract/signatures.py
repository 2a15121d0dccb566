"""The keys that a service publishes."""

from __future__ import annotations

from typing import Any

from tests.contract.serving import Served

Json = dict[str, Any]


async def jwks(served: Served) -> Json:
    async with served.client.get("/.well-known/jwks.json") as answer:
        return dict(await answer.json(content_type=None))
