"""What monerod and monero-wallet-rpc are asked, and what they answer, in types.

Written for and tested with Monero 0.18. Amounts are piconero (10^-12 XMR), heights count from 0,
hashes, keys and transactions are lower-case hex. Every method raises RpcFailure (daemon_rpc.py).
What does not live here: when to ask, and what an answer means for an order or a payout.
Source: the daemon and wallet RPC documentation at getmonero.org.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple, Self

from rpcsvc.settlement.onchain.daemon_rpc import (
    Answer,
    DaemonRpc,
    Endpoint,
    JsonObject,
    NodeError,
    Pause,
    parse_json,
)

MOST_ADDRESSES_PER_CALL: Final = 64
MOST_DESTINATIONS: Final = 15
LARGEST_AMOUNT: Final = 2**64 - 1

_RPC_PATH: Final = "/json_rpc"
_HASHES_PER_CALL: Final = 100
_SLOW_SECONDS: Final = 600.0
_RESCAN_SECONDS: Final = 48 * 3600.0
_HEIGHT_BEYOND_TOP: Final = -2
_INTERNAL_ERROR: Final = -5
# Of the base point of Ed25519 (RFC 8032).
_GROUP_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_KEY_DIGITS: Final = 64
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class WalletCode(IntEnum):
    """Error codes of monero-wallet-rpc that callers tell apart (NodeError.code)."""

    UNKNOWN = -1
    WRONG_ADDRESS = -2
    DAEMON_BUSY = -3
    TRANSFER_FAILED = -4
    WRONG_TXID = -8
    NOT_OPEN = -13
    NO_SUCH_ADDRESS = -15
    TX_NOT_POSSIBLE = -16
    NOT_ENOUGH_MONEY = -17
    WALLET_EXISTS = -21
    NO_TX_KEY = -24
    WRONG_TX_KEY = -25
    NOT_ENOUGH_UNLOCKED = -37
    NO_DAEMON = -38


# --- monerod: what it answers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """State of a monerod. ``height`` is the number of blocks: the top block's height plus one.

    ``nettype``: mainnet, stagenet, testnet, or fakechain (regtest).
    """

    height: int
    top_hash: str
    nettype: str
    synchronized: bool
    busy_syncing: bool
    offline: bool
    target_height: int
    pool_size: int
    version: str


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A block of the main chain, or of another branch when ``orphan``. ``timestamp``: seconds."""

    height: int
    hash: str
    previous: str
    timestamp: int
    orphan: bool
    transactions: int


@dataclass(frozen=True, slots=True)
class NodeTransaction:
    """A transaction that monerod knows. ``height`` is None while it is in the pool."""

    txid: str
    height: int | None
    double_spend_seen: bool

    @property
    def in_pool(self) -> bool:
        """Whether it waits in the pool."""
        return self.height is None


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """A transaction that monerod knows, whole. ``raw`` is hex, and empty where it is pruned.

    ``height`` is None while it is in the pool.
    """

    txid: str
    raw: str
    key_images: tuple[str, ...]
    height: int | None


class Spent(IntEnum):
    """Where a key image was seen. Both SPENT states say nothing about which transaction did it."""

    UNSPENT = 0
    IN_CHAIN = 1
    IN_POOL = 2


class Submission(StrEnum):
    """What monerod said to a raw transaction. None of them proves what the network will do.

    ACCEPTED: new, in its pool, relayed. KNOWN: it has it already, in the pool or mined, or took it
    without relaying. BUSY: not looked at, the node is syncing. DOUBLE_SPEND: an input is spent by
    another transaction, in pool or chain, which a reorganisation may undo; or by this very one,
    while Dandelion++ still hides it. FEE_TOO_LOW: below the
    relay fee of the moment. INVALID: inputs, outputs, ring or size break a rule, which may be so
    only until blocks that were reorganised away are replaced. REFUSED: none of these; also what
    comes for bytes that are no transaction.
    """

    ACCEPTED = "accepted"
    KNOWN = "known"
    BUSY = "busy"
    DOUBLE_SPEND = "double_spend"
    FEE_TOO_LOW = "fee_too_low"
    INVALID = "invalid"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """monerod's answer to a raw transaction: its meaning, and its flags and words for the log."""

    submission: Submission
    flags: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PoolTransaction:
    """A transaction in the pool. ``received_at``: seconds; ``fee``: piconero; ``weight``: bytes.

    ``given_up``: it was not valid at a moment, and the node will not try again to mine it. A
    restricted node doesn't tell.
    """

    txid: str
    fee: int
    weight: int
    relayed: bool
    do_not_relay: bool
    double_spend_seen: bool
    received_at: int
    given_up: bool


