"""The port of the treasury: an engine's wallets as the operator sees them."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct


class Noted(Struct, frozen=True):
    """The outcome of a note on a transaction.

    ``moved``: what the transaction moved, in words. ``recorded``: the payment that it is on record
    as. ``refused``: why nothing was changed.
    """

    txid: str
    note: str | None = None
    moved: str | None = None
    recorded: str | None = None
    refused: str | None = None


class Treasury(Protocol):
    """The operator's view of an engine's wallets."""

    async def view(self) -> dict[str, Any]:
        """The wallets' holdings, and the amounts reserved, owed, swept and spent on fees."""
        ...

    async def plan(self) -> dict[str, Any]:
        """The inventory of each network beside its target, and the moves that would reach it."""
        ...

    async def annotate(self, network: str, txid: str, note: str, wei: int) -> Noted:
        """Annotate a transaction that was made by hand. Raises InvalidInput, Unavailable."""
        ...

    async def remove_annotation(self, network: str, txid: str) -> Noted:
        """Remove an annotation. Raises InvalidInput."""
        ...
