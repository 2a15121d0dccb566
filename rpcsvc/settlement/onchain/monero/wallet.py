"""The client of monero-wallet-rpc: wallet file, addresses, transfers, payments, proofs.

Written for and tested with Monero 0.18. Units and forms are those of wallet_types.py. Every method
raises RpcFailure (daemon_rpc.py). Source: the wallet RPC documentation at getmonero.org.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from rpcsvc.settlement.onchain.daemon_rpc import (
    TEXT,
    WHOLE,
    BadAnswer,
    DaemonEndpoint,
    DaemonRpc,
    HasTime,
    JsonObject,
    Model,
    NodeError,
    Pause,
    Text,
    TooLarge,
    Whole,
    always,
    read_answer,
    read_field,
)
from rpcsvc.settlement.onchain.monero.wallet_types import (
    AddressCheck,
    Balance,
    Destination,
    Output,
    OutputFilter,
    PreparedPayment,
    Refreshed,
    Subaddress,
    SubaddressIndex,
    TxCheck,
    WalletCode,
    WalletTransfer,
    WalletTransferKind,
)

MOST_ADDRESSES_PER_CALL: Final = 64
MOST_DESTINATIONS: Final = 15
LARGEST_AMOUNT: Final = 2**64 - 1

_RPC_PATH: Final = "/json_rpc"
_SLOW_SECONDS: Final = 600.0
_RESCAN_SECONDS: Final = 48 * 3600.0
# Of the base point of Ed25519 (RFC 8032).
_GROUP_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_KEY_DIGITS: Final = 64
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_DO_NOT_RELAY: Final = {
    "do_not_relay": True,
    "get_tx_key": True,
    "get_tx_hex": True,
    "get_tx_metadata": True,
}


T = TypeVar("T")
UNLOCK_BLOCKS: Final = 10
_OWN: Final = (0,)


@dataclass(frozen=True, slots=True)
class _Made:
    address_indices: tuple[Whole, ...] = ()
    addresses: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class _ListedAddress:
    address_index: Whole
    address: Text


class WalletClient:
    """Asks one monero-wallet-rpc, which holds one wallet open. Use as ``async with``.

    Addresses, transfers, balances and payments are those of one ``account`` of the wallet.
    Everything raises RpcFailure; NodeError.code is one of WalletCode or another of the wallet's.
    The daemon works on one request at a time, so the endpoint has to be ``serial``; else
    ValueError is raised.
    """

    def __init__(
        self,
        endpoint: DaemonEndpoint,
        *,
        account: int = 0,
        pause: Pause = asyncio.sleep,
        has_time: HasTime = always,
    ) -> None:
        if not endpoint.serial:
            raise ValueError(f"{endpoint.name}: a wallet's endpoint must be serial")
        self.account = account
        self.rpc = DaemonRpc(endpoint, rpc_path=_RPC_PATH, pause=pause, has_time=has_time)

    async def __aenter__(self) -> Self:
        self.rpc.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()

    # --- the wallet file -----------------------------------------------------------------------

    async def version(self) -> tuple[int, int]:
        """Return the major and minor version of the wallet RPC."""
        number = await self._read_field(WHOLE, "version", "get_version")
        return number >> 16, number & 0xFFFF

    async def create(self, filename: str, password: str) -> None:
        """Make a wallet and open it."""
        params = {"filename": filename, "password": password, "language": "English"}
        await self._act("create_wallet", params, seconds=_SLOW_SECONDS)

    async def open(self, filename: str, password: str) -> None:
        """Open a wallet. The daemon stores and closes the one that was open."""
        await self._act(
            "open_wallet", {"filename": filename, "password": password}, seconds=_SLOW_SECONDS
        )

    async def restore(self, filename: str, password: str, seed: str, from_height: int) -> None:
        """Make a wallet from its 25 words and open it. It scans from ``from_height``."""
        params = {
            "filename": filename,
            "password": password,
            "seed": seed,
            "restore_height": from_height,
        }
        await self._act("restore_deterministic_wallet", params, seconds=_SLOW_SECONDS)

    async def close(self) -> None:
        """Store the open wallet and close it."""
        await self._act("close_wallet")

    async def store(self) -> None:
        """Write the open wallet to its file. Until then a kill undoes its last changes."""
        await self._act("store")

    async def seed(self) -> str:
        """The wallet's 25 words. They are the money: keep them out of logs."""
        return await self._read_field(TEXT, "key", "query_key", {"key_type": "mnemonic"})

    # --- following the chain -------------------------------------------------------------------

    async def height(self) -> int:
        """The number of blocks that the wallet has scanned."""
        return await self._read_field(WHOLE, "height", "get_height")

    async def refresh(self) -> Refreshed:
        """Scan up to the daemon's top, and its pool."""
        answer = await self._act("refresh", seconds=_SLOW_SECONDS)
        return self._model(Refreshed, "refresh", answer)

    async def auto_refresh(self, *, enabled: bool, period: int = 20) -> None:
        """Whether the daemon refreshes by itself, every ``period`` seconds."""
        await self._act("auto_refresh", {"enable": enabled, "period": period})

    async def rescan_blockchain(self) -> None:
        """Scan everything again; keeps keys and addresses, loses notes on sent transactions.

        It takes hours where there are years to scan; the wallet answers nothing else meanwhile.
        """
        await self._act("rescan_blockchain", {"hard": False}, seconds=_RESCAN_SECONDS)

    async def rescan_spent(self) -> None:
        """Ask the daemon which outputs are spent. Needs a trusted daemon."""
        await self._act("rescan_spent", seconds=_SLOW_SECONDS)

    # --- addresses -----------------------------------------------------------------------------

    async def primary_address(self) -> str:
        """The account's own address (index 0). Change goes there."""
        # Without an index it would give all that there are.
        params = {"account_index": self.account, "address_index": [0]}
        return await self._read_field(TEXT, "address", "get_address", params)

    async def create_account(self) -> int:
        """Make another account; its number. ``store`` before it is used."""
        return self._field(
            WHOLE, "create_account", await self._act("create_account"), "account_index"
        )

    async def create_addresses(self, count: int) -> list[Subaddress]:
        """Make 1 to 64 subaddresses. ``store`` before any of them is given to anyone."""
        if not 1 <= count <= MOST_ADDRESSES_PER_CALL:
            raise ValueError(f"1 to {MOST_ADDRESSES_PER_CALL} addresses a call, not {count}")
        method, params = "create_address", {"account_index": self.account, "count": count}
        made = self._model(_Made, method, await self._act(method, params))
        if len(made.address_indices) != count or len(made.addresses) != count:
            problem = "the answer has another number of addresses than asked for"
            raise BadAnswer(self.rpc.endpoint.name, method, problem)
        return [
            Subaddress(SubaddressIndex(self.account, index), address)
            for index, address in zip(made.address_indices, made.addresses, strict=True)
        ]

    async def addresses(self, indices: Sequence[int]) -> list[Subaddress]:
        """Addresses that were made before. The wallet raises NodeError beyond the newest."""
        params = {"account_index": self.account, "address_index": list(indices)}
        answer = await self._read("get_address", params)
        listed = self._model(list[_ListedAddress], "get_address", answer.get("addresses", []))
        return [
            Subaddress(SubaddressIndex(self.account, item.address_index), item.address)
            for item in listed
        ]

    async def index_of(self, address: str) -> SubaddressIndex | None:
        """The index of an address in the wallet; None when the wallet does not own it."""
        try:
            return await self._read_field(
                SubaddressIndex, "index", "get_address_index", {"address": address}
            )
        except NodeError as error:
            if error.code == WalletCode.WRONG_ADDRESS:
                return None
            raise

    async def validate(self, address: str) -> AddressCheck:
        """The wallet's check of an address, of any network."""
        params = {"address": address, "any_net_type": True, "allow_openalias": False}
        answer = await self._read("validate_address", params)
        return self._model(AddressCheck, "validate_address", answer)

    # --- transfers and outputs -----------------------------------------------------------------

    async def transfers(
        self,
        from_height: int,
        kinds: Sequence[WalletTransferKind] = (
            WalletTransferKind.INCOMING,
            WalletTransferKind.POOL,
        ),
    ) -> list[WalletTransfer]:
        """Return transfers in blocks at or above ``from_height``, and all that are not mined."""
        params: JsonObject = {str(kind): kind in kinds for kind in WalletTransferKind}
        # The wallet leaves out the block at min_height itself.
        params |= {"account_index": self.account, "filter_by_height": True}
        params["min_height"] = max(from_height - 1, 0)
        answer = await self._read("get_transfers", params)
        listed = [
            self._model(list[WalletTransfer], "get_transfers", answer.get(kind, []))
            for kind in kinds
        ]
        return [item for some in listed for item in some]

    async def transfer(self, txid: str) -> list[WalletTransfer]:
        """The wallet's entries of one transaction; empty when it knows none."""
        params = {"txid": txid, "account_index": self.account}
        try:
            answer = await self._read("get_transfer_by_txid", params)
        except NodeError as error:
            if error.code == WalletCode.WRONG_TXID:
                return []
            raise
        return self._model(
            list[WalletTransfer], "get_transfer_by_txid", answer.get("transfers", [])
        )

    async def total(self) -> tuple[int, str]:
        """Return all piconero of the account, locked ones and change that is not mined included,
        and the account's own address.
        """
        held = await self.balance(_OWN)
        for item in held.subaddresses:
            if item.minor == 0:
                return held.total, item.address
        problem = "the answer lacks the account's own address"
        raise BadAnswer(self.rpc.endpoint.name, "get_balance", problem)

    async def balance(self, indices: Sequence[int] = ()) -> Balance:
        """The balance of an account, and of these subaddresses (none given: of all in use).

        Without ``indices`` it takes seconds in a wallet with many transfers.
        """
        params: JsonObject = {"account_index": self.account}
        if indices:
            params["address_indices"] = list(indices)
        return self._model(Balance, "get_balance", await self._read("get_balance", params))

    async def outputs(
        self, which: OutputFilter = OutputFilter.AVAILABLE, indices: Sequence[int] = ()
    ) -> list[Output]:
        """The account's outputs, or those of these subaddresses, with their key images."""
        params: JsonObject = {"transfer_type": which, "account_index": self.account}
        if indices:
            params["subaddr_indices"] = list(indices)
        answer = await self._read("incoming_transfers", params)
        return self._model(list[Output], "incoming_transfers", answer.get("transfers", []))

    # --- paying --------------------------------------------------------------------------------

    async def prepare(
        self,
        destinations: Sequence[Destination],
        *,
        priority: int = 0,
        from_indices: Sequence[int] = (),
    ) -> PreparedPayment:
        """Sign a payment to 1 to 15 destinations without publishing it. Raises ValueError.

        ``priority`` 0 lets the wallet choose, 1 is the cheapest, 4 the dearest. Nothing is
        reserved: the next payment that is prepared may spend the same outputs.
        """
        params = {
            "destinations": _checked_destinations(destinations),
            "account_index": self.account,
            "priority": priority,
        }
        if from_indices:
            params["subaddr_indices"] = list(from_indices)
        answer = await self._act("transfer", params | _DO_NOT_RELAY)
        return self._model(PreparedPayment, "transfer", answer)

    async def prepare_sweep(
        self, key_image: str, address: str, *, priority: int = 0
    ) -> PreparedPayment:
        """Sign a transaction that sends one whole output to ``address``, without publishing it."""
        params = {"key_image": key_image, "address": address, "priority": priority}
        answer = await self._act("sweep_single", params | _DO_NOT_RELAY)
        return self._model(PreparedPayment, "sweep_single", answer)

    async def relay(self, metadata: str) -> str:
        """Publish a prepared payment through the wallet, which notes it; return the transaction id.

        At most once per payment, then ``store``: for a mined payment the wallet reports success and
        books it a second time, permanently. After that, MonerodClient.submit.
        """
        found = await self.rpc.act("relay_tx", {"hex": metadata}, publishes=True)
        answer = self._model(JsonObject, "relay_tx", found)
        return self._field(TEXT, "relay_tx", answer, "tx_hash")

    async def freeze(self, key_image: str) -> None:
        """Keep an output from being spent until thawed."""
        await self._act("freeze", {"key_image": key_image})

    async def thaw(self, key_image: str) -> None:
        """Let a frozen output be spent again."""
        await self._act("thaw", {"key_image": key_image})

    # --- proving -------------------------------------------------------------------------------

    async def tx_key(self, txid: str) -> str:
        """The key of a transaction that this wallet made, while it remembers it."""
        return await self._read_field(TEXT, "tx_key", "get_tx_key", {"txid": txid})

    async def prove_payment(self, txid: str, address: str, message: str = "") -> str:
        """A signature that this wallet's transaction paid ``address``."""
        params = {"txid": txid, "address": address, "message": message}
        return await self._read_field(TEXT, "signature", "get_tx_proof", params)

    async def check_proof(
        self, txid: str, address: str, signature: str, message: str = ""
    ) -> TxCheck:
        """Check a signature of ``prove_payment``."""
        params = {"txid": txid, "address": address, "message": message, "signature": signature}
        answer = await self._read("check_tx_proof", params)
        return self._model(TxCheck, "check_tx_proof", answer)

    async def check_key(self, txid: str, tx_key: str, address: str) -> TxCheck:
        """Check a transaction's payment to ``address`` with the transaction's key.

        NodeError.code is WRONG_TX_KEY for what can't be a key: wallets up to 0.18.0.0 at least end
        themselves over one that is not below the order of the group.
        """
        if not _may_be_tx_key(tx_key):
            name, text = self.rpc.endpoint.name, "not asked: that is no transaction key"
            raise NodeError(name, "check_tx_key", WalletCode.WRONG_TX_KEY, text)
        params = {"txid": txid, "tx_key": tx_key, "address": address}
        answer = await self._read("check_tx_key", params) | {"good": True}
        return self._model(TxCheck, "check_tx_key", answer)

    # --- plumbing ------------------------------------------------------------------------------

    async def _read(self, method: str, params: JsonObject | None = None) -> JsonObject:
        return self._model(JsonObject, method, await self.rpc.read(method, params))

    async def _act(
        self, method: str, params: JsonObject | None = None, *, seconds: float | None = None
    ) -> JsonObject:
        return self._model(JsonObject, method, await self.rpc.act(method, params, seconds=seconds))

    async def _read_field(
        self, model: Model[T], key: str, method: str, params: JsonObject | None = None
    ) -> T:
        return self._field(model, method, await self._read(method, params), key)

    def _model(self, model: Model[T], method: str, value: Any) -> T:
        return read_answer(model, self.rpc.endpoint.name, method, value)

    def _field(self, model: Model[T], method: str, answer: JsonObject, key: str) -> T:
        return read_field(model, self.rpc.endpoint.name, method, answer, key)


