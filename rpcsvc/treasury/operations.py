"""The admin methods of the wallets: balances, moves, annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcsvc.operations.admin import admin_row, json_of
from rpcsvc.operations.params import NoParams, Params
from rpcsvc.operations.service import Call, Cli, Effect, Flat, Service

if TYPE_CHECKING:
    from rpcsvc.treasury.wallets import OnchainTreasury

_INCOMPLETE: Final = ". Exit status: 0, or 1 when a node or wallet could not be asked."


class AnnotationParams(Params):
    """A transaction that was made by hand, and what it was for."""

    network: str
    txid: str
    note: str
    internal_wei: int = 0


class TransactionParams(Params):
    """A transaction."""

    network: str
    txid: str


async def show(treasury: OnchainTreasury, *_: object) -> Flat:
    """The wallets' holdings, and the amounts reserved, owed, swept and spent on fees."""
    return Flat(await treasury.view())


async def plan(treasury: OnchainTreasury, *_: object) -> Flat:
    """The inventory of each network beside its target, and the moves that would reach it."""
    return Flat(await treasury.plan())


async def annotate(
    treasury: OnchainTreasury, _service: Service, params: AnnotationParams, _call: Call
) -> Flat:
    """Annotate a transaction that was made by hand. Raises InvalidInput."""
    given = (params.network, params.txid, params.note, params.internal_wei)
    return Flat(json_of(await treasury.annotate(*given)))


async def remove(
    treasury: OnchainTreasury, _service: Service, params: TransactionParams, _call: Call
) -> Flat:
    """Remove an annotation. Raises InvalidInput."""
    return Flat(json_of(await treasury.remove_annotation(params.network, params.txid)))


TREASURY: Final = (
    admin_row(
        "treasury.show",
        NoParams,
        show,
        cli=Cli(
            "treasury",
            "what the wallets hold, what is reserved, owed, swept and spent on fees",
            more=_INCOMPLETE,
            prints="tables",
            engine="onchain",
        ),
    ),
    admin_row(
        "treasury.plan",
        NoParams,
        plan,
        cli=Cli(
            "treasury plan",
            "moves that would bring each network to its target, and when it runs dry; moves"
            " nothing",
            more=_INCOMPLETE,
            prints="tables",
            engine="onchain",
        ),
    ),
    admin_row("treasury.annotate", AnnotationParams, annotate, Effect.WRITE),
    admin_row("treasury.unannotate", TransactionParams, remove, Effect.WRITE),
)
