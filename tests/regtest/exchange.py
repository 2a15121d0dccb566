"""The full stack: daemons, chains with money on them, and the service as a process of its own."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.evm.keys import (
    HOT_WALLET_INDEX,
    EvmSigner,
    HdKeys,
    create_mnemonic,
    read_mnemonic,
)
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Crash, Server, send, server, until
from tests.regtest.daemons import (
    WALLET_NAME,
    WALLET_PASSWORD,
    Anvil,
    AnvilControls,
    Miner,
    Monerod,
    WalletRpc,
    mined,
)
from tests.regtest.token import Token

XMR: Final = 10**12
USDC: Final = 10**6
ETHER: Final = 10**18
CONFIRMATIONS: Final = 3
PRICE: Final = "165.00"
STEP_SECONDS: Final = 300
BLOCK_SECONDS: Final = 1.0

_CHAINS = """
[chains.arbitrum]
display_name = "Arbitrum One"
chain_id = {chain_id}
aliases = ["arb", "arbitrum-one"]
native_token = "ETH"
usdc_contract = "{token}"
min_swap_usd = 1
confirmations = {confirmations}
block_time_ms = 250
test_network = "arbitrum-regtest"
test_chain_id = {chain_id}
test_usdc_contract = "{token}"
"""


@dataclass
class Exchange:
    """The stack of one operator, and the purse of one user: an EVM account with USDC and ether.

    The user's XMR is the miner's bank. Blocks come only when ``mine`` is called.
    """

    data_dir: Path
    monerod: Monerod
    wallet_rpc: WalletRpc
    miner: Miner
    anvil: Anvil
    token: Token
    evm: EvmClient
    controls: AnvilControls
    user: EvmSigner
    treasury: str
    extra: dict[str, str] = field(default_factory=dict)
    next_block: float = 0.0

    def environ(self) -> dict[str, str]:
        """The service's settings. ``extra`` may put a proxy in place of a node."""
        return {
            "RPCSVC_ENGINE": "onchain",
            "RPCSVC_CHAINS_FILE": str(self.data_dir / "chains.toml"),
            "RPCSVC_RATES__FIXED_USDC_PER_XMR": PRICE,
            "RPCSVC_ONCHAIN__MONERO_NETWORK": "regtest",
            "RPCSVC_ONCHAIN__MONEROD_URL": self.monerod.url,
            "RPCSVC_ONCHAIN__WALLET_URL": self.wallet_rpc.url,
            "RPCSVC_ONCHAIN__WALLET_USERNAME": self.wallet_rpc.USERNAME,
            "RPCSVC_ONCHAIN__WALLET_PASSWORD": self.wallet_rpc.SECRET,
            "RPCSVC_ONCHAIN__WALLET_FILE": WALLET_NAME,
            "RPCSVC_ONCHAIN__WALLET_FILE_PASSWORD": WALLET_PASSWORD,
            "RPCSVC_ONCHAIN__NODES": f"arbitrum={self.anvil.url}",
            "RPCSVC_ONCHAIN__XMR_CONFIRMATIONS": f"0={CONFIRMATIONS}",
            "RPCSVC_ONCHAIN__XMR_SETTLED_AFTER": str(CONFIRMATIONS),
            "RPCSVC_ONCHAIN__XMR_OUTPUTS": "0",
            # The fewest: monero-wallet-rpc needs 17 ms of CPU for each.
            "RPCSVC_ONCHAIN__XMR_ADDRESSES": "64",
            "RPCSVC_ONCHAIN__USDC_ADDRESSES": "64",
            "RPCSVC_ONCHAIN__POLL_MS": "100",
            **self.extra,
        }

    @asynccontextmanager
    async def serving(
        self, crash: Crash | None = None, *, is_new: bool = False
    ) -> AsyncIterator[Server]:
        """The service, ready to take orders."""
        environ = self.environ()
        async with server(self.data_dir, crash=crash, environ=environ, is_new=is_new) as running:
            yield running

    @asynccontextmanager
    async def starting(self, crash: Crash | None = None) -> AsyncIterator[Server]:
        """The service during its start; it may not be ready, or already killed."""
        running = Server(self.data_dir, crash=crash, environ=self.environ())
        try:
            yield running
        finally:
            if not running.is_dead:
                running.kill()

    async def mine(self, blocks: int = 1) -> None:
        """A few blocks on both chains."""
        await self.miner.mine(blocks)
        await self.controls.mine(blocks)

    async def mine_in_time(self, *, evm: bool = True) -> None:
        """Mine a block on each chain, if enough time has passed since the last.

        The time between blocks is needed: the service signs only while wallet and node agree on
        the chain's height.
        """
        if time.monotonic() < self.next_block:
            return
        await self.miner.mine()
        if evm:
            await self.controls.mine()
        self.next_block = time.monotonic() + BLOCK_SECONDS

    async def pay_usdc(self, to: str, units: int) -> str:
        """Send USDC from the user, mined; the transaction id."""
        await self.token.mint(self.user.address, units)
        txid = await self._from_user(to, units)
        await mined(self.evm, txid)
        return txid

    async def _from_user(self, to: str, units: int) -> str:
        from rpcsvc.domain import usdc  # noqa: PLC0415

        await self.controls.impersonate(self.user.address)
        return await self.controls.send_from(
            self.user.address, self.token.address, usdc.transfer(to, units)
        )

    async def pay_xmr(self, to: str, units: int) -> str:
        """Send XMR from the user, left in the pool; the transaction id."""
        return await self.miner.pay(to, units)

    @property
    def node(self) -> MonerodClient:
        """A client of the node, to be used as ``async with``."""
        return MonerodClient(self.monerod.endpoint)

    @property
    def wallet(self) -> WalletClient:
        """A client of the operator's wallet, to be used as ``async with``."""
        return WalletClient(self.wallet_rpc.endpoint)


