"""Inspects nodes and wallets from outside the service, and checks what the engine needs.

While a service runs (``alone`` False) nothing is changed: the wallet is neither opened nor
refreshed. The checks of ``rpcsvc onchain init`` are pure functions of the findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, RpcFailure, TimedOut
from rpcsvc.settlement.onchain.evm.gas import HotBalances
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.records import MoneroOptions, WalletRecord
from rpcsvc.settlement.onchain.monero.wallet import WalletClient, read_held
from rpcsvc.settlement.onchain.monero.wallet_types import WalletCode

_WEI_DIGITS: Final = 18
_BLOCK_MINUTES: Final = 2


class XmrHeld(Struct, frozen=True):
    """The wallet's balance, in piconero. ``outputs`` counts all that could be listed, ``large``
    those of the configured size; ``blocks_to_unlock`` until everything can be spent.
    """

    unlocked: int
    locked: int
    outputs: int
    large: int
    blocks_to_unlock: int


class MoneroFound(Struct, frozen=True):
    """The result of the inspection of Monero. A problem is None where all is well."""

    height: int | None = None
    node_problem: str | None = None
    wallet_problem: str | None = None
    primary_address: str | None = None
    held: XmrHeld | None = None


class NetworkFound(Struct, frozen=True):
    """The inspection of one EVM network. ``paused`` and ``blacklisted`` are the token's."""

    network: EvmNetwork
    problem: str | None = None
    hot: HotBalances | None = None
    paused: bool = False
    blacklisted: bool = False


class _Problem(Exception):
    """A problem of the wallet, for the operator."""


# --- Monero ----------------------------------------------------------------------------------


class MoneroInspector(Struct, frozen=True):
    """Inspects node and wallet once; opens and closes the clients of ``connection``.

    ``recorded`` is the wallet of the service's first start.
    """

    connection: MoneroConnection
    recorded: WalletRecord | None
    options: MoneroOptions
    alone: bool

    @property
    def wallet(self) -> WalletClient:
        """The wallet daemon."""
        return self.connection.wallet

    async def poll(self) -> MoneroFound:
        """Return everything that can be found out now."""
        async with self.connection.node, self.connection.wallet:
            try:
                info = await self.connection.check_node()
            except (RpcFailure, ChainUnusable) as error:
                return MoneroFound(node_problem=str(error), wallet_problem="its node is not there")
            return await self._read_wallet(info.height)

    async def _read_wallet(self, height: int) -> MoneroFound:
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
        """Return the primary address of the open wallet; open it when no service does."""
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
        held = await read_held(self.wallet, height)
        return XmrHeld(
            unlocked=held.unlocked,
            locked=held.locked,
            outputs=len(held.outputs),
            large=sum(item.amount >= self.options.output_units for item in held.outputs),
            blocks_to_unlock=held.blocks_to_unlock,
        )


# --- EVM -------------------------------------------------------------------------------------


async def inspect_network(
    network: EvmNetwork, client: EvmClient, hot_wallet: str | None
) -> NetworkFound:
    """Inspect a node once, its token, and the hot wallet's balances there, if there is a wallet."""
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


