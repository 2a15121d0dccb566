"""A model of monero-wallet-rpc with one wallet, at the level of its JSON answers.

What it learns is in memory until ``store``: a restart goes back to its file. It learns of blocks
and pool in ``refresh`` alone, and keeps what it saw in blocks that were taken off the chain until
the first block of another branch. Source: the wallet RPC documentation at getmonero.org, and the
facts of tests/regtest.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, NamedTuple

from rpcsvc.domain.addresses import MoneroNetwork, parse_monero_address, stagenet_subaddress
from rpcsvc.errors import InvalidDestination
from rpcsvc.settlement.onchain.monero.wallet_types import WalletCode
from tests.simulation.daemons import CallRefused, DaemonModel
from tests.simulation.monero import (
    PER_BYTE,
    SPENDABLE_AGE,
    MonerodModel,
    MonerodName,
    Paid,
    XmrBlock,
    XmrTransaction,
    build,
    decoded,
    digest,
    weight_of,
)

LOOKAHEAD: Final = 200
_MOST_INPUTS: Final = 100
_MOST_ADDRESSES: Final = 64
_FACTORS: Final = (1, 1, 4, 20, 160)
# A wallet gives a payment up that it has not found in the pool at so many looks with new blocks,
# and so many seconds after it was sent (wallet2, version 0.18).
_MISSES: Final = 2
_PROPAGATION_SECONDS: Final = 500
_NETWORKS: Final = tuple(MoneroNetwork)


class XmrReceived(NamedTuple):
    """An output of the wallet. ``spent_at``: the block that it was seen spent in."""

    txid: str
    place: int
    minor: int
    amount: int
    height: int
    global_index: int
    is_spent: bool = False
    spent_at: int | None = None
    frozen: bool = False


class XmrSent(NamedTuple):
    """A transaction of the wallet. ``change`` came back, or will."""

    made: XmrTransaction
    amount: int
    change: int
    timestamp: int
    height: int = 0
    destinations: tuple[Paid, ...] = ()


@dataclass
class Wallet:
    """The knowledge of a wallet; ``scanned`` are hashes of blocks."""

    highest: int = 0
    scanned: list[str] = field(default_factory=list)
    received: dict[str, XmrReceived] = field(default_factory=dict)
    pool: dict[str, XmrTransaction] = field(default_factory=dict)
    doubtful: dict[str, None] = field(default_factory=dict)
    out: dict[str, XmrSent] = field(default_factory=dict)
    pending: dict[str, XmrSent] = field(default_factory=dict)
    failed: dict[str, XmrSent] = field(default_factory=dict)
    keys: dict[str, tuple[Paid, ...]] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Wallet:
        """Another one of the same knowledge: what the containers hold does not change."""
        return replace(self, **{name: value.copy() for name, value in vars(self).items()
                                if not isinstance(value, int)})  # fmt: skip


_MINORS: Final[dict[str, int]] = {}


@cache
def address_of(minor: int) -> str:
    """The wallet's address of an index."""
    address = stagenet_subaddress(hashlib.sha512(f"wallet {minor}".encode()).digest())
    _MINORS[address] = minor
    return address


