"""A simulated EVM chain with scripted faults, and the deposit scanner on it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, RpcFailure
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.deposits import EvmDepositScanner
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, Log, LogFilter, LogRange, Receipt, Tag
from rpcsvc.settlement.onchain.evm.records import BlockPoint, EvmAddress
from tests.chain_options import evm_network
from tests.sandbox import ManualClock
from tests.waiting import record_deposits

SEEN, CONFIRMED, REMOVED = DepositState.SEEN, DepositState.CONFIRMED, DepositState.REMOVED
TOKEN, HOT, USER, STRANGER, NOBODY = (
    evm_checksum(f"0x{n:040x}") for n in (0xA0B8, 0x4077, 0x05E2, 0x57A6, 0)
)
OURS = [EvmAddress(i, evm_checksum(f"0x{0xDE60000 + i:08x}{i:032x}")) for i in range(1, 30)]
NETWORK = evm_network(
    "arbitrum", 42161, TOKEN, confirmations=3, tracked_blocks=40, block_seconds=10
)  # fmt: skip
GENESIS_SECONDS = 1_700_000_000
Event = tuple[str, str, int]


@lru_cache(10_000)
def txid_of(name: str) -> str:
    return digest(name)


def digest(*parts: object) -> str:
    return "0x" + usdc.keccak256(repr(parts).encode()).hex()


class Chain(EvmClient):
    """A simulated node. A block is a list of transactions, a transaction a list of events.

    ``lag``: number of newest blocks that it lacks. ``blind``: number of newest blocks without
    events. ``behind``: number of newest blocks that the node lacks which lists events, of several
    behind one address. ``takes_batches``: whether one node shows the block and lists its events.
    ``elsewhere``: blocks answered by another node on a fork. ``missing``: blocks that it lacks
    though it has later ones. ``pool``: transactions of its pending block; ``refusal``: the error if
    it has no pending block. ``genesis``: seconds of the first block. ``asked``: the calls.
    """

    def __init__(self) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.blocks: list[list[tuple[str, list[Event]]]] = [[]]
        self.salts = [0]
        self.hashes: list[str] = []
        self.lag = 0
        self.blind = 0
        self.behind = 0
        self.takes_batches = True
        self.elsewhere: set[int] = set()
        self.missing: set[int] = set()
        self.safe = self.finalized = 0
        self.genesis = GENESIS_SECONDS
        self.pool: list[dict[str, Any]] = []
        self.refusal: RpcFailure | None = None
        self.asked: list[str] = []

    def mine(self, *transactions: tuple[str, list[Event]], count: int = 1) -> int:
        for _ in range(count):
            self.blocks.append([])
            self.salts.append(len(self.salts))
        self.blocks[-1] = list(transactions)
        self.hash_of(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def replace_from(self, number: int, salt: int) -> list[tuple[str, list[Event]]]:
        """Drop the blocks from ``number``; their transactions. New blocks get other hashes."""
        dropped = [item for block in self.blocks[number:] for item in block]
        del self.blocks[number:], self.salts[number:], self.hashes[number:]
        self.blocks.append([])
        self.salts.append(-salt)
        return dropped

    @property
    def head(self) -> int:
        return max(0, len(self.blocks) - 1 - self.lag)

    def hash_of(self, number: int) -> str:
        for new in range(len(self.hashes), number + 1):
            parent = self.hashes[-1] if new else ""
            self.hashes.append(digest(parent, self.salts[new], self.blocks[new]))
        return self.hashes[number]

    async def block(self, at: Any = Tag.LATEST) -> Block | None:
        self.asked.append("block")
        known = {Tag.LATEST: self.head, Tag.SAFE: self.safe, Tag.FINALIZED: self.finalized}
        return self._at(known.get(at, at))

    def _at(self, number: int) -> Block | None:
        if number > self.head or number in self.missing:
            return None
        parent = self.hash_of(number - 1) if number else digest()
        here = digest("fork") if number in self.elsewhere else self.hash_of(number)
        return Block(number, here, parent, self.genesis + 10 * number, None)

    async def pending_block(self, *, seconds: float) -> Any:
        self.asked.append("pending")
        assert seconds > 0
        if self.refusal is not None:
            raise self.refusal
        return {"number": hex(self.head + 1), "hash": None, "transactions": self.pool}

    async def logs(
        self, wanted: LogFilter, first: int, last: int, after: BlockPoint | None = None
    ) -> LogRange:
        self.asked.append("logs")
        assert wanted == LogFilter(TOKEN, (usdc.TRANSFER_TOPIC,))
        numbers = range(first, min(last, self.head - self.blind - self.behind) + 1)
        listed = [log for number in numbers for log in self._logs_in(number)]
        logs = tuple(log for log in listed if log.address == TOKEN)
        has_it = last <= self.head - self.behind or not self.takes_batches
        found = LogRange.shown(first, last, logs, self._at(last) if has_it else None)
        if after is None:
            return found
        has_after = after.number <= self.head - self.behind
        return found.joined(after, self._at(after.number) if has_after else None)

    async def receipt(self, txid: str) -> Receipt | None:
        self.asked.append("receipt")
        for number in range(self.head + 1):
            names = [] if number in self.missing else self.blocks[number]
            if any(txid_of(name) == txid for name, _ in names):
                logs = tuple(log for log in self._logs_in(number) if log.txid == txid)
                return Receipt(txid, True, number, self.hash_of(number), 1, 1, logs)
        return None

    def _logs_in(self, number: int) -> list[Log]:
        where, logs = self.hash_of(number), list[Log]()
        for name, events in self.blocks[number]:
            for sender, to, units in events:
                # An event of another contract, which has a log index in the transaction, too.
                address = USER if sender == "other" else TOKEN
                source = STRANGER if sender == "other" else sender
                topics = (usdc.TRANSFER_TOPIC, *map(usdc.address_word, (source, to)))
                data = usdc.uint_word(units)
                log = Log(address, topics, data, txid_of(name), number, where, len(logs))
                logs.append(log)
        return logs


class CheckedConnection(EvmConnection):
    """A connection whose node passes every check."""

    async def check(self) -> Block:
        block = await self.client.block()
        assert block is not None
        self.problem = None
        return block

    async def head(self) -> Block:
        return await self.check()


class Reader:
    """A scanner on a simulated chain, and the deposits that the order layer would record."""

    def __init__(self, ledger: EvmDepositLedger, **options: Any) -> None:
        self.ledger = ledger
        self.network = replace(NETWORK, **options)
        self.chain = Chain()
        self.clock = ManualClock((GENESIS_SECONDS + 10**6) * 1000)
        self.book: dict[DepositKey, DepositSighting] = {}
        self.restart()

    def restart(self) -> None:
        self.connection = CheckedConnection(self.chain, self.network)
        self.scanner = EvmDepositScanner(self.connection, self.ledger, self.clock)

    async def poll(self, *, acknowledge: bool = True) -> dict[DepositKey, DepositState]:
        """One pass; the states found."""
        sightings = await self.scanner.observe()
        for item in sightings:
            known = self.book.get(item.key)
            assert known is None or replace(known, state=item.state) == item
            self.book[item.key] = item
        if acknowledge:
            await record_deposits(self.ledger._db, sightings)
            await self.scanner.acknowledge(sightings)
        return {item.key: item.state for item in sightings}


def pays(*units: int, to: int = 0, sender: str = USER) -> list[Event]:
    return [(sender, OURS[to].address, amount) for amount in units]


def key(name: str, position: int = 0) -> DepositKey:
    return DepositKey("arbitrum", digest(name), position)
