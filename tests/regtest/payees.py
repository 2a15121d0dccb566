"""Payees of the XMR adapter, and the order layer's part of a payment."""

from __future__ import annotations

from dataclasses import dataclass

from rpcsvc.domain.order import Transfer
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.monero.wallet import MOST_DESTINATIONS, WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination, WalletTransferKind
from tests.regtest.daemons import SPENDABLE_AGE, Miner, WalletRpc
from tests.regtest.treasury import OPTIONS, XMR, Treasury, add_account, bank_of


@dataclass
class Payee:
    """A wallet outside of the service, which shows the payments that arrived."""

    wallet: WalletClient
    address: str

    async def received(self) -> list[int]:
        await self.wallet.refresh()
        return [item.amount for item in await self.wallet.transfers(0)]


async def funded_accounts(rpc: WalletRpc, miner: Miner, count: int) -> list[int]:
    """Accounts with two outputs of 1 XMR each, paid together to save time."""
    made = [await add_account(rpc) for _ in range(count)]
    due = [Destination(address, XMR) for _, address in made for _ in range(2)]
    async with bank_of(miner) as bank:
        await bank.refresh()
        for at in range(0, len(due), MOST_DESTINATIONS):
            payment = await bank.prepare(due[at : at + MOST_DESTINATIONS])
            await bank.relay(payment.metadata)
        await bank.store()
    await miner.mine(SPENDABLE_AGE)
    return [account for account, _ in made]


async def pay(adapter: Treasury, transfer: Transfer) -> Verdict:
    """Publish as the order layer does: only if the transaction is absent from the node."""
    verdict = await adapter.adapter.payments.look_up(transfer)
    if verdict.outcome is Outcome.ABSENT:
        verdict = await adapter.adapter.payments.publish(transfer)
    return verdict


async def settle(adapter: Treasury, miner: Miner, transfer: Transfer) -> None:
    """Mine until the transfer is settled."""
    assert (await pay(adapter, transfer)).outcome is Outcome.PENDING
    await miner.mine(OPTIONS.settled_after)
    assert await adapter.adapter.payments.look_up(transfer) == Verdict(Outcome.SETTLED)


async def sent(wallet: WalletClient) -> list[str]:
    kinds = (WalletTransferKind.OUTGOING, WalletTransferKind.PENDING, WalletTransferKind.FAILED)
    await wallet.refresh()
    return [item.txid for item in await wallet.transfers(0, kinds)]
