"""Records whole swaps on the sandbox, and renders them as Markdown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import asdict

from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.order import AgentState
from rpcsvc.http.documents import links
from rpcsvc.http.documents.links import code, json_text
from rpcsvc.http.site import API_ROOT, RPC_PATH, Site
from rpcsvc.operations import table
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.service import option_of
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import Settings

FILE = "recording.json"
# The site of the service that was recorded: shown as the reader's own.
RECORDED_AT = Settings().effective_site_url
START_MS = 1_767_323_045_000  # 2026-01-02T03:04:05Z
STEP_MS = 250
LONGEST_WAIT_STEPS = 400
HOUR_MS = 3_600_000
EXAMPLE_KEY = "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c05"
# Placeholder key of a second order, where JSON-RPC and HTTPS keys are separate namespaces.
RPC_EXAMPLE_KEY = "7b1d9e44-2c8f-4f6a-8d53-90c4a1e2b6f8"
_OPERATION = {operation.name: operation for operation in OPERATIONS}
_DONE = frozenset({AgentState.COMPLETED.value, AgentState.TERMINAL_FAILURE.value})


class RecordedCall(Struct, frozen=True):
    """One call and its answer. ``name`` is also the request id that the call was made under."""

    name: str
    operation: str
    params: Json
    key: str | None
    answer: Json


Recording = Mapping[str, RecordedCall]


class StageClock:
    """A clock that the script moves. Milliseconds since the epoch."""

    def __init__(self) -> None:
        self.now = START_MS

    def now_ms(self) -> int:
        """The time of the script."""
        return self.now


class StageRandom:
    """A deterministic byte source for the recording. Never use it for real ids."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, size: int) -> bytes:
        """The next ``size`` bytes; up to 64."""
        self._count += 1
        return hashlib.sha512(f"stage {self._count}".encode()).digest()[:size]


class _Stage:
    """Makes calls and records them."""

    def __init__(self, service: LocalService, clock: StageClock) -> None:
        self._service = service
        self._clock = clock
        self.exchanges: dict[str, RecordedCall] = {}

    async def play(
        self, name: str, operation: str, params: Json, key: str | None = None
    ) -> RecordedCall:
        """Make a call and keep it under ``name``."""
        answer = await self._call(name, operation, params, key)
        exchange = RecordedCall(name, operation, params, key, answer)
        self.exchanges[name] = exchange
        return exchange

    async def _call(self, name: str, operation: str, params: Json, key: str | None) -> Json:
        body = await self._service.call(_OPERATION[operation], params, name, key)
        answer: Json = json.loads(body)
        return answer

    async def follow(self, prefix: str, order_id: str, last_state: str) -> None:
        """Poll until the order ends, and record each answer with a new state."""
        for _ in range(LONGEST_WAIT_STEPS):
            await self.pass_time(STEP_MS)
            answer = await self._call(f"{prefix}-poll", "swap.status", {"orderId": order_id}, None)
            if answer["state"] == last_state:
                continue
            last_state = answer["state"]
            await self.play(f"{prefix}-{last_state}", "swap.status", {"orderId": order_id})
            if last_state in _DONE:
                return
        raise TimeoutError(f"{prefix}: still {last_state} after {LONGEST_WAIT_STEPS} polls")

    @property
    def now(self) -> int:
        """The time of the script."""
        return self._clock.now

    async def pass_time(self, ms: int) -> None:
        """Advance the clock, and run the work that is due."""
        self._clock.now += ms
        await self._service.catch_up()


async def record(service: LocalService, clock: StageClock) -> Recording:
    """Run the script on a fresh sandbox with ``clock`` and a StageRandom.

    Raises TimeoutError if an order does not end.
    """
    stage = _Stage(service, clock)
    swap = _swap_params()
    await _prepare(stage, swap)
    ordered = {**swap, "refundAddress": table.MONERO}
    await _succeed(stage, ordered)
    await _meet_errors(stage, swap, ordered)
    await _expire(stage, swap)
    await _refund(stage, swap)
    await _cancel(stage, swap)
    await _sign(stage)
    return stage.exchanges


def _swap_params() -> Json:
    """The table's own example of an order: XMR to USDC."""
    return dict(_OPERATION["swap.execute"].examples[0].params)


async def _prepare(stage: _Stage, swap: Json) -> None:
    without_to = {name: value for name, value in swap.items() if name != "to"}
    await stage.play("capabilities", "capabilities", {})
    await stage.play("plan-nothing-known", "swap.plan", {})
    await stage.play("plan-no-destination", "swap.plan", without_to)
    await stage.play("plan-ready", "swap.plan", {**swap, "hasFunds": True})
    await stage.play("quote", "swap.quote", without_to)


