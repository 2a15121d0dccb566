"""/rates.xml and /rates.json: what is listed can be ordered, at the listed rate or a better one."""

from __future__ import annotations

import asyncio
import re
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rpcsvc.domain.money import format_units, parse_amount
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.http.rates import PATHS
from rpcsvc.settlement.sandbox.engine import SandboxEngine
from tests.contract.described import check_response, openapi_of
from tests.contract.relaying import service
from tests.contract.serving import EVM, MONERO, Served, serving
from tests.contract.v1_api import v1_api

FIELDS = ["from", "to", "in", "out", "amount", "minamount", "maxamount"]
CODES = {"XMR", "USDCERC20", "USDCARBTM", "USDCBASE", "USDCOPTM", "USDCPOLYGON", "USDCAVAXC"}


async def listed(served: Served) -> list[dict[str, Any]]:
    answer = await served.client.get("/rates.json")
    assert answer.status == 200
    found: list[dict[str, Any]] = (await answer.json())["rates"]
    return found


async def fault(served: Served, **params: Any) -> None:
    assert (await served.post("/sandbox/fault", params)).status == 200


def params_of(offer: dict[str, Any], amount: str) -> dict[str, Any]:
    to = EVM if offer["direction"] == "x2u" else MONERO
    swap = {"direction": offer["direction"], "chain": offer["chain"], "amount": amount}
    return {**swap, "to": to}


def units_of(offer: dict[str, Any], field: str) -> int:
    return parse_amount(offer[field], deposit_asset(Direction(offer["direction"]))).units


def text_of(offer: dict[str, Any], units: int) -> str:
    return format_units(units, deposit_asset(Direction(offer["direction"])))


def next_rounded(units: int) -> int:
    """The next amount with two significant digits."""
    return int(units + 10 ** (len(str(units)) - 2))


async def test_both_directions_of_every_chain_are_listed(served: Served) -> None:
    found = await listed(served)
    chains = [chain.name for chain in served.up.service.chains.all()]
    assert [(each["direction"], each["chain"]) for each in found] == [
        *product(("x2u", "u2x"), chains)
    ]
    assert {each["from"] for each in found} == {each["to"] for each in found} == CODES
    for each in found:
        assert "XMR" in (each["from"], each["to"])
        assert (each["from"] == "XMR") == (each["direction"] == "x2u")
        assert all(isinstance(each[name], str) for name in FIELDS)


async def test_xml_is_the_form_of_monitors_and_agrees_with_json(served: Served) -> None:
    answer = await served.client.get("/rates.xml")
    text = await answer.text()
    root = ElementTree.fromstring(text)
    assert root.tag == "rates"
    assert "<!-- network: sandbox -->" in text
    rows = [{field.tag: field.text for field in item} for item in root]
    assert [list(row) for row in rows] == [FIELDS] * 12
    json_rows = [{name: each[name] for name in FIELDS} for each in await listed(served)]
    assert rows == json_rows


async def test_listed_amounts_are_taken_and_those_beyond_are_not(served: Served) -> None:
    for offer in await listed(served):
        beyond = {
            "minamount": units_of(offer, "minamount") - 1,
            "maxamount": next_rounded(units_of(offer, "maxamount")),
        }
        for field, units in beyond.items():
            made = await served.post("/agent/swap/create", params_of(offer, offer[field]))
            assert made.status == 200, made.body
            params = params_of(offer, text_of(offer, units))
            refused = await served.post("/agent/swap/create", params)
            assert refused.body["error"]["code"].startswith("amount_"), refused.body


