"""The settings of the service: which exist, their defaults and bounds, and loading them.

Layers, each winning over the one before: defaults, TOML file, environment, flags. Every value keeps
the name of the source that gave it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from rpcsvc.domain.integrators import Integrator, key_hash
from rpcsvc.domain.money import USDC, XMR, as_units
from rpcsvc.engines import ENGINES
from rpcsvc.errors import SettingsError
from rpcsvc.health_probe import DEFAULT_DATA_DIR
from rpcsvc.settings_clients import ClientSettings, ClientTables
from rpcsvc.settings_onchain import DAY, InventorySettings, OnchainSettings, RatesSettings
from rpcsvc.settings_sources import (
    BLANK_IS_NONE,
    CONFIG_VARIABLE,
    LOWER_CASE,
    TOKENS_KEY,
    Contact,
    DatabaseUrl,
    FilePath,
    Flag,
    Given,
    Group,
    Host,
    HostNames,
    Integrators,
    Network,
    Networks,
    Origins,
    Ports,
    RatePath,
    SiteUrl,
    Tokens,
    decimal,
    integer_in,
    line,
    nested,
    parse_address,
    read_environment,
    read_file,
    read_flags,
)
from rpcsvc.urls import is_loopback, without_userinfo

__all__ = [
    "KEYS", "RELOADED", "SECRETS", "BrandSettings", "ConfigRow", "LimitSettings", "LoadedSettings",
    "LogSettings", "OrderSettings", "RateLimitSettings", "SandboxSettings", "Settings",
    "SettingsError", "SigningSettings", "UpstreamSettings", "changed_keys", "check_bind",
    "effective_config", "load_settings", "reloaded", "render_config",
]  # fmt: skip

HOUR: Final = 3_600
MASK: Final = "********"

Xmr = Annotated[str, decimal(12)]
XmrFee = Annotated[str, decimal(12, positive=False)]
Usdc = Annotated[str, decimal(6)]
UsdcFee = Annotated[str, decimal(6, positive=False)]
PerMinute = Annotated[int, integer_in(1, 1_000_000)]
Seconds = Annotated[int, integer_in(1, 30 * DAY)]
BlockMs = Annotated[int, integer_in(10, HOUR * 1000)]
Confirmations = Annotated[int, integer_in(1, 1000)]

Percent = Annotated[int, integer_in(1, 100)]
AnyGroup = TypeVar("AnyGroup", bound=Group)
HistoryDays = Annotated[int, integer_in(90, 36_500)]
# A URL of these may hold a provider's key in its path or query: only its host is shown.
_URLS_WITH_KEYS: Final = frozenset(
    {
        "onchain.monerod_url",
        "onchain.wallet_url",
        "onchain.nodes",
        "rates.sources",
        "telemetry.otlp_endpoint",
        "upstream.url",
    }
)
_URL: Final = re.compile(r"(https?://)([^/?#\s]*)(\S*)")
# Of keys in tables whose names the operator chooses.
_KEY_PROBLEMS: Final = {
    "missing": "a value, which is required",
    "extra_forbidden": "keys that are known, and this one is not",
}
# Any of them may be of a URL, mistyped.
_MARKS_OF_URLS: Final = frozenset("/?#@")


class BrandSettings(Group):
    """How the service names itself. ``slug`` is the word in ``service.*`` and ``x-service-*``."""

    slug: str = Field(default="service", pattern=r"^[a-z][a-z0-9-]{0,30}$")
    name: Annotated[str, line(1, 64)] = "rpcsvc"
    motto: Annotated[str, line(0, 200)] = "XMR and USDC swaps for software agents"
    domain: Annotated[str, line(0, 253)] = ""

    @field_validator("slug")
    @classmethod
    def _is_free_to_use(cls, slug: str) -> str:
        if slug == "rpc":
            raise ValueError("another word: rpc.* is reserved by JSON-RPC 2.0 (section 4.3)")
        return slug


class RateLimitSettings(Group):
    """Requests a minute: per client address, ``rpc_requests_per_minute`` per token.

    ``wrong_tokens_per_minute`` counts calls of /rpc that no token lets in.
    """

    enabled: Flag = True
    orders_per_minute: PerMinute = 30
    requests_per_minute: PerMinute = 300
    rpc_requests_per_minute: PerMinute = 6_000
    wrong_tokens_per_minute: PerMinute = 30
    max_clients: Annotated[int, integer_in(1, 1_000_000)] = 10_000


class LimitSettings(Group):
    """The largest body in bytes, elements of a batch, and depth of JSON nesting; connections.

    ``connections`` counts all of TCP, and half of them may wait for events;
    ``connections_per_address`` those of one address or IPv6 /64.
    """

    body_bytes: Annotated[int, integer_in(1_024, 16 * 1024 * 1024)] = 65_536
    batch: Annotated[int, integer_in(1, 1_000)] = 50
    depth: Annotated[int, integer_in(4, 256)] = 32
    connections: Annotated[int, integer_in(16, 60_000)] = 2_000
    connections_per_address: Annotated[int, integer_in(1, 60_000)] = 200


class OrderSettings(Group):
    """Terms and deadlines of orders. ``*_bps`` are 1/10,000; ``max_swap_usd`` whole dollars.

    ``unfunded_*`` bound what orders reserve before their deposits come (domain/reservations.py):
    shares are percentages of what the wallet holds in addition to funded orders;
    ``address_orders_a_day`` bounds what an address may leave behind,
    ``address_authorizations_a_day`` the signed payments (x402) that it may have the service pay gas
    for. ``unpaid_*``: how many days the answers of orders that ended unpaid are kept, and how many
    bytes of them; ``history_keep_days`` the history of orders that are over, None permanently
    (orders/policy.py).
    """

    deposit_window_seconds: Seconds = HOUR
    late_window_seconds: Annotated[Seconds | None, BLANK_IS_NONE] = None
    price_lock_seconds: Seconds = 900
    lock_break_bps: Annotated[int, integer_in(1, 5_000)] = 100
    idempotency_days: Annotated[int, integer_in(1, 3_650)] = 30
    min_received_bps: Annotated[int, integer_in(1, 10_000)] = 9_900
    spread_bps: Annotated[int, integer_in(0, 5_000)] = 50
    max_swap_usd: Annotated[int, integer_in(1, 100_000_000)] = 50_000
    bridge_min_usd: Annotated[int, integer_in(1, 100_000_000)] = 10
    unfunded_share: Percent = 50
    unfunded_address_total_share: Percent = 40
    unfunded_address_share: Percent = 10
    unfunded_address_orders: Annotated[int, integer_in(1, 100_000)] = 10
    address_orders_a_day: Annotated[int, integer_in(1, 10_000_000)] = 1_000
    address_authorizations_a_day: Annotated[int, integer_in(1, 10_000_000)] = 100
    unfunded_token_share: Percent = 30
    unfunded_token_orders: Annotated[int, integer_in(1, 1_000_000)] = 100
    unpaid_keep_days: Annotated[int, integer_in(1, 36_500)] = 30
    unpaid_bytes: Annotated[int, integer_in(1024 * 1024, 2**40)] = 256 * 1024 * 1024
    history_keep_days: Annotated[HistoryDays | None, BLANK_IS_NONE] = None
    confirm_timeout_seconds: Seconds = DAY
    prepare_timeout_seconds: Seconds = 900
    payout_check_seconds: Seconds = 600
    refund_reminder_seconds: Seconds = 7 * DAY

    @field_validator("history_keep_days")
    @classmethod
    def _history_outlasts_answers(cls, days: int | None, info: ValidationInfo) -> int | None:
        # While keys and webhooks are kept, callers may ask for what the history tells.
        longest = max(info.data.get(name, 0) for name in ("idempotency_days", "unpaid_keep_days"))
        if days is not None and days <= longest:
            raise ValueError(
                f"more than {longest}, the larger one of idempotency_days and unpaid_keep_days;"
                " leave it out to keep the history for ever"
            )
        return days

    @property
    def effective_late_window_seconds(self) -> int:
        """``late_window_seconds``, or a quarter of the deposit window where that is not set."""
        return self.late_window_seconds or max(1, self.deposit_window_seconds // 4)

    @property
    def effective_price_lock_seconds(self) -> int:
        """``price_lock_seconds``, and at most the deposit window."""
        return min(self.price_lock_seconds, self.deposit_window_seconds)


class SandboxSettings(Group):
    """The simulated chains. Amounts are decimal strings of whole XMR or USDC.

    ``rate_path_bps`` moves the price by 1/10,000 each, every ``rate_step_seconds``. The properties
    are for the engine: by asset symbol, amounts in atomic units.
    """

    usdc_per_xmr: Usdc = "165.00"
    xmr_block_ms: BlockMs = 1_000
    usdc_block_ms: BlockMs = 500
    xmr_confirmations: Confirmations = 2
    usdc_confirmations: Confirmations = 2
    xmr_payout_fee: XmrFee = "0.0001"
    usdc_payout_fee: UsdcFee = "0.05"
    xmr_float: Xmr = "10000"
    usdc_float: Usdc = "2000000"
    rate_path_bps: RatePath = ()
    rate_step_seconds: Annotated[int, integer_in(1, DAY)] = 10

    @property
    def block_ms(self) -> Mapping[str, int]:
        """Milliseconds from block to block."""
        return {"XMR": self.xmr_block_ms, "USDC": self.usdc_block_ms}

    @property
    def confirmations(self) -> Mapping[str, int]:
        """Blocks until a deposit is final."""
        return {"XMR": self.xmr_confirmations, "USDC": self.usdc_confirmations}

    @property
    def fees(self) -> Mapping[str, int]:
        """The network fee of a transfer."""
        return _units(self.xmr_payout_fee, self.usdc_payout_fee)

    @property
    def inventory(self) -> Mapping[str, int]:
        """The wallet's balance on each new chain."""
        return _units(self.xmr_float, self.usdc_float)

    @property
    def price(self) -> int:
        """USDC units per XMR."""
        return int(as_units(self.usdc_per_xmr, USDC))


