"""The auditor's memory over restarts, and when it asks the chains again."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from rpcsvc.audit.evm_chain import EvmReceipts, MinedTransaction
from rpcsvc.audit.memory import FILE, Anchor, AuditMemory
from rpcsvc.audit.monero_chain import MoneroReader
from rpcsvc.audit.records import (
    MONERO,
    Books,
    ChainMoved,
    MoneroFacts,
    PaymentEntry,
    Sighting,
    Watched,
)
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block, Receipt, Tag
from rpcsvc.settlement.onchain.monero.monerod import BlockHeader, NodeInfo
from tests.chain_options import evm_network, monero_options

DEEP = MinedTransaction(80, True, 21)
PRIMARY = "4primary"
PAYMENT = PaymentEntry(
    "ord_1/payout/1", MONERO, "transfer", "8user", 7, "settled", ("tx",), 1, None, "key", 9
)


# --- the file ------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> AuditMemory:
    return AuditMemory(tmp_path)


async def test_facts_are_recalled_by_network(memory: AuditMemory, tmp_path: Path) -> None:
    await memory.remember("one", Anchor(90, "h90"), {"a": DEEP})
    await memory.remember("two", Anchor(5, "h5"), {"b": Sighting("b", 4, 7, None)})
    await memory.remember("one", Anchor(95, "h95"), {"c": replace(DEEP, block=94, cost=None)})
    again = AuditMemory(tmp_path)
    recalled = await again.recall("one", MinedTransaction)
    assert recalled is not None
    assert recalled[0] == Anchor(95, "h95")
    assert recalled[1] == {"a": DEEP, "c": MinedTransaction(94, True, None)}
    await again.forget("one")
    assert await again.recall("one", MinedTransaction) is None
    assert await again.recall("two", Sighting) is not None
    await again.forget()
    assert await again.recall("two", Sighting) is None
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


async def test_anchor_stays_above_all_facts_of_two_processes(memory: AuditMemory) -> None:
    await memory.remember("one", Anchor(95, "h95"), {"c": replace(DEEP, block=94)})
    await memory.remember("one", Anchor(92, "h92"), {"a": DEEP})
    recalled = await memory.recall("one", MinedTransaction)
    assert recalled is not None
    assert recalled[0] == Anchor(95, "h95")
    assert recalled[1].keys() == {"a", "c"}


async def test_file_of_another_version_is_emptied_and_used(
    memory: AuditMemory, tmp_path: Path
) -> None:
    await memory.remember("one", Anchor(90, "h90"), {"a": DEEP})
    with closing(sqlite3.connect(tmp_path / FILE)) as file, file:
        file.execute("UPDATE facts SET fact = x'7b7d'")
        file.execute("PRAGMA user_version = 7")
    assert await memory.recall("one", MinedTransaction) is None
    await memory.remember("one", Anchor(91, "h91"), {"b": DEEP})
    recalled = await memory.recall("one", MinedTransaction)
    assert recalled is not None
    assert (recalled[0], recalled[1].items()) == (Anchor(91, "h91"), {"b": DEEP}.items())


@pytest.mark.parametrize(
    "damage", ["no database at all", "a fact of another form", "no JSON", "a folder"]
)
async def test_unusable_file_is_reported_and_recalls_nothing(
    memory: AuditMemory, tmp_path: Path, damage: str
) -> None:
    if damage == "a folder":
        (tmp_path / FILE).mkdir()
    elif damage == "no database at all":
        (tmp_path / FILE).write_bytes(b"x" * 4096)
    else:
        await memory.remember("one", Anchor(90, "h90"), {"a": DEEP})
        with closing(sqlite3.connect(tmp_path / FILE)) as file, file:
            file.execute("UPDATE facts SET fact = ?", (b"{}" if "form" in damage else b"{",))
    with capture_logs() as logs:
        assert await memory.recall("one", MinedTransaction) is None
        await memory.remember("one", Anchor(91, "h91"), {"b": DEEP})
    assert logs[0]["event"] == "audit_memory_unusable"
    assert str(tmp_path / FILE) in logs[0]["path"]


# --- receipts of an EVM network ------------------------------------------------------------------


class Node(EvmClient):
    """A node with a receipt in block 80, whose blocks are named by ``branch``."""

    def __init__(self, branch: str = "h", top: int = 100) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.branch, self.top = branch, top
        self.asked: Counter[str] = Counter()

    async def receipt(self, txid: str) -> Receipt | None:
        self.asked[txid] += 1
        return Receipt(txid, True, 80, "h80", 3, 7, ())

    async def block(self, at: Tag | int = Tag.LATEST) -> Block | None:
        assert isinstance(at, int)
        return self.at(at) if at <= self.top else None

    def at(self, number: int) -> Block:
        return Block(number, f"{self.branch}{number}", "", 0, None)


async def asked(memory: AuditMemory, node: Node) -> int:
    """How often a process that has just begun asks for the receipt; it remembers it."""
    network = evm_network("arbitrum", 42161, "0xtoken", failed_after=10)
    receipts = EvmReceipts(network, node, memory)
    await receipts.start_again()
    head = node.at(node.top)
    found, _ = await receipts.mined(["tx"], head)
    assert found == {"tx": DEEP}
    number = receipts.deepest(head)
    await receipts.keep(None if number is None else node.at(number))
    return node.asked["tx"]


async def test_deep_receipt_is_asked_for_once_over_restarts(memory: AuditMemory) -> None:
    assert await asked(memory, Node()) == 1
    assert await asked(memory, Node()) == 0
    assert await asked(memory, Node(top=150)) == 0
    await memory.forget()
    assert await asked(memory, Node()) == 1, "as audit --full does"


async def test_young_receipt_is_asked_for_again_after_a_restart(memory: AuditMemory) -> None:
    assert await asked(memory, Node(top=89)) == 1
    assert await asked(memory, Node(top=89)) == 1


@pytest.mark.parametrize("node", [Node(branch="other"), Node(top=89)], ids=["replaced", "lags"])
async def test_receipts_are_asked_again_without_their_anchor(
    memory: AuditMemory, node: Node
) -> None:
    assert await asked(memory, Node()) == 1
    assert await asked(memory, node) == 1
    if node.branch == "other":
        assert await asked(memory, Node(branch="other")) == 0
        assert await asked(memory, Node()) == 1


# --- payments of Monero --------------------------------------------------------------------------


class Monerod:
    """A node on which the transaction is in block 9 of 100."""

    def __init__(self, branch: str = "h") -> None:
        self.branch = branch
        self.rpc = SimpleNamespace(
            endpoint=SimpleNamespace(name="node"), read_path=self._transactions
        )
        self.looked = 0

    async def info(self) -> NodeInfo:
        return NodeInfo(101, self._hash(100), "fakechain", True, False, True, 101, 0, "0.18", 0)

    async def header_at(self, height: int) -> BlockHeader:
        return BlockHeader(height, self._hash(height), "", 0)

    def _hash(self, height: int) -> str:
        return f"{self.branch}{height}"

    async def _transactions(self, _path: str, body: Any) -> Any:
        self.looked += 1
        fee = '{"rct_signatures": {"txnFee": 1}}'
        shown = [
            {"tx_hash": txid, "in_pool": False, "as_json": fee, "block_height": 9}
            for txid in body["txs_hashes"]
        ]
        return {"status": "OK", "txs": shown}


class Wallet:
    """An empty wallet, in which each key proves 7 to its own address alone."""

    account = 0

    def __init__(self) -> None:
        self.rpc = SimpleNamespace(endpoint=SimpleNamespace(name="wallet"), read=self._read)

    async def primary_address(self) -> str:
        return PRIMARY

    async def refresh(self) -> None: ...

    async def height(self) -> int:
        return 101

    async def outputs(self) -> list[Any]:
        return []

    async def check_key(self, _txid: str, _key: str, address: str) -> Any:
        return SimpleNamespace(received=7 if address == "8user" else 0)

    async def _read(self, _method: str, _params: Any) -> Any:
        return {"balance": 0}


async def audited(
    memory: AuditMemory,
    payment: PaymentEntry = PAYMENT,
    *,
    node: Any = None,
    wallet: Any = None,
) -> tuple[MoneroFacts, int]:
    """Facts of a process that has just begun, and how often it has asked for transactions."""
    node, wallet = node or Monerod(), wallet or Wallet()
    reader = MoneroReader(node, wallet, monero_options(nettype="fakechain"), memory)
    watched = {MONERO: Watched(1, 100, f"{node.branch}100")}
    books = Books(watched=watched, monero_primary=PRIMARY, payments=(payment,))
    facts = await reader.facts(books, await reader.head())
    assert facts is not None
    return facts, node.looked


async def test_deep_payment_is_proven_once_over_restarts(memory: AuditMemory) -> None:
    first, looked = await audited(memory)
    assert (first.payments["ord_1/payout/1"].paid, looked) == (7, 1)
    again, looked = await audited(memory)
    assert (again.payments, looked) == (first.payments, 0)
    assert (await audited(memory, node=Monerod("other")))[1] == 1


@pytest.mark.parametrize(
    ("change", "paid"),
    [({"recipient": "8thief"}, 0), ({"tx_key": "other"}, 7), ({"txids": ("tx2",)}, 7)],
)
async def test_changed_payment_is_proven_again_after_a_restart(
    memory: AuditMemory, change: dict[str, Any], paid: int
) -> None:
    await audited(memory)
    changed, looked = await audited(memory, replace(PAYMENT, **change))
    assert (changed.payments["ord_1/payout/1"].paid, looked) == (paid, 1)


async def test_changed_payment_is_proven_again_without_a_restart() -> None:
    node: Any = Monerod()
    wallet: Any = Wallet()
    reader = MoneroReader(node, wallet, monero_options(nettype="fakechain"))
    for payment, paid in ((PAYMENT, 7), (replace(PAYMENT, recipient="8thief"), 0)):
        watched = {MONERO: Watched(1, 100, "h100")}
        books = Books(watched=watched, monero_primary=PRIMARY, payments=(payment,))
        facts = await reader.facts(books, await reader.head())
        assert facts is not None
        assert facts.payments["ord_1/payout/1"].paid == paid


class GrowingWallet(Wallet):
    """A wallet that scans one more block while it proves a payment."""

    scanned = 101

    async def height(self) -> int:
        return self.scanned

    async def check_key(self, txid: str, key: str, address: str) -> Any:
        self.scanned += 1
        return await super().check_key(txid, key, address)


async def test_blocks_that_come_during_proofs_end_no_audit(memory: AuditMemory) -> None:
    facts, looked = await audited(memory, wallet=GrowingWallet())
    assert (facts.payments["ord_1/payout/1"].paid, looked) == (7, 1)
    again, looked = await audited(memory)
    assert (again.payments, looked) == (facts.payments, 0)


async def test_proofs_are_not_kept_once_their_head_is_replaced(memory: AuditMemory) -> None:
    node = Monerod()

    class Replacing(Wallet):
        async def check_key(self, txid: str, key: str, address: str) -> Any:
            node.branch = "other"
            return await super().check_key(txid, key, address)

    await audited(memory, node=node, wallet=Replacing())
    assert await memory.recall(MONERO, Sighting) is None


# --- lists of the Monero wallet ------------------------------------------------------------------


class PaidWallet(Wallet):
    """A wallet that was paid in block 35, of which ``scanned`` are scanned at each look."""

    def __init__(self, *scanned: int) -> None:
        super().__init__()
        self.scanned = list(scanned)

    async def height(self) -> int:
        return self.scanned.pop(0)

    async def _read(self, method: str, params: Any) -> Any:
        if method == "get_transfers" and params.get("min_height", 99) < 35 <= params["max_height"]:
            paid = {"txid": "p", "address": "8a", "amount": 5, "height": 35, "unlock_time": 0}
            return {"in": [paid]}
        return await super()._read(method, params)


@pytest.mark.parametrize(
    "scanned",
    [
        pytest.param(((81, 81), (101, 102), (101, 101)), id="a block came during the second"),
        pytest.param(((101, 101), (93, 93), (101, 101)), id="the second saw fewer blocks"),
    ],
)
async def test_deep_arrival_is_listed_once(
    memory: AuditMemory, scanned: tuple[tuple[int, int], ...]
) -> None:
    node: Any = Monerod()
    wallet: Any = PaidWallet(*(height for look in scanned for height in look))
    reader = MoneroReader(node, wallet, monero_options(nettype="fakechain"), memory)
    books = Books(watched={MONERO: Watched(1, 80, "h80")}, monero_primary=PRIMARY)
    for first, last in scanned:
        head = await reader.head()
        if first != last:
            with pytest.raises(ChainMoved):
                await reader.facts(books, head)
            continue
        facts = await reader.facts(books, head)
        assert facts is not None
        assert [item.units for item in facts.arrivals] == [5]
