"""Readers of strangers' bytes: each target reads them as the product does.

A target lets through only exceptions that its reader documents. A reader that decides from text is
asked for a consistent answer as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import orjson

from rpcsvc import strict_json, verify
from rpcsvc.domain import money, payment_check, usdc
from rpcsvc.domain.addresses import MoneroNetwork, parse_evm_address, parse_monero_address
from rpcsvc.domain.webhooks import Targets, read_secret, read_url
from rpcsvc.errors import InputError, InvalidJson
from rpcsvc.settlement.onchain import daemon_rpc
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, RpcFailure
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import EvmCall, LogFilter, Tag
from rpcsvc.settlement.onchain.journal import files
from rpcsvc.settlement.onchain.journal_entries import entries_of
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient, read_held
from rpcsvc.settlement.onchain.monero.wallet_types import Destination

_HASH: Final = "0x" + "ab" * 32
_TXID: Final = "ab" * 32
_EVM: Final = "0x52908400098527886E0F7030069857D2E4169EE7"
_MONERO: Final = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcd"
    "RsiKc9dhwMVgN5S9cQUiyoogDavup3H"
)


def _text(data: bytes) -> str:
    """Return the text as JSON gives it: any characters, but no half of a surrogate pair."""
    return data.decode("utf-8", "replace")


def read_json(data: bytes) -> None:
    """A body that is read can be written, and reads as the same value again."""
    with suppress(InvalidJson):
        value = strict_json.loads(data)
        with suppress(TypeError):  # an integer beyond 64 bits is not written
            assert strict_json.loads(strict_json.dumps(value)) == value


def read_addresses(data: bytes) -> None:
    """An address that is taken is taken again in the form that it was given."""
    text = _text(data)
    with suppress(InputError):
        found = parse_evm_address(text)
        assert parse_evm_address(found) == found
    for network in MoneroNetwork:
        with suppress(InputError):
            assert parse_monero_address(text, networks={network}).text == text


def read_amounts(data: bytes) -> None:
    """An amount that is taken comes back as the same units."""
    text = _text(data)
    for asset in (money.XMR, money.USDC):
        with suppress(InputError):
            found = money.parse_amount(text, asset)
            assert found.units > 0
            assert money.parse_any_amount(money.format_units(found.units, asset), asset) == found


def read_payments(data: bytes) -> None:
    """Payments that ``swap.check`` is asked about: a URI, calldata or a transaction."""
    text = _text(data)
    for read in (payment_check.read_uri, payment_check.read_calldata):
        with suppress(payment_check.Unreadable, InputError):
            _compare(read(text))
    with suppress(InvalidJson):
        given = strict_json.loads(data, max_depth=4)
        if isinstance(given, Mapping):
            with suppress(payment_check.Unreadable, InputError):
                payment_check.require_unsigned(given)
                _compare(payment_check.read_transaction(given))
    with suppress(ValueError):
        usdc.read_paying_call(data)


def _compare(found: payment_check.ProposedPayment) -> None:
    for asset, address in ((money.XMR, _MONERO), (money.USDC, _EVM)):
        due = payment_check.ExpectedPayment(
            address, 10**6, asset, 42161, None, is_payable=True, closes_at=1
        )
        payment_check.differences(found, due, 0)


def read_webhooks(data: bytes) -> None:
    """URLs and secrets of webhook receivers."""
    text = _text(data)
    with suppress(InputError):
        assert read_url(text, Targets(), name="webhook.url").lower().startswith("https://")
    with suppress(InputError):
        read_secret(text, name="webhook.secret")


def read_journal(data: bytes) -> None:
    """The lines of a payment journal, sums right or wrong."""
    files.read(data)
    start = files.JournalPosition(0, "")
    whole, after = files.encode(start, files.header(start, "journal", 1))
    for part in data.split(b"\n"):
        with suppress(ValueError):
            body = orjson.loads(part)
            if isinstance(body, dict):
                line, after = files.encode(after, body)
                whole += line
    for found in files.read(whole).lines:
        with suppress(ValueError):
            entries_of(found)


_EXPECTED: Final = verify.Expected(
    direction="x2u", chain_id=42161, amount="0.8", to=_EVM, issuer="https://swap.example",
    refund_to=_MONERO, session="6f1f9c5e-7b0a-4d39-8f7e-2f1f6f3d9a11",
)  # fmt: skip


def read_attestations(data: bytes) -> None:
    """Tokens and key sets of a hostile service."""
    token, _, keys = data.partition(b"\n")
    jwks: Any = {"keys": []}
    with suppress(ValueError):
        jwks = orjson.loads(keys)
    with suppress(verify.VerificationError):
        verify.verify_attestation(_text(token), jwks, _EXPECTED)


# --- answers of daemons ------------------------------------------------------------------------


class _Body:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), size):
            yield self._body[at : at + size]


class _OneAnswer:
    """An HTTP session whose every answer has the same body."""

    def __init__(self, body: bytes, **_options: Any) -> None:
        self._answer = SimpleNamespace(
            status=200, headers={}, content_length=len(body), content=_Body(body),
            close=lambda: None,
        )  # fmt: skip

    def request(self, *_arguments: Any, **_options: Any) -> _OneAnswer:
        return self

    async def __aenter__(self) -> SimpleNamespace:
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        pass

    async def close(self) -> None:
        pass


async def _scan(node: EvmClient) -> None:
    async for _piece in node.scan(LogFilter(_EVM, ()), 1, 5):
        pass


_EVM_CALLS: Final[tuple[Callable[[EvmClient], Awaitable[Any]], ...]] = (
    lambda node: node.chain_id(),
    lambda node: node.block(),
    lambda node: node.sent_in(5, _EVM),
    lambda node: node.nonce(_EVM),
    lambda node: node.ether(_EVM, Tag.LATEST),
    lambda node: node.call(EvmCall(_EVM, b"")),
    lambda node: node.estimate_gas(EvmCall(_EVM, b"")),
    lambda node: node.fees(),
    lambda node: node.submit(b"\x02"),
    lambda node: node.transaction(_HASH),
    lambda node: node.receipt(_HASH),
    _scan,
)
_MONEROD_CALLS: Final[tuple[Callable[[MonerodClient], Awaitable[Any]], ...]] = (
    lambda node: node.info(),
    lambda node: node.header_at(5),
    lambda node: node.headers(5, 6),
    lambda node: node.block_at(5),
    lambda node: node.transactions([_TXID]),
    lambda node: node.bodies([_TXID]),
    lambda node: node.key_images([_TXID]),
    lambda node: node.pool(),
    lambda node: node.fees(),
    lambda node: node.submit("ab"),
)
_WALLET_CALLS: Final[tuple[Callable[[WalletClient], Awaitable[Any]], ...]] = (
    lambda wallet: wallet.height(),
    lambda wallet: wallet.refresh(),
    lambda wallet: wallet.create_addresses(2),
    lambda wallet: wallet.index_of(_MONERO),
    lambda wallet: wallet.validate(_MONERO),
    lambda wallet: wallet.transfers(0),
    lambda wallet: wallet.transfer(_TXID),
    lambda wallet: wallet.balance(),
    lambda wallet: wallet.prepare([Destination(_MONERO, 1)], priority=1),
    lambda wallet: wallet.prove_payment(_TXID, _MONERO),
    lambda wallet: read_held(wallet, 10),
)
_CLIENTS: Final = ((EvmClient, _EVM_CALLS), (MonerodClient, _MONEROD_CALLS),
                   (WalletClient, _WALLET_CALLS))  # fmt: skip


async def _no_pause(_seconds: float) -> None:
    pass


def read_daemons(data: bytes) -> None:
    """Answers of nodes and wallets. The first byte says which call it is the answer to."""
    if not data:
        return
    calls: list[tuple[Any, Any]] = [(made, call) for made, each in _CLIENTS for call in each]
    client, call = calls[data[0] % len(calls)]
    body = data[1:]
    if body[:1] != b"!":
        body = b'{"jsonrpc":"2.0","id":"1","status":"OK","result":' + body + b"}"
    asyncio.run(_ask(client, call, body))


async def _ask(client: Any, call: Any, body: bytes) -> None:
    with patch.object(daemon_rpc, "ClientSession", lambda **options: _OneAnswer(body, **options)):
        async with client(
            DaemonEndpoint("node", "http://node", serial=True), pause=_no_pause
        ) as opened:
            with suppress(RpcFailure):
                await call(opened)


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "json": read_json,
    "addresses": read_addresses,
    "amounts": read_amounts,
    "payments": read_payments,
    "webhooks": read_webhooks,
    "journal": read_journal,
    "attestations": read_attestations,
    "daemons": read_daemons,
}