@dataclass(frozen=True, slots=True)
class FeeEstimate:
    """Fees in piconero per byte, for priorities 1 to 4; fees are rounded up to ``quantum``."""

    per_byte: tuple[int, ...]
    quantum: int


_INVALID_FLAGS: Final = (
    "invalid_input",
    "invalid_output",
    "low_mixin",
    "overspend",
    "too_big",
    "too_few_outputs",
    "tx_extra_too_big",
    "nonzero_unlock_time",
)
_SUBMISSION_FLAGS: Final = (
    "double_spend",
    "fee_too_low",
    "not_relayed",
    "sanity_check_failed",
    *_INVALID_FLAGS,
)


class MonerodClient:
    """Asks one monerod. Use as ``async with``. Everything raises RpcFailure.

    A node that is syncing answers many questions with the error of code BUSY_CODE.
    """

    BUSY_CODE: Final = -9

    def __init__(self, endpoint: Endpoint, *, pause: Pause = asyncio.sleep) -> None:
        self.rpc = DaemonRpc(endpoint, rpc_path=_RPC_PATH, pause=pause)

    async def __aenter__(self) -> Self:
        self.rpc.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()

    # --- reading -------------------------------------------------------------------------------

    async def info(self) -> NodeInfo:
        """The node's state, the network it is on included."""
        answer = await self._read("get_info")
        return NodeInfo(
            height=answer.whole("height"),
            top_hash=answer.text("top_block_hash"),
            nettype=answer.text("nettype"),
            synchronized=answer.flag("synchronized"),
            busy_syncing=answer.flag("busy_syncing", default=False),
            offline=answer.flag("offline"),
            target_height=answer.whole("target_height"),
            pool_size=answer.whole("tx_pool_size"),
            version=answer.text("version"),
        )

    async def header_at(self, height: int) -> BlockHeader | None:
        """The main chain's block at ``height``; None above the top."""
        try:
            answer = await self._read("get_block_header_by_height", {"height": height})
        except NodeError as error:
            if error.code == _HEIGHT_BEYOND_TOP:
                return None
            raise
        return _header(answer.inner("block_header"))

    async def header_of(self, block_hash: str) -> BlockHeader | None:
        """The block of that hash, on whatever branch; None when the node does not have it."""
        try:
            answer = await self._read("get_block_header_by_hash", {"hash": block_hash})
        except NodeError as error:
            if error.code == _INTERNAL_ERROR and "can't get block by hash" in error.text:
                return None
            raise
        return _header(answer.inner("block_header"))

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        """Those of ``txids`` that are in the pool or the main chain, by transaction id."""
        found: dict[str, NodeTransaction] = {}
        for some in _batches(txids):
            answer = await self._read_path(
                "/get_transactions", {"txs_hashes": some, "decode_as_json": False, "prune": True}
            )
            for item in answer.each("txs"):
                found[item.text("tx_hash")] = _node_transaction(item)
        return found

    async def transaction_bytes(self, txid: str) -> NodeBytes | None:
        """A transaction of the pool or the main chain with its bytes; None when unknown."""
        body = {"txs_hashes": [txid], "decode_as_json": True, "prune": False}
        items = (await self._read_path("/get_transactions", body)).each("txs")
        return _node_bytes(items[0]) if items else None

    async def key_images(self, images: Sequence[str]) -> dict[str, Spent]:
        """Whether each key image is spent, by key image."""
        states: dict[str, Spent] = {}
        for some in _batches(images):
            answer = await self._read_path("/is_key_image_spent", {"key_images": some})
            codes = answer.items("spent_status")
            if len(codes) != len(some) or not set(codes) <= set(Spent):
                raise answer.bad("has no known state for each key image")
            states.update(zip(some, map(Spent, codes), strict=True))
        return states

    async def pool(self) -> list[PoolTransaction]:
        """The transactions that wait in the node's pool."""
        answer = await self._read_path("/get_transaction_pool", {})
        return [_pool_transaction(item) for item in answer.each("transactions")]

    async def fees(self) -> FeeEstimate:
        """The fees of the moment."""
        answer = await self._read("get_fee_estimate")
        per_byte = answer.items("fees") or [answer.whole("fee")]
        if not all(type(fee) is int and fee >= 0 for fee in per_byte):
            raise answer.bad("has fees that are not whole numbers")
        return FeeEstimate(tuple(per_byte), answer.whole("quantization_mask", 1))

    # --- acting --------------------------------------------------------------------------------

    async def submit(self, raw: str) -> SubmissionResult:
        """Hand a signed transaction to the network. The same bytes may be handed over again."""
        answer = Answer(
            self.rpc.endpoint.name,
            "/send_raw_transaction",
            await self.rpc.act_path("/send_raw_transaction", {"tx_as_hex": raw}),
        )
        status = answer.text("status")
        flags = tuple(flag for flag in _SUBMISSION_FLAGS if answer.flag(flag, default=False))
        reason = answer.text("reason", "") or status
        return SubmissionResult(_submission(status, flags), flags, reason)

    async def flush_pool(self, txids: Sequence[str] = ()) -> None:
        """Forget these transactions of the pool, or all of them. Needs an unrestricted node."""
        params = {"txids": list(txids)} if txids else {}
        self._checked("flush_txpool", await self.rpc.act("flush_txpool", params))

    # --- making a chain do as told: regtest only -----------------------------------------------

    async def generate_blocks(self, count: int, address: str) -> tuple[str, ...]:
        """Mine blocks that pay ``address``; their hashes. Regtest only; not repeated."""
        params = {"amount_of_blocks": count, "wallet_address": address, "starting_nonce": 0}
        answer = self._checked(
            "generateblocks", await self.rpc.act("generateblocks", params, seconds=_SLOW_SECONDS)
        )
        return answer.texts("blocks")

    async def pop_blocks(self, count: int) -> int:
        """Take the newest blocks off the chain; the height after. Needs an unrestricted node."""
        answer = await self.rpc.act_path("/pop_blocks", {"nblocks": count})
        return self._checked("/pop_blocks", answer).whole("height")

    # --- plumbing ------------------------------------------------------------------------------

    async def _read(self, method: str, params: JsonObject | None = None) -> Answer:
        return self._checked(method, await self.rpc.read(method, params))

    async def _read_path(self, path: str, body: JsonObject) -> Answer:
        return self._checked(path, await self.rpc.read_path(path, body))

    def _checked(self, method: str, value: Any) -> Answer:
        """monerod reports some failures in a field ``status`` of a good answer."""
        answer = Answer(self.rpc.endpoint.name, method, value)
        status = answer.text("status")
        if status == "OK":
            return answer
        code = self.BUSY_CODE if status == "BUSY" else _INTERNAL_ERROR
        raise NodeError(answer.node, method, code, status)