@asynccontextmanager
async def exchange(
    directory: Path,
    miner: Miner,
    wallet_rpc: WalletRpc,
    anvil: Anvil,
    token: Token,
    *,
    xmr: int = 30 * XMR,
    usdc: int = 20_000 * USDC,
) -> AsyncIterator[Exchange]:
    """A stack whose wallets hold so much, in several outputs; the service is not started."""
    data_dir = directory / "operator"
    data_dir.mkdir(mode=0o700)
    chains = _CHAINS.format(
        chain_id=anvil.chain_id, token=token.address, confirmations=CONFIRMATIONS
    )
    (data_dir / "chains.toml").write_text(chains)
    create_mnemonic(data_dir / KEY_FILE, system_random)
    keys = await asyncio.to_thread(HdKeys, read_mnemonic(data_dir / KEY_FILE))
    hot = keys.signer(HOT_WALLET_INDEX).address
    user = EvmSigner(system_random(32))
    controls = AnvilControls(token.client)
    await controls.set_ether(hot, 10 * ETHER)
    await controls.set_ether(user.address, 10 * ETHER)
    await token.mint(hot, usdc)
    async with WalletClient(wallet_rpc.endpoint) as wallet:
        primary = await wallet.primary_address()
    await miner.fund(primary, *[xmr // 10] * 10)
    yield Exchange(
        data_dir, miner.monerod, wallet_rpc, miner, anvil, token, token.client, controls, user, hot
    )


async def call(at: Server, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """One operation's envelope, over JSON-RPC."""
    message = {"jsonrpc": "2.0", "id": "1", "method": method, "params": dict(params)}
    answer = orjson.loads(await send(at, message))
    assert "result" in answer, answer
    return dict(answer["result"])


async def create(at: Server, **params: Any) -> dict[str, Any]:
    """Create an order; its envelope. Raises AssertionError if the service refuses it."""
    envelope = await call(at, "service.swap.create", {"chain": "arbitrum", **params})
    assert envelope["ok"], envelope
    return envelope


async def status(at: Server, order_id: str) -> dict[str, Any]:
    """The order in the answer of swap.status."""
    return dict((await details(at, order_id))["order"])


async def details(at: Server, order_id: str) -> dict[str, Any]:
    """The full data of swap.status: order, deposits, transfers and receipt."""
    envelope = await call(at, "service.swap.status", {"orderId": order_id})
    assert envelope["ok"], envelope
    return dict(envelope["data"])


async def reaches(
    stack: Exchange, at: Server, order_id: str, wanted: str, *, mine: bool = True
) -> dict[str, Any]:
    """Wait, with a block from time to time, until the order has a status."""

    async def poll() -> dict[str, Any] | None:
        order = await status(at, order_id)
        if order["status"] == wanted:
            return order
        if mine:
            await stack.mine_in_time()
        return None

    return await until(poll, seconds=STEP_SECONDS)


async def swept(stack: Exchange) -> None:
    """Mine from time to time until the database has all USDC as swept.

    A completed order does not imply it: sweeps are independent of orders.
    """

    async def is_on_record() -> bool:
        await stack.mine_in_time()
        with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as database:
            (left,) = database.execute(
                "SELECT count(*) FROM evm_holdings WHERE confirmed > taken"
            ).fetchone()
        return not left

    await until(is_on_record, seconds=STEP_SECONDS)
