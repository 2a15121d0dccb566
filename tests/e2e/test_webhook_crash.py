"""kill -9 around the sending of webhooks: no event is lost, and the order of events is kept."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Crash, Gone, call, server, until, until_over
from tests.e2e.swaps import SWAPS
from tests.receiver import receiving

KEY = "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c05"
EVENTS = 6  # of a swap without incidents


@pytest.mark.parametrize(
    ("crash", "expected"),
    [
        # Sent but not recorded: it is sent once more, under the same id.
        (("record webhook", "before", 1), [1, 1, 2, 3, 4, 5, 6]),
        (("record webhook", "after", 1), [1, 2, 3, 4, 5, 6]),
        (("send webhook", "before", 1), [1, 2, 3, 4, 5, 6]),
        # The order is committed with its first message, or neither is.
        (("open", "before", 1), [1, 2, 3, 4, 5, 6]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value[0], str) else "",
)
async def test_webhook_messages_survive_a_kill(
    tmp_path: Path, crash: Crash, expected: list[int]
) -> None:
    data_dir = tmp_path / "data"
    async with receiving(tmp_path) as receiver:
        environ = {
            "SSL_CERT_FILE": str(receiver.ca_file),
            "RPCSVC_WEBHOOKS__ALLOWED_NETWORKS": "127.0.0.0/8",
        }
        order = {**SWAPS["x2u"], "webhook": receiver.url, "idempotency-key": KEY}
        async with server(data_dir, crash=crash, environ=environ) as up:
            with suppress(Gone):
                await call(up, "swap.execute", order)
            await up.death()
        async with server(data_dir, environ=environ) as up:
            made = (await call(up, "swap.execute", order))["data"]
            owned = {"orderId": made["order"]["orderId"], "sessionId": made["sessionId"]}
            await call(up, "sandbox.fund", {"orderId": owned["orderId"]})
            await until_over(up, owned["orderId"])

            async def delivered() -> list[dict[str, Any]] | None:
                answer = await call(up, "swap.webhookDeliveries", owned)
                found = answer["data"]["deliveries"]
                return found if {each["state"] for each in found} == {"delivered"} else None

            messages = await until(delivered)
            assert [each["sequence"] for each in messages] == list(range(1, EVENTS + 1))
            assert receiver.sequences() == expected
            ids = {each.headers["webhook-id"] for each in receiver.received}
            assert ids == {each["messageId"] for each in messages}
