"""The quickstart (spec 2.2), agent metadata (agent.json) and the plugin manifest (ai-plugin.json).

agent.json has a format of this service's own. The MCP server card is in wellknown.py.
"""

from __future__ import annotations

import re
from typing import Any

from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import AgentState
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.http.documents import links, signatures
from rpcsvc.http.documents.links import escape_markdown, mail_domain
from rpcsvc.http.gate import RPC_TOKEN_HEADER, WINDOW_SECONDS
from rpcsvc.http.mcp.revisions import SERVED
from rpcsvc.http.site import API_ROOT, BFF_ROOT, MCP_PATH, RPC_PATH, Site
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.service import Operation
from rpcsvc.operations.table import on_network
from rpcsvc.strict_json import Json

# The longest values of these fields that plugin manifest readers accept.
_HUMAN_NAME = 20
_MODEL_NAME = 50
_HUMAN_DESCRIPTION = 100


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
            "idempotencyHeader": IDEMPOTENCY_KEY,
        },
        "links": links.quickstart_links(site),
        "quickstart": {"flow": flow(site), "endpoints": links.endpoints(site)},
        "examples": examples(site, key),
        "generatedAt": iso8601(generated_at),
        "propagation": propagation(site),
    }


def flow(site: Site) -> list[str]:
    """The calls of a swap in order, each with one or two sentences."""
    path = links.endpoints(site)
    status = site.operation("swap.status")
    return [
        f"GET {path['capabilities']}: the chains, directions, limits and deposit policy.",
        f"POST {path['plan']} with whatever is known. While the state is needs_input or"
        " needs_destination, ask the user for what missingInputs names, and plan again.",
        f"POST {path['quote']}: the price, the fees and what happens to a deposit in every case."
        " With receiveAmount in place of amount it says what to send for exactly that to arrive.",
        f"POST {path['create']} (or POST {path['execute']}, which quotes and creates in one call)"
        f" with the header {IDEMPOTENCY_KEY}: a new value for each order, the same value"
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
    """A plan and an execute call that work unchanged; ``key`` is execute's idempotency key."""
    body = example_swap(site)
    paths = links.endpoints(site)
    return {
        "plan": {"method": "POST", "path": paths["plan"], "body": {**body, "hasFunds": True}},
        "execute": {
            "method": "POST",
            "path": paths["execute"],
            "headers": {"content-type": "application/json", IDEMPOTENCY_KEY: key},
            "body": body,
        },
    }


def example_swap(site: Site) -> Json:
    """A swap that this installation accepts with its chains, its limits and any rate.

    USDC is sent, because the limits are in USD: an amount of XMR that is within them today may
    be outside tomorrow.
    """
    params = _usdc_example(site.operation("swap.create"))
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
    """The links to read on, and how to cite the service."""
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


def agent(site: Site) -> Json:
    """agent.json: identity, endpoints, capabilities and limits of the service."""
    return {
        "name": site.brand.name,
        "description": description(site),
        "version": site.version,
        "url": site.absolute(links.HOME),
        "network": site.network,
        "simulated": site.is_simulated,
        "transports": _transports(site),
        "auth": _auth(site),
        "signing": signing(site),
        "limits": limits(site),
        "networks": networks(site),
        "directions": [_direction(direction) for direction in Direction],
        "flow": flow(site),
        "states": [state.value for state in AgentState],
        "envelope": site.absolute(f"{links.OPENRPC}#/components/schemas/Envelope"),
        "operations": [
            _operation(site, operation, at) for at, operation in enumerate(site.operations)
        ],
        "links": {
            **links.quickstart_links(site),
            "quickstart": site.absolute(links.QUICKSTART),
            "openrpc": site.absolute(links.OPENRPC),
            "apiCatalog": site.absolute(links.API_CATALOG),
            "mcpServerCard": site.absolute(links.SERVER_CARD),
            "aiCatalog": site.absolute(links.AI_CATALOG),
        },
    }


def description(site: Site) -> str:
    """A paragraph on what the service does."""
    sandbox = (
        " This installation settles in a sandbox: chains and money are simulated."
        if site.is_simulated
        else ""
    )
    return (
        "Swaps XMR for USDC and USDC for XMR on behalf of a user. An agent plans, asks for a"
        " quote, creates an order, shows the user a deposit address with an exact amount and an"
        " expiry, and polls until the order is completed or has failed permanently. The agent never"
        f" holds funds.{sandbox}"
    )


def _transports(site: Site) -> Json:
    return {
        "https": {
            "url": site.absolute(API_ROOT),
            "description": site.absolute(links.OPENAPI),
            "contentType": "application/json",
        },
        "jsonrpc": {
            "version": "2.0",
            "url": site.absolute(RPC_PATH),
            "description": site.absolute(links.OPENRPC),
            "methodPrefix": f"{site.brand.slug}.",
            "params": "by name only",
        },
        "mcp": {
            "versions": list(SERVED),
            "url": site.absolute(MCP_PATH),
            "description": site.absolute(links.SERVER_CARD),
            "stdio": f"{site.client} mcp {site.client_target}",
        },
        "bff": {
            "url": site.absolute(BFF_ROOT),
            "description": site.absolute(links.OPENAPI),
            "contentType": "application/json",
        },
        "cli": {
            "command": "rpcsvc",
            "usage": f"{site.client} agent:capabilities {site.client_target}",
        },
    }


def _auth(site: Site) -> Json:
    return {
        "https": {"required": False, "scheme": "none"},
        "jsonrpc": {
            "required": site.rpc_needs_token,
            "scheme": "header",
            "header": RPC_TOKEN_HEADER,
            "note": "The operator gives out the token."
            if site.rpc_needs_token
            else "No token is set: the service answers JSON-RPC to local clients only.",
        },
        "bff": {"required": False, "scheme": "header", "header": "x-api-key"},
        "tlsRequired": True,
    }


def signing(site: Site) -> Json:
    """The signing of responses: the method, and links to the keys and the procedure."""
    return {
        "version": signatures.VERSION,
        "alg": signatures.ALGORITHM,
        "headers": list(site.signature_headers),
        "jwks": site.absolute(links.JWKS),
        "procedure": site.absolute(links.LLMS_FULL),
        "label": signatures.LABEL,
        "signedLines": list(signatures.SIGNED_LINES),
    }


def limits(site: Site) -> Json:
    """Limits on calls. Amounts are in whole USD: in XMR they move with the rate."""
    return {
        "bodyBytes": site.limits.body_bytes,
        "batchCalls": site.limits.batch,
        "jsonDepth": site.limits.depth,
        "rateLimits": _rate_limits(site),
        "maxSwapUsd": site.max_swap_usd,
        "minSwapUsd": {chain.name: chain.min_swap_usd for chain in site.chains},
        "depositWindowSeconds": site.deposit_window_seconds,
        "priceLockSeconds": site.price_lock_seconds,
        "idempotencyKeyDays": site.idempotency_days,
    }


def _rate_limits(site: Site) -> list[Json]:
    """The rate limits by their policy names in RateLimit headers; empty if limits are off."""
    rate = site.rate_limit
    if not rate.enabled:
        return []
    address, orders = "client address", "whatever creates an order over HTTPS, BFF and bridge too"
    rpc_client = "token" if site.rpc_needs_token else address
    rows = (
        ("orders", rate.orders_per_minute, address, orders),
        ("requests", rate.requests_per_minute, address, "other requests over HTTPS, health exempt"),
        ("rpc", rate.rpc_requests_per_minute, rpc_client, "each call over JSON-RPC"),
    )
    return [
        {"budget": name, "limit": limit, "windowSeconds": WINDOW_SECONDS, "per": who, "for": what}
        for name, limit, who, what in rows
    ]


def networks(site: Site) -> list[Json]:
    """The chains on which USDC is taken and paid, and Monero, which is chain id 0."""
    usdc = [
        {
            "name": chain.name,
            "displayName": chain.display_name,
            "chainId": chain.chain_id,
            "aliases": list(chain.aliases),
            "asset": USDC.symbol,
            "token": chain.usdc_contract,
            "decimals": USDC.decimals,
            "minSwapUsd": chain.min_swap_usd,
        }
        for chain in site.chains
    ]
    monero = {"name": "monero", "chainId": 0, "asset": XMR.symbol, "decimals": XMR.decimals}
    return [monero, *usdc]


def _direction(direction: Direction) -> Json:
    return {
        "direction": direction.value,
        "send": deposit_asset(direction).symbol,
        "receive": payout_asset(direction).symbol,
    }


def _operation(site: Site, operation: Operation, at: int) -> Json:
    """An operation; its params and result are in the OpenRPC document, where it stands ``at``."""
    https = None
    if operation.path:
        https = {"method": operation.method, "url": site.absolute(API_ROOT + operation.path)}
    return {
        "name": operation.name,
        "summary": operation.summary,
        "effect": operation.effect.value,
        "idempotencyKey": operation.idempotent,
        "https": https,
        "jsonrpc": site.rpc_method(operation),
        "cli": operation.command,
        "errors": list(operation.errors),
        "description": site.absolute(f"{links.OPENRPC}#/methods/{at}"),
    }


def ai_plugin(site: Site) -> Json:
    """The plugin manifest. Its address fields point into this site."""
    return {
        "schema_version": "v1",
        "name_for_human": site.brand.name[:_HUMAN_NAME].strip(),
        "name_for_model": re.sub(r"[^a-z0-9]", "_", site.brand.slug)[:_MODEL_NAME],
        "description_for_human": (site.brand.motto or description(site))[:_HUMAN_DESCRIPTION],
        "description_for_model": f"{description(site)} Amounts are decimal strings. Start with"
        f" {site.absolute(links.QUICKSTART)}",
        "auth": {"type": "none"},
        "api": {
            "type": "openapi",
            "url": site.absolute(links.OPENAPI),
            "is_user_authenticated": False,
        },
        "logo_url": site.absolute(links.LOGO),
        "contact_email": _contact_email(site),
        "legal_info_url": site.absolute(links.HOME),
    }


def _contact_email(site: Site) -> str:
    """The contact if it is a mailbox, else the standard mailbox of RFC 2142."""
    if site.contact is not None and site.contact.startswith("mailto:"):
        return site.contact.removeprefix("mailto:").partition("?")[0]
    return f"support@{mail_domain(site.domain)}"