class ReadinessCheck(Struct, frozen=True):
    """A result of the inspection. ``remedy``: the operator's next step when it is not ``ok``."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


def coins(wei: int) -> str:
    """Wei as a decimal number of whole coins."""
    whole, part = divmod(wei, 10**_WEI_DIGITS)
    digits = f"{part:0{_WEI_DIGITS}d}".rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)


# --- XMR -------------------------------------------------------------------------------------


def monero_checks(
    found: MoneroFound, options: MoneroOptions, floor: int
) -> Iterator[ReadinessCheck]:
    """Yield the checks of node, wallet and its outputs. ``floor`` in piconero."""
    if found.node_problem is not None:
        yield ReadinessCheck(
            "monero node", False, found.node_problem,
            "Start monerod, let it synchronise, and set monerod_url, monero_network.",
        )  # fmt: skip
        return
    yield ReadinessCheck("monero node", True, f"{options.nettype}, at height {found.height}")
    if found.held is None or found.primary_address is None:
        yield ReadinessCheck(
            "monero wallet", False, found.wallet_problem or "not found",
            "Run monero-wallet-rpc with the service's own wallet, and set wallet_url,"
            " wallet_username, wallet_password, wallet_file.",
        )  # fmt: skip
        return
    yield ReadinessCheck("monero wallet", True, f"open, its address is {found.primary_address}")
    yield _xmr_check(found.held, found.primary_address, options, floor)


def _xmr_check(held: XmrHeld, address: str, options: MoneroOptions, floor: int) -> ReadinessCheck:
    total = held.unlocked + held.locked
    detail = (
        f"{format_units(held.unlocked, XMR)} XMR to spend, {format_units(held.locked, XMR)} locked,"
        f" in {held.outputs} outputs"
    )
    wanted = max(floor, 1)
    if total < wanted:
        least = f"at least {format_units(floor - total, XMR)} XMR" if floor else "XMR"
        return ReadinessCheck("XMR", False, detail, f"Send {least} to {address}")
    if not held.unlocked:
        minutes = held.blocks_to_unlock * _BLOCK_MINUTES
        return ReadinessCheck(
            "XMR", False, detail, f"Wait about {minutes} minutes: all of it is locked."
        )
    if held.large < options.outputs_target:
        detail += f"; the service splits them into {options.outputs_target} by itself"
    return ReadinessCheck("XMR", True, detail)


# --- USDC ------------------------------------------------------------------------------------


def network_checks(
    found: NetworkFound, hot_wallet: str | None, native_token: str
) -> Iterator[ReadinessCheck]:
    """Yield the checks of one network: node and token, gas and USDC."""
    network = found.network
    if found.problem is not None:
        yield ReadinessCheck(
            f"{network.name} node", False, found.problem,
            f"Run a node of chain {network.chain_id} and name it in onchain.nodes:"
            f" {network.name}=URL.",
        )  # fmt: skip
        return
    yield ReadinessCheck(
        f"{network.name} node", True, f"chain {network.chain_id}, USDC at {network.token}"
    )
    if found.paused:
        yield ReadinessCheck(
            f"{network.name} token", False, "USDC is paused by its issuer",
            "Wait: nobody can move it now.",
        )  # fmt: skip
    if found.hot is None or hot_wallet is None:
        return
    if found.blacklisted:
        yield ReadinessCheck(
            f"{network.name} token", False, f"{hot_wallet} is on the token's blacklist",
            "Nothing it holds there can be moved. Take the network out of onchain.nodes.",
        )  # fmt: skip
    yield _gas_check(found, found.hot.ether, hot_wallet, native_token)
    units = found.hot.usdc
    remedy = None if units else f"Send USDC on {network.name} to {hot_wallet}"
    name, detail = f"{network.name} USDC", f"{format_units(units, USDC)} USDC"
    yield ReadinessCheck(name, bool(units), detail, remedy)


def _gas_check(found: NetworkFound, wei: int, hot_wallet: str, native_token: str) -> ReadinessCheck:
    network = found.network
    name, missing = f"{network.name} gas", network.gas_reserve - wei
    detail = f"{coins(wei)} {native_token}, of {coins(network.gas_reserve)} that should be there"
    if missing <= 0:
        return ReadinessCheck(name, True, detail)
    remedy = (
        f"Send at least {coins(missing)} {native_token} on {network.name} to {hot_wallet}:"
        " it pays the gas of payouts and sweeps."
    )
    return ReadinessCheck(name, False, detail, remedy)


def usdc_floor_check(
    found: Sequence[NetworkFound], hot_wallet: str, floor: int
) -> ReadinessCheck | None:
    """Return whether all networks together hold the floor; None without one, or if a network is not
    known.
    """
    known = [item.hot.usdc for item in found if item.hot is not None]
    if not floor or len(known) < len(found):
        return None
    total = sum(known)
    shown = format_units(total, USDC), format_units(floor, USDC)
    missing = format_units(max(0, floor - total), USDC)
    remedy = None if total >= floor else f"Send at least {missing} USDC to {hot_wallet}"
    detail = f"{shown[0]} USDC on all networks, the floor is {shown[1]}"
    return ReadinessCheck("USDC floor", total >= floor, detail, remedy)
