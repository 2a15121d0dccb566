"""The clients of the settings: ``[clients.NAME]``, who calls with which token, and within which
limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field

from rpcsvc.domain.addresses import MoneroNetwork, parse_evm_address, parse_monero_address
from rpcsvc.domain.clients import DEFAULT, Credential, KnownClient
from rpcsvc.domain.pricing import ONE_USDC
from rpcsvc.errors import InvalidDestination
from rpcsvc.settings_sources import Group, TextValue, integer_in

# Bounds of the table: each name is a label of metrics, and each token is compared at each call.
MOST_CLIENTS: Final = 100
MOST_TOKENS: Final = 4
MOST_DESTINATIONS: Final = 100
MOST_SCOPES: Final = 50

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)
_HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SCOPE: Final = re.compile(r"[A-Za-z.]{1,40}", re.ASCII)
_TAKEN: Final = frozenset({DEFAULT, "public", "rpc"})


def _strings(value: object, most: int) -> tuple[str, ...] | None:
    """The elements of a list of 1 to ``most`` strings, each once; None for anything else."""
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= most:
        return None
    if not all(isinstance(each, str) for each in value) or len({*value}) < len(value):
        return None
    return tuple(value)


def _hashes(value: object) -> tuple[str, ...]:
    found = _strings(value, MOST_TOKENS)
    if found is None or not all(_HASH.fullmatch(each) for each in found):
        raise ValueError(
            f"a list of 1 to {MOST_TOKENS} SHA-256 hashes of tokens, 64 lower-case hex digits each:"
            " printf %s TOKEN | sha256sum"
        )
    return found


def _scopes(value: object) -> tuple[str, ...]:
    found = _strings(value, MOST_SCOPES)
    if found is None or not all(_SCOPE.fullmatch(each) for each in found):
        raise ValueError(
            'a list of "read", "order", "fund" and names of operations such as "swap.quote", each'
            " once"
        )
    return found


def _destinations(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    found = _strings(value, MOST_DESTINATIONS)
    if found is None:
        raise ValueError(f"a list of 1 to {MOST_DESTINATIONS} addresses, each once")
    return tuple(_address(number, each) for number, each in enumerate(found, 1))


def _address(number: int, text: str) -> str:
    try:
        if text[:2] in ("0x", "0X"):
            return parse_evm_address(text, field=f"number {number}")
        networks = frozenset(MoneroNetwork)
        return parse_monero_address(text, field=f"number {number}", networks=networks).text
    except InvalidDestination as problem:
        raise ValueError(f"EVM and Monero addresses in full. {problem.message}") from None


Usd = Annotated[int, integer_in(1, 100_000_000)]


class ClientSettings(Group):
    """One client. Limits are whole dollars of an order's worth; None: no limit.

    ``spread_bps`` (1/10,000) stands in place of ``orders.spread_bps``.
    """

    token_sha256: Annotated[tuple[str, ...], BeforeValidator(_hashes)] = Field(repr=False)
    scopes: Annotated[tuple[str, ...], BeforeValidator(_scopes)]
    max_order_usd: Usd | None = None
    max_day_usd: Usd | None = None
    approve_above_usd: Usd | None = None
    destinations: Annotated[tuple[str, ...] | None, BeforeValidator(_destinations)] = None
    orders_per_minute: Annotated[int, integer_in(1, 1_000_000)] | None = None
    spread_bps: Annotated[int, integer_in(0, 5_000)] | None = None

    def shown(self) -> dict[str, Any]:
        """The settings that are set, with the number of tokens in place of their hashes."""
        found = self.model_dump(mode="json", exclude={"token_sha256"}, exclude_none=True)
        return {"tokens": len(self.token_sha256), **found}


def _table(value: object) -> object:
    """A table of clients: of the file, or as JSON where it came as text."""
    if isinstance(value, TextValue):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    allowed = (
        f"tables [clients.NAME], {MOST_CLIENTS} at most, with names of a-z, 0-9 and -, up to 32"
        f" characters, none of them {', '.join(sorted(_TAKEN))}; in a variable, as one JSON object"
    )
    if not isinstance(value, Mapping) or len(value) > MOST_CLIENTS:
        raise ValueError(allowed)
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in value):
        raise ValueError(allowed)
    if not _TAKEN.isdisjoint(value):
        raise ValueError(allowed)
    return value


def _with_own_tokens(clients: Mapping[str, ClientSettings]) -> Mapping[str, ClientSettings]:
    hashes = [each for client in clients.values() for each in client.token_sha256]
    if len({*hashes}) < len(hashes):
        raise ValueError("each token with one client: two of them have the same token_sha256")
    return clients


ClientTables = Annotated[
    dict[str, ClientSettings], BeforeValidator(_table), AfterValidator(_with_own_tokens)
]


def credentials(clients: Mapping[str, ClientSettings]) -> list[Credential]:
    """The clients of the settings, by each of their tokens."""
    return [
        Credential(bytes.fromhex(each), known)
        for name, client in clients.items()
        for known in [_known(name, client)]
        for each in client.token_sha256
    ]


def _known(name: str, client: ClientSettings) -> KnownClient:
    return KnownClient(
        name=name,
        scopes=frozenset(client.scopes),
        destinations=client.destinations,
        max_order=_units(client.max_order_usd),
        max_day=_units(client.max_day_usd),
        approve_above=_units(client.approve_above_usd),
        orders_per_minute=client.orders_per_minute,
        spread_bps=client.spread_bps,
    )


def _units(dollars: int | None) -> int | None:
    return None if dollars is None else dollars * ONE_USDC
