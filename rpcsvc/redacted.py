"""Values with secrets, which logs and tracebacks must not show."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct


class Redacted(Struct, frozen=True):
    """A value whose repr leaves out the fields named in ``HIDDEN``."""

    HIDDEN: ClassVar[frozenset[str]]

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown = (name for name in self.__struct_fields__ if name not in self.HIDDEN)
        return [(name, getattr(self, name)) for name in shown]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"