def _units(xmr: str, usdc: str) -> Mapping[str, int]:
    return {"XMR": int(as_units(xmr, XMR)), "USDC": int(as_units(usdc, USDC))}


class UpstreamSettings(Group):
    """Another swap API that settles the orders: ``bff`` is another rpcsvc, ``v1`` the public API.

    ``*_per_minute`` are its limits for this service; by default the dialect's published ones.
    ``monero_network`` is where its users pay and are paid.
    """

    url: Annotated[str, line(0, 300)] = ""
    api_key: Annotated[SecretStr | None, BLANK_IS_NONE] = None
    dialect: Literal["bff", "v1"] = "bff"
    plain_http: Flag = False
    monero_network: Literal["mainnet", "stagenet", "testnet"] = "mainnet"
    creations_per_minute: Annotated[PerMinute | None, BLANK_IS_NONE] = None
    calls_per_minute: Annotated[PerMinute | None, BLANK_IS_NONE] = None
    reservable_usd: Annotated[int, integer_in(1, 1_000_000_000)] = 250_000


def _socks_proxy(url: str) -> str:
    if url and not re.fullmatch(r"socks5://[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}", url):
        raise ValueError('a SOCKS proxy such as "socks5://127.0.0.1:9050"')
    if url and find_spec("aiohttp_socks") is None:
        raise ValueError("nothing, unless the extra tor is installed: pip install 'rpcsvc[tor]'")
    return url


