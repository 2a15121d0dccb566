"""Values in compressed pages, for books of more orders than fit into memory as objects."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

from msgspec import msgpack

T = TypeVar("T")

_PAGE: Final = 500
_FASTEST: Final = 1


class Packed(Generic[T]):
    """Values of one type, read from ``values`` once. Each iteration makes them again, page by
    page.
    """

    def __init__(self, values: Iterable[T], kind: type[T]) -> None:
        # mypy knows no type that is made at run time.
        self._decoder = msgpack.Decoder(list[kind])  # type: ignore[valid-type]
        self._pages: list[bytes] = []
        self._count = 0
        left = iter(values)
        while page := list(islice(left, _PAGE)):
            self._pages.append(zlib.compress(msgpack.encode(page), _FASTEST))
            self._count += len(page)

    def __iter__(self) -> Iterator[T]:
        for page in self._pages:
            yield from self._decoder.decode(zlib.decompress(page))

    def __len__(self) -> int:
        return self._count
