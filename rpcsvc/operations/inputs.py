"""Reads a caller's inputs: the params models check types, the domain checks meaning.

All problems of a call are collected into one refusal, one for each field. Every message names what
was received and what to send instead, in the service's own words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any, Final, TypeVar, get_args

from msgspec import Struct
from pydantic import ValidationError

from rpcsvc.domain.addresses import parse_evm_address, parse_monero_address, same_address
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money, parse_amount, parse_any_amount
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.domain.webhooks import Webhook, read_secret, read_url, secret_digest
from rpcsvc.errors import (
    InputError,
    InputErrors,
    InvalidDestination,
    InvalidInput,
    MissingInput,
    UnsupportedDirection,
    VerificationFailed,
)
from rpcsvc.operations.params import (
    LONGEST_NAME,
    ORDER_ID_PATTERN,
    UUID_PATTERN,
    Params,
    WebhookParams,
)
from rpcsvc.operations.service import Call, Service
from rpcsvc.orders.ports.venue import FaultKind
from rpcsvc.strict_json import Json, as_integer

P = TypeVar("P", bound=Params)
T = TypeVar("T")

_UUID = re.compile(UUID_PATTERN, re.ASCII)
_ORDER_ID = re.compile(ORDER_ID_PATTERN, re.ASCII)
# The header, and over JSON-RPC the param, of the key.
IDEMPOTENCY_KEY: Final = "idempotency-key"
LEAST_PUBLIC_KEY = 16
LONGEST_KEY = 255

_INTENT: Final = (
    "direction", "chain", "amount", "receive_amount", "to", "refund_address", "funding",
)  # fmt: skip

# Bounded: an answer to thousands of unknown properties would be many times their size.
MOST_PROBLEMS: Final = 16
# For how many of them a near name is looked for: a batch has fifty calls.
_MOST_GUESSES: Final = 4
_CHAIN_NUMBER: Final = "Send 0 for XMR, else the number of the USDC's chain, such as 42161."
# How a validator names the branches of a union; they are no part of a field's name.
_BRANCHES: Final = frozenset({"str", "int", "dict[str,any]"})
# In any spelling: the idempotency key has a different place on each transport.
_KEY_SPELLING: Final = re.compile(r"(x[-_ ]?)?idempot[a-z]*[-_ ]?key", re.IGNORECASE)
_KEY_PLACE: Final = (
    "The key goes into the header idempotency-key over HTTPS, and into the param idempotency-key"
    " over JSON-RPC, of calls that create an order."
)
_QUOTED: Final = re.compile(r"'([^']*)'")
_LIMITS: Final = ("ge", "le", "min_length", "max_length")


class SwapIntent(Struct, frozen=True):
    """A swap as far as the caller's inputs define it. ``amount`` is in the asset that the user
    sends, ``receive_amount`` in that of the payout; there is one of them at most.

    ``funding``: x402 if the quote must include the gas of a signed payment.
    """

    direction: Direction | None
    chain: Chain | None
    amount: Money | None
    to: str | None
    refund_address: str | None = None
    funding: str | None = None
    receive_amount: Money | None = None

    @property
    def named(self) -> Money | None:
        """The amount that the caller named, in the asset of the deposit or of the payout."""
        return self.amount if self.receive_amount is None else self.receive_amount

    @property
    def missing(self) -> list[str]:
        """Names of required inputs that are missing."""
        needed = (
            ("direction", self.direction),
            ("chain", self.chain),
            ("amount", self.named),
            ("to", self.to),
        )
        return [name for name, value in needed if not value]


class Problems:
    """Collects the problems of a call's inputs, and raises them once, as one error.

    ``with problems:`` takes the InputError or InputErrors that its block raises, and what follows
    the block runs.
    """

    def __init__(self, found: Iterable[InputError] = ()) -> None:
        self._found = list(found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, InputError | InputErrors):
            self.note(error)
            return True
        return False

    def note(self, error: InputError | InputErrors) -> None:
        """Add the problems of an error that was raised."""
        self._found += error.problems if isinstance(error, InputErrors) else (error,)

    def add(self, *problems: InputError) -> None:
        """Add problems that were found without raising them."""
        self._found += problems

    @property
    def fields(self) -> frozenset[str]:
        """The fields that have a problem."""
        return frozenset(problem.field for problem in self._found)

    @property
    def error(self) -> InputError | InputErrors:
        """Return one error for all problems, of which there has to be one."""
        return self._found[0] if len(self._found) == 1 else InputErrors(self._found)

    def raise_found(self) -> None:
        """Raise one error for all problems; return if there are none."""
        if self._found:
            raise self.error


async def parse_call(model: type[P], params: dict[str, Any], call: Call, service: Service) -> P:
    """Validate the params of a call together with its idempotency key.

    Raises InputError or InputErrors that name every problem, the key's included.
    """
    if call.idempotency_key is None:
        return await parse_params(model, params, service)
    problems = Problems()
    with problems:
        read_key(call.idempotency_key, call.namespace)
    with problems:
        parsed = await parse_params(model, params, service)
    problems.raise_found()
    return parsed


async def parse_params(model: type[P], params: dict[str, Any], service: Service) -> P:
    """Validate the params. Raises InputError or InputErrors that name every problem."""
    params = _without_excess(model, params)
    try:
        parsed: P = model.__pydantic_validator__.validate_python(params)
    except ValidationError as error:
        problems = Problems(_with_one(model, params, problems_of(model, error)))
    else:
        return parsed
    await _read_rest(model, params, service, problems)
    raise problems.error


async def read_intent(params: Any, service: Service, problems: Problems) -> SwapIntent:
    """Read direction, chain, amounts and addresses; what is wrong is added to ``problems``."""
    chain = amount = to = refund_to = receive = None
    known = vars(params)  # pydantic is slow to report a missing attribute
    given, refund = known.get("to"), known.get("refund_address")
    direction = Direction(params.direction) if params.direction else None
    funding = known.get("funding")
    # Each call passes these three: ``with problems`` would cost it 2,000 instructions a time.
    try:
        if params.chain is not None:
            chain = service.chains.resolve(params.chain)
    except InputError as error:
        problems.note(error)
    try:
        if params.amount is not None:
            amount = _amount(params.amount, direction)
    except InputError as error:
        problems.note(error)
    if params.receive_amount is not None:
        with problems:
            receive = _receive_amount(params, direction)
    try:
        if given is not None:
            to = await read_destination(given, direction, service)
    except InputError as error:
        problems.note(error)
    if refund is not None and direction is not None:
        with problems:
            refund_to = await read_refund_address(refund, direction, service)
    if funding is not None:
        with problems:
            require_signable(direction)
    return SwapIntent(direction, chain, amount, to, refund_to, funding, receive)


def require_signable(direction: Direction | None) -> None:
    """Raise InvalidInput for a deposit that no service takes by a signature."""
    if direction is Direction.XMR_TO_USDC:
        raise InvalidInput(
            "Only USDC is paid by signing (x402), and with x2u the user sends XMR. Leave funding"
            " out, and send the deposit in the ordinary way.",
            field="funding",
            received="x402",
        )


def read_session(session_id: str | None, *, field: str = "sessionId") -> str | None:
    """The session id in lower case. Raises InvalidInput if it is no UUID.

    The message shows no example UUID: everybody could read orders made with it.
    """
    if session_id is None:
        return None
    if not is_session_id(session_id):
        raise InvalidInput(
            f"{field} must be a random UUID (version 4). {HINTS[field]}",
            field=field,
            received=session_id,
        )
    return session_id.lower()


def is_session_id(text: str) -> bool:
    """Return whether ``text`` has the form of a session id, a UUID of version 4."""
    return _UUID.fullmatch(text) is not None


def read_order_id(order_id: str) -> str:
    """The order id. Raises InvalidInput when it can't be one."""
    if not _ORDER_ID.fullmatch(order_id):
        raise InvalidInput(
            "orderId must be ord_ and 26 characters, as create or execute answered it.",
            field="orderId",
            received=order_id,
        )
    return order_id


