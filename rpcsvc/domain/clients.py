"""Clients: who calls, and of the clients of the settings what they may do, and for how much.

A client's worth and limits are in USDC units (10^-6); days are of UTC, counted from the epoch.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv6Network
from typing import ClassVar, Final, NamedTuple

from msgspec import Struct

from rpcsvc.domain.integrators import key_hash
from rpcsvc.domain.money import MAX_UNITS, mul_div_ceil
from rpcsvc.domain.pricing import BPS, ONE_XMR, Direction, usdc_to_deposit_floor
from rpcsvc.errors import DestinationNotAllowed, Forbidden
from rpcsvc.redacted import Redacted

ADDRESS: Final = "address"
# The largest IPv6 network that one customer is given (RFC 6177).
_CUSTOMER_PREFIX: Final = 48
# Who holds the AGENT_RPC_TOKEN.
DEFAULT: Final = "default"
# How much worse than shown the rate may be at which an approved order is made, in 1/10,000.
TOLERANCE_BPS: Final = 100
# A refusal lists no more destinations.
_SHOWN: Final = 10


class Client(Struct, frozen=True):
    """The caller that asks for an order.

    ``kind`` is ADDRESS for a caller known by its network address alone; ``name`` is then an IPv4
    address or an IPv6 /64. Other kinds name a token, an integrator or the UNIX socket.
    """

    kind: str
    name: str = ""

    def stored(self, secret: bytes) -> str:
        """The client as kept with its orders: the kind, and a keyed hash of the name."""
        digest = hmac.new(secret, f"{self.kind}:{self.name}".encode(), hashlib.sha256)
        return f"{self.kind}:{digest.hexdigest()[:24]}"

    @property
    def customer(self) -> Client:
        """The client as places are shared: an IPv6 /64 counts as its /48.

        The owner of a /48 has 65,536 networks of /64, and would count as many clients.
        """
        if self.kind != ADDRESS or ":" not in self.name:
            return self
        network = IPv6Network(self.name).supernet(new_prefix=_CUSTOMER_PREFIX)
        return Client(ADDRESS, str(network))


# The user that the service runs as: through the UNIX socket, or in one process with it.
SOCKET: Final = Client("socket")


def is_known(client: str) -> bool:
    """Return whether a stored client was known by a token, a key or the socket."""
    return bool(client) and not client.startswith(f"{ADDRESS}:")


class Scope(StrEnum):
    """Groups of operations: what only reads, what makes and changes orders, what pays them."""

    READ = "read"
    ORDER = "order"
    FUND = "fund"


class Spending(NamedTuple):
    """The worth that an order takes of its client's day, and the most of that day, in USDC units.

    The transaction that makes the order counts it.
    """

    day: int
    client: str
    units: int
    most: int


class ExceededLimit(NamedTuple):
    """The setting whose limit an order would break: the limit, and what is used of it."""

    setting: str
    limit: int
    used: int


class ApprovalState(StrEnum):
    """The state of an approval. ENDED: expired, or replaced by one for other terms."""

    PENDING = "pending"
    GRANTED = "granted"
    DENIED = "denied"
    USED = "used"
    ENDED = "ended"


class Approval(Struct, frozen=True):
    """A request for a person's approval of one order, and the decision.

    ``key`` is the idempotency key of the call, empty without one; ``terms`` a hash of what the
    caller named. ``deposit`` and ``output``: atomic units of the quote that was shown.
    """

    approval_id: str
    client: str
    key: str
    terms: str
    state: ApprovalState
    requested_at: int
    expires_at: int
    deposit: int
    output: int
    shown: dict[str, str | None]
    decided_at: int | None = None
    decided_by: str | None = None
    order_id: str | None = None

    @property
    def least_output(self) -> int:
        """Payout units that the order has to bring: TOLERANCE_BPS less than was shown."""
        return -(-self.output * (BPS - TOLERANCE_BPS) // BPS)

    @property
    def most_deposit(self) -> int:
        """Deposit units that the order may ask for: TOLERANCE_BPS more than was shown."""
        return self.deposit * (BPS + TOLERANCE_BPS) // BPS

    def covers(self, deposit: int, output: int) -> bool:
        """Return whether a quote is no worse than the one shown by more than TOLERANCE_BPS."""
        return output >= self.least_output and deposit <= self.most_deposit


class ApprovalUse(NamedTuple):
    """The order that uses an approval up, at a time (ms)."""

    approval_id: str
    order_id: str
    at: int


class KnownClient(Redacted, frozen=True):
    """A client that a token names.

    ``scopes`` are groups of operations and names of operations. ``destinations``: the only
    addresses that its orders pay or refund; None: any. ``max_order``, ``max_day`` and
    ``approve_above`` (worth above which a person has to approve an order) in USDC units,
    ``spread_bps`` in 1/10,000 in place of the operator's; None: no limit of its own.
    ``token``: of the client DEFAULT, each of whose tokens has a budget of its own.
    """

    HIDDEN: ClassVar[frozenset[str]] = frozenset({"token"})

    name: str
    scopes: frozenset[str] = frozenset(Scope)
    destinations: tuple[str, ...] | None = None
    max_order: int | None = None
    max_day: int | None = None
    approve_above: int | None = None
    orders_per_minute: int | None = None
    spread_bps: int | None = None
    token: str = ""

    @property
    def is_default(self) -> bool:
        """Whether it is the client of AGENT_RPC_TOKEN."""
        return self.name == DEFAULT

    @property
    def namespace(self) -> str:
        """The namespace of its idempotency keys (docs/adr/0006-idempotency-namespaces.md)."""
        return "rpc" if self.is_default else f"client:{self.name}"

    @property
    def account(self) -> str:
        """The name under which its budgets are kept."""
        return f"token:{self.token}" if self.is_default else f"client:{self.name}"

    @property
    def client(self) -> Client:
        """The client whose unfunded orders count."""
        return Client("token", self.account)

    @property
    def has_limits(self) -> bool:
        """Whether the worth of its orders is limited."""
        limits = (self.max_order, self.max_day, self.approve_above)
        return any(each is not None for each in limits)

    def needs_approval(self, units: int) -> bool:
        """Return whether an order of that worth waits for a person."""
        return self.approve_above is not None and units > self.approve_above

    def require_scope(self, operation: str, group: Scope) -> None:
        """Raise Forbidden unless the client may call the operation, which is in the group."""
        if group in self.scopes or operation in self.scopes:
            return
        raise Forbidden(
            f"The client {self.name} may not call {operation}. It needs the scope {group.value}, or"
            f" {operation} by name; the operator adds scopes to [clients.{self.name}].",
            details={"scope": group.value, "scopes": sorted(self.scopes)},
        )

    def require_destination(self, address: str, *, field: str, caller: KnownClient | None) -> None:
        """Raise DestinationNotAllowed unless the client's orders may pay the address.

        The destinations are shown to a ``caller`` that is the client itself, and to nobody else.
        """
        if self.destinations is None:
            return
        if _compared(address) in _set_of(self.destinations):
            return
        is_itself = caller is not None and caller.name == self.name
        raise DestinationNotAllowed(
            f"{field} is not among the destinations of the client {self.name}. Send one of them;"
            f" the operator adds addresses to [clients.{self.name}].",
            field=field,
            received=address,
            allowed=list(self.destinations[:_SHOWN]) if is_itself else None,
        )

    def require_refund_address(self, address: str | None, direction: Direction) -> None:
        """Raise DestinationNotAllowed where a refund could go to an address that is not allowed.

        Without a refund address USDC goes back to its sender, who is not known beforehand.
        """
        if address is not None:
            self.require_destination(address, field="refundAddress", caller=self)
        elif self.destinations is not None and direction is Direction.USDC_TO_XMR:
            raise DestinationNotAllowed(
                "refundAddress is missing: a refund would go to whoever sends the deposit, and the"
                f" client {self.name} has a list of destinations. Send one of them.",
                field="refundAddress",
                allowed=list(self.destinations[:_SHOWN]),
            )

    def exceeded(self, units: int, used: int) -> ExceededLimit | None:
        """Return the limit that one more order would break.

        ``units``: the order's worth; ``used``: that of the orders which the client has made today.
        """
        if self.max_order is not None and units > self.max_order:
            return ExceededLimit("max_order_usd", self.max_order, 0)
        if self.max_day is not None and used + units > self.max_day:
            return ExceededLimit("max_day_usd", self.max_day, used)
        return None

    def spending(self, units: int, day: int) -> Spending | None:
        """Return what an order counts for on its day; None of the client DEFAULT."""
        if self.is_default:
            return None
        return Spending(day, self.name, units, MAX_UNITS if self.max_day is None else self.max_day)

    def most_deposit(self, direction: Direction, deposit: int, rate: int) -> int:
        """Most deposit units that an order over ``deposit`` swaps: more is refunded.

        A larger deposit would get around the limits. What the day counts is ``deposit``.
        """
        if self.max_day is not None:
            return deposit
        limits = [each for each in (self.max_order, self.approve_above) if each is not None]
        if not limits:
            return MAX_UNITS
        return max(deposit, usdc_to_deposit_floor(direction, min(limits), rate))


def _compared(address: str) -> str:
    """The form in which addresses are compared: EVM without case, Monero to the letter."""
    return address.lower() if address[:2] in ("0x", "0X") else address


@lru_cache(maxsize=256)
def _set_of(destinations: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(_compared, destinations))


def worth(direction: Direction, deposit: int, rate: int) -> int:
    """A deposit's worth in USDC units, rounded up; ``rate`` in USDC units per XMR."""
    if direction is Direction.XMR_TO_USDC:
        return mul_div_ceil(deposit, rate, ONE_XMR)
    return deposit


