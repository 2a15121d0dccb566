"""The pages for people: the site root, /status, /swap, and the page of each order with its forms.

Neither a cookie nor a loopback address authorizes a caller. The refund form carries the order's
secret, so another site can't submit it for a reader; the secret is checked first. A page shows the
address again before it is set, since it can't be changed afterwards. The form at /swap makes an
order in two steps, by the same calls and within the same limits as the HTTPS API.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import orjson
from aiohttp import web

from rpcsvc.domain.order import REFUND_ADDRESS, Order, OrderStatus
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.settle_times import kind_of_order
from rpcsvc.errors import (
    IdempotencyConflict,
    InputError,
    InputErrors,
    InvalidInput,
    OperationError,
    OrderNotFound,
    QuoteChanged,
    RateLimited,
    ServiceError,
    TicketNotFound,
    Unavailable,
)
from rpcsvc.http.documents.links import HOME
from rpcsvc.http.gate import CALLER, Caller, Gate
from rpcsvc.http.health import HealthRoutes
from rpcsvc.http.messages import JSON, error_headers, media_type, read_body
from rpcsvc.http.pages import swap
from rpcsvc.http.pages.checkout import CheckoutWriter
from rpcsvc.http.pages.front import home_values, status_values
from rpcsvc.http.pages.rendering import Catalogues, Renderer, Texts
from rpcsvc.http.site import Site
from rpcsvc.ids import session_id
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.models import StatusResult
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.session import read_untried
from rpcsvc.operations.swap import find_funding
from rpcsvc.operations.views import status_data
from rpcsvc.orders.ports.venue import Confirmations
from rpcsvc.strict_json import Json, dumps
from rpcsvc.terminal import printable

ORDER_PATH: Final = "/orders/{orderId}"
_FORM: Final = "application/x-www-form-urlencoded"
_FORM_BYTES: Final = 4_096
_REFUND_FORM: Final = ("address", "secret", "confirmed")
_SANDBOX_FORM: Final = ("do",)
_TICKET: Final = ("ticketId", "ticketSecret")
_SUPPORT_FORM: Final = ("message", *_TICKET)
# Characters of a message of the form; escaped, each takes up to 12 bytes.
_LONGEST_MESSAGE: Final = 2_000
_SUPPORT_BYTES: Final = 12 * _LONGEST_MESSAGE + 1_000


class Visit(NamedTuple):
    """An admitted request for a page, and the language of its answer."""

    request: web.Request
    caller: Caller
    texts: Texts


# A submitted form; missing fields are empty.
_Form = dict[str, str]
_Answer = Callable[[Visit], Awaitable[web.Response]]


class PagesHttp:
    """Routes of the pages for people."""

    def __init__(
        self,
        gate: Gate,
        service: Service,
        dispatcher: Dispatcher,
        site: Site,
        renderer: Renderer,
        health: HealthRoutes,
    ) -> None:
        self._gate = gate
        self._service = service
        self._dispatcher = dispatcher
        self._site = site
        self._renderer = renderer
        self._health = health
        self._catalogues = Catalogues()

    def routes(self) -> list[web.RouteDef]:
        """All routes of the pages."""
        found = [
            web.get(HOME, self._around(self._home), allow_head=True),
            web.get("/swap", self._around(self._swap), allow_head=True),
            web.post("/swap", self._around(self._take_swap)),
            web.get("/status", self._around(self._status_page), allow_head=True),
            web.get(ORDER_PATH, self._around(self._order), allow_head=True),
            web.get(f"{ORDER_PATH}/refund", self._around(self._back_to_order), allow_head=True),
            web.post(f"{ORDER_PATH}/refund", self._around(self._refund)),
            web.get(f"{ORDER_PATH}/support", self._around(self._support), allow_head=True),
            web.post(f"{ORDER_PATH}/support", self._around(self._write)),
            web.get(f"{ORDER_PATH}/attestation", self._around(self._attestation)),
            web.get(f"{ORDER_PATH}/receipt", self._around(self._receipt)),
        ]
        if self._site.is_simulated:
            path = f"{ORDER_PATH}/sandbox"
            found.append(web.get(path, self._around(self._back_to_order), allow_head=True))
            found.append(web.post(path, self._around(self._simulate)))
        return found

    def _around(self, answer: _Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Admit and charge a request; render failures as a page."""

        async def handle(request: web.Request) -> web.Response:
            request[CALLER] = caller = self._gate.admit(request)
            texts = self._catalogues.choose(request.headers.get("accept-language", ""))
            visit = Visit(request, caller, texts)
            try:
                self._gate.charge(caller, "requests")
                response = await answer(visit)
            except ServiceError as error:
                response = self._refused(visit, error)
            response.headers.update({**caller.headers, "x-request-id": caller.request_id})
            if self._site.onion_url:
                response.headers["onion-location"] = f"{self._site.onion_url}{request.rel_url}"
            return response

        return handle

    async def _home(self, visit: Visit) -> web.Response:
        readiness = await self._health.readiness()
        client = visit.caller.client
        values = await home_values(self._site, self._service, visit.texts, client, readiness)
        values |= swap.form_values(self._service, visit.texts)
        return self._renderer.page("home.html", visit.texts, values)

    async def _status_page(self, visit: Visit) -> web.Response:
        """The answer of /health, status code included; details only for insiders."""
        checks = await self._health.checks()
        is_insider = self._gate.is_insider(visit.request, visit.caller)
        values = await status_values(self._service, visit.texts, checks, is_insider=is_insider)
        status = 200 if values["is_well"] else 503
        return self._renderer.page("status.html", visit.texts, values, status=status)

    # --- the form for a swap ---

    async def _swap(self, visit: Visit) -> web.Response:
        """The form; in the sandbox with an example if the query names a direction."""
        wanted = visit.request.query.get("example")
        if not self._site.is_simulated or wanted not in list(Direction):
            return self._ask(visit)
        return self._ask(visit, swap.example(self._service, Direction(wanted)))

    def _ask(
        self,
        visit: Visit,
        typed: _Form | None = None,
        wrong: dict[str, swap.FieldProblem] | None = None,
        *,
        alert: str = "",
        status: int = 200,
    ) -> web.Response:
        values = swap.form_values(self._service, visit.texts, typed, wrong, alert)
        return self._renderer.page("swap.html", visit.texts, values, status=status)

    async def _take_swap(self, visit: Visit) -> web.Response:
        """Handle the form: price it, make the order of a quote, or show the form again."""
        if _is_from_elsewhere(visit.request):
            return self._unchanged(visit, "swap.cross_site", 403)
        form = await _read_form(visit.request, swap.FORM)
        steps = {"": self._price, "order": self._make_order, "change": self._change}
        if form is None or form["step"] not in steps:
            return self._unchanged(visit, "swap.unreadable", 400)
        try:
            return await steps[form["step"]](visit, form)
        except (InputError, InputErrors) as error:
            wrong = swap.field_problems(error, visit.texts)
            if wrong is None:
                return self._unchanged(visit, "swap.unreadable", error.http_status)
            return self._ask(visit, form, wrong, status=error.http_status)

    async def _change(self, visit: Visit, form: _Form) -> web.Response:
        return self._ask(visit, form)

    async def _price(
        self, visit: Visit, form: _Form, alert: str = "", status: int = 200
    ) -> web.Response:
        """The quote of what was typed, or the form again while there is none.

        Raises InputError and InputErrors.
        """
        try:
            given = await swap.read_swap(form, self._service)
            priced = {name: given[name] for name in swap.PRICED if name in given}
            data = await self._run(visit, "swap.quote", priced)
        except (OperationError, RateLimited) as error:
            said = swap.refusal(error, visit.texts)
            response = self._ask(visit, form, alert=said, status=error.http_status)
            return _with_headers(response, error)
        key = session_id(self._service.random)
        quoted = {**form, "quoteDigest": data["quoteDigest"], "key": key}
        values = swap.quote_values(self._service, visit.texts, data["quote"])
        return self._show_quote(visit, quoted, values, alert, status)

    async def _make_order(self, visit: Visit, form: _Form) -> web.Response:
        """Make the order of the form's key, once, and lead to its page with the order's secret.

        Raises InputError and InputErrors.
        """
        try:
            self._gate.charge(visit.caller, "orders")
            given = await swap.read_swap(form, self._service)
            params = {**given, "quoteDigest": form["quoteDigest"]}
            data = await self._run(visit, "swap.create", params, form["key"])
        except QuoteChanged as error:
            changed = visit.texts.say("swap.changed")
            return await self._price(visit, form, changed, error.http_status)
        except IdempotencyConflict as error:
            return self._unchanged(visit, "swap.used", error.http_status)
        except (OperationError, RateLimited) as error:
            # The same key again: an order that was made all the same is not made twice.
            said = swap.refusal(error, visit.texts)
            response = self._show_quote(visit, form, {"quote": None}, said, error.http_status)
            return _with_headers(response, error)
        return _see_order(data["order"]["orderId"], data["sessionId"])

    def _show_quote(
        self, visit: Visit, form: _Form, values: dict[str, Any], alert: str, status: int
    ) -> web.Response:
        shown = {**values, "form": form, "alert": alert}
        return self._renderer.page("quote.html", visit.texts, shown, status=status)

    async def _run(
        self, visit: Visit, operation: str, params: Json, key: str | None = None
    ) -> dict[str, Any]:
        """``data`` of an operation's answer. Raises the ServiceError that it answers."""
        caller = visit.caller
        call = Call(caller.request_id, idempotency_key=key, client=caller.client, transport="page")
        reply = await self._dispatcher.run(self._site.operation(operation), params, call)
        if reply.error is not None:
            raise reply.error
        data: dict[str, Any] = orjson.loads(reply.body)["data"]
        return data

    # --- the page of an order ---

    async def _order(self, visit: Visit) -> web.Response:
        return await self._show(visit)

    async def _find(self, visit: Visit) -> Order:
        """The order. Raises OrderNotFound, also for a malformed id."""
        return (await self._find_funding(visit))[0]

    async def _find_funding(self, visit: Visit) -> tuple[Order, bool]:
        """The order, and whether a signed payment of it is under way. Raises OrderNotFound."""
        order_id = visit.request.match_info["orderId"]
        try:
            found = await find_funding(self._service, order_id)
        except InputError as error:
            raise OrderNotFound(error.message) from error
        self._service.venue.watch(order_id)
        return found

    async def _show(
        self,
        visit: Visit,
        *,
        error: str = "",
        detail: str = "",
        address: str = "",
        sandbox_error: str = "",
        status: int = 200,
    ) -> web.Response:
        order, is_paying = await self._find_funding(visit)
        confirmations = await self._confirmations(order)
        now = self._service.clock.now_ms()
        views = self._service.views
        observed = await self._service.observed.of(kind_of_order(order))
        writer = CheckoutWriter(
            self._site, views, visit.texts, order, confirmations, now, observed, is_paying=is_paying
        )
        page = writer.page(may_refresh=visit.request.query.get("refresh") != "off")
        return self._renderer.page(
            "order.html",
            visit.texts,
            {
                "page": page,
                "form_error": error,
                "form_detail": detail,
                "form_address": address,
                "faults": swap.faults(visit.texts) if self._site.is_simulated else [],
                "sandbox_error": sandbox_error,
            },
            status=status,
            style=f":root{{--left:{page.seconds_left};--all:{page.seconds_in_all}}}",
            has_script=True,
        )

    async def _confirmations(self, order: Order) -> Confirmations | None:
        """Confirmations of the deposits while the order waits for them; None if unknown."""
        if order.status is not OrderStatus.DEPOSIT_DETECTED:
            return None
        try:
            return await self._service.venue.confirmations(order)
        except Unavailable:
            return None

    def _refused(self, visit: Visit, error: ServiceError) -> web.Response:
        say = visit.texts.say
        if isinstance(error, OrderNotFound):
            title, message = say("notice.not_found_title"), say("notice.not_found")
        elif isinstance(error, RateLimited):
            title = say("notice.busy_title")
            message = say("notice.busy", seconds=error.retry_after)
        else:
            title, message = say("notice.failed_title"), say("notice.failed")
        return self._notice(visit, title, message, error.http_status, error)

    def _notice(
        self,
        visit: Visit,
        title: str,
        message: str,
        status: int,
        error: ServiceError | None = None,
    ) -> web.Response:
        values = {"title": title, "message": message}
        response = self._renderer.page("notice.html", visit.texts, values, status=status)
        return _with_headers(response, error)

    # --- files ---

    async def _attestation(self, visit: Visit) -> web.Response:
        """The signed terms, a compact JWS; available while the order may be paid."""
        order = await self._find(visit)
        text = self._status(order).order.attestation
        if not text:
            raise OrderNotFound("the order has no attestation now")
        return _file(f"{order.order_id}.jws", "application/jose", text.encode())

    async def _receipt(self, visit: Visit) -> web.Response:
        """The proof of the payout, as swap.status has it."""
        order = await self._find(visit)
        receipt = self._status(order).receipt
        if receipt is None:
            raise OrderNotFound("the order has no receipt")
        return _file(f"{order.order_id}.receipt.json", JSON, dumps(receipt))

    def _status(self, order: Order) -> StatusResult:
        return status_data(self._service.views, order, self._service.clock.now_ms())

    # --- the form for a refund ---

    async def _back_to_order(self, visit: Visit) -> web.Response:
        """Redirect a GET of a form's address to the page of the order."""
        return _see_order((await self._find(visit)).order_id)

    async def _refund(self, visit: Visit) -> web.Response:
        """Handle the form in two steps: show the address again, then set it."""
        order = await self._find(visit)
        if _is_from_elsewhere(visit.request):
            return self._unchanged(visit, "refund.cross_site", 403)
        form = await _read_form(visit.request, _REFUND_FORM)
        if form is None:
            return self._unchanged(visit, "refund.unreadable", 400)
        given = form["secret"].lower().encode()
        if not hmac.compare_digest(order.terms.session_id.encode(), given):
            wrong = visit.texts.say("refund.wrong_secret")
            return await self._show(visit, error=wrong, address=form["address"], status=403)
        if self._status(order).action_required != REFUND_ADDRESS:
            return self._unchanged(visit, "refund.not_waiting", 409)
        try:
            return await self._read_and_take(visit, order, form)
        except InputError as error:
            return await self._show(
                visit,
                error=visit.texts.say("refund.address_refused"),
                detail=error.message,
                address=form["address"],
                status=400,
            )

    async def _read_and_take(self, visit: Visit, order: Order, form: _Form) -> web.Response:
        """Read and handle the form. Raises InputError for an address that is refused."""
        address = await read_untried(form["address"], order, self._service, field="address")
        if form["confirmed"] != "yes":
            return self._confirm(visit, order, address)
        return await self._take(visit, order, address)

    def _unchanged(self, visit: Visit, key: str, status: int) -> web.Response:
        say = visit.texts.say
        return self._notice(visit, say("notice.failed_title"), say(key), status)

    def _confirm(self, visit: Visit, order: Order, address: str) -> web.Response:
        values = {
            "order_id": order.order_id,
            "address": address,
            "secret": order.terms.session_id,
        }
        return self._renderer.page("confirm_refund.html", visit.texts, values)

    async def _take(self, visit: Visit, order: Order, address: str) -> web.Response:
        """Set the refund address, as swap.refundAddress does. Raises ServiceError."""
        params = {
            "orderId": order.order_id,
            "sessionId": order.terms.session_id,
            "address": address,
        }
        data = await self._run(visit, "swap.refundAddress", params)
        if not data["refundAddress"]["accepted"]:
            return self._unchanged(visit, "refund.taken", 409)
        return _see_order(order.order_id)

    # --- support ---

    async def _support(self, visit: Visit) -> web.Response:
        """The forms to write to the operator, and to read an answer."""
        order_id = (await self._find(visit)).order_id
        return self._show_ticket(visit, order_id, dict.fromkeys(_SUPPORT_FORM, ""))

    async def _write(self, visit: Visit) -> web.Response:
        """Open a ticket about the order, or read and continue one, and show the conversation."""
        order_id = (await self._find(visit)).order_id
        if _is_from_elsewhere(visit.request):
            return self._unchanged(visit, "refund.cross_site", 403)
        form = await _read_form(visit.request, _SUPPORT_FORM, _SUPPORT_BYTES)
        if form is None:
            return self._unchanged(visit, "refund.unreadable", 400)
        ticket = {name: form[name] for name in _TICKET if form[name]}
        said = "support.refused"
        try:
            if form["message"]:
                message = {"message": form["message"].replace("\r\n", "\n")}
                params = {**message, **(ticket or {"orderId": order_id})}
                data = await self._run(visit, "support.create", params)
                if not ticket:
                    ticket = {"ticketId": data["ticket"]["ticketId"]}
                    ticket["ticketSecret"] = data["ticketSecret"]
                said = "support.unread"
                form = {**ticket, "message": ""}  # the new secret is shown, whatever fails next
            data = await self._run(visit, "support.get", ticket)
        except TicketNotFound as error:
            wrong = visit.texts.say("support.not_found")
            typed = {**form, "ticketSecret": ""}
            return self._show_ticket(visit, order_id, typed, alert=wrong, status=error.http_status)
        except (InputError, InputErrors, RateLimited, Unavailable) as error:
            response = self._show_ticket(
                visit,
                order_id,
                form,
                alert=visit.texts.say(said),
                detail=error.message,
                status=error.http_status,
            )
            return _with_headers(response, error)
        messages = [{**each, "text": printable(each["text"])} for each in data["messages"]]
        return self._show_ticket(visit, order_id, {**ticket, "message": ""}, messages)

    def _show_ticket(
        self,
        visit: Visit,
        order_id: str,
        typed: _Form,
        messages: Sequence[Json] = (),
        *,
        alert: str = "",
        detail: str = "",
        status: int = 200,
    ) -> web.Response:
        values = {
            "order_id": order_id,
            "typed": typed,
            "messages": messages,
            "alert": alert,
            "detail": detail,
            "longest": _LONGEST_MESSAGE,
        }
        return self._renderer.page("support.html", visit.texts, values, status=status)

    # --- the sandbox ---

    async def _simulate(self, visit: Visit) -> web.Response:
        """Send the simulated payment that is due, or provoke a fault."""
        order = await self._find(visit)
        if _is_from_elsewhere(visit.request):
            return self._unchanged(visit, "refund.cross_site", 403)
        form = await _read_form(visit.request, _SANDBOX_FORM)
        if form is None:
            return self._unchanged(visit, "refund.unreadable", 400)
        try:
            if form["do"] == "fund":
                await self._fund(visit, order)
            else:
                client = visit.caller.client
                params = await swap.fault_params(form["do"], order, self._service, client)
                await self._run(visit, "sandbox.fault", params)
        except InputError as error:
            return await self._show(visit, sandbox_error=error.message, status=400)
        return _see_order(order.order_id)

    async def _fund(self, visit: Visit, order: Order) -> None:
        """Send what is due; nothing if it was sent before, as a second click finds."""
        with suppress(InvalidInput):
            await self._run(visit, "sandbox.fund", {"orderId": order.order_id})