def read_key(key: object, namespace: str) -> str:
    """The idempotency key. Raises InvalidInput for a wrong form.

    In the namespace that all callers share, a guessed key gives the order's session away.
    """
    least = LEAST_PUBLIC_KEY if namespace == "public" else 1
    if not isinstance(key, str) or not _KEYS[least].fullmatch(key):
        raise InvalidInput(
            f"idempotency-key must be {least} to {LONGEST_KEY} printable ASCII characters. Send a"
            " UUID that is made for this order.",
            field=IDEMPOTENCY_KEY,
            received=key,
        )
    return key


def key_pattern(least: int) -> str:
    """A pattern for printable ASCII of at least ``least`` characters, without blanks at
    either end.
    """
    rest = f"[ -~]{{{max(0, least - 2)},{LONGEST_KEY - 2}}}[!-~]"
    return f"[!-~]{rest}" if least > 1 else f"[!-~]({rest})?"


_KEYS: Final = {least: re.compile(key_pattern(least), re.ASCII) for least in (1, LEAST_PUBLIC_KEY)}


def bare_key(key: Any) -> Any:
    """An idempotency key without surrounding blanks, as a header carries it.

    They are no part of a header's value (RFC 9110, section 5.5), so with them the same key would
    differ between transports. ``read_key`` refuses what is no string.
    """
    return key.strip(" ") if isinstance(key, str) else key