def _checked_destinations(destinations: Sequence[Destination]) -> list[JsonObject]:
    if not 1 <= len(destinations) <= MOST_DESTINATIONS:
        raise ValueError(f"1 to {MOST_DESTINATIONS} destinations, not {len(destinations)}")
    for _, amount in destinations:
        if type(amount) is not int or not 0 < amount <= LARGEST_AMOUNT:
            raise ValueError(f"an amount is a whole number of piconero above 0, not {amount!r}")
    return [{"address": to, "amount": amount} for to, amount in destinations]


def _may_be_tx_key(text: str) -> bool:
    """Whether it is one scalar, or several: hex, least byte first, below the order of the group."""
    if not text or len(text) % _KEY_DIGITS or not _HEX.issuperset(text):
        return False
    parts = (text[at : at + _KEY_DIGITS] for at in range(0, len(text), _KEY_DIGITS))
    scalars = [int.from_bytes(bytes.fromhex(part), "little") for part in parts]
    return scalars[0] > 0 and max(scalars) < _GROUP_ORDER


@dataclass(frozen=True, slots=True)
class Held:
    """The spendable balance, now or later. ``outputs``: neither spent nor frozen.

    ``is_complete`` is False when those are of the wallet's own address alone, and the sums are not;
    ``locked`` then counts what is still in the pool, too.
    ``blocks_to_unlock`` until all of it is unlocked, locks of the sender's making left out.
    """

    outputs: tuple[Output, ...]
    is_complete: bool
    unlocked: int
    locked: int
    blocks_to_unlock: int


async def read_held(wallet: WalletClient, height: int) -> Held:
    """Return the balance at the height of the chain. Raises RpcFailure."""
    listed, is_complete = await list_unspent(wallet)
    outputs = tuple(item for item in listed if not item.spent and not item.frozen)
    if is_complete:
        total = sum(item.amount for item in outputs)
        unlocked = sum(item.amount for item in outputs if item.unlocked)
        blocks = max((_blocks_left(item, height) for item in outputs), default=0)
    else:
        balance = await wallet.balance(_OWN)
        total, unlocked = balance.total, balance.unlocked
        blocks = min(UNLOCK_BLOCKS, balance.blocks_to_unlock)
    return Held(outputs, is_complete, unlocked, max(0, total - unlocked), blocks)


async def list_unspent(wallet: WalletClient) -> tuple[list[Output], bool]:
    """The unspent outputs, and whether the list is complete. Raises RpcFailure."""
    try:
        return await wallet.outputs(), True
    except TooLarge:
        return await wallet.outputs(indices=_OWN), False


def _blocks_left(output: Output, height: int) -> int:
    if output.unlocked:
        return 0
    return max(1, UNLOCK_BLOCKS - (height - output.height)) if output.height else UNLOCK_BLOCKS