def _submission(status: str, flags: tuple[str, ...]) -> Submission:
    if status == "OK":
        return Submission.KNOWN if "not_relayed" in flags else Submission.ACCEPTED
    if status == "BUSY":
        return Submission.BUSY
    # A transaction may earn several flags; that of the input already spent says the most.
    if "double_spend" in flags:
        return Submission.DOUBLE_SPEND
    if any(flag in _INVALID_FLAGS for flag in flags):
        return Submission.INVALID
    return Submission.FEE_TOO_LOW if "fee_too_low" in flags else Submission.REFUSED


def _header(item: Answer) -> BlockHeader:
    return BlockHeader(
        height=item.whole("height"),
        hash=item.text("hash"),
        previous=item.text("prev_hash"),
        timestamp=item.whole("timestamp"),
        orphan=item.flag("orphan_status"),
        transactions=item.whole("num_txes"),
    )


def _node_transaction(item: Answer) -> NodeTransaction:
    return NodeTransaction(
        txid=item.text("tx_hash"),
        height=None if item.flag("in_pool") else item.whole("block_height"),
        double_spend_seen=item.flag("double_spend_seen"),
    )


def _node_bytes(item: Answer) -> NodeBytes:
    try:
        decoded = parse_json(item.text("as_json").encode())
    except ValueError as error:
        raise item.bad("has a transaction that is not JSON") from error
    inputs = Answer(item.node, item.method, decoded).each("vin")
    images = tuple(each.inner("key").text("k_image") for each in inputs)
    height = None if item.flag("in_pool") else item.whole("block_height")
    return NodeBytes(item.text("tx_hash"), item.text("as_hex"), images, height)


