"""A model of an EVM chain with USDC: blocks, the network's pool, the token, and who holds what.

The chain is one; each node has a pool of its own, may lag, and may keep a branch that was replaced.
What people send needs no signature (``EvmChain.send``). The state of each past block can be asked
for. Sources: EIP-1559, EIP-3009; FiatToken 2.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from eth_keys.datatypes import Signature

from rpcsvc.domain import usdc

if TYPE_CHECKING:
    from tests.simulation.evm_node import EvmNode

GWEI: Final = 10**9
TRANSFER_GAS: Final = 45_000
NEW_HOLDER_GAS: Final = 20_000
AUTHORIZED_GAS: Final = 85_000
REVERTED_GAS: Final = 30_000
# Percent by which both fees of a replacement have to rise.
_REPLACEMENT: Final = 10
_ELSEWHERE: Final = "0x" + "e1" * 20
_NAME, _VERSION = "USD Coin", "2"
_TRANSFER: Final = usdc.selector("transfer(address,uint256)")
_RECEIVE: Final = usdc.selector(
    "receiveWithAuthorization(address,address,uint256,uint256,uint256,bytes32,uint8,bytes32,bytes32)"
)
_AUTHORIZED: Final = usdc.selector(
    "transferWithAuthorization(address,address,uint256,uint256,uint256,bytes32,uint8,bytes32,bytes32)"
)
_BALANCE_OF: Final = usdc.selector("balanceOf(address)")
_NONCES: Final = usdc.selector("nonces(address)")
_ALLOWANCE: Final = usdc.selector("allowance(address,address)")
_STATE_OF: Final = usdc.selector("authorizationState(address,bytes32)")
_BLACKLISTED: Final = usdc.selector("isBlacklisted(address)")

# "ether", "usdc", "nonce" or "blacklisted", and the account; "used", and account and nonce;
# "paused", and nothing.
Key = tuple[str, str]


class Reverted(Exception):
    """The token refuses a call."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction, signed or of a person. Addresses are in lower case."""

    txid: str
    sender: str
    to: str
    nonce: int
    data: bytes
    gas: int
    max_fee: int
    tip: int
    value: int = 0
    is_signed: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """A log of the token."""

    topics: tuple[bytes, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Mined:
    """A transaction in a block: what it used and what came of it. ``first_log``: in its block."""

    made: Transaction
    ok: bool
    gas: int
    price: int
    events: tuple[Event, ...]
    first_log: int


@dataclass(slots=True)
class Block:
    """A block, and the state that it changed."""

    number: int
    hash: str
    parent: str
    timestamp: int
    base_fee: int
    mined: list[Mined] = field(default_factory=list)
    changed: list[Key] = field(default_factory=list)


class State:
    """Numbers by key, as of each block."""

    def __init__(self) -> None:
        self._values: dict[Key, list[tuple[int, int]]] = {}

    def get(self, key: Key, at: int | None = None) -> int:
        """The value after block ``at``; None: now."""
        known = self._values.get(key)
        if not known:
            return 0
        if at is None:
            return known[-1][1]
        place = bisect_right(known, at, key=lambda item: item[0])
        return known[place - 1][1] if place else 0

    def set(self, key: Key, value: int, block: Block) -> None:
        """Change a value in a block, which must be the newest."""
        known = self._values.setdefault(key, [])
        if known and known[-1][0] == block.number:
            known[-1] = (block.number, value)
        else:
            known.append((block.number, value))
            block.changed.append(key)

    def copy(self) -> State:
        """The numbers as they are now."""
        made = State()
        made._values = {key: known.copy() for key, known in self._values.items()}
        return made

    def undo(self, block: Block) -> None:
        """Take back what the newest block changed."""
        for key in block.changed:
            self._values[key].pop()

    def total(self, kind: str) -> int:
        """The sum of all present values of a kind."""
        return sum(self.get(key) for key in self._values if key[0] == kind)


@dataclass(frozen=True, slots=True)
class Holding:
    """Holdings of an account in the first block: wei and USDC units."""

    ether: int = 10**18
    units: int = 0


class EvmChain:
    """The chain and the network's pool. ``now`` tells Unix seconds."""

    def __init__(
        self,
        chain_id: int,
        token: str,
        now: Callable[[], int],
        chance: random.Random,
        holdings: Mapping[str, Holding],
    ) -> None:
        self.chain_id = chain_id
        self.token = token.lower()
        self.state = State()
        self.pool: dict[str, Transaction] = {}
        self.nodes: list[EvmNode] = []
        self.base_fee = GWEI
        # The share of waiting transactions that a block leaves out.
        self.left_out = 0.0
        # The share of signed transactions that no pool gets back from replaced blocks.
        self.forgotten = 0.0
        # Transactions whose nonce their senders have used for something else.
        self._doomed: dict[str, None] = {}
        # The calls that were submitted to any node under a nonce, by sender and nonce.
        self.submitted: dict[tuple[str, int], dict[bytes, None]] = {}
        # Called with the id of each transaction that is submitted to a node.
        self.submitting: Callable[[str], None] = lambda _txid: None
        # Called before blocks are replaced.
        self.replacing: Callable[[], None] = lambda: None
        # Unix seconds of the last reorganisation.
        self.replaced_at = 0
        self._now = now
        self._chance = chance
        self._places: dict[str, tuple[int, int]] = {}
        self.domain = usdc.Domain(_NAME, _VERSION, chain_id, token)
        genesis = Block(0, _hash("genesis", chain_id), _hash("nothing"), now(), GWEI)
        self.blocks = [genesis]
        for account, holding in holdings.items():
            self.give(account, holding)

    def give(self, account: str, holding: Holding) -> None:
        """Let an account have something in the first block, before there is another."""
        (genesis,) = self.blocks
        self.state.set(("ether", account.lower()), holding.ether, genesis)
        self.state.set(("usdc", account.lower()), holding.units, genesis)

    @property
    def top(self) -> Block:
        """The newest block."""
        return self.blocks[-1]

    def branch(self) -> EvmChain:
        """A copy of the blocks as they are now, to which nothing is added."""
        made = copy(self)
        made.blocks, made.state, made._places = [*self.blocks], self.state.copy(), {**self._places}
        return made

    def find(self, txid: str) -> Transaction | None:
        """A transaction in a block, or waiting."""
        place = self.place_of(txid)
        return self.pool.get(txid) if place is None else place[0].mined[place[1]].made

    def place_of(self, txid: str) -> tuple[Block, int] | None:
        """Where a transaction is mined: its block, and its index there."""
        place = self._places.get(txid)
        return None if place is None else (self.blocks[place[0]], place[1])

    # --- blocks --------------------------------------------------------------------------------

    def mine(self) -> Block:
        """Add a block of what waits and can be mined, dearest first."""
        top = self.top
        timestamp = max(self._now(), top.timestamp + 1)
        salt = self._chance.getrandbits(64)
        hash_ = _hash(top.hash, timestamp, salt)
        block = Block(top.number + 1, hash_, top.hash, timestamp, self.base_fee)
        self.blocks.append(block)
        waiting = [each for each in self.pool.values() if not self._is_left_out()]
        waiting.sort(key=lambda each: -min(each.tip, each.max_fee - block.base_fee))
        while (made := next((e for e in waiting if self._can_mine(e, block)), None)) is not None:
            waiting.remove(made)
            self._include(made, block)
        for pool in (self.pool, *(node.pool for node in self.nodes)):
            for txid, made in list(pool.items()):
                if made.nonce < self.state.get(("nonce", made.sender)):
                    del pool[txid]
        return block

    def _is_left_out(self) -> bool:
        return self.left_out > 0 and self._chance.random() < self.left_out

    def _is_forgotten(self, made: Transaction) -> bool:
        return made.is_signed and self._chance.random() < self.forgotten

    def _can_mine(self, made: Transaction, block: Block) -> bool:
        cost = made.gas * made.max_fee + made.value
        return (
            made.nonce == self.state.get(("nonce", made.sender))
            and made.max_fee >= block.base_fee
            and self.state.get(("ether", made.sender)) >= cost
        )

    def _include(self, made: Transaction, block: Block) -> None:
        price = block.base_fee + min(made.tip, made.max_fee - block.base_fee)
        first_log = sum(len(each.events) for each in block.mined)
        self._add(("nonce", made.sender), 1, block)
        ok, gas, events = True, 21_000, list[Event]()
        try:
            if made.to == self.token:
                gas, events = self._run(made, block)
        except Reverted:
            ok, gas = False, min(made.gas, REVERTED_GAS)
        self._add(("ether", made.sender), -gas * price, block)
        self._places[made.txid] = (block.number, len(block.mined))
        block.mined.append(Mined(made, ok, gas, price, tuple(events), first_log))

    def _add(self, key: Key, change: int, block: Block) -> None:
        self.state.set(key, self.state.get(key) + change, block)

    def reorganise(self, depth: int, *, again: int | None = None) -> list[Transaction]:
        """Replace the newest blocks by ``again`` others (None: one more); what was in them.

        Doomed payments do not come back; the others wait again, in the network and at each node.
        """
        removed = []
        self.replacing()
        self.replaced_at = self._now()
        for _ in range(min(depth, len(self.blocks) - 1)):
            block = self.blocks.pop()
            self.state.undo(block)
            for each in block.mined:
                del self._places[each.made.txid]
                removed.append(each.made)
        for made in removed:
            if made.txid not in self._doomed and not self._is_forgotten(made):
                for pool in (self.pool, *(node.pool for node in self.nodes)):
                    pool.setdefault(made.txid, made)
        for txid in self._doomed:
            for pool in (self.pool, *(node.pool for node in self.nodes)):
                pool.pop(txid, None)
        for _ in range(depth + 1 if again is None else again):
            self.mine()
        return removed

    def depth_of(self, sender: str, nonce: int, most: int) -> int | None:
        """How deep the transaction with a nonce is, if it is in one of the ``most`` newest
        blocks.
        """
        for depth, block in enumerate(reversed(self.blocks[-most:]), start=1):
            if any((e.made.sender, e.made.nonce) == (sender, nonce) for e in block.mined):
                return depth
        return None

    def displace(self, made: Transaction, depth: int) -> None:
        """Have a branch in which the sender has used the nonce to pay somebody else."""
        self._doomed[made.txid] = None
        self.replace_waiting(made, made.to, usdc.transfer(_ELSEWHERE, 1))
        self.reorganise(depth)

    def replace_waiting(self, made: Transaction, to: str, data: bytes) -> str:
        """Have the sender use the nonce of a transaction for another one that waits; its id."""
        txid = _hash("displaced", made.txid)
        rival = replace(
            made, txid=txid, to=to, data=data, max_fee=2 * made.max_fee, tip=2 * made.tip
        )
        for pool in (self.pool, *(node.pool for node in self.nodes)):
            pool.pop(made.txid, None)
            pool[txid] = rival
        return txid

    # --- what is sent --------------------------------------------------------------------------

    def send(self, sender: str, data: bytes) -> str:
        """Have an account call the token, without a signature; the transaction id."""
        sender = sender.lower()
        nonce = self.state.get(("nonce", sender))
        while any((each.sender, each.nonce) == (sender, nonce) for each in self.pool.values()):
            nonce += 1
        txid = _hash("sent", sender, nonce, data, self._chance.getrandbits(64))
        made = Transaction(
            txid, sender, self.token, nonce, data, 200_000, 10**12, GWEI, is_signed=False
        )
        self.receive(made)
        return txid

    def receive(self, made: Transaction) -> None:
        """The network hears of a transaction: it is offered to all pools."""
        offer(self.pool, made, self.state.get(("nonce", made.sender)))
        for node in self.nodes:
            offer(node.pool, made, node.number_of("nonce", made.sender))

    # --- the token -----------------------------------------------------------------------------

    def estimate(self, sender: str, data: bytes, at: int) -> int:
        """The gas that a call of the token would use after block ``at``. Raises Reverted."""
        self._require_moving(sender, data, at, self.blocks[at].timestamp)
        return self._gas_of(data, at)

    def _gas_of(self, data: bytes, at: int | None = None) -> int:
        paying = usdc.read_paying_call(data)
        if paying is None:
            return REVERTED_GAS
        usual = TRANSFER_GAS if data[:4] == _TRANSFER else AUTHORIZED_GAS
        return usual + (0 if self.state.get(("usdc", paying.to), at) else NEW_HOLDER_GAS)

    def _run(self, made: Transaction, block: Block) -> tuple[int, list[Event]]:
        """Carry out a call in the newest block: its gas, and its events. Raises Reverted."""
        gas = self._gas_of(made.data)
        if gas > made.gas:
            raise Reverted("out of gas")
        source, to, units, used = self._require_moving(
            made.sender, made.data, None, block.timestamp
        )
        events = []
        if used is not None:
            self.state.set(used, 1, block)
            nonce = bytes.fromhex(used[1][42:])
            events.append(Event((usdc.AUTHORIZATION_USED, usdc.address_word(source), nonce), b""))
        self._add(("usdc", source), -units, block)
        self._add(("usdc", to), units, block)
        parties = (usdc.address_word(source), usdc.address_word(to))
        return gas, [*events, Event((usdc.TRANSFER_TOPIC, *parties), usdc.uint_word(units))]

    def _require_moving(
        self, sender: str, data: bytes, at: int | None, now: int
    ) -> tuple[str, str, int, Key | None]:
        """Who pays whom how much, and the authorization that it uses. Raises Reverted."""
        words = [data[n : n + 32] for n in range(4, len(data), 32)]
        used = None
        if data[:4] == _TRANSFER:
            source, to, units = sender, _account(words[0]), usdc.read_uint(words[1])
        elif data[:4] in (_RECEIVE, _AUTHORIZED):
            source, to, units, used = self._authorized(sender, data[:4], words, at, now)
        else:
            raise Reverted("execution reverted")
        if self.state.get(("paused", ""), at):
            raise Reverted("Pausable: paused")
        if any(self.state.get(("blacklisted", each), at) for each in (sender, source, to)):
            raise Reverted("Blacklistable: account is blacklisted")
        if self.state.get(("usdc", source), at) < units:
            raise Reverted("ERC20: transfer amount exceeds balance")
        return source, to, units, used

    def _authorized(
        self, sender: str, call: bytes, words: Sequence[bytes], at: int | None, now: int
    ) -> tuple[str, str, int, Key]:
        source, to = _account(words[0]), _account(words[1])
        units, after, before = (usdc.read_uint(word) for word in words[2:5])
        given = usdc.Authorization(source, to, units, after, before, words[5])
        is_receipt = call == _RECEIVE
        digest = (usdc.receive_digest if is_receipt else usdc.transfer_digest)(self.domain, given)
        v, r, s = (usdc.read_uint(word) for word in words[6:9])
        if is_receipt and sender != to:
            raise Reverted("FiatTokenV2: caller must be the payee")
        if not given.valid_after < now < given.valid_before:
            raise Reverted("FiatTokenV2: authorization is not valid now")
        if signer_of(digest, v - 27, r, s) != source:
            raise Reverted("FiatTokenV2: invalid signature")
        used = ("used", source + words[5].hex())
        if self.state.get(used, at):
            raise Reverted("FiatTokenV2: authorization is used or canceled")
        return source, to, given.units, used

    def ask(self, sender: str, data: bytes, at: int) -> bytes:
        """The result of a call of the token after block ``at``. Raises Reverted."""
        call = data[:4]
        if call in (_TRANSFER, _RECEIVE, _AUTHORIZED):
            self._require_moving(sender, data, at, self.blocks[at].timestamp)
            return usdc.uint_word(1) if call == _TRANSFER else b""
        account = _account(data[4:36]) if len(data) >= 36 else ""

        def state(kind: str, which: str) -> bytes:
            return usdc.uint_word(self.state.get((kind, which), at))

        if call == _BALANCE_OF:
            return state("usdc", account)
        if call == _BLACKLISTED:
            return state("blacklisted", account)
        if call == _STATE_OF:
            return state("used", account + data[36:68].hex())
        constant = {
            usdc.DECIMALS: usdc.uint_word(6),
            usdc.NAME: _text(_NAME),
            usdc.VERSION: _text(_VERSION),
            usdc.DOMAIN_SEPARATOR: self.domain.separator(),
            _NONCES: usdc.uint_word(0),
            _ALLOWANCE: usdc.uint_word(0),
        }
        if call == usdc.PAUSED:
            return state("paused", "")
        if call in constant:
            return constant[call]
        raise Reverted("execution reverted")


def offer(pool: dict[str, Transaction], made: Transaction, next_nonce: int) -> str | None:
    """Put a transaction into a pool, or say why not, as Geth does."""
    if made.txid in pool:
        return "already known"
    if made.nonce < next_nonce:
        return f"nonce too low: next nonce {next_nonce}, tx nonce {made.nonce}"
    rival = next(
        (e for e in pool.values() if (e.sender, e.nonce) == (made.sender, made.nonce)), None
    )
    if rival is not None:
        least = [fee * (100 + _REPLACEMENT) for fee in (rival.max_fee, rival.tip)]
        if any(
            100 * fee < wanted for fee, wanted in zip((made.max_fee, made.tip), least, strict=True)
        ):
            return "replacement transaction underpriced"
        del pool[rival.txid]
    pool[made.txid] = made
    return None


@lru_cache(maxsize=4096)
def signer_of(digest: bytes, parity: int, r: int, s: int) -> str:
    """Who signed a digest, in lower case."""
    signed = Signature(vrs=(parity, r, s))
    return str(signed.recover_public_key_from_msg_hash(digest).to_address())


def _hash(*parts: object) -> str:
    return "0x" + hashlib.sha256(repr(parts).encode()).hexdigest()


def _account(word: bytes) -> str:
    return "0x" + word[12:].hex()


def _text(value: str) -> bytes:
    content = value.encode()
    return usdc.uint_word(32) + usdc.uint_word(len(content)) + content.ljust(32, b"\0")
