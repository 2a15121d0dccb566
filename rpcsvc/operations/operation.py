"""The type of an operation: what one row of a table declares.

The agent API, the BFF and the admin methods are tables of it. Dispatcher, routes, command line and
documents are loops over them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel

from rpcsvc.operations.envelope import Answer, Json
from rpcsvc.operations.params import Params

if TYPE_CHECKING:
    from rpcsvc.operations.service import Call, Flat, Stored

Handler: TypeAlias = "Callable[[Any, Any, Call], Awaitable[Answer | Flat | Stored]]"


class Effect(StrEnum):
    """What an operation does to the world."""

    READ = "read"
    WRITE = "write"
    MOVES_MONEY = "moves_money"


def option_of(wire_name: str) -> str:
    """The CLI's option for an input: ``--refund-address`` for ``refundAddress``."""
    return "--" + re.sub(r"([A-Z])", r"-\1", wire_name).lower()


@dataclass(frozen=True, slots=True)
class Example:
    """Params that work as they stand.

    ``"$orderId"`` stands for an order made just before, ``"$sessionId"`` for its session, and
    ``"$usdc"`` for the USDC contract of a chain.
    """

    name: str
    params: Json


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. ``path`` is under the root of its surface, empty when HTTP does not offer it.

    ``errors`` are the codes that it can answer besides those of its transport.
    ``creates``: the answer tells what was made, so it does not run as a notification.
    """

    name: str
    summary: str
    params: type[Params]
    result: type[BaseModel]
    handler: Handler
    effect: Effect
    method: str = "POST"
    path: str = ""
    examples: tuple[Example, ...] = ()
    errors: tuple[str, ...] = ()
    idempotent: bool = False
    creates: bool = False
    sandbox_only: bool = False

    @property
    def command(self) -> str:
        """The CLI command (spec 1): ``agent:swap:plan``; sandbox commands have no prefix."""
        name = self.name.replace(".", ":")
        return name if self.sandbox_only else f"agent:{name}"