class SupportSettings(Group):
    """Tickets of one client a day, bytes of all clients a day, and days for which they are kept."""

    tickets_per_client: Annotated[int, integer_in(1, 1_000_000)] = 20
    bytes_per_day: Annotated[int, integer_in(65_536, 2**40)] = 8 * 1024 * 1024
    keep_days: Annotated[int, integer_in(1, 36_500)] = 365


class WebhookSettings(Group):
    """The hosts that webhooks may call in addition to public ones, and the SOCKS proxy that reaches
    onion services.

    ``allowed_networks``: of private addresses, in CIDR form. ``allowed_ports``: below 1024.
    """

    allowed_networks: Networks = ()
    allowed_ports: Ports = ()
    onion_proxy: Annotated[str, AfterValidator(_socks_proxy)] = ""


def _otlp_endpoint(url: str) -> str:
    if url and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
        raise ValueError(
            'the URL of an OTLP/HTTP collector, such as "http://127.0.0.1:4318/v1/traces"'
        )
    if url and find_spec("opentelemetry") is None:
        raise ValueError("nothing, unless the extra otel is installed: pip install 'rpcsvc[otel]'")
    return url


class TelemetrySettings(Group):
    """Where OpenTelemetry traces of orders are sent; empty: nowhere. Tokens for /metrics alone."""

    otlp_endpoint: Annotated[str, AfterValidator(_otlp_endpoint)] = ""
    metrics_token: Tokens = ()