async def read_refund_address(
    address: str, direction: Direction, service: Service, *, field: str = "refundAddress"
) -> str:
    """An address on the deposit's network, normalised. Raises InvalidDestination."""
    read = _monero if direction is Direction.XMR_TO_USDC else _evm
    return await _not_ours(read(address, field, service), service, field=field, received=address)


def read_webhook(given: WebhookParams | None, service: Service) -> Webhook | None:
    """The webhook of an order. Raises InvalidInput, and MissingInput if messages could not be
    signed.

    The address of its host is checked when a message is sent.
    """
    if given is None:
        return None
    url = read_url(given.url, service.webhooks.targets, name="webhook.url")
    if given.secret is not None:
        return Webhook(url, read_secret(given.secret, name="webhook.secret"))
    if service.webhooks.public_key() is None:
        raise missing("webhook.secret")
    return Webhook(url)


def keyed_webhook(webhook: Webhook | None) -> Json:
    """A webhook in the form that an idempotency key's fingerprint holds."""
    if webhook is None:
        return {}
    secret = None if webhook.secret is None else secret_digest(webhook.secret)
    return {"webhook": {"url": webhook.url, "secretSha256": secret}}


def _evm(text: str, field: str, service: Service) -> str:
    try:
        return parse_evm_address(text, field=field, forbidden=service.chains.token_contracts)
    except InvalidDestination as problem:
        problem.allowed = ["the user's own EVM address: 0x and 40 hex digits"]
        raise


def _monero(text: str, field: str, service: Service) -> str:
    networks = service.monero_networks
    try:
        return parse_monero_address(text, field=field, networks=networks).text
    except InvalidDestination as problem:
        problem.allowed = [f"a Monero address of the {network}" for network in sorted(networks)]
        raise


def _amount(text: object, direction: Direction | None) -> Money:
    # Without a direction the asset is not known yet: XMR takes the most decimals.
    return parse_any_amount(text, deposit_asset(direction or Direction.XMR_TO_USDC))


def _receive_amount(params: Any, direction: Direction | None) -> Money:
    if params.amount is not None:
        raise both_amounts("receiveAmount", "amount", params.receive_amount)
    asset = payout_asset(direction or Direction.USDC_TO_XMR)
    return parse_any_amount(params.receive_amount, asset, field="receiveAmount")


def _with_one(
    model: type[Params], given: Mapping[str, Any], found: list[InputError]
) -> list[InputError]:
    """The problems of a call, with that of neither of the inputs of which one is needed, in its
    place.
    """
    if model.one_of is None or any(given.get(name) is not None for name in model.one_of):
        return found
    order = [info.alias or name for name, info in model.model_fields.items()]
    later = order[order.index(model.one_of[0]) :]
    at = next((at for at, each in enumerate(found) if each.field in later), len(found))
    return [*found[:at], missing(model.one_of[0]), *found[at:]]


def both_amounts(field: str, other: str, received: str) -> InvalidInput:
    """The error for an amount to arrive beside one to send: one follows from the other."""
    return InvalidInput(
        f"{field} stands in place of {other}. Send {field} for what is to arrive exactly, or"
        f" {other} for what the user sends, and leave the other one out.",
        field=field,
        received=received,
    )


async def read_destination(
    text: str, direction: Direction | None, service: Service, *, field: str = "to"
) -> str:
    """The destination of the payout, normalised. Raises InvalidDestination."""
    looks_evm = text.strip()[:2] in ("0x", "0X")
    is_evm = looks_evm if direction is None else direction is Direction.XMR_TO_USDC
    address = _evm(text, field, service) if is_evm else _monero(text, field, service)
    return await _not_ours(address, service, field=field, received=text)


async def _not_ours(address: str, service: Service, *, field: str, received: str) -> str:
    if await service.store.is_deposit_address(address):
        raise InvalidDestination(
            "This is a deposit address of the service itself. Send the user's own address.",
            field=field,
            received=received,
            allowed=["the user's own address"],
        )
    return address


