"""kill -9 around a signed payment: one debit, one credit, with or without the client's copy."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from eth_account import Account
from x402.client import x402ClientSync
from x402.mechanisms.evm.exact.register import register_exact_evm_client
from x402.schemas import PaymentRequired

from tests.e2e.audit import audit, count, deposits_on_chain, orders_of
from tests.e2e.processes import (
    Crash,
    Gone,
    Server,
    call,
    call_for_data,
    crash_name,
    server,
    until_over,
)
from tests.e2e.swaps import SWAPS

Json = dict[str, Any]


def signer() -> x402ClientSync:
    client = x402ClientSync()
    client.set_spend_controls(False)
    register_exact_evm_client(client, Account.from_key(b"\7" * 32))
    return client


@dataclass
class Payer:
    """A client that survives a crash; ``keeps``: it still has the payment that it signed."""

    data_dir: Path
    keeps: bool
    payment: Json | None = None
    end: Json = field(default_factory=dict)

    async def run(self, at: Server) -> None:
        """Order, pay, follow to the end. Raises Gone."""
        keyed = {**SWAPS["u2x"], "idempotency-key": "the key-01234567"}
        made, _ = await call_for_data(at, "swap.execute", keyed)
        order_id = made["order"]["orderId"]
        await self.pay(at, order_id)
        self.end = await until_over(at, order_id)

    async def pay(self, at: Server, order_id: str) -> None:
        """Sign the payment that the service asks for; none if it asks for none."""
        payment = self.payment if self.keeps else None
        if payment is None:
            asked = await call(at, "swap.fund", {"orderId": order_id})
            if asked["ok"] or asked["error"]["code"] == "order_not_fundable":
                return  # under way, or there already
            required = asked["error"]["details"]["paymentRequired"]
            signed = signer().create_payment_payload(PaymentRequired.model_validate(required))
            payment = self.payment = signed.model_dump(by_alias=True, exclude_none=True)
        paid = await call(at, "swap.fund", {"orderId": order_id, "payment": payment})
        assert paid["ok"], paid


STEPS = [
    ("authorize", "before", 1),
    pytest.param(("authorize", "after", 1), marks=pytest.mark.slow),
    ("pool", "before", 1),
    ("pool", "after", 1),
    *(
        pytest.param((seam, when, number), marks=pytest.mark.slow)
        for seam, number in (("carry_out", 1), ("resolve", 1), ("resolve", 2))
        for when in ("before", "after")
    ),
]


@pytest.mark.parametrize("keeps", [True, False], ids=["same payment", "payment lost"])
@pytest.mark.parametrize("crash", STEPS, ids=crash_name)
async def test_crash_around_a_signed_payment_is_one_debit(
    tmp_path: Path, crash: Any, keeps: bool
) -> None:
    data_dir = tmp_path / "data"
    payer = Payer(data_dir, keeps)
    at: Crash = crash
    async with server(data_dir, crash=at) as first:
        with suppress(Gone):
            await payer.run(first)
        await first.death()
    async with server(data_dir) as second:
        await payer.run(second)
        assert second.stop() == 0
    orders = orders_of(data_dir)
    assert list(orders.values()) == ["completed"]
    assert [deposits_on_chain(data_dir, order_id) for order_id in orders] == [1]
    assert count(data_dir, "deposits") == count(data_dir, "funding_authorizations") == 1
    assert audit(data_dir) == []
