"""An operator's money as the chains have it, without the service's database.

Counts payments by payee, wallet balances and network fees, and checks that they add up to the
atomic unit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm.node_types import LogFilter, Receipt
from rpcsvc.settlement.onchain.monero.monerod import Spent
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import (
    OutputFilter,
    WalletCode,
    WalletTransferKind,
)
from tests.e2e.processes import until
from tests.regtest.exchange import Exchange


async def usdc_received(stack: Exchange, account: str) -> list[int]:
    """USDC units of each Transfer event to an account, in the chain as it is now."""
    topics = (usdc.TRANSFER_TOPIC, None, usdc.address_word(account))
    wanted = LogFilter(stack.token.address, topics)
    head = await stack.evm.block()
    assert head is not None
    found = (await stack.evm.logs(wanted, 0, head.number)).logs
    return [usdc.read_transfer(item.topics, item.data).units for item in found]


async def xmr_received(wallet: WalletClient, address: str) -> list[int]:
    """Piconero of each transaction that paid an address of a wallet, mined or in the pool."""
    await refreshed(wallet)
    return [item.amount for item in await wallet.transfers(0) if item.address == address]


async def xmr_payments(wallet: WalletClient, addresses: Container[str]) -> set[str]:
    """The transactions that paid any of these addresses of a wallet: one may pay several."""
    await refreshed(wallet)
    return {item.txid for item in await wallet.transfers(0) if item.address in addresses}


async def refreshed(wallet: WalletClient) -> None:
    """Refresh a wallet. Its connection may be to a node that was killed since."""

    async def scanned() -> bool:
        try:
            await wallet.refresh()
        except NodeError as error:
            if error.code != WalletCode.NO_DAEMON:
                raise
            return False
        return True

    await until(scanned)


# --- the operator's wallets ------------------------------------------------------------------


@dataclass(frozen=True)
class XmrWallet:
    """Piconero in the operator's wallet. ``unspent``: the sum of outputs unspent by the node.

    ``sent``: the fees of the transactions that it has sent and that are mined, by id.
    """

    unspent: int
    shown: int
    sent: Mapping[str, int]


async def xmr_wallet(stack: Exchange) -> XmrWallet:
    """Read the operator's wallet, and check its outputs against the node."""
    async with stack.wallet as wallet, stack.node as node:
        await refreshed(wallet)
        outputs = await wallet.outputs(OutputFilter.ALL)
        spent = await node.key_images([item.key_image for item in outputs])
        unspent = sum(item.amount for item in outputs if spent[item.key_image] is Spent.UNSPENT)
        sent = await wallet.transfers(0, (WalletTransferKind.OUTGOING,))
        return XmrWallet(
            unspent, (await wallet.balance()).total, {item.txid: item.fee for item in sent}
        )


async def hot_transactions(stack: Exchange, first_block: int = 0) -> list[Receipt]:
    """The receipts of the hot wallet's mined transactions, newest block first.

    From block to parent: Anvil's list by number may have holes after it was killed.
    """
    receipts = []
    block = await stack.evm.rpc.read("eth_getBlockByNumber", ["latest", True])
    while int(block["number"], 16) >= first_block:
        for item in block["transactions"]:
            if item["from"].lower() == stack.treasury.lower():
                receipt = await stack.evm.receipt(item["hash"])
                assert receipt is not None
                receipts.append(receipt)
        number, parent = block["number"], block["parentHash"]
        if int(number, 16) == 0:
            break
        block = await stack.evm.rpc.read("eth_getBlockByHash", [parent, True])
        assert block is not None, f"the parent {parent} of block {number} is not there"
    return receipts


# --- the sums --------------------------------------------------------------------------------


@dataclass
class Books:
    """The wallets' opening balances, and the users' payments since.

    ``given``: units that the test itself moved into or out of the hot wallet. ``payments``: XMR
    transactions that reached users.
    """

    stack: Exchange
    xmr: int
    usdc: int
    ether: int
    first_block: int
    deposit_addresses: set[str] = field(default_factory=set)
    xmr_in: int = 0
    usdc_in: int = 0
    xmr_out: int = 0
    usdc_out: int = 0
    ether_given: int = 0
    payments: int = 0

    @classmethod
    async def opened(cls, stack: Exchange) -> Books:
        """Read the wallets before the first order."""
        head = await stack.evm.block()
        assert head is not None
        return cls(
            stack,
            (await xmr_wallet(stack)).unspent,
            await stack.token.balance(stack.treasury),
            await stack.evm.ether(stack.treasury),
            head.number + 1,
        )

    async def differences(self) -> list[str]:
        """All differences; empty if there are none. The service must not be running."""
        return [*await self._xmr_differences(), *await self._usdc_differences()]

    async def _xmr_differences(self) -> list[str]:
        held = await xmr_wallet(self.stack)
        due = self.xmr + self.xmr_in - self.xmr_out - sum(held.sent.values())
        return [
            *_difference("XMR in the wallet", held.unspent, due),
            *_difference("XMR that the wallet shows", held.shown, held.unspent),
            *_difference("transactions of the XMR wallet", len(held.sent), self.payments),
        ]

    async def _usdc_differences(self) -> list[str]:
        sent = await hot_transactions(self.stack, self.first_block)
        gas = sum(item.gas_used * item.gas_price for item in sent)
        ether = await self.stack.evm.ether(self.stack.treasury)
        held = await self._usdc_held(self.deposit_addresses | {self.stack.treasury})
        return [
            *_difference("USDC held", held, self.usdc + self.usdc_in - self.usdc_out),
            *_difference("ether", ether, self.ether + self.ether_given - gas),
            *_difference("failed transactions", sum(not item.ok for item in sent), 0),
        ]

    async def _usdc_held(self, accounts: Iterable[str]) -> int:
        return sum([await self.stack.token.balance(account) for account in accounts])


def _difference(what: str, found: int, due: int) -> list[str]:
    return [] if found == due else [f"{what}: {found}, should be {due}, off by {found - due}"]
