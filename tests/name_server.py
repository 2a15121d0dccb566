"""A name server on loopback: it answers for the names that it is given, and is silent otherwise.

Source: RFC 1035, section 4.1.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address
from typing import Final, cast

_ADDRESS: Final = 1  # the record type A
_IPV6_ADDRESS: Final = 28  # AAAA
# A pointer to the name in the question, the class IN, and no time for which it may be kept.
_RECORD: Final = struct.Struct("!HHHIH")
_POINTER: Final = 0xC00C
_HEAD: Final = struct.Struct("!HHHHHH")
_ANSWERED: Final = 0x8180
_NO_SUCH_NAME: Final = 0x8183


class NameServer(asyncio.DatagramProtocol):
    """Answers each look-up of a name with the next of its lists of addresses, and then the last.

    An empty list says that there is no such name. ``asked`` are the names looked up. It answers
    after ``delay`` seconds.
    """

    def __init__(self, names: Mapping[str, list[list[str]]]) -> None:
        self.asked: list[str] = []
        self.address = ""
        self.delay = 0.0
        self._names = {name: list(lists) for name, lists in names.items()}
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)
        host, port = transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, end = _name(data)
        (kind,) = struct.unpack_from("!H", data, end)
        if kind == _ADDRESS:  # each look-up asks for both kinds, for this one first
            self.asked.append(name)
        if name not in self._names or self._transport is None:
            return
        lists = self._names[name]
        addresses = lists[min(max(0, self.asked.count(name) - 1), len(lists) - 1)]
        records = [
            _RECORD.pack(_POINTER, kind, 1, 0, len(packed)) + packed
            for packed in _packed(addresses, kind)
        ]
        flags = _ANSWERED if addresses else _NO_SUCH_NAME
        (number,) = struct.unpack_from("!H", data)
        head = _HEAD.pack(number, flags, 1, len(records), 0, 0)
        answer = head + data[_HEAD.size : end + 4] + b"".join(records)
        asyncio.get_running_loop().call_later(self.delay, self._transport.sendto, answer, addr)


def _name(query: bytes) -> tuple[str, int]:
    """The name that a query is about, and where it ends."""
    at, labels = _HEAD.size, []
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels).lower(), at + 1


def _packed(addresses: list[str], kind: int) -> Iterator[bytes]:
    for address in map(ip_address, addresses):
        if isinstance(address, IPv6Address) is (kind == _IPV6_ADDRESS):
            yield address.packed


@asynccontextmanager
async def name_server(names: Mapping[str, list[list[str]]]) -> AsyncIterator[NameServer]:
    """A name server on a free port, until the block ends."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: NameServer(names), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
