"""Support tickets: opened by anybody, continued by the holder of their secret, answered by the
operator.

The secret is stored as its hash only. An unknown ticket and a wrong secret get the same answer.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import Annotated, Final, NamedTuple

import structlog
from msgspec.structs import replace
from pydantic import Field
from pydantic.alias_generators import to_camel

from rpcsvc import ids
from rpcsvc.clock import day_of, iso8601
from rpcsvc.domain.clients import SOCKET, KnownClient
from rpcsvc.domain.events import SupportReplied
from rpcsvc.domain.integrators import key_hash
from rpcsvc.domain.order import AgentState, Order
from rpcsvc.errors import (
    InvalidDestination,
    InvalidInput,
    MissingInput,
    TicketNotFound,
    Unavailable,
)
from rpcsvc.operations import models
from rpcsvc.operations.admin import admin_row
from rpcsvc.operations.clients import require_refundable
from rpcsvc.operations.inputs import (
    HINTS,
    Problems,
    read_order_id,
    read_refund_address,
    read_session,
)
from rpcsvc.operations.params import NoParams, Params, SupportParams, TicketParams
from rpcsvc.operations.service import Answer, Call, Cli, Effect, Flat, Service, action
from rpcsvc.operations.session import awaits_address, read_untried
from rpcsvc.operations.swap import look_again
from rpcsvc.operations.views import may_be_refunded_upstream
from rpcsvc.store.changes import Change, Ticket, TicketMessage
from rpcsvc.store.database import StaleWrite
from rpcsvc.store.tickets import MOST_MESSAGES, StoredTicket
from rpcsvc.strict_json import Json

log = structlog.get_logger(__name__)

# Characters of a message.
LONGEST_MESSAGE: Final = 8_000
# How often a budget is read again because another ticket was charged to it meanwhile.
_TRIES: Final = 5
# Bytes of a ticket beside its texts: numbers, ids, its row and its client's count.
_ROW_BYTES: Final = 200
# The hash that a secret is compared with where there is no ticket: no text has it.
_NOBODYS: Final = "0" * 64
# Inputs that belong to a new ticket.
_OF_A_NEW_ONE: Final = ("order_id", "session_id", "wallet_address")


class _Account(NamedTuple):
    """Whose budget a ticket uses: the client as stored, or the order that has money in it."""

    name: str
    has_money: bool


# --- the person who writes -----------------------------------------------------------------------


async def create_ticket(
    service: Service, params: SupportParams, call: Call, *, tells_secret: bool = True
) -> Answer[models.SupportResult]:
    """Record a ticket, and set the order's refund address when its owner asks for it; or record one
    more message of a ticket.

    Nobody can read an answer to a ticket whose surface does not tell the secret. Raises
    InvalidInput, InvalidDestination, TicketNotFound, RateLimited and Unavailable.
    """
    texts = ("message", "category", "wallet_address")
    params = params.model_copy(update={name: _storable(getattr(params, name)) for name in texts})
    if params.ticket_id is not None or params.ticket_secret is not None:
        return await _add_message(service, params, call)
    session, order_id = _read_ids(params)
    named = None if order_id is None else await service.store.order(order_id)
    order = _owned(named, session)
    refund_to = await _refund_address(service, params, order, call.known)
    if call.known is not None and refund_to is not None:
        call.known.require_destination(refund_to, field="walletAddress", caller=call.known)
    secret = ids.ticket_secret(service.random)
    ticket = Ticket(
        ticket_id=ids.ticket_id(service.random),
        created_at=service.clock.now_ms(),
        category=params.category,
        message=params.message,
        order_id=params.order_id,
        session_id=session,
        wallet_address=params.wallet_address,
        secret_hash=_hash_of(secret) if tells_secret else "",
    )
    account = None
    if not _sets_refund_address(order, refund_to):
        account = _account(service, order, call)
    texts = (ticket.message, ticket.category, ticket.wallet_address or "")
    await _record(service, Change(ticket=ticket), account, ticket.created_at, _size(*texts))
    log.info("ticket_created", ticket_id=ticket.ticket_id, order_id=ticket.order_id)
    accepted = await _give_with_ticket(service, order, refund_to, ticket)
    data = models.SupportResult(
        *service.views.common(session, call),
        ticket=_view(ticket),
        ticket_secret=secret,
        refund_address=accepted,
    )
    steps = [_ticket_action(params.order_id, named), _read_action(ticket.ticket_id, secret)]
    return Answer(AgentState.TICKET_CREATED, data, steps)


async def get_ticket(
    service: Service, params: TicketParams, _call: Call
) -> Answer[models.TicketResult]:
    """A ticket with its conversation, for the holder of its secret. Raises TicketNotFound."""
    ticket = await _opened(service, params.ticket_id, params.ticket_secret)
    messages = [models.TicketMessageView(iso8601(ticket.created_at), "user", ticket.message)]
    messages += [
        models.TicketMessageView(
            iso8601(each.at), "user" if each.answered_by is None else "operator", each.message
        )
        for each in await service.store.ticket_messages(ticket.ticket_id)
    ]
    data = models.TicketResult(*service.views.common(), ticket=_view(ticket), messages=messages)
    return Answer(AgentState.READY, data)


async def _add_message(
    service: Service, params: SupportParams, call: Call
) -> Answer[models.SupportResult]:
    """Record one more message of a ticket, charged as a ticket is."""
    for name in ("ticket_id", "ticket_secret"):
        if getattr(params, name) is None:
            field = to_camel(name)
            raise MissingInput(f"{field} is missing. {HINTS[field]}", field=field)
    for name in _OF_A_NEW_ONE:
        if getattr(params, name) is not None:
            field = to_camel(name)
            raise InvalidInput(
                f"{field} belongs to a new ticket. Leave it out to write to this one, or leave out"
                " ticketId and ticketSecret.",
                field=field,
            )
    ticket = await _opened(service, params.ticket_id or "", params.ticket_secret or "")
    if ticket.messages >= MOST_MESSAGES:
        raise InvalidInput(
            f"This ticket has {MOST_MESSAGES} messages of yours, the most of one. Open a new one:"
            " leave out ticketId and ticketSecret.",
            field="ticketId",
        )
    order = None if ticket.order_id is None else await service.store.order(ticket.order_id)
    now = service.clock.now_ms()
    message = TicketMessage(ticket.ticket_id, now, None, params.message)
    account = _account(service, _owned(order, ticket.session_id), call)
    await _record(service, Change(message=message), account, now, _size(params.message))
    log.info("ticket_continued", ticket_id=ticket.ticket_id, order_id=ticket.order_id)
    data = models.SupportResult(
        *service.views.common(), ticket=_view(ticket), ticket_secret=None, refund_address=None
    )
    step = _read_action(ticket.ticket_id, params.ticket_secret or "")
    return Answer(AgentState.TICKET_CREATED, data, [step])


async def _opened(service: Service, ticket_id: str, secret: str) -> StoredTicket:
    """The ticket that the secret opens. Raises TicketNotFound, for a wrong secret, too."""
    stored, found = None, None
    if ids.is_ticket_id(ticket_id):  # the hash alone: a long message would take its time
        stored = await service.store.ticket_secret_hash(ticket_id)
    if hmac.compare_digest(_hash_of(secret), stored or _NOBODYS):
        found = await service.store.ticket(ticket_id)
    if found is None:
        raise TicketNotFound(
            "There is no ticket with this ticketId and ticketSecret. Send both as support.create"
            " answered them; the operator may have closed the ticket since."
        )
    return found


def _storable(text: str | None) -> str | None:
    """The text with U+FFFD for U+0000, which PostgreSQL does not store."""
    return None if text is None else text.replace("\0", "\ufffd")


def _hash_of(secret: str) -> str:
    return key_hash(secret).hex()


def _view(ticket: Ticket | StoredTicket) -> models.TicketView:
    return models.TicketView(
        ticket_id=ticket.ticket_id,
        created_at=iso8601(ticket.created_at),
        category=ticket.category,
        order_id=ticket.order_id,
    )


def _account(service: Service, order: Order | None, call: Call) -> _Account | None:
    """Whose budget is charged; None for calls over the socket. ``order`` is the caller's own."""
    if call.client == SOCKET:
        return None
    if order is not None and order.has_money:
        return _Account(order.order_id, True)
    return _Account(call.client.stored(service.client_secret), False)


