"""The addresses of all examples, and the Monero one encoded for each network."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, TypeVar, cast

from rpcsvc.domain.addresses import MoneroNetwork, subaddress_on

T = TypeVar("T")

EVM: Final = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO: Final = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)


def on_network(value: T, network: str) -> T:
    """A deep copy of a JSON value whose examples can be sent to a service on ``network``."""
    return cast("T", _copy(value, _monero(network)))


def _copy(value: Any, monero: str) -> Any:
    if isinstance(value, str):
        return value.replace(MONERO, monero)
    if isinstance(value, dict):
        return {name: _copy(each, monero) for name, each in value.items()}
    return [_copy(each, monero) for each in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=8)
def _monero(network: str) -> str:
    """The example's address; a sandbox takes those of all networks, a regtest chain mainnet's."""
    named = [each for each in MoneroNetwork if each == network]
    return subaddress_on(MONERO, named[0]) if named else MONERO
