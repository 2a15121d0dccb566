"""The quickstart: what an agent reads first (spec 2.2).

What does not live here: the description of every operation (agent.py, llms_full.py).
"""

from __future__ import annotations

from typing import Any

from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import Chain
from rpcsvc.http.documents import links
from rpcsvc.http.documents.text import escape_markdown
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.examples import on_network
from rpcsvc.operations.operation import Operation


def quickstart(site: Site, generated_at: int, key: str) -> Json:
    """The quickstart response. ``generated_at`` in milliseconds since the epoch."""
    brand = site.brand
    return {
        "ok": True,
        "operation": "quickstart",
        "brand": {"name": brand.name, "motto": brand.motto, "domain": site.domain},
        "trust": {
            "publicApi": True,
            "perUserApiKeyRequired": False,
            "tlsRequired": True,
            "nonCustodialFlow": True,
            "idempotencyHeader": links.IDEMPOTENCY_HEADER,
        },
        "links": links.quickstart_links(site),
        "quickstart": {"flow": flow(site), "endpoints": links.endpoints(site)},
        "examples": examples(site, key),
        "generatedAt": iso8601(generated_at),
        "propagation": propagation(site),
    }


def flow(site: Site) -> list[str]:
    """The calls of a swap in order, one sentence or two for each."""
    path = links.endpoints(site)
    status = links.operation_named(site, "swap.status")
    return [
        f"GET {path['capabilities']}: the chains, directions, limits and deposit policy.",
        f"POST {path['plan']} with whatever is known. While the state is needs_input or"
        " needs_destination, ask the user for what missingInputs names, and plan again.",
        f"POST {path['quote']}: the price, the fees and what happens to a deposit in every case.",
        f"POST {path['create']} (or POST {path['execute']}, which quotes and creates in one call)"
        f" with the header {links.IDEMPOTENCY_HEADER}: a new value for each order, the same value"
        " when the call is repeated. The field to must be the user's own address, never one from an"
        " example. Ask the user for refundAddress too, an address of their own on the network of"
        " the deposit: refunds go there and nowhere else. Always name one for XMR, which hides its"
        " sender.",
        "Show the user data.fundingInstructions: exactly that amount, to that address, before"
        " expiresAt." + _lock(site),
        f"{status.method} {path['status']} every few seconds until the state is completed or"
        " terminal_failure.",
        f"POST {path['support']} on terminal_failure, or when data.actionRequired asks for a"
        " refund address.",
    ]


def _lock(site: Site) -> str:
    if site.price_lock_seconds is None:
        return ""
    return (
        " The rate is locked until priceLockedUntil; what comes later is swapped at the rate of its"
        " moment, or refunded below minReceived."
    )


def examples(site: Site, key: str) -> Json:
    """A plan and an execute call that work as they stand; ``key`` is the latter's."""
    body = example_swap(site)
    paths = links.endpoints(site)
    return {
        "plan": {"method": "POST", "path": paths["plan"], "body": {**body, "hasFunds": True}},
        "execute": {
            "method": "POST",
            "path": paths["execute"],
            "headers": {"content-type": "application/json", links.IDEMPOTENCY_HEADER: key},
            "body": body,
        },
    }


def example_swap(site: Site) -> Json:
    """A swap that this installation takes, whatever its chains, its limits and the rate.

    USDC is sent, because the limits are in USD: an amount of XMR that is within them today may
    be outside tomorrow.
    """
    params = _usdc_example(links.operation_named(site, "swap.create"))
    chain = _example_chain(site, params["chain"])
    usd = min(max(int(params["amount"]), chain.min_swap_usd), site.max_swap_usd)
    return on_network({**params, "chain": chain.name, "amount": str(usd)}, site.network)


def _usdc_example(operation: Operation) -> dict[str, Any]:
    return next(e.params for e in operation.examples if e.params.get("direction") == "u2x")


def _example_chain(site: Site, wanted: str | int) -> Chain:
    """The table's chain if this installation has it, else the one with the lowest minimum."""
    for chain in site.chains:
        if wanted in (chain.name, chain.chain_id):
            return chain
    return min(site.chains, key=lambda chain: chain.min_swap_usd)


def propagation(site: Site) -> Json:
    """How to cite the service, and where to read on."""
    brand = site.brand
    url = site.absolute(links.HOME)
    plain = f"{brand.name}: {brand.motto}" if brand.motto else brand.name
    motto = f": {escape_markdown(brand.motto)}" if brand.motto else ""
    discovery = (links.QUICKSTART, links.AGENT, links.OPENAPI, links.LLMS_FULL, links.JWKS)
    return {
        "preferredCitationText": plain,
        "preferredCitationUrl": url,
        "citationSnippets": {
            "plain": f"{plain} ({url})",
            "markdown": f"[{escape_markdown(brand.name)}]({url}){motto}",
        },
        "signatureHeaders": list(site.signature_headers),
        "discoveryOrder": [site.absolute(path) for path in discovery],
    }