class Credential(NamedTuple):
    """A client, and the SHA-256 of a token that names it."""

    token_hash: bytes
    client: KnownClient


class Clients:
    """Finds clients by token and by name. ``replace`` changes them while the service runs."""

    def __init__(self, credentials: Iterable[Credential] = ()) -> None:
        self.replace(credentials)

    def replace(self, credentials: Iterable[Credential]) -> None:
        """Know these clients from now on, and no others."""
        self._credentials = tuple(credentials)
        self._by_name = {each.client.name: each.client for each in self._credentials}

    @property
    def has_tokens(self) -> bool:
        """Whether any token is known."""
        return bool(self._credentials)

    def find(self, token: str) -> KnownClient | None:
        """The client with that token. All hashes are compared, so timing reveals nothing."""
        given = key_hash(token)
        matches = [
            each.client for each in self._credentials if hmac.compare_digest(given, each.token_hash)
        ]
        return matches[0] if matches else None

    def named(self, name: str) -> KnownClient | None:
        """The client of that name."""
        return self._by_name.get(name)

    @property
    def listed(self) -> Sequence[KnownClient]:
        """The clients with a table of the settings, by name."""
        found = (each for each in self._by_name.values() if not each.is_default)
        return sorted(found, key=lambda each: each.name)


def default_credentials(tokens: Iterable[str]) -> list[Credential]:
    """The client DEFAULT, by each of its tokens."""
    return [Credential(key_hash(token), KnownClient(DEFAULT, token=token)) for token in tokens]
