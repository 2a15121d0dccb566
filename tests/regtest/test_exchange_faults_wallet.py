"""Faults of wallets, gas, nonces, the token and the disk, in the middle of orders.

As in test_exchange_faults.py: health gives the reason, quotes that can't be paid are refused, and
afterwards every order has one payout and the money of both chains adds up.
"""

from __future__ import annotations

import resource

import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.keys import (
    HOT_WALLET_INDEX,
    EvmSigner,
    HdKeys,
    TransactionPlan,
    read_mnemonic,
)
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Server, until
from tests.regtest.daemons import WALLET_NAME, WALLET_PASSWORD
from tests.regtest.exchange import Exchange, status
from tests.regtest.faults import both_refused, degraded, refusal, well
from tests.regtest.trading import Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BOTH = ("x2u", "u2x")
GWEI = 10**9


async def finished(trader: Trader, at: Server) -> None:
    """Complete all orders, stop the service, and check the books."""
    await well(at)
    await trader.finish(at)
    await trader.stop(at)
    await trader.check()


# --- the XMR wallet ---------------------------------------------------------------------------


async def test_a_wallet_that_was_closed_is_opened_again(trader: Trader) -> None:
    async with trader.stack.serving() as at:
        for direction in BOTH:
            await trader.order_and_pay(at, direction)
        async with trader.stack.wallet as wallet:
            await wallet.store()
            await wallet.close()
        await finished(trader, at)


async def test_a_wallet_that_cannot_be_opened_stops_orders(trader: Trader) -> None:
    directory = trader.stack.wallet_rpc.directory
    files = [directory / WALLET_NAME, directory / f"{WALLET_NAME}.keys"]
    async with trader.stack.serving() as at:
        for direction in BOTH:
            await trader.order_and_pay(at, direction)
        async with trader.stack.wallet as wallet:
            await wallet.store()
            for file in files:
                file.rename(file.with_name(f"away-{file.name}"))
            await wallet.close()
        await degraded(at, "XMR: ")
        await both_refused(at)
        for file in files:
            file.with_name(f"away-{file.name}").rename(file)
        await finished(trader, at)


async def test_another_wallet_is_never_paid_from(trader: Trader) -> None:
    async with trader.stack.serving() as at:
        for direction in BOTH:
            await trader.order_and_pay(at, direction)
        async with trader.stack.wallet as wallet:
            await wallet.store()
            await wallet.create("another", WALLET_PASSWORD)
        await degraded(at, "another wallet: its primary address begins with")
        await both_refused(at)
        async with trader.stack.wallet as wallet:
            await wallet.close()
            await wallet.open(WALLET_NAME, WALLET_PASSWORD)
            await wallet.auto_refresh(enabled=False)
        await finished(trader, at)


# --- gas --------------------------------------------------------------------------------------


async def test_no_usdc_is_reserved_without_ether_for_gas(trader: Trader) -> None:
    stack = trader.stack
    async with stack.serving() as at:
        await trader.order_and_pay(at, "x2u")
        held = await stack.evm.ether(stack.treasury)
        await stack.controls.set_ether(stack.treasury, 0)
        await degraded(at, "the hot wallet on arbitrum is short of ether for gas")
        await refusal(at, "x2u")
        await stack.mine(5)
        await stack.controls.set_ether(stack.treasury, held)
        await finished(trader, at)


async def test_no_usdc_is_reserved_while_gas_is_too_dear(trader: Trader) -> None:
    stack = trader.stack
    async with stack.serving() as at:
        await trader.order_and_pay(at, "x2u")
        await stack.controls.set_next_base_fee(2_000 * GWEI)
        await stack.controls.mine()
        await degraded(at, "gas on arbitrum is too dear")
        await refusal(at, "x2u")
        # Each empty block lowers the base fee by an eighth.
        await stack.controls.mine(60)
        await finished(trader, at)


# --- nonces -----------------------------------------------------------------------------------


