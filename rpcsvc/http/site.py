"""The site as the documents describe it: address, brand, limits, chains and operations.

All of it comes from the settings and the operation table, never from a request: a ``Host`` header
is untrusted.
"""

from __future__ import annotations

from msgspec import Struct

from rpcsvc import __version__
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import Chain
from rpcsvc.operations.narrowing import Networks
from rpcsvc.operations.service import Operation, Service
from rpcsvc.settings import BrandSettings, LimitSettings, RateLimitSettings, Settings
from rpcsvc.verify import signature_headers

API_ROOT = "/api/v1"
BFF_ROOT = "/bff/v1"
RPC_PATH = "/rpc"
MCP_PATH = "/mcp"


class Site(Struct, frozen=True):
    """The public face of one installation. ``url`` is the site root without a trailing slash;
    ``onion_url`` the same as an onion service, empty where there is none.

    ``price_lock_seconds`` is None if an upstream decides how long a rate is locked.
    """

    url: str
    onion_url: str
    domain: str
    brand: BrandSettings
    contact: str | None
    version: str
    network: str
    is_simulated: bool
    rpc_needs_token: bool
    limits: LimitSettings
    rate_limit: RateLimitSettings
    max_swap_usd: int
    deposit_window_seconds: int
    late_window_seconds: int
    price_lock_seconds: int | None
    idempotency_days: int
    chains: tuple[Chain, ...]
    monero_networks: frozenset[MoneroNetwork]
    operations: tuple[Operation, ...]

    def absolute(self, path: str) -> str:
        """The address of a path that begins with a slash."""
        return self.url + path

    @property
    def networks(self) -> Networks:
        """The networks served, as the schemas of inputs need them."""
        return Networks(self.chains, self.monero_networks)

    @property
    def signature_headers(self) -> tuple[str, ...]:
        """Names of the headers that a signed response has (spec 5.3)."""
        return signature_headers(self.brand.slug)

    @property
    def client(self) -> str:
        """The command that calls this site."""
        slug = self.brand.slug
        return "rpcsvc" if slug == BrandSettings().slug else f"RPCSVC_BRAND__SLUG={slug} rpcsvc"

    @property
    def client_target(self) -> str:
        """The options with which the command calls this site."""
        token = ' --token "$AGENT_RPC_TOKEN"' if self.rpc_needs_token else ""
        return f"--url {self.url}{token}"

    def operation(self, name: str) -> Operation:
        """Return an operation of the site. Raises KeyError when the site does not offer it."""
        for operation in self.operations:
            if operation.name == name:
                return operation
        raise KeyError(name)

    def rpc_method(self, operation: Operation) -> str:
        """The JSON-RPC method of an operation."""
        return f"{self.brand.slug}.{operation.name}"


def site_of(settings: Settings, service: Service) -> Site:
    """The site of these settings and this service."""
    price_lock = service.venue.price_lock
    return Site(
        url=settings.effective_site_url,
        onion_url=settings.onion_url,
        domain=settings.effective_domain,
        brand=settings.brand,
        contact=settings.contact,
        version=__version__,
        network=service.views.network,
        is_simulated=service.views.profile.is_simulated,
        rpc_needs_token=bool(settings.agent_rpc_tokens or settings.clients),
        limits=settings.limits,
        rate_limit=settings.rate_limit,
        max_swap_usd=settings.orders.max_swap_usd,
        deposit_window_seconds=settings.orders.deposit_window_seconds,
        late_window_seconds=settings.orders.effective_late_window_seconds,
        price_lock_seconds=None if price_lock is None else price_lock // 1000,
        idempotency_days=settings.orders.idempotency_days,
        chains=tuple(service.chains.all()),
        monero_networks=service.monero_networks,
        operations=service.operations,
    )