async def _succeed(stage: _Stage, swap: Json) -> None:
    order = await stage.play("execute", "swap.execute", swap, EXAMPLE_KEY)
    order_id = order.answer["data"]["order"]["orderId"]
    await stage.play("status-waiting_for_funding", "swap.status", {"orderId": order_id})
    funding = order.answer["data"]["fundingInstructions"]
    payment = {"orderId": order_id, "paymentUri": funding["paymentUri"]}
    await stage.play("check", "swap.check", payment)
    await stage.play("fund", "sandbox.fund", {"orderId": order_id})
    await stage.follow("status", order_id, AgentState.WAITING_FOR_FUNDING.value)
    await stage.play("events", "swap.events", {"orderId": order_id})


async def _meet_errors(stage: _Stage, swap: Json, ordered: Json) -> None:
    await stage.play("error-conflict", "swap.execute", {**ordered, "amount": "0.9"}, EXAMPLE_KEY)
    await stage.play("error-amount", "swap.quote", {**_priced(swap), "amount": "0.01"})
    # The form of the address is right, and its checksum is not.
    mistyped = swap["to"][:-2] + swap["to"][-2:].lower()
    await stage.play("error-destination", "swap.plan", {**swap, "to": mistyped})


def _priced(swap: Json) -> Json:
    return {name: swap[name] for name in ("direction", "chain", "amount")}


async def _expire(stage: _Stage, swap: Json) -> None:
    with_webhook = {**swap, "webhook": "https://agent.example/hooks/swaps"}
    order = await stage.play("unfunded", "swap.create", with_webhook, "0f6c2b9a-order-2")
    data = order.answer["data"]
    order_id = data["order"]["orderId"]
    owned = {"orderId": order_id, "sessionId": data["sessionId"]}
    await stage.play("webhook-deliveries", "swap.webhookDeliveries", owned)
    await stage.pass_time(2 * HOUR_MS)
    status = await stage.play("unfunded-end", "swap.status", {"orderId": order_id})
    ticket = next(a for a in status.answer["nextActions"] if a["action"] == "create_support_ticket")
    await stage.play("ticket", ticket["operation"], ticket["params"])


async def _refund(stage: _Stage, swap: Json) -> None:
    order = await stage.play("underfunded", "swap.create", swap, "0f6c2b9a-order-3")
    data = order.answer["data"]
    order_id = data["order"]["orderId"]
    await stage.play("part", "sandbox.fund", {"orderId": order_id, "amount": "0.02"})
    await stage.pass_time(2 * HOUR_MS)
    # A deposit is judged in several passes: seen, confirmed, then refunded.
    for _ in range(8):
        await stage.pass_time(STEP_MS)
    await stage.play("refund-asked", "swap.status", {"orderId": order_id})
    give = {
        "orderId": order_id,
        "sessionId": data["sessionId"],
        "address": table.MONERO,
    }
    await stage.play("refund-address", "swap.refundAddress", give)
    await stage.follow("refund", order_id, AgentState.REFUNDING.value)


async def _cancel(stage: _Stage, swap: Json) -> None:
    order = await stage.play("unwanted", "swap.create", swap, "0f6c2b9a-order-4")
    data = order.answer["data"]
    owned = {"orderId": data["order"]["orderId"], "sessionId": data["sessionId"]}
    await stage.play("list", "swap.list", {"sessionId": data["sessionId"]})
    await stage.play("cancel", "swap.cancel", owned)


async def _sign(stage: _Stage) -> None:
    """Sign a payment of an order with a publicly known key that owns nothing."""
    back = _OPERATION["swap.execute"].examples[1].params
    order = await stage.play("usdc-order", "swap.create", dict(back), "0f6c2b9a-order-5")
    params = {"orderId": order.answer["data"]["order"]["orderId"]}
    asked = await stage.play("payment-required", "swap.fund", params)
    offer = asked.answer["error"]["details"]["paymentRequired"]["accepts"][0]
    await stage.play("payment", "swap.fund", {**params, "payment": _payment(offer, stage.now)})


