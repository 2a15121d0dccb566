"""Documents in standard formats: security.txt, catalogues, MCP card, robots.txt, sitemap.xml."""

from __future__ import annotations

import html
from urllib.parse import quote

from rpcsvc.clock import DAY_MS, iso8601
from rpcsvc.http.documents import links
from rpcsvc.http.documents.links import mail_domain
from rpcsvc.http.mcp.revisions import SERVED
from rpcsvc.http.site import API_ROOT, MCP_PATH, RPC_PATH, Site
from rpcsvc.strict_json import Json

# RFC 9116, section 2.5.5, recommends less than a year.
SECURITY_TXT_DAYS = 180
CATALOG_PROFILE = "https://www.rfc-editor.org/info/rfc9727"
CATALOG_TYPE = f'application/linkset+json; profile="{CATALOG_PROFILE}"'
_JSON = "application/json"
_CARD_SCHEMA = "https://static.modelcontextprotocol.io/schemas/v1/server-card.schema.json"
SERVER_CARD_TYPE = "application/mcp-server-card+json"
AI_CATALOG_TYPE = "application/ai-catalog+json"


def security_txt(site: Site, now: int) -> bytes:
    """security.txt (RFC 9116). ``now`` in milliseconds; ``Expires`` moves once a day, at midnight
    UTC, so that the document stays the same in between.
    """
    expires = (now // DAY_MS + SECURITY_TXT_DAYS) * DAY_MS
    lines = [
        f"Contact: {security_contact(site)}",
        f"Expires: {iso8601(expires)}",
        "Preferred-Languages: en",
    ]
    # A web URI in this file must be https (section 2.5): on a plain local site there is none.
    if site.url.startswith("https://"):
        lines.append(f"Canonical: {site.absolute(links.SECURITY_TXT)}")
    return "".join(f"{line}\r\n" for line in lines).encode()


def security_contact(site: Site) -> str:
    """The operator's contact; without one, the home page, which says how to open a ticket.

    RFC 9116 requires a contact, and https for a web address. A plain HTTP site is a local one:
    there the mailbox of RFC 2142 stands in.
    """
    if site.contact is not None:
        return site.contact
    if site.url.startswith("https://"):
        return site.absolute(links.HOME)
    return "mailto:security@" + quote(mail_domain(site.domain), safe="")


def api_catalog(site: Site) -> Json:
    """The linkset of RFC 9727: the three APIs, and for each its descriptions and status."""
    apis = (
        (API_ROOT, links.OPENAPI, _JSON, links.HEALTH),
        (RPC_PATH, links.OPENRPC, _JSON, "/health"),
        (MCP_PATH, links.SERVER_CARD, SERVER_CARD_TYPE, "/health"),
    )
    return {
        "linkset": [
            {
                "anchor": site.absolute(links.API_CATALOG),
                "item": [{"href": site.absolute(path)} for path, *_ in apis],
            },
            *(_api(site, *api) for api in apis),
        ]
    }


def _api(site: Site, path: str, described_by: str, described_as: str, health: str) -> Json:
    def target(path: str, media_type: str) -> list[Json]:
        return [{"href": site.absolute(path), "type": media_type}]

    return {
        "anchor": site.absolute(path),
        "service-desc": target(described_by, described_as),
        "service-doc": target(links.LLMS_FULL, "text/plain"),
        "service-meta": target(links.AGENT, _JSON),
        "status": target(health, _JSON),
    }


def api_catalog_link(site: Site) -> str:
    """The Link header of RFC 9727, section 2: the same relations without a body."""
    rows = (
        (links.API_CATALOG, "api-catalog"),
        (API_ROOT, "item"),
        (RPC_PATH, "item"),
        (MCP_PATH, "item"),
    )
    return ", ".join(f'<{site.absolute(path)}>; rel="{relation}"' for path, relation in rows)


def server_card(site: Site) -> Json:
    """The MCP server card (SEP-2127): identity and endpoint. Tools are listed after connecting."""
    return {
        "$schema": _CARD_SCHEMA,
        "name": f"{_namespace(site.domain)}/{site.brand.slug}",
        "title": site.brand.name[:100],
        "description": "Swaps XMR for USDC and USDC for XMR on behalf of a user.",
        "version": site.version,
        "websiteUrl": site.absolute(links.HOME),
        "remotes": [
            {
                "type": "streamable-http",
                "url": site.absolute(MCP_PATH),
                "supportedProtocolVersions": list(SERVED),
            }
        ],
    }


def _namespace(domain: str) -> str:
    """``swap.example.com`` as ``com.example.swap``; an IP address unchanged, without colons."""
    if domain.replace(".", "").isdigit() or ":" in domain:
        return domain.replace(":", "-")
    return ".".join(reversed(domain.split(".")))


def ai_catalog(site: Site) -> Json:
    """The AI catalogue of the domain: one entry, the MCP server card."""
    return {
        "specVersion": "1.0",
        "entries": [
            {
                "identifier": f"urn:air:{site.domain}:mcp:{site.brand.slug}",
                "type": SERVER_CARD_TYPE,
                "url": site.absolute(links.SERVER_CARD),
            }
        ],
    }


def robots_txt(site: Site) -> bytes:
    """robots.txt (RFC 9309): documents yes; calls and orders no."""
    allowed = [path for path in (*links.DESCRIPTIONS, *links.ALIASES) if path != links.ROBOTS]
    lines = [
        "User-agent: *",
        *(f"Allow: {path}" for path in allowed),
        f"Allow: {links.endpoints(site)['capabilities']}",
        f"Disallow: {API_ROOT}/",
        f"Disallow: {RPC_PATH}",
        f"Disallow: {MCP_PATH}",
        "",
        f"Sitemap: {site.absolute(links.SITEMAP)}",
    ]
    return ("\n".join(lines) + "\n").encode()


def sitemap(site: Site) -> bytes:
    """sitemap.xml: the home page and every document once, aliases left out."""
    paths = [links.HOME, *(p for p in links.DESCRIPTIONS if p not in (links.SITEMAP, links.ROBOTS))]
    entries = [f"  <url><loc>{html.escape(site.absolute(path))}</loc></url>" for path in paths]
    return "\n".join(
        (
            '<?xml version="1.0" encoding="UTF-8"?>',
            '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">',
            *entries,
            "</urlset>",
            "",
        )
    ).encode()


def logo() -> bytes:
    """Two arrows, one each way."""
    return (
        b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" role="img"'
        b' aria-label="swap"><rect width="64" height="64" rx="12" fill="#1b2a41"/>'
        b'<path d="M14 24h30m0 0-9-9m9 9-9 9M50 42H20m0 0 9-9m-9 9 9 9" fill="none"'
        b' stroke="#f6f7f9" stroke-width="5" stroke-linecap="round" stroke-linejoin="round"/>'
        b"</svg>\n"
    )
