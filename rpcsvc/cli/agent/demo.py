"""``rpcsvc demo``: runs one swap each way on the sandbox and prints every step."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rpcsvc.cli.context import FAILED, OK, Context, add_common, add_target, say
from rpcsvc.cli.opening import in_process, opening
from rpcsvc.client.blocking import rpc_calls
from rpcsvc.client.calls import Calls
from rpcsvc.client.errors import Refused
from rpcsvc.client.transport import find_endpoint
from rpcsvc.domain.addresses import evm_address_from_seed, stagenet_subaddress
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import Settings

POLLS = 60
PAUSE_SECONDS = 0.25
_SANDBOX = "sandbox"
_BY_NAME = {operation.name: operation for operation in OPERATIONS}
Json = dict[str, Any]
T = TypeVar("T")


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="run a whole swap each way on the sandbox")
    add_common(parser)
    add_target(parser)
    parser.set_defaults(command=_run)


def _run(context: Context) -> int:
    settings = context.settings()
    url, data_dir = context.url(), context.options.data_dir
    endpoint = find_endpoint(url, settings.data_dir) if url or data_dir else None
    if endpoint is not None:
        caller = Remote(rpc_calls(endpoint, context.token(settings), settings.brand.slug))
        return OK if run_remote(caller) else FAILED
    configure_logging(settings.log.format, "warning")
    passing = data_dir is None  # on a sandbox of its own, whatever engine is configured
    with opening(settings) if passing else in_process(settings):
        return OK if run_local(settings, context.local, passing=passing) else FAILED


class DemoTarget(Protocol):
    """Calls operations, and waits between polls."""

    async def call(self, name: str, params: Json) -> Json:
        """The envelope of one call."""
        ...

    async def pause(self) -> None:
        """Wait PAUSE_SECONDS."""
        ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """Calls a service in this process, and runs its worker between polls."""

    service: LocalService

    async def call(self, name: str, params: Json) -> Json:
        """The envelope of one call."""
        return dict(json.loads(await self.service.call(_BY_NAME[name], params, "demo", None)))

    async def pause(self) -> None:
        """Run the worker for a while."""
        await self.service.settle_for(PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class Remote:
    """Calls a server."""

    calls: Calls

    async def call(self, name: str, params: Json) -> Json:
        """The envelope of one call. Raises Unreachable."""
        try:
            return await self.calls.call(name, params, request_id="demo")
        except Refused as refused:
            return refused.envelope

    async def pause(self) -> None:
        """Wait PAUSE_SECONDS while the server settles."""
        await asyncio.sleep(PAUSE_SECONDS)


class CallFailed(Exception):
    """An operation answered ``ok: false``, for a network other than the sandbox's, or in an unknown
    form.
    """


def run_remote(caller: Remote) -> bool:
    """Run the demo against a server; True when both orders completed. Raises Unreachable."""
    return asyncio.run(_demo(caller))


def run_local(
    settings: Settings,
    local: Callable[[Settings], AbstractAsyncContextManager[LocalService]],
    *,
    passing: bool,
) -> bool:
    """Run the demo in this process; True when both orders completed.

    ``passing``: use a sandbox in a temporary data directory. Raises DataDirInUse and SettingsError.
    """

    async def run(chosen: Settings) -> bool:
        async with local(chosen) as service:
            return await _demo(InProcess(service))

    if not passing:
        return asyncio.run(run(settings))
    with tempfile.TemporaryDirectory(prefix="rpcsvc-demo-") as folder:
        own = {"data_dir": Path(folder), "engine": "sandbox"}
        return asyncio.run(run(settings.model_copy(update=own)))


async def _demo(caller: DemoTarget) -> bool:
    _say("Two swaps on the sandbox: simulated chains, no real money.")
    try:
        first = await _swap(caller, "x2u", "0.8", evm_address_from_seed(system_random(32)))
        second = await _swap(caller, "u2x", "150", stagenet_subaddress(system_random(64)))
    except CallFailed as failed:
        _say(f"The demo stops: {failed}")
        return False
    _say("Both orders completed." if first and second else "An order did not complete.")
    return first and second


async def _swap(caller: DemoTarget, direction: str, amount: str, to: str) -> bool:
    swap = {"direction": direction, "chain": "arbitrum", "amount": amount}
    _say(f"\n=== {direction} on arbitrum, sending {amount} ===")
    plan = await _step(caller, "swap.plan", swap)
    network = _text(plan, "data", "network")
    if network != _SANDBOX:
        # Its orders would reserve real money that nobody pays for.
        raise CallFailed(f"the service is on {network}, and the demo is for a sandbox.")
    _say(f"    missing: {', '.join(map(str, _list(plan, 'missingInputs')))}")
    quote = _at(await _step(caller, "swap.quote", swap), "data", "quote")
    brings = f"{_text(quote, 'expectedOutput')} {_text(quote, 'payoutAsset')}"
    _say(f"    you get {brings} at {_text(quote, 'rate')}")
    made = await _step(caller, "swap.execute", {**swap, "to": to})
    order_id = _text(made, "data", "order", "orderId")
    funding = _at(made, "data", "fundingInstructions")
    _say(f"    send {_text(funding, 'amountDisplay')} to {_text(funding, 'depositAddress')}")
    await _step(caller, "sandbox.fund", {"orderId": order_id})
    return await _poll(caller, order_id)


async def _poll(caller: DemoTarget, order_id: str) -> bool:
    shown = None
    for _ in range(POLLS):
        answer = _checked("swap.status", await caller.call("swap.status", {"orderId": order_id}))
        state = _text(answer, "state")
        if state != shown:
            shown = state
            _say(f"--> swap.status: {shown}")
        if shown in ("completed", "terminal_failure"):
            _show_transfers(answer)
            return shown == "completed"
        await caller.pause()
    _say(f"    {order_id} is not over yet; the demo stops waiting.")
    return False


def _show_transfers(answer: Json) -> None:
    for transfer in _list(answer, "data", "transfers"):
        kind, amount, asset = (_text(transfer, name) for name in ("kind", "amount", "asset"))
        ended = f"{_text(transfer, 'status')}, transaction {_at(transfer, 'txid')}"
        _say(f"    {kind} of {amount} {asset} {ended}")


async def _step(caller: DemoTarget, name: str, params: Json) -> Json:
    _say(f"--> {name} {json.dumps(params)}")
    answer = _checked(name, await caller.call(name, params))
    _say(f"    {_text(answer, 'state')}")
    return answer


def _checked(name: str, answer: Json) -> Json:
    if not answer["ok"]:
        reported = f"{_text(answer, 'error', 'code')}: {_text(answer, 'error', 'message')}"
        raise CallFailed(f"{name} answered {reported}")
    return answer


# Another service may answer in the envelope's form, too. Each of these raises CallFailed for an
# answer that this service never gives.


def _at(answer: Any, *path: str) -> Any:
    """The part of an answer that ``path`` leads to."""
    for name in path:
        if not isinstance(answer, dict) or name not in answer:
            raise CallFailed(f"another service or version answers: it has no {name}.")
        answer = answer[name]
    return answer


def _text(answer: Any, *path: str) -> str:
    return _of(str, answer, path)


def _list(answer: Any, *path: str) -> list[Any]:
    return _of(list, answer, path)


def _of(kind: type[T], answer: Any, path: Sequence[str]) -> T:
    found = _at(answer, *path)
    if not isinstance(found, kind):
        raise CallFailed(f"another service or version answers: see its {path[-1]}.")
    return found


def _say(line: str) -> None:
    say(f"{line}\n")
    sys.stdout.flush()
