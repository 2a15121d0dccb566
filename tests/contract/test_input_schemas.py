"""Input schemas and validation agree, on drawn requests and on near misses of these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rpcsvc.domain.clients import DEFAULT, KnownClient
from rpcsvc.errors import (
    InputError,
    InputErrors,
    InvalidDestination,
    InvalidInput,
    MissingInput,
    ServiceError,
)
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.schemas import placed
from rpcsvc.http.site import API_ROOT, BFF_ROOT, site_of
from rpcsvc.operations.discovery import IDEMPOTENCY_KEY_SCHEMA
from rpcsvc.operations.dispatch import flat_dispatcher
from rpcsvc.operations.inputs import bare_key, read_key
from rpcsvc.operations.service import Call, Operation
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from tests.contract.good_addresses import with_formats
from tests.sandbox import EVM, MONERO, Sandbox, sandbox

Json = dict[str, Any]
# The faults come last: they would affect the other requests.
ROWS: list[Operation] = sorted(
    (*(op for op in OPERATIONS if op.path), *BFF_OPERATIONS),
    key=lambda row: row.name == "sandbox.fault",
)
# Refusals that no schema can describe: changing limits, unknown orders, their owners, checksums.
UNKNOWABLE = {
    "amount_below_minimum", "amount_above_maximum", "order_not_found", "ticket_not_found",
    "verification_failed",
}  # fmt: skip
MANY = {
    "orders.unfunded_address_orders": 100_000,
    "orders.address_orders_a_day": 1_000_000,
    "orders.unfunded_share": 100,
    "orders.unfunded_address_total_share": 100,
    "orders.unfunded_address_share": 100,
    "support.tickets_per_client": 1_000_000,
}


class World(NamedTuple):
    """A service, and the strategies that schemathesis makes of its document."""

    sandbox: Sandbox
    api: Any

    def requests(self, row: Operation) -> st.SearchStrategy[Json]:
        """Params that match the schema of an operation."""
        path = f"{BFF_ROOT if row in BFF_OPERATIONS else API_ROOT}{row.path}"
        cases: st.SearchStrategy[Any] = self.api[path][row.method].as_strategy()
        return cases.map(lambda case: {**case.path_parameters, **case.query, **_body(case)})

    async def refusal(self, row: Operation, params: Json) -> ServiceError | None:
        """The error of a call with a token, which a list without session needs; None: success."""
        service = self.sandbox.up.service
        flat = row in BFF_OPERATIONS
        dispatcher = flat_dispatcher(service) if flat else self.sandbox.up.dispatcher
        return (await dispatcher.run(row, params, Call("test", known=KnownClient(DEFAULT)))).error


def _body(case: Any) -> Json:
    return case.body if isinstance(case.body, dict) else {}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with sandbox(tmp_path, flags=MANY) as running:
        site = site_of(running.up.settings, running.up.service)
        document = with_formats(openapi_document(site))
        yield World(running, schemathesis.openapi.from_dict(document))


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def is_of_state(error: ServiceError) -> bool:
    """Whether no schema can describe the reason of a refusal. Refusals of plan also name missing
    inputs, which are ignored here.
    """
    problems = error.problems if isinstance(error, InputErrors) else [error]
    found = [problem for problem in problems if not isinstance(problem, MissingInput)]
    return bool(found) and all(
        problem.code in UNKNOWABLE
        or (isinstance(problem, InputError) and problem.field in ("quoteDigest", "requoteOf"))
        or (isinstance(problem, InvalidDestination) and "checksum" in problem.message)
        for problem in found
    )


async def test_inputs_of_the_schema_are_accepted(world: World) -> None:
    for row in ROWS:
        for params in drawn(world.requests(row), 10):
            error = await world.refusal(row, params)
            assert error is None or is_of_state(error), (row.name, params, error)


EDGES = (
    "0 0.0 0.009999 0.01 0.010000 0.0100000 0.1 0.999999 00.1 1 1. 1.0 999999.999999"
    " 999999.9999999 1000000 1000000.0 1000000.000001 1000001 10000000"
)
# Each replaces a value by another one, which is often invalid and sometimes valid.
_DIRECTIONS = {"x2u": "u2x", "u2x": "x2u"}
MISSES: list[Any] = [
    lambda _: None,
    lambda _: True,
    lambda _: 0,
    lambda _: -1,
    lambda _: 1.5,
    lambda _: 10**30,
    lambda _: "",
    lambda _: "0",
    lambda _: "0.0",
    lambda _: "0.000000",
    lambda _: "1.1234567",
    lambda _: "1.1234567890123",
    lambda _: "01",
    lambda _: "1e3",
    lambda _: "9" * 14,
    lambda _: [],
    lambda _: {},
    lambda _: EVM,
    lambda _: MONERO,
    lambda _: f"5{MONERO[1:]}",
    lambda _: f"3{MONERO[1:]}",
    lambda _: "0x" + "0" * 40,
    lambda _: "solana",
    lambda value: _DIRECTIONS.get(value, "up"),
    lambda value: f"{value}0",
    lambda value: f" {value}",
    lambda value: f"{value}\n",
    lambda value: str(value)[:-1],
    lambda value: value,
]


def near_miss(params: Json, choice: int) -> Json:
    """The params with one of them left out, added, or changed."""
    names = sorted(params)
    at, which = divmod(choice, len(MISSES) + 2)
    if not names or which == len(MISSES):
        return {**params, "what": 1}
    name = names[at % len(names)]
    if which > len(MISSES):
        return {key: value for key, value in params.items() if key != name}
    return {**params, name: MISSES[which](params[name])}


async def test_a_near_miss_is_accepted_as_the_schema_says(world: World) -> None:
    networks = site_of(world.sandbox.up.settings, world.sandbox.up.service).networks
    # Drawing a request costs far more than changing it, so each is changed four times.
    choices = st.lists(st.integers(0, 20 * (len(MISSES) + 2)), min_size=4, max_size=4)
    for row in ROWS:
        # Not Python's re: its $ also matches before a line break at the end.
        validator = jsonschema_rs.validator_for(row.params.input_schema(networks))
        refused = 0
        cases = drawn(st.tuples(world.requests(row), choices), 15)
        for params in (near_miss(good, choice) for good, chosen in cases for choice in chosen):
            error = await world.refusal(row, params)
            if error is None or not is_of_state(error):
                assert validator.is_valid(params) == (error is None), (row.name, params, error)
                refused += error is not None
        assert refused, row.name


async def test_the_rates_of_the_sandbox_are_those_of_the_schema(world: World) -> None:
    fault = next(row for row in ROWS if row.name == "sandbox.fault")
    networks = site_of(world.sandbox.up.settings, world.sandbox.up.service).networks
    validator = jsonschema.Draft202012Validator(fault.params.input_schema(networks))
    for rate in EDGES.split():
        params = {"fault": "set_rate", "rate": rate}
        refused = await world.refusal(fault, params) is not None
        assert validator.is_valid(params) != refused, rate


@given(
    st.text(st.characters(min_codepoint=9, max_codepoint=130), min_size=14, max_size=20)
    | st.integers(250, 260).map("k".__mul__)
    | st.from_regex(r" {0,2}[!-~ ]{14,18} {0,2}", fullmatch=True)
)
def test_the_schema_of_a_key_takes_what_a_call_takes(key: str) -> None:
    takes = jsonschema_rs.validator_for(IDEMPOTENCY_KEY_SCHEMA).is_valid(key)
    if takes:
        read_key(bare_key(key), "public")
    else:
        with pytest.raises(InvalidInput):
            read_key(bare_key(key), "public")


def test_every_example_keeps_to_its_schema(world: World) -> None:
    networks = site_of(world.sandbox.up.settings, world.sandbox.up.service).networks
    usdc = networks.chains[0].usdc_contract
    for row in ROWS:
        validator = jsonschema.Draft202012Validator(row.params.input_schema(networks))
        for example in row.examples:
            filled = {k: usdc if v == "$usdc" else placed(v) for k, v in example.params.items()}
            validator.validate(filled)