async def _record(
    service: Service, change: Change, account: _Account | None, at: int, size: int
) -> None:
    """Store a ticket or a message and charge it to a budget; None charges nobody.

    Raises RateLimited and Unavailable.
    """
    for _ in range(_TRIES):
        charge = None
        if account is not None:
            taken = await service.store.tickets_taken(day_of(at), account.name)
            charge = service.ticket_budget.charge(
                account.name, at, size, taken, has_money=account.has_money
            )
        with suppress(StaleWrite):  # others were faster: the budget is read again
            return await service.store.commit(replace(change, charge=charge))
    raise Unavailable("Others are writing tickets right now. Try again.", retry_after=1)


def _size(*texts: str) -> int:
    return _ROW_BYTES + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _read_ids(params: SupportParams) -> tuple[str | None, str | None]:
    """Session id and order id of a ticket; unknown ones are accepted.

    Raises InvalidInput or InputErrors for malformed ones.
    """
    problems = Problems()
    with problems:
        session = read_session(params.session_id)
    with problems:
        order_id = None if params.order_id is None else read_order_id(params.order_id)
    problems.raise_found()
    return session, order_id


def _owned(order: Order | None, session: str | None) -> Order | None:
    """The order, if the caller has shown both halves of its owner's secret."""
    if order is None or session is None:
        return None
    owns = hmac.compare_digest(order.terms.session_id.encode(), session.encode())
    return order if owns else None


