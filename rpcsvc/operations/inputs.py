"""Reading what a caller sent: types by the params models, meaning by the domain.

All problems of a call are collected, so that one correction mends them all. Every message says
what came and what to send instead. What does not live here: limits that depend on the rate
(quoting.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from rpcsvc.domain.addresses import parse_evm_address, parse_monero_address, same_address
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money, parse_amount
from rpcsvc.domain.order import PERPS
from rpcsvc.domain.pricing import deposit_asset
from rpcsvc.domain.states import Direction
from rpcsvc.errors import (
    InputError,
    InputErrors,
    InvalidDestination,
    InvalidInput,
    MissingInput,
    UnsupportedChain,
    UnsupportedDirection,
    VerificationFailed,
)
from rpcsvc.operations.models import ORDER_ID_PATTERN, UUID_PATTERN, Params
from rpcsvc.operations.service import Service

P = TypeVar("P", bound=Params)
T = TypeVar("T")

_UUID = re.compile(UUID_PATTERN, re.ASCII)
_ORDER_ID = re.compile(ORDER_ID_PATTERN, re.ASCII)
_KEY = re.compile(r"[ -~]{1,255}", re.ASCII)

# An answer to thousands of unknown properties would be many times their size.
MOST_PROBLEMS: Final = 32
_INTENT: Final = ("direction", "chain", "amount", "to")

HINTS = {
    "direction": "Say which way to swap: x2u (XMR to USDC) or u2x (USDC to XMR).",
    "chain": "Name the chain of the USDC side, such as arbitrum or 42161.",
    "amount": 'Say how much the user sends, as a decimal string such as "0.8".',
    "to": "Ask the user where the payout goes: an EVM address for x2u, a Monero one for u2x.",
    "orderId": "Send the orderId that create or execute answered.",
    "message": "Say in words what the ticket is about.",
    "sessionId": "Leave it out to have one made.",
    "session": "Send the sessionId that the orders were made with.",
    "fromToken": "Send XMR on chain 0, else the chain's USDC contract.",
    "toToken": "Send XMR on chain 0, else the chain's USDC contract.",
    "fromAmount": "Send atomic units as a string: one XMR is 10^12, one USDC 10^6.",
    "toAddress": "Ask the user where the payout goes.",
}

# How a validator names the branches of a union; they are no part of a field's name.
_BRANCHES: Final = frozenset({"str", "int"})


@dataclass(frozen=True, slots=True)
class Intent:
    """What a caller wants, as far as it is known. ``amount`` in the asset that the user sends."""

    direction: Direction | None
    chain: Chain | None
    amount: Money | None
    to: str | None

    @property
    def missing(self) -> list[str]:
        """Names of the inputs that an order needs and that are not known."""
        return [name for name in ("direction", "chain", "amount", "to") if not getattr(self, name)]


def parse_params(model: type[P], params: dict[str, Any], service: Service) -> P:
    """The params as their model. Raises InputError or InputErrors naming every problem."""
    try:
        return model.__pydantic_validator__.validate_python(params)  # type: ignore[no-any-return]
    except ValidationError as error:
        problems = _problems(model, error)
        problems += _problems_of_rest(model, params, problems, service)
        raise combined(problems) from None


def combined(problems: list[InputError]) -> InputError | InputErrors:
    """One error for all the problems of a call."""
    return problems[0] if len(problems) == 1 else InputErrors(problems)


def missing(field: str) -> MissingInput:
    """The error for a required input that was not sent."""
    return MissingInput(f"{field} is missing. {HINTS.get(field, '')}".strip(), field=field)


def read_intent(params: Any, service: Service) -> tuple[Intent, list[InputError]]:
    """The meaning of direction, chain, amount and to, and what is wrong with them."""
    problems: list[InputError] = []

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except InputError as problem:
            problems.append(problem)
            return None

    direction = Direction(params.direction) if params.direction else None
    chain = (
        attempt(lambda: service.chains.resolve(params.chain)) if params.chain is not None else None
    )
    amount = (
        attempt(lambda: _amount(params.amount, direction)) if params.amount is not None else None
    )
    given = getattr(params, "to", None)
    to = attempt(lambda: read_destination(given, direction, service)) if given is not None else None
    return Intent(direction, chain, amount, to), problems


def read_session(session_id: str | None, *, field: str = "sessionId") -> str | None:
    """The session id in lower case. Raises InvalidInput when it is not a UUID."""
    if session_id is None:
        return None
    if not _UUID.fullmatch(session_id):
        raise InvalidInput(
            f"{field} must be a UUID such as 3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90. {HINTS[field]}",
            field=field,
            received=session_id,
        )
    return session_id.lower()


def read_order_id(order_id: str) -> str:
    """The order id. Raises InvalidInput when it can't be one."""
    if not _ORDER_ID.fullmatch(order_id):
        raise InvalidInput(
            "orderId must be ord_ and 26 characters, as create or execute answered it.",
            field="orderId",
            received=order_id,
        )
    return order_id