def _payment(offer: Json, now: int) -> Json:
    """The PaymentPayload of x402 that accepts an offer at ``now`` (ms)."""
    from coincurve import PrivateKey  # noqa: PLC0415 - of no use but to make the recording

    key, valid_before = PrivateKey(b"\1" * 32), now // 1_000 + offer["maxTimeoutSeconds"]
    public = key.public_key.format(compressed=False)[1:]
    payer = evm_checksum("0x" + usdc.keccak256(public)[-20:].hex())
    nonce = hashlib.sha256(b"stage nonce").digest()
    units = int(offer["amount"])
    given = usdc.Authorization(payer, offer["payTo"], units, 0, valid_before, nonce)
    extra, chain_id = offer["extra"], int(offer["network"].removeprefix("eip155:"))
    domain = usdc.Domain(extra["name"], extra["version"], chain_id, offer["asset"])
    signed = key.sign_recoverable(usdc.transfer_digest(domain, given), hasher=None)
    authorization = {
        "from": payer,
        "to": offer["payTo"],
        "value": offer["amount"],
        "validAfter": "0",
        "validBefore": str(valid_before),
        "nonce": f"0x{nonce.hex()}",
    }
    signature = f"0x{signed[:64].hex()}{27 + signed[64]:02x}"
    payload = {"signature": signature, "authorization": authorization}
    return {"x402Version": 2, "accepted": offer, "payload": payload}


def on_network(recording: Recording, network: str) -> Recording:
    """The recording, with the callers' addresses converted to another network."""
    return {
        name: RecordedCall(**table.on_network(asdict(exchange), network))
        for name, exchange in recording.items()
    }


def of_site(site: Site, document: Json) -> Json:
    """A document whose recorded answers have this site's network and URL."""
    on_its_network = json.dumps(table.on_network(document, site.network))
    given: Json = json.loads(on_its_network.replace(RECORDED_AT, site.url))
    return given


def dumps(recording: Recording) -> str:
    """The text of ``recording.json``."""
    rows = [asdict(exchange) for exchange in recording.values()]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


@lru_cache(maxsize=1)
def load() -> Recording:
    """The recording that is part of the package."""
    text = (resources.files(__package__) / FILE).read_text(encoding="utf-8")
    return {row["name"]: RecordedCall(**row) for row in json.loads(text)}


def show(site: Site, exchange: RecordedCall) -> str:
    """One call over HTTPS and its answer."""
    answer = code(json_text(exchange.answer).replace(RECORDED_AT, site.url), "json")
    return f"{code(_request(site, exchange), 'http')}\n\nAnswer:\n\n{answer}"


def _request(site: Site, exchange: RecordedCall) -> str:
    operation = links.operation_named(site, exchange.operation)
    params = dict(exchange.params)
    path = operation.path or ""
    for name in [name for name in params if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", str(params.pop(name)))
    query = f"?{urlencode(params)}" if operation.method == "GET" and params else ""
    host = site.url.partition("://")[2]
    lines = [f"{operation.method} {API_ROOT}{path}{query} HTTP/1.1", f"host: {host}"]
    lines.append(f"x-request-id: {exchange.name}")
    if exchange.key is not None:
        lines.append(f"{links.IDEMPOTENCY_HEADER}: {exchange.key}")
    if operation.method == "POST":
        lines += ["content-type: application/json", "", json_text(params)]
    return "\n".join(lines)


def show_elsewhere(site: Site, exchange: RecordedCall) -> str:
    """The recorded call as it looks over JSON-RPC and on the command line."""
    operation = links.operation_named(site, exchange.operation)
    key = RPC_EXAMPLE_KEY if site.rpc_needs_token else exchange.key
    message = {
        "jsonrpc": "2.0",
        "id": exchange.name,
        "method": site.rpc_method(operation),
        "params": {**exchange.params, links.IDEMPOTENCY_HEADER: key},
    }
    token = f"\n{links.RPC_TOKEN_HEADER}: <the operator's token>" if site.rpc_needs_token else ""
    request = (
        f"POST {RPC_PATH} HTTP/1.1\nhost: {site.url.partition('://')[2]}"
        f"\ncontent-type: application/json{token}\n\n{json_text(message)}"
    )
    options = " ".join(f"{option_of(name)} {value}" for name, value in exchange.params.items())
    command = (
        f"{site.client} {operation.command} {site.client_target} {options}"
        f" --idempotency-key {key} --request-id {exchange.name}"
    )
    return "\n\n".join(
        (
            code(request, "http"),
            "The envelope is in `result`. Protocol faults are JSON-RPC errors; what the operation"
            " itself finds is a result with `ok: false`.",
            code(command, "sh"),
            f"{_on_the_token(site)}The command prints one envelope, whatever the exit status: 0"
            " ok, 1 `ok: false`, 2 usage error (`error.code` is `invalid_request`), 3 no answer of"
            " the service (`unavailable`): the call may have been carried out. With 2 and 3"
            " `data.network` is null.",
        )
    )


def _on_the_token(site: Site) -> str:
    if not site.rpc_needs_token:
        return ""
    return (
        "Put the operator's token into the variable `AGENT_RPC_TOKEN` first. With a token keys are"
        " apart from those of HTTPS: under its own key this is another order than the one above,"
        " the same for JSON-RPC and the command. "
    )
