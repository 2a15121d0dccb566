"""A user who pays a USDC order by x402, with the client of the package x402."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from x402.client import x402ClientSync
from x402.mechanisms.evm.exact.register import register_exact_evm_client
from x402.schemas import PaymentRequired

from tests.e2e.processes import Server, until
from tests.regtest.exchange import USDC, call, reaches
from tests.regtest.trading import PaidOrder, Trader

VALUE: Final = 165 * USDC
# A call that fails with one of these codes may be repeated unchanged.
LATER: Final = {"unavailable"}


@dataclass
class Payer:
    """An account with USDC and no ether; ``keeps``: it still has the payment that it signed."""

    trader: Trader
    account: Any
    keeps: bool
    swap: PaidOrder | None = None
    deposit_address: str = ""
    payment: dict[str, Any] | None = None

    async def run(self, at: Server) -> None:
        """Order, sign, pay, follow to the end. Raises Gone."""
        if self.swap is None:
            self.swap, self.deposit_address = await self.trader.order(at, "u2x")
            self.trader.books.deposit_addresses.add(self.deposit_address)
            self.trader.books.usdc_in += VALUE
        await until(lambda: self._pay(at))
        await reaches(self.trader.stack, at, self.swap.order_id, "completed")

    async def _pay(self, at: Server) -> bool:
        """Pay what the service asks for, if it asks. False: try again."""
        assert self.swap is not None
        to = {"orderId": self.swap.order_id}
        payment = self.payment if self.keeps else None
        if payment is None:
            asked = await call(at, "service.swap.fund", to)
            if asked["ok"] or asked["error"]["code"] == "order_not_fundable":
                return True  # under way, or there already
            if asked["error"]["code"] in LATER:
                return False
            required = asked["error"]["details"]["paymentRequired"]
            payment = self.payment = self._signed(required)
        paid = await call(at, "service.swap.fund", {**to, "payment": payment})
        if not paid["ok"] and paid["error"]["code"] in LATER:
            return False
        assert paid["ok"], paid
        return True

    def _signed(self, required: dict[str, Any]) -> dict[str, Any]:
        client = x402ClientSync()
        client.set_spend_controls(False)
        register_exact_evm_client(client, self.account)
        signed = client.create_payment_payload(PaymentRequired.model_validate(required))
        return dict(signed.model_dump(by_alias=True, exclude_none=True))