async def _refund_address(
    service: Service, params: SupportParams, order: Order | None, caller: KnownClient | None
) -> str | None:
    """The validated refund address, when the order waits for one. Raises InvalidDestination."""
    if order is None or params.wallet_address is None:
        return None
    if awaits_address(order):
        return await read_untried(
            params.wallet_address, order, service, caller, field="walletAddress"
        )
    if may_be_refunded_upstream(order):
        with suppress(InvalidDestination):  # or it is a ticket that happens to name an address
            direction = order.terms.direction
            address = await read_refund_address(
                params.wallet_address, direction, service, field="walletAddress"
            )
            require_refundable(service, order, address, "walletAddress", caller)
            return address
    return None


def _sets_refund_address(order: Order | None, refund_to: str | None) -> bool:
    """Return whether the ticket sets a refund address: no budget may block a refund."""
    if order is None or refund_to is None:
        return False
    return awaits_address(order)


async def _give_with_ticket(
    service: Service, order: Order | None, address: str | None, ticket: Ticket
) -> models.RefundAddressView | None:
    if order is None:
        return None
    if order.terms.refund_address is not None and ticket.wallet_address is not None:
        return models.RefundAddressView(False, ticket.wallet_address)  # the agreed one is final
    if address is None:
        return None
    accepted = await service.venue.give_refund_address(order, address, ticket)
    return models.RefundAddressView(accepted, address)


def _ticket_action(order_id: str | None, order: Order | None) -> Json:
    if order is not None:
        return look_again(order, "Give the user the ticketId, and check the order again later.")
    text = "Give the user the ticketId."
    if order_id is not None:
        text += f" There is no order {order_id} here: check the orderId with them."
    return action("tell_user", text)


def _read_action(ticket_id: str, secret: str) -> Json:
    params = {"ticketId": ticket_id, "ticketSecret": secret}
    return action("read_ticket", "Look whether the operator has answered.", "support.get", params)


# --- the operator --------------------------------------------------------------------------------


class TicketIdParams(Params):
    """Name a ticket."""

    ticket_id: str


class ReplyParams(Params):
    """An answer to a ticket, and who answers."""

    ticket_id: str
    message: Annotated[
        str,
        Field(
            min_length=1,
            max_length=LONGEST_MESSAGE,
            description="what the person who opened the ticket reads",
        ),
    ]
    by: Annotated[
        str,
        Field(
            min_length=1, max_length=64, description="who answers; stored, and shown to you alone"
        ),
    ]


async def list_tickets(service: Service, _params: NoParams, _call: Call) -> Flat:
    """All tickets without their messages, oldest first."""
    return Flat({"tickets": [_row(each) for each in await service.store.tickets()]})


