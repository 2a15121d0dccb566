"""The mnemonic of the hot wallet and deposit addresses, signatures, and the bytes of transactions.

BIP-39 words, BIP-32 derivation at m/44'/60'/0'/0/i (BIP-44), EIP-1559 transactions and EIP-712
digests. Nothing is sent from here. No ``repr`` and no message shows a secret. Needs the extra
``rpcsvc[onchain]``; eth-account is imported when a key is first needed.

A transaction rebuilt from a node's fields must hash to its id: what the service would publish again
is what was mined. The sender is the node's word. Sources: EIP-1559, EIP-2718; the Yellow Paper,
appendix B (RLP).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from rpcsvc.domain.usdc import Signature, keccak256
from rpcsvc.durable_files import sync_directory, write_new
from rpcsvc.ids import RandomBytes

HOT_WALLET_INDEX: Final = 0
LARGEST_INDEX: Final = 2**31 - 1
_ENTROPY_BYTES: Final = 32
_MOST_FILE_BYTES: Final = 4096
_WORD_COUNTS: Final = (12, 15, 18, 21, 24)
_GROUP_AND_OTHERS: Final = 0o077
_LEGACY, _FEE_MARKET = 0, 2
_SHORT: Final = 55
_STRING, _LIST = 0x80, 0xC0


class KeyFileRefused(Exception):
    """The mnemonic's file can't or must not be used. The message names the remedy."""


class OnchainExtraMissing(ImportError):
    """The packages of the extra ``onchain`` are not installed."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            f"The onchain engine needs the package {missing}:"
            " install the service with pip install 'rpcsvc[onchain]'."
        )


# --- the file --------------------------------------------------------------------------------