def _pool_transaction(item: Answer) -> PoolTransaction:
    return PoolTransaction(
        txid=item.text("id_hash"),
        fee=item.whole("fee"),
        weight=item.whole("weight"),
        relayed=item.flag("relayed"),
        do_not_relay=item.flag("do_not_relay"),
        double_spend_seen=item.flag("double_spend_seen"),
        received_at=item.whole("receive_time"),
        given_up=item.whole("last_failed_height", 0) > 0,
    )


def _batches(items: Sequence[str]) -> Iterable[list[str]]:
    """In parts as large as a restricted node takes."""
    for at in range(0, len(items), _HASHES_PER_CALL):
        yield list(items[at : at + _HASHES_PER_CALL])


# --- monero-wallet-rpc: what it answers ------------------------------------------------------


class SubaddressIndex(NamedTuple):
    """Account (``major``) and index within it (``minor``)."""

    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Subaddress:
    """An address of the wallet."""

    index: SubaddressIndex
    address: str


class TransferKind(StrEnum):
    """Where the wallet lists a transfer. INCOMING: mined. POOL: incoming, not mined.

    OUTGOING: mined. PENDING: sent, not seen mined. FAILED: sent, given up by the wallet.
    """

    INCOMING = "in"
    POOL = "pool"
    OUTGOING = "out"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WalletTransfer:
    """A transfer as the wallet tells it. Incoming: one per transaction and subaddress.

    ``amount`` sums what this transaction paid to ``index``. ``height`` is None until mined;
    ``coinbase`` outputs unlock after 60 blocks, others after 10. ``locked``: by ``unlock_time`` or
    age. ``timestamp``: seconds. ``fee`` is of the whole transaction.
    """

    kind: TransferKind
    txid: str
    address: str
    index: SubaddressIndex
    amount: int
    fee: int
    height: int | None
    confirmations: int
    timestamp: int
    unlock_time: int
    locked: bool
    double_spend_seen: bool
    coinbase: bool


class Destination(NamedTuple):
    """Who gets how many piconero."""

    address: str
    amount: int


@dataclass(frozen=True, slots=True)
class PreparedPayment:
    """A signed transaction that is not published. The wallet reserves nothing for it.

    ``raw`` is what monerod takes (submit), ``metadata`` what the wallet takes (relay). ``tx_key``
    proves the payment; the wallet forgets it when it is killed before ``store``.
    """

    txid: str
    amount: int
    fee: int
    weight: int
    raw: str
    metadata: str
    tx_key: str
    key_images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubaddressBalance:
    """The balance of one subaddress."""

    index: SubaddressIndex
    address: str
    total: int
    unlocked: int
    blocks_to_unlock: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of an account; ``blocks_to_unlock`` until all of it is unlocked."""

    total: int
    unlocked: int
    blocks_to_unlock: int
    subaddresses: tuple[SubaddressBalance, ...]


class OutputFilter(StrEnum):
    """Which of the wallet's outputs: AVAILABLE is not spent."""

    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Output:
    """An output that the wallet received. ``key_image`` is what spending it shows."""

    txid: str
    global_index: int
    index: SubaddressIndex
    amount: int
    key_image: str
    height: int
    spent: bool
    unlocked: bool
    frozen: bool


