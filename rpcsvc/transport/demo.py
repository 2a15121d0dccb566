"""``rpcsvc demo``: one whole swap each way on the sandbox, every step printed for a person."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rpcsvc.domain.addresses import evm_address_from_seed, stagenet_subaddress
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.operations.local import LocalService
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import Settings

POLLS = 60
_BY_NAME = {operation.name: operation for operation in OPERATIONS}
Json = dict[str, Any]


def run_demo(
    settings: Settings,
    local: Callable[[Settings], AbstractAsyncContextManager[LocalService]],
    data_dir: str | None,
) -> bool:
    """Run the demo; True when both orders completed. Without a data directory: a passing one."""
    configure_logging(settings.log.format, "warning")
    if data_dir is not None:
        return asyncio.run(_demo(settings, local))
    with tempfile.TemporaryDirectory(prefix="rpcsvc-demo-") as folder:
        passing = settings.model_copy(update={"data_dir": Path(folder)})
        return asyncio.run(_demo(passing, local))


async def _demo(
    settings: Settings, local: Callable[[Settings], AbstractAsyncContextManager[LocalService]]
) -> bool:
    async with local(settings) as service:
        _say("Two swaps on the sandbox: simulated chains, no real money.")
        first = await _swap(service, "x2u", "0.8", evm_address_from_seed(system_random(32)))
        second = await _swap(service, "u2x", "150", stagenet_subaddress(system_random(64)))
    _say("Both orders completed." if first and second else "An order did not complete.")
    return first and second


async def _swap(service: LocalService, direction: str, amount: str, to: str) -> bool:
    wish = {"direction": direction, "chain": "arbitrum", "amount": amount}
    _say(f"\n=== {direction} on arbitrum, sending {amount} ===")
    plan = await _call(service, "swap.plan", wish)
    _say(f"    missing: {', '.join(plan['missingInputs'])}")
    quote = (await _call(service, "swap.quote", wish))["data"]["quote"]
    _say(f"    you get {quote['expectedOutput']} {quote['payoutAsset']} at {quote['rate']}")
    made = await _call(service, "swap.execute", {**wish, "to": to})
    order_id = made["data"]["order"]["orderId"]
    funding = made["data"]["fundingInstructions"]
    _say(f"    send {funding['amountDisplay']} to {funding['depositAddress']}")
    await _call(service, "sandbox.fund", {"orderId": order_id})
    return await _poll(service, order_id)


async def _poll(service: LocalService, order_id: str) -> bool:
    shown = None
    for _ in range(POLLS):
        answer = await _call(service, "swap.status", {"orderId": order_id}, show=False)
        if answer["state"] != shown:
            shown = answer["state"]
            _say(f"--> swap.status: {shown}")
        if shown in ("completed", "terminal_failure"):
            _show_transfers(answer)
            return bool(shown == "completed")
        await service.settle_for(0.25)
    return False


def _show_transfers(answer: Json) -> None:
    for transfer in answer["data"]["transfers"]:
        _say(
            f"    {transfer['kind']} of {transfer['amount']} {transfer['asset']}"
            f" {transfer['status']}, transaction {transfer['txid']}"
        )


async def _call(service: LocalService, name: str, params: Json, *, show: bool = True) -> Json:
    if show:
        _say(f"--> {name} {json.dumps(params)}")
    body = await service.call(_BY_NAME[name], params, "demo", None)
    answer: Json = json.loads(body)
    if show:
        _say(f"    {answer['state']}")
    return answer


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
