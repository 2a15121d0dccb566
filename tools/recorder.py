"""Records whole swaps on a sandbox, for the documents that show real answers.

``make generate`` plays the script and writes ``recording.json``, which the product reads.
"""

from __future__ import annotations

import hashlib
import json

from coincurve import PrivateKey
from msgspec.structs import asdict

from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.order import AgentState
from rpcsvc.http.documents.recording import EXAMPLE_KEY, RecordedCall, Recording
from rpcsvc.operations import table
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.strict_json import Json

START_MS = 1_767_323_045_000  # 2026-01-02T03:04:05Z
STEP_MS = 250
LONGEST_WAIT_STEPS = 400
HOUR_MS = 3_600_000
_OPERATION = {operation.name: operation for operation in OPERATIONS}
_DONE = frozenset({AgentState.COMPLETED.value, AgentState.TERMINAL_FAILURE.value})


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
    opened = await stage.play("ticket", ticket["operation"], ticket["params"])
    read = next(a for a in opened.answer["nextActions"] if a["action"] == "read_ticket")
    await stage.play("ticket-read", read["operation"], read["params"])


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


def dumps(recording: Recording) -> str:
    """The text of ``recording.json``."""
    rows = [asdict(exchange) for exchange in recording.values()]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