@dataclass(frozen=True, slots=True)
class AddressCheck:
    """What the wallet says of an address. ``nettype``: mainnet, stagenet or testnet."""

    valid: bool
    integrated: bool
    subaddress: bool
    nettype: str


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh brought."""

    blocks: int
    received_money: bool


@dataclass(frozen=True, slots=True)
class PaymentCheck:
    """What a transaction paid to an address, by its proof or key. ``valid``: the proof holds."""

    valid: bool
    received: int
    confirmations: int
    in_pool: bool


class WalletClient:
    """Asks one monero-wallet-rpc, which holds one wallet open. Use as ``async with``.

    Addresses, transfers, balances and payments are those of one ``account`` of the wallet.
    Everything raises RpcFailure; NodeError.code is one of WalletCode or another of the wallet's.
    The daemon works on one request at a time, so the endpoint has to be ``serial``; else
    ValueError is raised.
    """

    def __init__(
        self, endpoint: Endpoint, *, account: int = 0, pause: Pause = asyncio.sleep
    ) -> None:
        if not endpoint.serial:
            raise ValueError(f"{endpoint.name}: a wallet's endpoint must be serial")
        self.account = account
        self.rpc = DaemonRpc(endpoint, rpc_path=_RPC_PATH, pause=pause)

    async def __aenter__(self) -> Self:
        self.rpc.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()

    # --- the wallet file -----------------------------------------------------------------------

    async def version(self) -> tuple[int, int]:
        """Major and minor version of the wallet RPC."""
        number = (await self._read("get_version")).whole("version")
        return number >> 16, number & 0xFFFF

    async def create(self, filename: str, password: str) -> None:
        """Make a wallet and open it."""
        await self._act(
            "create_wallet", {"filename": filename, "password": password, "language": "English"}
        )

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
        """Write the open wallet to its file. Until then a kill undoes what it learned."""
        await self._act("store")

    async def seed(self) -> str:
        """The wallet's 25 words. They are the money: keep them out of logs."""
        return (await self._read("query_key", {"key_type": "mnemonic"})).text("key")

    # --- following the chain -------------------------------------------------------------------

    async def height(self) -> int:
        """The number of blocks that the wallet has scanned."""
        return (await self._read("get_height")).whole("height")

    async def refresh(self) -> Refreshed:
        """Scan up to the daemon's top, and its pool."""
        answer = await self._act("refresh", seconds=_SLOW_SECONDS)
        return Refreshed(answer.whole("blocks_fetched"), answer.flag("received_money"))

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
        return (await self._read("get_address", params)).text("address")

    async def create_account(self) -> int:
        """Make another account; its number. ``store`` before it is used."""
        return (await self._act("create_account")).whole("account_index")

    async def create_addresses(self, count: int) -> list[Subaddress]:
        """Make 1 to 64 subaddresses. ``store`` before any of them is given to anyone."""
        if not 1 <= count <= MOST_ADDRESSES_PER_CALL:
            raise ValueError(f"1 to {MOST_ADDRESSES_PER_CALL} addresses a call, not {count}")
        answer = await self._act("create_address", {"account_index": self.account, "count": count})
        indices, addresses = answer.items("address_indices"), answer.texts("addresses")
        if len(indices) != count or len(addresses) != count:
            raise answer.bad("has another number of addresses than asked for")
        return [
            Subaddress(SubaddressIndex(self.account, index), address)
            for index, address in zip(indices, addresses, strict=True)
        ]

    async def addresses(self, indices: Sequence[int]) -> list[Subaddress]:
        """Addresses that were made before. The wallet raises NodeError beyond the newest."""
        params = {"account_index": self.account, "address_index": list(indices)}
        answer = await self._read("get_address", params)
        return [
            Subaddress(
                SubaddressIndex(self.account, item.whole("address_index")), item.text("address")
            )
            for item in answer.each("addresses")
        ]

    async def index_of(self, address: str) -> SubaddressIndex | None:
        """Where an address is in the wallet; None when it is somebody else's."""
        try:
            answer = await self._read("get_address_index", {"address": address})
        except NodeError as error:
            if error.code == WalletCode.WRONG_ADDRESS:
                return None
            raise
        inner = answer.inner("index")
        return SubaddressIndex(inner.whole("major"), inner.whole("minor"))

    async def validate(self, address: str) -> AddressCheck:
        """What the wallet says of an address, of whatever network."""
        params = {"address": address, "any_net_type": True, "allow_openalias": False}
        answer = await self._read("validate_address", params)
        return AddressCheck(
            valid=answer.flag("valid"),
            integrated=answer.flag("integrated"),
            subaddress=answer.flag("subaddress"),
            nettype=answer.text("nettype"),
        )

    # --- what came in and went out -------------------------------------------------------------

    async def transfers(
        self,
        from_height: int,
        kinds: Sequence[TransferKind] = (TransferKind.INCOMING, TransferKind.POOL),
    ) -> list[WalletTransfer]:
        """Transfers in blocks at or above ``from_height``, and all that are not mined."""
        params: JsonObject = {str(kind): kind in kinds for kind in TransferKind}
        # The wallet leaves out the block at min_height itself.
        params |= {"account_index": self.account, "filter_by_height": True}
        params["min_height"] = max(from_height - 1, 0)
        answer = await self._read("get_transfers", params)
        return [_transfer(kind, item) for kind in kinds for item in answer.each(kind)]

    async def transfer(self, txid: str) -> list[WalletTransfer]:
        """What the wallet knows of one transaction; empty when nothing."""
        params = {"txid": txid, "account_index": self.account}
        try:
            answer = await self._read("get_transfer_by_txid", params)
        except NodeError as error:
            if error.code == WalletCode.WRONG_TXID:
                return []
            raise
        items = answer.each("transfers")
        return [_transfer(_kind(item), item) for item in items]

    async def balance(self, indices: Sequence[int] = ()) -> Balance:
        """The balance of an account, and of these subaddresses (none given: of all in use).

        Without ``indices`` it takes seconds in a wallet with many transfers.
        """
        params: JsonObject = {"account_index": self.account}
        if indices:
            params["address_indices"] = list(indices)
        answer = await self._read("get_balance", params)
        return Balance(
            total=answer.whole("balance"),
            unlocked=answer.whole("unlocked_balance"),
            blocks_to_unlock=answer.whole("blocks_to_unlock"),
            subaddresses=tuple(map(_subaddress_balance, answer.each("per_subaddress"))),
        )

    async def outputs(
        self, which: OutputFilter = OutputFilter.AVAILABLE, indices: Sequence[int] = ()
    ) -> list[Output]:
        """The account's outputs, or those of these subaddresses, with their key images."""
        params: JsonObject = {"transfer_type": which, "account_index": self.account}
        if indices:
            params["subaddr_indices"] = list(indices)
        answer = await self._read("incoming_transfers", params)
        return [_output(item) for item in answer.each("transfers")]

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
        return _prepared(await self._act("transfer", params | _DO_NOT_RELAY))

    async def prepare_sweep(
        self, key_image: str, address: str, *, priority: int = 0
    ) -> PreparedPayment:
        """Sign a transaction that sends one whole output to ``address``, without publishing it."""
        params = {"key_image": key_image, "address": address, "priority": priority}
        return _prepared(await self._act("sweep_single", params | _DO_NOT_RELAY))

    async def relay(self, metadata: str) -> str:
        """Publish a prepared payment through the wallet, which notes it; the transaction id.

        At most once per payment, then ``store``: for one that is mined the wallet reports success
        and books it a second time, for good. After that, MonerodClient.submit.
        """
        return (await self._act("relay_tx", {"hex": metadata})).text("tx_hash")

    async def freeze(self, key_image: str) -> None:
        """Keep an output from being spent until thawed."""
        await self._act("freeze", {"key_image": key_image})

    async def thaw(self, key_image: str) -> None:
        """Let a frozen output be spent again."""
        await self._act("thaw", {"key_image": key_image})

    # --- proving -------------------------------------------------------------------------------

    async def tx_key(self, txid: str) -> str:
        """The key of a transaction that this wallet made, while it remembers it."""
        return (await self._read("get_tx_key", {"txid": txid})).text("tx_key")

    async def prove_payment(self, txid: str, address: str, message: str = "") -> str:
        """A signature that this wallet's transaction paid ``address``."""
        params = {"txid": txid, "address": address, "message": message}
        return (await self._read("get_tx_proof", params)).text("signature")

    async def check_proof(
        self, txid: str, address: str, signature: str, message: str = ""
    ) -> PaymentCheck:
        """What ``prove_payment``'s signature shows."""
        params = {"txid": txid, "address": address, "message": message, "signature": signature}
        answer = await self._read("check_tx_proof", params)
        return _payment_check(answer, valid=answer.flag("good"))

    async def check_key(self, txid: str, tx_key: str, address: str) -> PaymentCheck:
        """What a transaction paid ``address``, by the transaction's key.

        NodeError.code is WRONG_TX_KEY for what can't be a key: wallets up to 0.18.0.0 at least end
        themselves over one that is not below the order of the group.
        """
        if not _may_be_tx_key(tx_key):
            name, text = self.rpc.endpoint.name, "not asked: that is no transaction key"
            raise NodeError(name, "check_tx_key", WalletCode.WRONG_TX_KEY, text)
        params = {"txid": txid, "tx_key": tx_key, "address": address}
        return _payment_check(await self._read("check_tx_key", params), valid=True)

    # --- plumbing ------------------------------------------------------------------------------

    async def _read(self, method: str, params: JsonObject | None = None) -> Answer:
        return self._answer(method, await self.rpc.read(method, params))

    async def _act(
        self, method: str, params: JsonObject | None = None, *, seconds: float | None = None
    ) -> Answer:
        return self._answer(method, await self.rpc.act(method, params, seconds=seconds))

    def _answer(self, method: str, value: Any) -> Answer:
        return Answer(self.rpc.endpoint.name, method, value)