def read_mnemonic(path: Path) -> str:
    """The words of a file that belongs to this user alone. Raises KeyFileRefused.

    Words may be separated by any white space. Their checksum (BIP-39) has to hold.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise KeyFileRefused(f"The key file {path} can't be opened: {error.strerror}.") from error
    try:
        _require_private(path, os.fstat(fd))
        content = os.read(fd, _MOST_FILE_BYTES + 1)
    finally:
        os.close(fd)
    return _checked_words(path, content)


def create_mnemonic(path: Path, random: RandomBytes) -> str:
    """Make a file with 24 new words, on disk before this returns. Raises KeyFileRefused.

    A file that is there is never touched.
    """
    words = _words_of(random(_ENTROPY_BYTES))
    fresh = path.with_name(f".{path.name}.{random(8).hex()}")
    try:
        write_new(fresh, f"{words}\n".encode())
        # A link is made whole or not at all, and never over a file that is there.
        os.link(fresh, path)
        sync_directory(path.parent)
    except FileExistsError:
        raise KeyFileRefused(f"The key file {path} exists already; it is left as it is.") from None
    except OSError as error:
        problem = f"The key file {path} can't be made: {error.strerror}."
        raise KeyFileRefused(problem) from error
    finally:
        with suppress(FileNotFoundError):
            fresh.unlink()
    return words


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileRefused(f"The key file {path} is not a regular file.")
    if status.st_uid != os.geteuid():
        raise KeyFileRefused(
            f"The key file {path} belongs to user {status.st_uid}, and the service runs as user"
            f" {os.geteuid()}. Run: chown {os.geteuid()} {path}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & _GROUP_AND_OTHERS:
        raise KeyFileRefused(
            f"The key file {path} has mode {mode:04o}: others on this machine may have read the"
            f" keys. If that can't be, run: chmod 600 {path}. If it can, move the funds to new keys"
            " first."
        )


def _checked_words(path: Path, content: bytes) -> str:
    if len(content) > _MOST_FILE_BYTES:
        raise KeyFileRefused(f"The key file {path} has over {_MOST_FILE_BYTES} bytes.")
    try:
        words = content.decode("ascii").split()
    except UnicodeDecodeError:
        raise KeyFileRefused(f"The key file {path} holds other than English words.") from None
    if len(words) not in _WORD_COUNTS:
        raise KeyFileRefused(
            f"The key file {path} holds {len(words)} words; a BIP-39 mnemonic has 12, 15, 18, 21"
            " or 24."
        )
    mnemonic = " ".join(words)
    if not _english().is_mnemonic_valid(mnemonic):
        raise KeyFileRefused(
            f"The words in the key file {path} fail their checksum (BIP-39, English): one of them"
            " is wrong, or two have changed places."
        )
    return mnemonic


# --- accounts --------------------------------------------------------------------------------


class TransactionPlan(Struct, frozen=True):
    """A transaction to be signed (EIP-1559). Amounts are wei; ``max_fee`` and ``tip`` per gas.

    ``max_fee`` bounds base fee and ``tip`` together.
    """

    chain_id: int
    nonce: int
    to: str
    gas: int
    max_fee: int
    tip: int
    data: bytes = b""
    value: int = 0


class SignedTransaction(Struct, frozen=True):
    """A signed transaction: the bytes for a node, and its id on the chain (0x and hex)."""

    txid: str
    raw: bytes


class EvmSigner:
    """An account that signs: its address (EIP-55) and its signatures."""

    def __init__(self, key: bytes) -> None:
        self._account = _eth_account().Account.from_key(key)
        self.address = str(self._account.address)

    def __repr__(self) -> str:
        return f"EvmSigner({self.address})"

    def sign(self, plan: TransactionPlan) -> SignedTransaction:
        """Sign without sending. Equal plans give equal bytes (RFC 6979).

        Raises ValueError when a field can't be right.
        """
        _require_sane(plan)
        signed = self._account.sign_transaction(
            {
                "type": 2,
                "chainId": plan.chain_id,
                "nonce": plan.nonce,
                "to": plan.to,
                "gas": plan.gas,
                "maxFeePerGas": plan.max_fee,
                "maxPriorityFeePerGas": plan.tip,
                "data": plan.data,
                "value": plan.value,
            }
        )
        raw = bytes(signed.raw_transaction)
        return SignedTransaction("0x" + keccak256(raw).hex(), raw)

    def sign_digest(self, digest: bytes) -> Signature:
        """Sign 32 bytes as they are: a digest of typed data (EIP-712) that was made here."""
        if len(digest) != 32:
            raise ValueError(f"a digest has 32 bytes, not {len(digest)}")
        signed = self._account.unsafe_sign_hash(digest)
        return Signature(signed.v, signed.r, signed.s)


class HdKeys:
    """The accounts of one mnemonic. Deriving one takes well under a millisecond (coincurve)."""

    def __init__(self, mnemonic: str, passphrase: str = "") -> None:
        self._seed: bytes = _hd().seed_from_mnemonic(mnemonic, passphrase)

    def __repr__(self) -> str:
        return "HdKeys(...)"

    def signer(self, index: int) -> EvmSigner:
        """The account at m/44'/60'/0'/0/``index``. Raises ValueError."""
        if isinstance(index, bool) or not 0 <= index <= LARGEST_INDEX:
            raise ValueError(f"an index is 0 to {LARGEST_INDEX}, not {index}")
        return EvmSigner(_hd().key_from_seed(self._seed, f"m/44'/60'/0'/0/{index}"))

    def address(self, index: int) -> str:
        """The address of that account (EIP-55). Raises ValueError."""
        return self.signer(index).address


def _require_sane(plan: TransactionPlan) -> None:
    if plan.chain_id < 1:
        raise ValueError(f"chain_id is {plan.chain_id}: without one, other networks take it too")
    if plan.max_fee < 1 or not 0 <= plan.tip <= plan.max_fee:
        raise ValueError(f"max_fee {plan.max_fee} must be above 0, tip {plan.tip} not above it")
    if plan.nonce < 0 or plan.gas < 1 or plan.value < 0:
        raise ValueError("nonce and value must not be negative, and gas must be above 0")


# --- eth-account, when it is needed ----------------------------------------------------------


def _eth_account() -> Any:
    return _load("eth_account")


def _hd() -> Any:
    return _load("eth_account.hdaccount")


def _english() -> Any:
    return _load("eth_account.hdaccount.mnemonic").Mnemonic()


def _words_of(entropy: bytes) -> str:
    return str(_english().to_mnemonic(entropy))


