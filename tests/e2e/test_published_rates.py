"""A replica whose rate contradicts the one that was published last takes no orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asyncpg

from tests.contract.serving import serving
from tests.e2e.processes import until
from tests.e2e.swaps import SWAPS
from tests.postgres import new_database

# Published by an earlier process, and still fresh; the sandbox's own rate is 165.
_OTHER = (
    "INSERT INTO rates (published_at, usdc_per_xmr, token)"
    " VALUES (now_ms() + 3600000, 169000000, 1)"
)


async def test_takeover_with_a_rate_that_disagrees_takes_no_orders(
    tmp_path: Path, postgres: Callable[[], str]
) -> None:
    async with new_database(postgres()) as url:
        environ = {"RPCSVC_DATABASE_URL": url}
        async with serving(tmp_path / "before", environ):
            pass
        outside = await asyncpg.connect(url)
        try:
            await outside.execute(_OTHER)
            async with serving(tmp_path / "after", environ) as served:
                for method in ("swap.execute", "swap.quote"):
                    params = {**SWAPS["x2u"]}
                    if method == "swap.quote":
                        params.pop("to")
                    refused = (await served.rpc(method, params)).body["result"]
                    assert (refused["ok"], refused["state"]) == (False, "unavailable")
                    assert refused["error"]["retryable"]
                    assert "disagree on the rate: 165 and 169 USDC" in refused["error"]["message"]
                assert (await served.client.get("/readyz")).status == 503
                assert served.count("orders") == served.count("reservations") == 0
                await outside.execute("DELETE FROM rates WHERE usdc_per_xmr = 169000000")

                async def made() -> bool:
                    answer = await served.rpc("swap.execute", SWAPS["x2u"])
                    return bool(answer.body["result"]["ok"])

                await until(made)
                assert (await served.client.get("/readyz")).status == 200
        finally:
            await outside.close()
