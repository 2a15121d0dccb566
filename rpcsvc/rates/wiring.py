"""The rate source that the settings ask for. What does not live here: anything that decides."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from rpcsvc.clock import Clock
from rpcsvc.domain.money import USDC, parse_amount
from rpcsvc.orders.ports.rates import RateSource
from rpcsvc.rates.fixed import FixedRate
from rpcsvc.rates.median import Agreement, MedianRate
from rpcsvc.rates.tickers import ticker
from rpcsvc.settings import SettingsError
from rpcsvc.settings_onchain import RatesSettings


class Rates(NamedTuple):
    """A rate source, and what has to run to keep it fresh; None: nothing."""

    source: RateSource
    run: Callable[[], Coroutine[Any, Any, None]] | None


def rate_source(settings: RatesSettings, clock: Clock) -> Rates:
    """The source. Raises SettingsError."""
    if settings.fixed_usdc_per_xmr is not None:
        return Rates(FixedRate(parse_amount(settings.fixed_usdc_per_xmr, USDC).units, clock), None)
    rule = Agreement(settings.max_age_seconds * 1000, settings.quorum, settings.max_spread_bps)
    try:
        sources = [ticker(text) for text in settings.sources]
        median = MedianRate(sources, clock, rule, every_ms=settings.every_seconds * 1000)
    except ValueError as error:
        raise SettingsError([f"rates: {error}"]) from error
    return Rates(median, median.run)
