"""The pages for people: the site root, /status, and the page of each order with its refund form.

Neither a cookie nor a loopback address authorizes a caller. The form carries the order's secret,
so another site can't submit it for a reader; the secret is checked first. A page shows the
address again before it is set, since it can't be changed afterwards.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from urllib.parse import parse_qs

import orjson
from aiohttp import web

from rpcsvc.domain.order import REFUND_ADDRESS, Order, OrderStatus
from rpcsvc.errors import InputError, OrderNotFound, RateLimited, ServiceError, Unavailable
from rpcsvc.http.documents.links import HOME
from rpcsvc.http.gate import CALLER, Caller, Gate
from rpcsvc.http.health import HealthRoutes
from rpcsvc.http.messages import JSON, error_headers, media_type, read_body
from rpcsvc.http.pages.checkout import CheckoutWriter
from rpcsvc.http.pages.front import home_values, status_values
from rpcsvc.http.pages.rendering import Catalogues, Renderer, Texts
from rpcsvc.http.site import Site
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.models import StatusResult
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.session import read_untried
from rpcsvc.operations.swap import find_funding
from rpcsvc.operations.views import status_data
from rpcsvc.orders.ports.venue import Confirmations
from rpcsvc.strict_json import dumps

ORDER_PATH: Final = "/orders/{orderId}"
_FORM: Final = "application/x-www-form-urlencoded"
_FORM_BYTES: Final = 4_096
_FIELDS: Final = ("address", "secret", "confirmed")


class Visit(NamedTuple):
    """An admitted request for a page, and the language of its answer."""

    request: web.Request
    caller: Caller
    texts: Texts


class RefundForm(NamedTuple):
    """The submitted form; missing fields are empty."""

    address: str
    secret: str
    confirmed: str


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
        self._refund_address = site.operation("swap.refundAddress")

    def routes(self) -> list[web.RouteDef]:
        """All routes of the pages."""
        return [
            web.get(HOME, self._around(self._home), allow_head=True),
            web.get("/status", self._around(self._status_page), allow_head=True),
            web.get(ORDER_PATH, self._around(self._order), allow_head=True),
            web.get(f"{ORDER_PATH}/refund", self._around(self._back_to_order), allow_head=True),
            web.post(f"{ORDER_PATH}/refund", self._around(self._refund)),
            web.get(f"{ORDER_PATH}/attestation", self._around(self._attestation)),
            web.get(f"{ORDER_PATH}/receipt", self._around(self._receipt)),
        ]

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
        return self._renderer.page("home.html", visit.texts, values)

    async def _status_page(self, visit: Visit) -> web.Response:
        """The answer of /health, status code included; details only for insiders."""
        checks = await self._health.checks()
        is_insider = self._gate.is_insider(visit.request, visit.caller)
        values = await status_values(self._service, visit.texts, checks, is_insider=is_insider)
        status = 200 if values["is_well"] else 503
        return self._renderer.page("status.html", visit.texts, values, status=status)

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
        status: int = 200,
    ) -> web.Response:
        order, is_paying = await self._find_funding(visit)
        confirmations = await self._confirmations(order)
        now = self._service.clock.now_ms()
        views = self._service.views
        writer = CheckoutWriter(
            self._site, views, visit.texts, order, confirmations, now, is_paying=is_paying
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
        response.headers.update(error_headers(error))
        return response

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
        """Redirect a GET of the form's address to the page of the order."""
        return _see_order(await self._find(visit))

    async def _refund(self, visit: Visit) -> web.Response:
        """Handle the form in two steps: show the address again, then set it."""
        order = await self._find(visit)
        if visit.request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return self._unchanged(visit, "refund.cross_site", 403)
        form = await _read_form(visit.request)
        if form is None:
            return self._unchanged(visit, "refund.unreadable", 400)
        given = form.secret.strip().lower().encode()
        if not hmac.compare_digest(order.terms.session_id.encode(), given):
            wrong = visit.texts.say("refund.wrong_secret")
            return await self._show(visit, error=wrong, address=form.address, status=403)
        if self._status(order).action_required != REFUND_ADDRESS:
            return self._unchanged(visit, "refund.not_waiting", 409)
        try:
            return await self._read_and_take(visit, order, form)
        except InputError as error:
            return await self._show(
                visit,
                error=visit.texts.say("refund.address_refused"),
                detail=error.message,
                address=form.address,
                status=400,
            )

    async def _read_and_take(self, visit: Visit, order: Order, form: RefundForm) -> web.Response:
        """Read and handle the form. Raises InputError for an address that is refused."""
        address = await read_untried(form.address.strip(), order, self._service, field="address")
        if form.confirmed != "yes":
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
        call = Call(visit.caller.request_id, client=visit.caller.client, transport="page")
        reply = await self._dispatcher.run(self._refund_address, params, call)
        if reply.error is not None:
            raise reply.error
        if not orjson.loads(reply.body)["data"]["refundAddress"]["accepted"]:
            return self._unchanged(visit, "refund.taken", 409)
        return _see_order(order)


async def _read_form(request: web.Request) -> RefundForm | None:
    """The form; None when it can't be read. Raises as read_body."""
    if media_type(request) != _FORM:
        return None
    body = await read_body(request, _FORM_BYTES)
    try:
        fields = parse_qs(body.decode(), strict_parsing=True, max_num_fields=len(_FIELDS))
    except ValueError:
        return None
    if any(name not in _FIELDS or len(values) > 1 for name, values in fields.items()):
        return None
    return RefundForm(*(fields.get(name, [""])[0] for name in _FIELDS))


def _see_order(order: Order) -> web.Response:
    headers = {"location": f"/orders/{order.order_id}", "cache-control": "no-store"}
    return web.Response(body=b"", status=303, headers=headers)


def _file(name: str, media_type: str, body: bytes) -> web.Response:
    headers = {
        "content-type": media_type,
        "content-disposition": f'attachment; filename="{name}"',
        "cache-control": "no-store, no-transform",
    }
    return web.Response(body=body, headers=headers)
