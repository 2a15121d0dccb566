"""The deposit for an exact payout, by quotes of an upstream that prices deposits only."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.upstream.answers import UpstreamQuote
from rpcsvc.settlement.upstream.engine import MOST_QUOTES, exact_quote

# A market of 20 to 20,000 USDC for one XMR, with fees of up to 5 %.
PRICES = st.builds(
    Price, st.integers(20 * 10**6, 20_000 * 10**6), st.integers(0, 500), st.integers(0, 10**6),
    st.just(9_900), st.integers(0, 100),
)  # fmt: skip
# What arrives, in a hundredth of a dollar: 20 to 50,000 USD, of which no fixed fee takes a half.
CENTS = st.integers(2_000, 5_000_000)


def answer(deposit: int, output: int) -> UpstreamQuote:
    return UpstreamQuote.model_construct(
        from_amount=deposit, to_amount=output, min_received=output, estimated_seconds=1,
        from_amount_usd=Decimal(1), to_amount_usd=Decimal(1), from_symbol="", to_symbol="",
    )  # fmt: skip


class Market:
    """An upstream's quotes at ``price``, which moves by ``drift`` USDC units with each."""

    def __init__(self, price: Price, direction: Direction, drift: int = 0) -> None:
        self.price, self.direction, self.drift = price, direction, drift
        self.asked: list[int] = []

    async def quote(self, deposit: int) -> UpstreamQuote:
        self.asked.append(deposit)
        self.price = self.price.at(self.price.rate + self.drift)
        return answer(deposit, self.price.output(self.direction, deposit))

    def found(self, wanted: int, deposit: int, output: int) -> UpstreamQuote:
        return asyncio.run(exact_quote(wanted, deposit, output, self.quote))


def wanted_of(cents: int, direction: Direction, rate: int) -> int:
    units = cents * 10**4
    return units if direction is Direction.XMR_TO_USDC else units * 10**12 // rate


@given(PRICES, st.sampled_from(Direction), CENTS, st.integers(-300, 300))
def test_found_deposit_is_within_one_unit_and_never_below(
    price: Price, direction: Direction, cents: int, moved: int
) -> None:
    """The price of before may be old: of a rate some percent away, and of another amount."""
    wanted = wanted_of(cents, direction, price.rate)
    before = price.at(price.rate * (10_000 + moved) // 10_000)
    first = before.deposit_for(direction, wanted_of(20_000, direction, price.rate))
    market = Market(price, direction)
    found = market.found(wanted, first, before.output(direction, first))
    assert found.to_amount >= wanted
    assert len(market.asked) <= MOST_QUOTES
    # One unit of USDC, which is the coarser asset.
    if direction is Direction.XMR_TO_USDC:
        assert found.to_amount - wanted <= 1
    else:
        assert found.from_amount - price.deposit_for(direction, wanted) <= 1


def test_rate_that_does_not_stay_is_unavailable() -> None:
    market = Market(Price(165_000_000, 50, 1_000, 9_900), Direction.XMR_TO_USDC, drift=-100_000)
    with pytest.raises(Unavailable, match="moves too fast") as caught:
        market.found(100_000_000, 10**12, 165_000_000)
    assert caught.value.retry_after == 5
    assert len(market.asked) == MOST_QUOTES


def test_rate_that_rests_again_is_found() -> None:
    market = Market(Price(165_000_000, 50, 1_000, 9_900), Direction.USDC_TO_XMR, drift=5_000)

    async def quote(deposit: int) -> UpstreamQuote:
        if len(market.asked) == 2:
            market.drift = 0
        return await market.quote(deposit)

    found = asyncio.run(exact_quote(10**12, 165_000_000, 10**12, quote))
    assert found.to_amount >= 10**12
