"""Handlers of sandbox.fund and sandbox.fault, which only the sandbox engine has."""

from __future__ import annotations

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import format_units, parse_any_amount
from rpcsvc.domain.order import AgentState
from rpcsvc.operations.envelope import Answer
from rpcsvc.operations.inputs import read_order_id
from rpcsvc.operations.params import FaultParams, FundParams
from rpcsvc.operations.service import Call, SandboxService
from rpcsvc.operations.swap import find_any_order, look_again
from rpcsvc.operations.validation_messages import missing
from rpcsvc.orders.ports.sandbox import NEEDED, FaultKind


async def fund(service: SandboxService, params: FundParams, _call: Call) -> Answer:
    """Send a simulated deposit; by default what is still due."""
    order = await find_any_order(service, params.order_id)
    asset = order.terms.deposit_asset
    units = None if params.amount is None else parse_any_amount(params.amount, asset).units
    tx = await service.controls.fund(order, units)
    service.wake()
    data = {
        "transaction": {
            "txid": tx.txid,
            "network": tx.network,
            "to": tx.recipient,
            "amount": format_units(tx.units, asset),
            "asset": asset.symbol,
        }
    }
    poll = look_again(order, "Watch the order until it is completed or has failed.")
    return Answer(AgentState.READY, data, [poll])


async def fault(service: SandboxService, params: FaultParams, _call: Call) -> Answer:
    """Provoke a fault, move the clock, or change the rate."""
    kind = FaultKind(params.fault)
    if params.order_id is not None:
        read_order_id(params.order_id)
    if NEEDED.get(kind) == "orderId":
        if params.order_id is None:
            raise missing("orderId")
        await service.controls.fault_on_order(kind, await find_any_order(service, params.order_id))
    else:
        await service.controls.fault(kind, seconds=params.seconds, rate=params.rate)
    service.wake()
    return Answer(AgentState.READY, {"fault": kind.value, "now": iso8601(service.clock.now_ms())})
