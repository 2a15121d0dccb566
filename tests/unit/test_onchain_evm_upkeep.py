"""Upkeep of EVM payments, in states that no node gives on request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.evm.node import Conditions
from rpcsvc.settlement.onchain.evm.presence import EvmPresence
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    BlockPoint,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    Inclusion,
)
from rpcsvc.settlement.onchain.evm.upkeep import EvmUpkeep
from tests.sandbox import ManualClock
from tests.unit.evm_chain import NETWORK

ORDER = EvmPaymentOrder("sweep_1", EvmPurpose.SWEEP, "0xhot", 5, "0xtoken", b"", 60_000)
SETTLED = EvmPayment(
    "arbitrum", "0xhot", 4, ORDER, (Attempt("0xt1", "00", 100, 1, 0),), 0,
    state=EvmPaymentState.SETTLED, published_at=0,
    inclusion=Inclusion("0xt1", BlockPoint(90, "0xold"), 1, 1),
)  # fmt: skip
MINED_IN_VAIN = SimpleNamespace(
    txid="0xt1", block_number=99, block_hash="0xnew", ok=False, gas_used=1, gas_price=1,
    l1_fee=None, logs=(),
)  # fmt: skip


@pytest.mark.parametrize(("mined_nonces", "offers"), [(5, 0), (4, 1)])
async def test_settled_sweep_mined_again_in_vain_is_not_replaced(
    mined_nonces: int, offers: int
) -> None:
    """Its block was replaced; its nonce is spent. Where the nonce is not, it is offered again."""
    clock, state = ManualClock(), {"payment": SETTLED}
    board = Conditions("arbitrum")
    connection: Any = SimpleNamespace(
        network=NETWORK,
        has=AsyncMock(side_effect=lambda block: block.hash != "0xold"),
        client=SimpleNamespace(
            nonce=AsyncMock(return_value=mined_nonces), transaction=AsyncMock(return_value=object())
        ),
    )
    presence = EvmPresence(connection, board)

    async def verdict(payment: EvmPayment, _top: object) -> Any:
        judgement = presence._mined_in_vain(payment, MINED_IN_VAIN, 2)  # type: ignore[arg-type]
        state["payment"] = judgement.payment
        return judgement.verdict

    async def payment(_: str) -> EvmPayment:
        return state["payment"]

    offered = AsyncMock(return_value=[SimpleNamespace(is_taken=True, more_may_help=False)])
    payments: Any = SimpleNamespace(
        gas=SimpleNamespace(
            is_too_low=AsyncMock(return_value=False), raised_price=AsyncMock(return_value=None)
        ),
        board=board, writer=asyncio.Lock(), verdict=verdict, payment=payment, hand_over=offered,
        paid_out_attempt=AsyncMock(return_value=None),
    )  # fmt: skip
    upkeep = EvmUpkeep(connection, payments, AsyncMock(), clock)
    top: Any = SimpleNamespace(number=100, hash="0xtop")
    for _ in range(2):
        await upkeep._compare(state["payment"], top)
        clock.now += 60_000
    assert offered.await_count == offers
    assert len(board.present()) == offers


async def test_payment_mined_while_another_is_signed_is_not_replaced() -> None:
    """Late when it was looked up; then a batch was signed, which takes seconds."""
    waits = replace(SETTLED, state=EvmPaymentState.PUBLISHED, inclusion=None)
    state, writer = {"payment": waits}, asyncio.Lock()

    async def payment(_: str) -> EvmPayment:
        return state["payment"]

    async def verdict(_payment: EvmPayment, _top: object = None) -> Verdict:
        state["payment"] = replace(waits, inclusion=SETTLED.inclusion)
        return Verdict(Outcome.PENDING, "1 of 2 confirmations")

    client = SimpleNamespace(
        nonce=AsyncMock(return_value=5), transaction=AsyncMock(return_value=object())
    )
    connection: Any = SimpleNamespace(network=NETWORK, client=client)
    gas = SimpleNamespace(
        is_too_low=AsyncMock(return_value=False), raised_price=AsyncMock(return_value=None)
    )
    offered = AsyncMock(return_value=[SimpleNamespace(is_taken=True, more_may_help=False)])
    payments: Any = SimpleNamespace(
        gas=gas, board=Conditions("arbitrum"), writer=writer, payment=payment, verdict=verdict,
        hand_over=offered, paid_out_attempt=AsyncMock(return_value=None),
    )  # fmt: skip
    clock = ManualClock()
    clock.now = NETWORK.bump_after_ms
    upkeep = EvmUpkeep(connection, payments, AsyncMock(), clock)
    async with writer:
        follow = asyncio.create_task(upkeep._follow("sweep_1", Verdict(Outcome.PENDING)))
        await asyncio.sleep(0)
    await follow
    assert gas.raised_price.await_count == 0
    assert offered.await_count == 0


async def test_payment_under_way_again_is_not_told_of_as_ended() -> None:
    """An older database has one as published that had ended and was gone; it ends once more."""

    async def payment(_: str) -> EvmPayment:
        return SETTLED

    board = Conditions("arbitrum")
    payments: Any = SimpleNamespace(
        board=board, payment=payment, gas=None,
        hand_over=AsyncMock(return_value=[SimpleNamespace(is_taken=True)]),
    )  # fmt: skip
    connection: Any = SimpleNamespace(network=NETWORK)
    upkeep = EvmUpkeep(connection, payments, AsyncMock(), ManualClock())
    await upkeep._publish_again(SETTLED, Verdict(Outcome.ABSENT))
    assert len(board.present()) == 1
    await upkeep._follow("sweep_1", Verdict(Outcome.SETTLED))
    assert board.present() == []


async def test_payment_mined_again_below_the_compared_is_not_told() -> None:
    """A look-up between two passes recorded its new block, which the pass before had compared."""

    top: Any = SimpleNamespace(number=100, hash="0xtop")
    board = Conditions("arbitrum")
    payments: Any = SimpleNamespace(
        board=board, gas=None,
        hand_over=AsyncMock(return_value=[SimpleNamespace(is_taken=True)]),
    )  # fmt: skip
    ledger: Any = SimpleNamespace(
        ended_above=AsyncMock(return_value=[]), payment=AsyncMock(return_value=SETTLED)
    )
    connection: Any = SimpleNamespace(network=NETWORK, has=AsyncMock(return_value=True))
    upkeep = EvmUpkeep(connection, payments, ledger, ManualClock())
    await upkeep._publish_again(SETTLED, Verdict(Outcome.ABSENT))
    assert len(board.present()) == 1
    await upkeep._watch_ended(top)
    assert board.present() == []
