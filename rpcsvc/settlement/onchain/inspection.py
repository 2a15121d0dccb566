"""A look at nodes and wallets from outside the service: what is there, and what they hold.

Beside a running service (``alone`` False) nothing is changed: the wallet is neither opened nor
refreshed. What does not live here: what is missing and what to do about it (readiness.py), what
the database says (store/operator_books.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure, TimedOut
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.gas import HotBalances
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.options import EvmNetwork
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.holdings import look_at_held
from rpcsvc.settlement.onchain.monero.ledger import MoneroOptions, WalletRecord
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import WalletCode
from rpcsvc.settlement.onchain.unusable import ChainUnusable


@dataclass(frozen=True, slots=True)
class XmrHeld:
    """What the wallet holds, in piconero. ``outputs`` counts all that could be listed, ``large``
    those of the configured size; ``blocks_to_unlock`` until everything can be spent.
    """

    unlocked: int
    locked: int
    outputs: int
    large: int
    blocks_to_unlock: int


@dataclass(frozen=True, slots=True)
class MoneroFound:
    """What a look at Monero found. A problem is None where all is well."""

    height: int | None = None
    node_problem: str | None = None
    wallet_problem: str | None = None
    primary_address: str | None = None
    held: XmrHeld | None = None


@dataclass(frozen=True, slots=True)
class NetworkFound:
    """What a look at one EVM network found. ``paused`` and ``blacklisted`` are the token's."""

    network: EvmNetwork
    problem: str | None = None
    hot: HotBalances | None = None
    paused: bool = False
    blacklisted: bool = False


class _Problem(Exception):
    """What is wrong with the wallet, for the operator."""


# --- Monero ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoneroInspector:
    """One look at node and wallet; it opens and closes the clients of ``connection``.

    ``recorded`` is the wallet of the service's first start.
    """

    connection: MoneroConnection
    recorded: WalletRecord | None
    options: MoneroOptions
    alone: bool = field(kw_only=True)

    @property
    def wallet(self) -> WalletClient:
        """The wallet daemon."""
        return self.connection.wallet

    async def look(self) -> MoneroFound:
        """Everything that can be found out now."""
        async with self.connection.node, self.connection.wallet:
            try:
                info = await self.connection.check_node()
            except (RpcFailure, ChainUnusable) as error:
                return MoneroFound(node_problem=str(error), wallet_problem="its node is not there")
            return await self._look_at_wallet(info.height)

    async def _look_at_wallet(self, height: int) -> MoneroFound:
        address = None
        try:
            address = await self._open_address()
            await self._require_right(address)
            await self._require_scanned(height)
            held = await self._held(height)
        except (RpcFailure, _Problem) as error:
            return MoneroFound(height, wallet_problem=str(error), primary_address=address)
        return MoneroFound(height, primary_address=address, held=held)

    async def _open_address(self) -> str:
        """The primary address of the open wallet; opens it when that is nobody else's task."""
        try:
            return await self.wallet.primary_address()
        except NodeError as error:
            if error.code != WalletCode.NOT_OPEN:
                raise
        if not self.alone:
            raise _Problem("the wallet daemon has no wallet open; the service opens it by itself")
        if self.options.wallet_file is None:
            raise _Problem("the wallet daemon has no wallet open, and wallet_file is not set")
        await self.wallet.open(self.options.wallet_file, self.options.wallet_password)
        return await self.wallet.primary_address()

    async def _require_right(self, address: str) -> None:
        nettype = (await self.wallet.validate(address)).nettype
        if nettype != self.options.address_nettype:
            wanted = self.options.address_nettype
            raise _Problem(f"wrong network: the wallet is of {nettype}, not of {wanted}")
        known = self.recorded
        if known is not None and known.primary_address != address:
            raise _Problem(
                f"another wallet: its primary address begins with {address[:12]}, that of the"
                f" first start with {known.primary_address[:12]}"
            )

    async def _require_scanned(self, height: int) -> None:
        if self.alone:
            try:
                await self.wallet.refresh()
            except TimedOut:
                raise _Problem("the wallet is still scanning the chain; ask again later") from None
        scanned = await self.wallet.height()
        # A block may have come meanwhile.
        if scanned < height - 1:
            raise _Problem(f"the wallet is still scanning: it is at height {scanned} of {height}")

    async def _held(self, height: int) -> XmrHeld:
        held = await look_at_held(self.wallet, height)
        return XmrHeld(
            unlocked=held.unlocked,
            locked=held.locked,
            outputs=len(held.outputs),
            large=sum(item.amount >= self.options.output_units for item in held.outputs),
            blocks_to_unlock=held.blocks_to_unlock,
        )


# --- EVM -------------------------------------------------------------------------------------


async def look_at_network(
    network: EvmNetwork, client: EvmClient, hot_wallet: str | None
) -> NetworkFound:
    """One look at a node, its token, and what the hot wallet holds there, if there is one."""
    connection = EvmConnection(client, network)
    async with client:
        try:
            top = await connection.check()
            if hot_wallet is None:
                return NetworkFound(network, paused=connection.paused)
            ether, units = await client.ether(hot_wallet), await connection.balance(hot_wallet)
            blacklisted = await connection.is_blacklisted(hot_wallet)
        except (RpcFailure, ChainUnusable) as error:
            return NetworkFound(network, problem=str(error))
    return NetworkFound(
        network, None, HotBalances(ether, units, top.number), connection.paused, blacklisted
    )