def read_key(key: object) -> str:
    """The idempotency key. Raises InvalidInput when it has another form."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidInput(
            "idempotency-key must be 1 to 255 printable ASCII characters, such as a UUID.",
            field="idempotency-key",
            received=key,
        )
    return key


def read_refund_address(address: str, direction: Direction, service: Service) -> str:
    """An address on the deposit's network. Raises InvalidDestination."""
    if direction is Direction.XMR_TO_USDC:
        return parse_monero_address(
            address, field="walletAddress", networks=service.monero_networks
        ).text
    return parse_evm_address(address, field="walletAddress", forbidden=_contracts(service))


def _amount(text: object, direction: Direction | None) -> Money:
    # Without a direction the asset is not known yet: XMR takes the most decimals.
    return parse_amount(text, deposit_asset(direction or Direction.XMR_TO_USDC))


def read_destination(
    text: str, direction: Direction | None, service: Service, *, field: str = "to"
) -> str:
    """Where the payout goes, normalised. Raises InvalidDestination."""
    is_evm = text[:2] in ("0x", "0X") if direction is None else direction is Direction.XMR_TO_USDC
    if is_evm:
        address = parse_evm_address(text, field=field, forbidden=_contracts(service))
    else:
        networks = service.monero_networks
        address = parse_monero_address(text, field=field, networks=networks).text
    if service.store.is_deposit_address(address):
        raise InvalidDestination(
            "This is a deposit address of the service itself. Send the user's own address.",
            field=field,
            received=text,
        )
    return address


def require_offered(chain: Chain, service: Service) -> None:
    """Raise UnsupportedChain for a chain that is configured, and not settled on now.

    Not asked while an order is read: the retry of a key gets its first answer all the same.
    """
    offered = service.chains.all()
    if chain.name == PERPS or any(chain.chain_id == other.chain_id for other in offered):
        return
    names = [other.name for other in offered]
    raise UnsupportedChain(
        f"{chain.name} can't be used now. Send one of: {', '.join(names)}.",
        field="chain",
        received=chain.name,
        allowed=names,
    )


def require_verified(verify: str | None, to_address: str) -> None:
    """Raise VerificationFailed unless ``verify``, if given, is the order's destination."""
    if verify is not None and not same_address(verify, to_address):
        raise VerificationFailed(
            "verify is not the destination address of this order. Check that the orderId is the"
            " one you were given, and send the destination exactly as it was ordered."
        )


def _contracts(service: Service) -> frozenset[str]:
    return service.chains.token_contracts


def _problems(model: type[Params], error: ValidationError) -> list[InputError]:
    """One problem per field: a union reports each of its branches."""
    by_field: dict[str, InputError] = {}
    for item in error.errors(include_url=False)[:MOST_PROBLEMS]:
        field = str(item["loc"][0]) if item["loc"] else "params"
        by_field.setdefault(field, _problem(model, field, item["type"], item))
    return list(by_field.values())


def _problems_of_rest(
    model: type[Params], params: dict[str, Any], found: list[InputError], service: Service
) -> list[InputError]:
    """What the inputs mean that have the right type: one correction should mend them all."""
    names = model.model_fields.keys() - {problem.field for problem in found}
    rest = {name: params.get(name) if name in names else None for name in _INTENT}
    return read_intent(SimpleNamespace(**rest), service)[1]


def _problem(model: type[Params], field: str, kind: str, item: Any) -> InputError:
    received = item["input"]
    if kind == "missing":
        return missing(field)
    if kind == "extra_forbidden" and len(item["loc"]) == 1:
        return _unknown(model, field, received)
    if field == "direction":
        return UnsupportedDirection(
            "direction must be x2u (XMR to USDC) or u2x (USDC to XMR).",
            field=field,
            received=received,
            allowed=["x2u", "u2x"],
        )
    if field == "amount":
        return _wrong_amount(received)
    path = ".".join(str(part) for part in item["loc"] if part not in _BRANCHES) or field
    return InvalidInput(_type_message(path, kind, item), field=path, received=received)


def _unknown(model: type[Params], field: str, received: Any) -> InvalidInput:
    known = [info.alias or name for name, info in model.model_fields.items()]
    near = difflib.get_close_matches(field, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return InvalidInput(
        f"{field[:64]} is not a property of this operation.{hint}",
        field=field[:64],
        received=received,
        allowed=known,
    )


def _wrong_amount(received: Any) -> InputError:
    try:
        parse_amount(received, deposit_asset(Direction.XMR_TO_USDC))
    except InputError as problem:
        return problem
    return InvalidInput("amount must be a decimal string.", field="amount", received=received)


def _type_message(field: str, kind: str, item: Any) -> str:
    if kind == "literal_error":
        return f"{field} must be one of {item['ctx']['expected']}."
    expected = {
        "string_type": "a string",
        "bool_type": "true or false",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
    }.get(kind)
    if field == "chain":
        expected = "a chain name or number, such as arbitrum or 42161"
    if expected is None:
        return f"{field}: {item['msg']}."
    return f"{field} must be {expected}. {HINTS.get(field, '')}".strip()
