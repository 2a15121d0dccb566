"""Requests that a stranger could send to use up the service, and what each of them costs."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rpcsvc.operations.service import Operation
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from tests.contract import bff
from tests.contract.serving import BACK, SWAP, TOKEN, Served

ROOT = Path(__file__).parents[2]
LARGEST = 65_536
# CPU seconds of the yardstick on a quiet machine.
YARDSTICK_SECONDS = 0.0015
# Of a line, and of all header lines of a request beside its own.
LINE_BYTES, HEAD_BYTES = 8_000, 60_000
# What the product reads only by a method of aiohttp, or must not read at all.
OF_AIOHTTP = {
    "accept", "authorization", "connection", "content-length", "content-type", "cookie", "expect",
    "forwarded", "from", "host", "if-modified-since", "if-range", "origin", "range", "te",
    "trailer", "upgrade", "via",
}  # fmt: skip
# What may come on several lines, which are read as one list.
LISTS = ("accept", "accept-language", "content-encoding", "if-none-match", "x-forwarded-for")
# Two of these make a request unreadable.
SINGLE = {"content-length", "content-type", "host", "transfer-encoding"}
# Parts of what is read in headers and URLs, and in fields: numbers, addresses, URIs, seeds, keys.
HEADER_UNITS = [
    '"', "(", "\\", ",", ";a*0*=", "a=1&", "/", "%00", "[", "a ", "9", "127.0.0.1,", "a;q=0.1,",
    'W/"a",', "=?a?q?", "\xff",
]  # fmt: skip
FIELD_UNITS = ['"', "(", "\\", "/", "a=1&", "%00", "a ", "raw", "0x", "9", "xprv", "\xe9"]


class Sent(NamedTuple):
    """A request to be sent: ``make`` writes it, each time with less of what is repeated.

    A request that was sent before may be answered from a cache.
    """

    name: str
    make: Callable[[int], bytes]


class Cost(NamedTuple):
    """The cost of a request: its status, and seconds of CPU."""

    name: str
    status: int
    seconds: float


class Target(NamedTuple):
    """A call that is answered, as a stranger would write it."""

    method: str
    path: str
    body: bytes = b""
    media_type: str = "application/json"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def raw(self, *lines: bytes, leave_out: str = "") -> bytes:
        """The bytes of the call, with more header lines."""
        own = {
            "host": "localhost",
            "x-forwarded-proto": "https",
            "x-agent-rpc-token": TOKEN,
            **({"content-type": self.media_type} if self.method == "POST" else {}),
            "content-length": str(len(self.body)),
        }
        own.pop(leave_out, None)
        head = [f"{name}: {value}".encode() for name, value in own.items()]
        first = f"{self.method} {self.path} HTTP/1.1".encode("utf-8", "surrogateescape")
        return b"\r\n".join([first, *head, *lines, b"", self.body])


def header_names() -> list[str]:
    """Every header that the product may read: each text that could be one, where one is read."""
    found = set(OF_AIOHTTP)
    for file in [*(ROOT / "rpcsvc/http").rglob("*.py"), ROOT / "rpcsvc/local_secret.py"]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in [*_constants(tree), *_looked_up(tree)]:
            found |= {text for text in _texts(node) if re.fullmatch("[a-z]+(-[a-z0-9]+)+", text)}
    return sorted(found)


def _constants(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Dict):
            yield node


def _looked_up(tree: ast.Module) -> Iterator[ast.AST]:
    """Names in ``headers.get("x")``, ``headers.getall("x")`` and ``"x" in headers``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "getall"):
                yield node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            yield node.left


def _texts(node: ast.AST) -> set[str]:
    constants = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
    return {each.value.lower() for each in constants if isinstance(each.value, str)}


