"""Messages for params that their model refuses: one problem for each field.

Each names what was received and what to send instead, in our words and not in the validator's.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Final, get_args

from pydantic import ValidationError

from rpcsvc.domain.money import parse_amount
from rpcsvc.domain.pricing import Direction, deposit_asset
from rpcsvc.errors import InputError, InputErrors, InvalidInput, MissingInput, UnsupportedDirection
from rpcsvc.operations.params import Params, whole
from rpcsvc.orders.ports.sandbox import FaultKind

# An answer to thousands of unknown properties would be many times their size.
MOST_PROBLEMS: Final = 32


LONGEST_NAME: Final = 64


_CHAIN_NUMBER: Final = "Send 0 for XMR, else the number of the USDC's chain, such as 42161."


HINTS = {
    "direction": "Say which way to swap: x2u (XMR to USDC) or u2x (USDC to XMR).",
    "chain": "Name the chain of the USDC side, such as arbitrum or 42161.",
    "amount": 'Say how much the user sends, as a decimal string such as "0.8".',
    "to": "Ask the user where the payout goes: an EVM address for x2u, a Monero one for u2x.",
    "orderId": "Send the orderId that create or execute answered.",
    "message": "Say in words what the ticket is about.",
    "category": "Say in a word what the ticket is about, such as payout.",
    "refundAddress": "Send the user's own address on the network of the deposit, or leave it out.",
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
    "fromAmount": "Send atomic units as a string: one XMR is 10^12, one USDC 10^6.",
    "toAddress": "Ask the user where the payout goes.",
}


# How a validator names the branches of a union; they are no part of a field's name.
_BRANCHES: Final = frozenset({"str", "int"})


# However a caller spells it: what is called idempotency-key has another place on each transport.
_KEY_SPELLING: Final = re.compile(r"(x[-_ ]?)?idempot[a-z]*[-_ ]?key", re.IGNORECASE)


_KEY_PLACE: Final = (
    "The key goes into the header idempotency-key over HTTPS, and into the param idempotency-key"
    " over JSON-RPC, of calls that create an order."
)


_QUOTED: Final = re.compile(r"'([^']*)'")


def combined(problems: list[InputError]) -> InputError | InputErrors:
    """One error for all the problems of a call."""
    return problems[0] if len(problems) == 1 else InputErrors(problems)


def missing(field: str) -> MissingInput:
    """The error for a required input that was not sent."""
    return MissingInput(f"{field} is missing. {HINTS.get(field, '')}".strip(), field=field)


def problems_of(model: type[Params], error: ValidationError) -> list[InputError]:
    """One problem per field: a union reports each of its branches."""
    by_field: dict[str, InputError] = {}
    for item in error.errors(include_url=False)[:MOST_PROBLEMS]:
        by_field.setdefault(_path(item), _problem(model, item))
    return list(by_field.values())


def _path(item: Any) -> str:
    """The field's name on the wire: ``twapConfig.intervalMs`` for one within another."""
    parts = [str(part) for part in item["loc"]]
    if item["type"] != "extra_forbidden":
        parts = [*parts[:1], *(part for part in parts[1:] if part not in _BRANCHES)]
    return ".".join(parts)[:LONGEST_NAME] or "params"


def _problem(model: type[Params], item: Any) -> InputError:
    field, kind, received = _path(item), item["type"], item["input"]
    if kind == "missing":
        return _left_out(model, field)
    if kind == "extra_forbidden":
        return _unknown(_model_at(model, item["loc"]), field, item)
    if field == "direction":
        return UnsupportedDirection(
            "direction must be x2u (XMR to USDC) or u2x (USDC to XMR).",
            field=field,
            received=received,
            allowed=["x2u", "u2x"],
        )
    if field == "amount":
        return _wrong_amount(received)
    return _wrong(field, kind, item)


def _left_out(model: type[Params], field: str) -> MissingInput:
    """A required input that was not sent; some may be null, but have to be said to be."""
    takes_null = any(
        type(None) in get_args(info.annotation)
        for name, info in model.model_fields.items()
        if (info.alias or name) == field
    )
    if takes_null:
        return MissingInput(f"{field} is missing. Send null if there is none.", field=field)
    return missing(field)


def _model_at(model: type[Params], path: tuple[int | str, ...]) -> type[Params]:
    """The model whose property the last part of ``path`` is."""
    for part in path[:-1]:
        annotation = next(
            info.annotation
            for name, info in model.model_fields.items()
            if (info.alias or name) == part
        )
        kinds = (annotation, *get_args(annotation))
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Params))
    return model


def _unknown(model: type[Params], field: str, item: Any) -> InvalidInput:
    known = [info.alias or name for name, info in model.model_fields.items()]
    return InvalidInput(
        f"{field} is not a property of this operation.{_meant(str(item['loc'][-1]), known)}",
        field=field,
        received=item["input"],
        allowed=known,
    )


def _meant(name: str, known: list[str]) -> str:
    """What an unknown property was to be, as a sentence to append; empty when nothing is near."""
    if _KEY_SPELLING.fullmatch(name[:LONGEST_NAME]):
        return f" {_KEY_PLACE}"
    by_small = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name[:LONGEST_NAME].lower(), by_small, n=1)
    return f" Did you mean {by_small[near[0]]}?" if near else ""


def _wrong_amount(received: Any) -> InputError:
    try:
        parse_amount(received, deposit_asset(Direction.XMR_TO_USDC))
    except InputError as problem:
        return problem
    return InvalidInput("amount must be a decimal string.", field="amount", received=received)


def _wrong(field: str, kind: str, item: Any) -> InvalidInput:
    """A value of another type, or outside of its bounds."""
    received, limits = item["input"], item.get("ctx", {})
    allowed: Any = None
    if kind in _BOUNDS:
        name, text = _BOUNDS[kind]
        bound = whole(next(iter(limits[key] for key in _LIMITS if key in limits)))
        message, allowed = f"{field} {text.format(bound)}", {name: bound}
    elif kind == "literal_error":
        allowed = _QUOTED.findall(limits["expected"])
        message = f"{field} must be one of {', '.join(allowed)}."
        message += _meant(received, allowed) if isinstance(received, str) else ""
    else:
        message = _type_message(field, kind, item)
    return InvalidInput(message, field=field, received=received, allowed=allowed)


# What a bound is called for programs, and how it is told.
_BOUNDS: Final = {
    "greater_than_equal": ("minimum", "must be at least {}."),
    "less_than_equal": ("maximum", "must be at most {}."),
    "string_too_short": ("minimumLength", "is too short: send at least {} character."),
    "string_too_long": ("maximumLength", "is too long: send at most {} characters."),
}


_LIMITS: Final = ("ge", "le", "min_length", "max_length")


_TYPES: Final = {
    "string_type": "a string",
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
