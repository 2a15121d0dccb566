"""Recorded calls in Markdown: the request as it is sent, and its answer.

What does not live here: which calls are shown where (llms_full.py), recording them (recording.py).
"""

from __future__ import annotations

from urllib.parse import urlencode

from rpcsvc.http.documents import links
from rpcsvc.http.documents.recording import RPC_EXAMPLE_KEY, Exchange
from rpcsvc.http.documents.text import code, json_text
from rpcsvc.http.site import API_ROOT, RPC_PATH, Site
from rpcsvc.operations.operation import option_of


def show(site: Site, exchange: Exchange) -> str:
    """One call over HTTPS and its answer."""
    answer = code(json_text(exchange.answer), "json")
    return f"{code(_request(site, exchange), 'http')}\n\nAnswer:\n\n{answer}"


def _request(site: Site, exchange: Exchange) -> str:
    operation = links.operation_named(site, exchange.operation)
    params = dict(exchange.params)
    path = operation.path or ""
    for name in [name for name in params if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", str(params.pop(name)))
    query = f"?{urlencode(params)}" if operation.method == "GET" and params else ""
    host = site.url.partition("://")[2]
    lines = [f"{operation.method} {API_ROOT}{path}{query} HTTP/1.1", f"host: {host}"]
    lines.append(f"x-request-id: {exchange.name}")
    if exchange.key is not None:
        lines.append(f"{links.IDEMPOTENCY_HEADER}: {exchange.key}")
    if operation.method == "POST":
        lines += ["content-type: application/json", "", json_text(params)]
    return "\n".join(lines)


def show_elsewhere(site: Site, exchange: Exchange) -> str:
    """The same call over JSON-RPC and on the command line."""
    operation = links.operation_named(site, exchange.operation)
    key = RPC_EXAMPLE_KEY if site.rpc_needs_token else exchange.key
    message = {
        "jsonrpc": "2.0",
        "id": exchange.name,
        "method": site.rpc_method(operation),
        "params": {**exchange.params, links.IDEMPOTENCY_HEADER: key},
    }
    token = f"\n{links.RPC_TOKEN_HEADER}: <the operator's token>" if site.rpc_needs_token else ""
    request = (
        f"POST {RPC_PATH} HTTP/1.1\nhost: {site.url.partition('://')[2]}"
        f"\ncontent-type: application/json{token}\n\n{json_text(message)}"
    )
    options = " ".join(f"{option_of(name)} {value}" for name, value in exchange.params.items())
    command = (
        f"{site.client} {operation.command} {site.client_target} {options}"
        f" --idempotency-key {key} --request-id {exchange.name}"
    )
    return "\n\n".join(
        (
            code(request, "http"),
            "The envelope is in `result`. Protocol faults are JSON-RPC errors; what the operation"
            " itself finds is a result with `ok: false`.",
            code(command, "sh"),
            f"{_on_the_token(site)}The command prints one envelope, whatever the exit status: 0"
            " ok, 1 `ok: false`, 2 usage error (`error.code` is `invalid_request`), 3 no answer of"
            " the service (`unavailable`): the call may have been carried out. With 2 and 3"
            " `data.network` is null.",
        )
    )


def _on_the_token(site: Site) -> str:
    if not site.rpc_needs_token:
        return ""
    return (
        "Put the operator's token into the variable `AGENT_RPC_TOKEN` first. With a token keys are"
        " apart from those of HTTPS: under its own key this is another order than the one above,"
        " the same for JSON-RPC and the command. "
    )