def repeated(unit: str, size: int, less: int = 0) -> str:
    """A text of at most ``size`` bytes in JSON, by ``less`` units shorter."""
    return unit * (size // len(json.dumps(unit)[1:-1]) - less)


def targets(order_id: str) -> list[Target]:
    """A call of each kind of surface."""
    message = {"jsonrpc": "2.0", "id": 1, "method": "service.swap.plan", "params": {}}
    tools = {**message, "method": "tools/list"}
    return [
        Target("POST", "/rpc", json.dumps(message).encode()),
        Target("POST", "/mcp", json.dumps(tools).encode()),
        Target("POST", "/api/v1/agent/swap/create", b"{}"),
        Target("POST", f"/api/v1/agent/swap/fund/{order_id}", b"{}"),
        Target("GET", f"/api/v1/agent/swap/events/{order_id}"),
        Target("POST", "/bff/v1/quote", json.dumps(bff.TO_USDC).encode()),
        Target("OPTIONS", "/bff/v1/quote"),
        Target("GET", "/llms.txt"),
        Target("GET", "/health"),
        Target("GET", f"/orders/{order_id}"),
        Target("POST", f"/orders/{order_id}/refund", b"a=1", "application/x-www-form-urlencoded"),
        Target("POST", "/swap", b"amount=1", "application/x-www-form-urlencoded"),
    ]


def of_header(target: Target, name: str, unit: str, times: int = 1) -> Sent:
    """The call with a header that repeats a unit, on one line or on several."""
    prefix = "application/json;" if name == "content-type" else ""

    def make(less: int) -> bytes:
        value = prefix + unit * (LINE_BYTES // len(unit) - less)
        return target.raw(*[f"{name}: {value}".encode("latin-1")] * times, leave_out=name)

    return Sent(f"{target} {name}: {unit!r} x{times}", make)


def of_headers(target: Target, names: list[str], unit: str) -> Sent:
    """The call with several headers that repeat a unit each."""

    def make(less: int) -> bytes:
        value = unit * (HEAD_BYTES // len(names) // len(unit) - less)
        return target.raw(*[f"{name}: {value}".encode("latin-1") for name in names])

    return Sent(f"{target} {names} {unit!r}", make)


def of_path(target: str, unit: str) -> Sent:
    """A GET with a unit repeated in its target, whatever a target must escape escaped."""
    escaped = "".join(c if " " < c < "\x7f" and c not in '"\\' else f"%{ord(c):02x}" for c in unit)

    def make(less: int) -> bytes:
        filled = target.replace("*", escaped * ((LINE_BYTES - 200) // len(escaped) - less))
        return Target("GET", filled).raw()

    return Sent(f"GET {target} {escaped!r}", make)


# Where a text stands in the params of a call; None is a place for a name, and not a value.
Place = tuple[str | None, ...]


def of_field(
    how: str, operation: Operation, params: dict[str, Any], path: Place, unit: str
) -> Sent:
    """A call with a unit repeated in its params, as a value or as a name."""

    def make(less: int) -> bytes:
        text = repeated(unit, LARGEST - 1_200, less) + "\n"
        return _call(how, operation, {**params, **_filled(path, text)})

    return Sent(f"{how} {operation.name} {path} {unit!r}", make)


def _filled(path: Place, text: str) -> Any:
    if not path:
        return text
    return {text if path[0] is None else path[0]: _filled(path[1:], text) if path[0] else 1}


def _call(how: str, operation: Operation, params: dict[str, Any]) -> bytes:
    if how in ("rpc", "mcp"):
        tool = operation.tool
        name = f"service.{operation.name}" if how == "rpc" else "tools/call"
        given = params if how == "rpc" else {"name": tool and tool.name, "arguments": params}
        message = {"jsonrpc": "2.0", "id": 1, "method": name, "params": given}
        return Target("POST", f"/{how}", json.dumps(message).encode()).raw()
    path = ("/api/v1" if how == "http" else "/bff/v1") + operation.path
    rest = dict(params)
    for name in [name for name in rest if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", str(rest.pop(name)))
    return Target("POST", path, json.dumps(rest).encode()).raw()


def paths_of(operation: Operation) -> list[Place]:
    """Every field of an operation, a name of its own, and every string and name within objects."""
    schema = operation.params.model_json_schema(by_alias=True)
    within = [path for path in _strings(schema, schema.get("$defs", {})) if len(path) > 1]
    return [*((name,) for name in schema.get("properties", {})), (None,), *within]


def _strings(schema: Any, named: dict[str, Any], path: Place = ()) -> Iterator[Place]:
    if "$ref" in schema:
        schema = named[schema["$ref"].rpartition("/")[2]]
    for branch in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from _strings(branch, named, path)
    properties = schema.get("properties", {})
    for name, inner in properties.items():
        yield from _strings(inner, named, (*path, name))
    if schema.get("type") == "object" or properties:
        yield (*path, None)
    elif schema.get("type", "string") == "string" and "anyOf" not in schema:
        yield path


def of_fields(known: dict[str, str]) -> Iterator[Sent]:
    """Every string of every operation on every surface, filled with each unit.

    ``known`` has values of placeholders in examples.
    """
    for operation in (*OPERATIONS, *BFF_OPERATIONS):
        is_bff = operation in BFF_OPERATIONS
        is_post = operation.path and operation.method == "POST"
        surfaces = {
            "rpc": not is_bff,
            "mcp": not is_bff and operation.tool,
            "http": not is_bff and is_post,
            "bff": is_bff and is_post,
        }
        needed = {i.alias or n for n, i in operation.params.model_fields.items() if i.is_required()}
        example = _with(operation.examples[0].params, known)
        least = {name: value for name, value in example.items() if name in needed}
        for how in (how for how, is_there in surfaces.items() if is_there):
            for path in paths_of(operation):
                is_in_path = how in ("http", "bff") and f"{{{path[0]}}}" in operation.path
                is_read_alike = how != "rpc" and len(path) > 1
                for unit in () if is_in_path or is_read_alike else FIELD_UNITS:
                    yield of_field(how, operation, least, path, unit)


def _with(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _with(part, known) for name, part in value.items()}
    return known.get(value, value) if isinstance(value, str) else value


def of_paths() -> Iterator[Sent]:
    """Paths and queries of every operation that is read by a GET, and of what is nowhere."""
    found = ["/*", "/*?*", "http://*/livez", "/livez?*", "/orders/*", "/orders/*/refund"]
    for root, operations in (("/api/v1", OPERATIONS), ("/bff/v1", BFF_OPERATIONS)):
        for operation in operations:
            if operation.path and operation.method == "GET":
                path = root + operation.path
                found.append(re.sub(r"\{\w+\}", "*", path))
                names = [i.alias or n for n, i in operation.params.model_fields.items()]
                found += [f"{path}?{name}=*" for name in names if f"{{{name}}}" not in path]
    return (of_path(target, unit) for target in found for unit in HEADER_UNITS)


def of_bodies(known: dict[str, str]) -> Iterator[Sent]:
    """Bodies that are costly by their shape: many, deep, or many small pieces."""
    many = "\u0100"
    rpc = Target("POST", "/rpc")

    def names(count: int) -> dict[str, int]:
        return {chr(ord(many) + n) if n < 50_000 else str(n): 1 for n in range(count)}

    def batch(element: dict[str, Any], less: int) -> bytes:
        return json.dumps([{"jsonrpc": "2.0", "id": 1, **element}] * (50 - less)).encode()

    unknown = {f"{n}transactiondirection": 1 for n in range(30)}
    order = {"orderId": known["$orderId"]}
    elements: dict[str, dict[str, Any]] = {
        "unknown methods": {"method": "service.swap.plam" * 2},
        "unknown names": {"method": "service.swap.check", "params": unknown},
        "schemas": {"method": "service.schemas"},
        "lists": {"method": "service.swap.list", "params": {"sessionId": known["$sessionId"]}},
        "status": {"method": "service.swap.status", "params": order},
        "orders": {"method": "service.swap.create", "params": SWAP},
    }
    for name, element in elements.items():
        yield Sent(f"batch of {name}", lambda n, e=element: rpc._replace(body=batch(e, n)).raw())  # type: ignore[misc]
    for name in ("swap.check", "swap.create", "swap.fund"):
        yield Sent(
            f"names of {name}",
            lambda n, name=name: rpc._replace(
                body=json.dumps(  # type: ignore[misc]
                    {
                        "jsonrpc": "2.0",
                        "id": 1,
                        "method": f"service.{name}",
                        "params": {**order, "transaction": names(1), "webhook": names(5_000 - n)},
                    }
                ).encode()
            ).raw(),
        )
    shapes: dict[str, Callable[[int], bytes]] = {
        "open lists": lambda n: b"[" * (60_000 - n),
        "flat lists": lambda n: b"[" + b"[]," * (20_000 - n) + b"[]]",
        "open objects": lambda n: b'{"a":' * (12_000 - n),
        "equal keys": lambda n: b"{" + b'"a":1,' * (10_000 - n) + b'"a":1}',
        "numbers": lambda n: b"[" + b"1.5e300," * (7_000 - n) + b"1]",
        "digits": lambda n: b"[" + (b"9" * 299 + b",") * (200 - n) + b"1]",
        "halves": lambda n: b'["' + b"\\ud83d" * (10_000 - n) + b'"]',
        "lines": lambda n: b"\n" * (60_000 - n) + b"x",
    }  # fmt: skip
    for name, shape in shapes.items():
        yield Sent(name, lambda n, shape=shape: rpc._replace(body=shape(n)).raw())  # type: ignore[misc]
    yield Sent("small chunks", lambda n: _chunked(10_000 - n))


def _chunked(count: int) -> bytes:
    head = Target("POST", "/rpc").raw(b"transfer-encoding: chunked", leave_out="content-length")
    return head + b"1\r\n \r\n" * count + b"0\r\n\r\n"


def slowness() -> float:
    """How often a quiet machine would do what this one does once: a shared core takes longer."""
    began = time.thread_time()
    [{str(number): number} for number in range(10_000)]
    return max((time.thread_time() - began) / YARDSTICK_SECONDS, 1.0)


class Stranger:
    """Sends requests to a service of this process, and measures their CPU time."""

    def __init__(self, served: Served) -> None:
        self._port = served.client.port

    async def cost(self, sent: Sent, most: float) -> Cost:
        """The cost of a request; one above ``most`` is the least of six, as on a quiet machine."""
        found = await self._once(sent, 0)
        for less in range(1, 6):
            if found.seconds > most:
                again = await self._once(sent, less)
                quiet = again._replace(seconds=again.seconds / slowness())
                found = min(found, quiet, key=lambda cost: cost.seconds)
        return found

    async def _once(self, sent: Sent, less: int) -> Cost:
        raw = sent.make(less)
        assert len(raw) <= LARGEST, sent.name
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        began = time.process_time()
        writer.write(raw)
        async with asyncio.timeout(60):
            status = int((await reader.readline()).split()[1])
            await reader.readuntil(b"\r\n\r\n")
        seconds = time.process_time() - began
        writer.transport.abort()
        return Cost(sent.name, status, seconds)


async def known_order(served: Served) -> dict[str, str]:
    """An order, as placeholders in examples name it."""
    answer = await served.post("/agent/swap/create", BACK, x_forwarded_proto="https")
    data = answer.body["data"]
    told = {"message": "m"}
    answer = await served.post("/agent/support/tickets", told, x_forwarded_proto="https")
    ticket = answer.body["data"]
    return {
        "$ticketId": ticket["ticket"]["ticketId"],
        "$ticketSecret": ticket["ticketSecret"],
        "$orderId": data["order"]["orderId"],
        "$sessionId": data["sessionId"],
        "$usdc": bff.USDC,
    }
