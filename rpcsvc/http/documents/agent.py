"""Agent metadata (agent.json) and the plugin manifest (ai-plugin.json).

agent.json is this service's own description of itself. It does not claim to be the card of an
agent protocol: the service speaks JSON-RPC 2.0 and HTTPS with its own operations, nothing else.
What does not live here: OpenAPI and OpenRPC, which describe the two transports in full.
"""

from __future__ import annotations

import re

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import AgentState
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.http.documents import links, signatures
from rpcsvc.http.documents.quickstart import flow
from rpcsvc.http.documents.text import mail_domain
from rpcsvc.http.limits import WINDOW_SECONDS
from rpcsvc.http.site import API_ROOT, BFF_ROOT, RPC_PATH, Site
from rpcsvc.operations.discovery import ENVELOPE_SCHEMA, schemas_of
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.operation import Operation

# The lengths that readers of plugin manifests allow for these fields.
_HUMAN_NAME = 20
_MODEL_NAME = 50
_HUMAN_DESCRIPTION = 100


def agent(site: Site) -> Json:
    """agent.json: what the service is, how it is reached, what it can do and within what."""
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
        "envelope": ENVELOPE_SCHEMA,
        "operations": [_operation(site, operation) for operation in site.operations],
        "links": {
            **links.quickstart_links(site),
            "quickstart": site.absolute(links.QUICKSTART),
            "openrpc": site.absolute(links.OPENRPC),
            "apiCatalog": site.absolute(links.API_CATALOG),
        },
    }


def description(site: Site) -> str:
    """One paragraph on what the service does."""
    sandbox = (
        " This installation settles in a sandbox: chains and money are simulated."
        if site.is_simulated
        else ""
    )
    return (
        "Swaps XMR for USDC and USDC for XMR on behalf of a user. An agent plans, asks for a"
        " quote, creates an order, shows the user a deposit address with an exact amount and an"
        " expiry, and polls until the order is completed or has failed for good. The agent never"
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
            "header": links.RPC_TOKEN_HEADER,
            "note": "The operator gives out the token."
            if site.rpc_needs_token
            else "No token is set: the service answers JSON-RPC to local clients only.",
        },
        "bff": {"required": False, "scheme": "header", "header": "x-api-key"},
        "tlsRequired": True,
    }


def signing(site: Site) -> Json:
    """How responses are signed and where the keys and the procedure are."""
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
    """What a call must stay within. Amounts in whole USD: in XMR they move with the rate."""
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
    """The budgets by the names that the RateLimit headers give them; none when they are off."""
    rate = site.rate_limit
    if not rate.enabled:
        return []
    address, orders = "client address", "whatever creates an order over HTTPS, BFF and bridge too"
    rpc_client = "token" if site.rpc_needs_token else address
    rows = (
        ("orders", rate.orders_per_minute, address, orders),
        ("requests", rate.requests_per_minute, address, "all else over HTTPS but health"),
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


def _operation(site: Site, operation: Operation) -> Json:
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
        **schemas_of(operation, site.networks),
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
    """The contact, if it is a mailbox; else the one that RFC 2142 gives every service."""
    if site.contact is not None and site.contact.startswith("mailto:"):
        return site.contact.removeprefix("mailto:").partition("?")[0]
    return f"support@{mail_domain(site.domain)}"
