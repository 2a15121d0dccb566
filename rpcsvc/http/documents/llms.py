"""llms.txt: the overview in Markdown that links to everything else (the llms.txt convention).

What does not live here: the long version (llms_full.py).
"""

from __future__ import annotations

from rpcsvc.http.documents import links
from rpcsvc.http.documents.agent import description
from rpcsvc.http.documents.quickstart import flow
from rpcsvc.http.documents.text import escape_markdown, link, page
from rpcsvc.http.site import API_ROOT, RPC_PATH, Site

_LISTED_ABOVE = (links.LLMS, links.QUICKSTART, links.LLMS_FULL, links.OPENAPI, links.OPENRPC)


def llms_txt(site: Site) -> bytes:
    """llms.txt."""
    return page(
        title(site),
        description(site),
        summary(site),
        "## The flow",
        numbered(flow(site)),
        "## Start here",
        _links(site, (links.QUICKSTART, links.LLMS_FULL)),
        "## API descriptions",
        _links(site, (links.OPENAPI, links.OPENRPC)),
        "## Optional",
        _links(site, tuple(p for p in links.DESCRIPTIONS if p not in _LISTED_ABOVE)),
    )


def title(site: Site) -> str:
    """The page's only H1, and the summary that the convention wants as a quotation below it."""
    name, motto = escape_markdown(site.brand.name), escape_markdown(site.brand.motto)
    return f"# {name}\n\n> {motto or 'XMR and USDC swaps'}"


def summary(site: Site) -> str:
    """What has to be known before the first call, as a list."""
    token = (
        f"with the header `{links.RPC_TOKEN_HEADER}`"
        if site.rpc_needs_token
        else "for local clients only, since no token is set"
    )
    variable = ", the token in `AGENT_RPC_TOKEN`" if site.rpc_needs_token else ""
    return "\n".join(
        (
            f"- HTTPS API: {site.absolute(API_ROOT)}, JSON bodies, no API key.",
            f"- JSON-RPC 2.0: POST {site.absolute(RPC_PATH)}, methods `{site.brand.slug}.*`,"
            f" {token}.",
            f"- Command line: `{site.client} agent:capabilities {site.client_target}`{variable}.",
            "- `x2u` sends XMR and receives USDC; `u2x` sends USDC and receives XMR.",
            "- Amounts are decimal strings of what the user sends, never JSON numbers.",
            f"- Send the header `{links.IDEMPOTENCY_HEADER}` when you create an order: a repeated"
            " call then finds the order that the first one made.",
            "- Never fund an order on the user's behalf without asking them, and never change an"
            " address that they gave.",
        )
    )


def numbered(steps: list[str]) -> str:
    """A numbered list."""
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def document_list(site: Site) -> str:
    """Every document with its description."""
    return _links(site, tuple(links.DESCRIPTIONS))


def _links(site: Site, paths: tuple[str, ...]) -> str:
    return "\n".join(link(path, site.absolute(path), links.DESCRIPTIONS[path]) for path in paths)
