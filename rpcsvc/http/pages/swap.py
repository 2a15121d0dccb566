"""The form for a swap, its quote and the sandbox's menu, for a person without an agent.

The forms carry all that was typed from step to step: nothing is stored before the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rpcsvc.domain.addresses import evm_address_from_seed, stagenet_subaddress
from rpcsvc.domain.clients import Client
from rpcsvc.domain.money import LIMITS, RECEIVE_LIMITS, USDC, format_units
from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.errors import (
    AmountAboveMaximum,
    AmountBelowMinimum,
    InputError,
    InputErrors,
    MissingInput,
    RateLimited,
    ServiceError,
    Unavailable,
)
from rpcsvc.http.pages.checkout import network_title, observed_in_words
from rpcsvc.http.pages.rendering import Texts
from rpcsvc.operations.inputs import Problems, missing, parse_params, read_intent
from rpcsvc.operations.params import SwapParams
from rpcsvc.operations.service import Service
from rpcsvc.orders.ports.venue import NEEDED, FaultKind
from rpcsvc.strict_json import Json

# What a person types, by the names of the API.
PRICED: Final[tuple[str, ...]] = ("direction", "chain", "amount", "receiveAmount")
_ADDRESSES: Final = ("to", "refundAddress")
FIELDS: Final[tuple[str, ...]] = (*PRICED, *_ADDRESSES)
# What the page with a quote adds: the next step, the quote, and the key that makes it one order.
FORM: Final[tuple[str, ...]] = (*FIELDS, "step", "quoteDigest", "key")

_EXAMPLE_AMOUNTS: Final = {Direction.XMR_TO_USDC: "0.8", Direction.USDC_TO_XMR: "150"}
# How far the sandbox's menu moves the clock: beyond the time in which an order can be paid.
_SECONDS: Final = 7_200
_NEEDED: Final = {kind.value: needed for kind, needed in NEEDED.items()}


class FieldProblem(NamedTuple):
    """The problem of a field in words; ``detail`` is English on every page."""

    says: str
    detail: str


def form_values(
    service: Service,
    texts: Texts,
    typed: Mapping[str, str] | None = None,
    wrong: Mapping[str, FieldProblem] | None = None,
    alert: str = "",
) -> dict[str, Any]:
    """Values of the form: what was typed, and what is wrong with it."""
    typed = typed or {"direction": Direction.XMR_TO_USDC.value}
    return {
        "typed": {name: typed.get(name, "") for name in FIELDS},
        "wrong": wrong or {},
        "alert": alert or (texts.say("swap.look") if wrong else ""),
        "chains": _chains(service),
    }


def _chains(service: Service) -> list[tuple[str, str]]:
    """Name and title of the chains on offer, or of all while that is unknown."""
    try:
        offered = service.venue.listed_chains()
    except Unavailable:
        offered = service.chains.all()
    profile = service.venue.profile
    return [(chain.name, network_title(profile, USDC, chain.name)) for chain in offered]


def example(service: Service, direction: Direction) -> dict[str, str]:
    """A swap between new addresses of nobody, to try out the sandbox with."""
    evm = evm_address_from_seed(service.random(32))
    monero = stagenet_subaddress(service.random(64))
    to, refund = (evm, monero) if direction is Direction.XMR_TO_USDC else (monero, evm)
    return {
        "direction": direction.value,
        "chain": service.chains.all()[0].name,
        "amount": _EXAMPLE_AMOUNTS[direction],
        "to": to,
        "refundAddress": refund,
    }


async def read_swap(form: Mapping[str, str], service: Service) -> Json:
    """The params of the typed swap. Raises InputError or InputErrors that name every problem.

    A refund address is required here: without one, a refund may need the order's secret.
    """
    given: Json = {name: form[name] for name in FIELDS if form[name]}
    problems = Problems()
    with problems:
        params = await parse_params(SwapParams, given, service)
        intent = await read_intent(params, service, problems)
        problems.add(*(missing(name) for name in intent.missing if name not in problems.fields))
    if "refundAddress" not in given:
        problems.add(missing("refundAddress"))
    problems.raise_found()
    return given


def field_problems(error: InputError | InputErrors, texts: Texts) -> dict[str, FieldProblem] | None:
    """The problems by field; None if one is of no field that a person fills in."""
    problems = error.problems if isinstance(error, InputErrors) else (error,)
    if any(problem.field not in FIELDS for problem in problems):
        return None
    return {problem.field: _in_words(problem, texts) for problem in problems}


def _in_words(problem: InputError, texts: Texts) -> FieldProblem:
    if isinstance(problem, MissingInput):
        return FieldProblem(texts.say("swap.missing"), "")
    says = _limit(problem, texts)
    if says is not None:
        return FieldProblem(says, "")
    name, detail = f"{problem.field} ", problem.message
    if problem.field in _ADDRESSES and detail.startswith(name):
        detail = f"It {detail.removeprefix(name)}"  # the API's name of the field is on no page
    return FieldProblem(texts.say(f"swap.wrong_{problem.field}"), detail)


def _limit(problem: InputError, texts: Texts) -> str | None:
    """The limit that an amount passes, in the asset that it is typed in; None: it passes none."""
    limits, sent = problem.details or {}, problem.field == "amount"
    names = {name: name if sent else RECEIVE_LIMITS[name] for name in LIMITS}
    asset = limits.get("asset" if sent else "receiveAsset")
    least = limits.get(names["minimum"])
    most = limits.get(names["maxNow"], limits.get(names["maximum"]))
    if isinstance(problem, AmountBelowMinimum) and least is not None:
        return texts.say("swap.below" if sent else "swap.below_arriving", least=f"{least} {asset}")
    if isinstance(problem, AmountAboveMaximum) and most is not None:
        return texts.say("swap.above" if sent else "swap.above_arriving", most=f"{most} {asset}")
    return None


def refusal(error: ServiceError, texts: Texts) -> str:
    """Why nothing was done, where no field is to blame."""
    if isinstance(error, RateLimited):
        return texts.say("swap.busy", minutes=-(-(error.retry_after or 0) // 60))
    return texts.say("swap.failed")


def quote_values(service: Service, texts: Texts, quote: Json) -> dict[str, Any]:
    """Values of a quote, beside the quote itself as swap.quote answers it."""
    direction, chain = Direction(quote["direction"]), quote["chain"]
    profile, locked = service.venue.profile, quote["priceLockedUntil"]
    return {
        "quote": quote,
        "send_network": network_title(profile, deposit_asset(direction), chain),
        "receive_network": network_title(profile, payout_asset(direction), chain),
        "observed": _observed(texts, quote.get("observedTime")),
        "minutes": -(-quote["estimatedTimeSeconds"] // 60),
        "window": quote["depositWindowSeconds"] // 60,
        "held": (
            texts.say("checkout.rate_upstream")
            if locked is None
            else texts.say("swap.held", time=f"{locked[11:16]} UTC")
        ),
    }


def _observed(texts: Texts, found: Json | None) -> str:
    if not found:
        return ""
    return observed_in_words(texts, found["p50Seconds"], found["p95Seconds"], found["samples"])


# --- the sandbox's menu ------------------------------------------------------------------------


def faults(texts: Texts) -> list[tuple[str, str]]:
    """Name and description of each fault that the sandbox can provoke."""
    return [(kind.value, texts.say(f"sandbox.fault_{kind.value}")) for kind in FaultKind]


async def fault_params(name: str, order: Order, service: Service, client: Client) -> Json:
    """The params of sandbox.fault for a choice of the menu. Raises Unavailable without a rate."""
    needed = _NEEDED.get(name)
    if needed == "orderId":
        return {"fault": name, "orderId": order.order_id}
    if needed == "seconds":
        return {"fault": name, "seconds": _SECONDS}
    if needed == "rate":
        return {"fault": name, "rate": await _lower_rate(service, client)}
    return {"fault": name}


async def _lower_rate(service: Service, client: Client) -> str:
    """A rate that is a tenth below that of now."""
    market = await service.venue.market(client)
    if market is None:
        raise Unavailable("There is no rate now that could fall.")
    return format_units(market.rate.usdc_per_xmr * 9 // 10, USDC)
