"""POST /mcp: MCP over Streamable HTTP, every answer one JSON document, no session and no stream.

It uses the same path as /rpc: the gate, ``JsonRpcServer``, the dispatcher. A token is optional;
without one the public rate limits apply.
Source: the MCP specification, revisions 2026-07-28, 2025-11-25 and 2025-06-18.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, cast
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from rpcsvc.errors import (
    ForbiddenOrigin,
    InternalError,
    InvalidParams,
    InvalidRequest,
    QuoteChanged,
    RateLimited,
    ServiceError,
    TlsRequired,
    UnknownMethod,
)
from rpcsvc.http.discovery import Document, DocumentCache
from rpcsvc.http.documents import links
from rpcsvc.http.edge import is_loopback_origin
from rpcsvc.http.gate import Caller, Gate
from rpcsvc.http.jsonrpc import JsonRpcServer, RpcMethod, error_object
from rpcsvc.http.mcp.interim import TRANSPORT, OrderTask, OrderTasks, UserApproval
from rpcsvc.http.mcp.revisions import (
    APPS,
    HANDSHAKE,
    SERVED,
    SERVER_INFO_KEY,
    TASKS,
    Headers,
    McpClient,
    client_of,
    is_stateless,
)
from rpcsvc.http.mcp.tools import (
    OrderApp,
    described,
    instructions,
    result_meta,
    rules_text,
    rules_uri,
    tools_of,
)
from rpcsvc.http.messages import error_headers, read_body, require_json, respond
from rpcsvc.http.operation_routes import (
    carry_out,
    end_with_caller,
    refused,
    require_no_query_of_rpc,
    waits,
)
from rpcsvc.http.site import Site
from rpcsvc.http.x402 import tool_result, with_meta_payment
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.params import DETAIL, LEAN
from rpcsvc.operations.service import Call, Effect, Operation, Reply
from rpcsvc.orders.quoted import FIELD
from rpcsvc.strict_json import Json

_TTL_MS: Final = 300_000
_MARKDOWN: Final = "text/markdown"
_CAPABILITIES: Final[Json] = {"tools": {}, "resources": {}, "extensions": {APPS: {}}}
_STATELESS_CAPABILITIES: Final[Json] = {**_CAPABILITIES, "extensions": {APPS: {}, TASKS: {}}}
_QUOTED: Final = ("direction", "chain", "amount", "receiveAmount", "funding")


McpMethod = Callable[[Caller, McpClient, "str | None", Json], Awaitable[Json]]

# 200 for clients with a handshake: to them 404 means that their session is over.
_WITHIN_HANDSHAKE: Final = (UnknownMethod, InvalidParams, InternalError, RateLimited)


class McpHttp:
    """The /mcp endpoint.

    Pages of ``origins``, of the site itself and of loopback origins may call it, no others.
    """

    def __init__(
        self,
        gate: Gate,
        dispatcher: Dispatcher,
        site: Site,
        documents: Iterable[DocumentCache],
        approval: UserApproval,
        order_app: OrderApp,
        origins: Iterable[str],
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._site = site
        self._tools = tools_of(site.operations)
        self._quote = site.operation("swap.quote")
        self._documents = {
            site.absolute(each.document.path): each
            for each in documents
            if each.document.path in links.DESCRIPTIONS
        }
        self._approval = approval
        self._app = order_app
        self._tasks = OrderTasks(site, dispatcher)
        home = urlsplit(site.url)
        self._origins = frozenset((*origins, f"{home.scheme}://{home.netloc}".lower()))
        self._body_bytes = site.limits.body_bytes
        self._server: JsonRpcServer[Caller] = JsonRpcServer(
            self._methods(),
            max_depth=site.limits.depth,
            describe_error=_described_error,
            request_id=Caller.request_id_for,
        )
        self._listed: bytes | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one POST: a request, or a notification, which gets 202."""
        try:
            caller = self._gate.admit(request)
        except TlsRequired as error:
            return refused(self._gate.unknown(request), error)
        try:
            self._require_origin(request.headers.get("origin"))
            self._identify(request, caller)
            require_no_query_of_rpc(request)
            require_json(request, self._body_bytes)
            body = await read_body(request, self._body_bytes)
            if body.lstrip()[:1] == b"[":
                raise InvalidRequest("MCP has no batches. Send one message at a time.")
        except ServiceError as error:
            return refused(caller, error)
        _, answer = await self._server.answer(body, caller, partial(end_with_caller, request))
        if answer is None:
            return respond(None, caller.request_id, status=202, headers=caller.headers)
        status = _status(caller.error, request.headers)
        return respond(answer, caller.request_id, status=status, headers=caller.headers)

    def _require_origin(self, origin: str | None) -> None:
        """Raise ForbiddenOrigin for a page of another site (DNS rebinding)."""
        if origin is None or origin.lower() in self._origins or is_loopback_origin(origin.lower()):
            return
        raise ForbiddenOrigin(
            "Pages of this origin may not call /mcp. The operator adds origins to allowed_origins.",
            details={"received": origin[:100]},
        )

    def _identify(self, request: web.Request, caller: Caller) -> None:
        """Read the caller's token and charge its budget. Raises Unauthorized and RateLimited."""
        self._gate.identify(request, caller)
        self._gate.charge(caller, "requests" if caller.budget is None else "rpc")

    # --- methods ---

    def _methods(self) -> dict[str, RpcMethod[Caller]]:
        everywhere: dict[str, McpMethod] = {
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "resources/list": self._list_resources,
            "resources/templates/list": self._list_templates,
            "resources/read": self._read_resource,
        }
        handshake: dict[str, McpMethod] = {"initialize": self._initialize, "ping": self._ping}
        stateless: dict[str, McpMethod] = {
            "server/discover": self._discover,
            "tasks/get": self._get_task,
            "tasks/update": self._acknowledge_task,
            "tasks/cancel": self._acknowledge_task,
        }
        return {
            **{name: self._method(name, answer, None) for name, answer in everywhere.items()},
            **{name: self._method(name, answer, False) for name, answer in handshake.items()},
            **{name: self._method(name, answer, True) for name, answer in stateless.items()},
        }

    def _method(self, name: str, answer: McpMethod, stateless: bool | None) -> RpcMethod[Caller]:
        """A method of all revisions (None), or of those with or without a handshake only."""

        async def call(caller: Caller, hint: str | None, params: Json) -> Any:
            caller.request_id_for(hint)
            headers = cast("Headers", caller.given)
            client = client_of(name, params, headers)
            if stateless is not None and client.is_stateless is not stateless:
                raise UnknownMethod(f'The revision of MCP in use has no method "{name}".')
            result = await answer(caller, client, hint, params)
            if not client.is_stateless:
                return result
            meta = {**result.get("_meta", {}), SERVER_INFO_KEY: self._server_info}
            return {"resultType": "complete", **result, "_meta": meta}

        is_call = name == "tools/call"
        waiting = {"waits": self._waits} if is_call else {}
        return RpcMethod(call, runs_as_notification=False, **waiting)

    def _waits(self, params: Json) -> bool:
        """Return whether a tool's call waits for an event and changes nothing."""
        operation, arguments = self._tools.get(str(params.get("name"))), params.get("arguments")
        return operation is not None and isinstance(arguments, dict) and waits(operation, arguments)

    @property
    def _server_info(self) -> Json:
        site = self._site
        return {
            "name": site.brand.slug,
            "title": site.brand.name,
            "version": site.version,
            "websiteUrl": site.url,
        }

    async def _initialize(
        self, _caller: Caller, _client: McpClient, _hint: str | None, params: Json
    ) -> Json:
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in HANDSHAKE else HANDSHAKE[0],
            "capabilities": _CAPABILITIES,
            "serverInfo": self._server_info,
            "instructions": instructions(self._site),
        }

    async def _ping(
        self, _caller: Caller, _client: McpClient, _hint: str | None, _params: Json
    ) -> Json:
        return {}

    async def _discover(
        self, _caller: Caller, _client: McpClient, _hint: str | None, _params: Json
    ) -> Json:
        return {
            "supportedVersions": list(SERVED),
            "capabilities": _STATELESS_CAPABILITIES,
            "instructions": instructions(self._site),
            **_kept(_TTL_MS),
        }

    async def _list_tools(
        self, _caller: Caller, client: McpClient, _hint: str | None, params: Json
    ) -> Json:
        _require_first_page(params)
        if self._listed is None:
            rows = [(op, op.tool) for op in self._tools.values()]
            meta = self._app.tool_meta
            found = [described(self._site, op, tool, meta) for op, tool in rows if tool is not None]
            self._listed = orjson.dumps(found)
        return {"tools": orjson.Fragment(self._listed), **_hints(client, _TTL_MS)}

    async def _list_resources(
        self, _caller: Caller, client: McpClient, _hint: str | None, params: Json
    ) -> Json:
        _require_first_page(params)
        found = [_resource(uri, each.document) for uri, each in self._documents.items()]
        return {"resources": [*found, self._app.resource()], **_hints(client, _TTL_MS)}

    async def _list_templates(
        self, _caller: Caller, client: McpClient, _hint: str | None, params: Json
    ) -> Json:
        _require_first_page(params)
        template = {
            "uriTemplate": rules_uri(self._site, "{tool}"),
            "name": "rules",
            "description": "the rules of a tool: effects, needs, limits, a second call, failure",
            "mimeType": _MARKDOWN,
        }
        return {"resourceTemplates": [template], **_hints(client, _TTL_MS)}

    async def _read_resource(
        self, _caller: Caller, client: McpClient, _hint: str | None, params: Json
    ) -> Json:
        uri = params.get("uri")
        if uri == self._app.uri:
            return {"contents": [self._app.contents()], **_hints(client, _TTL_MS)}
        for name, operation in self._tools.items():
            if uri == rules_uri(self._site, name) and operation.tool is not None:
                text = rules_text(self._site, operation, operation.tool)
                rules = {"uri": uri, "mimeType": _MARKDOWN, "text": text}
                return {"contents": [rules], **_hints(client, _TTL_MS)}
        found = self._documents.get(uri) if isinstance(uri, str) else None
        if found is None:
            raise InvalidParams(
                "There is no resource of this uri. resources/list names all.",
                details={"uri": str(uri)[:200]},
            )
        document = found.document
        text = found.rendering().body.decode()
        is_shared = document.is_shared
        hints = _hints(client, document.kept_seconds * 1000 if is_shared else 0, shared=is_shared)
        return {"contents": [{"uri": uri, "mimeType": document.media_type, "text": text}], **hints}

    # --- tools/call ---

    async def _call_tool(
        self, caller: Caller, client: McpClient, hint: str | None, params: Json
    ) -> Json:
        operation, arguments = self._tool_and_arguments(params)
        if operation.payable:
            arguments = with_meta_payment(params, arguments)
        if client.can_take_tasks and self._tasks.is_wait(operation, arguments):
            return await self._begin_task(caller, client, hint, arguments)
        if not operation.idempotent:
            reply = await carry_out(
                self._dispatcher, operation, caller, hint, arguments, transport=TRANSPORT
            )
            return _result(reply, client, operation)
        try:
            if caller.budget is None:
                self._gate.charge(caller, "orders")
            self._gate.charge_order(caller)
            agreed = None
            if client.can_ask_user and operation.effect is Effect.MOVES_MONEY:
                agreed = self._approval.agreed(params, arguments)
                if agreed is None:
                    return await self._ask(caller, hint, arguments)
        except InvalidParams:
            raise
        except ServiceError as error:
            call = Call(
                caller.request_id_for(hint),
                caller.namespace,
                known=caller.known,
                transport=TRANSPORT,
            )
            caller.headers.update(error_headers(error))
            return _result(self._dispatcher.refuse(operation.name, error, call, arguments))
        reply = await carry_out(
            self._dispatcher,
            operation,
            caller,
            hint,
            dict(arguments),
            transport=TRANSPORT,
            keyed_by_terms=True,
            held_to=agreed,
        )
        # A caller that sent its own digest gets the error; the user is not asked.
        if agreed and isinstance(reply.error, QuoteChanged) and FIELD not in arguments:
            return await self._ask(caller, hint, arguments)
        return _result(reply, client, operation)

    # --- tasks ---

    async def _begin_task(
        self, caller: Caller, client: McpClient, hint: str | None, arguments: Json
    ) -> Json:
        """The task for a call that waits; the answer itself if there is nothing to wait for."""
        begun = await self._tasks.begin(caller, hint, arguments)
        if isinstance(begun, OrderTask) and not begun.is_over:
            return {"resultType": "task", **begun.view}
        reply = begun.reply if isinstance(begun, OrderTask) else begun
        return _result(reply, client, self._tasks.operation)

    async def _get_task(
        self, caller: Caller, client: McpClient, hint: str | None, params: Json
    ) -> Json:
        client.require_tasks()
        task = await self._tasks.get(caller, hint, params)
        if not task.is_over:
            return task.view
        return {**task.view, "result": _result(task.reply, client, self._tasks.operation)}

    async def _acknowledge_task(
        self, caller: Caller, client: McpClient, hint: str | None, params: Json
    ) -> Json:
        """Acknowledge an update (no task needs input) or a cancellation (which ends no swap)."""
        client.require_tasks()
        await self._tasks.get(caller, hint, params)
        return {}

    def _tool_and_arguments(self, params: Json) -> tuple[Operation, Json]:
        """Return the tool's operation and its arguments; answers are lean unless they say full.

        Raises InvalidParams for an unknown tool, and for arguments that are no object.
        """
        name, arguments = params.get("name"), params.get("arguments", {})
        operation = self._tools.get(name) if isinstance(name, str) else None
        if operation is None:
            near = get_close_matches(str(name)[:48], self._tools, n=1, cutoff=0.4)
            hint = f" The nearest is {near[0]}." if near else ""
            raise InvalidParams(
                f"There is no such tool.{hint} tools/list names all.",
                details={"tools": list(self._tools)},
            )
        if not isinstance(arguments, dict):
            raise InvalidParams("arguments must be an object, such as {}.")
        detail = arguments.get(DETAIL)
        return operation, {**arguments, DETAIL: LEAN if detail is None else detail}

    async def _ask(self, caller: Caller, hint: str | None, arguments: Json) -> Json:
        """Have the client ask its user to accept the current terms."""
        asked: Json = {name: arguments[name] for name in _QUOTED if name in arguments}
        reply = await carry_out(
            self._dispatcher, self._quote, caller, hint, asked, transport=TRANSPORT
        )
        if reply.error is not None:
            return _result(reply)
        data = orjson.loads(reply.body)["data"]
        return self._approval.question(arguments, data["quote"], data[FIELD])