class SigningSettings(Group):
    """Whether responses and orders are signed, with keys made in the data directory."""

    enabled: Flag = True


class LogSettings(Group):
    """``auto`` is ``console`` on a terminal and ``json`` elsewhere."""

    format: Literal["auto", "json", "console"] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error", "critical"], LOWER_CASE] = "info"


def _engine(name: str) -> str:
    if name in ENGINES:
        return name
    *others, last = (repr(each) for each in ENGINES)
    raise ValueError(f"{', '.join(others)} or {last}")


def _hashed(tokens: Iterable[SecretStr]) -> set[str]:
    return {key_hash(token.get_secret_value()).hex() for token in tokens}


def _hashes_of(clients: Mapping[str, ClientSettings]) -> set[str]:
    return {each for client in clients.values() for each in client.token_sha256}


def _require_clients(clients: Mapping[str, ClientSettings], others: Mapping[str, Any]) -> None:
    """Raise ValueError for clients that don't go with the ``others`` of Settings, by field."""
    if _hashed(others.get("agent_rpc_tokens", ())) & _hashes_of(clients):
        raise ValueError("a client's token that is no agent_rpc_token: that has no limits")
    is_upstream = others.get("engine") == "upstream"
    if is_upstream and any(each.spread_bps is not None for each in clients.values()):
        raise ValueError("no spread_bps with the engine upstream, which names its own prices")


def _require_metrics_tokens(telemetry: TelemetrySettings, others: Mapping[str, Any]) -> None:
    """Raise ValueError for a token of metrics that opens more, by the ``others`` of Settings."""
    if set(telemetry.metrics_token) & set(others.get("agent_rpc_tokens", ())):
        raise ValueError("a metrics_token that is no agent_rpc_token: it opens /metrics alone")
    if _hashed(telemetry.metrics_token) & _hashes_of(others.get("clients", {})):
        raise ValueError("a metrics_token that is no client's token: it opens /metrics alone")


