"""Audits of large books of the engine onchain: the process takes no more memory for them."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from rpcsvc.audit.auditor import Auditor
from rpcsvc.audit.books import reader_of
from rpcsvc.audit.evm_chain import EvmReader
from rpcsvc.audit.memory import AuditMemory
from rpcsvc.audit.monero_chain import MoneroReader
from rpcsvc.audit.records import AuditReport
from rpcsvc.domain import usdc
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.settlement.onchain.daemon_rpc import Call, DaemonEndpoint
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, Receipt, Tag
from rpcsvc.settlement.onchain.monero.monerod import BlockHeader, NodeInfo
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from rpcsvc.store.backends.sqlite.migrations import migrate
from tests.chain_options import evm_network, monero_options

FEW: Final = 6_000
MANY: Final = 18_000
MORE_BYTES: Final = 8 * 1024 * 1024

# --- orders 1 to ``count`` -------------------------------------------------------------------
#
# One is made in each block of both chains, and paid out in it: those with even numbers take USDC,
# which is swept in the same block, the others XMR. All ids are made of their numbers.

TOKEN: Final = "0x" + "aa" * 20
HOT: Final = "0x" + "bb" * 20
SENDER: Final = "0x" + "cc" * 20
PRIMARY: Final = "4primary"
FIRST: Final = 1_000
PRICE: Final = Price(165_000_000, 50, 1_000, 9_900, 0)
XMR: Final = 10**12
USDC: Final = 150 * 10**6
XMR_OUT: Final = PRICE.output(Direction.USDC_TO_XMR, USDC)
USDC_OUT: Final = PRICE.output(Direction.XMR_TO_USDC, XMR)
XMR_FEE: Final = 31
GAS: Final = 21_000
WEI: Final = 10**21

_DEPOSIT, _PAYOUT, _SWEEP = 1, 2, 3
# An id of 64 digits for what happened of an order, in no sequence.
_TXID: Final = "printf('%08x%02x%054x', n * 2654435761 % 4294967296, {0}, n)"
_EVM: Final = "'0x' || printf('%08x%032x', n * 2654435761 % 4294967296, n)"
_SUB: Final = "printf('8%094d', n)"
_ID: Final = "printf('ord_%026d', n)"
_PAID: Final = f"{_ID} || '/payout/1'"
_NUMBERS: Final = (
    "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)"
)


def _by_direction(of_usdc: Any, of_xmr: Any) -> str:
    return f"CASE n % 2 WHEN 0 THEN {of_usdc} ELSE {of_xmr} END"


_EVM_TXID = "'0x' || " + _TXID
_ROWS: Final[tuple[tuple[str, dict[str, Any], str], ...]] = (
    ("orders", {
        "seq": "n", "order_id": _ID, "session_id": "''", "chain": "'arbitrum'", "chain_id": 42161,
        "direction": _by_direction("'u2x'", "'x2u'"),
        "deposit_network": _by_direction("'arbitrum'", "'monero'"),
        "payout_network": _by_direction("'monero'", "'arbitrum'"),
        "deposit_address": _by_direction(_EVM, _SUB), "to_address": _by_direction(_SUB, _EVM),
        "deposit_amount": _by_direction(USDC, XMR), "expected_output": 1, "min_received": 0,
        "min_deposit": 1, "max_deposit": XMR, "rate": PRICE.rate, "spread_bps": PRICE.spread_bps,
        "payout_fee": PRICE.payout_fee, "min_received_bps": PRICE.min_received_bps,
        "refund_fee": 700, "created_at": 1, "expires_at": 2, "late_window": 1,
        "confirm_timeout": 1, "prepare_timeout": 1, "payout_check": 1, "refund_reminder": 1,
        "integrator_bps": 0, "funding_fee": 0, "funding_gas": 0, "status": "'completed'",
        "status_at": 1, "version": 1, "leftover": 0,
    }, ""),
    ("deposits", {
        "seq": "n", "network": _by_direction("'arbitrum'", "'monero'"),
        "txid": _by_direction(_EVM_TXID.format(_DEPOSIT), _TXID.format(_DEPOSIT)),
        "output_index": 0, "order_id": _ID, "units": _by_direction(USDC, XMR),
        "sender": _by_direction(f"'{SENDER}'", "NULL"), "first_seen_at": 1, "state": "'confirmed'",
        "transfer_id": _PAID, "is_dust": 0,
    }, ""),
    ("transfers", {
        "seq": "n", "transfer_id": _PAID, "order_id": _ID, "kind": "'payout'",
        "network": _by_direction("'monero'", "'arbitrum'"),
        "asset": _by_direction("'XMR'", "'USDC'"), "address": _by_direction(_SUB, _EVM),
        "units": _by_direction(XMR_OUT, USDC_OUT), "fee": PRICE.payout_fee, "state": "'settled'",
        "txid": _by_direction(_TXID.format(_PAYOUT), _EVM_TXID.format(_PAYOUT)), "raw": "x''",
        "integrator_fee": 0,
    }, ""),
    ("monero_payments", {
        "seq": "n", "payment_id": _PAID, "purpose": "'transfer'", "address": _SUB,
        "units": XMR_OUT, "fee": XMR_FEE, "txid": _TXID.format(_PAYOUT), "raw": "x''",
        "metadata": "''", "tx_key": "printf('%064x', n)", "prepared_at": 1, "state": "'settled'",
        "relayed_at": 1, "height": f"{FIRST} + n",
    }, "n % 2 = 0"),
    ("evm_addresses", {"address_index": "n", "address": _EVM}, "n % 2 = 0"),
    ("evm_payments", {
        "seq": "n", "payment_id": _by_direction("'sweep-' || n", _PAID), "network": "'arbitrum'",
        "sender": f"'{HOT}'", "nonce": "n - 1", "purpose": _by_direction("'sweep'", "'transfer'"),
        "recipient": _by_direction(f"'{HOT}'", _EVM), "units": _by_direction(USDC, USDC_OUT),
        "contract": f"'{TOKEN}'", "data": "x''", "gas": GAS, "prepared_at": 1,
        "state": "'settled'", "published_at": 1,
    }, ""),
    ("evm_attempts", {
        "payment_id": _by_direction("'sweep-' || n", _PAID), "number": 1,
        "txid": _by_direction(_EVM_TXID.format(_SWEEP), _EVM_TXID.format(_PAYOUT)),
        "raw": "x''", "max_fee": 1, "tip": 1, "made_at": 1,
    }, ""),
    ("evm_sweeps", {
        "network": "'arbitrum'", "address_index": "n", "serial": 1, "address": _EVM,
        "method": "'permit'", "units": USDC, "payment_id": "'sweep-' || n", "state": "'done'",
        "taken": USDC,
    }, "n % 2 = 0"),
)  # fmt: skip


def make_books(data_dir: Path, count: int) -> None:
    """Make a database with so many completed orders, as rows alone."""
    with closing(sqlite3.connect(data_dir / DATABASE_NAME, isolation_level=None)) as books:
        migrate(books)
        books.execute("PRAGMA foreign_keys = OFF")
        books.execute("PRAGMA synchronous = OFF")
        triggers = books.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'")
        for (name,) in triggers.fetchall():
            books.execute(f"DROP TRIGGER {name}")
        books.execute("BEGIN")
        for table, row, where in _ROWS:
            values = ", ".join(map(str, row.values()))
            books.execute(
                f"{_NUMBERS} INSERT INTO {table} ({', '.join(row)}) SELECT {values} FROM numbers"
                f" WHERE {where or 'TRUE'}",
                {"count": count},
            )
        books.execute("INSERT INTO monero_wallet VALUES (1, 'fakechain', ?, 0)", (PRIMARY,))
        books.execute("INSERT INTO evm_wallet VALUES (1, ?, 0)", (HOT,))
        top, opening = top_of(count), ("arbitrum", HOT, FIRST, f"h{FIRST}", 0, str(WEI))
        for number in (FIRST + 1, top):
            books.execute(
                "INSERT INTO evm_cursor VALUES ('arbitrum', ?, ?)", (number, f"h{number}")
            )
            books.execute("INSERT INTO monero_cursor VALUES (?, ?)", (number, f"h{number}"))
        books.execute("INSERT INTO evm_openings VALUES (?, ?, ?, ?, ?, ?)", opening)
        books.execute("COMMIT")


def top_of(count: int) -> int:
    return FIRST + count + 100


def _txid(n: int, kind: int) -> str:
    return f"{n * 2654435761 % 2**32:08x}{kind:02x}{n:054x}"


def _evm(n: int) -> str:
    return f"0x{n * 2654435761 % 2**32:08x}{n:032x}"


# --- the chains --------------------------------------------------------------------------------


class Node(EvmClient):
    """An EVM node on which the orders are swapped."""

    def __init__(self, count: int) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self._count = count
        self.receipts = 0

    async def chain_id(self) -> int:
        return 42161

    async def block(self, at: Tag | int = Tag.LATEST) -> Block | None:
        number = at if isinstance(at, int) else top_of(self._count)
        return Block(number, f"h{number}", "", 0, None)

    async def nonce(self, *_: Any) -> int:
        return self._count

    async def ether(self, *_: Any) -> int:
        return WEI - self._count * GAS

    async def call(self, call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        swept, paid = self._count // 2, self._count - self._count // 2
        is_hot = "0x" + call.data[-20:].hex() == HOT and at > FIRST
        held = paid * USDC_OUT if at == FIRST else swept * USDC
        return usdc.uint_word(held if at == FIRST or is_hot else 0)

    async def receipt(self, txid: str) -> Receipt | None:
        self.receipts += 1
        number = FIRST + int(txid[-54:], 16)
        return Receipt(txid, True, number, f"h{number}", GAS, 1, ())

    async def with_blocks(self, numbers: Sequence[int], call: Call) -> tuple[list[Any], Any]:
        (asked,) = call[1]
        first, last = (int(asked[name], 16) - FIRST for name in ("fromBlock", "toBlock"))
        which, words = len(asked["topics"]), asked["topics"][-1]
        found = [
            item
            for word in words
            for item in self._events("0x" + word[-40:], which == 2, first, last)
        ]
        return [await self.block(number) for number in numbers], found

    def _events(self, address: str, left: bool, first: int, last: int) -> Iterator[Any]:
        if address != HOT:
            n = int(address[-32:], 16)
            if first <= n <= last:
                yield _sweep(n) if left else _event(n, _DEPOSIT, SENDER, _evm(n), USDC)
            return
        for n in range(max(1, first), min(last, self._count) + 1):
            if n % 2 == 0 and not left:
                yield _sweep(n)
            elif n % 2 and left:
                yield _event(n, _PAYOUT, HOT, _evm(n), USDC_OUT)


def _sweep(n: int) -> Any:
    return _event(n, _SWEEP, _evm(n), HOT, USDC)


def _event(n: int, kind: int, source: str, to: str, units: int) -> Any:
    words = [usdc.TRANSFER_TOPIC, usdc.address_word(source), usdc.address_word(to)]
    return {
        "topics": ["0x" + word.hex() for word in words],
        "data": "0x" + usdc.uint_word(units).hex(),
        "transactionHash": "0x" + _txid(n, kind),
        "blockNumber": hex(FIRST + n),
        "logIndex": hex(kind),
    }


class Monero:
    """A Monero node, and its wallet, on which the orders are swapped."""

    account = 0

    def __init__(self, count: int) -> None:
        self._count = count
        self.rpc = SimpleNamespace(
            endpoint=SimpleNamespace(name="monero"), read=self._read, read_path=self._transactions
        )
        self.proofs = 0

    async def info(self) -> NodeInfo:
        top = top_of(self._count)
        return NodeInfo(top + 1, f"h{top}", "fakechain", True, False, True, top + 1, 0, "0.18", 0)

    async def header_at(self, height: int) -> BlockHeader:
        return BlockHeader(height, f"h{height}", "", 0)

    async def primary_address(self) -> str:
        return PRIMARY

    async def refresh(self) -> None: ...

    async def height(self) -> int:
        return top_of(self._count) + 1

    async def outputs(self) -> list[Any]:
        return []

    async def check_key(self, txid: str, _key: str, _address: str) -> Any:
        self.proofs += 1
        return SimpleNamespace(received=XMR_OUT)

    async def _transactions(self, _path: str, body: Any) -> Any:
        fee = f'{{"rct_signatures": {{"txnFee": {XMR_FEE}}}}}'
        shown = [
            {"tx_hash": txid, "in_pool": False, "as_json": fee,
             "block_height": FIRST + int(txid[-54:], 16)}
            for txid in body["txs_hashes"]
        ]  # fmt: skip
        return {"status": "OK", "txs": shown}

    async def _read(self, method: str, params: Any) -> Any:
        if method == "get_balance":
            paid = self._count // 2
            return {"balance": (self._count - paid) * XMR - paid * (XMR_OUT + XMR_FEE)}
        first, last = (params.get(name, 0) - FIRST for name in ("min_height", "max_height"))
        came, went = [], []
        for n in range(max(0, first) + 1, min(last, self._count) + 1):
            if n % 2:
                came.append({"txid": _txid(n, _DEPOSIT), "address": f"8{n:094}", "amount": XMR,
                             "height": FIRST + n, "unlock_time": 0})  # fmt: skip
            else:
                went.append({"txid": _txid(n, _PAYOUT), "amount": XMR_OUT, "fee": XMR_FEE,
                             "height": FIRST + n})  # fmt: skip
        return {"in": came, "out": went}


def auditor_of(data_dir: Path, node: Node, monero: Any) -> Auditor:
    memory = AuditMemory(data_dir)
    network = evm_network("arbitrum", 42161, TOKEN)
    return Auditor(
        reader_of(data_dir, None),
        MoneroReader(monero, monero, monero_options(nettype="fakechain"), memory),
        [EvmReader(network, node, memory)],
    )


# --- their audits ------------------------------------------------------------------------------


def audit(data_dir: Path, count: int, audits: int = 2) -> list[AuditReport]:
    """Reports of audits by one process."""
    auditor = auditor_of(data_dir, Node(count), Monero(count))

    async def all_of_them() -> list[AuditReport]:
        return [await auditor.audit() for _ in range(audits)]

    return asyncio.run(all_of_them())


_AUDIT: Final = """
import sys, threading, time
from pathlib import Path
from rpcsvc.audit import evm_chain
from tests.e2e import test_large_audits as large
data_dir, count, audits = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
evm_chain._MANY = 2_000
def anonymous():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])
most = anonymous()
def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
for report in large.audit(data_dir, count, audits):
    assert (report.orders, report.differences, report.notes) == (count, (), ()), report
print(most)
"""


def most_memory(data_dir: Path, count: int, audits: int = 2) -> int:
    """Return the most bytes of memory of its own that a process has in its audits."""
    command = (sys.executable, "-c", _AUDIT, str(data_dir), str(count), str(audits))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout) * 1024


@pytest.mark.slow(seconds=50)
def test_memory_of_an_audit_does_not_grow_with_the_orders(tmp_path: Path) -> None:
    most = []
    for count in (FEW, MANY):
        data_dir = tmp_path / str(count)
        data_dir.mkdir(mode=0o700)
        make_books(data_dir, count)
        most.append(most_memory(data_dir, count, 1))
    assert most[1] <= most[0] + MORE_BYTES