async def test_each_listed_amount_brings_the_listed_rate_or_more(served: Served) -> None:
    for offer in await listed(served):
        asset = deposit_asset(Direction(offer["direction"]))
        least, most = (parse_amount(offer[f], asset).units for f in ("minamount", "maxamount"))
        rate = Fraction(offer["out"]) / Fraction(offer["in"])
        for units in (least, least + 1, least * 3 // 2, (least + most) // 2, most):
            swap = params_of(offer, format_units(units, asset))
            del swap["to"]
            quote = (await served.post("/agent/swap/quote", swap)).body["data"]["quote"]
            output = Fraction(quote["expectedOutput"])
            # The output is rounded down to its unit.
            unit = Fraction(1, 10 ** payout_asset(Direction(offer["direction"])).decimals)
            assert output + unit > rate * Fraction(quote["depositAmount"])
            assert output <= Fraction(offer["amount"])
            if units == least:
                assert (quote["depositAmount"], quote["expectedOutput"]) == (
                    offer["in"],
                    offer["out"],
                )


async def test_openapi_describes_the_listing_and_its_refusals(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"rate_limit__enabled": True, "rate_limit__requests_per_minute": 5}
    seen = []
    async with serving(tmp_path, **limits) as served:
        document = openapi_of(served)

        async def get(**headers: str) -> None:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = await served.client.get("/rates.json", headers=names)
            body = await answer.json() if await answer.read() else None
            check_response(document, "/rates.json", "get", answer.status, answer.headers, body)
            seen.append(answer.status)

        await get()
        await get(if_none_match="*")
        await fault(served, fault="advance_clock", seconds=60)
        await fault(served, fault="rates_down")
        for _ in range(2):
            await get()
    assert seen == [200, 304, 503, 429]


async def test_listing_is_empty_while_no_orders_are_taken(served: Served) -> None:
    await fault(served, fault="engine_down")
    assert await listed(served) == []
    text = await (await served.client.get("/rates.xml")).text()
    assert list(ElementTree.fromstring(text)) == []


async def test_listing_is_unavailable_without_a_rate(served: Served) -> None:
    await fault(served, fault="rates_down")
    for path in sorted(PATHS):
        answer = await served.client.get(path)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        error = (await answer.json())["error"]
        assert (error["code"], error["retryable"]) == ("unavailable", True)
        assert "rate" in error["message"]


async def test_sidecar_of_an_upstream_lists_nothing_and_says_why(tmp_path: Path) -> None:
    async with v1_api() as api, service(api.server.url, tmp_path / "sidecar") as served:
        answer = await served.client.get("/rates.json")
        assert (answer.status, answer.headers["retry-after"]) == (503, "86400")
        assert "Ask for a quote" in (await answer.json())["error"]["message"]


# --- for strangers ---------------------------------------------------------------------------


def max_age(answer: Any) -> int:
    (seconds,) = re.findall("max-age=([0-9]+),", answer.headers["cache-control"])
    return int(seconds)


async def test_listing_is_kept_as_long_as_a_rate_of_the_source(tmp_path: Path) -> None:
    async with serving(tmp_path, rates__every_seconds=30) as served:
        before = await listed(served)
        answer = await served.client.get("/rates.json")
        assert 25 < max_age(answer) <= 30
        await fault(served, fault="set_rate", rate="100")
        await fault(served, fault="advance_clock", seconds=20)
        assert await listed(served) == before
        assert 5 < max_age(await served.client.get("/rates.xml")) <= 10
        await fault(served, fault="advance_clock", seconds=10)
        after = await listed(served)
        assert after[0]["maxamount"] != before[0]["maxamount"]


async def test_many_readers_at_once_have_one_listing_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    venue, quotes = served.up.service.venue, 0
    quote = venue.quote

    async def counted(request: Any) -> Any:
        nonlocal quotes
        quotes += 1
        await asyncio.sleep(0)
        return await quote(request)

    monkeypatch.setattr(venue, "quote", counted)
    answers = await asyncio.gather(*(served.client.get("/rates.xml") for _ in range(40)))
    assert {answer.status for answer in answers} == {200}
    assert quotes == 24


async def test_listing_is_paid_for_like_other_reads(tmp_path: Path) -> None:
    async with serving(
        tmp_path, rate_limit__enabled=True, rate_limit__requests_per_minute=3
    ) as served:
        statuses = [(await served.client.get("/rates.xml")).status for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


# --- what can't be ordered is left out -------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """Holdings of the wallets by asset, in atomic units; None: not known."""
    units: dict[str, int | None] = {"XMR": 10**15, "USDC": 10**15}

    def holdings(network: str) -> Holdings:
        free = units["XMR" if "monero" in network or "xmr" in network else "USDC"]
        if free is None:
            raise Unavailable("What can be paid is not known yet.")
        return Holdings(free=free, locked=0, seconds_to_unlock=0)

    monkeypatch.setattr(SandboxEngine, "holdings", staticmethod(holdings))
    return units


async def test_limits_are_what_a_strangers_order_may_reserve(
    tmp_path: Path, held: dict[str, int | None]
) -> None:
    held["USDC"] = 1_000 * 10**6
    flags: dict[str, Any] = {
        "orders__unfunded_share": 60,
        "orders__unfunded_address_total_share": 30,
        "orders__unfunded_address_share": 20,
    }
    async with serving(tmp_path, rates__every_seconds=1, **flags) as served:
        offer = (await listed(served))[0]
        assert (offer["direction"], offer["maxamount"]) == ("x2u", "1.2")  # of 1.212 for 200 USD
        assert float(offer["amount"]) < 200
        refused = await served.post("/agent/swap/create", params_of(offer, "1.3"))
        assert refused.status == 400
        made = await served.post("/agent/swap/create", params_of(offer, offer["maxamount"]))
        assert made.status == 200
        await fault(served, fault="advance_clock", seconds=1)
        # Others may reserve what the order has left of the share of all strangers: 102 USD.
        rest = (await listed(served))[0]
        assert rest["chain"] == offer["chain"]
        assert rest["maxamount"] == "0.62"


async def test_most_tells_two_digits_and_is_no_less_than_the_least(
    tmp_path: Path, held: dict[str, int | None]
) -> None:
    flags: dict[str, Any] = {
        "orders__unfunded_share": 60,
        "orders__unfunded_address_total_share": 30,
        "orders__unfunded_address_share": 20,
    }
    raised = 0
    for units in (50_100_000, 1_234_567_890, 56_789_000_000):  # 20% of the first: 10.02 USD
        held["USDC"] = units
        async with serving(tmp_path / str(units), **flags) as served:
            offers = [each for each in await listed(served) if each["direction"] == "x2u"]
            assert offers
            for offer in offers:
                most, least = units_of(offer, "maxamount"), units_of(offer, "minamount")
                assert most == least or not str(most)[2:].strip("0")
                assert most >= least
                raised += most == least
                quoted = await served.post(
                    "/agent/swap/quote",
                    {name: offer[name] for name in ("direction", "chain")}
                    | {"amount": offer["maxamount"]},
                )
                quote = quoted.body["data"]["quote"]
                assert quote["expectedOutput"] == offer["amount"]
    assert raised


async def test_pairs_that_no_wallet_can_pay_are_left_out(
    tmp_path: Path, held: dict[str, int | None]
) -> None:
    for units in (None, 0, 5 * 10**6):
        held["USDC"] = units
        async with serving(tmp_path / str(units)) as served:
            assert {each["direction"] for each in await listed(served)} == {"u2x"}


async def test_pairs_of_a_network_that_is_down_are_left_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    venue, before = served.up.service.venue, await listed(served)
    networks = {"base": Health(False), "arbitrum": Health(True)}

    async def known() -> dict[str, Health]:
        return networks

    monkeypatch.setattr(venue, "networks", known)
    await fault(served, fault="advance_clock", seconds=60)
    chains = {each["chain"] for each in before}
    assert {each["chain"] for each in await listed(served)} == chains - {"base"}
    networks["monero"] = Health(False)
    await fault(served, fault="advance_clock", seconds=60)
    assert await listed(served) == []


async def test_pair_whose_least_amount_is_eaten_by_fees_is_left_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = SandboxEngine.fee

    def dear(self: SandboxEngine, network: str) -> int:
        return 60 * 10**6 if network == "ethereum" else usual(self, network)

    monkeypatch.setattr(SandboxEngine, "fee", dear)
    pairs = {(each["direction"], each["chain"]) for each in await listed(served)}
    assert ("x2u", "ethereum") not in pairs
    assert ("x2u", "base") in pairs


@pytest.fixture
def chains_file(tmp_path: Path) -> Path:
    """A table of one chain, under a name of its own."""
    tables = Path("config/chains.toml").read_text().split("[chains.")
    kept = [each for each in tables[1:] if each.startswith("base]")]
    file = tmp_path / "chains.toml"
    file.write_text("".join(f"[chains.{table}" for table in kept).replace("base]", "my-base]"))
    return file


async def test_chain_that_is_not_offered_is_left_out(tmp_path: Path, chains_file: Path) -> None:
    async with serving(tmp_path, chains_file=str(chains_file)) as served:
        found = await listed(served)
    assert [(each["from"], each["to"]) for each in found] == [
        ("XMR", "USDCBASE"),
        ("USDCBASE", "XMR"),
    ]