class Settings(Group):
    """All settings of the service. In files and variables the tokens' key is singular."""

    host: Host = "127.0.0.1"
    port: Annotated[int, integer_in(0, 65_535)] = 8080
    data_dir: FilePath = Path(DEFAULT_DATA_DIR)
    database_url: Annotated[DatabaseUrl | None, BLANK_IS_NONE] = None
    engine: Annotated[str, AfterValidator(_engine)] = "sandbox"
    site_url: SiteUrl = ""
    onion_url: SiteUrl = ""
    tls_cert: Annotated[FilePath | None, BLANK_IS_NONE] = None
    tls_key: Annotated[FilePath | None, BLANK_IS_NONE] = Field(default=None, validate_default=True)
    trusted_proxies: Networks = ()
    allowed_hosts: HostNames = ()
    allowed_origins: Origins = ()
    agent_rpc_tokens: Tokens = Field(default=(), validation_alias=TOKENS_KEY)
    clients: ClientTables = Field(default={}, validate_default=False)
    integrators: Integrators = ()
    chains_file: Annotated[FilePath | None, BLANK_IS_NONE] = None
    contact: Annotated[Contact | None, BLANK_IS_NONE] = None
    graceful_seconds: Annotated[int, integer_in(1, HOUR)] = 10
    brand: BrandSettings = BrandSettings()
    rate_limit: RateLimitSettings = RateLimitSettings()
    limits: LimitSettings = LimitSettings()
    orders: OrderSettings = OrderSettings()
    sandbox: SandboxSettings = SandboxSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    onchain: OnchainSettings = OnchainSettings()
    inventory: InventorySettings = InventorySettings()
    rates: RatesSettings = RatesSettings()
    support: SupportSettings = SupportSettings()
    webhooks: WebhookSettings = WebhookSettings()
    signing: SigningSettings = SigningSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()

    @field_validator("tls_key")
    @classmethod
    def _key_goes_with_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_cert" in info.data and (key is None) != (info.data["tls_cert"] is None):
            raise ValueError("a path together with tls_cert; give both of them or neither")
        return key

    @field_validator("clients")
    @classmethod
    def _clients_have_tokens_of_their_own(
        cls, clients: dict[str, ClientSettings], info: ValidationInfo
    ) -> dict[str, ClientSettings]:
        _require_clients(clients, info.data)
        return clients

    @field_validator("telemetry")
    @classmethod
    def _metrics_have_tokens_of_their_own(
        cls, telemetry: TelemetrySettings, info: ValidationInfo
    ) -> TelemetrySettings:
        _require_metrics_tokens(telemetry, info.data)
        return telemetry

    @property
    def postgresql_url(self) -> str | None:
        """The secret URL of the PostgreSQL database; None: SQLite, in the data directory."""
        return None if self.database_url is None else self.database_url.get_secret_value()

    @property
    def network(self) -> str:
        """``data.network`` of every answer: the engine's Monero network, or the engine's name."""
        networks = {
            "upstream": self.upstream.monero_network,
            "onchain": self.onchain.monero_network,
        }
        return networks.get(self.engine, self.engine)

    @property
    def database(self) -> str:
        """The place of the database, in words."""
        if self.database_url is not None:
            return "the database of database_url"
        return f"the data directory {self.data_dir}"

    @property
    def is_loopback_only(self) -> bool:
        """Whether only callers of this machine are served: bound to loopback, and no proxy."""
        return is_loopback(self.host) and not self.trusted_proxies

    @property
    def serves_tls(self) -> bool:
        """Whether HTTPS is served directly."""
        return self.tls_cert is not None

    @property
    def effective_site_url(self) -> str:
        """The public site root without a trailing slash: ``site_url`` or where it listens."""
        if self.site_url:
            return self.site_url
        address = parse_address(self.host)
        host = "localhost" if address is not None and address.is_unspecified else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.serves_tls else 'http'}://{host}:{self.port}"

    @property
    def effective_domain(self) -> str:
        """``brand.domain``, or the host of the site URL where that is empty."""
        return self.brand.domain or urlsplit(self.effective_site_url).hostname or self.host


class LoadedSettings(NamedTuple):
    """Settings, and the origin of each by dotted key, such as ``env RPCSVC_HOST``."""

    settings: Settings
    origins: Mapping[str, str]


class ConfigRow(TypedDict):
    """One effective setting; ``value`` is a JSON value with secrets masked."""

    key: str
    value: object
    origin: str