def own_key(stack: Exchange) -> EvmSigner:
    """The hot wallet's key, for use outside of the service."""
    keys = HdKeys(read_mnemonic(stack.data_dir / KEY_FILE))
    return keys.signer(HOT_WALLET_INDEX)


async def send_with(stack: Exchange, signer: EvmSigner, nonce: int, max_fee: int) -> None:
    """Use a nonce for a call without effect."""
    plan = TransactionPlan(
        chain_id=stack.anvil.chain_id, nonce=nonce, to=stack.token.address, gas=100_000,
        max_fee=max_fee, tip=GWEI, data=usdc.transfer(signer.address, 0),
    )  # fmt: skip
    answer = await stack.evm.submit(signer.sign(plan).raw)
    assert answer.submission.value == "accepted", answer


async def test_nonce_used_elsewhere_pauses_payouts_until_resumed(
    trader: Trader,
) -> None:
    stack = trader.stack
    async with stack.serving() as at:
        await trader.order_and_pay(at, "x2u")
        await trader.finish(at)
        signer, switch = own_key(stack), PauseSwitch(stack.data_dir)
        await send_with(stack, signer, await stack.evm.nonce(signer.address), 100 * GWEI)
        swap = await trader.order_and_pay(at, "x2u")

        async def paused() -> bool:
            await stack.mine_in_time()
            return switch.reason() is not None

        await until(paused)
        await degraded(at, "transactions of the hot wallet on arbitrum that the database does not")
        await degraded(at, "something else sends from the hot wallet on arbitrum")
        assert await trader.received(swap) == []
        assert (await status(at, swap.order_id))["status"] == "deposit_confirmed"
        switch.resume()
        await trader.finish(at)
        assert switch.reason() is None
        await trader.stop(at)
    await trader.check()


async def test_payout_with_a_taken_nonce_is_not_repaid_too_soon(
    trader: Trader,
) -> None:
    """The user is refunded once the other transaction is deep."""
    stack = trader.stack
    async with stack.serving() as at:
        swap = await trader.order_and_pay(at, "x2u")
        await stack.controls.automine(enabled=False)
        signer = own_key(stack)
        nonce = await stack.evm.nonce(signer.address)

        async def published() -> bool:
            await stack.mine_in_time(evm=False)
            return await stack.evm.nonce(signer.address) > nonce

        await until(published)
        await send_with(stack, signer, nonce, 5_000 * GWEI)
        await stack.controls.automine(enabled=True)
        await stack.mine(2)
        assert (await status(at, swap.order_id))["status"] == "executing_swap"

        async def asks() -> bool:
            await stack.mine_in_time()
            return str((await status(at, swap.order_id))["status"]) == "refunding"

        await until(asks)
        await trader.stop(at)
    assert await trader.received(swap) == []
    trader.abandon(swap)
    await trader.check()


# --- the token --------------------------------------------------------------------------------


async def test_a_paused_token_stops_orders_and_nothing_else(trader: Trader) -> None:
    stack = trader.stack
    async with stack.serving() as at:
        await trader.order_and_pay(at, "x2u")
        await stack.token.pause()
        await degraded(at, "USDC on arbitrum is paused by its issuer")
        await both_refused(at)
        await stack.token.unpause()
        await finished(trader, at)


# --- the disk ---------------------------------------------------------------------------------


def limit_files(at: Server, size: int) -> None:
    """Limit the size of the service's files, as a full disk does."""
    _, hard = resource.prlimit(at.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(at.pid, resource.RLIMIT_FSIZE, (size, hard))


@pytest.mark.parametrize("direction", BOTH)
async def test_a_full_disk_stops_everything_until_there_is_room(
    trader: Trader, direction: str
) -> None:
    stack = trader.stack
    async with stack.serving() as at:
        await trader.order_and_pay(at, direction)
        wal = stack.data_dir / f"{DATABASE_NAME}-wal"
        limit_files(at, wal.stat().st_size)
        await stack.mine(2)
        await degraded(at, "")
        await stack.mine(2)
        limit_files(at, resource.RLIM_INFINITY)
        await finished(trader, at)
