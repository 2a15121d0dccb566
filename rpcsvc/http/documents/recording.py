"""Swaps as a sandbox answered them (``tools/recorder.py``), and their form in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import asdict

from rpcsvc.http.documents.links import code, json_text
from rpcsvc.http.gate import RPC_TOKEN_HEADER
from rpcsvc.http.site import API_ROOT, RPC_PATH, Site
from rpcsvc.operations import table
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.service import option_of
from rpcsvc.settings import Settings
from rpcsvc.strict_json import Json

FILE = "recording.json"
# The site of the service that was recorded: shown as the reader's own.
RECORDED_AT = Settings().effective_site_url
EXAMPLE_KEY = "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c05"
# Placeholder key of a second order, where JSON-RPC and HTTPS keys are separate namespaces.
RPC_EXAMPLE_KEY = "7b1d9e44-2c8f-4f6a-8d53-90c4a1e2b6f8"


class RecordedCall(Struct, frozen=True):
    """A call and its answer. ``name`` is also the request id that the call was made under."""

    name: str
    operation: str
    params: Json
    key: str | None
    answer: Json


Recording = Mapping[str, RecordedCall]


def on_network(recording: Recording, network: str) -> Recording:
    """The recording, with the callers' addresses converted to another network."""
    return {
        name: RecordedCall(**table.on_network(asdict(exchange), network))
        for name, exchange in recording.items()
    }


def of_site(site: Site, document: Json) -> Json:
    """A document whose recorded answers have this site's network and URL."""
    on_its_network = json.dumps(table.on_network(document, site.network))
    given: Json = json.loads(on_its_network.replace(RECORDED_AT, site.url))
    return given


@lru_cache(maxsize=1)
def load() -> Recording:
    """The recording that is part of the package."""
    text = (resources.files(__package__) / FILE).read_text(encoding="utf-8")
    return {row["name"]: RecordedCall(**row) for row in json.loads(text)}


def show(site: Site, exchange: RecordedCall) -> str:
    """A call over HTTPS and its answer."""
    answer = code(json_text(exchange.answer).replace(RECORDED_AT, site.url), "json")
    return f"{code(_request(site, exchange), 'http')}\n\nAnswer:\n\n{answer}"


def _request(site: Site, exchange: RecordedCall) -> str:
    operation = site.operation(exchange.operation)
    params = dict(exchange.params)
    path = operation.path or ""
    for name in [name for name in params if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", str(params.pop(name)))
    query = f"?{urlencode(params)}" if operation.method == "GET" and params else ""
    host = site.url.partition("://")[2]
    lines = [f"{operation.method} {API_ROOT}{path}{query} HTTP/1.1", f"host: {host}"]
    lines.append(f"x-request-id: {exchange.name}")
    if exchange.key is not None:
        lines.append(f"{IDEMPOTENCY_KEY}: {exchange.key}")
    if operation.method == "POST":
        lines += ["content-type: application/json", "", json_text(params)]
    return "\n".join(lines)


def show_elsewhere(site: Site, exchange: RecordedCall) -> str:
    """The recorded call as it looks over JSON-RPC and on the command line."""
    operation = site.operation(exchange.operation)
    key = RPC_EXAMPLE_KEY if site.rpc_needs_token else exchange.key
    message = {
        "jsonrpc": "2.0",
        "id": exchange.name,
        "method": site.rpc_method(operation),
        "params": {**exchange.params, IDEMPOTENCY_KEY: key},
    }
    token = f"\n{RPC_TOKEN_HEADER}: <the operator's token>" if site.rpc_needs_token else ""
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