def _walk(group: Group, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every dotted key of ``group`` with its value, in the order of declaration."""
    for name, field in type(group).model_fields.items():
        key = f"{prefix}{field.validation_alias or name}"
        value = getattr(group, name)
        if isinstance(value, Group):
            yield from _walk(value, f"{key}.")
        else:
            yield key, value


def _secrets(group: type[Group], prefix: str = "") -> Iterator[str]:
    for name, field in group.model_fields.items():
        key = f"{prefix}{field.validation_alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from _secrets(field.annotation, f"{key}.")
        elif _is_secret(field.annotation):
            yield key


def _is_secret(annotation: object) -> bool:
    return annotation is SecretStr or any(map(_is_secret, get_args(annotation)))


KEYS: Final = tuple(key for key, _ in _walk(Settings()))
SECRETS: Final = frozenset(_secrets(Settings))


# What a running service takes from its settings again, on SIGHUP.
RELOADED: Final = frozenset(
    {
        TOKENS_KEY,
        "clients",
        "rate_limit.orders_per_minute",
        "rate_limit.requests_per_minute",
        "rate_limit.rpc_requests_per_minute",
        "rate_limit.wrong_tokens_per_minute",
        "orders.spread_bps",
        "orders.max_swap_usd",
        "orders.bridge_min_usd",
        "orders.unfunded_share",
        "orders.unfunded_address_total_share",
        "orders.unfunded_address_share",
        "orders.unfunded_address_orders",
        "orders.unfunded_token_share",
        "orders.unfunded_token_orders",
        "orders.address_orders_a_day",
        "orders.address_authorizations_a_day",
        "upstream.reservable_usd",
    }
)


def reloaded(started: Settings, found: Settings) -> Settings:
    """Return the settings of the start, with the keys in RELOADED as they are in ``found``.

    Raises SettingsError where the two don't go together, though each does by itself.
    """
    merged = _merged(started, found, "")
    try:
        _require_clients(merged.clients, dict(merged))
        _require_metrics_tokens(merged.telemetry, dict(merged))
    except ValueError as error:
        raise SettingsError([f"needs a restart first: allowed: {error}"]) from None
    return merged


def _merged(started: AnyGroup, found: AnyGroup, prefix: str) -> AnyGroup:
    changes = {}
    for name, field in type(started).model_fields.items():
        key = f"{prefix}{field.validation_alias or name}"
        mine, theirs = getattr(started, name), getattr(found, name)
        if isinstance(mine, Group):
            changes[name] = _merged(mine, theirs, f"{key}.")
        elif key in RELOADED:
            changes[name] = theirs
    return started.model_copy(update=changes)


def changed_keys(before: Settings, after: Settings) -> list[str]:
    """The dotted keys whose values differ."""
    values = dict(_walk(after))
    return [key for key, value in _walk(before) if values[key] != value]


def load_settings(
    *, config_file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> LoadedSettings:
    """The settings of all layers; ``flags`` by dotted key, ``None`` where a flag was not given.

    ``config_file`` wins over ``RPCSVC_CONFIG``. Raises SettingsError with every problem found.
    """
    named = environ.get(CONFIG_VARIABLE)
    path = config_file or (Path(named) if named else None)
    layers = (
        read_file(path, KEYS),
        read_environment(environ, KEYS, SECRETS),
        read_flags(flags, KEYS),
    )
    given = {key: value for layer in layers for key, value in layer.values.items()}
    problems = [problem for layer in layers for problem in layer.problems]
    settings = _validated(given, problems)
    if settings is None or problems:
        raise SettingsError(problems)
    origins = {key: given[key].origin if key in given else "default" for key in KEYS}
    return LoadedSettings(settings, MappingProxyType(origins))


def check_bind(settings: Settings) -> None:
    """Raise SettingsError if plain HTTP would be served to other machines (design: TLS required).

    Loopback addresses and the name ``localhost`` pass, any address with TLS or behind trusted
    proxies does too. Other names do not: what they resolve to may change.
    """
    if is_loopback(settings.host) or settings.serves_tls or settings.trusted_proxies:
        return
    raise SettingsError(
        [
            f"host: received {settings.host!r}, where plain HTTP would be open to other machines;"
            " allowed, one of: (1) serve HTTPS: set tls_cert and tls_key (--tls-cert, --tls-key);"
            " (2) name the proxies that end TLS in front of it: set trusted_proxies"
            " (RPCSVC_TRUSTED_PROXIES);"
            " (3) stay on this machine: host 127.0.0.1 (RPCSVC_HOST, --host)"
        ]
    )


def effective_config(loaded: LoadedSettings) -> list[ConfigRow]:
    """Every setting with its origin, in the order of declaration, ready for JSON."""
    return [
        ConfigRow(key=key, value=_shown(key, value), origin=loaded.origins[key])
        for key, value in _walk(loaded.settings)
    ]


def render_config(loaded: LoadedSettings) -> str:
    """The effective configuration for a person: key, value and origin in aligned columns."""
    rows = [
        (row["key"], "unset" if row["value"] is None else json.dumps(row["value"]), row["origin"])
        for row in effective_config(loaded)
    ]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in rows
    )


def _shown(key: str, value: object) -> object:
    if isinstance(value, tuple):
        return [_shown(key, item) for item in value]
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, dict):
        return {name: client.shown() for name, client in value.items()}
    if key in _URLS_WITH_KEYS and isinstance(value, str):
        shown, urls = _URL.subn(_host_alone, value)
        return shown if urls or _MARKS_OF_URLS.isdisjoint(value) else MASK
    return str(value) if isinstance(value, Path | Network | Integrator) else value


def _host_alone(url: re.Match[str]) -> str:
    scheme, host, rest = url.groups()
    if "@" in rest:  # what looks like a host may be the beginning of a password
        return f"{scheme}{MASK}"
    if "@" not in host and rest in ("", "/"):
        return url[0]
    return f"{scheme}{host.rpartition('@')[2]}/{MASK}"


def _validated(given: Mapping[str, Given], problems: list[str]) -> Settings | None:
    """Return the settings, or None and a line in ``problems`` for each bad value.

    The ValidationError holds the received values, tokens included; it must not travel on as the
    context of another exception.
    """
    try:
        return Settings.model_validate(nested(given))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    problems += [_problem(detail, given) for detail in details]
    return None


def _problem(detail: ErrorDetails, given: Mapping[str, Given]) -> str:
    location = ".".join(str(part) for part in detail["loc"])
    key = next((key for key in KEYS if f"{location}.".startswith(f"{key}.")), location)
    value, origin = given.get(key, Given(None, "default"))
    received = "nothing" if value is None else without_userinfo(repr(value))
    if key == "clients":
        # Which table and key is wrong; the hashes of tokens are in what came.
        key = location
        received = "nothing" if detail["type"] == "missing" else "a value that is not shown"
    elif key in SECRETS or key in _URLS_WITH_KEYS:
        received = "a value that is not shown"
    elif len(received) > 80:
        received = f"{received[:80]}..."
    return f"{key} ({origin}): received {received}; allowed: {_allowed(detail)}"


def _allowed(detail: ErrorDetails) -> str:
    """Return what the setting takes, in the validator's own words or in pydantic's."""
    context = detail.get("ctx", {})
    match detail["type"]:
        case "value_error":
            return str(context["error"])
        case "string_type":
            return "a string in quotes"
        case "string_pattern_mismatch":
            return f"a string that matches {context['pattern']}"
        case "literal_error":
            return str(context["expected"])
        case kind:
            return _KEY_PROBLEMS.get(kind) or detail["msg"].removeprefix("Input should be ")
