"""The requests of the benchmark, and the stores that it runs on.

Requests are complete HTTP messages, made beforehand. Stores are grown from a template: a few real
orders, taken through the service itself, whose rows are then copied in SQL under fresh ids, so
that a million orders take seconds and look like those that the service writes. The copying knows
the identity columns of the schema (``IDENTITY``) and finds everything else by content.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import itertools
import os
import random
import re
import secrets
import sqlite3
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from monero import const
from monero.keccak import keccak_256
from monero.seed import Seed

from tests.bench.driver import HOST, Server, python_of

TOKEN = secrets.token_hex(16)
LIMITED_TOKEN = secrets.token_hex(16)
# Orders without a deposit as many as are measured, all of one client.
UNBOUNDED = {
    "RPCSVC_ORDERS__UNFUNDED_TOKEN_ORDERS": "1000000",
    "RPCSVC_ORDERS__UNFUNDED_ADDRESS_SHARE": "100",
    "RPCSVC_ORDERS__UNFUNDED_TOKEN_SHARE": "100",
    "RPCSVC_ORDERS__UNFUNDED_SHARE": "100",
}
SAMPLE = 100_000  # how many order ids a seeded store gives back at most
IDENTITY = frozenset(
    {"order_id", "session_id", "deposit_address", "transfer_id", "txid", "idempotency_key"}
)
# Shared by all orders, or written again (_COPY_HISTORY), so never copied with one.
SHARED_TABLES = frozenset(
    {"event_log", "sandbox_blocks", "sandbox_chains", "sandbox_settings", "tickets"}
)
# A finished order has no effects due, even if the template's service was stopped before it had
# recorded that.
_NOT_OF_FINISHED = frozenset({"effects"})
_FORCED_IN_FINISHED = {("sandbox_transactions", "watched"): 0}
_OPEN_IN = 10  # one order in so many waits for its deposit; the others are completed
_TEMPLATE_SECONDS = 60.0
_BATCH = 2_000
_DESTINATIONS = 50  # of each kind; a client may list twice as many
_VARIETY = 1_024
_CROCKFORD = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"
)
_DIGITS = "123456789"  # valid in hexadecimal, base58 and base32 alike
_SHORTEST_TOKEN = 16  # a shorter token could be in a text by chance

_ORDER_OF_SEQ = "(SELECT order_id FROM orders WHERE seq = order_seq)"
_SEQ_OF_ORDER = "(SELECT seq FROM orders WHERE order_id = ?)"

Params = dict[str, Any]


def service(
    name: str,
    data_dir: Path,
    log: Path,
    *,
    signs: bool,
    more: Mapping[str, str] | None = None,
    checkout: Path | None = None,
    under: Sequence[str] = (),
) -> Server:
    """Start the service on ``data_dir``, rate limits off, with the token that requests carry."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RPCSVC_")}
    env |= {"AGENT_RPC_TOKEN": TOKEN, "RPCSVC_RATE_LIMIT__ENABLED": "false"}
    env |= UNBOUNDED
    if checkout is None:  # older code may know no clients
        env["RPCSVC_CLIENTS"] = orjson.dumps({"limited": _limited_client()}).decode()
    # Stored answers contain the site's URL: under another port all would be rendered again.
    env["RPCSVC_SITE_URL"] = "https://bench.example"
    env["RPCSVC_SIGNING__ENABLED"] = str(signs).lower()
    env |= more or {}
    arguments = ["rpcsvc", "serve", "--data-dir", str(data_dir)]
    return Server(name, arguments, env, log, checkout, under)


def _limited_client() -> Params:
    """The table of a client that has every limit, and is refused by none."""
    most = 100_000_000
    return {
        "token_sha256": [hashlib.sha256(LIMITED_TOKEN.encode()).hexdigest()],
        "scopes": ["read", "order"],
        "max_order_usd": most,
        "max_day_usd": most,
        "approve_above_usd": most,
        "destinations": [*_EVM, *_MONERO],
        "orders_per_minute": 1_000_000,
        "spread_bps": 50,
    }


