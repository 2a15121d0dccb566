"""Which amounts add up to a sum: bounded, exact. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

MOST_PARTS: Final = 15  # recipients of one Monero transaction, besides the change
# Both halves of so many amounts make 2^17 sums each: a fraction of a second.
MOST_AMOUNTS: Final = 34


class TooMany(Exception):
    """More amounts than can be searched."""


def parts_of(total: int, amounts: Sequence[int]) -> tuple[int, ...] | None:
    """The indices of the fewest amounts that add up to ``total``; None when none do.

    At most MOST_PARTS of them. Raises TooMany when there are more than MOST_AMOUNTS to choose from.
    """
    usable = [index for index, amount in enumerate(amounts) if 0 < amount <= total]
    for count in (1, 2):
        for chosen in combinations(usable, count):
            if sum(amounts[index] for index in chosen) == total:
                return chosen
    if len(usable) > MOST_AMOUNTS:
        raise TooMany
    middle = len(usable) // 2
    left, right = _sums(usable[:middle], amounts), _sums(usable[middle:], amounts)
    found = [
        (*chosen, *right[total - part])
        for part, chosen in left.items()
        if total - part in right and len(chosen) + len(right[total - part]) <= MOST_PARTS
    ]
    return min(found, key=len) if found else None


def _sums(indices: Sequence[int], amounts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Each sum that some of the amounts make, with the fewest that make it."""
    sums: dict[int, tuple[int, ...]] = {0: ()}
    for index in indices:
        more = {part + amounts[index]: (*chosen, index) for part, chosen in sums.items()}
        for part, chosen in more.items():
            if part not in sums or len(chosen) < len(sums[part]):
                sums[part] = chosen
    return sums