class WalletModel(DaemonModel):
    """The wallet's daemon. It needs its node for all that is not in the wallet, or one of several.

    ``lag``: newest blocks that it is not given yet.
    """

    FILE: Final = "treasury"

    def __init__(self, node: MonerodModel | MonerodName, chance: random.Random) -> None:
        self._daemon = node
        self._chance = chance
        self._file = Wallet()
        self._open: Wallet | None = None
        self.lag = 0

    def restart(self) -> None:
        """Go on from the file; no wallet is open then."""
        self._open = None

    def call(self, method: str, params: Any) -> Any:
        """The result of a call. Raises CallRefused."""
        answer = _METHODS.get(method)
        if answer is None:
            raise CallRefused(-32601, "Method not found")
        return answer(self, params or {}) or {}

    @staticmethod
    def owns(address: str) -> bool:
        """Whether it is an address of the wallet."""
        return address in _MINORS

    @property
    def _wallet(self) -> Wallet:
        if self._open is None:
            raise CallRefused(WalletCode.NOT_OPEN, "No wallet file")
        return self._open

    @property
    def _node(self) -> MonerodModel:
        """The node that answers next."""
        return self._daemon.one({}) if isinstance(self._daemon, MonerodName) else self._daemon

    def _require_node(self) -> None:
        if self._node.is_away:
            raise CallRefused(WalletCode.NO_DAEMON, "no connection to daemon")

    def _minor_of(self, address: str) -> int | None:
        """The index of an address of the wallet, as far as it looks ahead."""
        minor = _MINORS.get(address)
        return None if minor is None or minor > self._wallet.highest + LOOKAHEAD else minor

    # --- file and addresses --------------------------------------------------------------------

    def _version(self, _params: Any) -> Any:
        return {"version": 0x1001B}

    def _open_file(self, params: Mapping[str, str]) -> Any:
        if params["filename"] != self.FILE:
            raise CallRefused(WalletCode.UNKNOWN, "Failed to open wallet")
        self._open = self._file.copy()

    def _close(self, _params: Any) -> Any:
        self._store({})
        self._open = None

    def _store(self, _params: Any) -> Any:
        self._file = self._wallet.copy()

    def _nothing(self, _params: Any) -> Any:
        return None

    def _addresses(self, params: Mapping[str, Any]) -> Any:
        minors = params.get("address_index") or range(self._wallet.highest + 1)
        if any(minor > self._wallet.highest for minor in minors):
            raise CallRefused(WalletCode.NO_SUCH_ADDRESS, "address index is out of bound")
        listed = [{"address_index": minor, "address": address_of(minor)} for minor in minors]
        return {"address": address_of(0), "addresses": listed}

    def _create(self, params: Mapping[str, int]) -> Any:
        wallet, count = self._wallet, params.get("count", 1)
        if not 1 <= count <= _MOST_ADDRESSES:
            raise CallRefused(WalletCode.UNKNOWN, "Count must be between 1 and 64.")
        minors = list(range(wallet.highest + 1, wallet.highest + count + 1))
        wallet.highest = minors[-1]
        addresses = [address_of(minor) for minor in minors]
        return {"address_indices": minors, "addresses": addresses, "address": addresses[0]}

    def _index(self, params: Mapping[str, str]) -> Any:
        minor = self._minor_of(params["address"])
        if minor is None:
            raise CallRefused(WalletCode.WRONG_ADDRESS, "Address doesn't belong to the wallet")
        return {"index": {"major": 0, "minor": minor}}

    def _validate(self, params: Mapping[str, str]) -> Any:
        try:
            found = parse_monero_address(params["address"], networks=_NETWORKS)
        except InvalidDestination:
            return {"valid": False, "integrated": False, "subaddress": False, "nettype": ""}
        return {
            "valid": True,
            "integrated": found.kind == "integrated",
            "subaddress": found.kind == "subaddress",
            "nettype": found.network.value,
        }

    # --- following the chain -------------------------------------------------------------------

    def _height(self, _params: Any) -> Any:
        return {"height": len(self._wallet.scanned)}

    def _refresh(self, _params: Any) -> Any:
        self._require_node()
        wallet, node = self._wallet, self._node
        blocks = node.view.blocks
        blocks = blocks[: len(blocks) - self.lag]
        fork = min(len(wallet.scanned), len(blocks))
        while fork and wallet.scanned[fork - 1] != blocks[fork - 1].hash:
            fork -= 1
        if fork < len(blocks):
            self._detach(fork)
            for block in blocks[fork:]:
                self._scan(block)
        self._wallet.pool, self._wallet.doubtful = {}, {}
        self._look_at_pool(node)
        if fork < len(blocks):
            self._give_up(node)
        return {"blocks_fetched": max(0, len(blocks) - fork), "received_money": False}

    def _detach(self, fork: int) -> None:
        """Forget what was in blocks from ``fork`` on."""
        wallet = self._wallet
        del wallet.scanned[fork:]
        for image, item in list(wallet.received.items()):
            if item.height >= fork:
                del wallet.received[image]
            elif item.spent_at is not None and item.spent_at >= fork:
                wallet.received[image] = item._replace(is_spent=False, spent_at=None)
        for txid, sent in list(wallet.out.items()):
            if sent.height >= fork:
                del wallet.out[txid]

    def _scan(self, block: XmrBlock) -> None:
        wallet = self._wallet
        wallet.scanned.append(block.hash)
        index = block.first_index
        for made in block.mined:
            spent = [image for image in made.images if image in wallet.received]
            for image in spent:
                item = wallet.received[image]
                wallet.received[image] = item._replace(is_spent=True, spent_at=block.height)
            for place, paid in enumerate(made.outputs):
                minor = self._minor_of(paid.address)
                if minor is not None:
                    found = XmrReceived(made.txid, place, minor, paid.amount, block.height, index)
                    wallet.received[made.image_of(place)] = found
                index += 1
            if spent:
                self._note_mined(made, block, [wallet.received[image] for image in spent])

    def _note_mined(
        self, made: XmrTransaction, block: XmrBlock, spent: Sequence[XmrReceived]
    ) -> None:
        """Note a mined payment; the wallet knows no destinations of a forgotten one."""
        wallet = self._wallet
        change = self._own(made)
        destinations = wallet.keys.get(made.txid, ())
        to_itself = sum(
            paid.amount for paid in destinations if self._minor_of(paid.address) is not None
        )
        amount = sum(item.amount for item in spent) - made.fee - change + to_itself
        wallet.out[made.txid] = XmrSent(
            made, amount, change, block.timestamp, block.height, destinations
        )
        wallet.pending.pop(made.txid, None)
        wallet.failed.pop(made.txid, None)

    def _own(self, made: XmrTransaction) -> int:
        """Outputs of a transaction to the wallet."""
        return sum(paid.amount for paid in made.outputs if self._minor_of(paid.address) is not None)

    def _look_at_pool(self, node: MonerodModel) -> None:
        wallet = self._wallet
        for txid, waiting in node.pool.items():
            is_own = any(image in wallet.received for image in waiting.made.images)
            if not is_own and self._own(waiting.made):
                wallet.pool[txid] = waiting.made
                if waiting.double_spend_seen:
                    wallet.doubtful[txid] = None

    def _give_up(self, node: MonerodModel) -> None:
        """Count looks with a new block, and give payments up that were long not in the pool."""
        wallet = self._wallet
        for txid, sent in list(wallet.pending.items()):
            if txid in node.pool:
                wallet.misses.pop(txid, None)
                continue
            wallet.misses[txid] = wallet.misses.get(txid, 0) + 1
            is_late = node.chain.now() > sent.timestamp + _PROPAGATION_SECONDS
            if wallet.misses[txid] >= _MISSES and is_late:
                wallet.failed[txid] = wallet.pending.pop(txid)
                self._free(sent.made.images)

    def _free(self, images: Iterable[str]) -> None:
        """Take outputs for unspent that no block spends."""
        received = self._wallet.received
        for image in images:
            if image in received and received[image].spent_at is None:
                received[image] = received[image]._replace(is_spent=False)

    def _rescan(self, _params: Any) -> Any:
        self._require_node()
        wallet = self._wallet
        self._open = Wallet(highest=wallet.highest, keys=wallet.keys)
        self._refresh({})

    def _rescan_spent(self, _params: Any) -> Any:
        self._require_node()
        received, node = self._wallet.received, self._node
        for image, item in list(received.items()):
            if not node.state_of(image):
                received[image] = item._replace(is_spent=False, spent_at=None)
            elif not item.is_spent:
                received[image] = item._replace(is_spent=True)

    # --- what came in and went out -------------------------------------------------------------

    def _transfers(self, params: Mapping[str, Any]) -> Any:
        wallet = self._wallet
        if params.get("pool"):
            self._look_at_pool(self._node)
        bounds = params if params.get("filter_by_height") else {}
        low: int = bounds.get("min_height", -1)
        high: int = bounds.get("max_height", 1 << 40)

        def within(height: int) -> bool:
            return low < height <= high

        lists: dict[str, Iterator[Any]] = {
            "in": (each for each in self._came() if within(each["height"])),
            "pool": self._coming(),
            "out": (self._went("out", e) for e in wallet.out.values() if within(e.height)),
            "pending": (self._went("pending", each) for each in wallet.pending.values()),
            "failed": (self._went("failed", each) for each in wallet.failed.values()),
        }
        answer = {name: list(lists[name]) for name in lists if params.get(name)}
        return {name: listed for name, listed in answer.items() if listed}

    def _of_transaction(self, params: Mapping[str, str]) -> Any:
        everything = self._transfers(
            dict.fromkeys(("in", "pool", "out", "pending", "failed"), True)
        )
        found = [e for listed in everything.values() for e in listed if e["txid"] == params["txid"]]
        if not found:
            raise CallRefused(WalletCode.WRONG_TXID, "XmrTransaction not found.")
        return {"transfer": found[0], "transfers": found}

    def _came(self) -> Iterator[Any]:
        """One for each transaction and subaddress; not the change of its own."""
        wallet = self._wallet
        sums: dict[tuple[str, int, int], int] = {}
        for item in wallet.received.values():
            if item.txid not in wallet.out:
                key = item.txid, item.minor, item.height
                sums[key] = sums.get(key, 0) + item.amount
        for (txid, minor, height), amount in sums.items():
            yield self._entry("in", txid, minor, amount, height)

    def _coming(self) -> Iterator[Any]:
        wallet = self._wallet
        for txid, made in wallet.pool.items():
            sums: dict[int, int] = {}
            for paid in made.outputs:
                minor = self._minor_of(paid.address)
                if minor is not None:
                    sums[minor] = sums.get(minor, 0) + paid.amount
            for minor, amount in sums.items():
                entry = self._entry("pool", txid, minor, amount, 0)
                yield entry | {"double_spend_seen": txid in wallet.doubtful}

    def _went(self, kind: str, sent: XmrSent) -> Any:
        entry = self._entry(kind, sent.made.txid, 0, sent.amount, sent.height)
        listed = [{"address": paid.address, "amount": paid.amount} for paid in sent.destinations]
        return (
            entry
            | {"fee": sent.made.fee, "timestamp": sent.timestamp}
            | ({"destinations": listed} if listed else {})
        )

    def _entry(self, kind: str, txid: str, minor: int, amount: int, height: int) -> Any:
        scanned, blocks = len(self._wallet.scanned), self._node.view.blocks
        return {
            "type": kind,
            "txid": txid,
            "address": address_of(minor),
            "subaddr_index": {"major": 0, "minor": minor},
            "amount": amount,
            "fee": 10**7,
            "height": height,
            "confirmations": max(0, scanned - height) if height else 0,
            "timestamp": blocks[min(height, len(blocks) - 1)].timestamp,
            "unlock_time": 0,
            "locked": not height or height + SPENDABLE_AGE > scanned,
            "double_spend_seen": False,
        }

    def _is_unlocked(self, item: XmrReceived) -> bool:
        scanned: int = len(self._wallet.scanned)
        return item.height + SPENDABLE_AGE <= scanned

    def _balance(self, params: Mapping[str, Any]) -> Any:
        wallet, strict = self._wallet, params.get("strict", False)
        held = [
            item
            for item in wallet.received.values()
            if not (item.spent_at is not None if strict else item.is_spent) and not item.frozen
        ]
        coming = 0
        if not strict:
            coming = sum(sent.change for sent in wallet.pending.values())
            coming += sum(
                paid.amount
                for made in wallet.pool.values()
                for paid in made.outputs
                if self._minor_of(paid.address) is not None
            )
        unlocked = sum(item.amount for item in held if self._is_unlocked(item))
        left = [item.height + SPENDABLE_AGE - len(wallet.scanned) for item in held]
        return {
            "balance": sum(item.amount for item in held) + coming,
            "unlocked_balance": unlocked,
            "blocks_to_unlock": max(0, *left, 0) if left else 0,
            "per_subaddress": [
                {
                    "account_index": 0,
                    "address_index": minor,
                    "address": address_of(minor),
                    "balance": 0,
                    "unlocked_balance": 0,
                    "blocks_to_unlock": 0,
                    "num_unspent_outputs": 0,
                }
                for minor in params.get("address_indices", ())
            ],
        }

    def _outputs(self, params: Mapping[str, Any]) -> Any:
        kind, minors = params["transfer_type"], params.get("subaddr_indices")
        listed = [
            {
                "tx_hash": item.txid,
                "global_index": item.global_index,
                "subaddr_index": {"major": 0, "minor": item.minor},
                "amount": item.amount,
                "key_image": image,
                "block_height": item.height,
                "spent": item.is_spent,
                "unlocked": self._is_unlocked(item),
                "frozen": item.frozen,
            }
            for image, item in self._wallet.received.items()
            if (kind == "all" or item.is_spent == (kind == "unavailable"))
            and (not minors or item.minor in minors)
        ]
        return {"transfers": listed} if listed else {}

    # --- paying --------------------------------------------------------------------------------

    def _prepare(self, params: Mapping[str, Any]) -> Any:
        self._require_node()
        to = [Paid(each["address"], each["amount"]) for each in params["destinations"]]
        for paid in to:
            if not self._validate({"address": paid.address})["valid"]:
                raise CallRefused(WalletCode.WRONG_ADDRESS, f"Invalid destination: {paid.address}")
        due, minors = sum(paid.amount for paid in to), params.get("subaddr_indices")
        usable = self._usable(minors)
        self._chance.shuffle(usable)
        chosen: list[tuple[str, XmrReceived]] = []
        fee = 0
        while sum(item.amount for _, item in chosen) < due + fee or not chosen:
            if not usable:
                raise self._short(due + fee, minors)
            chosen.append(usable.pop())
            fee = self._fee(params, len(chosen), len(to) + 1)
        if len(chosen) > _MOST_INPUTS:
            raise CallRefused(WalletCode.TX_NOT_POSSIBLE, "XmrTransaction would be too large")
        return self._signed(chosen, to, fee)

    def _usable(self, minors: Sequence[int] | None) -> list[tuple[str, XmrReceived]]:
        return [
            (image, item)
            for image, item in self._wallet.received.items()
            if not item.is_spent
            and not item.frozen
            and self._is_unlocked(item)
            and (not minors or item.minor in minors)
        ]

    def _short(self, due: int, minors: Sequence[int] | None) -> CallRefused:
        held = sum(
            item.amount
            for item in self._wallet.received.values()
            if not item.is_spent and not item.frozen and (not minors or item.minor in minors)
        )
        if held < due:
            return CallRefused(WalletCode.NOT_ENOUGH_MONEY, "not enough money")
        return CallRefused(WalletCode.NOT_ENOUGH_UNLOCKED, "not enough unlocked money")

    def _fee(self, params: Mapping[str, int], inputs: int, outputs: int) -> int:
        return PER_BYTE * _FACTORS[params.get("priority", 0)] * weight_of(inputs, outputs)

    def _prepare_sweep(self, params: Mapping[str, Any]) -> Any:
        self._require_node()
        image = params["key_image"]
        item = next((each for known, each in self._usable(None) if known == image), None)
        if item is None:
            raise CallRefused(WalletCode.UNKNOWN, "No spendable output of that key image")
        fee = self._fee(params, 1, 2)
        return self._signed([(image, item)], [Paid(params["address"], item.amount - fee)], fee)

    def _signed(self, chosen: Sequence[tuple[str, XmrReceived]], to: list[Paid], fee: int) -> Any:
        change = sum(item.amount for _, item in chosen) - sum(paid.amount for paid in to) - fee
        outputs = [*to, *([Paid(address_of(0), change)] if change else [])]
        images = [image for image, _ in chosen]
        made = build(images, outputs, fee, self._chance.getrandbits(64))
        return {
            "tx_hash": made.txid,
            "amount": sum(paid.amount for paid in to),
            "fee": fee,
            "weight": made.weight,
            "tx_blob": made.raw,
            "tx_metadata": f"{len(to):02x}{made.raw}",
            "tx_key": made.key,
            "spent_key_images": {"key_images": images},
        }

    def _relay(self, params: Mapping[str, str]) -> Any:
        self._require_node()
        wallet, metadata = self._wallet, params["hex"]
        made, count = decoded(metadata[2:]), int(metadata[:2], 16)
        said = self._node.submit(made.raw)
        if said["status"] != "OK":
            raise CallRefused(WalletCode.TRANSFER_FAILED, "transaction was rejected by daemon")
        for image in made.images:
            if image in wallet.received:
                wallet.received[image] = wallet.received[image]._replace(is_spent=True)
        to = made.outputs[:count]
        wallet.keys[made.txid] = to
        change = sum(paid.amount for paid in made.outputs[count:])
        now, amount = self._node.chain.now(), sum(paid.amount for paid in to)
        wallet.pending[made.txid] = XmrSent(made, amount, change, now, 0, to)
        return {"tx_hash": made.txid}

    def _freeze(self, params: Mapping[str, str]) -> Any:
        self._set_frozen(params["key_image"], frozen=True)

    def _thaw(self, params: Mapping[str, str]) -> Any:
        self._set_frozen(params["key_image"], frozen=False)

    def _set_frozen(self, image: str, *, frozen: bool) -> None:
        received = self._wallet.received
        if image not in received:
            raise CallRefused(WalletCode.UNKNOWN, "Key image not found")
        received[image] = received[image]._replace(frozen=frozen)

    # --- proving -------------------------------------------------------------------------------

    def _key(self, params: Mapping[str, str]) -> Any:
        if params["txid"] not in self._wallet.keys:
            raise CallRefused(WalletCode.NO_TX_KEY, "No tx secret key is stored for this tx")
        made = self._node.transaction(params["txid"])
        return {"tx_key": "" if made is None else made.key}

    def _proof(self, params: Mapping[str, str]) -> Any:
        self._require_node()
        if params["txid"] not in self._wallet.keys:
            raise CallRefused(WalletCode.UNKNOWN, "Tx secret key wasn't found in the wallet file.")
        return {"signature": _proof(params)}

    def _check_proof(self, params: Mapping[str, str]) -> Any:
        return {"good": params["signature"] == _proof(params)} | self._paid(params)

    def _check_key(self, params: Mapping[str, str]) -> Any:
        found = self._paid(params)
        made = self._node.transaction(params["txid"])
        if made is None or made.key != params["tx_key"]:
            found["received"] = 0
        return found

    def _paid(self, params: Mapping[str, str]) -> dict[str, Any]:
        """Units that a transaction paid to an address."""
        self._require_node()
        node, txid = self._node, params["txid"]
        made = node.transaction(txid)
        if made is None:
            raise CallRefused(WalletCode.UNKNOWN, "Failed to get transaction from daemon")
        height = node.view.heights.get(txid)
        return {
            "received": sum(p.amount for p in made.outputs if p.address == params["address"]),
            "in_pool": height is None,
            "confirmations": 0 if height is None else len(node.view.blocks) - height,
        }


