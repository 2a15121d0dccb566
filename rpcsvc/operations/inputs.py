"""Reads what a caller sent: types by the params models, meaning by the domain.

All problems of a call are collected into one refusal. Every message names what was received and
what to send instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from rpcsvc.domain.addresses import parse_evm_address, parse_monero_address, same_address
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money, parse_any_amount
from rpcsvc.domain.pricing import Direction, deposit_asset
from rpcsvc.errors import (
    InputError,
    InputErrors,
    InvalidDestination,
    InvalidInput,
    VerificationFailed,
)
from rpcsvc.operations.params import ORDER_ID_PATTERN, UUID_PATTERN, Params, whole
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.validation_messages import HINTS, combined, problems_of

P = TypeVar("P", bound=Params)
T = TypeVar("T")

_UUID = re.compile(UUID_PATTERN, re.ASCII)
_ORDER_ID = re.compile(ORDER_ID_PATTERN, re.ASCII)
LEAST_PUBLIC_KEY = 16
LONGEST_KEY = 255

_INTENT: Final = ("direction", "chain", "amount", "to", "refund_address")


@dataclass(frozen=True, slots=True)
class Intent:
    """What a caller wants, as far as it is known. ``amount`` in the asset that the user sends."""

    direction: Direction | None
    chain: Chain | None
    amount: Money | None
    to: str | None
    refund_address: str | None = None

    @property
    def missing(self) -> list[str]:
        """Names of the inputs that an order needs and that are not known."""
        return [name for name in ("direction", "chain", "amount", "to") if not getattr(self, name)]


async def parse_call(model: type[P], params: dict[str, Any], call: Call, service: Service) -> P:
    """The params of a call, whose idempotency key, if any, is judged with them.

    Raises InputError or InputErrors naming every problem, the key's included.
    """
    wrong_key = None
    if call.idempotency_key is not None:
        try:
            read_key(call.idempotency_key, call.namespace)
        except InvalidInput as problem:
            wrong_key = problem
    if wrong_key is None:
        return await parse_params(model, params, service)
    problems: list[InputError] = [wrong_key]
    try:
        await parse_params(model, params, service)
    except InputError as problem:
        problems.append(problem)
    except InputErrors as others:
        problems += others.problems
    raise combined(problems)


async def parse_params(model: type[P], params: dict[str, Any], service: Service) -> P:
    """The params as their model. Raises InputError or InputErrors naming every problem."""
    try:
        parsed: P = model.__pydantic_validator__.validate_python(params)
    except ValidationError as error:
        problems = problems_of(model, error)
        problems += await _problems_of_rest(model, params, problems, service)
        raise combined(problems) from None
    return parsed


async def read_intent(params: Any, service: Service) -> tuple[Intent, list[InputError]]:
    """The meaning of direction, chain, amount and to, and what is wrong with them."""
    chain = amount = to = refund_to = None
    given, refund = getattr(params, "to", None), getattr(params, "refund_address", None)
    direction = Direction(params.direction) if params.direction else None
    problems: list[InputError] = []
    try:
        if params.chain is not None:
            chain = service.chains.resolve(params.chain)
    except InputError as problem:
        problems.append(problem)
    try:
        if params.amount is not None:
            amount = _amount(params.amount, direction)
    except InputError as problem:
        problems.append(problem)
    try:
        if given is not None:
            to = await read_destination(given, direction, service)
    except InputError as problem:
        problems.append(problem)
    try:
        if refund is not None and direction is not None:
            refund_to = await read_refund_address(refund, direction, service)
    except InputError as problem:
        problems.append(problem)
    return Intent(direction, chain, amount, to, refund_to), problems


def read_session(session_id: str | None, *, field: str = "sessionId") -> str | None:
    """The session id in lower case. Raises InvalidInput when it is not a UUID.

    The message names no UUID for an example: with one that everybody can read, an order made with
    it would be everybody's.
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
    """Whether ``text`` has the form of a session id, a UUID of version 4."""
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
    """The idempotency key. Raises InvalidInput when it has another form.

    In the namespace that all callers share, whoever guesses a key is given the order's session.
    """
    least = LEAST_PUBLIC_KEY if namespace == "public" else 1
    if not isinstance(key, str) or not _KEYS[least].fullmatch(key):
        raise InvalidInput(
            f"idempotency-key must be {least} to {LONGEST_KEY} printable ASCII characters. Send a"
            " UUID that is made for this order.",
            field="idempotency-key",
            received=key,
        )
    return key


def key_pattern(least: int) -> str:
    """Printable ASCII from ``least`` characters on, with no blank at either end."""
    rest = f"[ -~]{{{max(0, least - 2)},{LONGEST_KEY - 2}}}[!-~]"
    return f"[!-~]{rest}" if least > 1 else f"[!-~]({rest})?"


_KEYS: Final = {least: re.compile(key_pattern(least), re.ASCII) for least in (1, LEAST_PUBLIC_KEY)}


def bare_key(key: Any) -> Any:
    """An idempotency key as a header would carry it: without the blanks around it.

    They are no part of a header's value (RFC 9110, section 5.5), so the same key over another
    transport would be another one. What is no string is left for read_key to refuse.
    """
    return key.strip(" ") if isinstance(key, str) else key


async def read_refund_address(
    address: str, direction: Direction, service: Service, *, field: str = "refundAddress"
) -> str:
    """An address on the deposit's network, normalised. Raises InvalidDestination."""
    read = _monero if direction is Direction.XMR_TO_USDC else _evm
    return await _not_ours(read(address, field, service), service, field=field, received=address)


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


async def read_destination(
    text: str, direction: Direction | None, service: Service, *, field: str = "to"
) -> str:
    """Where the payout goes, normalised. Raises InvalidDestination."""
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


async def _problems_of_rest(
    model: type[Params], params: dict[str, Any], found: list[InputError], service: Service
) -> list[InputError]:
    """What the inputs mean that have the right type: one correction should mend them all."""
    wrong = {problem.field for problem in found}
    known = {name: info.alias or name for name, info in model.model_fields.items()}
    names = {name for name, wire in known.items() if wire not in wrong}
    rest = {name: whole(params.get(known[name])) if name in names else None for name in _INTENT}
    return (await read_intent(SimpleNamespace(**rest), service))[1]