def _result(
    reply: Reply, client: McpClient | None = None, operation: Operation | None = None
) -> Json:
    """A CallToolResult: the envelope as structured content, and as text for older clients.

    For clients that can show the app of an order, ``_meta`` has the data that it needs.
    """
    result: Json = {
        "content": [{"type": "text", "text": reply.body.decode()}],
        "structuredContent": orjson.Fragment(reply.body),
        "isError": reply.error is not None,
    }
    if client and client.can_show_apps and operation and operation.tool and operation.tool.has_app:
        result["_meta"] = result_meta(reply)
    return tool_result(reply, result)


def _resource(uri: str, document: Document) -> Json:
    return {
        "uri": uri,
        "name": document.path.rpartition("/")[2],
        "description": links.DESCRIPTIONS[document.path],
        "mimeType": document.media_type,
    }


def _require_first_page(params: Json) -> None:
    """Raise InvalidParams for a cursor: every list is one page."""
    if params.get("cursor") is not None:
        raise InvalidParams("There is no such page: every list here is whole. Leave cursor out.")


def _kept(ttl_ms: int, *, shared: bool = True) -> Json:
    return {"ttlMs": ttl_ms, "cacheScope": "public" if shared else "private"}


def _hints(client: McpClient, ttl_ms: int, *, shared: bool = True) -> Json:
    """The time for which a client may keep a result; revisions with a handshake don't know it."""
    return _kept(ttl_ms, shared=shared) if client.is_stateless else {}


def _described_error(caller: Caller, error: ServiceError, request_id: str | None) -> Json:
    """The error object, its details beside the code, where MCP looks for them."""
    caller.error = error
    caller.headers.update(error_headers(error))
    described_error = error_object(error, request_id)
    described_error["data"] |= described_error["data"].pop("details", {})
    return described_error


def _status(error: ServiceError | None, headers: Headers) -> int:
    if error is None or (isinstance(error, _WITHIN_HANDSHAKE) and not is_stateless(headers)):
        return 200
    return error.http_status
