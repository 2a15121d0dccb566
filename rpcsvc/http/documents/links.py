"""The paths of the documents, their links to each other and to the API, and the Markdown to write
them in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rpcsvc.http.site import API_ROOT, Site
from rpcsvc.operations.service import Operation

HOME = "/"
LOGO = "/logo.svg"
QUICKSTART = API_ROOT + "/agent/quickstart"
HEALTH = API_ROOT + "/health"
AGENT = "/.well-known/agent.json"
AGENT_ALIAS = "/agent.json"
AI_PLUGIN = "/.well-known/ai-plugin.json"
SECURITY_TXT = "/.well-known/security.txt"
API_CATALOG = "/.well-known/api-catalog"
AI_CATALOG = "/.well-known/ai-catalog.json"
SERVER_CARD = "/.well-known/mcp/server-card.json"
SERVER_CARD_ALIAS = "/mcp/server-card"
JWKS = "/.well-known/jwks.json"
OPENAPI = "/openapi.json"
OPENAPI_WELL_KNOWN = "/.well-known/openapi.json"
OPENRPC = "/openrpc.json"
LLMS = "/llms.txt"
LLMS_FULL = "/llms-full.txt"
RATES_XML = "/rates.xml"
RATES_JSON = "/rates.json"
ROBOTS = "/robots.txt"
SITEMAP = "/sitemap.xml"

# The documents with a one-line description, in the order in which a new user reads them.
DESCRIPTIONS: dict[str, str] = {
    QUICKSTART: "the first call: what this is, the flow, two requests that work as they stand",
    LLMS_FULL: "the whole API on one page, with real requests and answers",
    LLMS: "a short overview that links to the rest",
    OPENAPI: "OpenAPI 3.1 description of the HTTPS API",
    OPENRPC: "OpenRPC description of the JSON-RPC methods",
    AGENT: "machine-readable metadata: transports, operations with schemas, signing, limits",
    JWKS: "the public keys that responses are signed with",
    AI_PLUGIN: "plugin manifest that points to the OpenAPI description",
    SERVER_CARD: "MCP server card: where MCP is served, and in which revisions",
    AI_CATALOG: "AI catalogue that points to the server card",
    API_CATALOG: "API catalog (RFC 9727)",
    RATES_XML: "amounts and rates on offer now, as rate listings read them",
    RATES_JSON: "the same in JSON",
    SECURITY_TXT: "where to report a security problem (RFC 9116)",
    SITEMAP: "the list of these documents for crawlers",
    ROBOTS: "what crawlers may read",
}
ALIASES: dict[str, str] = {
    AGENT_ALIAS: AGENT,
    OPENAPI_WELL_KNOWN: OPENAPI,
    SERVER_CARD_ALIAS: SERVER_CARD,
}

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|])")


def quickstart_links(site: Site) -> dict[str, str]:
    """``links`` of the quickstart: all fifteen keys of spec 2.2, absolute."""
    paths = {
        "website": HOME,
        "docs": LLMS_FULL,
        "health": HEALTH,
        "capabilities": endpoints(site)["capabilities"],
        "openapi": OPENAPI,
        "openapiWellKnown": OPENAPI_WELL_KNOWN,
        "llms": LLMS,
        "llmsFull": LLMS_FULL,
        "jwks": JWKS,
        "aiPlugin": AI_PLUGIN,
        "securityTxt": SECURITY_TXT,
        "agentDiscovery": AGENT,
        "agentDiscoveryAlias": AGENT_ALIAS,
        "robotsTxt": ROBOTS,
        "sitemap": SITEMAP,
    }
    return {key: site.absolute(path) for key, path in paths.items()}


def endpoints(site: Site) -> dict[str, str]:
    """``quickstart.endpoints`` (spec 2.2): each operation's short name and its path."""
    named = {
        _short_name(operation): API_ROOT + operation.path
        for operation in site.operations
        if operation.path and not operation.sandbox_only
    }
    return {"quickstart": QUICKSTART, **named}


def _short_name(operation: Operation) -> str:
    """``swap.plan`` is ``plan``; ``support.create`` is ``support``, which the interface names."""
    group, _, verb = operation.name.partition(".")
    if operation.name == "support.get":
        return "ticket"
    return verb if group == "swap" else group


# --- Markdown ----------------------------------------------------------------------------------


def escape_markdown(text: str) -> str:
    """``text`` so that no character of it is read as Markdown."""
    return _SPECIAL.sub(r"\\\1", text)


def link(label: str, url: str, note: str = "") -> str:
    """A list item with a link, in the form of the llms.txt convention."""
    return f"- [{escape_markdown(label)}]({url})" + (f": {note}" if note else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. Cells may hold Markdown, but no line breaks; ``|`` is escaped here."""
    lines = [_row(columns), "|" + "---|" * len(columns)]
    lines += [_row([str(cell).replace("|", "\\|") for cell in row]) for row in rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(text: str, language: str = "") -> str:
    """A code block. ``text`` must not hold a fence of its own."""
    return f"```{language}\n{text}\n```"


def json_text(value: Any) -> str:
    """JSON for people to read."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def page(*parts: str) -> bytes:
    """Parts of a Markdown page, a blank line between them."""
    return ("\n\n".join(part for part in parts if part) + "\n").encode()


def mail_domain(domain: str) -> str:
    """``domain`` as a mailbox has it: an IP address goes into brackets (RFC 5321, 4.1.3)."""
    if ":" in domain:
        return f"[IPv6:{domain}]"
    return f"[{domain}]" if domain.replace(".", "").isdigit() else domain