def require_verified(verify: str | None, to_address: str) -> None:
    """Raise VerificationFailed unless ``verify``, if given, is the order's destination."""
    if verify is not None and not same_address(verify, to_address):
        raise VerificationFailed(
            "verify is not the destination address of this order. Check that the orderId is the"
            " one you were given, and send the destination exactly as it was ordered."
        )


async def _read_rest(
    model: type[Params], params: dict[str, Any], service: Service, problems: Problems
) -> None:
    """Read the meaning of well-typed inputs, so that one correction can fix all problems."""
    wrong = problems.fields
    known = {name: info.alias or name for name, info in model.model_fields.items()}
    names = {name for name, wire in known.items() if wire not in wrong}
    rest = {
        name: as_integer(params.get(known[name])) if name in names else None for name in _INTENT
    }
    await read_intent(SimpleNamespace(**rest), service, problems)


HINTS = {
    "direction": "Say which way to swap: x2u (XMR to USDC) or u2x (USDC to XMR).",
    "chain": "Name the chain of the USDC side, such as arbitrum or 42161.",
    "amount": 'Say how much the user sends, as a decimal string such as "0.8", or in receiveAmount'
    " how much is to arrive exactly.",
    "receiveAmount": 'Say how much is to arrive, as a decimal string such as "100", or leave it'
    " out.",
    "to": "Ask the user where the payout goes: an EVM address for x2u, a Monero one for u2x.",
    "orderId": "Send the orderId that create or execute answered.",
    "message": "Say in words what the ticket is about.",
    "ticketId": "Send the ticketId that support.create answered.",
    "ticketSecret": "Send the ticketSecret that support.create answered with the ticketId.",
    "category": "Say in a word what the ticket is about, such as payout.",
    "refundAddress": "Send the user's own address on the network of the deposit, or leave it out.",
    "address": "Send the user's own address on the network of the deposit.",
    "funding": "Send x402 to pay a u2x order by signing, or leave it out.",
    "quoteDigest": "Send the one that quote answered, or leave it out.",
    "transaction": "Send the unsigned EVM transaction or its calldata, or leave it out.",
    "payment": "Send the PaymentPayload of x402, or leave it out to learn what to sign.",
    "webhook": 'Send an https URL, or an object such as {"url": "https://agent.example/hook"}.',
    "webhook.url": "Send an https URL of a public host, such as https://agent.example/hook.",
    "webhook.secret": "This service has no signing key: send whsec_ and the base64 of 24 to 64"
    " random bytes, which messages are signed with.",
    "walletAddress": "Send the user's own address, where a refund may go.",
    "fault": f"Send one of: {', '.join(FaultKind)}.",
    "rate": 'Send USDC for one XMR as a decimal string, such as "165".',
    "verify": "Send the destination that was ordered.",
    "fromChainId": _CHAIN_NUMBER,
    "toChainId": _CHAIN_NUMBER,
    "twapConfig": 'Send an object such as {"disabled": true}, or leave it out.',
    "sessionId": "Send the one that create or execute answered, or leave it out.",
    "session": "Send the sessionId that the orders were made with.",
    "fromToken": "Send XMR on chain 0, else the chain's USDC contract.",
    "toToken": "Send XMR on chain 0, else the chain's USDC contract.",
    "toAmount": "Send atomic units as a string, or leave it out.",
    "fromAmount": "Send atomic units as a string: one XMR is 10^12, one USDC 10^6.",
    "toAddress": "Ask the user where the payout goes.",
}


def missing(field: str) -> MissingInput:
    """The error for a required input that was not sent."""
    return MissingInput(f"{field} is missing. {HINTS.get(field, '')}".strip(), field=field)


def problems_of(model: type[Params], error: ValidationError) -> list[InputError]:
    """Return one problem for each field, although a union reports each of its branches."""
    by_field: dict[str, InputError] = {}
    for count, item in enumerate(error.errors(include_url=False)[:MOST_PROBLEMS]):
        by_field.setdefault(_path(item), _problem(model, item, is_guessed=count < _MOST_GUESSES))
    return list(by_field.values())


def _without_excess(model: type[Params], params: dict[str, Any]) -> dict[str, Any]:
    """Return the params with no more unknown ones than are reported."""
    if len(params) <= MOST_PROBLEMS:
        return params
    known = _wire_names(model)
    reported = set(islice((name for name in params if name not in known), MOST_PROBLEMS))
    return {name: params[name] for name in params if name in known or name in reported}