_DO_NOT_RELAY: Final = {
    "do_not_relay": True,
    "get_tx_key": True,
    "get_tx_hex": True,
    "get_tx_metadata": True,
}


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


def _prepared(answer: Answer) -> PreparedPayment:
    images = answer.inner("spent_key_images").texts("key_images")
    fields = ("tx_hash", "tx_blob", "tx_metadata", "tx_key")
    txid, raw, metadata, key = (answer.text(field) for field in fields)
    if not (images and txid and raw and metadata and key):
        raise answer.bad("is a payment without id, bytes, metadata, key or key images")
    return PreparedPayment(
        txid=txid,
        amount=answer.whole("amount"),
        fee=answer.whole("fee"),
        weight=answer.whole("weight"),
        raw=raw,
        metadata=metadata,
        tx_key=key,
        key_images=images,
    )


def _kind(item: Answer) -> TransferKind:
    name = item.text("type")
    if name == "block":
        return TransferKind.INCOMING
    if name not in set(TransferKind):
        raise item.bad(f"has a transfer of unknown type {name!r}")
    return TransferKind(name)


def _transfer(kind: TransferKind, item: Answer) -> WalletTransfer:
    height = item.whole("height")
    return WalletTransfer(
        kind=kind,
        txid=item.text("txid"),
        address=item.text("address"),
        index=_index(item),
        amount=item.whole("amount"),
        fee=item.whole("fee"),
        height=height or None,
        confirmations=item.whole("confirmations", 0),
        timestamp=item.whole("timestamp"),
        unlock_time=item.whole("unlock_time"),
        locked=item.flag("locked"),
        double_spend_seen=item.flag("double_spend_seen"),
        coinbase=item.text("type") == "block",
    )


def _index(item: Answer) -> SubaddressIndex:
    inner = item.inner("subaddr_index")
    return SubaddressIndex(inner.whole("major"), inner.whole("minor"))


def _subaddress_balance(item: Answer) -> SubaddressBalance:
    return SubaddressBalance(
        index=SubaddressIndex(item.whole("account_index"), item.whole("address_index")),
        address=item.text("address"),
        total=item.whole("balance"),
        unlocked=item.whole("unlocked_balance"),
        blocks_to_unlock=item.whole("blocks_to_unlock"),
        outputs=item.whole("num_unspent_outputs"),
    )


def _output(item: Answer) -> Output:
    return Output(
        txid=item.text("tx_hash"),
        global_index=item.whole("global_index"),
        index=_index(item),
        amount=item.whole("amount"),
        key_image=item.text("key_image"),
        height=item.whole("block_height"),
        spent=item.flag("spent"),
        unlocked=item.flag("unlocked"),
        frozen=item.flag("frozen"),
    )


def _payment_check(answer: Answer, *, valid: bool) -> PaymentCheck:
    return PaymentCheck(
        valid=valid,
        received=answer.whole("received", 0),
        confirmations=answer.whole("confirmations", 0),
        in_pool=answer.flag("in_pool", default=False),
    )
