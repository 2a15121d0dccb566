"""When a deposit counts: confirmations by amount, in one form for every network.

``["0=1", "500=20", "5000=finalized"]``: an amount of the network's asset, and what deposits of that
much and more wait for: a number of blocks, or a block tag. A deposit that is as deep as the last
threshold asks is final.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from rpcsvc.domain.money import Asset, parse_amount
from rpcsvc.errors import ServiceError, SettingsError

# int() takes more than people mean by a number: 1_0, digits of any script.
_COUNT: Final = re.compile(r"[0-9]{1,6}", re.ASCII)


class DepthTag(StrEnum):
    """Block tags of JSON-RPC that a deposit may wait for, in rising order.

    On a rollup SAFE is posted to L1 and FINALIZED is final there.
    """

    SAFE = "safe"
    FINALIZED = "finalized"


class Threshold(NamedTuple):
    """The depth at which deposits of ``units`` and more count: confirmations, or a tag."""

    units: int
    depth: int | DepthTag


Thresholds = tuple[Threshold, ...]


def rise(thresholds: Thresholds) -> bool:
    """Return whether thresholds begin at 0 units and rise in units and depth, tags last."""
    if not thresholds or thresholds[0].units != 0:
        return False
    units = [item.units for item in thresholds]
    depths = [_rank(item.depth) for item in thresholds]
    return units == sorted(set(units)) and depths == sorted(depths) and depths[0] >= (0, 1)


def threshold_of(thresholds: Thresholds, units: int) -> Threshold:
    """Return the threshold of a deposit of ``units``."""
    return next(item for item in reversed(thresholds) if item.units <= units)


def blocks(thresholds: Thresholds) -> list[int]:
    """Return the depths that are numbers of blocks, rising."""
    return [item.depth for item in thresholds if isinstance(item.depth, int)]


def tags(thresholds: Thresholds) -> list[DepthTag]:
    """Return the depths that are tags, rising."""
    return [item.depth for item in thresholds if isinstance(item.depth, DepthTag)]


def read_thresholds(
    setting: str, texts: Iterable[str], asset: Asset, allowed: Collection[DepthTag] = ()
) -> Thresholds:
    """Return the thresholds of a setting's texts. Raises SettingsError.

    ``allowed``: the tags that mean something on the network.
    """
    received = tuple(texts)
    try:
        found = tuple(_threshold(text, asset, allowed) for text in received)
    except (ServiceError, ValueError):
        found = ()
    if not rise(found):
        words = "".join(f" or {tag.value}" for tag in DepthTag if tag in allowed)
        raise SettingsError(
            [
                f"{setting}: received {', '.join(received)[:80]!r}; allowed: {asset.symbol}="
                f"confirmations{words}, both rising, from 0 {asset.symbol} and from 1"
                f' confirmation, such as "0=10, 50=20"'
            ]
        )
    return found


def _threshold(text: str, asset: Asset, allowed: Collection[DepthTag]) -> Threshold:
    amount, _, depth = text.partition("=")
    units = 0 if amount == "0" else parse_amount(amount, asset).units
    if _COUNT.fullmatch(depth):
        return Threshold(units, int(depth))
    tag = DepthTag(depth)
    if tag not in allowed:
        raise ValueError(depth)
    return Threshold(units, tag)


def _rank(depth: int | DepthTag) -> tuple[int, int]:
    """Return the order of depths: any tag is deeper than any number."""
    return (0, depth) if isinstance(depth, int) else (1, list(DepthTag).index(depth))
