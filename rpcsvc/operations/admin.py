"""The table of admin methods, over the UNIX socket only, and the methods of records.

An answer is a plain JSON object. A request that the current state forbids is answered with
``refused`` and the reason; a wrong input is an error. A method with ``cli`` is a command, too:
``rpcsvc/cli/operator/methods.py`` makes it from the row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace
from pydantic import Field
from pydantic.alias_generators import to_camel

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import ASSETS, format_units
from rpcsvc.errors import InvalidInput
from rpcsvc.operations.models import View
from rpcsvc.operations.params import NoParams, Params
from rpcsvc.operations.service import Call, Cli, Effect, Flat, Operation, Service
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.strict_json import Json

PREFIX: Final = "admin."
MOST_LISTED: Final = 10_000


def admin_row(
    name: str,
    params: type[Params],
    handler: Callable[..., Awaitable[Flat]],
    effect: Effect = Effect.READ,
    cli: Cli | None = None,
) -> Operation:
    """Return the row of an admin method, whose summary is the handler's docstring.

    The handler takes the row's owner (see ``bound``), service, params and call. No schema of its
    answer is published.
    """
    summary = (handler.__doc__ or "").partition("\n")[0].partition(" Raises")[0]
    return Operation(PREFIX + name, summary, params, View, handler, effect, cli=cli)


def bound(rows: Iterable[Operation], owner: object) -> tuple[Operation, ...]:
    """Return the rows with ``owner`` as the first argument of their handlers."""
    return tuple(replace(row, handler=partial(row.handler, owner)) for row in rows)


def json_of(row: Struct, **changed: Any) -> Json:
    """Return a record with camelCase names, some of its values ``changed``."""
    return {to_camel(name): value for name, value in {**asdict(row), **changed}.items()}


# --- integrators, claims -------------------------------------------------------------------------


class ClaimParams(Params):
    """A claim on an upstream order, and what was found about it."""

    order_id: str
    note: Annotated[str, Field(description="what you found; stored")]


async def report_fees(books: OperatorBooks, *_: object) -> Flat:
    """Return what integrators have earned by settled payouts."""
    rows = [
        {
            "integrator": each.integrator,
            "asset": each.asset,
            "amount": format_units(each.units, ASSETS[each.asset]),
            "payouts": each.payouts,
        }
        for each in await books.integrator_fees()
    ]
    return Flat({"fees": rows})


async def list_doubts(books: OperatorBooks, *_: object) -> Flat:
    """Upstream orders that may have been made."""
    found = await books.doubts()
    rows = [json_of(each, created_at=iso8601(each.created_at)) for each in found]
    return Flat({"inDoubt": rows})


async def close_claim(
    books: OperatorBooks, service: Service, params: ClaimParams, _call: Call
) -> Flat:
    """End a claim that was looked up. Raises InvalidInput when it is not in doubt."""
    note = " ".join(params.note.split())
    if not note:
        raise InvalidInput(
            "note must say what was found: no other record of it is kept.", field="note"
        )
    reason = f"closed by the operator at {iso8601(service.clock.now_ms())}: {note}"
    if not await books.close_claim(params.order_id, reason):
        raise InvalidInput(
            f"no upstream order {params.order_id[:60]} is in doubt. rpcsvc relays lists those;"
            " one whose call is still under way can't be closed.",
            field="orderId",
        )
    return Flat({"closed": {"orderId": params.order_id, "reason": reason}})


RECORDS: Final = (
    admin_row(
        "integrators.report",
        NoParams,
        report_fees,
        cli=Cli("integrators report", "what each has earned by settled payouts"),
    ),
    admin_row(
        "relays.list",
        NoParams,
        list_doubts,
        cli=Cli("relays", "upstream orders in doubt: look them up at the upstream"),
    ),
    admin_row(
        "relays.close",
        ClaimParams,
        close_claim,
        Effect.WRITE,
        Cli(
            "relays close",
            "end one that you looked up: it was not made, or will never be paid",
            {"order_id": "ORDER_ID", "note": "--note TEXT"},
        ),
    ),
)
