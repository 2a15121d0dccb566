"""The auditor's reads of chains that move meanwhile: no absence is taken for a fact.

Node and wallet are fakes. The same readers on real daemons: tests/regtest/test_audit_chains.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.audit import evm_chain
from rpcsvc.audit.evm_chain import EvmReader
from rpcsvc.audit.monero_chain import MoneroReader
from rpcsvc.audit.records import MONERO, Books, ChainMoved, EvmFacts, PaymentEntry, Watched
from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import BatchRefused, Call
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, Log, LogFilter, Tag
from rpcsvc.settlement.onchain.monero.monerod import BlockHeader, NodeInfo
from tests.chain_options import monero_options
from tests.unit.evm_chain import HOT, NETWORK, OURS, TOKEN, Chain, pays

# --- EVM -------------------------------------------------------------------------------------


class AuditedChain(Chain):
    """A simulated node that answers the auditor, too; every account holds 7 units."""

    def __init__(self) -> None:
        super().__init__()
        self.rpc: Any = SimpleNamespace(endpoint=self.rpc.endpoint, read=self._read)
        self.compared: set[str] = set()

    async def chain_id(self) -> int:
        return NETWORK.chain_id

    async def nonce(self, *_: Any) -> int:
        return 0

    async def ether(self, *_: Any) -> int:
        return 0

    async def call(self, call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        if at == self.head:
            self.compared.add("0x" + call.data[-20:].hex())
        return usdc.uint_word(7)

    async def with_blocks(
        self, numbers: Sequence[int], call: Call
    ) -> tuple[list[Block | None], Any]:
        if not self.takes_batches:
            raise BatchRefused("node", "any", "no batches")
        newest = self.head - self.behind
        blocks = [self._at(number) if number <= newest else None for number in numbers]
        return blocks, await self._read(*call)

    async def _read(self, method: str, params: Any) -> Any:
        assert method == "eth_getLogs"
        first, last = (int(params[0][name], 16) for name in ("fromBlock", "toBlock"))
        wanted = LogFilter(TOKEN, (usdc.TRANSFER_TOPIC,))
        return [_as_json(item) for item in (await self.logs(wanted, first, last)).logs]


def _as_json(item: Log) -> dict[str, Any]:
    return {
        "topics": ["0x" + topic.hex() for topic in item.topics],
        "data": "0x" + item.data.hex(),
        "transactionHash": item.txid,
        "blockNumber": hex(item.block_number),
        "logIndex": hex(item.log_index),
    }


@dataclass
class Audited:
    """A reader of a chain on which block 50 was the newest when the service began."""

    chain: AuditedChain
    books: Books
    reader: EvmReader

    async def facts(self) -> EvmFacts:
        self.chain.compared.clear()
        found = await self.reader.facts(self.books, await self.reader.head())
        assert found is not None
        return found


@pytest.fixture
def audited() -> Audited:
    chain = AuditedChain()
    chain.mine(count=50)
    watched = Watched(51, 50, chain.hash_of(50))
    ours = frozenset(item.address for item in OURS)
    books = Books(watched={NETWORK.name: watched}, evm_hot=HOT, evm_addresses=ours)
    return Audited(chain, books, EvmReader(NETWORK, chain))


async def test_events_that_a_lagging_node_leaves_out_are_read_again(audited: Audited) -> None:
    """One of several nodes behind an address lacks the newest blocks, and gives no error."""
    audited.chain.mine(("a", pays(5)))
    audited.chain.blind = 2
    assert len((await audited.facts()).moves) == 0
    audited.chain.blind = 0
    audited.chain.mine(count=2)
    assert [move.units for move in (await audited.facts()).moves] == [5]
    assert OURS[0].address.lower() in audited.chain.compared


async def test_node_that_lacks_the_last_block_is_not_audited(audited: Audited) -> None:
    audited.chain.mine(("a", pays(5)), count=20)
    audited.chain.behind = 10
    with pytest.raises(ChainMoved, match="lacks block 70: it lags"):
        await audited.facts()
    audited.chain.behind = 0
    assert [move.units for move in (await audited.facts()).moves] == [5]


async def test_node_behind_what_the_service_has_read_is_not_audited(audited: Audited) -> None:
    audited.chain.mine(count=20)
    audited.books = replace(audited.books, watched={NETWORK.name: Watched(51, 70, "0x70")})
    assert (await audited.facts()).top == 70
    audited.chain.lag = 4
    with pytest.raises(ChainMoved, match="lacks the newest 4 blocks"):
        await audited.facts()
    audited.chain.lag = 3
    assert (await audited.facts()).top == 67


async def test_node_without_batches_is_audited(audited: Audited) -> None:
    audited.chain.takes_batches = False
    audited.chain.mine(("a", pays(5)))
    assert [move.units for move in (await audited.facts()).moves] == [5]


async def test_what_is_read_again_is_compared_once(audited: Audited) -> None:
    audited.chain.mine(("a", pays(5)))
    await audited.facts()
    audited.reader.accept()
    audited.chain.mine(("b", pays(6, to=1)))
    assert [move.units for move in (await audited.facts()).moves] == [5, 6]
    assert audited.chain.compared == {HOT.lower(), OURS[1].address.lower()}


async def test_young_events_of_replaced_blocks_are_forgotten(audited: Audited) -> None:
    audited.chain.mine(count=20)
    number = audited.chain.mine(("a", pays(5)))
    assert len((await audited.facts()).moves) == 1
    audited.reader.accept()
    audited.chain.replace_from(number, salt=1)
    audited.chain.mine(("b", pays(6, to=1)))
    assert [move.units for move in (await audited.facts()).moves] == [6]
    assert audited.chain.compared == {
        HOT.lower(), OURS[0].address.lower(), OURS[1].address.lower()
    }  # fmt: skip


async def test_old_events_are_read_once(audited: Audited) -> None:
    audited.chain.mine(("a", pays(5)))
    audited.chain.mine(count=20)
    await audited.facts()
    audited.chain.blind = 10**6
    assert [move.units for move in (await audited.facts()).moves] == [5]


async def test_events_of_an_audit_that_failed_are_read_once(audited: Audited) -> None:
    """The first ranges were read when the node lacked the last one."""
    audited.chain.mine(count=5)
    await audited.facts()
    audited.chain.mine(("a", pays(5)))
    audited.chain.mine(count=20)
    audited.reader._span, audited.chain.behind = 5, 10
    with pytest.raises(ChainMoved, match="it lags"):
        await audited.facts()
    audited.chain.behind = 0
    assert [move.units for move in (await audited.facts()).moves] == [5]


async def test_node_that_lags_now_doubles_no_event(audited: Audited) -> None:
    """The events of the last old block are read once, though it is young to this node."""
    audited.chain.mine(count=16)
    audited.chain.mine(("a", pays(5)))
    audited.chain.mine(count=3)
    for lag in (0, 2, 0):
        audited.chain.lag = lag
        assert [move.units for move in (await audited.facts()).moves] == [5]


async def test_node_that_lacks_what_was_read_is_not_audited(audited: Audited) -> None:
    """Another node behind the same address has those blocks, and events of them were kept."""
    audited.chain.mine(count=15)
    audited.chain.mine(("a", pays(5)))
    audited.chain.mine(count=4)
    await audited.facts()
    audited.chain.lag = 5
    late = await audited.reader.head()
    audited.chain.lag = 0
    with pytest.raises(ChainMoved, match="lacks block 67: it lags"):
        await audited.reader.facts(audited.books, late)
    assert [move.units for move in (await audited.facts()).moves] == [5]


async def test_range_after_one_of_many_events_is_narrower(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evm_chain, "_MANY", 1)
    steps: list[tuple[int, int]] = []
    audited.reader = EvmReader(
        NETWORK, audited.chain, None, lambda _what, done, total: steps.append((done, total))
    )
    audited.reader._span = 8
    audited.chain.mine(("a", pays(5)), ("b", pays(6)))
    audited.chain.mine(count=12)
    assert [move.units for move in (await audited.facts()).moves] == [5, 6]
    assert steps == [(0, 12), (8, 12), (10, 12)], "8 blocks, 2, and up to twice as many"


# --- Monero ----------------------------------------------------------------------------------

PRIMARY = "4primary"
PAYMENT = PaymentEntry("tr_1", MONERO, "upkeep", PRIMARY, 5, "settled", ("tx",), fee=1)


@dataclass
class Node:
    """``known``: it shows the payment. ``between``: what happens while it looks for it."""

    known: bool = False
    top: int = 9
    between: Callable[[], None] = lambda: None
    rpc: Any = field(default=None)

    def __post_init__(self) -> None:
        self.rpc = SimpleNamespace(endpoint=SimpleNamespace(name="node"), read_path=self._read)

    async def info(self) -> NodeInfo:
        height = self.top + 1
        return NodeInfo(
            height, f"h{self.top}", "fakechain", True, False, True, height, 0, "0.18", 600_000
        )

    async def header_at(self, height: int) -> BlockHeader | None:
        return BlockHeader(height, f"h{height}", "", 0) if height <= self.top else None

    async def _read(self, _path: str, _body: Any) -> Any:
        body = '{"rct_signatures": {"txnFee": 1}}'
        shown = {"tx_hash": "tx", "in_pool": False, "as_json": body, "block_height": self.top}
        found = [shown] if self.known else []
        self.between()
        return {"status": "OK", "txs": found}


@dataclass
class Wallet:
    """An empty wallet that has scanned all."""

    account: int = 0
    rpc: Any = field(default=None)

    def __post_init__(self) -> None:
        self.rpc = SimpleNamespace(endpoint=SimpleNamespace(name="wallet"), read=self._read)

    async def primary_address(self) -> str:
        return PRIMARY

    async def refresh(self) -> None: ...

    async def height(self) -> int:
        return 10

    async def outputs(self) -> list[Any]:
        return []

    async def _read(self, _method: str, _params: Any) -> Any:
        return {"balance": 0}


async def test_payment_that_is_just_being_mined_is_not_missing() -> None:
    node: Any = Node()
    wallet: Any = Wallet()
    reader = MoneroReader(node, wallet, monero_options(nettype="fakechain"))
    books = Books(
        watched={MONERO: Watched(1, 9, "h9")}, monero_primary=PRIMARY, payments=(PAYMENT,)
    )

    def mine() -> None:
        node.top += 1

    head = await reader.head()
    node.between = mine
    with pytest.raises(ChainMoved, match="went on from block 11"):
        await reader.facts(books, head)

    def mine_it() -> None:
        node.top, node.known = node.top + 1, True

    node.between = mine_it
    facts = await reader.facts(books, head)
    assert facts is not None
    assert facts.payments["tr_1"].txid == "tx"
    node.known, node.between = False, lambda: None
    facts = await reader.facts(books, head)
    assert facts is not None
    assert facts.payments == {}, "the top stood still: it is nowhere"
