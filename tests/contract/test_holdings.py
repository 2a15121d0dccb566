"""A quote for more than the wallet can pay is refused with the amount that it can pay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.http.documents.advice import ERROR
from rpcsvc.settlement.sandbox.engine import SandboxEngine
from tests.contract.serving import SWAP, Served, serving

USDC = 10**6
QUOTE = {key: SWAP[key] for key in ("direction", "chain", "amount")}


class Wallet:
    """The wallet's balance on every network; may be unknown."""

    def __init__(self) -> None:
        self.held: Holdings | None = Holdings(10**15, locked=0, seconds_to_unlock=0)

    def __call__(self, held: Holdings | None) -> None:
        self.held = held

    def holdings(self, _network: str) -> Holdings:
        if self.held is None:
            raise Unavailable("What can be paid is not known yet.")
        return self.held


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Wallet:
    """Set the wallet's balance on every network."""
    wallet = Wallet()
    monkeypatch.setattr(SandboxEngine, "holdings", staticmethod(wallet.holdings))
    return wallet


@pytest.fixture
async def served(tmp_path: Path, hold: Wallet) -> AsyncIterator[Served]:
    """A service in which one unfunded order may reserve the wallet's whole balance."""
    shares = ("unfunded_share", "unfunded_address_total_share", "unfunded_address_share")
    flags: dict[str, Any] = {f"orders__{name}": 100 for name in shares}
    async with serving(tmp_path, **flags) as made:
        yield made


async def test_an_amount_that_the_wallet_can_pay_is_quoted(served: Served, hold: Wallet) -> None:
    hold(Holdings(free=200 * USDC, locked=0, seconds_to_unlock=0))
    assert (await served.post("/agent/swap/quote", QUOTE)).status == 200


@pytest.mark.parametrize("path", ["/agent/swap/quote", "/agent/swap/create"])
async def test_more_than_the_wallet_holds_is_refused_with_the_most(
    served: Served, hold: Wallet, path: str
) -> None:
    hold(Holdings(free=66 * USDC, locked=0, seconds_to_unlock=0))
    params = SWAP if path.endswith("create") else QUOTE

    answer = await served.post(path, params)

    assert answer.status == 400
    error = answer.body["error"]
    assert (error["code"], error["details"]["maxNow"]) == ("amount_above_maximum", "0.4")
    assert "`details.maxNow`" in ERROR[error["code"]]
    again = await served.post(path, {**params, "amount": error["details"]["maxNow"]})
    assert again.status == 200
    assert served.count("orders") == int(path.endswith("create"))


async def test_quote_over_locked_money_is_refused_until_it_unlocks(
    served: Served, hold: Wallet
) -> None:
    hold(Holdings(free=66 * USDC, locked=500 * USDC, seconds_to_unlock=840))

    answer = await served.post("/agent/swap/quote", QUOTE)

    assert (answer.status, answer.headers["Retry-After"]) == (503, "840")
    error = answer.body["error"]
    assert (error["code"], error["details"]["secondsToUnlock"]) == ("unavailable", 840)
    over_rpc = await served.rpc("swap.quote", QUOTE)
    assert (over_rpc.status, over_rpc.headers["Retry-After"]) == (200, "840")
    assert over_rpc.body["result"]["error"] == error


async def test_capabilities_state_the_payable_amount(served: Served, hold: Wallet) -> None:
    hold(Holdings(free=66 * USDC, locked=0, seconds_to_unlock=0))
    answer = await served.http("GET", "/agent/capabilities")
    row = next(r for r in answer.body["data"]["limits"] if r["direction"] == "x2u")
    assert row["maxNow"] == "0.4"


async def test_capabilities_state_no_limit_of_simulated_wallets(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answer = await served.http("GET", "/agent/capabilities")
    assert {row["maxNow"] for row in answer.body["data"]["limits"]} == {None}


async def test_unknown_wallet_quotes_nothing(served: Served, hold: Wallet) -> None:
    hold(None)
    assert (await served.post("/agent/swap/quote", QUOTE)).status == 503
    answer = await served.http("GET", "/agent/capabilities")
    assert {row["maxNow"] for row in answer.body["data"]["limits"]} == {"0"}


async def test_amount_that_fees_would_eat_is_refused_with_the_minimum(tmp_path: Path) -> None:
    """Network fees may be above the chain's minimum in dollars."""
    async with serving(tmp_path, sandbox__usdc_payout_fee="20") as served:
        params = {**SWAP, "amount": "0.1"}
        for path in ("/agent/swap/quote", "/agent/swap/create"):
            answer = await served.post(
                path, params if path.endswith("create") else {**QUOTE, "amount": "0.1"}
            )
            assert (answer.status, answer.body["error"]["code"]) == (400, "amount_below_minimum")
        least = answer.body["error"]["details"]["minimum"]
        assert (await served.post("/agent/swap/create", {**SWAP, "amount": least})).status == 200