def _load(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise OnchainExtraMissing(error.name or name) from error


Item = bytes | Sequence["Item"]


class SignedFields(Struct, frozen=True):
    """A signed transaction. ``raw`` are its bytes; gas is a limit, fees are wei per gas."""

    txid: str
    raw: bytes
    sender: str
    to: str
    nonce: int
    value: int
    data: bytes
    gas: int
    max_fee: int
    tip: int


def signed_fields(answer: Mapping[str, Any]) -> SignedFields:
    """The transaction of a node's answer to eth_getTransactionByHash.

    Raises ValueError when its bytes do not give its id: the node tells something else than was
    signed, or the transaction is of another type than 0 (legacy) and 2 (EIP-1559).
    """
    try:
        kind = _number(answer.get("type", "0x0"))
        fields = {_LEGACY: _legacy, _FEE_MARKET: _fee_market}[kind](answer)
        prefix = bytes([kind]) if kind else b""
        raw = prefix + rlp(fields)
        txid = str(answer["hash"]).lower()
        if "0x" + keccak256(raw).hex() != txid:
            raise ValueError("its bytes do not give its id")
        return _read(answer, txid, raw, kind)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing, or of an unknown kind: {error}") from error


def _read(answer: Mapping[str, Any], txid: str, raw: bytes, kind: int) -> SignedFields:
    dynamic = kind == _FEE_MARKET
    return SignedFields(
        txid=txid,
        raw=raw,
        sender=str(answer["from"]).lower(),
        to=str(answer["to"]).lower(),
        nonce=_number(answer["nonce"]),
        value=_number(answer["value"]),
        data=_bytes(answer["input"]),
        gas=_number(answer["gas"]),
        max_fee=_number(answer["maxFeePerGas" if dynamic else "gasPrice"]),
        tip=_number(answer["maxPriorityFeePerGas" if dynamic else "gasPrice"]),
    )


def unsigned(plan: TransactionPlan) -> bytes:
    """The transaction as it is before it is signed (EIP-1559), without an access list."""
    numbers = (plan.chain_id, plan.nonce, plan.tip, plan.max_fee, plan.gas)
    to = bytes.fromhex(plan.to[2:])
    return bytes([_FEE_MARKET]) + rlp(
        [*map(_digits, numbers), to, _digits(plan.value), plan.data, []]
    )


def _legacy(answer: Mapping[str, Any]) -> list[Item]:
    names = ("nonce", "gasPrice", "gas")
    return [
        *(_quantity(answer[name]) for name in names),
        _bytes(answer["to"]),
        _quantity(answer["value"]),
        _bytes(answer["input"]),
        *(_quantity(answer[name]) for name in ("v", "r", "s")),
    ]


def _fee_market(answer: Mapping[str, Any]) -> list[Item]:
    names = ("chainId", "nonce", "maxPriorityFeePerGas", "maxFeePerGas", "gas")
    listed: list[Item] = [
        [_bytes(entry["address"]), [_bytes(key) for key in entry["storageKeys"]]]
        for entry in answer.get("accessList") or []
    ]
    parity = answer.get("yParity", answer.get("v"))
    return [
        *(_quantity(answer[name]) for name in names),
        _bytes(answer["to"]),
        _quantity(answer["value"]),
        _bytes(answer["input"]),
        listed,
        *(_quantity(each) for each in (parity, answer["r"], answer["s"])),
    ]


def _number(text: Any) -> int:
    return int(text, 16)


def _quantity(text: Any) -> bytes:
    return _digits(_number(text))


def _digits(number: int) -> bytes:
    """Return a number as big-endian bytes without leading zeros; empty for 0."""
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _bytes(text: Any) -> bytes:
    return bytes.fromhex(text.removeprefix("0x"))


def rlp(item: Item) -> bytes:
    """Return the recursive length prefix encoding of bytes, or of lists of them."""
    if isinstance(item, bytes):
        if len(item) == 1 and item[0] < _STRING:
            return item
        return _prefix(len(item), _STRING) + item
    body = b"".join(rlp(each) for each in item)
    return _prefix(len(body), _LIST) + body


def _prefix(length: int, offset: int) -> bytes:
    if length <= _SHORT:
        return bytes([offset + length])
    size = _digits(length)
    return bytes([offset + _SHORT + len(size)]) + size
