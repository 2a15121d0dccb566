"""The chains on which the service takes and pays USDC, and the names that callers may use."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields

from rpcsvc.domain.addresses import evm_checksum, parse_evm_address
from rpcsvc.domain.money import XMR, Asset
from rpcsvc.errors import InvalidDestination, InvalidInput, UnsupportedChain

MONERO_CHAIN_ID = 0

_MONERO_NAMES = frozenset({"monero", "xmr"})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9 ._-]*", re.ASCII)
_LONGEST_SHOWN = 40

# As a chain id is written: ASCII only, since int() would take digits of any script.
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,19}", re.ASCII)
MONERO_NETWORK: Final = "monero"


class Chain(Struct, frozen=True):
    """One EVM chain. ``min_swap_usd`` in whole dollars, ``block_time_ms`` typical.

    The ``test_*`` fields name the test network that the sandbox uses in its payment URIs, and that
    the engine onchain serves on a Monero test network.
    ``confirmations``: blocks after which a payout is settled. ``deposit_confirmations``: what a
    deposit waits for, by amount (settlement/onchain/thresholds.py); without them, as a payout.
    ``safe_seconds`` and ``finalized_seconds``: how long a block typically takes to get that tag; a
    chain without them does not use the tag.
    ``l1_fee_oracle`` is the contract of an OP-stack chain that gives the fee for data on
    L1; None on a chain that takes nothing for that.
    """

    name: str
    display_name: str
    chain_id: int
    aliases: tuple[str, ...]
    native_token: str
    usdc_contract: str
    min_swap_usd: int
    confirmations: int
    block_time_ms: int
    test_network: str
    test_chain_id: int
    test_usdc_contract: str
    l1_fee_oracle: str | None = None
    deposit_confirmations: tuple[str, ...] = ()
    safe_seconds: int | None = None
    finalized_seconds: int | None = None


class ChainRegistry:
    """All configured chains, by name, alias and number."""

    def __init__(self, chains: Iterable[Chain]) -> None:
        self._chains = tuple(chains)
        self._by_id = _unique({}, ((c.chain_id, c) for c in self._chains))
        names = ((n.lower(), c) for c in self._chains for n in (c.name, *c.aliases))
        self._by_name = _unique({}, names)
        self.token_contracts = frozenset(
            contract.lower()
            for chain in self._chains
            for contract in (chain.usdc_contract, chain.test_usdc_contract)
        )

    def all(self) -> tuple[Chain, ...]:
        """The chains in the order of the configuration."""
        return self._chains

    def by_id(self, chain_id: int) -> Chain | None:
        """The chain of that number."""
        return self._by_id.get(chain_id)

    def usdc_on(self, chain_id: int) -> str | None:
        """The USDC contract on the chain of that number, or on the test network."""
        for chain in self._chains:
            if chain_id == chain.chain_id:
                return chain.usdc_contract
            if chain_id == chain.test_chain_id:
                return chain.test_usdc_contract
        return None

    def resolve(self, value: object, *, field: str = "chain") -> Chain:
        """The chain that a caller names: name, alias, number, or number as a string.

        Raises InvalidInput for another type and UnsupportedChain for an unknown chain.
        """
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InvalidInput(
                f"{field} must be a chain name or number, such as arbitrum or 42161.",
                field=field,
                received=value,
            )
        chain = self._find(value)
        if chain is None:
            raise self._unsupported(value, field)
        return chain

    def _find(self, value: int | str) -> Chain | None:
        if isinstance(value, int):
            return self._by_id.get(value)
        number = _number(value)
        return self._by_name.get(value.lower()) if number is None else self._by_id.get(number)

    def _unsupported(self, value: int | str, field: str) -> UnsupportedChain:
        names = [chain.name for chain in self._chains]
        shown = _shown(value)
        near = difflib.get_close_matches(shown.lower(), list(self._by_name), n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if _is_monero(value):
            hint = f" {field} is the USDC side of the swap; the XMR side is always Monero."
        return UnsupportedChain(
            f"{shown!r} is not a supported chain.{hint} Send one of: {', '.join(names)}.",
            field=field,
            received=value,
            allowed=names,
            details={"nearest": near} if near else None,
        )


def _number(text: str) -> int | None:
    """The chain id that a string spells."""
    return int(text) if _DECIMAL.fullmatch(text) else None


def _is_monero(value: int | str) -> bool:
    if isinstance(value, int):
        return value == MONERO_CHAIN_ID
    return value.lower() in _MONERO_NAMES or _number(value) == MONERO_CHAIN_ID


def _shown(value: int | str) -> str:
    # From 4300 digits on Python refuses to write an integer as text.
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    return str(value)[:_LONGEST_SHOWN]


def load_chains(toml_text: str) -> ChainRegistry:
    """The registry from its TOML form: a table ``[chains.<name>]`` for each chain.

    Raises ValueError naming the chain and the key that is wrong.
    """
    document = tomllib.loads(toml_text)
    tables = document.get("chains")
    if set(document) != {"chains"} or not isinstance(tables, dict) or not tables:
        raise ValueError("the chains file must hold [chains.<name>] tables and nothing else")
    no_tables = [name for name, table in tables.items() if not isinstance(table, dict)]
    if no_tables:
        raise ValueError(f"chains.{no_tables[0]} must be a table: [chains.{no_tables[0]}]")
    return ChainRegistry(_chain(name, table) for name, table in tables.items())


_WANTED = {f.name: f.type for f in fields(Chain) if f.name != "name"}
_REQUIRED = {f.name for f in fields(Chain) if f.name != "name" and f.required}


def _chain(name: str, table: dict[str, Any]) -> Chain:
    for key in sorted((table.keys() - _WANTED.keys()) | (_REQUIRED - table.keys())):
        problem = "is missing" if key in _WANTED else "is not known"
        raise ValueError(f"chains.{name}.{key} {problem}")
    for key, value in table.items():
        _check(f"chains.{name}.{key}", key, value)
    for callers_name in (name, *table["aliases"]):
        _check_name(f"chains.{name}", callers_name)
    lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return Chain(name=name, **{**table, **lists})


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: a name or alias begins with a letter, unlike {name!r}")
    if name.lower() in _MONERO_NAMES:
        raise ValueError(f"{where}: {name!r} is the other side of every swap, not a USDC chain")


def _check(where: str, key: str, value: Any) -> None:
    good, wanted = {
        int: (type(value) is int and value > 0, "a whole number above 0"),
        int | None: (type(value) is int and value > 0, "a whole number above 0"),
        str: (isinstance(value, str) and bool(value), "a string that is not empty"),
        str | None: (isinstance(value, str) and bool(value), "a string that is not empty"),
        tuple[str, ...]: (
            isinstance(value, list) and all(isinstance(v, str) for v in value),
            "a list of strings",
        ),
    }[_WANTED[key]]
    if not good:
        raise ValueError(f"{where} must be {wanted}, not {value!r}")
    if key.endswith("usdc_contract") or key == "l1_fee_oracle":
        _check_contract(where, value)


def _check_contract(where: str, address: str) -> None:
    try:
        parse_evm_address(address.lower(), field=where)
    except InvalidDestination as problem:
        raise ValueError(problem.message) from None
    if evm_checksum(address) != address:
        raise ValueError(f"{where} must be a checksummed address (EIP-55): {evm_checksum(address)}")


def _unique(index: dict[Any, Chain], entries: Iterable[tuple[Any, Chain]]) -> dict[Any, Chain]:
    for key, chain in entries:
        if key in index:
            raise ValueError(f"chains {index[key].name} and {chain.name} both claim {key!r}")
        index[key] = chain
    return index


def network_of(asset: Asset, chain: Chain) -> str:
    """The network that an asset moves on, in a swap with USDC on ``chain``."""
    return MONERO_NETWORK if asset is XMR else chain.name