async def show_ticket(service: Service, params: TicketIdParams, _call: Call) -> Flat:
    """Return one ticket with its messages. Raises InvalidInput."""
    ticket = await _named(service, params.ticket_id)
    first: Json = {"at": iso8601(ticket.created_at), "answeredBy": None, "text": ticket.message}
    more = [
        {"at": iso8601(each.at), "answeredBy": each.answered_by, "text": each.message}
        for each in await service.store.ticket_messages(ticket.ticket_id)
    ]
    order = None if ticket.order_id is None else await service.store.order(ticket.order_id)
    is_from_owner = _owned(order, ticket.session_id) is not None
    view = {**_row(ticket), "isFromOwner": is_from_owner, "conversation": [first, *more]}
    return Flat({"ticket": view})


async def reply(service: Service, params: ReplyParams, _call: Call) -> Flat:
    """Answer a ticket, and note that in the events of its order. Raises InvalidInput."""
    ticket = await _named(service, params.ticket_id)
    if not ticket.secret_hash:
        raise InvalidInput(
            "Nobody can read an answer to this ticket: it came over the BFF, or you made it with a"
            " refund address. Write to the person in another way, and close it.",
            field="ticketId",
        )
    by, text = " ".join(params.by.split()), params.message.strip()
    if not by:
        raise InvalidInput("by must say who answers.", field="by")
    if not text:
        raise InvalidInput("message must say something.", field="message")
    by, text = by.replace("\0", "\ufffd"), text.replace("\0", "\ufffd")
    message = TicketMessage(ticket.ticket_id, service.clock.now_ms(), by, text)
    order = None if ticket.order_id is None else await service.store.order(ticket.order_id)
    if order is not None:
        event = SupportReplied(ticket.ticket_id)
        await service.processor.apply(order.order_id, event, message=message)
    else:
        try:
            await service.store.commit(Change(message=message))
        except StaleWrite:  # it was closed meanwhile
            raise _no_ticket(ticket.ticket_id) from None
    log.info("ticket_answered", ticket_id=ticket.ticket_id, order_id=ticket.order_id, by=by)
    return Flat({"answered": {"ticketId": ticket.ticket_id, "by": by}})


async def close_ticket(service: Service, params: TicketIdParams, _call: Call) -> Flat:
    """Delete a ticket that was dealt with, and its messages. Raises InvalidInput."""
    if not await service.store.close_ticket(params.ticket_id):
        raise _no_ticket(params.ticket_id)
    return Flat({"closed": {"ticketId": params.ticket_id}})


async def _named(service: Service, ticket_id: str) -> StoredTicket:
    found = await service.store.ticket(ticket_id)
    if found is None:
        raise _no_ticket(ticket_id)
    return found


def _no_ticket(ticket_id: str) -> InvalidInput:
    return InvalidInput(
        f"there is no ticket {ticket_id[:60]}. rpcsvc tickets list names them all.",
        field="ticketId",
    )


def _row(ticket: StoredTicket) -> Json:
    return {
        "ticketId": ticket.ticket_id,
        "createdAt": iso8601(ticket.created_at),
        "category": ticket.category,
        "orderId": ticket.order_id,
        "walletAddress": ticket.wallet_address,
        "awaitsAnswer": ticket.awaits_answer,
        "canBeAnswered": bool(ticket.secret_hash),
    }


TICKETS: Final = (
    admin_row(
        "tickets.list",
        NoParams,
        list_tickets,
        cli=Cli("tickets list", "all tickets without their messages, oldest first"),
    ),
    admin_row(
        "tickets.show",
        TicketIdParams,
        show_ticket,
        cli=Cli("tickets show", "one ticket with its messages", {"ticket_id": "TICKET_ID"}),
    ),
    admin_row(
        "tickets.reply",
        ReplyParams,
        reply,
        Effect.WRITE,
        Cli(
            "tickets reply",
            "answer a ticket: its writer reads it by support.get or on the order's page",
            {"ticket_id": "TICKET_ID", "message": "--message TEXT", "by": "--by NAME"},
        ),
    ),
    admin_row(
        "tickets.close",
        TicketIdParams,
        close_ticket,
        Effect.WRITE,
        Cli("tickets close", "delete a handled ticket", {"ticket_id": "TICKET_ID"}),
    ),
)