def _is_from_elsewhere(request: web.Request) -> bool:
    """Return whether a browser says that a page of another site sent the form."""
    return request.headers.get("sec-fetch-site", "same-origin") != "same-origin"


async def _read_form(
    request: web.Request, names: tuple[str, ...], most_bytes: int = _FORM_BYTES
) -> _Form | None:
    """The form, its values stripped; None when it can't be read. Raises as read_body."""
    if media_type(request) != _FORM:
        return None
    body = await read_body(request, most_bytes)
    try:
        fields = parse_qs(body.decode(), strict_parsing=True, max_num_fields=len(names))
    except ValueError:
        return None
    if any(name not in names or len(values) > 1 for name, values in fields.items()):
        return None
    return {name: fields.get(name, [""])[0].strip() for name in names}


def _see_order(order_id: str, session: str = "") -> web.Response:
    """Lead to an order's page; with its session in the fragment, which no server gets to see."""
    fragment = f"#session={session}" if session else ""
    location = f"/orders/{order_id}{fragment}"
    headers = {"location": location, "cache-control": "no-store"}
    return web.Response(body=b"", status=303, headers=headers)


def _with_headers(response: web.Response, error: ServiceError | None) -> web.Response:
    response.headers.update(error_headers(error))
    return response


def _file(name: str, media_type: str, body: bytes) -> web.Response:
    headers = {
        "content-type": media_type,
        "content-disposition": f'attachment; filename="{name}"',
        "cache-control": "no-store, no-transform",
    }
    return web.Response(body=body, headers=headers)
