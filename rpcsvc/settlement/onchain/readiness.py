"""What ``rpcsvc onchain init`` checks: each thing that the engine needs, with what to do about it.

Pure: from what a look found (inspection.py) and the settings to a list of checks. What does not
live here: asking nodes, making keys, printing (cli/operator/onchain.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.settlement.onchain.inspection import MoneroFound, NetworkFound, XmrHeld
from rpcsvc.settlement.onchain.monero.ledger import MoneroOptions

_WEI_DIGITS: Final = 18
_BLOCK_MINUTES: Final = 2


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``remedy`` says what to do when it is not ``ok``."""

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


def monero_checks(found: MoneroFound, options: MoneroOptions, floor: int) -> Iterator[Check]:
    """Node, wallet, and its outputs. ``floor`` in piconero."""
    if found.node_problem is not None:
        yield Check(
            "monero node", False, found.node_problem,
            "Start monerod, let it synchronise, and set monerod_url, monero_network.",
        )  # fmt: skip
        return
    yield Check("monero node", True, f"{options.nettype}, at height {found.height}")
    if found.held is None or found.primary_address is None:
        yield Check(
            "monero wallet", False, found.wallet_problem or "not found",
            "Run monero-wallet-rpc with the service's own wallet, and set wallet_url,"
            " wallet_username, wallet_password, wallet_file.",
        )  # fmt: skip
        return
    yield Check("monero wallet", True, f"open, its address is {found.primary_address}")
    yield _xmr_check(found.held, found.primary_address, options, floor)


def _xmr_check(held: XmrHeld, address: str, options: MoneroOptions, floor: int) -> Check:
    total = held.unlocked + held.locked
    detail = (
        f"{format_units(held.unlocked, XMR)} XMR to spend, {format_units(held.locked, XMR)} locked,"
        f" in {held.outputs} outputs"
    )
    wanted = max(floor, 1)
    if total < wanted:
        least = f"at least {format_units(floor - total, XMR)} XMR" if floor else "XMR"
        return Check("XMR", False, detail, f"Send {least} to {address}")
    if not held.unlocked:
        minutes = held.blocks_to_unlock * _BLOCK_MINUTES
        return Check("XMR", False, detail, f"Wait about {minutes} minutes: all of it is locked.")
    if held.large < options.outputs_target:
        detail += f"; the service splits them into {options.outputs_target} by itself"
    return Check("XMR", True, detail)


# --- USDC ------------------------------------------------------------------------------------


def network_checks(
    found: NetworkFound, hot_wallet: str | None, native_token: str
) -> Iterator[Check]:
    """Node and token, gas and USDC of one network."""
    network = found.network
    if found.problem is not None:
        yield Check(
            f"{network.name} node", False, found.problem,
            f"Run a node of chain {network.chain_id} and name it in onchain.nodes:"
            f" {network.name}=URL.",
        )  # fmt: skip
        return
    yield Check(f"{network.name} node", True, f"chain {network.chain_id}, USDC at {network.token}")
    if found.paused:
        yield Check(
            f"{network.name} token", False, "USDC is paused by its issuer",
            "Wait: nobody can move it now.",
        )  # fmt: skip
    if found.hot is None or hot_wallet is None:
        return
    if found.blacklisted:
        yield Check(
            f"{network.name} token", False, f"{hot_wallet} is on the token's blacklist",
            "Nothing it holds there can be moved. Take the network out of onchain.nodes.",
        )  # fmt: skip
    yield _gas_check(found, found.hot.ether, hot_wallet, native_token)
    units = found.hot.usdc
    remedy = None if units else f"Send USDC on {network.name} to {hot_wallet}"
    name, detail = f"{network.name} USDC", f"{format_units(units, USDC)} USDC"
    yield Check(name, bool(units), detail, remedy)


def _gas_check(found: NetworkFound, wei: int, hot_wallet: str, native_token: str) -> Check:
    network = found.network
    name, missing = f"{network.name} gas", network.gas_reserve - wei
    detail = f"{coins(wei)} {native_token}, of {coins(network.gas_reserve)} that should be there"
    if missing <= 0:
        return Check(name, True, detail)
    remedy = (
        f"Send at least {coins(missing)} {native_token} on {network.name} to {hot_wallet}:"
        " it pays the gas of payouts and sweeps."
    )
    return Check(name, False, detail, remedy)


def usdc_floor_check(found: Sequence[NetworkFound], hot_wallet: str, floor: int) -> Check | None:
    """Whether all networks together hold the floor; None when none is set or not all are known."""
    known = [item.hot.usdc for item in found if item.hot is not None]
    if not floor or len(known) < len(found):
        return None
    total = sum(known)
    shown = format_units(total, USDC), format_units(floor, USDC)
    missing = format_units(max(0, floor - total), USDC)
    remedy = None if total >= floor else f"Send at least {missing} USDC to {hot_wallet}"
    detail = f"{shown[0]} USDC on all networks, the floor is {shown[1]}"
    return Check("USDC floor", total >= floor, detail, remedy)