def _proof(params: Mapping[str, str]) -> str:
    return "OutProofV2" + digest(params["txid"], params["address"], params.get("message", ""))


_METHODS: Final[Mapping[str, Callable[[WalletModel, Any], Any]]] = {
    "get_version": WalletModel._version,
    "open_wallet": WalletModel._open_file,
    "close_wallet": WalletModel._close,
    "store": WalletModel._store,
    "auto_refresh": WalletModel._nothing,
    "get_height": WalletModel._height,
    "refresh": WalletModel._refresh,
    "rescan_blockchain": WalletModel._rescan,
    "rescan_spent": WalletModel._rescan_spent,
    "get_address": WalletModel._addresses,
    "create_address": WalletModel._create,
    "get_address_index": WalletModel._index,
    "validate_address": WalletModel._validate,
    "get_transfers": WalletModel._transfers,
    "get_transfer_by_txid": WalletModel._of_transaction,
    "get_balance": WalletModel._balance,
    "incoming_transfers": WalletModel._outputs,
    "transfer": WalletModel._prepare,
    "sweep_single": WalletModel._prepare_sweep,
    "relay_tx": WalletModel._relay,
    "freeze": WalletModel._freeze,
    "thaw": WalletModel._thaw,
    "get_tx_key": WalletModel._key,
    "get_tx_proof": WalletModel._proof,
    "check_tx_proof": WalletModel._check_proof,
    "check_tx_key": WalletModel._check_key,
}