def _path(item: Any) -> str:
    """The field's name on the wire: ``twapConfig.intervalMs`` for one within another."""
    parts = [str(part) for part in item["loc"]]
    if item["type"] != "extra_forbidden":
        parts = [*parts[:1], *(part for part in parts[1:] if part not in _BRANCHES)]
    return ".".join(parts)[:LONGEST_NAME] or "params"


def _problem(model: type[Params], item: Any, *, is_guessed: bool) -> InputError:
    field, kind, received = _path(item), item["type"], item["input"]
    if kind == "missing":
        return _left_out(model, field)
    if kind == "extra_forbidden":
        return _unknown(_model_at(model, item["loc"]), field, item, is_guessed=is_guessed)
    if field == "direction":
        return UnsupportedDirection(
            "direction must be x2u (XMR to USDC) or u2x (USDC to XMR).",
            field=field,
            received=received,
            allowed=["x2u", "u2x"],
        )
    if field in ("amount", "receiveAmount"):
        return _wrong_amount(received, field)
    return _wrong(field, kind, item)


def _left_out(model: type[Params], field: str) -> MissingInput:
    """The problem of a required input that was not sent; some accept null, but need it
    explicitly.
    """
    takes_null = any(
        type(None) in get_args(info.annotation)
        for name, info in model.model_fields.items()
        if (info.alias or name) == field
    )
    if takes_null:
        return MissingInput(f"{field} is missing. Send null if there is none.", field=field)
    return missing(field)


def _model_at(model: type[Params], path: tuple[int | str, ...]) -> type[Params]:
    """The model that has the last part of ``path`` as a property."""
    for part in path[:-1]:
        annotation = next(
            info.annotation
            for name, info in model.model_fields.items()
            if (info.alias or name) == part
        )
        kinds = (annotation, *get_args(annotation))
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Params))
    return model


def _unknown(model: type[Params], field: str, item: Any, *, is_guessed: bool) -> InvalidInput:
    known = _wire_names(model)
    meant = _meant(str(item["loc"][-1]), known) if is_guessed else ""
    return InvalidInput(
        f"{field} is not a property of this operation.{meant}",
        field=field,
        received=item["input"],
        allowed=known,
    )


@cache
def _wire_names(model: type[Params]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def _meant(name: str, known: list[str]) -> str:
    """A sentence that suggests the property meant by an unknown one; empty if none is near."""
    if _KEY_SPELLING.fullmatch(name[:LONGEST_NAME]):
        return f" {_KEY_PLACE}"
    by_small = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name[:LONGEST_NAME].lower(), by_small, n=1)
    return f" Did you mean {by_small[near[0]]}?" if near else ""


def _wrong_amount(received: Any, field: str) -> InputError:
    try:
        parse_amount(received, deposit_asset(Direction.XMR_TO_USDC), field=field)
    except InputError as problem:
        return problem
    return InvalidInput(f"{field} must be a decimal string.", field=field, received=received)


def _wrong(field: str, kind: str, item: Any) -> InvalidInput:
    """The problem of a value with a wrong type or outside its bounds."""
    received, limits = item["input"], item.get("ctx", {})
    allowed: Any = None
    if kind in _BOUNDS:
        name, text = _BOUNDS[kind]
        bound = as_integer(next(iter(limits[key] for key in _LIMITS if key in limits)))
        message, allowed = f"{field} {text.format(bound)}", {name: bound}
    elif kind == "literal_error":
        allowed = _QUOTED.findall(limits["expected"])
        message = f"{field} must be one of {', '.join(allowed)}."
        message += _meant(received, allowed) if isinstance(received, str) else ""
    else:
        message = _type_message(field, kind, item)
    return InvalidInput(message, field=field, received=received, allowed=allowed)


# Bounds: the name for programs, and the wording for messages.
_BOUNDS: Final = {
    "greater_than_equal": ("minimum", "must be at least {}."),
    "less_than_equal": ("maximum", "must be at most {}."),
    "string_too_short": ("minimumLength", "is too short: send at least {} character."),
    "string_too_long": ("maximumLength", "is too long: send at most {} characters."),
}


_TYPES: Final = {
    "string_type": "a string",
    "string_pattern_mismatch": "as the service answered it",
    "dict_type": "an object or a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "model_type": "an object",
}


def _type_message(field: str, kind: str, item: Any) -> str:
    expected = _TYPES.get(kind)
    if field == "chain":
        expected = "a chain name or number, such as arbitrum or 42161"
    if expected is None:
        return f"{field}: {item['msg']}."
    return f"{field} must be {expected}. {HINTS.get(field, '')}".strip()