def http_request(method: str, params: Params, request_id: str, token: str = TOKEN) -> bytes:
    """One JSON-RPC call as a complete HTTP/1.1 message."""
    call = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
    body = orjson.dumps(call)
    head = (
        f"POST /rpc HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"x-agent-rpc-token: {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def status_requests(order_ids: list[str]) -> Iterator[bytes]:
    """Status of the given orders in random order, for ever."""
    shuffled = random.sample(order_ids, len(order_ids))
    return itertools.cycle(
        [
            http_request("service.swap.status", {"orderId": order_id}, f"s{n}")
            for n, order_id in enumerate(shuffled)
        ]
    )


def plan_requests() -> Iterator[bytes]:
    """Plans with all inputs, both directions, for ever."""
    return itertools.cycle(
        [
            http_request("service.swap.plan", swap_params(n) | {"hasFunds": True}, f"p{n}")
            for n in range(_VARIETY)
        ]
    )


def echo_requests(method: str) -> Iterator[bytes]:
    """The params of a swap to an echo server, for ever."""
    return itertools.cycle([http_request(method, swap_params(n), f"e{n}") for n in range(_VARIETY)])


def create_requests() -> Iterator[bytes]:
    """Creates of both directions, for ever, each with an idempotency key never used before."""
    return _creates(swap_params, TOKEN)


def refundable_requests(token: str) -> Iterator[bytes]:
    """The same with a refund address, which a client with destinations has to name."""
    return _creates(refundable_params, token)


def _creates(params_of: Callable[[int], Params], token: str) -> Iterator[bytes]:
    mark = secrets.token_hex(16)
    halves = []
    for n in range(_VARIETY):
        params = params_of(n) | {"idempotency-key": mark}
        request = http_request("service.swap.create", params, f"c{n}", token)
        halves.append(request.split(mark.encode()))
    run = secrets.token_hex(10)
    for number, (before, after) in enumerate(itertools.cycle(halves)):
        yield b"%b%b%012d%b" % (before, run.encode(), number, after)


def swap_params(number: int) -> Params:
    """A valid swap; direction, network, amount and destination vary with ``number``."""
    which = number // 2 % _DESTINATIONS
    if number % 2:
        amount, to = f"{100 + number % 400}.25", _MONERO[which]
    else:
        amount, to = f"1.{number % 900 + 100}", _EVM[which]
    return {
        "direction": "u2x" if number % 2 else "x2u",
        "chain": ("arbitrum", "base", 10, "137")[number // 4 % 4],
        "amount": amount,
        "to": to,
    }


def refundable_params(number: int) -> Params:
    """The swap with the address that its deposit goes back to."""
    back = (_EVM if number % 2 else _MONERO)[number // 2 % _DESTINATIONS]
    return swap_params(number) | {"refundAddress": back}


def _checksummed(number: int) -> str:
    """An EVM address made from ``number``, in the mixed case of EIP-55."""
    plain = keccak_256(b"bench destination %d" % number).hexdigest()[-40:]
    marks = keccak_256(plain.encode()).hexdigest()
    pairs = zip(plain, marks[:40], strict=True)
    return "0x" + "".join(c.upper() if int(mark, 16) > 7 else c for c, mark in pairs)


_EVM = [_checksummed(n) for n in range(_DESTINATIONS)]
_MONERO = [str(Seed(f"{n + 1:064x}").public_address(const.NET_STAGE)) for n in range(_DESTINATIONS)]


class SeedingFailed(Exception):
    """The template orders could not be made or copied; the message has the answer."""


def make_template(data_dir: Path, *, signs: bool) -> None:
    """Make one waiting and one completed order of each direction through the service itself.

    Raises ServerFailed or SeedingFailed.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = service("template", data_dir, data_dir.with_suffix(".log"), signs=signs)
    try:
        server.wait_for("/readyz", _TEMPLATE_SECONDS)
        funded = [_create(server.port, number) for number in range(4)][:2]
        for order_id in funded:
            _call(server.port, "service.sandbox.fund", {"orderId": order_id})
        for order_id in funded:
            _wait_until_completed(server.port, order_id)
    finally:
        server.stop()


def _create(port: int, number: int) -> str:
    key = {"idempotency-key": f"{number}-template-{secrets.token_hex(16)}"}
    envelope = _call(port, "service.swap.create", swap_params(number) | key)
    return str(envelope["data"]["order"]["orderId"])


def _wait_until_completed(port: int, order_id: str) -> None:
    deadline = time.monotonic() + _TEMPLATE_SECONDS
    state = "(none)"
    while time.monotonic() < deadline:
        state = _call(port, "service.swap.status", {"orderId": order_id})["state"]
        if state == "completed":
            return
        time.sleep(0.05)
    raise SeedingFailed(
        f"a funded sandbox order was {state}, not completed, after {_TEMPLATE_SECONDS:.0f} s"
    )


def _call(port: int, method: str, params: Params) -> Params:
    """One call over its own connection; the envelope. Raises SeedingFailed unless it is ok."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=10)) as connection:
        body = orjson.dumps({"jsonrpc": "2.0", "id": "seed", "method": method, "params": params})
        headers = {"Content-Type": "application/json", "x-agent-rpc-token": TOKEN}
        connection.request("POST", "/rpc", body, headers)
        response = connection.getresponse()
        answer = orjson.loads(response.read())
    envelope = answer.get("result")
    if response.status != 200 or not envelope or not envelope.get("ok"):
        raise SeedingFailed(f"{method} answered {response.status}: {answer}")
    return dict(envelope)


@dataclass(frozen=True)
class _RowTemplate:
    """A row to be written again and again: constants, and texts in which ids are replaced."""

    insert: str
    values: list[Any]
    varying: list[tuple[int, Callable[..., str], bool]]  # column, format, is it a BLOB

    def filled(self, fresh: list[str]) -> list[Any]:
        row = self.values.copy()
        for column, fill, is_blob in self.varying:
            text = fill(*fresh)
            row[column] = text.encode() if is_blob else text
        return row


@dataclass(frozen=True)
class _OrderTemplate:
    """All rows of one order. ``tokens[0]`` is its id."""

    tokens: list[str]
    rows: list[_RowTemplate]


# History has the order's number, which a copy gets only when it is written.
_COPY_HISTORY = """
    WITH RECURSIVE version(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM version WHERE n < 20)
    INSERT INTO event_log (order_seq, version, at, event, status, details)
    SELECT o.seq, version.n, o.created_at, 'Copied', o.status, '{}'
    FROM orders o JOIN version ON version.n <= o.version
    WHERE o.seq > (SELECT max(order_seq) FROM event_log)
"""


def clone_orders(data_dir: Path, count: int, *, open_in: int = _OPEN_IN) -> list[str]:
    """Copy the orders that ``data_dir`` holds under fresh ids until there are ``count`` more.

    One in ``open_in`` waits for its deposit, the others are completed; both directions.
    The service must not run on it. Returns a random sample of the new ids.
    """
    with closing(sqlite3.connect(find_database(data_dir), isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -524288")  # KiB: keeps the indexes in memory
        finished, waiting = _templates(db)
        ids: list[str] = []
        for first in range(0, count, _BATCH):
            numbers = range(first, min(first + _BATCH, count))
            ids += _write_batch(db, finished, waiting, numbers, open_in)
        db.execute(_COPY_HISTORY)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return random.sample(ids, min(SAMPLE, count))


_SEED = """
import json, sys
from pathlib import Path
from tests.bench import seeding
data_dir = Path(sys.argv[1])
seeding.make_template(data_dir, signs=sys.argv[3] == "signed")
print(json.dumps(seeding.clone_orders(data_dir, int(sys.argv[2]))))
"""


def seed_with(checkout: Path, data_dir: Path, count: int, *, signs: bool) -> list[str]:
    """``make_template`` and ``clone_orders`` by the code of another checkout, in its schema."""
    kind = "signed" if signs else "plain"
    command = [python_of(checkout), "-c", _SEED, str(data_dir), str(count), kind]
    made = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SeedingFailed(f"{checkout} could not seed a store: {made.stderr[-2000:]}")
    return list(orjson.loads(made.stdout))


def find_database(data_dir: Path) -> Path:
    """The SQLite file of a data directory that has the ``orders`` table."""
    for path in sorted(data_dir.rglob("*")):
        if path.is_file() and _is_sqlite(path):
            with closing(sqlite3.connect(path)) as db:
                if "orders" in _tables(db):
                    return path
    raise SeedingFailed(f"no SQLite database with a table named orders under {data_dir}")


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _write_batch(
    db: sqlite3.Connection,
    finished: list[_OrderTemplate],
    waiting: list[_OrderTemplate],
    numbers: range,
    open_in: int,
) -> list[str]:
    ids = []
    by_statement: dict[str, list[list[Any]]] = {}
    for number in numbers:
        kind = finished if number % open_in else waiting
        template = kind[number // open_in % len(kind)]
        fresh = [_fresh(token, number) for token in template.tokens]
        ids.append(fresh[0])
        for row in template.rows:
            by_statement.setdefault(row.insert, []).append(row.filled(fresh))
    db.execute("BEGIN")
    for statement, rows in by_statement.items():
        db.executemany(statement, rows)
    db.execute("COMMIT")
    return ids


def _fresh(token: str, number: int) -> str:
    """A value of the same form as ``token`` that no other order has."""
    if token.startswith("ord_"):
        bits = random.getrandbits(128).to_bytes(20, "big")
        return "ord_" + base64.b32encode(bits).translate(_CROCKFORD)[6:].decode()
    if len(token) == 36 and token.count("-") == 4:
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    # The random part of an address or a hash begins after its prefix: a copy differs there, too.
    noise = "".join(random.choices(_DIGITS, k=16)) if len(token) >= 40 else ""
    tail = _in_digits(number)
    return token[:2] + noise + token[2 + len(noise) : len(token) - len(tail)] + tail


def _in_digits(number: int) -> str:
    """``number`` in base nine, eight of the digits that every alphabet here has."""
    digits = ""
    for _ in range(8):
        number, digit = divmod(number, 9)
        digits = _DIGITS[digit] + digits
    return digits


def _templates(db: sqlite3.Connection) -> tuple[list[_OrderTemplate], list[_OrderTemplate]]:
    found: dict[str, list[_OrderTemplate]] = {"completed": [], "awaiting_deposit": []}
    for order_id, status in db.execute("SELECT order_id, status FROM orders").fetchall():
        if status in found:
            found[status].append(_order_template(db, order_id, finished=status == "completed"))
    if not all(found.values()):
        raise SeedingFailed("the template store needs a completed and a waiting order")
    return found["completed"], found["awaiting_deposit"]


def _order_template(db: sqlite3.Connection, order_id: str, *, finished: bool) -> _OrderTemplate:
    skipped = SHARED_TABLES | (_NOT_OF_FINISHED if finished else frozenset())
    tables = sorted(_tables(db) - skipped, key=lambda name: name != "orders")
    rows = {name: _rows(db, name) for name in tables}
    tokens = _tokens_of(order_id, rows)
    mine = [
        _row_template(table, row, tokens, finished=finished)
        for table in tables
        for row in rows[table]
        if _mentions(row, tokens)
    ]
    return _OrderTemplate(tokens, mine)


def _tokens_of(order_id: str, rows: dict[str, list[Params]]) -> list[str]:
    """Every id that belongs to the order: those in its rows, and in rows that contain these."""
    tokens = [order_id]
    for _ in range(3):  # order -> its transfers and address -> the chain's transactions
        for row in itertools.chain.from_iterable(rows.values()):
            if _mentions(row, tokens):
                tokens += [value for value in _identities(row) if not _covered(value, tokens)]
    return tokens


def _identities(row: Params) -> Iterator[str]:
    for name, value in row.items():
        if name in IDENTITY and isinstance(value, str) and len(value) >= _SHORTEST_TOKEN:
            yield value


def _covered(value: str, tokens: list[str]) -> bool:
    return any(token in value for token in tokens)


def _mentions(row: Params, tokens: list[str]) -> bool:
    return any(_covered(_as_text(value), tokens) for value in row.values())


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _row_template(table: str, row: Params, tokens: list[str], *, finished: bool) -> _RowTemplate:
    if finished:
        forced = {c: v for (t, c), v in _FORCED_IN_FINISHED.items() if t == table and c in row}
        row = row | forced
    varying = [
        (column, _formatter(_as_text(value), tokens), isinstance(value, bytes))
        for column, value in enumerate(row.values())
        if _covered(_as_text(value), tokens)
    ]
    names = ", ".join(f'"{name}"' for name in row)
    marks = ", ".join(_SEQ_OF_ORDER if name == "order_seq" else "?" for name in row)
    return _RowTemplate(
        f'INSERT INTO "{table}" ({names}) VALUES ({marks})', list(row.values()), varying
    )


def _formatter(text: str, tokens: list[str]) -> Callable[..., str]:
    """A function of the fresh ids, in the order of ``tokens``, that gives ``text`` with them."""
    pattern = re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)))
    escaped = text.replace("{", "{{").replace("}", "}}")
    return pattern.sub(lambda found: f"{{{tokens.index(found.group())}}}", escaped).format


def _tables(db: sqlite3.Connection) -> set[str]:
    names = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
    return {name for (name,) in names if not name.startswith("sqlite_")}


def _rows(db: sqlite3.Connection, table: str) -> list[Params]:
    """All rows of a table as mappings, without a column that SQLite numbers by itself.

    ``order_seq`` holds the order's id.
    """
    columns = db.execute(f'PRAGMA table_info("{table}")').fetchall()
    keys = [name for _, name, _, _, _, key in columns if key]
    numbered = {
        name for _, name, kind, _, _, key in columns if key and len(keys) == 1 and kind == "INTEGER"
    } - {"order_seq"}
    # Skip a table that has no column but its number.
    names = [name for _, name, *_ in columns if name not in numbered] or [*numbered]
    listed = ", ".join(_ORDER_OF_SEQ if name == "order_seq" else f'"{name}"' for name in names)
    found = db.execute(f'SELECT {listed} FROM "{table}"')
    return [dict(zip(names, row, strict=True)) for row in found]
